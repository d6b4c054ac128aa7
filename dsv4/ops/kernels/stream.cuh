// A matrix product that streams its weights once: tiles of 16 rows of W x^T for up to 64 tokens, W in bf16, FP8 or NVFP4.
//
// One block an SM, WARPS warps, KW of which split K and the others rows. Each warp keeps a ring of STAGES steps of its own in
// shared memory, filled by cp.async: 128 bytes of each of 16 rows, and their NVFP4 scales. It multiplies a step with mma.sync
// m16n8k16 (weights are the 16 rows, tokens the 8 columns, float32 sums); at the end of a tile the KW warps' sums meet in
// shared memory and all threads add them. Activations stay in shared memory while the block works on one segment (group or
// expert). Copies for the next tiles are under way all the time, also before the previous kernel has ended.
//
// Quantised weights become fp16 by moving bits: E2M1 is 2^14 and E4M3 2^8 times too small as such, made up for at the end.
// E2M1 x E4M3 scale is exact in fp16. Activations become fp16 times a power of two that puts the token's largest value at
// 2^14..2^15: exact for values down to 2^-31 of the largest. bf16 weights are multiplied as they are.
//
// A first version copied rows with cp.async.bulk from one producer warp: about 80 cycles an instruction made that the limit
// (1.3 TB/s in NVFP4 with 16 pieces of 1024 and 16 of 128 bytes a stage).
//
// Defines: FMT (0 bf16, 1 FP8, 2 NVFP4), WARPS, KW, NT (tiles of 8 tokens), STAGES, TAIL (rows do not fill 128-byte steps).
#ifndef DSV4_STREAM
#define DSV4_STREAM
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "common.cuh"

#define BF16 0
#define FP8 1
#define FP4 2

typedef unsigned char u8;

constexpr int THREADS = WARPS * 32, RW = WARPS / KW;
constexpr int LANE_K = FMT == FP4 ? 64 : FMT == FP8 ? 32 : 16;  // values in a lane's 32 bytes of a row
constexpr int STEP_K = LANE_K * 4;                              // values in 128 bytes of a row
constexpr int PITCH = 144;                                      // bytes of a row in a stage: no bank conflicts
constexpr int STAGE_BYTES = 16 * PITCH + (FMT == FP4 ? 256 : 0);
constexpr int PART = NT * 128;                                  // floats of one warp's sums of one tile
constexpr int CHAINS = NT == 1 ? 2 : 1;                         // independent sums, to hide the latency of mma
constexpr float RAW = FMT == FP4 ? 16384.f : FMT == FP8 ? 256.f : 1.f;

// --- PTX --------------------------------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Weights are read once: they leave the L2 first.
DEVICE u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void copy16(u32 to, const u8* from, u64 policy, bool valid = true) {
  if (TAIL)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0),
                 "l"(policy) : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}
DEVICE void copy4(u32 to, const u8* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE float load_remote(const float* variable, u32 rank) {
  u32 remote;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(variable)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote) : "memory");
  return v;
}

DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if FMT == BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// --- decoding ---------------------------------------------------------------------------------------------------------

DEVICE u32 times(u32 a, __half2 s) {
  const __half2 r = __hmul2(*reinterpret_cast<__half2*>(&a), s);
  return *reinterpret_cast<const u32*>(&r);
}

// Eight E2M1 codes -> pairs (0,4) (1,5) (2,6) (3,7) in fp16, times the block's scale, times 2^-14.
DEVICE void decode_fp4(u32 v, __half2 scale, u32 (&out)[4]) {
  const u32 even = ((v << 4) & 0x80808080u) | ((v << 1) & 0x0E0E0E0Eu);
  const u32 odd = (v & 0x80808080u) | ((v >> 3) & 0x0E0E0E0Eu);
  out[0] = times(__byte_perm(even, 0, 0x2404), scale);
  out[1] = times(__byte_perm(odd, 0, 0x2404), scale);
  out[2] = times(even & 0xFF00FF00u, scale);
  out[3] = times(odd & 0xFF00FF00u, scale);
}

