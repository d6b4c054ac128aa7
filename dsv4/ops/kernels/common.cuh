// Device helpers that the kernels share: bf16 packing, reductions, the last warp of a group, clusters, rope's angles.
#ifndef DSV4_COMMON
#define DSV4_COMMON

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define NEG_INF __int_as_float(0xff800000)

// --- bf16: two values a 32-bit word, the lower address in the lower half ---------------------------------------------

DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE float round_bf16(float x) { return bf16_low(pack_bf16(x, 0.f)); }

DEVICE void unpack8(uint4 v, float* x) {
  x[0] = bf16_low(v.x); x[1] = bf16_high(v.x); x[2] = bf16_low(v.y); x[3] = bf16_high(v.y);
  x[4] = bf16_low(v.z); x[5] = bf16_high(v.z); x[6] = bf16_low(v.w); x[7] = bf16_high(v.w);
}

DEVICE uint4 pack8(const float* x) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Component n, known when compiling.
DEVICE u32 word(const uint4& v, int n) { return n == 0 ? v.x : n == 1 ? v.y : n == 2 ? v.z : v.w; }

DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

DEVICE float dot4(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// --- to fp16 ----------------------------------------------------------------------------------------------------------

// The largest magnitudes of eight values, of the even and of the odd ones, as bits of bf16, which are in the values' order.
DEVICE u32 largest_of_8(uint4 v) {
  return __vmaxu2(__vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu), __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu));
}
DEVICE u32 larger(u32 pair) { return max(pair & 0xFFFFu, pair >> 16); }

// The exponent of the power of two that brings a number to 2^14..2^15, given the number's own exponent as it is stored.
DEVICE int fp16_shift(int exponent) { return max(-100, min(100, 127 + 14 - exponent)); }

// Four E4M3 codes -> pairs (0,1) (2,3) in fp16, exact.
DEVICE void decode_fp8(u32 v, u32& low, u32& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high) : "r"(v));
}

// --- synchronisation and reductions -----------------------------------------------------------------------------------

// The end of the kernel before this one in the stream, for launches with programmatic dependence; otherwise nothing.
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Start bringing `bytes` at `from` (multiples of 16) from device memory to the L2.
DEVICE void prefetch_to_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

DEVICE float fast_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

DEVICE float clamped_swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
  return gate * fast_reciprocal(1.f + __expf(-gate)) * up;
}

// A barrier among `threads` threads of the block; `id` 0 is __syncthreads.
DEVICE void barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Sum over groups of Width neighbouring lanes; every lane gets it, always added in the same order.
template <int Width = 32>
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = Width / 2; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// a where mask is all ones, b where it is 0. (A choice between two elements of an array by ?: may become a load from the one
// place or the other, and the array then lies in local memory.)
DEVICE float choose(u32 mask, float a, float b) {
  return __uint_as_float((__float_as_uint(a) & mask) | (__float_as_uint(b) & ~mask));
}

// Lanes t = 0..3 of four: w[c] of lane t becomes what w[t] of lane c was.
DEVICE void transpose4(u32 (&w)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & step) continue;
      const u32 other = __shfl_xor_sync(~0u, upper ? w[j] : w[j + step], step);
      if (upper) w[j] = other;
      else w[j + step] = other;
    }
  }
}

// x[i] + x[i + Half] of this lane or of the lane `step` away, for i < Half; then the same with half of each.
template <int Half, int Count>
DEVICE void fold(float (&x)[Count], int step) {
  const u32 upper = threadIdx.x & step ? ~0u : 0u;
#pragma unroll
  for (int i = 0; i < Half; ++i) {
    const float give = choose(upper, x[i], x[i + Half]), keep = choose(upper, x[i + Half], x[i]);
    x[i] = keep + __shfl_xor_sync(~0u, give, step);
  }
  if constexpr (Half > 1) fold<Half / 2>(x, step / 2);
}

// Sums of Count values (a power of two up to 32) over the warp's lanes, with Count + 4 shuffles at most instead of 5 *
// Count. Returns the sum number `reduced_index<Count>()` of this lane; the lanes' order of addition is always the same.
template <int Count>
DEVICE float warp_sums(float (&x)[Count]) {
  if constexpr (Count > 1) fold<Count / 2>(x, 16);
#pragma unroll
  for (int step = 16 / Count; step; step >>= 1) x[0] += __shfl_xor_sync(~0u, x[0], step);
  return x[0];
}

template <int Count>
DEVICE int reduced_index() {
  const int lane = threadIdx.x & 31;
  int index = 0, step = 16;
#pragma unroll
  for (int half = Count / 2; half; half >>= 1, step >>= 1) index += lane & step ? half : 0;
  return index;
}

// Sum over the first Warps warps, at barrier `id`. `scratch` [Warps] may be used again after the next barrier.
template <int Warps>
DEVICE float block_sum(float x, float* scratch, int id) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  barrier(id, Warps * 32);
  x = 0.f;
#pragma unroll
  for (int w = 0; w < Warps; ++w) x += scratch[w];
  return x;
}

// Whether this warp is the last of `total` to come here; what the others wrote before is then visible to it. The counter is 0
// before the first and after the last, so launches that share it must follow one another.
DEVICE bool last_warp(u32* counter, u32 total) {
  u32 before = 0;
  __syncwarp();
  if ((threadIdx.x & 31) == 0)  // the increment wraps to 0 at the last
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(total - 1) : "memory");
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();
  return before == total - 1;
}

// --- thread-block clusters ---------------------------------------------------------------------------------------------

DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Without waiting for this thread's stores: for blocks that only have to have begun.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Write to the same shared variable of block `rank` of the cluster.
DEVICE void store_remote(float* variable, u32 rank, float value) {
  u32 local = static_cast<u32>(__cvta_generic_to_shared(variable)), remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

// --- rope --------------------------------------------------------------------------------------------------------------

// Cosine and sine of the float32 product position * frequency, reduced in double: exact for positions in the millions
// and without the local memory of cosf's slow path.
DEVICE void rope_cos_sin(i64 position, float frequency, float* cosine, float* sine) {
  double half_turns = static_cast<double>(static_cast<float>(position) * frequency) * 0.31830988618379067154;
  half_turns -= 2.0 * rint(half_turns * 0.5);
  sincospif(static_cast<float>(half_turns), sine, cosine);
}

#endif
