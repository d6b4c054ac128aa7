"""The attend kernel against the reference in float32, on the same bfloat16 inputs; outputs are poisoned beforehand."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.attend import attend_cuda
from dsv4.ops.kernels.attend_plans import Shape, Share, WideShape
from dsv4.ops.row_formats import row_bytes, simulate_rows
from tests.ops.cases import GARBAGE_POSITIONS, compact, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NAN = float("nan")


def poison(*shape, dtype=torch.bfloat16):
    """Memory that the next allocation of this size gets is full of NaN."""
    torch.full(shape, NAN, device="cuda", dtype=dtype)


def store(rows, rope, fp8):
    """Rows [S, n, D] as the cache holds them; a row of NaN stays one: its compact bytes are all 0xFF."""
    if not fp8:
        return rows
    buffer = compact(rows.nan_to_num(), rope, row_bytes(rows.shape[-1], rope))
    data = buffer.flatten(1)[:, : rows.shape[1] * (rows.shape[-1] + rope)].unflatten(1, (rows.shape[1], -1))
    data[rows[..., 0].isnan()] = 0xFF
    return buffer


def inputs(draw, batch, mode, heads, dim=512, rate=4, blocks=600, picks=512, window=128, rope=64, fp8=False):
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
    if fp8:
        kv = simulate_rows(kv, rope)
    ring, entries = (t if t is None else store(t, rope, fp8) for t in (ring, entries))
    tensors = (q, kv, ring, entries, indices, draw.normal(heads), draw.inv_freq(rope), batch.positions, batch.slots)
    return (*(t if t is None else t.cuda() for t in tensors), rate)


def first_planes(slot, fp8):
    """One slot's buffer [n, width] as views of what its rows consist of."""
    if not fp8:
        return [slot]
    rows, flat = slot.shape[0], slot.flatten()
    return [flat[: rows * 576].view(rows, 576), flat[rows * 576 :].view(rows, 8)]


def widened(args):
    return [a.float() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args]


def reference(args):
    """In float32; compact rows are what they are."""
    return ops.registered()["attend"].reference(*widened(args))


def check(args, actual=None):
    """Cosine above 0.999 and relative error at most 5e-3 for every token; idle tokens exactly zero."""
    if actual is None:
        poison(*args[0].shape)
        actual = ops.attend(*args)
    expected = reference(args)
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


fp8 = pytest.mark.parametrize("fp8", (False, True), ids=("bf16", "fp8"))


@fp8
@pytest.mark.parametrize("heads", (4, 64, 128))
@pytest.mark.parametrize(("mode", "rate"), (("window", 0), ("picks", 4), ("all", 128), ("all", 4)), ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_matches_reference(name, mode, rate, heads, fp8, draw):
    check(inputs(draw, make_batch(BATCHES[name], GARBAGE_POSITIONS), mode, heads, rate=rate, fp8=fp8))


@fp8
@pytest.mark.parametrize("heads", (64, 128))
@pytest.mark.parametrize("keys", (128, 512, 1024, 2048, 4096, 8192))
def test_long_context(keys, heads, fp8, draw):
    """`keys` keys in all: the window and blocks of 128 tokens."""
    position = 128 * max(keys - 128, 1) - 1 if keys > 128 else 127
    batch, mode = make_batch([(0, position, position + 1)]), "all" if keys > 128 else "window"
    check(inputs(draw, batch, mode, heads, rate=128, blocks=max(keys - 100, 4), fp8=fp8))


WIDTHS = ((64, 4, 16), (16, 3, 16), (192, 17, 64), (128, 33, 32), (512, 5, 64), (80, 9, 16))


@pytest.mark.parametrize(("dim", "heads", "rope"), WIDTHS)
@pytest.mark.parametrize("mode", ("window", "picks", "all"))
def test_other_widths(mode, dim, heads, rope, draw):
    batch, fp8 = make_batch(BATCHES["mixed"], GARBAGE_POSITIONS), dim > rope and (dim - rope) % 64 == 0
    check(inputs(draw, batch, mode, heads, dim, picks=37, blocks=520, window=52, rope=rope, fp8=fp8))


@fp8
def test_every_number_of_keys(fp8, draw):
    """Windows of 1 to 200 rows in one batch: every remainder of tile and cluster."""
    batch = make_batch([(s, s, s + 1) for s in range(200)])
    check(inputs(draw, batch, "window", 4, window=256, dim=80, rope=16, fp8=fp8))
    check(inputs(draw, batch, "window", 64, window=256, fp8=fp8))
    for start in range(0, 32, 8):
        batch = make_batch([(s, start + s, start + s + 1) for s in range(8)])
        check(inputs(draw, batch, "window", 16, window=256, fp8=fp8))


@pytest.mark.parametrize("wide", (False, True), ids=("few", "wide"))
def test_compact_rows_are_read_exactly(wide, draw):
    """Scales from 2^-22 to 2^15 and codes that are subnormal in E4M3: with a query of zeros, a zero row of its own and no
    weight on the sink a token gets half of the row before it, without any rounding."""
    scales = torch.arange(-22, 16)
    args = list(inputs(draw, make_batch([(s, 1, 2) for s in range(len(scales))]), "window", 64, fp8=True))
    rows = draw.integers(-7, 8, len(scales), 128, 512).float() / 512
    rows[..., :448:64] = 448
    rows = (rows * 2.0 ** scales[:, None, None]).bfloat16()
    args[0], args[1], args[5] = args[0] * 0, args[1] * 0, args[5] * 0 - 1000
    args[2] = store(rows, 64, True).cuda()
    actual = attend_cuda(*args, shares=(Share(WideShape(64, 1)),) if wide else None)
    assert torch.equal(actual[..., :448], (rows[:, :1, :448].cuda() / 2).expand(-1, 64, -1))


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
    {"kt": 32},
    {"fetchers": 8},
    {"kt": 48, "cluster": 16},
    {"nh": 2, "cluster": 4},
    {"nh": 2, "kt": 48, "stages": 2, "cluster": 2},
    {"nh": 4, "kt": 64, "stages": 2, "cluster": 2},
    {"nh": 4, "wd": 4, "kt": 64, "stages": 2, "cluster": 1},
    {"wd": 4, "fetchers": 8},
    {"kt": 48, "stages": 2, "clusters": 2},
    {"nh": 2, "kt": 32, "stages": 3, "cluster": 4, "clusters": 3},
    {"nh": 4, "kt": 64, "stages": 2, "clusters": 7},
)
BASE = Shape(512, 1, 8, 80, 1, 8)
SHAPES = (*(BASE._replace(**changes) for changes in CHANGES),)
WIDE_SIZES = [(64, cluster, 1) for cluster in (1, 2, 4, 8, 16)] + [(64, 16, 6), (64, 8, 8)]
WIDE = tuple(WideShape(*sizes) for sizes in WIDE_SIZES)


