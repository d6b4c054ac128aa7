"""dsv4 eval: lm-evaluation-harness with this model in it, or two configurations against each other (dsv4.eval_parity).

The harness finds no models outside its own package, so this starts its command line with the model registered. All
arguments but those listed here go to it unchanged.
"""

import argparse


def add_eval(commands) -> None:
    """The parser of `dsv4 eval`."""
    parser = commands.add_parser(
        "eval",
        help="measure accuracy with lm-evaluation-harness",
        description="Run lm-evaluation-harness on a checkpoint folder. Arguments that are not listed here go to the "
        "harness as they are: --tasks, --include_path, --limit, --batch_size (default here: 8), --apply_chat_template, "
        "--use_cache, --output_path, --log_samples, --gen_kwargs and others (lm-eval run --help). --model_args takes "
        "max_length, max_gen_toks, dtype (bf16, fp32), thinking, effort, prefill_chunk, compile, deterministic, "
        "activation (nvfp4), kv (bf16, fp8) and index (bf16, fp8, fp4).",
        epilog="example: dsv4 eval --model examples/tiny --include_path examples/eval --tasks dsv4_offline",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="FOLDER", help="checkpoint folder")
    pair = parser.add_argument_group("two configurations against each other, in place of the harness")
    pair.add_argument(
        "--parity",
        nargs=2,
        metavar=("A", "B"),
        help="how far their predictions differ; each FOLDER, FOLDER,dtype=fp32,device=cpu,activation=nvfp4,compile=False,"
        "prefill_chunk=64,deterministic=True,kv=fp8,index=fp4, or FOLDER,transformers,dtype=fp32,device=cpu for "
        "transformers' own model",
    )
    pair.add_argument("--texts", metavar="FILE", help="what to predict: plain text, or .jsonl with a field text")
    pair.add_argument("--items", type=int, default=100, metavar="N", help="texts to take at most; default: 100")
    pair.add_argument("--window", type=int, default=1024, metavar="N", help="tokens of each text; default: 1024")
    pair.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    known = parser.parse_known_args

    def forward_the_rest(args=None, namespace=None):
        namespace, rest = known(args, namespace)
        namespace.forwarded = rest
        return namespace, []

    # argparse.REMAINDER would not do: it swallows --model if a harness flag stands before it
    parser.parse_known_args = forward_the_rest
    parser.set_defaults(run=evaluate)


def evaluate(args: argparse.Namespace) -> int:
    """Start the harness; its own output follows. Or compare, with --parity."""
    if args.parity is not None:
        from dsv4.eval_parity import parity

        if args.model is not None or args.forwarded:
            raise ValueError(
                f"--parity goes with --texts, --items, --window and --json, found {args.model or args.forwarded[0]}"
            )
        if args.texts is None or args.items < 1 or args.window < 1:
            raise ValueError("--parity needs --texts FILE, and --items and --window of at least 1")
        return parity(args)
    if args.model is None:
        raise ValueError("give --model FOLDER, or --parity A B")
    if args.texts is not None or args.json:
        raise ValueError("--texts and --json belong to --parity; the harness writes JSON with --output_path")
    try:
        from lm_eval._cli.harness import HarnessCLI
    except ImportError as error:
        raise ValueError(f"dsv4 eval needs lm-eval ({error}); install it with: pip install 'dsv4[eval]'") from error
    import torch

    import dsv4
    import dsv4.eval  # registers the model
    from dsv4.eval_cache import keyed_path
    from dsv4.model.config import ModelConfig
    from dsv4.model.fingerprint import fingerprint

    ModelConfig.from_folder(args.model)  # a wrong folder shows before the harness reads all of its tasks
    command = HarnessCLI()._parser.parse_args(["run", *args.forwarded])
    settings = command.model_args or {}
    if command.model is not None or {"model", "pretrained"} & set(settings):
        raise ValueError("the model is given once, as dsv4 eval --model FOLDER")
    if command.config is None:  # else the file has them; the harness's own defaults are cuda:0 and 1
        command.device = command.device or ("cuda" if torch.cuda.is_available() else "cpu")
        command.batch_size = getattr(command, "batch_size", "8")
    if command.use_cache is not None:
        versions = {"dsv4": dsv4.__version__, "torch": torch.__version__}
        key = fingerprint(args.model, {"settings": settings, "versions": versions, "device": command.device})
        command.use_cache = keyed_path(command.use_cache, key)
    command.model, command.model_args = "dsv4", {"model": args.model, **settings}
    command.func(command)
    return 0
