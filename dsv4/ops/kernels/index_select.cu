// index_select: the numbers of a token's TOPK best blocks (see ../index_topk.py), for a few tokens.
//
// Up to a few thousand keys everything is latency (1024 keys are 0.26 MB in bf16, 0.06 us at 4.25 TB/s), so one cluster scores its
// keys and selects in one launch; beyond LOCAL keys index_score has scored them.
//
// A score becomes a 32-bit number in the order of the floats, NaN as -inf. Each CTA of the cluster has a run of consecutive
// blocks, of which it puts forward those that can be among the best: sorted, to all CTAs. A CTA then counts how many of the
// others' are better than each of its own, by bisection; that is the place in the output. Of equal scores the lowest
// block's is better: the one earlier in the run, or of the CTA before. What a CTA puts forward is all that it has scored, or what
// is not below the bound that index_score has left, of many thousand scores about TOPK.
//
// What the step does not write while this kernel may already be running (positions, slots) is read before the wait for
// the previous kernel, and the keys are brought to the L2.
//
// Measured on an H200, in a CUDA graph, one launch after another, before the warps shared the counting as they do now: 1024 keys of
// bf16 4.6 us at 1 token, 5.3 at 8, 8.0 at 16 and 13.0 at 32, of which counting was 1.8, 2.2 and 6.4 us at 1, 8 and 32; what
// takes that long are dependent instructions and divisions, not their number. With index_score, one token: 16,384 keys 8.8 in
// fp4 and 9.6 in bf16, 262,144 keys 24.3 in fp4, 25.2 in fp8, 31.5 in bf16. More clusters than run at a time double a launch:
// with one block a multiprocessor 15 of 8 and 30 of 4, with two twice as many.
//
// Given besides what index_scores.cuh wants: TOPK, CLUSTER, SLICE (the most blocks a CTA can have), LOCAL (scored here up to
// this many), SHARED.
#include "index_cut.cuh"
#include "index_maxima.cuh"

constexpr int ROUND = THREADS / GROUP * TILE;  // keys that the warpgroups take at a time
constexpr int NEAR_KEYS = 65536;               // brought to the L2 ahead of time, for all tokens
constexpr int OWN = ((LOCAL + CLUSTER - 1) / CLUSTER + 15) / 16 * 16;  // the most blocks a CTA scores by itself
constexpr int BATCH = 8;                           // scores of a lane on their way, times 4
constexpr int FIT = 2048 / WARPS;                  // survivors of a warp's scores that there is room for
constexpr int KEPT = SLICE < TOPK ? SLICE : TOPK;  // the most a CTA puts forward
constexpr int LIST = (KEPT + 15) / 16 * 16, PLACES = LIST > OWN ? LIST : OWN;

// Shared memory. The survivors lie where the query would be.
constexpr int AT_LISTS = 1024 * (QUERY_BYTES > WARPS * FIT * 8 ? QUERY_BYTES / 1024 : WARPS * FIT * 8 / 1024);  // u32 [CLUSTER][LIST or OWN]
constexpr int AT_SIZES = AT_LISTS + CLUSTER * PLACES * 4;           // u32 [CLUSTER], of the lists
constexpr int AT_ARRIVED = AT_SIZES + (CLUSTER + 3) / 4 * 16;      // a barrier
constexpr int AT_SCORES = AT_ARRIVED + 16;                        // u32 [OWN]
constexpr int AT_VALUES = AT_SCORES + OWN * 4;                    // u32 [LIST], in the order of the blocks
constexpr int AT_BLOCKS = AT_VALUES + LIST * 4;                   // int [LIST]
constexpr int AT_SORTED = AT_BLOCKS + LIST * 4;                   // u32 [LIST], and their blocks
constexpr int AT_PLACES = AT_SORTED + LIST * 8;                   // int [PLACES]
constexpr int AT_WEIGHT = AT_PLACES + PLACES * 4;                 // float [64]
constexpr int AT_WORK = AT_WEIGHT + 256;
static_assert(AT_WORK + sizeof(Workspace) <= SHARED, "SHARED is too small");

// The least of those maxima that are in the bin of the TOPK-th or in a higher one; 0 if there are fewer. All threads.
DEVICE u32 least_of_best(const u32* maxima, int count, Workspace& work) {
  if (count < TOPK) {
    __syncthreads();
    return 0;
  }
  const auto numbers = stored([=](int i) { return with_block(maxima[i], 0); }, count);
  const Intervals interval = histogram(numbers, TOPK, work);
  u32 least = ~0u;
  numbers.each([&](u64 x) {
    if (interval(x >> 32) >= work.found[0]) least = min(least, static_cast<u32>(x >> 32));
  });
  least = __reduce_min_sync(~0u, least);
  if ((threadIdx.x & 31) == 0) work.low[threadIdx.x >> 5] = least;
  __syncthreads();
  return __reduce_min_sync(~0u, work.low[(threadIdx.x & 31) % WARPS]);
}

