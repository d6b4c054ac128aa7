// Scores of index keys by warpgroups, for the kernels index_*.cu: 64 keys at a time, decoded in registers, against the heads of
// a token, which lie in shared memory. All formats' values are exact in what the tensor cores multiply: bf16 keys and
// fp4 keys (E2M1 times the power of two of their group) in bf16, fp8 keys in fp16, where the key's scale comes after the sum and
// each head of the query is brought to the range of fp16 by a power of two that its weight takes back.
//
// Lane 4 g + t of a warp holds of 16 keys the rows g and g + 8, of each a quarter of the channels. Which channels of a step of 16
// are the lane's is free, as long as the query has the same order: so a lane reads what lies side by side in the format.
// Given: HEADS, D (of a head), FORMAT (0 bf16, 1 fp8, 2 fp4), THREADS.
#ifndef DSV4_INDEX_SCORES
#define DSV4_INDEX_SCORES
#include "fp16.cuh"
#include "wgmma.cuh"

typedef unsigned char u8;
enum { BF16, FP8, FP4 };
constexpr int TILE = 64, STEPS = D / 16, GROUP = 128;               // keys, products of 16 channels, threads of a warpgroup
constexpr int ROW_BYTES = FORMAT == BF16 ? 2 * D : FORMAT == FP8 ? D : D / 2;
constexpr int SCALE_BYTES = FORMAT == BF16 ? 0 : FORMAT == FP8 ? 4 : D / 32;
constexpr int WORDS = ROW_BYTES / 16;                               // of 32 bits that a lane has of a row
constexpr int CHUNK_BYTES = 64 * 128, QUERY_BYTES = (D + 63) / 64 * CHUNK_BYTES;
static_assert(HEADS <= 64 && D % 32 == 0 && D <= 128, "shape of the query");
static_assert(FORMAT == BF16 || (D & (D - 1)) == 0, "widths of compact keys");

// --- keys -------------------------------------------------------------------------------------------------------------

// The keys of a slot, and of them a lane's words, four groups' scales (fp4) or the key's (fp8).
struct Rows {
  const u8 *codes, *scales;
  int last;
  DEVICE Rows(const u8* keys, i64 slot, int blocks, int count)
      : codes(keys + slot * blocks * (ROW_BYTES + SCALE_BYTES)), scales(codes + static_cast<i64>(blocks) * ROW_BYTES), last(count - 1) {}
  // So many rows from `row` on come to the L2. One lane.
  DEVICE void prefetch(int row, int count) const {
    if (row > last) return;
    count = min(count, last + 1 - row);
    near(codes + static_cast<i64>(row) * ROW_BYTES, count * ROW_BYTES);
    if (SCALE_BYTES) near(scales + static_cast<i64>(row) * SCALE_BYTES, count * SCALE_BYTES);
  }
  DEVICE static void near(const u8* from, int bytes) {  // in whole pieces of 16 bytes
    const int before = reinterpret_cast<u64>(from) % 16;
    prefetch_to_l2(from - before, (before + bytes + 15) / 16 * 16);
  }
};

struct Keys {
  u32 low[WORDS], high[WORDS], low_scale, high_scale;
};

DEVICE void load_words(u32 (&to)[WORDS], const u8* row, int t) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(row + (FORMAT == BF16 ? i * 64 + t * 16 : t * WORDS * 4 + i * 16));
      to[i * 4] = v.x, to[i * 4 + 1] = v.y, to[i * 4 + 2] = v.z, to[i * 4 + 3] = v.w;
    }
  } else if constexpr (WORDS == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(row + t * 8);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *reinterpret_cast<const u32*>(row + t * 4);
  }
}

DEVICE u32 load_scale(const Rows& rows, int row, int t) {
  if constexpr (FORMAT == FP8) return reinterpret_cast<const u32*>(rows.scales)[row];
  if constexpr (FORMAT == FP4) return rows.scales[static_cast<i64>(row) * SCALE_BYTES + t * D / 128];
  return 0;
}

// The warp's 16 keys from `first` on; past the last it is the last.
DEVICE void load_keys(Keys& keys, const Rows& rows, int first) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  const int low = min(first + (lane >> 2), rows.last), high = min(first + (lane >> 2) + 8, rows.last);
  load_words(keys.low, rows.codes + static_cast<i64>(low) * ROW_BYTES, t);
  load_words(keys.high, rows.codes + static_cast<i64>(high) * ROW_BYTES, t);
  keys.low_scale = load_scale(rows, low, t), keys.high_scale = load_scale(rows, high, t);
}

DEVICE u32 times_bf16(u32 a, u32 b) {
  u32 r;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Bits 11 and 15 of each half from `signs`, the others from `rest`.
DEVICE u32 signs_and_rest(u32 signs, u32 rest) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, 0x88008800, 0xE4;" : "=r"(r) : "r"(signs), "r"(rest));
  return r;
}

