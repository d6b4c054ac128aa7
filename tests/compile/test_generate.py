"""Engine.generate and Engine.stream on a random model: what the text is, when it ends, and that nothing beside a
request changes it. Eager steps throughout; test_engine has the compiled ones."""

import dataclasses

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import dsv4
from dsv4.compile.engine import Engine
from dsv4.compile.sampling import MAX_STOP_IDS
from tests.model.random_checkpoints import assert_same_tokens, clear_tokens, engine, expected, folder

VOCAB, CHUNK = 448, 64
GREEDY = dict(temperature=0.0, ignore_eos=True)


def one(max_batch: int = 1) -> Engine:
    return engine("tiny", max_batch=max_batch, max_context=256, prefill_chunk=CHUNK)


def prompt(draw, length: int) -> list[int]:
    return draw.integers(2, VOCAB, length).tolist()


def with_eos(*ids: int) -> Engine:
    """The shared engine with other end-of-sequence tokens in its config; undone by the test's own copy."""
    shared = one()
    own = Engine(shared.runner, shared.tokenizer, shared.load_report)
    own.config = dataclasses.replace(shared.config, eos_token_ids=ids)
    return own


# --- the tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1])
def test_greedy_is_the_argmax_of_transformers(length, draw):
    """Prompts of one token, which have no prefill, and prompts that fill chunks exactly (the last token is decoded)."""
    ids = prompt(draw, length)
    [completion] = one().generate([ids], max_new_tokens=12, **GREEDY)
    assert completion.prompt_token_ids == ids and len(completion.token_ids) == 12
    wanted = []
    while len(wanted) < 12:
        wanted.append(expected("tiny", ids + wanted)[-1].argmax().item())
    assert_same_tokens("tiny", ids, completion.token_ids, wanted)


def test_generate_of_transformers(draw):
    """The same through transformers' own generate()."""
    from tests.model.random_checkpoints import oracle

    ids = prompt(draw, 40)
    theirs = oracle("tiny").generate(
        torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    [ours] = one().generate([ids], max_new_tokens=16, **GREEDY)
    assert_same_tokens("tiny", ids, ours.token_ids, theirs[0, len(ids) :].tolist())


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_neighbours_and_order_do_not_matter(sampling, draw):
    """Five prompts through one slot and through three, in two orders, of different lengths: each gets what it gets
    alone, with the seed of its place in the list."""
    rows = [prompt(draw, length) for length in (1, 5, CHUNK + 1, 33, 130)]
    settings = GREEDY if sampling == "greedy" else dict(temperature=1.0, ignore_eos=True)
    news = 9
    order = draw.random.sample(range(len(rows)), len(rows))
    batched = one(3).generate(rows, news, seed=100, **settings)
    serial = one(1).generate(rows, news, seed=100, **settings)
    shuffled = one(3).generate([rows[i] for i in order], news, seed=200, **settings)
    assert [completion.prompt_token_ids for completion in batched] == rows
    for i, row in enumerate(rows):
        seeds = (None, None) if sampling == "greedy" else (100 + i, 200 + order.index(i))
        [alone] = one(1).generate([row], news, seed=100 + i, **settings)
        [alone_shuffled] = one(1).generate([row], news, seed=200 + order.index(i), **settings)
        assert serial[i].token_ids == alone.token_ids  # the same shapes: the same bits
        assert_same_tokens("tiny", row, batched[i].token_ids, alone.token_ids, seeds[0])
        assert_same_tokens("tiny", row, shuffled[order.index(i)].token_ids, alone_shuffled.token_ids, seeds[1])


def test_requests_of_different_ends_share_slots(draw):
    """Three slots, six requests that end at different times by a stop token: slots are refilled while others go on."""
    rows = [prompt(draw, 10) for _ in range(6)]
    free = one(1).generate(rows[:1], 16, seed=7)
    stop = free[0].token_ids[5]
    alone = [one(1).generate([row], 16, seed=7 + i, stop_token_ids=[stop])[0] for i, row in enumerate(rows)]
    together = one(3).generate(rows, 16, seed=7, stop_token_ids=[stop])
    for i, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert_same_tokens("tiny", rows[i], a.token_ids, b.token_ids, 7 + i)
        assert a.finish_reason == b.finish_reason or a.token_ids != b.token_ids


def test_equal_prompts_draw_differently_and_repeatably(draw):
    rows = [prompt(draw, 6)] * 3
    first, again = (one(3).generate(rows, 10, seed=3) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 3
    assert len({tuple(one(3).generate(rows[:1], 10)[0].token_ids) for _ in range(3)}) == 3  # a new seed each time


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 1e-40}]
)
def test_narrow_sampling_is_greedy(settings, draw):
    ids = prompt(draw, 30)
    [greedy] = one().generate([ids], 10, **GREEDY)
    [narrow] = one().generate([ids], 10, seed=1, ignore_eos=True, **settings)
    assert narrow.token_ids == greedy.token_ids