// Four E4M3 codes -> pairs (0,2) (1,3) in fp16, times 2^-8.
DEVICE void decode_fp8(u32 v, u32& even, u32& odd) {
  const u32 u = v << 8;
  even = (u & 0x80008000u) | ((u >> 1) & 0x3F803F80u);
  odd = (v & 0x80008000u) | ((v >> 1) & 0x3F803F80u);
}

// Two E4M3 scales -> fp16, exact.
DEVICE __half2 decode_scales(u32 two) {
  u32 r;
  asm("{\n.reg .b16 t;\ncvt.u16.u32 t, %1;\ncvt.rn.f16x2.e4m3x2 %0, t;\n}" : "=r"(r) : "r"(two));
  return *reinterpret_cast<__half2*>(&r);
}

// --- shared memory ----------------------------------------------------------------------------------------------------

constexpr int INVERSE = 2 * WARPS * PART * 4, RING = INVERSE + 256, ACTIVATIONS = RING + WARPS * STAGES * STAGE_BYTES;

struct Shared {
  u8* base;
  DEVICE float* parts(int buffer) const { return reinterpret_cast<float*>(base) + buffer * WARPS * PART; }  // [WARPS][PART]
  DEVICE float* inverse() const { return reinterpret_cast<float*>(base + INVERSE); }                        // [64], a token
  DEVICE u8* ring() const { return base + RING + (threadIdx.x >> 5) * STAGES * STAGE_BYTES; }
  DEVICE u8* activations() const { return base + ACTIVATIONS; }
};

// --- loads ------------------------------------------------------------------------------------------------------------

// This block works on bytes [begin, end) of every row of codes, in `steps` steps; a warp takes every KW-th.
struct Slice {
  int row_bytes, scale_bytes, begin, end, steps, chunks;
};

DEVICE Slice make_slice(int k, int rank, int ranks) {
  Slice s;
  s.row_bytes = FMT == FP4 ? k / 2 : FMT == FP8 ? k : 2 * k;
  s.scale_bytes = k / 16;
  const int steps = (s.row_bytes + 127) / 128, mine = (steps + ranks - 1) / ranks;
  s.begin = rank * mine * 128;
  s.end = max(s.begin, min(s.row_bytes, s.begin + mine * 128));
  s.steps = (s.end - s.begin + 127) / 128;
  s.chunks = (s.steps + KW - 1) / KW;
  return s;
}

// Where the lane's pieces of a tile of 16 rows begin: rows low .. low + 7 and high .. high + 7, of which `rows` exist (rows
// past them repeat the last). The lane copies 16 bytes of rows lane / 8 + 4 i, and of the scales of row lane % 16.
struct Pieces {
  const u8* codes[4];
  const u8* scales[2];
};

DEVICE Pieces make_pieces(const u8* codes, const u8* scales, const Slice& s, i64 low, i64 high, int rows) {
  const int lane = threadIdx.x & 31;
  auto row = [&](int r) {
    r = min(r, rows - 1);
    return r < 8 ? low + r : high + r - 8;
  };
  Pieces p;
#pragma unroll
  for (int i = 0; i < 4; ++i) p.codes[i] = codes + row(lane / 8 + 4 * i) * s.row_bytes + s.begin + lane % 8 * 16;
  if (FMT == FP4) {
    p.scales[0] = scales + row(TAIL ? lane / 4 : lane % 16) * s.scale_bytes + s.begin / 8 + (TAIL ? lane % 4 * 4 : 0);
    p.scales[1] = TAIL ? scales + row(lane / 4 + 8) * s.scale_bytes + s.begin / 8 + lane % 4 * 4 : p.scales[0];
  }
  return p;
}

// Start copying step `step` of a tile into a stage.
DEVICE void load_step(u8* stage, const Pieces& p, const Slice& s, int step, u64 policy) {
  const int lane = threadIdx.x & 31, at = step * 128;
  const u32 to = shared_address(stage);
  const bool valid = !TAIL || s.begin + at + lane % 8 * 16 < s.end;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    copy16(to + (lane / 8 + 4 * i) * PITCH + lane % 8 * 16, p.codes[i] + (valid ? at : 0), policy, valid);
  if (FMT == FP4) {
    if (!TAIL) {
      if (lane < 16) copy16(to + 16 * PITCH + lane * 16, p.scales[0] + at / 8, policy);
    } else {
      const bool in = (s.begin + at) / 8 + lane % 4 * 4 < s.scale_bytes;
#pragma unroll
      for (int i = 0; i < 2; ++i) copy4(to + 16 * PITCH + i * 128 + lane * 4, in ? p.scales[i] + at / 8 : p.scales[i] - lane % 4 * 4, in);
    }
  }
}

