// One block's share of y = x W^T for up to 8 * NT tokens, as kernels that stream weights do it (see stream.cuh).
//
// The rows of W are divided evenly among the blocks of a group. Where tokens times K do not fit in shared memory, a cluster of
// `ranks` blocks splits K; each then adds up its share of the outputs, in rank order. Before it waits for the previous kernel, a
// block starts its rings and fetches what else is constant. To ask for the rest of its weights to come to the L2 as well gained
// nothing: 0.1 to 0.5 us after a kernel that leaves the memory idle, and lost as much where kernels of this kind follow.
//
// Shared memory: rings, sums of up to `slots` tiles of each warp (twice if there are more), FP8 scales, norm, activations.
#ifndef DSV4_PRODUCT
#define DSV4_PRODUCT
#include "stream.cuh"

constexpr int TILE = 16 * MT;                                  // rows of a step
constexpr int SUMS = MT * NT == 1 ? 4 : MT * NT == 2 ? 2 : 1;  // independent sums, to hide the latency of mma
constexpr int SUM_PITCH = 20;                                  // floats of 16 rows of one token's sums: no bank conflicts
constexpr int MAX_STATS = 64 + WARPS;
constexpr int RESIDENT = NT == 1 && WARPS <= 8 ? 2 : 1;  // blocks an SM, of this kernel and the next, as registers go
constexpr int MAX_RANKS = 8;
constexpr int PIECES = 2;  // of 8 values that a lane stages at a time

template <typename Out>
struct Product {
  const __nv_bfloat16* x;  // [tokens, stride], of which groups * k are used
  const float* norm;       // [k] or null: RMSNorm of x
  const u8* codes;
  const u8* scales;
  const float* scale_2;  // NVFP4: one, or with row_scales one a row
  Out* y;                // [tokens, n]
  int tokens, n, k, groups, stride, row_scales, slots, buffers;
  float eps;
};

DEVICE void store(float* to, float v) { *to = v; }
DEVICE void store(__nv_bfloat16* to, float v) { *to = __float2bfloat16(v); }
DEVICE void store4(float* to, const float (&v)[4]) { *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]); }
DEVICE void store4(__nv_bfloat16* to, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}

// Keeps the compiler from computing a value anew wherever it is used.
DEVICE void keep(u32& value) { asm volatile("" : "+r"(value)); }

// --- weights ----------------------------------------------------------------------------------------------------------

// A step of a warp in its registers: 32 bytes of rows lane / 4 and lane / 4 + 8 of each tile of 16, and their NVFP4 scales.
struct Fragment {
  u32 low[MT][8], high[MT][8], low_scales[MT], high_scales[MT];
};

// A warp's ring over its tiles of rows and its steps of K. All STAGES steps are under way: one that has come goes to registers
// and makes room for the next. Chunk c of 16 bytes of row r lies at chunk c ^ (r % 8): no bank conflicts.
template <int F>
struct Feed {
  static constexpr int STEP_BYTES = TILE * (F == FP4 ? 144 : 128), END = STAGES * STEP_BYTES;
  const u8* codes;   // the lane's 16 bytes of row lane / 8 of the tile, of the step to be copied next
  const u8* scales;  // NVFP4: those of row lane, with TAIL 4 bytes of row lane / 4
  i64 row_bytes, scale_bytes, next_tile, next_scales;
  int left, below;  // rows from the lane's to the last; rows from the tile to the next
  int step, span, steps, inside;  // the step; the warp's steps of a tile times KW; the block's; bytes of a row past the lane's
  // The lane's places in the first stage, to write as shared address and to read in the warp's ring; and to write in the present
  // stage. (With a policy, ptxas of CUDA 13.0 gets copies wrong whose place it takes for the same in all lanes plus a constant.)
  u32 to, from, now;

