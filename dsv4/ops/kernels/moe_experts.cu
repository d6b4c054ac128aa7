// The routed experts of up to ENTRIES / k tokens: gate and up with clamped SwiGLU, then down with the weighted sum.
//
// Bytes: every picked expert's weights once, 1.5 * I * H * 1.125 in NVFP4 (14.2 MB an expert in Flash, 37.2 in Pro), once for
// each 8 of its tokens. Floor at 4.25 TB/s on an H200 for one token and 6 experts: Flash 84.9 MB, 20.0 us (gate and up 13.3,
// down 6.7); Pro 223 MB, 52.4 us.
//
// Measured there (random routing, in a CUDA graph): Flash, one token 40.9 us (49 %: the chain of routing, first weights and
// activations, and decoding); 8 tokens 199 us (76 %), 32 tokens 566 us (80 %). Pro, one token 86 us (61 %).
//
// Every block reads the routing and makes the same list of segments: an expert with up to 8 of the (token, choice) entries
// that picked it, in order of entries. Work is (segment, tile) pairs in that order, a contiguous range for each block, so a
// block changes its activations once or twice. Entries that are not an expert's id cost nothing.
//   moe_gate_up   tile: 8 gate rows and the 8 up rows that belong to them; h [entry, I] in bf16, routing weight included
//   moe_down_one  one token: a tile is 16 rows of y, summed over all its experts in the order of entries
//   moe_down      several tokens: out [entry, H] in float32, which moe_combine adds over each token's entries in order
// Defines: see stream.cuh (NT is 1).
#include "stream.cuh"

#define ENTRIES 512

struct Routing {
  short expert[ENTRIES];   // -1 where the entry is not an expert's id
  short order[ENTRIES];    // how many earlier entries picked the same expert
  short segment[ENTRIES];  // first entry of each segment
  short column[8];         // entries of the segment in shared memory
  float weight[8];         // their routing weights
  int segments;
  int single;               // each entry is a segment
  float factor[16];
};

// All threads. With `single` (one token) an expert picked twice is two segments, so that one row of activations is enough.
DEVICE void read_routing(Routing& r, const int* experts, int entries, int count, bool single) {
  for (int i = threadIdx.x; i < entries; i += THREADS) {
    const int e = experts[i];
    r.expert[i] = static_cast<short>(e >= 0 && e < count ? e : -1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < entries; i += THREADS) {
    const short e = r.expert[i];
    int before = 0;
    if (!single)
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
    if (threadIdx.x == 0) r.segments = total, r.single = single;
  }
  __syncthreads();
}

// All threads: find the segment's entries and put their activations (row entry / divisor of x) into shared memory, with the
// factors of the epilogue. Returns how many they are.
DEVICE int stage_segment(Routing& r, const Shared& sh, int pitch, const __nv_bfloat16* x, const float* weights, int k, int steps,
                         int segment, int entries, int divisor) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, lead = r.segment[segment];
  __syncthreads();
  if (threadIdx.x < 8) r.column[threadIdx.x] = -1;
  __syncthreads();
  for (int i = lead + threadIdx.x; i < (r.single ? lead + 1 : entries); i += THREADS)
    if (r.expert[i] == r.expert[lead] && r.order[i] / 8 == r.order[lead] / 8) {
      r.column[r.order[i] % 8] = static_cast<short>(i);
      if (weights) r.weight[r.order[i] % 8] = weights[i];
    }
  __syncthreads();
  int columns = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) columns += r.column[i] >= 0;
  const int sharing = max(1, WARPS / columns), worker = warp % sharing;
  for (int m = warp / sharing; m < columns; m += max(1, WARPS / sharing)) {
    const __nv_bfloat16* from = x + static_cast<i64>(r.column[m] / divisor) * k;
    const float inverse = stage_token(sh.activations() + m * pitch, from, k, steps, worker * 32 + lane, sharing * 32);
    if (lane == 0) sh.inverse()[m] = inverse;
  }
  __syncthreads();
  return columns;
}

struct Arguments {
  const __nv_bfloat16* x;
  const int* experts;
  const float* weights;
  const u8* codes;
  const u8* scales;
  const float* scale_2;
  void* out;
  int entries, divisor, k, rows, count;  // rows: tiles cover them, of I in gate_up and of H in down
  float limit;
};

