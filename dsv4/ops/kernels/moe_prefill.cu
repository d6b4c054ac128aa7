// The routed experts of many tokens: entries (token, choice) sorted by expert, 128 of one expert against 128 weight rows in a
// block, weights decoded to bf16 in shared memory, mma.sync m16n8k16, float32 sums.
//
// Work: 6 * I * H operations an entry; Flash, 4096 tokens: 1.24e12, 2 ms at 600 Tflop/s; bytes 3.6 GB of weights, 0.85 ms.
// Entry tiles come from the sorted entries on the device: `bounds[e]` is where expert e begins in `order`, `tile_ends[e]` the
// number of 128-entry tiles up to and with expert e. Blocks past the last tile end at once.
//
// FP8 weights have a scale for 128 values along K and 128 rows, which no tile of rows leaves: at a new block the sums are
// brought to its scale, and after the last one to 1.
// Defines: FMT (0 bf16, 1 FP8, 2 NVFP4), GATE_UP (rows are 64 gate rows and their up rows; h in sorted order) or not (down: out
// [entry, N] in float32).
#include <cuda_fp16.h>
#include "common.cuh"

#define BF16 0
#define FP8 1
#define FP4 2
typedef unsigned char u8;

constexpr int M = 128, N = 128, K = 64, THREADS = 256, STAGES = 3;
constexpr int TILE_BYTES = M * K * 2;
constexpr float RAW = FMT == FP4 ? 16384.f : 1.f;

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// 16-byte piece `piece` of row `row` in a tile of 128-byte rows; pieces are permuted so that 8 rows fall on all banks.
DEVICE u32 at(u32 tile, int row, int piece) { return tile + row * 128 + ((piece ^ (row & 7)) << 4); }

DEVICE void copy16(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

DEVICE void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Eight E2M1 codes times a scale -> bf16 in order, times 2^-14, exact (through fp16, see stream.cuh).
DEVICE uint4 decode_fp4(u32 v, __half2 scale) {
  const u32 even = ((v << 4) & 0x80808080u) | ((v << 1) & 0x0E0E0E0Eu);
  const u32 odd = (v & 0x80808080u) | ((v >> 3) & 0x0E0E0E0Eu);
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 pair = __byte_perm(even, odd, 0x4000 + i * 0x1010) & 0xFF00FF00u;
    const float2 f = __half22float2(__hmul2(*reinterpret_cast<const __half2*>(&pair), scale));
    out[i] = pack_bf16(f.x, f.y);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Four E4M3 codes -> bf16 in order, exact.
DEVICE uint2 decode_fp8(u32 v) {
  u32 low, high;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high) : "r"(v));
  const float2 a = __half22float2(*reinterpret_cast<__half2*>(&low)), b = __half22float2(*reinterpret_cast<__half2*>(&high));
  return make_uint2(pack_bf16(a.x, a.y), pack_bf16(b.x, b.y));
}

DEVICE __half2 decode_scale(u32 code) {
  u32 r;
  asm("{\n.reg .b16 t;\ncvt.u16.u32 t, %1;\ncvt.rn.f16x2.e4m3x2 %0, t;\n}" : "=r"(r) : "r"(code & 255u));
  return __low2half2(*reinterpret_cast<__half2*>(&r));
}

