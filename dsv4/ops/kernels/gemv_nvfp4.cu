// y = x W^T for one token and W in NVFP4; with a second weight, of which float32 results are wanted, in the same launch.
//
// Bytes: W once, 0.5625 a value. Floor at 4.25 TB/s on an H200: 1024 -> 40960 23.6 MB, 5.6 us; 4096 -> 8192 in 8 groups and 8192
// -> 4096 18.9 MB, 4.4 us; 4096 -> 1536 and 2624 9.6 MB, 2.3 us.
//
// Measured there, launches in turn with other weights each (and what one adds after a kernel of 6 us that leaves the memory
// idle): 11.7 us (9.3) with the norm, 8.7 (6.3), 8.1 (6.1), 6.0 (3.8). Without decoding the first takes 9.4 us and the third
// 6.7, without the products 10.3 and 7.6. A turn of a unit, 4096 values, takes a warp 330 instructions, of which 240 decode;
// 110 of those go to the pipe of logical instructions, which takes one in two clocks. Tiles of 16 rows whose K several warps
// share, as in product.cuh, took 11.4, 10.9 and 9.8 us.
//
// The next kernel is let start after the wait: with all kernels of a layer starting as early as they can, they take memory,
// bandwidth and multiprocessors from the one that is waited for (a layer of V4-Flash in 91.5 us then, so in 81.9).
//
// A warp works on a unit of four rows at a time, over all of K, so that warps have nothing to add up among each other. Lane
// 4 g + t has the values 32 (32 i + lane) .. + 31 of each row for every turn i, and copies them itself into the warp's ring in
// shared memory: STAGES turns are under way, also before the previous kernel has ended. mma.sync m16n8k16 serves as a dot
// product: what the lanes 4 g .. 4 g + 3 have of one row of a pair is row g of A, of the other row g + 8, their activations are
// column g of B, and what counts of the products is the diagonal.
//
// Activations become fp16 times a power of two, one for all that the lanes 4 g .. 4 g + 3 have of them (see stream.cuh).
// Defines: K (a multiple of 1024), STAGES, NORM (whether RMSNorm comes first); and WARPS=8, KW, NT, TAIL for stream.cuh.
#include "stream.cuh"

constexpr int ROW = K / 2, SCALES = K / 16, TURNS = K / 1024;  // bytes of a row and of its scales; turns
constexpr int UNIT = 4;                                        // rows
constexpr int STEP_BYTES = UNIT * (512 + 64);                  // of a unit in a turn
constexpr int PIECES = (TURNS * 16 + 31) / 32;                 // of 8 activations that a lane prepares

struct Matrix {
  const u8 *codes, *scales;
  const float* scale_2;  // one, or one a row
  void* y;
  int rows, row_scales, exact;  // exact: y is float32, else bf16
};

// A warp's ring over its units and their turns.
struct Feed {
  const u8 *codes, *scales;  // of the step to be copied next: the lane's of the first row; 16 bytes of row lane / 4
  int units, turn = 0;       // left, the present one among them
  u8* memory;                // the warp's
  u32 to, now;               // the lane's place in the first stage and in the present one

  DEVICE Feed(const Matrix& m, int first, int count, u8* ring) : units(count), memory(ring), to(shared_address(ring)) {
    const int lane = threadIdx.x & 31;
    codes = m.codes + static_cast<i64>(first) * UNIT * ROW + lane * 16;
    scales = m.scales + (static_cast<i64>(first) * UNIT + lane / 4 % UNIT) * SCALES + lane % 4 * 16;
    to += lane * 16;
    asm volatile("" : "+r"(to));  // ptxas of CUDA 13.0 gets copies wrong whose place is the lane's number and a constant to it
    now = to;
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) copy();
  }
  DEVICE void copy() {
    if (units > 0) {
#pragma unroll
      for (int r = 0; r < UNIT; ++r) copy16_once(now + r * 512, codes + r * ROW, true);
      if ((threadIdx.x & 31) < UNIT * 4) copy16_once(now + UNIT * 512, scales, true);
      const bool ends = ++turn == TURNS;
      turn = ends ? 0 : turn, units -= ends;
      codes += ends ? 512 + WARPS * UNIT * ROW - ROW : 512;
      scales += ends ? 64 + WARPS * UNIT * SCALES - SCALES : 64;
    }
    copies_end();
    if ((now += STEP_BYTES) == to + STAGES * STEP_BYTES) now = to;
  }
};

