// attend: one query token's heads over window rows and compressed entries, read in place (see ../attend.py).
//
// Bytes a token: N keys x DIM x 2 once from memory (640 keys x 1 KB = 0.66 MB: 0.15 us at 4.25 TB/s; 8192: 8.4 MB, 2 us),
// q and out 64 KB each at 64 heads. At one token everything is latency: launch, picks, rows, two products, exchange.
//
// A cluster of CLUSTER CTAs has one token and HB heads. Its keys (the window, newest first, then the entries) go to the CTAs
// in turn: key j to CTA j % CLUSTER. In a CTA four warps fetch tiles of KT key rows, 16 rows a barrier; the others multiply.
// Keys are the 16 rows of a tensor-core tile and heads its 8 columns, so a CTA can have as few as 8 heads. Every warp owns a
// slice of DIM, for both products: logits are summed over slices in shared memory, and of the output a warp holds its own
// channels, which it sends at the end to the CTA that adds them up, in rank order.
//
// What the step does not write while this kernel may already be running (positions, slots) is read before the wait for the
// previous kernel, and rows that will be needed are brought to the L2.
//
// Measured on an H200, in a CUDA graph, one launch after another, rows cold: 64 heads and 640 keys 6.3 us (8 tokens 15.4, 32
// tokens 25.9), 160 keys 4.4, 8320 keys 34.8. Rows that lie in the L2 already save 0.1 us: one SM takes in at most 25 to 30
// bytes a clock, by cp.async, bulk copies and plain loads alike, so 80 rows are about 2 us of the 6.3.
#include "hopper.cuh"

// Given: DIM, NH (tiles of 8 heads), WD (warps over DIM), KT (keys a tile), STAGES, CLUSTER, SHARED.
constexpr int CONSUMERS = 32 * WD, FETCHERS = 128, HB = 8 * NH;
constexpr int SLICE = DIM / WD, DT = SLICE / 16;       // channels of a warp, in tiles of 16
constexpr int TILES = DIM / 16, PER = (TILES + CLUSTER - 1) / CLUSTER;  // tiles of 16 channels that a CTA sums up
constexpr int SUBS = KT / 16;                          // barriers of a tile
constexpr int ROW = DIM * 2 + 16;                      // bytes of a row in shared memory: eight rows fall into different banks
constexpr int PART = KT + 4, PROB = KT + 8;            // likewise
constexpr int HEADS_PER_WARP = (HB + WD - 1) / WD, PAIRS_PER_LANE = (KT + 63) / 64;
constexpr int CHAINS = NH == 1 ? 2 : 1;                // independent sums, to hide the latency of mma
constexpr int NEAR_ROWS = 16384;                       // rows that are brought to the L2 ahead of time, for all tokens
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
static_assert(DIM % (16 * WD) == 0 && KT % 16 == 0 && KT <= 128, "tile shape");

