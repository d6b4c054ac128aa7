// One block's share of y = x W^T for up to 8 tokens, as kernels that stream weights do it (see stream.cuh).
//
// The rows of W are divided evenly among the blocks of a group; with one token among all blocks, and one whose rows are of two
// groups multiplies them with both groups' activations, as if these were two tokens. Where tokens times K are many bytes, a
// cluster of `ranks` blocks splits K; each then adds up its share of the outputs, in rank order.
//
// Before it waits for the previous kernel, a block starts its rings and fetches what else is constant. After that a warp needs
// no other to begin: it puts into shared memory the activations of its own steps of K, scaled by a power of two of their own.
// That all warps of a block did it together, with one scale a token, took 1 us longer. With one token it does so once before,
// with anything, so that the instructions are there: 0.5 us. To ask for the rest of a block's weights to come to the L2 as well
// lost 1 to 5 us a layer of Flash, before the wait and after it.
//
// Shared memory: rings, sums of up to `slots` tiles of each warp (twice if there are more), the cluster's sums, FP8 scales,
// norm, activations.
//
// Defines, besides those of stream.cuh (NT is 1): MOST, columns of the product: 1, 2 (one token, groups) or 8.
#ifndef DSV4_PRODUCT
#define DSV4_PRODUCT
#include "stream.cuh"

constexpr int TILE = 16;        // rows of a step
constexpr int SUMS = 4;         // independent sums, to hide the latency of mma
constexpr int SUM_PITCH = 20;   // floats of a tile's sums of one token: no bank conflicts
// A thread has, which leaves room for a block of the next kernel, and with one token for one of attend before.
constexpr int REGISTERS = MOST > 1 ? 128 : 120;
constexpr int MAX_RANKS = 8;
constexpr int HELD = 8;         // pieces of 8 values that a lane stages at a time

template <typename Out>
struct Product : Linear<Out> {
  int slots, buffers;
};

DEVICE void store4(float* to, const float (&v)[4]) { *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]); }
DEVICE void store4(__nv_bfloat16* to, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}

// --- weights ----------------------------------------------------------------------------------------------------------

// A step of a warp in its registers: 32 bytes of rows lane / 4 and lane / 4 + 8, and their NVFP4 scales.
struct Fragment {
  u32 low[8], high[8], low_scales, high_scales;
};

