// advance_state: the decode batch's state after a step. Blocks (part of the logits, row); the first block of a row changes the
// row's numbers, all of them copy logits, 1.03 MB a row read and written at V = 129,280.
// Measured on an H200 in a CUDA graph: 2.5 us at 1 row, 3.1 at 8, 8.8 at 32 (87 % of the copy rate).
//
// Defines: V, STOPS stop tokens a row, QUADS of logits a thread.
#include "hopper.cuh"

KERNEL advance_state(const i64* token, const float* logprob, const float* logits, const i64* stop_ids, i64* tokens,
                     i64* positions, i64* slots, i64* remaining, unsigned char* seen, float* kept, i64* out, int out_rows) {
  const i64 row = blockIdx.y;
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x < 32) {
    const i64 next = token[row], slot = slots[row], left = remaining[row];
    const bool stop = threadIdx.x < STOPS && stop_ids[row * STOPS + threadIdx.x] == next;
    const bool done = __any_sync(~0u, stop) || left <= 1;  // before a lane changes what the others read
    if (threadIdx.x == 0) {
      out[row] = slot >= 0 ? next : -1;
      out[out_rows + row] = __float_as_int(logprob[row]);
      if (slot >= 0) {
        tokens[row] = next;
        positions[row] += 1;
        remaining[row] = left - 1;
        seen[row * V + next] = 1;
        if (done) slots[row] = -1;
      }
    }
  }
  const float* from = logits + row * V;
  float* to = kept + row * V;
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    const int quad = (blockIdx.x * QUADS + q) * blockDim.x + threadIdx.x;
    if (V % 4 == 0 && quad < V / 4) reinterpret_cast<float4*>(to)[quad] = reinterpret_cast<const float4*>(from)[quad];
    if (V % 4 != 0)
      for (int i = quad * 4; i < quad * 4 + 4 && i < V; ++i) to[i] = from[i];
  }
}
