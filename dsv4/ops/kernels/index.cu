// index: scores of a token's visible index keys, and the numbers of the TOPK best (see ../index_topk.py).
//
// Bytes a token: visible keys x D x 2 (1024 keys: 0.26 MB, 0.06 us at 4.25 TB/s; 262,144: 67 MB, 15.8 us), query 16 KB.
// Up to a few thousand keys everything is latency, so one cluster scores its keys and selects in one launch; beyond LOCAL
// keys index_score spreads the scoring over the GPU first.
//
// A score becomes a 32-bit number in the order of the floats, NaN as -inf; with the block's number below it, inverted, a
// 64-bit one: no two are equal, and of equal scores the lowest block's is the largest. Each CTA of the cluster has a run of
// consecutive blocks, and sends at most TOPK of them to CTA 0, which takes the TOPK best of all. To select: a histogram of
// 2048 equal intervals between the extremes (digits of the bits themselves would pile up in a few counters), then the rank
// within one interval. index_score also leaves the largest score of every few blocks: what lies below the TOPK-th of these
// cannot be among the best, so of many thousand scores about TOPK are left to select from.
//
// What the step does not write while these kernels may already be running (positions, slots) is read before the wait for
// the previous kernel, and the keys are brought to the L2.
//
// Measured on an H200, in a CUDA graph, one launch after another, keys cold, one token: 1024 keys 6.3 us, 2048 keys 9.1, 4096
// keys 14.7, 16,384 keys 12.0, 262,144 keys 34.3; 8 tokens and 1024 keys 7.4, 32 tokens 11.8, 32 tokens and 16,384 keys 57.
#include "hopper.cuh"

// Given: HEADS, D (of a head), TOPK, SPLIT (warps that share the heads of a key), CLUSTER, SLICE (the most blocks a CTA can
// have), LOCAL (scored here up to this many), SHARED.
constexpr int WARPS = 16, THREADS = 32 * WARPS, BINS = 2048;
constexpr int CHUNKS = D / 32;                               // 16 bytes of each of four lanes make 32 dimensions
constexpr int TILES = ((HEADS + 7) / 8 + SPLIT - 1) / SPLIT;  // n8 tiles of heads a warp
constexpr int OWN = ((LOCAL + CLUSTER - 1) / CLUSTER + 15) / 16 * 16;  // the most blocks a CTA scores by itself
constexpr int NEAR_KEYS = 65536;                             // keys that are brought to the L2 ahead of time, for all tokens
static_assert(D % 32 == 0 && WARPS % SPLIT == 0, "tile shape");

#include "index_scores.cuh"

// --- scoring alone: the grid's y is the token; a warp takes 32 keys at a time, with the query in shared memory ---------
constexpr int SCORE_WARPS = 8, ALL_TILES = (HEADS + 7) / 8;

// `maxima` holds, for every four groups of neighbouring rows, the largest scores of a warp's steps; a warp leaves them
// every `per` steps, so that there are about as many whatever the number of warps.
struct Maxima {
  int steps, per, left;  // steps of all warps, steps of a warp that share a maximum, maxima
  DEVICE Maxima(int count, int warps, int sets) {
    steps = (count + 31) / 32;
    const int rounds = (steps + warps - 1) / warps;
    per = (rounds + sets - 1) / sets;
    const int before = (rounds + per - 1) / per - 1;
    left = 4 * (before * warps + min(warps, steps - before * per * warps));
  }
};