// Eight E2M1 codes -> pairs (0,4) (1,5) (2,6) (3,7) in bf16. A code's bits as the lowest of a bf16's exponent and the highest
// of its mantissa stand for 2^-126 times its value, the half too, as a subnormal number.
DEVICE void decode_fp4(u32 v, u32 scale, u32 (&out)[4]) {
  const u32 even = signs_and_rest(v << 8, v << 2), odd = signs_and_rest(v, v >> 6);
  out[0] = times_bf16((even << 4) & 0x81C081C0u, scale);
  out[1] = times_bf16(even & 0x81C081C0u, scale);
  out[2] = times_bf16((odd << 4) & 0x81C081C0u, scale);
  out[3] = times_bf16(odd & 0x81C081C0u, scale);
}

DEVICE u32 power_twice(u32 exponent) { return exponent * 0x00800080u; }  // 2^(exponent - 127) in bf16, two of them

// The 16 keys as the first operand of STEPS products, all lanes of the warp.
DEVICE void decode_keys(const Keys& keys, u32 (&a)[STEPS][4]) {
  if constexpr (FORMAT == BF16) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      a[s][0] = keys.low[2 * s], a[s][1] = keys.high[2 * s], a[s][2] = keys.low[2 * s + 1], a[s][3] = keys.high[2 * s + 1];
  } else if constexpr (FORMAT == FP8) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      decode_fp8(keys.low[s], a[s][0], a[s][2]);
      decode_fp8(keys.high[s], a[s][1], a[s][3]);
    }
  } else {
    // 2^126 times a scale above 2 is too large for bf16: those, which are rare, take a second multiplication.
    const u32 low = min(keys.low_scale, 128u), high = min(keys.high_scale, 128u);
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      u32 x[4], y[4];
      decode_fp4(keys.low[w], power_twice(low + 126), x);
      decode_fp4(keys.high[w], power_twice(high + 126), y);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[2 * w + i / 2][i % 2 * 2] = x[i], a[2 * w + i / 2][i % 2 * 2 + 1] = y[i];
    }
    if (__any_sync(~0u, keys.low_scale > 128 || keys.high_scale > 128)) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[s][i] = times_bf16(a[s][i], power_twice((i % 2 ? keys.high_scale - high : keys.low_scale - low) + 127));
    }
  }
}

// --- query ------------------------------------------------------------------------------------------------------------

// A token's query as 64 rows of the second operand, in chunks of 64 channels as wgmma.cuh describes them, and half of each
// row's weight; rows that are not heads are 0. All threads; afterwards `stores_before_products` and a barrier.
DEVICE void stage_query(u8* query, float* weight, const bf16* q, const float* weights, i64 token) {
  constexpr int PIECES = D / 8;
  for (int i = threadIdx.x; i < 64 * PIECES; i += THREADS) {
    const int head = i / PIECES, piece = i % PIECES;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < HEADS) v = *reinterpret_cast<const uint4*>(q + (token * HEADS + head) * D + piece * 8);
    u32 pairs[4] = {v.x, v.y, v.z, v.w};
    float unit = 1.f;
    if constexpr (FORMAT == FP8) {
      float x[8], top = 0.f;
      unpack8(v, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) top = fmaxf(top, fabsf(x[e]));
#pragma unroll
      for (int step = PIECES / 2; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      const int shift = fp16_shift(static_cast<int>(__float_as_uint(top) >> 23));
      const float scale = two_to(shift);
      unit = two_to(-shift);
#pragma unroll
      for (int e = 0; e < 4; ++e) pairs[e] = pack_fp16(x[2 * e] * scale, x[2 * e + 1] * scale);
    }
    if constexpr (FORMAT == FP4) {
      pairs[0] = __byte_perm(v.x, v.z, 0x5410), pairs[1] = __byte_perm(v.x, v.z, 0x7632);
      pairs[2] = __byte_perm(v.y, v.w, 0x5410), pairs[3] = __byte_perm(v.y, v.w, 0x7632);
    }
    // The two steps that lane t of a quad has these channels in.
    const int t = FORMAT == BF16 ? piece % 4 : piece / (PIECES / 4), step = 2 * (FORMAT == BF16 ? piece / 4 : piece % (PIECES / 4));
    u8* const chunk = query + step / 4 * CHUNK_BYTES;
#pragma unroll
    for (int e = 0; e < 4; ++e) *reinterpret_cast<u32*>(chunk + swizzled(head, step % 4 * 2 + e) + t * 4) = pairs[e];
    if (piece == 0) weight[head] = head < HEADS ? weights[token * HEADS + head] * (0.5f * unit) : 0.f;
  }
}

// --- scores as numbers ------------------------------------------------------------------------------------------------

// Larger scores, larger numbers; -0 equals 0, NaN equals -inf. 0 is less than all of them.
DEVICE u32 ordered(float x) {
  const u32 bits = x == x ? __float_as_uint(x) : 0xff800000u;
  return x == 0.f ? 0x80000000u : bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}

DEVICE float from_ordered(u32 value) { return __uint_as_float(value >> 31 ? value ^ 0x80000000u : ~value); }

