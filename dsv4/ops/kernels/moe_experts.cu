// The experts of several tokens: gate and up with clamped SwiGLU, then down, then each token's sum. A shared expert in FP8 goes
// along in the same launches.
//
// Every block reads the routing and makes the same list of segments: an expert with up to 8 of the (token, choice) entries
// that picked it, in order of entries; the shared expert is in a segment with each 8 tokens. Work is (segment, tile) pairs in
// that order, the shared expert's first, a contiguous range for each block, so a block changes its activations once or twice.
// Entries that are not an expert's id cost nothing. Tokens have an entry more each, after all others, for the shared expert.
//
// Bytes: see moe_token.cu; an expert's weights once for each 8 of its tokens. Measured on an H200 (random routing of Flash, in
// a CUDA graph), with the shared expert: 2 tokens 72 us (63 % of the floor at 4.25 TB/s), 4 tokens 115 us (72 %), 8 tokens 186
// us (82 %), 16 tokens 306 us (87 %), 32 tokens 520 us (90 %), 64 tokens 775 us (88 %): 15 us and the bytes at 3.9 TB/s.
//
//   moe_gate_up   tile: 8 * MT gate rows and the up rows that belong to them; h [entry, I] in bf16, routing weight included
//   moe_down      tile: 16 * MT rows; out [entry, H] in float32
//   moe_combine   adds out over each token's entries in order
// Defines: FMT (of the routed experts), SHARED (whether there is an FP8 one), and see stream.cuh (NT is 1).
#include "fragments.cuh"

#define ENTRIES 512

constexpr int COST[3] = {8, 4, 3};  // of a tile, to share work out: between its bytes and its instructions

struct Routing {
  short expert[ENTRIES];   // -1 where the entry is not an expert's id
  short order[ENTRIES];    // how many earlier entries picked the same expert
  short segment[ENTRIES];  // first entry of each segment
  short column[8];         // entries of the segment in shared memory
  float weight[8];         // their routing weights
  float inverse[8];        // of the powers of two that their activations were multiplied with
  int segments;
};

struct Experts {
  const __nv_bfloat16* x;  // x [tokens, k]; or h [entries + tokens, k]
  const int* experts;
  const float* weights;
  const u8 *codes, *scales;
  const float* scale_2;
  const u8 *shared_codes, *shared_scales;
  void* out;
  int tokens, choices, last_shared, k, rows, count;
  float limit;
  DEVICE int entries() const { return tokens * choices; }
};

// Sum of the KW warps' values at `part`, in fixed order.
DEVICE float add_warps(const float* part) {
  float sum = part[0];
#pragma unroll
  for (int w = 1; w < KW; ++w) sum += part[w * MT * 128];
  return sum;
}

// All threads. With last_shared, all tokens have the stack's last expert as well.
DEVICE void read_routing(Routing& r, const Experts& p) {
  const int entries = p.entries() + (p.last_shared ? p.tokens : 0);
  for (int i = threadIdx.x; i < entries; i += THREADS) {
    const int e = i < p.entries() ? p.experts[i] : p.count - 1;
    r.expert[i] = static_cast<short>(e >= 0 && e < p.count ? e : -1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < entries; i += THREADS) {
    const short e = r.expert[i];
    int before = 0;
#pragma unroll 8
    for (int j = 0; j < i; ++j) before += r.expert[j] == e;
    r.order[i] = static_cast<short>(before);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int total = 0;
    for (int base = 0; base < entries; base += 32) {
      const int i = base + threadIdx.x;
      const bool leads = i < entries && r.expert[i] >= 0 && r.order[i] % 8 == 0;
      const u32 leaders = __ballot_sync(~0u, leads);
      if (leads) r.segment[total + __popc(leaders & ((1u << threadIdx.x) - 1))] = static_cast<short>(i);
      total += __popc(leaders);
    }
    if (threadIdx.x == 0) r.segments = total;
  }
  __syncthreads();
}

// All threads: find the segment's entries and put their activations into shared memory. Returns how many they are.
template <int F, bool GateUp, bool OfShared>
DEVICE int stage_segment(Routing& r, const Experts& p, u8* activations, int pitch, int steps, int segment) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, entries = p.entries();
  __syncthreads();
  if (threadIdx.x < 8) {
    const int token = segment * 8 + threadIdx.x;
    r.column[threadIdx.x] = static_cast<short>(OfShared && token < p.tokens ? entries + token : -1);
    r.weight[threadIdx.x] = 1.f;
  }
  __syncthreads();
  if (!OfShared) {
    const int lead = r.segment[segment];
    for (int i = lead + threadIdx.x; i < entries + (p.last_shared ? p.tokens : 0); i += THREADS)
      if (r.expert[i] == r.expert[lead] && r.order[i] / 8 == r.order[lead] / 8) {
        r.column[r.order[i] % 8] = static_cast<short>(i);
        if (GateUp && i < entries) r.weight[r.order[i] % 8] = p.weights[i];
      }
    __syncthreads();
  }
  int columns = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) columns += r.column[i] >= 0;
  const int sharing = max(1, WARPS / columns), worker = warp % sharing;
  for (int m = warp / sharing; m < columns; m += max(1, WARPS / sharing)) {
    const int entry = r.column[m], row = !GateUp ? entry : entry < entries ? entry / p.choices : entry - entries;
    const float inverse = stage_token<F>(activations + m * pitch, p.x + static_cast<i64>(row) * p.k, p.k, steps,
                                         worker * 32 + lane, sharing * 32);
    if (lane == 0) r.inverse[m] = inverse;
  }
  __syncthreads();
  return columns;
}

