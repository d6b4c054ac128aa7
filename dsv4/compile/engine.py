"""The engine: load a checkpoint once, then generate text or score tokens with it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv4.compile.chat import ChatCompletion, chat_completion, run_chat
from dsv4.compile.held import HeldSlots
from dsv4.compile.progress import PromptBar, watched
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
from dsv4.model.plan import CONTEXT_BYTES, PREFILL_CHUNK, Sizes, buffer_bytes, fit_text, longest_context, plan
from dsv4.model.source import Source
from dsv4.model.tokenizer import Tokenizer
from dsv4.model.transformer import Transformer

Prompt = str | list[int]
CPU_CHUNK = 512  # tokens of a prompt at a time on a CPU, where they take longer than weights


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
    kv: str = "bf16"  # formats of the cache's rows
    index: str = "bf16"
    chosen: bool = False  # whether "auto" made them compact

    def __str__(self) -> str:
        emulated = f"  activations of 4-bit weights: {self.activation}, emulated\n" if self.activation else ""
        compact = f" (rows {self.kv}, index keys {self.index}{', chosen for a long context' if self.chosen else ''})"
        compact = "" if self.kv == self.index == "bf16" else compact
        return (
            f"{self.checkpoint}\n{emulated}"
            f"weights {self.weight_bytes / 2**20:.1f} MiB, cache {self.cache_bytes / 2**20:.1f} MiB{compact}; "
            f"loaded in {self.load_seconds:.1f} s, compiled in {self.compile_seconds:.1f} s"
            + (f", captured in {self.capture_seconds:.1f} s" if self.capture_seconds else "")
        )


def load(
    folder: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    max_batch: int = 1,
    max_context: int = 4096,
    prefill_chunk: int | None = None,
    compile: bool = True,
    deterministic: bool = False,
    progress: bool = False,
    activation: str | None = None,
    kv: str = "auto",
    index: str = "auto",
) -> "Engine":
    """Load a folder of safetensors with config.json (and tokenizer.json, without which only token ids are accepted).

    device: default CUDA if present, else CPU. dtype: of activations and plain weights, torch.bfloat16 or torch.float32
    (or "bf16", "fp32"); default the config's. max_batch sequences of max_context tokens are allocated now and for good;
    prompts run in chunks of at most prefill_chunk tokens, default 2,048 on CUDA and 512 on a CPU (a chunk reads most of the
    weights, so larger ones are faster). With compile=False the same step runs eagerly.
    activation="nvfp4" emulates W4A4 kernels: what is multiplied with NVFP4 weights is quantised too. It is slow.

    kv, index: how the cache holds key/value rows, "bf16" (plain, in dtype) or "fp8", and the indexer's keys, "bf16", "fp8"
    or "fp4". "auto" is fp8 and fp4 for more than 65,536 tokens of max_context, else plain; the load report says so.

    deterministic: a request gets the same bits whatever else is in flight, in any slot and order; also with another
    max_batch of the same multiple of 8 (`score` and `logits`: with any). Prompts then get chunks of their own, which costs
    time if many are short, and the decode batch becomes a multiple of 8 rows; see dsv4.compile.runner. ValueError if equal
    rows get different bits on this device. Without it prompts share chunks, and a neighbour may change a log-probability
    as another rounding does.

    Raises ValueError for anything wrong with the arguments or the folder, before weights are read where possible.
    """
    config = ModelConfig.from_folder(folder)
    dtype = dtype_of(dtype, config)
    device = device_of(device)
    if prefill_chunk is None:
        prefill_chunk = PREFILL_CHUNK if device.type == "cuda" else CPU_CHUNK
    for name, value in (("max_batch", max_batch), ("max_context", max_context), ("prefill_chunk", prefill_chunk)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, found {value!r}")
    Cache(config, max_batch, max_context, dtype, "meta", kv, index)  # refuses bad sizes before any weight is read
    most = max_context if deterministic else max_batch * max_context  # that one chunk can be asked to hold
    prefill_chunk = min(prefill_chunk, most)
    sizes = Sizes(max_batch, max_context, dtype, kv, index, prefill_chunk)
    tokenizer = Tokenizer.from_folder(folder) if (Path(folder) / "tokenizer.json").exists() else None

    def build(source: Source) -> Transformer:
        model = Transformer(config, source)
        if activation is not None:
            quantise_activations(model, activation)
        if source.device.type == "meta":  # no weight is read yet, see load_folder
            check_memory(model, sizes, device)
        return model

    start = time.perf_counter()
    model, checkpoint = load_folder(folder, build, device, dtype, ProgressLine() if progress else None)
    cache = Cache(config, max_batch, max_context, dtype, device, kv, index)
    loaded = time.perf_counter() - start
    runner = Runner(model, cache, prefill_chunk, compile, deterministic)
    report = LoadReport(
        loaded,
        runner.compile_seconds,
        runner.capture_seconds,
        sum(buffer.nbytes for buffer in model.buffers()),
        cache.nbytes(),
        checkpoint,
        activation,
        cache.kv,
        cache.index,
        chosen=(kv, cache.kv) == ("auto", "fp8") or (index, cache.index) == ("auto", "fp4"),
    )
    return Engine(runner, tokenizer, report, Path(folder).absolute())  # it is read from later too, wherever that is


def device_memory(device: torch.device) -> int | None:
    """Bytes that an engine can have on a CUDA device, with those of the CUDA context; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)  # of a device with a context
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) + CONTEXT_BYTES


