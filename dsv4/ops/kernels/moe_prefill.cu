// The experts of many tokens: entries (token, choice) of one expert against its weights, on wgmma (see gemm_multiply.cuh).
//
// A block takes tiles of 256 weight rows (of gate_up 128 gate rows and their up rows) and up to 128 entries, one after another;
// the tiles of one expert come together, so that its weights are read once from memory. Four warpgroups multiply 64 rows each:
// a warp decodes its weights in registers, while the products of the other three run. A fifth warpgroup copies codes and
// activations, steps ahead, into STAGES places. moe_prefill_order.cu makes the list of tiles and brings activations into the
// form in which they are multiplied.
//
// Work: 6 * I * H operations an entry; Flash with 4096 tokens, 6 experts and the shared one: 1.44e12, 2.4 ms at 600 TFLOP/s;
// bytes: 3.6 GB of NVFP4 weights, 0.85 ms. Measured on an H200, with what moe_prefill_order.cu and moe_combine take:
//   8192 tokens 6.05 ms (477 TFLOP/s), 4096 2.88 (502), 2048 1.98 (365), 1024 1.59 (226)
//   512 tokens 1.44 ms (2.5 TB/s), 256 1.36 (2.7), 128 1.26 (2.8), 80 1.08 (2.7), 65 1.03 (2.8)
// With mma.sync and weights decoded in shared memory it was 8 ms for 4096 tokens and 4.9 for 512; 512 in launches of 64 by
// moe_experts.cu take 6.4. Of 4096 tokens the two launches here are 1.59 and 0.86 ms. Without decoding they take 0.3 ms less,
// without stores 0.3, without copies of weights 0.3, of which 0.17 are the scales'; of 512 tokens 0.1, 0.1 and 0.2. Two
// warpgroups with twice the rows, which decode while their own products run, took 0.2 ms more with 4096 and 0.1 with 512.
//
// FP8 weights have a scale for 128 values along K and 128 rows, which no half of a tile leaves: at a new block the sums are
// brought to its scale, and after the last one to 1.
// Defines: FMT (0 bf16, 1 FP8, 2 NVFP4), GATE_UP (h in sorted order, in bf16) or not (down: out [entry, rows] in float32), BESIDE
// (whether there is a shared expert in FP8 beside NVFP4 ones), STAGES.
#define WARPS 20
#define KW 1
#define NT 1
#define TAIL 0
#include "gemm_multiply.cuh"

constexpr int ENTRIES = 128, ROWS = 256, MULTIPLIERS = 512, COPIERS = 128;
constexpr int TILE_ROWS = GATE_UP ? ROWS / 2 : ROWS;
constexpr int TABLES = STAGES + 1;  // the copying threads are at most STAGES steps, so as many tiles, ahead

// A step: values of K, in atoms of 64; bytes of a weight row; rows that are copied at a time.
template <int F> constexpr int ATOMS = F == FP4 ? 2 : 1;
template <int F> constexpr int VALUES = 64 * ATOMS<F>;
template <int F> constexpr int ROW_BYTES = F == BF16 ? 128 : 64;
template <int F> constexpr int COPY_ROWS = COPIERS * 16 / ROW_BYTES<F>;
constexpr int ATOM = ENTRIES * 128, TOKEN_BYTES = ATOMS<FMT> * ATOM, CODE_BYTES = ROWS * ROW_BYTES<FMT>;
constexpr int SCALE_BYTES = FMT == FP4 ? ROWS * 8 : FMT == FP8 ? 8 : 0;  // FP8: of two blocks of rows

// A tile for the multiplying threads. factor: to make up for what the entry was multiplied with. last: in gate_up the entry's
// routing weight, in down the entry, as bits.
struct Tile {
  int expert, first, live, row;  // first: its place in the sorted order; row: its first of `rows`
  float scale_2[2];
  int unused[2];
  struct Entry {
    float factor, last;
  } entries[ENTRIES];
};

