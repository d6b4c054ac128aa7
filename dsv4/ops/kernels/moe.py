"""Launches of the expert kernels: moe_token.cu for one token, moe_experts.cu for up to 64; for more see moe_prefill.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.moe_plans import MOST_PICKS, ExpertsPlan, TokenPlan, experts_plan, token_plan
from dsv4.ops.kernels.moe_prefill import prefill
from dsv4.ops.kernels.stream import BF16, FORMATS, FP4, FP8, Weight, check_weight, processors, ready, rows_of

ENTRIES = 512  # (token, choice) pairs of a decode launch, those of a shared expert among them
MANY_ENTRIES = 32768  # and of a prefill launch, which keeps a float32 result of each
DECODE_TOKENS = 64
TOKEN, EXPERTS = "moe_token.cu", "moe_experts.cu"
# moe_combine uses none of them
COMBINE = "FMT=0", "WARPS=4", "KW=4", "NT=1", "MT=1", "STAGES=3", "TAIL=0", "SHARED=0"


class Shared(NamedTuple):
    """The FP8 matrices of a shared expert beside the stack."""

    gate_up: Weight
    down: Weight


class Router(NamedTuple):
    """What route_topk takes beside x."""

    gate: Tensor
    bias: Tensor
    slots: Tensor
    k: int
    scale: float


class Call(NamedTuple):
    """What all launches of one call have in common. The kernels' arguments for the shared expert are null without one."""

    number: int
    gate_up: Weight
    down: Weight
    shared: Shared | None
    shared_last: bool
    limit: float
    inter: int
    count: int

    @classmethod
    def of(
        cls, gate_up: Weight, down: Weight, limit: float, shared_last: bool = False, shared: Shared | None = None
    ) -> "Call":
        inter, count = gate_up.codes.shape[1] // 2, down.codes.shape[0]
        return cls(gate_up.number, gate_up, down, shared, shared_last, limit, inter, count)

    def result(self, x: Tensor) -> Tensor:
        """Room for it."""
        return torch.empty(x.shape, dtype=x.dtype if self.is_rounded else torch.float32, device=x.device)

    @property
    def shared_gate_up(self) -> tuple[Tensor | None, Tensor | None]:
        return self.shared.gate_up[:2] if self.shared else (None, None)

    @property
    def shared_down(self) -> tuple[Tensor | None, Tensor | None]:
        return self.shared.down[:2] if self.shared else (None, None)

    @property
    def is_rounded(self) -> bool:
        """Whether there is a shared expert, so that the result is what the layer gives on."""
        return self.shared is not None or self.shared_last