def check_memory(model: Transformer, sizes: Sizes, device: torch.device) -> None:
    """ValueError with the longest context that would fit, if an engine for `model` (which may be on the meta device) would
    not fit the device."""
    memory = device_memory(device)
    if memory is None:
        return
    weights = buffer_bytes(model)
    need = plan(weights, model.config, sizes)
    if need.total > memory:
        longest = longest_context(weights, model.config, sizes, memory)
        raise ValueError(f"{fit_text(need, longest, memory)} on {device}; load with less max_context or max_batch")


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


class Engine(HeldSlots):
    """A loaded model. It does one thing at a time: a call while a stream is unfinished raises RuntimeError."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer | None, load_report: LoadReport, folder: str | Path | None = None
    ):
        self.runner, self.tokenizer, self.load_report, self.folder = runner, tokenizer, load_report, folder
        self.activation = load_report.activation
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
        slots = self.scheduler.free_slots()
        results = []
        for start in range(0, len(ids), len(slots)):
            wave = dict(zip(slots, ids[start : start + len(slots)], strict=False))
            hidden: dict[int, list[Tensor]] = {slot: [] for slot in wave}
            for chunk in self.runner.chunks(list(wave.items())):
                out = self.runner.prefill(chunk)
                for piece in chunk.pieces:
                    rows = out[piece.start : piece.start + piece.count]
                    hidden[piece.slot].append(rows.clone())  # the next chunk may overwrite `out`
            for parts in hidden.values():
                rows = torch.cat(parts)
                results.append(torch.cat([self.model.logits(part) for part in rows.split(HEAD_ROWS)]))
        return results

    def score(self, requests: list[tuple[list[int], list[int]]]) -> list[Score]:
        """For each (context ids, continuation ids): the continuation's log-probability, and whether it is the greedy one.
        In order, and independent of what is scored together. See dsv4.compile.scoring."""
        self.scheduler.check_idle()
        return score(self.runner, self.scheduler.free_slots(), requests)

    def prefill(self, prompt: Prompt, slot: int | None = None, progress: bool | None = None) -> Timing:
        """Run a prompt through the model and time it, generating nothing. In a held slot the sequence stays: later requests
        that begin with it find it there. progress: a bar on stderr if it takes long; None shows it on a terminal."""
        ids = self._encode(prompt, 0)
        self.scheduler.check_idle()
        sequence = None if slot is None else self.scheduler.sequence(slot)
        self.runner.synchronize()
        start = time.perf_counter()
        kept = 0 if sequence is None else sequence.begin([*ids, -1])  # of all of it, not only of all but the last
        queue = self.runner.prompt_queue()
        queue.push(self.scheduler.free_slots()[0] if slot is None else slot, ids[kept:], kept)
        with PromptBar(len(ids), progress) as bar:
            while queue:
                chunk = queue.pop()
                if sequence is None:
                    self.runner.prefill(chunk)
                else:
                    [piece] = chunk.pieces
                    sequence.writes(piece.count)
                    self.runner.prefill(chunk)
                    sequence.ran(ids[piece.position : piece.position + piece.count])
                bar.add(chunk)
        if sequence is not None:
            sequence.mark()
        self.runner.synchronize()
        return Timing(prompt_tokens=len(ids), prefill_seconds=time.perf_counter() - start, kept_tokens=kept)

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        max_new_tokens: int | None = None,
        progress: bool | None = None,
        slot: int | None = None,
        **sampling,
    ) -> list[Completion]:
        """Generate for one prompt or many, of any lengths; strings get BOS in front, token ids are taken as they are.

        sampling: temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, stop_token_ids, ignore_eos, logprobs
        as in SamplingParams; prompt i draws with seed + i, so a result does not depend on what runs beside it (to
        rounding, or bitwise: see `dsv4.load`). progress: a bar on stderr, of the requests or of one long prompt; None shows
        it on a terminal.
        slot: a held slot (see `hold`) whose sequence one prompt continues.
        Returns one Completion per prompt, in order. Raises ValueError before anything runs if any prompt is bad.
        """
        if isinstance(prompts, (str, bytes)) or (isinstance(prompts, list) and prompts and type(prompts[0]) is int):
            prompts = [prompts]
        requests = self._requests(prompts, SamplingParams(max_new_tokens, **sampling), slot)
        for _ in watched(self.scheduler, requests, progress):
            pass
        completions = [request.completion() for request in requests]
        self.last = completions[-1] if completions else None
        return completions

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        progress: bool | None = None,
        slot: int | None = None,
        **sampling,
    ) -> Iterator[str]:
        """Generate for one prompt and yield its text as it becomes certain, always whole characters. Arguments, those of
        `generate`, are checked at the call, not at the first piece. Afterwards `engine.last` is the Completion."""
        [request] = self._requests([prompt], SamplingParams(max_new_tokens, **sampling), slot)
        if self.tokenizer is None:
            raise ValueError("stream needs a tokenizer, and the checkpoint folder has no tokenizer.json")

        def pieces() -> Iterator[str]:
            for _, piece in watched(self.scheduler, [request], progress):
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
        `ChatEncoding.encode`; further options, such as max_new_tokens, slot and progress, as in `generate`.
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
        slot, progress = options.pop("slot", None), options.pop("progress", None)
        params = SamplingParams(**options)
        ids = self.encoding.encode(messages, thinking=thinking, effort=effort, tools=tools, **prompt_options)
        [request] = self._requests([ids], params, slot)
        reasons = self.encoding.reasons_next(ids)
        if reasons:
            request.reasons_until(self.tokenizer.token_id(END_THINK))
        answer = self.encoding.stream(reasons, params.stop)

        def pieces() -> Iterator[ChatPiece]:
            yield from run_chat(watched(self.scheduler, [request], progress), request, answer)
            self.last = chat_completion(request, answer)

        return pieces()

    def _requests(self, prompts: list[Prompt], params: SamplingParams, slot: int | None = None) -> list[Request]:
        requests = []
        if slot is None:
            self.scheduler.free_slots()  # ValueError if there are none
        else:
            self.scheduler.sequence(slot)
            if isinstance(prompts, (list, tuple)) and len(prompts) != 1:
                raise ValueError(f"slot {slot} holds one sequence, found {len(prompts)} prompts; give one")
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
            requests.append(Request(ids, params.for_prompt(index), wanted or room, stop_ids, self.tokenizer, slot))
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
