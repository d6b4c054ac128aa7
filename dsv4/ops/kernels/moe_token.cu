// The experts of one token in one launch: gate and up with clamped SwiGLU, then down with the weighted sum. A shared expert goes
// along, in FP8 beside the stack or as its last.
//
// Bytes: every picked expert's weights once, 3 * I * H * 0.5625 in NVFP4 (14.2 MB an expert in Flash, 37.2 in Pro), and the
// shared expert's, 3 * I * H. Floor at 4.25 TB/s on an H200 for Flash and 6 experts: 84.9 MB, 20.0 us; with the shared expert
// 110 MB, 25.9 us.
//
// Measured there (in CUDA graphs, weights past the L2) with the choice of experts inside, and in brackets for route_topk and
// this kernel one after the other. Flash with the FP8 shared expert: 33.5 us by itself (37.1), and 34.3 us (37.0) more than a
// linear and hc_mix alone when it follows them; with all experts in NVFP4 32.0 us (36.1) and 33.0 us (36.7); Pro with the FP8
// shared expert 80.2 us (85.6) and 83.5 us (85.1).
//
// After hc_mix, by stamps: x is in shared memory 0.8 us after the end of that, the last scores are given at 2.0, the experts
// are known at 4.1, gate and up rows are done at 19.5, the end is at 30. What is exchanged between blocks is slow under the
// load of the weights: a round of counting up and polling takes 0.6 us on an idle device, 1.5 us under load, and 2.4 with the
// fence that orders h before its count. Without decoding and products it takes 1 us less. 5 slots of the ring lose 1 us,
// 12 warps 3, weights with the usual priority in the L2 5; 7 or 8 slots and 20 warps gain nothing. Values of h that say
// themselves that they are there, in place of the count, were 2 to 6 us slower, as was the shared expert's down before the
// routed experts; groups of rows dealt out to the blocks in turn gained nothing.
//
// Each block has a range of pairs of rows, the same of every expert (see moe_pairs.cuh), and their weights come through one
// ring in the order of use: of gate and up of the shared expert and of each picked one, and then of down. The shared expert's
// are known before the routing: before the previous kernel has ended, the ring is filled with them; gate and up are used
// while the experts are chosen. h of an expert is complete when all blocks have counted up `ready` for it, which, but for the
// last ones, was long ago when down needs it.
//
// Of WARPS + 3 warps one asks for weights, one counts what the block has written, one fetches h and the others multiply.
// All blocks have to run at a time: a block for each multiprocessor. They wait for nothing but each other and the previous
// kernel, whose blocks all run before the first of these does.
// Defines: see moe_pairs.cuh and moe_routing.cuh; DOWN_PAIRS (of rows of y that a warp has at most).
#include "moe_routing.cuh"

constexpr int MOST = 33;  // experts of a token, the shared one among them
__device__ u32 ready[MOST];  // blocks that have written an expert's h; 0 between launches
__device__ u32 ended;

struct Token {
  const uint4* x;
  Routing routing;
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
  Routing::Shared routing;
};

// Where things are in the order of slots. The shared expert, if any, is number 0 of the experts.
struct Order {
  Range up, down;
  int shared, routed;  // experts
  DEVICE Order(const Token& p, int picks) : up(I), down(H / 2), shared(BESIDE || p.last_shared), routed(picks) {}
  DEVICE int experts() const { return shared + routed; }
  template <int F, bool Up>
  DEVICE int slots() const {
    constexpr int GROUP = Rows<F, Up>::GROUP;
    return ((Up ? up : down).size() + GROUP - 1) / GROUP;
  }
  template <bool Up>
  DEVICE int slots_before(int expert) const {
    return min(expert, shared) * slots<SHARED_FORMAT, Up>() + max(expert - shared, 0) * slots<FMT, Up>();
  }
  template <bool Up>
  DEVICE int first_slot(int expert) const {
    return (Up ? 0 : slots_before<true>(experts())) + slots_before<Up>(expert);
  }
};

