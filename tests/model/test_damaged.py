"""Damaged checkpoints, generated from whole ones of every format: each gives one clear error of one line, none loads."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.model.transformer import Transformer
from tests.model import checkpoints as mini
from tests.model.format_checkpoints import VARIANTS, config, tensors_of

CHOSEN = (
    *("native", "native, fused", "base, .scale", "base, F32 .weight_scale_inv", "base, fused", "nvfp4 experts"),
    *("all nvfp4", "all nvfp4, fused", "compressed-tensors experts", "compressed-tensors, fused"),
)
# What follows a module's name, or a fused tensor's, whose weight has no ending.
SUFFIX = re.compile(
    r"(?:[._](?:weight|weight_packed|weight_global_scale|weight_scale(?:_inv|_2)?|scale|scale_inv)|(?<=_proj))$"
)
QUANTISED = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
VIEWED_AS = {
    torch.uint8: torch.int8,
    torch.int8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float32: torch.int32,
}
NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e8m0fnu: 0xFF}


def build(source) -> Transformer:
    return Transformer(config(), source)


def refused(folder: Path, *words: str, headers: bool = True) -> str:
    return mini.refused(folder, *words, request=build, headers=headers)


def write_with_config(path: Path, *shards: dict[str, Tensor]) -> Path:
    mini.write(path, *shards)
    (path / "config.json").write_text(json.dumps(config().to_json()))
    return path


def kinds_of(name: str) -> dict[tuple[str, str], list[str]]:
    """The parts of quantised weights in a variant's file by kind, such as ("expert", ".weight_scale")."""
    kinds = {}
    for key, tensor in tensors_of(VARIANTS[name])[0].items():
        suffix = SUFFIX.search(key)
        if (
            suffix
            and "hc" not in key
            and "input" not in key
            and (tensor.dtype in QUANTISED or (tensor.dtype == torch.float32 and "scale" in key))
        ):
            kinds.setdefault(("expert" if ".experts." in key else "linear", suffix[0]), []).append(key)
    return kinds


def damages(tensor: Tensor, is_scale: bool) -> dict[str, Tensor | None]:
    out = {"missing": None, "dtype": tensor.view(VIEWED_AS[tensor.dtype])}
    out["shape"] = tensor[:-1].contiguous() if tensor.numel() > 1 else tensor.reshape(1).expand(3).contiguous()
    if is_scale:
        bad = tensor.clone()
        if tensor.dtype in NAN:
            bad.view(torch.uint8).view(-1)[-1] = NAN[tensor.dtype]
        else:
            bad.view(-1)[-1] = torch.nan
        out["NaN"] = bad
    return out


@pytest.mark.parametrize("damage", ["missing", "dtype", "shape", "NaN"])
@pytest.mark.parametrize("name", CHOSEN)
def test_damaged_tensor(name, damage, tmp_path, draw):
    """One part of one weight, of each kind that the format has, is gone, of another dtype or shape, or holds a NaN."""
    tensors = tensors_of(VARIANTS[name])[0]
    kinds = kinds_of(name)
    assert len(kinds) >= 4
    for number, (kind, keys) in enumerate(kinds.items()):
        key = draw.random.choice(keys)
        changes = damages(tensors[key], "scale" in kind[1])
        if damage not in changes:
            continue
        changed = {k: v for k, v in (tensors | {key: changes[damage]}).items() if v is not None}
        folder = write_with_config(tmp_path / str(number), changed)
        named = key[: SUFFIX.search(key).start()]
        if damage == "missing" and key.endswith(".weight"):  # nobody can know under which of its two names it would be
            named = re.sub(
                r"compressor\.indexer\.(?:scorer\.)?weights_proj", "compressor.indexer.scorer.weights_proj", named
            )
        message = refused(folder, str(folder), named, headers=damage != "NaN")
        assert len(message) < 500


