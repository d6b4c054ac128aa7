// y = x W^T for 2 to 64 tokens; W in bf16, FP8 (128 x 128 block scales) or NVFP4. See gemm.cuh.
//
// Bytes: W once (N * K * 2, 1 or 0.5625) plus x and y. Floor at 4.25 TB/s on an H200: 1024 -> 40960 in FP8 41.9 MB, 9.9 us; 4096 ->
// 8192 in 8 groups and 8192 -> 4096 in FP8 33.6 MB, 7.9 us. Measured there with 8, 16, 32 and 64 tokens, launches in turn:
//   1024 -> 40960 with norm   12.9   14.1   16.5   22.0 us   in NVFP4 with 8 tokens 11.3 us
//   4096 -> 8192, 8 groups    11.1   12.5   16.0   24.6 us                          13.2 us
//   8192 -> 4096              12.0   13.9   16.4   23.4 us                          12.5 us
// product.cuh takes 15.0, 11.7 and 13.1 us with 8 tokens, in NVFP4 14.0, 11.0 and 12.4: see `few` in linear.py. Two launches of
// 48 or of 64 tokens take 36 to 39 and 44 to 50 us, dequantising and the library's GEMM 53 to 62.
//
// Rows that all warpgroups have in 64 each, and some in 64 more, took the first line's kernel 5 % less than even shares that fill
// their last tiles badly. Sums that are sent while the next tile is multiplied: 2 to 4 % with several tiles a warp.
//
// product.cuh, with mma.sync and each warp's own reading of the tokens, took 22, 36 and 39 us with 32 tokens.
//
// With 32 tokens 1 to 1.5 us pass until a block waits for the previous kernel, 2.5 to 4.5 us more until tokens are staged (a
// multiprocessor takes in 25 to 30 bytes a clock, and they queue behind the rings' copies: hence EARLY), 7 to 9 us for the
// products, 1.5 to 3 us for the exchange of sums in a cluster. With copies, staging and products taken out a launch took 6 to 8
// us. To ask for all weights ahead of the copies (cp.async.bulk.prefetch.L2) cost 3 us.
//
// With `groups`, the rows of group g see x[:, g, :].
// Defines: FMT (0 bf16, 1 FP8, 2 NVFP4), OUT (type of y), NORM (whether an RMSNorm comes first), and see gemm.cuh.
#include "gemm.cuh"

KERNEL __launch_bounds__(THREADS, 1)
gemm_linear(const __nv_bfloat16* x, const float* norm, const u8* codes, const u8* scales, const float* scale_2, OUT* y, int tokens,
            int n, int k, int groups, int stride, int row_scales, float eps, int received) {
  let_next_kernel_start();
  gemm<FMT, TILES, NORM, APART>(Linear<OUT>{x, norm, codes, scales, scale_2, y, tokens, n, k, groups, stride, row_scales, eps},
                         blockIdx.x / RANKS, gridDim.x / RANKS, RANKS > 1 ? cluster_rank() : 0, received);
}