def test_sampling_settings_are_per_request(draw):
    """A sampled request beside the slots that greedy ones have used: no setting stays in a slot."""
    rows = [prompt(draw, 8) for _ in range(3)]
    wanted = one(3).generate(rows, 8, seed=5, ignore_eos=True)
    one(3).generate(rows, 8, temperature=0.1, top_k=2, top_p=0.5, min_p=0.3, repetition_penalty=1.9, seed=1)
    one(3).generate(rows, 8, stop_token_ids=[c.token_ids[1] for c in wanted], seed=5)
    again = one(3).generate(rows, 8, seed=5, ignore_eos=True)
    assert [c.token_ids for c in again] == [c.token_ids for c in wanted]


@pytest.mark.parametrize("penalty, length", [(2.0, 200), (0.6, 25), (0.4, 5)])
def test_repetition_penalty_is_that_of_transformers(penalty, length, draw):
    """Over the prompt (200 tokens are a third of the vocabulary) and over what has been generated, which a penalty
    below 1 repeats; signs apart. Each token is the argmax after their processor. The slot has held another prompt,
    whose tokens do not count."""
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    ids = clear_tokens("tiny", length, draw)
    one().generate([prompt(draw, 200)], 1)
    [completion] = one().generate([ids], 24, repetition_penalty=penalty, **GREEDY)
    logits = expected("tiny", ids + completion.token_ids)[len(ids) - 1 : -1]
    for step, token in enumerate(completion.token_ids):
        so_far = torch.tensor([ids + completion.token_ids[:step]])
        scores = processor(so_far, logits[step][None].clone())[0]
        assert scores[token] > scores.max() - 1e-3
    assert completion.token_ids != logits.argmax(-1).tolist()  # without the penalty it would be another text


# --- the end ----------------------------------------------------------------------------------------------------------


def test_length(draw):
    for count in (1, 2, 9):
        [completion] = one().generate([prompt(draw, 5)], max_new_tokens=count, **GREEDY)
        assert (len(completion.token_ids), completion.finish_reason) == (count, "length")


def test_end_of_context(draw):
    """Without max_new_tokens a sequence fills its context to the last token."""
    short = engine("tiny", max_batch=2, max_context=24, prefill_chunk=16)
    rows = [prompt(draw, length) for length in (1, 16, 17, 22, 23)]
    for row, completion in zip(rows, short.generate(rows, **GREEDY), strict=True):
        assert (len(row) + len(completion.token_ids), completion.finish_reason) == (24, "length")
        [roomy] = one().generate([row], len(completion.token_ids), **GREEDY)
        assert_same_tokens("tiny", row, completion.token_ids, roomy.token_ids)


@pytest.mark.parametrize("how", ["stop_token_ids", "eos", "second eos"])
def test_stop_tokens(how, draw):
    ids = prompt(draw, 12)
    [free] = one().generate([ids], 16, **GREEDY)
    stop = free.token_ids[draw.random.randint(0, 15)]
    at = free.token_ids.index(stop)
    if how == "stop_token_ids":
        [stopped] = one().generate([ids], 16, stop_token_ids=[stop], **GREEDY)
    else:
        eos = (stop,) if how == "eos" else (1, stop)
        [stopped] = with_eos(*eos).generate([ids], 16, temperature=0.0)
        [ignored] = with_eos(*eos).generate([ids], 16, **GREEDY)
        assert (ignored.token_ids, ignored.finish_reason) == (free.token_ids, "length")
    assert stopped.token_ids == free.token_ids[: at + 1] and stopped.finish_reason == "stop"
    assert stopped.text == one().tokenizer.decode(free.token_ids[:at])  # the stop token itself gives no text


