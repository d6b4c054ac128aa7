"""dsv4 quantize: write a checkpoint again in another format, one weight at a time.

    DST.work/plan.json     what is being made of which files; a rerun with anything else is refused
    DST.work/done/         what became of each weight, a file for each finished shard
    DST.work/out/          the folder itself; renamed to DST when all of it is there
    DST.quantize.json      the report, beside DST

Which weight goes into which shard follows from the source's headers, and a shard is renamed to its name when it is
complete. So an interrupted run goes on where it stopped, and ends with the same bytes as one that was not.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMATS = ("nvfp4-experts", "all-nvfp4")  # keys of dsv4.model.targets.TARGETS
COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "generation_config.json")
COPIED += ("*.jinja", "chat_template*", "LICENSE*", "encoding")
NOT_COPIED = ("config.json", "*.safetensors", "*.safetensors.index.json")  # what is written anew
VERSION = 1  # of the layout of work folders and of the arithmetic: another one does not go on with an old work folder


def add_quantize(commands) -> None:
    """The parser of `dsv4 quantize`."""
    parser = commands.add_parser(
        "quantize",
        help="write a checkpoint again with NVFP4 weights",
        description="Write the checkpoint SRC (BF16, FP32, FP8, MXFP4 or a mixture) as a new folder DST. "
        "An interrupted run leaves DST.work, and the same command goes on with it.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="checkpoint folder")
    parser.add_argument("target", metavar="DST", help="folder to write; must not exist")
    parser.add_argument(
        "--format",
        default=FORMATS[0],
        metavar="NAME",
        help="nvfp4-experts, NVIDIA's: experts NVFP4, other linears FP8 (default); all-nvfp4: all linears but router and "
        "head NVFP4, under transformers' names",
    )
    parser.add_argument("--shard-size", type=float, default=5.0, metavar="GB", help="bytes of a file; default: 5 GB")
    parser.add_argument("--drop-mtp", action="store_true", help="leave out the draft head (mtp.*), else copied as it is")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda, where values are computed")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table")
    parser.set_defaults(run=quantize)


def quantize(args: argparse.Namespace) -> int:
    """`dsv4 quantize`."""
    source, target = Path(args.source), Path(os.path.abspath(args.target))
    if args.format not in FORMATS:
        raise ValueError(f"--format {args.format} cannot be written, expected {' or '.join(FORMATS)}")
    if not args.shard_size * 1e9 >= 1:
        raise ValueError(f"--shard-size must be a positive number, found {args.shard_size}")
    check_device(args.device)
    if os.path.lexists(target):
        raise ValueError(f"{target}: exists; nothing is ever overwritten, so give another folder or remove it")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent}: no such folder, so {target.name} cannot be written there")
    work = target.with_name(f"{target.name}.work")
    try:
        with locked(work):
            summary = run(source, target, work, args)
            os.rename(work / "out", target)  # all or nothing
            shutil.rmtree(work)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on with {work}", file=sys.stderr)
        raise
    except OSError as error:
        raise ValueError(f"{error.filename or work}: {error.strerror}; the same command goes on with {work}") from error
    if not args.quiet:
        print(summary)
    return 0


def check_device(device: str) -> None:
    """ValueError for a device that is not there."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, found {device!r}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device cuda was asked for, but PyTorch sees no CUDA device here")


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """The work folder, made if there is none, for this process alone. A folder that was made in vain is removed."""
    new = not os.path.lexists(work)
    if not new and not (work / "lock").is_file():
        raise ValueError(f"{work}: is not unfinished work of this command, which would be kept there; remove or rename it")
    work.mkdir(exist_ok=True)
    with (work / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{work}: another process is at work there") from error
        try:
            yield
        except ValueError:
            if new and not (work / "plan.json").exists():
                shutil.rmtree(work)
            raise


def run(source: Path, target: Path, work: Path, args: argparse.Namespace) -> str:
    """Everything but the last rename; returns the summary. Leaves the report beside the target."""
    from dsv4.model import conversion
    from dsv4.model.checkpoint import FolderSource
    from dsv4.model.config import ModelConfig, read_json_object
    from dsv4.model.shards import Folder, Reader
    from dsv4.model.targets import TARGETS
    from dsv4.model.transformer import Transformer

    folder, form = Folder.open(source), TARGETS[args.format]
    config = ModelConfig.from_folder(source)
    FolderSource.check(folder, lambda weights: Transformer(config, weights), config.dtype)
    items = conversion.items(folder, form, args.drop_mtp)
    shards = split(items, int(args.shard_size * 1e9))
    out, done = work / "out", work / "done"
    start_or_go_on(work, fingerprint(folder, args))
    names = file_names(len(shards))
    missing = [shard for name, shard in zip(names, shards, strict=True) if not (out / name).exists()]
    remaining = sum(item.output_bytes for shard in missing for item in shard)
    free = shutil.disk_usage(work).free
    if remaining > free:
        raise ValueError(f"{target.parent}: {remaining / 1e9:.1f} GB are still to be written, {free / 1e9:.1f} GB are free")

    progress = Progress(sum(item.source_bytes for item in items), args.quiet)
    reader = Reader()
    try:
        for name, shard in zip(names, shards, strict=True):
            if (out / name).exists():
                progress.skip(sum(item.source_bytes for item in shard))
                continue
            outcomes = []
            write_shard(work / "shard.part", shard, reader, outcomes, progress, args.device)
            write_json(done / f"{name}.json", [vars(outcome) for outcome in outcomes])
            os.replace(work / "shard.part", out / name)
    finally:
        reader.close()
        progress.close()

    write_index(out, dict(zip(names, shards, strict=True)))
    values = read_json_object(source / "config.json")
    # Scales of FP8 weights, where the format has any, are powers of two (E8M0) unless the source has others.
    powers = all(o.dtype == "F8_E8M0" for item in items for o in item.outputs if o.name.endswith(".scale"))
    quantization = form.quantization_config(config.num_hidden_layers)
    if not powers:
        quantization.pop("scale_fmt", None)
    write_json(out / "config.json", output_config(values, config, args.drop_mtp) | {"quantization_config": quantization})
    left_out = copy_files(source, out)
    written = Folder.open(out)
    FolderSource.check(written, lambda weights: Transformer(config, weights), config.dtype)  # before it is called done

    used = {stored.name for item in items for stored in item.sources}
    used |= {s.name for item in items if item.kind == "nvfp4" for w in item.weights for s in w.ignored.values()}
    outcomes = [outcome for name in names for outcome in json.loads((done / f"{name}.json").read_bytes())]
    report = {
        "format": args.format,
        "source": str(source),
        "source_bytes": sum(stored.nbytes for stored in folder.tensors.values()),
        "bytes": sum(item.output_bytes for item in items),
        "dropped_tensors": sorted(folder.tensors.keys() - used),
        "files_not_copied": left_out,
        "tensors": sorted(outcomes, key=lambda outcome: outcome["name"]),
    }
    path = target.with_name(f"{target.name}.quantize.json")
    write_json(path, report)
    return summary(report, target, path)


def split(items: list, shard_bytes: int) -> list[list]:
    """Items in shards of at most `shard_bytes`, or of one item."""
    shards, size = [[]], 0
    for item in items:
        if shards[-1] and size + item.output_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.output_bytes
    return shards


def file_names(count: int) -> list[str]:
    """Of the shards, as all checkpoints have them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]


def fingerprint(folder, args: argparse.Namespace) -> str:
    """Of everything that decides what is written: the source's files as they are now, and the options."""
    files = {stored.file for stored in folder.tensors.values()} | {folder.path / "config.json"}
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    decides = [VERSION, args.format, args.shard_size, args.drop_mtp, args.device, str(folder.path.resolve()), stats]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def start_or_go_on(work: Path, fingerprint: str) -> None:
    """Lay out a new work folder. ValueError if there is one that belongs to something else."""
    plan = work / "plan.json"
    if plan.exists() and json.loads(plan.read_bytes()) != {"fingerprint": fingerprint}:
        raise ValueError(f"{work}: holds unfinished work of another source or with other options; remove it to start again")
    (work / "out").mkdir(exist_ok=True)
    (work / "done").mkdir(exist_ok=True)
    write_json(plan, {"fingerprint": fingerprint})


def write_shard(file: Path, shard: list, reader, outcomes: list, progress: "Progress", device: str) -> None:
    """Convert the items of a shard into one safetensors file, each tensor written to its place as it comes."""
    import torch

    from dsv4.model.conversion import convert
    from dsv4.model.shards import BITS

    # Wide dtypes first, as the safetensors package orders them: then every tensor is aligned.
    outputs = sorted((output for item in shard for output in item.outputs), key=lambda o: (-BITS[o.dtype], o.name))
    header, places, end = {"__metadata__": {"format": "pt"}}, {}, 0
    for output in outputs:
        header[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [end, end + output.nbytes]}
        places[output.name] = [end, end + output.nbytes]
        end += output.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + end)
        for item in shard:
            for name, tensor in convert(item, reader, outcomes, device):
                place = places[name]
                data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                assert place[0] + data.nbytes <= place[1], f"{name} is larger than planned"
                stream.seek(8 + len(raw) + place[0])
                stream.write(data)
                place[0] += data.nbytes
            progress.add(item.source_bytes)
        assert all(start == end for start, end in places.values()), "a tensor is smaller than planned"
        stream.flush()
        os.fsync(stream.fileno())


