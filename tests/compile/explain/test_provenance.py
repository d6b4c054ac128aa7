"""Which module a launch comes from, read from inductor's code: layers traced once and used by all that look alike."""

import json
import subprocess
import sys

import torch
from torch import Tensor, nn

from dsv4.compile.explain.provenance import Inductor, common


class Layer(nn.Module):
    """Two ops, of which the second lies in a submodule; the graph holds nothing else, so nothing is built."""

    def __init__(self):
        super().__init__()
        self.ffn = Feed()

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(torch.ops.gallery.double(x))


class Feed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.gallery.returns_a_copy(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = Feed()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    from tests.compile.explain import gallery_ops  # noqa: F401

    backend = Inductor()
    with torch.no_grad():
        torch.compile(Model(), backend=backend, fullgraph=True)(torch.ones(4))
    json.dump([[launch.name, launch.origin, launch.module] for launch in backend.launches()], sys.stdout)


def test_launches_of_layers_that_look_alike():
    """In a process of its own: torch's caches belong to the tests around."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    double, copy = "gallery::double", "gallery::returns_a_copy"
    wanted = [[name, "gallery", f"layers.{i}{end}"] for i in range(3) for name, end in ((double, ""), (copy, ".ffn"))]
    assert json.loads(done.stdout) == [*wanted, [copy, "gallery", "head"]]


def test_common_module():
    def of(*paths: str) -> str:
        return ".".join(common([path.split(".") if path else [] for path in paths]))

    assert of("layers.0.attn.q", "layers.0.attn.k") == "layers.0.attn"
    assert of("", "layers.0.attn") == "layers.0.attn"  # a value from outside that is made again inside
    assert of("layers.0.ffn", "layers.1.norm") == "layers.1.norm"  # across layers: where it ends
    assert of("a.b", "a.c") == "a" and of() == ""


if __name__ == "__main__":
    main()
