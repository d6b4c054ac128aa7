// hc_pre, hc_head: one launch. hc_post: elementwise.
//
// Bytes of hc_pre at one token: Flash (H 4096) fn 24 x 16384 float32 = 1.57 MB, streams 32 KB, norm 16 KB: 0.39 us at
// 4.25 TB/s; Pro (H 7168) 2.75 MB: 0.66 us. hc_head 0.29 / 0.51 MB. hc_post 72 / 129 KB. All are latency.
// Measured on an H200 in a CUDA graph, of which a launch is about 1.5 us: hc_pre Flash 6.4 us at 1 token, 7.7 at 8, 13.2 at 32,
// 65 at 2048 (31 % of the copy rate); Pro 8.4, 10.4, 15.8, 103. hc_head Flash 3.5 at 1, Pro 3.9. hc_post 1.5 at 1, 1.8 at 32,
// 39 at 2048 (90 %). Of hc_pre's 6.4 us the Sinkhorn steps are about 2, fn into 16 multiprocessors about 1.5.
//
// hc_collapse: a cluster of CLUSTER blocks for TT tokens. A block has SLICE channels of all N streams and the columns of
// fn that meet them. A warp multiplies RPW rows with 128 columns, all its weights in flight at once; the blocks exchange
// their sums through distributed shared memory. Then each block collapses its channels (a second exchange gives the
// norm), while one warp of the first block takes the Sinkhorn steps, a token a lane.
//
// More tokens take two launches: hc_products (beyond 64 tokens a matrix product, see the op) and hc_finish.
//
// Defines: HEAD 0 or 1, N streams, H hidden, WARPS; for hc_collapse CLUSTER (H / CLUSTER a multiple of 8), RPW rows a
// warp, TT; for hc_post: N, H, Y_FLOAT.
#include "common.cuh"

constexpr int K = N * H;

#ifdef HEAD
constexpr int ROWS = HEAD ? N : 2 * N + N * N;
constexpr int THREADS = WARPS * 32;
#ifdef CLUSTER
constexpr int SUMS = TT * (ROWS + 1);       // the last row is the square of the streams
constexpr int SLICE = H / CLUSTER;          // channels of a block
constexpr int COLUMNS = N * SLICE;
constexpr int CHUNKS = (COLUMNS + 127) / 128;  // a warp's step: 32 lanes x 4 columns
constexpr int ROW_GROUPS = (ROWS + RPW - 1) / RPW;
constexpr int COLLAPSERS = THREADS - 32;    // the last warp has the Sinkhorn steps
constexpr int VECTORS = SLICE / 8;
constexpr int ITEMS = TT * VECTORS;
constexpr int PER_THREAD = (ITEMS + COLLAPSERS - 1) / COLLAPSERS;
constexpr int HELD = TT * (RPW + 1);        // sums a lane accumulates
constexpr int AT_ONCE = HELD <= 4 ? 4 : HELD <= 8 ? 8 : HELD <= 16 ? 16 : 32;
constexpr int PADDED = (HELD + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
static_assert(H % (8 * CLUSTER) == 0 && TT <= 8 && TT < WARPS, "");
#endif

DEVICE float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// Vector number v of the output.
DEVICE uint4 normalised(uint4 collapsed, const float* norm_weight, int v, float rms) {
  const float4* weight = reinterpret_cast<const float4*>(norm_weight) + 2 * v;
  const float4 a = __ldg(weight), b = __ldg(weight + 1);
  const float w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  float value[8];
  unpack8(collapsed, value);
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = value[i] * rms * w[i];
  return pack8(value);
}

// The four (N) reciprocals by one division.
DEVICE void reciprocals(const float (&x)[N], float (&r)[N]) {
  float before[N + 1];
  before[0] = 1.f;
#pragma unroll
  for (int i = 0; i < N; ++i) before[i + 1] = before[i] * x[i];
  float rest = fast_reciprocal(before[N]);
#pragma unroll
  for (int i = N - 1; i >= 0; --i) {
    r[i] = rest * before[i];
    rest *= x[i];
  }
}

// m: this token's products divided by their root mean square. After each Sinkhorn step comb is k[i][j] / (row[i] * column[j])
// for the matrix k it began with: dividing row i by its sum + eps makes row[i] = sum over j of k[i][j] / column[j] + eps * row[i].
DEVICE void mix(const float* m, const float* base, const float* scale, float hc_eps, int iterations, float* post,
                float* comb) {
  float k[N][N], row[N], column[N], by_row[N], by_column[N];
#pragma unroll
  for (int n = 0; n < N; ++n) post[n] = 2.f * sigmoid(m[N + n] * scale[1] + base[N + n]);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float top = NEG_INF, sum = 0.f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      k[i][j] = m[2 * N + i * N + j] * scale[2] + base[2 * N + i * N + j];
      top = fmaxf(top, k[i][j]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) sum += k[i][j] = expf(k[i][j] - top);
#pragma unroll
    for (int j = 0; j < N; ++j) k[i][j] = __fdividef(k[i][j], sum) + hc_eps;
    row[i] = column[i] = by_row[i] = 1.f;
  }
  for (int step = 0;; ++step) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      column[j] *= hc_eps;
#pragma unroll
      for (int i = 0; i < N; ++i) column[j] = fmaf(k[i][j], by_row[i], column[j]);
    }
    reciprocals(column, by_column);
    if (step >= iterations - 1) break;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      row[i] *= hc_eps;
