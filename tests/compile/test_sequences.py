"""Held slots: what of a prompt is run again, and that a state that was rewound, saved or restored goes on to the bit like
one that was not. Eager steps; a compiled one has the same state."""

import os

import pytest
import torch

import dsv4
from dsv4.compile.engine import Engine
from dsv4.compile.sequences import MARKS, covered
from dsv4.compile.snapshot import Snapshot
from tests.compile.test_generate import CHUNK, GREEDY, prompt
from tests.model.random_checkpoints import config_of, engine

# After so many tokens something in a window, a block or both has just begun, ended or been replaced.
EDGES = [127, 128, 129, 130, 255, 256, 257]


def fresh(max_batch: int = 2, max_context: int = 256) -> Engine:
    """An engine of its own on the shared weights: nothing is held."""
    shared = engine("tiny", max_batch=max_batch, max_context=max_context, prefill_chunk=CHUNK)
    return Engine(shared.runner, shared.tokenizer, shared.load_report)


@pytest.fixture
def chunks(monkeypatch):
    """Counts the tokens that go through prefill: chunks(engine) since the last call."""

    def counter(one: Engine):
        run, seen = one.runner.prefill, []

        def prefill(chunk):
            seen.append(sum(piece.count for piece in chunk.pieces))
            return run(chunk)

        monkeypatch.setattr(one.runner, "prefill", prefill)
        return lambda: [sum(seen), seen.clear()][0]

    return counter


def answer(one: Engine, slot: int, ids: list[int], count: int = 20):
    """Ids and log-probabilities of what follows, exactly."""
    [completion] = one.generate([ids], count, slot=slot, logprobs=1, **GREEDY)
    return completion.token_ids, [each.logprob for each in completion.logprobs]


