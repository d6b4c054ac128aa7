"""torch's words in plain ones: guards that failed and graph breaks, as torch 2.11 to 2.13 write them."""

import pytest

from dsv4.compile.explain.breaks import RULES, describe_break
from dsv4.compile.explain.frames import Place
from dsv4.compile.explain.guards import cause_of
from dsv4.compile.explain.trace import parse_break

GUARDS = [
    ("0/0: tensor 'x' size mismatch at index 0. expected 8, actual 16", "size changed", "x became 16"),
    ("tensor 'self.keys' size mismatch at index 1. expected 8, actual 9", "size changed", "of self.keys became 9"),
    ("1/0: tensor 'x' rank mismatch. expected 2, actual 3", "number of dimensions changed", "x has 3 dimensions"),
    ("0/1: tensor 'x' dtype mismatch. expected Float, actual Double", "dtype changed", "x is Double"),
    ("0/0: tensor 'x' stride mismatch at index 0. expected 4, actual 1", "strides changed", "stride of dimension 0"),
    ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0", "requires_grad changed", "x requires"),
    ("0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU)", "device or mode changed", "x lies on"),
    ("0/0: GLOBAL_STATE changed: grad_mode ", "mode of torch changed", "grad_mode"),
    ("0/0: not c                   # c.append(x)  # m.py:3 in f", "length of a list changed", "c no longer has 0"),
    ("0/0: len(L['c']) == 2        # c.append(x)  # m.py:3 in f", "length of a list changed", "c no longer has 2"),
    ("0/0: G['STEP'] == 4          # STEP += 1  # m.py:3 in f", "global changed", "the global STEP is no longer 4"),
    ("0/0: self.k == 1             # self.k += 1  # m.py:3 in f", "attribute changed", "self.k is no longer 1"),
    ("0/0: L['n'] == 2             # return x * n  # m.py:3 in f", "Python int changed", "n is no longer 2"),
    ("0/0: L['mode'] == 'fast'     # if fast  # m.py:3 in f", "Python value changed", "mode is no longer 'fast'"),
    ("0/0: not ___dict_contains('s', d)", "keys of a dict changed", "d has the key 's'"),
    ("0/0: ___check_type_id(L['x'], 99), type=<class 'int'>", "type changed", "x is of another type"),
    ("0/0: ___check_obj_id(f, 99), type=<function f>", "another object", "f is another object"),
    ("0/0: ___check_obj_id(self.training, 99), type=<class 'bool'>", "training mode changed", "self was switched"),
    ("0/0: 2 <= L['x'].size()[0] <= 8", "size outside the assumed range", "no longer satisfies"),
    ("0/0: Duplicate tensors found", "arguments share memory differently", "share memory"),
    ("0/0: something new", "assumption failed", "something new no longer holds"),
]


@pytest.mark.parametrize("guard, title, words", GUARDS)
def test_guards(guard, title, words):
    cause = cause_of(guard, "/app/m.py")
    assert cause.title == title and words in cause.reason and cause.hint
    assert cause.place == (Place("/app/m.py", 3, "f") if "m.py:3" in guard else None)


def test_guard_with_a_stack_has_its_line():
    text = "0/0: G['G'] == 0   # G += 1  # x/probe.py:59 in f\nUser stack trace:\n  File \"/x/probe.py\", line 59, in f\n"
    assert cause_of(text).place == Place("/x/probe.py", 59, "f")


def test_state_that_grows_has_its_own_hint():
    size, grows = (cause_of(f"tensor '{name}' size mismatch at index 1. expected 8, actual 9") for name in ("x", "self.k"))
    assert "pad" in size.hint and "index_copy_" in grows.hint


@pytest.mark.parametrize(
    "text, title",
    [
        ("Failed to trace builtin operator\n  Explanation: ... builtin operator `print` with", "print"),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "tensor value read on the host"),
        ("Data-dependent branching\n  Explanation: Detected", "branch on a tensor's value"),
        ("Operator does not support running with fake tensors ... unsupported operator: a.b.default", "op without a fake"),
        ("There was no fake impl registered for <CustomOpDef(a::b)>. This is", "op without a fake"),
        ("Module-level backwards hooks require compiled autograd.", "backward hook of a module"),
        ("Tensor.tolist() with non-integer tensor", "tensor value read on the host"),
    ],
)
def test_breaks(text, title):
    found, reason, hint = describe_break(text)
    assert found == title and reason and hint
    assert "a::b" in hint if title == "op without a fake" else True


def test_unknown_breaks_keep_torchs_words():
    text = (
        "New thing\n  Explanation: It is\n    new.\n  Hint: Please report an issue to PyTorch.\n  Hint: Do it otherwise.\n"
    )
    assert describe_break(text) == ("New thing", "It is new.", "Do it otherwise.")


def test_every_rule_has_its_texts():
    assert all(rule.title and rule.reason.endswith(".") and rule.hint.endswith(".") for rule in RULES)


def test_break_record():
    """As torch records it: lead, message, the traced stack, and torch's own, which is cut off."""
    record = (
        "Graph break in user code at /a/b.py:7\nGraph Break Reason: Encountered graph break when attempting to trace "
        "CALL: a function call, e.g. f(x, y):\n\nFailed\n  Explanation: Because.\n\nUser code traceback:\n"
        '  File "/a/b.py", line 7, in f\n    print()\n\n'
        'Traceback (most recent call last):\n  File "/torch/x.py", line 1, in y\n'
    )
    found = parse_break(record)
    assert found.text == "Failed\n  Explanation: Because." and found.stack == (Place("/a/b.py", 7, "f"),)
    assert not found.skipped
    skipped = record.replace("Encountered graph", "Failed to handle it. Skipping the function. Encountered graph")
    assert parse_break(skipped).skipped