KERNEL __launch_bounds__(32 * SCORE_WARPS, 1)
index_score(const bf16* q, const float* weights, const bf16* keys, const i64* __restrict__ positions, const i64* __restrict__ slots,
            u32* scores, u32* maxima, int rate, int blocks, int pitch, int sets) {
  __shared__ uint4 query[ALL_TILES][CHUNKS][32];
  __shared__ float weight[ALL_TILES * 8];
  let_next_kernel_start();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const i64 token = blockIdx.y, slot = slots[token];
  const int count = visible_blocks(positions[token], slot, rate, blocks);
  const int warps = gridDim.x * SCORE_WARPS, index = blockIdx.x * SCORE_WARPS + warp;
  if (count <= LOCAL || count <= TOPK || blockIdx.x * SCORE_WARPS * 32 >= count) {
    wait_for_previous_kernel();
    return;
  }
  const Maxima groups(count, warps, sets);
  const bf16* rows = keys + slot * blocks * D;
  if (index * 32 + lane < count) prefetch_to_l2(rows + static_cast<i64>(index * 32 + lane) * D, D * 2);
  wait_for_previous_kernel();
  Keys current[2], following[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) load_keys(current[m], rows, index * 32 + 16 * m, count - 1, g, t);
  for (int i = threadIdx.x; i < ALL_TILES * CHUNKS * 32; i += 32 * SCORE_WARPS) {
    const int tile = i / (CHUNKS * 32), head = tile * 8 + (i & 31) / 4;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < HEADS) v = *reinterpret_cast<const uint4*>(q + (token * HEADS + head) * D + i / 32 % CHUNKS * 32 + i % 4 * 8);
    query[tile][i / 32 % CHUNKS][i & 31] = v;
  }
  if (threadIdx.x < ALL_TILES * 8) weight[threadIdx.x] = threadIdx.x < HEADS ? weights[token * HEADS + threadIdx.x] : 0.f;
  __syncthreads();
  u32 top = 0;
  for (int step = index, round = 0; step < groups.steps; step += warps, ++round) {
    const int first = step * 32;
    if (step + warps < groups.steps) {
#pragma unroll
      for (int m = 0; m < 2; ++m) load_keys(following[m], rows, first + warps * 32 + 16 * m, count - 1, g, t);
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
      const u32 low = row < count ? ordered(sum[m].x) : 0, high = row + 8 < count ? ordered(sum[m].y) : 0;
      if (t == 0 && row < count) scores[token * pitch + row] = low;
      if (t == 0 && row + 8 < count) scores[token * pitch + row + 8] = high;
      top = max(top, max(low, high));
      current[m] = following[m];
    }
    if ((round + 1) % groups.per == 0 || step + warps >= groups.steps) {
      top = max(top, __shfl_xor_sync(~0u, top, 4));
      if (t == 0 && g % 2 == 0) maxima[4 * (token * sets * warps + round / groups.per * warps + index) + g / 2] = top;
      top = 0;
    }
  }
}

// --- selecting ---------------------------------------------------------------------------------------------------------
constexpr int FIT = 128;  // survivors of a warp's scores that there is room for

struct Workspace {
  int bins[BINS];
  u64 list[THREADS];  // the candidates of one interval
  int totals[WARPS];
  u32 low[WARPS], high[WARPS];
  int found[2];  // interval, how many of its values are wanted
  int listed;
};

// Exclusive sum over the block of one number a thread.
DEVICE int scan(int x, Workspace& work) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) work.totals[warp] = sum;
  __syncthreads();
  return static_cast<int>(__reduce_add_sync(~0u, lane < warp ? work.totals[lane] : 0)) + sum - x;
}

// The bin, counted from the top, in which the running count reaches `wanted`; what is still wanted of it.
DEVICE void find_bin(Workspace& work, int wanted) {
  constexpr int PER_THREAD = BINS / THREADS;
  int mine[PER_THREAD], sum = 0;
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) sum += mine[j] = work.bins[BINS - 1 - (threadIdx.x * PER_THREAD + j)];
  int before = scan(sum, work);
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) {
    if (before < wanted && before + mine[j] >= wanted) {
      work.found[0] = BINS - 1 - (threadIdx.x * PER_THREAD + j);
      work.found[1] = wanted - before;
    }
    before += mine[j];
  }
  __syncthreads();
}

// Equal intervals between the least and the largest finite value; a larger value never has a smaller interval.
struct Intervals {
  float low, scale;
  DEVICE int operator()(u32 value) const {  // NaN (infinity times 0) becomes 0
    return min(max(__float2int_rz((from_ordered(value) - low) * scale), 0), BINS - 1);
  }
};

