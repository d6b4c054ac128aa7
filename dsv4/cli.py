"""The `dsv4` command. Text goes to stdout; progress, warnings and statistics go to stderr.

Exit status: 0, 1 for a check that says no (inspect, explain), 2 for input that cannot be used (one line `dsv4: error:
...`), 130 after Ctrl-C.
Modules that need torch are imported where they are used, so that `dsv4 --help` does not wait for them.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

# What generation_config.json may hold besides sampling settings without anything being lost.
_NOT_SAMPLING = frozenset(
    {
        "do_sample",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "transformers_version",
        "max_length",
        "max_new_tokens",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    }
)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX_DEFAULT_BATCH = 8


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and leave the process."""

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: the process's) and return its exit status."""
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except ValueError as error:
        print(f"dsv4: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader went away, as in `dsv4 generate ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        return 141


def build_parser() -> Parser:
    """The parser with all subcommands; each sets `run`, a function of the parsed arguments that returns the status."""
    from dsv4 import __version__
    from dsv4.bench import add_bench
    from dsv4.chat import add_chat
    from dsv4.eval_command import add_eval
    from dsv4.explain_command import add_explain
    from dsv4.inspection import add_inspect
    from dsv4.quantize import add_quantize

    parser = Parser(prog="dsv4", description="DeepSeek-V4 inference in plain PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dsv4 {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_generate(commands)
    add_chat(commands)
    add_bench(commands)  # further commands get a module of their own, as this one
    add_inspect(commands)
    add_eval(commands)
    add_explain(commands)
    add_quantize(commands)
    return parser


def add_generate(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from a checkpoint folder",
        description="Generate text from a checkpoint folder, for prompts of one of the three kinds below.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=generate)
    add_model_arguments(parser)

    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="prompt text, - for stdin; repeatable")
    prompt.add_argument("--prompt-file", action="append", metavar="FILE", help="read a prompt from a file, - for stdin")
    prompt.add_argument("--prompt-ids", action="append", metavar="1,2,3", help="a prompt as token ids, taken as they are")

    sampling = add_sampling_arguments(parser, "default: until a stop or the end of the context")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")

    output = parser.add_argument_group("output")
    output.add_argument("--logprobs", type=int, metavar="N", help="log-probability of each token and of the N most likely")
    output.add_argument("--json", action="store_true", help="one JSON object per completion")
    output.add_argument("--no-stream", action="store_true", help="print a single completion at its end, not as it comes")
    output.add_argument("--prefill-only", action="store_true", help="time the prompts and generate nothing")
    output.add_argument("--quiet", action="store_true", help="no progress and no statistics")


def add_sampling_arguments(parser: argparse.ArgumentParser, length: str):
    """The flags that `sampling_settings` reads, in a group of their own, which is returned. `length` is the help text of
    --max-new-tokens."""
    sampling = parser.add_argument_group("sampling", "defaults come from the checkpoint's generation_config.json")
    sampling.add_argument("--max-new-tokens", "--max-tokens", type=int, metavar="N", help=length)
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K", help="0 or -1 is off")
    sampling.add_argument("--top-p", type=float, metavar="P", help="1 is off")
    sampling.add_argument("--min-p", type=float, metavar="P", help="0 is off")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X", help="1 is off")
    sampling.add_argument("--seed", type=int, metavar="N", help="default: a new one each time")
    sampling.add_argument("--greedy", action="store_true", help="always take the most likely token")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    return sampling


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `dsv4.load`, for every subcommand that loads a model."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, metavar="FOLDER", help="checkpoint folder: config.json, safetensors")
    model.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda if there is one")
    model.add_argument("--dtype", choices=("bf16", "fp32"), help="of activations; default: the checkpoint's")
    model.add_argument("--max-context", type=int, default=4096, metavar="N", help="tokens per sequence, prompt included")
    model.add_argument(
        "--max-batch",
        type=int,
        metavar="N",
        help=f"sequences at a time; default: all prompts, up to {_MAX_DEFAULT_BATCH}",
    )
    add_cache_arguments(model)
    model.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="prompt tokens a step; default: 2048 on CUDA, 512 on a CPU"
    )
    model.add_argument("--no-compile", action="store_true", help="run the same step without torch.compile")
    model.add_argument("--deterministic", action="store_true", help="the same bits whatever else is in flight; slower")
    model.add_argument(
        "--activation", choices=("nvfp4",), help="quantise what meets 4-bit weights too: W4A4, emulated and slow"
    )


def add_cache_arguments(parser, default: str | None = "auto") -> None:
    """The formats of the cache, for every subcommand that makes one."""
    long = "auto (default): plain up to 65536 tokens of context"
    parser.add_argument("--kv", choices=("auto", "bf16", "fp8"), default=default, help=f"cache rows; {long}, then fp8")
    parser.add_argument(
        "--index", choices=("auto", "bf16", "fp8", "fp4"), default=default, help=f"index keys; {long}, then fp4"
    )


def generate(args: argparse.Namespace) -> int:
    """`dsv4 generate`: check everything that can be checked without weights, load, generate, print."""
    import dsv4

    prompts = read_prompts(args)
    settings = sampling_settings(args)
    dsv4.SamplingParams(**settings)  # refuses bad values now; loading can take minutes
    check_prompts(prompts, args)
    engine = dsv4.load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        max_batch=min(len(prompts), _MAX_DEFAULT_BATCH) if args.max_batch is None else args.max_batch,
        max_context=args.max_context,
        prefill_chunk=args.prefill_chunk,
        compile=not args.no_compile,
        progress=not args.quiet,
        activation=args.activation,
        deterministic=args.deterministic,
        kv=args.kv,
        index=args.index,
    )
    note(args, str(engine.load_report))
    if args.prefill_only:
        return prefill_only(engine, prompts, args)
    start = time.perf_counter()
    progress = False if args.quiet else None
    if len(prompts) == 1 and not args.json and not args.no_stream and engine.tokenizer is not None:
        print_stream(engine.stream(prompts[0], progress=progress, **settings))
        completions = [engine.last]
        print_logprobs(engine.last, engine.tokenizer)
    else:
        completions = engine.generate(prompts, progress=progress, **settings)
        for index, completion in enumerate(completions):
            if args.json:
                print(json.dumps(completion_json(index, completion), ensure_ascii=False), flush=True)
                continue
            if len(completions) > 1:
                print(f"--- prompt {index + 1} of {len(completions)} ---")
            # without a tokenizer there is no text, only ids
            print(completion.text if engine.tokenizer is not None else ",".join(map(str, completion.token_ids)))
            print_logprobs(completion, engine.tokenizer)
    note(args, statistics(completions, time.perf_counter() - start, engine.load_report))
    return 0


