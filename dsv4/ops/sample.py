"""sample: the next token, drawn on the device.

Order, as users of transformers know it: repetition penalty, temperature, top-k, top-p, min-p, then the draw.
Temperature 0 takes the largest (penalised) logit. The draw is argmax(logit / T + Gumbel noise) with noise from
Philox4x32-10, a counter-based generator: its key is the row's seed, its counter the token's position and the vocabulary
index, so a result depends neither on the batch around it nor on earlier draws.

On CUDA kernels/sample.cu does it in one launch, for float32 and bf16 logits.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.kernels.limits import raised

_MASK = 0xFFFFFFFF


def _mul_hi_lo(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b for 32-bit values held in int64, without overflowing it."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)  # below 2^49
    return ((high >> 16) + (total >> 32)) & _MASK, total & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Philox4x32-10 (Salmon et al. 2011). Counter and key words are int64 tensors of 32-bit values, broadcastable.
    Returns int64 [..., 4] of 32-bit values."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(c0, 0xD2511F53)
        hi1, lo1 = _mul_hi_lo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """float32 [B, vocab] of Gumbel noise for seeds, positions int64 [B]."""
    quads = torch.arange((vocab + 3) // 4, device=seeds.device)
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    position = positions[:, None]
    key = (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK)
    bits = philox((quads, position & _MASK, position >> 32, zero), key).flatten(1)[:, :vocab]
    # 23 bits and a half: never 0 or 1, so both logarithms are finite.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _keep(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [B, V]: what the three filters leave of temperature-scaled logits; at least the largest."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    # Each filter sees the distribution that the one before it left.
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    keep = keep & ((probs.cumsum(-1) - probs < top_p[:, None]) | (top_p[:, None] >= 1))
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    keep = keep & (probs >= min_p[:, None] * probs[:, :1])
    return torch.zeros_like(keep).scatter(-1, order, keep | (rank == 0))


SCHEMA = (
    "sample(Tensor logits, Tensor seen, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor repetition_penalty, Tensor seeds, Tensor positions) -> (Tensor, Tensor)"
)


def _fake(logits, seen, temperature, top_k, top_p, min_p, repetition_penalty, seeds, positions):
    batch = logits.shape[0]
    return logits.new_empty(batch, dtype=torch.int64), logits.new_empty(batch, dtype=torch.float32)


def shape(rows: int, quads: int) -> tuple[int, int]:
    """Threads a block and blocks a cluster for rows of so many quads of tokens. Few rows spread over more blocks."""
    threads = 256 if quads <= 1024 else 512
    return threads, min(16 if rows <= 8 else 8, 1 << (-(-quads // threads) - 1).bit_length())


def _cuda(logits, seen, temperature, top_k, top_p, min_p, repetition_penalty, seeds, positions):
    rows, vocab = logits.shape
    logits = logits.contiguous()
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    require("sample", logits.dtype in (torch.float32, torch.bfloat16), f"logits of {logits.dtype} are not supported")
    require_tensors("sample", logits.dtype, logits=logits)
    require_tensors("sample", torch.bool, seen=seen)
    require_tensors("sample", torch.float32, **floats)
    require_tensors("sample", torch.int64, top_k=top_k, seeds=seeds, positions=positions)
    require("sample", 1 <= vocab <= 262144, f"a vocabulary of 1 to 262144 tokens, found {vocab}")
    token, logprob = _fake(logits, seen, temperature, top_k, top_p, min_p, repetition_penalty, seeds, positions)
    if rows:
        quads = -(-vocab // 4)
        threads, cluster = shape(rows, quads)
        scaled = seeds.new_empty((rows, quads, 4), dtype=torch.float32)
        is_float = int(logits.dtype == torch.float32)
        defines = f"V={vocab}", f"THREADS={threads}", f"CLUSTER={cluster}", f"FLOAT_LOGITS={is_float}"
        columns = temperature, top_k, top_p, min_p, repetition_penalty, seeds, positions
        launch = raised(kernel("sample.cu", "sample", *defines), 0, cluster)
        results = scaled, token, logprob
        launch(rows, threads, logits, seen, *columns, *results, cluster=cluster, pdl=True)
    return token, logprob


@op(SCHEMA, fake=_fake, cuda=_cuda)
def sample_ref(
    logits: Tensor,
    seen: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """The order above, with a stable sort: equal logits keep their vocabulary order."""
    logits = logits.float()
    penalty = repetition_penalty[:, None]
    penalised = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    greedy = penalised.argmax(-1)
    scaled = penalised / torch.where(temperature > 0, temperature, 1)[:, None]
    kept = scaled.masked_fill(~_keep(scaled, top_k, top_p, min_p), -torch.inf)
    drawn = (kept + gumbel_noise(seeds, positions, logits.shape[-1])).argmax(-1)
    token = torch.where(temperature > 0, drawn, greedy)
    return token, logits.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)


def sample(
    logits: Tensor,
    seen: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """logits float32 [B, V]; seen bool [B, V]: tokens that the penalty applies to; per row [B]: temperature, top_p
    (1 = off), min_p (0 = off), repetition_penalty (1 = off) float32, top_k (0 = off), seeds, positions int64.
    Returns the token int64 [B] and its log-probability float32 [B] under the unmodified logits."""
    return torch.ops.dsv4.sample(logits, seen, temperature, top_k, top_p, min_p, repetition_penalty, seeds, positions)
