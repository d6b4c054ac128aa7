"""Train the tiny DeepSeek-V4 checkpoint of examples/tiny; examples/tiny/README.md has the exact commands.

python examples/train_tiny.py prepare              # Debian packages -> .data/tokens.npz, .data/tokenizer.json
python examples/train_tiny.py check                # training model against transformers, fp32, CPU
python examples/train_tiny.py train --out RUN      # one GPU; writes bf16 weights, log.txt, report.json, samples.txt
python examples/train_tiny.py export --weights RUN # -> examples/tiny, NVFP4 experts
"""

import argparse
import json
import math
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from tiny_check import check
from tiny_data import Crops, prepare
from tiny_export import export, save_weights
from tiny_model import TinyConfig, TinyV4
from tiny_quantise import quantise_in_place, restore
from tiny_score import score
from tiny_sinkhorn import check_kernels

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE.parent / ".data"


def make_optimizer(model, lr, weight_decay, fused):
    decay = [
        p for n, p in model.named_parameters() if p.dim() >= 2 and not n.endswith((".ape", "_fn")) and "embed" not in n
    ]
    rest = [p for n, p in model.named_parameters() if all(p is not d for d in decay)]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)


def make_loss(model):
    def loss(ids, target, dense):
        hidden, index_loss, load = model(ids, dense)
        ce = F.cross_entropy(model.logits(hidden).flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return ce, index_loss, load

    return loss


def train(args):
    begin = time.time()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").unlink(missing_ok=True)

    def log(text):
        print(text, flush=True)
        with open(out / "log.txt", "a") as file:
            file.write(text + "\n")

    dev = torch.device(args.device)
    cuda = dev.type == "cuda"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    if cuda:
        check_kernels()
    config = TinyConfig(**json.loads(args.config))
    model = TinyV4(config, torch.bfloat16).to(dev)
    log(f"torch {torch.__version__} {dev}, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    data = np.load(DATA / "tokens.npz")
    crops = Crops(data["train"], dev, args.seed)
    loss_fn = make_loss(model)
    if not args.eager:
        loss_fn = torch.compile(loss_fn, fullgraph=True, dynamic=False)
    opt = make_optimizer(model, args.lr, args.weight_decay, fused=cuda)
    phases = [tuple(map(int, p.split("x"))) for p in (args.short, args.long)]  # rows, length
    deadline = begin + 60 * args.minutes - args.reserve
    flags = [torch.tensor(flag, device=dev) for flag in (False, True)]  # made once: making one waits for the device
    phase, start, step, last_save, tokens, progress, last = 0, None, 0, time.time(), 0, 0.0, begin
    mark, mark_tokens, sums = time.time(), 0, []
    load_total = torch.zeros(len(config.compress_ratios), config.n_routed_experts, device=dev)
    hashed = torch.tensor([not hasattr(layer.ffn.gate, "bias") for layer in model.layers], device=dev)
    while True:
        now = time.time()
        if step >= args.steps if args.steps else start is not None and now >= deadline:
            break
        if args.steps:
            progress = step / args.steps
        elif start is not None:  # each step advances by its share of the time that is left for steps
            left = deadline - now - (args.compile_s if phase == 0 else 0)
            progress += (1 - progress) * min(1.0, (now - last) / max(now - last, left))
        last = now
        new_phase = int(progress >= 1 - args.long_share)
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
        except torch._dynamo.exc.TorchDynamoException as error:
            raise SystemExit(f"torch.compile failed; --eager trains without it.\n{error}") from error
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
            rate = (tokens - mark_tokens) / 1e3 / max(1e-9, time.time() - mark)
            log(
                f"step {step} progress {progress:.3f} loss {a:.4f} index {b:.4f} norm {g:.2f} lr {lr:.2e} load "
                f"max/mean {worst:.2f} {rate:.1f}k tokens/s {'q ' if quantised else ''}{time.time() - begin:.0f} s"
            )
            mark, mark_tokens, sums = time.time(), tokens, []
        if time.time() - last_save > args.save_every:
            last_save = time.time()
            save_weights(model, out, log, f"step {step} tokens {tokens}")
    save_weights(model, out, log, f"final step {step} tokens {tokens}")
    report = {
        "steps": step,
        "tokens": tokens,
        "seconds": round(time.time() - begin, 1),
        "torch": torch.__version__,
        "compiled": not args.eager,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "epochs": round(tokens / len(data["train"]), 2),
    }
    score(model, loss_fn, data, phases[phase], report, log, begin + 60 * args.minutes - 4, out, DATA / "tokenizer.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["prepare", "check", "train", "export"])
    parser.add_argument("--out", default=str(DATA / "run"), help="train: folder to write")
    parser.add_argument("--weights", default=str(DATA / "run"), help="export: folder that train wrote")
    parser.add_argument("--to", default=str(HERE / "tiny"), help="export: checkpoint folder to write")
    parser.add_argument("--accept-new-versions", action="store_true", help="prepare: rewrite manifest.json")
    parser.add_argument("--minutes", type=float, default=6.2, help="wall time in all, compiling included")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--config", default="{}", help="JSON, overrides of TinyConfig")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile")
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
    parser.add_argument("--compile-s", type=float, default=30.0, help="seconds kept for compiling the second shape")
    parser.add_argument("--save-every", type=float, default=50.0)
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    if args.step == "prepare":
        prepare(DATA, HERE / "tiny" / "manifest.json", args.accept_new_versions)
    elif args.step == "check":
        check(args.seed)
    elif args.step == "train":
        train(args)
    else:
        export(args.weights, args.to, TinyConfig(**json.loads(args.config)), DATA / "tokenizer.json")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # dsv4, where it is not installed
    main()
