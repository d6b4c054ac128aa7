// index_prefill: scores of visible index keys, and the numbers of the TOPK best (see ../index_topk.py), for many tokens.
//
// Arithmetic, not bytes, is the floor: 16,384 FLOP a token and key, at 700 TFLOP/s 3.1 ms for 512 tokens that see 262,144 keys
// each. A block has TOKENS tokens, whose queries stay in its shared memory, and each of its four warpgroups takes 64 keys at a
// time, decodes them in registers once and multiplies them with every token's heads: a token costs 64 x 64 x 128 products of the
// tensor cores and the sum over the heads. All blocks go through the keys side by side, so these come from the L2.
//
// No score is stored for long: a token keeps ROOM numbers (a score in the order of the floats, and its block), which all its
// scores join that are above its bound. Now and then its block takes a token's TOPK best of them, the least of which becomes
// the bound: a later block with the same score is worse. That is all the memory there is, whatever the capacity.
//
// Measured on an H200 for 512 tokens, before heads were added up by additions alone: 262,144 keys 4.1 ms in fp4 and fp8 and 4.3 in
// bf16 (540 and 516 TFLOP/s), 16,384 keys 0.31 ms, 4096 keys 0.10. Products of 128 columns for two warpgroups were slower.
//
// A block's tokens of one slot are dealt with together, one slot after another; what lies past a token's visible blocks is not
// kept. The order of a token's numbers depends on which warp came first, but not which they are; the output is in the order of
// the blocks.
//
// Given besides what index_scores.cuh wants: TOPK, TOKENS, ROOM (at least 2 TOPK), SHARED.
constexpr int THREADS = 512;
#include "index_cut.cuh"

constexpr int ROUND = THREADS / GROUP * TILE;  // keys that the warpgroups take at a time
constexpr bool EARLY = FORMAT != BF16;          // there are registers for the next keys
static_assert(ROOM >= 2 * TOPK && ROOM >= 4 * ROUND, "room for the best and for as many new ones");

struct Token {
  float weight[64];
  i64 slot;
  int count, fill;  // visible blocks, numbers kept
  u32 bound;        // scores up to this are not kept
};

constexpr int AT_NUMBERS = TOKENS * QUERY_BYTES;          // u64 [TOKENS][ROOM]
constexpr int AT_TOKENS = AT_NUMBERS + TOKENS * ROOM * 8;  // Token [TOKENS]
constexpr int AT_WORK = AT_TOKENS + TOKENS * sizeof(Token);
static_assert(AT_WORK + sizeof(Workspace) <= SHARED, "SHARED is too small");

// The warp's new numbers, one a lane or none.
DEVICE void keep(Token& token, u64* numbers, bool kept, u64 number) {
  const int lane = threadIdx.x & 31;
  const u32 all = __ballot_sync(~0u, kept);
  if (!all) return;
  int place = lane == 0 ? atomicAdd(&token.fill, __popc(all)) : 0;
  place = __shfl_sync(~0u, place, 0) + __popc(all & ((1u << lane) - 1));
  if (kept) numbers[place] = number;
}

// Only the TOPK best stay. All threads; barriers before and after.
__device__ __noinline__ void prune(Token& token, u64* numbers, Workspace& work) {
  const Held<(ROOM + THREADS - 1) / THREADS> held(numbers, token.fill);
  const u64 cut = find_cut(held, TOPK, work);
  int kept = 0;
  held.each([&](u64 x) { kept += x >= cut; });
  int place = scan(kept, work);
  held.each([&](u64 x) {
    if (x >= cut) numbers[place++] = x;
  });
  if (threadIdx.x == 0) token.fill = TOPK, token.bound = cut >> 32;
  __syncthreads();
}

// The blocks of the TOPK numbers, in their order, by a map of bits of so many blocks at a time. All threads, as above.
DEVICE void write_blocks(const Token& token, const u64* numbers, int* out, Workspace& work) {
  constexpr int SPAN = BINS * 32, WORDS_EACH = BINS / THREADS;
  int done = 0;
#pragma unroll 1
  for (int first = 0; first < token.count; first += SPAN) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) work.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < TOPK; i += THREADS) {
      const u32 block = ~static_cast<u32>(numbers[i]) - first;
      if (block < SPAN) atomicOr(&work.bins[block / 32], 1 << block % 32);
    }
    __syncthreads();
    int found = 0;
