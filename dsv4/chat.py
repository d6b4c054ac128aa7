"""dsv4 chat: talk to a model in the terminal, or through a pipe with one message a line.

Answers go to stdout as they are made, reasoning dimmed (in a pipe: between <think> and </think>); everything else goes to
stderr. Ctrl-C stops an answer, not the program; what was said until then stays in the history.

With --tools the model may call functions. Nothing is ever run: a call is printed, and the next line that is typed is its
result, with which the model goes on.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from dsv4.cli import add_model_arguments, add_sampling_arguments, note, sampling_settings

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = """\
/undo           take back the last message and its answer
/reset          forget the conversation (the system prompt stays)
/system TEXT    set the system prompt; without a text, remove it
/help           this list
/quit           leave, as do /exit and Ctrl-D
//...           a message that begins with /
Ctrl-C          stop the answer
After the call of a tool the next line is its result; with several calls, one line for each in their order."""


def add_chat(commands) -> None:
    """The parser of `dsv4 chat`."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model. Commands inside:\n\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=chat, ignore_eos=False, logprobs=None)
    add_model_arguments(parser)

    talk = parser.add_argument_group("chat")
    talk.add_argument("--system", metavar="TEXT", help="system prompt")
    talk.add_argument("--thinking", action="store_true", help="let the model reason before it answers")
    talk.add_argument("--effort", metavar="LEVEL", help="how much it reasons: high or max, in later releases also low")
    talk.add_argument(
        "--tools", metavar="FILE", help="JSON list of functions that the model may call, as OpenAI's API takes them"
    )
    talk.add_argument("--hide-thinking", action="store_true", help="do not show the reasoning")
    talk.add_argument(
        "--encoding",
        choices=("auto", "v4", "v4-0731", "checkpoint"),
        default="auto",
        help="prompt format; auto finds out from the folder (default); checkpoint runs the folder's own encoding/*.py or "
        "chat template, which is code from the checkpoint: use it only with a checkpoint you trust",
    )

    add_sampling_arguments(parser, "per answer; default: no limit but the context")
    parser.add_argument("--quiet", action="store_true", help="no progress and no statistics")


def chat(args: argparse.Namespace) -> int:
    """`dsv4 chat`: check everything that can be checked without weights, load, talk."""
    import dsv4
    from dsv4.model.config import ModelConfig
    from dsv4.model.encoding import ChatEncoding
    from dsv4.model.tokenizer import Tokenizer

    settings = sampling_settings(args)
    dsv4.SamplingParams(**settings)
    ModelConfig.from_folder(args.model)  # so that a wrong folder is the first complaint
    source, format = ("checkpoint", "auto") if args.encoding == "checkpoint" else ("builtin", args.encoding)
    encoding = ChatEncoding.from_folder(args.model, Tokenizer.from_folder(args.model), format, source)
    encoding.check(args.thinking, args.effort)
    tools = None if args.tools is None else read_tools(args.tools, encoding)
    engine = dsv4.load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        max_batch=args.max_batch or 1,
        max_context=args.max_context,
        prefill_chunk=args.prefill_chunk,
        compile=not args.no_compile,
        progress=not args.quiet,
        activation=args.activation,
        deterministic=args.deterministic,
        kv=args.kv,
        index=args.index,
    )
    engine.encoding = encoding
    note(args, str(engine.load_report))
    return Talk(engine, args, settings, tools).run()


def read_tools(file: str, encoding) -> list:
    """The functions of a JSON file. ValueError for what the encoding cannot offer to a model."""
    try:
        tools = json.loads(Path(file).read_bytes())
        encoding.render([{"role": "user", "content": "?"}], tools=tools)
    except OSError as error:
        raise ValueError(f"--tools: {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--tools: {file}: {error}") from error
    if not tools:
        raise ValueError(f"--tools: {file}: found no functions, expected a list of at least one")
    return tools