def write_index(out: Path, shards: dict[str, list]) -> None:
    """The index of several shards; a single one needs none."""
    if len(shards) > 1:
        weight_map = {o.name: name for name, shard in shards.items() for item in shard for o in item.outputs}
        total = sum(item.output_bytes for shard in shards.values() for item in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(out / "model.safetensors.index.json", index)


def output_config(values: dict, config, drop_mtp: bool) -> dict:
    """config.json of the result but for its `quantization_config`: native spelling."""
    from dsv4.model.config_json import IGNORED_KEYS

    if "compress_ratios" not in values:  # transformers' spelling
        values = {key: value for key, value in values.items() if key in IGNORED_KEYS} | config.to_json()
    out = {key: value for key, value in values.items() if key not in ("compression_config", "dtype", "torch_dtype")}
    out |= {"torch_dtype": "bfloat16", "expert_dtype": "fp4"}
    if drop_mtp:
        out = {key: value for key, value in out.items() if not key.startswith("dspark_")} | {"num_nextn_predict_layers": 0}
    return out


def copy_files(source: Path, out: Path) -> list[str]:
    """Copy tokenizer, generation settings, templates and licence; returns what else there is and stays behind."""
    left = []
    for path in sorted(source.iterdir()):
        if any(path.match(pattern) for pattern in NOT_COPIED):
            continue
        if not any(path.match(pattern) for pattern in COPIED):
            left.append(path.name)
        elif path.is_dir():
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, out / path.name)
    return left


