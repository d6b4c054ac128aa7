"""dsv4 explain: why a step is not one graph, not one CUDA graph, or not fast; of a model or of any PyTorch callable.

Exit status: 0; 1 if something is found that --fail-on names, or if it got worse than --baseline; 2 for bad arguments.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from dsv4.cli import add_cache_arguments
from dsv4.compile.explain.baseline import Change, compare, comparison_text
from dsv4.compile.explain.report import STAGES, Report
from dsv4.compile.explain.text import text

# What --fail-on takes, and the stage that decides it.
FAILURES = {"break": 2, "recompile": 3, "skip": 4, "sync": 5, "alloc": 5}
MODEL_OPTIONS = ("device", "dtype", "max_context", "max_batch", "kv", "index")  # of dsv4.load
STDOUT = "-"


def add_explain(commands) -> None:
    """The parser of `dsv4 explain`."""
    parser = commands.add_parser(
        "explain",
        help="say why a step is not one graph, not one CUDA graph, or not fast",
        description="Look at the steps of a model, or at any PyTorch callable, in a process of its own: custom ops, graph "
        "breaks, recompilations, the CUDA graph, the running kernels, agreement with eager, and the ladder of backends. "
        "Without a GPU stage 5 is skipped, and stage 4 says only what an uncompiled call shows.",
        epilog="examples: dsv4 explain --model examples/tiny --html report.html;  dsv4 explain my_module:step --inputs "
        "my_module:inputs --fail-on break,recompile",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to look at")
    what.add_argument("callable", nargs="?", metavar="MODULE:CALLABLE", help="a function or nn.Module; also FILE.py:NAME")
    what.add_argument("--inputs", metavar="MODULE:CALLABLE", help="a function that returns its arguments; default: none")
    what.add_argument("--model", metavar="FOLDER", help="a checkpoint folder, of which prefill and decode are looked at")
    what.add_argument("--device", help="of the model: cpu, cuda, cuda:1; default: cuda if there is one")
    what.add_argument("--dtype", choices=("bf16", "fp32"), help="of the model's activations; default: the checkpoint's")
    what.add_argument("--max-context", type=int, metavar="N", help="of the model: tokens per sequence; default: 1024")
    what.add_argument("--max-batch", type=int, metavar="N", help="of the model: sequences at a time; default: 1")
    add_cache_arguments(what, default=None)
    what.add_argument(
        "--stages", metavar="1,2,3", help="default: all of " + ", ".join(f"{n} {s}" for n, s in STAGES.items())
    )
    what.add_argument("--time-limit", type=float, default=600.0, metavar="S", help="seconds for each stage; default: 600")
    output = parser.add_argument_group("output")
    output.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help="write JSON; without FILE, instead of text")
    output.add_argument("--html", metavar="FILE", help="write one page that needs no network")
    check = parser.add_argument_group("checks, with exit status 1")
    check.add_argument("--fail-on", metavar="KINDS", help=f"if any is found; of {','.join(FAILURES)}")
    check.add_argument("--baseline", metavar="OLD.json", help="if there are more of these than in this file of --json")
    parser.set_defaults(run=explain)


def explain(args: argparse.Namespace) -> int:
    """`dsv4 explain`: check the arguments, look, print, write, and judge."""
    stages = parse_stages(args.stages)
    kinds = parse_kinds(args.fail_on, stages)
    check_subject(args)
    for flag, file in (("--json", args.json), ("--html", args.html)):
        if file not in (None, STDOUT):
            check_writable(flag, Path(file))
    baseline = None if args.baseline is None else load_baseline(args.baseline)
    if sys.stderr.isatty():
        print(
            f"dsv4: looking at {args.model or args.callable}; each stage compiles it, which takes a while", file=sys.stderr
        )
    reports = look(args, stages)
    data = json.dumps({"reports": [report.to_json() for report in reports]})
    # The files first: who reads the text may go away before its end, as `| head` does.
    if args.json not in (None, STDOUT):
        write_whole(Path(args.json), data)
    if args.html is not None:
        from dsv4.compile.explain.html import page

        write_whole(Path(args.html), page(reports))
    if args.json == STDOUT:
        print(data)
    else:
        print(text(reports, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    reasons = failures(reports, kinds)
    if baseline is not None:
        changes = compare(baseline, reports)
        print(comparison_text(changes), file=sys.stderr if args.json == STDOUT else sys.stdout)
        reasons += worse(changes)
    for reason in reasons:
        print(f"dsv4: failed: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def look(args: argparse.Namespace, stages: set[int]) -> list[Report]:
    """The reports that the arguments ask for."""
    from dsv4.compile.explain.run import explain_callable, explain_model

    if args.model is None:
        return explain_callable(args.callable, args.inputs, stages, time_limit=args.time_limit)
    options = {name: getattr(args, name) for name in MODEL_OPTIONS if getattr(args, name) is not None}
    return explain_model(args.model, stages, time_limit=args.time_limit, **options)


def failures(reports: list[Report], kinds: list[str]) -> list[str]:
    """Why --fail-on says no: findings of these kinds, and stages that should have looked for them and could not.

    A stage that was skipped for want of a GPU fails nothing, but a warning says so: nobody should take silence for health.
    """
    found = []
    for report in reports:
        broken = any(stage.status == "error" for stage in report.stages)
        for kind in kinds:
            times = sum(finding.count for finding in report.findings(kind))
            stage = report.stage(FAILURES[kind])
            if times:
                found.append(f"{report.subject}: {kind} found, {times} in all")
            elif stage is None or stage.status == "error" or (stage.status == "skipped" and broken):
                found.append(f"{report.subject}: {kind} is not known, since stage {FAILURES[kind]} did not run")
            elif stage.status == "skipped":
                reason = stage.summary.removeprefix("skipped: ")
                print(f"dsv4: warning: {report.subject}: --fail-on {kind} was not checked: {reason}", file=sys.stderr)
    return found


def worse(changes: list[Change]) -> list[str]:
    """Why --baseline says no: more of what --fail-on can name, or a stage that now fails. Numbers are only shown."""
    kinds = {*FAILURES, "error"}
    return [f"{c.subject}: {c.text}" for c in changes if c.direction == "worse" and c.kind in kinds]


def parse_stages(flag: str | None) -> set[int]:
    """Numbers of stages from `1,2,3`; all of them without a flag."""
    if flag is None:
        return set(STAGES)
    try:
        stages = {int(part) for part in flag.split(",")}
    except ValueError:
        stages = set()
    if not stages or not stages <= set(STAGES):
        raise ValueError(f"--stages: found {flag!r}, expected numbers from 1 to {max(STAGES)} with commas between them")
    return stages


def parse_kinds(flag: str | None, stages: set[int]) -> list[str]:
    """Kinds from `break,sync`, each of them decided by a stage that runs."""
    kinds = [] if flag is None else flag.split(",")
    for kind in kinds:
        if kind not in FAILURES:
            raise ValueError(f"--fail-on: found {kind!r}, expected some of {','.join(FAILURES)}")
        if FAILURES[kind] not in stages:
            raise ValueError(f"--fail-on {kind} needs stage {FAILURES[kind]}, which --stages leaves out")
    return kinds


def check_subject(args: argparse.Namespace) -> None:
    """ValueError unless there is exactly one thing to look at, written as it should be."""
    if args.callable is None and args.model is None:
        taken = f"; --json took {args.json!r} as its file, so put --json last" if ":" in (args.json or "") else ""
        raise ValueError(f"found nothing to look at, expected MODULE:CALLABLE or --model FOLDER{taken}")
    if args.callable is not None and args.model is not None:
        raise ValueError(f"found both {args.callable} and --model {args.model}, expected one of them")
    for flag, spec in (("MODULE:CALLABLE", args.callable), ("--inputs", args.inputs)):
        if spec is not None and not all(spec.rpartition(":")[::2]):
            raise ValueError(f"{flag}: found {spec!r}, expected a module or file, a colon and a name, as my_module:step")
    if args.model is not None and args.inputs is not None:
        raise ValueError("--inputs belongs to MODULE:CALLABLE; the steps of a model have inputs of their own")
    for name in MODEL_OPTIONS:
        if args.model is None and getattr(args, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} belongs to --model; a callable runs with the inputs that it is given"
            )
    if not args.time_limit > 0:
        raise ValueError(f"--time-limit must be more than 0 seconds, found {args.time_limit:g}")


def check_writable(flag: str, file: Path) -> None:
    """ValueError now rather than after minutes."""
    file = file.resolve()
    if not file.parent.is_dir():
        raise ValueError(f"{flag}: the folder {file.parent} does not exist")
    if file.exists() and not file.is_file():
        raise ValueError(f"{flag}: {file} is no regular file, and would be replaced")
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"{flag}: the folder {file.parent} cannot be written to")


def load_baseline(file: str) -> list[Report]:
    """The reports of --baseline; ValueError for anything that --json did not write."""
    try:
        return Report.load(file)
    except OSError as error:
        raise ValueError(f"--baseline: {file}: {error.strerror}") from error


def write_whole(file: Path, content: str) -> None:
    """The file with this content or, if that fails, as it was."""
    file = file.resolve()  # of a link, what it points to
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        aside.write_text(content, encoding="utf-8")
        os.replace(aside, file)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        aside.unlink(missing_ok=True)
