"""Readers of the corpus packages: unpacked package folder -> documents, each a list of paragraphs."""

import glob
import gzip
import hashlib
import html
import html.parser
import pathlib
import re
import struct
import zlib

ASCII = str.maketrans(
    {
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "–": "-",
        "—": "--",
        "…": "...",
        "\u00a0": " ",
        "―": "--",
        "æ": "ae",
        "\u00ad": "",
        "\ufeff": "",
    }
)


def clean(text):
    """One paragraph on one line, ASCII quotes and dashes."""
    return re.sub(r"\s+", " ", text.translate(ASCII)).strip()


def unzip(path):
    return gzip.decompress(pathlib.Path(path).read_bytes()).decode("utf-8", "replace")


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
        yield block[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace")
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
    text = text[text.find("ADVERTISEMENT") :].replace("_", "")
    paragraphs = [p for p in map(clean, re.split(r"\n\s*\n", text)) if is_prose(p)]
    for i in range(0, len(paragraphs), 20):
        yield paragraphs[i : i + 20]


def read_devil(folder):
    text = unzip(f"{folder}/usr/share/dictd/devil.dict.dz")
    entries = [p for p in map(clean, re.split(r"\n\n(?=[A-Z])", text)) if is_prose(p, 30)]
    for i in range(5, len(entries), 30):
        yield entries[i : i + 30]


def read_jargon(folder):
    text = unzip(f"{folder}/usr/share/doc/jargon-text/jargon.txt.gz")
    text = re.sub(r"\{([^{}]*)\}", r"\1", text)
    paragraphs = [p for p in map(clean, re.split(r"\n\s*\n", text)) if is_prose(p, 80)]
    for i in range(0, len(paragraphs), 30):
        yield paragraphs[i : i + 30]


def read_sword(folder):
    """SWORD zText and zCom modules: an index of (offset, size, unpacked size) and zlib blocks of OSIS markup."""
    for index in sorted(glob.glob(f"{folder}/usr/share/sword/modules/*/*/*/[on]t.?zs")):
        rows = struct.iter_unpack("<III", pathlib.Path(index).read_bytes())
        data = pathlib.Path(index[:-1] + "z").read_bytes()
        text = "".join(zlib.decompress(data[at : at + size]).decode("utf-8", "replace") for at, size, _ in rows)
        for chapter in re.split(r"<chapter\b[^>]*sID[^>]*>", text):
            paragraphs = [p for p in map(clean, strip_tags(chapter).split("\n")) if is_prose(p, 20)]
            yield paragraphs


def wordnet_entries(folder):
    """(word, part of speech, [glosses]) with every gloss given to the first headword that has it."""
    kinds = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
    text = unzip(f"{folder}/usr/share/dictd/wn.dict.dz")
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
    """Running dictionary text; one entry in four is also a question and an answer in V4's chat encoding."""
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
            r"/html/(book|reference|nomicon|edition-guide|rustc|cargo|rust-by-example|embedded-book|rustdoc)/", path
        ):
            continue  # the rest is generated API reference
        if path.endswith(("print.html", "toc.html")):
            continue
        parser = Paragraphs()
        parser.feed(pathlib.Path(path).read_text("utf-8", "replace"))
        yield parser.found


READERS = {
    "novels": read_novels,
    "opticks": read_opticks,
    "devil": read_devil,
    "jargon": read_jargon,
    "sword": read_sword,
    "wordnet": read_wordnet,
    "rst": read_rst,
    "html": read_html,
}
