"""The command line: what reaches the engine, what is printed where, and the error paths.

The engine is a fake in all tests but the last ones, which run a small random model.
"""

import io
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import dsv4
from dsv4.cli import main
from dsv4.compile.sampling import Completion, Timing, TokenLogprob

ROOT = Path(__file__).parents[1]
PIECES = ["Once", " upon", " a", " time"]


@dataclass
class FakeReport:
    load_seconds: float = 1.5
    compile_seconds: float = 2.5

    def __str__(self) -> str:
        return "weights 1 MiB"


class FakeTokenizer:
    def token_bytes(self, id, skip_special=True) -> bytes:
        return [b"Once", b" upon", "🙂".encode()[:2], b""][id]


@dataclass
class FakeEngine:
    """Records its calls. Every completion is PIECES; `fail` is raised in place of the third one."""

    load_report: FakeReport = field(default_factory=FakeReport)
    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    last: Completion | None = None
    load_call: dict | None = None
    calls: list = field(default_factory=list)
    fail: BaseException | None = None

    def load(self, folder, **settings) -> "FakeEngine":
        self.load_call = {"folder": folder} | settings
        return self

    def completion(self, prompt, logprobs=None, **_) -> Completion:
        ids = list(range(len(PIECES)))
        entries = None if logprobs is None else [TokenLogprob(i, -0.5 - i, {i: -0.5 - i, 0: -9.0}) for i in ids]
        return Completion([7, 8, 9], ids, "".join(PIECES), "length", entries, Timing(3, 4, 0.1, 0.25, 1.5))

    def generate(self, prompts, progress=None, **settings) -> list[Completion]:
        self.calls.append(("generate", prompts, settings))
        return [self.completion(prompt, **settings) for prompt in prompts]

    def stream(self, prompt, progress=None, **settings):
        self.calls.append(("stream", prompt, settings))
        for index, piece in enumerate(PIECES):
            if self.fail is not None and index == 2:
                raise self.fail
            yield piece
        self.last = self.completion(prompt, **settings)

    def prefill(self, prompt, progress=None) -> Timing:
        self.calls.append(("prefill", prompt, {}))
        return Timing(prompt_tokens=300, prefill_seconds=0.5)


