// Scores of index keys by one warp, for index.cu: queries of a SPLIT-th of the heads in fragments against 16 keys at a time.
// Uses what index.cu defines before it: HEADS, D, SPLIT, CHUNKS, TILES.
#ifndef DSV4_INDEX_SCORES
#define DSV4_INDEX_SCORES
#include "hopper.cuh"

struct Query {
  u32 b[TILES][CHUNKS][4];
  float2 weight[TILES];
};
constexpr bool WHOLE = HEADS == SPLIT * TILES * 8;  // no head is padding

// Both operands take the dimensions in the same shuffled order: lane t of a quad has 8 neighbours of every 32.
DEVICE void load_query(Query& query, const bf16* q, const float* weights, i64 token, int part, int g, int t) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int tile = part * TILES + n, head = tile * 8 + g;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (head < HEADS) v = *reinterpret_cast<const uint4*>(q + (token * HEADS + head) * D + c * 32 + t * 8);
      query.b[n][c][0] = v.x, query.b[n][c][1] = v.y, query.b[n][c][2] = v.z, query.b[n][c][3] = v.w;
    }
    const int column = tile * 8 + 2 * t;
    query.weight[n].x = column < HEADS ? weights[token * HEADS + column] : 0.f;
    query.weight[n].y = column + 1 < HEADS ? weights[token * HEADS + column + 1] : 0.f;
  }
}

struct Keys {
  uint4 low[CHUNKS], high[CHUNKS];  // of rows g and g + 8
};

DEVICE void load_keys(Keys& keys, const bf16* rows, int first, int last, int g, int t) {
  const bf16* low = rows + static_cast<i64>(min(first + g, last)) * D + t * 8;
  const bf16* high = rows + static_cast<i64>(min(first + g + 8, last)) * D + t * 8;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    keys.low[c] = *reinterpret_cast<const uint4*>(low + c * 32);
    keys.high[c] = *reinterpret_cast<const uint4*>(high + c * 32);
  }
}

DEVICE float relu(float x) { return x <= 0.f ? 0.f : x; }  // a NaN stays one

// What two heads, at `column`, add to the scores of the rows g and g + 8 of one or two groups of keys.
template <int N>
DEVICE void add_heads(float2 (&sum)[N], const float (&acc)[N][4], float2 weight, int column) {
#pragma unroll
  for (int m = 0; m < N; ++m) {
    if (WHOLE || column < HEADS) sum[m].x += relu(acc[m][0]) * weight.x, sum[m].y += relu(acc[m][2]) * weight.x;
    if (WHOLE || column + 1 < HEADS) sum[m].x += relu(acc[m][1]) * weight.y, sum[m].y += relu(acc[m][3]) * weight.y;
  }
}

DEVICE float2 quad_sum(float2 sum) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    sum.x += __shfl_xor_sync(~0u, sum.x, step);
    sum.y += __shfl_xor_sync(~0u, sum.y, step);
  }
  return sum;
}

// The part of this warp's heads (this lane's first is `column`) in the scores of 16 keys, in every lane of a quad.
DEVICE float2 score_keys(const Query& query, const Keys& keys, int column) {
  float acc[TILES][1][4] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const u32 first[4] = {keys.low[c].x, keys.high[c].x, keys.low[c].y, keys.high[c].y};
    const u32 second[4] = {keys.low[c].z, keys.high[c].z, keys.low[c].w, keys.high[c].w};
#pragma unroll
    for (int n = 0; n < TILES; ++n) mma_bf16(acc[n][0], first, query.b[n][c][0], query.b[n][c][1]);
#pragma unroll
    for (int n = 0; n < TILES; ++n) mma_bf16(acc[n][0], second, query.b[n][c][2], query.b[n][c][3]);
  }
  float2 sum[1] = {};
#pragma unroll
  for (int n = 0; n < TILES; ++n) add_heads(sum, acc[n], query.weight[n], column + n * 8);
  return quad_sum(sum[0]);
}

// Larger scores, larger numbers; -0 equals 0, NaN equals -inf. 0 is less than all of them.
DEVICE u32 ordered(float x) {
  const u32 bits = x == x ? __float_as_uint(x) : 0xff800000u;
  return x == 0.f ? 0x80000000u : bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}

DEVICE float from_ordered(u32 value) { return __uint_as_float(value >> 31 ? value ^ 0x80000000u : ~value); }

DEVICE u64 with_block(u32 value, int block) { return static_cast<u64>(value) << 32 | ~static_cast<u32>(block); }

DEVICE int visible_blocks(i64 position, i64 slot, int rate, int blocks) {
  return slot < 0 ? 0 : min((static_cast<int>(position) + 1) / rate, blocks);
}

#endif
