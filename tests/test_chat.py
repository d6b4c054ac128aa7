"""`Engine.chat` on the shipped model, and `dsv4 chat`: a fake engine for the talk, the real one in a pseudo-terminal."""

import io
import json
import os
import re
import select
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.cli import main
from dsv4.compile.chat import ChatCompletion
from dsv4.compile.sampling import Timing
from dsv4.model.encoding_tools import ChatPiece
from tests.model.tiny_oracle import TINY

QUESTION = [{"role": "user", "content": 'What does "river" mean?'}]


@pytest.fixture(scope="module")
def engine():
    import dsv4

    return dsv4.load(TINY, device="cpu", max_context=256, prefill_chunk=64, compile=False)


def test_the_tiny_model_answers_and_ends(engine):
    answer = engine.chat(QUESTION, temperature=0)
    assert answer.content.startswith('As a noun, "river" means: ') and answer.content.endswith(".")
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == engine.tokenizer.eos_token_ids[0]
    assert answer.complete and (answer.reasoning, answer.tool_calls, answer.unparsed) == ("", [], "")
    assert answer.message == {"role": "assistant", "content": answer.content}
    expected = '<｜begin▁of▁sentence｜><｜User｜>What does "river" mean?<｜Assistant｜></think>'
    assert answer.prompt_token_ids == engine.tokenizer.encode(expected)
    assert answer.token_ids == engine.generate(expected, temperature=0)[0].token_ids
    assert engine.last.text == answer.text


def test_stop_strings_do_not_end_reasoning(engine):
    """Not the reasoning's own text, only the answer's: here it never comes to an answer."""
    plain = engine.chat(QUESTION, thinking=True, temperature=0, max_new_tokens=24)
    assert plain.reasoning and plain.finish_reason == "length"
    word = plain.reasoning.split()[0]
    stopped = engine.chat(QUESTION, thinking=True, temperature=0, max_new_tokens=24, stop=[word])
    assert stopped.token_ids == plain.token_ids and stopped.reasoning == plain.reasoning


def test_streamed_pieces_are_the_answer(engine):
    answer = engine.chat(QUESTION, temperature=0)
    pieces = list(engine.stream_chat(QUESTION, temperature=0))
    assert len(pieces) > 5 and {piece.kind for piece in pieces} == {"content"}
    assert "".join(piece.text for piece in pieces) == answer.content == engine.last.content
    thinking = engine.chat(QUESTION, thinking=True, temperature=0, max_new_tokens=5)
    assert thinking.reasoning and not thinking.content and not thinking.complete and thinking.finish_reason == "length"
    stopped = engine.chat(QUESTION, temperature=0, stop=["means"])
    assert stopped.content == stopped.text == 'As a noun, "river" ' and not stopped.complete


def test_a_second_turn_and_going_on(engine):
    answer = engine.chat(QUESTION, temperature=0)
    longer = engine.chat([*QUESTION, answer.message, *QUESTION], temperature=0)
    assert longer.prompt_token_ids[: len(answer.prompt_token_ids)] == answer.prompt_token_ids
    ids = answer.prompt_token_ids + answer.token_ids
    assert longer.prompt_token_ids[: len(ids)] == ids
    begun = [*QUESTION, {"role": "assistant", "content": "As a noun,"}]
    rest = engine.chat(begun, continue_final=True, temperature=0)
    assert ("As a noun," + rest.content).startswith('As a noun, "river" means: ')


def test_bad_arguments_are_refused_at_the_call(engine):
    with pytest.raises(ValueError, match=r"^message 0: role"):
        engine.stream_chat([{"role": "x"}])
    with pytest.raises(ValueError, match=r"^temperature must be"):
        engine.chat(QUESTION, temperature=-1)
    with pytest.raises(ValueError, match="does not say whether its format is"):
        engine.chat(QUESTION, thinking=True, effort="max")
    with pytest.raises(ValueError, match="max_context is 256"):
        engine.chat([{"role": "user", "content": "river " * 300}])
    with pytest.raises(TypeError):
        engine.chat(QUESTION, thinkin=True)
    with pytest.raises(RuntimeError, match="a stream is unfinished"):
        stream = engine.stream_chat(QUESTION)
        next(stream)
        engine.chat(QUESTION)
    stream.close()
    assert engine.chat(QUESTION, temperature=0).complete


# --- dsv4 chat, with a fake engine ---


