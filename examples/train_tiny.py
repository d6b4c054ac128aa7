"""Train the tiny DeepSeek-V4 checkpoint of examples/tiny: prepare, check, train, export.

    python examples/train_tiny.py prepare                       # Debian packages -> .data/tokens.npz, tokenizer.json
    python examples/train_tiny.py check                         # training model against transformers, fp32, CPU
    python examples/train_tiny.py train --out OUT --minutes 6   # one GPU; writes bf16 weights, log.txt, report.json
    python examples/train_tiny.py export --weights OUT          # -> examples/tiny, NVFP4 experts
"""
import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from tiny_model import TinyConfig, TinyV4, to_native
from tiny_sinkhorn import sinkhorn

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE.parent / ".data"
PROMPTS = ["It was a fine morning in the spring, and", "And God said to Abraham,", "The function returns",
           "The whale rose out of the water and", "She looked at him with surprise, and said,",
           "water (noun):", "In this chapter we will learn how to", "The king of the country was"]
QUESTIONS = ["friend", "river", "to run", "happiness"]


def config_json(c):
    """config.json in the native spelling of the released checkpoints."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "num_hidden_layers": len(c.compress_ratios),
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": 1, "head_dim": c.head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim, "q_lora_rank": c.q_lora_rank, "o_groups": c.o_groups,
        "o_lora_rank": c.o_lora_rank, "sliding_window": c.sliding_window, "compress_ratios": list(c.compress_ratios),
        "index_n_heads": c.index_n_heads, "index_head_dim": c.index_head_dim, "index_topk": c.index_topk,
        "n_routed_experts": c.n_routed_experts, "n_shared_experts": 1, "num_experts_per_tok": c.num_experts_per_tok,
        "moe_intermediate_size": c.moe_intermediate_size, "routed_scaling_factor": c.routed_scaling_factor,
        "num_hash_layers": c.num_hash_layers, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "swiglu_limit": c.swiglu_limit, "hidden_act": "silu", "expert_dtype": "fp4",
        "hc_mult": c.hc_mult, "hc_sinkhorn_iters": c.hc_sinkhorn_iters, "hc_eps": c.hc_eps, "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta, "compress_rope_theta": c.compress_rope_theta,
        "rope_scaling": {"type": "yarn", "factor": c.rope_factor, "original_max_position_embeddings": c.rope_original,
                         "beta_fast": 32, "beta_slow": 1},
        "max_position_embeddings": c.max_position_embeddings, "num_nextn_predict_layers": 0,
        "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "initializer_range": 0.02,
        "use_cache": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }


# ---- fake quantisation (straight-through): weights are replaced by their rounded values for forward and backward -----
def fake_nvfp4(w, amax):
    """w [..., in] with per-tensor amax broadcastable to [..., 1] -> nearest NVFP4 values, as dsv4.ops.nvfp4 rounds them."""
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


FP8_NAMES = ("wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight")


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


# ---- data ------------------------------------------------------------------------------------------------------------
class Crops:
    """Random crops of the token stream; each starts with BOS, so that any text may follow BOS at inference."""
    def __init__(self, stream, device, seed):
        self.stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def batch(self, rows, length):
        dev = self.stream.device
        start = torch.randint(len(self.stream) - length - 1, (rows, 1), generator=self.generator, device=dev)
        x = self.stream[start + torch.arange(length + 1, device=dev)].long()
        ids, target = x[:, :-1].clone(), x[:, 1:]
        ids[:, 0] = 0
        return ids, target


def held_out_batches(stream, rows, length):
    """Non-overlapping crops of the whole held-out stream as (ids, target); -100 where there is no token."""
    count = math.ceil(len(stream) / length)
    padded = np.full(count * length, -100, np.int64)
    padded[:len(stream)] = stream
    target = torch.from_numpy(padded).view(count, length)
    target = torch.cat((target, torch.full((-count % rows, length), -100)))
    ids = torch.cat((torch.zeros(len(target), 1, dtype=torch.long), target[:, :-1]), 1).clamp(min=0)
    return list(zip(ids.split(rows), target.split(rows)))


# ---- training --------------------------------------------------------------------------------------------------------
def make_optimizer(model, lr, weight_decay, fused):
    decay = [p for n, p in model.named_parameters() if p.dim() >= 2 and not n.endswith((".ape", "_fn")) and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if all(p is not d for d in decay)]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)


def make_loss(model):
    def loss(ids, target, dense):
        hidden, index_loss, load = model(ids, dense)
        ce = F.cross_entropy(model.logits(hidden).flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return ce, index_loss, load
    return loss


def save_weights(model, out, log, note, piece=14 * 2**20):
    """bf16 weights under native names in pieces below 16 MiB; written aside, then renamed."""
    from safetensors.torch import save_file
    pieces, size = [{}], 0
    for name, value in to_native(model, torch.bfloat16).items():
        n = value.numel() * value.element_size()
        if size + n > piece:
            pieces.append({})
            size = 0
        pieces[-1][name] = value
        size += n
    for i, tensors in enumerate(pieces):
        save_file(tensors, out / f"part-{i}.tmp", metadata={"note": note})
    for i in range(len(pieces)):
        (out / f"part-{i}.tmp").rename(out / f"weights-{i}.safetensors")
    log(f"saved {len(pieces)} files: {note}")


def train(args):
    begin = time.time()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    lines = open(os.devnull if args.warm else out / "log.txt", "w")

    def log(text):
        print(text, flush=True)
        lines.write(text + "\n")
        lines.flush()

    dev = torch.device(args.device)
    cuda = dev.type == "cuda"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config = TinyConfig(**json.loads(args.config))
    model = TinyV4(config, torch.bfloat16).to(dev)
    log(f"torch {torch.__version__} {dev}, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    data = np.load(DATA / "tokens.npz")
    crops = Crops(data["train"], dev, args.seed)
    loss_fn = make_loss(model)
    if not args.eager:
        torch._dynamo.config.recompile_limit = 32
        loss_fn = torch.compile(loss_fn, fullgraph=True, dynamic=False)
    opt = make_optimizer(model, args.lr, args.weight_decay, fused=cuda)
    phases = [tuple(map(int, p.split("x"))) for p in (args.short, args.long)]  # rows, length
    if args.warm:  # only fill the compiler's disk cache with the second shape, beside the training process
        ids, target = crops.batch(*phases[1])
        ce, index_loss, _ = loss_fn(ids, target, torch.zeros((), dtype=torch.bool, device=dev))
        (ce + index_loss).backward()
        log(f"warm after {time.time() - begin:.0f} s")
        return
    warm = None
    if cuda and not args.eager:
        warm = subprocess.Popen([sys.executable, __file__, "train", "--warm", *sys.argv[2:]])
    deadline = begin + 60 * args.minutes - args.reserve
    flags = [torch.tensor(flag, device=dev) for flag in (False, True)]  # made once: making one waits for the device
    phase, start, step, last_save, tokens, progress, last = 0, None, 0, time.time(), 0, 0.0, begin
    mark, mark_tokens, sums = time.time(), 0, []
    load_total = torch.zeros(len(config.compress_ratios), config.n_routed_experts, device=dev)
    hashed = torch.tensor([not hasattr(layer.ffn.gate, "bias") for layer in model.layers], device=dev)
    while True:
        now = time.time()
        if start is not None and now >= deadline or args.steps and step >= args.steps:
            break
        if args.steps:
            progress = step / args.steps
        elif start is not None:  # each step advances by its share of the time that is left for steps
            left = deadline - now - (args.compile_s if phase == 0 else 0)
            progress += (1 - progress) * min(1.0, (now - last) / max(now - last, left))
        last = now
        new_phase = int(progress >= 1 - args.long_share)
        if new_phase > phase:
            if warm is not None and warm.poll() is None and now < deadline - 60:
                new_phase = phase  # the other process still compiles; going on costs nothing
        switched, phase = new_phase > phase, max(phase, new_phase)
        warmup = min(1.0, (step + 1) / args.warmup)
        lr = args.lr * warmup * (args.floor + (1 - args.floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in opt.param_groups:
            group["lr"] = lr
        rows, length = phases[phase]
        ids, target = crops.batch(rows, length)
        dense = flags[progress < args.dense_share]
        quantised = progress >= 1 - args.quant_share
        exact = quantise_in_place(model) if quantised else None
        tick = time.time()
        try:
            ce, index_loss, load = loss_fn(ids, target, dense)
            ce = ce / target.numel()
            (ce + args.index_weight * index_loss).backward()
        except Exception as error:
            if args.eager or not (start is None or switched):
                raise
            log(f"compiling failed, going on without: {type(error).__name__}: {str(error)[:2000]}")
            args.eager, loss_fn = True, make_loss(model)
            opt.zero_grad(set_to_none=True)
            if exact:
                restore(model, exact)
            continue
        if start is None or switched:
            if cuda:
                torch.cuda.synchronize()
            took = time.time() - tick
            log(f"first step of {rows} x {length} took {took:.1f} s")
            start = start or time.time()
            mark, last = mark + took, time.time()  # compiling is not training time
        if exact:
            restore(model, exact)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        opt.step()
        opt.zero_grad(set_to_none=True)
        with torch.no_grad():  # aux-loss-free balance: the bias moves against the load by a fixed step
            error = torch.sign(load.mean(1, keepdim=True) - load)
            for i, layer in enumerate(model.layers):
                if hasattr(layer.ffn.gate, "bias"):
                    layer.ffn.gate.bias += args.bias_rate * (1 - progress) * error[i]
            load_total = 0.95 * load_total + load
        step += 1
        tokens += ids.numel()
        sums.append(torch.stack((ce.detach(), index_loss.detach(), norm.detach())))
        if step % args.log_every == 0 or step == 1:
            a, b, g = torch.stack(sums).mean(0).tolist()  # the only host sync of the loop
            if not math.isfinite(a):
                log(f"step {step}: loss is {a}; stopping, the last saved weights stand")
                raise SystemExit(1)
            worst = (load_total.amax(1) / load_total.mean(1))[~hashed].max().item()
            rate = (tokens - mark_tokens) / max(1e-9, time.time() - mark)
            log(f"step {step} progress {progress:.3f} loss {a:.4f} index {b:.4f} norm {g:.2f} lr {lr:.2e} load max/mean "
                f"{worst:.2f} {rate / 1e3:.1f}k tokens/s {'q' if quantised else ''} {time.time() - begin:.0f} s")
            mark, mark_tokens, sums = time.time(), tokens, []
        if time.time() - last_save > args.save_every:
            last_save = time.time()
            save_weights(model, out, log, f"step {step} tokens {tokens}")
    save_weights(model, out, log, f"final step {step} tokens {tokens}")
    if warm is not None and warm.poll() is None:
        warm.kill()
    report = {"steps": step, "tokens": tokens, "seconds": round(time.time() - begin, 1), "torch": torch.__version__,
              "device": torch.cuda.get_device_name() if cuda else "cpu", "epochs": round(tokens / len(data["train"]), 2)}
    finish(model, loss_fn, data, phases[phase], report, log, begin + 60 * args.minutes - 4, out)


@torch.no_grad()
def round_bf16(model):
    for name, p in model.named_parameters():
        if not name.endswith(("_fn", "_base", "_scale", "attn_sink", ".ape")):
            p.copy_(p.to(torch.bfloat16))


def finish(model, loss_fn, data, shape, report, log, deadline, out):
    """Held-out bits per byte as bf16 and as the quantised checkpoint reads, then samples; the shape is a compiled one."""
    dev = model.embed.weight.device
    dense = torch.zeros((), dtype=torch.bool, device=dev)
    batches = held_out_batches(data["valid"], *shape)
    round_bf16(model)
    for name in ("bf16", "nvfp4"):
        if name == "nvfp4":
            quantise_in_place(model)
        total, count = 0.0, 0
        for ids, target in batches:
            with torch.enable_grad():  # as in training: without gradients the compiler would build the graph once more
                total += loss_fn(ids.to(dev), target.to(dev), dense)[0].item()
            count += 1
            if time.time() > deadline:
                break
        seen = sum((t >= 0).sum().item() for _, t in batches[:count])
        share = seen / len(data["valid"])
        report[f"held_out_nats_per_token_{name}"] = total / seen
        report[f"held_out_bits_per_byte_{name}"] = total / math.log(2) / (data["valid_bytes"].sum() * share)
        log(f"held out {name}: {total / seen:.4f} nats a token, {report[f'held_out_bits_per_byte_{name}']:.4f} bits a byte "
            f"({share:.0%} of the held-out tokens)")
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    samples = sample(model, deadline)
    (out / "samples.txt").write_text("\n\n".join(samples) + "\n")
    for text in samples:
        log(text + "\n")


@torch.no_grad()
def sample(model, deadline, new_tokens=100, seed=0):
    """Greedy and sampled (temperature 0.8) continuations with the weights as they are; recomputes each prefix."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(HERE / "tiny" / "tokenizer.json"))
    user, assistant, think_end = (tok.token_to_id(t) for t in ("<｜User｜>", "<｜Assistant｜>", "</think>"))
    starts = [[0, *tok.encode(p, add_special_tokens=False).ids] for p in PROMPTS]
    starts += [[0, user, *tok.encode(f'What does "{q}" mean?', add_special_tokens=False).ids, assistant, think_end] for q in QUESTIONS]
    dev, window = model.embed.weight.device, model.c.sliding_window
    rows = [list(s) for s in starts + starts]
    greedy, generator = len(starts), torch.Generator(device=dev).manual_seed(seed)
    for _ in range(new_tokens):
        if time.time() > deadline:
            break
        width = -(-max(map(len, rows)) // window) * window
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, :len(row)] = torch.tensor(row)
        hidden, _, _ = model(ids.to(dev), torch.zeros((), dtype=torch.bool, device=dev))
        last = hidden[torch.arange(len(rows), device=dev), torch.tensor([len(r) - 1 for r in rows], device=dev)]
        logits = model.logits(last)
        logits[:, 2] = -torch.inf
        drawn = torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=generator)[:, 0].tolist()
        for i, (best, other) in enumerate(zip(logits.argmax(-1).tolist(), drawn)):
            if 1 not in rows[i]:
                rows[i].append(best if i < greedy else other)
    return [("greedy:  " if i < greedy else "sampled: ") + tok.decode(r[1:], skip_special_tokens=False) for i, r in enumerate(rows)]


