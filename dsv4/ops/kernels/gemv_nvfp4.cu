// y = x W^T for one token and W in NVFP4; with a second weight, of which float32 results are wanted, in the same launch.
//
// Bytes: W once, 0.5625 a value. Floor at 4.25 TB/s on an H200: 1024 -> 40960 23.6 MB, 5.6 us; 1024 -> 32768, 4096 -> 8192 in 8
// groups and 8192 -> 4096 18.9 MB, 4.4 us; 4096 -> 1536 and 2624 9.6 MB, 2.3 us.
//
// Measured there, launches in turn with other weights each (and what one adds after a kernel of 6 us that leaves the memory
// idle): 9.6 us (9.1) and 8.2 (7.6) with the norm, 7.8 (6.1), 8.2 (7.3), 5.2 (3.8); a layer of V4-Flash in 78.5 us. With five
// steps of the ring instead of three the first four took 9.8 (8.4), 7.7 (6.5), 7.9 (6.1), 7.5 (6.5), but the layer 79.6: what is
// copied early takes bandwidth from the kernel that is waited for. Without copies they took 7.3, 6.2, 5.8 and 6.2, without
// products 8.0, 6.3, 5.7 and 6.4, with neither about 3: 0.4 us until the wait ends, 0.5 to 0.7 until activations are staged,
// 0.4 at the end. A step takes a warp some 280 instructions, of which 176 decode; 112 of those go to the pipe of logical
// instructions, which takes one in two clocks: a scheduler multiplies a step in 330 clocks, 430 with the copies.
//
// The next kernel is let start after the wait: with all kernels of a layer starting as early as they can, they take memory,
// bandwidth and multiprocessors from the one that is waited for (an earlier form: a layer in 91.5 us then, so in 81.9). Only
// hc_mix after wo_b, with few blocks that read little, comes earlier (`early`): a layer in 73.2 us, 74.1 otherwise.
//
// KW warps of a block split K, in pieces of 512 values; RW of them have the same values and take turns at the rows, 8 rows at a
// time. So a warp multiplies all its rows with the same activations, which stay in registers, and waits for no other warp until
// its last row. It copies 8 rows of a piece into its ring in shared memory: STAGES such steps are under way, also before the
// previous kernel has ended.
//
// Lane 4 g + t has 128 values of row g in a step. mma.sync m16n8k16 serves as 64 dot products that are each one lane's alone:
// its first 64 values are row g of A, the others row g + 8, and in B column 2 t has the activations for the first, column 2 t + 1
// those for the others, and only where lane t has K; the rest of B is zero. So a product's sums are of one block of 16 values,
// and the block's scale is applied to sums: applied to weights it took 64 instructions a step.
//
// Activations become fp16 times a power of two, one a warp (see stream.cuh).
// Defines: K (a multiple of 512 KW), KW, STAGES, NORM (whether RMSNorm comes first); and WARPS=8, NT, TAIL for stream.cuh.
#include "stream.cuh"

constexpr int ROW = K / 2, SCALES = K / 16;                      // bytes of a row and of its scales
constexpr int UNIT = 8, PIECE = 512;                             // rows and values of a step
constexpr int CODE_BYTES = PIECE / 2, SCALE_BYTES = PIECE / 16;  // of a row in a step
constexpr int STEP_BYTES = UNIT * (CODE_BYTES + SCALE_BYTES);
constexpr int PASSES = K / (PIECE * KW);                         // pieces of K that a warp has
constexpr int WORDS = PIECE / 8;                                 // 16 bytes of 8 activations each
constexpr int MINE = PASSES * WORDS / 32;                        // words that a lane prepares

