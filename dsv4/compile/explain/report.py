"""What `dsv4 explain` finds out, as plain data: a report of stages, a stage of findings and of numbers.

It travels from the subprocess that looks to the process that prints, so everything here is JSON: to_json, from_json.
"""

import dataclasses
import json
from dataclasses import dataclass, field

# What a finding says is wrong. --fail-on takes the names up to `alloc`; `error` is a stage that met an exception.
KINDS = ("break", "recompile", "skip", "sync", "alloc", "copy", "op", "difference", "error", "note")

STAGES = {
    1: "ops",  # schema, kernels, fake, opcheck, declared mutations
    2: "graphs",  # graphs and breaks
    3: "recompiles",  # guards over a sweep of shapes
    4: "capture",  # one CUDA graph, or why not
    5: "step",  # the running step: kernels, gaps, syncs, copies, allocations
    6: "agreement",  # eager against compiled against replayed
    7: "ladder",  # eager, aot_eager, inductor, inductor with a CUDA graph
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing (kind "note")."""

    kind: str  # one of KINDS
    title: str  # a few words
    reason: str = ""  # plain sentence: what happens and why it matters
    hint: str = ""  # what to change, concretely
    file: str = ""
    line: int = 0
    source: str = ""  # the source line
    module: str = ""  # path of the nn.Module, "layers.*.attn" where folded
    count: int = 1  # how often, with identical findings of repeated layers folded
    details: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """What one stage found. `data` holds its numbers:

    1: ops [{name, schema, kernels, mutates, tags, calls}]               (those that are not torch's own)
    2: graphs [{id, ops, modules}], calls [id], layers [{name, graphs, breaks}], failed (compiling raised)
                                                                         (the graphs as one call runs them, and
                                                                         one entry a repeated layer, in order)
    3: sweep [{shape, compiled}]                                         (whether that call compiled again)
    4: captured, why, static_bytes, copied_bytes, pool_bytes (if captured)
    5: kernels [{name, module, origin, count, us}], timeline [{name, module, start_us, us}], nodes, nodes_per_layer,
       gap_us, ms, bytes, floor_ms, syncs, copies, allocations
    6: pairs [{a, b, max_abs, max_rel, first_module}]
    7: rungs [{name, ok, seconds, first_seconds, error}]
    """

    number: int
    status: str  # "ok", "found" (something is wrong), "skipped" (summary says why), "error"
    summary: str  # one line
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()
    data: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in STAGES."""
        return STAGES[self.number]


@dataclass(frozen=True)
class Report:
    """Everything about one callable."""

    subject: str  # "my_module:step" or "examples/tiny (decode)"
    verdict: str  # one line
    stages: tuple[Stage, ...]
    environment: dict = field(default_factory=dict)  # torch, CUDA, device, python, platform, versions

    def findings(self, *kinds: str) -> list[Finding]:
        """The findings of these kinds, of all kinds without any, in the order of the stages."""
        return [f for stage in self.stages for f in stage.findings if not kinds or f.kind in kinds]

    def stage(self, number: int) -> Stage | None:
        """The stage of this number, None if it did not run."""
        return next((stage for stage in self.stages if stage.number == number), None)

    def to_json(self) -> dict:
        """Plain data for json.dumps."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> "Report":
        """The report that `to_json` gave; ValueError for anything else."""
        try:
            stages = tuple(
                Stage(**{**stage, "findings": tuple(Finding(**finding) for finding in stage["findings"])})
                for stage in data["stages"]
            )
            return cls(data["subject"], data["verdict"], stages, data["environment"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a report of dsv4 explain: {error!r}; expected the file that --json wrote") from error

    @classmethod
    def load(cls, path: str) -> list["Report"]:
        """The reports in a file that --json wrote; ValueError if it is not one."""
        with open(path) as file:
            try:
                data = json.load(file)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is not JSON ({error}); expected the file that --json wrote") from error
        if not isinstance(data, dict) or not isinstance(data.get("reports"), list):
            raise ValueError(f"{path} has no list of reports; expected the file that --json wrote")
        return [cls.from_json(report) for report in data["reports"]]
