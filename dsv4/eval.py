"""dsv4 as a model of EleutherAI's lm-evaluation-harness.

    from dsv4.eval import Dsv4LM
    results = lm_eval.simple_evaluate(model=Dsv4LM(engine), tasks=[...])      # or Dsv4LM("folder", batch_size=32)

Importing this module registers the name `dsv4`; the harness itself never looks for it, so `dsv4 eval` starts it from here.
A request's result does not depend on the batch size or on the order of the requests: to rounding, or to the bit with
deterministic=True (see `dsv4.load`). What differs from the harness's own `hf` model: BOS always begins the model's input,
also where a context was cut to fit; a request that cannot be answered (no text, or a continuation longer than the window)
gets log-probability -inf or an empty text and is listed in `refused`, where `hf` stops the run.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

import dsv4
from dsv4.compile.engine import Engine
from dsv4.compile.progress import watched
from dsv4.compile.requests import Request
from dsv4.eval_cache import guard, keyed_path
from dsv4.eval_requests import Refused, decoding, fit_context
from dsv4.model.fingerprint import fingerprint

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
except ImportError as error:
    raise ImportError(f"dsv4.eval needs lm-eval ({error}); install it with: pip install 'dsv4[eval]'") from error

_log = logging.getLogger(__name__)
_WAVE = 16  # scored sequences per slot between two saves of partial results
_SEED = 1234  # of sampled generations, unless a task gives one
_NEVER = float("-inf")


class Dsv4LM(TemplateLM):
    """An Engine behind the harness's interface.

    model (or `pretrained`, the harness's usual word): a checkpoint folder, or an Engine, which is used as it is.
    batch_size: slots, an integer; "auto" is refused, because memory is taken once, at load. max_length: context window in
    tokens, default the checkpoint's or 8192, whichever is less. max_gen_toks: where a task does not say, default 256 or
    half the window. thinking, effort: of the chat template; with thinking the reasoning is cut from answers, and
    log-likelihoods are refused. device, dtype, prefill_chunk, compile, activation, deterministic, kv and index as in
    `dsv4.load`.
    """

    def __init__(
        self,
        model: str | Path | Engine | None = None,
        pretrained: str | Path | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        prefill_chunk: int | None = None,
        compile: bool | None = None,
        activation: str | None = None,
        deterministic: bool | None = None,
        kv: str | None = None,
        index: str | None = None,
        thinking: bool = False,
        effort: str | None = None,
        **unknown,
    ):
        super().__init__()
        if unknown:
            raise ValueError(f"model arguments: found {', '.join(sorted(unknown))}, which dsv4 does not have")
        if (model is None) == (pretrained is None):
            raise ValueError("model arguments: give a checkpoint folder as model=FOLDER")
        if max_batch_size is not None:
            raise ValueError(f"max_batch_size={max_batch_size} belongs to batch_size=auto, which dsv4 does not have")
        given = model if model is not None else pretrained
        if isinstance(given, Engine):
            self.engine = given
            settings = {"device": device, "dtype": dtype, "prefill_chunk": prefill_chunk, "compile": compile}
            settings |= {"activation": activation, "deterministic": deterministic, "kv": kv, "index": index}
            named = [name for name, value in settings.items() if value is not None]
            if named:
                raise ValueError(f"model arguments: {', '.join(named)} of an Engine are set when it is loaded")
            if batch_size is not None and _whole("batch_size", batch_size) != self.batch_size:
                raise ValueError(f"batch_size={batch_size}, but the Engine was loaded with max_batch={self.batch_size}")
        else:
            self.engine = _load(
                given, batch_size, max_length, device, dtype, prefill_chunk, compile, activation, deterministic, kv, index
            )
        window = self.engine.cache.max_context
        self._max_length = window if max_length is None else _whole("max_length", max_length)
        if self._max_length > window:
            raise ValueError(f"max_length={max_length}, but the Engine was loaded with max_context={window}")
        if self.engine.tokenizer is None or self.engine.folder is None:
            raise ValueError("an evaluation needs a tokenizer, and the checkpoint folder has no tokenizer.json")
        usual = min(256, max(1, self._max_length // 2))
        self._max_gen_toks = usual if max_gen_toks is None else _whole("max_gen_toks", max_gen_toks)
        _flag("thinking", thinking)
        if thinking or effort is not None:
            self.engine.encoding.check(thinking, effort)
        self.thinking, self.effort = thinking, effort
        self.refused: list[str] = []
        self._fingerprint: str | None = None
        self._warned: set[str] = set()

    # ---- what the harness asks about the model -----------------------------------------------------------------------
    @property
    def eot_token_id(self) -> int:
        return self.engine.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Stands in for an empty context: BOS."""
        return self.engine.tokenizer.bos_token_id

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def batch_size(self) -> int:
        return self.engine.cache.num_slots

    @property
    def device(self) -> torch.device:
        return self.engine.runner.device

    @property
    def tokenizer_name(self) -> str:
        """Part of the harness's key for stored prompts: vocabulary, chat format and its settings."""
        vocabulary = hashlib.sha256((Path(self.engine.folder) / "tokenizer.json").read_bytes()).hexdigest()[:12]
        return f"dsv4-{vocabulary}-{self.chat_template(True)}".replace(" ", "-")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """A name for the chat encoding; there is one, in code, and no other can be chosen."""
        if chat_template is False or chat_template is None:
            return None
        if isinstance(chat_template, str):
            raise ValueError(f"apply_chat_template={chat_template!r}: dsv4 has one chat encoding; give no name")
        return f"{self.engine.encoding.format} {dsv4.__version__} thinking={self.thinking} effort={self.effort}"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of chat messages, BOS included; without a generation prompt the last message is gone on with."""
        encoding, goes_on = self.engine.encoding, not add_generation_prompt
        options = {"thinking": self.thinking, "effort": self.effort}
        options |= {"continue_final": True} if goes_on and chat_history[-1]["role"] == "assistant" else {}
        options |= {"generation_prompt": False} if goes_on and "continue_final" not in options else {}
        text = encoding.render(chat_history, **options)
        if self.tok_encode(text) != encoding.encode(chat_history, **options):
            self._warn_once("control", "a message spells a control token, which acts as one: the harness passes text")
        return text

    def get_model_info(self) -> dict:
        """Goes into the results file; the harness asks once, after the run."""
        if self.refused:
            _log.warning("%d requests were refused, the first: %s", len(self.refused), self.refused[0])
        return {
            "dsv4_version": dsv4.__version__,
            "fingerprint": self.fingerprint,
            "model_dtype": str(self.engine.model.embed.dtype),
            "max_length": self.max_length,
            "refused": self.refused,
        }

    # ---- answers that are stored -------------------------------------------------------------------------------------
    @property
    def fingerprint(self) -> str:
        """Of the checkpoint and everything that may change an answer by more than rounding; the batch size may not."""
        if self._fingerprint is None:
            settings = {
                "version": dsv4.__version__,
                "torch": torch.__version__,
                "device": self.device.type,
                "cache": [str(self.engine.model.embed.dtype), self.engine.cache.kv, self.engine.cache.index],
                "lengths": [self.max_length, self.max_gen_toks],
                "chat": [self.thinking, self.effort],
                "activation": self.engine.load_report.activation,
                "deterministic": self.engine.runner.deterministic,
            }
            self._fingerprint = fingerprint(self.engine.folder, settings)
        return self._fingerprint

    def cache_path(self, path: str) -> str:
        """What to give `simple_evaluate(use_cache=...)`, so that answers of other checkpoints or settings stay apart."""
        return keyed_path(path, self.fingerprint)

    def set_cache_hook(self, cache_hook) -> None:
        if cache_hook.dbdict is not None:
            guard(cache_hook.dbdict, self.fingerprint)
        super().set_cache_hook(cache_hook)

    # ---- text to tokens ----------------------------------------------------------------------------------------------
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """BOS comes first exactly once, also if the text already spells it, unless add_special_tokens is False."""
        return self.engine.tokenizer.encode(string, add_bos=add_special_tokens is not False)

    def tok_decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return self.engine.tokenizer.decode(tokens, skip_special=skip_special_tokens)

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """A scored pair in the window: all but the last token are run."""
        if not continuation:
            raise Refused("the continuation is empty")
        if len(continuation) > self.max_length:
            raise Refused(f"the continuation has {len(continuation)} tokens, and max_length is {self.max_length}")
        room = self.max_length + 1 - len(continuation)
        if len(context) > room:
            self._warn_once("cut", f"contexts are cut from the left to fit max_length={self.max_length}")
        return fit_context(context, room, self.prefix_token_id), continuation

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        _check_text(context, continuation)
        if context:
            return self._encode_pair(context, continuation)
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        bos = self.prefix_token_id
        return [bos], tokens[1:] if tokens[:1] == [bos] else tokens

    # ---- the three kinds of requests ---------------------------------------------------------------------------------
    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if self.thinking:
            raise ValueError("log-likelihoods of answers mean nothing with thinking=True; use a generate_until task")
        pairs = self._each("loglikelihood", [request.args for request in requests], self._pair)
        keyed = [None if pair is None else (requests[i].args, *pair) for i, pair in enumerate(pairs)]
        return self._loglikelihood_tokens(keyed, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """requests: (arguments as they came, context ids, continuation ids), or None where one was refused."""
        results: list[tuple[float, bool]] = [(_NEVER, False)] * len(requests)
        fitted = self._each("loglikelihood", [r and r[1:] for r in requests], lambda *pair: self._fit(*pair))

        def done(index: int, score) -> None:
            results[index] = (score.logprob, score.greedy)
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])

        self._score(fitted, done, "log-likelihoods", disable_tqdm)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts in windows of max_length, each of which predicts what the last one did not."""

        def windows(text: str) -> list[tuple[list[int], list[int]]]:
            _check_text(text)
            # without BOS: the windows put it in front
            tokens = self.tok_encode(text, add_special_tokens=False)
            tokens = tokens[1:] if tokens[:1] == [self.prefix_token_id] else tokens
            rolling = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            return [utils.make_disjoint_window(window) for window in rolling]

        texts = self._each("loglikelihood_rolling", [request.args for request in requests], windows)
        results = [_NEVER if parts is None else 0.0 for parts in texts]
        left = [len(parts or ()) for parts in texts]
        flat = [(index, part) for index, parts in enumerate(texts) for part in parts or ()]

        def done(at: int, score) -> None:
            index = flat[at][0]
            results[index] += score.logprob
            left[index] -= 1
            if left[index] == 0:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[index].args, results[index])

        self._score([part for _, part in flat], done, "rolling log-likelihoods", disable_tqdm)
        return results

    def _score(self, pairs: list, done: Callable, what: str, quiet: bool) -> None:
        """Score what is not None, longest first; `done(index, score)` as results come."""
        order = [index for index, pair in enumerate(pairs) if pair is not None]
        # Longest first: if memory is short, that shows at once, and estimates of the time left fall. Then by tokens, so
        # that choices that share a forward stand side by side.
        order.sort(key=lambda i: (-len(pairs[i][0]) - len(pairs[i][1]), pairs[i]))
        with tqdm(total=len(order), desc=what, disable=quiet) as bar:
            for start in range(0, len(order), _WAVE * self.batch_size):
                wave = order[start : start + _WAVE * self.batch_size]
                for index, score in zip(wave, self.engine.score([pairs[i] for i in wave]), strict=True):
                    done(index, score)
                bar.update(len(wave))

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        results = [""] * len(requests)
        bos, stop_ids = self.prefix_token_id, frozenset(self.engine.config.eos_token_ids)
        for request in requests:  # what is wrong with a task's settings is wrong with all of its requests
            decoding(request.args[1], self.max_gen_toks, _SEED)

        def prepare(context: str, gen_kwargs: dict) -> Request:
            _check_text(context)
            ids, wanted = self.tok_encode(context), decoding(gen_kwargs, self.max_gen_toks, _SEED)
            room = self.max_length - wanted.max_new_tokens
            if room < 1:
                raise Refused(f"{wanted.max_new_tokens} new tokens leave no room in max_length={self.max_length}")
            if len(ids) > room:
                self._warn_once("cut", f"contexts are cut from the left to fit max_length={self.max_length}")
            ids = fit_context(ids, room, bos)
            request = Request(ids, wanted, wanted.max_new_tokens, stop_ids, self.engine.tokenizer)
            if self.thinking and self.engine.encoding.reasons_next(ids):
                request.reasons_until(self.engine.tokenizer.token_id("</think>"))
            elif self.thinking:
                reason = "without --apply_chat_template, or with the task's gen_prefix,"
                self._warn_once("open", f"{reason} prompts do not open the reasoning: answers are taken whole")
            return request

        prepared = self._each("generate_until", [request.args for request in requests], prepare)
        waiting = {id(request): index for index, request in enumerate(prepared) if request is not None}
        order = sorted((r for r in prepared if r is not None), key=lambda r: (-len(r.prompt), r.prompt))
        for request, _ in watched(self.engine.scheduler, order, not disable_tqdm, "generations"):
            if request.finish_reason:
                index = waiting[id(request)]
                results[index] = request.answer
                self.cache_hook.add_partial("generate_until", requests[index].args, request.answer)
        return results

    # ---- requests that cannot be answered ----------------------------------------------------------------------------
    def _each(self, kind: str, arguments: list, prepare: Callable) -> list:
        """prepare(*arguments) of each; None, and a line in `refused`, where that is impossible or already was."""
        results = []
        for index, each in enumerate(arguments):
            result = None
            if each is not None:
                try:
                    result = prepare(*each)
                except ValueError as error:
                    self.refused.append(f"{kind} request {index}: {error}")
                    _log.warning("refused: %s", self.refused[-1])
            results.append(result)
        return results

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            _log.warning(text)