// Where numbers are: in shared memory, or scores whose blocks are counted from the first one's.
struct Source {
  const u64* numbers;
  const u32* scores;
  int first;
  DEVICE u64 operator()(int i) const { return numbers ? numbers[i] : with_block(scores[i], first + i); }
};

// The KEPT best of `count` numbers in the order of their blocks, or all if there are no more, in the same order.
__device__ __noinline__ void collect(const Source get, int count, u32* values, int* blocks, Workspace& work) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u64 cut = count > KEPT ? find_cut(stored(get, count), KEPT, work) : 1;
  const int run = (count + THREADS - 1) / THREADS * 32, begin = min(warp * run, count), end = min(begin + run, count);
  int total = 0;
#pragma unroll 1
  for (int i = begin + lane; i - lane < end; i += 32) total += __popc(__ballot_sync(~0u, i < end && get(i) >= cut));
  int place = __shfl_sync(~0u, scan(lane == 0 ? total : 0, work), 0);
#pragma unroll 1
  for (int i = begin + lane; i - lane < end; i += 32) {
    const u64 x = i < end ? get(i) : 0;
    const u32 all = __ballot_sync(~0u, x >= cut);
    const int at = place + __popc(all & ((1u << lane) - 1));
    if (x >= cut) values[at] = x >> 32, blocks[at] = ~static_cast<u32>(x);
    place += __popc(all);
  }
}

// How the warps share groups of 32 numbers of `count`: this warp has `group` and every WARPS-th after it, and of what the group's
// numbers are compared with one of `parts` parts, 1 << shift.
struct Sharing {
  int group, part, shift, parts;
  DEVICE Sharing(int count) {
    const int warp = threadIdx.x >> 5, bits = count > 32 ? 32 - __clz((count - 1) / 32) : 0;
    group = warp & ((1 << bits) - 1), part = warp >> bits;
    shift = max(31 - __clz(WARPS) - bits, 0), parts = 1 << shift;
  }
};

DEVICE int count_above(const u32* numbers, int from, int to, u32 limit) {
  int above = 0;
#pragma unroll 4
  for (int j = from; j < to; j += 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(numbers + j);
    above += (v.x > limit) + (v.y > limit) + (v.z > limit) + (v.w > limit);
  }
  return above;
}

// Add to places[i] how many of `count` numbers are above number i, or equal to it and before it. Zeros follow them, to a multiple
// of 16.
DEVICE void add_places(const u32* numbers, int count, int* places) {
  const Sharing sharing(count);
  const int span = ((count + 15) / 16 * 4 + sharing.parts - 1 >> sharing.shift) * 4;
  const int from = sharing.part * span, to = min(from + span, (count + 15) / 16 * 16);
  for (int group = sharing.group * 32; group < count; group += WARPS * 32) {
    const int i = group + (threadIdx.x & 31);
    const u32 value = numbers[min(i, count - 1)];
    int above = count_above(numbers, from, min(to, group), value - 1) + count_above(numbers, max(from, group + 32), to, value);
    for (int j = max(from, group); j < min(to, group + 32); j += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(numbers + j);
      above += (v.x > value - (j < i)) + (v.y > value - (j + 1 < i)) + (v.z > value - (j + 2 < i)) + (v.w > value - (j + 3 < i));
    }
    if (i < count) atomicAdd(&places[i], above);
  }
}

DEVICE constexpr int power_of_four_up_to(int x) { return x < 4 ? 1 : 4 * power_of_four_up_to(x / 4); }

// Add to places[i] how many of the other CTAs' falling lists, of at most Most numbers each, are better than number i of this
// one's: larger, or equal and of a CTA before it.
template <int Most, class Size>
DEVICE void add_better(const u32* numbers, int count, const u32* lists, int rank, int* places, Size size_of) {
  const Sharing sharing(count);
  for (int group = sharing.group * 32; group < count; group += WARPS * 32) {
    const int i = group + (threadIdx.x & 31);
    const u32 value = numbers[min(i, count - 1)];
    int all = 0;
#pragma unroll 2
    for (int other = sharing.part; other < CLUSTER; other += sharing.parts) {
      const u32* const list = lists + other * Most;
      const u32 limit = value - (other < rank);
      const int size = other == rank ? 0 : size_of(other);
      int better = 0;
#pragma unroll
      for (int step = power_of_four_up_to(Most); step; step /= 4) {  // to a quarter of what is left
        const int before = better;
#pragma unroll
        for (int n = 1; n < 4; ++n) {
          const int at = before + n * step;
          if (at <= size && list[at - 1] > limit) better = at;
        }
      }
      all += better;
    }
    if (i < count) atomicAdd(&places[i], all);
  }
}