KERNEL __launch_bounds__(CONSUMERS + FETCHERS, 1)
attend(const bf16* q, const bf16* kv, const bf16* ring, const bf16* entries, const int* indices, const float* __restrict__ sinks,
       const float* __restrict__ inv_freq, const i64* __restrict__ positions, const i64* __restrict__ slots, bf16* out, int tokens,
       int heads, int window, int blocks, int picks, int rate, int pairs, float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  let_next_kernel_start();
  const u32 base = shared_address(memory);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const u32 rank = cluster_rank();
  const int groups = (heads + HB - 1) / HB, work = blockIdx.x / CLUSTER, group = work % groups;
  const i64 token = work / groups, slot = slots[token];
  const int position = (int)positions[token], head0 = group * HB, active = min(HB, heads - head0);
  if (slot < 0) {
    wait_for_previous_kernel();
    u32* rows = reinterpret_cast<u32*>(out + (token * heads + head0) * DIM);
    for (int i = rank * blockDim.x + tid; i < active * DIM / 2; i += CLUSTER * blockDim.x) rows[i] = 0;
    return;
  }

  const u32 arrived = base + AT_BARRIER;  // the parts of the sum that this CTA makes
  auto full = [&](int sub) { return arrived + 8 + 8 * sub; };
  auto empty = [&](int sub) { return arrived + 8 + 8 * (STAGES * SUBS + sub); };
  float* const bias = reinterpret_cast<float*>(memory + AT_BIAS);
  const int own_tiles = max(0, min(PER, TILES - (int)rank * PER));
  if (tid == 0) {
    barrier_init(arrived, 1);
    for (int s = 0; s < STAGES * SUBS; ++s) barrier_init(full(s), FETCHERS + FETCHERS / 32), barrier_init(empty(s), WD);
    barrier_init_done();
    barrier_arrive_expecting(arrived, CLUSTER * (own_tiles * NH * 512 + HB * 8));
  }
  __syncthreads();

  const int visible = entries ? min((position + 1) / rate, blocks) : 0;
  const int total = window + (indices ? picks : visible);
  const int mine = total > (int)rank ? (total - (int)rank + CLUSTER - 1) / CLUSTER : 0, tiles = (mine + KT - 1) / KT;
  float m[HEADS_PER_WARP], l[HEADS_PER_WARP];  // of heads warp, warp + WD, ..., in units of log2; l is this lane's share
  float o[DT][NH][4] = {};
#pragma unroll
  for (int i = 0; i < HEADS_PER_WARP; ++i) m[i] = NEG_INF, l[i] = 0.f;

  if (warp >= WD) {  // --- the fetching warps ---
    const int fetcher = warp - WD;
    // The row of key j: null if there is none. `entry` is its pick, if it comes from the list.
    auto row_of = [&](int j, int entry) -> const bf16* {
      if (j >= window) return entry >= 0 && entry < visible ? entries + (slot * blocks + entry) * DIM : nullptr;
      if (j > position) return nullptr;
      const i64 row = token - j;
      if (row >= 0 && slots[row] == slot && positions[row] == position - j) return kv + row * DIM;
      return ring + (slot * window + (position - j) % window) * DIM;
    };
    // The head groups share this out among them.
    const int near = min(indices ? min(window, total) : total, NEAR_ROWS / tokens);
    for (int i = (tid - CONSUMERS) * groups + group; i * CLUSTER + (int)rank < near; i += FETCHERS * groups) {
      const int j = i * CLUSTER + rank;
      const bf16* row = row_of(j, j - window);
      if (row) prefetch_to_l2(row, DIM * 2);
    }
    // Of 16 rows a fetching warp has four; a lane knows the address of one row of one of up to eight times 16.
    const int own = (lane >> 2) * 16 + fetcher * 4 + (lane & 3);
    auto pick = [&](int tile) {
      const int j = (tile * KT + own) * CLUSTER + rank;
      if (own >= KT || j >= total || j < window) return -1;
      return indices ? indices[token * picks + j - window] : j - window;
    };
    wait_for_previous_kernel();
    int entry = pick(0);
    for (int tile = 0; tile < tiles; ++tile) {
      const int i = tile * KT + own, stage = tile % STAGES, subs = (min(KT, mine - tile * KT) + 15) / 16;
      const bf16* from = own < KT && i < mine ? row_of(i * CLUSTER + rank, entry) : nullptr;
      entry = pick(tile + 1);
      for (int s = 0; s < subs; ++s) {
        const int sub = stage * SUBS + s;
        if (tile >= STAGES) barrier_wait(empty(sub), (tile / STAGES - 1) & 1);
        if (lane >> 2 == s) bias[stage * KT + own] = from ? 0.f : NEG_INF;
        __syncwarp();
        if (lane == 0) barrier_arrive(full(sub));
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const u64 row = __shfl_sync(~0u, reinterpret_cast<u64>(from), s * 4 + r);
          const unsigned char* source = reinterpret_cast<const unsigned char*>(row ? row : reinterpret_cast<u64>(kv));
          const u32 to = base + (stage * KT + s * 16 + fetcher * 4 + r) * ROW;
#pragma unroll
          for (int c = lane; c < DIM / 8; c += 32) copy_16(to + c * 16, source + c * 16, row ? 16 : 0);  // or 16 zeros
        }
        barrier_arrive_after_copies(full(sub));
      }
    }
    __syncwarp();
    cluster_arrive();
  } else {  // --- the multiplying warps ---
    for (int i = tid; i < pairs; i += CONSUMERS) {
      float2* turn = reinterpret_cast<float2*>(memory + AT_TURN) + i;
      rope_cos_sin(position, inv_freq[i], &turn->x, &turn->y);
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
      const int stage = tile % STAGES, count = (min(KT, mine - tile * KT) + 15) / 16 * 16;
      const u32 rows = base + stage * KT * ROW + warp * SLICE * 2;
      float* part = reinterpret_cast<float*>(memory + AT_PART) + (warp * HB + 2 * t) * PART + g;
      for (int key = 0; key < count; key += 16, part += 16) {  // logits of this slice
        barrier_wait(full(stage * SUBS + key / 16), (tile / STAGES) & 1);
        const u32 at = rows + (key + (lane & 15)) * ROW + (lane >> 4) * 16;
        float acc[CHAINS][NH][4] = {};
#pragma unroll
        for (int k = 0; k < DT; ++k) {
          u32 a[4];
          load_matrices(a, at + k * 32);
#pragma unroll
          for (int n = 0; n < NH; ++n) mma_bf16(acc[k % CHAINS][n], a, query[n][k][0], query[n][k][1]);
        }
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
        const float zero = top == NEG_INF ? 0.f : top, corr = exp2f(m[i] - zero);
        m[i] = top;
        l[i] *= corr;
#pragma unroll
        for (int u = 0; u < PAIRS_PER_LANE; ++u) {
          const int key = (u * 32 + lane) * 2;
          const u32 p = pack_bf16(exp2f(x[u].x - zero), exp2f(x[u].y - zero));
          l[i] += bf16_low(p) + bf16_high(p);
          if (key < count) reinterpret_cast<u32*>(memory + AT_PROB + head * PROB * 2)[u * 32 + lane] = p;
        }
        if (lane == 0) reinterpret_cast<float*>(memory + AT_CORR)[head] = corr;
      }
      barrier(1, CONSUMERS);
      if (tile == tiles - 1) cluster_arrive();  // nobody reads logits any more: their place may take the parts of the sum
      if (tile > 0) {
#pragma unroll
        for (int n = 0; n < NH; ++n) {
          const float2 corr = *reinterpret_cast<const float2*>(memory + AT_CORR + (n * 8 + 2 * t) * 4);
#pragma unroll
          for (int d = 0; d < DT; ++d) o[d][n][0] *= corr.x, o[d][n][1] *= corr.y, o[d][n][2] *= corr.x, o[d][n][3] *= corr.y;
        }
      }
      for (int key = 0; key < count; key += 16) {
        u32 p[NH][2];
#pragma unroll
        for (int n = 0; n < NH; ++n) {
          const u32* row = reinterpret_cast<const u32*>(memory + AT_PROB + (n * 8 + g) * PROB * 2) + key / 2 + t;
          p[n][0] = row[0], p[n][1] = row[4];
        }
        const u32 at = rows + (key + (lane & 7) + (lane >> 4) * 8) * ROW + ((lane >> 3) & 1) * 16;
#pragma unroll
        for (int d = 0; d < DT; ++d) {
          u32 a[4];
          load_matrices_transposed(a, at + d * 32);
#pragma unroll
          for (int n = 0; n < NH; ++n) mma_bf16(o[d][n], a, p[n][0], p[n][1]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty(stage * SUBS + key / 16));
      }
    }
    if (tiles == 0) cluster_arrive();
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
  barrier_wait_cluster(arrived, 0);
  for (int f = warp; f < own_tiles * NH; f += WD + FETCHERS / 32) {
    const int n = f % NH, head = n * 8 + 2 * t;
    const float2 sink = *reinterpret_cast<const float2*>(memory + AT_SINK + head * 4);
    float2 stats[CLUSTER][2], top = sink;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float4 both = *reinterpret_cast<const float4*>(memory + AT_STATS + (r * HB + head) * 8);
      stats[r][0] = make_float2(both.x, both.y), stats[r][1] = make_float2(both.z, both.w);
      top.x = fmaxf(top.x, both.x), top.y = fmaxf(top.y, both.z);
    }
    float2 total_weight = make_float2(exp2f(sink.x - top.x), exp2f(sink.y - top.y));
    float sum[4] = {};
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float4 part = *reinterpret_cast<const float4*>(memory + AT_PART + (r * PER * NH + f) * 512 + lane * 16);
      const float first = exp2f(stats[r][0].x - top.x), second = exp2f(stats[r][1].x - top.y);
      total_weight.x += first * stats[r][0].y, total_weight.y += second * stats[r][1].y;
      sum[0] += first * part.x, sum[1] += second * part.y, sum[2] += first * part.z, sum[3] += second * part.w;
    }
    // Channel g of heads 2t and 2t + 1, and channel g + 8. Lanes of neighbouring channels swap one head for the other.
    const bool odd = g & 1;
    const float share = fast_reciprocal(odd ? total_weight.y : total_weight.x);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float keep = odd ? sum[2 * half + 1] : sum[2 * half], give = odd ? sum[2 * half] : sum[2 * half + 1];
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
  }
}
