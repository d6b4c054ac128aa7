"""Tool calls in V4's markup (DSML), to text and back, and the answer of the model taken apart as it arrives.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="search">
    <｜DSML｜parameter name="query" string="true">river</｜DSML｜parameter>
    <｜DSML｜parameter name="limit" string="false">5</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Of all this only `｜DSML｜` is a token of its own. A value with string="true" is raw text, any other is JSON.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsv4.model.encoding_messages import Call
from dsv4.model.tokenizer import BOS, EOS, TextStream, Tokenizer

THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
Piece = tuple[str, bool]  # text, and whether it is a control token

# What the model was trained on, word for word: encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash, the same in
# DeepSeek-V4-Flash-0731 and in the copies of vLLM and SGLang (MIT).
TOOLS_SECTION = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_END = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"

_CONTROLS = re.compile("|".join(map(re.escape, (BOS, EOS, THINK, END_THINK, DSML))))


def split_controls(text: str) -> list[Piece]:
    """A text of ours, or a decoded answer, at the control tokens that it spells."""
    pieces, at = [], 0
    for match in _CONTROLS.finditer(text):
        pieces += [(text[at : match.start()], False), (match.group(), True)]
        at = match.end()
    return [piece for piece in [*pieces, (text[at:], False)] if piece[0]]


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def render_tools(functions: Sequence) -> list[Piece]:
    """The section of the system text that offers tools."""
    schemas = "\n".join(to_json(function) for function in functions)
    return [*split_controls(TOOLS_SECTION), (schemas + TOOLS_END, False)]


def render_calls(calls: Sequence[Call]) -> list[Piece]:
    """The block of tool calls at the end of an assistant turn."""
    pieces: list[Piece] = []

    def add(*texts: str) -> None:
        """Texts with the DSML token between them."""
        for number, text in enumerate(texts):
            pieces.extend([(DSML, True)] if number else [])
            pieces.append((text, False))

    add("\n\n<", "tool_calls>\n")
    for call in calls:
        add("<", f'invoke name="{call.name}">\n')
        for number, (name, value) in enumerate(_arguments(call).items()):
            plain = isinstance(value, str)
            text = value if plain else to_json(value)
            add("\n" * (number > 0) + "<", f'parameter name="{name}" string="{str(plain).lower()}">{text}</', "parameter>")
        add("\n</", "invoke>\n")
    add("</", "tool_calls>")
    return pieces


def _arguments(call: Call) -> dict:
    """A call's arguments by name; a text that is no JSON object becomes one argument of the name "arguments"."""
    if not isinstance(call.arguments, str):
        return dict(call.arguments)
    try:
        values = json.loads(call.arguments)
    except ValueError:
        values = None
    return values if isinstance(values, dict) else {"arguments": call.arguments}


