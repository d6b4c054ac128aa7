"""advance_* on CUDA: the bits of the separate kernels, whose own tests compare them with the references; in compact formats
those of the plain kernels, quantised by the reference; and replayed."""

import pytest
import torch

from dsv4.ops.row_formats import keys_of, rows_of
from tests.gpu import small_kernels
from tests.gpu.small_kernels import assert_replay_equals, poison
from tests.ops.advance_layer import COMPACT_KINDS, KINDS, Layer, Sizes, decode_batches
from tests.ops.cases import GARBAGE_POSITIONS, assert_same_bits, inert_batch, make_batch, random_steps

pytestmark = small_kernels.needs_gpu
BF16 = torch.bfloat16
FLASH = Sizes(heads=64, dim=512, index_heads=64, index_dim=128, rank=1024, rope=64, window=128, hca_rate=128)
SIZES = {
    "Flash": FLASH,
    "tiny": FLASH._replace(heads=4, index_heads=16, rank=128),
    "odd": Sizes(3, 64, 4, 32, 8, 16, 12, 6),
}
COMPACT_SIZES = {"Flash": FLASH, "odd": SIZES["odd"]._replace(dim=144)}


def compare(layer, other, batches, write):
    """Both advance by the same batches; what an inert token gets is its own business."""
    for batch in batches:
        busy = (batch.slots >= 0).cuda()
        for actual, wanted in zip(layer.advance(batch, write), other.separately(batch, write), strict=True):
            assert actual.is_contiguous()
            assert_same_bits(actual[busy], wanted[busy])
        for actual, wanted in zip(layer.state(), other.state(), strict=True):
            assert_same_bits(actual, wanted)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_decode(kind, name, draw):
    """Past a block's end of each rate and round the window, two slots and inert tokens."""
    layer = Layer(draw, kind, (135, 20), BF16, SIZES[name])
    compare(layer.fork("cuda"), layer.fork("cuda"), decode_batches((135, 20)), True)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks(kind, name, draw):
    lengths = (300, 129, 5)
    layer = Layer(draw, kind, lengths, BF16, SIZES[name])
    compare(layer.fork("cuda"), layer.fork("cuda"), random_steps(draw, lengths), False)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_after_a_chunk(kind, draw):
    """A chunk without `write` and its kv_write, then single tokens with `write`."""
    layer = Layer(draw, kind, (300, 300), BF16, FLASH)
    mine, theirs = layer.fork("cuda"), layer.fork("cuda")
    chunk = make_batch([(1, 0, 250), (-1, 0, 2), (0, 0, 254)], GARBAGE_POSITIONS)
    compare(mine, theirs, [chunk], False)
    for layer in (mine, theirs):
        _, kv, *_ = layer.separately(chunk, False)
        torch.ops.dsv4.kv_write(kv, *layer.at(chunk), layer.ring)
    compare(mine, theirs, (make_batch([(0, p + 4, p + 5), (1, p, p + 1)]) for p in range(250, 259)), True)


def compare_compact(plain, layer, formats, batches, write):
    """A layer in compact formats against a plain one, byte by byte: results and states are the plain ones quantised."""
    plain, layer = plain.fork("cuda"), layer.fork("cuda")
    for batch in batches:
        busy = (batch.slots >= 0).cuda()
        expected = plain.results_as(plain.advance(batch, write), *formats)
        poison(*expected)
        for actual, wanted in zip(layer.advance(batch, write), expected, strict=True):
            assert actual.is_contiguous()
            assert_same_bits(actual[busy], wanted[busy])
        for actual, wanted in zip(layer.state(), plain.stored_as(*formats).state(), strict=True):
            assert_same_bits(actual, wanted)


@pytest.mark.parametrize("name", COMPACT_SIZES)
@pytest.mark.parametrize(("kind", "kv", "index"), COMPACT_KINDS)
def test_compact_decode(kind, kv, index, name, draw):
    """At every residue of both rates and round the window."""
    plain = Layer(draw, kind, (135, 20), BF16, COMPACT_SIZES[name])
    compare_compact(plain, plain.stored_as(kv, index), (kv, index), decode_batches((135, 20)), True)


@pytest.mark.parametrize("name", COMPACT_SIZES)
@pytest.mark.parametrize(("kind", "kv", "index"), COMPACT_KINDS)
def test_compact_chunks(kind, kv, index, name, draw):
    lengths = (300, 129, 5)
    plain = Layer(draw, kind, lengths, BF16, COMPACT_SIZES[name])
    compare_compact(plain, plain.stored_as(kv, index), (kv, index), random_steps(draw, lengths), False)