class Talk:
    """One conversation: reads lines, keeps the history, prints answers."""

    def __init__(self, engine, args: argparse.Namespace, settings: dict, tools: list | None = None):
        self.engine, self.args, self.settings, self.tools = engine, args, settings, tools
        self.slot = engine.hold()  # where the conversation stays, so that only what is new is read
        self.system: str | None = args.system
        self.history: list[dict] = []
        self.calls: list[dict] = []  # of the last answer; as many `results` as were given so far
        self.results: list[dict] = []
        self.failed = False
        self.interactive = sys.stdin.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  gives input() editing and history
            note(args, "/help lists the commands, /quit or Ctrl-D leaves")

    def run(self) -> int:
        """Until the end of the input. Exit status 2 if a line of piped input failed: nobody may have read why."""
        while True:
            try:
                line = self.read()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)
                continue
            if line is None:
                return 2 if self.failed and not self.interactive else 0
            if line.startswith("/") and not line.startswith("//"):
                if self.command(line):
                    return 0
                continue
            line = line[1:] if line.startswith("//") else line
            if self.calls:
                self.result(line)
            elif line.strip():
                self.answer([*self.history, {"role": "user", "content": line}])

    def read(self) -> str | None:
        """The next line, None at the end."""
        prompt = f"result of {harmless(self.calls[len(self.results)]['function']['name'])}> " if self.calls else "> "
        try:
            if self.interactive:
                if sys.stdout.isatty():
                    return input(prompt)
                print(prompt, end="", file=sys.stderr, flush=True)
                return input()
            line = sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return None
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin: not text in the encoding of this terminal ({error})") from error
        return line.rstrip("\r\n") if line else None

    def command(self, line: str) -> bool:
        """Obey a command; True if it ends the program."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return True
        if name == "/undo":
            self.undo()
        elif name == "/reset":
            self.history, self.calls, self.results = [], [], []
        elif name == "/system":
            self.system = rest or None
        elif name == "/help":
            print(HELP, file=sys.stderr)
        else:
            self.complain(f"no command {name}; /help lists the commands, and // begins a message with /")
        return False

    def undo(self) -> None:
        """Take back the last message of the user's and all that followed."""
        asked = [number for number, message in enumerate(self.history) if message["role"] == "user"]
        if not asked:
            self.complain("there is nothing to undo")
            return
        note(self.args, f"(took back: {harmless(self.history[asked[-1]]['content']):.60})")
        self.history, self.calls, self.results = self.history[: asked[-1]], [], []

    def result(self, text: str) -> None:
        """Take the result of a call; after the last one the model goes on."""
        call = self.calls[len(self.results)]
        self.results.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if len(self.results) == len(self.calls):
            self.answer([*self.history, *self.results])

    def answer(self, messages: list[dict]) -> None:
        """Ask the model and print what it says. Messages that fail do not stay in the history."""
        self.results = []
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        printer = Printer(self.args.hide_thinking)
        stopped = False
        try:
            pieces = self.engine.stream_chat(
                [*system, *messages],
                thinking=self.args.thinking,
                effort=self.args.effort,
                tools=self.tools,
                slot=self.slot,
                progress=False if self.args.quiet else None,
                **self.settings,
            )
            with contextlib.closing(pieces):
                for piece in pieces:
                    printer.show(piece.kind, piece.text)
        except ValueError as error:
            self.complain(str(error) + ("; /reset begins anew" if self.history else ""))
            return
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            stopped = True
        finally:
            printer.end()
        if stopped:
            # Nothing was said yet: then the question is taken back too.
            if any(printer.said.values()):
                said = {"role": "assistant", "content": printer.said["content"]}
                self.history = [*messages, said | {"reasoning_content": printer.said["reasoning"]}]
                self.calls = []
            note(self.args, "(stopped)")
            return
        last = self.engine.last
        self.calls = last.tool_calls if self.tools else []
        self.history = [*messages, last.message | {"tool_calls": self.calls}]
        for call in self.calls:
            print(harmless(f"call of {call['function']['name']} {call['function']['arguments']}"), flush=True)
        if last.tool_calls and not self.tools:
            names = ", ".join(call["function"]["name"] for call in last.tool_calls)
            self.complain(f"the model called a tool ({names}), and chat has none; --tools offers some")
        elif last.unparsed:
            self.complain(f"the model called a tool in a way that cannot be read: {harmless(last.unparsed)!r:.300}")
        if last.finish_reason == "length":
            limit = "--max-new-tokens" if self.args.max_new_tokens else "the context; a larger --max-context gives more"
            note(self.args, f"(cut off at {limit})")
        timing = last.timing
        rate = f", {timing.tokens_per_second:.1f} tokens/s" if timing.tokens_per_second else ""
        kept = f", {timing.kept_tokens} not read again" if timing.kept_tokens else ""
        note(self.args, f"({timing.prompt_tokens} + {timing.new_tokens} tokens{kept}{rate})")

    def complain(self, text: str) -> None:
        self.failed = True
        print(f"dsv4: error: {text}", file=sys.stderr)


def harmless(text: str) -> str:
    """Without control characters: what a model says may not move the cursor or rename the window."""
    return "".join(char for char in text if (char >= " " and not "\x7f" <= char < "\xa0") or char in "\n\t")


class Printer:
    """Prints an answer as it comes, and keeps what was said."""

    def __init__(self, hide_thinking: bool):
        self.hide = hide_thinking
        self.terminal = sys.stdout.isatty()
        self.dim = self.terminal and not os.environ.get("NO_COLOR")
        self.said = {"reasoning": "", "content": ""}
        self._open = False  # inside the reasoning
        self._last = "\n"

    def show(self, kind: str, text: str) -> None:
        self.said[kind] += text
        if kind == "reasoning":
            if self.hide:
                return
            if not self._open:
                self._open = True
                self._write(DIM if self.dim else "<think>")
        elif self._open:
            self._close("\n\n")
        self._write(harmless(text) if self.terminal else text)

    def end(self) -> None:
        """End the line, also after an interruption."""
        if self._open:
            self._close("")
        if self._last != "\n":
            self._write("\n")

    def _close(self, gap: str) -> None:
        self._open = False
        self._write((PLAIN if self.dim else "</think>") + gap)

    def _write(self, text: str) -> None:
        if text:
            print(text, end="", flush=True)
            self._last = text[-1]
