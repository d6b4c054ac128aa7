"""Stage 6: do the compiled and the replayed function give the numbers of the plain one?"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4.compile.explain.capture import Replay, uses_cuda
from dsv4.compile.explain.frames import place_of_function, where
from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.state import Snapshot, same_bits
from dsv4.compile.explain.subject import Call, Subject
from dsv4.compile.explain.summary import plural
from dsv4.compile.explain.watch import copies

NOT_COMPARABLE = "the callable differs from itself from call to call, so nothing can be compared"
# The largest difference, as a share of the largest value, that another order of the same sums may make, by the coarsest
# type that takes part. Types not listed (integers, bools) must be equal.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def run(subject: Subject) -> Stage:
    """The stage's report on a subject. Every call of the sweep runs eagerly and compiled from the same state; on CUDA
    the first also as a replayed graph."""
    compiled = subject.compiled()
    pairs: list[dict] = []
    findings: list[Finding] = []
    with subject.context():
        for i, call in enumerate(subject.calls()):
            call.ready()
            compare = Comparison(subject, call)
            eager = compare.outcome(call, subject.function)
            other = compare.outcome(call, compiled)
            pair, differs = compare("eager", eager, "compiled", other)
            if differs and compare("", eager, "", compare.outcome(call, subject.function))[1]:
                return Stage(6, "ok", NOT_COMPARABLE, findings=(not_comparable(subject),), data={"pairs": []})
            if differs:
                pair["first_module"] = first_module(subject, call, compare)
                findings.append(differing(subject, pair))
            pairs.append(pair)
            if i == 0 and uses_cuda(subject, call) and (replay := captured(subject, call)) is not None:
                pair, differs = compare("compiled", other, "replayed", compare.outcome(call, lambda *_, **__: replay()))
                pairs.append(pair)
                findings += [differing(subject, pair)] if differs else []
            compare.snapshot.restore()
    worst = max((pair["max_rel"] for pair in pairs), default=0.0)
    text = f"largest difference {worst:.1e} of the largest value, over {plural(len(pairs), 'comparison')}"
    return Stage(6, "found" if findings else "ok", text, findings=tuple(findings[:1]), data={"pairs": pairs})


class Comparison:
    """Runs a call in several ways from one state and compares what comes out."""

    def __init__(self, subject: Subject, call: Call):
        self.snapshot = Snapshot(subject, call)
        types = {tensor.dtype for tensor in subject.tensors(call).values()}
        self._coarsest = max((TOLERANCE.get(dtype, 0.0) for dtype in types), default=0.0)

    def outcome(self, call: Call, function: Callable) -> dict[str, Tensor]:
        """What a call returns and what it leaves behind in the tensors that it may change."""
        self.snapshot.restore()
        result = call.run(function)
        found = {f"result{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_leaves_with_path(result)}
        found |= self.snapshot.changed()
        return {name: leaf.detach().clone() for name, leaf in found.items() if isinstance(leaf, Tensor)}

    def __call__(self, a_name: str, a: dict[str, Tensor], b_name: str, b: dict[str, Tensor]) -> tuple[dict, bool]:
        """The largest differences between two outcomes, and whether any is larger than rounding can explain."""
        pair = {"a": a_name, "b": b_name, "max_abs": 0.0, "max_rel": 0.0, "first_module": "", "where": ""}
        differs = False
        for name in dict.fromkeys((*a, *b)):
            before = self.snapshot.copies.get(name)  # what one of them has left alone
            one, other = a.get(name, before), b.get(name, before)
            absolute, relative = difference(one, other)
            if not relative <= pair["max_rel"]:
                pair |= {"max_abs": absolute, "max_rel": relative, "where": name}
            own = TOLERANCE.get(one.dtype) if one is not None else None
            differs |= not relative <= (max(own, self._coarsest) if own is not None else 0.0)
        return pair, differs


def not_comparable(subject: Subject) -> Finding:
    """A callable that differs from itself."""
    return Finding(
        "note",
        "cannot be compared",
        "Two plain calls from the same state differ already: the callable keeps state outside of tensors, such as a list "
        "that grows, or draws random numbers that torch.manual_seed does not rule.",
        "Keep its state in tensors that are changed in place.",
        *where(place_of_function(subject.function)),
    )


def captured(subject: Subject, call: Call) -> Callable[[], Any] | None:
    """The call as a replayed graph, None where it cannot be captured: stage 4 says why."""
    try:
        return Replay(subject, call)
    except Exception:
        torch.cuda.synchronize()
        return None


def difference(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """(largest difference, the same as a share of the largest value); infinite where the two cannot be compared."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf, math.inf
    if same_bits(a, b):
        return 0.0, 0.0
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    apart = ((a - b).abs()).where(a != b, 0.0)  # equal infinities
    apart = apart.where(~(a.isnan() & b.isnan()), 0.0)
    largest = apart.nan_to_num(nan=math.inf).max().item()
    scale = a.abs().nan_to_num(posinf=0.0).max().item()
    return largest, largest / scale if scale else largest


def first_module(subject: Subject, call: Call, compare: Comparison) -> str:
    """Path of the first module, in the order in which modules finish, whose result differs; "" if none can be named.

    The modules' results are taken by hooks, which are compiled with the rest.
    """
    results: dict[str, Any] = {}

    def hook(name: str) -> Callable:
        def keep(_module, _args, result) -> None:
            results[name] = result

        return keep

    names = subject.module_names()
    modules = {id(m): m for root in subject.roots().values() for m in root.modules()}
    handles = [module.register_forward_hook(hook(names[key])) for key, module in modules.items()]
    outcomes = []
    torch._dynamo.reset()  # hooks are not guarded: what is compiled already would run on without them
    try:
        for function in (subject.function, subject.compile(subject.function)):
            results.clear()
            compare.outcome(call, function)
            outcomes.append(copies(dict(results)))
    except Exception:  # hooks stand in the way of the compilation: then no module can be named
        return ""
    finally:
        for handle in handles:
            handle.remove()
    for name, eager in outcomes[0].items():
        a, b = (
            {str(i): leaf for i, leaf in enumerate(pytree.tree_leaves(result)) if isinstance(leaf, Tensor)}
            for result in (eager, outcomes[1].get(name))
        )
        if compare("", a, "", b)[1]:
            return name
    return ""


def differing(subject: Subject, pair: dict) -> Finding:
    """A difference that is larger than rounding."""
    module = next(
        (m for root in subject.roots().values() for n, m in root.named_modules() if n == pair["first_module"]), None
    )
    place = place_of_function(module if pair["first_module"] and module is not None else subject.function)
    first = f", first in {pair['first_module']}" if pair["first_module"] else ""
    return Finding(
        "difference",
        f"{pair['b']} differs from {pair['a']}",
        f"{pair['where']} differs by up to {pair['max_abs']:.3g}, {pair['max_rel']:.1e} of its largest value{first}: more "
        "than another order of the same sums explains.",
        "Look at stage 1 first: an op that changes an argument undeclared, or a wrong fake, does this. Numbers drawn at "
        "random inside the function differ too.",
        *where(place),
        pair["first_module"],
        details={"where": pair["where"]},
    )
