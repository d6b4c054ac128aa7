"""DeepSeek-V4 as a differentiable module over whole sequences, small enough to train in minutes.

The same model as dsv4/model (paper sections 2.1 to 2.4), written for training instead of decoding: no cache, attention
in blocks of one window, every expert evaluated for every token with weight 0 where it is not selected. Sequences start
at position 0 and their length is a multiple of the window. Parameter names are the checkpoint's, except that the routed
experts of a layer are stacked: ffn.w13 [2, E, I, H] (gate, up) and ffn.w2 [E, H, I].
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from tiny_sinkhorn import sinkhorn
from torch import nn

NEG = -1e30  # masks scores; finite, so a row without any visible entry gives no NaN


@dataclasses.dataclass
class TinyConfig:
    """Native spelling of the fields, as in the checkpoint's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    compress_ratios: tuple = (0, 4, 128, 4, 128)
    num_attention_heads: int = 4
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    sliding_window: int = 128
    index_n_heads: int = 16
    index_head_dim: int = 128
    index_topk: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    num_hash_layers: int = 2
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_original: int = 65536
    max_position_embeddings: int = 8192


def inverse_frequencies(c, compressed):
    """[R/2] fp64; YaRN stretches the slow frequencies of the compressed layers and nothing else."""
    dim = c.qk_rope_head_dim
    theta = c.compress_rope_theta if compressed else c.rope_theta
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if not compressed:
        return freq

    def turns(n):
        return dim * math.log(c.rope_original / (2 * math.pi * n)) / (2 * math.log(theta))

    low, high = math.floor(turns(32)), math.ceil(turns(1))
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return freq / c.rope_factor * ramp + freq * (1 - ramp)


def rope(x, cos, sin):
    """Rotate the trailing interleaved pairs of x [..., D] in fp32; cos and sin broadcast to [..., R/2]."""
    r = 2 * cos.shape[-1]
    keep, turn = x[..., :-r], x[..., -r:].float().unflatten(-1, (-1, 2))
    a, b = turn[..., 0], turn[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((keep, turned.to(x.dtype)), -1)


def rms_norm(x, weight, eps):
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 if weight is None else x32 * weight).to(x.dtype)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


# ---- modules ---------------------------------------------------------------------------------------------------------
def param(*shape, std=None, fill=0.0):
    p = nn.Parameter(torch.empty(shape))
    nn.init.normal_(p, std=std) if std is not None else nn.init.constant_(p, fill)
    return p


class Weight(nn.Module):
    """A parameter called `<name>.weight`, as checkpoints have it; std defaults to 1/sqrt(fan_in)."""

    def __init__(self, *shape, std=None, fill=None):
        super().__init__()
        self.weight = (
            param(*shape, fill=fill) if fill is not None else param(*shape, std=shape[-1] ** -0.5 if std is None else std)
        )

    def forward(self, x):
        return linear(x, self.weight)


class Compressor(nn.Module):
    """Gated pooling of r tokens (r = 4: of 8, overlapping) into one entry, section 2.3."""

    def __init__(self, c, ratio, dim):
        super().__init__()
        self.c, self.ratio, self.dim = c, ratio, dim
        width = 2 * dim if ratio == 4 else dim
        self.wkv, self.wgate = Weight(width, c.hidden_size), Weight(width, c.hidden_size, std=0.3 * c.hidden_size**-0.5)
        self.ape, self.norm = param(ratio, width), Weight(dim, fill=1.0)

    def forward(self, x, cos, sin):
        """x [B,S,H] -> entries [B, S/r, dim], rotated at their first token's position."""
        r, d, blocks = self.ratio, self.dim, x.shape[1] // self.ratio
        x = x[:, : blocks * r]  # an incomplete block is no entry
        kv = self.wkv(x).float().unflatten(1, (blocks, r))
        gate = self.wgate(x).float().unflatten(1, (blocks, r)) + self.ape
        if r == 4:  # first halves come from the previous block; the first block has none
            kv = torch.cat((F.pad(kv[..., :d], (0, 0, 0, 0, 1, 0))[:, :-1], kv[..., d:]), 2)
            gate = torch.cat((F.pad(gate[..., :d], (0, 0, 0, 0, 1, 0), value=NEG)[:, :-1], gate[..., d:]), 2)
        entry = (torch.softmax(gate, 2) * kv).sum(2).to(x.dtype)
        entry = rms_norm(entry, self.norm.weight, self.c.rms_norm_eps)
        return rope(entry, cos[: blocks * r : r], sin[: blocks * r : r])