constexpr int AT_CODES = STAGES * TOKEN_BYTES, AT_SCALES = AT_CODES + STAGES * CODE_BYTES;
constexpr int AT_TABLES = AT_SCALES + STAGES * SCALE_BYTES, AT_BARRIERS = AT_TABLES + TABLES * sizeof(Tile);
static_assert(AT_TABLES % 8 == 0 && AT_BARRIERS + STAGES * 16 <= 227 * 1024, "shared memory");

struct Weights {
  const u8 *codes, *scales;  // [count, rows, or 2 rows, k]
  const float* scale_2;
};

struct Product {
  const u8* x;           // as moe_prepare makes it
  const float* inverse;  // of the powers of two that entries were multiplied with, in sorted order
  const int2* order;     // (entry, token), sorted by expert
  const float* weights;  // of the entries that are a choice; the others have 1
  Weights experts, shared;
  void* out;
  int choice_entries, k, pitch, rows;
  float limit;

  template <int F> DEVICE int steps() const { return (k + VALUES<F> - 1) / VALUES<F>; }
  template <int F> DEVICE const Weights& matrices() const { return BESIDE && F == FP8 ? shared : experts; }
};

DEVICE void copy16_line(u32 to, const u8* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy8(u32 to, const u8* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}
DEVICE void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Steps of the block go round in STAGES places.
struct Place {
  int stage = 0;
  u32 round = 0;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, ++round;
  }
};

struct Barriers {
  u32 full, empty;  // addresses of STAGES each
  DEVICE u32 full_of(const Place& p) const { return full + p.stage * 8; }
  DEVICE u32 empty_of(const Place& p) const { return empty + p.stage * 8; }
};

// Which weight row comes as row `at` of a tile. Rows of 16 that a warp multiplies are eight gate rows (part 0) and their up rows
// (part 1), or of down eight even and the odd ones between them: a thread has the sums of two that belong together.
struct RowOf {
  int part, row;
  DEVICE explicit RowOf(int at)
      : part(GATE_UP ? at / 8 % 2 : 0), row(GATE_UP ? at / 16 * 8 + at % 8 : at / 16 * 16 + at % 8 * 2 + at / 8 % 2) {}
};

