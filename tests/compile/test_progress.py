"""The progress bars: what they say, and when they are there."""

import io
import re
import sys
from functools import partial

import pytest
from tqdm import tqdm

from dsv4.compile import progress
from dsv4.compile.prefill import Chunk, Piece
from tests.model.random_checkpoints import engine

PROMPTS = [[5, 6, 7], [8, 9], [10], [11, 12]]


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Before stderr is looked at: making the checkpoint writes there too."""
    generate(PROMPTS[:1])


def generate(prompts=PROMPTS, **settings):
    return engine("tiny", max_batch=3, max_context=64).generate(prompts, 3, seed=1, ignore_eos=True, **settings)


def test_a_bar_if_asked(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY", 0)
    shown = [completion.token_ids for completion in generate(progress=True)]
    bar = capsys.readouterr().err
    assert "generate: 100%" in bar and "4/4" in bar
    assert " tokens/s, 3/3 slots, 4 left]" in bar and " tokens/s, 1/3 slots, 1 left]" in bar
    assert bar.rstrip().endswith(" tokens/s, 0/3 slots, 0 left]")
    assert [completion.token_ids for completion in generate(progress=False)] == shown
    assert not capsys.readouterr().err


def test_a_bar_on_a_terminal_for_several_prompts(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    generate(PROMPTS[:1])
    generate(progress=False)
    assert not sys.stderr.getvalue()
    generate()
    assert "4/4" in sys.stderr.getvalue()


def test_no_bar_in_a_file(capsys):
    generate()
    assert not capsys.readouterr().err


def test_a_long_prompt_has_a_bar_of_its_own(capsys, monkeypatch):
    """Tokens done, tokens a second, time left; gone when the prompt is through."""
    monkeypatch.setattr(progress, "_PATIENCE", 0)
    monkeypatch.setattr(progress, "tqdm", partial(tqdm, mininterval=0))
    long = engine("tiny", max_context=384, prefill_chunk=32)
    prompt = [5 + number % 400 for number in range(200)]
    quiet = long.generate(prompt, 3, temperature=0.0, progress=False)
    assert not capsys.readouterr().err
    shown = long.generate(prompt, 3, temperature=0.0, progress=True)
    bar = capsys.readouterr().err
    assert shown[0].token_ids == quiet[0].token_ids
    assert re.search(r"prompt: +\d+%\|.*\| 160/199 tokens \[\d\d:\d\d<\d\d:\d\d, +[\d.]+ tokens/s\]", bar)
    assert not bar.split("\r")[-1].strip()  # the line is cleared
    long.prefill(prompt, progress=True)
    assert "/200 tokens [" in capsys.readouterr().err
    assert "".join(long.stream(prompt, 3, temperature=0.0, progress=True)) == shown[0].text
    assert "/199 tokens [" in capsys.readouterr().err


def test_what_a_held_slot_has_already_is_not_counted(capsys):
    """Neither for the rate nor as left."""
    with progress.PromptBar(300, True) as bar:
        for position in (200, 250):
            bar.add(Chunk([], [], [], [Piece(0, 0, position, 50)]))
            assert (bar._bar.n, bar._bar.initial) == (position + 50, 200)
    assert not capsys.readouterr().err  # it took less than a second
