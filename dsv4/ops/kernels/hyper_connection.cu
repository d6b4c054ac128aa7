// hc_mix: what lies between two sublayers in one launch, up to some hundred tokens. hyper_connection_prefill.cu serves more.
//
// Bytes at one token: Flash (H 4096) fn 24 x 16384 float32 = 1.57 MB, streams read and written 64 KB, norm 16 KB: 0.4 us at
// 4.25 TB/s; Pro (H 7168) 2.75 MB, 0.7 us. All is latency.
// Measured on an H200 in a CUDA graph, launches one after another: Flash 2.8 us at 1 token, 3.8 at 8, 8.8 at 32 (at the power
// limit); the head 2.5 at 1; Pro 3.2 at 1. In a step it takes 3 to 4 us after wo_b, beside which its blocks come early; after
// the experts, whose blocks leave no room, 5 to 6, as the 98 KB of weights that each block then takes in come beside those of
// the next kernel. To let that start later costs more: 1.2 us a layer after the wait, 4 after the mixing.
// In cycles after the wait, at 1 token: the sums are sent at 2,300 to 2,500, there at 2,900, x is written at 4,400. Tried and
// not faster: the square of x from inner products of the streams, exchanged while the sums are (x at 3,800, but the launch
// slower by 0.3 us); the streams written behind the first exchange; the weights that lie in shared memory taken to registers
// while the streams come.
// Products on the tensor cores, with fn as two bf16, were faster from 16 tokens on (5.7 us at 32, 7.7 at 64), but no decode
// step with them was: splitting the weights adds to that time.
//
// A cluster of CLUSTER blocks has TT tokens, a block SLICE channels of all N streams and the columns of fn that meet them.
// fn is on its way before the kernel waits for the one before it: HELD quads of weights a thread in registers, the others in
// shared memory, where each thread but those of the last warp reads what it copied itself. So a block leaves room for one of
// another kernel beside it, and starts while that one runs. After the wait:
//   1. the streams are mixed, rounded and written, a few channels of all N streams a thread
//   2. a warp multiplies some rows of fn with its part of the columns; the blocks send each other their sums
//   3. each block collapses its channels; the blocks send each other the squares for the norm
// The sends of 2 and 3 complete on a barrier of the receiver, which costs half of what a barrier of the cluster does.
//
// comb comes as logits and goes as logits. Most often these were written some kernels before, so the last warp of each block
// makes comb of them before the wait, as they then are, and looks after the wait whether they have changed since. (Sinkhorn's
// steps at the end of the launch that writes the logits kept the next kernel waiting for 1.4 to 3.6 us in a step of Flash.)
// That takes it 3 us, of which one is the logits' way and much the instructions', so it begins with that, its code stands in
// one piece, and the other warps ask for its weights.
//
// Defines: N streams, H hidden, HEAD (no coefficients but pre; the streams are not written), LOGITS (0: there is nothing to mix
// in, and comb itself is the result), Y_FLOAT, CLUSTER, HELD, TT.
#include "hyper_connection.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int SLICE = (H / 8 + CLUSTER - 1) / CLUSTER * 8;  // the last blocks may have fewer channels, or none
constexpr int COLUMNS = N * SLICE;
constexpr int CHUNKS = (COLUMNS + 127) / 128;               // a warp's step: 32 lanes x 4 columns
constexpr int RPW = ROWS < 3 ? ROWS : 3;                    // rows a warp
constexpr int ROW_GROUPS = (ROWS + RPW - 1) / RPW;
constexpr int COLUMN_GROUPS = WARPS / ROW_GROUPS;
constexpr int STEPS = (CHUNKS + COLUMN_GROUPS - 1) / COLUMN_GROUPS;
constexpr int QUADS = STEPS * RPW;                          // of weights a thread
constexpr int KEPT = HELD < QUADS ? HELD : QUADS;
constexpr int STRIDE = (ROWS + 4) / 4 * 4;                  // sums of a token: the rows', then the square of the streams
constexpr int SUMS = TT * STRIDE;
constexpr int BATCH = TT < 4 ? TT : 4;                      // tokens a warp multiplies at a time
// Words of two channels of each stream a thread has in steps 1 and 3; the last warp, which makes comb, none if it can be.
constexpr int MIXED = TT * SLICE / 2 <= THREADS - 32 ? 1 : 2, A_TOKEN = SLICE / 2 / MIXED;
constexpr int COLLAPSERS = WARPS - (HEAD || LOGITS ? 0 : 1);
constexpr int WORDS = TT * ((SLICE + 63) / 64) <= COLLAPSERS ? 1 : TT * ((SLICE + 127) / 128) <= COLLAPSERS ? 2 : 4;
constexpr int PARTS = (SLICE + 64 * WORDS - 1) / (64 * WORDS);  // warps that share a token in step 3
static_assert(H % 8 == 0 && TT * A_TOKEN <= THREADS && TT * PARTS <= COLLAPSERS && CLUSTER <= WARPS, "");