// The thread's number in the block, read where it is asked for: what follows from it is not kept in registers all the time.
DEVICE u32 thread_number() {
  u32 r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

// --- copies -----------------------------------------------------------------------------------------------------------

// One of COPIERS threads: all steps of a tile, weights 16 bytes at a time.
template <int F>
DEVICE void copy_tile(const Product& p, u8* memory, Barriers at, Tile& table, int4 tile, int row, Place& place) {
  constexpr int PIECES = ROW_BYTES<F> / 16, TIMES = ROWS / COPY_ROWS<F>;
  constexpr int FURTHER = GATE_UP ? COPY_ROWS<F> / 2 : COPY_ROWS<F>;  // a thread's next row
  const Weights& w = p.matrices<F>();
  const int thread = thread_number() % COPIERS, lane = thread & 31, live = tile.z;
  const u32 base = shared_address(memory);
  const int row_bytes = F == FP4 ? p.k / 2 : F == FP8 ? p.k : 2 * p.k, own = thread / PIECES, piece = thread % PIECES;
  const i64 expert = BESIDE && F == FP8 ? 0 : tile.x, first_row = expert * (GATE_UP ? 2 * p.rows : p.rows) + row;
  const RowOf mine(own);
  const int rows = p.rows - row, after = rows - mine.row;  // rows that there are, of all and after this thread's first
  int left = row_bytes - piece * 16;                       // bytes of a row
  const u8* codes = w.codes + (first_row + mine.part * p.rows + mine.row) * row_bytes + piece * 16;
  const u32 code_at = base + AT_CODES + own * ROW_BYTES<F> + ((piece ^ (PIECES == 4 ? own >> 1 & 3 : own & 7)) << 4);
  const u8* scales = w.scales;
  int to_high = 0;  // this thread copies the scales of two rows, or of the last instead
  if (F == FP4) {
    const RowOf low(thread), high(thread + COPIERS);
    const int from = low.part * p.rows + min(low.row, rows - 1);
    scales += (first_row + from) * (p.k / 16);
    to_high = (high.part * p.rows + min(high.row, rows - 1) - from) * (p.k / 16);
  }
  if (F == FP8 && thread < 2) {
    const int blocks = (p.rows + 127) / 128, block = GATE_UP ? thread * blocks : min(thread, blocks - 1 - row / 128);
    scales += ((expert * (GATE_UP ? 2 * blocks : blocks) + row / 128 + block) * ((p.k + 127) / 128)) * 4;
  }

#pragma unroll 1
  for (int step = 0; step < p.steps<F>(); ++step) {
    if (place.round) barrier_wait(at.empty_of(place), (place.round - 1) & 1);
    if (step == 0) {
      if (thread < live) {
        const int entry = p.order[tile.y + thread].x;
        const float weight = GATE_UP && entry < p.choice_entries ? p.weights[entry] : 1.f;
        table.entries[thread] = {p.inverse[tile.y + thread] * RAW<F>, GATE_UP ? weight : __int_as_float(entry)};
      }
      if (thread == 0) {
        table.expert = tile.x, table.first = tile.y, table.live = live, table.row = row;
        if (F == FP4) table.scale_2[0] = w.scale_2[GATE_UP ? 2 * tile.x : tile.x];
        if (F == FP4) table.scale_2[1] = w.scale_2[GATE_UP ? 2 * tile.x + 1 : tile.x];
      }
    }
    const u32 full = at.full_of(place);
    __syncwarp();
    if (lane == 0) {  // the table is there
      if (thread == 0) {
        barrier_arrive_expecting(full, live * VALUES<F> * 2);
#pragma unroll
        for (int atom = 0; atom < ATOMS<F>; ++atom)
          copy_bulk(base + place.stage * TOKEN_BYTES + atom * ATOM,
                    p.x + static_cast<i64>(tile.y) * p.pitch * 2 + (step * ATOMS<F> + atom) * live * 128, live * 128, full);
      } else {
        barrier_arrive(full);
      }
    }
    const u32 to = code_at + place.stage * CODE_BYTES;
    const u8* from = codes;
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
      copy16_line(to + i * COPY_ROWS<F> * ROW_BYTES<F>, from, left > 0 && i * FURTHER < after);
      from += FURTHER * row_bytes;
    }
    codes += ROW_BYTES<F>, left -= ROW_BYTES<F>;
    if (F == FP4) {
      const u32 scale_to = base + AT_SCALES + place.stage * SCALE_BYTES + thread * 8;
      if (p.k % 128 == 0) {
        copy8(scale_to, scales, true);
        copy8(scale_to + COPIERS * 8, scales + to_high, true);
      } else {
        const bool second = step * 8 + 4 < p.k / 16;
        copy4(scale_to, scales, true);
        copy4(scale_to + 4, scales + 4, second);
        copy4(scale_to + COPIERS * 8, scales + to_high, true);
        copy4(scale_to + COPIERS * 8 + 4, scales + to_high + 4, second);
      }
      scales += 8;
    }
    if (F == FP8 && thread < 2) copy4(base + AT_SCALES + place.stage * SCALE_BYTES + thread * 4, scales + step / 2 * 4, true);
    barrier_arrive_after_copies(full);
    place.next();
  }
}

// --- products ---------------------------------------------------------------------------------------------------------