// The histogram of `count` values, in which it finds the bin that holds the `wanted`-th largest. All threads.
template <class Value>
DEVICE Intervals histogram(Value value, int count, int wanted, Workspace& work) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr u32 MINUS_INF = 0x007fffffu, PLUS_INF = 0xff800000u;  // as `ordered` gives them
  u32 least = PLUS_INF, most = MINUS_INF;                         // of the finite ones
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const u32 x = value(i);
    if (x > MINUS_INF) least = min(least, x);
    if (x < PLUS_INF) most = max(most, x);
  }
  least = __reduce_min_sync(~0u, least);
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) work.low[warp] = least, work.high[warp] = most;
  for (int i = threadIdx.x; i < BINS; i += THREADS) work.bins[i] = 0;
  if (threadIdx.x == 0) work.listed = 0;
  __syncthreads();
  const float low = from_ordered(__reduce_min_sync(~0u, work.low[lane % WARPS]));
  const float range = from_ordered(__reduce_max_sync(~0u, work.high[lane % WARPS])) - low;
  const Intervals interval = {low, range > 0.f && range < -NEG_INF ? (BINS - 1) * fast_reciprocal(range) : 0.f};
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const u32 x = value(i);
    if (x) atomicAdd(&work.bins[interval(x)], 1);
  }
  __syncthreads();
  find_bin(work, wanted);
  return interval;
}

// Numbers to select from: in shared memory, or scores with their block numbers made up.
struct Source {
  const u64* numbers;
  const u32* scores;
  int first;  // block of the first score
  DEVICE u64 operator()(int i) const { return numbers ? numbers[i] : with_block(scores[first + i], first + i); }
};

// Where chosen numbers go: to CTA 0's list, every CLUSTER-th place is this CTA's; or the block numbers to `out`.
struct Target {
  u32 list, arrived;  // addresses in CTA 0
  int* out;
  DEVICE void put(int place, u64 x) const {
    if (out)
      out[place] = ~static_cast<u32>(x);
    else
      peer_store_async(list + place * CLUSTER * 8, x, arrived);
  }
};

// The TOPK best of `count` numbers, of which at least TOPK are not 0. All threads; a barrier stands before it.
__device__ __noinline__ void select_best(const Source get, int count, Workspace& work, const Target target) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Intervals interval = histogram([&](int i) { return static_cast<u32>(get(i) >> 32); }, count, TOPK, work);
  const int bin = work.found[0];
  int wanted = work.found[1], size = work.bins[bin];
  u64 mask = 0, digits = 0;
#pragma unroll 1
  for (int shift = 53; size > THREADS; shift -= 11) {  // many in one interval: 11 bits at a time, until few are alike
    const u64 field = shift < 0 ? (BINS - 1) >> -shift : static_cast<u64>(BINS - 1) << shift;
    const int down = max(shift, 0);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) work.bins[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const u64 x = get(i);
      if (x && interval(x >> 32) == bin && (x & mask) == digits) atomicAdd(&work.bins[(x & field) >> down], 1);
    }
    __syncthreads();
    find_bin(work, wanted);
    const int digit = work.found[0];
    wanted = work.found[1], size = work.bins[digit];
    digits |= static_cast<u64>(digit) << down;
    mask |= field;
  }
  // 1: among the best. 0: a candidate, which its rank decides. -1: not.
  auto standing = [&](u64 x) {
    const int at = interval(x >> 32);
    if (!x || at < bin || (at == bin && (x & mask) < digits)) return -1;
    return at > bin || (x & mask) > digits ? 1 : 0;
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const u64 x = get(i);
    if (standing(x) == 0) work.list[atomicAdd(&work.listed, 1)] = x;
  }
  __syncthreads();
  // Chosen ones of 32 at a time, counted first.
  auto chosen = [&](int i) {
    int where = -1;
    if (i < count) {
      const u64 x = get(i);
      where = standing(x);
      if (where == 0) {
        int above = 0;
#pragma unroll 1
        for (int j = 0; j < size; ++j) above += work.list[j] > x;
        where = above < wanted ? 1 : -1;
      }
    }
    return __ballot_sync(~0u, where > 0);
  };
  int total = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i - lane < count; i += THREADS) total += __popc(chosen(i));
  if (lane == 0) work.totals[warp] = total;
  __syncthreads();
  int place = static_cast<int>(__reduce_add_sync(~0u, lane < warp ? work.totals[lane] : 0));
