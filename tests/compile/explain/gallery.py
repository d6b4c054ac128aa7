"""Callables that keep torch.compile or a CUDA graph from working, each beside its fixed twin.

explain must give each exactly one row, at the line marked `# row`, with a hint that turns it into its twin; the twin is
clean. `python -m tests.compile.explain.gallery` runs all of them and prints what was found, as JSON.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from dsv4.compile.explain.subject import Subject, calls_from
from dsv4.compile.explain.worker import look
from tests.compile.explain import gallery_breaks, gallery_numbers, gallery_state  # noqa: F401
from tests.compile.explain.gallery_case import CASES, Case


def found_in(one: Case, function: Callable, inputs: Callable) -> list[dict]:
    """The findings of a case's stage on a callable, without those that only inform."""
    subject = Subject(one.name, function, lambda: calls_from(inputs(), one.name))
    [stage] = look(subject, 0, [one.stage], lambda message: None)
    return [asdict(finding) for finding in stage.findings if finding.kind != "note"]


def main() -> None:
    """Run the cases, or those named."""
    torch.set_num_threads(1)
    answer, sys.stdout = sys.stdout, sys.stderr  # the callables print
    found = {}
    for name, one in CASES.items():
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            broken = found_in(one, one.broken, one.inputs) if one.broken is not None else []
            found[name] = {"broken": broken, "fixed": found_in(one, one.fixed, one.fixed_inputs)}
    json.dump(found, answer)


if __name__ == "__main__":
    main()
