"""Write a big synthetic checkpoint and load it: how fast against the disk, and how much host memory it takes.

    python examples/load_big.py FOLDER                                                          20 GB, onto the GPU
    python examples/load_big.py FOLDER --device cpu --layers 2 --experts 32 --vocab 16384       1.4 GB, for a look

The checkpoint is in NVIDIA's experts-only NVFP4 format, of V4-Flash's widths and a few of its layers. Its bytes are random
and valid as weights, but mean nothing. FOLDER stays if it holds such a checkpoint already, and goes away with --remove.
Exit status 1 if loading took more host memory than the largest tensor and 2 GiB.
"""

import argparse
import json
import os
import pathlib
import shutil
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # dsv4, where it is not installed

import numpy as np  # noqa: E402
import torch  # noqa: E402

from dsv4.model.checkpoint import load_folder  # noqa: E402
from dsv4.model.config import ModelConfig, excerpt, flash  # noqa: E402
from dsv4.model.export import quantization_config  # noqa: E402
from dsv4.model.inventory import Expected, nvfp4_experts_release  # noqa: E402
from dsv4.model.shards import BITS, Folder  # noqa: E402
from dsv4.model.transformer import Transformer  # noqa: E402

GB, GIB = 10**9, 2**30
SHARD = 2 * GB
BLOCK = 64 * 2**20  # bytes written, or read, at a time


def configuration(layers: int, experts: int, vocab: int) -> ModelConfig:
    """V4-Flash from its first CSA layer on, without hash routing."""
    return excerpt(flash(), layers, n_routed_experts=experts, vocab_size=vocab)


def patterns() -> dict[str, bytes]:
    """Bytes that are valid weights, by dtype: a block of each is written as often as it takes."""
    random = np.random.default_rng(0)
    data = random.integers(0, 256, BLOCK, dtype=np.uint8)
    normal = torch.from_numpy(random.standard_normal(BLOCK // 2, dtype=np.float32) * 0.02)
    return {
        "U8": data.tobytes(),
        "F8_E4M3": (data & 0xBF).tobytes(),  # the bit that is cleared is set in NaNs
        "scale": (data & 0x0F | 0x30).tobytes(),  # E4M3 from 0.5 to 2
        "F8_E8M0": (data & 0x03 | 0x74).tobytes(),  # 2^-11 to 2^-8
        "BF16": normal.bfloat16().view(torch.uint8).numpy().tobytes(),
        "F32": (normal.abs() + 1e-3).numpy().tobytes(),
    }


def nbytes(tensor: Expected) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * BITS[tensor.dtype] // 8


def write(folder: pathlib.Path, config: ModelConfig, threads: int) -> None:
    """All shards at once, each by a thread of its own."""
    shards: list[list[Expected]] = []
    room = 0
    for tensor in nvfp4_experts_release(config, draft=None):
        if nbytes(tensor) > room:
            shards.append([])
            room = SHARD
        shards[-1].append(tensor)
        room -= nbytes(tensor)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    folder.mkdir(parents=True)
    data = patterns()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda name, shard: write_shard(folder / name, shard, data), names, shards))
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    values = config.to_json() | {"quantization_config": quantization_config(config.num_hidden_layers)}
    (folder / "config.json").write_text(json.dumps(values))


def write_shard(file: pathlib.Path, shard: list[Expected], data: dict[str, bytes]) -> None:
    header, end = {}, 0
    shard = sorted(shard, key=lambda tensor: -BITS[tensor.dtype])
    for tensor in shard:
        offsets = [end, end + nbytes(tensor)]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        end = offsets[1]
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in shard:
            block = memoryview(data["scale" if tensor.name.endswith("weight_scale") else tensor.dtype])
            for start in range(0, nbytes(tensor), BLOCK):
                stream.write(block[: min(BLOCK, nbytes(tensor) - start)])
        stream.flush()
        os.fsync(stream.fileno())  # only what is on the disk can be dropped from memory


def forget(files: list[pathlib.Path]) -> None:
    """Ask the system to drop its cached copies of some files."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(files: list[pathlib.Path], threads: int) -> float:
    """Bytes a second of reading whole files, so many at once."""

    def read(file: pathlib.Path) -> int:
        block = bytearray(BLOCK // 4)
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass
        return file.stat().st_size

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, files))
    return total / (time.perf_counter() - start)


class Watch:
    """The largest host memory of this process while it is open, without pages of files (anonymous and shared memory)."""

    def __enter__(self):
        self.start = self.peak = self.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self.now())

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    @staticmethod
    def now() -> int:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=129280)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the writer")
    parser.add_argument("--remove", action="store_true", help="remove FOLDER at the end")
    args = parser.parse_args()
    if args.folder.exists():
        seconds = None
    else:
        start = time.perf_counter()
        write(args.folder, configuration(args.layers, args.experts, args.vocab), args.threads)
        seconds = time.perf_counter() - start
    config = ModelConfig.from_folder(args.folder)
    files = sorted(args.folder.glob("*.safetensors"))
    total, largest = (
        sum(file.stat().st_size for file in files),
        max(s.nbytes for s in Folder.open(args.folder).tensors.values()),
    )
    rows = [("checkpoint", f"{total / GB:.1f} GB in {len(files)} files, largest tensor {largest / GB:.2f} GB")]
    if seconds is not None:
        rows.append(("written", f"{seconds:.1f} s, {total / seconds / GB:.2f} GB/s to disk, {args.threads} threads"))
    quarter = files[: max(len(files) // 4, 1)]
    for threads in (1, 4):
        forget(quarter)
        cold = read_rate(quarter, threads)
        rows.append(
            (f"read, {threads} threads", f"{cold / GB:.2f} GB/s cold, {read_rate(quarter, threads) / GB:.2f} GB/s cached")
        )

    device = torch.device(args.device)
    torch.zeros(1, device=device)  # the device's context is no part of what is measured
    over = 0
    for state in ("cold", "cached"):
        if state == "cold":
            forget(files)
        start = time.perf_counter()
        with Watch() as watch:
            model, _ = load_folder(args.folder, lambda source: Transformer(config, source), device, torch.bfloat16)
            if device.type == "cuda":
                torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        kept = sum(buffer.nbytes for buffer in model.buffers()) if device.type == "cpu" else 0
        extra = watch.peak - watch.start - kept
        over = max(over, extra - largest)
        rows.append((f"loaded, {state}", f"{seconds:.1f} s, {total / seconds / GB:.2f} GB/s"))
        rows.append(("  host memory", f"{extra / GIB:.2f} GiB at most beside the weights, {watch.start / GIB:.2f} before"))
        del model
    rows.append(("bound", f"largest tensor + 2 GiB: {'kept' if over < 2 * GIB else 'BROKEN'}"))
    for name, text in rows:
        print(f"{name:<18} {text}")
    if args.remove:
        shutil.rmtree(args.folder)
    return 0 if over < 2 * GIB else 1


if __name__ == "__main__":
    sys.exit(main())
