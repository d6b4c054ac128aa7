// The keys of a token in attend: which they are, and how some warps bring them to shared memory, 16 rows a barrier.
#ifndef DSV4_ATTEND_KEYS
#define DSV4_ATTEND_KEYS
#include "key_rows.cuh"

// Given: KT (keys a tile), STAGES (tiles in shared memory), FETCHING_WARPS (4 or 8), and what key_rows.cuh needs.
constexpr int FETCHERS = 32 * FETCHING_WARPS;
constexpr int SUBS = KT / 16, ROWS = 512 / FETCHERS;   // barriers of a tile, and of 16 rows those of a warp
static_assert(KT % 16 == 0 && SUBS * ROWS <= 32, "a lane knows one row of a tile");
constexpr u32 FULL_ARRIVALS = (CODED ? 0 : FETCHERS) + FETCHERS / 32;  // of a barrier that says that 16 rows are there

// 2^x to 22 bits, 0 for -inf.
DEVICE float fast_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Key j of a token: its window, newest first, then the entries. Of `parts` parts each takes every `parts`-th key.
struct Keys {
  const bf16* kv;
  const u8 *ring, *entries;
  const int* indices;
  const i64 *positions, *slots;
  int window, blocks, picks;
  i64 token, slot;
  int position, visible, total, settled;  // entries that were there before this batch
  int part = 0, parts = 1, mine = 0;

  DEVICE Keys(const bf16* kv, const u8* ring, const u8* entries, const int* indices, const i64* positions, const i64* slots,
              int window, int blocks, int picks, int rate, i64 token)
      : kv(kv), ring(ring), entries(entries), indices(indices), positions(positions), slots(slots), window(window),
        blocks(blocks), picks(picks), token(token), slot(slots[token]), position((int)positions[token]) {
    visible = entries ? min((position + 1) / rate, blocks) : 0;
    settled = entries && position > token ? (position - (int)token) / rate : 0;
    total = window + (indices ? picks : visible);
  }
  DEVICE void divide(int number, int count) {
    part = number, parts = count;
    mine = total > part ? (total - part + parts - 1) / parts : 0;
  }
  // The number of the entry that this part's key i is, if it is one.
  DEVICE int entry(int i) const {
    const int j = i * parts + part;
    if (i >= mine || j < window) return -1;
    return indices ? indices[static_cast<int>(token) * picks + j - window] : j - window;
  }
  DEVICE Row row(int i, int entry) const {
    const int j = i * parts + part;
    if (i >= mine) return {};
    if (j >= window) return entry >= 0 && entry < visible ? stored_row(entries, slot, blocks, entry) : Row{};
    if (j > position) return {};
    const i64 row = token - j;
    if (row >= 0 && slots[row] == slot && positions[row] == position - j) return {reinterpret_cast<const u8*>(kv + row * DIM)};
    return stored_row(ring, slot, window, (position - j) % window);
  }
  // Whether row i was there before this batch.
  DEVICE bool is_settled(Row row, int i) const {
    const int j = i * parts + part;
    return row.data && (j < window ? row.data != reinterpret_cast<const u8*>(kv + (token - j) * DIM) : j - window < settled);
  }
};

// Tiles of KT rows in STAGES places. `Layout` says where a row's 16-byte pieces and its scales go, and how many rows of the last
// tile are wanted. Barriers full[STAGES * KT / 16], empty[...]: `bias` of a row is 0, or -inf if there is none.
template <typename Layout>
struct Fetch {
  const Keys& keys;
  u8* memory;
  float* bias;
  u32 full, empty;
  int tiles;
  const int fetcher = (threadIdx.x >> 5) % (FETCHERS / 32), lane = threadIdx.x & 31;
  const int own = lane / ROWS * 16 + fetcher * ROWS + lane % ROWS;
  int entry;
  Row from = {};
  u32 early;  // bit lane: the row that this lane knows has been copied before

