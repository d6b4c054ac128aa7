"""A layer's projections, weights and state at random, for the tests of advance_* on CPU and GPU."""

import copy
from typing import NamedTuple

import torch

from dsv4 import ops
from dsv4.ops.row_formats import hadamard, key_bytes, row_bytes, simulate_fp4, simulate_rows
from tests.ops.cases import GARBAGE_POSITIONS, compact, make_batch

EPS = 1e-6
KINDS = ("window", "csa", "hca")


class Sizes(NamedTuple):
    """Of a layer; `rank` are the columns of y before its key and value."""

    heads: int
    dim: int
    index_heads: int
    index_dim: int
    rank: int
    rope: int
    window: int
    hca_rate: int


SMALL = Sizes(heads=3, dim=16, index_heads=4, index_dim=8, rank=8, rope=8, window=12, hca_rate=6)
COMPACT = SMALL._replace(dim=72, index_dim=32)  # the least that compact rows and keys can have
# Formats of rows and of index keys; layers without an indexer have the first only.
FORMATS = (("fp8", "bf16"), ("bf16", "fp8"), ("bf16", "fp4"), ("fp8", "fp4"))
COMPACT_KINDS = [(kind, *f) for kind in KINDS for f in FORMATS[:: 1 if kind == "csa" else len(FORMATS)]]


class Layer:
    """Random projections for slots of given lengths, weights and states, and the ops that `advance_KIND` stands for."""

    def __init__(self, draw, kind, lengths, dtype=torch.float32, sizes=SMALL):
        self.kind, self.dtype, self.sizes = kind, dtype, sizes
        self.rate = {"window": 0, "csa": 4, "hca": sizes.hca_rate}[kind]
        overlap, dim = kind == "csa", sizes.dim
        width, blocks = dim * (1 + overlap), -(-(max(lengths) // max(self.rate, 1) + 1) // 4) * 4
        index = sizes.index_heads * sizes.index_dim if overlap else 0
        self.q_all = [draw.normal(n, sizes.heads * dim + index, dtype=dtype, outliers=10.0) for n in lengths]
        self.y = [draw.normal(n, sizes.rank + dim, dtype=dtype, outliers=10.0) for n in lengths]
        z_width = {"window": 0, "hca": 2 * dim, "csa": 4 * dim + 4 * sizes.index_dim + sizes.index_heads}[kind]
        self.z = [draw.normal(n, z_width, outliers=4.0) for n in lengths]
        self.kv_norm, self.inv_freq = draw.normal(dim) + 1.0, draw.inv_freq(sizes.rope)

        def compressor(dim, width):
            depth = self.rate * (1 + overlap)
            rings = [draw.normal(len(lengths), depth, width) for _ in range(2)]
            entries = draw.normal(len(lengths), blocks, dim, dtype=dtype)
            return [draw.normal(self.rate, width), draw.normal(dim) + 1.0, *rings, entries]

        self.ring = draw.normal(len(lengths), sizes.window, dim, dtype=dtype)
        self.main = compressor(dim, width) if self.rate else []
        self.index = compressor(sizes.index_dim, 2 * sizes.index_dim) if overlap else []

    def state(self):
        return [self.ring, *self.main[2:], *self.index[2:]]

    def fork(self, device=None):
        """The same layer with a state of its own, its weights and state on `device`."""
        other = copy.copy(self)
        other.kv_norm, other.inv_freq = self.kv_norm.to(device), self.inv_freq.to(device)
        other.ring = self.ring.to(device, copy=True)
        other.main, other.index = ([t.to(device, copy=True) for t in part] for part in (self.main, self.index))
        return other

    def stored_as(self, kv, index):
        """The same layer with a state in the given formats of rows and index keys."""
        other, n = self.fork(), self.sizes
        if kv != "bf16":
            other.ring = compact(self.ring, n.rope, row_bytes(n.dim, n.rope))
            other.main[4:] = [compact(entries, n.rope, row_bytes(n.dim, n.rope)) for entries in self.main[4:]]
        if index != "bf16":
            other.index[4:] = [compact(keys, n.rope, key_bytes(n.index_dim, index)) for keys in self.index[4:]]
        return other

    def results_as(self, results, kv, index):
        """What `advance` of a layer in these formats returns, by what that of a plain one does."""
        q, row, *rest = results
        row = simulate_rows(row, self.sizes.rope) if kv != "bf16" else row
        if index != "bf16":
            rest[0] = simulate_fp4(hadamard(rest[0])) if index == "fp4" else hadamard(rest[0])
        return q, row, *rest

    def inputs(self, batch):
        rows = (self.q_all, self.y, self.z) if self.rate else (self.q_all, self.y)
        return [batch.rows(part).to(self.ring.device) for part in rows]

    def at(self, batch):
        return batch.positions.to(self.ring.device), batch.slots.to(self.ring.device)

    def constants(self):
        """The sizes that follow the tensors."""
        index_heads, rate = [self.sizes.index_heads] if self.index else [], [self.rate] if self.rate else []
        return self.sizes.heads, *index_heads, *rate, EPS

    def advance(self, batch, write):
        at = self.kv_norm, self.inv_freq, *self.at(batch), self.ring
        op = getattr(ops, f"advance_{self.kind}")
        return op(*self.inputs(batch), *at, *self.main, *self.index, *self.constants(), write)

    def separately(self, batch, write):
        """What `advance` stands for, op by op."""
        (q_all, y, *z), at, n = self.inputs(batch), self.at(batch), self.sizes
        q = ops.q_rope(q_all[:, : n.heads * n.dim].unflatten(1, (n.heads, n.dim)), self.inv_freq, at[0], EPS)
        kv = ops.kv_rope(y[:, n.rank :], self.kv_norm, self.inv_freq, at[0], EPS)
        if write:
            ops.kv_write(kv, *at, self.ring)
        if self.main:
            width = self.main[0].shape[1]
            weights = *self.main[:2], self.inv_freq
            ops.compress(z[0][:, :width], z[0][:, width : 2 * width], *weights, *at, *self.main[2:], self.rate, EPS)
        if not self.index:
            return q, kv
        first, width = 4 * n.dim, 2 * n.index_dim
        c, gates = z[0][:, first : first + width], z[0][:, first + width : first + 2 * width]
        ops.compress(c, gates, *self.index[:2], self.inv_freq, *at, *self.index[2:], self.rate, EPS)
        index_q = q_all[:, n.heads * n.dim :].unflatten(1, (n.index_heads, n.index_dim))
        weights = z[0][:, -n.index_heads :] * (n.index_dim**-0.5 * n.index_heads**-0.5)
        return q, kv, ops.q_rope(index_q, self.inv_freq, at[0], norm=False), weights


def decode_batches(lengths):
    """One token of every slot that still has one, with inert tokens around."""
    for position in range(max(lengths)):
        busy = [(slot, position, position + 1) for slot, n in enumerate(lengths) if position < n]
        yield make_batch([(-1, 0, 1), *busy, (-1, 0, 2)], GARBAGE_POSITIONS[position % 3 :])