// The token's activations, before the previous kernel has ended and after.
struct Activations {
  float norm[NORM ? PIECES : 1][8];

  // A lane's piece number j: of the values of lanes 4 g .. 4 g + 3, g the number of the warp.
  DEVICE static int piece(int j) {
    const int q = j * 32 + (threadIdx.x & 31);
    return q / 16 * 128 + (threadIdx.x >> 5) * 16 + q % 16;
  }
  DEVICE static bool has(int j) { return TURNS % 2 == 0 || j * 32 + (threadIdx.x & 31) < TURNS * 16; }

  DEVICE explicit Activations(const float* weights) {
    if (NORM)
#pragma unroll
      for (int j = 0; j < PIECES; ++j)
        if (has(j))
#pragma unroll
          for (int e = 0; e < 8; ++e) norm[j % (NORM ? PIECES : 1)][e] = weights[piece(j) * 8 + e];
  }
  // Puts them where `multiply` finds them; inverse[g] becomes the inverse of the power of two.
  DEVICE void stage(const __nv_bfloat16* x, uint4* to, float* inverse, float eps) const {
    const int lane = threadIdx.x & 31;
    const uint4* from = reinterpret_cast<const uint4*>(x);
    uint4 v[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; ++j) v[j] = has(j) ? from[piece(j)] : make_uint4(0, 0, 0, 0);
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
      for (int j = 0; j < PIECES; ++j)
        if (has(j)) {
          float f[8];
          unpack8(v[j], f);
#pragma unroll
          for (int e = 0; e < 8; ++e) f[e] *= root * norm[j % (NORM ? PIECES : 1)][e];
          v[j] = pack8(f);
        }
    }
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
      largest = __vmaxu2(largest, largest_of_8(v[j]));
    largest = __reduce_max_sync(~0u, larger(largest));
    const int shift = fp16_shift(static_cast<int>(largest >> 7));
    const float scale = __int_as_float((127 + shift) << 23);
    if (lane == 0) inverse[threadIdx.x >> 5] = __int_as_float((127 - shift) << 23);
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
      if (has(j)) {
        float f[8];
        unpack8(v[j], f);
        u32 w[4];  // in the order in which pairs of weights are decoded
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __half2 h = __floats2half2_rn(f[i] * scale, f[i + 4] * scale);
          w[i] = *reinterpret_cast<const u32*>(&h);
        }
        const int c = piece(j);
        to[c / 128 * 128 + c % 4 * 32 + c % 128 / 4] = make_uint4(w[0], w[1], w[2], w[3]);
      }
  }
};

// A turn of a unit: its codes and scales come from the ring, and the ring goes on.
DEVICE void multiply(Feed& feed, const uint4* activations, float (&acc)[UNIT / 2][2][4]) {
  const int lane = threadIdx.x & 31;
  uint4 codes[UNIT];
  __half2 scales[UNIT];
  copies_wait<STAGES - 1>();
  __syncwarp();
  const u8* stage = feed.memory + (feed.now - feed.to);
#pragma unroll
  for (int r = 0; r < UNIT; ++r) {
    codes[r] = *reinterpret_cast<const uint4*>(stage + r * 512 + lane * 16);
    scales[r] = decode_scales(*reinterpret_cast<const u16*>(stage + (UNIT * 512 + r * 64) + lane * 2));
  }
  __syncwarp();
  feed.copy();
  auto word = [](const uint4& v, int n) { return n == 0 ? v.x : n == 1 ? v.y : n == 2 ? v.z : v.w; };
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint4 v = activations[w * 32 + lane];
#pragma unroll
    for (int pair = 0; pair < UNIT / 2; ++pair) {
      u32 a[4], b[4];
      const __half2 low = scales[pair * 2], high = scales[pair * 2 + 1];
      decode_fp4(word(codes[pair * 2], w), w / 2 ? __high2half2(low) : __low2half2(low), a);
      decode_fp4(word(codes[pair * 2 + 1], w), w / 2 ? __high2half2(high) : __low2half2(high), b);
      mma<FP4>(acc[pair][0], a[0], b[0], a[1], b[1], v.x, v.y);
      mma<FP4>(acc[pair][1], a[2], b[2], a[3], b[3], v.z, v.w);
    }
  }
}

