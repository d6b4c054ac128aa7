"""Corpus and tokenizer of the tiny checkpoint: Debian packages in, `tokens.npz` and `tokenizer.json` out.

The text comes from Debian 12 packages whose licences allow free reuse (public domain, PSF, PostgreSQL, WordNet, MIT).
Every step is deterministic: the same .deb files give the same tokens. The text itself is not part of the repository;
`manifest.json` records each package's version, sha256, licence and the bytes used.
"""
import collections
import glob
import gzip
import hashlib
import html
import html.parser
import json
import pathlib
import re
import struct
import subprocess
import zlib

import numpy as np

# package -> (licence as its copyright file states it, which reader below extracts it)
PACKAGES = {
    "r-cran-janeaustenr": ("public domain novels, packaged under MIT", "novels"),
    "r-cran-tokenizers": ("public domain novel (Moby Dick), packaged under MIT", "novels"),
    "golang-1.19-src": ("public domain text (Newton's Opticks) in a BSD-3-Clause package", "opticks"),
    "dict-devil": ("public domain", "devil"),
    "jargon-text": ("public domain", "jargon"),
    "sword-text-web": ("public domain", "sword"),
    "sword-comm-mhcc": ("public domain", "sword"),
    "sword-comm-scofield": ("public domain", "sword"),
    "sword-comm-tdavid": ("public domain", "sword"),
    "dict-wn": ("WordNet 3.0 licence", "wordnet"),
    "python3.11-doc": ("PSF-2", "rst"),
    "postgresql-doc-15": ("PostgreSQL", "html"),
    "sqlite3-doc": ("public domain", "html"),
    "rust-doc": ("MIT or Apache-2.0", "html"),
}
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK_END = "<｜User｜>", "<｜Assistant｜>", "</think>"
# V4's other control tokens; the real vocabulary also keeps them behind the BPE tokens.
CONTROL = ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", USER, ASSISTANT, "<|EOT|>", "<think>", THINK_END, "｜DSML｜",
           "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>",
           "<｜extracted_url｜>", "<｜read_url｜>"]
VOCAB = 4096
HELD_OUT_EVERY = 50  # one document in 50, chosen by the hash of its text
ASCII = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "--", "…": "...", "\u00a0": " ", "―": "--",
                       "æ": "ae", "\u00ad": "", "\ufeff": ""})


def clean(text):
    """One paragraph on one line, ASCII quotes and dashes."""
    return re.sub(r"\s+", " ", text.translate(ASCII)).strip()


def is_prose(p, least=60):
    """Long enough, mostly letters, no leftover markup: drops tables, code and signatures."""
    if len(p) < least or sum(ord(c) > 126 for c in p) > len(p) // 50:
        return False
    letters = sum(c.isalpha() or c == " " for c in p)
    return letters > 0.88 * len(p) and not re.search(r"[{}<>|\\_]{2}|::|==|\.\. ", p)


def strip_tags(s):
    s = re.sub(r"<note.*?</note>", " ", s, flags=re.S)
    s = re.sub(r"</?(w|hi|q|divineName|transChange|reference|seg|foreign)\b[^>]*>", "", s)
    s = re.sub(r"<(div|l|lb|lg|p|title|chapter|verse|milestone)\b[^>]*>|</(title|l|p)>", "\n", s)
    return html.unescape(re.sub(r"<[^>]*>", "", s))


# ---- readers: package folder -> documents, each a list of paragraphs -------------------------------------------------
def r_strings(block):
    """The strings of a serialised R character vector (XDR, version 3)."""
    (n,) = struct.unpack_from(">i", block, 14)  # after "X\n", three version words: the name of the native encoding
    _, count = struct.unpack_from(">ii", block, 18 + n)
    at = 26 + n
    for _ in range(count):
        _, size = struct.unpack_from(">ii", block, at)
        yield block[at + 8:at + 8 + max(size, 0)].decode("utf-8", "replace")
        at += 8 + max(size, 0)