#pragma unroll
      for (int j = 0; j < N; ++j) row[i] = fmaf(k[i][j], by_column[j], row[i]);
    }
    reciprocals(row, by_row);
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) comb[i * N + j] = k[i][j] * by_row[i] * by_column[j];
}

#ifdef CLUSTER

KERNEL __launch_bounds__(THREADS, 1)
    hc_collapse(const u16* __restrict__ streams, const float* __restrict__ fn, const float* __restrict__ base,
                const float* __restrict__ scale, const float* __restrict__ norm_weight, float eps, float hc_eps,
                int iterations, int tokens, uint4* __restrict__ x_out, float* __restrict__ post,
                float* __restrict__ comb) {
  __shared__ float parts[CHUNKS][SUMS];    // of this block
  __shared__ float all[CLUSTER][SUMS];     // of the cluster
  __shared__ float norms[CLUSTER][TT];
  __shared__ float m[SUMS];
  __shared__ float squares[ITEMS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const i64 token0 = static_cast<i64>(blockIdx.x / CLUSTER) * TT;
  if (CLUSTER > 1) cluster_arrive();  // before the first exchange every block of the cluster has begun

  for (int tile = warp; tile < CHUNKS * ROW_GROUPS; tile += WARPS) {
    const int chunk = tile % CHUNKS, first = tile / CHUNKS * RPW, local = chunk * 128 + lane * 4;
    const bool inside = local < COLUMNS;
    const int column = local / SLICE * H + rank * SLICE + local % SLICE;
    float4 w[RPW];
#pragma unroll
    for (int i = 0; i < RPW; ++i)
      w[i] = inside && first + i < ROWS
                 ? __ldg(reinterpret_cast<const float4*>(fn + static_cast<i64>(first + i) * K + column))
                 : make_float4(0.f, 0.f, 0.f, 0.f);
    if (tile == warp) wait_for_previous_kernel();  // the weights are under way
    float acc[PADDED] = {};
#pragma unroll
    for (int t = 0; t < TT; ++t) {
      uint2 v = make_uint2(0, 0);
      if (inside && token0 + t < tokens) v = *reinterpret_cast<const uint2*>(streams + (token0 + t) * K + column);
      const float4 x = make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
#pragma unroll
      for (int i = 0; i < RPW; ++i) acc[t * (RPW + 1) + i] = dot4(w[i], x, 0.f);
      acc[t * (RPW + 1) + RPW] = dot4(x, x, 0.f);
    }
#pragma unroll
    for (int begin = 0; begin < PADDED; begin += AT_ONCE) {
      float some[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) some[i] = acc[begin + i];
      const float sum = warp_sums(some);
      const int index = begin + reduced_index<AT_ONCE>(), t = index / (RPW + 1), i = index % (RPW + 1);
      if (lane % (32 / AT_ONCE) == 0 && index < HELD) {
        if (i < RPW ? first + i < ROWS : first == 0) parts[chunk][t * (ROWS + 1) + (i < RPW ? first + i : ROWS)] = sum;
      }
    }
  }
  wait_for_previous_kernel();
  uint4 x[PER_THREAD][N];
#pragma unroll
  for (int p = 0; p < PER_THREAD; ++p) {
    const int item = p * COLLAPSERS + threadIdx.x;
    const i64 token = token0 + item / VECTORS;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      x[p][n] = make_uint4(0, 0, 0, 0);
      if (warp < WARPS - 1 && item < ITEMS && token < tokens)
        x[p][n] = reinterpret_cast<const uint4*>(streams)[(token * N + n) * (H / 8) + rank * VECTORS + item % VECTORS];
    }
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_wait();
  for (int i = threadIdx.x; i < SUMS * CLUSTER; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) sum += parts[c][i % SUMS];
    if (CLUSTER > 1) store_remote(&all[rank][i % SUMS], i / SUMS, sum);
    else all[0][i] = sum;
  }
  if (CLUSTER > 1) cluster_arrive(), cluster_wait();
  else __syncthreads();
  for (int i = threadIdx.x; i < SUMS; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) sum += all[r][i];
    m[i] = sum;
  }
  __syncthreads();

  if (warp == WARPS - 1) {
    if (CLUSTER > 1) cluster_arrive();
    if (!HEAD && rank == 0 && lane < TT && token0 + lane < tokens) {
      const float* sums = m + lane * (ROWS + 1);
      const float r = rsqrtf(sums[ROWS] * (1.f / K) + eps);
      float mine[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) mine[i] = sums[i] * r;
      mix(mine, base, scale, hc_eps, iterations, post + (token0 + lane) * N, comb + (token0 + lane) * N * N);
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_wait();
    return;
  }

  uint4 collapsed[PER_THREAD];
#pragma unroll
  for (int p = 0; p < PER_THREAD; ++p) {
    const int item = p * COLLAPSERS + threadIdx.x;
    if (item >= ITEMS) continue;
    const float* sums = m + item / VECTORS * (ROWS + 1);
    const float r = rsqrtf(sums[ROWS] * (1.f / K) + eps);
    float sum[8] = {}, one[8], square = 0.f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float pre = sigmoid(sums[n] * r * scale[0] + base[n]) + hc_eps;
      unpack8(x[p][n], one);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = fmaf(pre, one[i], sum[i]);
    }
    collapsed[p] = pack8(sum);
    unpack8(collapsed[p], sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) square = fmaf(sum[i], sum[i], square);
    squares[item] = square;
  }
  barrier(1, COLLAPSERS);
  if (warp < TT) {
    float sum = 0.f;
    for (int v = lane; v < VECTORS; v += 32) sum += squares[warp * VECTORS + v];
    sum = warp_sum(sum);
    if (CLUSTER > 1) {
      if (lane < CLUSTER) store_remote(&norms[rank][warp], lane, sum);
    } else if (lane == 0) {
      norms[0][warp] = sum;
    }
  }
  if (CLUSTER > 1) cluster_arrive(), cluster_wait();
  else barrier(1, COLLAPSERS);
