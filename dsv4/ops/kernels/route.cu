// route_topk, route_hash: router scores and the choice of experts.
//
// Bytes at one token: route_topk reads the gate, Flash 256 x 4096 bf16 2.10 MB (0.49 us at 4.25 TB/s), Pro 384 x 7168
// 5.5 MB (1.3 us); route_hash six or eight of its rows, 49 / 115 KB.
// Measured on an H200 in a CUDA graph, of which a launch is about 1.5 us: route_topk Flash 4.5 us at 1 token, 6.0 at 8, with
// a matrix product 10.4 at 32 and 16 at 2048; Pro 5.4, 12.3, 12.4. route_hash Flash 2.5 us at 1 token, 2.9 at 32.
// Latency throughout: the gate's rows, an atomic, the scores from the L2, and TOP dependent rounds of selection.
//
// route_topk: a warp holds a part of one expert's row in registers and goes through its group's tokens, BATCH at a time;
// the last block of a token group to finish selects, a warp a token. route_select is the selection alone, for logits from
// a matrix product. route_hash: one block a token, SPLIT warps a picked expert.
//
// Defines: H (a multiple of 8), E, TOP (k), GATE_FLOAT 0 or 1, SPLIT warps a row, SETS rows a block, BATCH 1, 2 or 4;
// HASH for route_hash, where SETS is TOP and BATCH is 1.
#include "common.cuh"

constexpr int VECTORS = H / 8;
constexpr int STEPS = (VECTORS + SPLIT * 32 - 1) / (SPLIT * 32);
constexpr int WARPS = SPLIT * SETS;
constexpr int PER_LANE = (E + 31) / 32;
constexpr int MAX_GROUP = 32;
static_assert(H % 8 == 0 && TOP <= 32 && TOP <= E, "");

__device__ u32 arrivals[64];  // one a token group, each 0 between launches

// Part `part` of row `row` of the gate as float32, 0 beyond its end.
DEVICE void load_row(const void* gate, i64 row, int part, float (&w)[STEPS][8]) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const int v = (s * SPLIT + part) * 32 + (threadIdx.x & 31);
    if (v >= VECTORS) {
#pragma unroll
      for (int i = 0; i < 8; ++i) w[s][i] = 0.f;
    } else if (GATE_FLOAT) {
      const float4* source = static_cast<const float4*>(gate) + 2 * (row * VECTORS + v);
      const float4 a = __ldg(source), b = __ldg(source + 1);
      w[s][0] = a.x; w[s][1] = a.y; w[s][2] = a.z; w[s][3] = a.w;
      w[s][4] = b.x; w[s][5] = b.y; w[s][6] = b.z; w[s][7] = b.w;
    } else {
      unpack8(__ldg(static_cast<const uint4*>(gate) + row * VECTORS + v), w[s]);
    }
  }
}

// Sums of one part of a row with the same part of BATCH tokens, of which `count` exist; lane 0 gets the first token's, lane
// 32 / BATCH the second's, and so on.
DEVICE float dot_part(const uint4* x, int count, int part, const float (&w)[STEPS][8]) {
  uint4 raw[BATCH][STEPS];
  float sum[BATCH], one[8];
#pragma unroll
  for (int t = 0; t < BATCH; ++t)
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int v = (s * SPLIT + part) * 32 + (threadIdx.x & 31);
      raw[t][s] = v < VECTORS && t < count ? x[t * static_cast<i64>(VECTORS) + v] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
  for (int t = 0; t < BATCH; ++t) {
    float eight[8] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      unpack8(raw[t][s], one);
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = fmaf(w[s][i], one[i], eight[i]);
    }
    sum[t] = ((eight[0] + eight[1]) + (eight[2] + eight[3])) + ((eight[4] + eight[5]) + (eight[6] + eight[7]));
  }
  return warp_sums(sum);
}

DEVICE float score(float logit) { return sqrtf(logit > 20.f ? logit : log1pf(expf(logit))); }

// Lane r < TOP holds pick r: its expert and its score.
DEVICE void write_picks(int expert, float s, float scale, i64 token, int* experts, float* weights) {
  const int lane = threadIdx.x & 31;
  const float sum = warp_sum(lane < TOP ? s : 0.f);
  if (lane < TOP) {
    experts[token * TOP + lane] = expert;
    weights[token * TOP + lane] = s / (sum + 1e-20f) * scale;
  }
}

DEVICE void write_none(i64 token, int* experts, float* weights) {
  const int lane = threadIdx.x & 31;
  if (lane < TOP) {
    experts[token * TOP + lane] = -1;
    weights[token * TOP + lane] = 0.f;
  }
}

#ifndef HASH