def read_novels(folder):
    """R's lazy-load data files: zlib streams, each one book as a character vector of lines (or of one long string)."""
    for path in sorted(glob.glob(f"{folder}/usr/lib/R/site-library/*/data/Rdata.rdb")):
        data = pathlib.Path(path).read_bytes()
        while len(data) > 4:
            stream = zlib.decompressobj()
            text = "\n".join(r_strings(stream.decompress(data[4:]))).replace("\r", "").replace("_", "")
            data = stream.unused_data
            text = text.partition("*** END OF")[0].partition("End of Project Gutenberg")[0]
            for chapter in re.split(r"\n\s*(?:CHAPTER|Chapter)\b[^\n]*\n", "\n" + text)[1:]:
                yield [p for p in map(clean, re.split(r"\n\s*\n", chapter)) if is_prose(p, 2)]


def read_opticks(folder):
    text = pathlib.Path(glob.glob(f"{folder}/usr/share/go-*/src/testdata/Isaac.Newton-Opticks.txt")[0]).read_text("utf-8")
    text = text[text.find("ADVERTISEMENT"):].replace("_", "")
    paragraphs = [p for p in map(clean, re.split(r"\n\s*\n", text)) if is_prose(p)]
    for i in range(0, len(paragraphs), 20):
        yield paragraphs[i:i + 20]


def read_devil(folder):
    text = gzip.open(f"{folder}/usr/share/dictd/devil.dict.dz").read().decode("utf-8", "replace")
    entries = [p for p in map(clean, re.split(r"\n\n(?=[A-Z])", text)) if is_prose(p, 30)]
    for i in range(5, len(entries), 30):
        yield entries[i:i + 30]


def read_jargon(folder):
    text = gzip.open(f"{folder}/usr/share/doc/jargon-text/jargon.txt.gz").read().decode("utf-8", "replace")
    text = re.sub(r"\{([^{}]*)\}", r"\1", text)
    paragraphs = [p for p in map(clean, re.split(r"\n\s*\n", text)) if is_prose(p, 80)]
    for i in range(0, len(paragraphs), 30):
        yield paragraphs[i:i + 30]


def read_sword(folder):
    """SWORD zText and zCom modules: an index of (offset, size, unpacked size) and zlib blocks of OSIS markup."""
    for index in sorted(glob.glob(f"{folder}/usr/share/sword/modules/*/*/*/[on]t.?zs")):
        rows = struct.iter_unpack("<III", pathlib.Path(index).read_bytes())
        data = pathlib.Path(index[:-1] + "z").read_bytes()
        text = "".join(zlib.decompress(data[at:at + size]).decode("utf-8", "replace") for at, size, _ in rows)
        for chapter in re.split(r"<chapter\b[^>]*sID[^>]*>", text):
            paragraphs = [p for p in map(clean, strip_tags(chapter).split("\n")) if is_prose(p, 20)]
            yield paragraphs


def wordnet_entries(folder):
    """(word, part of speech, [glosses]) with every gloss given to the first headword that has it."""
    kinds = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
    text = gzip.open(f"{folder}/usr/share/dictd/wn.dict.dz").read().decode("utf-8", "replace")
    seen = set()
    for entry in re.split(r"\n(?=\S)", text):
        head, _, body = entry.partition("\n")
        body = re.sub(r"\[(syn|ant|also):.*?\]", "", body, flags=re.S)
        kind, glosses = None, []
        for part in re.split(r"\n\s+(?=(?:n|v|adj|adv) \d*: |\d+: )", "\n" + body):
            m = re.match(r"\s*(n|v|adj|adv)?\s*\d*\s*: (.*)", part, flags=re.S)
            if not m:
                continue
            if m[1] and glosses:
                yield head, kind, glosses
                glosses = []
            kind = kinds.get(m[1], kind)
            gloss = clean(m[2]).rstrip(" ;")
            if len(gloss) > 15 and gloss not in seen and kind:
                seen.add(gloss)
                glosses.append(gloss)
        if glosses:
            yield head, kind, glosses


