// One block's share of y = x W^T for up to 64 tokens; W, in bf16, FP8 or NVFP4, is streamed once. See stream.cuh,
// gemm_multiply.cuh and gemm_tokens.cuh.
//
// The rows of W are divided among the blocks of a group and, in a block, among its warps. Each warp has a ring of STAGES steps
// of its own, filled by cp.async before the previous kernel has ended; it decodes a step of 16 rows and 128 bytes in registers,
// from where wgmma takes it against all tokens. A block reads its tokens once. RANKS blocks of a cluster split K: each then has
// more rows and fewer values of a token, which are what a multiprocessor takes in besides the weights. At the end they send
// each other their sums, each block those of its share of the tokens, and add them in order of rank.
//
// Shared memory: tokens, rings, FP8 scales, the inverse powers of two of the tokens, a barrier. Sums that are received take the
// place of tokens and rings if there is one round of TILES tiles of 16 rows a warp, else they have room of their own.
//
// Defines: N (8, 16, 32 or 64 tokens), TILES, RANKS, APART (1: sums that are received have room of their own), PIECES (of 256
// values that a block has of a token), and see stream.cuh.
#ifndef DSV4_GEMM
#define DSV4_GEMM
#define KW 1
#define NT (N / 8)
#include "gemm_tokens.cuh"

template <int F> constexpr int ATOMS_OF = STEP_K<F> / 64;  // of 64 values in a step
constexpr int SHARE = N / RANKS;                           // tokens whose sums a block adds up
static_assert(SHARE >= 2, "sums are sent two at a time");
constexpr int EARLY = 2;                                   // steps copied before the tokens, which have to wait for them

// --- weights ----------------------------------------------------------------------------------------------------------

// A warp's ring over its rows, 16 at a time, and the steps of its block. Chunk c of 16 bytes of row r lies at c ^ (r % 8).
template <int F>
struct Ring {
  static constexpr int BYTES = STAGES * TILE_BYTES<F>;
  const u8* codes;   // the lane's 16 bytes of row lane / 8, of the step to be copied next
  const u8* scales;  // NVFP4: those of row lane, with TAIL 4 bytes of row lane / 4
  i64 row_bytes, scale_bytes;
  int left, step, steps, inside;  // rows to the last; the step; steps; bytes of a row past the lane's
  u32 begin, now, lane_at;        // shared addresses: the ring, its present stage, the lane's bytes in a stage

  DEVICE Ring(const u8* c, const u8* s, const Slice<F>& slice, u32 memory, int first, int last)
      : row_bytes(slice.row_bytes), scale_bytes(slice.scale_bytes), left(last - first), step(0), steps(slice.steps),
        inside(slice.end - slice.begin), begin(memory), now(memory) {
    const int lane = threadIdx.x & 31;
    codes = c + (first + lane / 8) * row_bytes + slice.begin + lane % 8 * 16;
    scales = s + (first + (TAIL ? lane / 4 : lane)) * scale_bytes + slice.begin / 8 + (TAIL ? lane % 4 * 4 : 0);
    lane_at = lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
  }
  template <int Steps>
  DEVICE void fill() {
#pragma unroll 1
    for (int i = 0; i < Steps; ++i) copy();
  }
  DEVICE void copy() {
    const int lane = threadIdx.x & 31;
    if (left > 0) {
      const bool valid = !TAIL || step * 128 + lane % 8 * 16 < inside;
      const u8* row = codes;
#pragma unroll
      for (int i = 0; i < 4; ++i, row += 4 * row_bytes)
        copy16((now + (i % 2 ? lane_at ^ 64 : lane_at)) + i * 512, row, valid && left > lane / 8 + 4 * i);
      if (F == FP4) {
        if (!TAIL) {
          if (lane < 16) copy16(now + 2048 + lane * 16, scales, left > lane);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            copy4(now + 2048 + i * 128 + lane * 4, scales + i * 8 * scale_bytes,
                  step * 16 + lane % 4 * 4 < inside / 8 && left > lane / 4 + 8 * i);
        }
      }
      codes += 128, scales += 16;
      if (++step == steps) {
        step = 0, left -= 16;
        codes += 16 * row_bytes - steps * 128, scales += 16 * scale_bytes - steps * 16;
      }
    }
    copies_end();
    if ((now += TILE_BYTES<F>) == begin + BYTES) now = begin;
  }
};

// A step in registers. codes[i]: 16-byte chunks 2 i (0: row lane / 4, 1: row lane / 4 + 8) and 2 i + 1 (2, 3), of each the four
// bytes lane % 4. scales: the NVFP4 scales of the two rows.
template <int F>
struct Step {
  u32 codes[4][4];
  uint4 scales[2];
};