// --- activations ------------------------------------------------------------------------------------------------------

DEVICE int activation_pitch(const Slice& s) { return s.steps * STEP_K * 2 + 64; }  // bytes of a token, 64 mod 128

// Put one token's x[0, k) into shared memory, by lanes `worker` of `workers` (whole warps); returns the inverse of the power
// of two it was multiplied with. k is a multiple of 8; the rest of `steps` steps is zeros. The order is the one in which a
// lane's weights are decoded.
DEVICE float stage_token(u8* to, const __nv_bfloat16* x, int k, int steps, int worker, int workers) {
  const int lane = threadIdx.x & 31;
  float scale = 1.f, inverse = 1.f;
  if (FMT != BF16) {
    u32 largest = 0;
#pragma unroll 8
    for (int i = lane; i < k / 8; i += 32) {
      const uint4 v = *reinterpret_cast<const uint4*>(x + i * 8);
      largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu),
                                           __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu)));
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, o));
    const int exponent = static_cast<int>(max(largest & 0xFFFFu, largest >> 16) >> 7);
    const int shift = max(-100, min(100, 127 + 14 - exponent));
    scale = __int_as_float((127 + shift) << 23);
    inverse = __int_as_float((127 - shift) << 23);
  }
#pragma unroll 2
  for (int i = worker; i < steps * (STEP_K / 8); i += workers) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i < k / 8) v = *reinterpret_cast<const uint4*>(x + i * 8);
    if (FMT != BF16) {
      float f[8];
      unpack8(v, f);
      constexpr int a[8] = {0, FMT == FP4 ? 4 : 2, 1, FMT == FP4 ? 5 : 3, FMT == FP4 ? 2 : 4, 6, FMT == FP4 ? 3 : 5, 7};
      u32 w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const __half2 h = __floats2half2_rn(f[a[2 * j]] * scale, f[a[2 * j + 1]] * scale);
        w[j] = *reinterpret_cast<const u32*>(&h);
      }
      v = make_uint4(w[0], w[1], w[2], w[3]);
    }
    const int step = i / (STEP_K / 8), in_step = i % (STEP_K / 8), t = in_step / (LANE_K / 8), w = in_step % (LANE_K / 8);
    *reinterpret_cast<uint4*>(to + (step * STEP_K + w * 32 + t * 8) * 2) = v;
  }
  return inverse;
}

// The lane's activations in each tile of 8 columns; columns past the last repeat it.
DEVICE void lane_columns(const u8* activations, int pitch, int first, int count, const u8* (&columns)[NT]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < NT; ++n)
    columns[n] = activations + (first + min(n * 8 + (lane >> 2), count - 1)) * pitch + (lane & 3) * 16;
}

// --- the product ------------------------------------------------------------------------------------------------------

