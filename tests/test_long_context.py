"""examples/long_context.py and examples/index_recall.py on a small scale: what they report must be right."""

import time
from dataclasses import replace

import pytest
import torch

from dsv4.compile.runner import Runner
from dsv4.model import config as configs
from dsv4.model.cache import Cache
from dsv4.model.plan import Sizes, buffer_bytes, step_bytes
from dsv4.model.random_source import RandomSource
from dsv4.model.transformer import Transformer
from tests.examples import EXAMPLES, example
from tests.test_bench import narrow


@pytest.fixture(scope="module")
def long_context():
    return example("long_context")


@pytest.fixture(scope="module")
def runner():
    config = narrow(3)
    cache = Cache(config, 1, 512, torch.bfloat16, "cpu", "fp8", "fp4")
    return Runner(Transformer(config, RandomSource("cpu")), cache, 64, compile=False)


def test_a_prompt_and_the_steps_after_it(long_context, runner, monkeypatch, capsys):
    monkeypatch.setattr(long_context, "STEPS", 3)
    out = long_context.report(runner, 150, [40, 100, 400], fill=False, deadline=time.perf_counter() + 100)
    assert out["prefill"]["tokens"] == 150 and [step["position"] for step in out["steps"]] == [40, 100, 150]
    assert (out["kv"], out["index"], out["cache_bytes"]) == ("fp8", "fp4", runner.cache.nbytes())
    sizes = Sizes(1, 150, kv="fp8", index="fp4")
    assert out["steps"][-1]["bytes"] == step_bytes(buffer_bytes(runner.model), runner.model.config, sizes)
    assert (runner.state.slots == -1).all() and runner.state.positions.item() == 150
    text = capsys.readouterr().out
    assert "150 of 150 tokens" in text and "decode at       150: " in text


def test_the_time_is_up(long_context, runner, monkeypatch, capsys):
    """What was reached until then is measured."""
    monkeypatch.setattr(long_context, "STEPS", 1)
    out = long_context.report(runner, 500, [40, 400], fill=False, deadline=0.0)
    assert out["prefill"]["tokens"] == 64 and [step["position"] for step in out["steps"]] == [40, 64]
    assert "the time is up" in capsys.readouterr().out


def test_random_state_in_place_of_a_prompt(long_context, runner, monkeypatch):
    monkeypatch.setattr(long_context, "STEPS", 1)
    out = long_context.report(runner, 512, [128], fill=True, deadline=0.0)
    assert "prefill" not in out and [step["position"] for step in out["steps"]] == [128, 512]
    assert all(buffer.any() for buffer in runner.cache.buffers())


def test_operations_by_hand(long_context):
    """Of one CSA and one HCA layer: a quarter of the pairs of a token and an earlier one are scored, and so on."""
    config = configs.excerpt(configs.flash(), 2)
    found = long_context.operations(config, 2**20)
    assert found["index scores"] == 2**39 / 4 * 64 * 128 * 2
    keys = 2**20 * (2 * 128 + 512) + 2**39 / 128
    assert found["attention"] == keys * 64 * 512 * 4


# --- index_recall -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recall():
    return example("index_recall")


def test_recall_of_noise_falls_with_the_format(recall):
    scored = recall.of_noise(800)
    bf16, fp8, fp4 = scored.recalls()
    assert 1 > bf16 > fp8 > fp4 > 0.8 and bf16 > 0.98


def test_recall_is_whole_where_formats_lose_nothing(recall):
    """Keys and queries of -1 and 1, whose transforms are small whole numbers: exact in bf16 and fp8, and ties go the same
    way. With other keys than the oracle's the share is that of a random choice."""
    scored, draw = recall.of_noise(800), torch.Generator().manual_seed(1)
    signs = [torch.randint(0, 2, tensor.shape, generator=draw).float() * 2 - 1 for tensor in (scored.q, scored.keys)]
    scored.q, scored.keys = signs
    scored.weights = torch.ones_like(scored.weights)
    assert scored.recalls()[0] == 1
    other = recall.of_noise(800)
    other.keys = other.keys.flip(1)
    chance = (other.picked("bf16") & recall.of_noise(800).picked(None)).sum() / (32 * 512)
    assert abs(chance - 512 / 800) < 0.03


def test_keys_of_the_shipped_checkpoint(recall):
    layers = recall.of_text(EXAMPLES / "tiny", 320)
    assert [len(layer.q) for layer in layers] == [320, 320] and layers[0].keys.shape == (1, 80, 128)
    assert layers[0].positions.tolist() == list(range(320))
    for layer in layers:
        bf16, fp8, fp4 = replace_topk(layer, 40).recalls()
        assert bf16 > 0.99 and fp8 > 0.97 and fp4 > 0.9


def replace_topk(scored, topk: int):
    scored.config = replace(scored.config, index_topk=topk)
    return scored