// A warp's ring over its tiles of rows and its steps of K. All STAGES steps are under way: one that has come goes to registers
// and makes room for the next. Chunk c of 16 bytes of row r lies at chunk c ^ (r % 8): no bank conflicts.
template <int F>
struct Feed {
  static constexpr int STEP_BYTES = TILE * (F == FP4 ? 144 : 128), END = STAGES * STEP_BYTES;
  const u8* codes;   // the lane's 16 bytes of row lane / 8 of the tile, of the step to be copied next
  const u8* scales;  // NVFP4: those of row lane, with TAIL 4 bytes of row lane / 4
  i64 row_bytes, scale_bytes, next_tile, next_scales;
  int left;                       // rows from the tile to the last
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
      for (int i = 0; i < 4; ++i, row += 4 * row_bytes)
        copy16_once((i % 2 ? odd : now) + i * 512, row, valid && left > lane / 8 + 4 * i);
      if (F == FP4) {
        const u32 stage = now - (lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16) + TILE * 128;
        if (!TAIL) {
          if (lane < TILE) copy16_once(stage + lane * 16, scales, left > lane);
        } else {
          row = scales;
#pragma unroll
          for (int i = 0; i < 2; ++i, row += 8 * scale_bytes)
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
    for (int i = 0; i < 2; ++i) {
      const u8* piece = memory + (at + (from ^ i * 16));
      const uint4 p = *reinterpret_cast<const uint4*>(piece), q = *reinterpret_cast<const uint4*>(piece + 1024);
      f.low[i * 4] = p.x, f.low[i * 4 + 1] = p.y, f.low[i * 4 + 2] = p.z, f.low[i * 4 + 3] = p.w;
      f.high[i * 4] = q.x, f.high[i * 4 + 1] = q.y, f.high[i * 4 + 2] = q.z, f.high[i * 4 + 3] = q.w;
    }
    if (F == FP4) {
      const u32* piece = reinterpret_cast<const u32*>(memory + at + TILE * 128 + lane * 4);
      f.low_scales = piece[0], f.high_scales = piece[32];
    }
    __syncwarp();
    copy();
    advance();
    return f;
  }
};

// One step against the tokens, of which the lane's activations for it are at `column`.
template <int F>
DEVICE void multiply_step(const Fragment& f, const u8* column, float (&sums)[SUMS][4]) {
  __half2 low[2], high[2];
  if constexpr (F == FP4) {
    low[0] = decode_scales(f.low_scales), low[1] = decode_scales(f.low_scales >> 16);
    high[0] = decode_scales(f.high_scales), high[1] = decode_scales(f.high_scales >> 16);
  }
#pragma unroll
  for (int w = 0; w < LANE_K<F> / 8; ++w) {
    u32 a[4], b[4];
    if constexpr (F == FP4) {
      decode_fp4(f.low[w], w / 2 % 2 ? __high2half2(low[w / 4]) : __low2half2(low[w / 4]), a);
      decode_fp4(f.high[w], w / 2 % 2 ? __high2half2(high[w / 4]) : __low2half2(high[w / 4]), b);
    } else if constexpr (F == FP8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        decode_fp8(f.low[2 * w + i], a[2 * i], a[2 * i + 1]);
        decode_fp8(f.high[2 * w + i], b[2 * i], b[2 * i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = f.low[4 * w + i], b[i] = f.high[4 * w + i];
    }
    const uint4 v = *reinterpret_cast<const uint4*>(column + w * 64);
    mma<F>(sums[2 * w % SUMS], a[0], b[0], a[1], b[1], v.x, v.y);
    mma<F>(sums[(2 * w + 1) % SUMS], a[2], b[2], a[3], b[3], v.z, v.w);
  }
}

// sums[0] += the others.
DEVICE void add_sums(float (&sums)[SUMS][4]) {
#pragma unroll
  for (int half = SUMS / 2; half; half /= 2)
#pragma unroll
    for (int s = 0; s < half; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[s][i] += sums[s + half][i];
}

// --- activations ------------------------------------------------------------------------------------------------------

// The RW warps that have the same steps kw, kw + KW, ... of K put the tokens' values of these steps into shared memory, each warp
// every RW-th token, in the order of place8, normalised and scaled as needed; zeros follow the last value. What is computed
// before the wait for the previous kernel is kept, since of all that follows it nothing else delays the first product so much.
template <int F, int Steps>
struct Staging {
  static constexpr int A_STEP = STEP_K<F> / 8, A_TOKEN = Steps * A_STEP;             // pieces of 8 values
  static constexpr int PIECES = (A_TOKEN + 31) / 32, APART = 32 * KW;                // a lane's of a token; from one to the next
  static constexpr int SHARE = (MOST + RW - 1) / RW;                                 // a warp's tokens
  static constexpr int FIT = HELD / PIECES > 1 ? HELD / PIECES : 1, BATCH = FIT < SHARE ? FIT : SHARE;
  static_assert(PIECES <= 16, "a warp has too much of K");
  i64 from;         // values of x before the lane's first piece, of the warp's first token
  u32 to;           // its place in shared memory, from the start
  int own, stored;  // pieces, from the lane's first on, that there are, and that are stored

  DEVICE Staging(u32 activations, int pitch, i64 stride, int values, int steps, int kw, int rw) {
    const int lane = threadIdx.x & 31, piece = (kw + lane / A_STEP * KW) * A_STEP + lane % A_STEP;
    from = rw * stride + piece * 8;
    to = activations + rw * pitch + place8<F>(piece);
    const int end = A_TOKEN % 32 && lane >= A_TOKEN % 32 ? (PIECES - 1) * APART : PIECES * APART;
    own = min(values / 8 - piece, end);
    stored = min(steps * A_STEP - piece, end);
    asm volatile("" : "+l"(from), "+r"(to), "+r"(own), "+r"(stored));
  }
  // For quantised weights inverse[token] becomes the inverse of the power of two that these values were multiplied with. `norm`,
  // in shared memory, or null; with a norm there are `values` values in a row of x.
  DEVICE void stage(u8* memory, int pitch, float* inverse, const float* norm, const __nv_bfloat16* x, i64 stride, int tokens,
                    int values, float eps, int kw, int rw) const {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int first = rw, turn = 0; first < tokens; first += BATCH * RW, turn += BATCH * RW) {
      uint4 v[BATCH][PIECES];
      float scale[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b)
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
          v[b][j] = make_uint4(0, 0, 0, 0);
          if (first + b * RW < tokens && j * APART < own)
            v[b][j] = *reinterpret_cast<const uint4*>(x + from + (turn + b * RW) * stride + j * APART * 8);
        }
      if (norm) {
        float root[BATCH], square[BATCH] = {};
#pragma unroll 4
        for (int i = lane; i < values / 8; i += 32)
#pragma unroll
          for (int b = 0; b < BATCH; ++b) {
            if (first + b * RW >= tokens) continue;
            float f[8];
            unpack8(*reinterpret_cast<const uint4*>(x + (first + b * RW) * stride + i * 8), f);
#pragma unroll
            for (int e = 0; e < 8; ++e) square[b] = fmaf(f[e], f[e], square[b]);
          }
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
          root[b] = rsqrtf(warp_sum(square[b]) * fast_reciprocal(static_cast<float>(values)) + eps);
        const float* weight = norm + ((kw + lane / A_STEP * KW) * A_STEP + lane % A_STEP) * 8;
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
#pragma unroll
          for (int j = 0; j < PIECES; ++j) {
            if (j * APART >= own) continue;
            float f[8];
            unpack8(v[b][j], f);
#pragma unroll
            for (int e = 0; e < 8; ++e) f[e] = f[e] * root[b] * weight[j * APART * 8 + e];
            v[b][j] = pack8(f);
          }
      }
      if (F != BF16) {
        u32 largest[BATCH] = {};
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
#pragma unroll
          for (int j = 0; j < PIECES; ++j)
            largest[b] = __vmaxu2(largest[b], largest_of_8(v[b][j]));
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
          const u32 peak = __reduce_max_sync(~0u, larger(largest[b]));
          const int shift = fp16_shift(static_cast<int>(peak >> 7));
          scale[b] = two_to(shift);
          if (lane == 0 && first + b * RW < tokens) inverse[first + b * RW] = two_to(-shift);
        }
      }
#pragma unroll
      for (int b = 0; b < BATCH; ++b)
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
          if (first + b * RW < tokens && j * APART < stored)
            *reinterpret_cast<uint4*>(memory + (to + (turn + b * RW) * pitch) + j * (APART * 16)) =
                operand8<F>(v[b][j], scale[b]);
    }
    if (RW == 1) __syncwarp();
    else barrier(1 + RW + kw, RW * 32);
  }
};

// --- the product ------------------------------------------------------------------------------------------------------

// Part `part` of `parts`; all blocks of a cluster have the same part. Steps: a warp's of a tile.
template <int F, int Steps, typename Out>
DEVICE void product(const Product<Out>& p, int part, int parts, int rank, int ranks) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float inverses[KW][8];
  __shared__ u64 arrived;  // the sums of the cluster
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kw = warp % KW, rw = warp / KW;
  const u32 rows = p.n / p.groups, granule = rows % 4 ? 1 : 4;  // four rows of y can be stored at a time
  const u32 divided = MOST == 2 ? p.n : rows, among = MOST == 2 ? parts : parts / p.groups, granules = divided / granule;
  const int first = part / among * divided + static_cast<u64>(granules) * (part % among) / among * granule;
  const int last = part / among * divided + static_cast<u64>(granules) * (part % among + 1) / among * granule;
  // Columns of the product: tokens, or the groups that the rows are of.
  const int group = first / rows, columns = MOST == 2 ? (first < last ? (last - 1) / rows - group + 1 : 1) : p.tokens;
  const Slice<F> slice = make_slice<F>(p.k, rank, ranks);
  const u8* ring = memory + warp * Feed<F>::END;
  Feed<F> feed(p.codes, p.scales, slice, ring, first + rw * TILE, last, kw);