  DEVICE Feed(const u8* c, const u8* s, const Slice<F>& slice, const u8* memory, int first, int last, int kw)
      : row_bytes(slice.row_bytes), scale_bytes(slice.scale_bytes), left(last - first), step(kw),
        span((slice.steps - kw + KW - 1) / KW * KW), steps(slice.steps), inside(slice.end - slice.begin) {
    const int lane = threadIdx.x & 31;
    codes = c + (first + lane / 8) * row_bytes + slice.begin + kw * 128 + lane % 8 * 16;
    scales = s + (first + (TAIL ? lane / 4 : lane)) * scale_bytes + slice.begin / 8 + kw * 16 + (TAIL ? lane % 4 * 4 : 0);
    next_tile = RW * TILE * row_bytes - span * 128;
    next_scales = RW * TILE * scale_bytes - span * 16;
    to = shared_address(memory) + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    from = lane / 4 * 128 + (2 * (lane % 4) ^ lane / 4) * 16;
    keep(to);
    keep(from);
    now = to;
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
      copy();
      advance();
    }
  }
  DEVICE void copy() {
    const int lane = threadIdx.x & 31;
    if (left > 0 && step < steps) {
      const bool valid = !TAIL || step * 128 + lane % 8 * 16 < inside;
      const u32 odd = now ^ 64;
      const u8* row = codes;
#pragma unroll
      for (int i = 0; i < 4 * MT; ++i, row += 4 * row_bytes)
        copy16((i % 2 ? odd : now) + i * 512, row, EVICT_FIRST, valid && left > lane / 8 + 4 * i);
      if (F == FP4) {
        const u32 stage = now - (lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16) + TILE * 128;
        if (!TAIL) {
          if (lane < TILE) copy16(stage + lane * 16, scales, EVICT_FIRST, left > lane);
        } else {
          row = scales;
#pragma unroll
          for (int i = 0; i < 2 * MT; ++i, row += 8 * scale_bytes)
            copy4(stage + i * 128 + lane * 4, row, step * 16 + lane % 4 * 4 < inside / 8 && left > lane / 4 + 8 * i);
        }
      }
      step += KW, codes += KW * 128, scales += KW * 16;
      if (step >= steps) step -= span, codes += next_tile, scales += next_scales, left -= RW * TILE;
    }
    copies_end();
  }
  DEVICE void advance() {
    if ((now += STEP_BYTES) == to + END) now = to;
  }
  // The next step, once it is there; `memory` is the warp's.
  DEVICE Fragment next(const u8* memory) {
    const int lane = threadIdx.x & 31;
    copies_wait<STAGES - 1>();
    __syncwarp();
    const u32 at = now - to;
    Fragment f;
#pragma unroll
    for (int j = 0; j < MT; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u8* piece = memory + (at + (from ^ i * 16)) + j * 2048;
        const uint4 p = *reinterpret_cast<const uint4*>(piece), q = *reinterpret_cast<const uint4*>(piece + 1024);
        f.low[j][i * 4] = p.x, f.low[j][i * 4 + 1] = p.y, f.low[j][i * 4 + 2] = p.z, f.low[j][i * 4 + 3] = p.w;
        f.high[j][i * 4] = q.x, f.high[j][i * 4 + 1] = q.y, f.high[j][i * 4 + 2] = q.z, f.high[j][i * 4 + 3] = q.w;
      }
      if (F == FP4) {
        const u32* piece = reinterpret_cast<const u32*>(memory + at + TILE * 128 + j * 256 + lane * 4);
        f.low_scales[j] = piece[0], f.high_scales[j] = piece[32];
      }
    }
    __syncwarp();
    copy();
    advance();
    return f;
  }
};

