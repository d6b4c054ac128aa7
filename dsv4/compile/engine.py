"""The engine: load a checkpoint once, then generate text or score tokens with it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv4.compile.chat import ChatCompletion, chat_completion, run_chat
from dsv4.compile.progress import watched
from dsv4.compile.requests import Request
from dsv4.compile.runner import HEAD_ROWS, Runner
from dsv4.compile.sampling import MAX_STOP_IDS, Completion, SamplingParams, Timing
from dsv4.compile.scheduler import Scheduler
from dsv4.compile.scoring import Score, score
from dsv4.model.cache import Cache
from dsv4.model.checkpoint import LoadReport as CheckpointReport
from dsv4.model.checkpoint import ProgressLine, load_folder
from dsv4.model.config import ModelConfig
from dsv4.model.encoding import ChatEncoding, ChatPiece, Messages
from dsv4.model.encoding_tools import END_THINK
from dsv4.model.linear import quantise_activations
from dsv4.model.source import Source
from dsv4.model.tokenizer import Tokenizer
from dsv4.model.transformer import Transformer

Prompt = str | list[int]


@dataclass(frozen=True)
class LoadReport:
    """What loading took: seconds, and bytes on the device."""

    load_seconds: float
    compile_seconds: float
    capture_seconds: float
    weight_bytes: int
    cache_bytes: int
    checkpoint: CheckpointReport
    activation: str | None = None  # "nvfp4" if activations are quantised too

    def __str__(self) -> str:
        emulated = f"  activations of 4-bit weights: {self.activation}, emulated\n" if self.activation else ""
        return (
            f"{self.checkpoint}\n{emulated}"
            f"weights {self.weight_bytes / 2**20:.1f} MiB, cache {self.cache_bytes / 2**20:.1f} MiB; "
            f"loaded in {self.load_seconds:.1f} s, compiled in {self.compile_seconds:.1f} s"
            + (f", captured in {self.capture_seconds:.1f} s" if self.capture_seconds else "")
        )


def load(
    folder: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    max_batch: int = 1,
    max_context: int = 4096,
    prefill_chunk: int = 512,
    compile: bool = True,
    deterministic: bool = False,
    progress: bool = False,
    activation: str | None = None,
) -> "Engine":
    """Load a folder of safetensors with config.json (and tokenizer.json, without which only token ids are accepted).

    device: default CUDA if present, else CPU. dtype: of activations and plain weights, torch.bfloat16 or torch.float32
    (or "bf16", "fp32"); default the config's. max_batch sequences of max_context tokens are allocated now and for good;
    prompts run in chunks of at most prefill_chunk tokens. With compile=False the same step runs eagerly.
    activation="nvfp4" emulates W4A4 kernels: what is multiplied with NVFP4 weights is quantised too. It is slow.

    deterministic: a request gets the same bits whatever else is in flight, in any slot and order; also with another
    max_batch of the same multiple of 8 (`score` and `logits`: with any). Prompts then get chunks of their own, which costs
    time if many are short, and the decode batch becomes a multiple of 8 rows; see dsv4.compile.runner. ValueError if equal
    rows get different bits on this device. Without it prompts share chunks, and a neighbour may change a log-probability
    as another rounding does.

    Raises ValueError for anything wrong with the arguments or the folder, before weights are read where possible.
    """
    config = ModelConfig.from_folder(folder)
    dtype = dtype_of(dtype, config)
    for name, value in (("max_batch", max_batch), ("max_context", max_context), ("prefill_chunk", prefill_chunk)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, found {value!r}")
    device = device_of(device)
    Cache(config, max_batch, max_context, dtype, "meta")  # refuses bad sizes before any weight is read
    tokenizer = Tokenizer.from_folder(folder) if (Path(folder) / "tokenizer.json").exists() else None

    def build(source: Source) -> Transformer:
        model = Transformer(config, source)
        if activation is not None:
            quantise_activations(model, activation)
        return model

    start = time.perf_counter()
    model, checkpoint = load_folder(folder, build, device, dtype, ProgressLine() if progress else None)
    cache = Cache(config, max_batch, max_context, dtype, device)
    loaded = time.perf_counter() - start
    most = max_context if deterministic else max_batch * max_context  # that one chunk can be asked to hold
    runner = Runner(model, cache, min(prefill_chunk, most), compile, deterministic)
    report = LoadReport(
        loaded,
        runner.compile_seconds,
        runner.capture_seconds,
        sum(buffer.nbytes for buffer in model.buffers()),
        cache.nbytes(),
        checkpoint,
        activation,
    )
    return Engine(runner, tokenizer, report, folder)


def dtype_of(dtype: torch.dtype | str | None, config: ModelConfig) -> torch.dtype:
    """The dtype asked for, or the config's; ValueError if it is none of the two there are."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    dtype = config.dtype if dtype is None else dtypes.get(dtype, dtype)
    if dtype not in dtypes.values():
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float32 (bf16, fp32), found {dtype}")
    return dtype


