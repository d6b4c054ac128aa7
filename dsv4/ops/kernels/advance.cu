// advance: everything between a layer's projections and its attention, in one launch (see ../advance.py).
//
// Bytes at one token of CSA: 64 queries and 64 index queries read and written, 160 KB; projections 21 KB; the rings' rows as
// in compress.cu. All latency.
// Measured on an H200, in a CUDA graph, one launch after another (behind a kernel that sweeps the L2: 1 us more), 1 and 32
// tokens: within a block CSA 1.7 and 4.2 us, HCA 1.4 and 5.9, window 1.4 and 2.7; at a block's end CSA 4.1 and 5.5, HCA 6.7
// and 18.9 (all tokens at once). Compact formats add up to 0.2 us, at 32 tokens with an indexer 0.4.
//
// Blocks by role, none needs another: for each token PARTS blocks advance the compressor (and one the indexer's); then come
// rows of channels, LANES lanes a row: keys, queries, the indexer's queries. Before the wait for the previous kernel they
// read positions and slots, which nothing that may still be running writes, compute the angles, and have brought to the L2
// what they will read of the rings.
//
// Defines: DIM, ROPE, THREADS; RATE (0: no compressor), OVERLAP, PARTS; INDEX_DIM (0: no indexer); KV, the Format of ring
// and entries; KEYS, that of the index keys.
#include "compress.cuh"
#include "hopper.cuh"
#include "rope.cuh"

DEVICE constexpr int lanes_of(int width) { return width <= 8 ? 1 : width >= 256 ? 32 : 2 * lanes_of((width + 1) / 2); }

KERNEL __launch_bounds__(THREADS, 2)
advance(const uint4* q_all, const uint4* y, const float* z, const float* __restrict__ kv_norm, const float* __restrict__ inv_freq,
        const i64* __restrict__ positions, const i64* __restrict__ slots, uint4* ring, uint4* q, uint4* kv, int tokens, int heads,
        int q_pitch, int y_pitch, int y_first, int z_pitch, int window, float eps, int write,
        const float* __restrict__ ape, const float* __restrict__ norm, float* c_ring, float* z_ring, u32* entries, int capacity,
        const float* __restrict__ index_ape, const float* __restrict__ index_norm, float* index_c_ring, float* index_z_ring,
        u32* index_entries, int index_capacity, int index_heads, float index_scale, uint4* index_q, float* index_weights) {
  let_next_kernel_start();
  int block = blockIdx.x;
#if RATE
  typedef Compressor<DIM, OVERLAP, RATE, ROPE, PARTS, THREADS, KV> Main;
  __shared__ __align__(16) typename Main::Shared shared;
  if (PARTS > 1) cluster_arrive();
  if (block < tokens * PARTS) {
    Main main = {z, z + Main::WIDTH, z_pitch, ape, norm, inv_freq, c_ring, z_ring, entries, capacity, eps, block % PARTS, shared, false, 0};
    main.advance(block / PARTS, positions, slots, tokens, write);
    return;
  }
  block -= tokens * PARTS;
#endif
#if INDEX_DIM
  typedef Compressor<INDEX_DIM, OVERLAP, RATE, ROPE, 1, THREADS, KEYS> Index;
  __shared__ __align__(16) typename Index::Shared index_shared;
  const float* const index_z = z + 2 * Main::WIDTH;
  if (block < tokens) {
    Index index = {index_z, index_z + Index::WIDTH, z_pitch, index_ape, index_norm, inv_freq, index_c_ring, index_z_ring,
                   index_entries, index_capacity, eps, 0, index_shared, false, 0};
    index.advance(block, positions, slots, tokens, write);
    return;
  }
  block -= tokens;
#endif

  // Rows past the last one are the last one again, and leave nothing.
  constexpr int LANES = lanes_of(DIM), ROWS = THREADS / LANES;
  Row<DIM, ROPE, LANES> row;
  if (block < (tokens + ROWS - 1) / ROWS) {
    const int at = block * ROWS + threadIdx.x / LANES;
    const i64 token = min(at, tokens - 1), slot = slots[token], position = positions[token], index = position % window;
    row.prepare(position, inv_freq);
    wait_for_previous_kernel();
    row.load(y + token * y_pitch + y_first);
    row.normalise(eps);
    row.multiply(kv_norm);
    row.turn();
    const bool keep = write && slot >= 0 && at < tokens;
    row.put<KV>(ring, slot, window, index, keep);
    if (at < tokens) row.store(kv + token * (DIM / 8));
    return;
  }
  block -= (tokens + ROWS - 1) / ROWS;
  if (block < (tokens * heads + ROWS - 1) / ROWS) {
    const int at = block * ROWS + threadIdx.x / LANES, from = min(at, tokens * heads - 1);
    const i64 token = from / heads;
    row.prepare(positions[token], inv_freq);
    wait_for_previous_kernel();
    row.load(q_all + token * q_pitch + from % heads * (DIM / 8));
    row.normalise(eps);
    row.turn();
    if (at == from) row.store(q + static_cast<i64>(from) * (DIM / 8));
    return;
  }
#if INDEX_DIM
  block -= (tokens * heads + ROWS - 1) / ROWS;
  constexpr int INDEX_LANES = lanes_of(INDEX_DIM), INDEX_ROWS = THREADS / INDEX_LANES;
  if (block < (tokens * index_heads + INDEX_ROWS - 1) / INDEX_ROWS) {
    const int at = block * INDEX_ROWS + threadIdx.x / INDEX_LANES, from = min(at, tokens * index_heads - 1), head = from % index_heads;
    const i64 token = from / index_heads;
    Row<INDEX_DIM, ROPE, INDEX_LANES> index_row;
    index_row.prepare(positions[token], inv_freq);
    wait_for_previous_kernel();
    index_row.load(q_all + token * q_pitch + heads * (DIM / 8) + head * (INDEX_DIM / 8));
    const float weight = index_z[token * z_pitch + 2 * Index::WIDTH + head];
    index_row.turn();
    index_row.make_query<KEYS>();
    if (at != from) return;
    index_row.store(index_q + static_cast<i64>(from) * (INDEX_DIM / 8));
    if (threadIdx.x % INDEX_LANES == 0) index_weights[from] = weight * index_scale;
    return;
  }
#endif
  wait_for_previous_kernel();
}
