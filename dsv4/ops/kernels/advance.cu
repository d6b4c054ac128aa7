// advance: everything between a layer's projections and its attention, in one launch (see ../advance.py).
//
// Bytes at one token of CSA: 64 queries and 64 index queries read and written, 160 KB; projections 21 KB; the rings' rows as
// in compress.cu. All latency.
// Measured on an H200, in a CUDA graph, one launch after another, 1, 8 and 32 tokens: within a block CSA 1.3, 1.5 and 2.4 us, HCA
// 1.3, 1.7 and 2.5; at a block's end, 32 tokens at once, CSA 5.5 and HCA 36 (four tokens a cluster; one a cluster 19). 4096
// tokens of one sequence: CSA 284 us, HCA 225. What bounds several tokens is how many blocks run at a time: two a multiprocessor,
// or 30 clusters of 8; with one token a cluster and one head a warp HCA took three turns of the GPU at 32 tokens, 5.3 us.
//
// Blocks by role, none needs another: for every `share` tokens PARTS blocks advance the compressor (and one the indexer's); then
// come rows of channels, LANES lanes a row: keys, queries, the indexer's queries. Before the wait for the previous kernel they
// read positions and slots, which nothing that may still be running writes, compute the angles, and have brought to the L2
// what they will read of the rings.
//
// Defines: DIM, ROPE, THREADS, HEADS (of a warp, one after another); RATE (0: no compressor), OVERLAP, PARTS; INDEX_DIM (0: no
// indexer); KV, the Format of ring and entries; KEYS, that of the index keys.
#include "compress.cuh"
#include "hopper.cuh"
#include "rope.cuh"

DEVICE constexpr int lanes_of(int width) { return width <= 8 ? 1 : width >= 256 ? 32 : 2 * lanes_of((width + 1) / 2); }

KERNEL __launch_bounds__(THREADS, 2)
advance(const uint4* q_all, const uint4* y, const float* z, const float* __restrict__ kv_norm, const float* __restrict__ inv_freq,
        const i64* __restrict__ positions, const i64* __restrict__ slots, uint4* ring, uint4* q, uint4* kv, int tokens, int heads,
        int q_pitch, int y_pitch, int y_first, int z_pitch, int window, float eps, int write, int share,
        const float* __restrict__ ape, const float* __restrict__ norm, float* c_ring, float* z_ring, u32* entries, int capacity,
        const float* __restrict__ index_ape, const float* __restrict__ index_norm, float* index_c_ring, float* index_z_ring,
        u32* index_entries, int index_capacity, int index_heads, float index_scale, uint4* index_q, float* index_weights) {
  let_next_kernel_start();
  int block = blockIdx.x;
#if RATE
  typedef Compressor<DIM, OVERLAP, RATE, ROPE, PARTS, THREADS, KV> Main;
  __shared__ __align__(16) typename Main::Shared shared;
  if (PARTS > 1) cluster_arrive_relaxed();
  const int shares = (tokens + share - 1) / share;
  if (block < shares * PARTS) {
    Main main = {z, z + Main::WIDTH, z_pitch, ape, norm, inv_freq, c_ring, z_ring, entries, capacity, eps, block % PARTS, shared, false, 0};
    main.advance(block / PARTS * share, share, positions, slots, tokens, write);
    return;
  }
  block -= shares * PARTS;
#endif
#if INDEX_DIM
  typedef Compressor<INDEX_DIM, OVERLAP, RATE, ROPE, 1, THREADS, KEYS> Index;
  __shared__ __align__(16) typename Index::Shared index_shared;
  const float* const index_z = z + 2 * Main::WIDTH;
  if (block < shares) {
    Index index = {index_z, index_z + Index::WIDTH, z_pitch, index_ape, index_norm, inv_freq, index_c_ring, index_z_ring,
                   index_entries, index_capacity, eps, 0, index_shared, false, 0};
    index.advance(block * share, share, positions, slots, tokens, write);
    return;
  }
  block -= shares;
#endif

  // Rows past the last one are the last one again, and leave nothing.
  constexpr int LANES = lanes_of(DIM), ROWS = THREADS / LANES;
  typedef Row<DIM, ROPE, LANES> Wide;
  if (block < (tokens + ROWS - 1) / ROWS) {
    const int at = block * ROWS + threadIdx.x / LANES;
    const i64 token = min(at, tokens - 1), slot = slots[token], position = positions[token], index = position % window;
    const Angles<DIM, ROPE, LANES> angles(position, inv_freq);
    Wide row;
    wait_for_previous_kernel();
    row.load(y + token * y_pitch + y_first);
    row.normalise(eps);
    row.multiply(kv_norm);
    row.turn(angles);
    const bool keep = write && slot >= 0 && at < tokens;
    row.put<KV>(ring, slot, window, index, keep);
    if (at < tokens) row.store(kv + token * (DIM / 8));
    return;
  }
  block -= (tokens + ROWS - 1) / ROWS;
  // Now HEADS rows in the same lanes.
  const int units = tokens * heads / HEADS;
  if (block < (units + ROWS - 1) / ROWS) {
    const int at = block * ROWS + threadIdx.x / LANES, from = min(at, units - 1) * HEADS;
    const i64 token = from / heads;
    const Angles<DIM, ROPE, LANES> angles(positions[token], inv_freq);
    Wide rows[HEADS];
    wait_for_previous_kernel();
#pragma unroll
    for (int e = 0; e < HEADS; ++e) rows[e].load(q_all + token * q_pitch + (from % heads + e) * (DIM / 8));
#pragma unroll
    for (int e = 0; e < HEADS; ++e) {
      rows[e].normalise(eps);
      rows[e].turn(angles);
      if (at < units) rows[e].store(q + (static_cast<i64>(from) + e) * (DIM / 8));
    }
    return;
  }
#if INDEX_DIM
  block -= (units + ROWS - 1) / ROWS;
  constexpr int INDEX_LANES = lanes_of(INDEX_DIM), INDEX_ROWS = THREADS / INDEX_LANES;
  static_assert(HEADS <= INDEX_LANES, "a lane has one weight at most");
  const int index_units = tokens * index_heads / HEADS;
  if (block < (index_units + INDEX_ROWS - 1) / INDEX_ROWS) {
    const int at = block * INDEX_ROWS + threadIdx.x / INDEX_LANES, from = min(at, index_units - 1) * HEADS, head = from % index_heads;
    const i64 token = from / index_heads;
    const Angles<INDEX_DIM, ROPE, INDEX_LANES> angles(positions[token], inv_freq);
    Row<INDEX_DIM, ROPE, INDEX_LANES> rows[HEADS];
    wait_for_previous_kernel();
#pragma unroll
    for (int e = 0; e < HEADS; ++e) rows[e].load(q_all + token * q_pitch + heads * (DIM / 8) + (head + e) * (INDEX_DIM / 8));
    const int own = threadIdx.x % INDEX_LANES;
    const float weight = own < HEADS ? index_z[token * z_pitch + 2 * Index::WIDTH + head + own] : 0.f;
#pragma unroll
    for (int e = 0; e < HEADS; ++e) {
      rows[e].turn(angles);
      rows[e].make_query<KEYS>();
      if (at < index_units) rows[e].store(index_q + (static_cast<i64>(from) + e) * (INDEX_DIM / 8));
    }
    if (at < index_units && own < HEADS) index_weights[from + own] = weight * index_scale;
    return;
  }
#endif
  wait_for_previous_kernel();
}