// One atom's weights of the warp's 16 rows, as they are multiplied. `codes`: address of the rows' bytes in this step; scales: of
// NVFP4, the lane's first row's; `live`: FP8 codes in a block whose scale is 0 are zeros, of rows lane / 4 and + 8.
template <int F>
DEVICE void decode_atom(u32 codes, const u8* scales, int lane, int atom, const bool (&live)[2], u32 (&a)[4][4]) {
  const int row = lane % 16;
  codes += row * ROW_BYTES<F>;
  if constexpr (F == FP4) {
    u32 v[4];
    load_matrices(v, codes + ((atom * 2 + lane / 16) ^ (row >> 1 & 3)) * 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 four = *reinterpret_cast<const u32*>(scales + h * 64 + atom * 4);
      const __half2 two = decode_scales(__byte_perm(four, 0, lane & 2 ? 0x31 : 0x20));
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        u32 w[4];
        decode_fp4(v[q * 2 + h], q ? __high2half2(two) : __low2half2(two), w);
        a[2 * q][h] = w[0], a[2 * q][2 + h] = w[1], a[2 * q + 1][h] = w[2], a[2 * q + 1][2 + h] = w[3];
      }
    }
  } else if constexpr (F == FP8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 v[4];
      load_matrices(v, codes + ((2 * i + lane / 16) ^ (row >> 1 & 3)) * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        decode_fp8(live[j % 2] ? v[j] : 0, a[2 * i + j / 2][j % 2], a[2 * i + j / 2][2 + j % 2]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_matrices(a[i], codes + ((2 * i + lane / 16) ^ (row & 7)) * 16);
  }
}

// Not branches, which the compiler would make of a condition.
DEVICE void store_if(bool stored, __nv_bfloat16* to, float v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.b16 [%0], %1;\n}"
               ::"l"(to), "h"(__bfloat16_as_ushort(__float2bfloat16(v))), "r"(static_cast<int>(stored)) : "memory");
}
DEVICE void store_if(bool stored, float* to, float v, float w) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.f32 [%0], {%1, %2};\n}"
               ::"l"(to), "f"(v), "f"(w), "r"(static_cast<int>(stored)) : "memory");
}
DEVICE void arrive_if(u32 barrier, bool arrives) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}"
               ::"r"(barrier), "r"(static_cast<int>(arrives)) : "memory");
}

// Sums to what is stored. scale: of the thread's two rows.
template <int Count>
DEVICE void store_tile(const Product& p, const Tile& tile, const float (&sums)[Count], const float (&scale)[2], int warp, int lane) {
  const int g = lane >> 2, t = lane & 3, row = tile.row + (GATE_UP ? warp * 8 + g : warp * 16 + 2 * g);
  const int live = row < p.rows ? tile.live : 0;
#pragma unroll
  for (int j = 0; j < Count / 4; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * j + 2 * t + e;
      const Tile::Entry entry = tile.entries[column];
      const float first = sums[j * 4 + e] * (entry.factor * scale[0]), second = sums[j * 4 + 2 + e] * (entry.factor * scale[1]);
      if (GATE_UP)
        store_if(column < live, static_cast<__nv_bfloat16*>(p.out) + static_cast<i64>(tile.first + column) * p.rows + row,
                 clamped_swiglu(first, second, p.limit) * entry.last);
      else
        store_if(column < live, static_cast<float*>(p.out) + static_cast<i64>(__float_as_int(entry.last)) * p.rows + row, first,
                 second);
    }
}

// The whole of a tile of up to N entries, whose first step has come.
template <int F, int N>
DEVICE void multiply_tile(const Product& p, u8* memory, Barriers at, const Tile& tile, Place& place) {
  const int thread = thread_number(), lane = thread & 31, warp = thread / 32, steps = p.steps<F>();
  const u32 base = shared_address(memory);
  float sums[N / 2], scale[2] = {1.f, 1.f};
  u32 a[4][4];
  // FP8: of the thread's two rows.
  auto block_scale = [&](int i) {
    return reinterpret_cast<const float*>(memory + AT_SCALES + place.stage * SCALE_BYTES)[GATE_UP ? i : warp / 8];
  };
  auto decode = [&](int atom) {
    const u8* scales = memory + AT_SCALES + place.stage * SCALE_BYTES + (warp * 16 + lane / 4) * 8;
    const bool live[2] = {F != FP8 || block_scale(0) != 0.f, F != FP8 || block_scale(1) != 0.f};
    decode_atom<F>(base + AT_CODES + place.stage * CODE_BYTES + warp * 16 * ROW_BYTES<F>, scales, lane, atom, live, a);
  };
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] = 0.f;
  decode(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const u32 tokens = tokens_at(base + place.stage * TOKEN_BYTES), empty = at.empty_of(place);
    if (F == FP8 && step % 2 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float now = block_scale(i), change = scale[i] / now;
        if (step == 0 || now != 0.f) scale[i] = now;
        if (step > 0 && now != 0.f)
#pragma unroll
          for (int j = 0; j < N / 8; ++j) sums[j * 4 + i * 2] *= change, sums[j * 4 + i * 2 + 1] *= change;
      }
    }
    settle(sums);