class Indexer(nn.Module):
    """Scores of the CSA entries; trained only by its own loss, so its inputs are detached."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.wq_b = Weight(c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        self.weights_proj = Weight(c.index_n_heads, c.hidden_size)
        self.compressor = Compressor(c, 4, c.index_head_dim)

    def forward(self, x, qr, cos, sin):
        """[B,S,T] fp32 scores, not yet masked."""
        c = self.c
        x, qr = x.detach(), qr.detach()
        q = rope(self.wq_b(qr).unflatten(-1, (c.index_n_heads, -1)), cos[:, None], sin[:, None])
        keys = self.compressor(x, cos, sin)
        weights = self.weights_proj(x).float() * (c.index_head_dim * c.index_n_heads) ** -0.5
        dots = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, (-1, c.index_n_heads))
        return (F.relu(dots).float() * weights[..., None]).sum(2)


class Attention(nn.Module):
    def __init__(self, c, ratio):
        super().__init__()
        self.c, self.ratio = c, ratio
        heads, dim = c.num_attention_heads, c.head_dim
        self.wq_a, self.q_norm = Weight(c.q_lora_rank, c.hidden_size), Weight(c.q_lora_rank, fill=1.0)
        self.wq_b = Weight(heads * dim, c.q_lora_rank)
        self.wkv, self.kv_norm = Weight(dim, c.hidden_size), Weight(dim, fill=1.0)
        self.wo_a = Weight(c.o_groups * c.o_lora_rank, heads * dim // c.o_groups)
        self.wo_b = Weight(c.hidden_size, c.o_groups * c.o_lora_rank, std=0.3 * (c.o_groups * c.o_lora_rank) ** -0.5)
        self.attn_sink = param(heads)
        if ratio:
            self.compressor = Compressor(c, ratio, dim)
        if ratio == 4:
            self.indexer = Indexer(c)

    def forward(self, x, cos, sin, dense):
        """x [B,S,H]; dense: bool [], true while all visible CSA entries are attended. Returns y [B,S,H], index loss."""
        c, (b, s, _) = self.c, x.shape
        heads, w = c.num_attention_heads, c.sliding_window
        blocks = s // w
        qr = rms_norm(self.wq_a(x), self.q_norm.weight, c.rms_norm_eps)
        q = rms_norm(self.wq_b(qr).unflatten(-1, (heads, -1)), None, c.rms_norm_eps)
        q = rope(q, cos[:, None], sin[:, None])
        kv = rope(rms_norm(self.wkv(x), self.kv_norm.weight, c.rms_norm_eps), cos, sin)
        # Each block of w queries sees its own w keys and the w before it.
        own = kv.unflatten(1, (blocks, w))
        near = torch.cat((F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1], own), 2)
        logits = torch.matmul(q.unflatten(1, (blocks, w)).flatten(2, 3), near.transpose(2, 3))
        logits = logits.unflatten(2, (w, heads)).float().flatten(1, 2) * c.head_dim**-0.5  # [B,S,A,2w]
        t = torch.arange(s, device=x.device)
        back = (t % w)[:, None] + w - torch.arange(2 * w, device=x.device)  # how far key j lies behind query t
        seen = (back >= 0) & (back < w) & (back <= t[:, None])
        logits = torch.where(seen[:, None], logits, NEG)
        loss = x.new_zeros((), dtype=torch.float32)
        if self.ratio:
            entries = self.compressor(x, cos, sin)
            visible = torch.arange(entries.shape[1], device=x.device) < ((t + 1) // self.ratio)[:, None]  # [S,T]
            far = torch.matmul(q.flatten(1, 2), entries.transpose(1, 2)).unflatten(1, (s, heads)).float() * c.head_dim**-0.5
            far = torch.where(visible[:, None], far, NEG)
            if self.ratio == 4:
                scores = torch.where(visible, self.indexer(x, qr, cos, sin), NEG)
                loss = self.index_loss(scores, logits.detach(), far.detach(), visible)
                picks = scores.topk(min(c.index_topk, scores.shape[-1]), -1).indices
                selected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, picks, True)
                far = torch.where((selected | dense)[:, :, None], far, NEG)
            logits = torch.cat((logits, far), -1)
        sink = self.attn_sink[:, None]
        top = torch.maximum(logits.amax(-1, keepdim=True), sink).detach()
        e = torch.exp(logits - top)
        probs = (e / (e.sum(-1, keepdim=True) + torch.exp(sink - top))).to(x.dtype)
        o = (
            torch.matmul(probs[..., : 2 * w].unflatten(1, (blocks, w)).flatten(2, 3), near)
            .flatten(1, 2)
            .unflatten(1, (s, heads))
        )
        if self.ratio:
            o = o + torch.matmul(probs[..., 2 * w :].flatten(1, 2), entries).unflatten(1, (s, heads))
        o = rope(o, cos[:, None], -sin[:, None])
        o = o.reshape(b, s, c.o_groups, -1)
        o = torch.einsum("bsgk,grk->bsgr", o, self.wo_a.weight.to(x.dtype).unflatten(0, (c.o_groups, -1))).flatten(2)
        return self.wo_b(o), loss

    def index_loss(self, scores, near, far, visible):
        """KL from the heads' summed attention mass over visible entries to softmax(scores), per query that has any."""
        top = torch.maximum(torch.maximum(near.amax(-1), far.amax(-1)), self.attn_sink.detach())
        e = torch.exp(far - top[..., None])
        total = torch.exp(near - top[..., None]).sum(-1) + e.sum(-1) + torch.exp(self.attn_sink.detach() - top)
        mass = (e / total[..., None]).sum(2)
        target = mass / (mass.sum(-1, keepdim=True) + 1e-20)
        kl = target * (torch.log(target + 1e-20) - torch.log_softmax(scores, -1))
        kl = torch.where(visible, kl, 0.0).sum(-1)
        return kl.mean()