DEVICE uint4 load_shared16(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
DEVICE uint2 load_shared8(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

struct Matrix {
  const u8 *codes, *scales;
  const float* scale_2;  // one, or one a row
  void* y;
  int rows, row_scales, exact;  // exact: y is float32, else bf16
};

// A block's units of 8 rows: those from `middle` on are of the next group.
struct Share {
  int begin, middle, end;
  DEVICE int runs() const { return end > middle ? 2 * PASSES : PASSES; }
  // A warp's first unit of a run, which is a group and a piece of K, and how many it has.
  DEVICE int first(int run) const { return (run < PASSES ? begin : middle) + static_cast<int>(threadIdx.x / 32 / KW); }
  DEVICE int count(int run) const { return ((run < PASSES ? middle : end) - first(run) + RW - 1) / RW; }
};

// A step in a lane's registers: 128 values of row lane / 4, and the scales of their blocks.
struct Step {
  uint4 codes[4];
  uint2 scales;
};

// A warp's ring over its runs and their units. Of a row's 16 pieces of 16 bytes, piece c lies at c ^ c / 8 * 2 ^ row % 2, so that
// lanes that read 64 bytes each, at four times, meet no bank conflicts.
struct Feed {
  const u8 *base, *scale_base;  // the lane's 16 bytes of row lane / 16 of the first unit; of row lane / 2
  const u8 *codes, *scales;     // and those of the step that was copied last
  Share share;
  int run = -1, left = 0;       // units of the present run that are still to come; -1 if there is no other run
  u32 copies_scales;            // whether the lane does
  u32 to, now;                  // where it copies codes in the warp's first stage, and in the present one
  u32 scales_to, from[4], scales_from;  // from there: where it copies scales, and reads

  DEVICE Feed(const Matrix& m, Share units, u32 ring) : base(m.codes), scale_base(m.scales), share(units) {
    const int lane = threadIdx.x & 31, kw = threadIdx.x / 32 % KW, row = lane / 16, piece = lane % 16, g = lane / 4, t = lane % 4;
    base += row * ROW + kw * CODE_BYTES + piece * 16;
    scale_base += lane / 2 % UNIT * SCALES + kw * SCALE_BYTES + lane % 2 * 16;
    copies_scales = lane < UNIT * 2;
    to = ring + row * CODE_BYTES + (piece ^ piece / 8 * 2 ^ row) * 16;
    const u32 ring_scales = ring + UNIT * CODE_BYTES;
    scales_to = ring_scales + lane * 16 - to, scales_from = ring_scales + lane * 8 - to;
#pragma unroll
    for (int i = 0; i < 4; ++i) from[i] = ring + g * CODE_BYTES + (t * 4 + i ^ t / 2 * 2 ^ g % 2) * 16 - to;
    // ptxas of CUDA 13.0 gets copies wrong whose place it takes for one value of all lanes plus a constant of the lane.
    keep(copies_scales), keep(to), keep(scales_to), keep(scales_from);
#pragma unroll
    for (int i = 0; i < 4; ++i) keep(from[i]);
    now = to;
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) copy();
  }
  DEVICE void next_run() {
    do {
      if (++run == share.runs()) {
        left = -1;
        return;
      }
      left = share.count(run);
    } while (left <= 0);
    const i64 row = static_cast<i64>(share.first(run) - RW) * UNIT;
    codes = base + row * ROW + run % PASSES * (KW * CODE_BYTES);
    scales = scale_base + row * SCALES + run % PASSES * (KW * SCALE_BYTES);
  }
  DEVICE void copy() {
    if (left == 0) next_run();
    if (left > 0) {
      --left;
      codes += RW * UNIT * ROW, scales += RW * UNIT * SCALES;
#pragma unroll
      for (int r = 0; r < UNIT / 2; ++r) copy16_once(now + r * 2 * CODE_BYTES, codes + r * 2 * ROW, true);
      if (copies_scales) copy16_once(now + scales_to, scales, true);
    }
    copies_end();
    if ((now += STEP_BYTES) == to + STAGES * STEP_BYTES) now = to;
  }
  // The next step, once it is there; its place is copied to again.
  DEVICE Step next() {
    copies_wait<STAGES - 1>();
    __syncwarp();
    Step s;
#pragma unroll
    for (int i = 0; i < 4; ++i) s.codes[i] = load_shared16(now + from[i]);
    s.scales = load_shared8(now + scales_from);
    __syncwarp();
    copy();
    return s;
  }
};

// The lane's part of the products of a step's row.
DEVICE float multiply(const Step& s, const uint4 (&x)[8]) {
  float sums[2] = {};
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const __half2 first = decode_scales(s.scales.x >> pair * 16), second = decode_scales(s.scales.y >> pair * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // blocks of 16 values
      float c[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int w = pair * 4 + half * 2 + i;
        u32 a[4], b[4];
        decode_codes(word(s.codes[w / 4], w % 4), a);
        decode_codes(word(s.codes[2 + w / 4], w % 4), b);
        mma<FP4>(c, a[0], b[0], a[1], b[1], x[w].x, x[w].y);
        mma<FP4>(c, a[2], b[2], a[3], b[3], x[w].z, x[w].w);
      }
      sums[0] = fmaf(half ? __high2float(first) : __low2float(first), c[0], sums[0]);
      sums[1] = fmaf(half ? __high2float(second) : __low2float(second), c[3], sums[1]);
    }
  }
  return sums[0] + sums[1];
}

