// y = x W^T in bf16 and z = x P^T in float32 in one launch, for 9 to 64 tokens: the first `parts` of the clusters of RANKS blocks
// work on W, the others on P. See gemm.cuh.
//
// Bytes: W and P once. Floor at 4.25 TB/s on an H200 for 4096 -> 1536 in FP8 and 2624 in bf16: 27.8 MB, 6.5 us. Measured there,
// launches in turn, 16, 32 and 64 tokens: 10.2, 11.0, 16.0 us; with 1024 in bf16 (14.7 MB, 3.5 us): 7.6, 8.4, 12.0 us. In turn with
// each other, so that each finds the other's instructions, the two take 0.4 us more, and took 1.5 before tiles were a loop.
//
// Defines: FMT and EXACT, the formats of W and of P (0 bf16, 1 FP8, 2 NVFP4), EXACT_TILES and EXACT_APART (of P), and see gemm.cuh.
#include "gemm.cuh"

KERNEL __launch_bounds__(THREADS, 1)
gemm_project(const __nv_bfloat16* x, const u8* codes, const u8* scales, const float* scale_2, __nv_bfloat16* y, int n,
             const u8* exact, const u8* exact_scales, const float* exact_scale_2, float* z, int m, int tokens, int k, int stride,
             int row_scales, int exact_row_scales, int parts, int received, int exact_received) {
  let_next_kernel_start();
  const int part = blockIdx.x / RANKS, rank = RANKS > 1 ? cluster_rank() : 0;
  if (part < parts)
    gemm<FMT, TILES, false, APART>(
        Linear<__nv_bfloat16>{x, nullptr, codes, scales, scale_2, y, tokens, n, k, 1, stride, row_scales, 0.f}, part, parts, rank,
        received);
  else
    gemm<EXACT, EXACT_TILES, false, EXACT_APART>(
        Linear<float>{x, nullptr, exact, exact_scales, exact_scale_2, z, tokens, m, k, 1, stride, exact_row_scales, 0.f},
        part - parts, gridDim.x / RANKS - parts, rank, exact_received);
}
