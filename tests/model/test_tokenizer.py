"""Tokenizer and TextStream on a small byte-level BPE, built here with the layout of DeepSeek's tokenizer."""

import json
import random
from functools import lru_cache

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from dsv4.model.tokenizer import BOS, EOS, TextStream, Tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog. " * 4, "深度求索 模型 模型 模型", "naïve café", "🙂🙂🚀 🙂"]
TEXTS = [
    "hello world",
    "  spaces\n\ttabs\r\n",
    "深度求索的模型。これは日本語です。한국어",
    "emoji 🙂🚀👩‍👩‍👧‍👦🏳️‍🌈 end",
    "naïve café ÀÉÎ ß Ω жизнь \u200b \ufffd x",
    "<｜User｜>hi</think><｜a b é｜>",
    "",
]


def build(folder, **config) -> Tokenizer:
    """Write a tokenizer folder: 256 bytes, some merges, special and ordinary added tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[BOS, EOS], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    # as in DeepSeek's file, markers of the chat format are added tokens that are not special
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1} | config))
    return Tokenizer.from_folder(folder)


MARKERS = ["<｜User｜>", "</think>", "<｜a b é｜>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 0 and ids.count(0) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=False) == BOS + text
    assert ids[1:] == tokenizer.encode(text, add_bos=False)


def test_bos_is_not_doubled(tokenizer):
    assert tokenizer.encode(BOS + "hi") == tokenizer.encode("hi")
    assert tokenizer.encode(BOS + "hi", add_bos=False) == tokenizer.encode("hi")
    assert tokenizer.encode(BOS) == [0] and tokenizer.encode("") == [0]
    assert tokenizer.encode("hi" + BOS).count(0) == 2


def test_control_literals_can_stay_text(tokenizer):
    text = f"a{EOS}<｜User｜>b</think>"
    assert tokenizer.encode(text, add_bos=False)[1] == tokenizer.token_id(EOS) == 1
    plain = tokenizer.encode(BOS + text, parse_special=False)
    assert plain[0] == 0 and not {0, 1, *map(tokenizer.token_id, MARKERS)} & set(plain[1:])
    assert tokenizer.decode(plain) == BOS + text
    # nothing changes for text without literals, and the tokenizer still parses them afterwards
    assert tokenizer.encode("the fox 🙂", parse_special=False) == tokenizer.encode("the fox 🙂")
    assert tokenizer.encode(EOS, add_bos=False) == [1]


def test_ids_and_vocabulary(tokenizer):
    assert tokenizer.token_id("</think>") == tokenizer.vocab_size - 2
    assert tokenizer.eos_token_ids == (1,)
    with pytest.raises(ValueError, match="'<none>'"):
        tokenizer.token_id("<none>")
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_bos_and_eos_from_the_files(tmp_path):
    assert build(tmp_path, eos_token_id=[1, 7]).eos_token_ids == (1, 7)
    names = tmp_path / "tokenizer_config.json"
    names.write_text(json.dumps({"bos_token": {"content": BOS}, "eos_token": "</think>"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == (tokenizer.token_id("</think>"), 1, 7)  # a model may end with either
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 5, "eos_token_id": 1}))
    with pytest.raises(ValueError, match=r"BOS is 0 .*config.json says 5"):
        Tokenizer.from_folder(tmp_path)
    names.write_text(json.dumps({"bos_token": "<none>"}))
    with pytest.raises(ValueError, match="found no token '<none>'"):
        Tokenizer.from_folder(tmp_path)
    names.unlink()
    (tmp_path / "config.json").unlink()
    tokenizer = Tokenizer.from_folder(tmp_path)  # DeepSeek's literals
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))


def test_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)
    build(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="decoder of type NoneType, expected ByteLevel"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()), 0, (1,))


def test_settings_of_a_training_run_do_not_cut_prompts(tmp_path):
    build(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(file)
    assert Tokenizer.from_folder(tmp_path).decode(Tokenizer.from_folder(tmp_path).encode(CORPUS[0])) == CORPUS[0]


@pytest.mark.parametrize("text", [b"bytes", "a\udcff", None])
def test_text_that_cannot_be_encoded(tokenizer, text):
    with pytest.raises(ValueError, match=r"^text: found"):
        tokenizer.encode(text)


@lru_cache
def ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """All tokens that are neither BOS, EOS nor a marker; every single byte is among them."""
    return {tokenizer.token_bytes(id): id for id in range(2, tokenizer.vocab_size - len(MARKERS))}


def random_tokenisation(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Ids of a text, cut at random bytes instead of by the merges, so that characters fall apart over tokens."""
    id_of, data, ids = ids_by_bytes(tokenizer), text.encode(), []
    while data:
        head = rng.choice([data[:size] for size in range(1, 9) if data[:size] in id_of])
        ids.append(id_of[head])
        data = data[len(head) :]
    return ids


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Oracle: read character by character until a stop string is complete."""
    for end in range(len(text) + 1):
        found = [item for item in stop if text[:end].endswith(item)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream_all(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push(id) for id in ids] + [stream.flush()]


def test_stream_equals_decode_and_gives_whole_characters(tokenizer, draw):
    rng = draw.random
    for text in TEXTS * 20:
        ids = random_tokenisation(tokenizer, text, rng)
        assert tokenizer.decode(ids) == text
        pieces = stream_all(TextStream(tokenizer), ids)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""  # whole characters leave nothing behind


def test_stream_of_any_ids_equals_decode(tokenizer, draw):
    """Also bytes that are not UTF-8, control tokens, and ids beyond the vocabulary."""
    rng = draw.random
    for skip_special in (True, False):
        for _ in range(300):
            ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randint(0, 30))]
            expected = tokenizer.decode(ids, skip_special)
            assert "".join(stream_all(TextStream(tokenizer, skip_special=skip_special), ids)) == expected


def test_token_bytes_of_every_token(tokenizer):
    for id in range(tokenizer.vocab_size):
        for skip_special in (True, False):
            text = tokenizer.token_bytes(id, skip_special).decode(errors="replace")
            assert text == tokenizer.decode([id], skip_special)


def test_stop_strings_cut_at_the_first_one(tokenizer, draw):
    """Random texts over few letters meet stop strings, their beginnings, overlaps and nested ones all the time."""
    rng = draw.random
    letters, stopped = ["a", "é", "🙂", "模"], 0
    for _ in range(2000):
        text = "".join(rng.choices(letters, k=rng.randint(0, 12)))
        stop = ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        ids = random_tokenisation(tokenizer, text, rng)
        stream = TextStream(tokenizer, stop)
        expected, found = first_stop(text, stop)
        pieces = []
        for id in ids:
            pieces.append(stream.push(id))
            assert expected.startswith("".join(pieces))  # nothing of a stop string is ever shown
        pieces.append(stream.flush())
        assert ("".join(pieces), stream.stop_string, stream.stopped) == (expected, found, found is not None)
        stopped += stream.stopped
    assert 200 < stopped < 1800


def test_stop_holds_back_no_more_than_it_must(tokenizer):
    stream = TextStream(tokenizer, stop=["\n\nUser:", "###"])
    assert [stream.push(id) for id in random_tokenisation(tokenizer, "ab", random.Random(0))] == ["a", "b"]
    assert "".join(stream.push(id) for id in tokenizer.encode("\n\nUs", add_bos=False)) == ""
    assert stream.push(tokenizer.encode("x", add_bos=False)[0]) == "\n\nUsx"
    assert "".join(stream.push(id) for id in tokenizer.encode("#\n\nUser", add_bos=False)) == "#"
    assert not stream.stopped
    assert stream.push(tokenizer.encode(":", add_bos=False)[0]) == ""
    assert stream.stopped and stream.stop_string == "\n\nUser:"
    assert stream.push(tokenizer.encode("x", add_bos=False)[0]) == stream.flush() == ""


def test_flush_gives_what_was_held_back(tokenizer):
    stream = TextStream(tokenizer, stop="stop")
    ids = tokenizer.encode("ab sto", add_bos=False)
    pieces = [stream.push(id) for id in ids]
    assert ("".join(pieces), stream.flush(), stream.stopped) == ("ab ", "sto", False)


def test_an_unfinished_character_is_the_replacement_character_as_in_decode(tokenizer):
    ids = [ids_by_bytes(tokenizer)[bytes([byte])] for byte in "a🙂".encode()[:-1]]
    stream = TextStream(tokenizer)
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) == "a"
    assert "a" + stream.flush() == tokenizer.decode(ids) == "a\ufffd"


def test_a_marker_can_be_a_stop_string(tokenizer):
    ids = tokenizer.encode("think</think>answer", add_bos=False)
    stream = TextStream(tokenizer, stop=["</think>"])
    assert "".join(stream_all(stream, ids)) == "think" and stream.stopped


@pytest.mark.parametrize("stop", [[""], "", [None], [3]])
def test_stop_strings_are_checked(tokenizer, stop):
    with pytest.raises(ValueError, match=r"stop: found .*, expected strings that are not empty"):
        TextStream(tokenizer, stop=stop)
