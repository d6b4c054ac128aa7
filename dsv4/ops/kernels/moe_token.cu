// The experts of one token: gate and up with clamped SwiGLU, then down with the weighted sum. A shared expert in FP8 goes along
// in the same two launches.
//
// Bytes: every picked expert's weights once, 3 * I * H * 0.5625 in NVFP4 (14.2 MB an expert in Flash, 37.2 in Pro), and the
// shared expert's, 3 * I * H. Floor at 4.25 TB/s on an H200 for Flash and 6 experts: 84.9 MB, 20.0 us; with the shared expert
// 110 MB, 25.9 us.
//
// Measured there (random routing, in a CUDA graph, after a kernel of 5 us): 37.0 us, with the shared expert 39.0 us (66 %), of
// which the arithmetic that weights do not hide is 5 us (34.3 us without any). Half as many warps with small rings, so that
// down's blocks start beside gate_up's: 49 and 64 us. Staging activations takes 3 to 4 us of each launch.
//
// A block works on a range of rows: in moe_token_gate_up on tiles of HALF gate rows and their up rows, of all picked experts one
// after the other; in moe_token_down on tiles of UNIT rows of y, of each expert. Its units are the tiles, or PARTS parts of each
// along K, dealt out to the warps; SHARED of the WARPS warps take the shared expert's. A unit's sums go to shared memory, where
// after a barrier, the only one since the activations were staged, threads add them up in a fixed order.
//
// The shared expert's weights do not depend on the routing: they are asked for before the previous kernel has ended, those for
// down included. A warp that has asked for the last of its own weights asks for the picked experts' down weights.
// Defines: FMT (of the routed experts), SHARED, PARTS, SHARED_PARTS, and see stream.cuh (KW and NT are 1).
#include "fragments.cuh"

constexpr int MOST = 32;                              // picked experts, a last one of the stack that is shared among them
constexpr int UNIT = 16 * MT, HALF = 8 * MT;          // rows and sums of a unit; those of gate
constexpr int WARP_RING = STAGES * STAGE_BYTES<FMT>;  // bytes; no format has longer stages than NVFP4

// Blocks that have their registers in an SM. Odd widths take a few more; large blocks leave no room in shared memory anyway.
constexpr int BLOCKS = TAIL || WARPS > 8 ? 1 : 2;

struct Token {
  const __nv_bfloat16* x;  // x [k]; or h [choices + 1, k], a row a segment and in the last the shared expert's
  const int* experts;
  const float* weights;
  const u8 *codes, *scales;
  const float* scale_2;
  const u8 *shared_codes, *shared_scales;
  const u8 *down_codes, *down_scales, *shared_down;  // to be prefetched
  void* out;
  int choices, last_shared, k, rows, count, slots, rounded;
  float limit;
};

// Lane s holds segment s: a choice that picks an expert, and where the stack's last one is shared, that. A number that is none
// takes no segment.
struct Segments {
  int count, expert;
  float weight, low_scale, high_scale;
};

template <bool GateUp>
DEVICE Segments read_segments(const Token& p) {
  const int lane = threadIdx.x & 31;
  const int expert = lane < p.choices ? p.experts[lane] : lane < p.choices + p.last_shared ? p.count - 1 : -1;
  const float weight = GateUp && lane < p.choices ? p.weights[lane] : 1.f;
  const u32 live = __ballot_sync(~0u, expert >= 0 && expert < p.count);
  int from = 0;  // the choice of this lane's segment: the live one that has `lane` live ones before it
#pragma unroll
  for (int half = 16; half; half >>= 1)
    if (__popc(live & ((1u << (from + half)) - 1)) <= lane) from += half;
  Segments s{__popc(live), __shfl_sync(~0u, expert, from), __shfl_sync(~0u, weight, from), RAW<FMT>, RAW<FMT>};
  if (FMT == FP4 && lane < s.count) {
    s.low_scale *= p.scale_2[GateUp ? s.expert * 2 : s.expert];
    s.high_scale *= p.scale_2[GateUp ? s.expert * 2 + 1 : s.expert];
  }
  return s;
}