#pragma unroll 1
  for (int i = threadIdx.x; i - lane < count; i += THREADS) {
    const u32 all = chosen(i);
    if (all >> lane & 1) target.put(place + __popc(all & ((1u << lane) - 1)), get(i));
    place += __popc(all);
  }
}

constexpr int KEPT = SLICE < TOPK ? SLICE : TOPK;  // the most a CTA hands on
constexpr int STRIDE = OWN + 16;                   // scores a warp column leaves for one run of blocks
DEVICE constexpr int max2(int a, int b) { return a > b ? a : b; }
constexpr int AT_MERGED = (sizeof(Workspace) + 15) / 16 * 16;   // u64 [KEPT][CLUSTER], in CTA 0
constexpr int AT_COUNTS = AT_MERGED + CLUSTER * KEPT * 8;       // u64 [CLUSTER]: how many each CTA has handed on, in CTA 0
constexpr int AT_ARRIVED = AT_COUNTS + CLUSTER * 8;
constexpr int AT_OWN = AT_ARRIVED + 16;                         // u64 [OWN], or [WARPS][FIT]
constexpr int AT_PARTS = AT_OWN + OWN * 8;                      // float [SPLIT][STRIDE]
static_assert(max2(AT_PARTS + SPLIT * STRIDE * 4, AT_OWN + WARPS * FIT * 8) <= SHARED, "SHARED is too small");

