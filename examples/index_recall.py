"""How many of the blocks that exact index scores pick are picked with index keys in bf16, fp8 and fp4: on the queries and
keys that examples/tiny has on a novel, and on random ones of the released sizes. Prints a table.

    python examples/index_recall.py                  # minutes on a CPU, nearly all for running the text
    python examples/index_recall.py --tokens 2048
"""

import argparse
import pathlib
import sys
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # dsv4, where it is not installed

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import dsv4  # noqa: E402
from dsv4.bench_ops import record  # noqa: E402
from dsv4.model.cache import INDEX_FORMATS, index_key  # noqa: E402
from dsv4.model.config import ModelConfig, flash  # noqa: E402
from dsv4.ops import index_topk  # noqa: E402
from dsv4.ops.row_formats import hadamard, simulate_fp4, stored  # noqa: E402

TEXT = ROOT / "examples" / "eval" / "haystack.txt"
RANDOM = (2048, 16384, 65536)  # keys
QUERIES = 32  # of random data
CHUNK = 256  # tokens of the text that are run together


class Scored:
    """Float32 inputs of index_topk for one sequence: q [T, heads, d], weights [T, heads], keys [1, blocks, d], positions
    int64 [T], all of whose blocks are visible or not by `rate`."""

    def __init__(self, config: ModelConfig, q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor):
        self.config, self.q, self.weights, self.keys, self.positions = config, q, weights, keys, positions

    def picked(self, index: str | None) -> Tensor:
        """bool [T, blocks]: what is picked with keys in this format, from inputs in bf16; None is the float32 oracle."""
        q, keys = self.q, self.keys
        if index is not None:
            q, keys = q.bfloat16(), keys.bfloat16()
            key = index_key(self.config, index, torch.bfloat16)
            buffer = torch.zeros(1, key.count(keys.shape[1]), key.width, dtype=key.dtype, device=q.device)
            for view, values in stored(keys, buffer, keys.shape[2]):
                view[:, : keys.shape[1]] = values
            if key.dtype == torch.uint8:
                q = hadamard(q)
            q, keys = simulate_fp4(q) if index == "fp4" else q, buffer
        slots = torch.zeros_like(self.positions)
        blocks = index_topk(q, self.weights, keys, self.positions, slots, self.config.csa_rate, self.config.index_topk)
        picked = torch.zeros(len(q), keys.shape[1] + 1, dtype=torch.bool, device=q.device)
        picked.scatter_(1, torch.where(blocks < 0, keys.shape[1], blocks.long()), True)
        return picked[:, : self.keys.shape[1]]

    def within(self, first: int, last: int) -> "Scored":
        """The queries of positions first .. last - 1."""
        rows = (self.positions >= first) & (self.positions < last)
        return Scored(self.config, self.q[rows], self.weights[rows], self.keys, self.positions[rows])

    def recalls(self) -> list[float]:
        """The share of the oracle's blocks that each format picks too, where not all are picked."""
        choice = self.within(self.config.csa_rate * (self.config.index_topk + 1) - 1, 2**62)
        oracle = choice.picked(None)
        return [((choice.picked(index) & oracle).sum() / oracle.sum()).item() for index in INDEX_FORMATS]


def of_text(folder: pathlib.Path, tokens: int) -> list[Scored]:
    """Of each CSA layer of a model that reads the beginning of a text, in float32 with plain keys."""
    engine = dsv4.load(folder, dtype="fp32", max_context=tokens, compile=False, kv="bf16", index="bf16")
    device = engine.runner.device
    ids = torch.tensor(engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:tokens], device=device)
    layers: dict[int, list[tuple[Tensor, ...]]] = {}
    for positions in torch.arange(len(ids), device=device).split(CHUNK):
        step = partial(engine.model, ids[positions], positions, torch.zeros_like(positions), engine.cache)
        for q, weights, keys, *_ in (args for name, _, args in record(step) if name == "index_topk"):
            layers.setdefault(keys.data_ptr(), []).append((q, weights, keys, positions))
    return [
        Scored(engine.config, torch.cat(q), torch.cat(weights), keys[0], torch.cat(positions))
        for q, weights, keys, positions in (zip(*parts, strict=True) for parts in layers.values())
    ]


def of_noise(blocks: int) -> Scored:
    """Normal values of Flash's sizes, all blocks visible."""
    config, draw = flash(), torch.Generator().manual_seed(blocks)
    q = torch.randn(QUERIES, config.index_n_heads, config.index_head_dim, generator=draw)
    weights = torch.randn(QUERIES, config.index_n_heads, generator=draw)
    keys = torch.randn(1, blocks, config.index_head_dim, generator=draw)
    return Scored(config, q, weights, keys, torch.full((QUERIES,), blocks * config.csa_rate - 1))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "examples" / "tiny", metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="of the text")
    args = parser.parse_args()
    print(f"| data | picked | {' | '.join(INDEX_FORMATS)} |\n|---|---|{'---|' * len(INDEX_FORMATS)}")
    for layer, scored in enumerate(of_text(args.model, args.tokens)):
        for first in (0, 2048, 4096):
            last = min(max(2048, 2 * first), args.tokens)
            part = scored.within(first, last)
            if len(part.q):
                row(f"{args.model.name}, CSA layer {layer + 1}, positions {first:,} to {last:,}", part, last)
    for blocks in RANDOM:
        row(f"random, {blocks:,} keys", of_noise(blocks), blocks * flash().csa_rate)


def row(what: str, scored: Scored, tokens: int) -> None:
    """A line of the table."""
    config = scored.config
    shares = " | ".join(f"{share:.2%}" for share in scored.recalls())
    print(f"| {what} | {config.index_topk} of up to {tokens // config.csa_rate:,} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
