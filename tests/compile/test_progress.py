"""The progress bar: what it says, and when it is there."""

import io
import sys

import pytest

from dsv4.compile import progress
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
