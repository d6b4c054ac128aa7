"""Plans against what is really allocated, and against the published figures of the releases."""

import dataclasses
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4.model import plan
from dsv4.model.cache import Cache
from dsv4.model.config import CSA, HCA, SLIDING, flash, pro
from dsv4.model.plan import GIB
from dsv4.model.sizes import size_text

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def engine():
    return dsv4.load(TINY, "cpu", max_batch=2, max_context=600, compile=False)


def test_plan_is_what_an_engine_holds(engine):
    weights = plan.buffer_bytes(engine.model)
    made = plan.plan(weights, engine.config, batch=2, context=600)
    assert made.weights == engine.load_report.weight_bytes and made.cache == engine.load_report.cache_bytes
    assert made.total == made.weights + made.cache + made.working


@pytest.mark.parametrize(("make", "gib"), [(flash, 6.72), (pro, 9.62)])
def test_cache_of_a_million_tokens(make, gib):
    """The published sizes with rows and index keys in bf16; partial states come on top."""
    config = make()
    fixed = sum(state.fixed_bytes for state in plan.layer_states(config).values())
    ring = config.num_hidden_layers * config.sliding_window * config.head_dim * 2
    states = plan.cache_bytes(config, 1, 2**20)
    assert (states - fixed + ring) / GIB == pytest.approx(gib, abs=0.01)


def test_layer_states_add_up(draw):
    config = flash()
    context = 128 * int(draw.integers(1, 8192, 1))
    states = plan.layer_states(config)
    assert set(states) == {SLIDING, CSA, HCA} and states[SLIDING].bytes_per_token == 0
    assert states[CSA].bytes_per_token == 21 * (1024 + 256) / 4 and states[HCA].bytes_per_token == 20 * 1024 / 128
    total = sum(state.fixed_bytes + state.bytes_per_token * context for state in states.values())
    assert total == plan.cache_bytes(config, 1, context) == Cache(config, 1, context, device="meta").nbytes()


def test_longest_context_is_the_longest():
    config, weights = flash(), {"head.weight": 100 * GIB}
    memory = 100 * GIB + plan.working_bytes(config, 3) + plan.cache_bytes(config, 3, 12_345)
    longest = plan.longest_context(weights, config, memory, batch=3)
    assert plan.plan(weights, config, 3, longest).total <= memory < plan.plan(weights, config, 3, longest + 4).total
    assert abs(longest - 12_345) < 4
    assert plan.longest_context(weights, config, 100 * GIB) == 0
    assert plan.longest_context(weights, config, 1000 * GIB) == config.max_position_embeddings


def test_more_gpus_share_what_tensor_parallelism_shards():
    config = flash()
    weights = {"layers.0.ffn.experts.gate_up": 800, "layers.0.attn.wq_b.weight": 80, "head.weight": 8, "embed": 3}
    weights |= {"layers.0.attn.wkv.weight": 5, "hc_head_fn": 1}
    assert sum(plan.on_each_gpu(weights, 8).values()) == 100 + 10 + 1 + 3 + 5 + 1
    assert plan.on_each_gpu(weights, 1) == weights
    with pytest.raises(ValueError, match="3 GPUs do not divide"):
        plan.plan(weights, config, gpus=3)


def test_step_reads_rows_of_tables_and_picked_experts():
    config = dataclasses.replace(flash(), n_routed_experts=256, num_experts_per_tok=6)
    base = plan.step_bytes({}, config, 1, 4096)
    table = {"embed": 10**12, "embed.weight": 10**12, "layers.0.ffn.tid2eid": 10**12, "layers.0.ffn.gate.tid2eid": 10**12}
    assert plan.step_bytes(table, config, 1, 4096) == base
    assert plan.step_bytes({"layers.9.ffn.experts.down": 256_000}, config, 1, 4096) == base + 6000
    assert plan.step_bytes({"layers.9.attn.wkv.weight": 1000}, config, 1, 4096) == base + 1000
    two = plan.step_bytes({"layers.9.ffn.experts.down": 256_000}, config, 2, 4096) - 2 * base
    assert 11_000 < two < 12_000  # two tokens share an expert now and then
    # 42.6 MB of rows in bf16 and of index keys, as counted for Pro at 4,096 tokens, less the embedding's row
    assert plan.step_bytes({}, pro(), 1, 4096) == pytest.approx(48.3e6, rel=0.01)
    assert plan.step_bytes({}, pro(), 1, 4096, torch.float32.itemsize) > 1.9 * plan.step_bytes({}, pro(), 1, 4096)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (1.5e9, "1.5 GB"), (2.25e12, "2.25 TB")]
)
def test_size_text(nbytes, text):
    assert size_text(nbytes) == text