#pragma unroll
  for (int p = 0; p < PER_THREAD; ++p) {
    const int item = p * COLLAPSERS + threadIdx.x, t = item / VECTORS;
    if (item >= ITEMS || token0 + t >= tokens) continue;
    float sum = 0.f;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) sum += norms[r][t];
    const float rms = rsqrtf(sum * (1.f / H) + eps);
    const int v = rank * VECTORS + item % VECTORS;
    x_out[(token0 + t) * (H / 8) + v] = normalised(collapsed[p], norm_weight, v, rms);
  }
}

#else

constexpr int RPW = (ROWS + WARPS - 1) / WARPS, UNITS = (K + 127) / 128, TT = 8;
constexpr int HELD = RPW * TT, PADDED = HELD <= 8 ? 8 : HELD <= 16 ? 16 : 32;
constexpr int VECTORS = H / 8, PER_THREAD = (VECTORS + THREADS - 1) / THREADS;
static_assert(HELD <= 32 && ROWS <= THREADS, "");

// Blocks (part of the columns, 8 tokens): products [T, gridDim.x, ROWS] of the streams with fn, a sum a part.
KERNEL __launch_bounds__(THREADS)
    hc_products(const u16* __restrict__ streams, const float* __restrict__ fn, int tokens,
                float* __restrict__ products) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = warp * RPW;
  const i64 token0 = static_cast<i64>(blockIdx.y) * TT;
  float acc[PADDED] = {};
  wait_for_previous_kernel();
#pragma unroll 2
  for (int unit = blockIdx.x; unit < UNITS; unit += gridDim.x) {
    const int column = unit * 128 + lane * 4;
    if (column >= K) continue;
    float4 w[RPW];
#pragma unroll
    for (int i = 0; i < RPW; ++i)
      w[i] = first + i < ROWS ? __ldg(reinterpret_cast<const float4*>(fn + static_cast<i64>(first + i) * K + column))
                              : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int t = 0; t < TT; ++t) {
      uint2 v = make_uint2(0, 0);
      if (token0 + t < tokens) v = __ldg(reinterpret_cast<const uint2*>(streams + (token0 + t) * K + column));
      const float4 x = make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
#pragma unroll
      for (int i = 0; i < RPW; ++i) acc[t * RPW + i] = dot4(w[i], x, acc[t * RPW + i]);
    }
  }
  const float sum = warp_sums(acc);
  const int index = reduced_index<PADDED>(), row = first + index % RPW;
  const i64 token = token0 + index / RPW;
  if (lane % (32 / PADDED) == 0 && index < HELD && row < ROWS && token < tokens)
    products[(token * gridDim.x + blockIdx.x) * ROWS + row] = sum;
}

