"""The lm-evaluation-harness model on examples/tiny: what the harness's own `hf` model gets from transformers on the same
weights, whatever the batch size and the order. Tests of the harness side are skipped without lm-eval."""

import json
import subprocess
import sys

import pytest

import dsv4
from dsv4.cli import main
from dsv4.compile.requests import Request
from dsv4.compile.sampling import SamplingParams
from dsv4.eval_cache import guard, keyed_path
from dsv4.eval_requests import fit_context
from dsv4.model.fingerprint import fingerprint
from tests.model.tiny_oracle import TINY, tiny_in_transformers

WINDOW = 256
TASKS = TINY.parents[1] / "examples" / "eval"
TEXTS = [
    ("She looked at him with surprise, and said,", " that she had never thought of it"),
    ("The function returns", " a table"),
    ("The function returns ", "the number of rows"),  # a space that belongs to the continuation
    ("", "And God said"),
    ("And God said to Abraham,", " Go"),
    ("The whale rose out of the water, and the king of the country was in the house of his father." * 2, " He"),
]


@pytest.fixture(scope="module")
def harness():
    return pytest.importorskip("lm_eval", reason="needs lm-eval")


def load(max_batch):
    return dsv4.load(
        TINY, device="cpu", dtype="fp32", max_batch=max_batch, max_context=WINDOW, prefill_chunk=64, compile=False
    )


@pytest.fixture(scope="module")
def engine():
    return load(3)


@pytest.fixture
def model(harness, engine):
    from dsv4.eval import Dsv4LM

    return Dsv4LM(engine)


