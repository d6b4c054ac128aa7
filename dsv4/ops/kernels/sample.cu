// sample: penalty, temperature, top-k, top-p, min-p and the draw, one cluster of CLUSTER blocks a row.
//
// Bytes of a row at V = 129,280: logits 517 KB, and seen 129 KB if there is a penalty: 0.15 us at 4.25 TB/s. Greedy rows
// are latency and one exchange; unfiltered draws add Philox and two logarithms a token near the maximum; filtered rows
// add 12 exchanges for top-k and 13 for top-p.
// Measured on an H200 in a CUDA graph: 1 row greedy 3.5 us, plain draw 9.9, all three filters 71; 8 rows 5.1, 15, 101; 32 rows
// 10, 36, 204.
//
// A thread goes through the same quads of tokens in each pass; a filtered row's scaled logits lie in `scaled`. All three
// filters keep a prefix of the stably sorted row, so what is kept is what lies above a threshold, and of the tokens at it
// those below `cutoff`, which gives equal logits their order; the others become -inf. Thresholds are found by bisection on
// the ordered bits, three bits a step: seven sums over the cluster, in fixed order.
//
// Defines: V, THREADS, CLUSTER, FLOAT_LOGITS 0 (bf16) or 1.
#include "hopper.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int ROW = (V + 3) / 4;                                                // quads of a row
constexpr int QUADS = (ROW + THREADS * CLUSTER - 1) / (THREADS * CLUSTER);  // quads of a thread
static_assert(WARPS >= 8 && WARPS <= 32 && CLUSTER <= 16 && V <= 262144, "");

// Gumbel noise lies in (-2.82, 16.64): a token this far below the largest logit cannot win.
constexpr float REACH = 20.f;

struct Shared {
  float scratch[8][WARPS];
  alignas(16) float box[2][CLUSTER][8];  // what each block says, by the parity of the exchange
  u64 arrived[2];                        // completes when all blocks have
};

struct Cluster {
  Shared& shared;
  int rank, exchanges;
};

DEVICE u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float from_ordered(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// This thread's quad number q of the row; beyond the row if there is none.
DEVICE int quad_of(int q, int rank) { return (q * CLUSTER + rank) * THREADS + threadIdx.x; }

// An exchange: each block sends `bytes` to each block's box, which is returned once all of them are there. A box is used again
// two exchanges later, when every block has read it, since each has sent again.
DEVICE u32 next_barrier(Cluster& k) { return shared_address(&k.shared.arrived[k.exchanges & 1]); }
DEVICE float* next_box(Cluster& k) { return k.shared.box[k.exchanges & 1][k.rank]; }

DEVICE const float (*receive(Cluster& k, u32 bytes))[8] {
  const u32 barrier = next_barrier(k);
  if (threadIdx.x == 0) barrier_arrive_expecting(barrier, bytes * CLUSTER);
  barrier_wait_cluster(barrier, k.exchanges >> 1 & 1);
  return k.shared.box[k.exchanges++ & 1];
}

template <int Count>
DEVICE void cluster_sums(Cluster& k, float (&x)[Count]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    x[i] = warp_sum(x[i]);
    if (lane == 0) k.shared.scratch[i][warp] = x[i];
  }
  __syncthreads();
  if (warp < Count) {
    const float sum = warp_sum(lane < WARPS ? k.shared.scratch[warp][lane] : 0.f);
    if (lane < CLUSTER)
      peer_store_async(peer_address(shared_address(next_box(k) + warp), lane), sum,
                       peer_address(next_barrier(k), lane));
  }
  const float(*box)[8] = receive(k, Count * sizeof(float));
#pragma unroll
  for (int i = 0; i < Count; ++i) x[i] = 0.f;
#pragma unroll 2
  for (int r = 0; r < CLUSTER; ++r)
#pragma unroll
    for (int i = 0; i < Count; ++i) x[i] += box[r][i];
}

// A value and its token as one number: larger values first, then lower tokens.
DEVICE u64 candidate(float value, int token) { return (static_cast<u64>(ordered(value)) << 32) | (0x7fffffffu - token); }
DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }
DEVICE int candidate_token(u64 x) { return 0x7fffffff - static_cast<int>(x & 0xffffffffu); }
DEVICE float candidate_value(u64 x) { return from_ordered(static_cast<u32>(x >> 32)); }