template <int Words>
struct alignas(4 * Words) Vector {
  u32 word[Words];
};

struct Shared {
  float parts[COLUMN_GROUPS][SUMS];      // of this block
  float all[CLUSTER][SUMS];              // of the cluster
  float squares[TT][CLUSTER * PARTS];
  alignas(16) float comb[TT][N * N];     // or its logits
  float4 last[KEPT > 0 ? KEPT : 1][32];  // weights that the last warp has not asked for itself
  alignas(16) float norm[SLICE];
  float base[ROWS], scale[3];
  u64 arrived[2];                        // the sums, the squares
};

// What row `lane` of fn, or the square, gives for token t over all blocks.
DEVICE float total(const Shared& shared, int t) {
  const int lane = threadIdx.x & 31;
  float sum[4] = {};
  if (lane <= ROWS)
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) sum[r % 4] += shared.all[r][t * STRIDE + lane];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// A lane's row of a token's logits, which another kernel may still be writing, as it is in the L2.
DEVICE void load_row(const float* from, float (&x)[N]) {
  if constexpr (N == 4) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(from));
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x[j]) : "l"(from + j));
  }
}

// The inverse root mean square of token t's streams; `sum` as total() gave it.
DEVICE float inverse_rms(float sum, float eps) { return rsqrtf(__shfl_sync(~0u, sum, ROWS) * (1.f / K) + eps); }