// With its block: of equal scores the lowest block's is the largest number.
DEVICE u64 with_block(u32 value, int block) { return static_cast<u64>(value) << 32 | ~static_cast<u32>(block); }

DEVICE int visible_blocks(i64 position, i64 slot, int rate, int blocks) {
  return slot < 0 ? 0 : min((static_cast<int>(position) + 1) / rate, blocks);
}

// --- products ---------------------------------------------------------------------------------------------------------

DEVICE float relu(float x) {  // a NaN stays one
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}
// Twice as much by an addition, of which a multiprocessor does twice as many; -inf becomes a NaN.
DEVICE float twice_relu(float x) { return x + fabsf(x); }

// What two heads, 8 n + 2 t and the next, add to the scores of the rows g and g + 8. The weights are halves of the heads'.
template <bool Exact>
DEVICE void add_heads(float2& sum, float low, float low_next, float high, float high_next, const float* weight, int n) {
  const int head = n * 8 + 2 * (threadIdx.x & 3);
  const float2 w = *reinterpret_cast<const float2*>(weight + head);
  auto part = [](float x) { return Exact ? 2.f * relu(x) : twice_relu(x); };
  if (HEADS == 64 || head < HEADS) sum.x += part(low) * w.x, sum.y += part(high) * w.x;
  if (HEADS == 64 || head + 1 < HEADS) sum.x += part(low_next) * w.y, sum.y += part(high_next) * w.y;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// d = a b^T or d += a b^T for a warpgroup's a [64][16] in registers, b [64][16] in shared memory.
DEVICE void multiply_step(float (&d)[32], const u32 (&a)[4], u64 b, bool add) {
#define DSV4_PRODUCT(TYPE)                                                                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE     \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                \
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"                                        \
               ", {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"                                                                \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),         \
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),   \
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory")
  if constexpr (FORMAT == FP8)
    DSV4_PRODUCT("f16");
  else
    DSV4_PRODUCT("bf16");
#undef DSV4_PRODUCT
}

// What a warpgroup's 64 keys and the query of a token give. Keys that `start` is given must not change before `wait`.
struct Products {
  float d[32];
  DEVICE void start(const u32 (&a)[STEPS][4], u32 query) {
    products_begin();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) multiply_step(d, a[s], operand(query + s / 4 * CHUNK_BYTES + s % 4 * 32), s > 0);
    products_end();
  }
  // All but the last `Last` that were started are done.
  template <int Last>
  DEVICE void wait() {
    products_wait<Last>();
    settle(d);
  }
  // The lane's heads in the scores of its warp's rows g and g + 8.
  template <bool Exact>
  DEVICE float2 part(const float* weight) const {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int n = 0; n < 8; ++n)
      add_heads<Exact>(sum, d[n * 4], d[n * 4 + 1], d[n * 4 + 2], d[n * 4 + 3], weight, n);
    return sum;
  }
};
#else
DEVICE void mma_fp16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with the products of single warps, at the time when they are asked for.
struct Products {
  const u32 (*a)[4];
  u32 query;
  DEVICE void start(const u32 (&keys)[STEPS][4], u32 at) { a = keys, query = at; }
  template <int Last>
  DEVICE void wait() {}
  template <bool Exact>
  DEVICE float2 part(const float* weight) const {
    const int lane = threadIdx.x & 31;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
      float d[4] = {};
#pragma unroll
      for (int s = 0; s < STEPS; s += 2) {
        u32 b[4];
        load_matrices(b, query + s / 4 * CHUNK_BYTES + swizzled(n * 8 + lane % 8, s % 4 * 2 + lane / 8));
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if constexpr (FORMAT == FP8)
            mma_fp16(d, a[s + i], b[2 * i], b[2 * i + 1]);
          else
            mma_bf16(d, a[s + i], b[2 * i], b[2 * i + 1]);
      }
      add_heads<true>(sum, d[0], d[1], d[2], d[3], weight, n);
    }
    return sum;
  }
};
#endif

// The sum over a quad's lanes of one of four numbers: even lanes get `a`'s x and odd ones its y, with `Two` the upper two
// lanes `b`'s. Always added in the same order.
template <bool Two>
DEVICE float fold(float2 a, float2 b) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  auto halves = [=](float2 v) { return (odd ? v.y : v.x) + __shfl_xor_sync(~0u, odd ? v.x : v.y, 1); };
  const float low = halves(a);
  if (!Two) return low + __shfl_xor_sync(~0u, low, 2);
  const float high = halves(b);
  return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
}

// A score of one of a quad's two or four, see `fold`, as its number; `scale` is that of its key (fp8).
template <bool Two>
DEVICE u32 score_of(const Products& a, const Products& b, const float* weight, u32 scale) {
  float score = fold<Two>(a.part<false>(weight), b.part<false>(weight));
  if (__any_sync(~0u, score != score)) score = fold<Two>(a.part<true>(weight), b.part<true>(weight));
  return ordered(FORMAT == FP8 ? score * __uint_as_float(scale) : score);
}

#endif
