"""The cache in compact formats: sizes, what is refused, and that it makes no difference how a sequence came into it."""

import pytest
import torch
from torch import Tensor

from dsv4.model.cache import COMPACT_ROWS, LONG_CONTEXT, Cache, choose_formats
from dsv4.model.config import ModelConfig, flash, pro
from dsv4.ops.row_formats import keys_of, rows_of
from tests.model.random_checkpoints import VOCAB, config_of, model
from tests.ops.cases import Draw, assert_same_bits

MILLION = 2**20
FORMATS = [("fp8", "fp4"), ("bf16", "fp8"), ("fp8", "bf16")]
ROWS = 16  # of every batch here: rows of batches of one shape take the same arithmetic, to the bit
NAME = "wide"  # the released head sizes


def new(kv: str, index: str, slots: int = 2, context: int = 288) -> Cache:
    return Cache(model(NAME).config, slots, context, torch.float32, "cpu", kv, index)


def run(cache: Cache, slot: int, ids: list[int], start: int, size: int, decode: bool = False) -> Tensor:
    """Logits of tokens from position `start` on, `size` at a time, each time in a batch filled up to ROWS."""
    parts = []
    for first in range(0, len(ids), size):
        part = ids[first : first + size]
        inert = ROWS - len(part)
        positions = [*range(start + first, start + first + len(part)), *[0] * inert]
        batch = part + [0] * inert, positions, [slot] * len(part) + [-1] * inert
        hidden = model(NAME)(*(torch.tensor(row) for row in batch), cache, decode)
        parts.append(model(NAME).logits(hidden)[: len(part)])
    return torch.cat(parts)


def values(cache: Cache, slot: int) -> dict[str, Tensor]:
    """A slot's state as numbers: the same row can be written with a scale twice as large and codes half as large."""
    state = {}
    for name, part in cache.state_of(slot).items():
        if part.dtype == torch.uint8 and ".indexer." in name:
            part = keys_of(part[None], model(NAME).config.index_head_dim, torch.float32)
        elif part.dtype == torch.uint8:
            part = rows_of(part[None], model(NAME).config.head_dim, model(NAME).config.qk_rope_head_dim, torch.float32)
        state[name] = part
    return state


def tokens(draw: Draw, length: int) -> list[int]:
    return draw.integers(2, VOCAB[NAME], length).tolist()


# --- size and choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "gib"), [(flash, 3.6), (pro, 5.1)], ids=["flash", "pro"])
def test_size_of_a_million_tokens(make, gib):
    """Of fp8 rows and fp4 keys; entries and window rows alone are the published 3.43 and 4.92 GiB."""
    cache = Cache(make(), 1, MILLION, torch.bfloat16, "meta", "fp8", "fp4")
    assert cache.nbytes() <= gib * 2**30
    widths = {name.rpartition(".")[2]: {buffer.shape[-1]} for name, buffer in cache.named_buffers()}
    assert widths["ring"] == {584}
    partial = sum(buffer.nbytes for name, buffer in cache.named_buffers() if name.endswith(("c_ring", "z_ring")))
    assert (cache.nbytes() - partial) / 2**30 == pytest.approx(gib - 0.17, abs=0.02)


@pytest.mark.parametrize("context", [1, 3, 4, 5, 127, 129, 1000, MILLION - 1])
def test_compact_buffers_have_whole_groups_of_rows(context):
    """So that the scales behind a slot's rows are aligned; no fewer rows than blocks, and plain buffers as ever."""
    plain = dict(Cache(flash(), 3, context, torch.bfloat16, "meta").named_buffers())
    for name, buffer in Cache(flash(), 3, context, torch.bfloat16, "meta", "fp8", "fp8").named_buffers():
        if name.endswith(("ring", "entries")) and not name.endswith(("c_ring", "z_ring")):
            assert buffer.dtype == torch.uint8 and buffer.shape[1] % COMPACT_ROWS == 0
            assert 0 <= buffer.shape[1] - plain[name].shape[1] < COMPACT_ROWS
        else:
            assert buffer.dtype == torch.float32 and buffer.shape == plain[name].shape