template <int F>
DEVICE Step<F> next_step(Ring<F>& ring, const u8* memory, u32 memory_at) {
  const int lane = threadIdx.x & 31;
  copies_wait<STAGES - 1>();
  __syncwarp();
  Step<F> s;
  const u32 from = ring.now + (lane % 8 + lane / 8 % 2 * 8) * 128, chunk = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) load_matrices(s.codes[i], from + (chunk ^ i * 32));
  if (F == FP4)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      s.scales[i] = *reinterpret_cast<const uint4*>(memory + (ring.now - memory_at) + 2048 + i * 128 + lane / 4 * 16);
  __syncwarp();
  ring.copy();
  return s;
}

// The fp16 scales of chunks 2 i and 2 i + 1, of one row, for the lane's codes.
DEVICE __half2 two_scales(uint4 row, int i) {
  const u32 word = i == 0 ? row.x : i == 1 ? row.y : i == 2 ? row.z : row.w;
  return decode_scales(__byte_perm(word, 0, threadIdx.x & 2 ? 0x31 : 0x20));
}

// The weights of atom `atom` of a step: of 64 values, four products.
template <int F>
DEVICE void decode(const Step<F>& s, int atom, u32 (&a)[4][4]) {
  if constexpr (F == FP8) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) decode_fp8(s.codes[atom * 2 + i / 2][i % 2 * 2 + h], a[i][h], a[i][2 + h]);
  } else if constexpr (F == FP4) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const __half2 scales = two_scales(s.scales[h], atom);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        u32 v[4];
        decode_fp4(s.codes[atom][q * 2 + h], q ? __high2half2(scales) : __low2half2(scales), v);
        a[2 * q][h] = v[0], a[2 * q][2 + h] = v[1], a[2 * q + 1][h] = v[2], a[2 * q + 1][2 + h] = v[3];
      }
    }
  }
}

// An atom of weights against one of tokens; sums begin anew unless `add`.
template <int F>
DEVICE void multiply(Sums& sums, const u32 (&a)[4][4], u32 tokens, int add) {
  products_begin();
#pragma unroll
  for (int i = 0; i < 4; ++i) multiply16<F>(sums, a[i], tokens_further(tokens, i * 32), add || i);
  products_end();
}

// --- the product ------------------------------------------------------------------------------------------------------

// The lane's sums of rows row + lane / 4 and + 8, of which those below `last` exist, to y. Two lanes of neighbouring rows
// exchange, so that each has both rows of a token.
template <typename Out>
DEVICE void store_sums(const Linear<Out>& p, const Sums& sums, int row, int last) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, odd = g & 1;
  row += g & ~1;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const int token = 8 * j + 2 * t + odd;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float own = odd ? sums[j * 4 + h * 2 + 1] : sums[j * 4 + h * 2];
      const float other = __shfl_xor_sync(~0u, odd ? sums[j * 4 + h * 2] : sums[j * 4 + h * 2 + 1], 4);
      const float a = odd ? other : own, b = odd ? own : other;
      if (token >= p.tokens) continue;
      Out* to = p.y + static_cast<i64>(token) * p.n + row + h * 8;
      if (p.n % 2 == 0 && row % 2 == 0 && row + h * 8 + 1 < last) {
        if constexpr (sizeof(Out) == 4) *reinterpret_cast<float2*>(to) = make_float2(a, b);
        else *reinterpret_cast<u32*>(to) = pack_bf16(a, b);
      } else {
        if (row + h * 8 < last) store(to, a);
        if (row + h * 8 + 1 < last) store(to + 1, b);
      }
    }
  }
}

