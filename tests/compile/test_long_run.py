"""examples/soak.py and examples/throughput.py, on a small scale: what they report on a GPU they must report right."""

import json

import pytest

from tests.examples import example
from tests.model.random_checkpoints import compiled_engine


@pytest.fixture(scope="module")
def soak():
    return example("soak")


def test_requests_of_random_lengths_leave_memory_flat_and_compile_nothing(soak):
    report = soak.run(compiled_engine(), 100, 300, 8, progress=False)
    assert report["flat"] and report["graphs_compiled"] == 0 and report["host_growth_bytes"] < 8 * 2**20
    assert report["requests"] == 100 and 100 < report["new_tokens"] <= 800
    assert report["ended_by"]["stop"] > 0 and report["ended_by"]["length"] > 0


def test_growth_is_noticed(soak, monkeypatch):
    sizes = iter(range(0, 10**12, 2**27))
    monkeypatch.setattr(soak, "memory", lambda device: (next(sizes), 0))
    assert not soak.run(compiled_engine(), 10, 10, 2, progress=False)["flat"]


def test_both_ways_of_running_the_same_requests(capsys):
    throughput = example("throughput")
    report = throughput.compare(compiled_engine().runner, count=9, prompt=30, new=6)
    json.dumps(report)
    assert report["slots"] == 3 and report["requests"] == 9
    assert report["slots_full_tokens_per_second"] > 0 and report["ratio"] > 0.5
    same = [(request.prompt, request.max_new_tokens) for request in throughput.requests(9, 30, 6, 448, seed=0)]
    assert sum(new for _, new in same) == report["new_tokens"]
    assert sum(len(prompt) for prompt, _ in same) == report["prompt_tokens"]
