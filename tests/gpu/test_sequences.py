"""Held slots on a GPU, compiled and captured: rewound, restored and saved states go on to the bit."""

import pytest
import torch

import dsv4
from tests.compile.test_sequences import EDGES, check_edges

LATE_EDGES = [4095, 4096, 4097]  # too many tokens for a test without a GPU

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kv, index", [("bf16", "bf16"), ("fp8", "fp4")])
def test_rewind_and_restore_at_every_edge(kv, index, draw, tmp_path):
    one = dsv4.load("examples/tiny", max_batch=3, max_context=4352, kv=kv, index=index)
    check_edges(one, draw.integers(2, 2000, 4098).tolist(), EDGES + LATE_EDGES, tmp_path)