// Part `part` of `parts`; all blocks of a cluster have the same part. Apart: the `received` sums have room of their own, and are
// sent while later tiles are multiplied; else they lie at 0.
template <int F, int Tiles, bool Norm, bool Apart, typename Out>
DEVICE void gemm(const Linear<Out>& p, int part, int parts, int rank, int received) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 memory_at = shared_address(memory);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const u32 per_group = parts / p.groups, group = part / per_group, in_group = part % per_group, rows = p.n / p.groups;
  const u32 granule = rows % 4 ? 1 : 4, granules = rows / granule;
  const u32 begin = granules * in_group / per_group, count = granules * (in_group + 1) / per_group - begin;
  const int first = group * rows + begin * granule, last = first + count * granule;
  // Where blocks do not exchange sums, the rows are as few rounds of 64 as they fit in, of which some warpgroups have one more.
  constexpr u32 WARPGROUPS = WARPS / 4;
  const u32 all_rounds = RANKS > 1 ? WARPGROUPS : (count * granule + 63) / 64;
  auto rounds_before = [&](u32 w) {  // of the warps before warp w, together
    const u32 i = w / 4, each = all_rounds / WARPGROUPS, more = all_rounds % WARPGROUPS;
    return 4 * (i * each + min(i, more)) + w % 4 * (each + (i < more));
  };
  auto row_of_warp = [&](u32 w) {  // its first
    return first + static_cast<int>(all_rounds ? count * rounds_before(w) / (4 * all_rounds) * granule : 0);
  };
  const int own = row_of_warp(warp), end = row_of_warp(warp + 1);
  const int rounds = RANKS > 1 ? ((count + WARPS - 1) / WARPS * granule + 16 * Tiles - 1) / (16 * Tiles)
                               : rounds_before(warp + 1) - rounds_before(warp);

  const Slice<F> slice = make_slice<F>(p.k, rank, RANKS);
  const int padded = slice.steps * STEP_K<F>, bytes = slice.end - slice.begin;
  const int values = F == FP4 ? 2 * bytes : F == FP8 ? bytes : bytes / 2;
  const int most = make_slice<F>(p.k, 0, RANKS).steps, token_bytes = most * (STEP_K<F> / 64) * ATOM_BYTES;  // as in all ranks
  float* table = reinterpret_cast<float*>(memory + token_bytes + WARPS * Ring<F>::BYTES);
  const int row_block = first / 128, row_blocks = F == FP8 && count ? (last - 1) / 128 - row_block + 1 : 0;
  float* inverse = table + (row_blocks * most + 1) / 2 * 2;
  const u32 barrier = shared_address(inverse + N);

  // What is small comes first: it would wait for the rings' copies.
  const Weights<Norm> norm(p.norm, values);
#pragma unroll 1
  for (int r = 0; r < row_blocks; ++r)
#pragma unroll 1
    for (int i = threadIdx.x; i < slice.steps; i += THREADS)
      copy4(shared_address(table + r * most + i),
            p.scales + ((row_block + r) * static_cast<i64>((p.k + 127) / 128) + slice.begin / 128 + i) * 4, true);
  Ring<F> ring(p.codes, p.scales, slice, memory_at + token_bytes + warp * Ring<F>::BYTES, own, end);
  ring.template fill<EARLY>();
  if (RANKS > 1 && threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_done();
  }

  if (Apart) cluster_arrive();

  wait_for_previous_kernel();
  const int in_row = F == FP4 ? 2 * slice.begin : F == FP8 ? slice.begin : slice.begin / 2;
  stage_tokens<F, Norm>(memory, inverse, norm, p.x + static_cast<i64>(group) * p.k + in_row, p.stride, p.tokens, values, padded,
                        p.eps, [&] { ring.template fill<STAGES - EARLY>(); });
  if (WGMMA) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  copies_wait<STAGES - 1>();  // the scales
  __syncthreads();

  // Sums [rank][slot: warp, tile, row][token of the share] of all blocks, for this block's share of the tokens.
  constexpr int SLOTS = WARPS * Tiles * 16, KEPT = Apart ? 1 : Tiles;  // tiles whose sums a warp keeps
  auto meet = [&] {  // until nobody needs what lies where sums will come
    if (threadIdx.x == 0) barrier_arrive_expecting(barrier, RANKS * SLOTS * SHARE * 4);
    cluster_wait();
  };
  auto send = [&](const Sums& sums, int tile) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const int token = 8 * j + lane % 4 * 2, to = token / SHARE;
      const int slot = rank * SLOTS + (warp * Tiles + tile) * 16 + lane / 4;
      const u32 remote = peer_address(memory_at + received + (slot * SHARE + token % SHARE) * 4, to);
      const u32 its_barrier = peer_address(barrier, to);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        peer_store_async(remote + h * 8 * SHARE * 4, make_float2(sums[j * 4 + h * 2], sums[j * 4 + h * 2 + 1]), its_barrier);
    }
  };

  const u32 tokens = tokens_at(memory_at);
  Step<F> s = next_step<F>(ring, memory, memory_at);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int row = own + round * Tiles * 16;
    Sums kept[KEPT];