// The first `parts` blocks work on the first weight, the others on the second. With `groups`, which only the first can have,
// the rows of group g see x[g], and a block has rows of two groups at most. All numbers of rows are multiples of 4, in each
// group.
KERNEL __launch_bounds__(THREADS, 2)
gemv_nvfp4(const __nv_bfloat16* x, const float* norm, const u8* codes, const u8* scales, const float* scale_2, void* y, int rows,
           int row_scales, int exact, const u8* second_codes, const u8* second_scales, const float* second_scale_2, float* second_y,
           int second_rows, int second_row_scales, int parts, int groups, float eps) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float inverses[2][8];
  const bool is_first = blockIdx.x < parts;
  const Matrix m = is_first ? Matrix{codes, scales, scale_2, y, rows, row_scales, exact}
                            : Matrix{second_codes, second_scales, second_scale_2, second_y, second_rows, second_row_scales, 1};
  const u32 part = is_first ? blockIdx.x : blockIdx.x - parts, all = is_first ? parts : gridDim.x - parts;
  const u32 units = m.rows / UNIT, per_group = units / groups;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int begin = units * part / all, end = units * (part + 1) / all, group = begin / per_group;
  const int first = begin + warp, count = (end - first + WARPS - 1) / WARPS, next_group = (group + 1) * per_group;
  uint4* activations = reinterpret_cast<uint4*>(memory + WARPS * STAGES * STEP_BYTES);
  Feed feed(m, first, count, memory + warp * STAGES * STEP_BYTES);
  const Activations own(norm);

  wait_for_previous_kernel();
  let_next_kernel_start();
  own.stage(x + group * K, activations, inverses[0], eps);
  if (end > next_group) own.stage(x + (group + 1) * K, activations + K / 8, inverses[1], eps);
  __syncthreads();
  const float even = lane / 8 == lane % 4 && lane % 8 < 4 ? RAW<FP4> : 0.f;  // what counts of a lane's sums: the diagonal
  const float odd = lane / 8 == lane % 4 && lane % 8 >= 4 ? RAW<FP4> : 0.f;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int unit = first + i * WARPS, row = unit * UNIT + reduced_index<UNIT>(), of_next = unit >= next_group;
    const float scale = __ldg(m.scale_2 + (m.row_scales ? row : 0));
    float acc[UNIT / 2][2][4] = {}, sums[UNIT];
#pragma unroll 2
    for (int turn = 0; turn < TURNS; ++turn) multiply(feed, activations + of_next * (K / 8) + turn * 128, acc);
    const float inverse = inverses[of_next][lane / 4], of_even = even * inverse, of_odd = odd * inverse;
#pragma unroll
    for (int r = 0; r < UNIT; ++r) {
      const float(&c)[2][4] = acc[r / 2];
      sums[r] = (c[0][r % 2 * 2] + c[1][r % 2 * 2]) * of_even;
      sums[r] = fmaf(c[0][r % 2 * 2 + 1] + c[1][r % 2 * 2 + 1], of_odd, sums[r]);
    }
    const float sum = warp_sums<UNIT>(sums) * scale;
    if (lane % (32 / UNIT) == 0) {
      if (m.exact) static_cast<float*>(m.y)[row] = sum;
      else static_cast<__nv_bfloat16*>(m.y)[row] = __float2bfloat16(sum);
    }
  }
}