// Number of the first tile that begins at `cost` or later, among `shared` tiles of the FP8 expert and then the others.
DEVICE int tile_at(i64 cost, int shared) {
  const i64 before = static_cast<i64>(shared) * COST[FP8];
  if (cost <= before) return static_cast<int>((cost + COST[FP8] - 1) / COST[FP8]);
  return shared + static_cast<int>((cost - before + COST[FMT] - 1) / COST[FMT]);
}

// Tiles [first, last) of all segments in one format. `wait`: the previous kernel may not have ended yet.
template <int F, bool GateUp, bool OfShared>
DEVICE void segments(Routing& r, const Experts& p, u8* memory, int tiles, int first, int last, bool wait) {
  constexpr int HALF = GateUp ? 8 : 16, ROWS = HALF * MT, SUMS = MT * 128;  // rows of a tile; sums with its columns
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kw = warp % KW, rw = warp / KW;
  const Slice<F> slice = make_slice<F>(p.k, kw, KW);
  float* parts = reinterpret_cast<float*>(memory);
  u8* ring = memory + 2 * WARPS * SUMS * 4 + warp * STAGES * STAGE_BYTES<FMT>;
  u8* activations = memory + 2 * WARPS * SUMS * 4 + WARPS * STAGES * STAGE_BYTES<FMT>;
  const u8* codes = OfShared ? p.shared_codes : p.codes;
  const u8* scales = OfShared ? p.shared_scales : p.scales;

  int segment = first / tiles, next = first + rw;  // where the copies are: a row group takes every RW-th tile of a segment
  auto stream = Stream(slice, ring, [&](Pieces(&pieces)[MT]) {
    while (next >= min(last, (segment + 1) * tiles)) {
      if (++segment * tiles >= last) return false;
      next = segment * tiles + rw;
    }
    const int row = (next - segment * tiles) * ROWS;
    next += RW;
    const i64 expert = OfShared ? 0 : r.expert[r.segment[segment]];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const i64 low = expert * p.rows * (GateUp ? 2 : 1) + row + m * HALF;
      const int rows = p.rows - row - m * HALF;
      pieces[m] = make_pieces(codes, scales, slice, low, low + (GateUp ? p.rows : 8), GateUp ? (rows > 0 ? 16 : 0) : rows);
    }
    return true;
  });
  stream.start();
  if (wait) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }

  const int steps = make_slice<F>(p.k, 0, 1).steps, pitch = steps * STEP_K<F> * 2 + 64;
  int buffer = 0;
  for (int now = first / tiles; now * tiles < last; ++now) {
    const int count = stage_segment<F, GateUp, OfShared>(r, p, activations, pitch, steps, now);
    const int expert = OfShared ? 0 : r.expert[r.segment[now]];
    const float low_scale = RAW<F> * (F == FP4 ? __ldg(p.scale_2 + (GateUp ? expert * 2 : expert)) : 1.f);
    const float high_scale = RAW<F> * (F == FP4 ? __ldg(p.scale_2 + (GateUp ? expert * 2 + 1 : expert)) : 1.f);
    const int last_here = min(last, (now + 1) * tiles);
    for (int tile = max(first, now * tiles) + rw; tile < last_here; tile += RW, buffer ^= 1) {
      const int row = (tile - now * tiles) * ROWS;
      const u8* column = activations + min(lane >> 2, count - 1) * pitch + slice.begin / 128 * STEP_K<F> * 2 + (lane & 3) * 16;
      const float* block_scales = reinterpret_cast<const float*>(scales) + slice.begin / 128;
      int blocks[MT * 2];
      if (F == FP8) {  // where the scales of the tile's rows begin, eight rows at a time
        const int all = (p.rows + 127) / 128;
#pragma unroll
        for (int j = 0; j < MT * 2; ++j) {
          const int block = min(row + (GateUp ? j / 2 * 8 : j * 8), p.rows - 1) / 128;
          blocks[j] = (GateUp ? (expert * 2 + j % 2) * all + block : expert * all + block) * ((p.k + 127) / 128);
        }
      }
      float acc[CHAINS][4] = {}, sums[MT][4] = {};
#pragma unroll 1
      for (int step = 0; step < slice.steps; ++step, column += STEP_K<F> * 2) {
        float scale[MT * 2];
        if (F == FP8)
#pragma unroll
          for (int j = 0; j < MT * 2; ++j) scale[j] = __ldg(block_scales + blocks[j] + step);
        const Fragment<F> fragment = stream.next();
        multiply_fragment<F>(fragment, column, acc);
        if (F == FP8) add_scaled(sums, scale, acc);
      }
      if (F != FP8) add_chains(sums, acc);

      float* part = parts + (buffer * WARPS + warp) * SUMS + (lane >> 2) * 8 + (lane & 3) * 2;
#pragma unroll
      for (int j = 0; j < MT * 2; ++j)
        *reinterpret_cast<float2*>(part + j * 64) = make_float2(sums[j / 2][j % 2 * 2], sums[j / 2][j % 2 * 2 + 1]);
      group_barrier(rw);
      const float* group = parts + (buffer * WARPS + rw * KW) * SUMS;
      for (int o = threadIdx.x % (KW * 32); o < ROWS * count; o += KW * 32) {
        const int column = o / ROWS, at = o % ROWS;
        if (row + at >= p.rows) continue;
        const float* sum = group + (GateUp ? at / 8 * 128 + at % 8 * 8 : at * 8) + column;
        const float value = add_warps(sum) * low_scale * r.inverse[column];
        const i64 to = static_cast<i64>(r.column[column]) * p.rows + row + at;
        if (GateUp) {
          const float gate = fminf(value, p.limit);
          const float up = fminf(fmaxf(add_warps(sum + 64) * high_scale * r.inverse[column], -p.limit), p.limit);
          static_cast<__nv_bfloat16*>(p.out)[to] = __float2bfloat16(gate / (1.f + __expf(-gate)) * up * r.weight[column]);
        } else {
          static_cast<float*>(p.out)[to] = value;
        }
      }
    }
  }
}