  // The tiles of this part. What earlier steps have written need not wait for the previous kernel: of the first tile it is copied
  // at once, of later ones brought to the L2, at most `most` rows; `group` of `groups` blocks share this.
  DEVICE void run(int group, int groups, int most) {
    const bool known = own < KT && (!keys.indices || own * keys.parts + keys.part < keys.window);
    if (known) from = keys.row(own, own * keys.parts + keys.part - keys.window);
    early = __ballot_sync(~0u, known && keys.is_settled(from, own));
    if (tiles > 0 && early)
#pragma unroll 1
      for (int s = 0; s < SUBS; ++s) copy_rows(0, s, early >> s * ROWS);
    const int near = min(keys.indices ? min(keys.window, keys.total) : keys.total, most);
    for (int i = KT + (threadIdx.x % FETCHERS) * groups + group; i * keys.parts + keys.part < near; i += FETCHERS * groups)
      prefetch_row(keys.row(i, i * keys.parts + keys.part - keys.window));
    wait_for_previous_kernel();
    entry = own < KT ? keys.entry(own) : -1;
    if constexpr (CODED == 0) {
      for (int tile = 0; tile < tiles; ++tile) start(tile);
    } else {
      // A tile is widened while the products take the one before, and before the next one waits for the place of that.
      u32 compact[STAGES] = {};  // of the last tile that has been begun, of the one before, ...
      int begun = 0;
      for (int tile = 0; tile < tiles; ++tile) {
        for (; begun < max(tile + 1, min(STAGES, tiles)); ++begun) {
          start(begun);
#pragma unroll
          for (int i = STAGES - 1; i > 0; --i) compact[i] = compact[i - 1];
          compact[0] = __ballot_sync(~0u, from.scales != nullptr);
        }
        const int since = begun - 1 - tile;
        u32 rows = compact[0];
#pragma unroll
        for (int i = 1; i < STAGES; ++i)
          if (since == i) rows = compact[i];
        widen_tile(tile, rows, since * SUBS);
      }
    }
    __syncwarp();
  }
  // The copies of a tile, 16 bytes a lane, or 16 zeros.
  DEVICE void start(int tile) {
    const int stage = tile % STAGES, subs = Layout::subs(keys.mine - tile * KT);
    if (tile > 0 || !from.data) from = own < KT ? keys.row(tile * KT + own, entry) : Row{};
    if (tile > 0) early = 0;
    entry = own < KT ? keys.entry((tile + 1) * KT + own) : -1;
#pragma unroll 1
    for (int s = 0; s < SUBS; ++s) {
      const u32 sub = 8 * (stage * SUBS + s);
      if (s < subs) {
        if (tile >= STAGES) barrier_wait(empty + sub, (tile / STAGES - 1) & 1);
        if (lane / ROWS == s) bias[stage * KT + own] = from.data ? 0.f : NEG_INF;
        __syncwarp();
        if (!CODED && lane == 0) barrier_arrive(full + sub);
        copy_rows(stage, s, ~early >> s * ROWS);
        if (!CODED) barrier_arrive_after_copies(full + sub);
      }
      if (CODED) end_copy_group();
    }
  }
  // Of this warp's ROWS rows those in `which`, a bit a row.
  DEVICE void copy_rows(int stage, int s, u32 which) const {
    const u32 place = shared_address(memory);
    const int row = stage * KT + s * 16 + fetcher * ROWS;
    const u32 compact = CODED ? __ballot_sync(~0u, from.scales != nullptr) >> s * ROWS : 0;
    const u64 known = reinterpret_cast<u64>(from.data ? from.data : reinterpret_cast<const u8*>(keys.kv));
    const u32 there = __ballot_sync(~0u, from.data != nullptr) >> s * ROWS;
    const u8* source[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) source[r] = reinterpret_cast<const u8*>(__shfl_sync(~0u, known, s * ROWS + r)) + lane * 16;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (!(which >> r & 1)) continue;
      const int skip = compact >> r & 1 ? CODE_PIECES : 0;
#pragma unroll
      for (int c = lane; c < PIECES; c += 32)
        if (c + skip < PIECES) copy_16(place + Layout::piece(row + r, c + skip), source[r] + (c - lane) * 16, there >> r & 1 ? 16 : 0);
    }
    if (CODED && lane / ROWS == s && which >> lane % ROWS & 1 && from.scales)
      copy_8(place + Layout::scales(row + lane % ROWS), from.scales);
  }
  // Compact rows of a tile that have come, if all groups of copies have but the last `later`: bit lane of `compact` is of row
  // `own`.
  DEVICE void widen_tile(int tile, u32 compact, int later) const {
    const int stage = tile % STAGES, subs = Layout::subs(keys.mine - tile * KT);
#pragma unroll 1
    for (int s = 0; s < subs; ++s) {
      wait_for_copy_groups(SUBS - 1 - s + later);
      __syncwarp();
      const int row = stage * KT + s * 16 + fetcher * ROWS;
#pragma unroll
      for (int r = 0; r < ROWS; r += 2)
        widen_rows(compact >> (s * ROWS + r), memory, [&](int i, int piece) { return Layout::piece(row + r + i, piece); },
                   [&](int i) { return Layout::scales(row + r + i); });
      __syncwarp();
      if (lane == 0) barrier_arrive(full + 8 * (stage * SUBS + s));
    }
  }
};
#endif
