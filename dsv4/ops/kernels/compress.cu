// compress: the compressor's state, and one entry for each block that the batch completes (see compress.cuh).
//
// Bytes at one token, CSA (d 512, width 1024): c, z, ape and the two ring rows 20 KB; at a block's last token 8 rows of
// halves, 32 KB. HCA (width 512): 10 KB, and at one token in 128 all of the ring, 512 KB. All latency.
//
// Defines: DIM (a multiple of 4), OVERLAP 0 or 1, RATE, ROPE, PARTS (blocks of a cluster that share a token), THREADS,
// FORMAT of the entries.
#include "compress.cuh"

KERNEL __launch_bounds__(THREADS, 2)
    compress(const float* c, const float* z, const float* __restrict__ ape, const float* __restrict__ norm,
             const float* __restrict__ inv_freq, const i64* __restrict__ positions, const i64* __restrict__ slots,
             float* c_ring, float* z_ring, u32* entries, int tokens, int share, int capacity, float eps) {
  typedef Compressor<DIM, OVERLAP, RATE, ROPE, PARTS, THREADS, FORMAT> Main;
  __shared__ __align__(16) typename Main::Shared shared;
  if (PARTS > 1) cluster_arrive_relaxed();
  Main main = {c, z, Main::WIDTH, ape, norm, inv_freq, c_ring, z_ring, entries, capacity, eps,
               static_cast<int>(cluster_rank()), shared, false, 0};
  main.advance(blockIdx.x / PARTS * share, share, positions, slots, tokens, false);
}