@pytest.mark.parametrize(("kind", "kv", "index"), COMPACT_KINDS)
def test_compact_inert_and_many(kind, kv, index, draw):
    """33 slots of one token each, among them inert ones; then inert ones alone, which leave every byte."""
    plain = Layer(draw, kind, (132,) * 33, BF16, SIZES["tiny"])
    layer = plain.stored_as(kv, index)
    segments = [(slot if slot % 5 else -1, 127 - slot % 3, 128 - slot % 3) for slot in range(33)]
    batches = make_batch(segments, GARBAGE_POSITIONS), inert_batch(6)
    compare_compact(plain, layer, (kv, index), batches, True)


@pytest.mark.parametrize(("kind", "kv", "index"), COMPACT_KINDS)
def test_compact_matches_reference(kind, kv, index, draw):
    """Against the op's reference: the kernel may round the last bit before quantising to the other side, which in few
    values gives the neighbouring code."""
    plain = Layer(draw, kind, (132,) * 9, BF16, SIZES["tiny"])
    theirs = plain.stored_as(kv, index)
    mine = theirs.fork("cuda")
    batch = make_batch([(slot, 123 + slot % 5, 124 + slot % 5) for slot in range(9)])
    pairs = zip((*mine.advance(batch, True), *values(mine)), (*theirs.advance(batch, True), *values(theirs)), strict=True)
    for actual, wanted in pairs:
        actual, wanted = actual.cpu().float(), wanted.float()
        different = (actual != wanted).float().mean()
        step = 0.34 * wanted.abs().amax(-1, keepdim=True)  # of fp4, and more than one of fp8
        assert different <= 0.02 and ((actual - wanted).abs() <= step).all()


def values(layer):
    """What ring, entries and keys of a layer stand for."""
    n = layer.sizes
    found = [rows_of(buffer, n.dim, n.rope, torch.float32) for buffer in (layer.ring, *layer.main[4:])]
    return found + [keys_of(keys, n.index_dim, torch.float32) for keys in layer.index[4:]]


@pytest.mark.parametrize("count", (12, 20, 33))
@pytest.mark.parametrize("kind", KINDS)
def test_many_slots(kind, count, draw):
    """Slots of one token each, among them inert ones: one or several heads a warp, one or several tokens a cluster."""
    layer = Layer(draw, kind, (132,) * count, BF16, SIZES["tiny"])
    segments = [(slot if slot % 5 else -1, 127 - slot % 3, 128 - slot % 3) for slot in range(count)]
    compare(layer.fork("cuda"), layer.fork("cuda"), [make_batch(segments, GARBAGE_POSITIONS)], True)


@pytest.mark.parametrize("kind", KINDS)
def test_inert_tokens_change_nothing(kind, draw):
    layer = Layer(draw, kind, (9, 5), BF16, FLASH).fork("cuda")
    before = [t.clone() for t in layer.state()]
    layer.advance(inert_batch(6), True)
    for now, then in zip(layer.state(), before, strict=True):
        assert_same_bits(now, then)


@pytest.mark.parametrize(("kind", "kv", "index"), (*((kind, "bf16", "bf16") for kind in KINDS), *COMPACT_KINDS))
def test_replay_equals_eager(kind, kv, index, draw):
    layer = Layer(draw, kind, (260, 128, 9), BF16, FLASH).stored_as(kv, index).fork("cuda")
    kept = [t.clone() for t in layer.state()]
    batch = make_batch([(1, 127, 128), (-1, 0, 1), (0, 255, 256), (2, 7, 8)], GARBAGE_POSITIONS)
    inputs, at = layer.inputs(batch), layer.at(batch)
    op = getattr(torch.ops.dsv4, f"advance_{kind}")

    def reset():
        for mine, then in zip(layer.state(), kept, strict=True):
            mine.copy_(then)

    def run():
        weights = layer.kv_norm, layer.inv_freq, *at, layer.ring, *layer.main, *layer.index
        results = op(*inputs, *weights, *layer.constants(), True)
        return *results, *layer.state()

    assert_replay_equals(run, reset)


def test_unsupported_inputs_are_named(draw):
    layer = Layer(draw, "csa", (8,), BF16, FLASH).fork("cuda")
    layer.sizes = FLASH._replace(heads=63)
    with pytest.raises(ValueError, match="q_all must be 40448 wide, found 40960"):
        layer.advance(make_batch([(0, 0, 1)]), True)
    layer.sizes = FLASH
    mixed = layer.fork()
    mixed.ring = layer.stored_as("fp8", "bf16").ring
    with pytest.raises(ValueError, match="ring and entries must have the same format"):
        mixed.advance(make_batch([(0, 0, 1)]), True)
    mixed.ring = torch.zeros(1, 126, 584, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="ring must have a multiple of 4 compact rows, found 126"):
        mixed.advance(make_batch([(0, 0, 1)]), True)
    layer.z = [z.to(BF16) for z in layer.z]
    with pytest.raises(ValueError, match=r"z must be torch\.float32"):
        layer.advance(make_batch([(0, 0, 1)]), True)
