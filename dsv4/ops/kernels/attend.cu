// attend: one query token's heads over window rows and compressed entries, read in place (see ../attend.py).
//
// Bytes a token: N keys x DIM x 2 once from memory (640 keys x 1 KB = 0.66 MB: 0.15 us at 4.25 TB/s; 8192: 8.4 MB, 2 us),
// q and out 64 KB each at 64 heads. At one token everything is latency: launch, position, index, row, two products, exchange.
//
// A cluster of CLUSTER CTAs has one token and HB heads. Its keys (listed entries first, then the window) go to the CTAs
// in turn: key j to CTA j % CLUSTER. In a CTA four warps fetch tiles of KT key rows; the others multiply. Every warp owns a slice of DIM, for both products: logits are summed over slices in shared memory,
// and of the output a warp holds its own columns. So it reads each key row's slice twice from shared memory, and the
// query's slice stays in registers. At the end each CTA sums one part of DIM over the cluster, in rank order.
#include "hopper.cuh"

// (One bulk copy a row was three times slower than this: lanes issue them one after another, 75 cycles each.)
// Measured on an H200, in a CUDA graph, rows cold: 64 heads and 640 keys 8.6 us (8 tokens 13.9, 32 tokens 23.2), 160 keys
// 7.7 to 8.6, 1152 keys 10.7, 8320 keys 23.8; 128 heads and 1152 keys 11.0. Of 8.6 us about 3 are the wait for the rows (a
// tile takes 5000 cycles to come, whatever its size), 1.5 the exchange; the products are 0.6 and the softmax 0.3.
// Given: DIM, MH (m16 tiles a warp), WH (warps over heads), WD (warps over DIM), KT (keys a tile), STAGES, CLUSTER, SHARED.
constexpr int WARPS = WH * WD, CONSUMERS = 32 * WARPS, FETCHERS = 128, HB = 16 * MH * WH;
constexpr int SLICE = DIM / WD, KSTEPS = SLICE / 16, NTILES = SLICE / 8;
constexpr int GROUP = CONSUMERS / HB;            // threads a head in the softmax
constexpr int ROW = DIM * 2 + 16;                // bytes of a row in shared memory: eight rows fall into different banks
constexpr int PART = KT + 8, PROB = KT + 8, OUT = DIM + 8;
constexpr int PER_LANE = KT / 32;
constexpr int STEP = MH == 1 ? 2 : 1;            // 16 keys times this are multiplied by the query at once
constexpr float LOG2E = 1.4426950408889634f;

DEVICE constexpr int max2(int a, int b) { return a > b ? a : b; }
constexpr int AT_KEYS = HB * ROW;                                              // after the query
constexpr int AT_PART = max2(AT_KEYS + STAGES * KT * ROW, HB * OUT * 4);       // the output takes the place of both
constexpr int AT_PROB = AT_PART + WD * HB * PART * 4;
constexpr int AT_CORR = AT_PROB + HB * PROB * 2;
constexpr int AT_SINK = AT_CORR + HB * 4;
constexpr int AT_STATS = AT_SINK + HB * 4;                                     // float2 [CLUSTER][HB]
constexpr int AT_TURN = AT_STATS + CLUSTER * HB * 8;                           // float2 [DIM / 2]
constexpr int AT_LIST = AT_TURN + DIM * 4;                                     // row addresses [FETCHERS / 32][KT]
constexpr int AT_COUNT = AT_LIST + FETCHERS / 4 * KT;
constexpr int AT_BARRIER = AT_COUNT + 16 * STAGES;
static_assert(AT_BARRIER + 8 * (1 + 2 * STAGES) <= SHARED, "SHARED is too small");
static_assert(DIM % (16 * WD) == 0 && KT % 32 == 0 && KT >= 2 * GROUP && GROUP <= 32 && SLICE >= 16, "tile shape");

