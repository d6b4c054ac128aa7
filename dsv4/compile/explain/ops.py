"""Stage 1: the ops that a call uses, before anything is traced. Each op that is not torch's own is run as itself and as
its fake, and what it does is compared with what it declares.

That an op has a fake cannot be asked: torch registers one that raises for ops that have none. So it is called.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from dsv4.compile.explain.frames import where
from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.state import same_bits
from dsv4.compile.explain.subject import Subject
from dsv4.compile.explain.summary import plural
from dsv4.compile.explain.watch import Use, Watch, copies, storage

_OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def run(subject: Subject) -> Stage:
    """The stage's report on a subject."""
    [call, *_] = subject.calls()
    call.ready()
    with subject.context(), Watch(keep=True) as watch:
        call.bare(subject.function)
    custom = [use for use in watch.uses.values() if use.custom]
    findings: dict[tuple, Finding] = {}
    for use in custom:
        for finding in check(use):
            findings.setdefault((use.name, finding.title), finding)
    names = sorted({use.name for use in custom})
    count = sum(use.count for use in watch.uses.values())
    text = f"{plural(count, 'op call')}; {plural(len(names), 'op')} outside of torch" + (
        f", {problems(findings)}" if names else ""
    )
    data = {"ops": [facts(use, custom) for use in {use.name: use for use in custom}.values()]}
    return Stage(1, "found" if findings else "ok", text, findings=tuple(findings.values()), data=data)


def problems(findings: dict[tuple, Finding]) -> str:
    """`all sound`, `2 unsound`."""
    names = {name for name, _ in findings}
    return f"{len(names)} unsound" if names else "all sound"


def facts(use: Use, custom: list[Use]) -> dict:
    """What is registered for an op."""
    keys = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return {
        "name": use.name,
        "schema": str(use.op._schema),
        "kernels": [key for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(use.name, key)],
        "mutates": [a.name for a in use.op._schema.arguments if a.alias_info is not None and a.alias_info.is_write],
        "tags": sorted(str(tag).removeprefix("Tag.") for tag in use.op.tags),
        "calls": sum(other.count for other in custom if other.name == use.name),
    }


def check(use: Use) -> list[Finding]:
    """Everything that is wrong with one op, as this use of it shows. Later checks need what earlier ones look at."""

    def finding(title: str, reason: str, hint: str, kind: str = "op", **details) -> Finding:
        details = {"op": use.name, **details}
        return Finding(kind, title, reason, hint, *where(use.place), count=use.count, details=details)

    found = []
    if torch.Tag.cudagraph_unsafe in use.op.tags:
        found.append(
            finding(
                "op that is not safe in a CUDA graph",
                f"{use.name} is tagged cudagraph_unsafe, so a step that calls it is not one CUDA graph.",
                "Give it a kernel that neither waits for the device nor allocates outside of PyTorch, and drop the tag.",
                "skip",
            )
        )
    found += undeclared(use, finding)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, copies((use.args, use.kwargs)))
            fake = use.op(*args, **kwargs)
    except Exception as error:
        found.append(fake_fails(use, error, finding))
        return found
    found += differences(use, fake, finding)
    found += defaults(use, finding)
    return found or opcheck(use, finding)


def undeclared(use: Use, finding: Callable[..., Finding]) -> list[Finding]:
    """What the op does to its arguments without its schema saying so."""
    args, kwargs = copies((use.args, use.kwargs))
    before = copies((args, kwargs))
    results = {storage(leaf) for leaf in pytree.tree_leaves(use.op(*args, **kwargs)) if isinstance(leaf, Tensor)}
    for i, argument in enumerate(use.op._schema.arguments):
        if argument.alias_info is not None:
            continue
        name = argument.name
        now, then = (pytree.tree_leaves(a[i] if i < len(a) else k.get(name)) for a, k in ((args, kwargs), before))
        tensors = [(a, b) for a, b in zip(now, then, strict=True) if isinstance(a, Tensor)]
        if any(not same_bits(a, b) for a, b in tensors):
            return [
                finding(
                    "undeclared change of an argument",
                    f"{use.name} changes {name}, which its schema does not say; compiled code may reorder, repeat or drop "
                    "it, and give wrong numbers.",
                    f"Declare it: Tensor(a!) {name} in the schema, mutates_args=({name!r},) of custom_op; or do not change "
                    "it.",
                )
            ]
        if any(storage(a) in results for a, _ in tensors):
            return [
                finding(
                    "undeclared alias of an argument",
                    f"What {use.name} returns shares memory with {name}, which its schema does not say; compiled code may "
                    "change one and with it the other.",
                    f"Return a copy ({name}.clone()).",
                )
            ]
    return []


