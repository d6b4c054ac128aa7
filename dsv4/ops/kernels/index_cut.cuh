// Which number of many is the TOPK-th largest, by one block. The numbers are 64 bits: a score in the order of the floats, below it
// its block inverted; no two are equal, 0 is none. A histogram of 2048 equal intervals between the extremes (digits of the bits
// themselves would pile up in a few counters), then digits if many are in one interval, then the rank within it.
// Given: THREADS, a power of two.
#ifndef DSV4_INDEX_CUT
#define DSV4_INDEX_CUT
#include "index_scores.cuh"

constexpr int WARPS = THREADS / 32, BINS = 2048;

struct Workspace {
  int bins[BINS];
  u64 list[THREADS];  // the candidates of one interval
  u64 cut;
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

// Numbers that lie somewhere, get(0) to get(count - 1), or that the threads have in registers, 0 for none.
template <class Get>
struct Stored {
  Get get;
  int count;
  template <class Do>
  DEVICE void each(Do act) const {
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += THREADS) act(get(i));
  }
};
template <class Get>
DEVICE Stored<Get> stored(Get get, int count) { return {get, count}; }

template <int Each>
struct Held {
  u64 x[Each];
  DEVICE Held(const u64* numbers, int count) {
#pragma unroll
    for (int j = 0; j < Each; ++j) {
      const int i = j * THREADS + threadIdx.x;
      x[j] = i < count ? numbers[i] : 0;
    }
  }
  template <class Do>
  DEVICE void each(Do act) const {
#pragma unroll
    for (int j = 0; j < Each; ++j) act(x[j]);
  }
};

// The histogram of the scores of numbers, in which it finds the bin that holds the `wanted`-th largest. All threads.
template <class Numbers>
DEVICE Intervals histogram(const Numbers& numbers, int wanted, Workspace& work) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr u32 MINUS_INF = 0x007fffffu, PLUS_INF = 0xff800000u;  // as `ordered` gives them
  u32 least = PLUS_INF, most = MINUS_INF;                         // of the finite ones
  numbers.each([&](u64 number) {
    const u32 x = number >> 32;
    if (x > MINUS_INF) least = min(least, x);
    if (x < PLUS_INF) most = max(most, x);
  });
  least = __reduce_min_sync(~0u, least);
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) work.low[warp] = least, work.high[warp] = most;
  for (int i = threadIdx.x; i < BINS; i += THREADS) work.bins[i] = 0;
  if (threadIdx.x == 0) work.listed = 0;
  __syncthreads();
  const float low = from_ordered(__reduce_min_sync(~0u, work.low[lane % WARPS]));
  const float range = from_ordered(__reduce_max_sync(~0u, work.high[lane % WARPS])) - low;
  const Intervals interval = {low, range > 0.f && range < -NEG_INF ? (BINS - 1) * fast_reciprocal(range) : 0.f};
  numbers.each([&](u64 x) {
    if (x) atomicAdd(&work.bins[interval(x >> 32)], 1);
  });
  __syncthreads();
  find_bin(work, wanted);
  return interval;
}

// The `wanted`-th largest of numbers of which at least so many are not 0. All threads; a barrier stands before it, and it ends
// with one.
template <class Numbers>
DEVICE u64 find_cut(const Numbers& numbers, int wanted, Workspace& work) {
  const Intervals interval = histogram(numbers, wanted, work);
  const int bin = work.found[0];
  wanted = work.found[1];
  int size = work.bins[bin];
  u64 mask = 0, digits = 0;
#pragma unroll 1
  for (int shift = 53; size > THREADS; shift -= 11) {  // many in one interval: 11 bits at a time, until few are alike
    const u64 field = shift < 0 ? (BINS - 1) >> -shift : static_cast<u64>(BINS - 1) << shift;
    const int down = max(shift, 0);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) work.bins[i] = 0;
    __syncthreads();
    numbers.each([&](u64 x) {
      if (x && interval(x >> 32) == bin && (x & mask) == digits) atomicAdd(&work.bins[(x & field) >> down], 1);
    });
    __syncthreads();
    find_bin(work, wanted);
    const int digit = work.found[0];
    wanted = work.found[1], size = work.bins[digit];
    digits |= static_cast<u64>(digit) << down;
    mask |= field;
  }
  numbers.each([&](u64 x) {
    if (x && interval(x >> 32) == bin && (x & mask) == digits) work.list[atomicAdd(&work.listed, 1)] = x;
  });
  __syncthreads();
  if (threadIdx.x < size) {
    const u64 x = work.list[threadIdx.x];
    int above = 0;
#pragma unroll 4
    for (int j = 0; j < size; ++j) above += work.list[j] > x;
    if (above == wanted - 1) work.cut = x;
  }
  __syncthreads();
  return work.cut;
}

#endif
