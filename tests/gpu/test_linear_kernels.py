"""The streaming linear kernels against their float32 references: formats, widths, token counts, groups, CUDA graphs."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops._register import registered
from dsv4.ops.fp8 import decode_e8m0, quantize_fp8_block
from dsv4.ops.nvfp4 import quantize_nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = (1, 3, 5, 8, 9, 17, 33, 64, 100, 129)
FP8 = [(160, 144, 1), (16, 16, 1), (100, 272, 2), (1024, 512, 8), (512, 4096, 1), (4096, 1024, 1), (1024, 8192, 1)]
NVFP4 = [(40, 64, 1), (128, 128, 1), (256, 256, 2), (1000, 512, 1), (2048, 4096, 8), (512, 7168, 1), (24, 2816, 1)]
NVFP4 += [(2000, 1024, 1), (4096, 8192, 1), (8, 16384, 1), (96, 2048, 2), (17000, 4096, 1)]
PLAIN = [(24, 72), (129, 264), (64, 4096), (256, 4096), (384, 7168), (5, 8), (2000, 1024)]
# bf16 results: one rounding, 2^-9 at most, 1.7e-3 root mean square at most. Float32 results: the tensor cores' sums.
NEAR = {torch.bfloat16: 3e-3, torch.float32: 2e-5}
# More than 128 tokens multiply FP8 weights that were rounded to bf16: as much again, and alike in all of a small block.
NEAR_ROUNDED = 6e-3


def near(actual, expected, most=None):
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    most = most or NEAR[actual.dtype]
    assert actual.shape == expected.shape and error <= most, f"relative error {error:.2e}, at most {most:.0e}"


def activations(*shape, scale=1.0):
    """bf16 with outliers, and a few values that are very small beside them."""
    x = torch.randn(shape, device="cuda") * scale
    x = torch.where(torch.rand(shape, device="cuda") < 1 / 64, x * 200, x)
    return torch.where(torch.rand(shape, device="cuda") < 1 / 64, x * 1e-4, x).bfloat16()


def poisoned(call):
    """The call's results where the memory that it gets for outputs was full of NaN."""
    results = call()
    for result in results if isinstance(results, tuple) else (results,):
        result.fill_(torch.nan)
    del result, results
    return call()


def fp8_weight(n, k):
    weight, scale = quantize_fp8_block(torch.randn(n, k, device="cuda") * torch.rand(n, 1, device="cuda").exp2())
    return weight, decode_e8m0(scale) * (0.5 + torch.rand(scale.shape, device="cuda"))  # not only powers of two


def check(name, *args):
    actual = poisoned(lambda: getattr(torch.ops.dsv4, name)(*args))
    expected = registered()[name].reference(*args)
    for a, e in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, expected)), strict=True):
        near(a, e, NEAR_ROUNDED if a.dtype == torch.bfloat16 and len(a) > 128 else None)
    return actual


@pytest.mark.parametrize("n, k, groups", FP8)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fp8_block(n, k, groups, tokens):
    x = activations(tokens, *([groups, k] if groups > 1 else [k]))
    check("linear_fp8_block", x, *fp8_weight(n, k), groups)


@pytest.mark.parametrize("name", ["linear_fp8_block", "linear_nvfp4"])
@pytest.mark.parametrize("n, k, groups, norm", [(40960, 1024, 1, True), (8192, 4096, 8, False), (4096, 8192, 1, False)])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 96])
def test_the_widths_of_flash(name, n, k, groups, norm, tokens):
    x = activations(tokens, *([groups, k] if groups > 1 else [k]))
    norm = torch.randn(k, device="cuda") if norm else None
    if name == "linear_fp8_block":
        check(name, x, *fp8_weight(n, k), groups, norm, 1e-6)
    else:
        check(name, x, *quantize_nvfp4(torch.randn(n, k, device="cuda")), None, groups, norm, 1e-6)


