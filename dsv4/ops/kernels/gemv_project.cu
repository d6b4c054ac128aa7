// y = x W^T in bf16 with W in FP8, and z = x P^T in float32 with P in bf16, in one launch: the first `parts` of the clusters of
// `ranks` blocks work on W, the others on P. See product.cuh.
//
// Bytes: W and P once. Floor at 4.25 TB/s on an H200 for 4096 -> 1536 in FP8 and 2624 in bf16: 27.8 MB, 6.5 us. Measured there,
// launches in turn: one token 9.2 us (8.4 after a kernel that leaves the memory idle), 8 tokens 11.6 us, 32 tokens 29 us. What
// bounds it stands in gemv_linear.cu.
//
// Defines: see stream.cuh.
#include "product.cuh"

KERNEL __launch_bounds__(THREADS, RESIDENT)
project(const __nv_bfloat16* x, const u8* codes, const float* scales, __nv_bfloat16* y, int n, const u8* plain, float* z, int m,
        int tokens, int k, int stride, int slots, int buffers, int plain_slots, int plain_buffers, int parts, int ranks) {
  __shared__ Stats stats;
  let_next_kernel_start();
  const int part = blockIdx.x / ranks, rank = ranks > 1 ? cluster_rank() : 0;
  if (part < parts)
    product<FP8>(Product<__nv_bfloat16>{x, nullptr, codes, reinterpret_cast<const u8*>(scales), nullptr, y, tokens, n, k, 1, stride,
                                        0, slots, buffers, 0.f},
                 stats, part, parts, rank, ranks);
  else
    product<BF16>(Product<float>{x, nullptr, plain, nullptr, nullptr, z, tokens, m, k, 1, stride, 0, plain_slots, plain_buffers, 0.f},
                  stats, part - parts, gridDim.x / ranks - parts, rank, ranks);
}