  const int tiles = (last - first + TILE - 1) / TILE, rounds = (tiles + RW - 1) / RW;
  const int slot_floats = columns * SUM_PITCH, warp_floats = p.slots * slot_floats;
  float* sums = reinterpret_cast<float*>(memory + WARPS * Feed<F>::END);
  float* received = sums + p.buffers * WARPS * warp_floats;
  // For the cluster: four rows of one token are a unit, and unit u belongs to rank u % ranks.
  const int quads = (last - first + 3) / 4, units = quads * p.tokens, most = (units + ranks - 1) / ranks;
  float* table = received + (ranks > 1 ? most * ranks * 4 : 0);
  const int row_block = first / 128, row_blocks = F == FP8 && first < last ? (last - 1) / 128 - row_block + 1 : 0;
  float* norm = table + (row_blocks * slice.steps + 3) / 4 * 4;
  u8* activations = reinterpret_cast<u8*>(norm + (p.norm ? p.k : 0));
  if (ranks > 1) {
    if (threadIdx.x == 0) {
      barrier_init(shared_address(&arrived), 1);
      barrier_init_done();
      barrier_arrive_expecting(shared_address(&arrived), (units - rank + ranks - 1) / ranks * ranks * 16);
    }
    cluster_arrive_relaxed();
  }
#pragma unroll 1
  for (int r = 0; r < row_blocks; ++r)
#pragma unroll 1
    for (int i = threadIdx.x; i < slice.steps; i += THREADS)
      table[r * slice.steps + i] =
          reinterpret_cast<const float*>(p.scales)[(row_block + r) * static_cast<i64>((p.k + 127) / 128) + slice.begin / 128 + i];
  if (p.norm)
#pragma unroll 1
    for (int i = threadIdx.x; i < p.k; i += THREADS) norm[i] = p.norm[i];
  const int pitch = activation_pitch(slice), bytes = slice.end - slice.begin;
  const int values = F == FP4 ? 2 * bytes : F == FP8 ? bytes : bytes / 2;
  const int begin = F == FP4 ? 2 * slice.begin : F == FP8 ? slice.begin : slice.begin / 2;
  const __nv_bfloat16 *x = p.x + static_cast<i64>(group) * p.k + begin, *anything = reinterpret_cast<const __nv_bfloat16*>(p.codes);
  const i64 stride = MOST == 2 ? p.k : p.stride;
  const Staging<F, Steps> staging(activations - memory, pitch, stride, values, slice.steps, kw, rw);
  // The lane's activations of its first step; lanes past the last column repeat it.
  u32 column = activations - memory + min(lane / 4, columns - 1) * pitch + lane % 4 * 16 + kw * (STEP_K<F> * 2);
  keep(column);
  __syncthreads();

#pragma unroll 1
  for (int real = MOST > 2; real < 2; ++real) {
    if (real) wait_for_previous_kernel();
    staging.stage(memory, pitch, inverses[kw], p.norm ? norm : nullptr, real ? x : anything, stride,
                  real ? columns : min(columns, p.n / 8), values, p.eps, kw, rw);
  }

