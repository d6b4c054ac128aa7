"""The index_topk kernels against the reference: the same set where scores are exact, else the same scores."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.index_topk import FEW, index_topk_cuda, prefill_for, shape_for
from dsv4.ops.row_formats import encode_keys, key_bytes, keys_of, simulate_fp4
from tests.ops.cases import GARBAGE_POSITIONS, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NAN = float("nan")
FORMATS = (None, "fp8", "fp4")
WIDTHS = 64, 128, "BF16"


def as_stored(keys, format):
    """Keys bf16 [S, blocks, d] as the cache holds them; those that are NaN become bytes of all ones."""
    if format is None:
        return keys
    parts = encode_keys(keys.nan_to_num(), format)
    parts = [torch.where(keys[..., :1].isnan(), 255, part) for part in parts]
    return torch.cat([part.flatten(1) for part in parts], 1).unflatten(1, (keys.shape[1], -1)).contiguous()


def integers(draw, *shape):
    """-1, 0 and 1 in bf16, made where they are needed: there are millions."""
    generator = torch.Generator("cuda").manual_seed(draw.random.randrange(2**31))
    return torch.randint(-1, 2, shape, generator=generator, dtype=torch.int8, device="cuda").bfloat16()


def normal(draw, *shape):
    generator = torch.Generator("cuda").manual_seed(draw.random.randrange(2**31))
    x = torch.randn(shape, generator=generator, device="cuda")
    return torch.where(torch.rand(shape, generator=generator, device="cuda") < 1 / 64, 4 * x, x).bfloat16()


def inputs(draw, visible, heads=64, dim=128, blocks=None, rate=4, topk=512, exact=True, format=None):
    """One token a slot that sees `visible[slot]` blocks (None: idle). Exact: small integers, so scores are integers
    far below 2^24 and most are equal to others. Blocks that are not visible are NaN."""
    blocks = -(-(blocks or max(v or 0 for v in visible) + 3) // 4) * 4
    segments = [(-1, 0, 1) if v is None else (s, v * rate, v * rate + 1) for s, v in enumerate(visible)]
    batch = make_batch(segments, GARBAGE_POSITIONS)
    tokens = len(visible)
    make = integers if exact else normal
    q, keys = make(draw, tokens, heads, dim), make(draw, tokens, blocks, dim)
    weights = draw.integers(-2, 3, tokens, heads) if exact else draw.normal(tokens, heads)
    for slot, v in enumerate(visible):
        keys[slot, v or 0 :] = NAN
    tensors = (q, weights.float(), as_stored(keys, format), batch.positions, batch.slots)
    return (*(t.cuda() for t in tensors), rate, topk)


def chunk(draw, tokens, blocks, format=None, capacity=None, slots=1, **widths):
    """The last `tokens` positions of a sequence of 4 * blocks in the last slot."""
    args = list(inputs(draw, (blocks,) * slots, blocks=capacity or blocks, format=format, **widths))
    heads, dim = args[0].shape[1:]
    args[0] = integers(draw, tokens, heads, dim)
    args[1] = draw.integers(-2, 3, tokens, heads).float().cuda()
    args[3] = torch.arange(4 * blocks - tokens, 4 * blocks, device="cuda")
    args[4] = torch.full((tokens,), slots - 1, device="cuda")
    return args


def run(args, **options):
    torch.full((args[0].shape[0], args[6]), -7, dtype=torch.int32, device="cuda")
    return index_topk_cuda(*args, **options) if options else ops.index_topk(*args)


def reference(args):
    return ops.registered()["index_topk"].reference(args[0].float(), *args[1:])


def check_same(args, actual=None):
    actual = run(args) if actual is None else actual
    expected = reference(args)
    assert actual.dtype == torch.int32 and actual.shape == expected.shape
    for token, (a, e) in enumerate(zip(actual.sort().values, expected.sort().values, strict=True)):
        assert torch.equal(a, e), (
            f"token {token}: {int((a != e).sum())} of {len(a)} differ, {a[a != e][:8]} {e[a != e][:8]}"
        )


def check_scores(args, actual=None, tokens=None):
    """No score left out is above one that was taken, up to rounding."""
    actual = run(args) if actual is None else actual
    q, weights, keys, positions, slots, rate, topk = args
    for token in tokens or range(len(q)):
        count = int(positions[token] + 1) // rate
        key = keys_of(keys[slots[token]][None], q.shape[2], torch.float32)[0, :count]
        dots = torch.cat([q[token].double() @ part.double().T for part in key.split(65536)], 1)
        score = weights[token].double() @ dots.relu()
        picks = actual[token].long()
        assert len(set(picks.tolist())) == topk and picks.min() >= 0 and picks.max() < count
        rest = torch.ones(count, dtype=torch.bool, device="cuda")
        rest[picks] = False
        worst, best = picks[score[picks].argmin()], torch.where(rest, score, -torch.inf).argmax()
        gross = weights[token].double().abs() @ q[token].double().abs() @ key[torch.stack((worst, best))].double().abs().T
        assert score[worst] >= score[best] - 1e-5 * gross.max()


EDGES = (0, 1, 2, 511, 512, 513, 514, 527, 528, 529, 1000, 1024, 2047, 2048, 2049, 4000)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("visible", EDGES)
def test_one_token(visible, format, draw):
    blocks = None if visible < 3 else 532 if visible < 530 else 4004  # each capacity is compiled
    check_same(inputs(draw, (visible,), blocks=blocks, format=format))


@pytest.mark.parametrize("format", FORMATS)
def test_several_tokens(format, draw):
    check_same(inputs(draw, (*EDGES[:12], None, 300, None), format=format))
    for tokens in (2, 8, 16, FEW):
        check_same(inputs(draw, [*range(500, 500 + tokens)], format=format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("visible", (1024, 1535, 1536, 1537, 2049, 3071, 3072, 3073, 5000, 20000, 65537, 262145))
def test_past_the_local_limit(visible, format, draw):
    blocks = next(n for n in (2200, 20480, 262148) if n >= visible + 3)
    for tokens in ((visible,), (visible, None, 40)):
        check_same(inputs(draw, tokens, blocks=blocks, format=format))


def test_many_tokens_past_the_local_limit(draw):
    for tokens in (7, 17, FEW):
        check_same(inputs(draw, [509 + 301 * t for t in range(tokens)], format="fp4"))


@pytest.mark.parametrize("format", FORMATS)
def test_topk_1024(format, draw):
    check_same(inputs(draw, (262144, 16383, 1025), topk=1024, format=format))


@pytest.mark.parametrize(("heads", "dim", "topk"), ((4, 32, 8), (1, 64, 1), (12, 96, 33), (20, 128, 100), (64, 32, 2000)))
def test_other_widths(heads, dim, topk, draw):
    for format in FORMATS if dim != 96 else (None,):
        check_same(inputs(draw, (0, 7, 8, 9, None, 40, 333, 2100), heads, dim, topk=topk, format=format))
        check_same(inputs(draw, (9, 5), heads, dim, blocks=9, topk=topk, format=format))
        check_same(chunk(draw, 70, 2100, heads=heads, dim=dim, topk=topk, format=format))


def test_equal_scores_go_to_the_lowest_block(draw):
    for visible, tokens in ((600, 1), (5000, 1), (30000, 1), (600, 40), (30000, 40)):
        args = chunk(draw, tokens, visible)
        args[1].zero_()
        assert torch.equal(run(args).sort().values.cpu(), torch.arange(512).int().expand(tokens, 512))
        args[1].fill_(1.0)
        args[0].fill_(1.0)
        args[2][:, :visible] = 1.0
        args[2][:, 100:300] = 0.0
        check_same(args)


def test_nan_ranks_last(draw):
    for visible, tokens in ((700, 1), (20000, 1), (700, 40), (20000, 40)):
        args = chunk(draw, tokens, visible)
        args[2][0, torch.randperm(visible)[: visible // 2].cuda(), 5] = NAN
        check_same(args)
        args[2][0, :visible] = NAN
        check_same(args)
        args[2][0, 550:600] = 1.0
        args[2][0, 570] = torch.inf
        check_same(args)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("visible", (2048, 65536, 262144))
def test_random_scores(visible, format, draw):
    """Also keys that resemble their neighbours, and with the query that meets fp4 keys."""
    args = list(inputs(draw, (visible, visible * 2 // 3), exact=False, format=format))
    check_scores(args)
    keys = normal(draw, 2, visible // 64, 1, 128).expand(-1, -1, 64, -1).flatten(1, 2) + 0.3 * normal(draw, 2, visible, 128)
    args[2] = as_stored(keys, format)
    if format == "fp4":
        args[0] = simulate_fp4(args[0])
    check_scores(args)


@pytest.mark.parametrize("format", FORMATS)
def test_scales_of_every_size(format, draw):
    """Keys from 2^-60 to 2^60 in one sequence, and groups of very different size in a key."""
    args = list(inputs(draw, (3000,), exact=False, format=format))
    keys = draw.normal(1, 3000, 4, 32) * torch.exp2(draw.integers(-20, 21, 1, 3000, 4, 1).float())
    keys = (keys.flatten(2) * torch.exp2(draw.integers(-40, 41, 1, 3000, 1).float())).bfloat16().cuda()
    args[2] = as_stored(keys, format)
    check_scores(args)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("tokens", "blocks"), ((33, 4000), (130, 4000), (300, 1500), (700, 700)))
def test_chunk(tokens, blocks, format, draw):
    """A chunk of one sequence, the end of which some tokens do not see; one, two and four tokens share a block."""
    check_same(chunk(draw, tokens, blocks, format, slots=2))


@pytest.mark.parametrize("format", FORMATS)
def test_mixed_chunks(format, draw):
    """Chunks of several sequences, single tokens and padding in one batch."""
    args = chunk(draw, 600, 3000, format, slots=5)
    slots = torch.full((600,), -1)
    slots[:101], slots[103:300], slots[300:305], slots[400:600] = 0, 3, torch.tensor((4, 0, -1, 2, 1)), 2
    slots[500:530] = draw.integers(-1, 5, 30)
    args[3] = torch.where(slots.cuda() < 0, 2**40, args[3] - draw.integers(0, 11000, 600).cuda() * (slots == 2).cuda())
    args[4] = slots.cuda()
    check_same(args)


@pytest.mark.parametrize("format", FORMATS)
def test_long_chunk(format, draw):
    """At a million tokens, and as one token after another would choose; without memory for scores."""
    args = chunk(draw, 512, 262144, format)
    args[0], args[1] = normal(draw, 512, 64, 128), draw.normal(512, 64).cuda()
    run(args)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    actual = run(args)
    assert torch.cuda.max_memory_allocated() - before <= 2 * actual.nbytes + 2**20
    assert torch.equal(actual, run(args))
    check_scores(args, actual, (0, 3, 300, 511))
    for start in (0, 480):
        some = [part[start : start + FEW] if i in (0, 1, 3, 4) else part for i, part in enumerate(args)]
        assert torch.equal(run(some).sort().values, actual[start : start + FEW])


@pytest.mark.parametrize("format", FORMATS)
def test_a_planted_key_is_found_at_a_million_tokens(format, draw):
    """At the start, in the middle and at the end, for positions of every residue of 4 and of 128, many tokens or one."""
    args = chunk(draw, 128, 262144, format, exact=False)
    q = draw.normal(1, 1, 128).bfloat16().cuda()
    args[0] = q.expand(128, 64, 128).contiguous()
    args[1].fill_(1.0)
    clean = args[2].clone()
    planted = as_stored((q * 8).expand(1, 4, 128), format)
    codes = {None: 128, "fp8": 128, "fp4": 64}[format]
    for block in (0, 1, 131071, 131072, 262110, 262111):  # the last one seen at the first position is 262111
        args[2].copy_(clean)
        flat, source = args[2].flatten(), planted.flatten()
        flat[block * codes : (block + 1) * codes] = source[:codes]
        width, first = args[2].shape[2] - codes, 262144 * codes
        if width:
            flat[first + block * width : first + (block + 1) * width] = source[4 * codes : 4 * codes + width]
        assert (run(args) == block).any(1).all()
        for token in (0, 1, 2, 3, 127):
            single = [part[token : token + 1] if i in (0, 1, 3, 4) else part for i, part in enumerate(args)]
            assert (run(single) == block).any()
    seen = (args[3] + 1) // 4 - 1
    for token in (3, 64, 127):  # the last block that a token sees, and the next, which it does not
        for block in (int(seen[token]), int(seen[token]) + 1):
            if block < 262144:
                picks = run([part[token : token + 1] if i in (0, 1, 3, 4) else part for i, part in enumerate(args)])
                assert picks.max() <= seen[token]


@pytest.mark.parametrize("format", FORMATS)
def test_offsets_past_2_31(format, draw):
    """The last of so many sequences of a million tokens that its keys lie past 2^31 elements."""
    blocks, width = 262144, 128 if format is None else key_bytes(128, format)
    slots = 2**31 // (blocks * width) + 2
    keys = torch.empty(slots, blocks, width, dtype=torch.bfloat16 if format is None else torch.uint8, device="cuda")
    for tokens in (1, 2, 40):
        args = chunk(draw, tokens, 9000, format, capacity=blocks)
        expected = run(args).sort().values
        keys[-1].copy_(args[2][0])
        keys[0].fill_(0)
        args[2] = keys
        args[4].fill_(slots - 1)
        assert torch.equal(run(args).sort().values, expected)
        args[2] = keys[-1:]
        args[4].zero_()
        check_same(args, expected)


def test_one_graph_serves_every_position(draw):
    for blocks, tokens in ((2000, 2), (20000, 2), (20000, 40)):
        args = inputs(draw, (blocks,) * tokens, blocks=blocks, exact=False, format="fp4")
        run(args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.index_topk(*args)
        for where, which in (((blocks * 4, 40), (0, 1)), ((4 * 513, 4 * 512), (1, 0)), ((6000, 2**40), (1, -1))):
            args[3].copy_(torch.tensor(where).repeat(tokens // 2))
            args[4].copy_(torch.tensor(which).repeat(tokens // 2))
            out.fill_(-7)
            graph.replay()
            assert torch.equal(out, run(args))
            first = out.clone()
            graph.replay()
            assert torch.equal(out, first)


def test_shapes_agree(draw):
    args = inputs(draw, (5000, 700, 100))
    base = shape_for(1, *WIDTHS, args[2].shape[1], 512)
    for changes in ({"cluster": 2}, {"cluster": 4}, {"cluster": 8}, {"cluster": 1}, {"local": 5003}, {"local": 64}):
        check_same(args, run(args, shape=base._replace(**changes)))
    base = prefill_for(1, 1, *WIDTHS, 512)
    for changes in ({}, {"tokens": 2}, {"tokens": 4, "room": 2048}, {"room": 1024}, {"room": 1111}):
        check_same(args, run(args, shape=base._replace(**changes)))


def test_best_scores_side_by_side(draw):
    """The best blocks are neighbours, so a few warps find many times more than others, and scores rise with the block's
    number: the bound that index_score leaves keeps little away, or nothing."""
    for visible, tokens in ((9000, 1), (100_000, 1), (100_000, 40)):
        args = chunk(draw, tokens, visible, heads=4, dim=32)
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
    compact = inputs(draw, (700,), format="fp4")
    with pytest.raises(ValueError, match="bytes of a compact row"):
        ops.index_topk(*compact[:2], compact[2][..., :67].contiguous(), *compact[3:])
    with pytest.raises(ValueError, match="a multiple of 4 blocks"):
        ops.index_topk(*compact[:2], compact[2][:, :701].contiguous(), *compact[3:])
