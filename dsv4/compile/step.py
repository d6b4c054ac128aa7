"""The two functions that get compiled: one prefill chunk, and one decode step with everything that follows it.

The decode step contains sampling, stop tokens, position counting and feeding the token back, so that a host replays it
without waiting for it: the state below is all on the device, and `out` carries each step's result away.
"""

import torch
from torch import Tensor, nn

from dsv4 import ops
from dsv4.compile.sampling import MAX_STOP_IDS
from dsv4.model.cache import Cache
from dsv4.model.transformer import Transformer


class DecodeState(nn.Module):
    """Per slot b of the decode batch, what the next step needs. Row b always works on cache slot b, or is inert.

    tokens [B]: the last token, not yet run. positions [B]: where it goes. slots [B]: b, or -1 when the row is idle.
    remaining [B]: tokens still allowed. stop_ids [B, MAX_STOP_IDS]: those that end the row, filled up with -1. seen
    [B, V]: tokens under the repetition penalty. temperature to seeds [B]: the row's sampling, as `ops.sample` takes it.
    out int64 [2, B]: the step's token (-1 from idle rows) and the bits of its float32 log-probability. logits float32
    [B, V]: what it was drawn from.
    """

    def __init__(self, batch: int, vocab: int, device: torch.device):
        super().__init__()

        def add(name: str, value: float, dtype: torch.dtype, *shape: int) -> None:
            self.register_buffer(name, torch.full((batch, *shape), value, dtype=dtype, device=device))

        add("tokens", 0, torch.int64)
        add("positions", 0, torch.int64)
        add("slots", -1, torch.int64)
        add("remaining", 0, torch.int64)
        add("stop_ids", -1, torch.int64, MAX_STOP_IDS)
        add("seen", 0, torch.bool, vocab)
        add("temperature", 0.0, torch.float32)
        add("top_k", 0, torch.int64)
        add("top_p", 1.0, torch.float32)
        add("min_p", 0.0, torch.float32)
        add("repetition_penalty", 1.0, torch.float32)
        add("seeds", 0, torch.int64)
        add("logits", 0.0, torch.float32, vocab)
        self.register_buffer("out", torch.full((2, batch), -1, dtype=torch.int64, device=device))


def prefill_step(model: Transformer, cache: Cache, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    """int64 [T] each -> the final hidden states [T, H]; the cache advances. See model.transformer for the batch."""
    return model(tokens, positions, slots, cache)


def decode_step(model: Transformer, cache: Cache, state: DecodeState) -> None:
    """Run each row's token, draw its successor and make it the row's next token; everything in place."""
    logits = model.logits(model(state.tokens, state.positions, state.slots, cache, decode=True))
    token, logprob = ops.sample(
        logits,
        state.seen,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.repetition_penalty,
        state.seeds,
        state.positions + 1,  # a draw is tied to the place that the new token takes in the text
    )
    ops.advance_state(
        token,
        logprob,
        logits,
        state.stop_ids,
        state.tokens,
        state.positions,
        state.slots,
        state.remaining,
        state.seen,
        state.logits,
        state.out,
    )
