"""What is explained: a callable, its arguments for each shape of the sweep, and the modules that it runs."""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsv4.compile.explain.frames import is_library, place_of_error
from dsv4.compile.explain.nodes import join

if TYPE_CHECKING:
    from dsv4.compile.explain.provenance import Inductor, Launch


@dataclass
class Call:
    """The arguments of one call. `prepare` puts state in place before it; `label` names it in the sweep."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    prepare: Callable[[], None] | None = None

    def ready(self) -> None:
        """Put state in place, where the call needs any."""
        if self.prepare is not None:
            self.prepare()

    def bare(self, function: Callable) -> Any:
        """function's result for these arguments, from the state as it is."""
        return function(*self.args, **self.kwargs)

    def run(self, function: Callable) -> Any:
        """The same with state put in place first."""
        self.ready()
        return self.bare(function)

    def describe(self, function: Callable) -> str:
        """The label, by default the arguments by name with their shapes and dtypes."""
        return self.label or describe(function, self.args, self.kwargs)


def compile_callable(function: Callable, backend: str | Callable = "inductor") -> Callable:
    """How a callable is compiled unless its subject says otherwise: as torch.compile does by default."""
    return torch.compile(function, backend=backend)


@dataclass
class Subject:
    """A callable and how to call it. `calls` gives the arguments anew each time it is asked."""

    name: str
    function: Callable
    calls: Callable[[], list[Call]]
    compile: Callable[..., Callable] = compile_callable  # (function, backend) -> compiled function
    context: Callable[[], AbstractContextManager] = nullcontext  # around every call, as torch.no_grad
    modules: dict[str, nn.Module] | None = None  # path prefix -> module; default: those that can be found
    changes: tuple[nn.Module, ...] | None = None  # the modules whose tensors a call changes; default: any may be
    read: Callable[[Call], int] | None = None  # bytes that a call reads at least; default: all that it can reach
    _compiled: Callable | None = None
    _inductor: "Inductor | None" = None

    def compiled(self) -> Callable:
        """The function compiled with inductor, once for all stages that run it."""
        if self._compiled is None:
            torch._dynamo.reset()
            if torch.cuda.is_available():
                from dsv4.compile.explain.provenance import Inductor  # takes seconds to import

                self._inductor = Inductor()
            self._compiled = self.compile(self.function, self._inductor or "inductor")
        return self._compiled

    def launches(self) -> list["Launch"]:
        """What one call of the compiled function launches on a CUDA device, once it has run. See provenance."""
        return self._inductor.launches() if self._inductor is not None else []

    def roots(self) -> dict[str, nn.Module]:
        """The modules from which the others are named, by the prefix that their names get."""
        if self.modules is None:
            self.modules = find_modules(self.function, self.calls()[0])
        return self.modules

    def module_names(self) -> dict[int, str]:
        """id(module) -> its path, for all modules below the roots."""
        names: dict[int, str] = {}
        for prefix, root in self.roots().items():
            for path, module in root.named_modules():
                names.setdefault(id(module), join(prefix, path))
        return names

    def layers(self) -> list[str]:
        """Paths of the repeated layers in order: the members of the longest list of modules."""
        names = self.module_names()
        lists = [
            module
            for root in self.roots().values()
            for module in root.modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in module}) == 1
        ]
        longest = max(lists, key=len, default=())
        return [names[id(layer)] for layer in longest] if len(longest) > 1 else []

    def tensors(self, call: Call) -> dict[str, Tensor]:
        """Every tensor that a call can find, by name: those in its arguments, and its modules' parameters and buffers."""
        found: dict[str, Tensor] = {}
        for name, module in self.roots().items():
            found |= {join(name, path): tensor for path, tensor in tensors_of(module)}
        for name, value in bind(self.function, call.args, call.kwargs).items():
            for path, leaf in pytree.tree_leaves_with_path(value):
                if isinstance(leaf, Tensor):
                    found[name + pytree.keystr(path)] = leaf
        return found

    def nbytes(self, call: Call) -> int:
        """Bytes that a call has to read at least."""
        return self.read(call) if self.read else sum(t.nbytes for t in self.tensors(call).values())

    def state(self, call: Call) -> dict[str, Tensor]:
        """Those of them that a call may change."""
        if self.changes is None:
            return self.tensors(call)
        return {f"{i}.{path}": tensor for i, module in enumerate(self.changes) for path, tensor in tensors_of(module)}


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's parameters and buffers by their paths."""
    return [*module.named_parameters(), *module.named_buffers()]


def from_spec(spec: str, inputs: str | None = None) -> Subject:
    """The subject that the command line names; ValueError if it cannot be resolved. See run.explain_callable."""
    function = resolve(spec)
    make = (lambda: ()) if inputs is None else resolve(inputs)

    def calls() -> list[Call]:
        try:
            made = make()
        except Exception as error:
            raise ValueError(f"{inputs or spec} could not make the inputs: {explain_error(error)}") from error
        return calls_from(made, inputs or spec)

    calls()  # refuses bad inputs before any stage runs
    return Subject(spec, original(function), calls)


