// y = x W^T for up to 8 tokens; W in bf16, FP8 (128 x 128 block scales) or NVFP4. See product.cuh.
//
// Bytes: W once (N * K * 2, 1 or 0.5625) plus x and y, 2 bytes each. Floor at 4.25 TB/s on an H200: 1024 -> 40960 in FP8
// 41.9 MB, 9.9 us; 8192 -> 4096 in FP8 33.6 MB, 7.9 us; 4096 -> 129280 in bf16 1.06 GB, 249 us.
//
// Measured there, launches in turn with other weights each, the mean of 1024 -> 40960 and 32768 with norm, 4096 -> 8192 in 8
// groups and 8192 -> 4096, FP8: 10.4, 10.0 and 9.8 us with one token, 14.5, 13.0 and 12.2 with 8 (before: 11.7, 10.7, 10.8 and
// 16.7, 13.8, 17.1). In a layer of Flash one waits 0.8 to 1.3 us for its predecessor's end to turn into its own first product,
// then draws 4 TB/s, and ends 0.5 us after its last product. What costs more is a multiprocessor with two blocks: see ALONE in
// linear.py, which took 4 us off a layer.
//
// With `groups`, the rows of group g see x[:, g, :].
// Defines: FMT (0 bf16, 1 FP8, 2 NVFP4), OUT (type of y), NORM (0: none comes first), STEPS, and see product.cuh.
#include "product.cuh"

KERNEL __maxnreg__(REGISTERS)
linear(const __nv_bfloat16* x, const float* norm, const u8* codes, const u8* scales, const float* scale_2, OUT* y, int tokens,
       int n, int k, int groups, int stride, int row_scales, int slots, int buffers, float eps, int ranks) {
  let_next_kernel_start();
  const Product<OUT> all = {{x, NORM ? norm : nullptr, codes, scales, scale_2, y, tokens, n, k, groups, stride, row_scales, eps},
                            slots, buffers};
  product<FMT, STEPS>(all, blockIdx.x / ranks, gridDim.x / ranks, ranks > 1 ? cluster_rank() : 0, ranks);
}
