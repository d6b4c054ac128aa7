// index: scores of a token's visible index keys, and the numbers of the TOPK best (see ../index_topk.py).
//
// Bytes a token: visible keys x D x 2 (1024 keys: 0.26 MB, 0.06 us at 4.25 TB/s; 262,144: 67 MB, 15.8 us), query 16 KB.
// Up to a few ten thousand keys everything is latency, so one cluster scores its keys and selects in one launch; beyond
// LOCAL keys index_score spreads the scoring over the GPU first.
//
// Scores become 32-bit keys in the order of the floats, NaN as -inf. index_select: each CTA of the cluster has a run of
// consecutive blocks and keeps at most its own TOPK best, in order; CTA 0 gets them all, in order, and takes the TOPK best
// of them. The threshold: a histogram of 2048 equal intervals between the extremes (digits of the bits themselves would
// pile up in a few counters), then the rank within one interval; among equals the first are taken.
//
// Measured on an H200, in a CUDA graph, keys cold, one token: nothing to choose 1.6 us, 1024 keys 6.8, 2048 keys 8.1, 8192
// keys 15.9, 32,768 keys 19.4, 262,144 keys 51; 8 tokens and 1024 keys 8.1, 32 tokens 13.2.
#include "hopper.cuh"

// Given: HEADS, D (of a head), TOPK, SPLIT (warps that share the heads of a key), CLUSTER, SLICE (the most blocks a CTA can
// have), LOCAL (scored here up to this many), SHARED.
constexpr int WARPS = 16, THREADS = 32 * WARPS, BINS = 2048;
constexpr int CHUNKS = D / 32;                               // 16 bytes of each of four lanes make 32 dimensions
constexpr int TILES = ((HEADS + 7) / 8 + SPLIT - 1) / SPLIT;  // n8 tiles of heads a warp
constexpr int STRIDE = (LOCAL + CLUSTER - 1) / CLUSTER + 16;  // scores a warp column leaves for one run of blocks
static_assert(D % 32 == 0 && WARPS % SPLIT == 0, "tile shape");

struct Query {
  u32 b[TILES][CHUNKS][4];
  float2 weight[TILES];
};
constexpr bool WHOLE = HEADS == SPLIT * TILES * 8;  // no head is padding

// Both operands take the dimensions in the same shuffled order: lane t of a quad has 8 neighbours of every 32.
DEVICE void load_query(Query& query, const bf16* q, const float* weights, i64 token, int part, int g, int t) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int tile = part * TILES + n, head = tile * 8 + g;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (head < HEADS) v = *reinterpret_cast<const uint4*>(q + (token * HEADS + head) * D + c * 32 + t * 8);
      query.b[n][c][0] = v.x, query.b[n][c][1] = v.y, query.b[n][c][2] = v.z, query.b[n][c][3] = v.w;
    }
    const int column = tile * 8 + 2 * t;
    query.weight[n].x = column < HEADS ? weights[token * HEADS + column] : 0.f;
    query.weight[n].y = column + 1 < HEADS ? weights[token * HEADS + column + 1] : 0.f;
  }
}

struct Keys {
  uint4 low[CHUNKS], high[CHUNKS];  // of rows g and g + 8
};

DEVICE void load_keys(Keys& keys, const bf16* rows, int first, int last, int g, int t) {
  const bf16* low = rows + static_cast<i64>(min(first + g, last)) * D + t * 8;
  const bf16* high = rows + static_cast<i64>(min(first + g + 8, last)) * D + t * 8;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    keys.low[c] = *reinterpret_cast<const uint4*>(low + c * 32);
    keys.high[c] = *reinterpret_cast<const uint4*>(high + c * 32);
  }
}

DEVICE float relu(float x) { return x <= 0.f ? 0.f : x; }  // a NaN stays one

