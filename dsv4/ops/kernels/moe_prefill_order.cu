// What comes before the products of moe_prefill.cu: which entry (token, choice) goes where, and activations in the form in which
// weights of a format are multiplied with them.
//
// Entries are a token's `choices` after another's, then one more of each token if there is a shared expert. Those of one expert
// come together, in any order: what is computed of an entry does not depend on it.
// Defines: FMT (0 bf16, 1 FP8, 2 NVFP4), BESIDE (whether tiles of expert `count` are of FP8).
#include "fp16.cuh"
#include "hopper.cuh"

enum { BF16, FP8, FP4 };

constexpr int THREADS = 1024, ENTRIES = 128;  // entries of a tile

// The sum of (x, y) over the threads before this one, and over all.
DEVICE int2 sum_before(int2 v, int2& all) {
  __shared__ int2 warps[THREADS / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int2 sum = v;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
    if (lane >= step) sum.x += x, sum.y += y;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  int2 before = make_int2(sum.x - v.x, sum.y - v.y);
  all = make_int2(0, 0);
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before.x += warps[w].x, before.y += warps[w].y;
    all.x += warps[w].x, all.y += warps[w].y;
  }
  return before;
}

// Entries of all threads that name one of `count` experts; several are read at a time.
template <typename Do>
DEVICE void each_entry(const int* experts, int entries, int count, Do what) {
  constexpr int TOGETHER = 8;
  for (int first = threadIdx.x; first < entries; first += TOGETHER * THREADS) {
    int e[TOGETHER];
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) e[j] = first + j * THREADS < entries ? experts[first + j * THREADS] : -1;
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j)
      if (e[j] >= 0 && e[j] < count) what(first + j * THREADS, e[j]);
  }
}

// experts [entries] -> order (entry, token) by expert, without entries that name none of `count`; tiles (expert, first, live, 0)
// of up to ENTRIES, and how many. With `more`, that many entries after these are all expert `last`'s, and come first. One block;
// dynamic shared memory: 4 bytes an expert up to `last`.
KERNEL __launch_bounds__(THREADS, 1)
moe_order(const int* experts, int2* order, int4* tiles, int* tile_count, int entries, int more, int choices, int count, int last) {
  extern __shared__ int places[];  // how many entries an expert has, then where the next one goes
  let_next_kernel_start();
  for (int e = threadIdx.x; e <= last; e += THREADS) places[e] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  each_entry(experts, entries, count, [&](int, int e) { atomicAdd(&places[e], 1); });
  __syncthreads();
  // A thread has `per` experts after those of the threads before; the last of all comes first.
  const int per = last / THREADS + 1, first = threadIdx.x * per, end = min(first + per, last + 1);
  int2 sum = make_int2(0, 0), all;
  for (int i = first; i < end; ++i) {
    const int e = i ? i - 1 : last, n = places[e] + (e == last ? more : 0);
    sum.x += n, sum.y += (n + ENTRIES - 1) / ENTRIES;
  }
  int2 at = sum_before(sum, all);
  if (threadIdx.x == 0) *tile_count = all.y;
  for (int i = first; i < end; ++i) {
    const int e = i ? i - 1 : last, n = places[e] + (e == last ? more : 0), parts = (n + ENTRIES - 1) / ENTRIES;
    for (int part = 0; part < parts; ++part) {
      const int from = n * static_cast<i64>(part) / parts, to = n * static_cast<i64>(part + 1) / parts;
      tiles[at.y + part] = make_int4(e, at.x + from, to - from, 0);
    }
    places[e] = at.x;
    at.x += n, at.y += parts;
  }
  __syncthreads();
  each_entry(experts, entries, count, [&](int i, int e) { order[atomicAdd(&places[e], 1)] = make_int2(i, i / choices); });
  __syncthreads();
  for (int i = threadIdx.x; i < more; i += THREADS) order[places[last] + i] = make_int2(entries + i, i);
}

// Values 8 i .. 8 i + 7 times `scale`, from each lane, i being its of 32 -> piece i of the row, in the order in which a lane's
// weights are decoded (see decode_atom of moe_prefill.cu).
template <int F>
DEVICE uint4 piece_of(uint4 v, float scale) {
  u32 w[4];
  fp16_pairs<F == FP4 ? 4 : 1>(v, scale, w);
  if (F == FP4) {
    transpose4(w);
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
  const bool odd = threadIdx.x & 1;
  const u32 x = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  return odd ? make_uint4(x, y, w[1], w[3]) : make_uint4(w[0], w[2], x, y);
}

// A warp: row r of a tile of `live` rows. Returns the inverse of the power of two.
template <int F>
DEVICE float prepare_row(const uint4* from, uint4* to, int r, int live, int k, int pitch) {
  const int lane = threadIdx.x & 31;
  const int shift = F == BF16 ? 0 : row_shift(from, k / 8);
#pragma unroll 4
  for (int first = 0; first < pitch / 8; first += 32) {
    const int i = first + lane;
    const uint4 v = i < k / 8 ? from[i] : make_uint4(0, 0, 0, 0);
    const uint4 piece = F == BF16 ? v : piece_of<F>(v, two_to(shift));
    if (i < pitch / 8) to[(i / 8 * live + r) * 8 + (i % 8 ^ (r & 7))] = piece;
  }
  return two_to(-shift);
}

// x bf16 [*, k], of which an entry of a tile has the row of its token, or without `by_token` that of its place in the order ->
// out and inverse, by place. out: of each tile [pitch / 64][live][64], two bytes a value, 16-byte piece c of row r at c ^ (r % 8).
// For quantised weights values are fp16, times the power of two that brings the row's largest to 2^14..2^15, of which inverse
// [entries] has the inverses; zeros beyond k. Block (tile, part of its entries), a warp for an entry; k % 8 is 0 (FP8: k % 16,
// NVFP4: k % 32), pitch % 64 is 0.
KERNEL __launch_bounds__(256, 4)
moe_prepare(const uint4* x, const int2* order, const int4* tiles, const int* tile_count, uint4* out, float* inverse, int by_token,
            int count, int k, int pitch) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (static_cast<int>(blockIdx.x) >= *tile_count) return;
  const int4 tile = tiles[blockIdx.x];
  uint4* const to = out + static_cast<i64>(tile.y) * (pitch / 8);
  for (int r = blockIdx.y * 8 + threadIdx.x / 32; r < tile.z; r += gridDim.y * 8) {
    const uint4* from = x + static_cast<i64>(by_token ? order[tile.y + r].y : tile.y + r) * (k / 8);
    const float back = BESIDE && tile.x == count ? prepare_row<FP8>(from, to, r, tile.z, k, pitch)
                                                 : prepare_row<FMT>(from, to, r, tile.z, k, pitch);
    if (threadIdx.x % 32 == 0) inverse[tile.y + r] = back;
  }
}
