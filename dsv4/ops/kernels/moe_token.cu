// The experts of one token in one launch: gate and up with clamped SwiGLU, then down with the weighted sum. A shared expert goes
// along, in FP8 beside the stack or as its last.
//
// Bytes: every picked expert's weights once, 3 * I * H * 0.5625 in NVFP4 (14.2 MB an expert in Flash, 37.2 in Pro), and the
// shared expert's, 3 * I * H. Floor at 4.25 TB/s on an H200 for Flash and 6 experts: 84.9 MB, 20.0 us; with the shared expert
// 110 MB, 25.9 us.
//
// Measured there for Flash (random routing, in a CUDA graph, with the shared expert): 28.6 us after a kernel of 5 us that leaves
// the memory idle, 30.4 us after route_topk, 32.8 us by itself (79 % of the floor), of which decoding is 0.3 us and everything
// but the copies 2 us; without the shared expert 29.0 us, FP8 experts 39.3 us (90 %), bf16 ones 74.2 us (96 %), Pro with the
// shared expert 82.0 us (83 %). Launched cooperatively, 35.1 us after route_topk: then no block starts before all can. Half
// as many warps take 3.5 us more, 6 slots in place of 10 nothing to speak of.
//
// Each block has a range of pairs of rows, the same of every expert (see moe_pairs.cuh), and their weights come through one
// ring in the order of use: of gate and up of each picked expert, and then of down. The shared expert's are known before the
// routing: before the previous kernel has ended, EARLY slots are filled with them, and the others are asked to come to the L2;
// they are used last, up's and down's. h of an expert is complete when all blocks have counted up `ready` for it, which, but
// for the last ones, was long ago when down needs it.
//
// Of WARPS + 3 warps one asks for weights, one counts what the block has written, one fetches h and the others multiply.
// All blocks have to run at a time: a block for each multiprocessor. They wait for nothing but each other and the previous
// kernel, whose blocks all run before the first of these does.
// Defines: see moe_pairs.cuh; DOWN_PAIRS (of rows of y that a warp has at most); EARLY.
#include "moe_pairs.cuh"

constexpr int MOST = 33;  // experts of a token, the shared one among them
__device__ u32 ready[MOST];  // blocks that have written an expert's h; 0 between launches
__device__ u32 ended;

struct Token {
  const __nv_bfloat16* x;
  const int* experts;
  const float* weights;
  Matrix up, down, shared_up, shared_down;
  __nv_bfloat16* h;  // [choices + 1, I] in the order of `place`
  void* y;
  int choices, last_shared, count, rounded;
  float limit;
};

struct Shared {
  Ring ring;
  u64 done[MOST], fetched[MOST];  // an expert's h: the block's part of it is written; all of it is here
  u32 largest[WARPS];
  float inverse[MOST];  // of the powers of two that an expert's h was multiplied with
};

// Lane s holds routed expert s. A number that is none takes no place.
struct Picks {
  int count, expert;
  float weight;
};

DEVICE Picks read_picks(const Token& p) {
  const int lane = threadIdx.x & 31;
  const int expert = lane < p.choices ? p.experts[lane] : -1;
  const float weight = lane < p.choices ? p.weights[lane] : 0.f;
  const u32 live = __ballot_sync(~0u, expert >= 0 && expert < p.count);
  int from = 0;  // the choice of this lane: the live one that has `lane` live ones before it
#pragma unroll
  for (int half = 16; half; half >>= 1)
    if (__popc(live & ((1u << (from + half)) - 1)) <= lane) from += half;
  return {__popc(live), __shfl_sync(~0u, expert, from), __shfl_sync(~0u, weight, from)};
}

