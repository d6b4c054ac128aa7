// What the hyper-connection kernels share: the coefficients, and the mixing of N streams.
// Defines: N streams, H hidden; HEAD and Y_FLOAT (y is float32, not bf16), 0 or 1.
#ifndef DSV4_HYPER_CONNECTION
#define DSV4_HYPER_CONNECTION
#include "hopper.cuh"

constexpr int K = N * H;
constexpr int ROWS = HEAD ? N : 2 * N + N * N;  // of fn

DEVICE float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

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

// Which of the three scales row `row` of fn has.
DEVICE int scale_of(int row) { return row < N ? 0 : row < 2 * N ? 1 : 2; }

// One warp, of which lanes 4 t + i have row i of token t: logits [N] become comb, Sinkhorn(softmax). After each of Sinkhorn's
// steps comb is k[i][j] / (row[i] * column[j]): dividing row i by its sum + eps makes row[i] = sum over j of k[i][j] /
// column[j] + eps * row[i]. At first row[i] is the sum of the softmax. When an iteration moves no column of a token by more
// than 2^-18, the next one is its last: those that are left move them ever less. (One lane for all rows takes a step in 50
// cycles, this in 65, but its instructions are four times as many, and seldom in the caches.)
DEVICE void make_comb(float (&x)[N], float hc_eps, int iterations) {
  const bool exists = (threadIdx.x & 3) < N;
  u32 words[4] = {};
  float across[N], top = NEG_INF, row = 0.f, column = 1.f;
#pragma unroll
  for (int j = 0; j < N; ++j) top = fmaxf(top, x[j]);
#pragma unroll
  for (int j = 0; j < N; ++j) row += x[j] = __expf(x[j] - top);
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = exists ? fmaf(hc_eps, row, x[j]) : 0.f, words[j] = __float_as_uint(x[j]);
  transpose4(words);
#pragma unroll
  for (int j = 0; j < N; ++j) across[j] = __uint_as_float(words[j]);
  // This lane's sum of `by` over those that the others have of the other kind, and its reciprocal.
  auto divide = [&](const float(&by)[N], float others, float& sum) {
    sum *= hc_eps;
#pragma unroll
    for (int j = 0; j < N; ++j) sum = fmaf(by[j], __shfl_sync(~0u, others, j, 4), sum);
    return exists ? fast_reciprocal(sum) : 0.f;
  };
  float by_row = exists ? fast_reciprocal(row) : 0.f, by_column = divide(across, by_row, column);
  int last = iterations;  // of this token
#pragma unroll 1
  for (int i = 1; i < iterations; ++i) {
    float new_row = row, new_column = column;
    const float new_by_row = divide(x, by_column, new_row), new_by_column = divide(across, new_by_row, new_column);
    const u32 moved = __ballot_sync(~0u, !(fabsf(new_column - column) <= 0x1p-18f * column));
    if (i < last) {
      row = new_row, column = new_column, by_row = new_by_row, by_column = new_by_column;
      if (!(moved >> (threadIdx.x & 28) & 15)) last = min(last, i + 2);
    }
    if (__all_sync(~0u, i + 1 >= last)) break;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] *= by_row * __shfl_sync(~0u, by_column, j, 4);
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