@pytest.mark.parametrize("name", CHOSEN)
def test_flipped_bits_in_the_header(name, tmp_path, draw):
    """Any bit of the length or the header: nothing in it may be wrong and stay unnoticed."""
    file = write_with_config(tmp_path, tensors_of(VARIANTS[name])[0]) / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    places = [draw.random.randrange(8), *(draw.random.randrange(8, 8 + length) for _ in range(6))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.random.randrange(8)
        file.write_bytes(damaged)
        refused(tmp_path, str(tmp_path))


def split(file: Path) -> tuple[list[tuple[str, dict]], bytes]:
    """The entries of a header in the order of their data, and the data."""
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    entries = [(k, v) for k, v in json.loads(whole[8 : 8 + length]).items() if k != "__metadata__"]
    return sorted(entries, key=lambda entry: entry[1]["data_offsets"]), whole[8 + length :]


def join(entries: list[tuple[str, dict]]) -> bytes:
    """A header that may have a key twice."""
    return ("{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in entries) + "}").encode()


def rewrite(path: Path, entries: list[tuple[str, dict]], data: bytes) -> None:
    header = join(entries)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize("name", CHOSEN)
def test_damaged_layout(name, tmp_path, draw):
    """Names that occur twice, byte ranges that overlap or leave a gap, and data cut off or appended."""
    file = write_with_config(tmp_path, tensors_of(VARIANTS[name])[0]) / "model.safetensors"
    entries, data = split(file)
    twins = [i for i, (k, _) in enumerate(entries) if k.endswith("norm.weight") and 0 < i < len(entries) - 1]
    spot = draw.random.choice(twins)  # there are others of its dtype and shape
    key, entry = entries[spot]
    before, after = entries[:spot], entries[spot + 1 :]
    begin, end = entry["data_offsets"]

    rewrite(tmp_path, [*entries, (key, entry)], data)
    refused(tmp_path, "corrupt header", repr(key), "occurs twice")

    rewrite(tmp_path, [*before, (key, entry | {"dtype": entry["dtype"] + " "}), *after], data)
    refused(tmp_path, "corrupt header", key, "unknown dtype")

    other = next(v for k, v in entries if k != key and v["dtype"] == entry["dtype"] and v["shape"] == entry["shape"])
    rewrite(tmp_path, [*before, (key, other), *after], data)
    refused(tmp_path, "corrupt header", "its data begins at byte")

    shifted = [(k, v | {"data_offsets": [i + 4 for i in v["data_offsets"]]}) for k, v in after]
    rewrite(tmp_path, [*before, (key, entry), *shifted], data)
    refused(tmp_path, "corrupt header", shifted[0][0])

    rewrite(tmp_path, [*before, (key, entry | {"data_offsets": [end, begin]}), *after], data)
    refused(tmp_path, "corrupt header", key)

    rewrite(tmp_path, [*before, *after], data[:begin] + data[end:])
    refused(tmp_path, "corrupt header")

    rewrite(tmp_path, entries, data[: draw.random.randrange(len(data))])
    refused(tmp_path, "truncated")

    rewrite(tmp_path, entries, data + b"\0")
    refused(tmp_path, "1 bytes after the last tensor")


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000])
@pytest.mark.parametrize("where", ["header", "index"])
def test_json_that_is_too_deep(where, deep, tmp_path):
    """A header may not crash the interpreter."""
    mini.write_raw(tmp_path, deep.encode() if where == "header" else b"{}")
    if where == "index":
        (tmp_path / "model.safetensors.index.json").write_text(deep)
    refused(tmp_path, "model.safetensors", "recursion")


@pytest.mark.parametrize("key", ["a\nb", "", "\x1b[2Jhead.weight", "\ud800"])
@pytest.mark.parametrize("where", ["header", "index"])
def test_names_that_cannot_be_printed(where, key, tmp_path):
    mini.write_raw(tmp_path, {key: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}} if where == "header" else {})
    if where == "index":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {key: "model.safetensors"}}))
    assert refused(tmp_path, "model.safetensors", "a tensor has the name").isprintable()


@pytest.mark.parametrize(
    "shard",
    [
        *("../model.safetensors", "..", ".", "", "./model.safetensors", "a/../model.safetensors", "sub/model.safetensors"),
        *("/etc/passwd", "/model.safetensors", "//host/model.safetensors", "~/model.safetensors", "~model.safetensors"),
        *("..\\model.safetensors", "C:\\model.safetensors", "C:model.safetensors", "file:///model.safetensors"),
        *("model.safetensors/", "model.safetensors\n", "model\0.safetensors", " model.safetensors", "$HOME.safetensors"),
        *("config.json", "model.bin", ".safetensors", "x" * 400 + ".safetensors", 7, None, ["model.safetensors"]),
    ],
)
def test_path_tricks_in_the_index(shard, tmp_path):
    """Beside the folder and in it there is a file that would load."""
    tensors = tensors_of(VARIANTS["native"])[0]
    write_with_config(tmp_path, tensors)
    folder = write_with_config(tmp_path / "sub", tensors)
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors") | {"head.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(folder, "model.safetensors.index.json: head.weight is in", "file beside it")
    assert message.isprintable() and len(message) < 600


def test_the_index_names_a_tensor_twice(tmp_path):
    """In two places: JSON readers take the last one without a word."""
    tensors = tensors_of(VARIANTS["native"])[0]
    keys = sorted(tensors)
    shards = [{key: tensors[key] for key in keys[i::2]} for i in range(2)]
    file = write_with_config(tmp_path, *shards) / "model.safetensors.index.json"
    text = file.read_text()
    entry = f'"{keys[0]}": "model-00001-of-00002.safetensors"'
    assert entry in text
    file.write_text(text.replace(entry, f"{entry.replace('1-of', '2-of')}, {entry}"))
    refused(tmp_path, "model.safetensors.index.json", "damaged index", repr(keys[0]), "occurs twice")


@pytest.mark.parametrize("spread", [17, 18])
def test_exponents_at_the_limit(spread, tmp_path):
    """MXFP4 experts whose scales span 17 binades load, and those that span 18 are refused by name."""
    tensors = dict(tensors_of(VARIANTS["native"])[0])
    key = "layers.2.ffn.experts.1.w2."
    exponents = torch.full_like(tensors[key + "scale"].view(torch.uint8), 120)
    exponents[3, 1] = 120 + spread
    tensors[key + "weight"] = tensors[key + "weight"] | 1
    tensors[key + "scale"] = exponents.view(torch.float8_e8m0fnu)
    write_with_config(tmp_path, tensors)
    if spread == 17:
        mini.load(tmp_path, request=build)
    else:
        refused(tmp_path, f"tensor {key}scale", "span 18 binades", headers=False)