// One step: 16 rows x 128 bytes in `stage` against up to 8 * NT tokens.
DEVICE void multiply(const u8* stage, const u8* const (&columns)[NT], int step, float (&acc)[CHAINS][NT][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, at = step * STEP_K * 2;
  const u8* low = stage + g * PITCH + t * 32;
  const u8* high = low + 8 * PITCH;
  u32 a[8], b[8];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 p = *reinterpret_cast<const uint4*>(low + i * 16), q = *reinterpret_cast<const uint4*>(high + i * 16);
    a[i * 4] = p.x, a[i * 4 + 1] = p.y, a[i * 4 + 2] = p.z, a[i * 4 + 3] = p.w;
    b[i * 4] = q.x, b[i * 4 + 1] = q.y, b[i * 4 + 2] = q.z, b[i * 4 + 3] = q.w;
  }
#if FMT == FP4
  const u32* scales = reinterpret_cast<const u32*>(stage + 16 * PITCH) + g * 4 + t;
  const u32 sa = scales[0], sb = scales[32];
  const __half2 pa[2] = {decode_scales(sa), decode_scales(sa >> 16)}, pb[2] = {decode_scales(sb), decode_scales(sb >> 16)};
#endif
#pragma unroll
  for (int w = 0; w < LANE_K / 8; ++w) {
    u32 x[4], y[4];
#if FMT == FP4
    const int q = w / 2;
    decode_fp4(a[w], q & 1 ? __high2half2(pa[q / 2]) : __low2half2(pa[q / 2]), x);
    decode_fp4(b[w], q & 1 ? __high2half2(pb[q / 2]) : __low2half2(pb[q / 2]), y);
#elif FMT == FP8
    decode_fp8(a[2 * w], x[0], x[1]);
    decode_fp8(b[2 * w], y[0], y[1]);
    decode_fp8(a[2 * w + 1], x[2], x[3]);
    decode_fp8(b[2 * w + 1], y[2], y[3]);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = a[4 * w + i], y[i] = b[4 * w + i];
#endif
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint4 v = *reinterpret_cast<const uint4*>(columns[n] + at + w * 64);
      mma(acc[0][n], x[0], y[0], x[1], y[1], v.x, v.y);
      mma(acc[CHAINS - 1][n], x[2], y[2], x[3], y[3], v.z, v.w);
    }
  }
}

// Put the warp's sums, times each token's inverse, where all threads find them after the next barrier: [16 rows][8 columns]
// for each tile of 8 tokens.
DEVICE void deposit(float* parts, const float* inverse, const float (&acc)[CHAINS][NT][4]) {
  const int lane = threadIdx.x & 31;
  float* part = parts + (threadIdx.x >> 5) * PART + (lane >> 2) * 8 + (lane & 3) * 2;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const float2 f = *reinterpret_cast<const float2*>(inverse + n * 8 + (lane & 3) * 2);
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = (CHAINS == 2 ? acc[0][n][i] + acc[1][n][i] : acc[0][n][i]) * (i & 1 ? f.y : f.x);
    *reinterpret_cast<float2*>(part + n * 128) = make_float2(s[0], s[1]);
    *reinterpret_cast<float2*>(part + n * 128 + 64) = make_float2(s[2], s[3]);
  }
}

// A barrier among the KW warps of a row group, so that the groups need not wait for each other.
DEVICE void group_barrier(int group) {
  if (KW == 1) __syncwarp();
  else barrier(1 + group, KW * 32);
}

// Sum of KW warps' values at `part`, in fixed order.
DEVICE float add_parts(const float* part) {
  float sum = part[0];
#pragma unroll
  for (int w = 1; w < KW; ++w) sum += part[w * PART];
  return sum;
}

// A warp's ring: STAGES - 1 steps are under way. `Locate` gives the pieces of tile number i of the `count` that the warp
// goes through; steps are (tile, chunk) in order.
template <typename Locate>
struct Ring {
  const Slice& slice;
  Locate locate;
  u8* memory;
  int count, kw, tile, chunk, load_stage, stage;
  Pieces pieces;
  u64 policy;

  DEVICE Ring(const Slice& s, u8* m, int n, int k, Locate l)
      : slice(s), locate(l), memory(m), count(n), kw(k), tile(0), chunk(0), load_stage(0), stage(0), policy(evict_first()) {
    if (slice.chunks == 0) count = 0;
    if (count) pieces = locate(0);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) load();
  }
  DEVICE void load() {
    if (tile < count) {
      const int step = chunk * KW + kw;
      if (step < slice.steps) load_step(memory + load_stage * STAGE_BYTES, pieces, slice, step, policy);
      if (++load_stage == STAGES) load_stage = 0;
      if (++chunk == slice.chunks) {
        chunk = 0;
        if (++tile < count) pieces = locate(tile);
      }
    }
    copies_end();
  }
  // The next step's stage, once it is there; it lasts until the next call. The stage before it is filled anew.
  DEVICE const u8* next() {
    copies_wait<STAGES - 2>();
    __syncwarp();
    const u8* now = memory + stage * STAGE_BYTES;
    load();
    if (++stage == STAGES) stage = 0;
    return now;
  }
};
#endif