// One step against up to 8 * NT tokens, whose activations for it lie at `columns` + at.
template <int F>
DEVICE void multiply_step(const Fragment& f, const u8* memory, const u32 (&columns)[NT], u32 at, float (&sums)[SUMS][MT][NT][4]) {
  __half2 low[MT][2], high[MT][2];
  if constexpr (F == FP4) {
#pragma unroll
    for (int j = 0; j < MT; ++j) {
      low[j][0] = decode_scales(f.low_scales[j]), low[j][1] = decode_scales(f.low_scales[j] >> 16);
      high[j][0] = decode_scales(f.high_scales[j]), high[j][1] = decode_scales(f.high_scales[j] >> 16);
    }
  }
#pragma unroll
  for (int w = 0; w < LANE_K<F> / 8; ++w) {
    u32 a[MT][4], b[MT][4];
#pragma unroll
    for (int j = 0; j < MT; ++j) {
      if constexpr (F == FP4) {
        decode_fp4(f.low[j][w], w / 2 % 2 ? __high2half2(low[j][w / 4]) : __low2half2(low[j][w / 4]), a[j]);
        decode_fp4(f.high[j][w], w / 2 % 2 ? __high2half2(high[j][w / 4]) : __low2half2(high[j][w / 4]), b[j]);
      } else if constexpr (F == FP8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          decode_fp8(f.low[j][2 * w + i], a[j][2 * i], a[j][2 * i + 1]);
          decode_fp8(f.high[j][2 * w + i], b[j][2 * i], b[j][2 * i + 1]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[j][i] = f.low[j][4 * w + i], b[j][i] = f.high[j][4 * w + i];
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint4 v = *reinterpret_cast<const uint4*>(memory + (columns[n] + at) + w * 64);
#pragma unroll
      for (int j = 0; j < MT; ++j) mma<F>(sums[2 * w % SUMS][j][n], a[j][0], b[j][0], a[j][1], b[j][1], v.x, v.y);
#pragma unroll
      for (int j = 0; j < MT; ++j) mma<F>(sums[(2 * w + 1) % SUMS][j][n], a[j][2], b[j][2], a[j][3], b[j][3], v.z, v.w);
    }
  }
}

// sums[0] += the others.
DEVICE void add_sums(float (&sums)[SUMS][MT][NT][4]) {
#pragma unroll
  for (int half = SUMS / 2; half; half /= 2)
#pragma unroll
    for (int s = 0; s < half; ++s)
#pragma unroll
      for (int j = 0; j < MT; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[s][j][n][i] += sums[s + half][j][n][i];
}

// --- activations ------------------------------------------------------------------------------------------------------

struct Stats {
  float inverse[64];                  // of the power of two that a token was multiplied with
  float peaks[MAX_STATS], squares[MAX_STATS];  // of the share that each warp has of a token
};

// All threads: put every token's `values` values, and zeros up to `padded`, into shared memory, first as they are, then in the
// order of put8 and normalised and scaled as needed. norm [values], in shared memory, or null; with a norm these are whole rows.
template <int F>
DEVICE void stage_tokens(u8* to, int pitch, Stats& stats, const float* norm, const __nv_bfloat16* x, i64 stride, int tokens,
                         int values, int padded, float eps) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int sharing = max(1, WARPS / tokens), step = WARPS / sharing, token = warp / sharing, share = warp % sharing;
#pragma unroll 1
  for (int m = token; m < tokens; m += step)
#pragma unroll 4
    for (int i = share * 32 + lane; i < padded / 8; i += sharing * 32)
      copy16(shared_address(to + m * pitch + i * 16), reinterpret_cast<const u8*>(x + m * stride + i * 8), i < values / 8);
  copies_end();
  copies_wait<0>();
  __syncthreads();
  if (F != BF16 || norm) {
#pragma unroll 1
    for (int m = token; m < tokens; m += step) {
      float peak = 0.f, square = 0.f;
      u32 largest = 0;
#pragma unroll PIECES
      for (int i = share * 32 + lane; i < values / 8; i += sharing * 32) {
        const uint4 v = *reinterpret_cast<const uint4*>(to + m * pitch + i * 16);
        if (!norm) {
          largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu),
                                               __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu)));
        } else {
          float f[8];
          unpack8(v, f);
#pragma unroll
          for (int e = 0; e < 8; ++e) square = fmaf(f[e], f[e], square), peak = fmaxf(peak, fabsf(f[e] * norm[i * 8 + e]));
        }
      }
      if (!norm) peak = fmaxf(bf16_low(largest), bf16_high(largest));
      peak = warp_max(peak);
      if (norm) square = warp_sum(square);
      if (lane == 0) stats.peaks[m * sharing + share] = peak, stats.squares[m * sharing + share] = square;
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int m = token; m < tokens; m += step) {
    float root = 1.f, scale = 1.f;
    if (F != BF16 || norm) {
      float peak = 0.f, square = 0.f;
#pragma unroll 1
      for (int i = m * sharing; i < (m + 1) * sharing; ++i) peak = fmaxf(peak, stats.peaks[i]), square += stats.squares[i];
      if (norm) root = rsqrtf(square * fast_reciprocal(static_cast<float>(values)) + eps);
      const int exponent = __float_as_int(peak * root) >> 23, shift = max(-100, min(100, 127 + 14 - exponent));
      scale = __int_as_float((127 + shift) << 23);
      if (lane == 0 && share == 0) stats.inverse[m] = __int_as_float((127 - shift) << 23);
    }
#pragma unroll 1
    for (int i = share * 32 + lane; i - lane < padded / 8; i += sharing * 32 * PIECES) {  // 32 pieces of 8 are whole steps
      uint4 v[PIECES];
#pragma unroll
      for (int j = 0; j < PIECES; ++j) {
        const int at = i + j * sharing * 32;
        v[j] = make_uint4(0, 0, 0, 0);
        if (at >= values / 8) continue;
        v[j] = *reinterpret_cast<const uint4*>(to + m * pitch + at * 16);
        if (norm) {
          float f[8];
          unpack8(v[j], f);
#pragma unroll
          for (int e = 0; e < 8; ++e) f[e] = f[e] * root * norm[at * 8 + e];
          v[j] = pack8(f);
        }
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < PIECES; ++j)
        if (i + j * sharing * 32 < padded / 8) put8<F>(to + m * pitch, i + j * sharing * 32, v[j], scale);
      __syncwarp();
    }
  }
  __syncthreads();
}