def _blocks(size: int) -> int:
    return -(-size // 128)


def _check_stack(
    name: str, part: str, number: int, stack: Weight, leading: tuple, halves: int, rows: int, width: int
) -> None:
    """ValueError unless the kernels can read `halves` * rows x width matrices of this format."""
    device = stack.codes.device
    FORMATS[number].check(width, f"{name} {part}")
    dtype = {BF16: torch.bfloat16, FP8: torch.float8_e4m3fn, FP4: torch.uint8}[number]
    columns = width // 2 if number == FP4 else width
    check_weight(f"{name} {part}", stack.codes, dtype, (*leading, halves * rows, columns), device)
    if number == FP8:
        shape = (*leading, halves * _blocks(rows), _blocks(width))
        check_weight(f"{name} {part}_scale", stack.scales, torch.float32, shape, device)
    if number == FP4:
        shape = (*leading, halves * rows, width // 16)
        check_weight(f"{name} {part}_scale", stack.scales, torch.float8_e4m3fn, shape, device)
        shape = (*leading, halves) if halves > 1 else leading
        check_weight(f"{name} {part}_scale_2", stack.scale_2, torch.float32, shape, device)


def check_routing(name: str, tokens: int, experts: Tensor, weights: Tensor) -> None:
    """ValueError for routing that the kernels do not read."""
    k = experts.shape[1]
    if experts.dtype != torch.int32 or weights.dtype != torch.float32 or weights.shape != experts.shape:
        raise ValueError(
            f"{name}: experts {experts.dtype} {tuple(experts.shape)} and weights {weights.dtype} {tuple(weights.shape)}, "
            f"expected int32 and float32 [{tokens}, k]"
        )
    if experts.shape[0] != tokens or not 1 <= k < ENTRIES:
        raise ValueError(f"{name}: experts {tuple(experts.shape)} for {tokens} tokens, 1 to {ENTRIES - 1} choices a token")


def check_stacks(name: str, x: Tensor, call: Call) -> None:
    """ValueError for activations and weights that the kernels do not read."""
    hidden, number, inter, count = x.shape[1], call.number, call.inter, call.count
    if x.dtype != torch.bfloat16:
        raise ValueError(f"{name}: x has dtype {x.dtype}, expected bfloat16 or float32")
    if inter % 8 or hidden % 8 or count > 32767:
        raise ValueError(
            f"{name}: {count} experts of {inter} x {hidden}, expected sizes divisible by 8, under 32768 experts"
        )
    stacks = [(number, call.gate_up, call.down, (count,), "")]
    if call.shared:
        stacks.append((FP8, *call.shared, (), "shared_"))
    for form, gate_up, down, leading, prefix in stacks:
        _check_stack(name, f"{prefix}gate_up", form, gate_up, leading, 2, inter, hidden)
        _check_stack(name, f"{prefix}down", form, down, leading, 1, hidden, inter)


def run_experts(name: str, x: Tensor, experts: Tensor, weights: Tensor, call: Call) -> Tensor:
    """[T, H]: bf16 with a shared expert, which is the stack's last or FP8 beside it; else float32. One launch for one
    token if widths are multiples of 1024, otherwise three for up to 64 tokens."""
    tokens, hidden = x.shape
    check_stacks(name, x, call)
    check_routing(name, tokens, experts, weights)
    y = call.result(x)
    x, experts, weights = rows_of(x, hidden), experts.contiguous(), weights.contiguous()
    many = tokens > DECODE_TOKENS
    most = max(1, (MANY_ENTRIES if many else ENTRIES) // (experts.shape[1] + 1))
    for start in range(0, tokens, most):
        part = slice(start, start + most)
        run = _run_many if many else _run
        run(call, x[part], experts[part], weights[part], y[part])
    return y


def _run(call: Call, x: Tensor, experts: Tensor, weights: Tensor, y: Tensor) -> None:
    (tokens, hidden), k, sms = x.shape, experts.shape[1], processors(x.device.index)
    picks, beside = k + call.shared_last, call.shared is not None
    if tokens == 1 and picks <= MOST_PICKS:
        plan = token_plan(call.number, hidden, call.inter, picks, beside, sms)
        if plan:
            return _run_token(call, plan, x, (experts, weights), k, y)
    plans = (
        experts_plan(call.number, True, hidden, tokens * k, beside),
        experts_plan(call.number, False, call.inter, tokens * k, beside),
    )
    if None in plans:
        raise ValueError(f"moe: experts of {call.inter} x {hidden} do not fit in shared memory")
    return _run_several(call, x, experts, weights, y, *plans)


def _run_token(
    call: Call, plan: TokenPlan, x: Tensor, routing: tuple, k: int, y: Tensor, more: tuple[str, ...] = ()
) -> None:
    """`routing`: what the kernel takes for it; `more` defines, if it picks the experts itself."""
    h = torch.empty((k + 1, call.inter), dtype=x.dtype, device=x.device)
    ready(TOKEN, "moe_token", *plan.defines(call.number, call.shared is not None), *more)(
        processors(x.device.index), plan.threads, x, *routing, *call.gate_up, *call.down, *call.shared_gate_up,
        *call.shared_down, h, y, k, call.shared_last, call.count, call.is_rounded, call.limit, shared=plan.bytes, pdl=True,
    )  # fmt: skip


def run_routed(name: str, x: Tensor, router: Router, call: Call) -> Tensor | None:
    """run_experts' result for one token and the experts that the router picks, in one launch; None if there is no such
    launch for these sizes."""
    check_stacks(name, x, call)
    (experts, hidden), k, sms = router.gate.shape, router.k, processors(x.device.index)
    if experts != call.count - call.shared_last:
        raise ValueError(f"{name}: gate has {experts} rows, expected {call.count - call.shared_last}, one an expert")
    plan = token_plan(call.number, hidden, call.inter, k + call.shared_last, call.shared is not None, sms)
    more = plan and plan.routing_defines(experts, k, sms)
    if more is None:
        return None
    y = call.result(x)
    _run_token(call, plan, rows_of(x, hidden), (router.gate, router.bias, router.slots, router.scale), k, y, more)
    return y


def _run_several(
    call: Call, x: Tensor, experts: Tensor, weights: Tensor, y: Tensor, up: ExpertsPlan, down: ExpertsPlan
) -> None:
    (tokens, hidden), k, sms, beside = x.shape, experts.shape[1], processors(x.device.index), call.shared is not None
    entries = tokens * (k + call.is_rounded)
    h = torch.empty((entries, call.inter), dtype=x.dtype, device=x.device)
    out = torch.empty((entries, hidden), dtype=torch.float32, device=x.device)
    sizes = tokens, k, call.shared_last
    ready(EXPERTS, "moe_gate_up", *up.defines(call.number, beside))(
        sms, up.warps * 32, x, experts, weights, *call.gate_up, *call.shared_gate_up, h, *sizes, hidden, call.inter,
        call.count, call.limit, shared=up.bytes, pdl=True,
    )  # fmt: skip
    ready(EXPERTS, "moe_down", *down.defines(call.number, beside))(
        sms, down.warps * 32, h, experts, *call.down, *call.shared_down, out, *sizes, call.inter, hidden, call.count,
        shared=down.bytes, pdl=True,
    )  # fmt: skip
    _combine(call, out, experts, y)


def _combine(call: Call, out: Tensor, experts: Tensor, y: Tensor) -> None:
    (tokens, hidden), k = y.shape, experts.shape[1]
    grid = -(-hidden // 512), tokens
    kernel(EXPERTS, "moe_combine", *COMBINE)(
        grid, 128, out, experts, y, tokens, hidden, k, call.count, call.is_rounded, pdl=True
    )


def _run_many(call: Call, x: Tensor, experts: Tensor, weights: Tensor, y: Tensor) -> None:
    (tokens, hidden), k = x.shape, experts.shape[1]
    out = torch.empty((tokens * (k + call.is_rounded), hidden), dtype=torch.float32, device=x.device)
    prefill(call.gate_up, call.down, call.shared, x, experts, weights, out, call.limit)
    _combine(call, out, experts, y)