@fp8
@pytest.mark.parametrize("shape", (*SHAPES, *WIDE), ids=str)
def test_shapes_agree(shape, fp8, draw):
    """Other divisions of the work than the one chosen."""
    batch = make_batch([(0, 2100, 2101), (-1, 0, 1), (1, 700, 702), (2, 5, 7)])
    for mode, heads, rate in (("picks", 64, 4), ("all", 40, 4), ("window", 128, 0)):
        args = inputs(draw, batch, mode, heads, rate=rate, fp8=fp8)
        poison(*args[0].shape)
        check(args, attend_cuda(*args, shares=(Share(shape),)))


@fp8
@pytest.mark.parametrize("heads", (64, 128))
@pytest.mark.parametrize("keys", (160, 1300, 1540, 3000, 8320))
def test_clusters_by_the_number_of_keys(keys, heads, fp8, draw):
    """Several clusters a token: as many as it has keys for, and another kernel for tokens with few."""
    batch = make_batch([(0, 4 * (keys - 128) - 1, 4 * (keys - 128)), (1, 700, 701), (-1, 0, 1)])
    args = inputs(draw, batch, "all", heads, blocks=8192, fp8=fp8)
    few, wide = BASE, WideShape(64, 16, 6)
    several = few._replace(kt=48, stages=2, clusters=2)
    for shares in ((Share(several),), (Share(wide),), (Share(few, most=1300), Share(wide, least=1301))):
        for _ in range(2):
            poison(*args[0].shape)
            check(args, attend_cuda(*args, shares=shares))


@fp8
def test_offsets_past_32_bits(fp8, draw):
    """Entries of which the slot attended to begins past 2^31 bytes; half a million blocks back it would be another's."""
    blocks, slots = 262_144, 16 if fp8 else 9
    args = list(inputs(draw, make_batch([(0, 4 * blocks - 1, 4 * blocks)]), "picks", 64, blocks=1024, fp8=fp8))
    few, ring, expected = args[3], args[2], reference(args)
    entries = torch.zeros(slots, blocks, few.shape[2], dtype=few.dtype, device="cuda")
    shift = blocks - 1024
    for target, source in zip(first_planes(entries[-1], fp8), first_planes(few[0], fp8), strict=True):
        target[shift:] = source
    args[2], args[3] = torch.cat((ring.new_zeros(slots - 1, *ring.shape[1:]), ring)), entries
    args[4] = torch.where(args[4] >= 0, args[4] + shift, -1).int()
    args[8] = torch.full_like(args[8], slots - 1)
    for shares in (None, (Share(WideShape(64, 8)),)):
        actual = attend_cuda(*args, shares=shares).float()
        assert (actual - expected).norm() <= 5e-3 * expected.norm()


def test_float32_runs_the_reference_and_other_types_raise(draw):
    args = inputs(draw, make_batch([(0, 20, 21)]), "picks", 4, dim=64, rope=16)
    assert torch.equal(ops.attend(*widened(args)), reference(args))
    with pytest.raises(ValueError, match="ring must be"):
        ops.attend(*args[:2], args[2].half(), *args[3:])
    with pytest.raises(ValueError, match="head dim 72"):
        attend_cuda(*(args[n].repeat_interleave(2, -1)[..., :72].contiguous() for n in range(4)), *args[4:])
