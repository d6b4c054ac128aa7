"""Launches of the expert kernels: moe_experts.cu for decode, moe_prefill.cu for many tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.limits import raised
from dsv4.ops.kernels.stream import (
    BF16,
    FORMATS,
    FP4,
    Format,
    Plan,
    check_weight,
    processors,
    ready,
    ring_plan,
    rows_of,
    steps_of,
)

ENTRIES = 512  # (token, choice) pairs of a decode launch
MANY_ENTRIES = 32768  # and of a prefill launch, which keeps a float32 result of each
DECODE_TOKENS = 64
PREFILL_BYTES = 6 * 128 * 128  # of dynamic shared memory in a prefill block
TILE = 128  # entries and weight rows of a prefill block
SOURCE = "moe_experts.cu"
COMBINE = "FMT=0", "WARPS=4", "KW=4", "NT=1", "STAGES=3", "TAIL=0"  # moe_combine uses none of them


class Weights(NamedTuple):
    """A stack of expert matrices: codes, and for NVFP4 block scales and the float32 scales of their matrices."""

    codes: Tensor
    scales: Tensor | None = None
    scale_2: Tensor | None = None


def check(name: str, x: Tensor, experts: Tensor, weights: Tensor, gate_up: Weights, down: Weights) -> tuple[int, int, int]:
    """(format, inter, experts) of the weights; ValueError for what the kernels do not read."""
    tokens, hidden = x.shape
    if x.dtype != torch.bfloat16:
        raise ValueError(f"{name}: x has dtype {x.dtype}, expected bfloat16 or float32")
    k = experts.shape[1]
    if experts.dtype != torch.int32 or weights.dtype != torch.float32 or weights.shape != experts.shape:
        raise ValueError(
            f"{name}: experts {experts.dtype} {tuple(experts.shape)} and weights {weights.dtype} {tuple(weights.shape)}, "
            f"expected int32 and float32 [{tokens}, k]"
        )
    if experts.shape[0] != tokens or not 1 <= k <= ENTRIES:
        raise ValueError(f"{name}: experts {tuple(experts.shape)} for {tokens} tokens, 1 to {ENTRIES} choices a token")
    count, inter = down.codes.shape[0], gate_up.codes.shape[1] // 2
    number = FP4 if gate_up.scales is not None else BF16
    if inter % 8 or hidden % 8 or count > 32767:
        raise ValueError(
            f"{name}: {count} experts of {inter} x {hidden}, expected sizes divisible by 8, under 32768 experts"
        )
    per_code, dtype = (2, torch.uint8) if number == FP4 else (1, torch.bfloat16)
    for part, stack, rows, width in (("gate_up", gate_up, 2 * inter, hidden), ("down", down, hidden, inter)):
        FORMATS[number].check(width, f"{name} {part}")
        check_weight(f"{name} {part}", stack.codes, dtype, (count, rows, width // per_code), x.device)
        if number == FP4:
            shape = (count, rows, width // 16)
            check_weight(f"{name} {part}_scale", stack.scales, torch.float8_e4m3fn, shape, x.device)
            shape = (count, 2) if part == "gate_up" else (count,)
            check_weight(f"{name} {part}_scale_2", stack.scale_2, torch.float32, shape, x.device)
    return number, inter, count


def plan_of(form: Format, width: int, rows: int, tile: int, tokens: int, work: float, sms: int) -> Plan | None:
    """The plan that should take the fewest clocks: `work` segments of tiles of `tile` rows for each row group of warps. A
    tile costs about 1000 clocks beside its steps, a step 140 for each warp (measured on an H200)."""
    best, steps = None, steps_of(form, width)
    for warps in (16, 12, 8, 4):
        for kw in (w for w in (1, 2, 4, 6, 8, 12, 16) if warps % w == 0):
            plan = ring_plan(form, width, tokens, warps, kw)
            if plan:
                items = -(-(work * -(-rows // (tile * (warps // kw)))) // sms)
                cost = items * (1000 + -(-steps // kw) * 140 * max(warps, 9)), plan.warps
                best = min(best, (cost, plan), key=lambda b: b[0]) if best else (cost, plan)
    return best and best[1]


def plans(number: int, hidden: int, inter: int, tokens: int, k: int, count: int, sms: int) -> tuple[Plan, Plan, bool]:
    """The plans of gate_up and down, and whether down is the kernel for one token."""
    form, rows = FORMATS[number], min(tokens * k, 8)
    work = count * (1 - (1 - min(k, count) / count) ** tokens)  # expected different experts
    up = plan_of(form, hidden, inter, 8, 1 if tokens == 1 else rows, work, sms)
    down = ring_plan(form, inter, k, 16, 4) if tokens == 1 and k <= 16 else None
    one = down is not None
    if not one:
        down = plan_of(form, inter, hidden, 16, rows, work, sms)
    if up is None or down is None:
        raise ValueError(f"moe: experts of {inter} x {hidden} do not fit in shared memory")
    return up, down, one


def run_experts(
    name: str,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    limit: float,
    pdl: bool = True,
    chosen=None,
) -> Tensor:
    """float32 [T, H]. Up to 64 tokens: two launches for one token, three for more."""
    number, inter, count = check(name, x, experts, weights, gate_up, down)
    tokens, hidden = x.shape
    k = experts.shape[1]
    y = torch.empty((tokens, hidden), dtype=torch.float32, device=x.device)
    x, experts, weights = rows_of(x, hidden), experts.contiguous(), weights.contiguous()
    many = tokens > DECODE_TOKENS
    most = max(1, (MANY_ENTRIES if many else ENTRIES) // k)
    for start in range(0, tokens, most):
        part = slice(start, start + most)
        arguments = number, x[part], experts[part], weights[part], gate_up, down, y[part], limit, inter, count
        if many:
            _run_many(*arguments)
        else:
            _run(*arguments, pdl, chosen)
    return y


def _run(number, x, experts, weights, gate_up, down, y, limit, inter, count, pdl, chosen) -> None:
    tokens, hidden = x.shape
    k = experts.shape[1]
    entries = tokens * k
    sms = processors(x.device.index)
    up_plan, down_plan, one = chosen or plans(number, hidden, inter, tokens, k, count, sms)
    h = torch.empty((entries, inter), dtype=x.dtype, device=x.device)
    ready(SOURCE, "moe_gate_up", *up_plan.defines(number))(
        sms, up_plan.threads, x, experts, weights, *gate_up, h, entries, k, hidden, inter, count, limit,
        shared=up_plan.shared, pdl=pdl,
    )  # fmt: skip
    out = y if one else torch.empty((entries, hidden), dtype=torch.float32, device=x.device)
    ready(SOURCE, "moe_down_one" if one else "moe_down", *down_plan.defines(number))(
        sms, down_plan.threads, h, experts, *down, out, entries, inter, hidden, count,
        shared=down_plan.shared, pdl=pdl,
    )  # fmt: skip
    if not one:
        kernel(SOURCE, "moe_combine", *COMBINE)(
            (-(-hidden // 512), tokens), 128, out, experts, y, hidden, k, count, pdl=pdl
        )


def _run_many(number, x, experts, weights, gate_up, down, y, limit, inter, count) -> None:
    tokens, hidden = x.shape
    k = experts.shape[1]
    entries = tokens * k
    flat = experts.view(-1)
    keys, order = torch.sort(torch.where((flat >= 0) & (flat < count), flat, count), stable=True)
    bounds = torch.searchsorted(keys, torch.arange(count + 1, dtype=keys.dtype, device=x.device))
    tile_ends = ((bounds.diff() + TILE - 1) // TILE).cumsum(0)
    most = entries // TILE + min(count, entries)
    h = torch.empty((entries, inter), dtype=x.dtype, device=x.device)
    out = torch.empty((entries, hidden), dtype=torch.float32, device=x.device)
    for gated, source, target, stack, width, rows in (
        (1, x, h, gate_up, hidden, inter), (0, h, out, down, inter, hidden)
    ):  # fmt: skip
        function = raised(kernel("moe_prefill.cu", "moe_prefill", f"FMT={number}", f"GATE_UP={gated}"), PREFILL_BYTES)
        function(
            (-(-rows // (TILE // 2 if gated else TILE)), most), 256,
            source, order, bounds, tile_ends, weights, *stack, target, k, width, rows, count, limit, shared=PREFILL_BYTES,
        )  # fmt: skip
    combine = kernel(SOURCE, "moe_combine", *COMBINE)
    combine((-(-hidden // 512), tokens), 128, out, experts, y, hidden, k, count)
