"""advance_state on CUDA against its reference, which computes nothing that rounds."""

import pytest
import torch

from dsv4.ops.advance_state import advance_state_ref
from tests.gpu import small_kernels
from tests.gpu.small_kernels import call, to_device
from tests.ops.test_advance_state import state

pytestmark = small_kernels.needs_gpu


@pytest.mark.parametrize(("rows", "vocab"), ((1, 129_280), (3, 129_280), (33, 151_937), (7, 5), (8, 4096)))
def test_matches_reference(rows, vocab, draw):
    for stops in (1, 16):
        args = state(draw, max(rows, 3), vocab, stops)
        args = *(a[:rows] for a in args[:-1]), args[-1][:, :rows].contiguous()
        actual, expected = to_device(args), [a.clone() for a in args]
        call("advance_state", *actual)
        advance_state_ref(*expected)
        for result, wanted in zip(actual, expected, strict=True):
            assert torch.equal(result.cpu(), wanted)