KERNEL __launch_bounds__(THREADS, 1)
index_select(const bf16* q, const float* weights, const bf16* keys, const i64* __restrict__ positions, const i64* __restrict__ slots,
             const u32* scores, const u32* maxima, int* picks, int rate, int blocks, int pitch, int score_warps, int sets) {
  extern __shared__ __align__(16) unsigned char memory[];
  let_next_kernel_start();
  Workspace& work = *reinterpret_cast<Workspace*>(memory);
  u64* const merged = reinterpret_cast<u64*>(memory + AT_MERGED);
  u64* const own = reinterpret_cast<u64*>(memory + AT_OWN);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const i64 token = blockIdx.x / CLUSTER, slot = slots[token];
  const u32 rank = cluster_rank(), arrived = shared_address(memory + AT_ARRIVED);
  const int count = visible_blocks(positions[token], slot, rate, blocks);
  int* const out = picks + token * TOPK;
  if (count <= TOPK) {
    wait_for_previous_kernel();
    for (int i = rank * THREADS + tid; i < TOPK; i += CLUSTER * THREADS) out[i] = i < count ? i : -1;
    return;
  }
  if (rank == 0) {
    for (int i = tid; i < CLUSTER * KEPT / 2; i += THREADS) reinterpret_cast<uint4*>(merged)[i] = make_uint4(0, 0, 0, 0);
    if (tid == 0) {
      merged[CLUSTER * KEPT - 1] = 0;
      barrier_init(arrived, CLUSTER);
      barrier_init_done();
    }
    __syncwarp();
  }
  cluster_arrive();
  // Runs of blocks, equal but for the last ones.
  const int slice = ((count + CLUSTER - 1) / CLUSTER + 15) / 16 * 16;
  const int first = min(static_cast<int>(rank) * slice, count), length = min(slice, count - first);
  const Target home = {peer_address(shared_address(merged), 0) + rank * 8, peer_address(arrived, 0), nullptr};
  Source candidates = {own, nullptr, 0};
  int left = length;  // to choose from; if TOPK or fewer, they are handed on by themselves

  if (count <= LOCAL) {
    const int part = warp % SPLIT, row = warp / SPLIT * 16;
    constexpr int RUN = 16 * WARPS / SPLIT;
    float* parts = reinterpret_cast<float*>(memory + AT_PARTS);
    const bf16* rows = keys + slot * blocks * D;
    if (count * static_cast<int>(gridDim.x / CLUSTER) <= NEAR_KEYS)
      for (int i = tid; i < length; i += THREADS) prefetch_to_l2(rows + static_cast<i64>(first + i) * D, D * 2);
    wait_for_previous_kernel();
    Query query;
    load_query(query, q, weights, token, part, g, t);
    Keys some, following;
    if (row < length) load_keys(some, rows, first + row, count - 1, g, t);
    for (int at = row; at < length; at += RUN) {
      if (at + RUN < length) load_keys(following, rows, first + at + RUN, count - 1, g, t);
      const float2 sum = score_keys(query, some, part * TILES * 8 + 2 * t);
      some = following;
      if (t == 0) parts[part * STRIDE + at + g] = sum.x, parts[part * STRIDE + at + g + 8] = sum.y;
    }
    __syncthreads();
    cluster_wait();  // CTA 0 is ready
    for (int i = tid; i < length; i += THREADS) {
      float score = parts[i];
#pragma unroll
      for (int p = 1; p < SPLIT; ++p) score += parts[p * STRIDE + i];
      const u64 x = with_block(ordered(score), first + i);
      if (length <= TOPK)
        home.put(i, x);
      else
        own[i] = x;
    }
  } else {
    for (int i = tid; i < WARPS * FIT; i += THREADS) own[i] = 0;
    wait_for_previous_kernel();
    const Maxima groups(count, score_warps, sets);
    const u32* tops = maxima + 4 * token * sets * score_warps;
    Intervals interval = {0.f, 0.f};
    int bin = 0;
    if (groups.left >= TOPK) {
      interval = histogram([&](int i) { return tops[i]; }, groups.left, TOPK, work);
      bin = work.found[0];
    } else {
      __syncthreads();
    }
    // What is not below that bin, in the order of the blocks.
    const u32* values = scores + token * pitch;
    const int run = (length + 128 * WARPS - 1) / (128 * WARPS) * 128, stop = min(first + (warp + 1) * run, first + length);
    int kept = 0;
#pragma unroll 4
    for (int i = first + warp * run + lane * 4; i - lane * 4 < stop; i += 128) {
      uint4 four = make_uint4(0, 0, 0, 0);
      if (i < stop) four = *reinterpret_cast<const uint4*>(values + i);  // up to the pitch, a multiple of 4
      const u32 v[4] = {four.x, four.y, four.z, four.w};
      bool keep[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) keep[j] = i + j < stop && interval(v[j]) >= bin;
      if (!__ballot_sync(~0u, keep[0] || keep[1] || keep[2] || keep[3])) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 all = __ballot_sync(~0u, keep[j]);
        const int place = kept + __popc(all & ((1u << lane) - 1));
        if (keep[j] && place < FIT) own[warp * FIT + place] = with_block(v[j], i + j);
        kept += __popc(all);
      }
    }
    const int base = __shfl_sync(~0u, scan(lane == 0 ? kept : 0, work), 0);
    if (warp == WARPS - 1 && lane == 0) work.listed = base + kept;
    const bool crowded = __syncthreads_or(kept > FIT);
    cluster_wait();  // CTA 0 is ready
    if (!crowded) left = work.listed;
    if (!crowded && left <= TOPK) {
      for (int i = lane; i < kept; i += 32) home.put(base + i, own[warp * FIT + i]);
    } else if (crowded) {  // no room: select from all of them
      candidates = {nullptr, values, first};
      if (length <= TOPK)
        for (int i = tid; i < length; i += THREADS) home.put(i, candidates(i));
    }
  }
  const int handed = min(left, TOPK);
  if (left > TOPK) {
    __syncthreads();
    select_best(candidates, count <= LOCAL || !candidates.numbers ? length : WARPS * FIT, work, home);
  }
  if (tid == 0) {
    peer_store_async(peer_address(shared_address(memory + AT_COUNTS), 0) + rank * 8, static_cast<u64>(handed), home.arrived);
    peer_arrive_expecting(home.arrived, handed * 8 + 8);
  }
  if (rank) return;
  barrier_wait_cluster(arrived, 0);
  __syncthreads();
  const u64* counts = reinterpret_cast<const u64*>(memory + AT_COUNTS);
  const int most = static_cast<int>(__reduce_max_sync(~0u, static_cast<u32>(counts[lane % CLUSTER])));
  select_best({merged, nullptr, 0}, most * CLUSTER, work, {0, 0, out});
}
