// attend: one query token's heads over window rows and compressed entries, read in place (see ../attend.py). attend_heads.cu does
// it for several tokens or many keys on sm_90a.
//
// Bytes a token: N keys of DIM x 2, or 584 compact, once from memory (640 keys: 0.66 MB, 0.15 us at 4.25 TB/s), q and out 64 KB
// each at 64 heads. At one token everything is latency: launch, picks, rows, two products, exchange.
//
// A cluster of CLUSTER CTAs has one token and HB heads; of CLUSTERS clusters as many take part as have MANY keys a CTA. Key j
// (the window, newest first, then the entries) goes to CTA j % n of n. In a CTA some warps fetch tiles of KT key rows, 16 rows a
// barrier; the others multiply. Keys are the 16 rows of a tensor-core tile and heads its 8 columns, so a CTA can have as few as 8
// heads. Every warp owns a slice of DIM, for both products: logits are summed over slices in shared memory, and of the output a
// warp holds its own channels, which it sends at the end to the CTA that adds them up, in rank order; of several clusters the
// last one to come there adds up all, in their order.
//
// What the step does not write while this kernel may already be running is read before the wait for the previous kernel:
// positions, slots, and rows of earlier steps, whose writers ended long before.
//
// Measured on an H200, in a CUDA graph, one launch after another, rows cold, 64 heads, plain / compact rows:
//   1 token: 160 keys 3.8 / 4.8 us, 640 keys 5.8 / 7.4, 1152 keys 8.0 / 12.5; 2 tokens, 640 keys 7.6 / 8.8; 4 tokens 11.1 / 13.9;
//   8 tokens, 160 keys 6.2 / 7.7
// One SM takes in 25 to 30 bytes a clock, by cp.async, bulk copies and plain loads alike; about a quarter of a launch is that,
// the rest are some twenty waits for one another. Widening compact rows takes longer than their fewer bytes save. That a block of
// the next kernel, wo_a, finds room beside one of these (at up to 72 registers a thread) does not show in the time of a layer: what
// it fetches early comes by the same way as the rows.
#include "attend_keys.cuh"

// Given: DIM, CODED (of compact rows), NH (tiles of 8 heads), WD (warps over DIM), KT (keys a tile), STAGES, CLUSTER, CLUSTERS,
// FETCHING_WARPS, SHARED.
constexpr int CONSUMERS = 32 * WD, HB = 8 * NH;
constexpr int SLICE = DIM / WD, DT = SLICE / 16;       // channels of a warp, in tiles of 16
constexpr int TILES = DIM / 16, PER = (TILES + CLUSTER - 1) / CLUSTER;  // tiles of 16 channels that a CTA sums up
constexpr int ROW = DIM * 2 + 16;  // bytes of a row in shared memory: eight rows fall into different banks; then its scales
constexpr int PART = KT + 4, PROB = KT + 8;            // likewise
constexpr int HEADS_PER_WARP = (HB + WD - 1) / WD, PAIRS_PER_LANE = (KT + 63) / 64;
constexpr bool WHOLE = STAGES == 1 && KT <= 32;        // small tiles are taken as if full: loops of a known length
constexpr bool AT_ONCE = WHOLE || CODED;               // a tile's place is free when all of it is, not 16 rows after another
constexpr int CHAINS = NH == 1 ? 2 : 1;                // independent sums, to hide the latency of mma
constexpr int NEAR_ROWS = 16384;                       // rows that are brought to the L2 ahead of time, for all tokens
constexpr int MANY = 160, COUNTERS = CLUSTERS > 1 ? 1024 : 1;
constexpr float LOG2E = 1.4426950408889634f;

