// How the blocks of moe_token.cu come to know the token's experts: they are given, or the blocks choose them while the shared
// expert's weights come.
//
// To choose, each block computes the scores of its share of the experts, whose rows of the gate are in registers before the
// previous kernel has ended, and leaves them where all blocks find them. A score is not negative, so its sign says that it is
// there. Each block then selects for itself.
//
// Defines, to choose: E, TOP (see route.cuh), ROWS (of the gate that a block has at most).
#ifndef DSV4_MOE_ROUTING
#define DSV4_MOE_ROUTING
#include "moe_pairs.cuh"

constexpr int PIECES = H / 8, EACH = (PIECES + THREADS - 1) / THREADS;  // of x; of them a thread

// Lane s holds routed expert s. A number that is none takes no place.
struct Picks {
  int count, expert;
  float weight;
};

#ifdef E
#include "route.cuh"

__device__ u32 scores[E];  // as bits, their signs set; 0 between launches

struct Routing {
  const uint4* gate;
  const float* bias;
  const i64* slots;
  float scale;

  struct Shared {
    u64 summed, chosen;
    float sums[ROWS][WARPS];
    int count, experts[TOP];
    float weights[TOP];
    DEVICE void init() {
      barrier_init(shared_address(&summed), WARPS);
      barrier_init(shared_address(&chosen), 1);
    }
  };
};

DEVICE void store_relaxed(u32* to, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE u32 load_relaxed(const u32* from) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// The experts whose scores this block computes: ROWS, or fewer, or none.
DEVICE int first_scored() { return min(E, static_cast<int>(blockIdx.x) * ROWS); }
DEVICE int scored() { return min(ROWS, E - first_scored()); }

// The warps that multiply: what each thread has of the block's rows of the gate.
struct Gate {
  uint4 rows[ROWS][EACH];
  DEVICE explicit Gate(const Routing& p) {
    const uint4* from = p.gate + static_cast<i64>(first_scored()) * PIECES;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const int c = threadIdx.x + i * THREADS;
        rows[r][i] = make_uint4(0, 0, 0, 0);
        if (c < PIECES && r < scored()) rows[r][i] = load_now(from + r * PIECES + c);
      }
  }
  DEVICE void multiply(const uint4 (&x)[EACH], Routing::Shared& shared) const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float sums[ROWS] = {};
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      float a[8];
      unpack8(x[i], a);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float b[8];
        unpack8(rows[r][i], b);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[r] = fmaf(a[j], b[j], sums[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sums[r] = warp_sum(sums[r]);
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) shared.sums[r][warp] = sums[r];
      barrier_arrive(shared_address(&shared.summed));
    }
  }
};

// One warp: the scores of the block's experts, to all blocks.
DEVICE void give_scores(Routing::Shared& shared) {
  static_assert(WARPS <= 32 && ROWS <= 32, "");
  const int lane = threadIdx.x & 31;
  barrier_wait(shared_address(&shared.summed), 0);
  float logit = 0.f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float sum = warp_sum(lane < WARPS ? shared.sums[r][lane] : 0.f);
    if (lane == r) logit = sum;
  }
  if (lane < scored()) store_relaxed(&scores[first_scored() + lane], __float_as_uint(score(logit)) | 0x80000000u);
}

// One warp: the experts, for all of the block.
DEVICE void pick_experts(const Routing& p, Routing::Shared& shared) {
  const int lane = threadIdx.x & 31;
  const bool idle = p.slots[0] < 0;
  float biases[PER_LANE], values[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) biases[i] = load_now(p.bias + min(i * 32 + lane, E - 1));
  bool complete;
  do {
    complete = true;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const u32 bits = load_relaxed(&scores[min(i * 32 + lane, E - 1)]);
      complete = complete && bits >> 31;
      values[i] = __uint_as_float(bits & 0x7FFFFFFFu);
    }
    complete = __all_sync(~0u, complete);
    if (!complete) __nanosleep(200);  // asking all the time delays the answers
  } while (!complete);
  const Pick pick = select(values, [&](int i, int) { return biases[i]; });
  const float weight = weight_of(pick.score, p.scale);
  if (lane < TOP) shared.experts[lane] = pick.expert, shared.weights[lane] = weight;
  if (lane == 0) shared.count = idle ? 0 : TOP;
  __syncwarp();
  if (lane == 0) barrier_arrive(shared_address(&shared.chosen));
}

DEVICE Picks read_picks(const Routing&, int, int, Routing::Shared& shared) {
  const int lane = threadIdx.x & 31;
  barrier_wait(shared_address(&shared.chosen), 0);
  return {shared.count, shared.experts[min(lane, TOP - 1)], shared.weights[min(lane, TOP - 1)]};
}

// One warp, after the last use.
DEVICE void forget_scores() {
  for (int e = threadIdx.x & 31; e < E; e += 32) scores[e] = 0;
}

#else

struct Routing {
  const int* experts;
  const float* weights;

  struct Shared {
    DEVICE void init() {}
  };
};

struct Gate {
  DEVICE explicit Gate(const Routing&) {}
  DEVICE void multiply(const uint4 (&)[EACH], Routing::Shared&) const {}
};

DEVICE void give_scores(Routing::Shared&) {}
DEVICE void pick_experts(const Routing&, Routing::Shared&) {}
DEVICE void forget_scores() {}

DEVICE Picks read_picks(const Routing& p, int choices, int count, Routing::Shared&) {
  const int lane = threadIdx.x & 31;
  const int expert = lane < choices ? p.experts[lane] : -1;
  const float weight = lane < choices ? p.weights[lane] : 0.f;
  const u32 live = __ballot_sync(~0u, expert >= 0 && expert < count);
  int from = 0;  // the choice of this lane: the live one that has `lane` live ones before it
#pragma unroll
  for (int half = 16; half; half >>= 1)
    if (__popc(live & ((1u << (from + half)) - 1)) <= lane) from += half;
  return {__popc(live), __shfl_sync(~0u, expert, from), __shfl_sync(~0u, weight, from)};
}

#endif
#endif
