"""The attend kernel against the reference in float32, on the same bfloat16 inputs; outputs are poisoned beforehand."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.attend import attend_cuda, shape_for
from tests.ops.cases import GARBAGE_POSITIONS, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NAN = float("nan")


def poison(*shape, dtype=torch.bfloat16):
    """Memory that the next allocation of this size gets is full of NaN."""
    torch.full(shape, NAN, device="cuda", dtype=dtype)


def inputs(draw, batch, mode, heads, dim=512, rate=4, blocks=600, picks=512, window=128, rope=64):
    """attend's arguments. What no token may see is NaN: ring rows not yet written, blocks not yet complete."""
    tokens, slots = len(batch.slots), max(int(batch.slots.max()) + 1, 1)
    q = draw.normal(tokens, heads, dim, dtype=torch.bfloat16, scale=1.5, outliers=3.0)
    kv = draw.normal(tokens, dim, dtype=torch.bfloat16, outliers=5.0)
    kv[batch.slots < 0] = NAN
    q[batch.slots < 0] = NAN
    ring = draw.normal(slots, window, dim, dtype=torch.bfloat16, outliers=5.0)
    entries = draw.normal(slots, blocks, dim, dtype=torch.bfloat16)
    for slot in range(slots):
        mine = batch.positions[batch.slots == slot]
        first, last = (int(mine.min()), int(mine.max())) if len(mine) else (0, 0)
        if first < window:
            ring[slot, first:] = NAN
        entries[slot, (last + 1) // rate if rate else 0 :] = NAN
    indices = None
    if mode == "picks":
        # Some -1, some blocks that are not visible yet, in any order.
        indices = draw.distinct(tokens, picks, blocks + picks // 8).int() - picks // 8
        indices = indices.clamp(min=-1)
    if mode == "window":
        entries, rate = None, 0
    tensors = (q, kv, ring, entries, indices, draw.normal(heads), draw.inv_freq(rope), batch.positions, batch.slots)
    return (*(t if t is None else t.cuda() for t in tensors), rate)


def check(args, actual=None):
    """Cosine above 0.999 and relative error at most 5e-3 for every token; idle tokens exactly zero."""
    if actual is None:
        poison(*args[0].shape)
        actual = ops.attend(*args)
    wide = [a.float() if a is not None and a.dtype == torch.bfloat16 else a for a in args[:-1]]
    expected = ops.registered()["attend"].reference(*wide, args[-1])
    busy = args[8] >= 0
    assert actual.dtype == torch.bfloat16 and actual.is_contiguous()
    assert (actual[~busy] == 0).all()
    a, e = actual[busy].double().flatten(1), expected[busy].double().flatten(1)
    assert a.isfinite().all(), f"{int((~a.isfinite()).sum())} values are not finite"
    error = (a - e).norm(dim=1) / e.norm(dim=1)
    cosine = torch.nn.functional.cosine_similarity(a, e, dim=1)
    assert error.numel() == 0 or error.max() <= 5e-3, f"relative error {error.max():.2e} at {int(error.argmax())}"
    assert cosine.numel() == 0 or cosine.min() > 0.999
    return error


BATCHES = {
    "one": [(0, 2100, 2101)],
    "first": [(0, 0, 1)],
    "early": [(0, 5, 6), (1, 127, 128), (2, 130, 131)],
    "eight": [(s, 300 + 250 * s, 301 + 250 * s) for s in range(8)],
    "idle": [(-1, 0, 2), (1, 900, 901), (-1, 0, 1)],
    "mixed": [(0, 60, 93), (-1, 0, 3), (2, 0, 5), (1, 2000, 2003), (-1, 0, 1), (3, 126, 130)],
    "chunk": [(0, 700, 790), (-1, 0, 5), (1, 0, 131)],
}


@pytest.mark.parametrize("heads", (4, 64, 128))
@pytest.mark.parametrize(("mode", "rate"), (("window", 0), ("picks", 4), ("all", 128), ("all", 4)), ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_matches_reference(name, mode, rate, heads, draw):
    check(inputs(draw, make_batch(BATCHES[name], GARBAGE_POSITIONS), mode, heads, rate=rate))


@pytest.mark.parametrize("keys", (128, 512, 1024, 2048, 4096, 8192))
def test_long_context(keys, draw):
    """128 heads, `keys` keys in all: the window and blocks of 128 tokens."""
    position = 128 * max(keys - 128, 1) - 1 if keys > 128 else 127
    args = inputs(draw, make_batch([(0, position, position + 1)]), "all" if keys > 128 else "window", 128,
                  rate=128, blocks=max(keys - 100, 1))  # fmt: skip
    check(args)


@pytest.mark.parametrize(("dim", "heads", "rope"), ((64, 4, 16), (16, 3, 16), (192, 17, 64), (128, 33, 32), (512, 5, 64)))
@pytest.mark.parametrize("mode", ("window", "picks", "all"))
def test_other_widths(mode, dim, heads, rope, draw):
    batch = make_batch(BATCHES["mixed"], GARBAGE_POSITIONS)
    check(inputs(draw, batch, mode, heads, dim, picks=37, blocks=520, window=50, rope=rope))


def test_every_number_of_keys(draw):
    """Windows of 1 to 200 rows in one batch: every remainder of tile and cluster."""
    batch = make_batch([(s, s, s + 1) for s in range(200)])
    check(inputs(draw, batch, "window", 4, window=256, dim=64, rope=16))
    for start in range(0, 32, 8):
        batch = make_batch([(s, start + s, start + s + 1) for s in range(8)])
        check(inputs(draw, batch, "window", 16, window=256))


def test_all_idle_and_no_valid_pick(draw):
    check(inputs(draw, make_batch([(-1, 0, 4)], GARBAGE_POSITIONS), "picks", 64))
    args = list(inputs(draw, make_batch([(0, 300, 301)]), "picks", 64))
    args[4].fill_(-1)
    check(args)


def test_sinks_and_scores_of_any_size(draw):
    for size in (1e-3, 30.0):
        args = list(inputs(draw, make_batch([(0, 2100, 2101), (1, 40, 41)]), "picks", 64))
        args[0] *= size
        args[5] *= 20.0
        check(args)


def test_one_graph_serves_every_position(draw):
    """Captured at one position, replayed at others and with idle rows: the same bits as eager, and repeatable."""
    batch = make_batch([(0, 2303, 2304), (1, 2303, 2304), (2, 2303, 2304)])
    args = inputs(draw, batch, "picks", 64)
    positions, slots = args[7:9]
    ops.attend(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attend(*args)
    for where, which in (((2303, 511, 0), (0, 1, 2)), ((4, 2000, 1), (2, -1, 1)), ((128, 127, 126), (1, 0, -1))):
        positions.copy_(torch.tensor(where))
        slots.copy_(torch.tensor(which))
        args[2].nan_to_num_()
        out.fill_(NAN)
        graph.replay()
        first = out.clone()
        check(args, first)
        graph.replay()
        assert torch.equal(first, out) and torch.equal(first, ops.attend(*args))


CHANGES = (
    *({"cluster": n} for n in (1, 2, 3, 4, 16)),
    {"kt": 32, "stages": 3},
    {"kt": 48, "cluster": 16},
    {"nh": 2, "cluster": 4},
    {"nh": 2, "kt": 48, "stages": 2, "cluster": 2},
    {"nh": 4, "kt": 64, "stages": 2, "cluster": 2},
    {"nh": 4, "wd": 4, "kt": 64, "stages": 2, "cluster": 1},
    {"wd": 4},
)


def test_shapes_agree(draw):
    """Other divisions of the work than the one chosen."""
    args = inputs(draw, make_batch([(0, 2100, 2101), (1, 700, 702)]), "picks", 64)
    base = shape_for(1, 64, 512)
    for changes in CHANGES:
        poison(*args[0].shape)
        check(args, attend_cuda(*args, shape=base._replace(**changes)))


def test_float32_runs_the_reference_and_other_types_raise(draw):
    args = inputs(draw, make_batch([(0, 20, 21)]), "picks", 4, dim=64, rope=16)
    wide = [a.float() if a is not None and a.dtype == torch.bfloat16 else a for a in args[:-1]]
    expected = ops.registered()["attend"].reference(*wide, args[-1])
    assert torch.equal(ops.attend(*wide, args[-1]), expected)
    with pytest.raises(ValueError, match="ring must be"):
        ops.attend(*args[:2], args[2].half(), *args[3:])
    with pytest.raises(ValueError, match="head dim 72"):
        attend_cuda(args[0].repeat(1, 1, 2)[..., :72], *args[1:])