template <bool GateUp>
DEVICE void experts(const Experts& p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Routing routing;
  if (GateUp) {
    wait_for_previous_kernel();
    let_next_kernel_start();  // not before, since it reads the routing at once
  }
  read_routing(routing, p);
  const int tiles = (p.rows + (GateUp ? 8 : 16) * MT - 1) / ((GateUp ? 8 : 16) * MT);
  const int shared = SHARED ? (p.tokens + 7) / 8 * tiles : 0;
  const i64 total = static_cast<i64>(shared) * COST[FP8] + static_cast<i64>(routing.segments) * tiles * COST[FMT];
  const int first = tile_at(blockIdx.x * total / gridDim.x, shared), last = tile_at((blockIdx.x + 1LL) * total / gridDim.x, shared);
  if (SHARED && first < shared) segments<FP8, GateUp, true>(routing, p, memory, tiles, first, min(last, shared), !GateUp);
  if (!SHARED || last > shared || first >= shared)
    segments<FMT, GateUp, false>(routing, p, memory, tiles, max(first, shared) - shared, last - shared, !GateUp && first >= shared);
}

// x bf16 [tokens, k]; experts, weights [tokens * choices]; codes [count, 2 * rows, k]; shared_codes E4M3 [2 * rows, k]; h bf16
// [tokens * (choices + 1), rows].
KERNEL __launch_bounds__(THREADS, 1)
moe_gate_up(const __nv_bfloat16* x, const int* experts_, const float* weights, const u8* codes, const u8* scales,
            const float* scale_2, const u8* shared_codes, const u8* shared_scales, void* h, int tokens, int choices,
            int last_shared, int k, int rows, int count, float limit) {
  experts<true>({x, experts_, weights, codes, scales, scale_2, shared_codes, shared_scales, h, tokens, choices, last_shared, k,
                 rows, count, limit});
}

// h as above with rows of k; codes [count, rows, k]; shared_codes E4M3 [rows, k]; out float32 [tokens * (choices + 1), rows].
KERNEL __launch_bounds__(THREADS, 1)
moe_down(const __nv_bfloat16* h, const int* experts_, const u8* codes, const u8* scales, const float* scale_2,
         const u8* shared_codes, const u8* shared_scales, void* out, int tokens, int choices, int last_shared, int k, int rows,
         int count) {
  experts<false>({h, experts_, nullptr, codes, scales, scale_2, shared_codes, shared_scales, out, tokens, choices, last_shared, k,
                  rows, count, 0.f});
}

// y [t, c]: the sum over j of out [t * choices + j, c], where the entry is an expert's id, and with `shared` of the token's last
// entry, rounded to bf16, and then bf16 itself, else float32. One thread for 4 columns; rows % 4 is 0.
KERNEL __launch_bounds__(128)
moe_combine(const float* __restrict__ out, const int* __restrict__ experts_, void* __restrict__ y, int tokens, int rows,
            int choices, int count, int shared) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int c = (blockIdx.x * 128 + threadIdx.x) * 4;
  if (c >= rows) return;
  const i64 token = blockIdx.y, place = token * rows + c;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  auto load = [&](i64 entry) { return *reinterpret_cast<const float4*>(out + entry * rows + c); };
  auto add = [&](float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; };
#pragma unroll 8
  for (int j = 0; j < choices; ++j) {
    const int e = experts_[token * choices + j];
    if (e >= 0 && e < count) add(load(token * choices + j));
  }
  if (shared) {
    const float4 v = load(static_cast<i64>(tokens) * choices + token);
    add(make_float4(round_bf16(v.x), round_bf16(v.y), round_bf16(v.z), round_bf16(v.w)));
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(y) + place) =
        make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(y) + place) = sum;
  }
}