// This block's share of `total` things.
struct Range {
  int first, last;
  DEVICE explicit Range(u32 total) : first(blockIdx.x * total / gridDim.x), last((blockIdx.x + 1) * total / gridDim.x) {}
  DEVICE int size() const { return last - first; }
};

// Ask for `rows` rows from row `row` on to come to the L2; one lane does.
template <typename T>
DEVICE void prefetch_rows(const u8* codes, T row, int rows, int row_bytes) {
  if ((threadIdx.x & 31) != 0) return;
  const u8* from = codes + row * static_cast<i64>(row_bytes);
  const u32 bytes = static_cast<u32>(rows * row_bytes);
#pragma unroll 1
  for (u32 at = 0; at < bytes; at += 16384) prefetch_to_l2(from + at, min(bytes - at, 16384u));
}

// All threads: the token's activations into shared memory, in the order of either format. Returns the inverse of the power of
// two they were multiplied with.
template <bool GateUp>
DEVICE float stage_activations(const Token& p, int segments, u8* routed, int pitch, int steps, u8* shared, int shared_steps) {
  __shared__ u32 largest_of[WARPS];
  const int per_row = p.k / 8, rows = GateUp ? 1 : segments;
  auto piece = [&](int row, int i) { return *reinterpret_cast<const uint4*>(p.x + static_cast<i64>(row) * p.k + i * 8); };
  float scale = 1.f, inverse = 1.f;
  if (FMT != BF16) {
    u32 largest = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * per_row; i += THREADS) largest = max(largest, largest_of_8(piece(0, i)));
    if (!GateUp && SHARED)
      for (int i = threadIdx.x; i < per_row; i += THREADS) largest = max(largest, largest_of_8(piece(p.choices, i)));
    largest = __reduce_max_sync(~0u, largest);
    if ((threadIdx.x & 31) == 0) largest_of[threadIdx.x >> 5] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = max(largest, largest_of[w]);
    const int shift = fp16_shift(largest);
    scale = __int_as_float((127 + shift) << 23), inverse = __int_as_float((127 - shift) << 23);
  }
  const int pieces = steps * (STEP_K<FMT> / 8), shared_pieces = SHARED ? shared_steps * (STEP_K<FP8> / 8) : 0;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
#pragma unroll 2
  for (int i = threadIdx.x; i < rows * pieces; i += THREADS) {
    const int row = GateUp ? 0 : i / pieces, at = i - row * pieces;
    put8<FMT>(routed + row * pitch, at, at < per_row ? piece(row, at) : zeros, scale);
  }
  for (int i = threadIdx.x; i < shared_pieces; i += THREADS)
    put8<FP8>(shared, i, i < per_row ? piece(GateUp ? 0 : p.choices, i) : zeros, scale);
  __syncthreads();
  return inverse;
}

// What one warp does for the shared expert in FP8, or for the routed ones: units worker, worker + WORKERS, ...
template <int F, bool GateUp, bool OfShared>
struct Work {
  static constexpr int WORKERS = OfShared ? (SHARED ? SHARED : 1) : WARPS - SHARED, SPLIT = OfShared ? SHARED_PARTS : PARTS;
  const Token& p;
  const Segments& segments;
  int worker, tiles, down_first, down_count, first = 0, units = 0, located = 0;