// The warp that asks for weights.
DEVICE void feed(const Token& p, u8* memory, Shared& shared) {
  const bool first = (threadIdx.x & 31) == 0;
  Feeder feeder{shared.ring, shared_address(memory)};
  const Order known(p, 0);
  const i64 last = BESIDE ? 0 : p.count - 1;
  const Matrix &shared_up = BESIDE ? p.shared_up : p.up, &shared_down = BESIDE ? p.shared_down : p.down;
  if (first && known.shared) feeder.ask<SHARED_FORMAT, true>(shared_up, last, known.up);
  __syncwarp();
  wait_for_previous_kernel();
  pick_experts(p.routing, shared.routing);
  const Picks picks = read_picks(p.routing, p.choices, p.count, shared.routing);
#pragma unroll 1
  for (int s = 0; s < picks.count; ++s) {
    const int expert = __shfl_sync(~0u, picks.expert, s);
    if (first) feeder.ask<FMT, true>(p.up, expert, known.up);
  }
  if (first && known.shared) feeder.ask<SHARED_FORMAT, false>(shared_down, last, known.down);
#pragma unroll 1
  for (int s = 0; s < picks.count; ++s) {
    const int expert = __shfl_sync(~0u, picks.expert, s);
    if (first) feeder.ask<FMT, false>(p.down, expert, known.down);
  }
  let_next_kernel_start();  // what begins earlier takes memory and bandwidth from this one
}

// The warps that multiply: x into shared memory. Returns the inverse of the power of two.
DEVICE float stage_x(const uint4* x, const Gate& gate, uint4* to, Shared& shared) {
  uint4 v[EACH];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int c = threadIdx.x + i * THREADS;
    v[i] = c < PIECES ? x[c] : make_uint4(0, 0, 0, 0);
    largest = max(largest, larger(largest_of_8(v[i])));
  }
  gate.multiply(v, shared.routing);
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
    if (c < PIECES) to[place_of(c)] = FMT == BF16 ? v[i] : operand8<FP8>(in_pairs(v[i]), two_to(shift));
  }
  barrier(1, THREADS);
  return two_to(-shift);
}

// One warp: count up `ready` when the block's part of an expert's h is written.
DEVICE void count_written(const Order& order, Shared& shared) {
  if ((threadIdx.x & 31) != 0) return;
#pragma unroll 1
  for (int s = 0; s < order.experts(); ++s) {
    barrier_wait(shared_address(&shared.done[s]), 0);
    count_up(&ready[s]);
  }
}

// One warp: h of each expert into shared memory when all blocks have written it.
DEVICE void fetch(const Token& p, const Order& order, Shared& shared, uint4* to) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int s = 0; s < order.experts(); ++s) {
    while (load_acquire(&ready[s]) != gridDim.x) {}
    __syncwarp();
    const float inverse = stage_h(reinterpret_cast<const uint4*>(p.h) + s * (I / 8), to + s * (I / 8));
    if (lane == 0) shared.inverse[s] = inverse;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.fetched[s]));
  }
  if (last_warp(&ended, gridDim.x)) {
    for (int s = lane; s < MOST; s += 32) ready[s] = 0;
    forget_scores();
  }
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
    const float2 sums = multiply<F, Up>(weights, j % GROUP, activations, scales);
    shared.ring.leave<GROUP>(slot, j, pairs);
    return sums;
  }

  // Expert number s: the warp's values of h. `scales`: of its first pair, of any in NVFP4.
  template <int F>
  DEVICE void up(const Matrix& matrix, int s, int expert, float weight, const uint4* x, float inverse, PairScales<F, true> scales) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_slot = order.first_slot<true>(s);
#pragma unroll 1
    for (int j = warp; j < order.up.size(); j += WARPS) {
      if (j > warp) scales = PairScales<F, true>(matrix, expert, order.up.first + j, scales.whole);
      const float2 sums = pair<F, true>(first_slot, j, x, scales);
      float both[2] = {sums.x, sums.y};
      const float value = swiglu(warp_sums(both) * inverse, p.limit) * weight;
      if (lane == 0) p.h[static_cast<i64>(s) * I + place(order.up.first + j)] = __float2bfloat16(value);
    }
    if (lane == 0) barrier_arrive(shared_address(&shared.done[s]));
  }

  // And its part of the rows of y, added to `sums`.
  template <int F>
  DEVICE void down(const Matrix& matrix, int s, int expert, const uint4* h, float2 (&sums)[DOWN_PAIRS], PairScales<F, false> scales) {
    const int warp = threadIdx.x >> 5, pairs = order.down.size(), first_slot = order.first_slot<false>(s);
    barrier_wait(shared_address(&shared.fetched[s]), 0);
    const float inverse = shared.inverse[s];
#pragma unroll
    for (int i = 0; i < DOWN_PAIRS; ++i) {
      const int j = warp + i * WARPS;
      if (j >= pairs) break;
      if (i > 0) scales = PairScales<F, false>(matrix, expert, order.down.first + j, scales.whole);
      const float2 one = pair<F, false>(first_slot, j, h + s * (I / 8), scales);
      sums[i].x = fmaf(one.x, inverse, sums[i].x);
      sums[i].y = fmaf(one.y, inverse, sums[i].y);
    }
  }
};

