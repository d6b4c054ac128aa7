"""The index_topk kernels against the reference: the same set where scores are exact, else the same scores."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.index_topk import LOCAL, index_topk_cuda, shape_for
from tests.ops.cases import GARBAGE_POSITIONS, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NAN = float("nan")


def inputs(draw, visible, heads=64, dim=128, blocks=None, rate=4, topk=512, exact=True):
    """One token a slot that sees `visible[slot]` blocks (None: idle). Exact: small integers, so scores are integers
    far below 2^24 and most are equal to others. Blocks that are not visible are NaN."""
    blocks = blocks or max(v or 0 for v in visible) + 3
    segments = [(-1, 0, 1) if v is None else (s, v * rate, v * rate + 1) for s, v in enumerate(visible)]
    batch = make_batch(segments, GARBAGE_POSITIONS)
    tokens = len(visible)
    if exact:
        q, keys = draw.integers(-1, 2, tokens, heads, dim), draw.integers(-1, 2, tokens, blocks, dim)
        weights = draw.integers(-2, 3, tokens, heads)
    else:
        q, keys = draw.normal(tokens, heads, dim, outliers=4.0), draw.normal(tokens, blocks, dim, outliers=4.0)
        weights = draw.normal(tokens, heads)
    keys = keys.bfloat16()
    for slot, v in enumerate(visible):
        keys[slot, v or 0 :] = NAN
    tensors = (q.bfloat16(), weights.float(), keys, batch.positions, batch.slots)
    return (*(t.cuda() for t in tensors), rate, topk)


def run(args, **options):
    torch.full((args[0].shape[0], args[6]), -7, dtype=torch.int32, device="cuda")
    return index_topk_cuda(*args, **options) if options else ops.index_topk(*args)


def reference(args):
    return ops.registered()["index_topk"].reference(args[0].float(), args[1], args[2].float(), *args[3:])


def check_same(args, actual=None):
    actual = run(args) if actual is None else actual
    expected = reference(args)
    assert actual.dtype == torch.int32 and actual.shape == expected.shape
    for token, (a, e) in enumerate(zip(actual.sort().values, expected.sort().values, strict=True)):
        assert torch.equal(a, e), (
            f"token {token}: {int((a != e).sum())} of {len(a)} differ, {a[a != e][:8]} {e[a != e][:8]}"
        )


EDGES = (0, 1, 2, 511, 512, 513, 514, 527, 528, 529, 1000, 1024, 2047, 5000, 8191, 8192)


@pytest.mark.parametrize("visible", EDGES)
def test_one_token(visible, draw):
    check_same(inputs(draw, (visible,)))


def test_many_tokens(draw):
    check_same(inputs(draw, (*EDGES[:12], None, 300, None)))
    check_same(inputs(draw, [*range(500, 570)]))


@pytest.mark.parametrize("visible", (LOCAL - 1, LOCAL, LOCAL + 1, 20000, 65537, 262144))
def test_past_the_local_limit(visible, draw):
    check_same(inputs(draw, (visible, None, 40), blocks=max(visible + 3, LOCAL + 100)))


def test_topk_1024(draw):
    check_same(inputs(draw, (262144, 16383, 1025), topk=1024))


@pytest.mark.parametrize(("heads", "dim", "topk"), ((4, 32, 8), (1, 64, 1), (12, 96, 33), (20, 128, 100), (64, 32, 2000)))
def test_other_widths(heads, dim, topk, draw):
    check_same(inputs(draw, (0, 7, 8, 9, None, 40, 333, 2100), heads, dim, topk=topk))
    check_same(inputs(draw, (9, 5), heads, dim, blocks=9, topk=topk))


def test_equal_scores_go_to_the_lowest_block(draw):
    for visible in (600, 5000, 30000):
        args = list(inputs(draw, (visible,)))
        args[1].zero_()
        assert torch.equal(run(args).sort().values.cpu(), torch.arange(512).int()[None])
        args[1].fill_(1.0)
        args[2][:, :visible] = 1.0
        args[2][:, 100:300] = 0.0
        check_same(args)


def test_nan_ranks_last(draw):
    for visible in (700, 20000):
        args = list(inputs(draw, (visible,)))
        args[2][0, torch.randperm(visible)[: visible // 2].cuda(), 5] = NAN
        check_same(args)
        args[2][0, :visible] = NAN
        check_same(args)
        args[2][0, 550:600] = 1.0
        args[2][0, 570] = torch.inf
        check_same(args)


@pytest.mark.parametrize("visible", (1024, 3000, 20000, 100000))
def test_random_scores(visible, draw):
    """No score left out is above one that was taken, up to rounding."""
    args = inputs(draw, (visible, visible * 2 // 3), exact=False)
    actual, (q, weights, keys, positions, _, rate, topk) = run(args), args
    for token in range(2):
        count = int(positions[token] + 1) // rate
        dots = torch.einsum("hd,sd->hs", q[token].double(), keys[token, :count].double()).relu()
        score = weights[token].double() @ dots
        picks = actual[token].long()
        assert len(set(picks.tolist())) == topk and picks.min() >= 0 and picks.max() < count
        rest = torch.ones(count, dtype=torch.bool, device="cuda")
        rest[picks] = False
        assert score[picks].min() >= score[rest].max() - 1e-5 * score.abs().max()


def test_one_graph_serves_every_position(draw):
    for blocks in (2000, 20000):
        args = inputs(draw, (blocks, blocks), blocks=blocks, exact=False)
        run(args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.index_topk(*args)
        for where, which in (((blocks * 4, 40), (0, 1)), ((4 * 513, 4 * 512), (1, 0)), ((6000, 2**40), (1, -1))):
            args[3].copy_(torch.tensor(where))
            args[4].copy_(torch.tensor(which))
            out.fill_(-7)
            graph.replay()
            assert torch.equal(out, run(args))
            first = out.clone()
            graph.replay()
            assert torch.equal(out, first)


def test_shapes_agree(draw):
    args = inputs(draw, (5000, 700, 100))
    base = shape_for(1, 64, 128, args[2].shape[1], 512)
    for changes in (
        {"cluster": 2},
        {"cluster": 4},
        {"cluster": 8},
        {"split": 2},
        {"cluster": 1},
        {"local": 5003},
        {"local": 64},
    ):
        check_same(args, run(args, shape=base._replace(**changes)))


def test_best_scores_side_by_side(draw):
    """The best blocks are neighbours, so a few warps find many times more than others, and scores rise with the block's
    number: the bound that index_score leaves keeps little away, or nothing."""
    for visible in (9000, 100_000):
        args = list(inputs(draw, (visible,), heads=4, dim=32))
        args[0].fill_(1.0)
        args[1].fill_(1.0)
        args[2][0, :visible] = 0.0
        args[2][0, :visible, 0] = (torch.arange(visible, device="cuda") // 256).bfloat16()
        check_same(args)
        args[2][0, :visible, 0] = 1.0
        args[2][0, 2000:8000, 0] = 2.0
        check_same(args)


def test_float32_runs_the_reference_and_other_shapes_raise(draw):
    args = inputs(draw, (700,))
    wide = (args[0].float(), args[1], args[2].float(), *args[3:])
    assert torch.equal(ops.index_topk(*wide), reference(args))
    with pytest.raises(ValueError, match="keys must be"):
        ops.index_topk(*args[:2], args[2].half(), *args[3:])
    with pytest.raises(ValueError, match="head dim 40"):
        index_topk_cuda(args[0][..., :40], args[1], args[2][..., :40].contiguous(), *args[3:])