@pytest.fixture(scope="module")
def oracle(harness, tmp_path_factory):
    """HFLM on the dequantised weights; add_bos says whether its tokenizer puts BOS in front of texts."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<｜▁pad▁｜>"
    ).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = tiny_in_transformers()

    def with_bos(add_bos):
        return HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=WINDOW, add_bos_token=add_bos, device="cpu"
        )

    return with_bos


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def scores(model, pairs=TEXTS):
    return model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)


def assert_alike(got, expected):
    for (logprob, greedy), (expected_logprob, flag) in zip(got, expected, strict=True):
        assert logprob == pytest.approx(expected_logprob, abs=1e-4) and greedy == flag


def run_tasks(harness, model, tasks, limit):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    return harness.simple_evaluate(model=model, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=0)


# ---- the same as transformers ----------------------------------------------------------------------------------------
def test_choices_equal_the_hf_model(harness, model, oracle):
    tasks = ["dsv4_definitions", "dsv4_cloze"]
    ours, theirs = (run_tasks(harness, lm, tasks, 3) for lm in (model, oracle(True)))
    for task in tasks:
        for a, b in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert a["acc"] == b["acc"] and a["arguments"] == b["arguments"]
            for (logprob, greedy), (expected, flag) in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
                assert float(logprob) == pytest.approx(float(expected), abs=1e-3) and greedy == flag
        assert ours["results"][task]["acc,none"] == theirs["results"][task]["acc,none"]
    assert ours["config"]["refused"] == []


def test_bits_per_byte_equal_the_hf_model(harness, model, oracle):
    """Texts longer than the window, so that windows roll. hf would double BOS with add_bos_token."""
    ours, theirs = (run_tasks(harness, lm, ["dsv4_bits"], 1) for lm in (model, oracle(False)))
    got, expected = (each["results"]["dsv4_bits"]["bits_per_byte,none"] for each in (ours, theirs))
    assert got == pytest.approx(expected, abs=1e-4) and 0.8 < got < 2.5


def test_greedy_text_equals_the_hf_model(model, oracle):
    requests = [(text, {"until": [".", ","], "max_gen_toks": 12}) for text, _ in TEXTS[:2]]
    ours, theirs = (lm.generate_until(instances("generate_until", requests)) for lm in (model, oracle(True)))
    assert ours == theirs and all(ours)
    assert not any("." in text or "," in text for text in ours)


@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_neither_batch_size_nor_order_matters(model, batch_size):
    """The fourth batch size is `model`'s own, 3. Bitwise equality is tests/compile/test_deterministic.py's."""
    from dsv4.eval import Dsv4LM

    expected, other = scores(model), Dsv4LM(load(batch_size), batch_size=batch_size)
    assert other.batch_size == batch_size
    for got in (scores(other), scores(other, TEXTS[::-1])[::-1]):
        assert_alike(got, expected)
    kwargs = {"until": ["\n\n"], "max_gen_toks": 4}
    texts = instances("generate_until", [(text, kwargs) for text, _ in TEXTS[:4]])
    written = model.generate_until(texts, disable_tqdm=True)
    assert other.generate_until(texts, disable_tqdm=True) == written
    assert other.generate_until(texts[::-1], disable_tqdm=True)[::-1] == written


def test_five_hundred_other_requests_leave_nothing_behind(model):
    expected = scores(model)
    others = [("word " * (1 + n % 5), f" {letter}{n % 5}") for n in range(20) for letter in "abcdefghijklmnopqrstuvwxy"]
    assert len(others) == 500 and len({logprob for logprob, _ in scores(model, others)}) > 50
    assert_alike(scores(model), expected)


# ---- tokens ----------------------------------------------------------------------------------------------------------
def test_bos_exactly_once(model, monkeypatch):
    seen = []
    score = model.engine.score
    monkeypatch.setattr(model.engine, "score", lambda pairs: seen.extend(pairs) or score(pairs))
    bos = "<｜begin▁of▁sentence｜>"
    plain, spelled, empty, written = scores(model, [("The", " cat"), (bos + "The", " cat"), ("", "The"), ("", bos + "The")])
    model.loglikelihood_rolling(instances("loglikelihood_rolling", [("The cat " * 130,), (bos + "The",)]))
    assert plain == spelled and empty == written
    starts = [context + continuation for context, continuation in seen if context[0] == 0]
    assert len(starts) == 6 and all(tokens.count(0) == 1 for tokens in starts)  # rolling windows go on without it
    prompts = [(bos + "The", {}), ("The", {"until": None}), ("", {})]
    ran = []
    monkeypatch.setattr(model.engine.scheduler, "run", lambda requests, prefilled: ran.extend(requests) or iter(()))
    model.generate_until(instances("generate_until", prompts))
    assert sorted(request.prompt.count(0) for request in ran) == [1, 1, 1]


def test_long_contexts_are_cut_behind_bos(model, caplog):
    long = "He said that the king was " * 100
    [(got, _)] = scores(model, [(long, " dead")])
    tokens = model.tok_encode(long.rstrip())
    continuation = model.tok_encode(long + " dead")[len(tokens) :]
    cut = [0, *tokens[len(tokens) - (WINDOW - len(continuation)) :]]
    assert len(cut) + len(continuation) == WINDOW + 1 and "cut from the left" in caplog.text
    assert got == model.engine.score([(cut, continuation)])[0].logprob


@pytest.mark.parametrize("room, expected", [(9, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (3, [0, 2, 3]), (1, [3])])
def test_fit_context(room, expected):
    assert fit_context([0, 1, 2, 3], room, bos=0) == expected


def test_chat_template(model):
    from dsv4.eval import Dsv4LM

    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'What does "river" mean?'}]
    text = model.apply_chat_template(history)
    ids = model.tok_encode(text)
    assert ids == model.engine.encoding.encode(history) and ids.count(0) == 1 and text.endswith("</think>")
    prefix = [*history, {"role": "assistant", "content": "As a noun,"}]
    assert model.apply_chat_template(prefix, add_generation_prompt=False) == text + "As a noun,"
    with pytest.raises(ValueError, match="one chat encoding"):
        model.chat_template("default")
    thinking = Dsv4LM(model.engine, thinking=True)
    assert thinking.apply_chat_template(history).endswith("<think>")
    assert thinking.tokenizer_name != model.tokenizer_name and " " not in model.tokenizer_name
    with pytest.raises(ValueError, match="thinking"):
        scores(thinking)


def test_answers_are_taken_whole_where_the_prompt_opens_no_reasoning(model, caplog, monkeypatch):
    """A plain prompt, and one that ends in the beginning of the answer (a task's gen_prefix)."""
    from dsv4.eval import Dsv4LM

    thinking, ran = Dsv4LM(model.engine, thinking=True), []
    run = model.engine.scheduler.run
    monkeypatch.setattr(model.engine.scheduler, "run", lambda requests, *more: ran.extend(requests) or run(requests, *more))
    history = [{"role": "user", "content": "Which king?"}]
    opened = thinking.apply_chat_template(history)
    begun = thinking.apply_chat_template([*history, {"role": "assistant", "content": "The"}], add_generation_prompt=False)
    requests = [(text, {"max_gen_toks": 5}) for text in (opened, begun, "The king")]
    texts = thinking.generate_until(instances("generate_until", requests), disable_tqdm=True)
    assert texts[0] == "" and all(texts[1:]) and "answers are taken whole" in caplog.text
    completions = {tuple(request.prompt): request.completion().text for request in ran}
    assert [completions[tuple(model.tok_encode(text))] for text in (begun, "The king")] == texts[1:]


def test_reasoning_is_stripped_and_stop_strings_begin_behind_it(engine):
    tokenizer = engine.tokenizer

    def answer(text):
        request = Request([0], SamplingParams(stop="\n\n"), 60, frozenset({1}), tokenizer)
        request.reasons_until(tokenizer.token_id("</think>"))
        for token in tokenizer.encode(text, add_bos=False):
            if not request.finish_reason:
                request.push(token, 0.0, {})
        return request.answer, request.finish_reason

    assert answer("First.\n\nThen.</think>\nForty-two\n\nmore") == ("Forty-two", "stop")
    assert answer("First.\n\nThen, and so on") == ("", None)
    assert answer("Short.</think>\nA</think>B\n\n") == ("A</think>B", "stop")  # only the first one ends the reasoning


# ---- requests that cannot be answered, settings that are not there ---------------------------------------------------
def test_bad_requests_are_refused_one_by_one(model):
    expected = scores(model)
    bad = [(None, " a"), ("The", 3), ("The", " whale" * 300), ("The", ""), ("The", "\ud800")]
    results = scores(model, [*TEXTS[:2], *bad, *TEXTS[2:]])
    assert_alike([r for r in results if r != (float("-inf"), False)], expected)
    assert results[2:7] == [(float("-inf"), False)] * 5
    reasons = ["NoneType, expected text", "int, expected text", "max_length is 256", "is empty", "not valid Unicode"]
    assert len(model.refused) == 5
    for line in model.refused:
        assert line.startswith("loglikelihood request ") and sum(reason in line for reason in reasons) == 1
    assert model.loglikelihood_rolling(instances("loglikelihood_rolling", [(7,), ("",)])) == [float("-inf"), 0.0]
    long = {"max_gen_toks": WINDOW}
    texts = model.generate_until(instances("generate_until", [("The", long), (3, {}), ("The", {"max_tokens": 2})]))
    assert texts[:2] == ["", ""] and texts[2] and len(model.refused) == 8
    assert model.get_model_info()["refused"] == model.refused


@pytest.mark.parametrize("kwargs", [{"num_beams": 4}, {"do_sample": False, "typical_p": 0.9}, {"max_length": 9}])
def test_unknown_generation_arguments_stop_the_run(model, kwargs):
    with pytest.raises(ValueError, match=f"generation arguments: found {[*kwargs][-1]}="):
        model.generate_until(instances("generate_until", [("The", kwargs)]))


def test_decoding_arguments(harness):
    from dsv4.eval_requests import decoding

    greedy = decoding({"until": "\n", "top_p": 0.9, "num_beams": 1, "max_tokens": 7}, 256, 1)
    assert (greedy.temperature, greedy.top_p, greedy.max_new_tokens, greedy.stop) == (0, 1.0, 7, ("\n",))
    assert decoding({"do_sample": False, "temperature": 0.7}, 256, 1).temperature == 0
    drawn = decoding({"do_sample": True, "top_p": 0.9, "until": ["", "x"]}, 256, 1)
    assert (drawn.temperature, drawn.top_p, drawn.seed, drawn.stop) == (1.0, 0.9, 1, ("x",))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(batch_size="auto"), "batch_size must be an integer >= 1, found 'auto'"),
        (dict(batch_size=4), "loaded with max_batch=3"),
        (dict(max_batch_size=64), "max_batch_size=64"),
        (dict(max_length=WINDOW + 1), "loaded with max_context=256"),
        (dict(dtype="bf16"), "dtype of an Engine"),
        (dict(parallelize=True), "found parallelize"),
        (dict(effort="high"), "without thinking"),
        (dict(thinking="yes"), "thinking must be"),
        (dict(pretrained="x"), "model=FOLDER"),
    ],
)
def test_settings_are_honoured_or_refused(harness, engine, arguments, words):
    from dsv4.eval import Dsv4LM

    with pytest.raises(ValueError) as error:
        Dsv4LM(engine, **arguments)
    assert words in str(error.value)
    with pytest.raises(ValueError, match="compile must be True or False, found 'no'"):
        Dsv4LM(str(TINY), compile="no")


