"""How the parts of dsv4 may depend on each other, read from the source of every file.

ops <- model <- compile <- eval, cli and the package's own __init__
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dsv4"
FILES = sorted(PACKAGE.rglob("*.py"))
LEVELS = {"ops": 0, "model": 1, "compile": 2}  # the rest of dsv4 stands above them
TOP = 3


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, full module name) of everything that a file imports, at any depth, relative names resolved."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append((node.lineno, full if base.startswith("dsv4") and is_module(full) else base))
    return found


def level(module: str) -> int:
    """Level of a dsv4 module, `dsv4.ops.rope` -> 0."""
    parts = module.split(".")
    return LEVELS.get(parts[1], TOP) if len(parts) > 1 else TOP


def test_files_are_found():
    assert {"dsv4.ops.rope", "dsv4.ops", "dsv4"} <= {module_name(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path):
    mine = level(module_name(path))
    for line, target in imports(path):
        if target.split(".")[0] == "dsv4":
            assert level(target) <= mine, f"{path}:{line} imports {target}"
        assert target.split(".")[0] != "tests", f"{path}:{line} imports {target}"


@pytest.mark.parametrize("path", [p for p in FILES if p.is_relative_to(PACKAGE / "ops")], ids=module_name)
def test_ops_import_torch_only(path):
    """Beside the standard library and dsv4.ops itself. The kernel builder also has its compiler's bindings."""
    allowed = {"torch", "dsv4"} | set(sys.stdlib_module_names)
    if path.is_relative_to(PACKAGE / "ops" / "kernels"):
        allowed |= {"cuda"}
    for line, target in imports(path):
        assert target.split(".")[0] in allowed, f"{path}:{line} imports {target}"


def test_files_have_one_subject():
    """A file past 500 lines has two."""
    sources = [p for folder in ("dsv4", "tests") for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cu", ".cuh")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {path: count for path, count in lengths.items() if count > 500} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    (
        ("import torch.nn as nn", [(1, "torch.nn")]),
        ("from dsv4 import ops", [(1, "dsv4.ops")]),
        ("from dsv4.ops import q_rope", [(1, "dsv4.ops")]),
        ("from dsv4.ops import rope", [(1, "dsv4.ops.rope")]),
        ("def f():\n    from .. import model", [(2, "dsv4.model")]),
        ("from .rope import rotate", [(1, "dsv4.ops.rope")]),
    ),
)
def test_reader(source, expected, tmp_path, monkeypatch):
    """The reader itself: what it finds in a file of dsv4/ops."""
    path = tmp_path / "dsv4" / "ops" / "probe.py"
    for name in ("ops/rope.py", "model/__init__.py", "ops/probe.py"):
        (tmp_path / "dsv4" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dsv4" / name).write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert imports(path) == expected