def test_a_stop_on_the_last_token_is_a_stop(draw):
    ids = prompt(draw, 4)
    [free] = one().generate([ids], 1, **GREEDY)
    [stopped] = one().generate([ids], 1, stop_token_ids=free.token_ids, **GREEDY)
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == (free.token_ids, "", "stop")


def test_as_many_stop_tokens_as_the_table_holds(draw):
    ids = prompt(draw, 4)
    [free] = one().generate([ids], 8, **GREEDY)
    unused = [token for token in range(2, VOCAB) if token not in free.token_ids]
    table = [*unused[: MAX_STOP_IDS - 1], free.token_ids[3]]
    [stopped] = one().generate([ids], 8, stop_token_ids=table, **GREEDY)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[3]) + 1]
    with pytest.raises(ValueError, match=f"at most {MAX_STOP_IDS} stop token ids"):
        one().generate([ids], 8, stop_token_ids=[*table, unused[-1]], **GREEDY)


def test_stop_string_across_tokens(draw):
    """The text ends before the string, the tokens with the one that completed it. The string spans two tokens."""
    tokenizer, ids = one().tokenizer, prompt(draw, 9)
    for seed in range(40):
        [free] = one().generate([ids], 20, seed=seed, ignore_eos=True)
        texts = [tokenizer.decode([token]) for token in free.token_ids]
        at = next((i for i in range(4, 18) if all(t.isascii() and t.strip() for t in texts[i : i + 2])), None)
        if at is not None:
            break
    stop = texts[at][-1] + texts[at + 1][0]
    for stops in (stop, ["never there ~~", stop]):
        [got] = one().generate([ids], 20, seed=seed, ignore_eos=True, stop=stops)
        assert got.text == free.text[: free.text.index(stop)] and got.finish_reason == "stop"
        assert got.token_ids == free.token_ids[: len(got.token_ids)]
        assert stop in tokenizer.decode(got.token_ids) and stop not in tokenizer.decode(got.token_ids[:-1])


def test_stop_string_ends_the_loop(draw):
    """Through the engine: a one-character stop string, in a batch where the neighbours go on."""
    rows = [prompt(draw, 9) for _ in range(3)]
    free = one(3).generate(rows, 16, seed=11, ignore_eos=True)
    stop = next(char for completion in free for char in completion.text if char.isascii() and char.strip())
    for wanted, got in zip(free, one(3).generate(rows, 16, seed=11, ignore_eos=True, stop=stop), strict=True):
        assert got.text == wanted.text.split(stop)[0]
        assert got.finish_reason == ("stop" if stop in wanted.text else "length")
        assert got.token_ids == wanted.token_ids[: len(got.token_ids)]


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", [1, 3])
@pytest.mark.parametrize("settings", [GREEDY, dict(temperature=0.6, top_p=0.8, repetition_penalty=1.3, seed=4)])
def test_logprobs_are_those_of_the_model(max_batch, settings, draw):
    """Before penalties and temperature; the sum equals that of the teacher-forced logits, and `top` is their top."""
    rows = [prompt(draw, length) for length in (1, 20, 66)]
    completions = one(max_batch).generate(rows, 9, logprobs=4, **settings)
    for row, completion in zip(rows, completions, strict=True):
        [logits] = one().logits([row + completion.token_ids])
        wanted = logits.log_softmax(-1)[len(row) - 1 : -1]
        chosen = wanted.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        got = torch.tensor([entry.logprob for entry in completion.logprobs])
        assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
        torch.testing.assert_close(got, chosen, rtol=0, atol=2e-4)
        assert got.sum().item() == pytest.approx(chosen.sum().item(), abs=1e-3)
        values = wanted.topk(4).values
        for step, entry in enumerate(completion.logprobs):
            ids, logprobs = list(entry.top), list(entry.top.values())
            torch.testing.assert_close(torch.tensor(logprobs), values[step], rtol=0, atol=2e-4)
            torch.testing.assert_close(wanted[step][ids], values[step], rtol=0, atol=2e-4)
            assert len(set(ids)) == 4 and logprobs == sorted(logprobs, reverse=True)
            if settings is GREEDY:
                assert ids[0] == entry.token_id and logprobs[0] == pytest.approx(entry.logprob, abs=1e-5)