// Where things are in the order of slots and of experts.
struct Order {
  Range up, down;
  int shared, routed;  // experts
  DEVICE Order(const Token& p, int picks) : up(I), down(H / 2), shared(BESIDE || p.last_shared), routed(picks) {}
  template <int F, bool Up>
  DEVICE int slots() const {
    constexpr int GROUP = Rows<F, Up>::GROUP;
    return ((Up ? up : down).size() + GROUP - 1) / GROUP;
  }
  DEVICE int nth(int i) const { return i < routed ? shared + i : 0; }  // expert; the shared one is number 0 and comes last
  DEVICE int early() const { return shared * min(EARLY, slots<SHARED_FORMAT, true>()); }
  // The slot that pair 0 of an expert would be in, if that of pair j is the one to be found.
  template <int F, bool Up>
  DEVICE int first_slot(int expert, int j) const {
    const bool is_shared = expert < shared;
    const int others = is_shared ? routed : expert - shared;  // that are before it
    if (Up) return is_shared && j < early() * Rows<F, Up>::GROUP ? 0 : (is_shared ? 0 : early()) + others * slots<FMT, true>();
    return shared * slots<SHARED_FORMAT, true>() + routed * slots<FMT, true>() + others * slots<FMT, false>();
  }
};

// The warp that asks for weights.
// Ask for the codes of some rows of a matrix to come to the L2.
template <int F, bool Up>
DEVICE void prefetch_rows(const Matrix& matrix, i64 row, int rows) {
  const u8* from = matrix.codes + row * Rows<F, Up>::ROW;
  const u32 bytes = rows * Rows<F, Up>::ROW;
#pragma unroll 1
  for (u32 at = 0; at < bytes; at += 16384) prefetch_to_l2(from + at, min(bytes - at, 16384u));
}

DEVICE void feed(const Token& p, u8* memory, Shared& shared) {
  const bool first = (threadIdx.x & 31) == 0;
  Feeder feeder{shared.ring, shared_address(memory)};
  const Order known(p, 0);
  const i64 last = BESIDE ? 0 : p.count - 1;
  const Matrix &shared_up = BESIDE ? p.shared_up : p.up, &shared_down = BESIDE ? p.shared_down : p.down;
  Range now = known.up, later = known.up;
  now.last = later.first = min(now.last, now.first + EARLY * Rows<SHARED_FORMAT, true>::GROUP);
  if (first && known.shared) {
    feeder.ask<SHARED_FORMAT, true>(shared_up, last, now);
    prefetch_rows<SHARED_FORMAT, true>(shared_up, last * 2 * I + later.first, later.size());
    prefetch_rows<SHARED_FORMAT, true>(shared_up, last * 2 * I + I + later.first, later.size());
    prefetch_rows<SHARED_FORMAT, false>(shared_down, last * H + known.down.first * 2, known.down.size() * 2);
  }
  __syncwarp();
  wait_for_previous_kernel();
  const Picks picks = read_picks(p);
#pragma unroll 1
  for (int s = 0; s < picks.count; ++s) {
    const int expert = __shfl_sync(~0u, picks.expert, s);
    if (first) feeder.ask<FMT, true>(p.up, expert, known.up);
  }
  if (first && known.shared) feeder.ask<SHARED_FORMAT, true>(shared_up, last, later);
#pragma unroll 1
  for (int s = 0; s < picks.count; ++s) {
    const int expert = __shfl_sync(~0u, picks.expert, s);
    if (first) feeder.ask<FMT, false>(p.down, expert, known.down);
  }
  if (first && known.shared) feeder.ask<SHARED_FORMAT, false>(shared_down, last, known.down);
}

// The warps that multiply: x into shared memory. Returns the inverse of the power of two.
DEVICE float stage_x(const __nv_bfloat16* x, uint4* to, Shared& shared) {
  constexpr int PIECES = H / 8, EACH = (PIECES + THREADS - 1) / THREADS;
  uint4 v[EACH];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int c = threadIdx.x + i * THREADS;
    v[i] = c < PIECES ? reinterpret_cast<const uint4*>(x)[c] : make_uint4(0, 0, 0, 0);
    largest = max(largest, larger(largest_of_8(v[i])));
  }
  int shift = 0;
  if (FMT != BF16) {
    largest = __reduce_max_sync(~0u, largest);
    if ((threadIdx.x & 31) == 0) shared.largest[threadIdx.x >> 5] = largest;
    barrier(1, THREADS);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = max(largest, shared.largest[w]);
    shift = fp16_shift(static_cast<int>(largest >> 7));
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int c = threadIdx.x + i * THREADS;
    if (c < PIECES) to[place_of(c)] = FMT == BF16 ? v[i] : to_fp16(in_pairs(v[i]), power_of_two(shift));
  }
  barrier(1, THREADS);
  return power_of_two(-shift);
}

