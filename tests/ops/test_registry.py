"""Every op of the `dsv4::` namespace three ways: registered whole, checked by opcheck, and compiled like eager.

One set of small arguments an op (cases.ARGUMENTS) in two dtypes: these tests are about registration, and the values are
tested in test_<op>.py.
"""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import dsv4.ops
from tests.ops.cases import ARGUMENTS, assert_same_bits

NAMES = sorted(dsv4.ops.registered())
DTYPES = (torch.float32, torch.bfloat16)


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.dsv4, name).default


def mutated(name: str) -> list[int]:
    """Numbers of the arguments that the op's schema marks as changed."""
    arguments = overload(name)._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def copied(args: tuple) -> tuple:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def tensors(result) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def test_registered_is_the_whole_namespace():
    """What `registered()` lists and what the dispatcher has under dsv4:: are the same, and each op has a case here."""
    known = {n.removeprefix("dsv4::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("dsv4::")}
    assert known == set(NAMES)
    assert not set(NAMES) - set(ARGUMENTS), "ops without arguments in tests/ops/cases.py"
    assert not set(ARGUMENTS) - set(NAMES), "arguments for ops that are gone"


@pytest.mark.parametrize("name", NAMES)
def test_registration_is_complete(name):
    """Schema as written, a CPU and a CUDA implementation, a fake, and a public function of the same name."""
    known = dsv4.ops.registered()[name]
    schema = overload(name)._schema
    assert schema.name == f"dsv4::{name}" and known.schema.startswith(f"{name}(")
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dsv4::{name}", key)
    fake = torch._library.simple_registry.singleton.find(f"dsv4::{name}").fake_impl
    assert fake.kernel is not None and callable(known.fake) and callable(known.reference)
    assert torch.Tag.pt2_compliant_tag in overload(name).tags
    assert callable(getattr(dsv4.ops, name)) and name in dsv4.ops.__all__
    # Mutation is only for state: an op that writes returns nothing, so nothing it returns can alias its input.
    assert bool(mutated(name)) == (len(schema.returns) == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, dtype, draw):
    args = ARGUMENTS[name](draw, dtype)
    checks = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    if any(t.dtype == torch.float8_e4m3fn for t in tensors(args)):
        # torch 2.13 compares arguments before and after with allclose, which float8 lacks; the same is asserted
        # bitwise in test_functional_ops_leave_their_inputs.
        checks.remove("test_schema")
    torch.library.opcheck(overload(name), args, test_utils=tuple(checks))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fake_matches_real(name, dtype, draw):
    """Shape, dtype, device and strides; results are contiguous, as kernels will write them."""
    args = ARGUMENTS[name](draw, dtype)
    real = tensors(overload(name)(*copied(args)))
    with FakeTensorMode() as mode:
        fake = tensors(overload(name)(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)))
    assert len(real) == len(fake)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.device, r.stride()) == (f.shape, f.dtype, f.device, f.stride())
        assert r.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_functional_ops_leave_their_inputs(name, draw):
    """Every tensor that the schema does not mark keeps its bits, and no result shares memory with an input."""
    args = ARGUMENTS[name](draw, torch.float32)
    before = copied(args)
    result = overload(name)(*args)
    inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
    assert not inputs & {r.untyped_storage().data_ptr() for r in tensors(result)}
    for number, (now, then) in enumerate(zip(args, before, strict=True)):
        if isinstance(now, torch.Tensor) and number not in mutated(name):
            assert_same_bits(now, then)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_matches_eager(name, dtype, draw):
    """fullgraph, inductor. The graph holds nothing but the op, so compiling costs no C++ build; and a mutated argument
    must reach the op itself, not a copy of it."""
    args = ARGUMENTS[name](draw, dtype)
    expected_args = copied(args)
    expected = overload(name)(*expected_args)
    torch._dynamo.reset()
    result, code = run_and_get_code(torch.compile(getattr(dsv4.ops, name), fullgraph=True), *args)
    for actual, wanted in zip(tensors(result), tensors(expected), strict=True):
        assert_same_bits(actual, wanted)
    for actual, wanted in zip(tensors(args), tensors(expected_args), strict=True):
        assert_same_bits(actual, wanted)
    if mutated(name):
        assert not re.search(r"empty_strided|copy_|clone", "".join(code).split("def call(")[1].split("def ")[0])
