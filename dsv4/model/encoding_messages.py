"""Chat messages as users write them, checked and brought into the turns that V4's prompt format knows.

The format has a place for system text at the front only, where all of it goes (as in DeepSeek's own deepseek-recipe; their
first encoder left it bare between two turns). It has no role for tool results: they are part of a user turn, and so are
several user messages in a row. What is wrong with a message is refused with its index and field, because a prompt that the
model was never trained on gives bad answers and no error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TASKS = ("action", "query", "authority", "domain", "title", "read_url")
ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")


@dataclass
class Call:
    """A tool call of an assistant turn. `arguments` as given: a JSON text or an object."""

    name: str
    arguments: str | Mapping[str, Any]
    id: str | None = None


@dataclass
class Turn:
    """One turn of the prompt. `blocks` are the texts of a user turn: (text, None) or a tool result with the place of its
    call in the assistant turn before. `unfinished`: an assistant turn that the model is to go on with."""

    role: str
    index: int = 0  # of its first message
    text: str = ""
    blocks: list[tuple[str, int | None]] = field(default_factory=list)
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    response_format: Any = None
    task: str | None = None
    unfinished: bool = False


def turns(messages: Sequence[Mapping[str, Any]], tools=None, response_format=None) -> list[Turn]:
    """The turns of some messages. All system text is in one turn at the front, and so are `tools` and `response_format`.

    ValueError "message N: field: ..." for anything that has no place in the format. Fields not listed here are ignored,
    as other programs add their own.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise ValueError(f"messages: found {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise ValueError("messages: found an empty list, expected at least one message")
    found: list[Turn] = []
    system: Turn | None = None
    open_calls: list[Call] = []  # of the last assistant turn
    answered: set[int] = set()
    for index, message in enumerate(messages):
        check = _Check(index, message)
        role = check.role()
        offered, schema = check.tools(role), check.response_format(role)
        if role in ("user", "tool"):
            task = check.task() if role == "user" else None
            if role == "tool":
                place = _place_of_call(check, open_calls, answered)
                answered.add(place)
                block = (check.text("content"), place)
            else:
                block = (check.text("content"), None)
            last = found[-1] if found and found[-1].role == "user" else None
            # a task token ends a user turn, so that what comes after is a turn of its own
            if last is None or (role == "user" and last.task):
                found.append(Turn("user", index, blocks=[block], task=task))
            else:
                last.blocks.append(block)
                last.task = last.task or task
            continue
        turn = Turn(role, index)
        if role == "assistant":
            turn.calls, turn.reasoning = check.calls(), check.reasoning()
            turn.unfinished = bool(message.get("wo_eos", False))
            turn.text = check.text("content", optional=bool(turn.calls or turn.reasoning or turn.unfinished))
            turn.task = check.task()
            open_calls, answered = turn.calls, set()
        else:
            turn.tools, turn.response_format = offered, schema
            turn.text = check.text("content", optional=role == "system" and bool(offered or schema))
        if role == "developer":
            turn.task = check.task()
            if not turn.text:
                check.fail("content", "found an empty text", "the developer's text")
        if role == "system":
            system = turn if system is None else _joined(system, turn)
        else:
            found.append(turn)
    if tools or response_format:
        given = Turn(
            "system", tools=_tools(tools or [], "tools"), response_format=_schema(response_format, "response_format")
        )
        system = given if system is None else _joined(system, given)
    found = found if system is None else [system, *found]
    for turn in found:
        order = iter(sorted((block for block in turn.blocks if block[1] is not None), key=lambda block: block[1]))
        turn.blocks = [block if block[1] is None else next(order) for block in turn.blocks]
    return found


def last_user(found: Sequence[Turn]) -> int:
    """Index of the last user or developer turn, -1 if there is none."""
    return max((index for index, turn in enumerate(found) if turn.role in ("user", "developer")), default=-1)


def drop_earlier(found: list[Turn]) -> list[Turn]:
    """The turns without the reasoning, and without the developer turns, before the last user turn."""
    last = last_user(found)
    kept = []
    for index, turn in enumerate(found):
        if index < last and turn.role == "developer":
            continue
        if index < last:
            turn.reasoning = ""
        kept.append(turn)
    return kept


def _joined(first: Turn, later: Turn) -> Turn:
    """Two system turns as one."""
    for name in ("tools", "response_format"):
        if getattr(later, name) and getattr(first, name):
            raise ValueError(f"message {first.index}: {name}: found them here and given once more, expected them once")
    text = "\n\n".join(filter(None, (first.text, later.text)))
    tools, schema = first.tools or later.tools, first.response_format or later.response_format
    return Turn("system", first.index, text, tools=tools, response_format=schema)


def _schema(value, where: str) -> Mapping[str, Any] | None:
    """The JSON schema of a response_format, bare or as OpenAI's API wraps it."""
    if not value:
        return None
    if isinstance(value, Mapping) and value.get("type") in ("json_schema", "json_object", "text"):
        wrapped = value.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
        if value["type"] == "json_schema" and isinstance(schema, Mapping):
            return schema
    elif isinstance(value, Mapping):
        return value
    raise ValueError(f"{where}: found {value!r:.80}, expected a JSON schema")


def _place_of_call(check: "_Check", calls: list[Call], answered: set[int]) -> int:
    """Which of the last assistant turn's calls a tool message answers."""
    id = check.message.get("tool_call_id")
    if not calls:
        check.fail("role", "found a tool result", "an assistant message with tool_calls before it")
    if id is None:  # allowed where order alone tells which call is meant
        free = [place for place, call in enumerate(calls) if place not in answered and call.id is None]
        if not free:
            check.fail("tool_call_id", "found none", "the id of one of the calls before it")
        return free[0]
    places = [place for place, call in enumerate(calls) if call.id == id]
    if not places:
        known = ", ".join(repr(call.id) for call in calls)
        check.fail("tool_call_id", f"found {id!r}", f"one of the calls before it ({known})")
    if places[0] in answered:
        check.fail("tool_call_id", f"found a second result for {id!r}", "one result for each call")
    return places[0]


def _tools(value, where: str) -> list[Mapping[str, Any]]:
    """The function objects of a list of tools, each `{"type": "function", "function": {...}}` or the function itself."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{where}: found {type(value).__name__}, expected a list of tools")
    functions = []
    for number, tool in enumerate(value):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}[{number}]: found {tool!r:.80}, expected a function with a name")
        functions.append(function)
    return functions


class _Check:
    """Reads the fields of one message; every complaint begins with "message N: field:"."""

    def __init__(self, index: int, message):
        self.index, self.message = index, message
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index}: found {type(message).__name__}, expected an object with a role")

    def fail(self, name: str, found: str, expected: str):
        raise ValueError(f"message {self.index}: {name}: {found}, expected {expected}")

    def role(self) -> str:
        role = self.message.get("role")
        if role not in ROLES:
            self.fail("role", f"found {role!r:.60}", f"one of {', '.join(ROLES)}")
        return role

    def text(self, name: str, optional: bool = False) -> str:
        """A text, or a list of {"type": "text", "text": ...} blocks, which a blank line joins."""
        value = self.message.get(name)
        if value is None:
            if not optional:
                self.fail(name, "found none", "a text")
            return ""
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            parts = []
            for number, block in enumerate(value):
                kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
                if kind != "text" or not isinstance(block.get("text"), str):
                    self.fail(f"{name}[{number}]", f"found {kind!r}", "a text block; this model reads text only")
                parts.append(block["text"])
            return "\n\n".join(parts)
        if not isinstance(value, str):
            self.fail(name, f"found {type(value).__name__}", "a text or a list of text blocks")
        return value

    def reasoning(self) -> str:
        for name in ("reasoning_content", "reasoning"):
            if self.message.get(name) is not None:
                return self.text(name)
        return ""

    def task(self) -> str | None:
        task = self.message.get("task")
        if task is not None and task not in TASKS:
            self.fail("task", f"found {task!r:.60}", f"one of {', '.join(TASKS)}")
        return task

    def tools(self, role: str) -> list[Mapping[str, Any]]:
        value = self.message.get("tools")
        if not value:
            return []
        if role not in ("system", "developer"):
            self.fail("tools", f"found tools in a message of role {role}", "them in the system message")
        return _tools(value, f"message {self.index}: tools")

    def response_format(self, role: str):
        value = self.message.get("response_format")
        if value and role not in ("system", "developer"):
            self.fail("response_format", f"found one in a message of role {role}", "it in the system message")
        return _schema(value, f"message {self.index}: response_format")

    def calls(self) -> list[Call]:
        value = self.message.get("tool_calls")
        if not value:
            return []
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            self.fail("tool_calls", f"found {type(value).__name__}", "a list of calls")
        calls = []
        for number, entry in enumerate(value):
            where = f"tool_calls[{number}]"
            function = entry.get("function", entry) if isinstance(entry, Mapping) else None
            if not isinstance(function, Mapping):
                self.fail(where, f"found {type(entry).__name__}", "an object with a function")
            name, arguments = function.get("name"), function.get("arguments", "{}")
            if not isinstance(name, str) or not name or any(char in name for char in '"<>\n'):
                self.fail(f"{where}.name", f"found {name!r:.60}", "a function name")
            if not isinstance(arguments, (str, Mapping)):
                self.fail(f"{where}.arguments", f"found {type(arguments).__name__}", "a JSON text or an object")
            id = entry.get("id")
            if id is not None and id in [call.id for call in calls]:
                self.fail(f"{where}.id", f"found {id!r} a second time", "an id for each call")
            calls.append(Call(name, arguments, id))
        return calls