class MoE(nn.Module):
    def __init__(self, c, hashed):
        super().__init__()
        self.c, self.hashed = c, hashed
        e, i, h = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.gate = Weight(e, h, std=0.5 * h**-0.5)
        if hashed:
            self.gate.register_buffer("tid2eid", torch.rand(c.vocab_size, e).topk(c.num_experts_per_tok).indices)
        else:
            self.gate.register_buffer("bias", torch.zeros(e))
        self.w13 = param(2, e, i, h, std=h**-0.5)
        self.w2 = param(e, h, i, std=0.6 * i**-0.5)
        self.shared_experts = nn.ModuleDict({"w1": Weight(i, h), "w2": Weight(h, i, std=0.3 * i**-0.5), "w3": Weight(i, h)})

    def forward(self, x, ids):
        """x [B,S,H], ids [B,S] -> y [B,S,H], selections per expert [E]."""
        c = self.c
        score = F.linear(x.float(), self.gate.weight).float()
        score = torch.sqrt(F.softplus(score))
        picks = self.gate.tid2eid[ids] if self.hashed else (score + self.gate.bias).topk(c.num_experts_per_tok, -1).indices
        chosen = torch.zeros_like(score).scatter(-1, picks, 1.0)
        weight = score * chosen
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        gate, up = linear(x, self.w13[0].flatten(0, 1)), linear(x, self.w13[1].flatten(0, 1))
        h = self.act(gate, up).unflatten(-1, (c.n_routed_experts, -1)) * weight[..., None]
        y = linear(h.flatten(-2).to(x.dtype), self.w2.transpose(0, 1).flatten(1))
        shared = self.shared_experts
        y = y + shared["w2"](self.act(shared["w1"](x), shared["w3"](x)).to(x.dtype))
        return y, chosen.sum((0, 1)).detach()

    def act(self, gate, up):
        limit = self.c.swiglu_limit
        return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        n, h = c.hc_mult, c.hidden_size
        self.c, self.compressed = c, int(c.compress_ratios[index] > 0)
        self.attn_norm, self.ffn_norm = Weight(h, fill=1.0), Weight(h, fill=1.0)
        self.attn, self.ffn = Attention(c, c.compress_ratios[index]), MoE(c, index < c.num_hash_layers)
        for i, site in enumerate(("attn", "ffn")):
            setattr(self, f"hc_{site}_fn", param((2 + n) * n, n * h, std=(n * h) ** -0.5))
            # Streams start apart: each site reads mostly one stream and comb starts near the identity.
            base = torch.cat((torch.full((n,), -1.0), torch.zeros(n), 2 * torch.eye(n).flatten()))
            base[(2 * index + i) % n] = 1.0
            setattr(self, f"hc_{site}_base", nn.Parameter(base))
            setattr(self, f"hc_{site}_scale", param(3, fill=0.1))

    def mix(self, streams, site):
        """streams [B,S,4,H] -> x [B,S,H], post [B,S,4] and comb [4,4,B,S], the hyper-connection's fp32 coefficients."""
        c, n = self.c, self.c.hc_mult
        fn, base, scale = (getattr(self, f"hc_{site}_{k}") for k in ("fn", "base", "scale"))
        flat = streams.flatten(2).float()
        m = F.linear(flat, fn).float() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        pre, post, comb = m.split((n, n, n * n), -1)
        pre = torch.sigmoid(pre * scale[0] + base[:n]) + c.hc_eps
        post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
        comb = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).permute(2, 3, 0, 1).flatten(2).contiguous()
        comb = sinkhorn(comb, c.hc_sinkhorn_iters, c.hc_eps).unflatten(2, streams.shape[:2])
        return (pre[..., None] * streams.float()).sum(2).to(streams.dtype), post, comb

    def unmix(self, y, streams, post, comb):
        """New stream k = post_k y + sum_j comb[j,k] stream_j."""
        x, n = streams.float(), self.c.hc_mult
        out = [
            post[..., k, None] * y.float() + sum(comb[j, k][..., None] * x[..., j, :] for j in range(n)) for k in range(n)
        ]
        return torch.stack(out, 2).to(streams.dtype)

    def forward(self, streams, ids, tables, dense):
        eps, (cos, sin) = self.c.rms_norm_eps, tables[self.compressed]
        x, post, comb = self.mix(streams, "attn")
        y, index_loss = self.attn(rms_norm(x, self.attn_norm.weight, eps), cos, sin, dense)
        streams = self.unmix(y, streams, post, comb)
        x, post, comb = self.mix(streams, "ffn")
        y, load = self.ffn(rms_norm(x, self.ffn_norm.weight, eps), ids)
        return self.unmix(y, streams, post, comb), index_loss, load


