// Weights that come in pairs of rows through a ring in shared memory, and their product with activations, for moe_token.cu.
//
// A pair is a gate row and its up row, or two rows of down. A block has the same range of pairs of every expert. Rows lie one
// after another in memory, so that a slot of the ring is filled by a few bulk copies of whole rows.
//
// A warp multiplies a pair with mma.sync m16n8k16 as a dot product: lane 4 g + t has the values 32 (32 i + lane) .. + 31 of a
// row for every i; its part of the first row is in row g of A, of the second in row g + 8, its activations are in column g of
// B, and what counts of the products is the diagonal. So weights are read in whole lines, and nothing is exchanged before
// the lanes' sums are added up.
//
// Defines: H, I (multiples of 1024), FMT (of the routed experts), BESIDE (whether there is a shared expert in FP8), WARPS (that
// multiply), STAGES, SLOT (slots of the ring and their bytes); and KW, NT and TAIL of stream.cuh.
#ifndef DSV4_MOE_PAIRS
#define DSV4_MOE_PAIRS
#include "stream.cuh"

constexpr int SHARED_FORMAT = BESIDE ? FP8 : FMT;
constexpr int USES = 8;  // pairs in a slot at most

struct Matrix {
  const u8 *codes, *scales;
  const float* scale_2;
};

// Rows of K values in format F: bytes, and how a slot holds them. Low rows of its pairs are gate's and high ones up's, or they
// alternate.
template <int F, bool Up>
struct Rows {
  static constexpr int K = Up ? H : I, ROW = F == FP4 ? K / 2 : F == FP8 ? K : 2 * K, SCALES = F == FP4 ? K / 16 : 0;
  static constexpr int PAIR = 2 * (ROW + SCALES), FIT = SLOT / PAIR;
  static constexpr int GROUP = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;  // pairs in a slot
  static constexpr int LOW = Up ? 1 : 2, HIGH = Up ? GROUP : 1;                 // rows from pair to pair, from low to high
  static_assert(K % 1024 == 0 && FIT >= 1, "");
};

// This block's share of `total` things. The last LATE blocks begin last, where hyper-connections ran until their end: the others
// have what the busiest would have anyway, and these the rest.
constexpr int LATE = 16;
struct Range {
  int first, last;
  DEVICE explicit Range(int total) {
    const int block = blockIdx.x, most = (total + gridDim.x - 1) / gridDim.x, others = gridDim.x - LATE;
    const int rest = total - others * most, late = block - others;
    if (others < 0 || rest < 0) {
      first = block * total / gridDim.x, last = (block + 1) * total / gridDim.x;
    } else if (late < 0) {
      first = block * most, last = first + most;
    } else {
      first = others * most + late * rest / LATE, last = others * most + (late + 1) * rest / LATE;
    }
  }
  DEVICE int size() const { return last - first; }
};

// --- memory -----------------------------------------------------------------------------------------------------------