// What two heads, at `column`, add to the scores of the rows g and g + 8 of one or two groups of keys.
template <int N>
DEVICE void add_heads(float2 (&sum)[N], const float (&acc)[N][4], float2 weight, int column) {
#pragma unroll
  for (int m = 0; m < N; ++m) {
    if (WHOLE || column < HEADS) sum[m].x += relu(acc[m][0]) * weight.x, sum[m].y += relu(acc[m][2]) * weight.x;
    if (WHOLE || column + 1 < HEADS) sum[m].x += relu(acc[m][1]) * weight.y, sum[m].y += relu(acc[m][3]) * weight.y;
  }
}

DEVICE float2 quad_sum(float2 sum) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    sum.x += __shfl_xor_sync(~0u, sum.x, step);
    sum.y += __shfl_xor_sync(~0u, sum.y, step);
  }
  return sum;
}

// The part of this warp's heads (this lane's first is `column`) in the scores of 16 keys, in every lane of a quad.
DEVICE float2 score_keys(const Query& query, const Keys& keys, int column) {
  float acc[TILES][1][4] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const u32 first[4] = {keys.low[c].x, keys.high[c].x, keys.low[c].y, keys.high[c].y};
    const u32 second[4] = {keys.low[c].z, keys.high[c].z, keys.low[c].w, keys.high[c].w};
#pragma unroll
    for (int n = 0; n < TILES; ++n) mma_bf16(acc[n][0], first, query.b[n][c][0], query.b[n][c][1]);
#pragma unroll
    for (int n = 0; n < TILES; ++n) mma_bf16(acc[n][0], second, query.b[n][c][2], query.b[n][c][3]);
  }
  float2 sum[1] = {};
#pragma unroll
  for (int n = 0; n < TILES; ++n) add_heads(sum, acc[n], query.weight[n], column + n * 8);
  return quad_sum(sum[0]);
}

// Larger scores, larger keys; -0 equals 0, NaN equals -inf.
DEVICE u32 ordered(float x) {
  const u32 bits = x == x ? __float_as_uint(x) : 0xff800000u;
  return x == 0.f ? 0x80000000u : bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}

DEVICE float from_ordered(u32 key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key); }

DEVICE int visible_blocks(const i64* positions, const i64* slots, i64 token, int rate, int blocks) {
  return slots[token] < 0 ? 0 : min((static_cast<int>(positions[token]) + 1) / rate, blocks);
}

// --- scoring alone: the grid's y is the token; a warp takes 32 keys at a time, with the query in shared memory ---------
constexpr int SCORE_WARPS = 8, ALL_TILES = (HEADS + 7) / 8;
KERNEL __launch_bounds__(32 * SCORE_WARPS, 1)
index_score(const bf16* __restrict__ q, const float* __restrict__ weights, const bf16* __restrict__ keys, const i64* __restrict__ positions,
            const i64* __restrict__ slots, u32* __restrict__ scores, int rate, int blocks) {
  __shared__ uint4 query[ALL_TILES][CHUNKS][32];
  __shared__ float weight[ALL_TILES * 8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const i64 token = blockIdx.y;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int count = visible_blocks(positions, slots, token, rate, blocks);
  const int step = gridDim.x * SCORE_WARPS * 32;
  int first = (blockIdx.x * SCORE_WARPS + warp) * 32;
  if (count <= LOCAL || count <= TOPK || first - warp * 32 >= count) return;
  const bf16* rows = keys + slots[token] * blocks * D;
  Keys current[2], following[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) load_keys(current[m], rows, first + 16 * m, count - 1, g, t);
  for (int i = threadIdx.x; i < ALL_TILES * CHUNKS * 32; i += 32 * SCORE_WARPS) {
    const int tile = i / (CHUNKS * 32), head = tile * 8 + (i & 31) / 4;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < HEADS) v = *reinterpret_cast<const uint4*>(q + (token * HEADS + head) * D + i / 32 % CHUNKS * 32 + i % 4 * 8);
    query[tile][i / 32 % CHUNKS][i & 31] = v;
  }
  if (threadIdx.x < ALL_TILES * 8) weight[threadIdx.x] = threadIdx.x < HEADS ? weights[token * HEADS + threadIdx.x] : 0.f;
  __syncthreads();
  for (; first < count; first += step) {
    if (first + step < count) {
#pragma unroll
      for (int m = 0; m < 2; ++m) load_keys(following[m], rows, first + step + 16 * m, count - 1, g, t);
    }
    float2 sum[2] = {};
#pragma unroll 2
    for (int n = 0; n < ALL_TILES; ++n) {
      float acc[2][4] = {};
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        const uint4 b = query[n][c][lane];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const Keys& k = current[m];
          mma_bf16(acc[m], {k.low[c].x, k.high[c].x, k.low[c].y, k.high[c].y}, b.x, b.y);
          mma_bf16(acc[m], {k.low[c].z, k.high[c].z, k.low[c].w, k.high[c].w}, b.z, b.w);
        }
      }
      add_heads(sum, acc, *reinterpret_cast<const float2*>(weight + n * 8 + 2 * t), n * 8 + 2 * t);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      sum[m] = quad_sum(sum[m]);
      const int row = first + 16 * m + g;
      if (t == 0 && row < count) scores[token * blocks + row] = ordered(sum[m].x);
      if (t == 0 && row + 8 < count) scores[token * blocks + row + 8] = ordered(sum[m].y);
      current[m] = following[m];
    }
  }
}

