// Pooling of finished blocks of tokens, for compress.cu and advance.cu.
//
// Of one token Parts thread blocks, a cluster if more than one, have Dim / Parts channels each; they meet for the norm only.
// A run is the tokens of one slot in the batch, its head the first of them. Reading a ring row before it is overwritten
// needs order between blocks only if two of them touch one slot's ring, so only the head's blocks do: they pool the (at most
// two) entries that reach back before the run, then write the run's last rows to the rings. A later token pools only what
// lies within the batch. Within a block the rows are split over GROUPS groups of threads, four channels a thread, each with a
// running maximum, combined in a fixed order: an entry has the same bits however its tokens came.
#ifndef DSV4_COMPRESS
#define DSV4_COMPRESS
#include "row_formats.cuh"

DEVICE constexpr int least(int a, int b) { return a < b ? a : b; }
DEVICE constexpr int power_of_two_up_to(int x) { return x < 2 ? 1 : 2 * power_of_two_up_to(x / 2); }

// Parts > 1: every block calls cluster_arrive_relaxed before anything else. Kind: the Format of the entries.
template <int Dim, bool Overlap, int Rate, int Turned, int Parts, int Threads, int Kind>
struct Compressor {
  static constexpr int WIDTH = Overlap ? 2 * Dim : Dim, DEPTH = Overlap ? 2 * Rate : Rate;
  static constexpr int SLICE = Dim / Parts, QUADS = SLICE / 4, GROUPS = least(DEPTH, Threads / QUADS);
  static constexpr int PAIRS = SLICE / 2, LANES = power_of_two_up_to(least(least(32, GROUPS), Threads / PAIRS));
  static constexpr int BATCH = least(4, (DEPTH + GROUPS - 1) / GROUPS);  // rows that a thread loads at once
  static constexpr int HALVES = WIDTH / Dim, COLUMNS = HALVES * QUADS;  // of a block, in vectors of four
  static_assert(Kind == PLAIN || Parts == 1 || SLICE % 64 == 0, "");  // a group lies in one block
  static_assert(Dim % (4 * Parts) == 0 && Turned % 2 == 0 && Turned <= Dim && Threads % 32 == 0 && PAIRS <= Threads, "");

  struct Shared {
    float tops[GROUPS * SLICE], totals[GROUPS * SLICE], values[GROUPS * SLICE];
    float scratch[Threads / 32], squares[2][Parts];
    int run_end[1];
  };

  const float *c, *z;  // of the batch: rows `pitch` floats apart
  i64 pitch;
  const float *ape, *norm, *inv_freq;
  float *c_ring, *z_ring;
  u32* entries;
  int capacity;
  float eps;
  int part;
  Shared& shared;
  bool peers_ready;
  int pooled;  // entries so far

  // The first position that the entry of the block with `position` needs.
  static DEVICE i64 first_needed(i64 position) {
    const i64 block = position / Rate - Overlap;
    return block > 0 ? block * Rate : 0;
  }
  // Where a vector of this block's stands in a row: `half` 1 are the second halves.
  DEVICE int column(int half, int quad) const { return half * Dim + part * SLICE + quad * 4; }

