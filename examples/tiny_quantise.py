"""Fake quantisation (straight-through): weights are replaced by their rounded values for forward and backward."""

import torch
import torch.nn.functional as F

FP8_NAMES = ("wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight")


def fake_nvfp4(w, amax):
    """w [..., in], amax of the tensor broadcastable to [..., 1] -> nearest NVFP4 values, as dsv4.ops.nvfp4 rounds."""
    scale_2 = amax / 2688.0
    g = w.unflatten(-1, (-1, 16))
    scale = (g.abs().amax(-1) / 6.0 / scale_2).clamp(max=448.0).to(torch.float8_e4m3fn).float() * scale_2
    x = (g / scale.clamp(min=1e-30)[..., None]).clamp(-6, 6)
    # E2M1's spacing is 0.5 below 2, 1 up to 4, 2 above; torch.round goes to even, and so does the code's last bit.
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (torch.round(x / step) * step * scale[..., None]).flatten(-2)


def fake_fp8(w):
    """w [out, in], both divisible by 128, or not: blocks are padded -> nearest FP8-block values."""
    rows, columns = w.shape
    p = F.pad(w, (0, -columns % 128, 0, -rows % 128)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = torch.exp2(torch.ceil(torch.log2(p.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448.0)))
    return ((p / scale).to(torch.float8_e4m3fn).float() * scale).flatten(2).flatten(0, 1)[:rows, :columns]


@torch.no_grad()
def quantise_in_place(model):
    """Round all weights that the checkpoint stores in 4 or 8 bits; returns the exact ones to put back."""
    exact = {}
    for name, p in model.named_parameters():
        if name.endswith("ffn.w13"):  # gate and up of an expert share weight_scale_2
            new = fake_nvfp4(p, p.abs().amax((0, 2, 3), keepdim=True))
        elif name.endswith("ffn.w2"):
            new = fake_nvfp4(p, p.abs().amax((1, 2), keepdim=True))
        elif name.endswith(FP8_NAMES) or ".shared_experts." in name:
            new = fake_fp8(p)
        else:
            continue
        exact[name] = p.detach().clone()
        p.copy_(new)
    return exact


@torch.no_grad()
def restore(model, exact):
    for name, p in model.named_parameters():
        if name in exact:
            p.copy_(exact[name])


@torch.no_grad()
def round_bf16(model):
    for name, p in model.named_parameters():
        if not name.endswith(("_fn", "_base", "_scale", "attn_sink", ".ape")):
            p.copy_(p.to(torch.bfloat16))