@pytest.mark.parametrize("n, k, groups", NVFP4)
@pytest.mark.parametrize("tokens", TOKENS)
def test_nvfp4(n, k, groups, tokens):
    x = activations(tokens, *([groups, k] if groups > 1 else [k]))
    codes, scale, scale_2 = quantize_nvfp4(torch.randn(n, k, device="cuda"))
    check("linear_nvfp4", x, codes, scale, scale_2, None, groups)
    rows = scale_2 * torch.rand(n, device="cuda")
    check("linear_nvfp4", x, codes, scale, rows, None, groups, None, 0.0, True)


@pytest.mark.parametrize("n, k", PLAIN)
@pytest.mark.parametrize("tokens", TOKENS)
def test_plain(n, k, tokens):
    check("linear_fp32", activations(tokens, k), torch.randn(n, k, device="cuda").bfloat16())


@pytest.mark.parametrize("n, m, k", [(48, 20, 144), (1536, 2624, 4096), (7, 300, 512)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_project(n, m, k, tokens):
    check("project", activations(tokens, k), *fp8_weight(n, k), None, torch.randn(m, k, device="cuda").bfloat16())


@pytest.mark.parametrize("n, m, k", [(48, 20, 192), (1536, 2624, 4096), (7, 300, 512), (4, 300, 1024)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_project_nvfp4(n, m, k, tokens):
    """With a scale_2 for each row; and beside plain rows."""
    x = activations(tokens, k)
    codes, scale, scale_2 = quantize_nvfp4(torch.randn(n, k, device="cuda"))
    exact, exact_scale, exact_scale_2 = quantize_nvfp4(torch.randn(m, k, device="cuda"))
    rows, exact_rows = scale_2 * torch.rand(n, device="cuda"), exact_scale_2 * torch.rand(m, device="cuda")
    check("project", x, codes, scale, rows, exact, exact_scale, exact_rows)
    check("project", x, codes, scale, scale_2, torch.randn(m, k, device="cuda").bfloat16())


@pytest.mark.parametrize("name", ["linear_fp8_block", "linear_nvfp4"])
@pytest.mark.parametrize("k, groups", [(1024, 1), (320, 2)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_norm_of_strided_rows(name, k, groups, tokens):
    """RMSNorm in the same launch, of rows that are part of wider ones. The reference rounds what it normalised to bf16; a
    value on the edge may go the other way here."""
    x = activations(tokens, groups + 1, k)[:, :groups].squeeze(1)
    norm = torch.randn(k, device="cuda")
    if name == "linear_fp8_block":
        actual = check(name, x, *fp8_weight(96, k), groups, norm, 1e-6)
    else:
        actual = check(name, x, *quantize_nvfp4(torch.randn(96, k, device="cuda")), None, groups, norm, 1e-6)
    assert actual.shape == (tokens, 96)


@pytest.mark.parametrize("tokens", [1, 8, 20, 64, 100])
def test_a_row_depends_on_itself_only(tokens):
    """The same bits whatever the other rows of the batch hold, infinities and NaN included."""
    weight, scale = fp8_weight(300, 1024)
    x = activations(tokens, 1024)
    alone = ops.linear_fp8_block(x, weight, scale)
    for other in (0.0, 1e30, torch.inf, torch.nan):
        changed = torch.full_like(x, other)
        changed[tokens // 2] = x[tokens // 2]
        assert torch.equal(ops.linear_fp8_block(changed, weight, scale)[tokens // 2], alone[tokens // 2])


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_any_range_of_activations(scale):
    """Activations become fp16 times a power of two: nothing is lost at either end of bfloat16."""
    x = activations(3, 512, scale=scale)
    check("linear_fp8_block", x, *fp8_weight(48, 512), 1)
    weight, block, scale_2 = quantize_nvfp4(torch.randn(48, 512, device="cuda"))
    check("linear_nvfp4", x, weight, block, scale_2)


def test_every_code():
    """All finite E4M3 codes and all E2M1 codes times all scales, subnormals too, one at a time: exact."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes = codes[(codes & 127) != 127].view(torch.float8_e4m3fn)
    weight = codes.view(-1, 1).expand(-1, 128).contiguous()
    x = torch.zeros(128, 128, device="cuda", dtype=torch.bfloat16).fill_diagonal_(1.0)
    for rows in x.split(8):
        y = ops.linear_fp8_block(rows, weight, torch.ones(-(-len(weight) // 128), 1, device="cuda"))
        assert torch.equal(y, weight.bfloat16()[:, 0].expand(8, -1))
    scales = torch.arange(128, dtype=torch.uint8, device="cuda") % 127
    scales = scales.view(-1, 1).expand(-1, 16).contiguous().view(torch.float8_e4m3fn)
    packed = torch.randint(0, 256, (128, 128), dtype=torch.uint8, device="cuda")
    x = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16).fill_diagonal_(1.0)
    one = torch.ones((), device="cuda")
    expected = registered()["linear_nvfp4"].reference(x, packed, scales, one)
    assert torch.equal(torch.cat([ops.linear_nvfp4(rows, packed, scales, one) for rows in x.split(8)]), expected)


def test_zero_activations_and_leading_dimensions():
    weight, scale = fp8_weight(64, 256)
    assert (ops.linear_fp8_block(torch.zeros(2, 256, device="cuda").bfloat16(), weight, scale) == 0).all()
    x = activations(2, 3, 256)
    assert torch.equal(
        ops.linear_fp8_block(x, weight, scale), ops.linear_fp8_block(x.view(6, 256), weight, scale).view(2, 3, 64)
    )
    assert ops.linear_fp8_block(x[:0], weight, scale).shape == (0, 3, 64)
    strided = activations(4, 512)[:, 256:]
    assert torch.equal(ops.linear_fp8_block(strided, weight, scale), ops.linear_fp8_block(strided.clone(), weight, scale))


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_graph_replay_equals_eager_and_itself(tokens):
    """A chain of dependent launches, replayed on new inputs in place."""
    weight, scale = fp8_weight(1024, 1024)
    plain = torch.randn(1024, 1024, device="cuda").bfloat16()
    quantised = quantize_nvfp4(torch.randn(1024, 1024, device="cuda"))

    def chain(x):
        for _ in range(4):
            x = ops.linear_fp8_block(x, weight, scale) * 0.03
            x = ops.linear_nvfp4(x, *quantised) * 0.03
            x = (ops.linear_fp32(x, plain) * 0.03).bfloat16()
        return x

    x = activations(tokens, 1024)
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(3):
        x.copy_(activations(tokens, 1024))
        graph.replay()
        first = y.clone()
        graph.replay()
        assert torch.equal(first, y) and torch.equal(y, chain(x))


def test_what_the_kernels_do_not_read_is_refused():
    x = activations(2, 136)
    with pytest.raises(ValueError, match="divisible by 16"):
        ops.linear_fp8_block(x, *fp8_weight(16, 136))
    with pytest.raises(ValueError, match="dtype"):
        ops.linear_fp8_block(activations(2, 128).half(), *fp8_weight(16, 128))
    with pytest.raises(ValueError, match="scale"):
        ops.linear_fp8_block(activations(2, 128), fp8_weight(16, 128)[0], torch.ones(2, 1, device="cuda"))
    with pytest.raises(ValueError, match="divisible by 64"):
        ops.linear_nvfp4(activations(2, 2080), *quantize_nvfp4(torch.randn(16, 2080, device="cuda")))


def test_float32_activations_run_the_reference():
    x = torch.randn(2, 256, device="cuda")
    weight, scale = fp8_weight(32, 256)
    assert torch.equal(ops.linear_fp8_block(x, weight, scale), registered()["linear_fp8_block"].reference(x, weight, scale))
