// route_topk, route_hash: router scores and the choice of experts. (One token with NVFP4 experts: see moe_routing.cuh.)
//
// Bytes at one token: route_topk reads the gate, Flash 256 x 4096 bf16 2.10 MB (0.49 us at 4.25 TB/s), Pro 384 x 7168
// 5.5 MB (1.3 us); route_hash six or eight of its rows, 49 / 115 KB. Latency throughout.
// Measured on an H200 in a CUDA graph: route_topk Flash 3.5 us at 1 token, 3.9 at 8, 4.3 at 16, 5.9 at 32, 8.9 at 64, 10.4
// with a matrix product; Pro 5.1 at 1, 6.1 at 8, 7.9 at 16, 12 with the product. route_hash Flash 2.2 at 1, 3.0 at 32; Pro
// 2.8, 3.7.
//
// route_topk: SPREAD clusters of CLUSTER blocks have 8 tokens, a block EXPERTS rows of the gate, its warps each a part of the
// channels. The gate is on its way before the kernel waits for the one before it: KEPT quads a thread in registers, STORED in
// shared memory, where each thread reads only what it copied itself; what is left is read where it is needed. The rows are
// the A of tensor-core products and the tokens B: what a lane loads in one vector are its places of two products, since the
// order of channels within a product is free as long as A and B agree. Each block sends its scores to the block that selects
// for the token, a warp a token. With SPREAD > 1, for gates that are too large for 16 multiprocessors, that warp passes its
// cluster's scores on through device memory, and the last of them selects.
//
// route_select is the selection alone, for logits from a matrix product. route_hash: one block a token, SPLIT warps a picked
// expert.
//
// Defines: H (a multiple of 8), E, TOP (k); CLUSTER, SPREAD and STORED for route_topk; HASH and SPLIT for route_hash.
#include "hopper.cuh"
#include "route.cuh"

constexpr int VECTORS = H / 8;
static_assert(H % 8 == 0, "");

