// compress: the compressor's state, and one entry for each block that the batch completes.
//
// Bytes at one token, CSA (d 512, width 1024): c, z, ape and the two ring rows 20 KB; at a block's last token 8 rows of
// halves, 32 KB. HCA (width 512): 10 KB, and at one token in 128 all of the ring, 512 KB. All latency.
// Measured on an H200 in a CUDA graph, of which a launch is about 1.5 us: within a block 1.5 us at 1 token, 2.0 at 32; at a
// block's end CSA 4.2 and 4.8, the indexer's 3.4 and 4.0, HCA 20 and 21 (one block a token, one token in 128).
//
// One block a token. A run is the tokens of one slot in the batch, its head the first of them. Reading a ring row before
// it is overwritten needs order between blocks only if two of them touch one slot's ring, so only the head's block does:
// it pools the (at most two) entries that reach back before the run, then writes the run's last rows to the rings. A later
// token pools only what lies within the batch. Within a block the rows are split over GROUPS groups of threads, four
// channels a thread, each with a running maximum, combined in a fixed order: an entry has the same bits however its tokens
// came.
//
// Defines: DIM (a multiple of 4), OVERLAP 0 or 1, RATE, ROPE, THREADS.
#include "common.cuh"

constexpr int WIDTH = OVERLAP ? 2 * DIM : DIM, DEPTH = OVERLAP ? 2 * RATE : RATE;
constexpr int QUADS = DIM / 4, GROUPS = THREADS / QUADS, ROW = WIDTH / 4;
static_assert(GROUPS >= 1 && DIM % 4 == 0 && ROPE % 2 == 0 && ROPE <= DIM && THREADS % 32 == 0, "");

struct Arguments {
  const float4 *c, *z, *ape;
  const float *norm_weight, *inv_freq;
  const float4 *c_ring, *z_ring;
  uint2* entries;
  int capacity;
  float eps;
};

// The first position that the entry of the block with `position` needs.
DEVICE i64 first_needed(i64 position) {
  const i64 block = position / RATE - OVERLAP;
  return block > 0 ? block * RATE : 0;
}

DEVICE float component(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Pool the block that token `row` at `position` completes; its tokens from row `first` on are in the batch.
DEVICE void pool(const Arguments& a, i64 slot, i64 position, int row, int first) {
  __shared__ float4 tops[GROUPS * QUADS], totals[GROUPS * QUADS], values[GROUPS * QUADS];
  __shared__ float scratch[THREADS / 32];
  const int quad = threadIdx.x % QUADS, group = threadIdx.x / QUADS;
  const i64 block = position / RATE;
  __syncthreads();
  if (group < GROUPS) {
    float top[4] = {NEG_INF, NEG_INF, NEG_INF, NEG_INF}, total[4] = {}, value[4] = {};
#pragma unroll 4
    for (int j = group; j < DEPTH; j += GROUPS) {
      const bool before = OVERLAP && j < RATE;  // of the previous block, whose first halves count
      const int within = j % RATE, column = (OVERLAP && !before ? QUADS : 0) + quad;
      const i64 at = (block - before) * RATE + within;
      if (at < 0) continue;
      const i64 source = row - (position - at);
      const bool in_batch = source >= first;
      const i64 offset = in_batch ? source * ROW + column : (slot * DEPTH + at % DEPTH) * ROW + column;
      const float4 c4 = (in_batch ? a.c : a.c_ring)[offset];
      const float4 z4 = (in_batch ? a.z : a.z_ring)[offset];
      const float4 p4 = in_batch ? a.ape[within * ROW + column] : make_float4(0.f, 0.f, 0.f, 0.f);
      const float z[4] = {z4.x + p4.x, z4.y + p4.y, z4.z + p4.z, z4.w + p4.w}, c[4] = {c4.x, c4.y, c4.z, c4.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float higher = fmaxf(top[i], z[i]);
        const float keep = expf(top[i] - higher), add = expf(z[i] - higher);
        total[i] = fmaf(total[i], keep, add);
        value[i] = fmaf(value[i], keep, add * c[i]);
        top[i] = higher;
      }
    }
    tops[threadIdx.x] = make_float4(top[0], top[1], top[2], top[3]);
    totals[threadIdx.x] = make_float4(total[0], total[1], total[2], total[3]);
    values[threadIdx.x] = make_float4(value[0], value[1], value[2], value[3]);
  }
  __syncthreads();

  float pooled[4] = {}, square = 0.f;
  if (group == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float top = NEG_INF, total = 0.f, value = 0.f;
      for (int g = 0; g < GROUPS; ++g) top = fmaxf(top, component(tops[g * QUADS + quad], i));
      for (int g = 0; g < GROUPS; ++g) {
        const float keep = expf(component(tops[g * QUADS + quad], i) - top);
        total = fmaf(keep, component(totals[g * QUADS + quad], i), total);
        value = fmaf(keep, component(values[g * QUADS + quad], i), value);
      }
      pooled[i] = round_bf16(value / total);
      square = fmaf(pooled[i], pooled[i], square);
    }
  }
  const float scale = rsqrtf(block_sum<THREADS / 32>(square, scratch, 0) * (1.f / DIM) + a.eps);
  if (group == 0) {
    const int channel = quad * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) pooled[i] = pooled[i] * scale * __ldg(a.norm_weight + channel + i);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      if (channel + i >= DIM - ROPE) {
        float c, s;
        rope_cos_sin(block * RATE, __ldg(a.inv_freq + (channel + i - (DIM - ROPE)) / 2), &c, &s);
        const float even = pooled[i], odd = pooled[i + 1];
        pooled[i] = even * c - odd * s;
        pooled[i + 1] = even * s + odd * c;
      }
    }
    const i64 entry = slot * a.capacity + (block < a.capacity ? block : a.capacity - 1);
    a.entries[entry * QUADS + quad] = make_uint2(pack_bf16(pooled[0], pooled[1]), pack_bf16(pooled[2], pooled[3]));
  }
}