def device_of(device: str | torch.device | None) -> torch.device:
    """The device asked for; ValueError if there is none of that name here."""
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be cpu, cuda or cuda:N, found {device!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N, found {str(device)!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"{count} of them" if count else "no CUDA device"
            raise ValueError(f"device {device} was asked for, but PyTorch sees {found} here; use device='cpu' or another")
    return device


class Engine:
    """A loaded model. It does one thing at a time: a call while a stream is unfinished raises RuntimeError."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer | None, load_report: LoadReport, folder: str | Path | None = None
    ):
        self.runner, self.tokenizer, self.load_report, self.folder = runner, tokenizer, load_report, folder
        self._encoding: ChatEncoding | None = None
        self.config: ModelConfig = runner.model.config
        self.scheduler = Scheduler(runner)
        self.last: Completion | None = None

    @property
    def model(self) -> Transformer:
        return self.runner.model

    @property
    def cache(self) -> Cache:
        return self.runner.cache

    @torch.no_grad()
    def logits(self, prompts: list[list[int]]) -> list[Tensor]:
        """Teacher-forced logits: for each prompt of token ids one float32 tensor [len, vocab]; row t is the
        distribution of the token after t."""
        ids = self._encode_all(prompts)
        self.scheduler.check_idle()
        results = []
        for start in range(0, len(ids), self.cache.num_slots):
            wave = ids[start : start + self.cache.num_slots]
            hidden: list[list[Tensor]] = [[] for _ in wave]
            for chunk in self.runner.chunks(list(enumerate(wave))):
                out = self.runner.prefill(chunk)
                for piece in chunk.pieces:
                    rows = out[piece.start : piece.start + piece.count]
                    hidden[piece.slot].append(rows.clone())  # the next chunk may overwrite `out`
            for parts in hidden:
                rows = torch.cat(parts)
                results.append(torch.cat([self.model.logits(part) for part in rows.split(HEAD_ROWS)]))
        return results

    def score(self, requests: list[tuple[list[int], list[int]]]) -> list[Score]:
        """For each (context ids, continuation ids): the continuation's log-probability, and whether it is the greedy one.
        In order, and independent of what is scored together. See dsv4.compile.scoring."""
        self.scheduler.check_idle()
        return score(self.runner, requests)

    def prefill(self, prompt: Prompt) -> Timing:
        """Run a prompt through the model and time it, generating nothing."""
        ids = self._encode(prompt, 0)
        self.scheduler.check_idle()
        self.runner.synchronize()
        start = time.perf_counter()
        for chunk in self.runner.chunks([(0, ids)]):
            self.runner.prefill(chunk)
        self.runner.synchronize()
        return Timing(prompt_tokens=len(ids), prefill_seconds=time.perf_counter() - start)

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        max_new_tokens: int | None = None,
        progress: bool | None = None,
        **sampling,
    ) -> list[Completion]:
        """Generate for one prompt or many, of any lengths; strings get BOS in front, token ids are taken as they are.

        sampling: temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, stop_token_ids, ignore_eos, logprobs
        as in SamplingParams; prompt i draws with seed + i, so a result does not depend on what runs beside it (to
        rounding, or bitwise: see `dsv4.load`). progress: a bar on stderr; None shows it for several prompts on a terminal.
        Returns one Completion per prompt, in order. Raises ValueError before anything runs if any prompt is bad.
        """
        if isinstance(prompts, (str, bytes)) or (isinstance(prompts, list) and prompts and type(prompts[0]) is int):
            prompts = [prompts]
        requests = self._requests(prompts, SamplingParams(max_new_tokens, **sampling))
        for _ in watched(self.scheduler, requests, False if progress is None and len(requests) < 2 else progress):
            pass
        completions = [request.completion() for request in requests]
        self.last = completions[-1] if completions else None
        return completions

    def stream(self, prompt: Prompt, max_new_tokens: int | None = None, **sampling) -> Iterator[str]:
        """Generate for one prompt and yield its text as it becomes certain, always whole characters. Arguments are
        checked at the call, not at the first piece. Afterwards `engine.last` is the Completion."""
        [request] = self._requests([prompt], SamplingParams(max_new_tokens, **sampling))
        if self.tokenizer is None:
            raise ValueError("stream needs a tokenizer, and the checkpoint folder has no tokenizer.json")

        def pieces() -> Iterator[str]:
            for _, piece in self.scheduler.run([request]):
                if piece:
                    yield piece
            self.last = request.completion()

        return pieces()

    @property
    def encoding(self) -> ChatEncoding:
        """How chat messages become prompts. Found out from the checkpoint's folder; assign another to override it."""
        if self._encoding is None:
            if self.tokenizer is None:
                raise ValueError("chat needs a tokenizer, and the checkpoint folder has no tokenizer.json")
            if self.folder is None:
                raise ValueError("this engine was not loaded from a folder; assign engine.encoding = ChatEncoding(...)")
            self._encoding = ChatEncoding.from_folder(self.folder, self.tokenizer)
        return self._encoding

    @encoding.setter
    def encoding(self, encoding: ChatEncoding) -> None:
        self._encoding = encoding

    def chat(
        self, messages: Messages, thinking: bool = False, effort: str | None = None, tools=None, **options
    ) -> ChatCompletion:
        """The model's answer to chat messages, a ChatCompletion: reasoning, content, tool calls, and all of Completion.

        messages, effort, tools and the options response_format, drop_thinking, continue_final as in
        `ChatEncoding.encode`; further options, such as max_new_tokens, as in `generate`.
        """
        for _ in self.stream_chat(messages, thinking, effort, tools, **options):
            pass
        return self.last

    def stream_chat(
        self, messages: Messages, thinking: bool = False, effort: str | None = None, tools=None, **options
    ) -> Iterator[ChatPiece]:
        """The same piece by piece: (kind, text), kind "reasoning" or "content". Arguments are checked at the call.
        Tool calls, which are of use only when whole, are in `engine.last` afterwards."""
        prompt_options = {
            name: options.pop(name) for name in ("response_format", "drop_thinking", "continue_final") if name in options
        }
        params = SamplingParams(**options)
        ids = self.encoding.encode(messages, thinking=thinking, effort=effort, tools=tools, **prompt_options)
        [request] = self._requests([ids], params)
        reasons = self.encoding.reasons_next(ids)
        if reasons:
            request.reasons_until(self.tokenizer.token_id(END_THINK))
        answer = self.encoding.stream(reasons, params.stop)

        def pieces() -> Iterator[ChatPiece]:
            yield from run_chat(self.scheduler, request, answer)
            self.last = chat_completion(request, answer)

        return pieces()

    def _requests(self, prompts: list[Prompt], params: SamplingParams) -> list[Request]:
        requests = []
        eos = () if params.ignore_eos else self.config.eos_token_ids
        stop_ids = frozenset((*eos, *params.stop_token_ids))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"at most {MAX_STOP_IDS} stop token ids (EOS included) are supported, found {len(stop_ids)}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the checkpoint folder has no tokenizer.json")
        for index, ids in enumerate(self._encode_all(prompts)):
            room = self.cache.max_context - len(ids)
            wanted = params.max_new_tokens
            if room < 1 or (wanted is not None and wanted > room):
                raise ValueError(
                    f"prompt {index} has {len(ids)} tokens and {wanted or 'at least 1'} new ones were asked for, but "
                    f"max_context is {self.cache.max_context}; load with a larger max_context or ask for less"
                )
            requests.append(Request(ids, params.for_prompt(index), wanted or room, stop_ids, self.tokenizer))
        return requests

    def _encode_all(self, prompts: list[Prompt]) -> list[list[int]]:
        if not isinstance(prompts, (list, tuple)):
            raise ValueError(f"prompts must be a list of strings or token-id lists, found {type(prompts).__name__}")
        return [self._encode(prompt, index) for index, prompt in enumerate(prompts)]

    def _encode(self, prompt: Prompt, index: int) -> list[int]:
        """Token ids of a prompt; ValueError if it is empty, too long or has ids that the model does not know."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("text prompts need a tokenizer, and the checkpoint folder has no tokenizer.json")
            ids = self.tokenizer.encode(prompt) if prompt else []
        elif isinstance(prompt, (list, tuple)):
            ids = list(prompt)
        else:
            raise ValueError(f"prompt {index} must be a string or a list of token ids, found {type(prompt).__name__}")
        if not ids:
            raise ValueError(f"prompt {index} is empty; give at least one token")
        vocab, limit = self.config.vocab_size, self.cache.max_context
        for i in ids:
            if type(i) is not int or not 0 <= i < vocab:
                raise ValueError(f"prompt {index} has token id {i!r}, but token ids are the integers 0..{vocab - 1}")
        if len(ids) > limit:
            raise ValueError(f"prompt {index} has {len(ids)} tokens, but max_context is {limit}; load with a larger one")
        return ids