// --- selecting ---------------------------------------------------------------------------------------------------------
struct Workspace {
  int bins[BINS];
  u32 list[THREADS];  // the values of one interval
  int totals[WARPS];
  u32 low[WARPS], high[WARPS];
  int found[2];  // interval, how many of its values are wanted
  int listed;
  u32 threshold;
};

// Exclusive sum over the block of one number a thread.
DEVICE int scan(int x, Workspace& work, int& before) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) work.totals[warp] = sum;
  __syncthreads();
  int total = lane < WARPS ? work.totals[lane] : 0, offset = 0;
#pragma unroll
  for (int step = 1; step < WARPS; step *= 2) {
    const int other = __shfl_up_sync(~0u, total, step);
    if (lane >= step) total += other;
  }
  offset = __shfl_sync(~0u, total, max(warp - 1, 0));
  before = (warp ? offset : 0) + sum - x;
  return __shfl_sync(~0u, total, WARPS - 1);
}

// The bin, counted from the top, in which the running count reaches `wanted`; what is still wanted of it.
DEVICE void find_bin(Workspace& work, int wanted) {
  constexpr int OWN = BINS / THREADS;
  int mine[OWN], sum = 0, before;
#pragma unroll
  for (int j = 0; j < OWN; ++j) sum += mine[j] = work.bins[BINS - 1 - (threadIdx.x * OWN + j)];
  scan(sum, work, before);
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    if (before < wanted && before + mine[j] >= wanted) {
      work.found[0] = BINS - 1 - (threadIdx.x * OWN + j);
      work.found[1] = wanted - before;
    }
    before += mine[j];
  }
  __syncthreads();
}

