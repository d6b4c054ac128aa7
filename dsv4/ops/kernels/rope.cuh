// Rows of channels that get an RMSNorm and whose last channels turn, held by a few lanes: for rope.cu and advance.cu.
#ifndef DSV4_ROPE
#define DSV4_ROPE
#include "row_formats.cuh"

// How rows of Width bf16 channels (a multiple of 8) lie in Lanes neighbouring lanes; the last Turned channels turn.
template <int Width, int Turned, int Lanes>
struct Lying {
  static constexpr int CHUNKS = Width / 8, PER_LANE = (CHUNKS + Lanes - 1) / Lanes;
  static_assert(Width % 8 == 0 && Turned % 2 == 0 && Turned <= Width && Lanes <= 32 && (Lanes & (Lanes - 1)) == 0, "");
  static DEVICE int vector(int p) { return p * Lanes + threadIdx.x % Lanes; }
};

// The angles at a position, for all its rows. Nothing of a row is needed for them, so they can come first.
template <int Width, int Turned, int Lanes>
struct Angles : Lying<Width, Turned, Lanes> {
  using Place = Lying<Width, Turned, Lanes>;
  float2 turns[Place::PER_LANE][4];  // cosine and sine of each pair

  DEVICE Angles(i64 position, const float* inv_freq) {
#pragma unroll
    for (int p = 0; p < Place::PER_LANE; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pair = Place::vector(p) * 4 + i - (Width - Turned) / 2;
        if (pair >= 0 && pair < Turned / 2) rope_cos_sin(position, __ldg(inv_freq + pair), &turns[p][i].x, &turns[p][i].y);
      }
    }
  }
};

// A row.
template <int Width, int Turned, int Lanes>
struct Row : Lying<Width, Turned, Lanes> {
  using Place = Lying<Width, Turned, Lanes>;
  using Place::CHUNKS, Place::PER_LANE, Place::vector;
  float value[PER_LANE][8];

  DEVICE void load(const uint4* row) {
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p) unpack8(vector(p) < CHUNKS ? row[vector(p)] : make_uint4(0, 0, 0, 0), value[p]);
  }

  // Divided by its root mean square; all lanes of the warp.
  DEVICE void normalise(float eps) {
    float square = 0.f;
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p)
#pragma unroll
      for (int i = 0; i < 8; ++i) square = fmaf(value[p][i], value[p][i], square);
    const float scale = rsqrtf(warp_sum<Lanes>(square) * (1.f / Width) + eps);
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p)
#pragma unroll
      for (int i = 0; i < 8; ++i) value[p][i] *= scale;
  }

  DEVICE void multiply(const float* weight) {
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p) {
      if (vector(p) >= CHUNKS) continue;
      const float4* at = reinterpret_cast<const float4*>(weight) + 2 * vector(p);
      const float4 low = __ldg(at), high = __ldg(at + 1);
      const float by[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) value[p][i] *= by[i];
    }
  }

  DEVICE void turn(const Angles<Width, Turned, Lanes>& angles) {
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (vector(p) * 4 + i < (Width - Turned) / 2) continue;
        const float even = value[p][2 * i], odd = value[p][2 * i + 1];
        const float2 turn = angles.turns[p][i];
        value[p][2 * i] = even * turn.x - odd * turn.y;
        value[p][2 * i + 1] = even * turn.y + odd * turn.x;
      }
    }
  }

  // Row `index` of `slot` in a buffer [S, rows, ..] of Format Kind, written with `keep`; the row becomes what is stored. All
  // lanes of the warp.
  template <int Kind>
  DEVICE void put(uint4* buffer, i64 slot, i64 rows, i64 index, bool keep) {
    if constexpr (Kind == PLAIN) {
      if (keep) store(buffer + (slot * rows + index) * CHUNKS);
    } else {
      const CompactRow<Width, Turned, Kind> row(buffer, slot, rows, index);
#pragma unroll
      for (int p = 0; p < PER_LANE; ++p) {
        round(p);
        row.store(value[p], vector(p), keep);
      }
    }
  }

  // What becomes of an index query that meets keys of Format Keys. All lanes of the warp.
  template <int Keys>
  DEVICE void make_query() {
    if constexpr (Keys != PLAIN) {
      static_assert(Lanes * 8 == Width, "");
      round(0);
      hadamard<Lanes>(value[0]);
      if (Keys == FP4_KEYS) to_e2m1(value[0], exponent_for_6(largest_of<4>(value[0], E2M1_FLOOR)));
    }
  }

  DEVICE void round(int p) { unpack8(pack8(value[p]), value[p]); }

  DEVICE void store(uint4* row) const {
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p)
      if (vector(p) < CHUNKS) row[vector(p)] = pack8(value[p]);
  }
};

#endif