def fake_fails(use: Use, error: Exception, finding: Callable[..., Finding]) -> Finding:
    """The fake raised, or there is none."""
    text = str(error)
    missing = isinstance(error, torch._subclasses.fake_tensor.UnsupportedOperatorException) or "no fake impl" in text
    if missing:
        return finding(
            "op without a fake",
            f"{use.name} has no fake (a function that gives the result's shape and dtype), so torch.compile cannot trace "
            "it.",
            f"Register one: @torch.library.register_fake({use.name!r}) with a function that returns an empty tensor of the "
            "result's shape, dtype, strides and device.",
        )
    lines = text.strip().splitlines() or [""]
    return finding(
        "fake that fails",
        f"The fake of {use.name} raises {type(error).__name__}: {lines[0]}.",
        "A fake may look at shapes, dtypes and devices only, never at values or data pointers, and must accept every "
        "argument that the schema allows.",
        error=text,
    )


def differences(use: Use, fake: Any, finding: Callable[..., Finding]) -> list[Finding]:
    """Where the fake's results are not like the real ones."""
    real_leaves = [leaf for leaf in pytree.tree_leaves(use.result) if isinstance(leaf, Tensor)]
    fake_leaves = [leaf for leaf in pytree.tree_leaves(fake) if isinstance(leaf, FakeTensor)]
    hint = f"Make the fake of {use.name} return what the op returns."
    if len(real_leaves) != len(fake_leaves):
        reason = f"{use.name} returns {plural(len(real_leaves), 'tensor')}, its fake {len(fake_leaves)}."
        return [finding("fake with another number of results", reason, hint)]
    for i, (r, f) in enumerate(zip(real_leaves, fake_leaves, strict=True)):
        which = f"result {i} of {use.name}" if len(real_leaves) > 1 else f"the result of {use.name}"
        checks = (
            ("shape", tuple(r.shape), tuple(f.shape), "reads and writes beside it"),
            ("dtype", r.dtype, f.dtype, "takes its bytes for something else"),
            ("device", r.device.type, f.device.type, "runs on the wrong device"),
            ("strides", strides(r), strides(f), "addresses the wrong elements"),
        )
        for what, is_real, is_fake, effect in checks:
            if is_real != is_fake and not isinstance(is_fake, torch.SymInt):
                title = f"fake with the wrong {what}"
                reason = f"By its fake {which} has {what} {is_fake}, in truth {is_real}; compiled code trusts the fake and "
                return [finding(title, f"{reason}{effect}.", f"{hint} Its {what} must be {is_real} here.")]
    return []


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have any."""
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def defaults(use: Use, finding: Callable[..., Finding]) -> list[Finding]:
    """Where the fake's Python defaults are not the schema's: an argument that is left out reaches the fake as those."""
    function = fake_function(use.name)
    if function is None:
        return []
    parameters = inspect.signature(function).parameters
    for argument in use.op._schema.arguments:
        parameter = parameters.get(argument.name)
        if parameter is None or not argument.has_default_value():
            continue
        if parameter.default is inspect.Parameter.empty or parameter.default != argument.default_value:
            has = "none" if parameter.default is inspect.Parameter.empty else repr(parameter.default)
            return [
                finding(
                    "fake with another default",
                    f"{argument.name} of {use.name} defaults to {argument.default_value!r} in the schema, but in the fake "
                    f"to {has}; a call that leaves it out is traced with the wrong value.",
                    f"Write {argument.name}={argument.default_value!r} in the fake.",
                )
            ]
    return []


def fake_function(name: str) -> Callable | None:
    """The Python function that was registered as an op's fake, None if there is none to be seen."""
    fake_impl = torch._library.simple_registry.singleton.find(name).fake_impl
    function = getattr(getattr(fake_impl, "kernel", None), "func", None)
    if function is None:
        return None
    return inspect.getclosurevars(function).nonlocals.get("func", function)  # register_fake wraps it


def opcheck(use: Use, finding: Callable[..., Finding]) -> list[Finding]:
    """What torch's own checker says beyond the above."""
    checks = list(_OPCHECKS)
    leaves = [leaf for leaf in pytree.tree_leaves((use.args, use.kwargs)) if isinstance(leaf, Tensor)]
    if any("float8" in str(leaf.dtype) for leaf in leaves):
        checks.remove("test_schema")  # it compares with allclose, which float8 lacks
    with torch.enable_grad():
        results = torch.library.opcheck(
            use.op, *copies((use.args, use.kwargs)), test_utils=tuple(checks), raise_exception=False
        )
    for name, result in results.items():
        if result != "SUCCESS":
            text = str(result).strip()
            reason = f"torch.library.opcheck ({name}) fails for {use.name}: {text.splitlines()[0]}"
            return [
                finding(
                    "opcheck fails", reason, "See torch.library.opcheck; torch's message is in the details.", error=text
                )
            ]
    return []
