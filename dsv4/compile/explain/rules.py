"""How torch's messages become plain words: tables of rules, in `breaks` for what ends a graph and in `guards` for what
compiles again."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """pattern is looked for in a message of torch; {name} in the texts is what its group `name` matched."""

    pattern: str
    title: str
    reason: str
    hint: str
