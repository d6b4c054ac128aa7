"""dsv4 bench without a GPU: its arithmetic, its refusals, and random weights that a model can be built from."""

import dataclasses

import pytest
import torch

from dsv4 import bench, cli
from dsv4.bench_peer import transformers_layer
from dsv4.model import config as configs
from dsv4.model.cache import Cache
from dsv4.model.linear import Fp8BlockLinear, Nvfp4Experts, Nvfp4Linear, PlainExperts, PlainLinear
from dsv4.model.plan import Sizes, buffer_bytes, step_bytes
from dsv4.model.random_source import FORMATS, RandomSource, fill_cache
from dsv4.model.transformer import Transformer
from dsv4.ops.row_formats import keys_of, rows_of

PLAIN, COMPACT = ("bf16", "bf16"), ("fp8", "fp4")


def narrow(layers: int):
    """V4-Flash's layers at a fraction of its width."""
    whole = configs.flash()
    return dataclasses.replace(
        whole,
        num_hidden_layers=layers,
        layer_types=whole.layer_types[1 : 1 + layers],
        mlp_layer_types=whole.mlp_layer_types[1 : 1 + layers],
        hidden_size=128,
        num_attention_heads=4,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=128,
        index_n_heads=16,
        n_routed_experts=8,
        moe_intermediate_size=128,
        vocab_size=512,
    )


@pytest.mark.parametrize("form", FORMATS)
def test_random_weights_give_finite_logits_of_sane_size(form):
    config = narrow(4)
    model = Transformer(config, RandomSource("cpu", form=form))
    cache = Cache(config, 1, 256)
    rows = torch.arange(140)
    logits = model.logits(model(rows, rows, torch.zeros_like(rows), cache))
    assert logits.isfinite().all() and 0.1 < logits.std() < 10


def test_the_peer_is_a_layer_of_transformers(capsys):
    pytest.importorskip("transformers.models.deepseek_v4")
    seconds = transformers_layer(narrow(2), context=20, steps=4, device="cpu")
    assert set(seconds) == {"CSA", "HCA"} and all(-1 < value < 10 for value in seconds.values())
    assert capsys.readouterr().err.count("ms a layer") == 2


@pytest.mark.parametrize("form", FORMATS)
def test_random_weights_have_the_modules_of_their_format(form):
    """Of everything but the head, which is plain in all of them; scales of MXFP4 experts are powers of two."""
    model = Transformer(narrow(4), RandomSource("cpu", form=form))
    modules = {name: module for name, module in model.named_modules() if type(module).__module__ == "dsv4.model.linear"}
    assert type(modules.pop("head")) is PlainLinear
    kinds = {type(module) for module in modules.values()}
    assert (
        kinds
        == {
            "nvfp4-experts": {Nvfp4Experts, Fp8BlockLinear, PlainLinear},
            "mxfp4": {Nvfp4Experts, Fp8BlockLinear, PlainLinear},
            "all-nvfp4": {Nvfp4Experts, Nvfp4Linear},
            "bf16": {PlainExperts, PlainLinear},
        }[form]
    )
    if form != "bf16":
        powers = torch.log2(model.layers[0].ffn.experts.gate_up_scale_2) % 1 == 0
        assert powers.all() if form == "mxfp4" else not powers.any()


def test_bytes_of_the_releases():
    """The figures of a whole step at batch 1 and 4,096 tokens, within 2 % of the counts made from the tensor list:
    11.43 GB (Flash) and 40.44 GB (Pro) with 584-byte rows; plain ones are 1,024 and index keys 256 bytes."""
    for config, expected in ((configs.flash(), 11.43e9), (configs.pro(), 40.44e9)):
        weights = buffer_bytes(Transformer(config, RandomSource("meta")))
        plain, compact = (step_bytes(weights, config, Sizes(kv=kv, index=index)) for kv, index in (PLAIN, COMPACT))
        assert compact < plain and [plain, compact] == pytest.approx([expected] * 2, rel=0.02)


@pytest.mark.parametrize(("kv", "index"), [PLAIN, COMPACT, ("fp8", "fp8")])
def test_random_state_is_of_unit_size(kv, index):
    """In every format and every row, with more rows than are drawn at a time."""
    config = configs.excerpt(narrow(3), 2, first=0)
    cache = Cache(config, 2, 70_000, kv=kv, index=index)
    fill_cache(cache, config)
    [csa] = (layer for layer in cache.layers if layer.indexer is not None)
    rows = rows_of(csa.compressor.entries, 512, 64, torch.float32)
    keys = keys_of(csa.indexer.entries, 128, torch.float32)
    for values in (rows, keys, rows_of(csa.ring, 512, 64, torch.float32), csa.compressor.c_ring):
        spread = values.std(-1)
        assert ((spread > 0.6) & (spread < 1.4)).all()
    assert len(keys.flatten(0, 1).unique(dim=0)) == keys.shape[0] * keys.shape[1]


def test_cost_of_a_layer_from_two_depths():
    def row(layers, seconds, launches):
        return {"layers": layers, "batch": 1, "seconds": seconds, "bytes": layers * 100, "kernels": {"k": (launches, 5.0)}}

    [layer] = bench.per_layer([row(6, 7e-4, 66), row(12, 13e-4, 126)], bandwidth=1e6)
    assert layer["seconds"] == pytest.approx(1e-4) and layer["outside_seconds"] == pytest.approx(1e-4)
    assert layer["kernels"] == 10 and layer["of_floor"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--layers", "a"], "--layers"),
        (["--layers", "1,2,3"], "--layers"),
        (["--batch", "0"], "--batch"),
        (["--context", "0"], "--context"),
        *([] if torch.cuda.is_available() else [([], "needs a CUDA device")]),
    ],
)
def test_refusals(arguments, words, capsys):
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
