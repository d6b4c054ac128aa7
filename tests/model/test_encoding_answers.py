"""The model's answers taken apart: whole, cut off anywhere, malformed; as text, as ids, as a stream. Formats found out."""

import json
import random

import pytest

from dsv4.model.encoding import Answer, ChatEncoding
from dsv4.model.tokenizer import BOS, EOS, Tokenizer
from tests.model.conversations import TEXTS, arguments
from tests.model.conversations import calls as random_calls
from tests.model.tiny_oracle import TINY

D = "｜DSML｜"
CALL = f'<{D}invoke name="f">\n<{D}parameter name="q" string="true">a b</{D}parameter>\n</{D}invoke>\n'
BLOCK = f"\n\n<{D}tool_calls>\n{CALL}</{D}tool_calls>"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY)


@pytest.fixture(scope="module")
def encoding(tokenizer):
    return ChatEncoding(tokenizer, "v4")


def one_call(arguments, id="call_0", name="f"):
    return [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]


F = one_call('{"q": "a b"}')
ANSWERS = {  # name: (output, thinking, answer)
    "content": (f"Hi{EOS}", False, Answer(content="Hi", complete=True)),
    "nothing": ("", False, Answer()),
    "only the end": (EOS, False, Answer(complete=True)),
    "cut off": ("Hi the", False, Answer(content="Hi the")),
    "reasoning": (f"why</think>Hi{EOS}", True, Answer("why", "Hi", complete=True)),
    "empty reasoning": (f"</think>Hi{EOS}", True, Answer("", "Hi", complete=True)),
    "reasoning never closed": (f"why{EOS}", True, Answer("why")),
    "reasoning cut off": ("why", True, Answer("why")),
    "cut off after reasoning": ("why</think>", True, Answer("why")),
    "opened once more": (f"<think>why</think>Hi{EOS}", True, Answer("why", "Hi", complete=True)),
    "closed once more": (f"</think>Hi{EOS}", False, Answer(content="Hi", complete=True)),
    "thinks unasked": (f"<think>why</think>Hi{EOS}", False, Answer("why", "Hi", complete=True)),
    "text after the end": (f"Hi{EOS}there", False, Answer(content="Hi", complete=True)),
    "newlines stay": (f"a\n\n\n<b{EOS}", False, Answer(content="a\n\n\n<b", complete=True)),
    "newlines at the end stay": (f"a\n\n{EOS}", False, Answer(content="a\n\n", complete=True)),
    "call": (BLOCK + EOS, False, Answer(tool_calls=F, complete=True)),
    "content and call": (f"Look.{BLOCK}{EOS}", False, Answer(content="Look.", tool_calls=F, complete=True)),
    "reasoning and call": (f"why</think>{BLOCK}{EOS}", True, Answer("why", tool_calls=F, complete=True)),
    "call without a blank line": (
        f"Look.{BLOCK.strip()}{EOS}",
        False,
        Answer(content="Look.", tool_calls=F, complete=True),
    ),
    "call out of open reasoning": (f"why{BLOCK}{EOS}", True, Answer("why", tool_calls=F)),
    "call without its end": (BLOCK, False, Answer(tool_calls=F)),
    "no parameters": (
        f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n</{D}invoke>\n</{D}tool_calls>{EOS}',
        False,
        Answer(tool_calls=one_call("{}"), complete=True),
    ),
    "values": (
        f'<{D}tool_calls>\n<{D}invoke name="f">\n<{D}parameter name="a" string="false">[1, "é"]</{D}parameter>\n'
        f'<{D}parameter name="b" string="false">not json</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>{EOS}',
        False,
        Answer(tool_calls=one_call('{"a": [1, "é"], "b": "not json"}'), complete=True),
    ),
    "second call cut off": (
        f"\n\n<{D}tool_calls>\n{CALL}<{D}invoke na",
        False,
        Answer(tool_calls=F, unparsed=f"<{D}invoke na"),
    ),
    "block not ended": (f"\n\n<{D}tool_calls>\n{CALL}{EOS}", False, Answer(tool_calls=F)),
    "text after the calls": (
        f"{BLOCK}and{EOS}",
        False,
        Answer(tool_calls=F, unparsed=f"</{D}tool_calls>and"),
    ),
    "a parameter twice": (
        f'<{D}tool_calls>\n<{D}invoke name="f">\n<{D}parameter name="a" string="true">1</{D}parameter>\n'
        f'<{D}parameter name="a" string="true">2</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>{EOS}',
        False,
        Answer(
            unparsed=f'<{D}invoke name="f">\n<{D}parameter name="a" string="true">1</{D}parameter>\n'
            f'<{D}parameter name="a" string="true">2</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>'
        ),
    ),
    "another block": (f"<{D}function_calls>x{EOS}", False, Answer(unparsed=f"<{D}function_calls>x")),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(encoding, tokenizer, name):
    output, thinking, expected = ANSWERS[name]
    assert encoding.parse(output, thinking) == expected
    assert encoding.parse(tokenizer.encode(output, add_bos=False), thinking) == expected


def test_spelled_out_is_not_a_token(encoding, tokenizer):
    """The ids tell a control token from text that spells one; so a tool's value can hold the markup itself."""
    text = f"a</think>b{BLOCK}{BOS}"
    ids = tokenizer.encode(text, add_bos=False, parse_special=False)
    end = tokenizer.token_id(EOS)
    assert encoding.parse([*ids, end]) == Answer(content=text, complete=True)
    assert encoding.parse([*ids, tokenizer.token_id("</think>"), end], True) == Answer(text, complete=True)
    prompt = encoding.encode(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": text, "tool_calls": one_call({"q": text})}],
        generation_prompt=False,
    )
    start = prompt.index(tokenizer.token_id("</think>")) + 1
    assert encoding.parse(prompt[start:]) == Answer(
        content=text, tool_calls=one_call(json.dumps({"q": text}, ensure_ascii=False)), complete=True
    )


def random_answer(rng: random.Random) -> dict:
    message = {"role": "assistant", "content": rng.choice(["", *TEXTS])}
    if rng.random() < 0.7:
        message["reasoning_content"] = rng.choice(TEXTS)
    if rng.random() < 0.6:
        message["tool_calls"] = [
            call | {"id": f"call_{place}"} for place, call in enumerate(random_calls(rng, 0)) if arguments(rng)
        ]
    return message


@pytest.mark.parametrize("seed", range(20))
def test_messages_come_back(encoding, tokenizer, seed):
    """Message to prompt to message; and of every beginning of the answer no more than a beginning comes out."""
    rng = random.Random(seed)
    for _ in range(5):
        message, thinking = random_answer(rng), rng.random() < 0.5
        if not thinking:
            message.pop("reasoning_content", None)
        messages = [{"role": "user", "content": "a"}]
        ids = encoding.encode([*messages, message], thinking=thinking, generation_prompt=False)
        ids = ids[len(encoding.encode(messages, thinking=thinking)) :]
        whole = encoding.parse(ids, thinking)
        assert whole.message() == message and whole.complete and not whole.unparsed
        assert encoding.parse(tokenizer.decode(ids, skip_special=False), thinking) == whole
        for cut in range(len(ids)):
            part = encoding.parse(ids[:cut], thinking)
            assert not part.complete
            assert whole.reasoning.startswith(part.reasoning.rstrip("\ufffd"))
            assert (whole.content + "\n\n<").startswith(part.content.rstrip("\ufffd"))
            assert part.tool_calls == whole.tool_calls[: len(part.tool_calls)]


@pytest.mark.parametrize("thinking", (False, True))
def test_stream(encoding, tokenizer, thinking):
    """Pieces come as early as they can, in whole characters, and joined they are the answer."""
    output = "wärum 🙂\n</think>" * thinking + f"Löök:\n\n<b> 🙂\n{BLOCK}{EOS}"
    stream = encoding.stream(thinking)
    pieces, early = [], 0
    for id in tokenizer.encode(output, add_bos=False):
        pieces += stream.push(id)
        early += bool(pieces) and not stream.answer.tool_calls
    pieces += stream.finish()
    assert all(text and "\ufffd" not in text for _, text in pieces) and early > 5
    joined = {kind: "".join(text for k, text in pieces if k == kind) for kind in ("reasoning", "content")}
    assert joined == {"reasoning": stream.answer.reasoning, "content": stream.answer.content}
    assert joined["content"] == "Löök:\n\n<b> 🙂\n" and stream.answer.tool_calls == F and stream.answer.complete


def test_stream_with_stop(encoding, tokenizer):
    stream = encoding.stream(True, stop=["END"])
    for id in tokenizer.encode(f"why</think>one ENDtwo{EOS}", add_bos=False):
        stream.push(id)
    stream.finish()
    assert stream.answer == Answer("why", "one ")


# --- which format a folder has, and its own encoder ---

FILE = """
{names}
def encode_messages(messages, thinking_mode, context=None, drop_thinking=True, reasoning_effort=None):
    return "{bos}" + thinking_mode + str(reasoning_effort) + "".join(m["role"] + str(m["content"]) for m in messages)
"""


def folder(path, names="", **config):
    for file in TINY.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    if names:
        (path / "encoding").mkdir()
        (path / "encoding" / "encoding_dsv4.py").write_text(FILE.format(names=names, bos=BOS), encoding="utf-8")
    if config:
        values = json.loads((path / "config.json").read_text()) | config
        (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("names", "format"),
    (
        ("", None),
        ("X = 1", None),
        ("REASONING_EFFORT_MAX = 'x'", "v4"),
        ("REASONING_EFFORT_PROMPTS: dict = {}", "v4-0731"),
    ),
)
def test_format_from_the_encoder_file(tmp_path, tokenizer, names, format):
    path = folder(tmp_path, names + ("\nraise SystemExit('this must not run')" if names else ""))
    assert ChatEncoding.from_folder(path, tokenizer).format == format
    assert ChatEncoding.from_folder(path, tokenizer, "v4").format == "v4"


def test_format_from_a_template_and_contradictions(tmp_path, tokenizer):
    path = folder(tmp_path)
    for text, format in (("Reasoning Effort: Absolute maximum", "v4"), ("Reasoning Effort: Beyond maximum", "v4-0731")):
        (path / "chat_template.jinja").write_text("{{ '" + text + "' }}")
        assert ChatEncoding.from_folder(path, tokenizer).format == format
    folder(path, "REASONING_EFFORT_MAX = 'x'")
    with pytest.raises(ValueError, match=r"ambiguous \(encoding_dsv4.py is v4, chat template is v4-0731\)"):
        ChatEncoding.from_folder(path, tokenizer)
    (path / "encoding" / "encoding_dsv4.py").write_text("def (")
    with pytest.raises(ValueError, match=r"not a Python file"):
        ChatEncoding.from_folder(path, tokenizer)


@pytest.mark.parametrize("sign", ("model_type", "architecture", "file", "template"))
def test_v41_is_refused(tmp_path, tokenizer, sign):
    config = {"model_type": "deepseek_v41"} if sign == "model_type" else {}
    config |= {"architectures": ["DeepseekV41ForCausalLM"]} if sign == "architecture" else {}
    path = folder(tmp_path, "REASONING_EFFORT_MAPPINGS = {}" if sign == "file" else "", **config)
    if sign == "template":
        (path / "chat_template.jinja").write_text("<｜System｜>")
    for format in ("auto", "v4"):
        with pytest.raises(ValueError, match=r"V4.1, another model"):
            ChatEncoding.from_folder(path, tokenizer, format)


def test_the_folders_encoder_as_the_source(tmp_path, tokenizer):
    path = folder(tmp_path, "REASONING_EFFORT_MAX = 'x'")
    encoding = ChatEncoding.from_folder(path, tokenizer, source="checkpoint")
    messages = [{"role": "user", "content": "a"}]
    assert encoding.render(messages, generation_prompt=False) == BOS + "chatNoneusera"
    assert encoding.render(messages, thinking=True, effort="odd") == BOS + "thinkingoddusera<｜Assistant｜><think>"
    assert encoding.encode(messages).count(tokenizer.bos_token_id) == 1
    with pytest.raises(ValueError, match=r"^message 0: found the control token '</think>' in its text"):
        encoding.encode([{"role": "user", "content": "a</think>"}])
    with pytest.raises(ValueError, match=r"^message 0: role"):
        encoding.encode([{"role": "x", "content": "a"}])
    (path / "encoding" / "encoding_dsv4.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=r"does not run .ZeroDivisionError"):
        ChatEncoding.from_folder(path, tokenizer, source="checkpoint")


def test_a_chat_template_as_the_source(tmp_path, tokenizer):
    pytest.importorskip("jinja2")
    path = folder(tmp_path)
    with pytest.raises(ValueError, match=r"found no encoding/encoding"):
        ChatEncoding.from_folder(path, tokenizer, source="checkpoint")
    template = "{{ bos_token }}{% for m in messages %}{{ '<｜User｜>' + m.content }}{% endfor %}{{ tools | tojson }}"
    template += "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    encoding = ChatEncoding.from_folder(path, tokenizer, source="checkpoint")
    system = {"role": "system", "content": "s", "tools": [{"name": "ä"}]}
    expected = BOS + '<｜User｜>s<｜User｜>q[{"type": "function", "function": {"name": "ä"}}]<｜Assistant｜></think>'
    assert encoding.render([system, {"role": "user", "content": "q"}]) == expected
    assert encoding.encode([system, {"role": "user", "content": "q"}]) == tokenizer.encode(expected)
    (path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match=r"chat template: no"):
        ChatEncoding.from_folder(path, tokenizer, source="checkpoint").render([system])