// --- the product ------------------------------------------------------------------------------------------------------

// Part `part` of `parts`; all blocks of a cluster have the same part.
template <int F, typename Out>
DEVICE void product(const Product<Out>& p, Stats& stats, int part, int parts, int rank, int ranks) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kw = warp % KW, rw = warp / KW;
  const u32 per_group = parts / p.groups, group = part / per_group, in_group = part % per_group, rows = p.n / p.groups;
  const u32 granule = rows % 4 ? 1 : 4, granules = rows / granule;  // four rows of y can be stored at a time
  const int first = group * rows + granules * in_group / per_group * granule;
  const int last = group * rows + granules * (in_group + 1) / per_group * granule;
  const Slice<F> slice = make_slice<F>(p.k, rank, ranks);
  const u8* ring = memory + warp * Feed<F>::END;
  Feed<F> feed(p.codes, p.scales, slice, ring, first + rw * TILE, last, kw);

  // Tile i of the warps `of` that split K begins at this row.
  auto row_of = [&](int i, int of) { return first + ((i / MT * RW + of) * MT + i % MT) * 16; };
  const int tiles = (last - first + TILE - 1) / TILE, rounds = (tiles + RW - 1) / RW, mine = (tiles - rw + RW - 1) / RW;
  float* sums = reinterpret_cast<float*>(memory + WARPS * Feed<F>::END);
  const int slot_floats = MT * p.tokens * SUM_PITCH;
  float* table = sums + p.buffers * p.slots * WARPS * slot_floats;
  const int row_block = first / 128, row_blocks = F == FP8 && first < last ? (last - 1) / 128 - row_block + 1 : 0;
  float* norm = table + (row_blocks * slice.steps + 3) / 4 * 4;
  u8* activations = reinterpret_cast<u8*>(norm + (p.norm ? p.k : 0));
#pragma unroll 1
  for (int r = 0; r < row_blocks; ++r)
#pragma unroll 1
    for (int i = threadIdx.x; i < slice.steps; i += THREADS)
      table[r * slice.steps + i] =
          reinterpret_cast<const float*>(p.scales)[(row_block + r) * static_cast<i64>((p.k + 127) / 128) + slice.begin / 128 + i];
  if (p.norm)