def resolve(spec: str) -> Callable:
    """The callable that "package.module:name" or "path/to/file.py:name" names; a class of modules gives an instance."""
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not name:
        raise ValueError(f"{spec!r} names no callable; write package.module:callable or path/to/file.py:callable")
    module = import_file(Path(home)) if home.endswith(".py") else import_name(home)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ValueError(f"{home} has no {name!r}; its callables are {', '.join(known) or 'none'}")
        found = getattr(found, part)
    if isinstance(found, type) and issubclass(found, nn.Module):
        try:
            found = found()
        except Exception as error:
            raise ValueError(
                f"{spec} is a module class, and making one without arguments failed: {explain_error(error)}; name an "
                "instance, or a function that calls one"
            ) from error
    if not callable(found):
        raise ValueError(f"{spec} is a {type(found).__name__}, which cannot be called; name a function or a module")
    return found


def import_file(path: Path) -> ModuleType:
    """A Python file as a module, with its folder importable, as if it were run."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    module = importlib.util.module_from_spec(spec)
    if path.stem not in sys.modules:  # so that what it defines can be found by name, and nothing else is replaced
        sys.modules[path.stem] = module
    return imported(str(path), lambda: spec.loader.exec_module(module)) or module


def import_name(name: str) -> ModuleType:
    """A module by its name, found from the working folder too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return imported(name, lambda: importlib.import_module(name))


def imported(name: str, load: Callable[[], Any]) -> Any:
    """What load() gives; whatever it raises becomes a ValueError that says where."""
    try:
        return load()
    except Exception as error:
        raise ValueError(f"{name} cannot be imported: {explain_error(error)}") from error


def explain_error(error: BaseException) -> str:
    """Type, first line and place of an exception."""
    lines = str(error).strip().splitlines()
    place = place_of_error(error)
    where = f" ({place})" if place is not None and not is_library(place.file) else ""
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}{where}"


def original(function: Callable) -> Callable:
    """The callable itself if it has been compiled already; one that torch.compiler.disable marks stays as it is."""
    function = getattr(function, "_orig_mod", function)
    while hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False):
        function = function._torchdynamo_orig_callable
    return function


def calls_from(made: Any, where: str) -> list[Call]:
    """What an inputs callable returned, as calls; ValueError for anything else."""
    if isinstance(made, list):
        if not made:
            raise ValueError(f"{where} returned an empty list; a sweep needs the arguments of one call or more")
        return [call for one in made for call in calls_from(one if isinstance(one, tuple) else (one,), where)]
    if isinstance(made, Tensor):
        made = (made,)
    if not isinstance(made, tuple):
        raise ValueError(
            f"{where} returned a {type(made).__name__}; expected a tuple of arguments, (arguments, keyword arguments), or "
            "a list of these"
        )
    if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return [Call(tuple(made[0]), dict(made[1]))]
    return [Call(made)]


def bind(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names that the callable gives them, by their numbers where it tells none."""
    target = function.forward if isinstance(function, nn.Module) else function
    if isinstance(target, functools.partial):
        args, kwargs, target = (*target.args, *args), {**target.keywords, **kwargs}, target.func
    target, bound = inspect.unwrap(target), getattr(target, "__self__", None) is not None
    code = getattr(target, "__code__", None)
    names = list(code.co_varnames[: code.co_argcount]) if code else []
    if bound:
        names = names[1:]
    names += [f"argument {i}" for i in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def describe(function: Callable, args: tuple, kwargs: dict[str, Any]) -> str:
    """`x float32 [2, 8], n 3` for a call's arguments; modules and other objects by their type."""

    def value(thing: Any) -> str:
        if isinstance(thing, Tensor):
            return f"{str(thing.dtype).removeprefix('torch.')} {list(thing.shape)}"
        if isinstance(thing, (list, tuple)) and thing:
            return f"({', '.join(value(part) for part in thing[:4])}{', ...' if len(thing) > 4 else ''})"
        return repr(thing) if isinstance(thing, (bool, int, float, str, type(None))) else type(thing).__name__

    return ", ".join(f"{name} {value(thing)}" for name, thing in bind(function, args, kwargs).items()) or "no arguments"


def find_modules(function: Callable, call: Call) -> dict[str, nn.Module]:
    """The modules that a callable can reach by name: itself, the object it is bound to, its arguments, its closure and
    the globals that its code mentions."""
    if isinstance(function, nn.Module):
        return {"": function}
    if isinstance(getattr(function, "__self__", None), nn.Module):
        return {"": function.__self__}
    found: dict[str, nn.Module] = {}

    def add(items: Iterable[tuple[str, Any]]) -> None:
        for name, value in items:
            if isinstance(value, nn.Module) and not any(value is known for known in found.values()):
                found.setdefault(name, value)

    add(bind(function, call.args, call.kwargs).items())
    owner = getattr(function, "__self__", None) if not isinstance(function, functools.partial) else None
    add(vars(owner).items() if hasattr(owner, "__dict__") else ())
    target = getattr(function, "func", function)
    target = getattr(target, "__func__", target)
    if not hasattr(target, "__code__"):
        add(vars(target).items() if hasattr(target, "__dict__") else ())
        target = type(target).__call__
    if isinstance(getattr(target, "__code__", None), CodeType):
        cells = zip(target.__code__.co_freevars, target.__closure__ or (), strict=True)
        add((name, cell.cell_contents) for name, cell in cells if not is_empty(cell))
        add((name, target.__globals__[name]) for name in target.__code__.co_names if name in target.__globals__)
    return found


def is_empty(cell: Any) -> bool:
    """Whether a closure's variable has no value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