def test_limits_and_the_registered_name(harness, engine):
    from lm_eval.api.registry import get_model

    import dsv4.eval as module

    assert get_model("dsv4") is module.Dsv4LM
    source = compile((TINY.parents[1] / "dsv4" / "eval.py").read_text(), "again", "exec")
    exec(source, {"__name__": "again"})  # as a reload does: registers nothing a second time
    model = module.Dsv4LM(engine, batch_size="3", max_length=100, max_gen_toks=7)
    assert (model.batch_size, model.max_length, model.max_gen_toks) == (3, 100, 7)
    assert (model.eot_token_id, model.prefix_token_id, model.tok_decode([0, 300])) == (1, 0, model.tok_decode([300]))


# ---- stored answers --------------------------------------------------------------------------------------------------
def test_stored_answers_survive_a_stop_midway(harness, model, tmp_path, monkeypatch):
    from lm_eval.api.model import CachingLM

    from dsv4 import eval as module

    monkeypatch.setattr(module, "_WAVE", 1)
    requests, expected = instances("loglikelihood", TEXTS), scores(model)
    cached = CachingLM(model, str(tmp_path / "answers.db"))
    score, calls = model.engine.score, []

    def stops(pairs):
        calls.append(len(pairs))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(pairs)

    monkeypatch.setattr(model.engine, "score", stops)
    with pytest.raises(KeyboardInterrupt):
        cached.loglikelihood(requests)
    assert_alike(cached.loglikelihood(requests), expected)
    assert calls == [3, 3, 3]  # the first three were not scored again
    cached.loglikelihood(requests)
    kwargs = {"until": ["."], "max_gen_toks": 4}
    generation = instances("generate_until", [("The king", kwargs)])
    [text] = cached.generate_until(generation)
    monkeypatch.setattr(model.engine.scheduler, "run", None)
    assert cached.generate_until(generation) == [text] and kwargs == {"until": ["."], "max_gen_toks": 4}
    assert len(calls) == 3 and len(cached.dbdict) == len(TEXTS) + 2  # no row under changed arguments; one is the mark
    other = module.Dsv4LM(model.engine, max_length=99)
    with pytest.raises(ValueError, match="give another --use_cache path"):
        CachingLM(other, str(tmp_path / "answers.db"))
    assert other.cache_path("a/b") != model.cache_path("a/b")