DEVICE u64 warp_max64(u64 x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = larger(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// The largest candidate of the cluster, and log-sum-exp's parts of (top, sum) pairs merged.
DEVICE u64 cluster_best(Cluster& k, u64 best, float& top, float& sum) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  auto merge = [](float from, float to, float x) { return from == NEG_INF ? 0.f : x * expf(from - to); };
  float high = warp_max(top);
  sum = warp_sum(merge(top, high, sum));
  best = warp_max64(best);
  if (lane == 0) {
    k.shared.scratch[0][warp] = high;
    k.shared.scratch[1][warp] = sum;
    k.shared.scratch[2][warp] = __uint_as_float(static_cast<u32>(best >> 32));
    k.shared.scratch[3][warp] = __uint_as_float(static_cast<u32>(best));
  }
  __syncthreads();
  if (warp == 0) {
    const bool inside = lane < WARPS;
    top = inside ? k.shared.scratch[0][lane] : NEG_INF;
    high = warp_max(top);
    sum = warp_sum(merge(top, high, inside ? k.shared.scratch[1][lane] : 0.f));
    best = 0;
    if (inside)
      best = (static_cast<u64>(__float_as_uint(k.shared.scratch[2][lane])) << 32) |
             __float_as_uint(k.shared.scratch[3][lane]);
    best = warp_max64(best);
    const float four[4] = {high, sum, __uint_as_float(static_cast<u32>(best >> 32)), __uint_as_float(static_cast<u32>(best))};
    if (lane < CLUSTER)
      peer_store_async(peer_address(shared_address(next_box(k)), lane), four, peer_address(next_barrier(k), lane));
  }
  const float(*box)[8] = receive(k, 4 * sizeof(float));
  const bool inside = lane < CLUSTER;  // a block a lane
  const float part = inside ? box[lane][0] : NEG_INF;
  top = warp_max(part);
  sum = warp_sum(merge(part, top, inside ? box[lane][1] : 0.f));
  best = inside ? static_cast<u64>(__float_as_uint(box[lane][2])) << 32 | __float_as_uint(box[lane][3]) : 0;
  return warp_max64(best);
}

// use(value, token) for all values of this thread, but for quads that lie below `floor` as a whole.
template <class Use>
DEVICE void each_value(const float4* scaled, int rank, float floor, Use use) {
#pragma unroll 1
  for (int q = 0; q < QUADS; ++q) {
    const int quad = quad_of(q, rank);
    if (quad >= ROW) break;
    const float4 v = scaled[quad];
    if (fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) < floor) continue;  // never with a floor that is NaN
    use(v.x, quad * 4);
    use(v.y, quad * 4 + 1);
    use(v.z, quad * 4 + 2);
    use(v.w, quad * 4 + 3);
  }
}

// Make -inf of all but the tokens before which less than `bound` lies in the sorted row: counted, or with Mass summed as
// exp(x - top).
template <bool Mass>
DEVICE void narrow(Cluster& k, float4* scaled, float top, float bound) {
  u32 threshold = 0;
#pragma unroll 1
  for (int shift = 29;; shift = shift > 2 ? shift - 3 : 0) {
    float sums[7] = {};
    each_value(scaled, k.rank, from_ordered(threshold + (1u << shift)), [&](float x, int) {
      const float weight = Mass ? expf(x - top) : 1.f;
      const u32 key = ordered(x);
#pragma unroll
      for (u32 i = 0; i < 7; ++i) sums[i] += key >= threshold + ((i + 1) << shift) ? weight : 0.f;
    });
    cluster_sums(k, sums);
    u32 reached = 0;
#pragma unroll
    for (int i = 0; i < 7; ++i) reached += sums[i] >= bound;
    threshold += reached << shift;
    if (shift == 0) break;
  }
  float parts[2] = {};  // what lies above the threshold, and how many tokens stand on it
  each_value(scaled, k.rank, from_ordered(threshold), [&](float x, int) {
    const u32 key = ordered(x);
    if (key > threshold) parts[0] += Mass ? expf(x - top) : 1.f;
    if (key == threshold) parts[1] += 1.f;
  });
  cluster_sums(k, parts);
  const float each = Mass ? expf(from_ordered(threshold) - top) : 1.f, left = bound - parts[0];
  int cutoff = 0;
  if (each * parts[1] <= left || parts[1] <= 1.f) {
    cutoff = 0x7fffffff;  // all of those
  } else {
    const float count = fmaxf(1.f, ceilf(left / each));
#pragma unroll 1
    for (int shift = 15; shift >= 0; shift -= 3) {
      float sums[7] = {};
      each_value(scaled, k.rank, from_ordered(threshold), [&](float x, int token) {
        const float weight = ordered(x) == threshold ? 1.f : 0.f;
#pragma unroll
        for (int i = 0; i < 7; ++i) sums[i] += token < cutoff + ((i + 1) << shift) ? weight : 0.f;
      });
      cluster_sums(k, sums);
      int reached = 0;
#pragma unroll
      for (int i = 0; i < 7; ++i) reached += sums[i] <= count;
      cutoff += reached << shift;
    }
  }
#pragma unroll 1
  for (int q = 0; q < QUADS; ++q) {
    const int quad = quad_of(q, k.rank);
    if (quad >= ROW) break;
    float4 v = scaled[quad];
    auto keep = [&](float x, int token) {
      const u32 key = ordered(x);
      return key > threshold || (key == threshold && token < cutoff) ? x : NEG_INF;
    };
    scaled[quad] = make_float4(keep(v.x, quad * 4), keep(v.y, quad * 4 + 1), keep(v.z, quad * 4 + 2),
                               keep(v.w, quad * 4 + 3));
  }
}

