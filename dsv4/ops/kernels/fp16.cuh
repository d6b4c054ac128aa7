// Activations in fp16, times a power of two (see fp16_shift).
#ifndef DSV4_FP16
#define DSV4_FP16
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "common.cuh"

DEVICE float two_to(int exponent) { return __int_as_float((127 + exponent) << 23); }

DEVICE u32 pack_fp16(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const u32*>(&h);
}

// Eight values times `scale`, in pairs of two that are `Apart`: (0, 1) (2, 3) ..., or (0, 4) (1, 5) ...
template <int Apart>
DEVICE void fp16_pairs(uint4 v, float scale, u32 (&w)[4]) {
  static_assert(Apart == 1 || Apart == 4, "");
  constexpr int STEP = Apart == 1 ? 2 : 1;
  constexpr int order[8] = {0, Apart, STEP, STEP + Apart, 2 * STEP, 2 * STEP + Apart, 3 * STEP, 3 * STEP + Apart};
  float f[8];
  unpack8(v, f);
#pragma unroll
  for (int j = 0; j < 4; ++j) w[j] = pack_fp16(f[order[2 * j]] * scale, f[order[2 * j + 1]] * scale);
}

// A whole warp: fp16_shift of the largest of a row's 8 * `pieces` values.
DEVICE int row_shift(const uint4* row, int pieces) {
  u32 largest = 0;
#pragma unroll 8
  for (int i = threadIdx.x & 31; i < pieces; i += 32) largest = __vmaxu2(largest, largest_of_8(row[i]));
  return fp16_shift(static_cast<int>(__reduce_max_sync(~0u, larger(largest)) >> 7));
}
#endif