#pragma unroll(KEPT)
    for (int tile = 0; tile < Tiles; ++tile) {
      Sums& total = kept[tile % KEPT];
      const float *low = table, *high = table;  // scales of the lane's rows
      if (F == FP8) {
        low += (max(first, min(row + tile * 16 + lane / 4, last - 1)) / 128 - row_block) * most;
        high += (max(first, min(row + tile * 16 + lane / 4 + 8, last - 1)) / 128 - row_block) * most;
      }
      float scale_2[2] = {1.f, 1.f};  // NVFP4: of the lane's rows
      if (F == FP4)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          scale_2[h] = __ldg(p.scale_2 + (p.row_scales ? max(0, min(row + tile * 16 + h * 8 + lane / 4, p.n - 1)) : 0));
#pragma unroll
      for (int i = 0; i < N / 2; ++i) total[i] = 0.f;
      u32 now = tokens;
      u32 a[2][4][4];
      if constexpr (F == FP8) {
        Sums part[2];  // of steps, to be added times their scales
#pragma unroll
        for (int i = 0; i < N / 2; ++i) part[0][i] = part[1][i] = 0.f;
        auto add = [&](Sums& sums, int step) {
          settle(sums);
          const float scale[2] = {low[step], high[step]};
#pragma unroll
          for (int i = 0; i < N / 2; ++i) total[i] = fmaf(scale[i % 4 / 2], sums[i], total[i]);
        };
        auto begin = [&](Sums& sums) {  // the first half of a step
          decode<F>(s, 0, a[0]);
          settle(sums);
          multiply<F>(sums, a[0], now, 0);
        };
        auto complete = [&](Sums& sums) {
          decode<F>(s, 1, a[1]);
          multiply<F>(sums, a[1], tokens_further(now, ATOM_BYTES), 1);
          now = tokens_further(now, 2 * ATOM_BYTES);
          s = next_step<F>(ring, memory, memory_at);  // after the last step of all: of no use
        };
        int step = 0;
#pragma unroll 1
        for (; N <= 32 && step + 1 < slice.steps; step += 2) {  // the second begins while the first ends
          begin(part[0]);
          complete(part[0]);
          products_wait<1>();
          begin(part[1]);
          products_wait<1>();
          add(part[0], step);
          complete(part[1]);
          products_wait<0>();
          add(part[1], step + 1);
        }
#pragma unroll 1
        for (; step < slice.steps; ++step) {
          begin(part[0]);
          complete(part[0]);
          products_wait<0>();
          add(part[0], step);
        }
      } else {
        settle(total);
#pragma unroll 1
        for (int step = 0; step < slice.steps; ++step) {
#pragma unroll
          for (int atom = 0; atom < ATOMS_OF<F>; ++atom) {
            if constexpr (F == BF16) {
              multiply<F>(total, s.codes, now, step);
            } else {
              decode<F>(s, atom, a[atom % 2]);
              multiply<F>(total, a[atom % 2], now, atom || step);
              products_wait<1>();
            }
            now = tokens_further(now, ATOM_BYTES);
          }
          const Step<F> next = next_step<F>(ring, memory, memory_at);
          if (F == BF16) products_wait<0>();
          s = next;
        }
        products_wait<0>();
        settle(total);
      }
      if (F != BF16)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float back = inverse[8 * j + lane % 4 * 2 + i] * RAW<F>;
            total[j * 4 + i] *= back * scale_2[0], total[j * 4 + 2 + i] *= back * scale_2[1];
          }
      if (Apart) {
        if (tile == 0) meet();
        send(total, tile);
      }
    }
    if (RANKS == 1) {
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) store_sums(p, kept[tile], row + tile * 16, end);
      continue;
    }

    if (!Apart) {
      cluster_arrive();
      meet();
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) send(kept[tile], tile);
    }
    barrier_wait_cluster(barrier, round & 1);
    constexpr int PER = SHARE < 4 ? 2 : 4;  // tokens a thread adds up at a time
#pragma unroll 1
    for (int i = threadIdx.x; i < SLOTS * (SHARE / PER); i += THREADS) {
      const int slot = i % SLOTS, token = i / SLOTS * PER, w = slot / (Tiles * 16);
      const int at = row_of_warp(w) + round * Tiles * 16 + slot % (Tiles * 16);
      if (at >= row_of_warp(w + 1)) continue;
      const float* from = reinterpret_cast<const float*>(memory + received) + slot * SHARE + token;
      float sum[PER] = {};
#pragma unroll
      for (int r = 0; r < RANKS; ++r) {
        float v[PER];
        if constexpr (PER == 4) *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(from + r * SLOTS * SHARE);
        else *reinterpret_cast<float2*>(v) = *reinterpret_cast<const float2*>(from + r * SLOTS * SHARE);
#pragma unroll
        for (int c = 0; c < PER; ++c) sum[c] += v[c];
      }
#pragma unroll
      for (int c = 0; c < PER; ++c)
        if (rank * SHARE + token + c < p.tokens) store(p.y + static_cast<i64>(rank * SHARE + token + c) * p.n + at, sum[c]);
    }
    __syncwarp();
    if (Apart && round + 1 < rounds) cluster_arrive();
  }
}
#endif
