"""The table of single ops without a GPU: what is recorded, and that the bytes of all ops are the bytes of the step."""

from functools import partial

import pytest
import torch

from dsv4.bench_ops import OpTime, call_bytes, record, table
from dsv4.compile.step import DecodeState, decode_step
from dsv4.model import config as configs
from dsv4.model.cache import Cache
from dsv4.model.plan import Sizes, buffer_bytes, step_bytes
from dsv4.model.random_source import RandomSource
from dsv4.model.transformer import Transformer

CONTEXT = 700


@pytest.mark.parametrize("form", ["nvfp4-experts", "all-nvfp4"])
@pytest.mark.parametrize("batch, kv, index", [(1, "bf16", "bf16"), (3, "bf16", "bf16"), (1, "fp8", "fp4")])
def test_bytes_of_the_ops_are_the_bytes_of_the_step(batch, kv, index, form):
    config = configs.excerpt(
        configs.flash(),
        3,
        first=1,  # sliding, CSA, HCA
        hidden_size=256,
        num_attention_heads=8,
        o_groups=2,
        index_n_heads=16,
        n_routed_experts=8,
        moe_intermediate_size=128,
        vocab_size=4096,
    )
    with torch.no_grad():
        model = Transformer(config, RandomSource("cpu", form=form))
        cache = Cache(config, batch, 1024, torch.bfloat16, "cpu", kv, index)
        state = DecodeState(batch, config.vocab_size, torch.device("cpu"))
        state.slots.copy_(torch.arange(batch))
        state.positions.fill_(CONTEXT)
        state.tokens.random_(config.vocab_size)
        calls = record(partial(decode_step, model, cache, state))
        state.slots.copy_(torch.arange(batch))  # advance_state has freed them
    names = [name for name, *_ in calls]
    assert names.count("hc_mix") == 6 and names.count("route_moe_nvfp4") == 3 and names.count("index_topk") == 1
    assert names[-2:] == ["sample", "advance_state"]
    # The step's bytes count the experts that are expected to be picked, the ops' those that were.
    experts = [torch.ops.dsv4.route_topk(*args[:6])[0] for name, _, args in calls if name == "route_moe_nvfp4"]
    picked = sum(pick.unique().numel() for pick in experts) / len(experts)
    expected = 8 * (1 - (1 - config.num_experts_per_tok / 8) ** batch)
    weights = buffer_bytes(model)
    stack = len(model.layers[0].ffn.experts.down)  # with a shared one, or without
    assert stack == (9 if form == "all-nvfp4" else 8)
    routed = sum(nbytes for name, nbytes in weights.items() if ".ffn.experts." in name) / stack
    sizes = Sizes(batch, CONTEXT, kv=kv, index=index)
    wanted = step_bytes(weights, config, sizes) + routed * (picked - expected)
    streamed = [(name, args) for name, _, args in calls if not name.startswith(("advance", "sample"))]
    found = sum(call_bytes(name, args, CONTEXT) for name, args in streamed)
    assert found == pytest.approx(wanted, rel=0.015)


def test_table():
    [_, line] = table([OpTime("linear", "1024 -> 8", 4, 2e-6, 4e6)], 4e12)
    assert line.split() == ["linear", "1024", "->", "8", "4", "2.00", "4.000", "1.00", "50%"]