# ---- check and export ------------------------------------------------------------------------------------------------
def check(args):
    """The training model's fp32 logits against transformers on the same random weights; also Sinkhorn's gradient."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    torch.manual_seed(args.seed)
    c = TinyConfig(index_topk=16, vocab_size=512)
    model = TinyV4(c).eval()
    with torch.no_grad():  # move everything off its neutral start, so that nothing is tested against 0 or 1
        for name, p in model.named_parameters():
            if p.dim() < 2 or name.endswith(".ape"):
                p += 0.3 * torch.randn_like(p)
            elif name.endswith("_fn"):
                p *= 2
        for layer in model.layers:
            if hasattr(layer.ffn.gate, "bias"):
                layer.ffn.gate.bias.normal_(std=0.1)
    for name, p in model.named_parameters():
        if name.endswith("_scale"):
            p.data.add_(0.5)
    hf = DeepseekV4ForCausalLM(DeepseekV4Config(**config_json(c), attn_implementation="eager")).eval()
    state = hf_state(to_native(model))
    missing, unexpected = hf.load_state_dict(state, strict=False)
    missing = [m for m in missing if not m.endswith("inv_freq")]
    if missing or unexpected:
        raise SystemExit(f"names differ: missing {missing}, unexpected {unexpected}")
    hf.float()
    length = 512
    ids = torch.randint(c.vocab_size, (2, length))
    with torch.no_grad():
        ours = model.logits(model(ids, torch.tensor(False))[0])
        theirs = hf(input_ids=ids, use_cache=False).logits
        dense = model.logits(model(ids, torch.tensor(True))[0])
    error = (ours - theirs).abs().max().item()
    print(f"{length} tokens, logits up to {theirs.abs().max():.2f}: largest difference {error:.2e}")
    print(f"with every visible CSA entry instead of the indexer's choice: {(dense - theirs).abs().max():.2e}")
    logits = (2 * torch.randn(4, 4, 5, dtype=torch.float64)).requires_grad_()
    torch.autograd.gradcheck(lambda x: sinkhorn(x, 20, 1e-6), (logits,))
    check_fake_quantisation()
    if error > 1e-4:
        raise SystemExit("the training model differs from transformers")
    print("check passed")


def check_fake_quantisation():
    from dsv4.ops.fp8 import dequantize_fp8_block, quantize_fp8_block
    from dsv4.ops.nvfp4 import dequantize_nvfp4, quantize_nvfp4
    w = torch.randn(256, 384) * torch.exp(torch.randn(256, 1))
    nv = dequantize_nvfp4(*quantize_nvfp4(w))
    print(f"fake NVFP4 against dsv4.ops: {(fake_nvfp4(w, w.abs().max()) - nv).abs().max():.1e}, "
          f"fake FP8: {(fake_fp8(w) - dequantize_fp8_block(*quantize_fp8_block(w))).abs().max():.1e}")


def export(args):
    """Weights of a run -> examples/tiny: NVFP4 experts, config, tokenizer and generation settings, report."""
    from safetensors.torch import load_file

    from dsv4.model.export import save_nvfp4_experts
    folder, tensors = HERE / "tiny", {}
    for path in sorted(pathlib.Path(args.weights).glob("weights-*.safetensors")):
        tensors |= load_file(path)
    save_nvfp4_experts(folder, config_json(TinyConfig(**json.loads(args.config))), tensors)
    (folder / "generation_config.json").write_text(json.dumps(
        {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>",
         "pad_token": "<｜▁pad▁｜>", "add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False,
         "model_max_length": TinyConfig.max_position_embeddings}, ensure_ascii=False, indent=1) + "\n")
    for name in ("report.json", "samples.txt"):
        (folder / name).write_bytes((pathlib.Path(args.weights) / name).read_bytes())
    print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.1f} MB")


def hf_state(native):
    """Native names -> transformers' (facts: one regular map; routed experts fused as [E, 2I, H])."""
    import re
    rules = [(r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^norm\.", "model.norm."),
             (r"^hc_head_", "model.hc_head.hc_"), (r"^layers\.", "model.layers."), (r"\.attn_norm\.", ".input_layernorm."),
             (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.hc_(attn|ffn)_", r".\1_hc."),
             (r"\.attn\.attn_sink", ".self_attn.sinks"), (r"\.attn\.", ".self_attn."),
             (r"\.indexer\.compressor\.", ".compressor.indexer."), (r"self_attn\.indexer\.", "self_attn.compressor.indexer."),
             (r"self_attn\.q_norm", "self_attn.q_a_norm"), (r"\.wq_a\.", ".q_a_proj."), (r"\.wq_b\.", ".q_b_proj."),
             (r"\.wkv\.", ".kv_proj."), (r"\.wgate\.", ".gate_proj."), (r"\.wo_a\.", ".o_a_proj."), (r"\.wo_b\.", ".o_b_proj."),
             (r"\.ape$", ".position_bias"), (r"(compressor\.(?:indexer\.)?)norm\.", r"\1kv_norm."),
             (r"indexer\.weights_proj", "indexer.scorer.weights_proj"), (r"\.ffn\.gate\.bias", ".ffn.gate.e_score_correction_bias"),
             (r"shared_experts\.w1", "shared_experts.gate_proj"), (r"shared_experts\.w2", "shared_experts.down_proj"),
             (r"shared_experts\.w3", "shared_experts.up_proj"), (r"\.ffn\.", ".mlp.")]
    out, experts = {}, {}
    for name, value in native.items():
        if m := re.match(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight", name):
            experts.setdefault(int(m[1]), {})[int(m[2]), m[3]] = value
            continue
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        out[name] = value
    for layer, parts in experts.items():
        count = 1 + max(e for e, _ in parts)
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat((parts[e, "w1"], parts[e, "w3"])) for e in range(count)])
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack([parts[e, "w2"] for e in range(count)])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["prepare", "check", "train", "export"])
    parser.add_argument("--out", default=str(DATA / "run"))
    parser.add_argument("--weights", default=str(DATA / "run"))
    parser.add_argument("--minutes", type=float, default=6.0, help="wall time in all, compiling included")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--config", default="{}", help="JSON, overrides of TinyConfig")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--short", default="64x512", help="rows x length of the first phase")
    parser.add_argument("--long", default="24x2048", help="rows x length of the last phase")
    parser.add_argument("--long-share", type=float, default=0.25)
    parser.add_argument("--quant-share", type=float, default=0.35, help="last part trained with rounded weights")
    parser.add_argument("--dense-share", type=float, default=0.3, help="first part attends to all visible CSA entries")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps instead of by time")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--floor", type=float, default=0.02)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--index-weight", type=float, default=0.2)
    parser.add_argument("--bias-rate", type=float, default=5e-3)
    parser.add_argument("--reserve", type=float, default=30.0, help="seconds kept for the held-out figures and samples")
    parser.add_argument("--compile-s", type=float, default=30.0, help="expected stall of the second shape's compilation")
    parser.add_argument("--save-every", type=float, default=50.0)
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    if args.step == "prepare":
        import tiny_data
        tiny_data.prepare(DATA, HERE / "tiny")
    else:
        {"check": check, "train": train, "export": export}[args.step](args)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