KERNEL __launch_bounds__(THREADS, (QUADS - KEPT) * THREADS * 16 <= 96 * 1024 ? 2 : 1)
    hc_mix(const void* y, const u32* streams, const float* post, const float* logits, const float* __restrict__ fn,
           const float* __restrict__ base, const float* __restrict__ scale, const float* __restrict__ norm_weight, float eps,
           float hc_eps, int iterations, int tokens, u32* mixed_out, u32* x_out, float* post_out,
           float* comb_out) {  // with LOGITS its logits
  extern __shared__ __align__(16) unsigned char memory[];
  float4(*weights)[THREADS] = reinterpret_cast<float4(*)[THREADS]>(memory);             // [QUADS - KEPT][THREADS]
  u16(*mixed)[CHUNKS * 128] = reinterpret_cast<u16(*)[CHUNKS * 128]>(weights + QUADS - KEPT);  // [TT][columns]
  __shared__ Shared shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cluster_rank();
  const i64 token0 = static_cast<i64>(blockIdx.x / CLUSTER) * TT;
  const bool makes_comb = LOGITS && warp == WARPS - 1;
  let_next_kernel_start();

  const int column_group = warp % COLUMN_GROUPS, first_row = warp / COLUMN_GROUPS * RPW;
  float4 kept[KEPT > 0 ? KEPT : 1];
  // Where quad q of a warp's weights comes from; null if there is none.
  auto source = [&](int of, int q) {
    const int chunk = q / RPW * COLUMN_GROUPS + of % COLUMN_GROUPS, row = of / COLUMN_GROUPS * RPW + q % RPW;
    const int local = chunk * 128 + lane * 4, channel = rank * SLICE + local % SLICE;
    return local < COLUMNS && channel < H && row < ROWS ? fn + static_cast<i64>(row) * K + local / SLICE * H + channel : nullptr;
  };
  // Also a copy of nothing needs an address inside: a memory checker does not know that it reads nothing.
  auto copy = [&](float4* to, const float* from) { copy_16(shared_address(to), from ? from : fn, from ? 16 : 0); };
  if (makes_comb) {
    // Of the cluster's tokens, lanes 4 t .. 4 t + 3 have the one with number t, or the last.
    const int t = static_cast<int>(min(static_cast<i64>(min(lane / 4, TT - 1)), tokens - 1 - token0));
    const float* const from = logits + (token0 + t) * N * N + min(lane % 4, N - 1) * N;
    float given[N], x[N];
    load_row(from, given);
#pragma unroll 1
    for (bool waited = false;; waited = true) {
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = given[j];
      make_comb(x, hc_eps, iterations);
      if (lane / 4 == t && lane % 4 < N) store(&shared.comb[t][lane % 4 * N], x);
      if (waited) break;
      wait_for_previous_kernel();
      load_row(from, x);
      bool same = true;
#pragma unroll
      for (int j = 0; j < N; ++j) same = same && __float_as_uint(x[j]) == __float_as_uint(given[j]), given[j] = x[j];
      if (__all_sync(~0u, same)) break;
    }
  } else {
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const float* from = source(warp, q);
      if (q < KEPT) kept[q] = from ? __ldg(reinterpret_cast<const float4*>(from)) : make_float4(0.f, 0.f, 0.f, 0.f);
      else copy(&weights[q - KEPT][threadIdx.x], from);
    }
    if (LOGITS)  // and those of the last warp
#pragma unroll 1
      for (int q = warp; q < QUADS; q += WARPS - 1)
        copy(q < KEPT ? &shared.last[q][lane] : &weights[q - KEPT][THREADS - 32 + lane], source(WARPS - 1, q));
  }
  const u32 arrived[2] = {shared_address(&shared.arrived[0]), shared_address(&shared.arrived[1])};
  if (threadIdx.x == 0) {
    barrier_init(arrived[0], 1);
    barrier_init(arrived[1], 1);
    barrier_init_done();
    barrier_arrive_expecting(arrived[0], CLUSTER * SUMS * sizeof(float));
    barrier_arrive_expecting(arrived[1], CLUSTER * PARTS * TT * sizeof(float));
  }
  cluster_arrive_relaxed();
  if (threadIdx.x < ROWS) copy_4(shared_address(&shared.base[threadIdx.x]), base + threadIdx.x);
  if (threadIdx.x < (HEAD ? 1 : 3)) copy_4(shared_address(&shared.scale[threadIdx.x]), scale + threadIdx.x);
  if (threadIdx.x < SLICE / 4 && rank * SLICE + threadIdx.x * 4 < H)
    copy_16(shared_address(&shared.norm[threadIdx.x * 4]), norm_weight + rank * SLICE + threadIdx.x * 4, 16);
  for (int i = threadIdx.x; i < TT * (CHUNKS * 128 - COLUMNS); i += THREADS)
    mixed[i % TT][COLUMNS + i / TT] = 0;
  if (!makes_comb) wait_for_previous_kernel();

  {
    // All that the kernel before wrote is on its way at once.
    const int t = threadIdx.x / A_TOKEN, local = threadIdx.x % A_TOKEN, v = rank * A_TOKEN + local;
    const i64 token = token0 + t, at = token * N * (H / 2 / MIXED) + v;
    const bool real = threadIdx.x < TT * A_TOKEN && token < tokens && v < H / 2 / MIXED;
    Vector<MIXED> before[N] = {}, after[N] = {};
    float2 update[MIXED];
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (real) before[n] = reinterpret_cast<const Vector<MIXED>*>(streams)[at + n * (H / 2 / MIXED)];
    alignas(16) float to[N] = {}, from[N * N] = {};
    if (LOGITS && real) {
#pragma unroll
      for (int i = 0; i < MIXED; ++i) update[i] = load_pair(y, (token * (H / 2 / MIXED) + v) * MIXED + i);
      load(post + token * N, to);
    }
    cluster_wait();  // every block of the cluster has its barriers
    if (LOGITS) __syncthreads();  // comb is made
    if (LOGITS && real) {
      load(shared.comb[t], from);
#pragma unroll
      for (int i = 0; i < MIXED; ++i) {
        u32 old[N], fresh[N];
#pragma unroll
        for (int n = 0; n < N; ++n) old[n] = before[n].word[i];
        mix(update[i], old, to, from, fresh);
#pragma unroll
        for (int n = 0; n < N; ++n) after[n].word[i] = fresh[n];
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!LOGITS) after[n] = before[n];
      else if (!HEAD && real) reinterpret_cast<Vector<MIXED>*>(mixed_out)[at + n * (H / 2 / MIXED)] = after[n];
      if (threadIdx.x < TT * A_TOKEN) reinterpret_cast<Vector<MIXED>*>(&mixed[t][n * SLICE])[local] = after[n];
    }
  }
  wait_for_copies();
  __syncthreads();  // the streams are mixed, and the last warp's weights are there
