// attend for several tokens, or for many keys: 64 heads of a token at once on the tensor cores of sm_90a (see ../attend.py, and
// attend.cu for few tokens with few keys).
//
// Up to CLUSTERS clusters of CLUSTER CTAs, as many as have MANY keys a CTA, share a token's keys: with n CTAs each takes every
// n-th key, in tiles of KT. Eight warps fetch them; two warpgroups multiply, each the logits of its half of a tile's keys for all
// channels. They exchange maxima and then weights by way of shared memory, and of the output each holds one half of the channels,
// for all keys. A tile serves as keys and, transposed, as values. At the end each CTA of a cluster adds up some of the channels
// for all, from parts rounded to bf16; of several clusters the last one to come there does it for all, in their order.
//
// Floors: a key costs 64 x DIM x 2 multiplications, 32 clocks of an SM's tensor cores, and its 1,024 or 584 bytes 35 to 50 clocks
// of what an SM gets from the L2 (20 to 30 bytes a clock). q is 64 KB a CTA, and parts 64 KB, sent at 12 to 17 bytes a clock.
//
// Measured on an H200, in a CUDA graph, one launch after another, plain / compact rows:
//   8 tokens, 640 keys 11.2 / 15.1 us, 8320 keys 46.6 / 77.8; 16 tokens, 640 keys 12.5 / 18.8; 32 tokens, 640 keys 16.8 / 26.9,
//   160 keys 9.2
//   1 token, 8320 keys 15.5 / 18.7 (16.8 / 20.9 with the launch of attend.cu for few keys before it)
//   512 tokens, 640 keys 130 / 201 us (330 / 214 TFLOP/s)
// Of the 130 us 121 stay without the copies and 94 without the products: the softmax between two products, and the barriers
// around it, are not hidden behind the tensor cores. Compact rows are bound by widening them.
#define FETCHING_WARPS 8
#include "attend_keys.cuh"
#include "wgmma.cuh"

// Given: DIM (512), CODED (of compact rows), KT (keys a tile), STAGES, CLUSTER, CLUSTERS,
// SHARED.
constexpr int HB = 64, CONSUMERS = 256, HALF = DIM / 2;   // channels of a warpgroup
constexpr int CHUNKS = DIM / 64, TILE_CHUNK = KT * 128;   // of 64 channels; bytes of one of a tile
constexpr int STEPS = HALF / 8, PER = 2 * STEPS / CLUSTER;  // of 8 channels: a warpgroup's, and those that a CTA sums up
constexpr int NEAR_ROWS = 16384;                          // rows that are brought to the L2 ahead of time, for all tokens
constexpr float SLACK = 8.f;                              // weights may be up to 2^SLACK before the sums are scaled anew
constexpr int MOST_PAIRS = 64, MANY = 96, COUNTERS = 1024;
constexpr float LOG2E = 1.4426950408889634f;

constexpr int AT_ROWS = HB * DIM * 2;                     // after q; in the end, over both, uint4 [CLUSTER][PER / 2][4][32]
constexpr int AT_STATS = HB * DIM * 2;                    // and float2 [CLUSTER][HB]
constexpr int AT_WEIGHTS = AT_ROWS + STAGES * CHUNKS * TILE_CHUNK;  // uint4 [2][KT / 32][128]
constexpr int AT_TOPS = AT_WEIGHTS + KT * 128;            // float2 [2][128]
constexpr int AT_SCALES = AT_TOPS + 2048;
constexpr int AT_BIAS = AT_SCALES + STAGES * KT * 8;      // of each key: 0, or -inf for none
constexpr int AT_TURN = AT_BIAS + STAGES * KT * 4;        // float2 [MOST_PAIRS]
constexpr int AT_SINK = AT_TURN + MOST_PAIRS * 8;
constexpr int AT_BARRIER = AT_SINK + HB * 4;
static_assert(AT_BARRIER + 8 * (1 + 2 * STAGES * SUBS) <= SHARED, "SHARED is too small");
static_assert(AT_STATS + CLUSTER * HB * 8 <= AT_WEIGHTS, "the parts of the sum lie over q and the rows");
static_assert(DIM == 512 && PER % 4 == 0 && PER * CLUSTER == 2 * STEPS, "a warpgroup holds 256 channels; parts of 32");

