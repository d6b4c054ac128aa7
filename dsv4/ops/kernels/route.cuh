// The choice of experts from their scores, for the kernels that route.
// Defines: E, TOP (k).
#ifndef DSV4_ROUTE
#define DSV4_ROUTE
#include "common.cuh"

constexpr int PER_LANE = (E + 31) / 32;
static_assert(TOP <= 32 && TOP <= E, "");

DEVICE float score(float logit) { return sqrtf(logit > 20.f ? logit : log1pf(expf(logit))); }

// Lane r < TOP has pick r.
struct Pick {
  int expert;
  float score;
};

// One warp: the TOP largest of score + bias, ties to the lower expert. Lane l has scores of experts l, l + 32, ...; `bias_of`
// gives the bias of an expert, the i-th of this lane.
template <typename Bias>
DEVICE Pick select(const float (&scores)[PER_LANE], Bias bias_of) {
  const int lane = threadIdx.x & 31;
  u32 key[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    key[i] = 0;
    if (i * 32 + lane < E) {
      const u32 bits = __float_as_uint(scores[i] + bias_of(i, i * 32 + lane) + 0.f);  // + 0: no negative zero
      key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
  }
  Pick mine{0, 0.f};
#pragma unroll
  for (int r = 0; r < TOP; ++r) {
    u32 best = key[0];
    int at = 0;
    float value = scores[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; ++i)
      if (key[i] > best) best = key[i], at = i, value = scores[i];
    const u32 top = __reduce_max_sync(~0u, best);
    const int expert = __reduce_min_sync(~0u, best == top ? static_cast<u32>(at * 32 + lane) : ~0u);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (expert == i * 32 + lane) key[i] = 0;
    value = __shfl_sync(~0u, value, expert % 32);
    if (lane == r) mine = {expert, value};
  }
  return mine;
}

// The weight of each lane's pick.
DEVICE float weight_of(float score, float scale) {
  const float sum = warp_sum((threadIdx.x & 31) < TOP ? score : 0.f);
  return score / (sum + 1e-20f) * scale;
}
#endif
