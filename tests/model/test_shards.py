"""Folders and their files: every way in which one is incomplete, damaged or not what it says."""

import json
import struct

import pytest
import torch

from dsv4.model.checkpoint import FolderSource
from dsv4.model.shards import Folder
from tests.model.checkpoints import build, nvfp4_experts_tensors, plain_tensors, refused, write, write_raw


def test_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "no such folder")


def test_missing_config(tmp_path):
    (write(tmp_path, plain_tensors()) / "config.json").unlink()
    refused(tmp_path, "no config.json")


def test_no_safetensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "no *.safetensors files")


def test_shards_without_index(tmp_path):
    refused(write(tmp_path, *[{"norm.weight": torch.ones(1)}] * 2, index=False), "no model.safetensors.index.json")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 1}}']
)
def test_damaged_index(tmp_path, text):
    (write(tmp_path, plain_tensors()) / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "model.safetensors.index.json")


def two_shards(tmp_path, overlap=()):
    tensors = nvfp4_experts_tensors()
    keys = sorted(tensors)
    first = {key: tensors[key] for key in keys[::2]}
    return write(tmp_path, first, {key: tensors[key] for key in [*keys[1::2], *overlap]})


def test_missing_shard(tmp_path):
    (two_shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "shard model-00002-of-00002.safetensors is missing", "download the missing shard")


def test_index_entry_without_tensor(tmp_path):
    file = two_shards(tmp_path) / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["layers.7.attn.wq_a.weight"] = "model-00002-of-00002.safetensors"
    file.write_text(json.dumps(index))
    refused(tmp_path, "model-00002-of-00002.safetensors", "no tensor layers.7.attn.wq_a.weight", "no shard has it")


def test_index_entry_with_another_shard(tmp_path):
    file = two_shards(tmp_path) / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    shard = index["weight_map"]["norm.weight"]
    other = shard.replace("0000" + shard[10], "0000" + str(3 - int(shard[10])), 1)
    index["weight_map"]["norm.weight"] = other
    file.write_text(json.dumps(index))
    refused(tmp_path, f"{other}: no tensor norm.weight", f"it is in {shard}")


def test_duplicate_tensor_in_two_shards(tmp_path):
    first = sorted(nvfp4_experts_tensors())[0]
    message = refused(two_shards(tmp_path, overlap=[first]), f"tensor {first}", "stored twice")
    assert "model-00001" in message and "model-00002" in message


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -1000])
def test_truncated_file(tmp_path, keep):
    file = write(tmp_path, plain_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors", "truncated", "download")


def test_truncated_while_reading(tmp_path):
    """The file shrinks between the check of its header and the reading of its data."""
    file = write(tmp_path, plain_tensors()) / "model.safetensors"
    folder = Folder.open(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    source = FolderSource(folder, "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="truncated while it was being read"):
        build(source)


def test_huge_header_length(tmp_path):
    refused(write_raw(tmp_path, b"{}", length=2**63), "not safetensors", str(2**63 + 8))


def test_git_lfs_pointer(tmp_path):
    (write_raw(tmp_path, b"") / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, "Git LFS pointer")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", ["corrupt header"]),
        (b"\xff\xfe{}", b"", ["corrupt header"]),
        (b"[]", b"", ["not a JSON object"]),
        (b'{"a": 1, "a": 2}', b"", ["'a' occurs twice"]),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", ["tensor a lacks"]),
        ({"a": "b"}, b"", ["tensor a lacks"]),
        ({"a": ENTRY | {"dtype": "F7"}}, b"12345678", ["tensor a", "unknown dtype 'F7'"]),
        ({"a": ENTRY | {"shape": [-2]}}, b"12345678", ["tensor a", "shape"]),
        ({"a": ENTRY | {"shape": ["2"]}}, b"12345678", ["tensor a", "shape"]),
        ({"a": ENTRY | {"shape": [3]}}, b"12345678", ["tensor a", "needs 12 bytes"]),
        ({"a": ENTRY | {"data_offsets": [-8, 0]}}, b"12345678", ["tensor a", "byte range"]),
        ({"a": ENTRY, "b": ENTRY}, b"12345678", ["tensor b", "corrupt header"]),
        ({"a": ENTRY | {"data_offsets": [4, 12]}}, b"123456789012", ["tensor a", "corrupt header"]),
        ({"a": ENTRY}, b"123456789", ["1 bytes after the last tensor"]),
        ({"a": ENTRY}, b"1234567", ["tensor a", "truncated"]),
    ],
)
def test_corrupt_header(tmp_path, header, data, words):
    refused(write_raw(tmp_path, header, data), "model.safetensors", *words)


def test_empty_tensors_and_unaligned_data(tmp_path):
    """Three bytes before a float tensor: its data does not lie on a multiple of 4."""
    header = {
        "embed.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [3, 11]},
        "x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "y": {"dtype": "F32", "shape": [0, 2], "data_offsets": [11, 11]},
        "__metadata__": {"format": "pt"},
    }
    folder = write_raw(tmp_path, header, b"abc" + struct.pack("<ff", 1.5, -2.0))
    source = FolderSource(folder, "cpu", torch.float32)
    assert source.tensor("embed.weight", (1, 2), torch.float32).tolist() == [[1.5, -2.0]]
    assert source.tensor("y", (0, 2), torch.float32).shape == (0, 2)
    with pytest.raises(ValueError, match="1 of 3 tensors have no place in this model: x;"):
        source.finish()
