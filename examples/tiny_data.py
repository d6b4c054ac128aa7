"""Corpus and tokenizer of the tiny checkpoint: Debian packages in, `tokens.npz` and `tokenizer.json` out.

Every step is deterministic: the same .deb files give the same tokens. The text itself is not part of the repository;
`examples/tiny/manifest.json` records each package's version, sha256, licence and the bytes used.
"""

import collections
import hashlib
import json
import math
import re
import shutil
import subprocess

import numpy as np
import torch
from tiny_readers import READERS

# package -> (licence of the text as the package states it, or why it is free; the reader that extracts it)
PACKAGES = {
    "r-cran-janeaustenr": ("MIT, which says nothing of the texts: novels of 1811-1818, public domain by age", "novels"),
    "r-cran-tokenizers": ("MIT, which says nothing of the text: Moby Dick (1851), public domain by age", "novels"),
    "golang-1.19-src": (
        "BSD-3-Clause, which says nothing of the text: Opticks (1730), public domain by age",
        "opticks",
    ),
    "dict-devil": ("public domain", "devil"),
    "jargon-text": ("public domain", "jargon"),
    "sword-text-web": ("public domain", "sword"),
    "sword-comm-mhcc": ("public domain", "sword"),
    "sword-comm-scofield": ("public domain", "sword"),
    "sword-comm-tdavid": ("public domain", "sword"),
    "dict-wn": ("WordNet 3.0 licence", "wordnet"),
    "python3.11-doc": ("PSF-2.0", "rst"),
    "postgresql-doc-15": ("PostgreSQL", "html"),
    "sqlite3-doc": ("public domain", "html"),
    "rust-doc": ("MIT or Apache-2.0; the prose of its embedded-book folder is CC-BY-SA-4.0", "html"),
}
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK_END = "<｜User｜>", "<｜Assistant｜>", "</think>"
# V4's other control tokens; the real vocabulary also keeps them behind the BPE tokens.
CONTROL = [
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    USER,
    ASSISTANT,
    "<|EOT|>",
    "<think>",
    THINK_END,
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
]
VOCAB = 4096
HELD_OUT_EVERY = 50  # one document in 50, chosen by the hash of its text