// A warp's activations, before the previous kernel has ended and after.
struct Activations {
  float norm[NORM ? MINE : 1][8];

  // The lane's word number j, in K.
  DEVICE static int word(int j) {
    const int q = j * 32 + (threadIdx.x & 31);
    return (q / WORDS * KW + threadIdx.x / 32 % KW) * WORDS + q % WORDS;
  }
  DEVICE explicit Activations(const float* weights) {
    if (NORM)
#pragma unroll
      for (int j = 0; j < MINE; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) norm[j % (NORM ? MINE : 1)][e] = weights[word(j) * 8 + e];
  }
  // Puts them where `load` finds them, as the other warps with the same values do; returns the inverse of the power of two.
  DEVICE float stage(const __nv_bfloat16* x, uint4* to, float eps) const {
    const int lane = threadIdx.x & 31;
    const uint4* from = reinterpret_cast<const uint4*>(x);
    uint4 v[MINE];
#pragma unroll
    for (int j = 0; j < MINE; ++j) v[j] = from[word(j)];
    if (NORM) {
      float square = 0.f;
#pragma unroll 4
      for (int i = lane; i < K / 8; i += 32) {
        float f[8];
        unpack8(from[i], f);
#pragma unroll
        for (int e = 0; e < 8; ++e) square = fmaf(f[e], f[e], square);
      }
      const float root = rsqrtf(warp_sum(square) * (1.f / K) + eps);
#pragma unroll
      for (int j = 0; j < MINE; ++j) {
        float f[8];
        unpack8(v[j], f);
#pragma unroll
        for (int e = 0; e < 8; ++e) f[e] *= root * norm[j % (NORM ? MINE : 1)][e];
        v[j] = pack8(f);
      }
    }
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < MINE; ++j) largest = __vmaxu2(largest, largest_of_8(v[j]));
    largest = __reduce_max_sync(~0u, larger(largest));
    const int shift = fp16_shift(static_cast<int>(largest >> 7));
    const float scale = two_to(shift);
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      u32 w[4];  // in the order in which pairs of weights are decoded
      fp16_pairs<4>(v[j], scale, w);
      to[j * 32 + lane] = make_uint4(w[0], w[1], w[2], w[3]);
    }
    __syncwarp();
    return two_to(-shift);
  }
  // What the lane has of B: column lane / 4, of the values of lane t = lane / 8.
  DEVICE static void load(uint4 (&x)[8], const uint4* from) {
    const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      x[w] = make_uint4(0, 0, 0, 0);
      if (g / 2 == t) x[w] = from[g * 8 + w];
    }
  }
};

