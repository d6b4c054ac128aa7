"""Graph breaks in plain words: what torch reports, a reason that names the effect, and a hint that says what to change.

torch names every break by its first line and explains it below; RULES recognises those that matter. What no rule
recognises keeps torch's own words.
"""

import re
from collections.abc import Mapping, Sequence

from dsv4.compile.explain.frames import Place, fold, innermost, where
from dsv4.compile.explain.report import Finding
from dsv4.compile.explain.rules import Rule
from dsv4.compile.explain.trace import Break

_SKIPPED = " It stands where torch cannot resume (in a loop, try or with), so the whole function runs without a graph."


RULES = (
    Rule(
        r"builtin operator `print`",
        "print",
        "print runs in Python at every call, so the graph ends before it and another begins after it.",
        "Remove the print, or print what the function returns, outside of it.",
    ),
    Rule(
        r"logging\.Logger method|LoggingLogger",
        "logging",
        "A logging call runs in Python at every call, so the graph ends before it.",
        "Move the logging call out of the compiled function.",
    ),
    Rule(
        r"Tensor\.(?:item|tolist)\(\)|\.(?:item|tolist)\(\) call|_local_scalar_dense",
        "tensor value read on the host",
        "item(), tolist(), int() or float() of a tensor brings its value to Python: on a GPU the host waits for the "
        "device, and the graph ends there.",
        "Keep the value on the device: a tensor of no dimensions takes part in arithmetic as a number does.",
    ),
    Rule(
        r"Data-dependent branching|Data-dependent assertion",
        "branch on a tensor's value",
        "Which way Python goes depends on a tensor's value, which is not known while tracing and makes the host wait.",
        "Compute both sides and choose on the device: torch.where(condition, a, b), or torch.cond.",
    ),
    Rule(
        r"Operator `(?P<op>[^`]+)`'s output shape depends",
        "result of data-dependent size",
        "The size of what {op} returns depends on values: the host must wait to learn it, and no CUDA graph can hold it.",
        "Give the result a fixed size: torch.where(mask, x, 0) for masked selection, torch.nonzero_static(x, size=n) for "
        "indices, topk for a fixed number of rows.",
    ),
    Rule(
        r"unsupported operator: (?P<op>[\w.:]+?)(?:\.default)?(?![\w.])|no fake impl registered for .*?(?P<op2>\w+::\w+)",
        "op without a fake",
        "{op} has no fake (a function that gives the result's shape and dtype), so torch.compile cannot trace through it.",
        'Register one: @torch.library.register_fake("{qualified}") with a function that returns an empty tensor of the '
        "result's shape, dtype, strides and device.",
    ),
    Rule(
        r"copy\.deepcopy",
        "copy.deepcopy of a tensor",
        "deepcopy is Python that walks through objects; torch.compile does not trace it for tensors or modules.",
        "Copy a tensor with x.clone(); copy a module once, in __init__.",
    ),
    Rule(
        r"backwards? hooks",
        "backward hook of a module",
        "A hook on a module's gradients runs in Python between its operations, so the module cannot be part of a graph.",
        "Remove the hook for inference, or register a hook on a tensor (x.register_hook), which can be traced.",
    ),
    Rule(
        r"requires_grad_\(\)",
        "requires_grad_ inside the function",
        "A tensor made inside starts to require gradients, which a graph cannot express for a result.",
        "Call requires_grad_() outside of the compiled function.",
    ),
    Rule(
        r"Tensor\.backward\(\)|autograd\.grad",
        "backward inside the function",
        "The backward pass runs in the autograd engine, outside of any graph.",
        "Compile the forward pass and call backward outside of the compiled function.",
    ),
    Rule(
        r"on generator\b|generator object",
        "generator from outside",
        "A generator that was made outside keeps its place between calls, which a graph cannot; only generators made "
        "inside the function are traced.",
        "Pass the next value as an argument, or keep the count in a tensor.",
    ),
    Rule(
        r"compiler\.disable|torch\.compiler\.disable|dynamo\.disable",
        "call of a function that is kept out of compilation",
        "torch.compiler.disable marks the function that is called here, so the graph ends before it.",
        "Remove torch.compiler.disable if the function can be traced, or call it outside of the compiled function.",
    ),
    Rule(
        r"numpy function",
        "NumPy function",
        "torch has no counterpart for this NumPy function, so it runs in Python, on the host.",
        "Use the torch function that does the same, or compute the value before the call and pass it in.",
    ),
    Rule(
        r"trace the builtin `(?:<unknown module>\.)?(?P<name>Random\.\w+|time\.\w+|datetime\S*?)\.?`",
        "random number or clock of Python",
        "{name} gives another value at every call, so it must run in Python and the graph ends there.",
        "Draw random numbers with torch (torch.rand), and read clocks outside of the compiled function.",
    ),
    Rule(
        r"trace the builtin `(?P<name>[^`]+?)\.?`",
        "call into C",
        "{name} is compiled code that torch does not know (a C extension, pybind, a builtin), so the graph ends before it.",
        "If it works on tensors, make it an op: torch.library.custom_op with register_fake. If not, call it before and "
        "pass its result in.",
    ),
    Rule(
        r"torch\.\* op returned non-Tensor",
        "call into C",
        "A function of torch returns a plain Python value here, so it runs in Python and the graph ends there.",
        "Call it before and pass its result in.",
    ),
    Rule(
        r"function marked as skipped[\s\S]*?qualname: (?P<name>[\w.<>]+)",
        "call of a function that torch does not trace",
        "torch.compile leaves {name} out on purpose, so the graph ends before it.",
        "Call it once outside, at initialisation, and keep its result.",
    ),
    Rule(
        r"Unsupported context manager|context manager",
        "context manager",
        "torch.compile does not trace this context manager, so the code under it runs without a graph.",
        "Enter it outside of the compiled function.",
    ),
    Rule(
        r"call_method UserDefinedObjectVariable\((?P<type>\w+)\) (?P<name>\w+)",
        "method of an object that torch does not know",
        "{type}.{name} is compiled code that cannot be traced.",
        "Call it before the compiled function and pass its result in.",
    ),
    Rule(
        r"builtin operator `(?P<name>[^`]+)`",
        "Python builtin",
        "torch.compile does not trace the builtin {name} with these arguments.",
        "Call it outside of the compiled function, or write the same with tensor operations.",
    ),
    Rule(
        r"Reconstruction failure",
        "result that cannot be returned",
        "The function returns an object that a compiled function cannot make again.",
        "Return tensors and plain Python values only.",
    ),
    Rule(
        r"Observed exception",
        "exception",
        "An exception leaves the function, so it cannot be one graph.",
        "Check the condition outside of the compiled function.",
    ),
)