class FakeEngine:
    """Answers with `pieces` and records the messages of each call."""

    def __init__(self):
        self.pieces = [("reasoning", "well"), ("content", "Hel"), ("content", "lo")]
        self.tool_calls, self.unparsed = [], ""
        self.calls, self.options, self.fail, self.last = [], None, None, None
        self.load_report = "loaded"

    def hold(self) -> int:
        return 0

    def stream_chat(self, messages, **options):
        self.calls.append(messages)
        self.options = options

        def pieces():
            if self.fail is not None:
                raise self.fail
            yield from (ChatPiece(*piece) for piece in self.pieces)
            said = {kind: "".join(text for k, text in self.pieces if k == kind) for kind in ("reasoning", "content")}
            message = {"role": "assistant", "content": said["content"]}
            timing = Timing(3, 4, 0.1, 0.25, 1.5)
            calls, self.tool_calls = self.tool_calls, []  # only once
            self.last = ChatCompletion([7], [1], "", "stop", None, timing, **said, tool_calls=calls, complete=True,
                                       unparsed=self.unparsed, message=message)  # fmt: skip

        return pieces()


@pytest.fixture
def talk(monkeypatch, capsys):
    """Run `dsv4 chat --model tiny ARGS` with some lines on stdin; returns status, stdout, stderr. `talk.engine` is it."""
    fake = FakeEngine()
    monkeypatch.setattr("dsv4.load", lambda *args, **settings: fake, raising=False)

    def run(lines: str, *args: str):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = main(["chat", "--model", str(TINY), *args])
        out = capsys.readouterr()
        return status, out.out, out.err

    run.engine = fake
    return run


def contents(messages):
    return [(message["role"], message["content"]) for message in messages]


def test_piped_lines_are_answered(talk):
    status, out, err = talk("one\n\ntwo", "--greedy", "--thinking", "--system", "be brief")
    assert (status, out) == (0, "<think>well</think>\n\nHello\n" * 2)
    first, second = talk.engine.calls
    assert contents(first) == [("system", "be brief"), ("user", "one")]
    assert contents(second) == [("system", "be brief"), ("user", "one"), ("assistant", "Hello"), ("user", "two")]
    assert talk.engine.options["temperature"] == 0 and talk.engine.options["thinking"] is True
    assert err.splitlines() == ["loaded", *["(3 + 4 tokens, 2.0 tokens/s)"] * 2]
    assert talk("one\n", "--hide-thinking", "--quiet") == (0, "Hello\n", "")


def test_commands(talk):
    lines = "/system be kind\none\n/reset\n//two\n/system\n/nope x\nthree\n/help\n/quit\nfour\n"
    status, _, err = talk(lines, "--quiet")
    assert status == 0
    assert [contents(call) for call in talk.engine.calls] == [
        [("system", "be kind"), ("user", "one")],
        [("system", "be kind"), ("user", "/two")],
        [("user", "/two"), ("assistant", "Hello"), ("user", "three")],
    ]
    assert "dsv4: error: no command /nope; /help lists the commands" in err and "/reset " in err
    assert talk.engine.options["slot"] == 0


def test_undo(talk):
    status, _, err = talk("/undo\none\ntwo\n/undo\nthree\n/undo\n/undo\n/undo\nfour\n")
    assert [contents(call) for call in talk.engine.calls] == [
        [("user", "one")],
        [("user", "one"), ("assistant", "Hello"), ("user", "two")],
        [("user", "one"), ("assistant", "Hello"), ("user", "three")],
        [("user", "four")],
    ]
    said = [line for line in err.splitlines() if "took back" in line or "error" in line]
    nothing = "dsv4: error: there is nothing to undo"
    assert said == [nothing, *[f"(took back: {text})" for text in ("two", "three", "one")], nothing]
    assert status == 2


def test_undo_of_a_call_takes_its_question_back(talk, tools):
    talk.engine.tool_calls = [call(0, "Rome"), call(1, "Oslo")]
    talk("one\nrain\n/undo\ntwo\n", "--tools", tools)
    assert contents(talk.engine.calls[-1]) == [("user", "two")]


