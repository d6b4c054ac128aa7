// A matrix product that streams its weights once: tiles of 16 rows of W x^T for up to 64 tokens, W in bf16, FP8 or NVFP4.
//
// A block has WARPS warps, KW of which split K and the others rows. Each warp keeps a ring of STAGES steps of its own in shared
// memory, filled by cp.async: 128 bytes of each of 16 * MT rows, and their NVFP4 scales. It multiplies a step with mma.sync
// m16n8k16 (weights are the 16 rows, tokens the 8 columns, float32 sums); the KW warps' sums of a tile meet in shared memory.
// Activations stay in shared memory while the block works on one segment (group or expert). Copies for the next tiles are
// under way all the time, also before the previous kernel has ended.
//
// Quantised weights become fp16: E4M3 by a conversion, E2M1 by moving bits, which leaves it 2^14 times too small, made up for
// at the end. E2M1 x E4M3 scale is exact in fp16. Activations become fp16 times a power of two that puts the token's largest
// value at 2^14..2^15: exact for values down to 2^-31 of the largest. bf16 weights are multiplied as they are.
//
// A first version copied rows with cp.async.bulk from one producer warp: about 80 cycles an instruction made that the limit
// (1.3 TB/s in NVFP4 with 16 pieces of 1024 and 16 of 128 bytes a stage).
//
// The format F of the weights (BF16, FP8, FP4) is a template parameter, so that blocks of one launch can work on different ones.
// Defines: WARPS, KW, NT (tiles of 8 tokens), STAGES, TAIL (rows do not fill 128-byte steps), MT (tiles of 16 rows a step).
#ifndef DSV4_STREAM
#define DSV4_STREAM
#include "fp16.cuh"
#include "hopper.cuh"

typedef unsigned char u8;

enum { BF16, FP8, FP4 };

constexpr int THREADS = WARPS * 32, RW = WARPS / KW;
#ifndef MT
#define MT 1
#endif
constexpr int CHAINS = MT > 1 ? MT : NT == 1 ? 2 : 1;  // independent sums, to hide the latency of mma

template <int F> constexpr int LANE_K = F == FP4 ? 64 : F == FP8 ? 32 : 16;  // values in a lane's 32 bytes of a row
template <int F> constexpr int STEP_K = LANE_K<F> * 4;                       // values in 128 bytes of a row
template <int F> constexpr int TILE_BYTES = 2048 + (F == FP4 ? 256 : 0);     // a step of 16 rows
template <int F> constexpr int STAGE_BYTES = MT * TILE_BYTES<F>;
template <int F> constexpr float RAW = F == FP4 ? 16384.f : 1.f;

// y = x W^T as the kernels of linears take it.
template <typename Out>
struct Linear {
  const __nv_bfloat16* x;  // [tokens, stride], of which groups * k are used
  const float* norm;       // [k] or null: RMSNorm of x
  const u8* codes;
  const u8* scales;
  const float* scale_2;  // NVFP4: one, or with row_scales one a row
  Out* y;                // [tokens, n]
  int tokens, n, k, groups, stride, row_scales;
  float eps;
};

// --- PTX --------------------------------------------------------------------------------------------------------------

// The policy of what is read once: it leaves the L2 first. The constant is what createpolicy makes.
constexpr u64 EVICT_FIRST = 0x12F0000000000000;

