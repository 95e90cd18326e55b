"""`jetfire-train prepare`: text to token files that training maps into memory.

A prepared folder holds `train.bin` and `validation.bin` (little-endian uint16, or uint32 where the
vocabulary needs it), `meta.json` (what they are and were made of) and what the tokenizer needs. The
same text and tokenizer give the same bytes. The folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from jetfire.core import files, terminal
from jetfire.core.errors import UsageError, unknown
from jetfire.core.files import Unreadable, Unwritable
from jetfire.gpt2.data import corpora, tokenizers
from jetfire.gpt2.data.corpora import Corpus, Piece
from jetfire.gpt2.data.prepared import META, SPLITS, CorpusSource, Meta, cache, opened, read_meta
from jetfire.gpt2.data.tokenizers import RANKS, Tokenizer
from jetfire.report.text import plural

# The share of documents held out: half a percent, more where that is under MINIMUM tokens, never
# above MOST. One text, or too few documents to choose from, gives its last TAIL instead.
SHARE, MINIMUM, MOST, TAIL = 0.005, 100_000, 0.05, 0.1
FEW_DOCUMENTS = 20
_BLOCK = 8 << 20


def run(
    names: Sequence[str],
    tokenizer: str | None,
    vocabulary: Path | None,
    copy: Path | None,
    output: Path | None,
) -> None:
    """The command: prepare, say on stdout where the tokens are and on stderr how many.

    Raises:
        UsageError: see `prepare`.
    """
    folder = prepare(names, tokenizer, output, vocabulary=vocabulary, copy=copy, show=True)
    meta = read_meta(folder)
    terminal.note(
        f"{meta['train']} training and {meta['validation']} validation tokens "
        f"({meta['tokenizer']['name']}, vocabulary {meta['vocabulary']}) of "
        f"{plural(meta['documents'], 'document')}"
    )
    terminal.result({"folder": folder}, lambda: print(folder))


def prepare(
    names: str | Path | Sequence[str | Path],
    tokenizer: str | None = None,
    output: Path | None = None,
    *,
    vocabulary: Path | None = None,
    copy: Path | None = None,
    show: bool = False,
) -> Path:
    """The folder of the tokens of these corpora, files and folders; made unless it is there.

    Args:
        names: corpora (`corpora.NAMED`) and paths, in the order that they are written.
        tokenizer: byte, char or gpt2; None is what the first corpus is usually given.
        output: folder; None is one in the cache for corpora, in the working folder for paths.
        vocabulary: folder with encoder.json and vocab.bpe for gpt2, else tiktoken downloads them.
        copy: local copy of a corpus that would be downloaded.
        show: report progress on stderr; a bar where that is a terminal.
    """
    given = [str(name) for name in ([names] if isinstance(names, str | Path) else names)]
    if not given:
        raise UsageError(f"expected a corpus ({', '.join(corpora.NAMED)}) or text files or folders")
    if tokenizer is not None and tokenizer not in tokenizers.NAMES:
        raise unknown(f"no tokenizer {tokenizer!r}", tokenizer, tokenizers.NAMES)
    if copy is not None and len(given) > 1:
        raise UsageError(f"--from {copy}: expected with one corpus, {len(given)} are given")
    say = terminal.note if show else lambda line: None
    chosen = tokenizer or corpora.TOKENIZERS.get(given[0], "gpt2")
    if vocabulary is not None and chosen != "gpt2":
        raise UsageError(
            f"--vocabulary {vocabulary}: expected with the gpt2 tokenizer, not {chosen}"
        )
    if chosen == "gpt2":
        tokenizers.tiktoken()  # before hours of downloads
    found = [corpora.find(name, copy, cache(), say) for name in given]
    folder = Path(os.path.abspath(output or default_folder(given, chosen)))
    try:
        with files.writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _turn(folder, say):
                files.tidy(folder.parent, folder.name)
                _prepare(found, chosen, vocabulary, folder, show)
    except Unwritable:  # a cache that is read-only will do where the tokens are there
        if not _same(folder, [corpus.source() for corpus in found], chosen, vocabulary):
            raise
    return folder


def folder_of(name: str, tokenizer: str) -> Path:
    """Return the folder of a run's tokens; text is prepared on first use, into the cache.

    Args:
        name: a corpus, a prepared folder, or a text to prepare.
        tokenizer: as of `prepare`, or auto.

    Raises:
        UsageError: there is no such data.
    """
    folder = Path(name)
    if (folder / META).exists():
        return folder
    output = None
    if name not in corpora.NAMED:
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
        output = cache() / f"{folder.stem[:100]}-{digest}-{tokenizer}"
    return prepare(name, None if tokenizer == "auto" else tokenizer, output, show=True)


@contextmanager
def _turn(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Prepare a folder alone: whoever else would waits."""
    lock = folder.with_name(f".{folder.name[:100]}.lock")
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(lock))
        except files.Busy:
            say(f"waiting for another process that prepares {folder}")
            stack.enter_context(files.locked(lock, wait=True))
        yield