def _load(
    folder, batch_size, max_length, device, dtype, prefill_chunk, compile, activation, deterministic, kv, index
) -> Engine:
    from dsv4.model.config import ModelConfig

    window = min(ModelConfig.from_folder(folder).max_position_embeddings, 8192)
    return dsv4.load(
        folder,
        device=device,
        dtype=dtype,
        max_batch=8 if batch_size is None else _whole("batch_size", batch_size),
        max_context=window if max_length is None else _whole("max_length", max_length),
        prefill_chunk=None if prefill_chunk is None else _whole("prefill_chunk", prefill_chunk),
        compile=True if compile is None else _flag("compile", compile),
        progress=True,
        activation=activation,
        deterministic=deterministic is not None and _flag("deterministic", deterministic),
        kv="auto" if kv is None else kv,
        index="auto" if index is None else index,
    )


def _whole(name: str, value) -> int:
    """An integer >= 1, also as text, as it comes from a command line."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, (bool, float)):
        extra = " (memory is taken once, at load: try one)" if name == "batch_size" else ""
        raise ValueError(f"{name} must be an integer >= 1, found {value!r}{extra}")
    return number


def _flag(name: str, value) -> bool:
    if type(value) is not bool:  # a command line gives "no" as text, which would count as true
        raise ValueError(f"{name} must be True or False, found {value!r}")
    return value


def _check_text(*texts: object) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise Refused(f"found {type(text).__name__}, expected text")


if "dsv4" not in model_registry:  # a second registration, as after importlib.reload, is an error
    model_registry.register("dsv4")(Dsv4LM)