KERNEL __launch_bounds__(THREADS, 1)
index_select(const bf16* q, const float* weights, const u8* keys, const i64* __restrict__ positions, const i64* __restrict__ slots,
             const u32* scores, const u32* maxima, int* picks, int rate, int blocks, int pitch, int most, int groups) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Workspace& work = *reinterpret_cast<Workspace*>(memory + AT_WORK);
  u32* const lists = reinterpret_cast<u32*>(memory + AT_LISTS);
  u32* const own = reinterpret_cast<u32*>(memory + AT_SCORES);
  u32* const values = reinterpret_cast<u32*>(memory + AT_VALUES);
  int* const numbers = reinterpret_cast<int*>(memory + AT_BLOCKS);
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
  // Runs of blocks, equal but for the last ones.
  const int slice = ((count + CLUSTER - 1) / CLUSTER + 15) / 16 * 16;
  const int first = min(static_cast<int>(rank) * slice, count), length = min(slice, count - first);
  int* const places = reinterpret_cast<int*>(memory + AT_PLACES);
  for (int i = tid; i < PLACES; i += THREADS) places[i] = 0;
  if (tid == 0) {
    barrier_init(arrived, count <= LOCAL ? 1 : CLUSTER);
    barrier_init_done();
    if (count <= LOCAL) barrier_arrive_expecting(arrived, ((count + 15) / 16 - (length + 15) / 16) * 64);
  }
  __syncwarp();
  cluster_arrive_relaxed();
  const u32* const far = scores + token * pitch + first;
  int put = min(length, KEPT);  // how many this CTA puts forward

  if (count <= LOCAL) {
    const Rows rows(keys, slot, blocks, count);
    if (count * static_cast<int>(gridDim.x / CLUSTER) <= NEAR_KEYS)
      for (int i = warp * 16; lane == 0 && i < length; i += 16 * WARPS) rows.prefetch(first + i, 16);
    float* const weight = reinterpret_cast<float*>(memory + AT_WEIGHT);
    const int row = warp / 4 * TILE + warp % 4 * 16;
    Keys current;
    wait_for_previous_kernel();
    let_next_kernel_start();  // attend has many blocks, which would delay the kernel before
    if (warp / 4 * TILE < length) load_keys(current, rows, first + row);
    stage_query(memory, weight, q, weights, token);
    stores_before_products();
    __syncthreads();
    for (int at = row; at - warp % 4 * 16 < length; at += ROUND) {
      u32 a[STEPS][4];
      decode_keys(current, a);
      Products products;
      products.start(a, shared_address(memory));
      products.wait<0>();
      const u32 scale = t & 1 ? current.high_scale : current.low_scale;
      const u32 score = score_of<false>(products, products, weight, scale);
      if (t < 2 && at < length) own[at + g + t * 8] = at + g + t * 8 < length ? score : 0;
      if (at - warp % 4 * 16 + ROUND < length) load_keys(current, rows, first + at + ROUND);
    }
    __syncthreads();
    add_places(own, length, places);
    __syncthreads();
    for (int i = tid; i < length; i += THREADS) lists[rank * OWN + places[i]] = own[i];
    __syncthreads();
    cluster_wait();  // all have begun
    const int fours = (length + 15) / 16 * 4;
    for (int i = tid; i < fours * CLUSTER; i += THREADS) {
      const int other = i % CLUSTER;
      float4* const from = reinterpret_cast<float4*>(lists + rank * OWN) + i / CLUSTER;
      const float v[4] = {from->x, from->y, from->z, from->w};
      if (other != static_cast<int>(rank))
        peer_store_async(peer_address(shared_address(from), other), v, peer_address(arrived, other));
    }
    barrier_wait(arrived, 0);
    add_better<OWN>(own, length, lists, rank, places, [=](int other) { return min(slice, count - other * slice); });
    __syncthreads();
    for (int i = tid; i < length; i += THREADS)
      if (places[i] < TOPK) out[places[i]] = first + i;
    return;
  }
  u64* const survivors = reinterpret_cast<u64*>(memory);  // [WARPS][FIT]
  for (int i = tid; i < WARPS * FIT; i += THREADS) survivors[i] = 0;
  const int left = Maxima(count, groups).left;
  wait_for_previous_kernel();
  let_next_kernel_start();
  // A lane's four scores of each BATCH of 128; the first are on their way before the bound is known.
  const int run = (length + 128 * WARPS - 1) / (128 * WARPS) * 128, end = min((warp + 1) * run, length);
  int at = warp * run + lane * 4, kept = 0;
  uint4 four[BATCH];
  auto load = [&] {
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
      four[n] = make_uint4(0, 0, 0, 0);
      if (at + n * 128 < end) four[n] = *reinterpret_cast<const uint4*>(far + at + n * 128);  // up to the pitch
    }
  };
  load();
  const u32 bound = least_of_best(maxima + token * most, left, work);
  // What is not below it, in the order of the blocks.