KERNEL __launch_bounds__(THREADS)
    compress(const float4* c, const float4* z, const float4* ape, const float* norm_weight, const float* inv_freq,
             const i64* positions, const i64* slots, float4* c_ring, float4* z_ring, uint2* entries, int tokens,
             int capacity, float eps) {
  __shared__ int run_end[1];
  const int head = blockIdx.x;
  const Arguments a = {c, z, ape, norm_weight, inv_freq, c_ring, z_ring, entries, capacity, eps};
  wait_for_previous_kernel();
  const i64 slot = slots[head], position = positions[head];
  if (slot < 0) return;

  if (head > 0 && slots[head - 1] == slot && positions[head - 1] == position - 1) {  // not a head
    if ((position + 1) % RATE) return;
    const i64 back = position - first_needed(position);
    if (back > head || slots[head - back] != slot || positions[head - back] != position - back) return;
    pool(a, slot, position, head, 0);
    return;
  }

  if (threadIdx.x == 0) run_end[0] = tokens;
  __syncthreads();
  for (int start = head + 1; start < tokens; start += THREADS) {
    const int row = start + threadIdx.x;
    const bool other = row < tokens && (slots[row] != slot || positions[row] != position + (row - head));
    if (other) atomicMin(run_end, row);
    if (__syncthreads_or(other)) break;
  }
  const int end = run_end[0];
  for (int row = head + RATE - 1 - static_cast<int>(position % RATE); row < end; row += RATE) {
    const i64 at = position + (row - head);
    if (row > head && first_needed(at) >= position) break;  // these find all in the batch
    pool(a, slot, at, row, head);
  }
  __syncthreads();
  const int first = end - head > DEPTH ? end - DEPTH : head;
  for (int i = threadIdx.x; i < (end - first) * ROW; i += THREADS) {
    const int row = first + i / ROW, column = i % ROW;
    const i64 at = position + (row - head), from = static_cast<i64>(row) * ROW + column;
    const i64 to = (slot * DEPTH + at % DEPTH) * ROW + column;
    const float4 gate = z[from], bias = ape[at % RATE * ROW + column];
    c_ring[to] = c[from];
    z_ring[to] = make_float4(gate.x + bias.x, gate.y + bias.y, gate.z + bias.z, gate.w + bias.w);
  }
}
