"""SamplingParams: defaults, and one clear error for every value that makes no sense."""

import math

import pytest

import dsv4
from dsv4.compile.sampling import MAX_STOP_IDS, Completion, SamplingParams, Timing
from dsv4.compile.step import DecodeState


def test_defaults_are_off():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.stop, params.stop_token_ids) == (1.0, (), ())
    assert (params.max_new_tokens, params.logprobs, params.ignore_eos) == (None, None, False)
    assert dsv4.SamplingParams is SamplingParams and dsv4.Completion is Completion


def test_none_is_the_default_as_in_transformers():
    params = SamplingParams(top_k=None, top_p=None, min_p=None, seed=None, stop=None, stop_token_ids=None)
    assert (params.top_k, params.top_p, params.min_p, params.stop, params.stop_token_ids) == (0, 1.0, 0.0, (), ())


def test_a_seed_is_drawn_if_none_is_given():
    assert len({SamplingParams().seed for _ in range(20)}) == 20


def test_prompts_of_a_list_have_seeds_of_their_own():
    params = SamplingParams(seed=5, temperature=0.5)
    assert [params.for_prompt(i).seed for i in range(3)] == [5, 6, 7]
    assert params.for_prompt(2).temperature == 0.5
    assert SamplingParams(seed=2**63 - 1).for_prompt(1).seed == 0


def test_stop_may_be_one_string():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


GOOD = [
    *[("temperature", value) for value in (0, 0.0, 1e-3, 1, 100.0)],
    *[("top_k", value) for value in (-1, 0, 1, 10**6)],
    *[("top_p", value) for value in (1e-6, 0.5, 1, 1.0)],
    *[("min_p", value) for value in (0, 0.0, 1, 1.0)],
    *[("repetition_penalty", value) for value in (0.5, 1, 3.0)],
    *[("seed", value) for value in (0, 2**63 - 1)],
    *[("max_new_tokens", value) for value in (1, 10**9)],
    *[("logprobs", value) for value in (0, 64)],
]
BAD = [
    *[("temperature", value) for value in (-1, -1e-9, math.nan, math.inf, "hot", [1.0], None, 1e39, 10**400)],
    *[("top_k", value) for value in (-2, 1.5, "5", 2**63, 2**70)],
    *[("top_p", value) for value in (0, 0.0, -0.1, 1.0001, 2, math.nan, "1")],
    *[("min_p", value) for value in (-0.1, 1.1, math.nan, "0")],
    *[("repetition_penalty", value) for value in (0, 0.0, -1, math.nan, math.inf, "1", None, 1e39)],
    *[("seed", value) for value in (-1, 2**63, 1.0, "7")],
    *[("max_new_tokens", value) for value in (0, -1, 1.0, "5")],
    *[("logprobs", value) for value in (-1, 65, 1.0, "2")],
    *[("stop", value) for value in ("", [""], ["a", ""], [5], 5)],
    *[("stop_token_ids", value) for value in ([1.0], ["1"], 5, [2**63])],
]


@pytest.mark.parametrize("name, value", GOOD)
def test_good_values_are_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("name, value", BAD, ids=lambda value: str(value)[:20])
def test_bad_values_are_one_line_with_the_name(name, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ") and "\n" not in message and len(message) < 600


@pytest.mark.parametrize("name, value", GOOD)
def test_good_values_fit_the_tables_of_the_decode_step(name, value):
    """What is accepted can be written to the device's state, and is still off or on there."""
    state = DecodeState(1, 4, "cpu")
    table = getattr(state, {"seed": "seeds", "max_new_tokens": "remaining"}.get(name, name), None)
    if table is not None:
        table[0] = value
        assert table[0].item() == pytest.approx(value) and (table[0].item() > 0) == (value > 0)
    assert state.stop_ids.shape == (1, MAX_STOP_IDS)


def test_tokens_per_second():
    assert Timing(new_tokens=1, decode_seconds=0.0).tokens_per_second == 0.0
    assert Timing(new_tokens=0).tokens_per_second == 0.0
    assert Timing(new_tokens=11, decode_seconds=2.0).tokens_per_second == 5.0  # the first has its own time
