"""dsv4 inspect: what a checkpoint folder holds, whether it would load, what it takes and what fits, from headers alone.

Exit status: 0 if the folder would load (and fits, where --memory says into what), 1 if not, 2 for bad arguments.
"""

import argparse
import gc
import json
import math
from dataclasses import fields, replace

from dsv4.cli import add_cache_arguments

SHORT = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "CSA",
    "heavily_compressed_attention": "HCA",
}
H200_COPY = 4.25  # TB/s, read and written, of a large device copy as measured on an H200
NOT_SHAPE = ("dtype", "bos_token_id", "eos_token_ids", "max_position_embeddings", "yarn")


def add_inspect(commands) -> None:
    """The parser of `dsv4 inspect`."""
    parser = commands.add_parser(
        "inspect",
        help="say what a checkpoint folder holds and what it needs, without loading it",
        description="Read the headers of a checkpoint folder: model, formats, sizes, memory, bandwidth floor, and whether "
        "it would load (exit status 0) or not (1).",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="checkpoint folder: config.json, safetensors")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs to spread the model over; default: 1")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of each GPU; default: only say what is needed")
    parser.add_argument("--max-context", type=int, metavar="N", help="tokens per sequence; default: 4096")
    parser.add_argument("--max-batch", type=int, default=1, metavar="N", help="sequences at a time; default: 1")
    add_cache_arguments(parser)
    parser.add_argument(
        "--bandwidth", type=float, default=H200_COPY, metavar="TB/S", help=f"of each GPU; default: {H200_COPY} (H200)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=inspect)


def inspect(args: argparse.Namespace) -> int:
    """`dsv4 inspect`: collect, print, return the status."""
    for flag in ("gpus", "max_context", "max_batch"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, found {value}")
    for flag in ("memory", "bandwidth"):
        value = getattr(args, flag)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{flag} must be a positive number, found {value}")
    collecting = gc.isenabled()
    gc.disable()  # the collector would go through 100,000s of objects, none of them garbage, for half of the time
    try:
        result = report(args)
    finally:
        if collecting:
            gc.enable()
    print(json.dumps(result) if args.json else text(result))
    return 0 if result["would_load"] else 1


def report(args: argparse.Namespace) -> dict:
    """All that is printed, as plain values. ValueError for a folder that is not there or a size beyond the model's."""
    import torch

    from dsv4.model import plan
    from dsv4.model.checkpoint import FolderSource
    from dsv4.model.config import ModelConfig
    from dsv4.model.survey import config_oddities, survey
    from dsv4.model.transformer import Transformer

    found = survey(args.folder)
    problems, warnings = found.problems, found.oddities
    config = weights = None
    try:
        config = ModelConfig.from_folder(args.folder)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    else:
        warnings += config_oddities(found)
        dtype = config.dtype
        if dtype == torch.float16:
            dtype = torch.bfloat16
            warnings.append("config.json says float16, which is not run: load with dtype bf16, as assumed here")
    if config is not None and not problems:
        source = FolderSource(found.folder, "meta", dtype)
        try:
            model = Transformer(config, source)
            source.finish()
            weights = plan.buffer_bytes(model)
        except ValueError as error:
            problems.append(str(error))
    out = {
        "folder": str(found.path),
        "model": model_name(config),
        "naming": found.naming,
        "tensors": len(found.folder.tensors),
        "files": found.files,
        "bytes": found.bytes,
        "parameters": found.parameters(),
        "parts": [
            {"name": p.name, "tensors": p.tensors, "bytes": p.bytes, "parameters": p.parameters}
            | {"formats": dict(p.formats.most_common())}
            for p in sorted(found.parts.values(), key=lambda p: -p.bytes)
        ],
    }
    if config is not None:
        if args.max_context is not None and args.max_context > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ValueError(f"--max-context {args.max_context} is beyond the model's max_position_embeddings {limit}")
        kinds = {SHORT[kind]: config.layer_types.count(kind) for kind in dict.fromkeys(config.layer_types)}
        out["layers"] = {"count": config.num_hidden_layers, "types": kinds}
        out["layers"]["hash_routing"] = config.mlp_layer_types.count("hash_moe")
        out["dtype"] = str(dtype).removeprefix("torch.")
        out["active_parameters"] = found.active_parameters(config)
        out["weights_as_loaded"] = weights is not None
        out |= sizes(args, config, weights or found.weight_bytes(), dtype)
    fit = out.get("fit")
    if fit is not None and not fit["fits"]:
        problems.append(fit["text"])
    out |= {"warnings": warnings, "problems": problems, "would_load": not problems}
    out["verdict"] = "would load" if not problems else f"would not load: {problems[0]}"
    return out


def model_name(config) -> str:
    """V4-Flash, V4-Pro, or a model of other sizes."""
    from dsv4.model.config import flash, pro

    if config is None:
        return "not known, config.json cannot be used"
    for name, release in (("Flash", flash()), ("Pro", pro())):
        if all(getattr(config, f.name) == getattr(release, f.name) for f in fields(config) if f.name not in NOT_SHAPE):
            return f"DeepSeek-V4-{name}"
    return "DeepSeek-V4 of other sizes than Flash and Pro"


def sizes(args: argparse.Namespace, config, weights: dict[str, int], dtype) -> dict:
    """Decode step, cache, memory and fit, for a config that could be read."""
    from dsv4.model import plan

    context = min(4096, config.max_position_embeddings) if args.max_context is None else args.max_context
    asked = plan.Sizes(args.max_batch, context, dtype, args.kv, args.index)
    kv, index = asked.formats(config)
    plan.check_gpus(config, args.gpus)
    each = plan.on_each_gpu(weights, args.gpus)
    steps = []
    for batch in sorted({1, args.max_batch}):
        read = plan.step_bytes(each, config, replace(asked, batch=batch))
        seconds = read / (args.bandwidth * 1e12)
        steps.append({"batch": batch, "context": context, "bytes": read, "floor_seconds": seconds})
    states = plan.layer_states(config, asked)
    one = replace(asked, batch=1)
    longest = replace(one, context=config.max_position_embeddings)
    cache = {
        "kv": kv,
        "index": index,
        "layers": {
            SHORT[kind]: {"layers": s.layers, "fixed_bytes": s.fixed_bytes, "bytes_per_token": s.bytes_per_token}
            for kind, s in states.items()
        },
        "fixed_bytes_per_sequence": sum(state.fixed_bytes for state in states.values()),
        "bytes_per_token": sum(state.bytes_per_token for state in states.values()),
        "per_sequence": {str(size.context): plan.cache_bytes(config, size) for size in dict.fromkeys((one, longest))},
        "longest_formats": longest.formats(config),
    }
    out = {"bandwidth": args.bandwidth * 1e12, "steps": steps, "cache": cache}
    need = plan.plan(weights, config, asked, args.gpus)
    out["memory"] = {"gpus": args.gpus, "batch": args.max_batch, "context": context}
    out["memory"] |= {name: getattr(need, name) for name in ("weights", "cache", "working", "total")}
    if args.memory is not None:
        out["fit"] = fit(args, config, weights, need)
    return out


def fit(args: argparse.Namespace, config, weights: dict[str, int], need) -> dict:
    """Whether the plan fits --memory on each GPU, by how much it does not, and the longest context that does."""
    from dsv4.model import plan

    memory = int(args.memory * plan.GIB)
    longest = plan.longest_context(weights, config, need.sizes, memory, args.gpus)
    words, runs = plan.fit_text(need, longest, memory), need.total <= memory
    if args.gpus > plan.MAX_GPUS:
        one = plan.plan(weights, config, need.sizes, plan.MAX_GPUS).total
        runs = runs and one <= memory
        what = f"{need.sizes.batch} x {need.sizes.context} tokens need {one / plan.GIB:.2f} GiB"
        words = f"dsv4 runs on {plan.MAX_GPUS} GPU today, where {what}; in the layout planned for {args.gpus} GPUs {words}"
    lacking = max(need.total - memory, 0)
    return {"memory": memory, "fits": runs, "lacking": lacking, "longest_context": longest, "text": words}


def text(out: dict) -> str:
    """The report for people: sizes on disk in decimal units, memory in GiB."""
    from dsv4.model.plan import GIB, MAX_GPUS
    from dsv4.model.sizes import size_text

    lines = [f"{out['folder']}: {out['model']}"]
    if "layers" in out:
        layers = out["layers"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in layers["types"].items())
        hashed = f"; {layers['hash_routing']} with hash routing" if layers["hash_routing"] else ""
        lines.append(f"{layers['count']} layers ({kinds}{hashed}), activations in {out['dtype']}")
    naming = f"{out['naming']} names" if out["naming"] else "names not recognised"
    files = "1 file" if out["files"] == 1 else f"{out['files']} files"
    lines.append(f"{out['tensors']} tensors, {size_text(out['bytes'])} in {files}, {naming}")
    if out["parts"]:
        lines += ["", f"{'part':<20} {'tensors':>8} {'size':>10} {'parameters':>11}  formats"]
    for part in out["parts"]:
        forms = part["formats"]
        shown = ", ".join(f"{form} {size_text(n)}" if len(forms) > 1 else form for form, n in forms.items())
        lines.append(
            f"{part['name']:<20} {part['tensors']:>8} {size_text(part['bytes']):>10} "
            f"{count_text(part['parameters']):>11}  {shown}"
        )
    if "layers" in out:
        active = f"active for each token {count_text(out['active_parameters'])} (embedding not counted)"
        lines += ["", f"parameters: {count_text(out['parameters'])}, {active}"]
        as_stored = "" if out["weights_as_loaded"] else " (weights as stored: they could not be laid out as loaded)"
        gpu = f"each of {out['memory']['gpus']} GPUs" if out["memory"]["gpus"] > 1 else "it"
        for step in out["steps"]:
            batch, seconds = step["batch"], step["floor_seconds"]
            lines.append(
                f"decode step at batch {batch}, context {step['context']}: {gpu} reads {size_text(step['bytes'])}, "
                f"at least {seconds * 1e3:.3f} ms ({batch / seconds:.0f} tokens/s) at {out['bandwidth'] / 1e12:g} TB/s"
                f"{as_stored}"
            )
        cache, memory = out["cache"], out["memory"]
        lines.append("")
        for kind, state in cache["layers"].items():
            growth = f"{size_text(state['bytes_per_token'])} a token" if state["bytes_per_token"] else "no growth"
            count = f"{state['layers']} {kind} layer{'s' if state['layers'] > 1 else ''}"
            lines.append(f"cache of {count}: {growth}, {size_text(state['fixed_bytes'])} fixed")
        lines.append(
            f"cache of a sequence, rows in {cache['kv']} and index keys in {cache['index']}: "
            f"{size_text(cache['bytes_per_token'])} a token and {size_text(cache['fixed_bytes_per_sequence'])} fixed; "
            + ", ".join(f"{n} tokens {nbytes / GIB:.3f} GiB" for n, nbytes in cache["per_sequence"].items())
            + (
                ""
                if cache["longest_formats"] == (cache["kv"], cache["index"])
                else " ({} and {})".format(*cache["longest_formats"])
            )
        )
        each = f" on each of {memory['gpus']} GPUs (tensor parallel)" if memory["gpus"] > 1 else ""
        lines.append(
            f"memory for {memory['batch']} x {memory['context']} tokens{each}: weights {memory['weights'] / GIB:.2f} + "
            f"cache {memory['cache'] / GIB:.2f} + working memory, estimated, {memory['working'] / GIB:.2f} = "
            f"{memory['total'] / GIB:.2f} GiB{as_stored}"
        )
        if memory["gpus"] > MAX_GPUS:
            lines.append(f"note: dsv4 runs on {MAX_GPUS} GPU today; this is the layout planned for several")
        if "fit" in out and out["fit"]["fits"]:
            lines.append(out["fit"]["text"])
    lines.append("")
    lines += [f"warning: {warning}" for warning in out["warnings"]]
    lines += [f"problem: {problem}" for problem in out["problems"][1:]]
    return "\n".join([*lines, f"verdict: {out['verdict']}"])


def count_text(count: int) -> str:
    """`13.27 B` parameters."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