  DEVICE Work(const Token& p_, const Segments& s, int tiles_, const Range& down)
      : p(p_), segments(s), worker(static_cast<int>(threadIdx.x >> 5) - (OfShared ? 0 : SHARED)), tiles(tiles_),
        down_first(down.first * 8), down_count(down.size() * 8) {}
  DEVICE const u8* codes() const { return OfShared ? p.shared_codes : p.codes; }
  DEVICE const u8* scales() const { return OfShared ? p.shared_scales : p.scales; }
  DEVICE void count_units() {
    int all = (down_count + UNIT - 1) / UNIT * (OfShared ? 1 : segments.count);
    if (GateUp) {
      const Range mine(OfShared ? tiles : segments.count * tiles);
      first = mine.first, all = mine.size();
    }
    units = max(0, all * SPLIT - worker + WORKERS - 1) / WORKERS;
  }
  // Unit number i of this warp: its segment, and the first of its rows within an expert's.
  DEVICE int unit(int i, int& segment) const {
    const int tile = (worker + i * WORKERS) / SPLIT;
    if (GateUp) {
      segment = OfShared ? 0 : (first + tile) / tiles;
      return (first + tile - segment * tiles) * HALF;
    }
    segment = OfShared ? 0 : tile % segments.count;
    return down_first + (OfShared ? tile : tile / segments.count) * UNIT;
  }
  DEVICE bool locate(const Slice<F>& slice, Pieces (&pieces)[MT]) {
    if (located == units) return false;
    int segment;
    const int row = unit(located++, segment);
    const i64 expert = OfShared ? 0 : __shfl_sync(~0u, segments.expert, segment);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const i64 low = expert * p.rows * (GateUp ? 2 : 1) + row + m * (GateUp ? 8 : 16);
      const int rows = GateUp ? (row + m * 8 < p.rows ? 16 : 0) : down_first + down_count - row - m * 16;
      pieces[m] = make_pieces(codes(), scales(), slice, low, low + (GateUp ? p.rows : 8), rows);
    }
    return true;
  }
  // Sums of all units to `parts`; `last_asked` is called once when all of the warp's copies are under way.
  template <typename Stream, typename Asked>
  DEVICE void run(const Slice<F>& slice, Stream& stream, const u8* activations, int pitch, float inverse, float* parts,
                  Asked last_asked) {
    const int lane = threadIdx.x & 31, scale_columns = (p.k + 127) / 128;
    bool asked = false;
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      int segment, blocks[MT * 2];
      const int row = unit(i, segment);
      if (F == FP8) {  // where the scales of the unit's rows begin, eight rows at a time
        const int all = (p.rows + 127) / 128, expert = OfShared ? 0 : __shfl_sync(~0u, segments.expert, segment);
#pragma unroll
        for (int j = 0; j < MT * 2; ++j) {
          const int of = GateUp ? (expert * 2 + j % 2) * all + row / 128 : expert * all + min(row + j * 8, p.rows - 1) / 128;
          blocks[j] = of * scale_columns + slice.begin / 128;
        }
      }
      const u8* column = activations + (GateUp ? 0 : segment * pitch) + slice.begin / 128 * STEP_K<F> * 2 + (lane & 3) * 16;
      float acc[CHAINS][4] = {}, sums[MT][4] = {};
#pragma unroll 1
      for (int step = 0; step < slice.steps; ++step, column += STEP_K<F> * 2) {
        float block_scales[MT * 2];
        if (F == FP8)
#pragma unroll
          for (int j = 0; j < MT * 2; ++j) block_scales[j] = __ldg(reinterpret_cast<const float*>(scales()) + blocks[j] + step);
        const Fragment<F> fragment = stream.next();
        multiply_fragment<F>(fragment, column, acc);
        if (F == FP8) add_scaled(sums, block_scales, acc);
        if (!asked && !stream.more) {
          asked = true;
          last_asked();
        }
      }
      if (F != FP8) add_chains(sums, acc);
      const float low = OfShared ? inverse : __shfl_sync(~0u, segments.low_scale, segment) * inverse;
      const float high = OfShared ? inverse : __shfl_sync(~0u, segments.high_scale, segment) * inverse;
      float* part = parts + (worker + i * WORKERS) * UNIT + lane / 4;
      if ((lane & 3) == 0)
#pragma unroll
        for (int j = 0; j < MT * 2; ++j) part[j * 8] = sums[j / 2][j % 2 * 2] * (j % 2 ? high : low);
    }
  }
};