// The first `parts` blocks work on the first weight, the others on the second. With `groups`, which only the first can have,
// the rows of group g see x[g], and a block has rows of two groups at most. All numbers of rows are multiples of 8, in each
// group. `most`: the most units of a block. `early`: the next kernel may start before the previous one has ended.
KERNEL __maxnreg__(120)
gemv_nvfp4(const __nv_bfloat16* x, const float* norm, const u8* codes, const u8* scales, const float* scale_2, void* y, int rows,
           int row_scales, int exact, const u8* second_codes, const u8* second_scales, const float* second_scale_2, float* second_y,
           int second_rows, int second_row_scales, int parts, int groups, int most, int early, float eps) {
  extern __shared__ __align__(128) u8 memory[];
  const bool is_first = blockIdx.x < parts;
  const Matrix m = is_first ? Matrix{codes, scales, scale_2, y, rows, row_scales, exact}
                            : Matrix{second_codes, second_scales, second_scale_2, second_y, second_rows, second_row_scales, 1};
  const u32 part = is_first ? blockIdx.x : blockIdx.x - parts, all = is_first ? parts : gridDim.x - parts;
  const u32 units = m.rows / UNIT, per_group = units / groups;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kw = warp % KW;
  const int begin = units * part / all, end = units * (part + 1) / all, group = begin / per_group;
  const Share share{begin, min(end, static_cast<int>((group + 1) * per_group)), end};
  const int first_row = begin * UNIT, block_rows = (end - begin) * UNIT;
  float* sums = reinterpret_cast<float*>(memory + WARPS * STAGES * STEP_BYTES);  // [unit][KW][lane]
  float* row_scale = sums + most * KW * 32;
  uint4* activations = reinterpret_cast<uint4*>(row_scale + most * UNIT) + kw * (groups > 1 ? 2 : 1) * PASSES * WORDS;

  if (m.row_scales)
    for (int i = threadIdx.x; i < block_rows / 4; i += THREADS)
      copy16(shared_address(row_scale) + i * 16, reinterpret_cast<const u8*>(m.scale_2 + first_row + i * 4), true);
  copies_end();
  const float scale = m.row_scales ? RAW<FP4> : RAW<FP4> * __ldg(m.scale_2);  // what is small would wait for the ring's copies
  const Activations own(norm);
  Feed feed(m, share, shared_address(memory) + warp * STAGES * STEP_BYTES);

  if (early) let_next_kernel_start();
  wait_for_previous_kernel();
  let_next_kernel_start();
  float inverse[2];
  inverse[0] = own.stage(x + group * K, activations, eps);
  if (end > share.middle) inverse[1] = own.stage(x + (group + 1) * K, activations + PASSES * WORDS, eps);
#pragma unroll 1
  for (int run = 0; run < share.runs(); ++run) {
    uint4 own_x[8];
    Activations::load(own_x, activations + run * WORDS);
    const float back = (run < PASSES ? inverse[0] : inverse[1]) * scale;
    const int count = share.count(run);
    float* to = sums + ((share.first(run) - begin) * KW + kw) * 32 + lane;
#pragma unroll 1
    for (int i = 0; i < count; ++i, to += WARPS * 32) {
      float sum = multiply(feed.next(), own_x) * back;
      if (run % PASSES) sum += *to;
      *to = sum;
    }
  }
  copies_wait<0>();
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < block_rows; i += THREADS) {
    const float4* from = reinterpret_cast<const float4*>(sums) + i / UNIT * (KW * 8) + i % UNIT;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < KW; ++w) sum = add4(sum, from[w * 8]);
    const float value = (sum.x + sum.y + sum.z + sum.w) * (m.row_scales ? row_scale[i] : 1.f);
    if (m.exact) static_cast<float*>(m.y)[first_row + i] = value;
    else static_cast<__nv_bfloat16*>(m.y)[first_row + i] = __float2bfloat16(value);
  }
}
