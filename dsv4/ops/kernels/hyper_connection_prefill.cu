// The hyper-connection of many tokens, around a matrix product with fn: hc_post mixes the streams, hc_finish does the rest.
//
// Bytes at 2048 tokens, Flash: hc_post 151 MB, hc_finish 84 MB. Measured on an H200 in a CUDA graph: all three 33 us at 256
// tokens, 104 us at 2048, of which hc_post is 39 (90 % of the copy rate); that was while hc_finish made comb. Now each block of
// hc_post does, and a prompt of 4,096 tokens takes 2 % longer.
//
// Defines: N streams, H hidden, HEAD, Y_FLOAT, LOGITS (comb comes and goes as logits).
#include "hyper_connection.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int VECTORS = H / 8, PER_THREAD = (VECTORS + THREADS - 1) / THREADS;
static_assert(H % 8 == 0 && ROWS <= THREADS, "");

// One warp: comb of one token's logits.
DEVICE void take_comb(const float* logits, float hc_eps, int iterations, float* comb) {
  const int lane = threadIdx.x & 31, row = min(lane & 3, N - 1);
  float x[N];
  load(logits + row * N, x);
  make_comb(x, hc_eps, iterations);
  if (lane < N) store(comb + lane * N, x);
}

// blocks (8-channel vectors, token)
KERNEL hc_post(const void* y, const uint4* streams, const float* post, const float* comb, float hc_eps, int iterations,
               uint4* mixed) {
  __shared__ alignas(16) float made[N * N];
  const int v = blockIdx.x * blockDim.x + threadIdx.x;
  const i64 token = blockIdx.y;
  let_next_kernel_start();
  wait_for_previous_kernel();
  uint4 before[N] = {}, after[N];
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (v < VECTORS) before[n] = streams[(token * N + n) * VECTORS + v];
  alignas(16) float to[N], from[N * N];
  load(post + token * N, to);
  if (LOGITS) {
    if (threadIdx.x < 32) take_comb(comb + token * N * N, hc_eps, iterations, made);
    __syncthreads();
  }
  load(LOGITS ? made : comb + token * N * N, from);
  if (v >= VECTORS) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 old[N], fresh[N];
#pragma unroll
    for (int n = 0; n < N; ++n) old[n] = reinterpret_cast<const u32*>(&before[n])[i];
    mix(load_pair(y, (token * VECTORS + v) * 4 + i), old, to, from, fresh);
#pragma unroll
    for (int n = 0; n < N; ++n) reinterpret_cast<u32*>(&after[n])[i] = fresh[n];
  }
#pragma unroll
  for (int n = 0; n < N; ++n) mixed[(token * N + n) * VECTORS + v] = after[n];
}

// One block a token: collapse, norm and coefficients from products [T, parts, ROWS] of the streams with parts of fn. The last
// warp has post and comb.
KERNEL __launch_bounds__(THREADS + 32)
    hc_finish(const uint4* streams, const float* products, const float* __restrict__ base, const float* __restrict__ scale,
              const float* __restrict__ norm_weight, float eps, float hc_eps, int iterations, int parts, uint4* x_out,
              float* post, float* comb) {
  __shared__ float m[ROWS], scratch[2][WARPS];
  __shared__ alignas(16) float logits[N * N];
  const int warp = threadIdx.x >> 5;
  const i64 token = blockIdx.x;
  uint4 x[PER_THREAD][N];
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (warp < WARPS) {
    float square = 0.f, one[8], product = 0.f;
#pragma unroll
    for (int p = 0; p < PER_THREAD; ++p)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int v = p * THREADS + threadIdx.x;
        x[p][n] = v < VECTORS ? streams[(token * N + n) * VECTORS + v] : make_uint4(0, 0, 0, 0);
      }
    if (threadIdx.x < ROWS)
      for (int part = 0; part < parts; ++part) product += products[(token * parts + part) * ROWS + threadIdx.x];
#pragma unroll
    for (int p = 0; p < PER_THREAD; ++p)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        unpack8(x[p][n], one);
#pragma unroll
        for (int i = 0; i < 8; ++i) square = fmaf(one[i], one[i], square);
      }
    square = block_sum<WARPS>(square, scratch[0], 1);
    if (threadIdx.x < ROWS) m[threadIdx.x] = product * rsqrtf(square * (1.f / K) + eps);
  }
  __syncthreads();
  if (warp == WARPS) {
    if (!HEAD) {
      const int lane = threadIdx.x & 31;
      const float logit = lane < ROWS ? m[lane] * scale[scale_of(lane)] + base[lane] : 0.f;
      if (lane >= N && lane < 2 * N) post[token * N + lane - N] = 2.f * sigmoid(logit);
      float* to = LOGITS ? comb + token * N * N : logits;
      if (lane >= 2 * N && lane < ROWS) to[lane - 2 * N] = logit;
      __syncwarp();
      if (!LOGITS) take_comb(logits, hc_eps, iterations, comb + token * N * N);
    }
    return;
  }
  float pre[N], square = 0.f, one[8], collapsed[PER_THREAD][8] = {};
#pragma unroll
  for (int n = 0; n < N; ++n) pre[n] = sigmoid(m[n] * scale[0] + base[n]) + hc_eps;
#pragma unroll
  for (int p = 0; p < PER_THREAD; ++p) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      unpack8(x[p][n], one);
#pragma unroll
      for (int i = 0; i < 8; ++i) collapsed[p][i] = fmaf(pre[n], one[i], collapsed[p][i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      collapsed[p][i] = round_bf16(collapsed[p][i]);
      square = fmaf(collapsed[p][i], collapsed[p][i], square);
    }
  }
  const float rms = rsqrtf(block_sum<WARPS>(square, scratch[1], 1) * (1.f / H) + eps);
#pragma unroll
  for (int p = 0; p < PER_THREAD; ++p) {
    const int v = p * THREADS + threadIdx.x;
    if (v >= VECTORS) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) collapsed[p][i] *= rms * __ldg(norm_weight + v * 8 + i);
    x_out[token * VECTORS + v] = pack8(collapsed[p]);
  }
}