@dataclass
class Answer:
    """An answer of the model taken apart. `tool_calls` are those that are whole, as OpenAI's API writes them.

    `complete`: it ended by itself, its reasoning was closed, and its tool calls are well formed. `unparsed` is the text
    from the first malformed or cut off tool call on.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict] = field(default_factory=list)
    complete: bool = False
    unparsed: str = ""

    def message(self) -> dict:
        """The answer as a message for the next request."""
        message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class ChatPiece(NamedTuple):
    """A piece of an answer on its way; `kind` is "reasoning" or "content"."""

    kind: str
    text: str


_MARK = "\udcff"  # stands for the DSML token; decoded text never holds a lone surrogate
_OPENER = re.compile(r"\n{0,2}<?\Z")  # what may stand before the DSML token that begins the tool calls
_INVOKE = re.compile(
    rf'\s*<{_MARK}invoke name="(?P<name>.*?)"\s*>\s*'
    rf'(?P<body>(?:<{_MARK}parameter name="[^{_MARK}]*?" string="(?:true|false)">[^{_MARK}]*</{_MARK}parameter>\s*)*)'
    rf"</{_MARK}invoke>",
    re.DOTALL,
)
_PARAMETER = re.compile(
    rf'<{_MARK}parameter name="(.*?)" string="(true|false)">([^{_MARK}]*)</{_MARK}parameter>', re.DOTALL
)


class AnswerStream:
    """Takes an answer apart while its tokens arrive, whole or cut off anywhere.

    `push` tokens, or `feed` text, then `finish`; the pieces they return are the reasoning and the content as they become
    certain, and `answer` is the result. Tool calls are in `answer` only, since half a call is of no use. With ids a
    control token is one by its id, so that text which merely spells it is text. `stop` ends the answer as in TextStream,
    but not its reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool, stop: Sequence[str] = ()):
        self.answer = Answer()
        self._kind = "reasoning" if thinking else "content"  # or "calls", "end"
        self._closed = not thinking
        self._ended = False
        self._held = ""  # may belong to the opener of the tool calls
        self._calls = ""
        self._tokenizer, self._stop = tokenizer, stop
        self._text = TextStream(tokenizer, self._stops())
        self._controls = {}
        for literal in (EOS, THINK, END_THINK, DSML):
            with contextlib.suppress(ValueError):  # no such token, so it cannot come
                self._controls[tokenizer.token_id(literal)] = literal
        self._controls |= dict.fromkeys(tokenizer.eos_token_ids, EOS)

    def push(self, id: int) -> list[ChatPiece]:
        """One more token."""
        if self._text.stopped:
            return []
        control = self._controls.get(id)
        if control is None:
            return self.feed([(self._text.push(id), False)])
        rest = self._text.flush()
        if self._text.stopped:
            return self.feed([(rest, False)])
        out = self.feed([(rest, False), (control, True)])
        self._text = TextStream(self._tokenizer, self._stops())
        return out

    def _stops(self) -> Sequence[str]:
        return () if self._kind == "reasoning" else self._stop

    def feed(self, pieces: Iterable[Piece]) -> list[ChatPiece]:
        """Some text, with control tokens marked as such."""
        out: list[ChatPiece] = []
        for text, control in pieces:
            if text and self._kind != "end":
                out += self._control(text) if control else self._plain(text)
        return out

    def finish(self) -> list[ChatPiece]:
        """The rest, when nothing follows. Sets `answer`."""
        out = self._plain(self._text.flush()) if self._kind != "end" else []
        out += self._flush()
        whole = True
        if self._calls:
            self.answer.tool_calls, rest, whole = parse_calls(self._calls)
            self.answer.unparsed = rest.replace(_MARK, DSML)
        self._kind = "end"
        self.answer.complete = self._ended and self._closed and whole
        return out

    def _plain(self, text: str) -> list[ChatPiece]:
        if self._kind == "calls":
            self._calls += text
            return []
        text = self._held + text
        at = _OPENER.search(text).start()
        self._held = text[at:]
        return self._emit(text[:at])

    def _control(self, token: str) -> list[ChatPiece]:
        begun = bool(self._held or (self.answer.content if self._kind == "content" else self.answer.reasoning))
        if token == EOS:
            self._ended = True
            out = self._flush()
            self._kind = "end"
            return out
        if self._kind == "calls":
            self._calls += _MARK if token == DSML else token
            return []
        if token == DSML and self._held.endswith("<"):
            self._held, self._kind, self._calls = "", "calls", "<" + _MARK
            return []
        if token == END_THINK and self._kind == "reasoning":
            out = self._flush()
            self._kind, self._closed = "content", True
            return out
        if token == END_THINK and not begun:  # the prompt has it already
            return []
        if token == THINK and not begun:
            if self._kind == "content" and not self.answer.reasoning:  # thinks although it was not asked to
                self._kind, self._closed = "reasoning", False
            return []
        return [] if token == BOS else self._flush() + self._emit(token)

    def _flush(self) -> list[ChatPiece]:
        held, self._held = self._held, ""
        return self._emit(held)

    def _emit(self, text: str) -> list[ChatPiece]:
        if not text or self._kind not in ("reasoning", "content"):
            return []
        setattr(self.answer, self._kind, getattr(self.answer, self._kind) + text)
        return [ChatPiece(self._kind, text)]


def parse_calls(block: str) -> tuple[list[dict], str, bool]:
    """Of a block from its first `<` on, with marks for DSML tokens: the whole calls, what is left after them, and whether
    that is because it ends as it should."""
    opener = f"<{_MARK}tool_calls>"
    if not block.startswith(opener):
        return [], block, False
    calls: list[dict] = []
    at = len(opener)
    while match := _INVOKE.match(block, at):
        values = _PARAMETER.findall(match["body"])
        names = [name for name, _, _ in values]
        if len(set(names)) < len(names):  # which of the two was meant is anyone's guess
            break
        arguments = ", ".join(f"{to_json(name)}: {_json_value(text, plain)}" for name, plain, text in values)
        function = {"name": match["name"], "arguments": "{" + arguments + "}"}
        calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
        at = match.end()
    rest = block[at:].strip()
    whole = bool(calls) and rest == f"</{_MARK}tool_calls>"
    return calls, "" if whole else rest, whole


def _json_value(text: str, plain: str) -> str:
    """A parameter's value as JSON text; what claims to be JSON and is not becomes a string."""
    if plain == "true":
        return to_json(text)
    try:
        json.loads(text)
    except ValueError:
        return to_json(text)
    return text