def test_a_conversation_is_not_read_again(engine, capsys, monkeypatch):
    """What the held slot saves on a real model: a turn reads what is new, an undone one nothing of what came before it."""
    monkeypatch.setattr("dsv4.load", lambda *args, **settings: engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a cat?\nAnd a dog?\n/undo\nThen a fox?\n"))
    assert main(["chat", "--model", str(TINY), "--greedy", "--max-new-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    engine.release(0)
    found = re.findall(r"\((\d+) \+ (\d+) tokens(?:, (\d+) not read again)?", err)
    first, second, again = (tuple(int(number or 0) for number in turn) for turn in found)
    assert first[2] == 0 and second[2] == again[2] == first[0] + first[1] - 1 and len(out.splitlines()) == 3


def test_an_error_takes_the_message_back(talk):
    talk.engine.fail = ValueError("prompt 0 has 300 tokens")
    assert talk("one\n", "--quiet") == (2, "", "dsv4: error: prompt 0 has 300 tokens\n")
    talk.engine.fail = KeyboardInterrupt()
    assert talk("one\n", "--quiet") == (130, "", "")


def test_a_tool_call_and_a_cut_are_told(talk):
    finish = SimpleNamespace(tool_calls=[{"function": {"name": "f"}}], unparsed="", finish_reason="length", message={})
    finish.timing = Timing(3, 1)
    type(talk.engine).last = property(lambda self: finish, lambda self, value: None)
    try:
        _, _, err = talk("one\n", "--max-tokens", "4")
    finally:
        del type(talk.engine).last
    assert (
        "dsv4: error: the model called a tool (f), and chat has none; --tools offers some\n(cut off at --max-new-tokens)\n"
        in err
    )


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def call(number: int, city: str) -> dict:
    function = {"name": "weather", "arguments": f'{{"city": "{city}"}}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


@pytest.fixture
def tools(tmp_path) -> str:
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    return str(tmp_path / "tools.json")


def test_tools_are_offered_called_and_answered(talk, tools):
    """Two calls, of which each gets the next line, an empty one too; then the model goes on, and the talk after it."""
    talk.engine.tool_calls = [call(0, "Oslo"), call(1, "Rome\x9b2J")]
    status, out, err = talk("one\nsunny\n\ntwo\n", "--tools", tools, "--hide-thinking", "--quiet")
    assert (status, err) == (0, "")
    assert out == 'Hello\ncall of weather {"city": "Oslo"}\ncall of weather {"city": "Rome2J"}\nHello\nHello\n'
    assert talk.engine.options["tools"] == [WEATHER]
    first, second, third = talk.engine.calls
    assert contents(first) == [("user", "one")]
    assert second[1]["tool_calls"] == [call(0, "Oslo"), call(1, "Rome\x9b2J")]
    assert second[2:] == [
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
    ]
    assert contents(third) == [*contents(second), ("assistant", "Hello"), ("user", "two")]


def test_commands_while_a_result_is_awaited(talk, tools):
    talk.engine.tool_calls = [call(0, "Oslo")]
    status, _, err = talk("one\n/nope\n/reset\ntwo\n", "--tools", tools, "--quiet")
    assert (
        status == 2 and err == "dsv4: error: no command /nope; /help lists the commands, and // begins a message with /\n"
    )
    assert contents(talk.engine.calls[-1]) == [("user", "two")]


def test_a_result_that_fails_is_asked_for_again(talk, tools):
    talk.engine.tool_calls = [call(0, "Oslo")]
    answer = talk.engine.stream_chat

    def once(messages, **options):
        if messages[-1]["content"] == "too long":
            raise ValueError("prompt 0 has 300 tokens")
        return answer(messages, **options)

    talk.engine.stream_chat = once
    status, _, err = talk("one\ntoo long\nshort\n", "--tools", tools, "--quiet")
    assert (status, err) == (2, "dsv4: error: prompt 0 has 300 tokens; /reset begins anew\n")
    assert talk.engine.calls[-1][-1] == {"role": "tool", "tool_call_id": "call_0", "content": "short"}


def test_a_malformed_call_is_told(talk, tools):
    talk.engine.unparsed = "<｜DSML｜tool_calls>\nweather"
    _, _, err = talk("one\n", "--tools", tools, "--quiet")
    assert err == "dsv4: error: the model called a tool in a way that cannot be read: '<｜DSML｜tool_calls>\\nweather'\n"


@pytest.mark.parametrize(
    ("content", "error"),
    (
        (None, "nowhere.json: No such file"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ("[]", "found no functions"),
        ("{}", "found no functions"),
        ('"f"', "tools: found str, expected a list of tools"),
        ('[{"type": "function"}]', "tools[0]: found {'type': 'function'}, expected a function with a name"),
    ),
)
def test_bad_files_of_tools(talk, tmp_path, content, error):
    file = tmp_path / "nowhere.json"
    if content is not None:
        file.write_text(content)
    status, out, err = talk("one\n", "--tools", str(file))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"dsv4: error: --tools: {file}: ") and error in err


def test_a_turn_with_tools_through_the_real_engine():
    """A call as a model would write it is taken apart, and the next prompt has the offer, the call and its result."""
    import dsv4

    engine = dsv4.load(TINY, device="cpu", max_context=640, compile=False)
    said = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
    said += "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    answer = engine.encoding.parse(said + "<｜end▁of▁sentence｜>")
    assert answer.complete and answer.tool_calls == [call(0, "Oslo")]
    result = {"role": "tool", "tool_call_id": "call_0", "content": "sunny"}
    after = engine.chat([*QUESTION, answer.message(), result], tools=[WEATHER], temperature=0, max_new_tokens=2)
    prompt = engine.tokenizer.decode(after.prompt_token_ids, skip_special=False)
    assert '{"name": "weather"' in prompt and f"</think>{said}" in prompt
    assert prompt.endswith("<｜User｜><tool_result>sunny</tool_result><｜Assistant｜></think>")


@pytest.mark.parametrize(
    ("args", "error"),
    (
        (["--effort", "max"], "effort: found 'max' without thinking"),
        (["--effort", "max", "--thinking"], "does not say whether its format"),
        (["--effort", "low", "--thinking", "--encoding", "v4"], "effort: found 'low', expected high, max"),
        (["--encoding", "checkpoint"], "found no encoding/encoding"),
        (["--temperature", "-1"], "temperature must be"),
        (["--encoding", "v5"], "invalid choice: 'v5'"),
    ),
)
def test_errors_before_loading(talk, args, error):
    status, out, err = talk("one\n", *args)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("dsv4: error: ") and error in err


def test_a_wrong_folder(capsys, tmp_path):
    assert main(["chat", "--model", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith(f"dsv4: error: {tmp_path}/nowhere: no such folder")


def test_help_says_what_the_checkpoints_encoder_means(capsys):
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    assert "use it only with a checkpoint you trust" in " ".join(capsys.readouterr().out.split())


# --- the real program in a pseudo-terminal ---


class Terminal:
    """The program in a pseudo-terminal of its own."""

    def __init__(self, args: list[str]):
        import pty

        self.text, self.seen = "", 0
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(Path(__file__).parents[1])
            os.environ |= {"TERM": "xterm", "PYTHONUNBUFFERED": "1"}
            os.execv(sys.executable, [sys.executable, "-m", "dsv4", *args])

    def expect(self, text: str, timeout: float = 120) -> None:
        """Wait until some text appears after what was expected before."""
        end = time.monotonic() + timeout
        while (at := self.text.find(text, self.seen)) < 0:
            assert time.monotonic() < end, f"no {text!r} in {self.text[self.seen :]!r}"
            if select.select([self.fd], [], [], 0.5)[0]:
                try:
                    self.text += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    assert text in self.text[self.seen :], f"no {text!r} in {self.text[self.seen :]!r}"
        self.seen = at + len(text)

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def close(self) -> int:
        """The exit status; kills the program if it is still there."""
        for _ in range(1200):  # a minute: leaving Python takes its time on a busy machine
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_in_a_terminal():
    """Reasoning dimmed, Ctrl-C ends an answer and not the program, Ctrl-D leaves."""
    args = ["chat", "--model", str(TINY), "--device", "cpu", "--no-compile", "--thinking", "--seed", "1"]
    # a penalty that rewards repetition keeps the model from ending its answer
    terminal = Terminal([*args, "--greedy", "--repetition-penalty", "0.5"])
    try:
        terminal.expect("> ")
        terminal.send("The river\r")
        terminal.expect("\x1b[2m")
        time.sleep(1)
        terminal.send("\x03")
        terminal.expect("\x1b[0m")
        terminal.expect("(stopped)")
        terminal.expect("> ")
        time.sleep(0.5)  # the prompt is printed before readline listens to signals
        terminal.send("\x03")
        terminal.expect("(/quit or Ctrl-D leaves)")
        terminal.send("/nope\r")
        terminal.expect("dsv4: error: no command /nope")
        terminal.send("\x04")
    finally:
        status = terminal.close()
    assert status == 0 and "Traceback" not in terminal.text