struct Layout {
  static DEVICE u32 piece(int row, int piece) {
    return AT_ROWS + (row / KT * CHUNKS + piece / 8) * TILE_CHUNK + swizzled(row % KT, piece % 8);
  }
  static DEVICE u32 scales(int row) { return AT_SCALES + row * 8; }
  static DEVICE int subs(int) { return SUBS; }  // the products take whole tiles
};

__device__ u32 arrivals[CLUSTERS > 1 ? COUNTERS : 1];  // of clusters, for each CTA of a cluster

// The weights of parts of a sum by their maxima, in units of log2, and sums of weights: the largest maximum, each part's share
// in it, and the sum of all weights. Parts from `count` on count nothing.
template <int Parts>
DEVICE float2 weigh(const float2* stats, int stride, int count, float bottom, float (&weight)[Parts]) {
  float2 part[Parts];
  float top = bottom, all = 0.f;
#pragma unroll
  for (int c = 0; c < Parts; ++c) {
    part[c] = c < count ? stats[c * stride] : make_float2(NEG_INF, 0.f);
    top = fmaxf(top, part[c].x);
  }
  const float zero = top == NEG_INF ? 0.f : top;
#pragma unroll
  for (int c = 0; c < Parts; ++c) weight[c] = fast_exp2(part[c].x - zero), all += weight[c] * part[c].y;
  return make_float2(top, all);
}

// Two channels of rows g and g + 8.
DEVICE void add_weighted(float (&sum)[4], float low, float high, u32 first, u32 second) {
  sum[0] = fmaf(low, bf16_low(first), sum[0]), sum[1] = fmaf(low, bf16_high(first), sum[1]);
  sum[2] = fmaf(high, bf16_low(second), sum[2]), sum[3] = fmaf(high, bf16_high(second), sum[3]);
}