// The TOPK best of `count` >= TOPK values, in order: put(place, i) is called once for each. All threads.
template <class Put>
DEVICE void select_best(const u32* values, int count, Workspace& work, Put put) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr u32 MINUS_INF = 0x007fffffu, PLUS_INF = 0xff800000u;  // as `ordered` gives them
  u32 least = PLUS_INF, most = MINUS_INF;  // of the finite ones
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const u32 value = values[i];
    if (value > MINUS_INF) least = min(least, value);
    if (value < PLUS_INF) most = max(most, value);
  }
  least = __reduce_min_sync(~0u, least);
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) work.low[warp] = least, work.high[warp] = most;
  for (int i = threadIdx.x; i < BINS; i += THREADS) work.bins[i] = 0;
  if (threadIdx.x == 0) work.listed = 0;
  __syncthreads();
  const float low = from_ordered(__reduce_min_sync(~0u, work.low[lane % WARPS]));
  const float range = from_ordered(__reduce_max_sync(~0u, work.high[lane % WARPS])) - low;
  const float scale = range > 0.f && range < -NEG_INF ? (BINS - 1) / range : 0.f;
  // A larger value never has a smaller interval; NaN (infinity times 0) becomes 0.
  auto interval = [&](u32 value) { return min(max(__float2int_rz((from_ordered(value) - low) * scale), 0), BINS - 1); };
  for (int i = threadIdx.x; i < count; i += THREADS) atomicAdd(&work.bins[interval(values[i])], 1);
  __syncthreads();
  find_bin(work, TOPK);
  const int bin = work.found[0], size = work.bins[bin];
  int wanted = work.found[1];
  u32 threshold = 0;
  if (size <= THREADS) {
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const u32 value = values[i];
      if (interval(value) == bin) work.list[atomicAdd(&work.listed, 1)] = value;
    }
    __syncthreads();
    if (threadIdx.x < size) {
      const u32 value = work.list[threadIdx.x];
      int above = 0, equal = 0;
      for (int i = 0; i < size; ++i) above += work.list[i] > value, equal += work.list[i] == value;
      if (above < wanted && above + equal >= wanted) work.threshold = value, work.found[1] = wanted - above;
    }
    __syncthreads();
    threshold = work.threshold;
    wanted = work.found[1];
  } else {  // many in one interval: its values digit by digit, 11, 11 and 10 bits
    u32 mask = 0;
    for (int shift = 21; shift >= 0; shift -= shift == 21 ? 11 : 10) {
      const u32 digits = shift ? BINS - 1 : BINS / 2 - 1;
      __syncthreads();
      for (int i = threadIdx.x; i < BINS; i += THREADS) work.bins[i] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < count; i += THREADS) {
        const u32 value = values[i];
        if ((value & mask) == threshold && interval(value) == bin) atomicAdd(&work.bins[value >> shift & digits], 1);
      }
      __syncthreads();
      find_bin(work, wanted);
      threshold |= static_cast<u32>(work.found[0]) << shift;
      mask |= digits << shift;
      wanted = work.found[1];
    }
  }
  // Values above the threshold, and the first `wanted` of those equal to it.
  const int length = (count + THREADS - 1) / THREADS * 32, start = warp * length, stop = min(start + length, count);
  int above = 0, equal = 0;
  for (int i = start + lane; i - lane < stop; i += 32) {
    const u32 value = i < stop ? values[i] : 0;
    above += __popc(__ballot_sync(~0u, i < stop && value > threshold));
    equal += __popc(__ballot_sync(~0u, i < stop && value == threshold));
  }
  __syncthreads();
  if (lane == 0) work.totals[warp] = above, work.bins[warp] = equal;
  __syncthreads();
  above = equal = 0;
  for (int w = 0; w < warp; ++w) above += work.totals[w], equal += work.bins[w];
  const u32 below = (1u << lane) - 1;
  for (int i = start + lane; i - lane < stop; i += 32) {
    const u32 value = i < stop ? values[i] : 0;
    const bool is_above = i < stop && value > threshold, is_equal = i < stop && value == threshold;
    const u32 aboves = __ballot_sync(~0u, is_above), equals = __ballot_sync(~0u, is_equal);
    const int equal_before = equal + __popc(equals & below);
    if (is_above || (is_equal && equal_before < wanted))
      put(above + __popc(aboves & below) + min(equal_before, wanted), i);
    above += __popc(aboves);
    equal += __popc(equals);
  }
  __syncthreads();
}

constexpr int KEPT = SLICE < TOPK ? SLICE : TOPK;  // the most a CTA hands on
constexpr int AT_VALUES = (sizeof(Workspace) + 15) / 16 * 16;
constexpr int AT_KEPT = AT_VALUES + (SLICE + 3) / 4 * 16;                    // [CLUSTER][KEPT] values, in CTA 0
constexpr int AT_BLOCKS = AT_KEPT + (CLUSTER > 1 ? CLUSTER * KEPT * 4 : 0);  // and their block numbers
constexpr int AT_PARTS = AT_BLOCKS + (AT_BLOCKS - AT_KEPT);                  // float [SPLIT][STRIDE]
static_assert(AT_PARTS + SPLIT * STRIDE * 4 <= SHARED, "SHARED is too small");

