// What the hyper-connection kernels share: the coefficients, and the mixing of N streams.
// Defines: N streams, H hidden; HEAD and Y_FLOAT (y is float32, not bf16), 0 or 1.
#ifndef DSV4_HYPER_CONNECTION
#define DSV4_HYPER_CONNECTION
#include "hopper.cuh"

constexpr int K = N * H;
constexpr int ROWS = HEAD ? N : 2 * N + N * N;  // of fn

DEVICE float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// The N reciprocals, two by one division.
DEVICE void reciprocals(const float (&x)[N], float (&r)[N]) {
#pragma unroll
  for (int i = 0; i + 1 < N; i += 2) {
    const float both = fast_reciprocal(x[i] * x[i + 1]);
    r[i] = both * x[i + 1];
    r[i + 1] = both * x[i];
  }
  if (N % 2) r[N - 1] = fast_reciprocal(x[N - 1]);
}

// The sum over i of a[i] * b[i] and the rest, in two chains.
DEVICE float sum_of(const float (&a)[N], const float (&b)[N], float rest) {
  float even = 0.f;
#pragma unroll
  for (int i = 0; i < N; i += 2) even = i ? fmaf(a[i], b[i], even) : a[i] * b[i];
#pragma unroll
  for (int i = 1; i < N; i += 2) rest = fmaf(a[i], b[i], rest);
  return even + rest;
}

template <int Count>
DEVICE void load(const float* from, float (&x)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i)
    if (Count % 4) x[i] = from[i];
    else if (i % 4 == 0) *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(from + i);
}

template <int Count>
DEVICE void store(float* to, const float (&x)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i)
    if (Count % 4) to[i] = x[i];
    else if (i % 4 == 0) *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(x + i);
}

// One warp, lane i < ROWS with product i of a token, divided by the root mean square: post written, and what the Sinkhorn steps
// begin with left in k [N * N].
DEVICE void begin_coefficients(float m, const float* base, const float* scale, float hc_eps, float* post, float* k) {
  const int lane = threadIdx.x & 31, entry = lane - 2 * N, first = 2 * N + (entry >= 0 ? entry / N * N : 0);
  const float logit = lane < ROWS ? m * scale[lane < N ? 0 : lane < 2 * N ? 1 : 2] + base[lane] : 0.f;
  float top = NEG_INF, sum = 0.f;
#pragma unroll
  for (int j = 0; j < N; ++j) top = fmaxf(top, __shfl_sync(~0u, logit, first + j));
  const float power = expf(logit - top);
#pragma unroll
  for (int j = 0; j < N; ++j) sum += __shfl_sync(~0u, power, first + j);
  if (lane >= N && lane < 2 * N) post[lane - N] = 2.f * sigmoid(logit);
  if (entry >= 0 && entry < N * N) k[entry] = __fdividef(power, sum) + hc_eps;
  __syncwarp();
}

// The Sinkhorn steps, by one thread. After each of them comb is k[i][j] / (row[i] * column[j]): dividing row i by its sum + eps
// makes row[i] = sum over j of k[i][j] / column[j] + eps * row[i]. When an iteration moves no column by more than 2^-20, those
// that are left, which move them ever less, are left out.
DEVICE void sinkhorn(const float* from, float hc_eps, int iterations, float* comb_out) {
  float k[N][N], transposed[N][N], row[N], column[N], by_row[N], by_column[N];
  alignas(16) float comb[N * N];
  load(from, comb);
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) transposed[j][i] = k[i][j] = comb[i * N + j];
    row[i] = column[i] = by_row[i] = 1.f;
  }
  auto divide = [&](const float(&by)[N][N], const float(&by_other)[N], float(&sums)[N], float(&by_sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = sum_of(by[i], by_other, sums[i] * hc_eps);
    reciprocals(sums, by_sums);
  };
  divide(transposed, by_row, column, by_column);
#pragma unroll 1
  for (int left = iterations - 1; left > 0; left -= 2) {  // two at a time, of which the second is watched
    divide(k, by_column, row, by_row);
    divide(transposed, by_row, column, by_column);
    if (left == 1) break;
    bool moved = false;
    float before[N];
#pragma unroll
    for (int j = 0; j < N; ++j) before[j] = column[j];
    divide(k, by_column, row, by_row);
    divide(transposed, by_row, column, by_column);
#pragma unroll
    for (int j = 0; j < N; ++j) moved = moved || !(fabsf(column[j] - before[j]) <= 0x1p-20f * before[j]);
    if (!moved) break;
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) comb[i * N + j] = k[i][j] * by_row[i] * by_column[j];
  store(comb_out, comb);
}

// Two neighbouring channels a word of bf16: mixed[k] = post[k] y + the sum over j of comb[j][k] streams[j], rounded.
DEVICE void mix(float2 y, const u32 (&streams)[N], const float (&post)[N], const float (&comb)[N * N], u32 (&mixed)[N]) {
  float low[N], high[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    low[k] = post[k] * y.x;
    high[k] = post[k] * y.y;
  }
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int k = 0; k < N; ++k) {
      low[k] = fmaf(comb[j * N + k], bf16_low(streams[j]), low[k]);
      high[k] = fmaf(comb[j * N + k], bf16_high(streams[j]), high[k]);
    }
#pragma unroll
  for (int k = 0; k < N; ++k) mixed[k] = pack_bf16(low[k], high[k]);
}

// Channels 2 i and 2 i + 1 of y, bf16 or float32.
DEVICE float2 load_pair(const void* y, i64 i) {
  if (Y_FLOAT) return static_cast<const float2*>(y)[i];
  const u32 pair = static_cast<const u32*>(y)[i];
  return make_float2(bf16_low(pair), bf16_high(pair));
}

#endif