DEVICE void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST) : "memory");
}
DEVICE void barrier_arrive_times(u32 barrier, u32 times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
DEVICE void store_release(u32 to, u32 value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
DEVICE u32 load_acquire(u32 from) {
  u32 value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
// What the block has written, as far as this thread knows of it, is visible to whoever then finds the count.
DEVICE void count_up(u32* counter) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
DEVICE u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Loads that stay where they stand. (ptxas moves __ldg's, ld.global.nc, past a wait to where their values are used.)
DEVICE float load_now(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}
DEVICE uint4 load_now(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// --- the ring ---------------------------------------------------------------------------------------------------------

struct Ring {
  u64 full[STAGES], empty[STAGES];
  u32 asked;  // slots whose weights have been asked for

  DEVICE void init() {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared_address(&full[i]), 1);
      barrier_init(shared_address(&empty[i]), USES);
    }
    asked = 0;
  }

  // Slot number n of all, once its weights are there.
  DEVICE const u8* wait(const u8* memory, int n) {
    while (load_acquire(shared_address(&asked)) <= n) {}  // before, the parity could be that of an earlier round
    barrier_wait(shared_address(&full[n % STAGES]), n / STAGES & 1);
    return memory + n % STAGES * SLOT;
  }
  // A warp that has multiplied pair j of `pairs`, which was in slot number n.
  template <int Group>
  DEVICE void leave(int n, int j, int pairs) {
    const int uses = j == pairs - 1 ? Group - j % Group : 1;  // the last does for those that are missing
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive_times(shared_address(&empty[n % STAGES]), uses * (USES / Group));
  }
};

// One thread: asks for weights, slot after slot.
struct Feeder {
  Ring& ring;
  u32 memory;
  int next = 0;

  template <int F, bool Up>
  DEVICE void ask(const Matrix& matrix, i64 expert, const Range& pairs) {
    using R = Rows<F, Up>;
#pragma unroll 1
    for (int at = pairs.first; at < pairs.last; at += R::GROUP, ++next) {
      const int slot = next % STAGES, round = next / STAGES, count = min(R::GROUP, pairs.last - at);
      if (round > 0) barrier_wait(shared_address(&ring.empty[slot]), (round - 1) & 1);
      const u32 to = memory + slot * SLOT, barrier = shared_address(&ring.full[slot]);
      barrier_arrive_expecting(barrier, count * R::PAIR);
      const i64 low = Up ? expert * 2 * I + at : expert * H + 2 * at;
#pragma unroll
      for (int half = 0; half <= Up; ++half) {
        const i64 row = low + half * I;
        copy_bulk(to + half * R::GROUP * R::ROW, matrix.codes + row * R::ROW, count * R::LOW * R::ROW, barrier);
        if (F == FP4)
          copy_bulk(to + 2 * R::GROUP * R::ROW + half * R::GROUP * R::SCALES, matrix.scales + row * R::SCALES,
                    count * R::LOW * R::SCALES, barrier);
      }
      store_release(shared_address(&ring.asked), next + 1);
    }
  }
};

// --- activations ------------------------------------------------------------------------------------------------------

// Activations lie in shared memory, and h in device memory, so that 8 values after 8 go to lane after lane: those with number
// 8 c .. 8 c + 7 at piece `place_of(c)`. For quantised weights they are in the order in which pairs of weights are decoded,
// whatever the format, and fp16 times a power of two: operand8 as for FP8, which leaves the order, turns them into that.
DEVICE int place_of(int c) { return c / 128 * 128 + c % 4 * 32 + c / 4 % 32; }
DEVICE int place(int value) {
  return place_of(value / 8) * 8 + (FMT == BF16 ? value % 8 : value % 4 * 2 + value / 4 % 2);
}

DEVICE uint4 in_pairs(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}

// One warp: h of an entry into shared memory. Returns the inverse of the power of two.
DEVICE float stage_h(const uint4* from, uint4* to) {
  constexpr int EACH = I / 8 / 32, AT_ONCE = EACH <= 8 ? EACH : EACH % 8 == 0 ? 8 : EACH % 7 == 0 ? 7 : 6;
  constexpr int KEPT = EACH <= 8 ? EACH : 1;  // others are read again
  const int lane = threadIdx.x & 31;
  uint4 kept[KEPT];
  int shift = 0;
  u32 largest = 0;
#pragma unroll AT_ONCE
  for (int i = 0; i < EACH; ++i) {
    const uint4 v = __ldcg(from + i * 32 + lane);
    if (KEPT == EACH) kept[i % KEPT] = v;
    largest = max(largest, larger(largest_of_8(v)));
  }
  if (FMT != BF16) shift = fp16_shift(static_cast<int>(__reduce_max_sync(~0u, largest) >> 7));
#pragma unroll AT_ONCE
  for (int i = 0; i < EACH; ++i) {
    const uint4 v = KEPT == EACH ? kept[i % KEPT] : __ldcg(from + i * 32 + lane);
    to[i * 32 + lane] = FMT == BF16 ? v : operand8<FP8>(v, two_to(shift));
  }
  return two_to(-shift);
}

// --- multiplying ------------------------------------------------------------------------------------------------------

// The scales of a row's FP8 blocks: lane l has number l, l + 32, ...
template <int K>
struct BlockScales {
  float scales[(K / 128 + 31) / 32];
  DEVICE void load(const float* from) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < (K / 128 + 31) / 32; ++i) scales[i] = load_now(from + min(i * 32 + lane, K / 128 - 1));
  }
  DEVICE float of_turn(int i) const {
    float scale = scales[0];
#pragma unroll
    for (int j = 1; j < (K / 128 + 31) / 32; ++j) scale = i >= j * 4 ? scales[j] : scale;
    return __shfl_sync(~0u, scale, i % 4 * 8 + (threadIdx.x & 31) / 4);
  }
};

// The scales of a matrix's low and high rows, in NVFP4.
template <int F, bool Up>
DEVICE float2 matrix_scales(const Matrix& matrix, int expert) {
  if (F != FP4) return make_float2(1.f, 1.f);
  const float* from = matrix.scale_2 + (Up ? expert * 2 : expert);
  return make_float2(load_now(from), load_now(from + Up));
}

// The scales of a pair: of its matrix, and of FP8 blocks. All are asked for well before they are used.
template <int F, bool Up>
struct PairScales {
  BlockScales<Rows<F, Up>::K> low_blocks, high_blocks;
  float2 whole;
  DEVICE PairScales(const Matrix& matrix, int expert, int pair, float2 whole) : whole(whole) {
    constexpr int COLUMNS = Rows<F, Up>::K / 128, BLOCKS = (Up ? I : H) / 128;
    if (F == FP8) {
      const int block = min(Up ? pair / 128 : pair / 64, BLOCKS - 1);  // there may be no such pair
      const float* from = reinterpret_cast<const float*>(matrix.scales) + (expert * (Up ? 2 : 1) * BLOCKS + block) * COLUMNS;
      low_blocks.load(from);
      high_blocks.load(from + (Up ? BLOCKS * COLUMNS : 0));
    }
  }
};

// A pair of a slot times activations: the lane's part of both rows' sums, without what is not on the diagonal.
template <int F, bool Up>
DEVICE float2 multiply(const u8* slot, int pair, const uint4* activations, const PairScales<F, Up>& of) {
  using R = Rows<F, Up>;
  constexpr int PARTS = F == FP4 ? 1 : F == FP8 ? 2 : 4;  // pieces of 16 bytes that a lane has of a row at a time
  const int lane = threadIdx.x & 31;
  const u8* row = slot + pair * R::LOW * R::ROW;
  const uint4 *low = reinterpret_cast<const uint4*>(row), *high = reinterpret_cast<const uint4*>(row + R::HIGH * R::ROW);
  const u8* scales = slot + 2 * R::GROUP * R::ROW + pair * R::LOW * R::SCALES + lane * 2;
  const bool odd = lane & 4;
  float acc[2][4] = {};  // independent sums, to hide the latency of mma
  auto diagonal = [&] {
    float x = odd ? acc[0][1] : acc[0][0], y = odd ? acc[0][3] : acc[0][2];
    x += odd ? acc[1][1] : acc[1][0], y += odd ? acc[1][3] : acc[1][2];
    return make_float2(x, y);
  };
  float2 sums = make_float2(0.f, 0.f);
#pragma unroll (F != FP4 ? 1 : 2)
  for (int i = 0; i < R::K / 1024; ++i) {
    uint4 a[PARTS], b[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) a[j] = low[(i * 32 + lane) * PARTS + j], b[j] = high[(i * 32 + lane) * PARTS + j];
    __half2 a_scale, b_scale;
    if constexpr (F == FP4) {
      a_scale = decode_scales(*reinterpret_cast<const u16*>(scales + i * 64));
      b_scale = decode_scales(*reinterpret_cast<const u16*>(scales + R::HIGH * R::SCALES + i * 64));
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 x[4], y[4];
      if constexpr (F == FP4) {
        decode_fp4(word(a[0], w), w / 2 ? __high2half2(a_scale) : __low2half2(a_scale), x);
        decode_fp4(word(b[0], w), w / 2 ? __high2half2(b_scale) : __low2half2(b_scale), y);
      } else if constexpr (F == FP8) {
        auto decode = [&](const uint4& v, u32(&to)[4]) {
          const u32 first = word(v, w % 2 * 2), second = word(v, w % 2 * 2 + 1);
          decode_fp8(__byte_perm(first, second, 0x5140), to[0], to[1]);
          decode_fp8(__byte_perm(first, second, 0x7362), to[2], to[3]);
        };
        decode(a[w / 2], x);
        decode(b[w / 2], y);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = word(a[w], j), y[j] = word(b[w], j);
      }
      const uint4 v = activations[(i * 4 + w) * 32 + lane];
      mma<F>(acc[0], x[0], y[0], x[1], y[1], v.x, v.y);
      mma<F>(acc[1], x[2], y[2], x[3], y[3], v.z, v.w);
    }
    if constexpr (F == FP8) {
      const float low_block = of.low_blocks.of_turn(i), high_block = of.high_blocks.of_turn(i);
      const float2 part = diagonal();
      sums.x = fmaf(low_block, part.x, sums.x);
      sums.y = fmaf(high_block, part.y, sums.y);
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[0][j] = acc[1][j] = 0.f;
    }
  }
  const bool counts = lane / 8 == lane % 4;
  if (F != FP8) sums = diagonal();
  return make_float2(counts ? sums.x * RAW<F> * of.whole.x : 0.f, counts ? sums.y * RAW<F> * of.whole.y : 0.f);
}

// A value of h from gate's sum in the warp's first lanes and up's in the others; what counts is in the first.
DEVICE float swiglu(float sum, float limit) {
  return clamped_swiglu(sum, __shfl_xor_sync(~0u, sum, 16), limit);
}
#endif