KERNEL __launch_bounds__(CONSUMERS + FETCHERS, 1)
attend(const bf16* __restrict__ q, const bf16* __restrict__ kv, const bf16* __restrict__ ring, const bf16* __restrict__ entries,
       const int* __restrict__ indices, const float* __restrict__ sinks, const float* __restrict__ inv_freq,
       const i64* __restrict__ positions, const i64* __restrict__ slots, bf16* __restrict__ out,
       int heads, int window, int blocks, int picks, int rate, int pairs, float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 base = shared_address(memory);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const u32 rank = cluster_rank();
  const int groups = (heads + HB - 1) / HB, work = blockIdx.x / CLUSTER;
  const i64 token = work / groups;
  const int head0 = (work % groups) * HB, active = min(HB, heads - head0);
  const int listed_max = indices ? picks : 0;

  const u32 q_ready = base + AT_BARRIER;
  auto full = [&](int s) { return q_ready + 8 + 8 * s; };
  auto empty = [&](int s) { return q_ready + 8 + 8 * (STAGES + s); };
  auto count_of = [&](int s) -> volatile int* { return reinterpret_cast<volatile int*>(memory + AT_COUNT) + s; };
  if (tid == 0) {
    barrier_init(q_ready, FETCHERS);
    for (int s = 0; s < STAGES; ++s) { barrier_init(full(s), FETCHERS + 1); barrier_init(empty(s), WARPS); }
    barrier_init_done();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();

  // The first tile's picks do not depend on the position: fetch them together with it.
  int ahead[PER_LANE];
  auto fetch_picks = [&](int tile) {
    #pragma unroll
    for (int u = 0; u < PER_LANE; ++u) {
      const int j = (tile * KT + u * 32 + lane) * CLUSTER + rank;
      ahead[u] = j < listed_max ? indices[token * picks + j] : -1;
    }
  };
  if (warp >= WARPS) fetch_picks(0);
  const i64 slot = slots[token];
  const int position = (int)positions[token];
  if (slot < 0) {
    u32* rows = reinterpret_cast<u32*>(out + (token * heads + head0) * DIM);
    for (int i = rank * blockDim.x + tid; i < active * DIM / 2; i += CLUSTER * blockDim.x) rows[i] = 0;
    return;
  }
  __syncthreads();
  cluster_arrive();

  const int visible = entries ? min((position + 1) / rate, blocks) : 0;
  const int listed = indices ? picks : visible, recent = min(window, position + 1), total = listed + recent;
  const int mine = total > (int)rank ? (total - (int)rank + CLUSTER - 1) / CLUSTER : 0, tiles = (mine + KT - 1) / KT;
  float m = NEG_INF, l = 0.f;  // of head tid / GROUP, in units of log2; l is this thread's share
  float o[MH][NTILES][4];
  const int wd = warp % WD, wh = warp / WD, g = lane >> 2, t = lane & 3;

  if (warp >= WARPS) {  // --- the fetching warps ---
    const int fetcher = warp - WARPS;
    for (int i = tid - CONSUMERS; i < active * (DIM / 8); i += FETCHERS)
      copy_16(base + i / (DIM / 8) * ROW + i % (DIM / 8) * 16, q + (token * heads + head0) * DIM + i * 8);
    barrier_arrive_after_copies(q_ready);
    const bf16** list = reinterpret_cast<const bf16**>(memory + AT_LIST) + fetcher * KT;  // each warp makes the whole list
    const int newest = position % window;
    for (int tile = 0; tile < tiles; ++tile) {
      const int s = tile % STAGES;
      const bf16* from[PER_LANE];
      int to[PER_LANE], count = 0;
      #pragma unroll
      for (int u = 0; u < PER_LANE; ++u) {
        const int i = tile * KT + u * 32 + lane, j = i * CLUSTER + rank;
        from[u] = nullptr;
        if (i < mine) {
          if (j < listed) {
            const int entry = indices ? ahead[u] : j;
            if (entry >= 0 && entry < visible) from[u] = entries + (slot * blocks + entry) * DIM;
          } else {
            const int d = j - listed;
            const i64 row = token - d;
            int at = newest - d;
            if (at < 0) at += window;
            from[u] = ring + (slot * window + at) * DIM;
            if (row >= 0 && slots[row] == slot && positions[row] == position - d) from[u] = kv + row * DIM;
          }
        }
        const u32 present = __ballot_sync(~0u, from[u] != nullptr);
        to[u] = count + __popc(present & ((1u << lane) - 1));
        count += __popc(present);
      }
      fetch_picks(tile + 1);
      // Rows up to a multiple of 16 are multiplied by probability 0, so they must be finite: the token's own row.
      const int padded = (count + 15) & ~15;
      #pragma unroll
      for (int u = 0; u < PER_LANE; ++u)
        if (from[u]) list[to[u]] = from[u];
      if (lane < padded - count) list[count + lane] = kv + token * DIM;
      __syncwarp();
      if (tile >= STAGES) barrier_wait(empty(s), (tile / STAGES - 1) & 1);
      const u32 stage = base + AT_KEYS + s * KT * ROW;
      #pragma unroll 4
      for (int r = fetcher; r < padded; r += FETCHERS / 32) {
        const bf16* row = list[r];
        #pragma unroll
        for (int c = lane; c < DIM / 8; c += 32) copy_16(stage + r * ROW + c * 16, row + c * 8);
      }
      barrier_arrive_after_copies(full(s));
      if (warp == WARPS && lane == 0) {
        *count_of(s) = count;
        barrier_arrive(full(s));
      }
      __syncwarp();
    }
    if (fetcher == 0) {
      for (int h = lane; h < active; h += 32) reinterpret_cast<float*>(memory + AT_SINK)[h] = sinks[head0 + h] * LOG2E;
    } else if (fetcher == 1) {
      for (int i = lane; i < pairs; i += 32) {
        float2* turn = reinterpret_cast<float2*>(memory + AT_TURN) + i;
        rope_cos_sin(position, inv_freq[i], &turn->x, &turn->y);
      }
    }
  } else {  // --- the multiplying warps ---
    #pragma unroll
    for (int i = 0; i < MH; ++i)
      #pragma unroll
      for (int n = 0; n < NTILES; ++n)
        #pragma unroll
        for (int c = 0; c < 4; ++c) o[i][n][c] = 0.f;
    u32 query[MH][KSTEPS][4];
    barrier_wait(q_ready, 0);
    #pragma unroll
    for (int i = 0; i < MH; ++i)
      #pragma unroll
      for (int k = 0; k < KSTEPS; ++k)
        load_matrices(query[i][k], base + ((wh * MH + i) * 16 + (lane & 15)) * ROW + (wd * SLICE + k * 16 + (lane >> 4) * 8) * 2);

    for (int tile = 0; tile < tiles; ++tile) {
      const int s = tile % STAGES;
      barrier_wait(full(s), (tile / STAGES) & 1);
      const int count = *count_of(s);
      const u32 stage = base + AT_KEYS + s * KT * ROW + wd * SLICE * 2;
      if (count > 0) {
        // Logits of this slice; rows past `count` give rubbish that the softmax leaves out.
        float* part = reinterpret_cast<float*>(memory + AT_PART) + (wd * HB + wh * MH * 16 + g) * PART + 2 * t;
        for (int key = 0; key < count; key += 16 * STEP) {
          float acc[MH][2 * STEP][4] = {};
          const u32 at = stage + (key + (lane & 7) + (lane >> 4) * 8) * ROW + ((lane >> 3) & 1) * 16;
          #pragma unroll
          for (int k = 0; k < KSTEPS; ++k) {
            u32 b[STEP][4];
            #pragma unroll
            for (int n = 0; n < STEP; ++n) load_matrices(b[n], at + n * 16 * ROW + k * 32);
            #pragma unroll
            for (int i = 0; i < MH; ++i)
              #pragma unroll
              for (int n = 0; n < 2 * STEP; ++n) mma_bf16(acc[i][n], query[i][k], b[n >> 1][(n & 1) * 2], b[n >> 1][(n & 1) * 2 + 1]);
          }
          #pragma unroll
          for (int i = 0; i < MH; ++i)
            #pragma unroll
            for (int n = 0; n < 2 * STEP; ++n) {
              float* p = part + i * 16 * PART + key + n * 8;
              *reinterpret_cast<float2*>(p) = make_float2(acc[i][n][0], acc[i][n][1]);
              *reinterpret_cast<float2*>(p + 8 * PART) = make_float2(acc[i][n][2], acc[i][n][3]);
            }
        }
        barrier(1, CONSUMERS);
        // Softmax, running over tiles: GROUP threads a head, two neighbouring keys at a time.
        {
          const int head = tid / GROUP, c = tid % GROUP;
          constexpr int STEPS = KT / (2 * GROUP);
          float2 x[STEPS];
          float top = NEG_INF;
          #pragma unroll
          for (int u = 0; u < STEPS; ++u) {
            const int key = (u * GROUP + c) * 2;
            const float* p = reinterpret_cast<const float*>(memory + AT_PART) + head * PART + key;
            float2 sum = make_float2(0.f, 0.f);
            #pragma unroll
            for (int w = 0; w < WD; ++w) {
              const float2 v = *reinterpret_cast<const float2*>(p + w * HB * PART);
              sum.x += v.x;
              sum.y += v.y;
            }
            x[u].x = key < count ? sum.x * scale : NEG_INF;
            x[u].y = key + 1 < count ? sum.y * scale : NEG_INF;
            top = fmaxf(top, fmaxf(x[u].x, x[u].y));
          }
          #pragma unroll
          for (int i = GROUP / 2; i; i >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
          top = fmaxf(m, top);
          const float zero = top == NEG_INF ? 0.f : top, corr = exp2f(m - zero);
          m = top;
          l *= corr;
          #pragma unroll
          for (int u = 0; u < STEPS; ++u) {
            const u32 p = pack_bf16(exp2f(x[u].x - zero), exp2f(x[u].y - zero));
            l += bf16_low(p) + bf16_high(p);
            reinterpret_cast<u32*>(memory + AT_PROB + head * PROB * 2)[u * GROUP + c] = p;
          }
          if (c == 0) reinterpret_cast<float*>(memory + AT_CORR)[head] = corr;
        }
        barrier(1, CONSUMERS);
        if (tile > 0) {
          #pragma unroll
          for (int i = 0; i < MH; ++i) {
            const float* corr = reinterpret_cast<const float*>(memory + AT_CORR) + (wh * MH + i) * 16 + g;
            const float low = corr[0], high = corr[8];
            #pragma unroll
            for (int n = 0; n < NTILES; ++n) {
              o[i][n][0] *= low;
              o[i][n][1] *= low;
              o[i][n][2] *= high;
              o[i][n][3] *= high;
            }
          }
        }
        for (int key = 0; key < count; key += 16) {
          u32 p[MH][4];
          #pragma unroll
          for (int i = 0; i < MH; ++i)
            load_matrices(p[i], base + AT_PROB + (((wh * MH + i) * 16 + (lane & 15)) * PROB + key + (lane >> 4) * 8) * 2);
          const u32 at = stage + (key + (lane & 15)) * ROW + (lane >> 4) * 16;
          #pragma unroll
          for (int n = 0; n < NTILES; n += 2) {
            u32 b[4];
            load_matrices_transposed(b, at + n * 16);
            #pragma unroll
            for (int i = 0; i < MH; ++i) {
              mma_bf16(o[i][n], p[i], b[0], b[1]);
              mma_bf16(o[i][n + 1], p[i], b[2], b[3]);
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty(s));
    }
    #pragma unroll
    for (int i = GROUP / 2; i; i >>= 1) l += __shfl_xor_sync(~0u, l, i);
  }

  // --- the cluster's sum ---
  __syncwarp();
  cluster_wait();  // every CTA of the cluster has started
  if (warp < WARPS) {
    const int head = tid / GROUP;
    for (int r = tid % GROUP; r < CLUSTER; r += GROUP)
      peer_store(peer_address(base + AT_STATS + (rank * HB + head) * 8, r), make_float2(m, l));
    barrier(1, CONSUMERS);  // nobody reads keys any more
    float* rows = reinterpret_cast<float*>(memory) + (wh * MH * 16 + g) * OUT + wd * SLICE + 2 * t;
    #pragma unroll
    for (int i = 0; i < MH; ++i)
      #pragma unroll
      for (int n = 0; n < NTILES; ++n) {
        float* p = rows + i * 16 * OUT + n * 8;
        *reinterpret_cast<float2*>(p) = make_float2(o[i][n][0], o[i][n][1]);
        *reinterpret_cast<float2*>(p + 8 * OUT) = make_float2(o[i][n][2], o[i][n][3]);
      }
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  constexpr int SHARE = (DIM / 2 + CLUSTER - 1) / CLUSTER;  // channel pairs of this CTA
  for (int i = tid; i < active * SHARE; i += CONSUMERS + FETCHERS) {
    const int head = i / SHARE, pair = rank * SHARE + i % SHARE;
    if (pair >= DIM / 2) continue;
    float2 part[CLUSTER], stats[CLUSTER];
    #pragma unroll
    for (int r = 0; r < CLUSTER; ++r) part[r] = peer_load(peer_address(base + (head * OUT + 2 * pair) * 4, r));
    const float sink = reinterpret_cast<const float*>(memory + AT_SINK)[head];
    float top = sink;
    #pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      stats[r] = reinterpret_cast<const float2*>(memory + AT_STATS)[r * HB + head];
      top = fmaxf(top, stats[r].x);
    }
    float sum = exp2f(sink - top), even = 0.f, odd = 0.f;
    #pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float f = exp2f(stats[r].x - top);
      sum += f * stats[r].y;
      even += f * part[r].x;
      odd += f * part[r].y;
    }
    even /= sum;
    odd /= sum;
    const int turned = pair - (DIM / 2 - pairs);
    if (turned >= 0) {
      const float2 turn = reinterpret_cast<const float2*>(memory + AT_TURN)[turned];
      const float x = even * turn.x + odd * turn.y;
      odd = odd * turn.x - even * turn.y;
      even = x;
    }
    reinterpret_cast<u32*>(out + (token * heads + head0 + head) * DIM)[pair] = pack_bf16(even, odd);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();  // nobody reads this CTA's memory any more
}