// One block a token: the rest of hc_collapse, from products [T, parts, ROWS]. The last warp has the Sinkhorn steps.
KERNEL __launch_bounds__(THREADS + 32)
    hc_finish(const uint4* __restrict__ streams, const float* __restrict__ products, const float* __restrict__ base,
              const float* __restrict__ scale, const float* __restrict__ norm_weight, float eps, float hc_eps,
              int iterations, int parts, uint4* __restrict__ x_out, float* __restrict__ post,
              float* __restrict__ comb) {
  constexpr int SPREAD = THREADS / ROWS;  // threads that share a row's parts
  __shared__ float some[SPREAD][ROWS], m[ROWS], scratch[2][WARPS], total[1];
  const int warp = threadIdx.x >> 5;
  const i64 token = blockIdx.x;
  uint4 x[PER_THREAD][N];
  wait_for_previous_kernel();
  if (warp < WARPS) {
    float square = 0.f, one[8];
#pragma unroll
    for (int p = 0; p < PER_THREAD; ++p)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int v = p * THREADS + threadIdx.x;
        x[p][n] = v < VECTORS ? streams[(token * N + n) * VECTORS + v] : make_uint4(0, 0, 0, 0);
      }
    if (threadIdx.x < SPREAD * ROWS) {
      float sum = 0.f;
      for (int part = threadIdx.x / ROWS; part < parts; part += SPREAD)
        sum += products[(token * parts + part) * ROWS + threadIdx.x % ROWS];
      some[threadIdx.x / ROWS][threadIdx.x % ROWS] = sum;
    }
#pragma unroll
    for (int p = 0; p < PER_THREAD; ++p)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        unpack8(x[p][n], one);
#pragma unroll
        for (int i = 0; i < 8; ++i) square = fmaf(one[i], one[i], square);
      }
    square = block_sum<WARPS>(square, scratch[0], 1);
    if (threadIdx.x < ROWS) {
      float sum = 0.f;
      for (int i = 0; i < SPREAD; ++i) sum += some[i][threadIdx.x];
      m[threadIdx.x] = sum * rsqrtf(square * (1.f / K) + eps);
    }
  }
  __syncthreads();
  if (warp == WARPS) {
    if (!HEAD && threadIdx.x == THREADS) mix(m, base, scale, hc_eps, iterations, post + token * N, comb + token * N * N);
    return;
  }
  float pre[N], square = 0.f, one[8];
  uint4 collapsed[PER_THREAD];
#pragma unroll
  for (int n = 0; n < N; ++n) pre[n] = sigmoid(m[n] * scale[0] + base[n]) + hc_eps;
#pragma unroll
  for (int p = 0; p < PER_THREAD; ++p) {
    float sum[8] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
      unpack8(x[p][n], one);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = fmaf(pre[n], one[i], sum[i]);
    }
    collapsed[p] = pack8(sum);
    unpack8(collapsed[p], sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) square = fmaf(sum[i], sum[i], square);
  }
  const float rms = rsqrtf(block_sum<WARPS>(square, scratch[1], 1) * (1.f / H) + eps);
#pragma unroll
  for (int p = 0; p < PER_THREAD; ++p) {
    const int v = p * THREADS + threadIdx.x;
    if (v < VECTORS) x_out[token * VECTORS + v] = normalised(collapsed[p], norm_weight, v, rms);
  }
}

#endif

#else

// blocks (8-channel vectors, token)
KERNEL hc_post(const void* __restrict__ y, const uint4* __restrict__ streams, const float* __restrict__ post,
               const float* __restrict__ comb, uint4* __restrict__ out) {
  const int v = blockIdx.x * blockDim.x + threadIdx.x;
  const i64 token = blockIdx.y;
  wait_for_previous_kernel();
  if (v >= H / 8) return;
  float one[8], sum[N][8], update[8];
  uint4 x[N];
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = streams[(token * N + j) * (H / 8) + v];
  if (Y_FLOAT) {
    const float4* row = static_cast<const float4*>(y) + 2 * (token * (H / 8) + v);
    const float4 a = row[0], b = row[1];
    update[0] = a.x; update[1] = a.y; update[2] = a.z; update[3] = a.w;
    update[4] = b.x; update[5] = b.y; update[6] = b.z; update[7] = b.w;
  } else {
    unpack8(static_cast<const uint4*>(y)[token * (H / 8) + v], update);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float weight = post[token * N + k];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[k][i] = weight * update[i];
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    unpack8(x[j], one);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float weight = comb[(token * N + j) * N + k];
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[k][i] = fmaf(weight, one[i], sum[k][i]);
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) out[(token * N + k) * (H / 8) + v] = pack8(sum[k]);
}

#endif
