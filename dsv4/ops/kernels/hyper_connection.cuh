// What the hyper-connection kernels share: the coefficients, and the mixing of N streams.
// Defines: N streams, H hidden; HEAD and Y_FLOAT (y is float32, not bf16), 0 or 1.
#ifndef DSV4_HYPER_CONNECTION
#define DSV4_HYPER_CONNECTION
#include "hopper.cuh"

constexpr int K = N * H;
constexpr int ROWS = HEAD ? N : 2 * N + N * N;  // of fn

DEVICE float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// part[i] = the product of all x but x[i]; returns the product of all, which divides part[i] to 1 / x[i].
DEVICE float products_of_others(const float (&x)[N], float (&part)[N]) {
  float all[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) all[i] = i < N ? x[i] : 1.f;
  const float pairs[2] = {all[0] * all[1], all[2] * all[3]};
#pragma unroll
  for (int i = 0; i < N; ++i) part[i] = all[i ^ 1] * pairs[1 - i / 2];
  return pairs[0] * pairs[1];
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

// Which of the three scales row `row` of fn has.
DEVICE int scale_of(int row) { return row < N ? 0 : row < 2 * N ? 1 : 2; }

// One warp, lane i < ROWS with logit i of a token: the powers of the softmax left in k [N * N], not yet divided by their sums.
DEVICE void begin_comb(float logit, float* k) {
  const int entry = static_cast<int>(threadIdx.x & 31) - 2 * N, first = 2 * N + (entry >= 0 ? entry / N * N : 0);
  float top = NEG_INF;
#pragma unroll
  for (int j = 0; j < N; ++j) top = fmaxf(top, __shfl_sync(~0u, logit, first + j));
  if (entry >= 0 && entry < N * N) k[entry] = __expf(logit - top);
  __syncwarp();
}

// The Sinkhorn steps, by one thread, from what begin_comb left. After each of them comb is k[i][j] / (row[i] * column[j]):
// dividing row i by its sum + eps makes row[i] = sum over j of k[i][j] / column[j] + eps * row[i]. At first row[i] is the
// sum of the softmax. A reciprocal is by_row[i] * row_scale: what takes long is a factor of all four, and the next sums are
// formed before it is there (50 cycles a step, 70 with the reciprocals themselves). The product of four sums stays a
// number, as no sum is far below eps. When an iteration moves no column by more than 2^-18, the next one is the last: those
// that are left move them ever less.
DEVICE void sinkhorn(const float* from, float hc_eps, int iterations, float* comb_out) {
  float k[N][N], transposed[N][N], row[N], column[N], by_row[N], by_column[N], row_scale, column_scale;
  alignas(16) float comb[N * N];
  load(from, comb);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float sum = comb[i * N];
#pragma unroll
    for (int j = 1; j < N; ++j) sum += comb[i * N + j];
    row[i] = sum;
    column[i] = 1.f;
#pragma unroll
    for (int j = 0; j < N; ++j) transposed[j][i] = k[i][j] = fmaf(hc_eps, sum, comb[i * N + j]);
  }
  row_scale = fast_reciprocal(products_of_others(row, by_row));
  auto divide = [&](const float(&by)[N][N], const float(&others)[N], float scale, float(&sums)[N], float(&by_sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float sum = by[i][0] * others[0];
#pragma unroll
      for (int j = 1; j < N; ++j) sum = fmaf(by[i][j], others[j], sum);
      sums[i] = fmaf(sum, scale, sums[i] * hc_eps);
    }
    return fast_reciprocal(products_of_others(sums, by_sums));
  };
  column_scale = divide(transposed, by_row, row_scale, column, by_column);
#pragma unroll 1
  for (int left = iterations - 1; left > 0; left -= 2) {  // two at a time, of which the first is watched
    float before[N];
    bool moved = false;
#pragma unroll
    for (int j = 0; j < N; ++j) before[j] = column[j];
    row_scale = divide(k, by_column, column_scale, row, by_row);
    column_scale = divide(transposed, by_row, row_scale, column, by_column);
    if (left == 1) break;
#pragma unroll
    for (int j = 0; j < N; ++j) moved |= !(fabsf(column[j] - before[j]) <= 0x1p-18f * before[j]);
    row_scale = divide(k, by_column, column_scale, row, by_row);
    column_scale = divide(transposed, by_row, row_scale, column, by_column);
    if (!moved) break;
  }
  const float scale = row_scale * column_scale;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) comb[i * N + j] = k[i][j] * (by_row[i] * scale) * by_column[j];
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