#pragma unroll 1
  while (true) {
    u32 mine = 0;  // four bits a batch
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
      const u32 v[4] = {four[n].x, four[n].y, four[n].z, four[n].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) mine |= (v[j] >= bound && at + n * 128 + j < end ? 1u : 0u) << (4 * n + j);
    }
    u32 all = __reduce_or_sync(~0u, mine);
#pragma unroll 1
    while (all) {
      const int shift = (__ffs(all) - 1) / 4 * 4;
      all &= ~(15u << shift);
      int place = kept;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 others = __ballot_sync(~0u, mine >> (shift + j) & 1);
        place += __popc(others & ((1u << lane) - 1));  // of lower lanes
        kept += __popc(others);
      }
#pragma unroll 1
      for (u32 bits = mine >> shift & 15; bits; bits &= bits - 1, ++place) {
        const int i = at + shift * 32 + __ffs(bits) - 1;
        if (place < FIT) survivors[warp * FIT + place] = with_block(far[i], first + i);
      }
    }
    at += 128 * BATCH;
    if (at - lane * 4 >= end) break;
    load();
  }
  const int base = __shfl_sync(~0u, scan(lane == 0 ? kept : 0, work), 0);
  if (warp == WARPS - 1 && lane == 0) work.listed = base + kept;
  const bool crowded = __syncthreads_or(kept > FIT);
  if (!crowded) put = min(work.listed, KEPT);
  if (!crowded && work.listed <= KEPT) {
    for (int i = lane; i < kept; i += 32) {
      const u64 x = survivors[warp * FIT + i];
      values[base + i] = x >> 32, numbers[base + i] = ~static_cast<u32>(x);
    }
  } else {  // too many; from all scores if there was no room for some
    const Source from = crowded ? Source{nullptr, far, first} : Source{survivors, nullptr, 0};
    __syncthreads();
    collect(from, crowded ? length : WARPS * FIT, values, numbers, work);
  }
  u32* const sorted = reinterpret_cast<u32*>(memory + AT_SORTED);
  int* const sorted_numbers = reinterpret_cast<int*>(sorted + LIST);
  for (int i = put + tid; i < LIST; i += THREADS) values[i] = 0;
  __syncthreads();
  add_places(values, put, places);  // to sort them
  __syncthreads();
  for (int i = tid; i < put; i += THREADS) sorted[places[i]] = values[i], sorted_numbers[places[i]] = numbers[i];
  if (tid < (4 - put % 4) % 4) sorted[put + tid] = 0;
  __syncthreads();
  for (int i = tid; i < put; i += THREADS) places[i] = i;
  cluster_wait();  // all have begun
  // A warp deals with one CTA or several, alone or with others.
  constexpr int SHARING = WARPS > CLUSTER ? WARPS / CLUSTER : 1;
  const int part = warp / CLUSTER * 32 + lane;
  for (int other = warp % CLUSTER; other < CLUSTER; other += WARPS) {
    const u32 there = peer_address(arrived, other);
    for (int i = part; i < (put + 3) / 4; i += SHARING * 32) {
      const float4 four = reinterpret_cast<const float4*>(sorted)[i];
      const float v[4] = {four.x, four.y, four.z, four.w};
      peer_store_async(peer_address(shared_address(lists + rank * LIST + i * 4), other), v, there);
    }
    if (part == 0) {
      peer_store_async(peer_address(shared_address(memory + AT_SIZES) + rank * 4, other), __int_as_float(put), there);
      peer_arrive_expecting(there, (put + 3) / 4 * 16 + 4);
    }
  }
  barrier_wait(arrived, 0);
  __syncthreads();
  const int* const sizes = reinterpret_cast<const int*>(memory + AT_SIZES);
  add_better<LIST>(sorted, put, lists, rank, places, [=](int other) { return sizes[other]; });
  __syncthreads();
  for (int i = tid; i < put; i += THREADS)
    if (places[i] < TOPK) out[places[i]] = sorted_numbers[i];
}
