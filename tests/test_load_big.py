"""The host memory of a load, on a checkpoint of examples/load_big.py; and that script itself."""

import sys

import pytest
import torch

from dsv4.model import read_ahead
from dsv4.model.checkpoint import load_folder
from dsv4.model.config import ModelConfig
from dsv4.model.shards import Folder
from dsv4.model.transformer import Transformer
from tests.examples import example
from tests.model.tiny_oracle import TINY

MIB = 2**20
SCRIPT = TINY.parent / "load_big.py"


@pytest.fixture(scope="module")
def script():
    return example("load_big")


@pytest.fixture(scope="module")
def checkpoint(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("big") / "checkpoint"
    script.write(folder, script.configuration(layers=1, experts=12, vocab=4096), threads=2)
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_host_memory_beside_the_weights(script, checkpoint, monkeypatch):
    """The largest tensor, what is read ahead, and a little: far less than the 300 MB of the file."""
    monkeypatch.setattr(read_ahead, "LIMIT", 16 * MIB)
    config, tensors = ModelConfig.from_folder(checkpoint), Folder.open(checkpoint).tensors
    total, largest = (pick(stored.nbytes for stored in tensors.values()) for pick in (sum, max))
    with script.Watch() as watch:
        model, _ = load_folder(checkpoint, lambda source: Transformer(config, source), "cpu", torch.bfloat16)
    beside = watch.peak - watch.start - sum(buffer.nbytes for buffer in model.buffers())
    assert total > 300 * MIB and beside < largest + 16 * MIB + 100 * MIB, f"{beside / MIB:.0f} MiB"


def test_the_table(script, checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(checkpoint), "--device", "cpu"])
    assert script.main() == 0
    out = capsys.readouterr().out
    assert "loaded, cold" in out and "GB/s" in out and "largest tensor + 2 GiB: kept" in out