  auto put = [&](int row, int token, float4 s) {  // y of one token and four rows
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
  // The KW warps' sum of one token and four rows of a tile in slot `slot` of the row group `of`.
  auto sum_of = [&](const float* slot, int of, int token, int quad) {
    const float* sum = slot + of * KW * warp_floats + token * SUM_PITCH + quad * 4;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < KW; ++w) s = add4(s, *reinterpret_cast<const float4*>(sum + w * warp_floats));
    return s;
  };

  int buffer = 0, slot = 0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    float* slots = sums + buffer * WARPS * warp_floats + slot * slot_floats;  // of the first warp
    const int top = first + (round * RW + rw) * TILE;                         // the warp's first row
    if (top < last) {
      float total[SUMS][4] = {};
      const float* low = table + (min(top + lane / 4, last - 1) / 128 - row_block) * slice.steps;  // scales of the lane's rows
      const float* high = table + (min(top + lane / 4 + 8, last - 1) / 128 - row_block) * slice.steps;
#pragma unroll 1
      for (int i = 0; i < Steps; ++i) {
        const int step = kw + i * KW;
        if (step >= slice.steps) break;
        const Fragment f = feed.next(ring);
        const u8* at = memory + (column + i * (KW * STEP_K<F> * 2));
        if (F == FP8) {
          float part[SUMS][4] = {};
          multiply_step<F>(f, at, part);
          add_sums(part);
          const float a = low[step], b = high[step];
#pragma unroll
          for (int j = 0; j < 4; ++j) total[0][j] = fmaf(j < 2 ? a : b, part[0][j], total[0][j]);
        } else {
          multiply_step<F>(f, at, total);
        }
      }
      if (F != FP8) add_sums(total);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = lane % 4 * 2 + j;
        if (token >= columns) continue;
        float* to = slots + warp * warp_floats + token * SUM_PITCH + lane / 4;
        const float inverse = F == BF16 ? 1.f : inverses[kw][token];
        to[0] = total[0][j] * inverse;
        to[8] = total[0][2 + j] * inverse;
      }
    }
    if (++slot < p.slots && round + 1 < rounds || ranks > 1) continue;
    const float* oldest = slots - (slot - 1) * slot_floats;
    const int kept = round - slot + 1;  // the first round whose sums are there
    group_barrier(rw);
