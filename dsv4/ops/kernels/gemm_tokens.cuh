// Tokens of a product, from device memory to the atoms of gemm_multiply.cuh, normalised and scaled as the weights' format needs.
// Defines: N (8, 16, 32 or 64 tokens), PIECES (of 256 values that a block has of a token).
#ifndef DSV4_GEMM_TOKENS
#define DSV4_GEMM_TOKENS
#include "gemm_multiply.cuh"

constexpr int ATOM_BYTES = N * 128;
typedef float Sums[N / 2];

// Put values 8 i .. 8 i + 7 of token m into its atoms, for quantised weights times `scale` in fp16. In 16 (NVFP4: 32) values
// the order is the one in which a lane's weights are decoded. Whole warps, i being the lane's of 32.
template <int F>
DEVICE void put_piece(u8* tokens, int m, int i, uint4 v, float scale) {
  u8* atom = tokens + i / 8 * ATOM_BYTES + m * 128;
  const int chunk = i % 8, swizzle = m % 8;
  if constexpr (F == BF16) {
    *reinterpret_cast<uint4*>(atom + (chunk ^ swizzle) * 16) = v;
  } else {
    u32 w[4];
    fp16_pairs<F == FP4 ? 4 : 1>(v, scale, w);
    if constexpr (F == FP8) {  // in every other atom the second half first: no bank conflicts
      const int flip = i / 8 % 2;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int odd = j ^ flip;
        *reinterpret_cast<uint2*>(atom + (((chunk & ~1) + odd) ^ swizzle) * 16 + chunk % 2 * 8) =
            make_uint2(odd ? w[1] : w[0], odd ? w[3] : w[2]);
      }
    } else {
      transpose4(w);
      *reinterpret_cast<uint4*>(atom + (chunk ^ swizzle) * 16) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// The lane's weights of an RMSNorm.
template <bool Norm>
struct Weights {
  float of[Norm ? PIECES : 1][8];
  DEVICE Weights(const float* norm, int values) {
    if (!Norm) return;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const int i = (lane + 32 * j) * 8 + e;
        const float4 v = i < values ? *reinterpret_cast<const float4*>(norm + i) : make_float4(0.f, 0.f, 0.f, 0.f);
        of[j][e] = v.x, of[j][e + 1] = v.y, of[j][e + 2] = v.z, of[j][e + 3] = v.w;
      }
  }
  DEVICE float largest() const {
    if (!Norm) return 1.f;
    float peak = 0.f;
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) peak = fmaxf(peak, fabsf(of[j][e]));
    return warp_max(peak);
  }
};

// All threads: read the tokens' `values` values (of PIECES * 256 at most) and put them, and zeros up to `padded`, into shared
// memory, normalised and scaled as needed. inverse: of the power of two that a token was multiplied with. With a norm these are
// whole rows, and the power of two is that of a bound of the largest value. `meanwhile` is what to do once loads are under way.
template <int F, bool Norm, typename Meanwhile>
DEVICE void stage_tokens(u8* to, float* inverse, const Weights<Norm>& norm, const __nv_bfloat16* x, i64 stride, int tokens,
                         int values, int padded, float eps, Meanwhile meanwhile) {
  // As registers allow: 16 bytes of the tokens that a lane reads at a time; tokens.
  constexpr int LOADS = !Norm || WARPS <= 8 ? 16 : WGMMA ? 8 : 4, TOGETHER = PIECES >= LOADS ? 1 : LOADS / PIECES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const float norm_peak = norm.largest();
#pragma unroll 1
  for (int first = warp; first < tokens; first += WARPS * TOGETHER) {
    uint4 v[TOGETHER][PIECES];
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
      for (int j = 0; j < PIECES; ++j) {
        const int m = first + t * WARPS, i = lane + 32 * j;
        v[t][j] = make_uint4(0, 0, 0, 0);
        if (m < tokens && i < values / 8) v[t][j] = *reinterpret_cast<const uint4*>(x + m * stride + i * 8);
      }
    if (first == warp) meanwhile();
    float root[TOGETHER], scale[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t) {
      root[t] = scale[t] = 1.f;
      if (F == BF16 && !Norm) continue;
      u32 largest = 0;
      float square = 0.f;
#pragma unroll
      for (int j = 0; j < PIECES; ++j) {
        largest = __vmaxu2(largest, largest_of_8(v[t][j]));
        if (!Norm) continue;
        float f[8];
        unpack8(v[t][j], f);
#pragma unroll
        for (int e = 0; e < 8; ++e) square = fmaf(f[e], f[e], square);
      }
      if (Norm) root[t] = rsqrtf(warp_sum(square) * fast_reciprocal(static_cast<float>(values)) + eps);
      const float peak = warp_max(fmaxf(bf16_low(largest), bf16_high(largest))) * root[t] * norm_peak;
      const int shift = fp16_shift(__float_as_int(peak) >> 23);
      scale[t] = two_to(shift);
      if (lane == 0 && first + t * WARPS < tokens) inverse[first + t * WARPS] = two_to(-shift);
    }
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
      for (int j = 0; j < PIECES; ++j) {
        const int i = lane + 32 * j;
        if (first + t * WARPS >= tokens || i >= padded / 8) continue;
        if (Norm) {
          float f[8];
          unpack8(v[t][j], f);
#pragma unroll
          for (int e = 0; e < 8; ++e) f[e] = f[e] * root[t] * norm.of[j][e];
          v[t][j] = pack8(f);
        }
        put_piece<F>(to, first + t * WARPS, i, v[t][j], scale[t]);
      }
  }
  if (warp >= tokens) meanwhile();
}
#endif