def prefill_only(engine, prompts: list, args: argparse.Namespace) -> int:
    for index, prompt in enumerate(prompts):
        timing = engine.prefill(prompt, progress=False if args.quiet else None)
        rate = timing.prompt_tokens / timing.prefill_seconds
        if args.json:
            values = {"index": index, "prompt_tokens": timing.prompt_tokens, "prefill_seconds": timing.prefill_seconds}
            print(json.dumps(values | {"prefill_tokens_per_second": rate}), flush=True)
        note(args, f"{timing.prompt_tokens} prompt tokens in {timing.prefill_seconds:.3f} s, {rate:.1f} tokens/s")
    return 0


def read_prompts(args: argparse.Namespace) -> list[str] | list[list[int]]:
    """The prompts of one of the three flags. ValueError unless exactly one of them is used."""
    flags = {"--prompt": args.prompt, "--prompt-file": args.prompt_file, "--prompt-ids": args.prompt_ids}
    used = [flag for flag, values in flags.items() if values]
    if len(used) != 1:
        raise ValueError(f"found {' and '.join(used) or 'no prompt'}, expected one of {', '.join(flags)}")
    values = flags[used[0]]
    if used[0] == "--prompt-ids":
        return [parse_ids(value) for value in values]
    if values.count("-") > 1:
        raise ValueError(f"{used[0]}: found - more than once, but stdin can be read only once")
    if used[0] == "--prompt-file":
        return [read_text(value) for value in values]
    return [read_text("-") if value == "-" else value for value in values]