DEVICE void write_picks(Pick pick, float scale, i64 token, int* experts, float* weights) {
  const int lane = threadIdx.x & 31;
  const float weight = weight_of(pick.score, scale);
  if (lane < TOP) {
    experts[token * TOP + lane] = pick.expert;
    weights[token * TOP + lane] = weight;
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

constexpr int WARPS = 16, THREADS = WARPS * 32, TOKENS = 8;
constexpr int STEPS = (VECTORS + 4 * WARPS - 1) / (4 * WARPS);  // vectors of each row a lane, of 32 channels a warp
constexpr int EXPERTS = (E + CLUSTER * SPREAD - 1) / (CLUSTER * SPREAD);  // a block
constexpr int GROUPS = (EXPERTS + 7) / 8, TILES = (GROUPS + 1) / 2;
constexpr int QUADS = STEPS * GROUPS;                           // of the gate a thread
constexpr int KEPT = QUADS < 4 ? QUADS : 4;
constexpr int AT_ONCE = (STEPS + (STEPS + 7) / 8 - 1) / ((STEPS + 7) / 8);  // vectors of a token: 8 at most, even parts
constexpr int SELECTED = (TOKENS + CLUSTER - 1) / CLUSTER;      // tokens that a block selects for

__device__ u32 arrivals[64];  // one a token, each 0 between launches

struct Shared {
  float sums[WARPS][TILES * 16 * TOKENS];
  float scores[SELECTED][CLUSTER * EXPERTS];
  float bias[E];
  u64 arrived[1];
};

// One warp: a token's experts. `scores` may be logits still.
template <bool Logits>
DEVICE void pick_experts(const float* scores, const float* bias, float scale, i64 token, int* experts, float* weights) {
  float mine[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const float one = scores[min(i * 32 + static_cast<int>(threadIdx.x & 31), E - 1)];
    mine[i] = Logits ? score(one) : one;
  }
  write_picks(select(mine, [&](int, int e) { return bias[e]; }), scale, token, experts, weights);
}

// all [T, SPREAD * CLUSTER * EXPERTS] is scratch.
KERNEL __launch_bounds__(THREADS, SPREAD == 1 && STORED <= 12 ? 2 : 1)
    route_topk(const uint4* x, const uint4* __restrict__ gate, const float* __restrict__ bias, const i64* slots, int tokens,
               float scale, float* all, int* experts, float* weights) {
  extern __shared__ __align__(16) unsigned char memory[];
  uint4(*stored)[THREADS] = reinterpret_cast<uint4(*)[THREADS]>(memory);  // [STORED][THREADS]
  __shared__ Shared shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cluster_rank();
  const i64 token0 = static_cast<i64>(blockIdx.x / (CLUSTER * SPREAD)) * TOKENS;
  const int count = tokens - token0 < TOKENS ? static_cast<int>(tokens - token0) : TOKENS;
  const int first = blockIdx.x % (CLUSTER * SPREAD) * EXPERTS;  // expert
  let_next_kernel_start();

  // Quad q is vector q / GROUPS of this lane, of row q % GROUPS * 8 + lane / 4 of the block.
  auto vector_of = [&](int step) { return (warp * STEPS + step) * 4 + lane % 4; };
  auto exists = [&](int q) {
    const int row = q % GROUPS * 8 + lane / 4;
    return vector_of(q / GROUPS) < VECTORS && row < EXPERTS && first + row < E;
  };
  auto source = [&](int q) {
    return gate + static_cast<i64>(first + q % GROUPS * 8 + lane / 4) * VECTORS + vector_of(q / GROUPS);
  };
  uint4 kept[KEPT];
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    if (q < KEPT) kept[q] = exists(q) ? __ldg(source(q)) : make_uint4(0, 0, 0, 0);
    else if (q >= KEPT + STORED) break;
    else copy_16(shared_address(&stored[q - KEPT][threadIdx.x]), exists(q) ? source(q) : gate, exists(q) ? 16 : 0);
  }
  for (int e = threadIdx.x; e < E; e += THREADS) copy_4(shared_address(&shared.bias[e]), bias + e);
  const u32 arrived = shared_address(shared.arrived);
  if (threadIdx.x == 0) {
    const int mine = (count - rank + CLUSTER - 1) / CLUSTER;  // tokens; 0 if rank >= count
    barrier_init(arrived, 1);
    barrier_init_done();
    barrier_arrive_expecting(arrived, (rank < count ? mine : 0) * CLUSTER * EXPERTS * sizeof(float));
  }
  cluster_arrive_relaxed();
  wait_for_previous_kernel();

  float acc[TILES][2][4] = {};
#pragma unroll
  for (int begin = 0; begin < STEPS; begin += AT_ONCE) {
    uint4 b[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int v = vector_of(begin + i);
      const bool real = begin + i < STEPS && v < VECTORS && lane / 4 < count;
      b[i] = real ? x[(token0 + lane / 4) * VECTORS + v] : make_uint4(0, 0, 0, 0);
    }
    if (begin == 0) wait_for_copies();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (begin + i >= STEPS) break;
      auto weight = [&](int group) {
        const int q = (begin + i) * GROUPS + group;
        if (group >= GROUPS) return make_uint4(0, 0, 0, 0);
        if (q < KEPT) return kept[q];
        if (q < KEPT + STORED) return stored[q - KEPT][threadIdx.x];
        return exists(q) ? __ldg(source(q)) : make_uint4(0, 0, 0, 0);
      };
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 low = weight(2 * tile), high = weight(2 * tile + 1);
        mma_bf16(acc[tile][0], {low.x, high.x, low.y, high.y}, b[i].x, b[i].y);
        mma_bf16(acc[tile][1], {low.z, high.z, low.w, high.w}, b[i].z, b[i].w);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const float(&a)[4] = acc[tile][0], (&b)[4] = acc[tile][1];
    float2* to = reinterpret_cast<float2*>(&shared.sums[warp][tile * 16 * TOKENS]) + lane;  // row lane / 4, two tokens
    to[0] = make_float2(a[0] + b[0], a[1] + b[1]);
    to[8 * TOKENS / 2] = make_float2(a[2] + b[2], a[3] + b[3]);
  }
  __syncthreads();
  cluster_wait();  // every block of the cluster has its barrier
  for (int i = threadIdx.x; i < TILES * 16 * TOKENS; i += THREADS) {
    const int row = i / TOKENS, t = i % TOKENS;
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum[w % 4] += shared.sums[w][i];
    if (row < EXPERTS && t < count)
      peer_store_async(peer_address(shared_address(&shared.scores[t / CLUSTER][rank * EXPERTS + row]), t % CLUSTER),
                       score((sum[0] + sum[1]) + (sum[2] + sum[3])), peer_address(arrived, t % CLUSTER));
  }
  const int t = warp * CLUSTER + rank;
  if (t >= count) return;
  const i64 slot = slots[token0 + t];
  barrier_wait_cluster(arrived, 0);
  const float* scores = shared.scores[warp];
  if (SPREAD > 1) {
    constexpr int PART = CLUSTER * EXPERTS;
    all += (token0 + t) * SPREAD * PART;
    for (int i = lane; i < PART; i += 32) all[first / PART * PART + i] = scores[i];
    if (!last_warp(&arrivals[token0 + t], SPREAD)) return;
    scores = all;
  }
  if (slot < 0) write_none(token0 + t, experts, weights);
  else pick_experts<false>(scores, shared.bias, scale, token0 + t, experts, weights);
}

// A warp a token.
KERNEL route_select(const float* logits, const float* __restrict__ bias, const i64* slots, int tokens, float scale,
                    int* experts, float* weights) {
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (t >= tokens) return;
  if (slots[t] < 0) write_none(t, experts, weights);
  else pick_experts<true>(logits + static_cast<i64>(t) * E, bias, scale, t, experts, weights);
}

#else

constexpr int STEPS = (VECTORS + SPLIT * 32 - 1) / (SPLIT * 32);
constexpr int WARPS = SPLIT * TOP;

// SPLIT warps a pick, one block a token.
KERNEL __launch_bounds__(WARPS * 32)
    route_hash(const uint4* x, const uint4* __restrict__ gate, const i64* __restrict__ tid2eid, const i64* token_ids,
               const i64* slots, float scale, int* experts, float* weights) {
  __shared__ float sums[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 t = blockIdx.x;
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (slots[t] < 0) {
    if (warp == 0) write_none(t, experts, weights);
    return;
  }
  const i64* picks = tid2eid + token_ids[t] * TOP;
  const uint4* row = gate + picks[warp / SPLIT] * VECTORS;
  uint4 w[STEPS], a[STEPS];
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const int v = (s * SPLIT + warp % SPLIT) * 32 + lane;
    w[s] = v < VECTORS ? __ldg(row + v) : make_uint4(0, 0, 0, 0);
    a[s] = v < VECTORS ? x[t * VECTORS + v] : make_uint4(0, 0, 0, 0);
  }
  float sum = 0.f;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    float one[8], other[8];
    unpack8(w[s], one);
    unpack8(a[s], other);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(one[i], other[i], sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (warp > 0) return;
  float logit = 0.f;
  if (lane < TOP)
#pragma unroll
    for (int p = 0; p < SPLIT; ++p) logit += sums[lane * SPLIT + p];
  write_picks({lane < TOP ? static_cast<int>(picks[lane]) : 0, score(logit)}, scale, t, experts, weights);
}

#endif
