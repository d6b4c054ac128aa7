// Names for the PTX that kernels of sm_90 and later share: tensor-core fragments, copies that complete on
// barriers, clusters.
#ifndef DSV4_HOPPER
#define DSV4_HOPPER
#include "common.cuh"

typedef u16 bf16;  // bits; the arithmetic is the tensor cores'

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// The kernel after this one, if launched with programmatic dependence, may start; it still waits before reading results.
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// A warpgroup's share of the registers from here on.
template <int Count>
DEVICE void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count)); }
template <int Count>
DEVICE void registers_less() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count)); }

// --- tensor cores: lane = 4 g + t holds of C[16][8] the rows g, g + 8 and the columns 2 t, 2 t + 1 -------------------
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of bf16; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// --- barriers in shared memory, and copies that complete on them ------------------------------------------------------
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
// An arrival, and so many bytes of asynchronous stores that the barrier waits for besides.
DEVICE void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// For what other CTAs of the cluster have stored.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
// 16 bytes to shared memory, both addresses aligned to that; of them the first `bytes`, then zeros.
DEVICE void copy_16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copy_4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// One of the arrivals that the barrier waits for, once this thread's copies so far are there.
DEVICE void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --- shared memory of the other CTAs of the cluster --------------------------------------------------------------------
// The address of the same shared variable in the CTA `rank` of the cluster.
DEVICE u32 peer_address(u32 address, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
// Stores that count their bytes at a barrier of the CTA that they go to. They may be under way when this CTA ends.
DEVICE void peer_store_async(u32 address, const float (&v)[4], u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}
DEVICE void peer_store_async(u32 address, float v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               ::"r"(address), "f"(v), "r"(barrier) : "memory");
}
DEVICE void peer_store_async(u32 address, float2 v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
               ::"r"(address), "f"(v.x), "f"(v.y), "r"(barrier) : "memory");
}
DEVICE void peer_store_async(u32 address, u64 v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];"
               ::"r"(address), "l"(v), "r"(barrier) : "memory");
}
// An arrival at another CTA's barrier, and so many bytes of asynchronous stores that it waits for besides. It does not wait for
// this thread's other stores (to release them to a cluster, the compiler waits for all that it has sent to global memory).
DEVICE void peer_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

#endif
