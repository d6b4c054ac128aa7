"""The cache: its size, and that what a sequence leaves in its slot is never seen by the next one."""

import pytest
import torch

from dsv4.model.cache import Cache
from dsv4.model.config import CSA, HCA, ModelConfig, flash, pro
from tests.model.random_checkpoints import NAMES, VOCAB, model, new_cache, run, run_in_chunks
from tests.ops.cases import Draw, assert_same_bits

MILLION = 2**20


def tokens(draw: Draw, name: str, length: int) -> list[int]:
    return draw.integers(2, VOCAB[name], length).tolist()


# --- size -------------------------------------------------------------------------------------------------------------


def entry_bytes(config: ModelConfig, context: int) -> int:
    """Compressed entries of one sequence in bfloat16: 1024 bytes a main row, 256 an index key."""
    csa, hca = config.layer_types.count(CSA), config.layer_types.count(HCA)
    return csa * (context // 4) * (1024 + 256) + hca * (context // 128) * 1024


def partial_bytes(config: ModelConfig) -> int:
    """Float32 rings of candidates and gates: CSA 8 tokens x 1024 (main) and x 256 (indexer), HCA 128 x 512."""
    csa, hca = config.layer_types.count(CSA), config.layer_types.count(HCA)
    return 2 * 4 * (csa * 8 * (1024 + 256) + hca * 128 * 512)


@pytest.mark.parametrize("config, gib, partial_mib", [(flash(), 6.72, 11.6), (pro(), 9.62, 17.8)], ids=["flash", "pro"])
def test_size_of_a_million_tokens(config, gib, partial_mib):
    """The published sizes for one sequence of 1,048,576 tokens, with bfloat16 rows and index keys. They count entries
    and window rings; the partial states come on top."""
    cache = Cache(config, 1, MILLION, torch.bfloat16, "meta")
    rings = config.num_hidden_layers * 128 * 1024
    assert cache.nbytes() == entry_bytes(config, MILLION) + rings + partial_bytes(config)
    assert (entry_bytes(config, MILLION) + rings) / 2**30 == pytest.approx(gib, abs=0.005)
    assert partial_bytes(config) / 2**20 == pytest.approx(partial_mib, abs=0.05)


@pytest.mark.parametrize("context", [1, 3, 4, 127, 128, 129, 4096, 100_000])
@pytest.mark.parametrize("slots", [1, 5])
def test_size_grows_with_slots_and_context(context, slots):
    config = flash()
    cache = Cache(config, slots, context, torch.bfloat16, "meta")
    blocks = {CSA: max(context // 4, 1), HCA: max(context // 128, 1)}
    entries = sum(blocks[kind] * (1280 if kind == CSA else 1024) for kind in config.layer_types if kind in blocks)
    assert cache.nbytes() == slots * (entries + config.num_hidden_layers * 128 * 1024 + partial_bytes(config))
    assert sum(part.nbytes for part in cache.state_of(0).values()) * slots == cache.nbytes()


def test_partial_states_are_float32_in_any_cache_dtype():
    for dtype in (torch.bfloat16, torch.float32):
        for name, buffer in Cache(pro(), 1, 256, dtype, "meta").named_buffers():
            assert buffer.dtype == (torch.float32 if name.endswith(("c_ring", "z_ring")) else dtype), name


@pytest.mark.parametrize(
    "slots, context, words",
    [
        (0, 10, ("max_batch", "at least 1", "found 0")),
        (1, 0, ("max_context", "at least 1", "found 0")),
        (1, MILLION + 1, ("max_context 1048577", "max_position_embeddings 1048576")),
    ],
)
def test_bad_sizes(slots, context, words):
    with pytest.raises(ValueError) as caught:
        Cache(flash(), slots, context, torch.bfloat16, "meta")
    assert all(word in str(caught.value) for word in words)


def test_addresses_stay(draw):
    """Steps change the buffers and never replace them: a CUDA graph holds their addresses."""
    cache = new_cache("tiny", 2)
    before = {name: buffer.data_ptr() for name, buffer in cache.named_buffers()}
    run_in_chunks("tiny", cache, 1, tokens(draw, "tiny", 140), 9)
    cache.reset(1)
    assert {name: buffer.data_ptr() for name, buffer in cache.named_buffers()} == before


# --- what stays behind ------------------------------------------------------------------------------------------------


def test_reset_zeroes_one_slot_and_no_other(draw):
    cache = new_cache("pro", 3)
    for slot in range(3):
        run_in_chunks("pro", cache, slot, tokens(draw, "pro", 270), 90)
    kept = [{name: part.clone() for name, part in cache.state_of(slot).items()} for slot in range(3)]
    cache.reset(1)
    assert all(part.any() for part in kept[1].values())  # every part had been written
    assert not any(part.any() for part in cache.state_of(1).values())
    for slot in (0, 2):
        for name, part in cache.state_of(slot).items():
            assert_same_bits(part, kept[slot][name])


def state_is_as_fresh(used: Cache, fresh: Cache, config: ModelConfig, slot: int, length: int) -> None:
    """What a sequence of `length` tokens has written has the same bits in both, ring by ring and entry by entry."""
    wanted = fresh.state_of(slot)
    for name, part in used.state_of(slot).items():
        layer = int(name.split(".")[1])
        rows = min(length, part.shape[0])
        if name.endswith("entries"):
            rows = min(length // config.rate(layer), part.shape[0])
        if rows:
            assert_same_bits(part[:rows], wanted[name][:rows])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stale", ["another sequence", "nan", "infinity"])
def test_a_reused_slot_leaves_no_trace(name, stale, draw):
    """To the bit, without any reset, for prompts that end before, at and after the first block and window."""
    fresh_fill, fill = 0.0, {"another sequence": 0.0, "nan": torch.nan, "infinity": torch.inf}[stale]
    for length in (1, 3, 4, 7, draw.random.choice((127, 128, 129)), 131):
        ids = tokens(draw, name, length + 6)
        used, fresh = new_cache(name, 2, 384, fill), new_cache(name, 2, 384, fresh_fill)
        if stale == "another sequence":
            run_in_chunks(name, used, 1, tokens(draw, name, draw.random.randint(1, 300)), 150)
        for start, size in ((0, length), *((length + i, 1) for i in range(6))):
            segment = [(1, start, ids[start : start + size])]
            assert_same_bits(run(name, used, segment)[0], run(name, fresh, segment)[0])
        state_is_as_fresh(used, fresh, model(name).config, 1, length + 6)


def test_reset_makes_no_difference(draw):
    """Admission needs no clearing: with and without a reset in between, the next sequence has the same bits."""
    first, second = tokens(draw, "tiny", 200), tokens(draw, "tiny", 150)
    caches = [new_cache("tiny") for _ in range(2)]
    for cache in caches:
        run_in_chunks("tiny", cache, 0, first, 70)
    caches[0].reset(0)
    logits = [run_in_chunks("tiny", cache, 0, second, 11) for cache in caches]
    assert_same_bits(*logits)


def test_context_shorter_than_a_block(draw):
    """A cache of 3 or 100 tokens has no room for a CSA or HCA block; up to its end it works as a large one does."""
    for context in (1, 3, 4, 5, 100):
        ids = tokens(draw, "pro", context)
        small, large = new_cache("pro", 2, context), new_cache("pro", 2)
        got, wanted = (run_in_chunks("pro", cache, 1, ids, 2) for cache in (small, large))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-5)


def test_the_last_position_fills_the_last_entry(draw):
    """max_context tokens fill every entry and touch nothing of the next slot."""
    cache = new_cache("tiny", 2, 256, fill=torch.nan)
    run_in_chunks("tiny", cache, 0, tokens(draw, "tiny", 256), 64)
    for name, part in cache.state_of(0).items():
        assert part.isfinite().all(), name
    for name, part in cache.state_of(1).items():
        assert part.isnan().all(), name
