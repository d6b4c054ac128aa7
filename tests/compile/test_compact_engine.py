"""The engine on compact cache formats and on long contexts: what it says at load, the compiled steps, reused slots, and a
prompt that is interrupted."""

from functools import partial

import pytest
import torch

import dsv4
from dsv4.compile import engine as engine_module
from dsv4.compile.graphs import compile_step
from dsv4.compile.progress import PromptBar
from dsv4.compile.step import DecodeState, decode_step, prefill_step
from dsv4.model import plan
from dsv4.model.cache import Cache
from dsv4.model.plan import GIB, Sizes
from tests.model.random_checkpoints import VOCAB, engine, folder, model
from tests.ops.cases import assert_same_bits

COMPACT = {"kv": "fp8", "index": "fp4"}


def load(**settings) -> dsv4.Engine:
    return dsv4.load(folder("wide"), "cpu", compile=False, **settings)


def prompts(draw, *lengths: int) -> list[list[int]]:
    return [draw.integers(2, VOCAB["wide"], length).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("settings", "formats", "words"),
    [
        ({"max_context": 65536}, ("bf16", "bf16"), "MiB; loaded in"),
        ({"max_context": 65537}, ("fp8", "fp4"), "MiB (rows fp8, index keys fp4, chosen for a long context); loaded in"),
        ({"max_context": 64, **COMPACT}, ("fp8", "fp4"), "MiB (rows fp8, index keys fp4); loaded in"),
        (
            {"max_context": 2**20, "kv": "bf16"},
            ("bf16", "fp4"),
            "MiB (rows bf16, index keys fp4, chosen for a long context); loaded",
        ),
    ],
)
def test_the_report_says_what_was_chosen(settings, formats, words):
    loaded = load(dtype="bf16", **settings)
    assert (loaded.load_report.kv, loaded.load_report.index) == (loaded.cache.kv, loaded.cache.index) == formats
    assert loaded.load_report.cache_bytes == loaded.cache.nbytes() and words in str(loaded.load_report)


def test_tokens_do_not_depend_on_the_room_behind_them(draw):
    [prompt] = prompts(draw, 21)
    small, large = (load(max_context=size, prefill_chunk=4, **COMPACT) for size in (32, 70_000))
    tokens = [one.generate([prompt], 4, temperature=0.0, ignore_eos=True)[0].token_ids for one in (small, large)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_steps_are_the_eager_ones(dtype, draw):
    """To the bit, state and all, as torch.compile traces them: one graph each, mutations of byte buffers included."""
    config, batch = model("wide").config, 2
    weights = load(dtype=dtype, max_context=64).model
    states = []
    for wrap in (lambda step: step, partial(compile_step, backend="aot_eager")):
        cache = Cache(config, batch, 320, dtype, "cpu", **COMPACT)
        prefill, decode = wrap(prefill_step), wrap(decode_step)
        draw.generator.manual_seed(draw.seed)
        for start in (0, 48, 96):
            tokens = draw.integers(2, config.vocab_size, 48)
            prefill(weights, cache, tokens, torch.arange(start, start + 48), torch.ones_like(tokens))
        state = DecodeState(batch, config.vocab_size, torch.device("cpu"))
        state.slots[1], state.positions[1], state.tokens[1], state.remaining[1] = 1, 144, 5, 100
        for _ in range(5):
            decode(weights, cache, state)
        states.append(cache.state_dict() | state.state_dict())
    for name, wanted in states[0].items():
        assert_same_bits(states[1][name], wanted)


def test_requests_share_slots_without_a_trace(draw):
    """Five requests through two slots, deterministic: each has the tokens that it has alone."""
    requests = prompts(draw, 3, 70, 128, 131, 20)
    both = load(max_batch=2, max_context=160, prefill_chunk=64, deterministic=True, **COMPACT)
    options = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    together = both.generate(requests, **options)
    for request, wanted in zip(reversed(requests), reversed(together), strict=True):
        [alone] = both.generate([request], **options)
        assert alone.token_ids == wanted.token_ids and alone.logprobs == wanted.logprobs


# --- memory -----------------------------------------------------------------------------------------------------------


def test_more_than_fits_is_refused_before_any_weight_is_read(monkeypatch):
    config = model("wide").config
    weights = plan.buffer_bytes(model("wide"))
    need = plan.plan(weights, config, Sizes(2, 300_000, torch.float32, chunk=64)).total
    monkeypatch.setattr(engine_module, "device_memory", lambda device: need)
    monkeypatch.setattr("dsv4.model.shards.Reader.read", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(ValueError) as caught:
        load(max_batch=2, max_context=1_000_000, prefill_chunk=64)
    message = str(caught.value)
    longest = plan.longest_context(weights, config, Sizes(2, 1_000_000, torch.float32, chunk=64), need)
    assert abs(longest - 300_000) < 64 and f"at most {longest} tokens fit" in message and "\n" not in message
    assert f"2 x 1000000 tokens do not fit {need / GIB:.4g} GiB" in message and "max_context" in message
    monkeypatch.undo()
    monkeypatch.setattr(engine_module, "device_memory", lambda device: need)
    assert load(max_batch=2, max_context=longest, prefill_chunk=64).cache.max_context == longest


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["prefill", "generate", "stream"])
def test_an_interrupted_prompt_leaves_the_engine_usable(how, draw, monkeypatch):
    """Ctrl-C in the second chunk of a long prompt. The next call gives what it gives on a fresh engine."""
    one = engine("tiny", max_batch=2, max_context=384, prefill_chunk=32)
    long, short = draw.integers(2, VOCAB["tiny"], 300).tolist(), draw.integers(2, VOCAB["tiny"], 40).tolist()
    [wanted] = one.generate([short], 5, temperature=0.0, ignore_eos=True)
    chunks = []

    def interrupt(self, chunk) -> None:
        chunks.append(chunk)
        if len(chunks) == 2:
            raise KeyboardInterrupt

    call = {
        "prefill": lambda: one.prefill(long),
        "generate": lambda: one.generate([long], 5),
        "stream": lambda: list(one.stream(long, 5)),
    }[how]
    with monkeypatch.context() as patch:
        patch.setattr(PromptBar, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call()
    assert len(chunks) == 2 and (one.runner.state.slots == -1).all()
    [again] = one.generate([short], 5, temperature=0.0, ignore_eos=True)
    assert again.token_ids == wanted.token_ids
    assert one.prefill(long).prompt_tokens == 300