CHILD = """
import sys, time
from lm_eval.api.model import CachingLM
from dsv4.eval import Dsv4LM
from tests.test_eval import generations, load
model = Dsv4LM(load(2))
run = model.engine.scheduler.run

def stops(requests, *more):
    finished = 0
    for request, piece in run(requests, *more):
        finished += bool(request.finish_reason)
        if finished == 4:
            time.sleep(0.5)  # the cache is written by another thread
            print("three are stored", flush=True)
            time.sleep(600)
        yield request, piece

model.engine.scheduler.run = stops
CachingLM(model, sys.argv[1]).generate_until(generations())
"""


def generations():
    return instances("generate_until", [(text, {"until": ["."], "max_gen_toks": 3}) for text, _ in TEXTS])


def test_a_killed_process_loses_only_what_was_in_flight(harness, tmp_path, monkeypatch):
    from lm_eval.api.model import CachingLM

    from dsv4.eval import Dsv4LM

    path = str(tmp_path / "answers.db")
    command = [sys.executable, "-c", CHILD, path]
    with subprocess.Popen(command, cwd=TINY.parents[1], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert any(line == "three are stored\n" for line in child.stdout)
        finally:
            child.kill()
    model = Dsv4LM(load(2))
    expected = model.generate_until(generations())
    run, ran = model.engine.scheduler.run, []
    monkeypatch.setattr(model.engine.scheduler, "run", lambda requests, *more: ran.extend(requests) or run(requests, *more))
    assert CachingLM(model, path).generate_until(generations()) == expected
    assert len(ran) == len(TEXTS) - 3


def test_fingerprint_follows_contents_and_settings(tmp_path):
    def folder(name, weights=b"\x02\0\0\0\0\0\0\0{}" + bytes(5_000_000), config="{}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text(config)
        return tmp_path / name

    first = fingerprint(folder("a"), {"x": 1})
    assert first == fingerprint(folder("b"), {"x": 1}) and len(first) == 16
    changed = b"\x02\0\0\0\0\0\0\0{}" + bytes(4_999_999) + b"\1"
    others = [fingerprint(tmp_path / "a", {"x": 2}), fingerprint(folder("c", changed), {"x": 1})]
    others.append(fingerprint(folder("d", config='{"a": 1}'), {"x": 1}))
    assert len({first, *others}) == 4
    assert keyed_path("a/b", "k") == "a/b-k" and keyed_path("a/", "k") == "a/k"
    store = {}
    guard(store, "k")
    guard(store, "k")
    for bad in (dict(store), {"an answer": 1}):
        with pytest.raises(ValueError, match="another --use_cache path"):
            guard(bad, "j")


# ---- data files and the command --------------------------------------------------------------------------------------
def test_data_files(harness, engine):
    sys.path.insert(0, str(TASKS))
    try:
        import tasks
    finally:
        sys.path.remove(str(TASKS))
    for name, least in (("definitions", 200), ("next_sentence", 200), ("cloze", 100), ("texts", 100)):
        rows = getattr(tasks, name)()["test"]
        assert least <= len(rows) <= 300
        if "choices" in rows.column_names:
            assert all(len(set(row["choices"])) == 4 for row in rows)
            assert (
                len(rows) / 6 < min(rows["label"].count(i) for i in range(4)) if isinstance(rows["label"], list) else True
            )
    for tokens in (1024, 8192):
        rows = tasks.needle(tokens)["test"]
        lengths = [len(engine.tokenizer.encode(row["prompt"])) for row in rows]
        assert len(rows) == 25 and tokens * 0.8 < min(lengths) and max(lengths) <= tokens - 12
        assert all(row["prompt"].count(f" is {row['word']}. ") == 1 for row in rows)
    assert tasks.found({"word": "copper"}, [" Copper, and"]) == {"acc": 1.0}
    assert tasks.found({"word": "copper"}, [""]) == tasks.found({"word": "copper"}, ["a copper"]) == {"acc": 0.0}


def test_command_without_lm_eval(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "--model", str(TINY), "--tasks", "x"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'dsv4[eval]'" in error and error.count("\n") == 1


def test_command_forwards(harness, monkeypatch, capsys, tmp_path):
    from lm_eval._cli.run import Run

    ran = []
    monkeypatch.setattr(Run, "_execute", staticmethod(ran.append))
    forwarded = ["--tasks", "a,b", "--limit", "3", "--model_args", "max_length=64,dtype=fp32", "--use_cache"]
    assert main(["eval", *forwarded, "here", "--model", str(TINY), "--log_samples"]) == 0
    [args] = ran
    assert (args.model, args.model_args) == ("dsv4", {"model": str(TINY), "max_length": 64, "dtype": "fp32"})
    assert (args.tasks, args.limit, args.batch_size, args.log_samples) == (["a", "b"], 3.0, "8", True)
    assert args.use_cache.startswith("here-") and args.device in ("cpu", "cuda")
    main(["eval", "--model", str(TINY), "--tasks", "a", "--use_cache", "here", "--batch_size", "2"])
    assert ran[1].use_cache != args.use_cache and ran[1].batch_size == "2"
    for extra, words in ((["--model_args", "pretrained=x"], "given once"), (["-M", "hf"], "given once")):
        assert main(["eval", "--model", str(TINY), "--tasks", "a", *extra]) == 2
        assert words in capsys.readouterr().err
    assert main(["eval", "--model", str(tmp_path / "none"), "--tasks", "a"]) == 2
    assert "none" in capsys.readouterr().err and len(ran) == 2


def test_the_group_names_every_task():
    named = (TASKS / "offline.yaml").read_text()
    files = [path for path in TASKS.glob("*.yaml") if path.name != "offline.yaml"]
    assert len(files) == 8 and all(f"  - dsv4_{path.stem}\n" in named for path in files)
    assert all(json.loads(line) for path in TASKS.glob("*.jsonl") for line in path.read_text().splitlines())
