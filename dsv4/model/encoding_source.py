"""What a checkpoint folder says about its prompt format, and its own encoder as an alternative to ours.

DeepSeek's releases carry no chat template but a Python file, `encoding/encoding_dsv4.py`. To tell formats apart it is
read, not run. Running it needs an explicit request, as it is code from the checkpoint.
"""

import ast
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

from dsv4.model.config import read_json_object
from dsv4.model.encoding_messages import Turn
from dsv4.model.encoding_tools import DSML, END_THINK, THINK, Piece, to_json
from dsv4.model.tokenizer import BOS, EOS, Tokenizer

ASSISTANT = "<｜Assistant｜>"
_LITERALS = (BOS, EOS, "<｜User｜>", ASSISTANT, "<｜latest_reminder｜>", THINK, END_THINK, DSML)
_CONTROL = re.compile("|".join([*map(re.escape, _LITERALS), r"<｜[a-z_]+｜>"]))
_V41 = "this checkpoint has the prompt format of DeepSeek-V4.1, another model that dsv4 does not run"


def detect_format(folder, tokenizer: Tokenizer | None = None) -> str | None:
    """The format, "v4" or "v4-0731", or None if the folder does not say. ValueError for V4.1, or if its files disagree.

    config.json and tokenizer.json are the same in both; only the folder's encoder or chat template tells.
    """
    folder = Path(folder)
    config = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "41" in str(config.get("model_type")) or any("V41" in str(name) for name in config.get("architectures") or []):
        raise ValueError(f"{folder}: {_V41}")
    if tokenizer is not None and _has_token(tokenizer, "<｜System｜>"):
        raise ValueError(f"{folder}: {_V41}")
    signs = {}
    for file in _encoder_files(folder):
        signs[file.name] = _format_of_encoder(file)
    template = _template(folder)
    if template is not None:
        signs["chat template"] = _format_of_template(template)
    if "v4.1" in signs.values():
        raise ValueError(f"{folder}: {_V41}")
    found = sorted({format for format in signs.values() if format is not None})
    if len(found) > 1:
        told = ", ".join(f"{name} is {format}" for name, format in signs.items() if format is not None)
        raise ValueError(f"{folder}: prompt format is ambiguous ({told}); name the format")
    return found[0] if found else None


def load(folder) -> "FileEncoder | TemplateEncoder":
    """The folder's own encoder. Runs code of the checkpoint, unless it has a chat template only."""
    folder = Path(folder)
    files = _encoder_files(folder)
    if len(files) > 1:
        raise ValueError(f"{folder / 'encoding'}: found {', '.join(f.name for f in files)}, expected one encoder")
    if files:
        return FileEncoder(files[0])
    template = _template(folder)
    if template is None:
        raise ValueError(f"{folder}: found no encoding/encoding*.py and no chat template, expected one as the encoder")
    return TemplateEncoder(template, folder)


