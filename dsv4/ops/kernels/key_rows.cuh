// Rows of keys and values as the cache holds them: DIM bf16, or compact (see ../row_formats.py): CODED channels in E4M3, a power
// of two for each 64 of them, and the other channels in bf16. A compact row is copied to the end of the place where its bf16
// values will be, which is already where its bf16 channels belong, and widened there.
// Given: DIM, CODED (0: plain rows).
#ifndef DSV4_KEY_ROWS
#define DSV4_KEY_ROWS
#include "hopper.cuh"

typedef unsigned char u8;
constexpr int ROW_BYTES = CODED ? 2 * DIM - CODED : 2 * DIM, SCALE_BYTES = CODED ? 8 : 0;
constexpr int PIECES = DIM / 8, CODE_PIECES = CODED / 16;  // of 16 bytes: of a row in bf16, and of its codes
static_assert(CODED % 64 == 0 && CODED <= 512 && CODED <= DIM, "eight scales at most, a warp widens a row");

// Where a row is: nowhere, in bf16 (no scales), or compact.
struct Row {
  const u8 *data, *scales;
};

// Row `row` of a slot's `rows`: first the data of all, then the scales of all.
DEVICE Row stored_row(const u8* buffer, i64 slot, int rows, int row) {
  const u8* first = buffer + slot * rows * (ROW_BYTES + SCALE_BYTES);
  return {first + (i64)row * ROW_BYTES, CODED ? first + (i64)rows * ROW_BYTES + row * SCALE_BYTES : nullptr};
}

DEVICE void prefetch_row(Row row) {
  if (!row.data) return;
  prefetch_to_l2(row.data, row.scales ? ROW_BYTES : 2 * DIM);
  if (row.scales) prefetch_to_l2(reinterpret_cast<const u8*>(reinterpret_cast<u64>(row.scales) & ~15ull), 16);
}

// 8 bytes to shared memory, both addresses aligned to that.
DEVICE void copy_8(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// This thread's copies so far are a group; wait for all groups but the last 5 at most.
DEVICE void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void wait_for_copy_groups(int but) {
  if (but >= 5) asm volatile("cp.async.wait_group 5;" ::: "memory");
  else if (but == 4) asm volatile("cp.async.wait_group 4;" ::: "memory");
  else if (but == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
  else if (but == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (but == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else asm volatile("cp.async.wait_group 0;" ::: "memory");
}

DEVICE u32 times_bf16(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Four E4M3 codes times 2^-120 as bf16: their bits at bf16's places.
DEVICE uint2 spread(u32 codes) {
  const u32 low = __byte_perm(codes, 0, 0x1404), high = __byte_perm(codes, 0, 0x3424);
  return make_uint2((low >> 4 & 0x07F007F0u) | (low & 0x80008000u), (high >> 4 & 0x07F007F0u) | (high & 0x80008000u));
}

DEVICE void store_if(bool really, u32 address, const u32* v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared.v4.u32 [%1], {%2,%3,%4,%5};\n}"
               ::"r"((int)really), "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// A warp widens two rows whose copies have arrived, exactly: `place(r, piece)` in shared memory, `scales(r)` their exponents; of
// them those in `which`, a bit a row.
template <typename Place, typename Scales>
DEVICE void widen_rows(u32 which, u8* memory, Place place, Scales scales) {
  const int lane = threadIdx.x & 31;
  uint2 codes[2][2];
  u32 exponent[2][2], wide[2][2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int piece = min(h * 32 + lane, 2 * CODE_PIECES - 1);  // of the row as it will be
      codes[r][h] = *reinterpret_cast<const uint2*>(memory + place(r, CODE_PIECES + piece / 2) + piece % 2 * 8);
      exponent[r][h] = memory[scales(r) + piece / 8];
    }
  __syncwarp();
  u32 largest = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest = max(largest, exponent[r][h]);
      const u32 scale = (min(exponent[r][h], 134u) + 120) * 0x00800080u;  // 2^(exponent - 127 + 120), as far as bf16 has that
      const uint2 first = spread(codes[r][h].x), second = spread(codes[r][h].y);
      wide[r][h][0] = times_bf16(first.x, scale), wide[r][h][1] = times_bf16(first.y, scale);
      wide[r][h][2] = times_bf16(second.x, scale), wide[r][h][3] = times_bf16(second.y, scale);
    }
  if (__any_sync(~0u, largest > 134)) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      wide[i / 8][i / 4 % 2][i % 4] = times_bf16(wide[i / 8][i / 4 % 2][i % 4], (max(exponent[i / 8][i / 4 % 2], 134u) - 7) * 0x00800080u);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      store_if((which >> r & 1) && h * 32 + lane < 2 * CODE_PIECES, shared_address(memory) + place(r, h * 32 + lane), wide[r][h]);
}
#endif
