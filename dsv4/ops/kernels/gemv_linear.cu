// y = x W^T for up to 64 tokens; W in bf16, FP8 (128 x 128 block scales) or NVFP4. See product.cuh.
//
// Bytes: W once (N * K * 2, 1 or 0.5625) plus x and y, 2 bytes each. Floor at 4.25 TB/s on an H200: 1024 -> 40960 in FP8
// 41.9 MB, 9.9 us; 8192 -> 4096 in FP8 33.6 MB, 7.9 us; 4096 -> 129280 in bf16 1.06 GB, 249 us.
//
// Measured there, one token, launches in turn (and what one adds after a kernel of 6 us that leaves the memory idle): FP8
// 1024 -> 40960 with norm 13.3 us (11.7), 4096 -> 8192 in 8 groups 11.2 us (9.1), 8192 -> 4096 11.3 us (9.8), from the L2 8.5
// us; NVFP4 8192 -> 4096 9.7 us (7.7), floor 4.4; bf16 4096 -> 129280 238 us, less than its floor, which is that of a copy that
// also writes. 8 tokens in FP8: 17.8, 14.4, 17.6 us; 32 tokens: 23, 37, 38 us. From the end of the previous kernel to staged
// activations 1.6 us pass, from the last product to the end 0.4 us; in between the L2 gives 5 TB/s. NVFP4 is bound by
// instructions: 350 a step, of which a scheduler's two warps hide too little. 32 tokens are bound by staging (4 to 6 us),
// mma.sync and sums across clusters.
//
// With `groups`, the rows of group g see x[:, g, :].
// Defines: FMT (0 bf16, 1 FP8, 2 NVFP4), OUT (type of y), and see stream.cuh.
#include "product.cuh"

KERNEL __launch_bounds__(THREADS, RESIDENT)
linear(const __nv_bfloat16* x, const float* norm, const u8* codes, const u8* scales, const float* scale_2, OUT* y, int tokens,
       int n, int k, int groups, int stride, int row_scales, int slots, int buffers, float eps, int ranks) {
  __shared__ Stats stats;
  let_next_kernel_start();
  product<FMT>(Product<OUT>{x, norm, codes, scales, scale_2, y, tokens, n, k, groups, stride, row_scales, slots, buffers, eps},
               stats, blockIdx.x / ranks, gridDim.x / ranks, ranks > 1 ? cluster_rank() : 0, ranks);
}
