"""What an uncompiled call does: every op with the line that calls it, as the dispatcher sees it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.compile.explain.frames import Place, current_place

# Namespaces of torch itself; what is in any other is somebody's own op.
BUILTIN = frozenset(
    (
        "aten", "aot_autograd", "c10d", "debugprims", "export", "higher_order", "inductor", "mkl", "mkldnn", "onednn",
        "prepacked", "prim", "prims", "profiler", "quantized", "quantized_decomposed", "rngprims", "sparse", "streams",
        "symm_mem", "torch_attn", "xnnpack", "_c10d_functional", "_c10d_functional_autograd", "_quantized",
    )
)  # fmt: skip


@dataclass
class Use:
    """One op as it was first called from one line. `args` and `kwargs` are copies from before that call and `result` of
    what came of it, where Watch keeps them."""

    op: OpOverload
    place: Place | None
    count: int = 1
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    written: set[int] = field(default_factory=set)  # storages that the schema says are changed
    devices: set[str] = field(default_factory=set)  # kinds of devices of all tensors that go in and come out
    scalar: bool = False  # among them a tensor of no dimensions on the CPU
    sized: bool = False  # the result's size depends on values

    @property
    def name(self) -> str:
        """namespace::name."""
        return self.op._schema.name

    @property
    def custom(self) -> bool:
        """Whether it is not one of torch's own."""
        return self.op.namespace not in BUILTIN


class Watch(TorchDispatchMode):
    """While it is active, `uses` gathers the ops: each line's ops once, with a count. keep: with the arguments and results
    of ops that are not torch's own."""

    def __init__(self, keep: bool = False):
        super().__init__()
        self._keep = keep
        self.uses: dict[tuple, Use] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        place = current_place()
        # One op at one line may meet several kinds of arguments; its fake must fit all of them.
        kind = signature(args, kwargs) if func.namespace not in BUILTIN else ()
        key = (func, place, kind)
        use = self.uses.get(key)
        if use is not None:
            use.count += 1
            result = func(*args, **kwargs)
        else:
            use = self.uses[key] = Use(func, place)
            if self._keep and use.custom:
                use.args, use.kwargs = copies((args, kwargs))
            result = func(*args, **kwargs)
            if self._keep and use.custom:
                use.result = copies(result)
        use.written |= written(func, args, kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        use.devices |= {tensor.device.type for tensor in (*inputs, *outputs)}
        # Indexing has the tag for the sake of masks; with numbers as indices its size is known.
        masked = func.namespace != "aten" or "index" not in func._opname or any(t.dtype == torch.bool for t in inputs[1:])
        use.sized |= torch.Tag.dynamic_output_shape in func.tags and masked
        use.scalar |= any(tensor.device.type == "cpu" and tensor.dim() == 0 for tensor in inputs)
        return result


def signature(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """What the arguments are like, without their values."""

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.dtype, leaf.dim(), leaf.device.type, leaf.is_contiguous()
        return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)

    return tuple(kind(leaf) for leaf in pytree.tree_leaves((args, kwargs)))


def copies(tree: Any) -> Any:
    """Arguments with their tensors copied, strides and all; tensors that are one stay one."""
    seen: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            seen[id(tensor)] = twin.copy_(tensor.detach()) if twin.numel() else twin
        return seen[id(tensor)]

    with torch.no_grad():
        return pytree.tree_map_only(Tensor, copy, tree)


def storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return tensor.untyped_storage()._cdata


def written(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> set[int]:
    """Storages of the arguments that the op's schema declares as changed."""
    found = set()
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found |= {storage(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
    return found
