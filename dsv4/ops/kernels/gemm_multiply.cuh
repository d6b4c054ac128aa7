// Products of 16 rows of weights a warp, in registers, and N tokens, in shared memory: wgmma m64nNk16 of a warpgroup's four
// warps where there is such an instruction, else mma.sync m16n8k16.
//
// Tokens lie in atoms of 64 values: 128 bytes a token, eight tokens after another, 16-byte chunk c of token n at chunk
// c ^ (n % 8). An atom of N tokens begins at a multiple of 1024 bytes.
// Defines: N (16, 32 or 64).
#ifndef DSV4_GEMM_MULTIPLY
#define DSV4_GEMM_MULTIPLY
#include "stream.cuh"

#ifndef WGMMA
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1
#else
#define WGMMA 0
#endif
#endif

constexpr int ATOM_BYTES = N * 128;

// Lane 4 g + t has of rows g (elements 0, 1) and g + 8 (2, 3) the tokens 8 j + 2 t and + 1, at 4 j.
typedef float Sums[N / 2];

#if WGMMA
// What the tensor cores are told of tokens at a shared address, the lower half; the upper says: 128-byte swizzle, 1024 bytes
// from eight to eight tokens.
DEVICE u32 tokens_at(u32 address) { return (address >> 4 & 0x3FFF) | 1 << 16; }
DEVICE u32 tokens_further(u32 tokens, u32 bytes) { return tokens + (bytes >> 4); }
constexpr u64 SWIZZLED = 1ull << 62 | static_cast<u64>(1024 >> 4) << 32;

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All groups of products but the last `Last` are done.
template <int Last>
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Last) : "memory"); }
// Sums that were begun or are done: nothing that changes or reads them is moved across this.
DEVICE void settle(Sums& sums) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
// Weights that are decoded here and not later.
DEVICE void settle(u32 (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

#define SUMS4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define REST : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)
#if N == 16
#define MULTIPLY(TYPE)                                                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE     \
               " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}" : SUMS4(0), SUMS4(4) REST)
#elif N == 32
#define MULTIPLY(TYPE)                                                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE     \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;\n}"        \
               : SUMS16(0) REST)
#else
#define MULTIPLY(TYPE)                                                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE     \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"    \
               "%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}" : SUMS16(0), SUMS16(16) REST)
#endif
// 16 values of K; sums begin anew unless `add`.
template <int F>
DEVICE void multiply16(Sums& c, const u32 (&a)[4], u32 tokens, int add) {
  const u64 b = SWIZZLED | tokens;
  if constexpr (F == BF16) MULTIPLY("bf16");
  else MULTIPLY("f16");
}
#else
DEVICE u32 tokens_at(u32 address) { return address; }
DEVICE u32 tokens_further(u32 tokens, u32 bytes) { return tokens + bytes; }
DEVICE void products_begin() {}
DEVICE void products_end() {}
template <int Last>
DEVICE void products_wait() {}
DEVICE void settle(Sums&) {}
DEVICE void settle(u32 (&)[4][4]) {}
template <int F>
DEVICE void multiply16(Sums& c, const u32 (&a)[4], u32 b, int add) {
  const int lane = threadIdx.x & 31, token = lane % 8 + lane / 16 * 8;
  const u32 chunk = b >> 4 & 7, at = (b & ~127u) + token * 128 + ((chunk + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
  for (int j = 0; j < N / 16; ++j) {
    u32 v[4];
    load_matrices(v, at + j * 2048);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float d[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i] = add ? c[j * 8 + h * 4 + i] : 0.f;
      mma<F>(d, a[0], a[1], a[2], a[3], v[h * 2], v[h * 2 + 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[j * 8 + h * 4 + i] = d[i];
    }
  }
}
#endif
#endif