// Philox4x32-10: the noise bits of tokens 4 * quad to 4 * quad + 3.
DEVICE uint4 philox(u32 quad, i64 position, i64 seed) {
  u32 c0 = quad, c1 = static_cast<u32>(position), c2 = static_cast<u32>(position >> 32), c3 = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
    const u32 high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

DEVICE float gumbel(u32 bits) {
  const float uniform = (static_cast<float>(bits >> 9) + 0.5f) * 1.1920928955078125e-7f;
  return -logf(-logf(uniform));
}

DEVICE float load_logit(const void* logits, i64 at) {
  return FLOAT_LOGITS ? static_cast<const float*>(logits)[at]
                      : __uint_as_float(static_cast<u32>(static_cast<const u16*>(logits)[at]) << 16);
}

// Four logits, -inf beyond the row.
DEVICE float4 load_quad(const void* logits, i64 row, int quad) {
  float4 v = make_float4(NEG_INF, NEG_INF, NEG_INF, NEG_INF);
  if (quad >= ROW) return v;
  const i64 at = row * V + quad * 4;
  if (V % 4 == 0) {
    if (FLOAT_LOGITS) return *reinterpret_cast<const float4*>(static_cast<const float*>(logits) + at);
    const uint2 pair = *reinterpret_cast<const uint2*>(static_cast<const u16*>(logits) + at);
    return make_float4(bf16_low(pair.x), bf16_high(pair.x), bf16_low(pair.y), bf16_high(pair.y));
  }
  v.x = load_logit(logits, at);
  if (quad * 4 + 1 < V) v.y = load_logit(logits, at + 1);
  if (quad * 4 + 2 < V) v.z = load_logit(logits, at + 2);
  if (quad * 4 + 3 < V) v.w = load_logit(logits, at + 3);
  return v;
}

// x / by rounded to the nearest, in four instructions and without the call that `/` makes.
struct Divisor {
  float by, inverse;
  DEVICE explicit Divisor(float x) : by(x), inverse(1.f / x) {}
  DEVICE float operator()(float x) const {
    const float q = x * inverse;
    return fabsf(q) < 3e38f ? fmaf(fmaf(-q, by, x), inverse, q) : q;
  }
  DEVICE float4 operator()(float4 v) const {
    return make_float4((*this)(v.x), (*this)(v.y), (*this)(v.z), (*this)(v.w));
  }
};

// A quad of logits after the repetition penalty.
DEVICE float4 penalise(float4 v, const unsigned char* seen, i64 row, int quad, Divisor penalty) {
  if (penalty.by == 1.f || quad >= ROW) return v;
  const unsigned char* flags = seen + row * V + quad * 4;
  auto apply = [&](float x, int i) {
    return quad * 4 + i < V && flags[i] ? (x > 0.f ? penalty(x) : x * penalty.by) : x;
  };
  return make_float4(apply(v.x, 0), apply(v.y, 1), apply(v.z, 2), apply(v.w, 3));
}

// scaled [rows, ROW] float4 is scratch for filtered rows.
KERNEL __launch_bounds__(THREADS, 1024 / THREADS)
    sample(const void* logits, const unsigned char* seen, const float* temperatures, const i64* top_ks, const float* top_ps,
           const float* min_ps, const float* penalties, const i64* seeds, const i64* positions, float4* scaled, i64* tokens,
           float* logprobs) {
  __shared__ Shared shared[1];
  const int rank = cluster_rank();
  const i64 row = blockIdx.x / CLUSTER;
  Cluster k = {shared[0], rank, 0};
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&k.shared.arrived[0]), 1);
    barrier_init(shared_address(&k.shared.arrived[1]), 1);
    barrier_init_done();
  }
  cluster_arrive_relaxed();
  wait_for_previous_kernel();
  const float temperature = temperatures[row];
  const Divisor penalty(penalties[row]);
  scaled += row * ROW;

  float top = NEG_INF, sum = 0.f;  // of the plain logits
  u64 best = 0;                    // of the penalised ones
  constexpr int AT_ONCE = QUADS < 8 ? QUADS : 8;
