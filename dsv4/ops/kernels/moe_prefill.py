"""Launches of the expert kernels for many tokens: moe_prefill_order.cu, then moe_prefill.cu for gate_up and for down."""

import torch
from torch import Tensor

from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.limits import raised
from dsv4.ops.kernels.stream import BF16, FP4, FP8, Weight, ceil, defines, processors

PREFILL, ORDER = "moe_prefill.cu", "moe_prefill_order.cu"
TILE = 128  # entries that a block multiplies at a time, with 256 weight rows
STEP = {BF16: 64, FP8: 64, FP4: 128}  # values of K
STAGES = {BF16: 4, FP8: 6, FP4: 4}
THREADS = 640


def order_defines(number: int, beside: bool) -> tuple[str, ...]:
    """What moe_prefill_order.cu is compiled with."""
    return defines(FMT=number, BESIDE=int(beside))


def prefill_defines(number: int, beside: bool, gated: bool) -> tuple[str, ...]:
    """What moe_prefill.cu is compiled with."""
    return defines(FMT=number, BESIDE=int(beside), GATE_UP=int(gated), STAGES=STAGES[number])


def prefill_bytes(number: int) -> int:
    """Of dynamic shared memory: steps of entries and weight rows, scales, barriers; tables of entries."""
    codes, scales = 256 * (128 if number == BF16 else 64), {BF16: 0, FP8: 8, FP4: 256 * 8}[number]
    return STAGES[number] * (TILE * STEP[number] * 2 + codes + scales + 16) + (STAGES[number] + 1) * (32 + TILE * 8)


def prefill(
    gate_up: Weight, down: Weight, shared: tuple[Weight, Weight] | None, x: Tensor, experts: Tensor, weights: Tensor,
    out: Tensor, limit: float,
) -> None:  # fmt: skip
    """out float32 [entries, H]: what an entry adds to its token's sum. Entries are the choices of experts int32 [T, k], by
    tokens, then, if out has room for one more of each token, that of the shared expert: FP8 matrices beside the stack
    or else the stack's last. Rows of entries that name no expert are left as they are."""
    number, (tokens, hidden), device = gate_up.number, x.shape, x.device
    count, inter, choices, entries = down.codes.shape[0], gate_up.codes.shape[1] // 2, experts.shape[1], out.shape[0]
    beside = shared is not None
    last = count - (not beside)
    order = torch.empty((entries, 2), dtype=torch.int32, device=device)
    tiles = torch.empty((entries // TILE + min(last + 1, entries), 4), dtype=torch.int32, device=device)
    tile_count = torch.empty(1, dtype=torch.int32, device=device)
    bytes_ = 4 * (last + 1)
    raised(kernel(ORDER, "moe_order", *order_defines(number, beside)), bytes_)(
        1, 1024, experts, order, tiles, tile_count, tokens * choices, entries - tokens * choices, choices, count, last,
        shared=bytes_, pdl=True,
    )  # fmt: skip
    h = torch.empty((entries, inter), dtype=x.dtype, device=device)
    inverse = torch.empty(entries, dtype=torch.float32, device=device)
    for gated, source, target, stack, width, rows in (
        (True, x, h, gate_up, hidden, inter), (False, h, out, down, inter, hidden)
    ):  # fmt: skip
        pitch = ceil(width, STEP[number]) * STEP[number]
        operand = torch.empty((entries, pitch), dtype=x.dtype, device=device)
        kernel(ORDER, "moe_prepare", *order_defines(number, beside))(
            (tiles.shape[0], 4), 256, source, order, tiles, tile_count, operand, inverse, gated, count, width, pitch,
            pdl=True,
        )  # fmt: skip
        matrices = shared[not gated][:2] if shared else (None, None)
        raised(kernel(PREFILL, "moe_prefill", *prefill_defines(number, beside, gated)), prefill_bytes(number))(
            processors(device.index), THREADS, operand, inverse, order, tiles, tile_count, weights, *stack,
            *matrices, target, tokens * choices, count, width, pitch, rows, limit, shared=prefill_bytes(number), pdl=True,
        )  # fmt: skip