DEVICE void copy16_once(u32 to, const u8* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0),
               "l"(EVICT_FIRST) : "memory");
}
DEVICE void copy16(u32 to, const u8* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy4(u32 to, const u8* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

template <int F>
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (F == BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Keeps the compiler from computing a value anew wherever it is used.
DEVICE void keep(u32& value) { asm volatile("" : "+r"(value)); }

DEVICE void store(float* to, float v) { *to = v; }
DEVICE void store(__nv_bfloat16* to, float v) { *to = __float2bfloat16(v); }

// --- decoding ---------------------------------------------------------------------------------------------------------

DEVICE u32 times(u32 a, __half2 s) {
  const __half2 r = __hmul2(*reinterpret_cast<__half2*>(&a), s);
  return *reinterpret_cast<const u32*>(&r);
}

// Bit 7 of each byte from `signs`, the others from `rest`.
DEVICE u32 signs_and_rest(u32 signs, u32 rest) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, 0x80808080, 0xE4;" : "=r"(r) : "r"(signs), "r"(rest));
  return r;
}

// Eight E2M1 codes -> pairs (0,4) (1,5) (2,6) (3,7) in fp16, times 2^-14. Logic runs at half the rate of arithmetic, so left
// shifts, which are multiplications, are preferred.
DEVICE void decode_codes(u32 v, u32 (&out)[4]) {
  const u32 even = signs_and_rest(v << 4, v << 1), odd = signs_and_rest(v, v >> 3);
  out[0] = (even << 8) & 0x8E008E00u;
  out[1] = (odd << 8) & 0x8E008E00u;
  out[2] = even & 0x8E008E00u;
  out[3] = odd & 0x8E008E00u;
}

// The same times the block's scale.
DEVICE void decode_fp4(u32 v, __half2 scale, u32 (&out)[4]) {
  decode_codes(v, out);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = times(out[i], scale);
}

// Two E4M3 scales -> fp16, exact.
DEVICE __half2 decode_scales(u32 two) {
  u32 r;
  asm("{\n.reg .b16 t;\ncvt.u16.u32 t, %1;\ncvt.rn.f16x2.e4m3x2 %0, t;\n}" : "=r"(r) : "r"(two));
  return *reinterpret_cast<__half2*>(&r);
}

// --- loads ------------------------------------------------------------------------------------------------------------

// Part `rank` of `ranks` of K, a block's or a warp's: bytes [begin, end) of every row of codes, in `steps` steps.
template <int F>
struct Slice {
  int row_bytes, scale_bytes, begin, end, steps;
};

template <int F>
DEVICE Slice<F> make_slice(int k, int rank, int ranks) {
  Slice<F> s;
  s.row_bytes = F == FP4 ? k / 2 : F == FP8 ? k : 2 * k;
  s.scale_bytes = k / 16;
  const int steps = (s.row_bytes + 127) / 128, mine = (steps + ranks - 1) / ranks;
  s.begin = rank * mine * 128;
  s.end = max(s.begin, min(s.row_bytes, s.begin + mine * 128));
  s.steps = (s.end - s.begin + 127) / 128;
  return s;
}

// Where the lane's pieces of a tile of 16 rows begin: rows low .. low + 7 and high .. high + 7, of which the first `rows` are
// copied and the others are zeros. The lane copies 16 bytes of rows lane / 8 + 4 i, and the scales of row lane % 16.
struct Pieces {
  const u8* codes[2];
  const u8* scales[2];
  int rows;
};

template <int F>
DEVICE Pieces make_pieces(const u8* codes, const u8* scales, const Slice<F>& s, i64 low, i64 high, int rows) {
  const int lane = threadIdx.x & 31;
  Pieces p;
  p.rows = rows;
  p.codes[0] = codes + (low + lane / 8) * s.row_bytes + s.begin + lane % 8 * 16;
  p.codes[1] = codes + (high + lane / 8) * s.row_bytes + s.begin + lane % 8 * 16;
  if (F == FP4) {
    const int r = TAIL ? lane / 4 : lane % 8, at = s.begin / 8 + (TAIL ? lane % 4 * 4 : 0);
    p.scales[0] = scales + ((TAIL || lane < 8 ? low : high) + r) * s.scale_bytes + at;
    p.scales[1] = scales + (high + r) * s.scale_bytes + at;
  }
  return p;
}

// Start copying step `step` of a tile into a stage. Chunk c of 16 bytes of row r goes to chunk c ^ (r % 8): no bank conflicts.
template <int F>
DEVICE void load_step(u8* stage, const Pieces& p, const Slice<F>& s, int step) {
  const int lane = threadIdx.x & 31, at = step * 128;
  const u32 to = shared_address(stage);
  const bool inside = !TAIL || s.begin + at + lane % 8 * 16 < s.end;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u8* from = p.codes[i / 2] + i % 2 * 4 * s.row_bytes + at;
    copy16_once(to + (lane / 8 + 4 * i) * 128 + (lane % 8 ^ (lane / 8 + i % 2 * 4)) * 16, from,
                inside && lane / 8 + 4 * i < p.rows);
  }
  if (F == FP4) {
    if (!TAIL) {
      if (lane < 16) copy16_once(to + 2048 + lane * 16, p.scales[0] + at / 8, lane < p.rows);
    } else {
      const bool in = (s.begin + at) / 8 + lane % 4 * 4 < s.scale_bytes;
#pragma unroll
      for (int i = 0; i < 2; ++i) copy4(to + 2048 + i * 128 + lane * 4, p.scales[i] + at / 8, in && lane / 4 + 8 * i < p.rows);
    }
  }
}

// --- activations ------------------------------------------------------------------------------------------------------

template <int F>
DEVICE int activation_pitch(const Slice<F>& s) { return s.steps * STEP_K<F> * 2 + 64; }  // bytes of a token, 64 mod 128

// Eight values as they are multiplied: for quantised weights fp16 times `scale`, in the order in which the weights are decoded.
template <int F>
DEVICE uint4 operand8(uint4 v, float scale) {
  if (F == BF16) return v;
  u32 w[4];
  fp16_pairs<F == FP4 ? 4 : 1>(v, scale, w);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Where values 8 i .. 8 i + 7 of a token lie in its shared memory, in bytes: a lane's of a step 64 bytes apart.
template <int F>
DEVICE int place8(int i) {
  const int step = i / (STEP_K<F> / 8), in_step = i % (STEP_K<F> / 8), t = in_step / (LANE_K<F> / 8), w = in_step % (LANE_K<F> / 8);
  return (step * STEP_K<F> + w * 32 + t * 8) * 2;
}

template <int F>
DEVICE void put8(u8* to, int i, uint4 v, float scale) {
  *reinterpret_cast<uint4*>(to + place8<F>(i)) = operand8<F>(v, scale);
}

// Put one token's x[0, k) into shared memory, by lanes `worker` of `workers` (whole warps); returns the inverse of the power
// of two it was multiplied with. k is a multiple of 8; the rest of `steps` steps is zeros.
template <int F>
DEVICE float stage_token(u8* to, const __nv_bfloat16* x, int k, int steps, int worker, int workers) {
  const int shift = F == BF16 ? 0 : row_shift(reinterpret_cast<const uint4*>(x), k / 8);
#pragma unroll 2
  for (int i = worker; i < steps * (STEP_K<F> / 8); i += workers) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i < k / 8) v = *reinterpret_cast<const uint4*>(x + i * 8);
    put8<F>(to, i, v, two_to(shift));
  }
  return two_to(-shift);
}

// A barrier among the KW warps of a row group, so that the groups need not wait for each other.
DEVICE void group_barrier(int group) {
  if (KW == 1) __syncwarp();
  else barrier(1 + group, KW * 32);
}
#endif
