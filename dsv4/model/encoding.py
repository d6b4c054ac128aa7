"""Chat messages to DeepSeek-V4's prompt, and the model's answer back to a message.

The format as DeepSeek publishes it in `encoding/encoding_dsv4.py`, for the first release ("v4": V4-Flash, V4-Pro) and
for the generation of 0731 and 0813 ("v4-0731"), which differ in the texts of the reasoning efforts only. Strings are raw;
nothing stands between turns:

    BOS [effort] [system] <｜User｜>question<｜Assistant｜><think>reasoning</think>answer EOS <｜User｜>...

Without thinking the model finds `</think>` where `<think>` would be. Where that file gives prompts that the model cannot
answer well (vllm issue 46256, pull 51262; TensorRT-LLM pull 18345), this follows DeepSeek's later deepseek-recipe:
`<｜Assistant｜>` is the last thing before every answer, also after a reminder, system text or another answer, and later
system text joins the first. Two more differences are on purpose: a user message that joins another user turn keeps its
task, and nothing that comes from a message ever becomes a control token.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsv4.model import encoding_source
from dsv4.model.encoding_messages import TASKS, Turn, drop_earlier, last_user, turns
from dsv4.model.encoding_tools import (
    DSML,
    END_THINK,
    THINK,
    Answer,
    AnswerStream,
    ChatPiece,
    Piece,
    render_calls,
    render_tools,
    split_controls,
    to_json,
)
from dsv4.model.tokenizer import BOS, EOS, Tokenizer

__all__ = ["EFFORTS", "FORMATS", "Answer", "ChatEncoding", "ChatPiece", "Messages"]

USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
FORMATS = ("v4", "v4-0731")
Messages = Sequence[Mapping[str, Any]]

# Word for word from encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash (REASONING_EFFORT_MAX) and of
# deepseek-ai/DeepSeek-V4-Flash-0731 (REASONING_EFFORT_PROMPTS), MIT; the model was trained on these texts.
_ABSOLUTE = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and \
rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_BEYOND = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem \
into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than \
any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
EFFORTS = {"v4": {"high": "", "max": _ABSOLUTE}, "v4-0731": {"low": "", "high": _ABSOLUTE, "max": _BEYOND}}
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class ChatEncoding:
    """Encodes chat messages for one checkpoint, and parses what the model answers.

    Messages are those of OpenAI's API: `role` and `content` (a text, or a list of text blocks), for an assistant also
    `reasoning_content` and `tool_calls`, for a tool result `tool_call_id`. Further roles of this model: `developer` and
    `latest_reminder`. Further fields: `tools` and `response_format` (of a system or developer message), `task`, `wo_eos`.

    `format` is "v4", "v4-0731" or None, if nothing in the checkpoint's folder says which; an effort is refused then.
    """

    def __init__(self, tokenizer: Tokenizer, format: str | None = "v4", source=None):
        if format is not None and format not in FORMATS:
            raise ValueError(f"format: found {format!r}, expected auto, {', '.join(FORMATS)}")
        self.tokenizer, self.format = tokenizer, format
        self._source = source  # the checkpoint's own encoder, or None

    @classmethod
    def from_folder(cls, folder, tokenizer: Tokenizer, format: str = "auto", source: str = "builtin") -> "ChatEncoding":
        """The encoding of a checkpoint folder; ValueError for V4.1's and for contradictory signs.

        `source="checkpoint"` runs the folder's own `encoding/*.py` or chat template in place of the code here. That is
        code from the checkpoint with all rights of this process: only do it with a checkpoint you trust.
        """
        if source not in ("builtin", "checkpoint"):
            raise ValueError(f"source: found {source!r}, expected builtin or checkpoint")
        found = encoding_source.detect_format(folder, tokenizer)
        own = encoding_source.load(folder) if source == "checkpoint" else None
        return cls(tokenizer, found if format == "auto" else format, own)

    def render(self, messages: Messages, **options) -> str:
        """The prompt as a string, for reading. Text that a user typed looks like a control token in it if it spells one;
        `encode` keeps them apart. Options as for `encode`."""
        return "".join(text for text, _ in self._pieces(messages, **options))

    def encode(self, messages: Messages, **options) -> list[int]:
        """The prompt as token ids, BOS once, ready for `Engine.generate`. Nothing in a message can act as a control token.

        thinking: whether the model reasons first. effort: how much it does then, "high" or "max", for v4-0731 also "low".
        tools: list of functions it may call. response_format: a JSON schema for the answer. Both become part of the
        system text. drop_thinking=False keeps the reasoning of earlier turns, as tools always do. generation_prompt=False
        leaves out the start of the answer. continue_final goes on with the last assistant message.
        ValueError "message N: field: ..." for messages that have no place in the format.
        """
        ids: list[int] = []
        text = ""
        for piece, control in [*self._pieces(messages, **options), ("", True)]:
            if not control:
                # One pass over all text between two control tokens: pieces on their own would be cut differently.
                text += piece
                continue
            if text:
                ids += self.tokenizer.encode(text, add_bos=False, parse_special=False)
                text = ""
            if piece:
                ids.append(self.tokenizer.bos_token_id if piece == BOS else self.tokenizer.token_id(piece))
        return ids

    def parse(self, output: str | Iterable[int], thinking: bool = False) -> Answer:
        """What the model wrote, as text or token ids from the start of its answer: reasoning, content, tool calls.

        Works for output that was cut off anywhere; `complete` says whether it was. Ids are more exact than text, in which
        a control token that was merely spelled out counts as one.
        """
        stream = self.stream(thinking)
        if isinstance(output, str):
            stream.feed(split_controls(output))
        else:
            for id in output:
                stream.push(int(id))
        stream.finish()
        return stream.answer

    def stream(self, thinking: bool = False, stop: Sequence[str] = ()) -> AnswerStream:
        """The same for an answer whose tokens are still to come."""
        return AnswerStream(self.tokenizer, thinking, stop)

    def reasons_next(self, prompt: Sequence[int]) -> bool:
        """Whether what follows a prompt is reasoning: `<think>` is open at its end."""
        controls = {}
        for literal in (BOS, EOS, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML, *map(_task_token, TASKS)):
            with contextlib.suppress(ValueError):  # not in this vocabulary
                controls[self.tokenizer.token_id(literal)] = literal
        return next((controls[id] for id in reversed(prompt) if id in controls), None) == THINK

    def check(self, thinking: bool, effort: str | None) -> str:
        """The text of an effort. ValueError if it is none of this format's."""
        if effort is None or (thinking and self._source is not None):  # the checkpoint's encoder knows its own efforts
            return ""
        if not thinking:
            raise ValueError(f"effort: found {effort!r} without thinking, expected thinking=True or no effort")
        if self.format is None:
            raise ValueError(
                f"effort: found {effort!r}, but the checkpoint's folder does not say whether its format is "
                f"{' or '.join(FORMATS)}, where efforts mean different things; name the format"
            )
        efforts = EFFORTS[self.format]
        if effort not in efforts:
            raise ValueError(f"effort: found {effort!r}, expected {', '.join(efforts)} for the format {self.format}")
        return efforts[effort]

    def _pieces(
        self,
        messages: Messages,
        thinking: bool = False,
        effort: str | None = None,
        tools=None,
        response_format=None,
        drop_thinking: bool = True,
        generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[Piece]:
        effort_text = self.check(thinking, effort)
        chat = turns(messages, tools, response_format)
        if continue_final:
            final = chat[-1]
            if final.role != "assistant":
                raise ValueError(f"message {final.index}: role: found {final.role}, expected assistant to go on with")
            final.unfinished = True
        drop = drop_thinking and not any(turn.tools for turn in chat)
        if self._source is not None:
            return self._source.pieces(chat, thinking, effort, drop, generation_prompt)
        if thinking and drop:
            chat = drop_earlier(chat)
        pieces: list[Piece] = [(BOS, True), (effort_text, False)]
        last = last_user(chat)
        if generation_prompt and chat[-1].role == "assistant" and not chat[-1].unfinished:
            last = len(chat)  # the new answer is a turn of its own, and what is there is earlier
        handed_over = False  # whether an answer can follow as it is: after a task token, or an unfinished one
        for index, turn in enumerate(chat):
            thinks = thinking and (not drop or index > last)
            if turn.role == "assistant":
                if not handed_over:
                    pieces += _handover(thinks)
                after_task = index > 0 and chat[index - 1].task is not None
                pieces += _assistant(turn, thinks and not after_task)
            else:
                pieces += _TURNS[turn.role](turn, index == 0)
            handed_over = turn.unfinished
            if turn.task is not None:
                after = chat[index + 1].role if index + 1 < len(chat) else "assistant"
                if after != "assistant":
                    raise ValueError(
                        f"message {turn.index}: task: found {turn.task!r} before a message of role {after}, expected it at "
                        "the end or before its answer"
                    )
                pieces += _handover(thinking) if turn.task == "action" else []
                pieces.append((_task_token(turn.task), True))
                handed_over = True
        if generation_prompt and not handed_over:
            pieces += _handover(thinking)
        return [piece for piece in pieces if piece[0]]


def _task_token(task: str) -> str:
    return f"<｜{task}｜>"


def _handover(thinks: bool) -> list[Piece]:
    return [(ASSISTANT, True), (THINK if thinks else END_THINK, True)]


def _system(turn: Turn, first: bool) -> list[Piece]:
    pieces: list[Piece] = [(turn.text, False)]
    if turn.tools:
        pieces += [("\n\n", False), *render_tools(turn.tools)]
    if turn.response_format:
        pieces.append(("\n\n" + RESPONSE_FORMAT + to_json(turn.response_format), False))
    return pieces


def _developer(turn: Turn, first: bool) -> list[Piece]:
    return [(USER, True), *_system(turn, first)]


def _user(turn: Turn, first: bool) -> list[Piece]:
    texts = [text if call is None else f"<tool_result>{text}</tool_result>" for text, call in turn.blocks]
    return [(USER, True), ("\n\n".join(texts), False)]


def _reminder(turn: Turn, first: bool) -> list[Piece]:
    return [(REMINDER, True), (turn.text, False)]


_TURNS = {"system": _system, "developer": _developer, "user": _user, "latest_reminder": _reminder}


def _assistant(turn: Turn, thinks: bool) -> list[Piece]:
    pieces: list[Piece] = []
    if thinks:
        pieces.append((turn.reasoning, False))
        # reasoning that is to be gone on with stays open
        if not (turn.unfinished and turn.reasoning and not turn.text and not turn.calls):
            pieces.append((END_THINK, True))
    pieces.append((turn.text, False))
    pieces += render_calls(turn.calls) if turn.calls else []
    return pieces if turn.unfinished else [*pieces, (EOS, True)]