def describe_break(text: str) -> tuple[str, str, str]:
    """Title, reason and hint for torch's message."""
    for rule in RULES:
        match = re.search(rule.pattern, text)
        if match:
            groups = {name: value or "" for name, value in match.groupdict().items()}
            groups["op"] = groups.get("op") or groups.get("op2") or ""
            groups["qualified"] = groups["op"].replace(".", "::", 1) if "::" not in groups["op"] else groups["op"]
            return rule.title, rule.reason.format(**groups), rule.hint.format(**groups)
    title = text.strip().splitlines()[0] if text.strip() else "graph break"
    explanation = re.search(r"Explanation: (.+?)(?=\n\s*Hint:|\n\s*Developer|\n\n|$)", text, re.DOTALL)
    hints = [h for h in re.findall(r"Hint: (.+)", text) if "report an issue" not in h and "Dynamo tracing rules" not in h]
    return title, " ".join(explanation[1].split()) if explanation else title, hints[0] if hints else ""


def finding_of(text: str, place: Place | None, visits: Mapping[str, int] | None = None, skipped: bool = False) -> Finding:
    """A break as a finding; visits: path of a module -> how often it ran the line in one call."""
    title, reason, hint = describe_break(text)
    visits = visits or {}
    return Finding(
        "break",
        title,
        reason + (_SKIPPED if skipped else ""),
        hint,
        *where(place),
        module=fold(path for path in visits if path),
        count=max(1, sum(visits.values())),
        details={"torch": text, "modules": [path for path in visits if path]},
    )


def findings_of(breaks: Sequence[Break], visits: Mapping[tuple[str, int], Mapping[str, int]]) -> list[Finding]:
    """One finding a line. torch tells of a break once for every function around it and for every compilation."""
    first: dict[tuple[str, int], tuple[Break, Place]] = {}
    for one in breaks:
        place = innermost(one.stack)
        if place is not None:
            first.setdefault((place.file, place.line), (one, place))
    return [
        finding_of(one.text, place, visits.get(key), all(b.skipped for b in breaks if innermost(b.stack) == place))
        for key, (one, place) in first.items()
    ]
