"""dsv4: DeepSeek-V4 inference in plain PyTorch, one compiled graph per step.

engine = dsv4.load("examples/tiny")
print(engine.generate("The cat", max_new_tokens=40)[0].text)
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["Completion", "Engine", "SamplingParams", "explain", "load"]

_HOMES = {
    "Completion": "dsv4.compile.sampling",
    "SamplingParams": "dsv4.compile.sampling",
    "Engine": "dsv4.compile.engine",
    "load": "dsv4.compile.engine",
    "explain": "dsv4.compile.explain.run",
}


def __getattr__(name: str):
    # Imported on first use, so that `dsv4 --help` does not wait for torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
