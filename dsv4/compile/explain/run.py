"""Runs the stages in a process of their own and gathers what they find.

What is explained may crash or hang that process: the stage it was in gets a row that says so, and another process goes on
with the next stage. Nothing here imports torch before it is needed.
"""

from collections.abc import Callable

from dsv4.compile.explain.process import Child
from dsv4.compile.explain.report import STAGES, Finding, Report, Stage
from dsv4.compile.explain.verdict import verdict

TIME_LIMIT = 600.0  # seconds for each stage
LOADING = 6  # times the limit: to import, and to load a model


def explain_callable(
    spec: str, inputs: str | None = None, stages: set[int] | None = None, *, time_limit: float = TIME_LIMIT
) -> list[Report]:
    """One report on the callable that `spec` names, "package.module:callable" or "path/to/file.py:callable".

    inputs names, in the same way, a callable that returns the arguments: a tuple, (args tuple, kwargs dict), or a list
    of either for a sweep of shapes. Default: no arguments. stages: numbers in report.STAGES, default all. time_limit:
    seconds for each stage. Raises ValueError if spec or inputs cannot be resolved; anything that goes wrong in a stage
    is a finding of the report.
    """
    return _explain({"spec": spec, "inputs": inputs, "folder": None}, spec, stages, time_limit)


def explain_model(
    folder: str, stages: set[int] | None = None, *, time_limit: float = TIME_LIMIT, **load_options
) -> list[Report]:
    """Two reports on the model in a checkpoint folder: its prefill step and its decode step, as the engine compiles them.

    load_options: as in `dsv4.load`, where they are numbers or names (device="cpu", dtype="fp32", max_context=1024). Raises
    ValueError if the folder or an option is bad.
    """
    return _explain({"spec": "", "inputs": None, "folder": folder, "options": load_options}, folder, stages, time_limit)


def explain(fn: Callable, *args, **kwargs) -> Report:
    """The report on fn(*args, **kwargs), for any callable, also a lambda, a closure or an nn.Module.

    It runs in a fork of this process, so nothing here is disturbed. Where CUDA is in use a fork is not possible: then it
    runs in this process, what torch.compile had compiled is compiled again at its next call, and a crash of what is
    explained is a crash; `dsv4 explain module:callable` has none of this.
    """
    import torch

    from dsv4.compile.explain.subject import Call, Subject, original
    from dsv4.compile.explain.worker import leave_stacks, sender, work

    if not callable(fn):
        raise ValueError(f"explain needs a callable and its arguments, found a {type(fn).__name__}")
    name = getattr(fn, "__qualname__", type(fn).__qualname__)

    def make() -> list[Subject]:
        return [Subject(name, original(fn), lambda: [Call(args, kwargs)])]

    stages = sorted(STAGES)
    if torch.cuda.is_initialized():
        return _here(lambda send: work(make, stages, set(), send), name)[0]

    def forked(done: set[tuple[int, int]]) -> Child:
        def child(answer) -> None:
            leave_stacks()
            torch.set_num_threads(1)  # OpenMP's threads do not live on in a fork
            with torch._inductor.config.patch(compile_threads=1):
                work(make, stages, done, sender(answer))

        return Child.fork(child)

    return _gather(forked, name, stages, TIME_LIMIT)[0]


def _explain(job: dict, name: str, stages: set[int] | None, time_limit: float) -> list[Report]:
    numbers = sorted(STAGES if stages is None else stages)
    unknown = [number for number in numbers if number not in STAGES]
    if unknown or not numbers:
        raise ValueError(f"stages must be some of {', '.join(map(str, STAGES))}, found {unknown or 'none'}")
    job = {"options": {}, **job, "stages": numbers}
    return _gather(
        lambda done: Child.spawn("dsv4.compile.explain.worker", {**job, "done": sorted(done)}), name, numbers, time_limit
    )