// x bf16 [*, k]; order int64 and bounds int64 of the entries; codes [count, rows_all, k]; out h bf16 [entries, rows] or float32
// [entries, rows]. rows: inter or hidden. Entries are a token's `choices` after another's, then one more of each token. Dynamic
// shared memory: 6 * TILE_BYTES, in FP8 half a tile more.
KERNEL __launch_bounds__(THREADS, 2)
moe_prefill(const u8* __restrict__ x, const i64* __restrict__ order, const i64* __restrict__ bounds,
            const i64* __restrict__ tile_ends, const float* __restrict__ weights, const u8* __restrict__ codes,
            const u8* __restrict__ scales, const float* __restrict__ scale_2, void* __restrict__ out, int tokens, int choices,
            int k, int rows, int count, float limit) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 a_tiles = shared_address(memory), b_tiles = a_tiles + STAGES * TILE_BYTES;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, wm = warp >> 2, wn = warp & 3;
  const int tile = blockIdx.y;
  if (tile >= tile_ends[count - 1]) return;
  int expert = 0;  // the first whose tile_ends is above this tile
  for (int low = 0, high = count - 1; low < high;) {
    const int middle = (low + high) / 2;
    if (tile_ends[middle] > tile) high = middle;
    else low = middle + 1;
    expert = high;
  }
  const i64 first = bounds[expert] + (tile - (expert ? tile_ends[expert - 1] : 0)) * M;
  const int live = static_cast<int>(min(static_cast<i64>(M), bounds[expert + 1] - first));
  const int live_rows = (live + 15) / 16 * 16;  // rows that are multiplied
  const int n0 = blockIdx.x * (GATE_UP ? N / 2 : N);

  // Activations: this thread copies pieces tid % 8 of rows tid / 8 + 32 i.
  const u8* a_rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = min(tid / 8 + 32 * i, live - 1);
    const i64 entry = order[first + r], after = static_cast<i64>(tokens) * choices;
    const i64 row = !GATE_UP ? first + r : entry < after ? entry / choices : entry - after;
    a_rows[i] = x + row * k * 2 + tid % 8 * 16;
  }
  // Weights: this thread decodes half a row, tid % 2 of row tid / 2.
  const int b_row = tid / 2, half = tid % 2, q = b_row % 32;
  const int in_part = GATE_UP ? min(n0 + b_row / 32 * 16 + q % 16, rows - 1) : min(n0 + b_row, rows - 1);
  const i64 weight_row = static_cast<i64>(expert) * (GATE_UP ? 2 * rows : rows) + (GATE_UP && q >= 16 ? rows : 0) + in_part;

  const int chunks = (k + K - 1) / K;
  auto load_a = [&](int c) {
    if (c < chunks) {
      const bool valid = c * K + tid % 8 * 8 < k;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (tid / 8 + 32 * i < live_rows)
          copy16(at(a_tiles + c % STAGES * TILE_BYTES, tid / 8 + 32 * i, tid % 8), valid ? a_rows[i] + c * K * 2 : x, valid);
    }
  };
  // Quantised: a thread copies the codes, and NVFP4 scales, that it decodes itself. bf16: straight into the tile.
  constexpr int OWN = FMT == FP8 ? 32 : 16, HALF_BYTES = FMT == FP4 ? 16 : FMT == FP8 ? 32 : 64;  // of K / 2 values
  const u8* row_codes = codes + weight_row * k * HALF_BYTES / (K / 2) + half * HALF_BYTES;
  const u8* row_scales = scales + weight_row * (k / 16);
  const u32 own = b_tiles + 2 * TILE_BYTES + tid * OWN, own_scales = own - tid * OWN + STAGES * THREADS * OWN + tid * 4;
  auto load_b = [&](int c) {
    if (c >= chunks) return;
    const int stage = c % STAGES;
    if (FMT == FP4) {
      copy16(own + stage * THREADS * 16, row_codes + c * (K / 2), true);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(own_scales + stage * THREADS * 4),
                   "l"(row_scales + c * (K / 16)) : "memory");
    } else if (FMT == FP8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool valid = c * K + half * 32 + i * 16 < k;
        copy16(own + stage * THREADS * OWN + i * 16, valid ? row_codes + c * K + i * 16 : codes, valid);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool valid = c * K + half * 32 + i * 8 < k;
        copy16(at(b_tiles + stage * TILE_BYTES, b_row, half * 4 + i), valid ? row_codes + c * K * 2 + i * 16 : codes, valid);
      }
    }
  };
  auto load_own = [&](u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
  };
  auto store_b = [&](int c, int i, uint4 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at(b_tiles + (c & 1) * TILE_BYTES, b_row, half * 4 + i)),
                 "r"(d.x), "r"(d.y), "r"(d.z), "r"(d.w) : "memory");
  };
  auto decode_b = [&](int c, bool live) {  // codes in a block whose scale is 0 are zeros
    if (FMT == FP8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 v = live ? load_own(own + c % STAGES * THREADS * OWN + i * 16) : make_uint4(0, 0, 0, 0);
        const uint2 a = decode_fp8(v.x), b = decode_fp8(v.y), e = decode_fp8(v.z), f = decode_fp8(v.w);
        store_b(c, i * 2, make_uint4(a.x, a.y, b.x, b.y));
        store_b(c, i * 2 + 1, make_uint4(e.x, e.y, f.x, f.y));
      }
    }
    if (FMT != FP4) return;
    u32 two;
    const uint4 v = load_own(own + c % STAGES * THREADS * OWN);
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(two) : "r"(own_scales + c % STAGES * THREADS * 4) : "memory");
    two >>= half * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_b(c, i, decode_fp4(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w, decode_scale(two >> (i / 2 * 8))));
  };

  // FP8: the scales of the blocks of gate and of up rows, or of the tile's rows.
  const float* block_scales = reinterpret_cast<const float*>(scales);
  const int row_blocks = (rows + 127) / 128, scale_columns = (k + 127) / 128;
  if (FMT == FP8) block_scales += (static_cast<i64>(expert) * row_blocks * (GATE_UP ? 2 : 1) + n0 / 128) * scale_columns;
  float scale[2] = {1.f, 1.f};

  float acc[4][4][4] = {};
  const int live_tiles = max(0, min(4, (live - wm * 64 + 15) / 16));
  for (int c = 0; c < STAGES - 1; ++c) load_a(c), load_b(c), copies_end();
  for (int c = 0; c < chunks; ++c) {
    copies_wait<STAGES - 2>();
    float now[2] = {1.f, 1.f};
    if (FMT == FP8) {
      now[0] = __ldg(block_scales + c * K / 128);
      now[1] = GATE_UP ? __ldg(block_scales + row_blocks * scale_columns + c * K / 128) : now[0];
    }
    decode_b(c, (GATE_UP && q >= 16 ? now[1] : now[0]) != 0.f);
    __syncthreads();
    load_a(c + STAGES - 1), load_b(c + STAGES - 1), copies_end();
    if (live_tiles == 0) continue;
    if (FMT == FP8 && c * K % 128 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float before = c ? scale[h] : now[h];
        if (now[h] != 0.f) scale[h] = now[h];
        const float change = before / scale[h];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = h * 2; j < h * 2 + 2; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][j][e] *= change;
      }
    }
    const u32 at_a = a_tiles + c % STAGES * TILE_BYTES, at_b = b_tiles + (FMT != BF16 ? c & 1 : c % STAGES) * TILE_BYTES;