template <bool GateUp>
DEVICE void segments(const Arguments& p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Routing routing;
  const Shared sh{memory};
  const int warp = threadIdx.x >> 5, kw = warp % KW, rw = warp / KW;
  constexpr int TILE = (GateUp ? 8 : 16) * RW;
  if (GateUp) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  read_routing(routing, p.experts, p.entries, p.count, p.entries == p.divisor);
  const int tiles = (p.rows + TILE - 1) / TILE;
  const i64 total = static_cast<i64>(routing.segments) * tiles;
  const int first = static_cast<int>(blockIdx.x * total / gridDim.x), last = static_cast<int>((blockIdx.x + 1) * total / gridDim.x);
  const Slice slice = make_slice(p.k, 0, 1);
  auto ring = Ring(slice, sh.ring(), last - first, kw, [&](int i) {
    const int item = first + i, row = item % tiles * TILE + rw * (TILE / RW);
    const i64 expert = routing.expert[routing.segment[item / tiles]];
    if (GateUp) {
      const i64 low = expert * 2 * p.rows + min(row, p.rows - 8);
      return make_pieces(p.codes, p.scales, slice, low, low + p.rows, 16);
    }
    const int start = min(row, p.rows - 1);
    const i64 low = expert * p.rows + start;
    return make_pieces(p.codes, p.scales, slice, low, low + 8, min(16, p.rows - start));
  });
  if (!GateUp) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }

  const int pitch = activation_pitch(slice);
  const u8* columns[1];
  int staged = -1, count = 0;
  float low_scale = 1.f, high_scale = 1.f, weight = 0.f;
  for (int item = first; item < last; ++item) {
    const int segment = item / tiles;
    if (segment != staged) {
      const int lead = routing.segment[segment], expert = routing.expert[lead];
      if (GateUp) weight = p.weights[lead];
      low_scale = RAW * (FMT == FP4 ? __ldg(p.scale_2 + (GateUp ? expert * 2 : expert)) : 1.f);
      high_scale = RAW * (FMT == FP4 && GateUp ? __ldg(p.scale_2 + expert * 2 + 1) : 1.f);
      if (staged < 0 || !routing.single) {  // one token: its activations stay
        count = stage_segment(routing, sh, pitch, p.x, p.weights, p.k, slice.steps, segment, p.entries, p.divisor);
        lane_columns(sh.activations(), pitch, 0, count, columns);
      }
      staged = segment;
    }
    float acc[CHAINS][1][4] = {};
    for (int c = 0; c < slice.chunks; ++c) {
      const u8* stage = ring.next();
      const int step = c * KW + kw;
      if (step < slice.steps) multiply(stage, columns, step, acc);
    }
    float* parts = sh.parts((item - first) & 1);
    deposit(parts, sh.inverse(), acc);
    group_barrier(rw);
    constexpr int OUTPUTS = TILE / RW * 8;
    for (int o = threadIdx.x % (KW * 32); o < OUTPUTS; o += KW * 32) {
      const int column = o % 8, row = item % tiles * TILE + rw * (TILE / RW) + o / 8;
      if (column >= count || row >= p.rows) continue;
      const i64 entry = routing.single ? routing.segment[segment] : routing.column[column];
      const float* part = parts + rw * KW * PART + o;
      const float value = add_parts(part) * low_scale;
      if (GateUp) {
        const float gate = fminf(value, p.limit), up = fminf(fmaxf(add_parts(part + 64) * high_scale, -p.limit), p.limit);
        static_cast<__nv_bfloat16*>(p.out)[entry * p.rows + row] =
            __float2bfloat16(gate / (1.f + __expf(-gate)) * up * (routing.single ? weight : routing.weight[column]));
      } else {
        static_cast<float*>(p.out)[entry * p.rows + row] = value;
      }
    }
  }
}

// x bf16 [T, k]; experts, weights [entries]; codes [count, 2 * rows, k]; h bf16 [entries, rows]. divisor: entries a token.
KERNEL __launch_bounds__(THREADS, 1)
moe_gate_up(const __nv_bfloat16* x, const int* experts, const float* weights, const u8* codes, const u8* scales,
            const float* scale_2, void* h, int entries, int divisor, int k, int rows, int count, float limit) {
  segments<true>({x, experts, weights, codes, scales, scale_2, h, entries, divisor, k, rows, count, limit});
}