@pytest.fixture
def engine(monkeypatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setitem(vars(dsv4), "load", fake.load)
    return fake


@pytest.fixture
def run(engine, tmp_path, capsys):
    """Run `dsv4 generate --model FOLDER ...`; returns status, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        status = main(["generate", "--model", str(tmp_path), *args])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


def test_a_single_prompt_streams(run, engine, tmp_path):
    status, out, err = run("--prompt", "hi")
    assert (status, out) == (0, "Once upon a time\n")
    assert engine.calls == [("stream", "hi", {"ignore_eos": False})]
    assert engine.load_call == {
        "folder": str(tmp_path), "device": None, "dtype": None, "max_batch": 1, "max_context": 4096,
        "prefill_chunk": None, "compile": True, "progress": True, "activation": None,
        "deterministic": False, "kv": "auto", "index": "auto",
    }  # fmt: skip
    assert err.splitlines() == [
        "weights 1 MiB",
        "3 prompt tokens, first token after 0.250 s, 4 new tokens at 2.0 tokens/s, ended by length; "
        "loaded in 1.5 s, compiled in 2.5 s",
    ]


def test_all_flags_reach_the_engine(run, engine):
    args = "--temperature 0.5 --top-k 40 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --seed 3 --max-new-tokens 8 "
    args += "--stop END --stop ## --ignore-eos --logprobs 2 --device cpu --dtype fp32 --max-context 64 --max-batch 2 "
    args += "--prefill-chunk 16 --no-compile --activation nvfp4 --deterministic --kv fp8 --index fp4 --quiet"
    status, out, err = run("--prompt", "hi", *args.split())
    assert (status, err) == (0, "")
    [(_, _, settings)] = engine.calls
    assert settings == {
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3,
        "max_new_tokens": 8, "stop": ["END", "##"], "ignore_eos": True, "logprobs": 2,
    }  # fmt: skip
    load = engine.load_call
    del load["folder"]
    assert load == {
        "device": "cpu", "dtype": "fp32", "max_batch": 2, "max_context": 64, "prefill_chunk": 16, "compile": False,
        "progress": False, "activation": "nvfp4", "deterministic": True, "kv": "fp8", "index": "fp4",
    }  # fmt: skip
    assert out.splitlines()[1] == "  -0.5000  'Once'  |  'Once' -9.0000"
    assert out.splitlines()[2] == "  -1.5000  ' upon'  |  ' upon' -1.5000  'Once' -9.0000"
    assert out.splitlines()[3] == "  -2.5000  b'\\xf0\\x9f'  |  b'\\xf0\\x9f' -2.5000  'Once' -9.0000"
    assert out.splitlines()[4] == "  -3.5000  #3  |  #3 -3.5000  'Once' -9.0000"


def test_max_tokens_is_an_alias(run, engine):
    assert run("--prompt", "hi", "--max-tokens", "5")[0] == 0
    assert engine.calls[0][2]["max_new_tokens"] == 5


def test_several_prompts_are_one_batch(run, engine):
    status, out, err = run("--prompt", "a", "--prompt", "b")
    assert status == 0
    assert engine.calls[0][:2] == ("generate", ["a", "b"]) and engine.load_call["max_batch"] == 2
    assert out == "--- prompt 1 of 2 ---\nOnce upon a time\n--- prompt 2 of 2 ---\nOnce upon a time\n"
    assert err.splitlines()[-1].startswith("2 completions, 6 prompt tokens, 8 new tokens in ")
    run(*["--prompt", "x"] * 20)
    assert engine.load_call["max_batch"] == 8


def test_no_stream(run, engine):
    assert run("--prompt", "hi", "--no-stream")[:2] == (0, "Once upon a time\n")
    assert engine.calls[0][:2] == ("generate", ["hi"])


def test_json(run, engine):
    status, out, _ = run("--prompt", "a", "--prompt", "b", "--json", "--logprobs", "1")
    first, second = map(json.loads, out.splitlines())
    assert status == 0 and (first["index"], second["index"]) == (0, 1)
    assert first["text"] == "Once upon a time" and first["finish_reason"] == "length"
    assert first["prompt_token_ids"] == [7, 8, 9] and first["token_ids"] == [0, 1, 2, 3]
    assert first["timing"] == {
        "prompt_tokens": 3, "new_tokens": 4, "prefill_seconds": 0.1, "time_to_first_token": 0.25,
        "decode_seconds": 1.5, "tokens_per_second": 2.0,
    }  # fmt: skip
    top = [{"token_id": 1, "logprob": -1.5}, {"token_id": 0, "logprob": -9.0}]
    assert first["logprobs"][1] == {"token_id": 1, "logprob": -1.5, "top": top}
    assert "logprobs" not in json.loads(run("--prompt", "a", "--json")[1])


def test_prompt_ids_need_no_tokenizer(run, engine):
    engine.tokenizer = None
    status, out, _ = run("--prompt-ids", "1, 2,3", "--prompt-ids", "4", "--logprobs", "0")
    assert status == 0 and engine.calls[0][:2] == ("generate", [[1, 2, 3], [4]])
    assert out.splitlines()[1] == "0,1,2,3" and out.splitlines()[2].startswith("  -0.5000  #0")


def test_prompts_from_files_and_stdin(run, engine, tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text("first 🙂\nsecond\n", encoding="utf-8")
    for flag in ("--prompt", "--prompt-file"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("von stdin é\n".encode())))
        assert run(flag, "-")[0] == 0
    assert run("--prompt-file", str(tmp_path / "one.txt"))[0] == 0
    assert [call[1] for call in engine.calls] == ["von stdin é", "von stdin é", "first 🙂\nsecond"]


def test_prefill_only(run, engine):
    status, out, err = run("--prompt", "a", "--prefill-only")
    assert (status, out, engine.calls) == (0, "", [("prefill", "a", {})])
    assert err.splitlines()[-1] == "300 prompt tokens in 0.500 s, 600.0 tokens/s"
    values = json.loads(run("--prompt", "a", "--prefill-only", "--json", "--quiet")[1])
    assert values == {"index": 0, "prompt_tokens": 300, "prefill_seconds": 0.5, "prefill_tokens_per_second": 600.0}


def test_defaults_of_the_checkpoint(run, engine, tmp_path):
    file = tmp_path / "generation_config.json"
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 5], "_from_model_config": True}
    file.write_text(json.dumps(config | {"top_k": None, "transformers_version": "5", "num_beams": 4}))
    err = run("--prompt", "a", "--top-p", "0.5", "--quiet")[2]
    assert err == f"dsv4: warning: {file}: ignored num_beams\n"
    settings = engine.calls[-1][2]
    assert settings == {"temperature": 0.6, "top_p": 0.5, "stop_token_ids": [1, 5], "ignore_eos": False}
    run("--prompt", "a", "--ignore-eos")
    assert "stop_token_ids" not in engine.calls[-1][2]
    run("--prompt", "a", "--greedy")
    assert engine.calls[-1][2]["temperature"] == 0
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "eos_token_id": 1}))
    run("--prompt", "a")
    assert engine.calls[-1][2]["temperature"] == 0 and engine.calls[-1][2]["stop_token_ids"] == [1]
    run("--prompt", "a", "--temperature", "0.3")
    assert engine.calls[-1][2]["temperature"] == 0.3


@pytest.mark.parametrize(
    "args, ignored",
    [
        ("--greedy", None),
        ("--greedy --temperature 0", None),
        ("--greedy --repetition-penalty 1.2", None),
        ("--greedy --temperature 0.5 --top-p 0.9", "--temperature, --top-p"),
        ("--temperature 0 --min-p 0.1 --top-k 5 --seed 1", "--top-k, --min-p, --seed"),
    ],
)
def test_sampling_flags_that_greedy_ignores(run, engine, args, ignored):
    status, _, err = run("--prompt", "a", "--quiet", *args.split())
    assert status == 0 and engine.calls[0][2]["temperature"] == 0
    assert err == ("" if ignored is None else f"dsv4: warning: greedy decoding ignores {ignored}\n")


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "found no prompt, expected one of --prompt, --prompt-file, --prompt-ids"),
        (["--prompt", "a", "--prompt-ids", "1"], "found --prompt and --prompt-ids, expected one of"),
        (["--prompt-ids", "1,x"], "--prompt-ids: found '1,x', expected integers"),
        (["--prompt-ids", ""], "--prompt-ids: found '', expected integers"),
        (["--prompt-file", "/nowhere/x.txt"], "--prompt-file: /nowhere/x.txt: No such file or directory"),
        (["--prompt", "-", "--prompt", "-"], "--prompt: found - more than once"),
        (["--prompt", ""], "prompt 0 is empty"),
        (["--prompt", "a", "--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be in [0, 1e6] (0 is greedy), found -1.0"),
        (["--prompt", "a", "--top-k", "-2"], "top_k must be"),
        (["--prompt", "a", "--top-p", "nan"], "top_p must be"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--prompt", "a", "--logprobs", "-1"], "logprobs must be"),
        (["--prompt", "a", "--stop", ""], "stop must be"),
        (["--prompt", "a", "--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
        (["--prompt", "a", "--max-tok", "3"], "unrecognized arguments: --max-tok 3 (see dsv4"),
        (["--prompt", "a", "stray"], "unrecognized arguments: stray"),
    ],
)
def test_bad_input_is_one_line_and_loads_nothing(run, engine, args, message):
    status, out, err = run(*args)
    assert (status, out, err.count("\n"), engine.load_call) == (2, "", 1, None)
    assert err.startswith("dsv4: error: ") and message in err


def test_no_command_and_unknown_command(capsys):
    for argv, message in (([], "COMMAND"), (["genrate"], "'genrate'"), (["generate", "--prompt", "a"], "--model")):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("dsv4: error: ") and message in err and err.count("\n") == 1


def test_prompt_file_that_is_not_text(run, tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\xff\x00")
    status, _, err = run("--prompt-file", str(tmp_path / "x.bin"))
    assert status == 2 and "x.bin: not UTF-8 text" in err


def test_broken_generation_config_is_named(run, engine, tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    status, _, err = run("--prompt", "a")
    assert status == 2 and "generation_config.json: not valid JSON" in err and engine.load_call is None


def test_prompts_too_long_are_refused_before_loading(run, engine, tmp_path):
    from tests.model.test_tokenizer import build

    build(tmp_path)
    status, _, err = run("--prompt", "ok", "--prompt", "zzz" * 9, "--max-context", "20")
    assert status == 2 and engine.load_call is None
    assert "prompt 1 has 28 tokens and 1 new ones were asked for, which is more than --max-context 20" in err
    status, _, err = run("--prompt-ids", "1,2,3", "--max-new-tokens", "18", "--max-context", "20")
    assert status == 2 and "prompt 0 has 3 tokens and 18 new ones" in err
    assert run("--prompt-ids", "1,2,3", "--prefill-only", "--max-context", "3")[0] == 0
    (tmp_path / "tokenizer.json").unlink()
    status, _, err = run("--prompt", "ok")
    assert status == 2 and "tokenizer.json: no such file" in err


def test_the_real_loader_names_a_missing_folder(tmp_path, capsys):
    assert main(["generate", "--model", str(tmp_path / "nowhere"), "--prompt", "a"]) == 2
    assert capsys.readouterr().err == (
        f"dsv4: error: {tmp_path}/nowhere: no such folder, expected a checkpoint folder with a config.json\n"
    )


def test_value_errors_of_the_engine(run, engine):
    engine.fail = ValueError("prompt 0 has token id 9, but the vocabulary is 0..7")
    status, out, err = run("--prompt", "a", "--quiet")
    assert (status, out) == (2, "Once upon\n")  # the line of the text ends before the error
    assert err == "dsv4: error: prompt 0 has token id 9, but the vocabulary is 0..7\n"


def test_ctrl_c_is_quiet(run, engine):
    engine.fail = KeyboardInterrupt()
    assert run("--prompt", "a", "--quiet") == (130, "Once upon\n", "")


def test_other_exceptions_are_not_hidden(run, engine):
    engine.fail = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        run("--prompt", "a")


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys\nfrom dsv4.cli import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    for args, text in ((["--help"], "generate text"), (["generate", "--help"], "--greedy"), (["--version"], "dsv4 ")):
        result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True, cwd=ROOT)
        assert text in result.stdout


def test_a_reader_that_goes_away(tmp_path):
    """`dsv4 generate ... | head -c 4` ends without a traceback."""
    code = (
        "import sys, dsv4\nfrom dsv4.cli import main\nfrom tests.test_cli import FakeEngine, PIECES\n"
        "PIECES[:] = ['word '] * 100000\ndsv4.load = FakeEngine().load\nsys.exit(main())"
    )
    args = [sys.executable, "-c", code, "generate", "--model", str(tmp_path), "--prompt", "a", "--quiet"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.read(4) == "word"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A folder as transformers saves it: random weights in fp32, all kinds of layers, with a tokenizer."""
    import torch  # not at the top, because the process of test_a_reader_that_goes_away imports this file
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    from dsv4.model.config import CSA, HCA, SLIDING
    from tests.model.test_tokenizer import build

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    build(folder)
    config = DeepseekV4Config(
        vocab_size=448, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=32, q_lora_rank=32,
        layer_types=[SLIDING, CSA, HCA], mlp_layer_types=["hash_moe", "moe", "moe"], partial_rotary_factor=0.5,
        sliding_window=8, index_n_heads=16, index_head_dim=32, index_topk=4, o_groups=2, o_lora_rank=16,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, dtype="float32",
    )  # fmt: skip
    model = DeepseekV4ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for module in model.modules():
        if hasattr(module, "tid2eid"):
            module.tid2eid.copy_(torch.rand(448, 4).argsort(-1)[:, :2])
    model.save_pretrained(folder)
    return folder


def test_streamed_batched_and_json_output_of_a_real_engine_agree(checkpoint, capsys):
    args = ["generate", "--model", str(checkpoint), "--device", "cpu", "--max-context", "64", "--no-compile", "--quiet"]
    args += ["--greedy", "--max-new-tokens", "8", "--prompt", "the quick brown 🙂"]

    def out(*more: str) -> str:
        assert main([*args, *more]) == 0
        return capsys.readouterr().out

    streamed = out()
    assert len(streamed) > 4 and streamed == out("--no-stream")
    first, second = map(json.loads, out("--prompt", "lazy dog", "--json", "--logprobs", "1").splitlines())
    assert first["text"] + "\n" == streamed and first["prompt_token_ids"][0] == 0
    assert first["timing"]["new_tokens"] == len(first["token_ids"]) == len(first["logprobs"])
    assert all(entry["top"][0]["token_id"] == entry["token_id"] for entry in second["logprobs"])
    stop = first["text"][3:5]
    assert out("--stop", stop) == first["text"].split(stop)[0] + "\n"


def test_statistics_and_errors_of_a_real_engine(checkpoint, capsys):
    args = ["generate", "--model", str(checkpoint), "--device", "cpu", "--max-context", "32", "--no-compile"]
    assert main([*args, "--prompt", "the fox", "--max-new-tokens", "3", "--seed", "1", "--ignore-eos"]) == 0
    err = capsys.readouterr().err
    assert "3 new tokens at " in err and "loaded in " in err.splitlines()[-1]
    assert main([*args, "--prompt", "the fox", "--prefill-only"]) == 0
    assert "prompt tokens in " in capsys.readouterr().err
    assert main([*args, "--prompt-ids", "1,9999"]) == 2
    assert "token id 9999" in capsys.readouterr().err