#pragma unroll (WGMMA ? 2 : 1)
    for (int atom = 0; atom < ATOMS<F>; ++atom) {
      settle(a);
      products_begin();
#pragma unroll
      for (int i = 0; i < 4; ++i) multiply16<F>(sums, a[i], tokens_further(tokens, atom * ATOM + i * 32), 1);
      products_end();
      products_wait<0>();
      if (atom + 1 < ATOMS<F>) decode(atom + 1);
    }
    settle(sums);
    arrive_if(empty, lane == 0);
    place.next();
    if (step + 1 < steps) barrier_wait(at.full_of(place), place.round & 1);
    decode(0);  // after the last step: of no use
  }
  if (F == FP4) scale[0] = tile.scale_2[0], scale[1] = tile.scale_2[1];
  store_tile(p, tile, sums, scale, warp, lane);
}

template <int F>
DEVICE void multiply_tile(const Product& p, u8* memory, Barriers at, const Tile& tile, Place& place) {
  switch ((tile.live + 15) / 16) {
    case 1: return multiply_tile<F, 16>(p, memory, at, tile, place);
    case 2: return multiply_tile<F, 32>(p, memory, at, tile, place);
    case 3: return multiply_tile<F, 48>(p, memory, at, tile, place);
    case 4: return multiply_tile<F, 64>(p, memory, at, tile, place);
    case 5: return multiply_tile<F, 80>(p, memory, at, tile, place);
    case 6: return multiply_tile<F, 96>(p, memory, at, tile, place);
    case 7: return multiply_tile<F, 112>(p, memory, at, tile, place);
    default: return multiply_tile<F, 128>(p, memory, at, tile, place);
  }
}

// Dynamic shared memory: AT_BARRIERS + 16 * STAGES. Tiles of expert `count` are the shared one's.
KERNEL __launch_bounds__(THREADS, 1)
moe_prefill(const u8* x, const float* inverse, const int2* order, const int4* tiles, const int* tile_count, const float* weights,
            const u8* codes, const u8* scales, const float* scale_2, const u8* shared_codes, const u8* shared_scales, void* out,
            int choice_entries, int count, int k, int pitch, int rows, float limit) {
  extern __shared__ __align__(1024) u8 memory[];
  let_next_kernel_start();
  const Product p{x, inverse, order, weights, {codes, scales, scale_2}, {shared_codes, shared_scales, nullptr}, out,
                  choice_entries, k, pitch, rows, limit};
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const Barriers at{shared_address(memory + AT_BARRIERS), shared_address(memory + AT_BARRIERS + STAGES * 8)};
  Tile* const tables = reinterpret_cast<Tile*>(memory + AT_TABLES);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s)
      barrier_init(at.full + s * 8, COPIERS + COPIERS / 32), barrier_init(at.empty + s * 8, MULTIPLIERS / 32);
    barrier_init_done();
  }
  __syncthreads();
  wait_for_previous_kernel();

  const int row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, works = *tile_count * row_tiles;
  Place place;
  int table = 0;
  if (warp >= MULTIPLIERS / 32) {
    registers_less<32>();
    for (int work = blockIdx.x; work < works; work += gridDim.x) {
      const int4 tile = tiles[work / row_tiles];
      const int row = work % row_tiles * TILE_ROWS;
      if (BESIDE && tile.x == count) copy_tile<FP8>(p, memory, at, tables[table], tile, row, place);
      else copy_tile<FMT>(p, memory, at, tables[table], tile, row, place);
      if (++table == TABLES) table = 0;
    }
    wait_for_copies();
  } else {
    registers_more<112>();
    for (int work = blockIdx.x; work < works; work += gridDim.x) {
      barrier_wait(at.full_of(place), place.round & 1);
      const Tile& tile = tables[table];
      if (BESIDE && tile.expert == count) multiply_tile<FP8>(p, memory, at, tile, place);
      else multiply_tile<FMT>(p, memory, at, tile, place);
      if (++table == TABLES) table = 0;
    }
  }
}