// One warp: count up `ready` when the block's part of an expert's h is written.
DEVICE void count_written(const Order& order, Shared& shared) {
  if ((threadIdx.x & 31) != 0) return;
#pragma unroll 1
  for (int i = 0; i < order.shared + order.routed; ++i) {
    const int s = order.nth(i);
    barrier_wait(shared_address(&shared.done[s]), 0);
    count_up(&ready[s]);
  }
}

// One warp: h of each expert into shared memory when all blocks have written it.
DEVICE void fetch(const Token& p, const Order& order, Shared& shared, uint4* to) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int i = 0; i < order.shared + order.routed; ++i) {
    const int s = order.nth(i);
    while (load_acquire(&ready[s]) != gridDim.x) {}
    __syncwarp();
    const float inverse = stage_row<true>(reinterpret_cast<const uint4*>(p.h) + s * (I / 8), to + s * (I / 8));
    if (lane == 0) shared.inverse[s] = inverse;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.fetched[s]));
  }
  if (last_warp(&ended, gridDim.x))
    for (int s = lane; s < MOST; s += 32) ready[s] = 0;
}

// One of the warps that multiply.
struct Multiplier {
  const Token& p;
  const Order& order;
  Shared& shared;
  const u8* memory;

  // Pair number j of the block's of an expert: its two sums.
  template <int F, bool Up>
  DEVICE float2 pair(int first_slot, int j, const uint4* activations, const PairScales<F, Up>& scales) {
    constexpr int GROUP = Rows<F, Up>::GROUP;
    const int slot = first_slot + j / GROUP, pairs = (Up ? order.up : order.down).size();
    const u8* weights = shared.ring.wait(memory, slot);
    const uint4* const rows[1] = {activations};
    float2 sums[1];
    multiply<F, Up, 1, 2>(weights, j % GROUP, rows, scales, sums);
    shared.ring.leave<GROUP>(slot, j, pairs);
    return sums[0];
  }

  // Pairs [from, to) of expert number s: its values of h. `scales`: of the warp's first pair.
  template <int F>
  DEVICE void up(const Matrix& matrix, int s, int expert, float weight, const uint4* x, float inverse,
                 PairScales<F, true> scales, int from, int to) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int j = warp; j < to; j += WARPS) {
      if (j < from) continue;
      if (j > warp) scales = PairScales<F, true>(matrix, expert, order.up.first + j);
      const float2 sums = pair<F, true>(order.first_slot<F, true>(s, j), j, x, scales);
      float both[2] = {sums.x, sums.y};
      const float value = swiglu(warp_sums(both) * inverse, p.limit) * weight;
      if (lane == 0) p.h[static_cast<i64>(s) * I + place(order.up.first + j)] = __float2bfloat16(value);
    }
    if (to == order.up.size() && lane == 0) barrier_arrive(shared_address(&shared.done[s]));
  }

  template <int F>
  DEVICE void down(const Matrix& matrix, int s, int expert, const uint4* h, float2 (&sums)[DOWN_PAIRS],
                   PairScales<F, false> scales) {
    const int warp = threadIdx.x >> 5, pairs = order.down.size();
    barrier_wait(shared_address(&shared.fetched[s]), 0);
    const float inverse = shared.inverse[s];
#pragma unroll
    for (int i = 0; i < DOWN_PAIRS; ++i) {
      const int j = warp + i * WARPS;
      if (j >= pairs) break;
      if (i > 0) scales = PairScales<F, false>(matrix, expert, order.down.first + j);
      const float2 one = pair<F, false>(order.first_slot<F, false>(s, j), j, h + s * (I / 8), scales);
      sums[i].x = fmaf(one.x, inverse, sums[i].x);
      sums[i].y = fmaf(one.y, inverse, sums[i].y);
    }
  }
};