KERNEL __launch_bounds__(CONSUMERS + FETCHERS, 1)
attend_heads(const bf16* q, const bf16* kv, const u8* ring, const u8* entries, const int* indices, const float* __restrict__ sinks,
             const float* __restrict__ inv_freq, const i64* __restrict__ positions, const i64* __restrict__ slots, bf16* out,
             int tokens, int heads, int window, int blocks, int picks, int rate, int pairs, float scale, int least, int most,
             float* left_over) {
  extern __shared__ __align__(1024) unsigned char memory[];
  let_next_kernel_start();
  const u32 base = shared_address(memory);
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31, g = lane >> 2, t = lane & 3;
  const u32 rank = cluster_rank();
  const int cluster = blockIdx.x / CLUSTER % CLUSTERS;
  const int groups = (heads + HB - 1) / HB, work = blockIdx.x / (CLUSTER * CLUSTERS), group = work % groups;
  const i64 token = work / groups;
  Keys keys(kv, ring, entries, indices, positions, slots, window, blocks, picks, rate, token);
  const int used = max(1, min(CLUSTERS, (keys.total + CLUSTER * MANY - 1) / (CLUSTER * MANY)));  // clusters that have keys
  keys.divide(cluster * CLUSTER + rank, used * CLUSTER);
  const int head0 = group * HB, active = min(HB, heads - head0);
  if (keys.slot < 0 || keys.total < least || keys.total > most || cluster >= used) {
    wait_for_previous_kernel();
    if (keys.slot >= 0 || least > 0 || cluster > 0) return;
    for (int i = rank * blockDim.x + tid; i < active * DIM / 2; i += CLUSTER * blockDim.x)
      reinterpret_cast<u32*>(out + (token * heads + head0) * DIM)[i] = 0;
    return;
  }

  const u32 arrived = base + AT_BARRIER, full = arrived + 8, empty = full + 8 * STAGES * SUBS;
  float* const bias = reinterpret_cast<float*>(memory + AT_BIAS);
  if (tid == 0) {
    barrier_init(arrived, 1);
    for (int s = 0; s < STAGES * SUBS; ++s)
      barrier_init(full + 8 * s, FULL_ARRIVALS), barrier_init(empty + 8 * s, CONSUMERS / 32);
    barrier_init_done();
    barrier_arrive_expecting(arrived, (CLUSTER - 1) * (PER * 4 * 256 + HB * 8));
  }
  __syncthreads();
  const int tiles = (keys.mine + KT - 1) / KT;

  if (warp >= CONSUMERS / 32) {  // --- the fetching warps ---
    registers_less<64>();
    Fetch<Layout> fetch{keys, memory, bias, full, empty, tiles};
    fetch.run(group, groups, NEAR_ROWS / tokens);
    if (CLUSTER > 1) cluster_arrive_relaxed(), cluster_wait();
  } else {  // --- the multiplying warpgroups ---
    registers_more<192>();
    const int side = warp >> 2, row = (warp & 3) * 16 + g;  // this thread's heads are row and row + 8
    float2* const turns = reinterpret_cast<float2*>(memory + AT_TURN);
    float* const sink = reinterpret_cast<float*>(memory + AT_SINK);
    for (int i = tid; i < pairs; i += CONSUMERS) rope_cos_sin(keys.position, inv_freq[i], &turns[i].x, &turns[i].y);
    for (int h = tid; h < HB; h += CONSUMERS) sink[h] = h < active ? sinks[head0 + h] * LOG2E : 0.f;
    wait_for_previous_kernel();
    for (int i = tid; i < HB * PIECES; i += CONSUMERS) {
      const int h = i / PIECES, piece = i % PIECES;
      const bf16* from = q + (token * heads + head0 + min(h, active - 1)) * DIM + piece * 8;
      copy_16(base + piece / 8 * (HB * 128) + swizzled(h, piece % 8), from, h < active ? 16 : 0);
    }
    wait_for_copies();
    barrier(1, CONSUMERS);

    float o[2][DIM / 8], m[2] = {NEG_INF, NEG_INF}, l[2] = {0.f, 0.f};  // m in units of log2; l: this thread's share
#pragma unroll
    for (int i = 0; i < DIM / 4; ++i) o[i / (DIM / 8)][i % (DIM / 8)] = 0.f;
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % STAGES;
      const u32 rows = base + AT_ROWS + stage * CHUNKS * TILE_CHUNK;
      const u64 queries = operand(base), keys_own = operand(rows + side * (KT / 16) * SWIZZLED_ROWS);
      for (int s = 0; s < SUBS; ++s) barrier_wait(full + 8 * (stage * SUBS + s), (tile / STAGES) & 1);
      stores_before_products();
      float x[KT / 4];
      products_begin();
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          multiply_keys(x, further(queries, c * (HB * 128) + k * 32), further(keys_own, c * TILE_CHUNK + k * 32), c + k > 0);
      products_end();
      products_wait<0>();
      settle(x);
      float top[2] = {m[0], m[1]};
#pragma unroll
      for (int i = 0; i < KT / 16; ++i) {
        const float2 none = *reinterpret_cast<const float2*>(bias + stage * KT + side * (KT / 2) + i * 8 + 2 * t);
        x[4 * i] = fmaf(x[4 * i], scale, none.x), x[4 * i + 1] = fmaf(x[4 * i + 1], scale, none.y);
        x[4 * i + 2] = fmaf(x[4 * i + 2], scale, none.x), x[4 * i + 3] = fmaf(x[4 * i + 3], scale, none.y);
        top[0] = fmaxf(top[0], fmaxf(x[4 * i], x[4 * i + 1])), top[1] = fmaxf(top[1], fmaxf(x[4 * i + 2], x[4 * i + 3]));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
      }
      // The same thread of the other warpgroup has the same heads and the other half of the keys.
      float2* const tops = reinterpret_cast<float2*>(memory + AT_TOPS) + (tid & 127);
      uint4* const weights = reinterpret_cast<uint4*>(memory + AT_WEIGHTS) + (tid & 127);
      tops[side * 128] = make_float2(top[0], top[1]);
      barrier(1, CONSUMERS);
      const float2 others = tops[(side ^ 1) * 128];
      top[0] = fmaxf(top[0], others.x), top[1] = fmaxf(top[1], others.y);
      float corr[2], zero[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (top[r] < m[r] + SLACK) top[r] = m[r];
        zero[r] = top[r] == NEG_INF ? 0.f : top[r];
        corr[r] = fast_exp2(m[r] - zero[r]), m[r] = top[r], l[r] *= corr[r];
      }
      u32 p[2][KT / 32][4];  // own keys' and the others'
#pragma unroll
      for (int k = 0; k < KT / 32; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows g, g + 8 by turns, then the next eight keys
          const float first = fast_exp2(x[8 * k + 2 * i] - zero[i & 1]), second = fast_exp2(x[8 * k + 2 * i + 1] - zero[i & 1]);
          p[0][k][i] = pack_bf16(first, second);
          l[i & 1] += first + second;
        }
        weights[(side * (KT / 32) + k) * 128] = make_uint4(p[0][k][0], p[0][k][1], p[0][k][2], p[0][k][3]);
      }
      if (__any_sync(~0u, corr[0] != 1.f || corr[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < DIM / 4; ++i) o[i / (DIM / 8)][i % (DIM / 8)] *= corr[i >> 1 & 1];
      }
      auto add_values = [&](const u32 (&p)[KT / 32][4], u64 values) {
        settle(o[0]), settle(o[1]);
        products_begin();
#pragma unroll
        for (int k = 0; k < KT / 32; ++k)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            multiply_values(o[h], p[k], further(values, h * (CHUNKS / 4) * TILE_CHUNK + k * 2 * SWIZZLED_ROWS));
        products_end();
      };
      const u32 values = rows + side * (CHUNKS / 2) * TILE_CHUNK;
      add_values(p[0], transposed_operand(values + side * (KT / 16) * SWIZZLED_ROWS, TILE_CHUNK));
      barrier(1, CONSUMERS);
#pragma unroll
      for (int k = 0; k < KT / 32; ++k) {
        const uint4 other = weights[((side ^ 1) * (KT / 32) + k) * 128];
        p[1][k][0] = other.x, p[1][k][1] = other.y, p[1][k][2] = other.z, p[1][k][3] = other.w;
      }
      add_values(p[1], transposed_operand(values + (side ^ 1) * (KT / 16) * SWIZZLED_ROWS, TILE_CHUNK));
      products_wait<0>();
      settle(o[0]), settle(o[1]);
      if (lane == 0)
        for (int s = 0; s < SUBS; ++s) barrier_arrive(empty + 8 * (stage * SUBS + s));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += __shfl_xor_sync(~0u, l[r], 1);
      l[r] += __shfl_xor_sync(~0u, l[r], 2);
    }
    {
      float2* const sums = reinterpret_cast<float2*>(memory + AT_TOPS) + (tid & 127);
      sums[side * 128] = make_float2(l[0], l[1]);
      barrier(1, CONSUMERS);
      const float2 others = sums[(side ^ 1) * 128];
      l[0] += others.x, l[1] += others.y;
    }

    // Found out once more, so that no registers hold it through the loop.
    const int again = block_number() / (CLUSTER * CLUSTERS), first_head = again % groups * HB;
    uint4* const rows_out = reinterpret_cast<uint4*>(out + ((i64)(again / groups) * heads + first_head) * DIM);
    auto at = [&](int step, int i) { return o[step / (STEPS / 2)][step % (STEPS / 2) * 4 + i]; };
    // Of head `head` four steps' channels of the sum over all keys, turned back, if among the last that may have rope. A lane has
    // two channels of each step; the quad's lanes exchange them, so that each stores one step.
    auto put = [&](int head, int step, const float (&sums)[4][4], int half, float share, bool last) {
      u32 v[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        float low = sums[s][2 * half] * share, high = sums[s][2 * half + 1] * share;
        const int turned = (step + s) * 4 + t - (DIM / 2 - pairs);
        if (last && turned >= 0) {
          const float2 turn = turns[turned];
          const float x = low * turn.x + high * turn.y;
          high = high * turn.x - low * turn.y;
          low = x;
        }
        v[s] = pack_bf16(low, high);
      }
      transpose4(v);
      if (head < heads - first_head) rows_out[head * (DIM / 8) + step + t] = make_uint4(v[0], v[1], v[2], v[3]);
    };
    auto share_of = [&](int r, float2 all) { return fast_reciprocal(fast_exp2(sink[row + 8 * r] - all.x) + all.y); };
    if (CLUSTER == 1) {
      float weight[1], share[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 own = make_float2(m[r], l[r]);
        share[r] = share_of(r, weigh<1>(&own, 0, 1, sink[row + 8 * r], weight)) * weight[0];
      }
#pragma unroll
      for (int j = 0; j < STEPS; j += 4) {
        float sums[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = at(j + i / 4, i % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) put(row + 8 * r, side * STEPS + j, sums, r, share[r], j >= STEPS - MOST_PAIRS / 4);
      }
      return;
    }
    // The sum over the cluster: each CTA gets its channels from all.
    __syncwarp();
    cluster_arrive_relaxed();  // as in attend.cu
    cluster_wait();            // every CTA of the cluster is done with its q and rows
#pragma unroll
    for (int j = 0; j < STEPS; j += 2) {
      const u32 step = side * STEPS + j, peer = step / PER, at_part = ((rank * PER + step % PER) / 2 * 4 + (warp & 3)) * 512 + lane * 16;
      const uint4 part = make_uint4(pack_bf16(at(j, 0), at(j, 1)), pack_bf16(at(j, 2), at(j, 3)),
                                    pack_bf16(at(j + 1, 0), at(j + 1, 1)), pack_bf16(at(j + 1, 2), at(j + 1, 3)));
      if (peer == rank)
        *reinterpret_cast<uint4*>(memory + at_part) = part;
      else
        peer_store_async(peer_address(base + at_part, peer), part, peer_address(arrived, peer));
    }
    if (side == 0) {
      for (int peer = t; peer < CLUSTER; peer += 4)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int at_stats = AT_STATS + (rank * HB + row + 8 * r) * 8;
          if (peer == rank)
            *reinterpret_cast<float2*>(memory + at_stats) = make_float2(m[r], l[r]);
          else
            peer_store_async(peer_address(base + at_stats, peer), make_float2(m[r], l[r]), peer_address(arrived, peer));
        }
    }
    barrier(1, CONSUMERS);
    // Of those that this CTA adds up, and then of those that other clusters have left.
    const int place = again * CLUSTER + rank, piece = (warp & 3) * 32 + lane;
    const int places = gridDim.x / CLUSTERS;
    float4* const left = reinterpret_cast<float4*>(left_over) + place * CLUSTERS * PER * 128 + piece;
    float2* const left_stats = reinterpret_cast<float2*>(left_over + (i64)places * CLUSTERS * PER * 512) + place * CLUSTERS * HB + row;
    const uint4* const parts = reinterpret_cast<const uint4*>(memory) + piece;
    const float2* const stats = reinterpret_cast<const float2*>(memory + AT_STATS) + row;
    float2 all[2];
    float share[2], weight[2][CLUSTER], weight_left[2][CLUSTERS];
    barrier_wait(arrived, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      all[r] = weigh<CLUSTER>(stats + 8 * r, HB, CLUSTER, used == 1 ? sink[row + 8 * r] : NEG_INF, weight[r]);
      share[r] = share_of(r, all[r]);
    }
    auto put_sums = [&](int j, const float (&sums)[4][4]) {
#pragma unroll
      for (int r = 0; r < 2; ++r) put(row + 8 * r, rank * PER + j, sums, r, share[r], true);
    };
    for (int j = side * 4; j < PER; j += 8) {
      float sums[4][4] = {};
#pragma unroll
      for (int c = 0; c < CLUSTER; ++c)
#pragma unroll
        for (int s = 0; s < 4; s += 2) {
          const uint4 part = parts[(c * PER + j + s) * 64];
          add_weighted(sums[s], weight[0][c], weight[1][c], part.x, part.y);
          add_weighted(sums[s + 1], weight[0][c], weight[1][c], part.z, part.w);
        }
      if (used == 1)
        put_sums(j, sums);
      else
#pragma unroll
        for (int s = 0; s < 4; ++s)
          left[(cluster * PER + j + s) * 128] = make_float4(sums[s][0], sums[s][1], sums[s][2], sums[s][3]);
    }
    if (used == 1) return;
    if (side == 0 && t == 0) left_stats[cluster * HB] = all[0], left_stats[cluster * HB + 8] = all[1];
    u32* const is_last = reinterpret_cast<u32*>(memory + AT_WEIGHTS);
    __threadfence();
    barrier(1, CONSUMERS);
    if (warp == 0) {
      const bool last = last_warp(&arrivals[place], used);
      if (lane == 0) *is_last = last;
    }
    barrier(1, CONSUMERS);
    if (!*is_last) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      share[r] = share_of(r, weigh<CLUSTERS>(left_stats + 8 * r, HB, used, sink[row + 8 * r], weight_left[r]));
#pragma unroll 1
    for (int j = side * 4; j < PER; j += 8) {
      float sums[4][4] = {};
#pragma unroll
      for (int c = 0; c < CLUSTERS; ++c)
        if (c < used) {
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            const float4 part = left[(c * PER + j + s) * 128];
            sums[s][0] = fmaf(weight_left[0][c], part.x, sums[s][0]), sums[s][1] = fmaf(weight_left[0][c], part.y, sums[s][1]);
            sums[s][2] = fmaf(weight_left[1][c], part.z, sums[s][2]), sums[s][3] = fmaf(weight_left[1][c], part.w, sums[s][3]);
          }
        }
      put_sums(j, sums);
    }
  }
}