DEVICE constexpr int max2(int a, int b) { return a > b ? a : b; }
constexpr int AT_PART = STAGES * KT * ROW;             // after the keys; float [WD][HB][PART], later float4 [CLUSTER][PER][NH][32]
constexpr int AT_PROB = AT_PART + max2(WD * HB * PART * 4, CLUSTER * PER * NH * 512);
constexpr int AT_STATS = AT_PROB + HB * PROB * 2;      // float2 [CLUSTER][HB]
constexpr int AT_TURN = AT_STATS + CLUSTER * HB * 8;   // float2 [DIM / 2]
constexpr int AT_SINK = AT_TURN + DIM * 4;
constexpr int AT_CORR = AT_SINK + HB * 4;
constexpr int AT_BIAS = AT_CORR + HB * 4;              // of each key: 0, or -inf for none
constexpr int AT_BARRIER = AT_BIAS + STAGES * KT * 4;
static_assert(AT_BARRIER + 8 * (1 + 2 * STAGES * SUBS) <= SHARED, "SHARED is too small");
static_assert(DIM % (16 * WD) == 0, "tile shape");

struct Layout {
  static DEVICE u32 piece(int row, int piece) { return row * ROW + piece * 16; }
  static DEVICE u32 scales(int row) { return row * ROW + DIM * 2; }
  static DEVICE int subs(int rows) { return WHOLE ? SUBS : (min(KT, rows) + 15) / 16; }
};

// The sum of `count` parts of two heads, `stride` apart: values of the first head (x, z) and the second (y, w). A part's statistics
// are maximum and sum of weights of the first head, then of the second, in units of log2; so are `all`, `bottom` included.
template <int Parts>
DEVICE float4 add_parts(const float4* parts, int stride, const float4* stats, int stats_stride, int count, float2 bottom, float4* all) {
  float4 part[Parts];
  float2 top = bottom;
#pragma unroll
  for (int c = 0; c < Parts; ++c) {
    part[c] = c < count ? stats[c * stats_stride] : make_float4(NEG_INF, 0.f, NEG_INF, 0.f);
    top.x = fmaxf(top.x, part[c].x), top.y = fmaxf(top.y, part[c].z);
  }
  const float2 zero = make_float2(top.x == NEG_INF ? 0.f : top.x, top.y == NEG_INF ? 0.f : top.y);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  *all = make_float4(top.x, fast_exp2(bottom.x - zero.x), top.y, fast_exp2(bottom.y - zero.y));
#pragma unroll
  for (int c = 0; c < Parts; ++c)
    if (c < count) {
      const float4 values = parts[c * stride];
      const float first = fast_exp2(part[c].x - zero.x), second = fast_exp2(part[c].z - zero.y);
      all->y += first * part[c].y, all->w += second * part[c].w;
      sum.x += first * values.x, sum.y += second * values.y, sum.z += first * values.z, sum.w += second * values.w;
    }
  return sum;
}

__device__ u32 arrivals[COUNTERS];  // of clusters, for each CTA of a cluster