def read_wordnet(folder):
    """Running dictionary text; one entry in four becomes a question and an answer in V4's chat encoding instead."""
    batch = []
    for word, kind, glosses in wordnet_entries(folder):
        word = clean(word)
        if not re.fullmatch(r"[A-Za-z][A-Za-z' -]*", word):
            continue
        article = "an" if kind[0] in "a" else "a"
        if int(hashlib.sha1(word.encode()).hexdigest(), 16) % 4 == 0 and len(glosses[0]) > 20:
            answer = glosses[0][0].upper() + glosses[0][1:]
            yield [(f'What does "{word}" mean?', f'As {article} {kind}, "{word}" means: {answer}.')]
        batch.append(f"{word} ({kind}): " + "; ".join(glosses) + ".")
        if len(batch) == 40:
            yield batch
            batch = []
    yield batch


def read_rst(folder):
    for path in sorted(glob.glob(f"{folder}/usr/share/doc/**/_sources/**/*.rst.txt", recursive=True)):
        text = pathlib.Path(path).read_text("utf-8", "replace")
        text = re.sub(r":[a-zA-Z:+-]+:`~?!?([^`<]*?)\s*(?:<[^`]*>)?`", r"\1", text)
        text = re.sub(r"`([^`<]*?)\s*<[^`]*>`_*", r"\1", text.replace("``", ""))
        text = re.sub(r"[*]{1,2}([^*\n]+)[*]{1,2}", r"\1", text)
        paragraphs = []
        for block in re.split(r"\n\s*\n", text):
            indent = len(block) - len(block.lstrip())
            block = block.strip().lstrip("*-# ").strip()
            if indent > 4 or block.startswith((".. ", ">>>", ":", "|", "=", "+-")):
                continue
            p = clean(block.replace("::", ":"))
            if is_prose(p):
                paragraphs.append(p)
        yield paragraphs


class Paragraphs(html.parser.HTMLParser):
    """Text of <p> elements outside <pre>, <table>, navigation and scripts."""
    def __init__(self):
        super().__init__()
        self.depth, self.skip, self.parts, self.found = 0, 0, [], []

    def handle_starttag(self, tag, attrs):
        if tag in ("pre", "table", "nav", "script", "style"):
            self.skip += 1
        elif tag in ("p", "div", "li", "dd", "dt", "h1", "h2", "h3", "ul", "ol", "dl", "blockquote"):
            self.flush()
            self.depth = tag in ("p", "li", "dd")

    def handle_endtag(self, tag):
        if tag in ("pre", "table", "nav", "script", "style"):
            self.skip = max(0, self.skip - 1)
        elif tag in ("p", "div", "li", "dd", "h1", "h2", "h3"):
            self.flush()

    def handle_data(self, data):
        if self.depth and not self.skip:
            self.parts.append(data)

    def flush(self):
        p = clean("".join(self.parts))
        self.parts, self.depth = [], 0
        if is_prose(p):
            self.found.append(p)


def read_html(folder):
    for path in sorted(glob.glob(f"{folder}/usr/share/doc/**/*.html", recursive=True)):
        if "/rust-doc/" in path and not re.search(
                r"/html/(book|reference|nomicon|edition-guide|rustc|cargo|rust-by-example|embedded-book|rustdoc)/", path):
            continue  # the rest is generated API reference
        if path.endswith(("print.html", "toc.html")):
            continue
        parser = Paragraphs()
        parser.feed(pathlib.Path(path).read_text("utf-8", "replace"))
        yield parser.found


READERS = {"novels": read_novels, "opticks": read_opticks, "devil": read_devil, "jargon": read_jargon, "sword": read_sword,
           "wordnet": read_wordnet, "rst": read_rst, "html": read_html}


# ---- preparation -----------------------------------------------------------------------------------------------------
def unpack(package, data):
    """Folder of the unpacked package and its manifest row; downloads the .deb with apt-get when it is not there."""
    debs = data / "deb"
    debs.mkdir(parents=True, exist_ok=True)
    if not list(debs.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", package], cwd=debs, check=True)
    (deb,) = debs.glob(f"{package}_*.deb")
    folder = data / "unpacked" / package
    if not folder.exists():
        folder.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(deb), str(folder)], check=True)
    version = subprocess.run(["dpkg-deb", "-f", str(deb), "Version"], check=True, capture_output=True, text=True).stdout.strip()
    return folder, {"package": package, "version": version, "sha256": hashlib.sha256(deb.read_bytes()).hexdigest(),
                    "licence": PACKAGES[package][0]}