#pragma unroll 1
    for (int u = threadIdx.x - rw * KW * 32; u < slot * 4 * p.tokens; u += KW * 32) {
      const int token = u / (slot * 4), tile = u / 4 % slot, row = first + ((kept + tile) * RW + rw) * TILE + u % 4 * 4;
      const int of = MOST == 2 ? row / static_cast<int>(rows) - group : token;
      if (row < last) put(row, token, sum_of(oldest + tile * slot_floats, rw, of, u % 4));
    }
    slot = 0;
    if (p.buffers == 2) buffer ^= 1;
    else if (round + 1 < rounds) group_barrier(rw);
  }

  if (ranks == 1) return;
  __syncthreads();
  cluster_wait();  // every block has its barrier
#pragma unroll 1
  for (int u = threadIdx.x; u < units; u += THREADS) {
    const int quad = u % quads, token = u / quads, tile = quad / 4, owner = u % ranks;
    const float4 s = sum_of(sums + tile / RW * slot_floats, tile % RW, token, quad % 4);
    const float v[4] = {s.x, s.y, s.z, s.w};
    peer_store_async(peer_address(shared_address(received) + (rank * most + u / ranks) * 16, owner), v,
                     peer_address(shared_address(&arrived), owner));
  }
  barrier_wait_cluster(shared_address(&arrived), 0);
#pragma unroll 1
  for (int u = threadIdx.x; u * ranks + rank < units; u += THREADS) {
    const int unit = u * ranks + rank;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int r = 0; r < MAX_RANKS; ++r)
      if (r < ranks) s = add4(s, *reinterpret_cast<const float4*>(received + (r * most + u) * 4));
    put(first + unit % quads * 4, unit / quads, s);
  }
}
#endif