// h bf16 [entries, k]; codes [count, rows, k]; out float32 [entries, rows].
KERNEL __launch_bounds__(THREADS, 1)
moe_down(const __nv_bfloat16* h, const int* experts, const u8* codes, const u8* scales, const float* scale_2, void* out,
         int entries, int k, int rows, int count) {
  segments<false>({h, experts, nullptr, codes, scales, scale_2, out, entries, 1, k, rows, count, 0.f});
}

// One token with at most 16 entries: y float32 [rows]. The warps beyond KW take other experts, not other rows.
KERNEL __launch_bounds__(THREADS, 1)
moe_down_one(const __nv_bfloat16* h, const int* experts, const u8* codes, const u8* scales, const float* scale_2, float* y,
             int entries, int k, int rows, int count) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Routing routing;
  const Shared sh{memory};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kw = warp % KW, rw = warp / KW;
  read_routing(routing, experts, entries, count, true);
  const int tiles = (rows + 15) / 16;
  const int first = static_cast<int>(static_cast<i64>(blockIdx.x) * tiles / gridDim.x);
  const int last = static_cast<int>((blockIdx.x + 1LL) * tiles / gridDim.x);
  const Slice slice = make_slice(k, 0, 1);
  const int mine = (routing.segments - rw + RW - 1) / RW;  // segments rw, rw + RW, ...
  auto ring = Ring(slice, sh.ring(), (last - first) * mine, kw, [&](int i) {
    const int start = (first + i / mine) * 16;
    const i64 low = static_cast<i64>(routing.expert[routing.segment[i % mine * RW + rw]]) * rows + start;
    return make_pieces(codes, scales, slice, low, low + 8, min(16, rows - start));
  });

  const int pitch = activation_pitch(slice);
  float scale = 1.f;
  if (FMT == FP4 && warp < routing.segments) scale = scale_2[routing.expert[routing.segment[warp]]];
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int s = warp; s < routing.segments; s += WARPS) {
    const int entry = routing.segment[s];
    if (FMT == FP4 && s != warp) scale = scale_2[routing.expert[entry]];
    const float inverse =
        stage_token(sh.activations() + s * pitch, h + static_cast<i64>(entry) * k, k, slice.steps, lane, 32);
    if (lane == 0) routing.factor[s] = inverse * RAW * scale;
  }
  if (threadIdx.x < 8) sh.inverse()[threadIdx.x] = 1.f;
  __syncthreads();
  for (int item = first; item < last; ++item) {
    float acc[CHAINS][1][4] = {};
    for (int s = rw; s < routing.segments; s += RW) {
      const u8* columns[1];
      lane_columns(sh.activations(), pitch, s, 1, columns);
      const float factor = routing.factor[s];
      for (int c = 0; c < slice.chunks; ++c) {
        const u8* stage = ring.next();
        const int step = c * KW + kw;
        if (step >= slice.steps) continue;
        float sums[CHAINS][1][4] = {};
        multiply(stage, columns, step, sums);
#pragma unroll
        for (int j = 0; j < CHAINS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[j][0][i] = fmaf(factor, sums[j][0][i], acc[j][0][i]);
      }
    }
    float* parts = sh.parts((item - first) & 1);
    deposit(parts, sh.inverse(), acc);
    __syncthreads();
    if (threadIdx.x < 16 && item * 16 + threadIdx.x < rows) {  // all columns are the same token
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += parts[w * PART + threadIdx.x * 8];
      y[item * 16 + threadIdx.x] = sum;
    }
  }
}

// y [t, c] = sum over j of out [t * k + j, c], where the entry is an expert's id. One thread for 4 columns; rows % 4 is 0.
KERNEL __launch_bounds__(128)
moe_combine(const float* __restrict__ out, const int* __restrict__ experts, float* __restrict__ y, int rows, int k, int count) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int c = (blockIdx.x * 128 + threadIdx.x) * 4;
  if (c >= rows) return;
  const i64 token = blockIdx.y;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int j = 0; j < k; ++j) {
    const int e = experts[token * k + j];
    if (e < 0 || e >= count) continue;
    const float4 v = *reinterpret_cast<const float4*>(out + (token * k + j) * rows + c);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  *reinterpret_cast<float4*>(y + token * rows + c) = sum;
}