// One warp: the TOP largest of score + bias, ties to the lower expert. `scores` may be logits still.
template <bool Logits>
DEVICE void select(const float* scores, const float* bias, float scale, i64 token, int* experts, float* weights) {
  const int lane = threadIdx.x & 31;
  u32 key[PER_LANE];
  float s[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = i * 32 + lane;
    key[i] = 0;
    s[i] = 0.f;
    if (e < E) {
      s[i] = __ldcg(scores + e);
      if (Logits) s[i] = score(s[i]);
      const u32 bits = __float_as_uint(s[i] + __ldg(bias + e) + 0.f);  // + 0: no negative zero
      key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
  }
  int my_expert = 0;
  float my_score = 0.f;
#pragma unroll
  for (int r = 0; r < TOP; ++r) {
    u32 best = key[0];
    int at = 0;
    float value = s[0];
#pragma unroll
    for (int i = 1; i < PER_LANE; ++i)
      if (key[i] > best) best = key[i], at = i, value = s[i];
    const u32 top = __reduce_max_sync(~0u, best);
    const u32 expert = __reduce_min_sync(~0u, best == top ? at * 32 + lane : 0x7fffffffu);
    value = __shfl_sync(~0u, value, expert & 31);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (expert == i * 32 + lane) key[i] = 0;
    if (lane == r) my_expert = expert, my_score = value;
  }
  write_picks(my_expert, my_score, scale, token, experts, weights);
}

// Blocks (SETS experts, `group` tokens). scores [T, E] is scratch.
KERNEL __launch_bounds__(WARPS * 32)
    route_topk(const uint4* __restrict__ x, const void* __restrict__ gate, const float* __restrict__ bias,
               const i64* __restrict__ slots, int tokens, int group, float scale, float* scores,
               int* __restrict__ experts, float* __restrict__ weights) {
  __shared__ float sums[MAX_GROUP][WARPS];
  const int warp = threadIdx.x >> 5, part = warp % SPLIT, first = blockIdx.y * group;
  const int last = first + group < tokens ? first + group : tokens;
  const int expert = blockIdx.x * SETS + warp / SPLIT;
  float w[STEPS][8];
  load_row(gate, expert < E ? expert : E - 1, part, w);
  wait_for_previous_kernel();  // the weights are under way
  for (int t = first; t < last; t += BATCH) {
    const float sum = dot_part(x + static_cast<i64>(t) * VECTORS, last - t, part, w);
    const int lane = threadIdx.x & 31, at = lane / (32 / BATCH);
    if (lane % (32 / BATCH) == 0 && t + at < last) sums[t + at - first][warp] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (last - first) * SETS; i += WARPS * 32) {
    const int t = i / SETS, set = i % SETS;
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < SPLIT; ++p) sum += sums[t][set * SPLIT + p];
    if (blockIdx.x * SETS + set < E)
      scores[static_cast<i64>(first + t) * E + blockIdx.x * SETS + set] = score(sum);
  }
  if (!last_block(&arrivals[blockIdx.y], gridDim.x)) return;
  for (int t = first + warp; t < last; t += WARPS) {
    if (slots[t] < 0) write_none(t, experts, weights);
    else select<false>(scores + static_cast<i64>(t) * E, bias, scale, t, experts, weights);
  }
}

// A warp a token.
KERNEL route_select(const float* __restrict__ logits, const float* __restrict__ bias, const i64* __restrict__ slots,
                    int tokens, float scale, int* __restrict__ experts, float* __restrict__ weights) {
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  wait_for_previous_kernel();
  if (t >= tokens) return;
  if (slots[t] < 0) write_none(t, experts, weights);
  else select<true>(logits + static_cast<i64>(t) * E, bias, scale, t, experts, weights);
}

#else

// SPLIT warps a pick, one block a token.
KERNEL __launch_bounds__(WARPS * 32)
    route_hash(const uint4* __restrict__ x, const void* __restrict__ gate, const i64* __restrict__ tid2eid,
                  const i64* __restrict__ token_ids, const i64* __restrict__ slots, float scale,
                  int* __restrict__ experts, float* __restrict__ weights) {
  __shared__ float sums[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 t = blockIdx.x;
  wait_for_previous_kernel();
  if (slots[t] < 0) {
    if (warp == 0) write_none(t, experts, weights);
    return;
  }
  const i64* picks = tid2eid + token_ids[t] * TOP;
  float w[STEPS][8];
  load_row(gate, picks[warp / SPLIT], warp % SPLIT, w);
  const float sum = dot_part(x + t * VECTORS, 1, warp % SPLIT, w);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (warp > 0) return;
  float logit = 0.f;
  if (lane < TOP)
#pragma unroll
    for (int p = 0; p < SPLIT; ++p) logit += sums[lane * SPLIT + p];
  write_picks(lane < TOP ? static_cast<int>(picks[lane]) : 0, score(logit), scale, t, experts, weights);
}

#endif