def documents(folder, reader, seen):
    """Documents without paragraphs that an earlier document already had; very small ones are dropped."""
    for doc in READERS[reader](folder):
        kept = []
        for p in doc:
            key = hashlib.sha1(re.sub(r"\W", "", p if isinstance(p, str) else p[1]).lower().encode()).digest()[:8]
            if key not in seen:
                seen.add(key)
                kept.append(p)
        if kept and (isinstance(kept[0], tuple) or sum(map(len, kept)) > 300):
            yield kept


def train_tokenizer(texts, path):
    """Byte-level BPE with VOCAB tokens in all: bos, eos, pad first, control tokens last, as in V4."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB - len(CONTROL), special_tokens=[BOS, EOS, PAD], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.add_tokens([AddedToken(t, normalized=False, special=False) for t in CONTROL])
    if tok.get_vocab_size() != VOCAB or [tok.token_to_id(t) for t in (BOS, EOS, PAD)] != [0, 1, 2]:
        raise ValueError(f"tokenizer has {tok.get_vocab_size()} tokens, expected {VOCAB}")
    tok.save(str(path))
    return tok


def prepare(data, out):
    """Write data/tokens.npz (train, valid: uint16; valid_bytes), out/tokenizer.json and out/manifest.json."""
    data, out = pathlib.Path(data), pathlib.Path(out)
    seen, train, valid, rows = set(), [], [], []
    for package, (_, reader) in PACKAGES.items():
        folder, row = unpack(package, data)
        count = collections.Counter()
        for doc in documents(folder, reader, seen):
            key = hashlib.sha1(repr(doc).encode()).digest()
            held_out = int.from_bytes(key[:4], "big") % HELD_OUT_EVERY == 0
            (valid if held_out else train).append((key, package, doc))
            size = sum(len(p.encode()) if isinstance(p, str) else len((p[0] + p[1]).encode()) for p in doc)
            count["held_out_bytes" if held_out else "train_bytes"] += size
            count["documents"] += 1
        rows.append({**row, **count})
        print(f"{package:22s} {count['documents']:6d} documents {count['train_bytes'] / 1e6:6.2f} MB", flush=True)
    (out / "manifest.json").write_text(json.dumps(rows, indent=1) + "\n")
    plain = ("\n\n".join(p for p in doc if isinstance(p, str)) for _, _, doc in train)
    tok = train_tokenizer(plain, out / "tokenizer.json")
    ids = {t: tok.token_to_id(t) for t in (BOS, EOS, USER, ASSISTANT, THINK_END)}

    def encode(docs):
        texts = ["\n\n".join(d) if isinstance(d[0], str) else d[0] for _, _, d in docs]
        flat = [t for x in texts for t in (x if isinstance(x, tuple) else (x,))]
        codes, at, stream = tok.encode_batch_fast(flat, add_special_tokens=False), 0, []
        for x in texts:
            if isinstance(x, tuple):
                stream += [ids[BOS], ids[USER], *codes[at].ids, ids[ASSISTANT], ids[THINK_END], *codes[at + 1].ids, ids[EOS]]
                at += 2
            else:
                stream += [ids[BOS], *codes[at].ids, ids[EOS]]
                at += 1
        return np.array(stream, np.uint16)

    for part in (train, valid):
        part.sort(key=lambda d: d[0])  # a fixed shuffle: neighbours in the stream come from different sources
    # Bits per byte are of prose only: the chat questions are formulaic and would flatter the figure.
    valid = [d for d in valid if isinstance(d[2][0], str)]
    arrays = {"train": encode(train), "valid": encode(valid)}
    sources = sorted(PACKAGES)
    lengths = [len(encode([d])) for d in valid]
    arrays["valid_lengths"] = np.array(lengths, np.int32)
    arrays["valid_bytes"] = np.array([len("\n\n".join(d[2]).encode()) for d in valid], np.int32)
    arrays["valid_source"] = np.array([sources.index(d[1]) for d in valid], np.int16)
    np.savez_compressed(data / "tokens.npz", **arrays)
    print(f"train {len(arrays['train'])} tokens, held out {len(arrays['valid'])} tokens, "
          f"{arrays['valid_bytes'].sum() / len(arrays['valid']):.2f} bytes a token")