def write_json(file: Path, value) -> None:
    """Write a file whole or not at all."""
    aside = file.with_name(f"{file.name}.part")
    aside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, file)


def summary(report: dict, target: Path, path: Path) -> str:
    """What was done, a line for each kind of outcome, and everything that was left out."""
    from dsv4.model.sizes import size_text

    groups: dict[str, list[dict]] = {}
    for outcome in report["tensors"]:
        groups.setdefault(outcome["how"], []).append(outcome)
    lines = [f"{'what':<22} {'weights':>8} {'mean rel. RMS':>14} {'worst':>10} {'max error':>10}"]
    for how, rows in sorted(groups.items()):
        rms = [row["relative_rms"] for row in rows]
        largest = max(row["max_error"] for row in rows)
        lines.append(f"{how:<22} {len(rows):>8} {sum(rms) / len(rms):>14.3e} {max(rms):>10.3e} {largest:>10.3e}")
    if report["dropped_tensors"]:
        dropped = report["dropped_tensors"]
        lines.append(f"{len(dropped)} tensors have no place in the result ({dropped[0]} and so on; all in the report)")
    if report["files_not_copied"]:
        lines.append(f"files not copied: {', '.join(report['files_not_copied'])}")
    lines.append(f"{target}: {size_text(report['bytes'])}, from {size_text(report['source_bytes'])}; report in {path}")
    return "\n".join(lines)


class Progress:
    """One line on stderr: source bytes done of all, and the rate of this run."""

    def __init__(self, total: int, quiet: bool):
        self._total, self._quiet = total, quiet
        self._done = self._here = 0
        self._start = self._shown = time.monotonic()

    def skip(self, nbytes: int) -> None:
        """Bytes that an earlier run did."""
        self._done += nbytes

    def add(self, nbytes: int) -> None:
        """Bytes done now."""
        self._done += nbytes
        self._here += nbytes
        if time.monotonic() - self._shown >= 0.5:
            self._show()

    def _show(self) -> None:
        from dsv4.model.sizes import size_text

        self._shown = time.monotonic()
        rate = size_text(self._here / max(self._shown - self._start, 1e-3))
        if not self._quiet:
            print(
                f"\rquantised {size_text(self._done)} of {size_text(self._total)}, {rate}/s   ",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """The last state, and the end of the line."""
        self._show()
        if not self._quiet:
            print(file=sys.stderr)
