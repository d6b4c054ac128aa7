// Products of 16 rows of weights a warp, in registers, and N tokens, in shared memory: wgmma m64nNk16 of a warpgroup's four
// warps where there is such an instruction, else mma.sync m16n8k16.
//
// Tokens lie in atoms of 64 values: 128 bytes a token, eight tokens after another, 16-byte chunk c of token n at chunk
// c ^ (n % 8). An atom of tokens begins at a multiple of 1024 bytes.
//
// Lane 4 g + t has of rows g (elements 0, 1) and g + 8 (2, 3) the sums of tokens 8 j + 2 t and + 1, at 4 j; N / 2 sums, which say
// what N is: 8, or a multiple of 16 up to 128.
#ifndef DSV4_GEMM_MULTIPLY
#define DSV4_GEMM_MULTIPLY
#include "stream.cuh"

#ifndef WGMMA
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1
#else
#define WGMMA 0
#endif
#endif

// Weights that are decoded here and not later.
template <int Count>
DEVICE void settle(u32 (&a)[Count][4]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

#if WGMMA
#include "wgmma.cuh"
// What the tensor cores are told of tokens at a shared address, the lower half; the upper says: 128-byte swizzle, 1024 bytes
// from eight to eight tokens.
DEVICE u32 tokens_at(u32 address) { return (address >> 4 & 0x3FFF) | 1 << 16; }
DEVICE u32 tokens_further(u32 tokens, u32 bytes) { return tokens + (bytes >> 4); }
constexpr u64 SWIZZLED = 1ull << 62 | static_cast<u64>(1024 >> 4) << 32;

#define SUMS4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS8(i) SUMS4(i), SUMS4(i + 4)
#define SUMS16(i) SUMS8(i), SUMS8(i + 8)
#define SUMS32(i) SUMS16(i), SUMS16(i + 16)
#define NAMES4 "%0,%1,%2,%3"
#define NAMES8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES16 NAMES8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES24 NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES32 NAMES24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES40 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES48 NAMES40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES56 NAMES48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES64 NAMES56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define TYPED(TYPE, N, NAMES, WEIGHTS, TOKENS, ADD, ...)                                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE \
               " {" NAMES "}, {" WEIGHTS "}, " TOKENS ", p, 1, 1, 0;\n}"                                                    \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define MULTIPLY(...)                                          \
  {                                                            \
    if constexpr (F == BF16) TYPED("bf16", __VA_ARGS__);       \
    else TYPED("f16", __VA_ARGS__);                            \
  }
// 16 values of K; sums begin anew unless `add`.
template <int F, int Count>
DEVICE void multiply16(float (&c)[Count], const u32 (&a)[4], u32 tokens, int add) {
  const u64 b = SWIZZLED | tokens;
  if constexpr (Count == 4) MULTIPLY("8", NAMES4, "%4,%5,%6,%7", "%8", "%9", SUMS4(0))
  else if constexpr (Count == 8) MULTIPLY("16", NAMES8, "%8,%9,%10,%11", "%12", "%13", SUMS8(0))
  else if constexpr (Count == 16) MULTIPLY("32", NAMES16, "%16,%17,%18,%19", "%20", "%21", SUMS16(0))
  else if constexpr (Count == 24) MULTIPLY("48", NAMES24, "%24,%25,%26,%27", "%28", "%29", SUMS16(0), SUMS8(16))
  else if constexpr (Count == 32) MULTIPLY("64", NAMES32, "%32,%33,%34,%35", "%36", "%37", SUMS32(0))
  else if constexpr (Count == 40) MULTIPLY("80", NAMES40, "%40,%41,%42,%43", "%44", "%45", SUMS32(0), SUMS8(32))
  else if constexpr (Count == 48) MULTIPLY("96", NAMES48, "%48,%49,%50,%51", "%52", "%53", SUMS32(0), SUMS16(32))
  else if constexpr (Count == 56) MULTIPLY("112", NAMES56, "%56,%57,%58,%59", "%60", "%61", SUMS32(0), SUMS16(32), SUMS8(48))
  else MULTIPLY("128", NAMES64, "%64,%65,%66,%67", "%68", "%69", SUMS32(0), SUMS32(32))
}
#else
DEVICE u32 tokens_at(u32 address) { return address; }
DEVICE u32 tokens_further(u32 tokens, u32 bytes) { return tokens + bytes; }
DEVICE void products_begin() {}
DEVICE void products_end() {}
template <int Last>
DEVICE void products_wait() {}
template <int Count>
DEVICE void settle(float (&)[Count]) {}
template <int F, int Count>
DEVICE void multiply16(float (&c)[Count], const u32 (&a)[4], u32 b, int add) {
  const int lane = threadIdx.x & 31, token = lane % 8 + (Count > 4 ? lane / 16 * 8 : 0);
  const u32 chunk = b >> 4 & 7, at = (b & ~127u) + token * 128 + ((chunk + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
  for (int j = 0; j < (Count + 7) / 8; ++j) {
    u32 v[4];
    load_matrices(v, at + j * 2048);
    __syncwarp();  // else more would be begun at a time than there are registers for
#pragma unroll
    for (int h = 0; h < (Count > 4 ? 2 : 1); ++h) {
      float d[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i] = add ? c[j * 8 + h * 4 + i] : 0.f;
      mma<F>(d, a[0], a[1], a[2], a[3], v[h * 2], v[h * 2 + 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[j * 8 + h * 4 + i] = d[i];
    }
  }
}
#endif
#endif
