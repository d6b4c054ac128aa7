"""Chat messages to prompts: DeepSeek's format string by string, bug reports of other engines, and what is refused.

Optional oracles: the package deepseek-recipe (DeepSeek's own encoder), litellm (DeepSeek's real tokenizer.json), and a
checkpoint folder with `encoding/` in the environment variable DSV4_CHECKPOINT.
"""

import copy
import json
import os
import random
from pathlib import Path

import pytest

from dsv4.model.encoding import EFFORTS, ChatEncoding
from dsv4.model.encoding_tools import TOOLS_END, TOOLS_SECTION
from dsv4.model.tokenizer import BOS, EOS, Tokenizer
from tests.model.conversations import TOOLS, conversation
from tests.model.tiny_oracle import TINY

U, A, R, D = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "｜DSML｜"
WEATHER = '{"name": "weather", "parameters": {"city": {"type": "string"}}}'
CHECKPOINT = os.environ.get("DSV4_CHECKPOINT", "")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY)


@pytest.fixture(scope="module")
def encoding(tokenizer):
    return ChatEncoding(tokenizer, "v4")


def system(text, **more):
    return {"role": "system", "content": text, **more}


def user(text, **more):
    return {"role": "user", "content": text, **more}


def answer(text, why=None, **more):
    return {"role": "assistant", "content": text, **({"reasoning_content": why} if why else {}), **more}


def reminder(text):
    return {"role": "latest_reminder", "content": text}