#pragma unroll 1
    for (int i = threadIdx.x; i < p.k; i += THREADS) norm[i] = p.norm[i];

  wait_for_previous_kernel();
  const int pitch = activation_pitch(slice), padded = slice.steps * STEP_K<F>;
  const int bytes = slice.end - slice.begin, values = F == FP4 ? 2 * bytes : F == FP8 ? bytes : bytes / 2;
  const __nv_bfloat16* x = p.x + static_cast<i64>(group) * p.k + (F == FP4 ? 2 * slice.begin : F == FP8 ? slice.begin : slice.begin / 2);
  stage_tokens<F>(activations, pitch, stats, p.norm ? norm : nullptr, x, p.stride, p.tokens, values, padded, p.eps);
  u32 columns[NT];  // the lane's activations of its first step, in each tile of 8 tokens; past the last they repeat it
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    columns[n] = activations - memory + min(n * 8 + lane / 4, p.tokens - 1) * pitch + lane % 4 * 16 + kw * (STEP_K<F> * 2);
    keep(columns[n]);
  }

  // Output rows 4 * quad .. + 3 of tile i of the warps `of`, for one token: add the warps' and the blocks' sums.
  auto finish = [&](const float* slot, int i, int of, int token, int quad) {
    const int row = row_of(i, of) + quad * 4;
    if (row >= last) return;
    const float* sum = slot + of * KW * p.slots * slot_floats + (i % MT * p.tokens + token) * SUM_PITCH + quad * 4;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
    if (ranks == 1) {
#pragma unroll
      for (int w = 0; w < KW; ++w) s = add4(s, *reinterpret_cast<const float4*>(sum + w * p.slots * slot_floats));
    } else {
#pragma unroll 1
      for (int w = 0; w < KW; ++w) {
        float4 v[MAX_RANKS];
#pragma unroll
        for (int r = 0; r < MAX_RANKS; ++r)
          if (r < ranks) v[r] = load_remote4(sum + w * p.slots * slot_floats, r);
#pragma unroll
        for (int r = 0; r < MAX_RANKS; ++r)
          if (r < ranks) s = add4(s, v[r]);
      }
    }
    float value[4] = {s.x, s.y, s.z, s.w};
    if (F == FP4)
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] *= RAW<F> * p.scale_2[p.row_scales ? min(row + j, last - 1) : 0];
    Out* to = p.y + static_cast<i64>(token) * p.n + row;
    if (granule == 4) {
      store4(to, value);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (row + j < last) store(to + j, value[j]);
    }
  };

  int buffer = 0, slot = 0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    float* slots = sums + buffer * WARPS * p.slots * slot_floats + slot * slot_floats;  // of the first warp
    if (round < mine) {
      float total[SUMS][MT][NT][4] = {};
      const float* low[MT];  // scales of the lane's rows
      const float* high[MT];
      if (F == FP8)
#pragma unroll
        for (int j = 0; j < MT; ++j) {
          const int row = row_of(round * MT + j, rw) + lane / 4;
          low[j] = table + (min(row, last - 1) / 128 - row_block) * slice.steps;
          high[j] = table + (min(row + 8, last - 1) / 128 - row_block) * slice.steps;
        }
#pragma unroll 1
      for (int step = kw, at = 0; step < slice.steps; step += KW, at += KW * STEP_K<F> * 2) {
        const Fragment f = feed.next(ring);
        if (F == FP8) {
          float part[SUMS][MT][NT][4] = {};
          multiply_step<F>(f, memory, columns, at, part);
          add_sums(part);
#pragma unroll
          for (int j = 0; j < MT; ++j) {
            const float a = low[j][step], b = high[j][step];
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) total[0][j][n][i] = fmaf(i < 2 ? a : b, part[0][j][n][i], total[0][j][n][i]);
          }
        } else {
          multiply_step<F>(f, memory, columns, at, total);
        }
      }
      if (F != FP8) add_sums(total);
      float* own = slots + warp * p.slots * slot_floats + lane / 4;
#pragma unroll
      for (int j = 0; j < MT; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int token = n * 8 + lane % 4 * 2 + i;
            if (token >= p.tokens) continue;
            float* to = own + (j * p.tokens + token) * SUM_PITCH;
            const float inverse = F == BF16 ? 1.f : stats.inverse[token];
            to[0] = total[0][j][n][i] * inverse;
            to[8] = total[0][j][n][2 + i] * inverse;
          }
    }
    if (++slot < p.slots && round + 1 < rounds) continue;
    float* begin = slots - (slot - 1) * slot_floats;
    const int base = round - slot + 1, tiles_kept = slot * MT;  // of each row group
    if (ranks > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      group_barrier(rw);
    }
    const int start = (threadIdx.x - rw * KW * 32) * ranks + rank, stride = KW * 32 * ranks;
    if (NT == 1) {
#pragma unroll 1
      for (int token = 0; token < p.tokens; ++token)
#pragma unroll 1
        for (int o = start; o < tiles_kept * 4; o += stride)
          finish(begin + o / 4 / MT * slot_floats, base * MT + o / 4, rw, token, o % 4);
    } else {
#pragma unroll 1
      for (int i = 0; i < tiles_kept; ++i)
#pragma unroll 1
        for (int o = start; o < p.tokens * 4; o += stride)
          finish(begin + i / MT * slot_floats, base * MT + i, rw, o / 4, o % 4);
    }
    slot = 0;
    buffer ^= 1;
    if (p.buffers == 1) {
      buffer = 0;
      if (ranks == 1 && round + 1 < rounds) group_barrier(rw);
    }
    if (ranks > 1 && (p.buffers == 1 || round + 1 == rounds)) {  // the others may still be reading this block's sums
      cluster_arrive();
      cluster_wait();
    }
  }
}
#endif