class TinyV4(nn.Module):
    def __init__(self, config=None, dtype=torch.float32):
        """dtype: activations' dtype; parameters stay fp32 and are cast where they are used."""
        super().__init__()
        self.c = c = config or TinyConfig()
        n, h = c.hc_mult, c.hidden_size
        self.dtype = dtype
        self.embed, self.head = Weight(c.vocab_size, h, std=0.5), Weight(c.vocab_size, h, std=0.5 * h**-0.5)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(len(c.compress_ratios)))
        self.norm = Weight(h, fill=1.0)
        self.hc_head_fn, self.hc_head_base = param(n, n * h, std=(n * h) ** -0.5), param(n)
        self.hc_head_scale = param(1, fill=0.1)
        for k in (0, 1):
            angles = torch.arange(c.max_position_embeddings)[:, None] * inverse_frequencies(c, k).float()
            self.register_buffer(f"cos{k}", angles.cos(), persistent=False)
            self.register_buffer(f"sin{k}", angles.sin(), persistent=False)

    def forward(self, ids, dense):
        """ids int64 [B,S], dense bool [] -> hidden [B,S,H] before the head, index loss [], load [layers, E]."""
        s, c = ids.shape[1], self.c
        tables = [(self.cos0[:s], self.sin0[:s]), (self.cos1[:s], self.sin1[:s])]
        streams = F.embedding(ids, self.embed.weight).to(self.dtype)[:, :, None].expand(-1, -1, c.hc_mult, -1)
        losses, loads = [], []
        for layer in self.layers:
            streams, index_loss, load = layer(streams, ids, tables, dense)
            losses.append(index_loss)
            loads.append(load)
        flat = streams.flatten(2).float()
        m = F.linear(flat, self.hc_head_fn).float() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        pre = torch.sigmoid(m * self.hc_head_scale + self.hc_head_base) + c.hc_eps
        x = (pre[..., None] * streams.float()).sum(2).to(self.dtype)
        return rms_norm(x, self.norm.weight, c.rms_norm_eps), sum(losses), torch.stack(loads)

    def logits(self, hidden):
        return linear(hidden, self.head.weight).float()


# ---- native names ----------------------------------------------------------------------------------------------------
def to_native(model, dtype=None):
    """Checkpoint tensors under native names (experts apart), detached copies on the CPU."""
    out = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if name.endswith("ffn.w13"):
            for e in range(value.shape[1]):
                for k, part in enumerate(("w1", "w3")):
                    out[name.replace("w13", f"experts.{e}.{part}.weight")] = value[k, e]
        elif name.endswith("ffn.w2"):
            for e in range(value.shape[0]):
                out[name.replace("w2", f"experts.{e}.w2.weight")] = value[e]
        else:
            out[name] = value
    # F32 in checkpoints: hyper-connections, sinks, ape and the router bias. tid2eid is I64.
    keep = ("_fn", "_base", "_scale", "attn_sink", ".ape", ".bias", "tid2eid")
    return {k: v.contiguous() if dtype is None or k.endswith(keep) else v.to(dtype) for k, v in out.items()}
