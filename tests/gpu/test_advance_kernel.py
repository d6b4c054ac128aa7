"""advance_* on CUDA: the bits of the separate kernels, whose own tests compare them with the references; and replayed."""

import pytest
import torch

from tests.gpu import small_kernels
from tests.gpu.small_kernels import assert_replay_equals
from tests.ops.advance_layer import KINDS, Layer, Sizes, decode_batches
from tests.ops.cases import GARBAGE_POSITIONS, assert_same_bits, inert_batch, make_batch, random_steps

pytestmark = small_kernels.needs_gpu
BF16 = torch.bfloat16
FLASH = Sizes(heads=64, dim=512, index_heads=64, index_dim=128, rank=1024, rope=64, window=128, hca_rate=128)
SIZES = {
    "Flash": FLASH,
    "tiny": FLASH._replace(heads=4, index_heads=16, rank=128),
    "odd": Sizes(3, 64, 4, 32, 8, 16, 12, 6),
}


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


@pytest.mark.parametrize("kind", KINDS)
def test_many_slots(kind, draw):
    """33 slots of one token each, among them inert ones."""
    layer = Layer(draw, kind, (132,) * 33, BF16, FLASH)
    segments = [(slot if slot % 5 else -1, 127 - slot % 3, 128 - slot % 3) for slot in range(33)]
    compare(layer.fork("cuda"), layer.fork("cuda"), [make_batch(segments, GARBAGE_POSITIONS)], True)


@pytest.mark.parametrize("kind", KINDS)
def test_inert_tokens_change_nothing(kind, draw):
    layer = Layer(draw, kind, (9, 5), BF16, FLASH).fork("cuda")
    before = [t.clone() for t in layer.state()]
    layer.advance(inert_batch(6), True)
    for now, then in zip(layer.state(), before, strict=True):
        assert_same_bits(now, then)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_eager(kind, draw):
    layer = Layer(draw, kind, (260, 128, 9), BF16, FLASH).fork("cuda")
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
    layer.sizes, layer.z = FLASH, [z.to(BF16) for z in layer.z]
    with pytest.raises(ValueError, match=r"z must be torch\.float32"):
        layer.advance(make_batch([(0, 0, 1)]), True)