#pragma unroll 1
  for (int q = 0; q < QUADS; q += AT_ONCE) {
    float4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) x[i] = load_quad(logits, row, quad_of(q + i, rank));
    float higher = top;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      higher = fmaxf(higher, fmaxf(fmaxf(x[i].x, x[i].y), fmaxf(x[i].z, x[i].w)));
    if (higher != NEG_INF) {
      sum *= expf(top - higher);
      top = higher;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        sum += (expf(x[i].x - top) + expf(x[i].y - top)) + (expf(x[i].z - top) + expf(x[i].w - top));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int quad = quad_of(q + i, rank);
      const float4 p = penalise(x[i], seen, row, quad, penalty);
      best = larger(best, larger(larger(candidate(p.x, quad * 4), candidate(p.y, quad * 4 + 1)),
                                 larger(candidate(p.z, quad * 4 + 2), candidate(p.w, quad * 4 + 3))));
    }
  }
  cluster_wait();  // every block of the cluster has its barriers
  best = cluster_best(k, best, top, sum);

  if (temperature > 0.f) {
    const float top_p = top_ps[row], min_p = min_ps[row];
    const i64 top_k = top_ks[row];
    const Divisor heat(temperature);
    const float largest = heat(candidate_value(best));
    const int first = candidate_token(best);
    const bool count = top_k > 0 && top_k < V, mass = top_p < 1.f, filtered = count || mass;
    if (filtered) {
#pragma unroll 1
      for (int q = 0; q < QUADS; ++q) {
        const int quad = quad_of(q, rank);
        const float4 v = penalise(load_quad(logits, row, quad), seen, row, quad, penalty);
        if (quad < ROW) scaled[quad] = heat(v);
      }
      if (count) narrow<false>(k, scaled, largest, static_cast<float>(top_k));
      if (mass) {
        float total[1] = {};
        each_value(scaled, rank, NEG_INF, [&](float x, int) { total[0] += expf(x - largest); });
        cluster_sums(k, total);
        narrow<true>(k, scaled, largest, fmaxf(top_p * total[0], 1e-30f));
      }
    }
    best = 0;
    const i64 seed = seeds[row], position = positions[row];
#pragma unroll 1
    for (int q = 0; q < QUADS; ++q) {
      const int quad = quad_of(q, rank);
      if (quad >= ROW) break;
      const float4 v =
          filtered ? scaled[quad]
                   : heat(penalise(load_quad(logits, row, quad), seen, row, quad, penalty));
      const float x[4] = {v.x, v.y, v.z, v.w};
      bool close[4], any = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        close[i] = x[i] >= largest - REACH;
        if (min_p > 0.f) close[i] = close[i] && expf(x[i] - largest) >= min_p;
        close[i] = close[i] || quad * 4 + i == first;
        any = any || close[i];
      }
      if (!any) continue;
      const uint4 bits = philox(quad, position, seed);
      const u32 word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (close[i]) best = larger(best, candidate(x[i] + gumbel(word[i]), quad * 4 + i));
    }
    float no_top = NEG_INF, no_sum = 0.f;
    best = cluster_best(k, best, no_top, no_sum);
  }
  if (rank == 0 && threadIdx.x == 0) {
    const int token = candidate_token(best);
    tokens[row] = token;
    // Without a penalty a greedy row has its logit already.
    const float logit = temperature > 0.f || penalty.by != 1.f ? load_logit(logits, row * V + token) : candidate_value(best);
    logprobs[row] = logit - top - logf(sum);
  }
}