template <int Count>
DEVICE float add(const float* part) {
  float sum = part[0];
#pragma unroll
  for (int i = 1; i < Count; ++i) sum += part[i * UNIT];
  return sum;
}

template <bool GateUp>
DEVICE void token(const Token& p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float weight_of[MOST];
  if (!GateUp) let_next_kernel_start();
  const int warp = threadIdx.x >> 5, tiles = (p.rows + HALF - 1) / HALF;
  const bool of_shared = warp < SHARED;
  float* parts = reinterpret_cast<float*>(memory);
  u8* ring = memory + p.slots * UNIT * 4 + warp * WARP_RING;
  u8* activations = memory + p.slots * UNIT * 4 + WARPS * WARP_RING;
  const Range down((GateUp ? p.k : p.rows) / 8);
  Segments segments{};
  Work<FP8, GateUp, true> shared(p, segments, tiles, down);
  Work<FMT, GateUp, false> routed(p, segments, tiles, down);
  const Slice<FP8> shared_slice = make_slice<FP8>(p.k, SHARED ? warp % SHARED_PARTS : 0, SHARED_PARTS);
  const Slice<FMT> slice = make_slice<FMT>(p.k, (warp - SHARED) % PARTS, PARTS);
  auto shared_stream = Stream(shared_slice, ring, [&](Pieces(&pieces)[MT]) { return shared.locate(shared_slice, pieces); });
  auto stream = Stream(slice, ring, [&](Pieces(&pieces)[MT]) { return routed.locate(slice, pieces); });
  shared.count_units();
  if (of_shared) {
    shared_stream.start();
    if (GateUp) {
      const int row = shared.first * HALF, rows = min(Range(tiles).last * HALF, p.rows) - row;
      if (warp == 0) prefetch_rows(p.shared_codes, row, rows, p.k);
      if (warp == SHARED / 2) prefetch_rows(p.shared_codes, p.rows + row, rows, p.k);
      if (warp == SHARED - 1) prefetch_rows(p.shared_down, shared.down_first, shared.down_count, p.rows);
    }
  }
  auto start_routed = [&] {
    segments = read_segments<GateUp>(p);
    routed.count_units();
    if (!of_shared) stream.start();
  };
  if (!GateUp) start_routed();
  wait_for_previous_kernel();
  if (GateUp) {
    start_routed();
    let_next_kernel_start();  // not before the wait, since that kernel reads the routing at once
  }
  if (GateUp && warp == 0) weight_of[threadIdx.x] = segments.weight;

  const int steps = make_slice<FMT>(p.k, 0, 1).steps, shared_steps = make_slice<FP8>(p.k, 0, 1).steps;
  const int pitch = steps * STEP_K<FMT> * 2 + 64;
  u8* shared_activations = activations + (GateUp ? 1 : p.choices + p.last_shared) * pitch;
  const float inverse =
      stage_activations<GateUp>(p, segments.count, activations, pitch, steps, shared_activations, shared_steps);
  const int shared_tiles = !SHARED ? 0 : GateUp ? Range(tiles).size() : (shared.down_count + UNIT - 1) / UNIT;
  float* routed_parts = parts + shared_tiles * SHARED_PARTS * UNIT;
  if (of_shared) {
    shared.run(shared_slice, shared_stream, shared_activations, 0, inverse, parts, [] {});
  } else {
    routed.run(slice, stream, activations, pitch, inverse, routed_parts, [&] {
      if (!GateUp) return;
      const Slice<FMT> next = make_slice<FMT>(p.rows, 0, 1);
#pragma unroll 1
      for (int s = warp - SHARED; s < segments.count; s += WARPS - SHARED) {
        const i64 row = static_cast<i64>(__shfl_sync(~0u, segments.expert, s)) * p.k + routed.down_first;
        prefetch_rows(p.down_codes, row, routed.down_count, next.row_bytes);
        if (FMT == FP4) prefetch_rows(p.down_scales, row, routed.down_count, next.scale_bytes);
      }
    });
  }
  __syncthreads();
  if (GateUp) {
    const int routed_tiles = Range(segments.count * tiles).size();
#pragma unroll 1
    for (int o = threadIdx.x; o < (shared_tiles + routed_tiles) * HALF; o += THREADS) {
      const int tile = o / HALF - shared_tiles, sum = o % HALF / 8 * 16 + o % 8;
      int to = p.choices, row = (Range(tiles).first + o / HALF) * HALF + o % HALF;
      float gate, up, weight = 1.f;
      if (SHARED && tile < 0) {
        const float* part = parts + o / HALF * SHARED_PARTS * UNIT + sum;
        gate = add<SHARED_PARTS>(part), up = add<SHARED_PARTS>(part + 8);
      } else {
        const float* part = routed_parts + tile * PARTS * UNIT + sum;
        gate = add<PARTS>(part), up = add<PARTS>(part + 8);
        to = (routed.first + tile) / tiles, row = (routed.first + tile - to * tiles) * HALF + o % HALF, weight = weight_of[to];
      }
      gate = fminf(gate, p.limit), up = fminf(fmaxf(up, -p.limit), p.limit);
      if (row < p.rows)
        static_cast<__nv_bfloat16*>(p.out)[static_cast<i64>(to) * p.rows + row] =
            __float2bfloat16(gate / (1.f + __expf(-gate)) * up * weight);
    }
  } else {
    for (int o = threadIdx.x; o < shared.down_count; o += THREADS) {
      const float* part = routed_parts + o / UNIT * segments.count * PARTS * UNIT + o % UNIT;
      float sum = 0.f, one = 0.f;  // of the routed, of the shared expert
#pragma unroll 8
      for (int s = 0; s < segments.count - p.last_shared; ++s) sum += add<PARTS>(part + s * PARTS * UNIT);
      if (SHARED) one = add<SHARED_PARTS>(parts + o / UNIT * SHARED_PARTS * UNIT + o % UNIT);
      else if (p.last_shared) one = add<PARTS>(part + (segments.count - 1) * PARTS * UNIT);
      sum += round_bf16(one);  // as a linear of its own gives it
      if (p.rounded) static_cast<__nv_bfloat16*>(p.out)[shared.down_first + o] = __float2bfloat16(sum);
      else static_cast<float*>(p.out)[shared.down_first + o] = sum;
    }
  }
}