def default_folder(names: Sequence[str], tokenizer: str) -> Path:
    """Return the usual folder of prepared tokens; python's depends on the Python."""
    stem = corpora.stem(names)
    if any(name not in corpora.NAMED for name in names):
        return Path(f"{stem}-{tokenizer}")
    if "python" in names:
        stem += f"-{'.'.join(map(str, sys.version_info[:3]))}"
    return cache() / f"{stem}-{tokenizer}"


def _prepare(
    found: Sequence[Corpus], chosen: str, vocabulary: Path | None, folder: Path, show: bool
) -> None:
    _check_ours(folder)
    sources = [corpus.source() for corpus in found]
    if _same(folder, sources, chosen, vocabulary):
        return
    with files.new_folder(folder, alone=True) as part:
        with _progress(show) as advance:
            meta = _write(found, _tokenizer(chosen, vocabulary, found), part, advance)
        meta["sources"] = sources
        (part / META).write_text(json.dumps(meta, indent=2) + "\n")
        _check_ours(folder)  # once more: that took a while


def _check_ours(folder: Path) -> None:
    """See that nothing is lost where a folder is replaced."""
    held = set(os.listdir(folder)) if folder.exists() else set()
    tokens = {f"{split}.bin" for split in SPLITS}
    if held and not (META in held and held & tokens and held <= {META, RANKS, *tokens}):
        raise UsageError(
            f"-o {folder}: holds something else: expected a new folder or an empty one"
        )


def _same(folder: Path, sources: list[CorpusSource], chosen: str, vocabulary: Path | None) -> bool:
    """Whether the folder holds just what would be made."""
    try:
        meta = read_meta(folder)
        if (meta.get("sources"), meta["tokenizer"]["name"]) != (sources, chosen):
            return False
        opened(folder, meta)
        mine = tokenizers.load(meta["tokenizer"], folder)
    except Unreadable:
        return False
    if not isinstance(mine, tokenizers.Gpt2):
        return True
    if vocabulary is None:
        return meta["vocabulary"] == tokenizers.GPT2_VOCABULARY
    return mine.ranks == tokenizers.gpt2(vocabulary).ranks


def _tokenizer(chosen: str, vocabulary: Path | None, found: Sequence[Corpus]) -> Tokenizer:
    if chosen == "byte":
        return tokenizers.Bytes()
    if chosen == "gpt2":
        return tokenizers.gpt2(vocabulary)
    characters: set[str] = set()
    for corpus in found:
        for piece in corpus.pieces():
            characters.update(piece.text)
    return tokenizers.Characters(characters)


def _write(
    found: Sequence[Corpus], tokenizer: Tokenizer, folder: Path, advance: Callable[[int, int], None]
) -> Meta:
    """All tokens into train.bin, then validation's moved out; returns the description."""
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    # Where each document ends in the tokens, and what decides its split.
    ends, keys = array("Q"), array("Q")
    pieces = (piece for corpus in found for piece in corpus.pieces())
    with (folder / "train.bin").open("w+b") as train:
        total, key = 0, None
        for piece, ids in _encoded(pieces, tokenizer):
            if key is None and not piece.text:
                continue  # an empty document
            if key is None:  # the document's first piece
                key = hashlib.sha256(piece.text.encode()).digest()[:8]
            train.write(ids.astype(dtype).tobytes())
            total += len(ids)
            if piece.last:
                if tokenizer.separator is not None:
                    train.write(np.array([tokenizer.separator], dtype).tobytes())
                    total += 1
                ends.append(total)
                keys.append(int.from_bytes(key, "little"))
                key = None
            advance(len(piece.text), len(ids))
        if total < 2:
            raise UsageError(f"{', '.join(c.name for c in found)}: there is no text in it")
        tail = tokenizer.name == "char" or any(corpus.tail for corpus in found)
        held = None if tail else _held_out(ends, keys, total)
        with (folder / "validation.bin").open("w+b") as validation:
            counts = _split(train, validation, ends, held, total, dtype.itemsize)
    return {
        "format": 1,
        "tokenizer": tokenizer.save(folder),
        "vocabulary": tokenizer.vocabulary,
        "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
        "train": counts[0],
        "validation": counts[1],
        "documents": len(ends),
        "split": "tail" if held is None else "documents",
        "sha256": {
            "train": files.digest(folder / "train.bin"),
            "validation": files.digest(folder / "validation.bin"),
        },
    }


