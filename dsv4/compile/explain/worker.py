"""The process that looks: it runs the stages on the subjects and sends what they find, one JSON object a line.

Messages, in order: {"environment"}, {"subjects": names}, and for every stage of every subject {"begin": [subject, stage]}
and {"stage": [subject, stage as data]}; {"alone": subject} once the plain callable has run. {"invalid": text} instead of
the subjects if they cannot be had.
"""

import dataclasses
import faulthandler
import importlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator

import torch

from dsv4.compile.explain.frames import place_of_error, where
from dsv4.compile.explain.report import STAGES, Finding, Stage
from dsv4.compile.explain.subject import Subject, from_spec

Send = Callable[[dict], None]


def main() -> None:
    """Do one job: a JSON object on stdin, which names the descriptor to answer on."""
    leave_stacks()
    job = json.load(sys.stdin)
    with os.fdopen(job["answer"], "w") as answer:
        work(lambda: subjects_of(job), job["stages"], {tuple(pair) for pair in job["done"]}, sender(answer))


def leave_stacks() -> None:
    """Have a crash of this process, and SIGUSR1 from whoever has waited too long, leave a stack in stderr."""
    faulthandler.enable(sys.__stderr__)
    faulthandler.register(signal.SIGUSR1, sys.__stderr__, all_threads=False, chain=False)


def subjects_of(job: dict) -> list[Subject]:
    """The subjects that a job names."""
    if job["folder"] is None:
        return [from_spec(job["spec"], job["inputs"])]
    from dsv4.compile.explain.model import from_folder

    return from_folder(job["folder"], **job["options"])


def sender(file) -> Send:
    """Writes messages to a file, each at once: the process may not live to write the next."""

    def send(message: dict) -> None:
        file.write(json.dumps(message, default=str) + "\n")
        file.flush()

    return send


def work(make: Callable[[], list[Subject]], stages: list[int], done: set[tuple[int, int]], send: Send) -> None:
    """Run the stages on the subjects that `make` gives, except those (subject, stage) that are done."""
    send({"environment": environment()})
    try:
        subjects = make()
    except ValueError as error:
        send({"invalid": str(error)})
        return
    send({"subjects": [subject.name for subject in subjects]})
    for index, subject in enumerate(subjects):
        numbers = [number for number in stages if (index, number) not in done]
        for stage in look(subject, index, numbers, send):
            send({"stage": [index, dataclasses.asdict(stage)]})


def look(subject: Subject, index: int, numbers: list[int], send: Send) -> Iterator[Stage]:
    """Run the stages one after another. If the callable fails by itself, the first says so and the others are skipped; so
    are, if it does not compile, those that only look at what is compiled."""
    fails = False
    for position, number in enumerate(numbers):
        send({"begin": [index, number]})
        start = time.perf_counter()
        if position == 0:
            error = fails_alone(subject)
            if error is not None:
                yield failed(number, error, "the callable itself raises")
                rest = f"skipped: the callable itself raises (see {STAGES[number]})"
                yield from (Stage(other, "skipped", rest) for other in numbers[1:])
                return
            send({"alone": index})
        if fails and number in (3, 6):  # they would only say it again
            yield Stage(number, "skipped", f"skipped: it does not compile (see {STAGES[2]})")
            continue
        try:
            stage = importlib.import_module(f"dsv4.compile.explain.{STAGES[number]}").run(subject)
        except (Exception, SystemExit) as error:  # whatever is explained, the other stages go on
            stage = failed(number, error, "the stage met an exception")
        fails = fails or (number == 2 and stage.data.get("failed", False))
        yield dataclasses.replace(stage, seconds=time.perf_counter() - start)


def fails_alone(subject: Subject) -> BaseException | None:
    """What the plain callable raises, None if it runs."""
    try:
        with subject.context():
            subject.calls()[0].run(subject.function)
    except (Exception, SystemExit) as error:  # see look
        return error
    return None


def failed(number: int, error: BaseException, what: str) -> Stage:
    """The stage for an exception."""
    place = place_of_error(error)
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    finding = Finding(
        "error",
        what,
        f"{text}.",
        "Make the callable run by itself first." if "callable" in what else "",
        *where(place),
        details={"error": str(error)},
    )
    return Stage(number, "error", f"{what}: {text}", findings=(finding,))


def environment() -> dict:
    """Versions and devices."""
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "device": "none",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        try:
            found["device"] = torch.cuda.get_device_name()
        except RuntimeError as error:  # a fork of a process that has asked for devices cannot use them
            found["device"] = str(error).splitlines()[0]
    return found


if __name__ == "__main__":
    main()