#pragma unroll
    for (int w = 0; w < WORDS_EACH; ++w) found += __popc(work.bins[threadIdx.x * WORDS_EACH + w]);
    int place = done + scan(found, work);
    if (threadIdx.x == THREADS - 1) work.found[0] = place + found;
#pragma unroll 1
    for (int w = 0; w < WORDS_EACH; ++w)
      for (u32 bits = work.bins[threadIdx.x * WORDS_EACH + w]; bits; bits &= bits - 1)
        out[place++] = first + (threadIdx.x * WORDS_EACH + w) * 32 + __ffs(bits) - 1;
    __syncthreads();
    done = work.found[0];
  }
  __syncthreads();
}

KERNEL __launch_bounds__(THREADS, 1)
index_prefill(const bf16* q, const float* weights, const u8* keys, const i64* __restrict__ positions,
              const i64* __restrict__ slots, int* picks, int tokens, int rate, int blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  let_next_kernel_start();
  Token* const mine = reinterpret_cast<Token*>(memory + AT_TOKENS);
  u64* const numbers = reinterpret_cast<u64*>(memory + AT_NUMBERS);
  Workspace& work = *reinterpret_cast<Workspace*>(memory + AT_WORK);
  const int first = (gridDim.x - 1 - blockIdx.x) * TOKENS, own = min(TOKENS, tokens - first);  // those that see most come first
  if (threadIdx.x < own) {
    Token& token = mine[threadIdx.x];
    token.slot = slots[first + threadIdx.x], token.fill = 0, token.bound = 0;
    token.count = visible_blocks(positions[first + threadIdx.x], token.slot, rate, blocks);
  }
  wait_for_previous_kernel();
  for (int k = 0; k < own; ++k)
    stage_query(memory + k * QUERY_BYTES, mine[k].weight, q, weights, first + k);
  stores_before_products();
  __syncthreads();
  u32 waiting = 0;  // tokens not dealt with
  for (int k = 0; k < own; ++k) {
    if (mine[k].count > TOPK)
      waiting |= 1u << k;
    else
      for (int i = threadIdx.x; i < TOPK; i += THREADS)
        picks[static_cast<i64>(first + k) * TOPK + i] = i < mine[k].count ? i : -1;
  }
#pragma unroll 1
  while (waiting) {
    const i64 slot = mine[__ffs(waiting) - 1].slot;
    u32 now = 0;
    int count = 0;
    for (int k = 0; k < own; ++k)
      if (waiting >> k & 1 && mine[k].slot == slot) now |= 1u << k, count = max(count, mine[k].count);
    waiting &= ~now;
    const Rows rows(keys, slot, blocks, count);
    const int rounds = (count + ROUND - 1) / ROUND, above = threadIdx.x / 32 * 16;
    int check = ROOM / ROUND;  // rounds after which there may be no room
    Keys current;
    if (EARLY) load_keys(current, rows, above);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      if (!EARLY) load_keys(current, rows, round * ROUND + above);
      u32 a[STEPS][4];
      decode_keys(current, a);
      const u32 low_scale = current.low_scale, high_scale = current.high_scale;
      if (EARLY && round + 1 < rounds) load_keys(current, rows, (round + 1) * ROUND + above);
#pragma unroll 1
      for (int k = 0; k < own; ++k) {
        if (!(now >> k & 1)) continue;
        Products products;
        products.start(a, shared_address(memory + k * QUERY_BYTES));
        products.wait<0>();
        const int lane = threadIdx.x % 32, row = round * ROUND + threadIdx.x / 32 * 16 + lane / 4 + lane % 2 * 8;
        const u32 score = score_of<false>(products, products, mine[k].weight, lane & 1 ? high_scale : low_scale);
        const bool kept = lane % 4 < 2 && row < mine[k].count && score > mine[k].bound;  // two lanes of a quad have scores
        keep(mine[k], numbers + k * ROOM, kept, with_block(score, row));
      }
      if (round + 1 < check && round + 1 < rounds) continue;
      __syncthreads();
      int most = 0;
      for (int k = 0; k < own; ++k) {
        if (now >> k & 1 && mine[k].fill > (round + 1 < rounds ? ROOM / 2 : TOPK)) prune(mine[k], numbers + k * ROOM, work);
        most = max(most, mine[k].fill);
      }
      check = round + 1 + (ROOM - most) / ROUND;
      __syncthreads();
    }
    for (int k = 0; k < own; ++k)
      if (now >> k & 1) write_blocks(mine[k], numbers + k * ROOM, picks + static_cast<i64>(first + k) * TOPK, work);
  }
}
