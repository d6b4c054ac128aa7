// index_score: scores of a token's visible index keys, spread over the GPU, for index_select.cu; for a few tokens that see more
// than LOCAL keys (see ../index_topk.py).
//
// Bytes a key 256 in bf16, 132 in fp8, 68 in fp4; 262,144 keys: 67 MB or 15.8 us at 4.25 TB/s in bf16, 35 or 8.1 in fp8, 17.8 or
// 4.2 in fp4, and 4.3 GFLOP, 6 us at 700 TFLOP/s. With fp4 instructions are the limit, most of them to decode keys and to add up
// heads: a warpgroup has two tiles of keys at a time, so that there is always something to do, and lane l looks after one of the
// 32 rows of its warp.
//
// Given besides what index_scores.cuh wants: TOPK, LOCAL.
constexpr int THREADS = 256;
#include "index_maxima.cuh"

constexpr int GROUPS = THREADS / GROUP;
constexpr int NEAR = 2 + 32 * 1024 / (GROUPS * STEP * ROW_BYTES);  // steps of a warpgroup that are on their way to the L2

KERNEL __launch_bounds__(THREADS, 1)
index_score(const bf16* q, const float* weights, const u8* keys, const i64* __restrict__ positions, const i64* __restrict__ slots,
            u32* scores, u32* maxima, int rate, int blocks, int pitch, int most) {
  __shared__ __align__(1024) u8 query[QUERY_BYTES];
  __shared__ float weight[64];
  let_next_kernel_start();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3;
  const i64 token = blockIdx.y, slot = slots[token];
  const int count = visible_blocks(positions[token], slot, rate, blocks);
  const int groups = gridDim.x * GROUPS, group = blockIdx.x * GROUPS + warp / 4;
  if (count <= LOCAL || count <= TOPK || static_cast<int>(blockIdx.x * GROUPS * STEP) >= count) {
    // That one block waits keeps the order of launches; the others make room for index_select.
    if (blockIdx.x == 0) wait_for_previous_kernel();
    return;
  }
  const Maxima shares(count, groups);
  const Rows rows(keys, slot, blocks, count);
  const int own = warp % 4 * 16;  // of each tile
  auto prefetch = [&](int step) { rows.prefetch(step * STEP + 2 * own, 32); };
  if (lane == 0)
    for (int i = 0; i < NEAR; ++i) prefetch(group + i * groups);
  wait_for_previous_kernel();
  Keys fetched[2];
  auto load = [&](int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_keys(fetched[i], rows, step * STEP + i * TILE + own);
  };
  load(group);
  stage_query(query, weight, q, weights, token);
  stores_before_products();
  __syncthreads();
  const int place = (t >> 1) * TILE + own + (lane >> 2) + (t & 1) * 8;
  u32 top = 0;
  int set = 0, done = 0;
  for (int step = group; step < shares.steps; step += groups) {
    const bool more = step + groups < shares.steps;
    if (lane == 0) prefetch(step + NEAR * groups);
    u32 a[2][STEPS][4];
    Products products[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      decode_keys(fetched[i], a[i]);
      products[i].start(a[i], shared_address(query));
    }
    const u32 scales[2] = {t & 1 ? fetched[0].high_scale : fetched[0].low_scale, t & 1 ? fetched[1].high_scale : fetched[1].low_scale};
    if (FORMAT != BF16 && more) load(step + groups);
    products[0].wait<0>();
    products[1].wait<0>();
    if (FORMAT == BF16 && more) load(step + groups);  // where the keys have been until now
    const u32 score = score_of<true>(products[0], products[1], weight, t >> 1 ? scales[1] : scales[0]);
    if (step * STEP + place < count) {
      scores[token * pitch + step * STEP + place] = score;
      top = max(top, score);
    }
    if (++done == shares.per || !more) {
      for (int rows = 1; rows < shares.rows; rows *= 2) top = max(top, __shfl_xor_sync(~0u, top, rows));
      const int at = ((set * groups + group) * 4 + warp % 4) * (32 / shares.rows) + lane / shares.rows;
      if (lane % shares.rows == 0) maxima[token * most + at] = top;
      top = 0, done = 0, ++set;
    }
  }
}
