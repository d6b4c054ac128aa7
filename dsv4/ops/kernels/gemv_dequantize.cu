// Quantised weights -> bf16, for products with so many tokens that a library GEMM is the faster way.
// Bytes: codes and scales read, 2 bytes a value written. A thread makes 8 values. k % 8 is 0 (NVFP4: k % 16).
#include "common.cuh"  // defines: THREADS

typedef unsigned char u8;

DEVICE float decode_e4m3(u32 code) {  // 2^-120 too small as bits, subnormals too; the product is exact
  return __uint_as_float(((code & 0x80u) << 24) | ((code & 0x7Fu) << 20)) * 0x1p120f;
}

DEVICE float decode_e2m1(u32 code) { return __uint_as_float(((code & 8u) << 28) | ((code & 7u) << 22)) * 0x1p126f; }

KERNEL dequantize_fp8(const u8* __restrict__ codes, const float* __restrict__ scales, uint4* __restrict__ out, int n, int k) {
  const i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  const int pieces = k / 8, column = static_cast<int>(i % pieces) * 8;
  const i64 row = i / pieces;
  if (row >= n) return;
  const uint2 v = reinterpret_cast<const uint2*>(codes)[i];
  const float scale = scales[row / 128 * ((k + 127) / 128) + column / 128];
  float x[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = decode_e4m3((j < 4 ? v.x : v.y) >> (j % 4 * 8) & 255u) * scale;
  out[i] = pack8(x);
}

KERNEL dequantize_fp4(const u32* __restrict__ codes, const u8* __restrict__ scales, uint4* __restrict__ out, int n, int k) {
  const i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= static_cast<i64>(n) * (k / 8)) return;
  const u32 v = codes[i];
  const float scale = decode_e4m3(scales[i / 2]);
  float x[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = decode_e2m1(v >> (j * 4) & 15u) * scale;
  out[i] = pack8(x);
}
