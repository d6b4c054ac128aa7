// q_rope, kv_rope: RMSNorm and rope of rows of D channels; kv_write: rows into the window rings.
//
// Bytes at one token: q 64 x 512 bf16 read and written, 128 KB (Pro 256 KB); kv 2 KB; the ring 2 KB. All latency.
// Measured on an H200 in a CUDA graph, of which a launch is about 1.5 us: q_rope 2.1 us at 1 token, 2.8 at 32 (Pro 2.2, 3.8),
// kv_rope 2.4 and 2.6, kv_write 1.4 and 1.5; q_rope at 2048 tokens 70 us, 3.8 TB/s.
//
// rope_rows: LANES lanes a row, so that small heads share a warp. Defines: D (a multiple of 8), ROPE (even), LANES; for kv_write: VECTORS, 16-byte vectors a row.
#include "common.cuh"

#ifdef D
constexpr int VECTORS = D / 8;
constexpr int PER_LANE = (VECTORS + LANES - 1) / LANES;
static_assert(D % 8 == 0 && ROPE % 2 == 0 && ROPE <= D && LANES <= 32 && (LANES & (LANES - 1)) == 0, "");

// x, out [rows, D] bf16, row = token * heads + head. weight [D] or null.
KERNEL rope_rows(const uint4* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ inv_freq,
                 const i64* __restrict__ positions, int heads, int rows, float eps, int norm, uint4* __restrict__ out) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
  const bool inside = row < rows;
  float value[PER_LANE][8];
  wait_for_previous_kernel();
#pragma unroll
  for (int p = 0; p < PER_LANE; ++p) {
    const int v = p * LANES + lane;
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (inside && v < VECTORS) raw = x[static_cast<i64>(row) * VECTORS + v];
    unpack8(raw, value[p]);
  }
  const i64 position = inside ? positions[row / heads] : 0;
  float scale = 1.f;
  if (norm) {
    float square = 0.f;
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p)
#pragma unroll
      for (int i = 0; i < 8; ++i) square = fmaf(value[p][i], value[p][i], square);
    scale = rsqrtf(warp_sum<LANES>(square) * (1.f / D) + eps);
  }
#pragma unroll
  for (int p = 0; p < PER_LANE; ++p) {
    const int channel = (p * LANES + lane) * 8;
    if (!inside || channel >= D) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) value[p][i] *= scale;
    if (weight) {
#pragma unroll
      for (int i = 0; i < 8; ++i) value[p][i] *= __ldg(weight + channel + i);
    }
    if (channel + 8 > D - ROPE) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int pair = (channel + i - (D - ROPE)) / 2;
        if (channel + i >= D - ROPE) {
          float c, s;
          rope_cos_sin(position, __ldg(inv_freq + pair), &c, &s);
          const float even = value[p][i], odd = value[p][i + 1];
          value[p][i] = even * c - odd * s;
          value[p][i + 1] = even * s + odd * c;
        }
      }
    }
    out[static_cast<i64>(row) * VECTORS + channel / 8] = pack8(value[p]);
  }
}

#else

// One warp a token: ring [S, window, VECTORS] <- kv [T, VECTORS], unless a later token of the batch takes the same row.
KERNEL kv_write(const uint4* __restrict__ kv, const i64* __restrict__ positions, const i64* __restrict__ slots,
                uint4* __restrict__ ring, int tokens, int window) {
  const int token = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, lane = threadIdx.x & 31;
  wait_for_previous_kernel();
  if (token >= tokens) return;
  const i64 slot = slots[token], position = positions[token];
  if (slot < 0) return;
  const int later = token + window;
  if (later < tokens && slots[later] == slot && positions[later] == position + window) return;
  uint4* row = ring + (slot * window + position % window) * VECTORS;
  for (int v = lane; v < VECTORS; v += 32) row[v] = kv[static_cast<i64>(token) * VECTORS + v];
}

#endif
