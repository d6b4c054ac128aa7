"""Text to token ids and back, and text that appears piece by piece while tokens arrive.

DeepSeek's tokenizer is a byte-level BPE: a token is a run of bytes, and a character outside ASCII is often split over
two or three tokens. `TextStream` therefore works on bytes and hands out whole characters only.
"""

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from dsv4.model.config import read_json_object

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"


class Tokenizer:
    """A checkpoint's `tokenizer.json`, with the ids of BOS and EOS.

    `bos_token_id` is the id that begins every sequence, `eos_token_ids` are the ids that end one. Build it with
    `from_folder`. ValueError if the tokenizer is not byte-level.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int, eos_token_ids: Sequence[int]):
        decoder = type(backend.decoder).__name__
        if decoder != "ByteLevel":
            raise ValueError(f"tokenizer.json: found a decoder of type {decoder}, expected ByteLevel")
        # a tokenizer.json may carry the settings of the last training run, which would cut or pad prompts
        backend.no_truncation()
        backend.no_padding()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._backend = backend
        # The same model without its table of literals. `encode_special_tokens` of the library is not enough: it leaves
        # added tokens that are not marked special, and `<｜User｜>` or `</think>` may be such.
        self._plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        self._special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._byte_of = _byte_level_alphabet()

    @classmethod
    def from_folder(cls, folder) -> "Tokenizer":
        """Read `tokenizer.json`; BOS and EOS come from `tokenizer_config.json` and `config.json`, whichever names them.

        If neither does, they are DeepSeek's own literals. ValueError with the path if a file is missing or broken, or
        if the two files name different BOS tokens.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file}: no such file, text needs the tokenizer of the checkpoint next to its weights")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for anything it cannot read
            raise ValueError(f"{file}: not a tokenizer that can be read ({error})") from error
        names = (folder / "tokenizer_config.json", folder / "config.json")
        named, ids = (read_json_object(name) if name.is_file() else {} for name in names)

        def token_ids(name: str) -> list[int]:
            """All ids that the two files give for "bos" or "eos", without repetition."""
            literal = named.get(f"{name}_token")
            if isinstance(literal, dict):
                literal = literal.get("content")
            number = ids.get(f"{name}_token_id")
            numbers = number if isinstance(number, list) else [number] if number is not None else []
            if literal is None and not numbers:
                literal = {"bos": BOS, "eos": EOS}[name]
            found = [] if literal is None else [_token_id(backend, literal, file)]
            return list(dict.fromkeys(found + numbers))

        bos = token_ids("bos")
        if len(bos) > 1:
            raise ValueError(
                f"{folder}: tokenizer_config.json says BOS is {bos[0]} ({backend.id_to_token(bos[0])}), "
                f"config.json says {bos[1]}; expected the same token"
            )
        return cls(backend, bos[0], token_ids("eos"))

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        BOS comes first exactly once, also if the text already starts with its literal. Literals of control tokens in
        the text become those tokens; with `parse_special=False` they stay ordinary text, for text from strangers.
        """
        if not isinstance(text, str):
            raise ValueError(f"text: found {type(text).__name__}, expected str")
        bad = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if bad is not None:
            raise ValueError(f"text: found {text[bad]!r} at position {bad}, which is not valid Unicode text")
        backend = self._backend if parse_special else self._plain
        ids = backend.encode(text, add_special_tokens=False).ids
        if add_bos and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of some token ids. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary give no text.

        `skip_special` leaves out the tokens that tokenizer.json marks as special, such as BOS and EOS.
        """
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=skip_special)

    def token_id(self, literal: str) -> int:
        """The id of a token by its literal, such as `</think>`. ValueError if the vocabulary has no such token."""
        return _token_id(self._backend, literal, "tokenizer.json")

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        """The bytes that a token stands for; none for an id beyond the vocabulary, or for a special one if skipped."""
        token = self._backend.id_to_token(id)
        if token is None or (skip_special and id in self._special):
            return b""
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token outside the byte alphabet, which is kept as its literal
            return token.encode()


class TextStream:
    """Text of tokens that arrive one at a time, in whole characters, cut at the first stop string.

    Joined, the pieces of `push` and `flush` are `tokenizer.decode` of all ids, up to the stop string that is complete
    first (of several that end at the same character, the longest). Text that may be the beginning of a stop string is
    held back until that is decided. After a stop, `stopped` is True, `stop_string` is the string that was found, and
    later tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] | None = None, skip_special: bool = True):
        self.stop = check_stop(stop)
        self.stopped = False
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, id: int) -> str:
        """The text that one more token settles; often empty."""
        if self.stopped:
            return ""
        return self._release(self._utf8.decode(self._tokenizer.token_bytes(id, self._skip_special)))

    def flush(self) -> str:
        """The rest, when no token follows. A character whose last bytes never came is U+FFFD, as in `decode`."""
        if self.stopped:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        """Add new text to what is held back, and return what cannot belong to a stop string any more."""
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self.stop if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.stop_string = min(matches)
            self.stopped = True
            self._held = ""
            return text[:at]
        held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def check_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple. ValueError unless they are strings that are not empty."""
    stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for item in stop:
        if not isinstance(item, str) or not item:
            raise ValueError(f"stop: found {item!r}, expected strings that are not empty")
    return stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is the beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character in a byte-level vocabulary: printable ones stand for themselves, others for 256 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _token_id(backend: tokenizers.Tokenizer, literal: str, source) -> int:
    id = backend.token_to_id(literal)
    if id is None:
        raise ValueError(f"{source}: found no token {literal!r} in the vocabulary")
    return id