KERNEL __launch_bounds__(THREADS, 1)
index_select(const bf16* __restrict__ q, const float* __restrict__ weights, const bf16* __restrict__ keys, const i64* __restrict__ positions,
             const i64* __restrict__ slots, const u32* __restrict__ scores, int* __restrict__ picks, int rate, int blocks) {
  extern __shared__ __align__(16) unsigned char memory[];
  Workspace& work = *reinterpret_cast<Workspace*>(memory);
  u32* values = reinterpret_cast<u32*>(memory + AT_VALUES);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const i64 token = blockIdx.x / CLUSTER;
  const u32 rank = cluster_rank();
  const int part = warp % SPLIT, row = warp / SPLIT * 16;
  constexpr int RUN = 16 * WARPS / SPLIT;
  int* const out = picks + token * TOPK;
  wait_for_previous_kernel();
  let_next_kernel_start();
  Query query;
  load_query(query, q, weights, token, part, g, t);  // in flight together with the position
  const int count = visible_blocks(positions, slots, token, rate, blocks);
  if (count <= TOPK) {
    for (int i = rank * THREADS + tid; i < TOPK; i += CLUSTER * THREADS) out[i] = i < count ? i : -1;
    return;
  }
  if (CLUSTER > 1) cluster_arrive();
  // Runs of blocks, equal but for the last ones, and long enough that CTA 0 can place them all.
  const int slice = ((count + CLUSTER - 1) / CLUSTER + 15) / 16 * 16;
  const int first = min(static_cast<int>(rank) * slice, count), own = min(slice, count - first);
  if (count <= LOCAL) {
    float* parts = reinterpret_cast<float*>(memory + AT_PARTS);
    const bf16* rows = keys + slots[token] * blocks * D;
    Keys some, following;
    if (row < own) load_keys(some, rows, first + row, count - 1, g, t);
    for (int at = row; at < own; at += RUN) {
      if (at + RUN < own) load_keys(following, rows, first + at + RUN, count - 1, g, t);
      const float2 sum = score_keys(query, some, part * TILES * 8 + 2 * t);
      some = following;
      if (t == 0) parts[part * STRIDE + at + g] = sum.x, parts[part * STRIDE + at + g + 8] = sum.y;
    }
    __syncthreads();
    for (int i = tid; i < own; i += THREADS) {
      float score = parts[i];
#pragma unroll
      for (int p = 1; p < SPLIT; ++p) score += parts[p * STRIDE + i];
      values[i] = ordered(score);
    }
  } else {
    for (int i = tid; i < own; i += THREADS) values[i] = scores[token * blocks + first + i];
  }
  __syncthreads();
  if (CLUSTER == 1) {
    select_best(values, count, work, [&](int place, int i) { out[place] = i; });
    return;
  }
  const int kept = min(slice, TOPK);
  const u32 home = peer_address(shared_address(memory + AT_KEPT), 0) + rank * kept * 4;
  auto hand_on = [&](int place, int i) {
    peer_store(home + place * 4, values[i]);
    peer_store(home + place * 4 + (AT_BLOCKS - AT_KEPT), static_cast<u32>(first + i));
  };
  cluster_wait();  // CTA 0 has started
  if (own > TOPK) {
    select_best(values, own, work, hand_on);
  } else {
    for (int i = tid; i < own; i += THREADS) hand_on(i, i);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (rank) return;
  int total = 0;
  for (int r = 0; r < CLUSTER; ++r) total += min(kept, max(0, count - r * slice));
  const u32* merged = reinterpret_cast<const u32*>(memory + AT_KEPT);
  const int* numbers = reinterpret_cast<const int*>(memory + AT_BLOCKS);
  select_best(merged, total, work, [&](int place, int i) { out[place] = numbers[i]; });
}
