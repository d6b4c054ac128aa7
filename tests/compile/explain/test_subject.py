"""What is named on the command line, resolved: callables, inputs, modules by name; and every way to get it wrong."""

from functools import partial

import pytest
import torch
from torch import nn

from dsv4.compile.explain.state import Snapshot
from dsv4.compile.explain.subject import Call, Subject, calls_from, describe, from_spec, original, resolve

SOURCE = """
import torch
from torch import nn
value = 3
def double(x): return x * 2
def inputs(): return (torch.ones(3),)
def sweep(): return [(torch.ones(3),), ((torch.ones(4),), {})]
def tensor(): return torch.ones(2)
def nothing(): return []
def text(): return "x"
def raises(): raise KeyError("missing")
class Model(nn.Module):
    def forward(self, x): return x
class Needs(nn.Module):
    def __init__(self, width): super().__init__()
class Space:
    @staticmethod
    def inner(x): return x
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "explained_source.py"
    path.write_text(SOURCE)
    return str(path)


def test_functions_modules_and_attributes(file):
    assert resolve(f"{file}:double")(2) == 4
    assert isinstance(resolve(f"{file}:Model"), nn.Module)
    assert resolve(f"{file}:Space.inner")(1) == 1
    assert resolve("torch:sin") is torch.sin


@pytest.mark.parametrize(
    "spec, words",
    [
        ("double", "names no callable"),
        ("{file}:", "names no callable"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("{file}:triple", "its callables are .*double"),
        ("{file}:value", "is a int, which cannot be called"),
        ("{file}:Needs", "making one without arguments failed: TypeError"),
    ],
)
def test_bad_specs(spec, words, file):
    with pytest.raises(ValueError, match=words):
        resolve(spec.format(file=file))


def test_file_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(ValueError, match=r"cannot be imported: ZeroDivisionError: .*broken.py:2"):
        resolve(f"{tmp_path}/broken.py:f")


def test_inputs(file):
    def shapes(inputs: str) -> list:
        return [[list(arg.shape) for arg in call.args] for call in from_spec(f"{file}:double", f"{file}:{inputs}").calls()]

    assert shapes("inputs") == [[[3]]] and shapes("tensor") == [[[2]]] and shapes("sweep") == [[[3]], [[4]]]
    assert from_spec(f"{file}:double").calls() == [Call()]
    [call] = calls_from(((1, 2), {"k": 3}), "")
    assert (call.args, call.kwargs) == ((1, 2), {"k": 3})


@pytest.mark.parametrize(
    "inputs, words",
    [("nothing", "empty list"), ("text", "returned a str; expected a tuple"), ("raises", "KeyError: 'missing'")],
)
def test_bad_inputs(inputs, words, file):
    with pytest.raises(ValueError, match=words):
        from_spec(f"{file}:double", f"{file}:{inputs}")


def test_compiled_callables_are_taken_apart():
    def f(x):
        return x

    disabled = torch.compiler.disable(f)
    assert original(torch.compile(f)) is f and original(disabled) is disabled
    model = nn.Linear(1, 1)
    assert original(torch.compile(model)) is model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x, scale=1.0):
        return x * scale

    def step(self, x):
        return x


NET = Net()


def uses_global(x):
    return NET(x)


def takes_model(model, x):
    return model(x)


@pytest.mark.parametrize(
    "function, args, layer",
    [
        (NET, (), "layers.0"),
        (NET.step, (), "layers.0"),
        (uses_global, (), "NET.layers.0"),
        (takes_model, (NET,), "model.layers.0"),
        (partial(takes_model, NET), (), "model.layers.0"),
        ((lambda net: lambda x: net(x))(NET), (), "net.layers.0"),
    ],
)
def test_modules_by_name(function, args, layer):
    subject = Subject("", function, lambda: [Call((*args, torch.ones(2)))])
    assert subject.layers() == [layer, layer.replace("0", "1"), layer.replace("0", "2")]
    names = set(subject.tensors(subject.calls()[0]))
    assert layer + ".weight" in names and len(names) == 7


def test_describe():
    assert describe(NET, (torch.ones(2, 3),), {"scale": 2.0}) == "x float32 [2, 3], scale 2.0"
    assert describe(takes_model, (NET, [torch.ones(1)]), {}) == "model Net, x (float32 [1])"
    assert describe(print, (1,), {}) == "argument 0 1"
    assert describe(print, (), {}) == "no arguments"


def test_snapshot_puts_back_what_a_call_changes():
    x = torch.ones(3)
    x[1] = torch.nan
    subject = Subject("", lambda x: x.add_(1), lambda: [Call((x,))])
    [call] = subject.calls()
    snapshot = Snapshot(subject, call)
    call.run(subject.function)
    assert list(snapshot.changed()) == ["x"]
    snapshot.restore()
    assert snapshot.changed() == {} and x[0] == 1
