// Compact rows as ../row_formats.py describes them, written by lanes that hold eight neighbouring channels each.
#ifndef DSV4_ROW_FORMATS
#define DSV4_ROW_FORMATS
#include "common.cuh"

typedef unsigned char u8;

enum Format { PLAIN, FP8_ROWS, FP8_KEYS, FP4_KEYS };
#define E4M3_FLOOR 1e-4f
#define E2M1_FLOOR __int_as_float(0x01c00000)  // 6 * 2^-126

// The largest magnitude of a group that lies in Lanes neighbouring lanes, at least `floor`.
template <int Lanes>
DEVICE float largest_of(const float (&v)[8], float floor) {
  float top = floor;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(v[i]));
#pragma unroll
  for (int step = Lanes / 2; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  return top;
}

// k + 127 for the smallest 2^k with top <= 448 * 2^k: what the mantissa of 448 lacks of 2, but one bit, carries into the
// exponent when the mantissa of top is above it. The same for 6.
DEVICE u32 exponent_for_448(float top) { return (__float_as_uint(top) + 0x1fffffu >> 23) - 8; }
DEVICE u32 exponent_for_6(float top) { return (__float_as_uint(top) + 0x3fffffu >> 23) - 2; }
DEVICE float power_of_two(u32 exponent) { return __uint_as_float(exponent << 23); }

DEVICE u32 e4m3_pair(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE float2 e4m3_values(u32 pair) {
  float2 v;
  asm("{\n.reg .b32 two;\n.reg .b16 low, high;\ncvt.rn.f16x2.e4m3x2 two, %2;\nmov.b32 {low, high}, two;\n"
      "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y) : "h"(static_cast<u16>(pair)));
  return v;
}

// The codes of eight values under a scale of 2^(exponent - 127); `v` becomes what they stand for.
DEVICE uint2 to_e4m3(float (&v)[8], u32 exponent) {
  const float scale = power_of_two(exponent), inverse = power_of_two(254 - exponent);
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = e4m3_pair(v[2 * i] * inverse, v[2 * i + 1] * inverse);
    const float2 two = e4m3_values(pairs[i]);
    v[2 * i] = two.x * scale, v[2 * i + 1] = two.y * scale;
  }
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

DEVICE u32 to_e2m1(float (&v)[8], u32 exponent) {
  const float scale = power_of_two(exponent), inverse = power_of_two(254 - exponent);
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // Codes 0 to 4 are steps of 1/2, to 6 steps of 1, to 7 a step of 2; rounding a half to even gives the even code.
    const float size = fabsf(v[i]) * inverse;
    const float steps = size < 2.f ? 2.f : size < 4.f ? 1.f : 0.5f, step = size < 2.f ? 0.5f : size < 4.f ? 1.f : 2.f;
    const float count = rintf(size * steps);
    const u32 code = static_cast<u32>(count) + (size < 2.f ? 0 : size < 4.f ? 2 : 4);
    codes |= (code | (__float_as_uint(v[i]) >> 31) << 3) << (4 * i);
    v[i] = copysignf(count * step * scale, v[i]);
  }
  return codes;
}

DEVICE constexpr double inverse_root(int power) {
  return power >= 4 ? inverse_root(power / 4) / 2 : power == 2 ? 0.70710678118654752440 : 1.0;
}

// The normalised Walsh-Hadamard transform of the 8 * Lanes channels of Lanes neighbouring lanes, rounded to bf16.
template <int Lanes>
DEVICE void hadamard(float (&v)[8]) {
  static_assert(Lanes <= 32 && (Lanes & (Lanes - 1)) == 0, "");
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & step) continue;
      const float a = v[i], b = v[i + step];
      v[i] = a + b, v[i + step] = a - b;
    }
#pragma unroll
  for (int step = 1; step < Lanes; step *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(~0u, v[i], step);
      v[i] = threadIdx.x & step ? other - v[i] : v[i] + other;
    }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = round_bf16(v[i] * static_cast<float>(inverse_root(8 * Lanes)));
}

// Row `row` of the n rows of `slot` in a compact buffer [S, n, CODES + SCALES]; of rows Turned channels are bf16.
template <int Dim, int Turned, int Kind>
struct CompactRow {
  static constexpr int QUANTISED = Kind == FP8_ROWS ? Dim - Turned : Dim;
  static constexpr int CODES = Kind == FP8_ROWS ? Dim + Turned : Kind == FP8_KEYS ? Dim : Dim / 2;
  static constexpr int SCALES = Kind == FP8_ROWS ? (QUANTISED + 511) / 512 * 8 : Kind == FP8_KEYS ? 4 : Dim / 32;
  static_assert(Kind != FP8_ROWS || (QUANTISED > 0 && QUANTISED % 64 == 0 && Turned % 8 == 0), "");
  static_assert(Kind == FP8_ROWS || (Dim >= 32 && Dim <= 256 && (Dim & (Dim - 1)) == 0), "");
  u8 *codes, *scales;

  DEVICE CompactRow(void* buffer, i64 slot, i64 rows, i64 row) {
    u8* const page = static_cast<u8*>(buffer) + slot * rows * (CODES + SCALES);
    codes = page + row * CODES, scales = page + rows * CODES + row * SCALES;
  }

  // Channels 8 * chunk and following, bf16; `v` becomes what the row stands for. All lanes of the warp, neighbouring chunks
  // in neighbouring lanes from a multiple of a group on; without `keep` nothing is written.
  DEVICE void store(float (&v)[8], int chunk, bool keep) const {
    if constexpr (Kind == FP8_ROWS) {
      const u32 exponent = exponent_for_448(largest_of<8>(v, E4M3_FLOOR));
      if (chunk < QUANTISED / 8) {
        const uint2 eight = to_e4m3(v, exponent);
        if (keep) reinterpret_cast<uint2*>(codes)[chunk] = eight;
        if (keep && chunk % 8 == 0) scales[chunk / 8] = exponent;
      } else if (keep && chunk < Dim / 8) {
        reinterpret_cast<uint4*>(codes + QUANTISED)[chunk - QUANTISED / 8] = pack8(v);
      }
#pragma unroll
      for (int spare = QUANTISED / 64; spare < SCALES; ++spare)
        if (keep && chunk == 0) scales[spare] = 0;
    } else if constexpr (Kind == FP8_KEYS) {
      hadamard<Dim / 8>(v);
      const u32 exponent = exponent_for_448(largest_of<Dim / 8>(v, E4M3_FLOOR));
      const uint2 eight = to_e4m3(v, exponent);
      if (keep) reinterpret_cast<uint2*>(codes)[chunk] = eight;
      if (keep && chunk == 0) *reinterpret_cast<float*>(scales) = power_of_two(exponent);
    } else {
      hadamard<Dim / 8>(v);
      const u32 exponent = exponent_for_6(largest_of<4>(v, E2M1_FLOOR)), eight = to_e2m1(v, exponent);
      if (keep) reinterpret_cast<u32*>(codes)[chunk] = eight;
      if (keep && chunk % 4 == 0) scales[chunk / 4] = exponent;
    }
  }
};

#endif