KERNEL __launch_bounds__(CONSUMERS + FETCHERS, NH == 1 && (WHOLE || CODED) ? 2 : 1)
attend(const bf16* q, const bf16* kv, const u8* ring, const u8* entries, const int* indices, const float* __restrict__ sinks,
       const float* __restrict__ inv_freq, const i64* __restrict__ positions, const i64* __restrict__ slots, bf16* out, int tokens,
       int heads, int window, int blocks, int picks, int rate, int pairs, float scale, int least, int most,
       float* left_over) {
  extern __shared__ __align__(128) unsigned char memory[];
  let_next_kernel_start();
  const u32 base = shared_address(memory);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const u32 rank = cluster_rank();
  const int cluster = blockIdx.x / CLUSTER % CLUSTERS;
  const int groups = (heads + HB - 1) / HB, work = blockIdx.x / (CLUSTER * CLUSTERS), group = work % groups;
  const i64 token = work / groups;
  const int head0 = group * HB, active = min(HB, heads - head0);
  Keys keys(kv, ring, entries, indices, positions, slots, window, blocks, picks, rate, token);
  const int used = max(1, min(CLUSTERS, (keys.total + CLUSTER * MANY - 1) / (CLUSTER * MANY)));  // clusters that have keys
  keys.divide(cluster * CLUSTER + rank, used * CLUSTER);
  if (keys.slot < 0 || keys.total < least || keys.total > most || cluster >= used) {
    wait_for_previous_kernel();
    if (keys.slot >= 0 || least > 0 || cluster > 0) return;
    u32* rows = reinterpret_cast<u32*>(out + (token * heads + head0) * DIM);
    for (int i = rank * blockDim.x + tid; i < active * DIM / 2; i += CLUSTER * blockDim.x) rows[i] = 0;
    return;
  }

  const u32 arrived = base + AT_BARRIER;  // the parts of the sum that this CTA makes
  auto full = [&](int sub) { return arrived + 8 + 8 * sub; };
  auto empty = [&](int sub) { return arrived + 8 + 8 * (STAGES * SUBS + sub); };
  float* const bias = reinterpret_cast<float*>(memory + AT_BIAS);
  const int own_tiles = TILES % CLUSTER ? max(0, min(PER, TILES - (int)rank * PER)) : PER;
  if (tid == 0) {
    barrier_init(arrived, 1);
    for (int s = 0; s < STAGES * SUBS; ++s) barrier_init(full(s), FULL_ARRIVALS), barrier_init(empty(s), WD);
    barrier_init_done();
    barrier_arrive_expecting(arrived, CLUSTER * (own_tiles * NH * 512 + HB * 8));
  }
  __syncthreads();

  const int mine = keys.mine, tiles = (mine + KT - 1) / KT;
  float m[HEADS_PER_WARP], l[HEADS_PER_WARP];  // of heads warp, warp + WD, ..., in units of log2; l is this lane's share
  float o[DT][NH][4] = {};
#pragma unroll
  for (int i = 0; i < HEADS_PER_WARP; ++i) m[i] = NEG_INF, l[i] = 0.f;

  if (warp >= WD) {  // --- the fetching warps ---
    Fetch<Layout> fetch{keys, memory, bias, full(0), empty(0), tiles};
    fetch.run(group, groups, NEAR_ROWS / tokens);
    cluster_arrive_relaxed();
  } else {  // --- the multiplying warps ---
    for (int i = tid; i < pairs; i += CONSUMERS) {
      float2* turn = reinterpret_cast<float2*>(memory + AT_TURN) + i;
      rope_cos_sin(keys.position, inv_freq[i], &turn->x, &turn->y);
    }
    for (int h = tid; h < active; h += CONSUMERS) reinterpret_cast<float*>(memory + AT_SINK)[h] = sinks[head0 + h] * LOG2E;
    wait_for_previous_kernel();
    u32 query[NH][DT][2];
#pragma unroll
    for (int n = 0; n < NH; ++n) {
      const u32* row = reinterpret_cast<const u32*>(q + (token * heads + head0 + n * 8 + g) * DIM + warp * SLICE) + t;
#pragma unroll
      for (int k = 0; k < DT; ++k) {
        query[n][k][0] = n * 8 + g < active ? row[k * 8] : 0;
        query[n][k][1] = n * 8 + g < active ? row[k * 8 + 4] : 0;
      }
    }

    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % STAGES, count = WHOLE ? KT : (min(KT, mine - tile * KT) + 15) / 16 * 16;
      const u32 rows = base + stage * KT * ROW + warp * SLICE * 2;
      float* part = reinterpret_cast<float*>(memory + AT_PART) + (warp * HB + 2 * t) * PART + g;
      for (int key = 0; key < count; key += 16, part += 16) {  // logits of this slice
        barrier_wait(full(stage * SUBS + key / 16), (tile / STAGES) & 1);
        const u32 at = rows + (key + (lane & 15)) * ROW + (lane >> 4) * 16;
        float acc[CHAINS][NH][4] = {};
        u32 a[DT][4];
#pragma unroll
        for (int k = 0; k < DT; ++k) load_matrices(a[k], at + k * 32);
#pragma unroll
        for (int k = 0; k < DT; ++k)
#pragma unroll
          for (int n = 0; n < NH; ++n) mma_bf16(acc[k % CHAINS][n], a[k], query[n][k][0], query[n][k][1]);
#pragma unroll
        for (int n = 0; n < NH; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float sum = CHAINS == 1 ? acc[0][n][c] : acc[0][n][c] + acc[CHAINS - 1][n][c];
            part[(n * 8 + (c & 1)) * PART + (c >> 1) * 8] = sum;
          }
      }
      barrier(1, CONSUMERS);
      // Softmax, running over tiles: a warp a head, two neighbouring keys a lane.
#pragma unroll
      for (int i = 0; i < HEADS_PER_WARP; ++i) {
        const int head = warp + i * WD;
        if (HB % WD && head >= HB) break;
        float2 x[PAIRS_PER_LANE];
        float top = m[i];
#pragma unroll
        for (int u = 0; u < PAIRS_PER_LANE; ++u) {
          const int key = (u * 32 + lane) * 2;
          x[u] = make_float2(NEG_INF, NEG_INF);
          if (key < count) {
            const float* p = reinterpret_cast<const float*>(memory + AT_PART) + head * PART + key;
            float2 sum = make_float2(0.f, 0.f);
#pragma unroll
            for (int w = 0; w < WD; ++w) {
              const float2 v = *reinterpret_cast<const float2*>(p + w * HB * PART);
              sum.x += v.x;
              sum.y += v.y;
            }
            const float2 none = *reinterpret_cast<const float2*>(bias + stage * KT + key);
            x[u] = make_float2(fmaf(sum.x, scale, none.x), fmaf(sum.y, scale, none.y));
          }
          top = fmaxf(top, fmaxf(x[u].x, x[u].y));
        }
        top = warp_max(top);
        const float zero = top == NEG_INF ? 0.f : top, corr = fast_exp2(m[i] - zero);
        m[i] = top;
        l[i] *= corr;
#pragma unroll
        for (int u = 0; u < PAIRS_PER_LANE; ++u) {
          const int key = (u * 32 + lane) * 2;
          const u32 p = pack_bf16(fast_exp2(x[u].x - zero), fast_exp2(x[u].y - zero));
          l[i] += bf16_low(p) + bf16_high(p);
          if (key < count) reinterpret_cast<u32*>(memory + AT_PROB + head * PROB * 2)[u * 32 + lane] = p;
        }
        if (lane == 0) reinterpret_cast<float*>(memory + AT_CORR)[head] = corr;
      }
      barrier(1, CONSUMERS);
      // Nobody reads logits any more: their place may take the parts of the sum. (Relaxed: the reads have ended, since what they
      // gave has been used, and to release anything a thread would wait for all that it has asked of global memory.)
      if (tile == tiles - 1) cluster_arrive_relaxed();
      if (tile > 0) {
#pragma unroll
        for (int n = 0; n < NH; ++n) {
          const float2 corr = *reinterpret_cast<const float2*>(memory + AT_CORR + (n * 8 + 2 * t) * 4);
#pragma unroll
          for (int d = 0; d < DT; ++d) o[d][n][0] *= corr.x, o[d][n][1] *= corr.y, o[d][n][2] *= corr.x, o[d][n][3] *= corr.y;
        }
      }
#pragma unroll
      for (int key = 0; key < KT; key += 16) {
        if (key >= count) break;
        u32 p[NH][2], a[DT][4];
#pragma unroll
        for (int n = 0; n < NH; ++n) {
          const u32* row = reinterpret_cast<const u32*>(memory + AT_PROB + (n * 8 + g) * PROB * 2) + key / 2 + t;
          p[n][0] = row[0], p[n][1] = row[4];
        }
        const u32 at = rows + (key + (lane & 7) + (lane >> 4) * 8) * ROW + ((lane >> 3) & 1) * 16;
#pragma unroll
        for (int d = 0; d < DT; ++d) load_matrices_transposed(a[d], at + d * 32);
#pragma unroll
        for (int d = 0; d < DT; ++d)
#pragma unroll
          for (int n = 0; n < NH; ++n) mma_bf16(o[d][n], a[d], p[n][0], p[n][1]);
        if (!AT_ONCE && tile < tiles - 1) {
          __syncwarp();
          if (lane == 0) barrier_arrive(empty(stage * SUBS + key / 16));
        }
      }
      if (AT_ONCE && tile < tiles - 1) {
        __syncwarp();
        if (lane == 0)
          for (int s = 0; s < SUBS; ++s) barrier_arrive(empty(s));
      }
    }
    if (tiles == 0) cluster_arrive_relaxed();
  }

  // --- the sum over the cluster: each CTA gets its channels from all ---
  __syncwarp();
  cluster_wait();  // every CTA of the cluster is done with its logits
  if (warp < WD) {
#pragma unroll
    for (int d = 0; d < DT; ++d) {
      const int tile = warp * DT + d;
      const u32 peer = tile / PER, to = peer_address(base + AT_PART, peer) + (rank * PER + tile % PER) * NH * 512 + lane * 16;
      const u32 barrier = peer_address(arrived, peer);
#pragma unroll
      for (int n = 0; n < NH; ++n) peer_store_async(to + n * 512, o[d][n], barrier);
    }
#pragma unroll
    for (int i = 0; i < HEADS_PER_WARP; ++i) {
      const int head = warp + i * WD;
      const float sum = warp_sum(l[i]);
      if (lane < CLUSTER && head < HB)
        peer_store_async(peer_address(base + AT_STATS + (rank * HB + head) * 8, lane), make_float2(m[i], sum),
                         peer_address(arrived, lane));
    }
  }
  // Channel g of heads 2t and 2t + 1, and channel g + 8, over the sum of weights. Lanes of neighbouring channels swap one head
  // for the other.
  auto store_sum = [&](int f, float4 sums, float4 all) {
    const int n = f % NH, head = n * 8 + 2 * t;
    const bool odd = g & 1;
    const float share = fast_reciprocal(odd ? all.w : all.y);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float first = half ? sums.z : sums.x, second = half ? sums.w : sums.y;
      const float keep = odd ? second : first, give = odd ? first : second;
      const float other = __shfl_xor_sync(~0u, give, 4);
      float low = (odd ? other : keep) * share, high = (odd ? keep : other) * share;
      const int pair = ((rank * PER + f / NH) * 16 + half * 8 + g) / 2, turned = pair - (DIM / 2 - pairs);
      if (turned >= 0) {
        const float2 turn = reinterpret_cast<const float2*>(memory + AT_TURN)[turned];
        const float x = low * turn.x + high * turn.y;
        high = high * turn.x - low * turn.y;
        low = x;
      }
      if (head + odd < active) reinterpret_cast<u32*>(out + (token * heads + head0 + head + odd) * DIM)[pair] = pack_bf16(low, high);
    }
  };
  barrier_wait(arrived, 0);
  const float2* const sinks_here = reinterpret_cast<const float2*>(memory + AT_SINK);
  const float4* const stats_here = reinterpret_cast<const float4*>(memory + AT_STATS) + t;
  const float4* const parts_here = reinterpret_cast<const float4*>(memory + AT_PART) + lane;
  const int place = work * CLUSTER + rank;
  float4* const left = reinterpret_cast<float4*>(left_over) + (i64)place * CLUSTERS * (PER * NH * 32 + HB / 2) + lane;
  float4* const left_stats = left - lane + CLUSTERS * PER * NH * 32 + t;
  for (int f = warp; f < own_tiles * NH; f += WD + FETCHERS / 32) {
    const int n = f % NH;
    const float2 bottom = used == 1 ? sinks_here[n * 4 + t] : make_float2(NEG_INF, NEG_INF);
    float4 all;
    const float4 sum = add_parts<CLUSTER>(parts_here + f * 32, PER * NH * 32, stats_here + n * 4, HB / 2, CLUSTER, bottom, &all);
    if (used == 1) {
      store_sum(f, sum, all);
    } else {
      left[(cluster * PER * NH + f) * 32] = sum;
      if (f == n && g == 0) left_stats[cluster * (HB / 2) + n * 4] = all;
    }
  }
  if (used == 1 || own_tiles == 0) return;
  u32* const is_last = reinterpret_cast<u32*>(memory + AT_CORR);
  __threadfence();
  __syncthreads();
  if (warp == 0) {
    const bool last = last_warp(&arrivals[place], used);
    if (lane == 0) *is_last = last;
  }
  __syncthreads();
  if (!*is_last) return;
  for (int f = warp; f < own_tiles * NH; f += WD + FETCHERS / 32) {
    const int n = f % NH;
    float4 all;
    const float4 sum = add_parts<CLUSTERS>(left + f * 32, PER * NH * 32, left_stats + n * 4, HB / 2, used, sinks_here[n * 4 + t], &all);
    store_sum(f, sum, all);
  }
}
