"""Failed guards in plain words: what torch.compile had assumed, what it found, and how to keep it from compiling again."""

import re
from dataclasses import dataclass

from dsv4.compile.explain.frames import Place, parse_stack
from dsv4.compile.explain.rules import Rule

_FIXED = (
    "Compile for a few fixed sizes and pad to them, which CUDA graphs need anyway; or call torch._dynamo.mark_dynamic(x, "
    "dimension) before the first call."
)
_STATIC_CACHE = (
    "State that grows needs a graph for every size. Allocate it once at its largest size and write at a position "
    "(cache.index_copy_(1, position, new)), with the position in a tensor and the part that is not filled masked."
)
_TENSOR = (
    "Keep it in a tensor (a registered buffer, changed in place) or pass it as a tensor: values of tensors are not guarded."
)


RULES = (
    Rule(
        r"tensor '(?P<name>.+?)' size mismatch at index (?P<dim>\d+)\. expected (?P<old>\S+), actual (?P<new>\S+)",
        "size changed",
        "dimension {dim} of {name} became {new}, the graph was compiled for {old}",
        _FIXED,
    ),
    Rule(
        r"tensor '(?P<name>.+?)' rank mismatch\. expected (?P<old>\S+), actual (?P<new>\S+)",
        "number of dimensions changed",
        "{name} has {new} dimensions, the graph was compiled for {old}",
        "Give it the same number of dimensions at every call (unsqueeze, flatten).",
    ),
    Rule(
        r"tensor '(?P<name>.+?)' dtype mismatch\. expected (?P<old>\S+), actual (?P<new>\S+)",
        "dtype changed",
        "{name} is {new}, the graph was compiled for {old}",
        "Convert it before the call: x.to(dtype).",
    ),
    Rule(
        r"tensor '(?P<name>.+?)' stride mismatch at index (?P<dim>\d+)\. expected (?P<old>\S+), actual (?P<new>\S+)",
        "strides changed",
        "the stride of dimension {dim} of {name} became {new}, the graph was compiled for {old}",
        "Pass it in one layout: x.contiguous().",
    ),
    Rule(
        r"tensor '(?P<name>.+?)' requires_grad mismatch\. expected requires_grad=(?P<old>\S+)",
        "requires_grad changed",
        "{name} requires gradients in one call and not in another",
        "For inference call under torch.no_grad(); else detach() it, or require gradients, at every call.",
    ),
    Rule(
        r"tensor '(?P<name>.+?)' (?:dispatch key set mismatch|device)",
        "device or mode changed",
        "{name} lies on another device, or is of another kind (inference or subclass), than the graph was compiled for",
        "Move it to one device before the call, and make it in one mode.",
    ),
    Rule(
        r"tensor '(?P<name>.+?)' (?P<what>.+)",
        "tensor changed",
        "{name}: {what}",
        "Give it the same properties at every call.",
    ),
    Rule(
        r"GLOBAL_STATE changed: (?P<what>\S+)",
        "mode of torch changed",
        "{what} is not what it was when the graph was compiled",
        "Call under the same modes every time (torch.no_grad, autocast, deterministic algorithms).",
    ),
    Rule(
        r"(?:.*Duplicate tensor|.*[Oo]verlap|.*alias)",
        "arguments share memory differently",
        "two arguments are one tensor, or share memory, in one call and not in another",
        "Pass separate tensors: x.clone().",
    ),
    Rule(
        r"(?:not (?P<empty>[\w.\[\]'\"]+)$|len\((?P<name>.+?)\) == (?P<old>\d+))",
        "length of a list changed",
        "{name} no longer has {old} elements, as the graph assumed",
        _STATIC_CACHE,
    ),
    Rule(
        r"G\['(?P<name>\w+)'\] == (?P<old>.+)",
        "global changed",
        "the global {name} is no longer {old}, which the graph holds as a constant",
        _TENSOR,
    ),
    Rule(
        r"(?P<name>[\w.\[\]'\"]*)\.training\b|.*obj_id\((?P<name2>[\w.\[\]'\"]*)\.training",
        "training mode changed",
        "{name} was switched between train() and eval()",
        "Call eval() once, before the first call.",
    ),
    Rule(
        r"(?P<name>(?:[\w\[\]'\"]+\.)+\w+) == (?P<old>.+)",
        "attribute changed",
        "{name} is no longer {old}, which the graph holds as a constant",
        _TENSOR,
    ),
    Rule(
        r"(?:not )?___dict_contains\((?P<key>[^,]+), (?P<name>.+)\)",
        "keys of a dict changed",
        "{name} has the key {key} in one call and not in another",
        "Pass the same keys every time.",
    ),
    Rule(
        r"___check_type_id\((?P<name>[^,]+),|.*___check_type_id\((?P<name2>[^,]+),",
        "type changed",
        "{name} is of another type than the graph was compiled for",
        "Pass the same type every time.",
    ),
    Rule(
        r".*___check_obj_id\((?P<name>[^,]+),|CodeGuardAccessor: Not a function on (?P<name2>\S+)",
        "another object",
        "{name} is another object than the graph was compiled for; functions and modules are recognised by identity",
        "Make it once and pass the same one every time, or compile each variant separately.",
    ),
    Rule(
        r"(?P<name>[\w.\[\]'\"]+) == (?P<old>-?\d+)$",
        "Python int changed",
        "{name} is no longer {old}, and a Python int is a constant of the graph",
        "Pass it as a tensor, torch.tensor(n, device=...), or keep to few values.",
    ),
    Rule(
        r"(?P<name>[\w.\[\]'\"]+) == (?P<old>.+)$",
        "Python value changed",
        "{name} is no longer {old}, and a Python value is a constant of the graph",
        "Pass it as a tensor if it is a number; else compile each variant separately.",
    ),
    Rule(
        r".*(?:size\(\)|stride\(\)|[<>]=?)",
        "size outside the assumed range",
        "a size no longer satisfies {guard}",
        _FIXED,
    ),
)


@dataclass(frozen=True)
class Cause:
    """Why one compilation did not fit a call."""

    title: str
    reason: str
    hint: str
    name: str  # what changed
    place: Place | None  # the line that made torch assume it, where it is known
    guard: str


def cause_of(text: str, file: str = "") -> Cause:
    """The cause that one failed guard names. `file`: of the compiled function, whose path torch shortens."""
    guard, _, rest = text.partition("  # ")
    guard = re.sub(r"^\d+/\d+: ", "", guard.splitlines()[0] if guard else "").strip()
    stack = parse_stack(rest)
    short = re.search(r"# \S*?([^/\s]+\.py):(\d+) in (\S+)", rest)
    place = stack[-1] if stack else None
    if place is None and short and file.endswith(short[1]):
        place = Place(file, int(short[2]), short[3])
    plain = re.sub(r"\bL\['(\w+)'\]", r"\1", guard)
    for rule in RULES:
        match = re.match(rule.pattern, plain)
        if match:
            groups = {name: value or "" for name, value in match.groupdict().items()}
            groups["name"] = groups.get("name") or groups.get("name2") or groups.get("empty") or ""
            groups["old"] = groups.get("old") or "0"
            reason = rule.reason.format(**groups, guard=plain)
            # A tensor that is no argument itself but part of an object is state.
            state = rule.title == "size changed" and re.search(r"[.\[]", groups["name"])
            return Cause(rule.title, reason, _STATIC_CACHE if state else rule.hint, groups["name"], place, guard)
    return Cause("assumption failed", f"{plain} no longer holds", "See torch's guard in the details.", plain, place, guard)