def call(name, arguments, id="c1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, id="c1"):
    return {"role": "tool", "tool_call_id": id, "content": text}


def developer(text, **more):
    return {"role": "developer", "content": text, **more}


TWO = [system("sys"), user("Hello"), answer("Hi", "greet"), user("Q")]
PROMPTS = {  # name: (messages, options, prompt after BOS)
    "one question": ([user("Q")], {}, f"{U}Q{A}</think>"),
    "thinking": ([user("Q")], {"thinking": True}, f"{U}Q{A}<think>"),
    "two turns": (TWO, {}, f"sys{U}Hello{A}</think>Hi{EOS}{U}Q{A}</think>"),
    "earlier reasoning goes": (TWO, {"thinking": True}, f"sys{U}Hello{A}</think>Hi{EOS}{U}Q{A}<think>"),
    "earlier reasoning stays": (
        TWO,
        {"thinking": True, "drop_thinking": False},
        f"sys{U}Hello{A}<think>greet</think>Hi{EOS}{U}Q{A}<think>",
    ),
    "no reasoning in a thinking turn": (
        [user("a"), answer("b"), user("c")],
        {"thinking": True, "drop_thinking": False},
        f"{U}a{A}<think></think>b{EOS}{U}c{A}<think>",
    ),
    "user messages in a row": ([user("a"), user("b")], {}, f"{U}a\n\nb{A}</think>"),
    "text blocks": ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], {}, f"{U}a\n\nb{A}</think>"),
    "developer": ([developer("d")], {}, f"{U}d{A}</think>"),
    "earlier developer goes": (
        [developer("d"), reminder("r"), user("a")],
        {"thinking": True},
        f"{R}r{U}a{A}<think>",
    ),
    "reminder before the question": ([system("s"), reminder("r"), user("a")], {}, f"s{R}r{U}a{A}</think>"),
    "system only": ([system("s")], {}, f"s{A}</think>"),
    "response format": (
        [system("s", response_format={"type": "object"}), user("a")],
        {},
        's\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "object"}'
        f"{U}a{A}</think>",
    ),
    "response format as OpenAI wraps it": (
        [user("a")],
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        '\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "object"}'
        f"{U}a{A}</think>",
    ),
    "high effort": ([user("a")], {"thinking": True, "effort": "high"}, f"{U}a{A}<think>"),
    "task after the text": ([user("a", task="query")], {}, f"{U}a<｜query｜>"),
    "task authority": ([user("a", task="authority")], {"thinking": True}, f"{U}a<｜authority｜>"),
    "task domain": ([user("a", task="domain"), answer("x")], {"generation_prompt": False}, f"{U}a<｜domain｜>x{EOS}"),
    "task read_url": ([user("a", task="read_url")], {}, f"{U}a<｜read_url｜>"),
    "task action": ([user("a", task="action")], {}, f"{U}a{A}</think><｜action｜>"),
    "task action, thinking": (
        [user("a", task="action"), answer("Search")],
        {"thinking": True, "generation_prompt": False},
        f"{U}a{A}<think><｜action｜>Search{EOS}",
    ),
    "task title": ([user("a"), answer("b", task="title")], {}, f"{U}a{A}</think>b{EOS}<｜title｜>"),
    "task of a joined user message": ([user("a"), user("b", task="query")], {}, f"{U}a\n\nb<｜query｜>"),
    "content goes on": ([user("a"), answer("b")], {"continue_final": True}, f"{U}a{A}</think>b"),
    "marked as unfinished": ([user("a"), answer("b", wo_eos=True)], {}, f"{U}a{A}</think>b"),
    "reasoning goes on": (
        [user("a"), answer("", "well")],
        {"continue_final": True, "thinking": True},
        f"{U}a{A}<think>well",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(encoding, tokenizer, name):
    messages, options, expected = PROMPTS[name]
    before = copy.deepcopy(messages)
    assert encoding.render(messages, **options) == BOS + expected
    ids = encoding.encode(messages, **options)
    assert ids == tokenizer.encode(BOS + expected) and ids.count(tokenizer.bos_token_id) == 1
    assert messages == before  # what the caller gave is left alone


def test_tools(encoding, tokenizer):
    """A conversation with calls in every form: values raw or as JSON, two results put into the order of their calls."""
    tools = [{"type": "function", "function": json.loads(WEATHER)}, {"name": "näme"}]
    calls = [call("weather", '{"city": "São", "days": [1, 2.5], "x": null}', "a"), call("weather", {"q": True}, "b")]
    messages = [system("s"), user("Q"), answer("Let me see.", "hm", tool_calls=calls), result("B", "b"), result("A", "a")]
    messages += [user("quick!"), answer("Fine", "so"), user("Thanks")]
    section = TOOLS_SECTION + WEATHER + '\n{"name": "näme"}' + TOOLS_END
    expected = (
        f"{BOS}s\n\n{section}{U}Q{A}<think>hm</think>Let me see.\n\n<{D}tool_calls>\n"
        f'<{D}invoke name="weather">\n<{D}parameter name="city" string="true">São</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">[1, 2.5]</{D}parameter>\n'
        f'<{D}parameter name="x" string="false">null</{D}parameter>\n</{D}invoke>\n'
        f'<{D}invoke name="weather">\n<{D}parameter name="q" string="false">true</{D}parameter>\n</{D}invoke>\n'
        f"</{D}tool_calls>{EOS}{U}<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>\n\nquick!"
        f"{A}<think>so</think>Fine{EOS}{U}Thanks{A}<think>"
    )
    assert encoding.render(messages, thinking=True, tools=tools) == expected
    assert encoding.encode(messages, thinking=True, tools=tools) == tokenizer.encode(expected)
    # the same given in the system message; no system message; in a developer message
    assert encoding.render([system("s", tools=tools), *messages[1:]], thinking=True) == expected
    assert encoding.render([user("Q")], tools=tools) == f"{BOS}\n\n{section}{U}Q{A}</think>"
    assert encoding.render([developer("d", tools=tools)]) == f"{BOS}{U}d\n\n{section}{A}</think>"


def test_arguments_that_are_no_object_become_one_parameter(encoding):
    for arguments in ("not json", "[1]", "3", ""):
        text = encoding.render([user("a"), answer("", tool_calls=[call("f", arguments)])])
        assert f'<{D}parameter name="arguments" string="true">{arguments}</{D}parameter>' in text
    text = encoding.render([user("a"), answer("", tool_calls=[call("f", "{}")])])
    assert f'{A}</think>\n\n<{D}tool_calls>\n<{D}invoke name="f">\n\n</{D}invoke>\n</{D}tool_calls>{EOS}' in text


@pytest.mark.parametrize(
    ("messages", "expected"),
    (
        # vllm pull 51262, sglang issue 35433, TensorRT-LLM pull 18345: system text after the first message
        ([system("s"), user("a"), system("t")], f"s\n\nt{U}a{A}</think>"),
        ([user("a"), system("t"), user("b")], f"t{U}a\n\nb{A}</think>"),
        ([user("a"), system("t"), answer("x"), user("b")], f"t{U}a{A}</think>x{EOS}{U}b{A}</think>"),
        # TensorRT-LLM pull 18345: the answer's start stood before a trailing reminder
        ([user("a"), reminder("r")], f"{U}a{R}r{A}</think>"),
        ([user("a"), reminder("r"), reminder("q")], f"{U}a{R}r{R}q{A}</think>"),
        ([user("a"), reminder("r"), answer("x"), user("b")], f"{U}a{R}r{A}</think>x{EOS}{U}b{A}</think>"),
        # vllm issue 46256: no start of an answer after an assistant message
        ([user("a"), answer("x")], f"{U}a{A}</think>x{EOS}{A}</think>"),
        ([user("a"), answer("x"), answer("y"), user("b")], f"{U}a{A}</think>x{EOS}{A}</think>y{EOS}{U}b{A}</think>"),
    ),
)
def test_bug_report_30_where_the_answer_begins(encoding, messages, expected):
    """System text after the first message stood bare, and the start of an answer before a reminder or not at all.
    https://github.com/NVIDIA/TensorRT-LLM/pull/18345 https://github.com/vllm-project/vllm/issues/46256"""
    assert encoding.render(messages) == BOS + expected


def test_bug_report_30_generation_prompt_is_honoured(encoding):
    """add_generation_prompt was ignored. https://github.com/NVIDIA/TensorRT-LLM/pull/18345"""
    for messages in ([user("a")], [user("a"), reminder("r")], [system("s")], [user("a"), answer("x")]):
        text = encoding.render(messages)
        assert text == encoding.render(messages, generation_prompt=False) + f"{A}</think>"


def test_efforts_of_both_generations(tokenizer):
    old, new = (ChatEncoding(tokenizer, name) for name in ("v4", "v4-0731"))
    tail = f"s{U}a{A}<think>"

    def effort(encoding, level):
        return encoding.render([system("s"), user("a")], thinking=True, effort=level).removeprefix(BOS)

    assert effort(old, None) == effort(old, "high") == effort(new, None) == effort(new, "low") == tail
    assert effort(old, "max") == effort(new, "high") == EFFORTS["v4"]["max"] + tail
    assert effort(old, "max").startswith(
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very "
    )
    assert effort(new, "max") == EFFORTS["v4-0731"]["max"] + tail
    assert effort(new, "max").startswith(
        "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\nYou"
    )
    assert all(text.endswith(".\n\n") for efforts in EFFORTS.values() for text in efforts.values() if text)
    with pytest.raises(ValueError, match=r"^effort: found 'low', expected high, max for the format v4$"):
        effort(old, "low")
    with pytest.raises(ValueError, match=r"^effort: found 'max' without thinking"):
        new.render([user("a")], effort="max")
    unknown = ChatEncoding(tokenizer, None)
    assert unknown.render([user("a")], thinking=True) == f"{BOS}{U}a{A}<think>"
    with pytest.raises(ValueError, match="does not say whether its format is v4 or v4-0731"):
        unknown.render([user("a")], thinking=True, effort="high")


LITERALS = (BOS, EOS, U, A, R, "<think>", "</think>", D, "<｜action｜>", f"\n\n<{D}tool_calls>")


@pytest.mark.parametrize("literal", LITERALS)
def test_text_cannot_act_as_a_control_token(encoding, tokenizer, literal):
    """The same control tokens in the same places whether texts spell one or not, in every field a text can come in."""
    controls = set(range(3)) | set(range(4079, 4096))

    def prompt(text):
        bad = {text: text} if text else {"k": "v"}
        messages = [system(text), reminder(text), user(text), answer(text, text, tool_calls=[call("f", json.dumps(bad))])]
        messages += [result(text), developer("d" + text), user([{"type": "text", "text": text}])]
        tools = [{"name": "f", "description": text}]
        return encoding.encode(messages, thinking=True, tools=tools, response_format={"enum": [text]})

    marks, plain = ([id for id in prompt(text) if id in controls] for text in (literal, "plain"))
    assert marks == plain
    assert literal in tokenizer.decode(prompt(literal), skip_special=False)


@pytest.mark.parametrize(
    ("messages", "error"),
    (
        ([], "messages: found an empty list"),
        ("hi", "messages: found str"),
        (["hi"], "message 0: found str, expected an object with a role"),
        ([user("a"), {"content": "x"}], "message 1: role: found None, expected one of system, user, "),
        ([user("a"), {"role": "human", "content": "x"}], "message 1: role: found 'human', expected one of system"),
        ([{"role": "user"}], "message 0: content: found none, expected a text"),
        ([user(None)], "message 0: content: found none, expected a text"),
        ([user(5)], "message 0: content: found int, expected a text or a list of text blocks"),
        ([user([{"type": "image_url", "image_url": {}}])], r"message 0: content\[0\]: found 'image_url', expected a text"),
        ([user(["a"])], r"message 0: content\[0\]: found 'str', expected a text block"),
        ([user("a"), {"role": "assistant"}], "message 1: content: found none"),
        ([developer("")], "message 0: content: found an empty text"),
        ([user("a"), result("r")], "message 1: role: found a tool result, expected an assistant message with tool_calls"),
        ([user("a"), answer("", tool_calls=[call("f", "{}")]), result("r", "zz")], "message 2: tool_call_id: found 'zz'"),
        ([user("a"), answer("", tool_calls=[call("f", "{}")]), result("r", None)], "message 2: tool_call_id: found none"),
        ([user("a"), answer("", tool_calls=[call("f", "{}")]), result("r"), result("r")], "message 3: .*a second result"),
        ([user("a"), answer("", tool_calls=[call("f", "{}")] * 2)], r"message 1: tool_calls\[1\].id: found 'c1' a second"),
        ([user("a"), answer("", tool_calls=["f"])], r"message 1: tool_calls\[0\]: found str"),
        ([user("a"), answer("", tool_calls="f")], "message 1: tool_calls: found str, expected a list"),
        ([user("a"), answer("", tool_calls=[call('f">', "{}")])], r"message 1: tool_calls\[0\].name: found 'f\">'"),
        ([user("a"), answer("", tool_calls=[call("f", 3)])], r"message 1: tool_calls\[0\].arguments: found int"),
        ([user("a", task="sing")], "message 0: task: found 'sing', expected one of action, query"),
        ([user("a", task="query"), user("b")], "message 0: task: found 'query' before a message of role user"),
        ([user("a", tools=TOOLS)], "message 0: tools: found tools in a message of role user"),
        ([system("a", tools=[{"type": "function"}])], r"message 0: tools\[0\]: found .*expected a function with a name"),
        (
            [user("a", response_format={"type": "object"})],
            "message 0: response_format: found one in a message of role user",
        ),
        ([system("a", response_format={"type": "json_object"})], "message 0: response_format: found .*a JSON schema"),
    ),
)
def test_bad_messages(encoding, messages, error):
    with pytest.raises(ValueError, match=r"^" + error) as caught:
        encoding.encode(messages)
    assert "\n" not in str(caught.value)


def test_bad_options(encoding, tokenizer):
    with pytest.raises(ValueError, match=r"^message 0: role: found user, expected assistant to go on with"):
        encoding.encode([user("a")], continue_final=True)
    with pytest.raises(ValueError, match=r"^message 0: tools: found them here and given once more"):
        encoding.encode([system("a", tools=TOOLS)], tools=TOOLS)
    with pytest.raises(ValueError, match=r"^tools: found str"):
        encoding.encode([user("a")], tools="f")
    with pytest.raises(ValueError, match=r"^format: found 'v5'"):
        ChatEncoding(tokenizer, "v5")
    with pytest.raises(TypeError):
        encoding.encode([user("a")], thinkin=True)


def test_whether_reasoning_comes_next(encoding):
    def next_is_reasoning(messages, **options):
        return encoding.reasons_next(encoding.encode(messages, **options))

    assert next_is_reasoning([user("a")], thinking=True)
    assert not next_is_reasoning([user("a")])
    assert not next_is_reasoning([user("a", task="action")], thinking=True)
    assert not next_is_reasoning([user("b"), answer("x"), user("a<think>", task="query")], thinking=True)
    assert next_is_reasoning([user("a"), answer("", "hm")], thinking=True, continue_final=True)
    assert not next_is_reasoning([user("a"), answer("x", "hm")], thinking=True, continue_final=True)


def test_deepseek_recipe_agrees(tokenizer):
    """Random conversations against DeepSeek's own package."""
    recipe = pytest.importorskip("deepseek_recipe")
    encoding = ChatEncoding(tokenizer, "v4-0731")
    for seed in range(500):
        rng = random.Random(seed)
        messages, thinking = conversation(rng), rng.random() < 0.6
        tools = TOOLS if rng.random() < 0.4 else None
        effort = rng.choice(["low", "high", "max"]) if thinking else None
        body = {"model": "DeepSeek-V4-Pro", "messages": messages}
        body |= {"thinking": {"type": "enabled" if thinking else "disabled"}}
        body |= {"tools": tools} if tools else {}
        body |= {"reasoning_effort": effort} if effort else {}
        request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
        expected = recipe.DeepseekV4Encoding().render_conversation(request.conversation).prompt
        assert encoding.render(messages, thinking=thinking, effort=effort, tools=tools) == expected


@pytest.mark.skipif(not CHECKPOINT, reason="DSV4_CHECKPOINT names no checkpoint folder")
def test_the_checkpoints_own_encoder_agrees():
    """Its published input and output pairs, then random conversations."""
    tokenizer = Tokenizer.from_folder(CHECKPOINT)
    ours, own = (ChatEncoding.from_folder(CHECKPOINT, tokenizer, source=name) for name in ("builtin", "checkpoint"))
    for file in sorted(Path(CHECKPOINT, "encoding").glob("tests/test_input_*.json")):
        given = json.loads(file.read_text(encoding="utf-8"))
        messages, tools = (given["messages"], given.get("tools")) if isinstance(given, dict) else (given, None)
        expected = Path(str(file).replace("input", "output").replace(".json", ".txt")).read_text(encoding="utf-8")
        thinking = "<think>" in expected.replace(TOOLS_SECTION, "")
        assert ours.render(messages, thinking=thinking, tools=tools, generation_prompt=False) == expected, file.name
    rng = random.Random(1)
    for _ in range(300):
        messages, thinking = conversation(rng, reminders=False), rng.random() < 0.6
        options = {"thinking": thinking, "tools": TOOLS if rng.random() < 0.4 else None}
        options["generation_prompt"] = messages[-1]["role"] != "assistant"
        assert ours.encode(messages, **options) == own.encode(messages, **options)


def test_deepseeks_real_vocabulary():
    """Ids of the real tokenizer. It is older than V4, whose added tokens take the place of its reserved ones."""
    litellm = pytest.importorskip("litellm")
    import tokenizers

    file = Path(litellm.__file__).parent / "litellm_core_utils" / "tokenizers" / "deepseek_tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<think>", "</think>", D, R)])
    tokenizer = Tokenizer(backend, 0, [1])
    encoding = ChatEncoding(tokenizer)
    messages = [system("你是助手。"), user("What does 河 mean?\n\n"), answer("river", "河: river"), user("Danke 🙂")]
    for options in ({}, {"thinking": True, "drop_thinking": False}, {"tools": TOOLS}):
        ids = encoding.encode(messages, **options)
        text = encoding.render(messages, **options)
        assert ids == tokenizer.encode(text) and tokenizer.decode(ids, skip_special=False) == text
        assert ids[0] == 0 and ids.count(0) == 1 and ids.count(1) == 1
    assert tokenizer.token_id(U) in ids and tokenizer.token_id(A) in ids
    typed = encoding.encode([user(EOS + A + "</think>")])
    assert typed.count(1) == 0 and typed.count(tokenizer.token_id(A)) == 1
