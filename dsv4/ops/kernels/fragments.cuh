// Steps of weights from a warp's ring into registers, and from there through the tensor cores. A stage is filled anew as
// soon as its bytes are in registers, so that all STAGES of them are under way while a step is multiplied.
// Defines: see stream.cuh (NT is 1).
#ifndef DSV4_FRAGMENTS
#define DSV4_FRAGMENTS
#include "stream.cuh"

// A lane's part of a step: 32 bytes of rows lane / 4 and lane / 4 + 8 of each tile, and their NVFP4 scales.
template <int F>
struct Fragment {
  u32 low[MT][8], high[MT][8], low_scales[MT], high_scales[MT];
};

template <int F>
DEVICE Fragment<F> load_fragment(const u8* stage) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  Fragment<F> f;
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const u8* row = stage + m * TILE_BYTES<F> + g * 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = ((2 * t + i) ^ g) * 16;
      const uint4 p = *reinterpret_cast<const uint4*>(row + chunk), q = *reinterpret_cast<const uint4*>(row + 1024 + chunk);
      f.low[m][i * 4] = p.x, f.low[m][i * 4 + 1] = p.y, f.low[m][i * 4 + 2] = p.z, f.low[m][i * 4 + 3] = p.w;
      f.high[m][i * 4] = q.x, f.high[m][i * 4 + 1] = q.y, f.high[m][i * 4 + 2] = q.z, f.high[m][i * 4 + 3] = q.w;
    }
    if constexpr (F == FP4) {
      const u32* scales = reinterpret_cast<const u32*>(stage + m * TILE_BYTES<F> + 2048) + lane;
      f.low_scales[m] = scales[0], f.high_scales[m] = scales[32];
    }
  }
  return f;
}

// One step: 16 * MT rows x 128 bytes against up to 8 tokens, the lane's activations at `column`. acc: tiles of rows, or with
// one tile two chains.
template <int F>
DEVICE void multiply_fragment(const Fragment<F>& f, const u8* column, float (&acc)[CHAINS][4]) {
  __half2 low_scales[MT][2], high_scales[MT][2];
  if constexpr (F == FP4) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      low_scales[m][0] = decode_scales(f.low_scales[m]), low_scales[m][1] = decode_scales(f.low_scales[m] >> 16);
      high_scales[m][0] = decode_scales(f.high_scales[m]), high_scales[m][1] = decode_scales(f.high_scales[m] >> 16);
    }
  }
#pragma unroll
  for (int w = 0; w < LANE_K<F> / 8; ++w) {
    const uint4 v = *reinterpret_cast<const uint4*>(column + w * 64);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      u32 x[4], y[4];
      if constexpr (F == FP4) {
        const __half2 low = low_scales[m][w / 4], high = high_scales[m][w / 4];
        decode_fp4(f.low[m][w], w / 2 % 2 ? __high2half2(low) : __low2half2(low), x);
        decode_fp4(f.high[m][w], w / 2 % 2 ? __high2half2(high) : __low2half2(high), y);
      } else if constexpr (F == FP8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          decode_fp8(f.low[m][2 * w + i], x[2 * i], x[2 * i + 1]);
          decode_fp8(f.high[m][2 * w + i], y[2 * i], y[2 * i + 1]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = f.low[m][4 * w + i], y[i] = f.high[m][4 * w + i];
      }
      mma<F>(acc[MT > 1 ? m : 0], x[0], y[0], x[1], y[1], v.x, v.y);
      mma<F>(acc[MT > 1 ? m : 1], x[2], y[2], x[3], y[3], v.z, v.w);
    }
  }
}

// The sums of the tiles: FP8 ones of a step times the scales of its rows, eight rows at a time, and begun anew; others as
// they are.
DEVICE void add_scaled(float (&sums)[MT][4], const float (&scale)[MT * 2], float (&acc)[CHAINS][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[m][i] = fmaf(scale[m * 2 + i / 2], MT > 1 ? acc[m][i] : acc[0][i] + acc[1][i], sums[m][i]);
      acc[MT > 1 ? m : 0][i] = acc[MT > 1 ? m : 1][i] = 0.f;
    }
}
DEVICE void add_chains(float (&sums)[MT][4], const float (&acc)[CHAINS][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[m][i] = MT > 1 ? acc[m][i] : acc[0][i] + acc[1][i];
}

// A warp's ring over units of MT tiles of 16 rows each, with STAGES steps under way. `locate` puts down where the next unit's
// pieces are, or returns false when there is none.
template <int F, typename Locate>
struct Stream {
  const Slice<F>& slice;
  Locate locate;
  u8* memory;
  bool more = false;
  int step = 0, stage = 0;
  Pieces pieces[MT];

  DEVICE Stream(const Slice<F>& s, u8* m, Locate l) : slice(s), locate(l), memory(m) {}
  DEVICE void start() {
    more = slice.steps > 0 && locate(pieces);
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
      load(memory + stage * STAGE_BYTES<F>);
      if (++stage == STAGES) stage = 0;
    }
  }
  DEVICE void load(u8* to) {
    if (more) {
#pragma unroll
      for (int m = 0; m < MT; ++m) load_step(to + m * TILE_BYTES<F>, pieces[m], slice, step);
      if (++step == slice.steps) {
        step = 0;
        more = locate(pieces);
      }
    }
    copies_end();
  }
  // The next step in registers, once it is there; its stage is filled anew.
  DEVICE Fragment<F> next() {
    copies_wait<STAGES - 1>();
    __syncwarp();
    u8* now = memory + stage * STAGE_BYTES<F>;
    const Fragment<F> f = load_fragment<F>(now);
    __syncwarp();
    load(now);
    if (++stage == STAGES) stage = 0;
    return f;
  }
};
#endif