def test_covered_is_what_rings_hold(draw):
    """Against rings of token numbers: after `written` tokens, is everything there that position p leaves behind?"""
    config = config_of("tiny")
    rates = {(config.rate(n), kind) for n, kind in enumerate(config.layer_types) if config.rate(n)}
    window = config.sliding_window
    assert len(rates) == 2

    def held(ring: int, written: int, first: int, last: int) -> bool:
        at = {token % ring: token for token in range(written)}
        return all(at.get(token % ring) == token for token in range(first, last))

    for written in [*range(0, 40), *draw.integers(40, 700, 12).tolist()]:
        for position in range(written + 1):
            wanted = held(window, written, max(position - window + 1, 0), position)
            for rate, kind in rates:
                back = 2 if "heavily" not in kind else 1
                wanted &= held(back * rate, written, max(position // rate - back + 1, 0) * rate, position)
            assert covered(config, position, written) == wanted, (position, written)
    assert not covered(config, 5, 4)


def test_only_what_is_new_is_run(draw, chunks):
    one = fresh()
    ran, slot, ids = chunks(one), one.hold(), prompt(draw, 70)
    first, _ = answer(one, slot, ids, 10)
    assert ran() == 69 and one.tokens(slot) == ids + first[:-1]
    longer = ids + first + prompt(draw, 5)  # the usual next turn
    second, _ = answer(one, slot, longer, 3)
    assert ran() == 1 + 4  # the last token of the answer, which was never run, and all but the last of the new ones
    assert one.last.timing.prompt_tokens == 85 and one.last.timing.kept_tokens == 79
    alone = fresh(1)  # with a cache of its own
    assert alone.generate([longer], 3, **GREEDY)[0].token_ids == second
    # the same question again, and another continuation of the first prompt
    assert answer(one, slot, longer, 3)[0] == second and ran() == 0
    assert answer(one, slot, ids, 10)[0] == first and ran() == 0
    other = [*ids[:-3], *prompt(draw, 9)]
    assert answer(one, slot, other, 4)[0] == alone.generate([other], 4, **GREEDY)[0].token_ids
    assert one.tokens(slot)[: len(other)] == other
    assert one.prefill(other, slot=slot).kept_tokens == len(other) - 1


def test_a_held_slot_is_left_alone_by_everything_else(draw):
    one = fresh(3)
    slot, ids = one.hold(), prompt(draw, 60)
    wanted = answer(one, slot, ids)
    one.rewind(slot, 59)
    before = {name: view.clone() for name, view in one.cache.state_of(slot).items()}
    others = [prompt(draw, 30) for _ in range(5)]
    one.generate(others, 8, **GREEDY)
    assert len(one.logits(others)) == 5 and len(one.score([(ids, [1]) for ids in others])) == 5
    one.prefill(others[0])
    assert all(torch.equal(view, before[name]) for name, view in one.cache.state_of(slot).items())
    assert answer(one, slot, ids) == wanted


def test_answers_beside_each_other(draw):
    """A held slot goes on while requests come and go in the others: the next step of both is one step."""
    one = fresh(2)
    slot, ids = one.hold(), prompt(draw, 40)
    stream = one.scheduler.run(one._requests([ids], dsv4.SamplingParams(12, **GREEDY), slot))
    tokens = [request.token_ids[-1] for request, _ in stream]
    assert tokens == fresh(2).generate([ids], 12, **GREEDY)[0].token_ids
    with pytest.raises(ValueError, match="found 2 prompts"):
        one.generate([ids, ids], slot=slot)


@pytest.mark.parametrize("end", ["stop string", "closed", "prefill", "interrupt"])
def test_after_an_end_that_the_device_did_not_know_of(end, draw, monkeypatch):
    """The state is behind or beyond what the host knows. It goes on exactly all the same, from where it can."""
    one = fresh()
    slot, ids = one.hold(), prompt(draw, 150)
    wanted = answer(one, slot, ids)
    one.rewind(slot, 0)
    if end == "prefill":
        run, left = one.runner.prefill, iter(range(2))

        def prefill(chunk):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return run(chunk)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(one.runner, "prefill", prefill)
            answer(one, slot, ids)
        assert one.tokens(slot) == ids[: 2 * CHUNK] and not one._sequence(slot).intact
        with pytest.raises(ValueError, match="ran beyond position 128"):
            one.snapshot(slot)
        with pytest.raises(ValueError, match="ran beyond"):
            one.mark(slot)
    elif end == "interrupt":
        run, left = one.runner.decode, iter(range(5))

        def decode():
            if next(left, None) is None:
                raise KeyboardInterrupt
            run()

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(one.runner, "decode", decode)
            answer(one, slot, ids)
        assert one.tokens(slot) == ids + wanted[0][:4]
    else:
        [request] = one._requests([ids], dsv4.SamplingParams(20, **GREEDY), slot)
        for count, _ in enumerate(one.scheduler.run([request]), 1):
            if count == 6:
                if end == "closed":
                    break
                request.finish_reason = "stop"  # what a stop string does; three more steps were launched behind it
                request.launched += 3
                one.scheduler._release(slot)
    assert one.tokens(slot) == (ids + wanted[0])[: len(one.tokens(slot))]
    assert answer(one, slot, ids) == wanted


def test_an_interruption_anywhere_leaves_nothing_that_only_seems_whole(draw, monkeypatch):
    """Ctrl-C comes where it likes. Every position that the slot then offers gives what it gives without all this."""
    one, alone = fresh(), fresh(1)
    slot, ids = one.hold(), prompt(draw, 60)
    one.prefill(ids[:30], slot=slot)
    far, [wanted] = one.snapshot(slot), one.generate([ids], 20, slot=slot, **GREEDY)
    text = ids + wanted.token_ids

    def interrupted(call, place, name: str, count: int, after: bool = False) -> None:
        run, left = getattr(place, name), iter(range(count))

        def interrupt(*arguments, **options):
            if next(left, None) is not None:
                return run(*arguments, **options)
            if after:
                run(*arguments, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, name, interrupt)
            call()
        held, sequence = one.tokens(slot), one._sequence(slot)
        state = {name: view.clone() for name, view in one.cache.state_of(slot).items()}
        record = sequence.written, sequence.marks
        assert held == text[: len(held)]
        for position in one.positions(slot)[-2:]:
            for name, view in one.cache.state_of(slot).items():
                view.copy_(state[name])
            sequence.tokens, (sequence.written, sequence.marks) = held[:], record
            one.rewind(slot, position)
            probe = [*held[:position], 7]
            [found] = one.generate([probe], 3, slot=slot, logprobs=0, **GREEDY)
            [expected] = alone.generate([probe], 3, logprobs=0, **GREEDY)
            for a, b in zip(found.logprobs, expected.logprobs, strict=True):
                assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-4)

    def again() -> None:
        one.rewind(slot, 0)
        one.generate([ids], 20, slot=slot, **GREEDY)

    interrupted(again, one.runner, "decode", 5, after=True)  # when the device, but not the host, has run it
    interrupted(again, one.scheduler, "_keep", 0, after=True)  # twice, at the end of the answer and in the cleaning up
    interrupted(again, one.scheduler, "_clear", 0)
    interrupted(lambda: one.restore(slot, far), torch.Tensor, "copy_", 5)
    one.rewind(slot, 0)
    one.prefill(ids[:30], slot=slot)
    one.generate([ids], 20, slot=slot, **GREEDY)
    interrupted(lambda: one.rewind(slot, 30), torch.Tensor, "copy_", 5)


def test_a_stream_whose_slot_is_gone_does_not_wait_forever(draw):
    one, ids = fresh(1), prompt(draw, 5)
    anywhere = one.stream(ids, 2)
    slot = one.hold()
    with pytest.raises(ValueError, match="every slot is held"):
        next(anywhere)
    named = one.stream(ids, 2, slot=slot)
    one.release(slot)
    with pytest.raises(ValueError, match="slot 0 is not held"):
        next(named)
    assert len(one.generate([ids], 2, **GREEDY)[0].token_ids) == 2


def check_edges(one: Engine, ids: list[int], edges: list[int], tmp_path, count: int = 20) -> None:
    """At each edge: `count` tokens; the same after rewinding, after restoring elsewhere, from memory and from a file."""
    slot, spare = one.hold(), one.hold()
    assert one.positions(slot) == [0]
    for edge in edges:
        one.prefill(ids[:edge], slot=slot)
        assert len(one.tokens(slot)) == edge and edge in one.positions(slot)
        snapshot = one.snapshot(slot)
        prompt = ids[: edge + 1]
        wanted = answer(one, slot, prompt, count)
        one.rewind(slot, edge)
        assert one.tokens(slot) == ids[:edge]
        assert answer(one, slot, prompt, count) == wanted
        one.restore(spare, snapshot)
        assert answer(one, spare, prompt, count) == wanted and one.tokens(spare) == one.tokens(slot)
        one.restore(spare, snapshot)  # not changed by its use
        assert one.tokens(spare) == ids[:edge]
        snapshot.save(tmp_path / "state")
        one.restore(spare, Snapshot.load(tmp_path / "state"))
        assert answer(one, spare, prompt, count) == wanted
        one.rewind(slot, edge)
    assert os.listdir(tmp_path) == ["state"]
    for edge in reversed(edges[-3:]):  # back through all of them
        one.rewind(slot, edge)
    one.release(spare)
    one.release(slot)


def test_rewind_and_restore_at_every_edge(draw, tmp_path):
    check_edges(fresh(2, 384), prompt(draw, 258), EDGES, tmp_path)


@pytest.mark.parametrize("kv, index", [("fp8", "fp4"), ("bf16", "fp8")])
def test_rewind_and_restore_compact_rows(kv, index, draw, tmp_path):
    one = dsv4.load("examples/tiny", "cpu", "bf16", 2, 1024, prefill_chunk=128, compile=False, kv=kv, index=index)
    check_edges(one, draw.integers(2, 2000, 258).tolist(), [3, 127, 257], tmp_path, 4)
    one.prefill(list(range(2, 302)), slot=(slot := one.hold()))
    assert one.folder.is_absolute()  # the checkpoint's fingerprint is taken later, perhaps in another directory
    found = f"has kv={kv} index={index} dtype=bfloat16, the engine's"
    for other, dtype in (({"kv": "bf16", "index": "bf16"}, "bfloat16"), ({"kv": kv, "index": index}, "float32")):
        another = dsv4.load("examples/tiny", "cpu", getattr(torch, dtype), 1, 1024, 128, compile=False, **other)
        wanted = f"kv={other['kv']} index={other['index']} dtype={dtype}; load with"
        with pytest.raises(ValueError, match=f"{found} {wanted}"):
            another.restore(another.hold(), one.snapshot(slot))


def test_what_cannot_be_done_is_said_and_nothing_changes(draw, tmp_path):
    one = fresh()
    slot, ids = one.hold(), prompt(draw, 200)
    one.prefill(ids, slot=slot)
    before = {name: view.clone() for name, view in one.cache.state_of(slot).items()}
    snapshot = one.snapshot(slot)
    for call, words in [
        (lambda: one.rewind(slot, 100), "cannot go back to position 100.* it can go to 0, 199, 200.*mark"),
        (lambda: one.rewind(slot, 201), "integer from 0 to 200.*found 201"),
        (lambda: one.rewind(slot, -1), "found -1"),
        (lambda: one.rewind(slot, 5.0), "found 5.0"),
        (lambda: one.rewind(7, 1), "slot 7 is not held .held: 0."),
        (lambda: one.rewind(False, 1), "slot False is not held"),
        (lambda: one.generate((ids, ids), 2, slot=slot), "found 2 prompts"),
        (lambda: one.snapshot(1), "slot 1 is not held"),
        (lambda: one.generate([ids], 2, slot=1), "slot 1 is not held"),
        (lambda: one.restore(slot, snapshot.__class__(ids, 200, "another", snapshot.formats, {})), "of checkpoint another"),
        (lambda: fresh(1, 128).restore(0, snapshot), "slot 0 is not held .held: none.; engine.hold"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    assert all(torch.equal(view, before[name]) for name, view in one.cache.state_of(slot).items())
    assert one.tokens(slot) == ids
    one.hold()
    for call in (one.hold, lambda: one.generate([ids], 2), lambda: one.logits([ids]), lambda: one.score([(ids, [1])])):
        with pytest.raises(ValueError, match="every slot is held"):
            call()


def test_damaged_files_are_refused(draw, tmp_path):
    one = fresh()
    slot = one.hold()
    one.prefill(prompt(draw, 30), slot=slot)
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    one.snapshot(slot).save(whole)
    content = whole.read_bytes()
    assert Snapshot.load(whole).tokens == one.tokens(slot)
    places = draw.integers(8, len(content), 12).tolist()
    for place in places:
        damaged.write_bytes(content[:place])
        with pytest.raises(ValueError, match="damaged"):
            Snapshot.load(damaged)
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            Snapshot.load(damaged)
    with pytest.raises(ValueError, match="no such file"):
        Snapshot.load(tmp_path / "none")
    weights = next(file for file in os.listdir("examples/tiny") if file.endswith(".safetensors"))
    with pytest.raises(ValueError, match="found no snapshot"):
        Snapshot.load(f"examples/tiny/{weights}")
    with pytest.raises(OSError):
        one.snapshot(slot).save(tmp_path / "no" / "folder")
    assert sorted(os.listdir(tmp_path)) == ["damaged", "whole"]


def test_marks_are_bounded(draw):
    one = fresh()
    slot, ids = one.hold(), prompt(draw, 2 * MARKS + 150)
    for end in range(150, len(ids)):
        one.prefill(ids[:end], slot=slot)
    assert one.positions(slot) == [0, *range(len(ids) - MARKS, len(ids))]