// x bf16 [k]; experts, weights [choices]; codes [count, 2 * rows, k]; shared_codes E4M3 [2 * rows, k]; h bf16 [choices + 1,
// rows], of which a row a segment and the last, the shared expert's, are written. k is also down's number of rows.
KERNEL __launch_bounds__(THREADS, BLOCKS)
moe_token_gate_up(const __nv_bfloat16* x, const int* experts, const float* weights, const u8* codes, const u8* scales,
                  const float* scale_2, const u8* shared_codes, const u8* shared_scales, const u8* down_codes,
                  const u8* down_scales, const u8* shared_down, void* h, int choices, int last_shared, int k, int rows, int count,
                  int slots, float limit) {
  token<true>({x, experts, weights, codes, scales, scale_2, shared_codes, shared_scales, down_codes, down_scales, shared_down, h,
               choices, last_shared, k, rows, count, slots, 0, limit});
}

// h as above; codes [count, rows, k]; shared_codes E4M3 [rows, k]; y [rows], bf16 if `rounded`, else float32.
KERNEL __launch_bounds__(THREADS, BLOCKS)
moe_token_down(const __nv_bfloat16* h, const int* experts, const u8* codes, const u8* scales, const float* scale_2,
               const u8* shared_codes, const u8* shared_scales, void* y, int choices, int last_shared, int k, int rows, int count,
               int slots, int rounded) {
  token<false>({h, experts, nullptr, codes, scales, scale_2, shared_codes, shared_scales, nullptr, nullptr, nullptr, y, choices,
                last_shared, k, rows, count, slots, rounded, 0.f});
}
