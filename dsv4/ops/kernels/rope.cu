// q_rope, kv_rope: RMSNorm and rope of rows of D channels; kv_write: rows into the window rings.
//
// Bytes at one token: q 64 x 512 bf16 read and written, 128 KB (Pro 256 KB); kv 2 KB; the ring 2 KB. All latency.
// Measured on an H200 in a CUDA graph, of which a launch is about 1.5 us: q_rope 2.1 us at 1 token, 2.8 at 32 (Pro 2.2, 3.8),
// kv_rope 2.4 and 2.6, kv_write 1.4 and 1.5; q_rope at 2048 tokens 70 us, 3.8 TB/s.
//
// rope_rows: LANES lanes a row, so that small heads share a warp. Defines: D (a multiple of 8), ROPE (even), LANES; for
// kv_write: VECTORS, 16-byte vectors a row of kv, and if the rings are compact ROPE.
#include "rope.cuh"

#ifdef D

// x, out [rows, D] bf16, row = token * heads + head. weight [D] or null.
KERNEL rope_rows(const uint4* x, const float* __restrict__ weight, const float* __restrict__ inv_freq, const i64* positions,
                 int heads, int rows, float eps, int norm, uint4* out) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const i64 at = min(row, rows - 1);  // lanes past the end repeat the last row and leave nothing
  Row<D, ROPE, LANES> data;
  wait_for_previous_kernel();
  data.load(x + at * (D / 8));
  const Angles<D, ROPE, LANES> angles(positions[at / heads], inv_freq);
  if (norm) data.normalise(eps);
  if (weight) data.multiply(weight);
  data.turn(angles);
  if (row < rows) data.store(out + at * (D / 8));
}

#else

// One warp a token: ring [S, window, VECTORS] or compact <- kv [T, VECTORS], unless a later token takes the same row.
KERNEL kv_write(const uint4* __restrict__ kv, const i64* __restrict__ positions, const i64* __restrict__ slots,
                uint4* __restrict__ ring, int tokens, int window) {
  const int token = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, lane = threadIdx.x & 31;
  wait_for_previous_kernel();
  if (token >= tokens) return;
  const i64 slot = slots[token], position = positions[token];
  if (slot < 0) return;
  const int later = token + window;
  if (later < tokens && slots[later] == slot && positions[later] == position + window) return;
#ifdef ROPE
  Row<8 * VECTORS, ROPE, 32> data;
  data.load(kv + static_cast<i64>(token) * VECTORS);
  data.put<FP8_ROWS>(ring, slot, window, position % window, true);
#else
  uint4* row = ring + (slot * window + position % window) * VECTORS;
  for (int v = lane; v < VECTORS; v += 32) row[v] = kv[static_cast<i64>(token) * VECTORS + v];
#endif
}

#endif