def test_logprobs_none_zero_and_all(draw):
    ids = prompt(draw, 3)
    [none], [zero] = (one().generate([ids], 3, logprobs=count, **GREEDY) for count in (None, 0))
    assert none.logprobs is None
    assert len(zero.logprobs) == 3 and all(entry.top == {} for entry in zero.logprobs)
    [most] = one().generate([ids], 2, logprobs=64, **GREEDY)
    assert all(len(entry.top) == 64 for entry in most.logprobs)
    assert zero.token_ids == none.token_ids and zero.token_ids[:2] == most.token_ids


# --- text and streams -------------------------------------------------------------------------------------------------


def test_text_prompts_get_bos_and_ids_do_not():
    shared = one()
    [text] = shared.generate("the quick brown fox", 5, **GREEDY)
    ids = shared.tokenizer.encode("the quick brown fox")
    assert text.prompt_token_ids == ids and ids[0] == shared.config.bos_token_id
    [same], [bare] = shared.generate([ids], 5, **GREEDY), shared.generate(ids[1:], 5, **GREEDY)
    assert same.token_ids == text.token_ids and bare.prompt_token_ids == ids[1:]
    assert text.text == shared.tokenizer.decode(text.token_ids)
    mixed = shared.generate(["the quick brown fox", tuple(ids)], 5, **GREEDY)
    assert [c.token_ids for c in mixed] == [text.token_ids] * 2
    assert shared.generate([], 5) == []


@pytest.mark.parametrize("settings", [{}, {"stop": "e"}, {"max_new_tokens": 1}, {"logprobs": 2}])
def test_stream_pieces_are_the_text(settings, draw):
    settings = dict(max_new_tokens=40, seed=draw.random.randrange(10**6)) | settings
    ids = prompt(draw, 7)
    pieces = list(one().stream(ids, **settings))
    streamed = one().last
    [whole] = one().generate([ids], **settings)
    assert "".join(pieces) == whole.text == streamed.text
    assert dataclasses.replace(streamed, timing=whole.timing) == whole
    assert all(pieces)  # no empty ones
    assert one().last is whole or one().last == whole


def test_stream_gives_whole_characters(draw):
    """Random tokens are mostly parts of characters: U+FFFD appears in the pieces exactly where it does in the text."""
    for _ in range(3):
        ids = prompt(draw, 3)
        pieces = list(one().stream(ids, 30, seed=1, ignore_eos=True))
        assert "".join(pieces) == one().tokenizer.decode(one().last.token_ids)


def test_stream_checks_its_arguments_at_the_call():
    for bad in ({"temperature": -1.0}, {"max_new_tokens": 10**6}):
        with pytest.raises(ValueError):
            one().stream([5, 6], **bad)


@pytest.mark.parametrize("how", ["closed", "dropped", "raised in", "never begun"])
def test_a_stream_that_is_not_finished_leaves_the_engine_usable(how, draw):
    ids, other = prompt(draw, 20), prompt(draw, 6)
    wanted = one().generate([other], 10, **GREEDY)[0].token_ids
    stream = one().stream(ids, 60, seed=1, ignore_eos=True)
    if how == "closed":
        next(stream)
        stream.close()
    elif how == "dropped":
        next(stream)
        del stream
    elif how == "raised in":
        with pytest.raises(KeyboardInterrupt):
            next(stream)
            stream.throw(KeyboardInterrupt)
    assert (one().runner.state.slots == -1).all() and not any(one().scheduler.rows)
    assert one().generate([other], 10, **GREEDY)[0].token_ids == wanted


