"""advance_state: after `sample`, make each row's new token the next step's input, all on the device.

Of each row of the decode batch: the token goes into `tokens` and its place into `positions`, `remaining` goes down by one,
`seen` and `out` take note of the token, and a row that is done (a stop token, or nothing left) gets slot -1. Rows whose
slot is -1 already keep their state; `out` says -1 of them. The step's logits are kept for who asks later.

On CUDA float32 logits run kernels/advance_state.cu.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors

_THREADS, _QUADS = 256, 4  # a block; of a row a thread


def _cuda(token, logprob, logits, stop_ids, tokens, positions, slots, remaining, seen, kept, out):
    rows, vocab = logits.shape
    numbers = {"tokens": tokens, "positions": positions, "slots": slots, "remaining": remaining, "out": out}
    require_tensors("advance_state", torch.float32, logprob=logprob, logits=logits, kept=kept)
    require_tensors("advance_state", torch.int64, token=token, stop_ids=stop_ids, **numbers)
    require_tensors("advance_state", torch.bool, seen=seen)
    count = stop_ids.shape[1]
    require("advance_state", count <= 32, f"at most 32 stop tokens, found {count}")
    require("advance_state", kept.shape == seen.shape == logits.shape, "kept and seen must be shaped like the logits")
    if rows:
        blocks = -(-vocab // (4 * _THREADS * _QUADS))
        launch = kernel("advance_state.cu", "advance_state", f"V={vocab}", f"STOPS={count}", f"QUADS={_QUADS}")
        arguments = token, logprob, logits, stop_ids, tokens, positions, slots, remaining, seen, kept, out, out.shape[1]
        launch((blocks, rows), _THREADS, *arguments, pdl=True)


@op(
    "advance_state(Tensor token, Tensor logprob, Tensor logits, Tensor stop_ids, Tensor(a!) tokens, Tensor(b!) positions, "
    "Tensor(c!) slots, Tensor(d!) remaining, Tensor(e!) seen, Tensor(f!) kept, Tensor(g!) out) -> ()",
    fake=lambda *arguments: None,
    cuda=_cuda,
)
def advance_state_ref(
    token: Tensor,
    logprob: Tensor,
    logits: Tensor,
    stop_ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    remaining: Tensor,
    seen: Tensor,
    kept: Tensor,
    out: Tensor,
) -> None:
    """What stands above, in that order."""
    active = slots >= 0
    done = (token[:, None] == stop_ids).any(-1) | (remaining <= 1)
    tokens.copy_(torch.where(active, token, tokens))
    positions.add_(active.long())
    remaining.sub_(active.long())
    seen.scatter_(1, token[:, None], seen.gather(1, token[:, None]) | active[:, None])
    out[:, : len(token)] = torch.stack((torch.where(active, token, -1), logprob.view(torch.int32).long()))
    slots.copy_(torch.where(active & ~done, slots, -1))
    kept.copy_(logits)


def advance_state(
    token: Tensor,
    logprob: Tensor,
    logits: Tensor,
    stop_ids: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    remaining: Tensor,
    seen: Tensor,
    kept: Tensor,
    out: Tensor,
) -> None:
    """token int64 [B], logprob float32 [B], as `sample` returns them of logits float32 [B, V]; stop_ids int64 [B, S] (-1:
    none). Changed in place: int64 [B] tokens, positions, slots, remaining; seen bool [B, V]; kept float32 [B, V], a copy of
    the logits; out int64 [2, B or more], row by row the token (-1 of inert rows) and the bits of its log-probability."""
    torch.ops.dsv4.advance_state(token, logprob, logits, stop_ids, tokens, positions, slots, remaining, seen, kept, out)
