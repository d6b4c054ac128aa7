"""Plans against what is really allocated, and against the published figures of the releases."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4.model import plan
from dsv4.model.cache import Cache
from dsv4.model.config import CSA, HCA, SLIDING, flash, pro
from dsv4.model.plan import GIB, Sizes
from dsv4.model.sizes import size_text

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def engine():
    return dsv4.load(TINY, "cpu", max_batch=2, max_context=600, compile=False)


def test_plan_is_what_an_engine_holds(engine):
    weights = plan.buffer_bytes(engine.model)
    made = plan.plan(weights, engine.config, Sizes(2, 600))
    assert made.weights == engine.load_report.weight_bytes and made.cache == engine.load_report.cache_bytes
    assert made.total == made.weights + made.cache + made.working


@pytest.mark.parametrize(("kv", "index", "row"), [("bf16", "bf16", 1024), ("fp8", "fp8", 584), ("auto", "auto", 584)])
@pytest.mark.parametrize(("make", "gib"), [(flash, (6.72, 3.76, 3.43)), (pro, (9.62, 5.39, 4.92))])
def test_cache_of_a_million_tokens(make, gib, kv, index, row):
    """The published sizes, "auto" being fp8 and fp4; partial states come on top."""
    config, sizes = make(), Sizes(1, 2**20, kv=kv, index=index)
    fixed = sum(state.fixed_bytes for state in plan.layer_states(config, sizes).values())
    ring = config.num_hidden_layers * config.sliding_window * row
    expected = gib[("bf16", "fp8", "auto").index(index)]
    assert (plan.cache_bytes(config, sizes) - fixed + ring) / GIB == pytest.approx(expected, abs=0.01)


def test_layer_states_add_up(draw):
    config = flash()
    context = 128 * int(draw.integers(1, 8192, 1))
    states = plan.layer_states(config, Sizes(1, 4096))
    assert set(states) == {SLIDING, CSA, HCA} and states[SLIDING].bytes_per_token == 0
    assert states[CSA].bytes_per_token == 21 * (1024 + 256) / 4 and states[HCA].bytes_per_token == 20 * 1024 / 128
    total = sum(state.fixed_bytes + state.bytes_per_token * context for state in states.values())
    assert total == plan.cache_bytes(config, Sizes(1, context, kv="bf16", index="bf16"))
    assert total == Cache(config, 1, context, device="meta").nbytes()


def test_longest_context_is_the_longest():
    config, weights = flash(), {"head.weight": 100 * GIB}
    # 70,000 tokens of fp8 and fp4 take less than 65,536 plain ones, so "auto" fits there what it does not below.
    for kv, asked in (("bf16", 12_345), ("fp8", 12_345), ("auto", 12_345), ("auto", 70_000), ("bf16", 400_000)):
        sizes = Sizes(3, asked, kv=kv, index="auto" if kv == "auto" else "bf16")
        memory = plan.plan(weights, config, sizes).total
        longest = plan.longest_context(weights, config, sizes, memory)
        assert asked <= longest < asked + 32 and plan.plan(weights, config, replace(sizes, context=longest)).total <= memory
        assert plan.plan(weights, config, replace(sizes, context=longest + 32)).total > memory
    assert plan.longest_context(weights, config, Sizes(), 100 * GIB) == 0
    assert plan.longest_context(weights, config, Sizes(), 1000 * GIB) == config.max_position_embeddings


def test_more_gpus_share_what_tensor_parallelism_shards():
    config = flash()
    weights = {"layers.0.ffn.experts.gate_up": 800, "layers.0.attn.wq_b.weight": 80, "head.weight": 8, "embed": 3}
    weights |= {"layers.0.attn.wkv.weight": 5, "hc_head_fn": 1}
    assert sum(plan.on_each_gpu(weights, 8).values()) == 100 + 10 + 1 + 3 + 5 + 1
    assert plan.on_each_gpu(weights, 1) == weights
    with pytest.raises(ValueError, match="3 GPUs do not divide"):
        plan.plan(weights, config, Sizes(), gpus=3)


def test_step_reads_rows_of_tables_and_picked_experts():
    config = replace(flash(), n_routed_experts=256, num_experts_per_tok=6)

    def read(weights: dict[str, int], batch: int = 1) -> int:
        return plan.step_bytes(weights, config, Sizes(batch))

    base = read({})
    table = {"embed": 10**12, "embed.weight": 10**12, "layers.0.ffn.tid2eid": 10**12, "layers.0.ffn.gate.tid2eid": 10**12}
    assert read(table) == base
    apart = {"layers.9.ffn.shared_experts.down.weight": 0, "layers.9.ffn.experts.down": 256_000}
    assert read(apart) == base + 6000
    assert read({"layers.9.ffn.experts.down": 257_000}) == base + 7000  # with the shared one
    assert read({"layers.8.ffn.experts.down": 257_000} | apart) == base + 13_000
    assert read({"layers.9.attn.wkv.weight": 1000}) == base + 1000
    two = read(apart, 2) - 2 * base
    assert 11_000 < two < 12_000  # two tokens share an expert now and then
    # 42.6 MB of rows in bf16 and of index keys, as counted for Pro at 4,096 tokens, less the embedding's row
    plain, exact, compact = (
        plan.step_bytes({}, pro(), sizes) for sizes in (Sizes(), Sizes(dtype=torch.float32), Sizes(kv="fp8", index="fp4"))
    )
    assert plain == pytest.approx(48.3e6, rel=0.01) and exact > 1.9 * plain
    assert plain - compact == pytest.approx(40.4e6 * (1 - 584 / 1024) + 7.9e6 * (1 - 68 / 256), rel=0.02)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (1.5e9, "1.5 GB"), (2.25e12, "2.25 TB")]
)
def test_size_text(nbytes, text):
    assert size_text(nbytes) == text