def parse_ids(text: str) -> list[int]:
    """`1,2,3` as a list of ints."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--prompt-ids: found {text!r}, expected integers with commas between them") from error


def read_text(file: str) -> str:
    """Content of a UTF-8 file, or of stdin for `-`, without the newline at its end, which is the editor's or echo's."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise ValueError(f"--prompt-file: {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file: {file}: not UTF-8 text ({error})") from error


def sampling_settings(args: argparse.Namespace) -> dict:
    """Keyword arguments of `Engine.generate` from the flags and, where there is none, from generation_config.json."""
    flags = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    settings = generation_defaults(Path(args.model)) | flags
    if args.greedy:
        settings["temperature"] = 0.0
    if settings.get("temperature") == 0:
        unused = {name for name in ("top_k", "top_p", "min_p") if name in flags}
        unused |= {"temperature"} if flags.get("temperature") else set()
        ignored = [f"--{name.replace('_', '-')}" for name in _SAMPLING if name in unused]
        ignored += ["--seed"] if args.seed is not None else []
        if ignored:
            warn(f"greedy decoding ignores {', '.join(ignored)}")
    if args.ignore_eos:
        settings.pop("stop_token_ids", None)
    for name in ("max_new_tokens", "seed", "stop", "logprobs"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    return settings | {"ignore_eos": args.ignore_eos}


def generation_defaults(folder: Path) -> dict:
    """Sampling settings and further end tokens from a checkpoint's generation_config.json; empty if it has none."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    from dsv4.model.config import read_json_object

    values = {name: value for name, value in read_json_object(file).items() if value is not None}
    settings = {name: values[name] for name in _SAMPLING if name in values}
    if values.get("do_sample") is False:
        settings["temperature"] = 0.0
    eos = values.get("eos_token_id", [])
    settings["stop_token_ids"] = eos if isinstance(eos, list) else [eos]
    ignored = [name for name in values if name not in _NOT_SAMPLING and name not in _SAMPLING and not name.startswith("_")]
    if ignored:
        warn(f"{file}: ignored {', '.join(sorted(ignored))}")
    return settings


def check_prompts(prompts: list, args: argparse.Namespace) -> None:
    """ValueError for a prompt that is empty or does not fit --max-context, before the weights are read."""
    empty = next((index for index, prompt in enumerate(prompts) if not prompt), None)
    if empty is not None:
        raise ValueError(f"prompt {empty} is empty")
    if not (Path(args.model) / "config.json").is_file():
        return  # not a checkpoint folder, and dsv4.load says so
    if isinstance(prompts[0], str):
        from dsv4.model.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_folder(args.model)
        prompts = [tokenizer.encode(prompt) for prompt in prompts]
    new = 0 if args.prefill_only else args.max_new_tokens or 1
    for index, ids in enumerate(prompts):
        if len(ids) + new > args.max_context:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens and {new} new ones were asked for, "
                f"which is more than --max-context {args.max_context}"
            )


def print_stream(pieces) -> None:
    """Print text as it comes, and end the line also if it is interrupted."""
    last = ""
    try:
        for last in pieces:
            print(last, end="", flush=True)
    finally:
        if not last.endswith("\n"):
            print(flush=True)


def print_logprobs(completion, tokenizer) -> None:
    """One line a token: log-probability, text, then the most likely tokens. Nothing if they were not asked for."""

    def show(token: int) -> str:
        """A token's text; its bytes if they are part of a character, its id if it has none."""
        data = b"" if tokenizer is None else tokenizer.token_bytes(token, skip_special=False)
        try:
            return repr(data.decode()) if data else f"#{token}"
        except UnicodeDecodeError:
            return repr(data)

    for entry in completion.logprobs or []:
        top = "  ".join(f"{show(token)} {logprob:.4f}" for token, logprob in entry.top.items())
        print(f"{entry.logprob:9.4f}  {show(entry.token_id)}" + (f"  |  {top}" if top else ""))


def completion_json(index: int, completion) -> dict:
    """A completion as plain values for --json."""
    timing = completion.timing
    fields = ("prompt_tokens", "new_tokens", "prefill_seconds", "time_to_first_token", "decode_seconds")
    out = {
        "index": index,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_token_ids": completion.prompt_token_ids,
        "token_ids": completion.token_ids,
        "timing": {name: getattr(timing, name) for name in (*fields, "tokens_per_second")},
    }
    if completion.logprobs is not None:
        out["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "top": [{"token_id": token, "logprob": logprob} for token, logprob in entry.top.items()],
            }
            for entry in completion.logprobs
        ]
    return out


def statistics(completions: list, seconds: float, load_report) -> str:
    """The last line on stderr."""
    loading = f"loaded in {load_report.load_seconds:.1f} s, compiled in {load_report.compile_seconds:.1f} s"
    prompt_tokens = sum(completion.timing.prompt_tokens for completion in completions)
    new_tokens = sum(completion.timing.new_tokens for completion in completions)
    if len(completions) == 1:
        timing = completions[0].timing
        return (
            f"{prompt_tokens} prompt tokens, first token after {timing.time_to_first_token:.3f} s, "
            f"{new_tokens} new tokens at {timing.tokens_per_second:.1f} tokens/s, "
            f"ended by {completions[0].finish_reason}; {loading}"
        )
    return (
        f"{len(completions)} completions, {prompt_tokens} prompt tokens, {new_tokens} new tokens in {seconds:.2f} s, "
        f"{new_tokens / seconds:.1f} tokens/s altogether; {loading}"
    )


def note(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        print(text, file=sys.stderr)


def warn(text: str) -> None:
    print(f"dsv4: warning: {text}", file=sys.stderr)