@pytest.mark.parametrize("call", ["generate", "logits", "prefill", "stream"])
def test_a_call_during_an_unfinished_stream(call, draw):
    """The engine does one thing at a time. A call between two pieces of a stream is refused, or both are right: neither
    gets the other's text, and the stream does not go on with another sequence's state in its slot."""
    ids, other = prompt(draw, 20), prompt(draw, 30)
    engine = one(3)
    settings = dict(max_new_tokens=24, ignore_eos=True, seed=2)
    wanted, other_wanted = (engine.generate([row], **settings)[0].text for row in (ids, other))
    [logits] = engine.logits([other])
    stream = engine.stream(ids, **settings)
    got = next(stream)
    try:
        if call == "generate":
            assert engine.generate([other], **settings)[0].text == other_wanted
        elif call == "stream":
            assert "".join(engine.stream(other, **settings)) == other_wanted
        elif call == "logits":
            torch.testing.assert_close(engine.logits([other])[0], logits)
        else:
            engine.prefill(other)
    except RuntimeError as error:
        assert "stream" in str(error)
    try:
        got += "".join(stream)
    except RuntimeError as error:
        assert "stream" in str(error)  # it says that it cannot go on
    else:
        assert got == wanted
    finally:
        stream.close()


@pytest.mark.parametrize("where", ["prefill", "decode", "to_host"])
def test_an_error_in_a_step_leaves_the_engine_usable(where, draw, monkeypatch):
    rows = [prompt(draw, 30) for _ in range(4)]
    wanted = [c.token_ids for c in one(3).generate(rows, 8, **GREEDY)]
    runner, calls = one(3).runner, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the device is gone")
        return original(*args)

    original = getattr(runner, where)
    with monkeypatch.context() as patch:
        patch.setattr(runner, where, failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            one(3).generate(rows, 8, **GREEDY)
    assert (runner.state.slots == -1).all() and not any(one(3).scheduler.rows) and not one(3).scheduler.in_flight
    assert [c.token_ids for c in one(3).generate(rows, 8, **GREEDY)] == wanted


def test_timing_is_sane(draw):
    import time

    start = time.perf_counter()
    completions = one(3).generate([prompt(draw, 70), prompt(draw, 1), prompt(draw, 30), prompt(draw, 5)], 6, **GREEDY)
    elapsed = time.perf_counter() - start
    for completion in completions:
        timing = completion.timing
        assert timing.prompt_tokens == len(completion.prompt_token_ids)
        assert timing.new_tokens == len(completion.token_ids) == 6
        assert 0 <= timing.prefill_seconds <= timing.time_to_first_token <= elapsed
        assert 0 < timing.decode_seconds <= elapsed - timing.time_to_first_token + 1e-3
        assert timing.tokens_per_second == pytest.approx(5 / timing.decode_seconds)
    # the fourth waited for a slot, and its time to first token says so
    assert completions[3].timing.time_to_first_token > completions[0].timing.time_to_first_token
    timing = one().prefill(prompt(draw, 66))
    assert timing.prompt_tokens == 66 and timing.prefill_seconds > 0 and timing.new_tokens == 0


def test_without_a_tokenizer(draw, tmp_path):
    """Token ids work, text is empty; whatever needs text is refused."""
    bare = engine("pro", max_context=64)
    assert bare.tokenizer is None and not (folder("pro") / "tokenizer.json").exists()
    [completion] = bare.generate([[5, 6, 7]], 4, **GREEDY)
    assert (completion.text, len(completion.token_ids), completion.finish_reason) == ("", 4, "length")
    for call in (
        lambda: bare.generate("text", 4),
        lambda: bare.generate([[5]], 4, stop="x"),
        lambda: bare.stream([5], 4),
        lambda: bare.logits(["text"]),
    ):
        with pytest.raises(ValueError, match=r"tokenizer, and the checkpoint folder has no tokenizer\.json"):
            call()
    assert isinstance(dsv4.Completion, type)