  DEVICE float block_total(float square) {
    const float own = block_sum<Threads / 32>(square, shared.scratch, 0);
    if (Parts == 1) return own;
    if (!peers_ready) cluster_wait();
    peers_ready = true;
    float* squares = shared.squares[pooled & 1];  // a block may be one entry ahead of another, not two
    if (threadIdx.x < Parts) store_remote(squares + part, threadIdx.x, own);
    cluster_arrive();
    cluster_wait();
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < Parts; ++p) sum += squares[p];
    return sum;
  }

  // Pool the block that token `row` at `position` completes; its tokens from row `first` on are in the batch.
  DEVICE void pool(i64 slot, i64 position, int row, int first) {
    const i64 block = position / Rate;
    const int pair = threadIdx.x / LANES, lane = threadIdx.x % LANES, channel = part * SLICE + 2 * pair;
    const int turned = (channel - (Dim - Turned)) / 2;
    const bool mine = pair < PAIRS, turns = mine && channel >= Dim - Turned;
    float2 turn = make_float2(1.f, 0.f), weight = make_float2(0.f, 0.f);
    if (turns) rope_cos_sin(block * Rate, __ldg(inv_freq + turned), &turn.x, &turn.y);
    if (mine) weight = __ldg(reinterpret_cast<const float2*>(norm + channel));
    __syncthreads();
    const int quad = threadIdx.x % QUADS, group = threadIdx.x / QUADS;
    if (group < GROUPS) {
      float top[4] = {NEG_INF, NEG_INF, NEG_INF, NEG_INF}, total[4] = {}, value[4] = {};
      for (int first_row = group; first_row < DEPTH; first_row += GROUPS * BATCH) {
        float4 c4[BATCH], z4[BATCH];
        bool there[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {  // all on their way before the first is used
          const int j = first_row + n * GROUPS, within = j % Rate;
          const bool before = Overlap && j < Rate;  // of the previous block, whose first halves count
          const i64 at = (block - before) * Rate + within, source = row - (position - at);
          there[n] = j < DEPTH && at >= 0;
          const bool in_batch = source >= first;
          const int from = column(Overlap && !before, quad);
          const i64 offset = in_batch ? source * pitch + from : (slot * DEPTH + at % DEPTH) * WIDTH + from;
          float4 bias = make_float4(0.f, 0.f, 0.f, 0.f);
          if (there[n]) {
            c4[n] = *reinterpret_cast<const float4*>((in_batch ? c : c_ring) + offset);
            z4[n] = *reinterpret_cast<const float4*>((in_batch ? z : z_ring) + offset);
            if (in_batch) bias = __ldg(reinterpret_cast<const float4*>(ape + within * WIDTH + from));
            z4[n] = add4(z4[n], bias);
          }
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
          if (!there[n]) continue;
          const float gate[4] = {z4[n].x, z4[n].y, z4[n].z, z4[n].w}, candidate[4] = {c4[n].x, c4[n].y, c4[n].z, c4[n].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float higher = fmaxf(top[i], gate[i]), zero = higher == NEG_INF ? 0.f : higher;
            const float keep = expf(top[i] - zero), add = expf(gate[i] - zero);
            total[i] = fmaf(total[i], keep, add);
            value[i] = fmaf(value[i], keep, add * candidate[i]);
            top[i] = higher;
          }
        }
      }
      const int at = group * QUADS + quad;
      reinterpret_cast<float4*>(shared.tops)[at] = make_float4(top[0], top[1], top[2], top[3]);
      reinterpret_cast<float4*>(shared.totals)[at] = make_float4(total[0], total[1], total[2], total[3]);
      reinterpret_cast<float4*>(shared.values)[at] = make_float4(value[0], value[1], value[2], value[3]);
    }
    __syncthreads();

    // Two neighbouring channels in LANES lanes.
    auto pair_of = [&](const float* rows, int g) { return reinterpret_cast<const float2*>(rows)[g * PAIRS + pair]; };
    float2 top = make_float2(NEG_INF, NEG_INF), total = make_float2(0.f, 0.f), value = make_float2(0.f, 0.f);
    for (int g = lane; g < GROUPS && mine; g += LANES) {
      const float2 other = pair_of(shared.tops, g);
      top.x = fmaxf(top.x, other.x), top.y = fmaxf(top.y, other.y);
    }
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) {
      top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, step));
      top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, step));
    }
    for (int g = lane; g < GROUPS && mine; g += LANES) {
      const float2 other = pair_of(shared.tops, g), weights = pair_of(shared.totals, g), sums = pair_of(shared.values, g);
      const float first_keep = expf(other.x - top.x), second_keep = expf(other.y - top.y);
      total.x = fmaf(first_keep, weights.x, total.x), total.y = fmaf(second_keep, weights.y, total.y);
      value.x = fmaf(first_keep, sums.x, value.x), value.y = fmaf(second_keep, sums.y, value.y);
    }
    total.x = warp_sum<LANES>(total.x), total.y = warp_sum<LANES>(total.y);
    float even = warp_sum<LANES>(value.x), odd = warp_sum<LANES>(value.y), square = 0.f;
    if (mine) {
      even = round_bf16(even / total.x), odd = round_bf16(odd / total.y);
      if (lane == 0) square = fmaf(even, even, odd * odd);
    }
    const float scale = rsqrtf(block_total(square) * (1.f / Dim) + eps);
    ++pooled;
    even *= scale * weight.x, odd *= scale * weight.y;
    const u32 two = pack_bf16(even * turn.x - odd * turn.y, even * turn.y + odd * turn.x);
    const i64 index = block < capacity ? block : capacity - 1;
    if constexpr (Kind == PLAIN) {
      if (mine && lane == 0) entries[((slot * capacity + index) * Dim + channel) / 2] = two;
    } else {
      u32* const row = reinterpret_cast<u32*>(shared.values);  // whose last reader has passed block_total
      if (mine && lane == 0) row[pair] = two;
      __syncthreads();
      constexpr int CHUNKS = SLICE / 8;
      const int chunk = threadIdx.x;
      if (chunk >= (CHUNKS + 31) / 32 * 32) return;
      float eight[8];
      unpack8(chunk < CHUNKS ? reinterpret_cast<const uint4*>(row)[chunk] : make_uint4(0, 0, 0, 0), eight);
      CompactRow<Dim, Turned, Kind>(entries, slot, capacity, index).store(eight, part * CHUNKS + chunk, chunk < CHUNKS);
    }
  }

  // One row of `ape`, to be there when it is needed, and what an entry that the token completes needs of the rings.
  DEVICE void bring_near(i64 slot, i64 position) const {
    const int at = threadIdx.x;
    if (at < HALVES) prefetch_to_l2(ape + position % Rate * WIDTH + column(at, 0), SLICE * 4);
    if ((position + 1) % Rate) return;
    for (int i = at; i < 2 * DEPTH; i += Threads) {
      const int j = i / 2;
      const float* ring = i % 2 ? c_ring : z_ring;
      const bool before = Overlap && j < Rate;
      const i64 from = (position / Rate - before) * Rate + j % Rate;
      if (from >= 0) prefetch_to_l2(ring + (slot * DEPTH + from % DEPTH) * WIDTH + column(Overlap && !before, 0), SLICE * 4);
    }
  }

  // Advance the state by `count` tokens of the batch from `first` on, as far as there are, all threads. `single`: no slot has
  // two tokens in the batch. What comes before the wait reads nothing that a kernel which may still be running has written.
  DEVICE void advance(int first, int count, const i64* positions, const i64* slots, int tokens, bool single) {
    const int last = min(first + count, tokens), own = first + threadIdx.x / COLUMNS;  // the token whose rows this thread keeps
    const i64 slot = own < last ? slots[own] : -1, position = own < last ? positions[own] : 0;
    auto has_work = [&](int row) {
      if (row >= last || slots[row] < 0) return false;
      return (positions[row] + 1) % Rate == 0 || (!single && is_head(row, positions, slots));
    };
    u32 left = __ballot_sync(~0u, has_work(first + (threadIdx.x & 31)));
    for (int row = first; single && row < last; ++row)
      if (slots[row] >= 0) bring_near(slots[row], positions[row]);
    wait_for_previous_kernel();
    for (int start = first;;) {
#pragma unroll 1
      for (; left; left &= left - 1) advance_run(start + __ffs(left) - 1, positions, slots, tokens, single);
      start += 32;
      if (start >= last) break;
      left = __ballot_sync(~0u, has_work(start + (threadIdx.x & 31)));
    }
    if (!single) return;
    __syncthreads();
    if (slot >= 0) keep(slot, position, own, threadIdx.x % COLUMNS);
    for (int i = threadIdx.x + Threads; i < (last - first) * COLUMNS; i += Threads) {
      const int row = first + i / COLUMNS;
      if (slots[row] >= 0) keep(slots[row], positions[row], row, i % COLUMNS);
    }
  }

  static DEVICE bool is_head(int row, const i64* positions, const i64* slots) {
    return row == 0 || slots[row - 1] != slots[row] || positions[row - 1] != positions[row] - 1;
  }

  // What token `head` has to do that is the head of a run or completes a block: a head pools until an entry finds all in the
  // batch, then leaves the run's last rows in the rings; another token pools only such an entry. A single one only pools.
  DEVICE void advance_run(int head, const i64* positions, const i64* slots, int tokens, bool single) {
    const i64 slot = slots[head], position = positions[head];
    const bool heads = single || is_head(head, positions, slots);
    int end = head + 1;
    if (heads && !single) {
      __syncthreads();
      if (threadIdx.x == 0) shared.run_end[0] = tokens;
      __syncthreads();
      for (int start = head + 1; start < tokens; start += Threads) {
        const int row = start + threadIdx.x;
        const bool other = row < tokens && (slots[row] != slot || positions[row] != position + (row - head));
        if (other) atomicMin(shared.run_end, row);
        if (__syncthreads_or(other)) break;
      }
      end = shared.run_end[0];
    }
    for (int row = head + Rate - 1 - static_cast<int>(position % Rate); row < end; row += Rate) {
      const i64 at = position + (row - head), back = position - first_needed(position);
      if (row > head && first_needed(at) >= position) break;
      if (!heads && (back > head || slots[head - back] != slot || positions[head - back] != position - back)) break;
      pool(slot, at, row, heads ? head : 0);
    }
    if (!heads || single) return;
    __syncthreads();
    const int first = end - head > DEPTH ? end - DEPTH : head;
    for (int i = threadIdx.x; i < (end - first) * COLUMNS; i += Threads) {
      const int row = first + i / COLUMNS;
      keep(slot, position + (row - head), row, i % COLUMNS);
    }
  }

  // Four of this block's channels of a token to the rings.
  DEVICE void keep(i64 slot, i64 position, int row, int number) const {
    const int from = column(number / QUADS, number % QUADS);
    const i64 to = (slot * DEPTH + position % DEPTH) * WIDTH + from;
    const float4 gate = *reinterpret_cast<const float4*>(z + row * pitch + from);
    *reinterpret_cast<float4*>(c_ring + to) = *reinterpret_cast<const float4*>(c + row * pitch + from);
    const float4 bias = __ldg(reinterpret_cast<const float4*>(ape + position % Rate * WIDTH + from));
    *reinterpret_cast<float4*>(z_ring + to) = add4(gate, bias);
  }
};

#endif