#pragma unroll
    for (int s = 0; s < K / 16; ++s) {
      u32 b[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j)  // rows 16 j .. of the warp's 32: matrices (rows 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), ...
        load_matrices(b[j], at(at_b, wn * 32 + j * 16 + (lane >> 4) * 8 + (lane & 7), s * 2 + (lane >> 3 & 1)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= live_tiles) break;
        u32 a[4];
        load_matrices(a, at(at_a, wm * 64 + i * 16 + (lane & 15), s * 2 + (lane >> 4)));
#pragma unroll
        for (int j = 0; j < 4; ++j) mma(acc[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int r = wm * 64 + i * 16 + p * 8 + (lane >> 2);
      if (r >= live) continue;
      const i64 entry = order[first + r];
      if (GATE_UP) {
        const float weight = weights[entry];
        const float gate_scale = RAW * (FMT == FP4 ? scale_2[expert * 2] : scale[0]);
        const float up_scale = RAW * (FMT == FP4 ? scale_2[expert * 2 + 1] : scale[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = n0 + wn * 16 + j * 8 + (lane & 3) * 2;
          float h[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float gate = fminf(acc[i][j][p * 2 + e] * gate_scale, limit);
            const float up = fminf(fmaxf(acc[i][j + 2][p * 2 + e] * up_scale, -limit), limit);
            h[e] = gate / (1.f + __expf(-gate)) * up * weight;
          }
          if (column < rows) reinterpret_cast<u32*>(out)[((first + r) * rows + column) / 2] = pack_bf16(h[0], h[1]);
        }
      } else {
        const float last_scale = RAW * (FMT == FP4 ? scale_2[expert] : scale[0]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = n0 + wn * 32 + j * 8 + (lane & 3) * 2;
          if (column < rows)
            reinterpret_cast<float2*>(out)[(entry * rows + column) / 2] =
                make_float2(acc[i][j][p * 2] * last_scale, acc[i][j][p * 2 + 1] * last_scale);
        }
      }
    }
}
