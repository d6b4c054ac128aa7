// y = x W^T in bf16 and z = x P^T in float32 in one launch, for up to 8 tokens: the first `parts` of the clusters of `ranks`
// blocks work on W, the others on P. See product.cuh.
//
// Bytes: W and P once. Floor at 4.25 TB/s on an H200 for 4096 -> 1536 in FP8 and 2624 in bf16: 27.8 MB, 6.5 us. Measured there,
// launches in turn, the mean of this and of 1024 rows in bf16 (14.7 MB): one token 7.2 us, 8 tokens 9.9 us. In a layer of Flash
// 7.3 and 4.8 us from its predecessor's end to its own. What bounds it stands in gemv_linear.cu.
//
// Defines: FMT and EXACT, the formats of W and of P (0 bf16, 1 FP8, 2 NVFP4), STEPS and EXACT_STEPS, and see product.cuh.
#include "product.cuh"

KERNEL __maxnreg__(REGISTERS)
project(const __nv_bfloat16* x, const u8* codes, const u8* scales, const float* scale_2, __nv_bfloat16* y, int n,
        const u8* exact, const u8* exact_scales, const float* exact_scale_2, float* z, int m, int tokens, int k, int stride,
        int row_scales, int exact_row_scales, int slots, int buffers, int exact_slots, int exact_buffers, int parts, int ranks) {
  let_next_kernel_start();
  const int part = blockIdx.x / ranks, rank = ranks > 1 ? cluster_rank() : 0;
  if (part < parts) {
    const Product<__nv_bfloat16> rounded = {
        {x, nullptr, codes, scales, scale_2, y, tokens, n, k, 1, stride, row_scales, 0.f}, slots, buffers};
    product<FMT, STEPS>(rounded, part, parts, rank, ranks);
  } else {
    const Product<float> plain = {
        {x, nullptr, exact, exact_scales, exact_scale_2, z, tokens, m, k, 1, stride, exact_row_scales, 0.f}, exact_slots,
        exact_buffers};
    product<EXACT, EXACT_STEPS>(plain, part - parts, gridDim.x / ranks - parts, rank, ranks);
  }
}