KERNEL __launch_bounds__((WARPS + 3) * 32, 1)
moe_token(const __nv_bfloat16* x, const int* experts, const float* weights, const u8* up, const u8* up_scales,
          const float* up_scale_2, const u8* down, const u8* down_scales, const float* down_scale_2, const u8* shared_up,
          const u8* shared_up_scales, const u8* shared_down, const u8* shared_down_scales, __nv_bfloat16* h, void* y,
          int choices, int last_shared, int count, int rounded, float limit) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Shared shared;
  const Token p{x, experts, weights, {up, up_scales, up_scale_2}, {down, down_scales, down_scale_2},
                {shared_up, shared_up_scales, nullptr}, {shared_down, shared_down_scales, nullptr}, h, y,
                choices, last_shared, count, rounded, limit};
  let_next_kernel_start();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    shared.ring.init();
    for (int i = 0; i < MOST; ++i) {
      barrier_init(shared_address(&shared.done[i]), WARPS);
      barrier_init(shared_address(&shared.fetched[i]), 1);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (warp == WARPS) return feed(p, memory, shared);
  uint4 *staged_x = reinterpret_cast<uint4*>(memory + STAGES * SLOT), *staged_h = staged_x + H / 8;
  const int last = BESIDE ? 0 : count - 1;
  const Matrix &last_up = BESIDE ? p.shared_up : p.up, &last_down = BESIDE ? p.shared_down : p.down;
  const Order known(p, 0);
  const PairScales<SHARED_FORMAT, true> first_up(last_up, last, known.up.first + warp);
  wait_for_previous_kernel();
  if (warp == WARPS + 1) return count_written(Order(p, read_picks(p).count), shared);
  if (warp == WARPS + 2) return fetch(p, Order(p, read_picks(p).count), shared, staged_h);

  const float inverse = stage_x(x, staged_x, shared);
  const Picks picks = read_picks(p);
  const Order order(p, picks.count);
  Multiplier multiplier{p, order, shared, memory};
  const int pairs = order.up.size(), early = min(pairs, order.early() * Rows<SHARED_FORMAT, true>::GROUP);
  if (early > 0) multiplier.up<SHARED_FORMAT>(last_up, 0, last, 1.f, staged_x, inverse, first_up, 0, early);
#pragma unroll 1
  for (int s = 0; s < order.routed; ++s) {
    const int expert = __shfl_sync(~0u, picks.expert, s);
    multiplier.up<FMT>(p.up, order.shared + s, expert, __shfl_sync(~0u, picks.weight, s), staged_x, inverse,
                       PairScales<FMT, true>(p.up, expert, order.up.first + warp), 0, pairs);
  }
  if (order.shared && (early < pairs || pairs == 0))
    multiplier.up<SHARED_FORMAT>(last_up, 0, last, 1.f, staged_x, inverse, first_up, early, pairs);
  float2 alone[DOWN_PAIRS] = {}, sums[DOWN_PAIRS] = {};
#pragma unroll 1
  for (int s = 0; s < order.routed; ++s) {
    const int expert = __shfl_sync(~0u, picks.expert, s);
    multiplier.down<FMT>(p.down, order.shared + s, expert, staged_h, sums,
                         PairScales<FMT, false>(p.down, expert, order.down.first + warp));
  }
  if (order.shared)
    multiplier.down<SHARED_FORMAT>(last_down, 0, last, staged_h, alone,
                                   PairScales<SHARED_FORMAT, false>(last_down, last, order.down.first + warp));
#pragma unroll
  for (int i = 0; i < DOWN_PAIRS; ++i) {
    const int j = warp + i * WARPS;
    if (j >= order.down.size()) break;
    float both[2] = {sums[i].x, sums[i].y}, one[2] = {alone[i].x, alone[i].y};
    const float sum = warp_sums(both) + round_bf16(warp_sums(one));  // as a linear of its own gives it
    const int row = (order.down.first + j) * 2 + lane / 16;
    if (lane % 16 == 0) {
      if (rounded) static_cast<__nv_bfloat16*>(y)[row] = __float2bfloat16(sum);
      else static_cast<float*>(y)[row] = sum;
    }
  }
}