# ---- preparation -----------------------------------------------------------------------------------------------------
def fetch(package, debs):
    """(.deb file, version, sha256); downloads the package with apt-get when it is not there."""
    if not list(debs.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", package], cwd=debs, check=True)
    found = list(debs.glob(f"{package}_*.deb"))
    if len(found) != 1:
        raise SystemExit(f"{debs} holds {len(found)} files {package}_*.deb; leave one")
    show = subprocess.run(["dpkg-deb", "-f", str(found[0]), "Version"], check=True, capture_output=True, text=True)
    return found[0], show.stdout.strip(), hashlib.sha256(found[0].read_bytes()).hexdigest()


def unpack(deb, folder):
    """Unpack aside and rename, so that a folder that exists is whole."""
    if not folder.exists():
        aside = folder.with_suffix(".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(deb), str(aside)], check=True)
        aside.rename(folder)
    return folder


def check_versions(fetched, known):
    """Stop, one line a package, where a package is not the one that the manifest names."""
    changed = [
        f"{package}: version {version} with sha256 {sha256[:12]}, manifest.json has "
        f"{known[package]['version']} with {known[package]['sha256'][:12]}"
        for package, (_, version, sha256) in fetched.items()
        if sha256 != known[package]["sha256"]
    ]
    if changed:
        raise SystemExit("\n".join([*changed, "--accept-new-versions goes on with them and rewrites manifest.json"]))


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
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB - len(CONTROL),
            special_tokens=[BOS, EOS, PAD],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tok.add_tokens([AddedToken(t, normalized=False, special=False) for t in CONTROL])
    if tok.get_vocab_size() != VOCAB or [tok.token_to_id(t) for t in (BOS, EOS, PAD)] != [0, 1, 2]:
        raise ValueError(f"tokenizer has {tok.get_vocab_size()} tokens, expected {VOCAB}")
    tok.save(str(path))
    return tok


def prepare(data, manifest, accept_new_versions):
    """Write data/tokens.npz (train, valid: uint16; valid_bytes) and data/tokenizer.json.

    Packages and the bytes taken from each must be those of the manifest, or are written to it on request.
    """
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise SystemExit("prepare needs apt-get and dpkg-deb, best those of Debian 12")
    (data / "deb").mkdir(parents=True, exist_ok=True)
    known = {row["package"]: row for row in json.loads(manifest.read_text())}
    fetched = {package: fetch(package, data / "deb") for package in PACKAGES}
    if not accept_new_versions:
        check_versions(fetched, known)
    seen, train, valid, rows = set(), [], [], []
    for package, (licence, reader) in PACKAGES.items():
        deb, version, sha256 = fetched[package]
        folder = unpack(deb, data / "unpacked" / f"{package}-{sha256[:12]}")
        count = collections.Counter(train_bytes=0, documents=0, held_out_bytes=0)
        for doc in documents(folder, reader, seen):
            key = hashlib.sha1(repr(doc).encode()).digest()
            held_out = int.from_bytes(key[:4], "big") % HELD_OUT_EVERY == 0
            (valid if held_out else train).append((key, package, doc))
            size = sum(len(p.encode()) if isinstance(p, str) else len((p[0] + p[1]).encode()) for p in doc)
            count["held_out_bytes" if held_out else "train_bytes"] += size
            count["documents"] += 1
        row = {"package": package, "version": version, "sha256": sha256, "licence": licence, **count}
        if not accept_new_versions and row != known[package]:
            raise SystemExit(f"{package}: found {row}, manifest.json has {known[package]}: the readers have changed")
        rows.append(row)
        print(f"{package:22s} {count['documents']:6d} documents {count['train_bytes'] / 1e6:6.2f} MB", flush=True)
    if accept_new_versions:
        manifest.write_text(json.dumps(rows, indent=1) + "\n")
    plain = ("\n\n".join(p for p in doc if isinstance(p, str)) for _, _, doc in train)
    tok = train_tokenizer(plain, data / "tokenizer.json")
    ids = {t: tok.token_to_id(t) for t in (BOS, EOS, USER, ASSISTANT, THINK_END)}

    def encode(docs):
        texts = ["\n\n".join(d) if isinstance(d[0], str) else d[0] for _, _, d in docs]
        flat = [t for x in texts for t in (x if isinstance(x, tuple) else (x,))]
        codes, at, stream = tok.encode_batch_fast(flat, add_special_tokens=False), 0, []
        for x in texts:
            if isinstance(x, tuple):
                stream += [
                    ids[BOS],
                    ids[USER],
                    *codes[at].ids,
                    ids[ASSISTANT],
                    ids[THINK_END],
                    *codes[at + 1].ids,
                    ids[EOS],
                ]
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
    print(
        f"train {len(arrays['train'])} tokens, held out {len(arrays['valid'])} tokens, "
        f"{arrays['valid_bytes'].sum() / len(arrays['valid']):.2f} bytes a token"
    )


# ---- batches ---------------------------------------------------------------------------------------------------------
class Crops:
    """Random crops of the token stream; each starts with BOS, so that any text may follow BOS at inference."""

    def __init__(self, stream, device, seed):
        self.stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def batch(self, rows, length):
        dev = self.stream.device
        start = torch.randint(len(self.stream) - length - 1, (rows, 1), generator=self.generator, device=dev)
        x = self.stream[start + torch.arange(length + 1, device=dev)].long()
        ids, target = x[:, :-1].clone(), x[:, 1:]
        ids[:, 0] = 0
        return ids, target


def held_out_batches(stream, rows, length):
    """Non-overlapping crops of the whole held-out stream as (ids, target); -100 where there is no token."""
    count = math.ceil(len(stream) / length)
    padded = np.full(count * length, -100, np.int64)
    padded[: len(stream)] = stream
    target = torch.from_numpy(padded).view(count, length)
    target = torch.cat((target, torch.full((-count % rows, length), -100)))
    ids = torch.cat((torch.zeros(len(target), 1, dtype=torch.long), target[:, :-1]), 1).clamp(min=0)
    return list(zip(ids.split(rows), target.split(rows), strict=True))