DEVICE float2 shuffle(float2 v, int lane) { return make_float2(__shfl_sync(~0u, v.x, lane), __shfl_sync(~0u, v.y, lane)); }

KERNEL __launch_bounds__((WARPS + 3) * 32, 1)
moe_token(const uint4* x,
#ifdef E
          const uint4* gate, const float* bias, const i64* slots, float scale,
#else
          const int* experts, const float* weights,
#endif
          const u8* up, const u8* up_scales, const float* up_scale_2, const u8* down, const u8* down_scales,
          const float* down_scale_2, const u8* shared_up, const u8* shared_up_scales, const u8* shared_down,
          const u8* shared_down_scales, __nv_bfloat16* h, void* y, int choices, int last_shared, int count, int rounded,
          float limit) {
#ifdef E
  const Routing routing{gate, bias, slots, scale};
#else
  const Routing routing{experts, weights};
#endif
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Shared shared;
  const Token p{x, routing, {up, up_scales, up_scale_2}, {down, down_scales, down_scale_2},
                {shared_up, shared_up_scales, nullptr}, {shared_down, shared_down_scales, nullptr}, h, y,
                choices, last_shared, count, rounded, limit};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    shared.ring.init();
    for (int i = 0; i < MOST; ++i) {
      barrier_init(shared_address(&shared.done[i]), WARPS);
      barrier_init(shared_address(&shared.fetched[i]), 1);
    }
    shared.routing.init();
    barrier_init_done();
  }
  __syncthreads();
  if (warp == WARPS) return feed(p, memory, shared);
  uint4 *staged_x = reinterpret_cast<uint4*>(memory + STAGES * SLOT), *staged_h = staged_x + PIECES;
  if (warp > WARPS) {
    wait_for_previous_kernel();
    if (warp == WARPS + 1) give_scores(shared.routing);
    const Order order(p, read_picks(routing, choices, count, shared.routing).count);
    return warp == WARPS + 1 ? count_written(order, shared) : fetch(p, order, shared, staged_h);
  }

  const int last = BESIDE ? 0 : count - 1;
  const Matrix &last_up = BESIDE ? p.shared_up : p.up, &last_down = BESIDE ? p.shared_down : p.down;
  const Order known(p, 0);
  const int up_pair = known.up.first + warp, down_pair = known.down.first + warp;
  const Gate rows(routing);
  const PairScales<SHARED_FORMAT, true> last_up_scales(last_up, last, up_pair, matrix_scales<SHARED_FORMAT, true>(last_up, last));
  const PairScales<SHARED_FORMAT, false> last_down_scales(last_down, last, down_pair,
                                                          matrix_scales<SHARED_FORMAT, false>(last_down, last));
  wait_for_previous_kernel();
  const float inverse = stage_x(x, rows, staged_x, shared);
  if (known.shared) Multiplier{p, known, shared, memory}.up<SHARED_FORMAT>(last_up, 0, last, 1.f, staged_x, inverse, last_up_scales);
  const Picks picks = read_picks(routing, choices, count, shared.routing);
  const float2 up_scale = matrix_scales<FMT, true>(p.up, max(picks.expert, 0));  // of each lane's expert
  const float2 down_scale = matrix_scales<FMT, false>(p.down, max(picks.expert, 0));
  const Order order(p, picks.count);
  Multiplier multiplier{p, order, shared, memory};
#pragma unroll 1
  for (int s = 0; s < order.routed; ++s) {
    const int expert = __shfl_sync(~0u, picks.expert, s);
    multiplier.up<FMT>(p.up, order.shared + s, expert, __shfl_sync(~0u, picks.weight, s), staged_x, inverse,
                       PairScales<FMT, true>(p.up, expert, up_pair, shuffle(up_scale, s)));
  }
  float2 alone[DOWN_PAIRS] = {}, sums[DOWN_PAIRS] = {};
  if (order.shared) multiplier.down<SHARED_FORMAT>(last_down, 0, last, staged_h, alone, last_down_scales);
#pragma unroll 1
  for (int s = 0; s < order.routed; ++s) {
    const int expert = __shfl_sync(~0u, picks.expert, s);
    multiplier.down<FMT>(p.down, order.shared + s, expert, staged_h, sums,
                         PairScales<FMT, false>(p.down, expert, down_pair, shuffle(down_scale, s)));
  }
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