def test_auto_is_compact_for_long_contexts_where_the_widths_allow_it():
    for config in (flash(), pro()):
        assert choose_formats(config, "auto", "auto", LONG_CONTEXT) == ("bf16", "bf16")
        assert choose_formats(config, "auto", "auto", LONG_CONTEXT + 1) == ("fp8", "fp4")
        assert choose_formats(config, "bf16", "auto", MILLION) == ("bf16", "fp4")
        assert choose_formats(config, "auto", "fp8", 1) == ("bf16", "fp8")
    assert choose_formats(config_of("tiny"), "auto", "auto", MILLION) == ("bf16", "fp4")  # 112 channels without rope
    assert choose_formats(config_of("tiny", index_head_dim=48), "auto", "auto", MILLION) == ("bf16", "bf16")
    cache = Cache(flash(), 1, MILLION, torch.bfloat16, "meta", "auto", "auto")
    assert (cache.kv, cache.index) == ("fp8", "fp4")


@pytest.mark.parametrize(
    "config, kv, index, words",
    [
        (flash(), "fp4", "auto", ("kv must be one of auto, bf16, fp8", "'fp4'")),
        (flash(), "auto", "bf8", ("index must be one of auto, bf16, fp8, fp4", "'bf8'")),
        (config_of("tiny"), "fp8", "bf16", ('kv="fp8"', "128 of which 16", 'kv="bf16"')),
        (config_of("wide", sliding_window=126), "fp8", "bf16", ("sliding_window", "multiple of 4", "126", 'kv="bf16"')),
        (config_of("wide", index_head_dim=96), "bf16", "fp8", ('index="fp8"', "power of two", "96", 'index="bf16"')),
        (config_of("wide", index_head_dim=96), "bf16", "fp4", ('index="fp4"', "power of two", "96", 'index="bf16"')),
    ],
)
def test_formats_that_are_not_there_or_do_not_fit(config: ModelConfig, kv, index, words):
    with pytest.raises(ValueError) as caught:
        Cache(config, 1, 1000, torch.bfloat16, "meta", kv, index)
    assert all(word in str(caught.value) for word in words), caught.value


# --- sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "index"), FORMATS)
def test_chunks_and_decode_agree_to_the_bit(kv, index, draw):
    """At every residue of a block of 4, across the end of a block of 128 and where the window's ring begins anew: what a
    token sees of itself and of its neighbours in the batch is what the ring gives back of it later."""
    ids, start = tokens(draw, 140), 120
    cache = new(kv, index)
    run(cache, 1, ids[:start], 0, ROWS)
    wanted = None
    for size, decode in ((ROWS, False), (1, True), (1, False), (3, False), (7, False)):
        fresh = new(kv, index)
        fresh.load_state_dict(cache.state_dict())
        logits = run(fresh, 1, ids[start:], start, size, decode)
        if wanted is None:
            wanted, state = logits, values(fresh, 1)
        assert_same_bits(logits, wanted)
        for name, part in values(fresh, 1).items():
            assert_same_bits(part, state[name])
        assert all(not part.any() for part in fresh.state_of(0).values())


@pytest.mark.parametrize(("kv", "index"), FORMATS)
def test_formats_matter_a_little(kv, index, draw):
    """Other logits than those of plain rows, but near: by what rounding to 8 or 4 bits explains."""
    ids = tokens(draw, 64)
    plain, compact = (run(new(*formats), 0, ids, 0, ROWS) for formats in (("bf16", "bf16"), (kv, index)))
    share = (compact - plain).std(-1) / plain.std(-1)
    picked = 4 * model(NAME).config.index_topk  # up to here every block is picked, whatever the keys' format
    assert (share[:picked] < 1e-5).all() if kv == "bf16" else (share > 1e-3).all()
    assert share.median() < 0.15


@pytest.mark.parametrize(("kv", "index"), FORMATS)
def test_a_reused_slot_leaves_no_trace(kv, index, draw):
    """To the bit and without a reset, also where every byte was 255, which is NaN in all formats."""
    ids = tokens(draw, 20)
    fresh, used, garbage = (new(kv, index) for _ in range(3))
    run(used, 1, tokens(draw, 40), 0, ROWS)
    for buffer in garbage.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else 255)
    wanted = run(fresh, 1, ids, 0, 5)
    for cache in (used, garbage):
        assert_same_bits(run(cache, 1, ids, 0, 5), wanted)
    used.reset(1)
    assert not any(part.any() for part in used.state_of(1).values())
    assert_same_bits(run(used, 1, ids, 0, 5), wanted)


def test_the_last_position_fills_the_last_entry(draw):
    """A context that is no multiple of a block, up to its end."""
    short, long = new("fp8", "fp4", context=131), new("fp8", "fp4", context=300)
    ids = tokens(draw, 131)
    assert_same_bits(run(short, 0, ids, 0, ROWS), run(long, 0, ids, 0, ROWS))
    assert all(not part.any() for part in short.state_of(1).values())