class _Gathered:
    """What has come in so far."""

    def __init__(self, name: str):
        self.names = [name]
        self.environment: dict = {}
        self.stages: dict[tuple[int, int], Stage] = {}
        self.running: tuple[int, int] | None = None
        self.alone: set[int] = set()  # subjects whose plain callable has run to its end

    def take(self, message: dict) -> None:
        """One message of the worker; ValueError if it says that there is nothing to explain."""
        if "invalid" in message:
            raise ValueError(message["invalid"])
        if "subjects" in message:
            self.names = message["subjects"]
        self.environment = message.get("environment", self.environment)
        if "begin" in message:
            self.running = tuple(message["begin"])
        if "alone" in message:
            self.alone.add(message["alone"])
        if "stage" in message:
            index, data = message["stage"]
            stage = Stage(**{**data, "findings": tuple(Finding(**finding) for finding in data["findings"])})
            self.stages[(index, stage.number)] = stage
            self.running = None

    def reports(self) -> list[Report]:
        """One for each subject."""
        found = []
        for index, name in enumerate(self.names):
            stages = tuple(stage for (i, _), stage in sorted(self.stages.items()) if i == index)
            found.append(Report(name, verdict(stages), stages, self.environment))
        return found


def _gather(start: Callable[[set[tuple[int, int]]], Child], name: str, numbers: list[int], limit: float) -> list[Report]:
    """Start processes until every stage of every subject has run or has ended one."""
    gathered = _Gathered(name)
    while True:
        child = start(set(gathered.stages))
        try:
            ended = _listen(child, gathered, limit)
        finally:
            child.close()
        missing = [(i, n) for i in range(len(gathered.names)) for n in numbers if (i, n) not in gathered.stages]
        if not missing:
            return gathered.reports()
        lost = gathered.running or missing[0]
        gathered.stages[lost] = _ended_in(lost[1], *ended)
        # What would end every further process in the same way is not tried again.
        if gathered.running is None:
            hopeless, why = missing, f"{ended[0]} while loading"
        elif lost[0] not in gathered.alone:
            hopeless = [pair for pair in missing if pair[0] == lost[0]]
            why = f"the callable itself ends its process (see {STAGES[lost[1]]})"
        else:
            hopeless, why = [], ""
        for pair in hopeless:
            gathered.stages.setdefault(pair, Stage(pair[1], "skipped", f"skipped: {why}"))
        gathered.running = None
        if len(gathered.stages) == len(gathered.names) * len(numbers):
            return gathered.reports()


def _listen(child: Child, gathered: _Gathered, limit: float) -> tuple[str, str]:
    """Take a process's messages to its end, or to the end of the time: how it ended, and what it printed."""
    while True:
        try:
            message = child.answer(limit * (LOADING if gathered.running is None else 1))
        except TimeoutError:
            child.stack()
            return f"no end after {limit:g} s", child.output()
        if message is None:
            return f"the process ended: {child.ended()}", child.output()
        gathered.take(message)


def _ended_in(number: int, how: str, output: str) -> Stage:
    """The row for a stage that ended its process, with the line that its last words name."""
    from dsv4.compile.explain.frames import innermost, parse_stack, where

    start = max(map(output.rfind, ("Fatal Python error", "Current thread", "Traceback (most recent call last)")))
    place = innermost(parse_stack(output[max(start, 0) :]))
    title = "hang" if how.startswith("no end") else "crash"
    finding = Finding(
        "error",
        title,
        f"{how[0].upper()}{how[1:]}, in stage {number} ({STAGES[number]}).",
        "The line is where it was then." if place else "",
        *where(place),
        details={"output": output[-4000:]},
    )
    return Stage(number, "error", f"{title}: {how}", findings=(finding,))


def _here(run: Callable[[Callable[[dict], None]], None], name: str) -> list[Report]:
    """Run a worker in this process, and leave torch's counters and random state as they were."""
    import copy

    import torch

    gathered = _Gathered(name)
    counters = copy.deepcopy(torch._dynamo.utils.counters)
    with torch.random.fork_rng():
        run(gathered.take)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.counters.update(counters)
    return gathered.reports()
