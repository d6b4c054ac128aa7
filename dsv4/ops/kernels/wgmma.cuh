// Warpgroup products of sm_90a: 128 threads multiply from shared memory, while other work goes on. Lane 4 g + t of warp w holds
// of the sum [64][N] the rows 16 w + g and 16 w + g + 8 and of every eight columns 2 t and 2 t + 1.
//
// Operands lie in chunks of 64 channels: a row's 128 bytes, eight rows after one another in 1024 bytes at such an address, the
// 16-byte pieces of row r exchanged by r % 8 (swizzle of 128 bytes).
#ifndef DSV4_WGMMA
#define DSV4_WGMMA
#include "hopper.cuh"

constexpr u32 SWIZZLED_ROWS = 1024;  // bytes of eight rows

// Where piece `piece` of row `row` of a chunk lies.
DEVICE u32 swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// Rows of a chunk, along which the sum runs; `address` 32 bytes further for every 16 channels.
DEVICE u64 operand(u32 address) { return (address & 0x3FFFF) >> 4 | (u64)(SWIZZLED_ROWS >> 4) << 32 | 1ull << 62; }
// An operand so many bytes on, a multiple of 16 that the compiler knows.
DEVICE u64 further(u64 operand, u32 bytes) { return (operand & 0xFFFFFFFF00000000ull) | ((u32)operand + (bytes >> 4)); }
// The same memory as the transposed operand: the sum runs over rows, the columns are chunks `step` bytes apart.
DEVICE u64 transposed_operand(u32 address, u32 step) { return operand(address) | (u64)(step >> 4) << 16; }

// Before the first product, and after registers of a sum have been written.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All groups of products but the last `Last` are done.
template <int Last>
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Last) : "memory"); }
// Registers that products write: what is read after this is read after them.
template <int Count>
DEVICE void settle(float (&r)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
// What other threads have stored in shared memory is seen by the products that follow.
DEVICE void stores_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores that count their bytes at a barrier of the CTA that they go to.
DEVICE void peer_store_async(u32 address, uint4 v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
}

// At a barrier of some threads of the block, without waiting for the others.
DEVICE void barrier_arrive_only(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// blockIdx.x, read where it is asked for.
DEVICE u32 block_number() {
  u32 r;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
  return r;
}

// d = a b^T or d += a b^T for a [64][16], b [N][16]
DEVICE void multiply_keys(float (&d)[16], u64 a, u64 b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
               ", %16, %17, p, 1, 1, 0, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "l"(a), "l"(b), "r"((int)add) : "memory");
}
// d += a b for a [64][16] in registers, laid out like the sum, and b [16][128] transposed
DEVICE void multiply_values(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
               "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
               "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
               ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}
#endif
