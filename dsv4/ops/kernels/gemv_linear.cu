// y = x W^T for up to 8 * NT tokens; W in bf16, FP8 (128 x 128 block scales) or NVFP4. See stream.cuh.
//
// Bytes: W once (N * K * 2, 1 or 0.5625) plus x and y, 2 bytes each. Floor at 4.25 TB/s on an H200: 4096 -> 4096 in FP8
// 16.8 MB, 3.9 us; 1024 -> 32768 in FP8 33.6 MB, 7.9 us; 4096 -> 129280 in bf16 1.06 GB, 249 us.
//
// Measured there, FP8: 1024 -> 32768 14.9 us (53 %), 4096 -> 8192 in 8 groups 14.6 us, 8192 -> 4096 15.9 us, 4096 -> 2048
// 6.7 us, 4096 -> 512 4.0 us; bf16 4096 -> 256 3.5 us (cuBLAS 6.2). Bound by decoding and by what a tile costs.
//
// A block takes a contiguous range of tiles of 16 * RW rows. Where tokens times K do not fit in shared memory, or where there
// are fewer tiles than blocks, a cluster of `ranks` blocks splits K; each adds up its share of the outputs, in rank order.
// With `groups`, the rows of group g see x[:, g, :].
// Defines: see stream.cuh; OUT_FP32 for a float32 result.
#include "stream.cuh"

#ifdef OUT_FP32
typedef float Out;
DEVICE Out to_out(float v) { return v; }
#else
typedef __nv_bfloat16 Out;
DEVICE Out to_out(float v) { return __float2bfloat16(v); }
#endif

KERNEL __launch_bounds__(THREADS, 1)
linear(const __nv_bfloat16* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
       const float* __restrict__ scale_2, Out* __restrict__ y, int tokens, int n, int k, int groups, int ranks) {
  extern __shared__ __align__(128) u8 memory[];
  const Shared sh{memory};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kw = warp % KW, rw = warp / KW;
  const int rank = ranks > 1 ? cluster_rank() : 0, cluster = blockIdx.x / ranks, clusters = gridDim.x / ranks;
  const int group_rows = n / groups, group_tiles = (group_rows + 16 * RW - 1) / (16 * RW);
  const i64 total = static_cast<i64>(group_tiles) * groups;
  const int first = static_cast<int>(cluster * total / clusters), last = static_cast<int>((cluster + 1) * total / clusters);
  const Slice slice = make_slice(k, rank, ranks);
  // The first of the 16 rows of a warp's tile, within all n; a warp past the group's end repeats the group's last row.
  auto row_of = [&](int item, int r) {
    const int group = item / group_tiles;
    return group * group_rows + min(item % group_tiles * 16 * RW + r * 16, group_rows - 1);
  };
  auto ring = Ring(slice, sh.ring(), last - first, kw, [&](int i) {
    const int row = row_of(first + i, rw), end = ((first + i) / group_tiles + 1) * group_rows;
    return make_pieces(codes, scales, slice, row, row + 8, min(16, end - row));
  });

  // The FP8 scales of the lane's two rows at a step.
  const float* block_scales = reinterpret_cast<const float*>(scales);
  const int scale_columns = (k + 127) / 128;
  auto block_scale = [&](int item, int c) {
    const int row = row_of(item, rw), column = min(slice.begin / 128 + c * KW + kw, scale_columns - 1);
    const int a = min(row + (lane >> 2), n - 1), b = min(row + 8 + (lane >> 2), n - 1);
    return make_float2(__ldg(block_scales + static_cast<i64>(a / 128) * scale_columns + column),
                       __ldg(block_scales + static_cast<i64>(b / 128) * scale_columns + column));
  };
  float2 scale_next = make_float2(1.f, 1.f);
  if (FMT == FP8 && first < last) scale_next = block_scale(first, 0);
  const float global = (FMT == FP4 ? *scale_2 : 1.f) * RAW;

  wait_for_previous_kernel();
  let_next_kernel_start();
  const int bytes = slice.end - slice.begin, values = FMT == FP4 ? 2 * bytes : FMT == FP8 ? bytes : bytes / 2;
  const int x_begin = FMT == FP4 ? 2 * slice.begin : FMT == FP8 ? slice.begin : slice.begin / 2;
  const int pitch = activation_pitch(slice);
  const u8* columns[NT];
  lane_columns(sh.activations(), pitch, 0, tokens, columns);
  int staged = -1;
  for (int item = first; item < last; ++item) {
    const int group = item / group_tiles;
    if (group != staged) {
      staged = group;
      __syncthreads();
      const int sharing = max(1, WARPS / tokens), worker = warp % sharing;
      for (int m = warp / sharing; m < tokens; m += max(1, WARPS / sharing)) {
        const float inverse = stage_token(sh.activations() + m * pitch, x + (static_cast<i64>(m) * groups + group) * k + x_begin,
                                          values, slice.steps, worker * 32 + lane, sharing * 32);
        if (lane == 0) sh.inverse()[m] = inverse;
      }
      __syncthreads();
    }
    float acc[CHAINS][NT][4] = {};
    for (int c = 0; c < slice.chunks; ++c) {
      const float2 scale_now = scale_next;
      if (FMT == FP8) {
        if (c + 1 < slice.chunks) scale_next = block_scale(item, c + 1);
        else if (item + 1 < last) scale_next = block_scale(item + 1, 0);
      }
      const u8* stage = ring.next();
      const int step = c * KW + kw;
      if (step >= slice.steps) continue;
      if (FMT == FP8) {
        float sums[CHAINS][NT][4] = {};
        multiply(stage, columns, step, sums);
#pragma unroll
        for (int j = 0; j < CHAINS; ++j)
#pragma unroll
          for (int i = 0; i < NT; ++i) {
            acc[j][i][0] = fmaf(scale_now.x, sums[j][i][0], acc[j][i][0]);
            acc[j][i][1] = fmaf(scale_now.x, sums[j][i][1], acc[j][i][1]);
            acc[j][i][2] = fmaf(scale_now.y, sums[j][i][2], acc[j][i][2]);
            acc[j][i][3] = fmaf(scale_now.y, sums[j][i][3], acc[j][i][3]);
          }
      } else {
        multiply(stage, columns, step, acc);
      }
    }
    float* parts = sh.parts((item - first) & 1);
    deposit(parts, sh.inverse(), acc);
    if (ranks > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      group_barrier(rw);
    }
    const int end = (group + 1) * group_rows;
    const int begin_o = ranks > 1 ? threadIdx.x + rank * THREADS : rw * PART + threadIdx.x % (KW * 32);
    const int end_o = ranks > 1 ? RW * PART : (rw + 1) * PART, step_o = ranks > 1 ? THREADS * ranks : KW * 32;
#pragma unroll 1
    for (int o = begin_o; o < end_o; o += step_o) {
      const float* part = parts + o / PART * KW * PART + o % PART;
      const int m = o % PART / 128 * 8 + o % 8, row = group * group_rows + item % group_tiles * 16 * RW + o / PART * 16 + o % 128 / 8;
      if (m >= tokens || row >= end) continue;
      float sum = 0.f;
      if (ranks > 1) {
        for (int r = 0; r < ranks; ++r)
#pragma unroll
          for (int w = 0; w < KW; ++w) sum += load_remote(part + w * PART, r);
      } else {
        sum = add_parts(part);
      }
      y[static_cast<i64>(m) * n + row] = to_out(sum * global);
    }
  }
  if (ranks > 1) {  // the others may still be reading this block's sums
    cluster_arrive();
    cluster_wait();
  }
}