class FileEncoder:
    """DeepSeek's `encode_messages` from a file of the checkpoint."""

    def __init__(self, file: Path):
        spec = importlib.util.spec_from_file_location(f"checkpoint_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # someone else's code can raise anything
            raise ValueError(f"{file}: does not run ({type(error).__name__}: {error})") from error
        self.file = file
        self.encode_messages: Callable[..., str] = getattr(module, "encode_messages", None)
        if not callable(self.encode_messages):
            raise ValueError(f"{file}: found no function encode_messages")

    def pieces(self, chat: list[Turn], thinking, effort, drop, generation_prompt) -> list[Piece]:
        """The prompt in pieces. Where the file always begins an answer, or never does, that is set right."""
        options = {"thinking_mode": "thinking" if thinking else "chat", "drop_thinking": drop}
        if effort is not None:
            options["reasoning_effort"] = effort
        messages = _messages(chat)
        try:
            prompt = self.encode_messages(messages, **options)
        except Exception as error:
            raise ValueError(f"{self.file}: {type(error).__name__}: {error}") from error
        pieces = _control_pieces(prompt, f"{self.file}")
        begun = pieces[-1][0] in (THINK, END_THINK) and pieces[-2][0] == ASSISTANT
        if begun and not generation_prompt:
            return pieces[:-2]
        if generation_prompt and not begun and not chat[-1].unfinished and chat[-1].task is None:
            return [*pieces, (ASSISTANT, True), (THINK if thinking else END_THINK, True)]
        return pieces


class TemplateEncoder:
    """A Jinja chat template, in the sandbox that transformers uses for such."""

    def __init__(self, template: str, folder: Path):
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ValueError("a chat template needs jinja2; pip install jinja2") from error

        def refuse(message):
            raise ValueError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _template_json
        environment.globals["raise_exception"] = refuse
        self.where, self._error = f"{folder}: chat template", TemplateError
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise ValueError(f"{self.where}: {error}") from error

    def pieces(self, chat: list[Turn], thinking, effort, drop, generation_prompt) -> list[Piece]:
        if chat[-1].unfinished:
            raise ValueError(f"{self.where}: going on with an assistant message is not supported with a chat template")
        messages = _messages(chat)
        values = {"messages": messages, "tools": messages[0].get("tools"), "reasoning_effort": effort}
        values |= {"add_generation_prompt": generation_prompt, "bos_token": BOS, "eos_token": EOS, "drop_thinking": drop}
        values |= {"thinking": thinking, "enable_thinking": thinking}
        values |= {"thinking_mode": "thinking" if thinking else "chat"}
        try:
            prompt = self._template.render({name: value for name, value in values.items() if value is not None})
        except (self._error, ValueError, TypeError) as error:
            raise ValueError(f"{self.where}: {error}") from error
        return _control_pieces(prompt, self.where)


def _template_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _control_pieces(prompt, where: str) -> list[Piece]:
    """A finished prompt at its control tokens, BOS exactly once."""
    if not isinstance(prompt, str):
        raise ValueError(f"{where}: gave {type(prompt).__name__}, expected a prompt as text")
    while prompt.startswith(BOS):
        prompt = prompt[len(BOS) :]
    pieces, at = [(BOS, True)], 0
    for match in _CONTROL.finditer(prompt):
        pieces += [(prompt[at : match.start()], False), (match.group(), True)]
        at = match.end()
    return [piece for piece in [*pieces, (prompt[at:], False)] if piece[0]]


def _messages(chat: list[Turn]) -> list[dict]:
    """Turns as messages again, in the one spelling that DeepSeek's file takes.

    ValueError if a text spells a control token: a foreign encoder gives one string, in which both look the same.
    """
    messages: list[dict] = []
    calls: list = []  # of the last assistant turn
    for turn in chat:
        if turn.role == "user":
            ids = [call.id or str(place) for place, call in enumerate(calls)]
            new = [{"role": "user", "content": text} for text, _ in turn.blocks]
            for message, (_, place) in zip(new, turn.blocks, strict=True):
                message |= {} if place is None else {"role": "tool", "tool_call_id": ids[place]}
        else:
            new = [{"role": turn.role, "content": turn.text}]
        if turn.role == "assistant":
            calls = turn.calls
        functions = [
            {"name": call.name, "arguments": call.arguments if isinstance(call.arguments, str) else to_json(call.arguments)}
            for call in turn.calls
        ]
        fields = {
            "reasoning_content": turn.reasoning,
            "tool_calls": [
                {"id": call.id or str(place), "type": "function", "function": functions[place]}
                for place, call in enumerate(turn.calls)
            ],
            "tools": [{"type": "function", "function": function} for function in turn.tools],
            "response_format": turn.response_format,
            "task": turn.task,
            "wo_eos": turn.unfinished,
        }
        new[-1] |= {name: value for name, value in fields.items() if value}
        match = _CONTROL.search(json.dumps(new, ensure_ascii=False))
        if match:
            raise ValueError(
                f"message {turn.index}: found the control token {match.group()!r} in its text, which the checkpoint's "
                "encoder cannot keep apart; use the built-in encoding"
            )
        messages += new
    return messages


def _encoder_files(folder: Path) -> list[Path]:
    return sorted(file for file in (folder / "encoding").glob("encoding*.py") if file.is_file())


def _format_of_encoder(file: Path) -> str | None:
    """What the names that DeepSeek's file assigns tell, without running it."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{file}: not a Python file that can be read ({error})") from error
    names = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    if "REASONING_EFFORT_MAPPINGS" in names or "<｜System｜>" in text:
        return "v4.1"
    if "REASONING_EFFORT_PROMPTS" in names:
        return "v4-0731"
    return "v4" if "REASONING_EFFORT_MAX" in names else None


def _format_of_template(template: str) -> str | None:
    if "<｜System｜>" in template:
        return "v4.1"
    if "Reasoning Effort: Beyond maximum" in template:
        return "v4-0731"
    return "v4" if "Reasoning Effort: Absolute maximum" in template else None


def _template(folder: Path) -> str | None:
    """The folder's chat template, from a file of its own or from tokenizer_config.json."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json_object(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # several with names; the one called default is meant for chat
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _has_token(tokenizer: Tokenizer, literal: str) -> bool:
    try:
        tokenizer.token_id(literal)
    except ValueError:
        return False
    return True