#pragma unroll
  for (int q = 0; q < KEPT; ++q)
    if (makes_comb) kept[q] = shared.last[q][lane];

#pragma unroll 1
  for (int begin = 0; begin < TT; begin += BATCH) {
    constexpr int COUNT = BATCH * (RPW + 1), PADDED = COUNT <= 4 ? 4 : COUNT <= 8 ? 8 : COUNT <= 16 ? 16 : 32;
    float acc[PADDED] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int chunk = s * COLUMN_GROUPS + column_group;
      if (STEPS * COLUMN_GROUPS > CHUNKS && chunk >= CHUNKS) break;
      if (BATCH == 4) __syncwarp();  // loads of the next step begun here would take registers that there are not
      float4 x[BATCH];
#pragma unroll
      for (int t = 0; t < BATCH; ++t) {
        const uint2 v = reinterpret_cast<const uint2*>(mixed[begin + t])[chunk * 32 + lane];
        x[t] = make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
        acc[t * (RPW + 1) + RPW] = dot4(x[t], x[t], acc[t * (RPW + 1) + RPW]);
      }
#pragma unroll
      for (int i = 0; i < RPW; ++i) {
        const int q = s * RPW + i;
        const float4 w = q < KEPT ? kept[q] : weights[q - KEPT][threadIdx.x];
#pragma unroll
        for (int t = 0; t < BATCH; ++t) acc[t * (RPW + 1) + i] = dot4(w, x[t], acc[t * (RPW + 1) + i]);
      }
    }
    const float sum = warp_sums(acc);
    const int index = reduced_index<PADDED>(), t = begin + index / (RPW + 1), i = index % (RPW + 1);
    if (lane % (32 / PADDED) == 0 && index < COUNT) {
      const int row = i < RPW ? first_row + i : ROWS;
      if (i < RPW ? row < ROWS : first_row == 0) shared.parts[column_group][t * STRIDE + row] = sum;
    }
  }
  __syncthreads();
  if (warp < CLUSTER) {  // warp w sends this block's sums to block w
    const u32 to = peer_address(shared_address(shared.all[rank]), warp), barrier = peer_address(arrived[0], warp);
    for (int quad = lane; quad < SUMS / 4; quad += 32) {
      float sum[4] = {};
#pragma unroll
      for (int g = 0; g < COLUMN_GROUPS; ++g) {
        const float4 part = reinterpret_cast<const float4*>(shared.parts[g])[quad];
        sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
      }
      peer_store_async(to + quad * 16, sum, barrier);
    }
  }

  const int row = lane < ROWS ? lane : 0;
  const float row_scale = shared.scale[HEAD ? 0 : scale_of(row)], row_base = shared.base[row];
  if (!HEAD && !LOGITS && warp == WARPS - 1) {
    barrier_wait_cluster(arrived[0], 0);
    for (int t = rank; t < TT; t += CLUSTER) {
      const float sum = total(shared, t), r = inverse_rms(sum, eps);
      if (lane >= 2 * N && lane < ROWS) shared.comb[t][lane - 2 * N] = sum * r * row_scale + row_base;
    }
    __syncwarp();
    const int t = rank + lane / 4 * CLUSTER, row = min(lane % 4, N - 1) * N;
    float x[N];
    load(&shared.comb[min(t, TT - 1)][row], x);
    make_comb(x, hc_eps, iterations);
    if (t < TT && token0 + t < tokens && lane % 4 < N) store(comb_out + (token0 + t) * N * N + row, x);
  }
  const int t = warp / PARTS, part = warp % PARTS;
  int local = part * 32 + lane;
  asm volatile("" : "+r"(local));  // else step 1's addresses, which may be the same, are kept over the products
  const int v = rank * (SLICE / 2 / WORDS) + local;
  if (t >= TT) return;
  const bool exists = local < SLICE / 2 / WORDS && v < H / 2 / WORDS;
  Vector<WORDS> from[N] = {};
  float2 weight[WORDS] = {};
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (exists) from[n] = reinterpret_cast<const Vector<WORDS>*>(&mixed[t][n * SLICE])[local];
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    if (exists) weight[i] = reinterpret_cast<const float2*>(shared.norm)[local * WORDS + i];
  barrier_wait_cluster(arrived[0], 0);
  const float sum = total(shared, t), logit = sum * inverse_rms(sum, eps) * row_scale + row_base, gate = sigmoid(logit);
  if (!HEAD && rank == 0 && part == 0 && token0 + t < tokens && lane >= N && lane < ROWS) {
    if (lane < 2 * N) post_out[(token0 + t) * N + lane - N] = 2.f * gate;
    else if (LOGITS) comb_out[(token0 + t) * N * N + lane - 2 * N] = logit;
  }
  float2 collapsed[WORDS] = {};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float pre = __shfl_sync(~0u, gate, n) + hc_eps;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      collapsed[i].x = fmaf(pre, bf16_low(from[n].word[i]), collapsed[i].x);
      collapsed[i].y = fmaf(pre, bf16_high(from[n].word[i]), collapsed[i].y);
    }
  }
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    collapsed[i] = make_float2(round_bf16(collapsed[i].x), round_bf16(collapsed[i].y));
    square = fmaf(collapsed[i].x, collapsed[i].x, fmaf(collapsed[i].y, collapsed[i].y, square));
  }
  square = warp_sum(square);
  if (lane < CLUSTER)
    peer_store_async(peer_address(shared_address(&shared.squares[t][rank * PARTS + part]), lane), square,
                     peer_address(arrived[1], lane));
  barrier_wait_cluster(arrived[1], 0);
  square = 0.f;
#pragma unroll
  for (int i = 0; i < CLUSTER * PARTS; i += 32)
    if (i + lane < CLUSTER * PARTS) square += shared.squares[t][i + lane];
  const float rms = rsqrtf(warp_sum(square) * (1.f / H) + eps);
  if (!exists || token0 + t >= tokens) return;
  Vector<WORDS> x;
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    x.word[i] = pack_bf16(collapsed[i].x * rms * weight[i].x, collapsed[i].y * rms * weight[i].y);
  reinterpret_cast<Vector<WORDS>*>(x_out)[(token0 + t) * (H / 2 / WORDS) + v] = x;
}