def _encoded(
    pieces: Iterator[Piece], tokenizer: Tokenizer
) -> Iterator[tuple[Piece, NDArray[np.uint32]]]:
    """Pieces and their ids in order, a few pieces ahead on every core: tiktoken leaves the GIL."""
    workers = max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
    ahead: deque[tuple[Piece, Future[NDArray[np.uint32]]]] = deque()
    waiting = 0
    pool = ThreadPoolExecutor(workers)
    try:
        for piece in pieces:
            ahead.append((piece, pool.submit(tokenizer.encode, piece.text)))
            waiting += len(piece.text)
            while waiting > 4 * workers * corpora.PIECE or len(ahead) > 4096:
                done, ids = ahead.popleft()
                waiting -= len(done.text)
                yield done, ids.result()
        while ahead:
            done, ids = ahead.popleft()
            yield done, ids.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _held_out(ends: array[int], keys: array[int], total: int) -> list[int] | None:
    """Documents of the validation split, in order; None where too few tokens can be found so.

    Documents are taken by the hash of how they begin until there are enough tokens, so that one
    more document or another order leaves the others where they are.
    """
    if len(ends) < FEW_DOCUMENTS:
        return None
    sizes = np.diff(np.array(ends, dtype=np.int64), prepend=0)
    most = int(MOST * total)
    target = min(max(int(SHARE * total), MINIMUM), most)
    chosen, count = [], 0
    for index in np.argsort(np.array(keys, dtype=np.uint64), kind="stable").tolist():
        if count >= target:
            break
        if count + int(sizes[index]) <= most:
            chosen.append(index)
            count += int(sizes[index])
    return sorted(chosen) if count >= target // 2 and chosen else None


def _split(
    train: IO[bytes],
    validation: IO[bytes],
    ends: array[int],
    held: list[int] | None,
    total: int,
    width: int,
) -> tuple[int, int]:
    """Move the validation tokens from one file to the other; returns how many each has."""
    if held is None:
        begin = min(int((1 - TAIL) * total), total - 1)
        ranges = [(begin, total)]
    else:
        ranges = [(ends[i - 1] if i else 0, ends[i]) for i in held]
    written, kept = 0, ranges[0][0]
    for (begin, end), (following, _) in zip(ranges, [*ranges[1:], (total, total)], strict=True):
        _copy(train, begin * width, validation, written * width, (end - begin) * width)
        written += end - begin
        _copy(train, end * width, train, kept * width, (following - end) * width)
        kept += following - end
    train.truncate(kept * width)
    return kept, written


def _copy(source: IO[bytes], begin: int, target: IO[bytes], place: int, size: int) -> None:
    """Copy bytes; within one file only towards its beginning."""
    while size:
        source.seek(begin)
        block = source.read(min(size, _BLOCK))
        target.seek(place)
        target.write(block)
        begin, place, size = begin + len(block), place + len(block), size - len(block)


@contextmanager
def _progress(show: bool) -> Iterator[Callable[[int, int], None]]:
    """What is done so far, live on stderr where that is a terminal."""
    if not show or not sys.stderr.isatty():
        yield lambda characters, tokens: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=terminal.console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading")
        done = [0, 0]

        def advance(characters: int, tokens: int) -> None:
            done[0] += characters
            done[1] += tokens
            text = f"{done[0] / 1e6:.1f} M characters, {done[1] / 1e6:.1f} M tokens"
            progress.update(task, description=text)

        yield advance
