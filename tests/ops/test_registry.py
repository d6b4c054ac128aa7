"""Every op of the `dsv4::` namespace three ways: registered whole, checked by opcheck, and compiled like eager.

Small arguments (cases.ARGUMENTS) in two dtypes: these tests are about registration, and values are tested in
test_<op>.py.
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


def op_of(case: str) -> str:
    return case.split(":")[0]


CASES = [case for case in ARGUMENTS if op_of(case) in NAMES]
every_case = pytest.mark.parametrize("case", CASES)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def overload(case: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.dsv4, op_of(case)).default


def mutated(case: str) -> list[int]:
    """Numbers of the arguments that the op's schema marks as changed."""
    arguments = overload(case)._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def copied(args: tuple) -> tuple:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def tensors(result) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def test_registered_is_the_whole_namespace():
    """What `registered()` lists and what the dispatcher has under dsv4:: are the same, and each op has a case here."""
    known = {n.removeprefix("dsv4::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("dsv4::")}
    assert known == set(NAMES)
    assert set(NAMES) - {op_of(case) for case in ARGUMENTS} == set(), "ops without arguments in tests/ops/cases.py"
    assert {op_of(case) for case in ARGUMENTS} - set(NAMES) == set(), "arguments for ops that are gone"


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
    # An op that returns nothing changes state; what one returns is new (test_inputs_are_left_alone) and says so.
    assert mutated(name) or schema.returns
    assert all(result.alias_info is None for result in schema.returns)


@both_dtypes
@every_case
def test_opcheck(case, dtype, draw):
    args = ARGUMENTS[case](draw, dtype)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(t.dtype == torch.float8_e4m3fn for t in tensors(args)):
        # torch 2.13 compares arguments before and after with allclose, which float8 lacks; the same is asserted
        # bitwise in test_inputs_are_left_alone.
        checks.remove("test_schema")
    torch.library.opcheck(overload(case), args, test_utils=tuple(checks))


# A fake CUDA tensor needs no GPU: the fake must follow its inputs' device.
@pytest.mark.parametrize("device", ("cpu", "cuda"))
@both_dtypes
@every_case
def test_fake_matches_real(case, dtype, device, draw):
    """Shape, dtype, device and strides; results are contiguous, as kernels will write them."""
    args = ARGUMENTS[case](draw, dtype)
    real = tensors(overload(case)(*copied(args)))
    with FakeTensorMode():
        fakes = pytree.tree_map_only(
            torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device), args
        )
        fake = tensors(overload(case)(*fakes))
    assert len(real) == len(fake)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride(), device) == (f.shape, f.dtype, f.stride(), f.device.type)
        assert r.is_contiguous()


@every_case
def test_inputs_are_left_alone(case, draw):
    """Every tensor that the schema does not mark keeps its bits, and no result shares memory with an input."""
    args = ARGUMENTS[case](draw, torch.float32)
    before = copied(args)
    result = overload(case)(*args)
    inputs = {t.untyped_storage().data_ptr() for t in tensors(args)}
    assert not inputs & {t.untyped_storage().data_ptr() for t in tensors(result)}
    for number, (now, then) in enumerate(zip(args, before, strict=True)):
        if isinstance(now, torch.Tensor) and number not in mutated(case):
            assert_same_bits(now, then)


@every_case
def test_no_tokens(case, draw):
    """A batch of no tokens gives results of no tokens, as the fake says, and leaves state alone."""
    args = ARGUMENTS[case](draw, torch.float32)
    tokens = args[0].shape[0]
    cut = pytree.tree_map_only(torch.Tensor, lambda t: t[:0] if t.dim() and t.shape[0] == tokens else t, args)
    before = copied(cut)
    for result in tensors(overload(case)(*cut)):
        assert result.shape[0] == 0
    for now, then in zip(tensors(cut), tensors(before), strict=True):
        assert_same_bits(now, then)


@both_dtypes
@every_case
def test_compiled_matches_eager(case, dtype, draw):
    """fullgraph, inductor. The graph holds nothing but the op, so compiling costs no C++ build; and a mutated argument
    must reach the op itself, not a copy of it."""
    args = ARGUMENTS[case](draw, dtype)
    expected_args = copied(args)
    expected = overload(case)(*expected_args)
    torch._dynamo.reset()
    result, code = run_and_get_code(torch.compile(getattr(dsv4.ops, op_of(case)), fullgraph=True), *args)
    for actual, wanted in zip(tensors((result, args)), tensors((expected, expected_args)), strict=True):
        assert_same_bits(actual, wanted)
    body = code[0].split("def call(")[1].split("\nrunner")[0]
    assert body.count(f"torch.ops.dsv4.{op_of(case)}.default(") == 1
    if mutated(case):
        assert not re.search(r"empty_strided|copy_\(|clone", body)
