"""A prepared folder: what its meta.json says, and whether its tokens are those that it tells of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from jetfire.core import files, schema
from jetfire.core.files import MIB, Unreadable, Unwritable
from jetfire.core.schema import Count, Digest, Size
from jetfire.gpt2.data import tokenizers
from jetfire.gpt2.data.tokenizers import Description
from jetfire.gpt2.data.vocabulary import Vocabulary

FORMAT, META = 1, "meta.json"
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
# A file of tokens from this size on is read through again only where it was written to since, as
# the file CHECKED in the cache says. Smaller ones take less than a second.
REMEMBERED, CHECKED = 512 * MIB, "checked.json"


class Digests(TypedDict):
    train: Digest
    validation: Digest


class TokenDigests(TypedDict):
    """How many tokens there are to train and to validate on, and what tells them from others."""

    train: Size
    validation: Size
    sha256: Digests


class CorpusSource(TypedDict):
    """What a corpus was, as `Corpus.source` gives it."""

    name: Annotated[str, StringConstraints(max_length=10_000)]
    files: Count
    bytes: Count
    sha256: Digest


class Meta(TypedDict):
    """What meta.json holds.

    Attributes:
        train, validation: tokens of the splits; documents: of both.
        split: whether the validation split is whole documents or the end of the text.
        sha256: of train.bin and validation.bin.
    """

    format: Literal[1]
    tokenizer: Description
    vocabulary: Vocabulary
    dtype: Literal["uint16", "uint32"]
    train: Count
    validation: Count
    documents: Count
    split: Literal["documents", "tail"]
    sha256: Digests
    sources: NotRequired[Annotated[list[CorpusSource], Field(max_length=1000)]]


class _Format(TypedDict):
    format: int


def read_meta(folder: Path) -> Meta:
    """What a prepared folder says of itself.

    Raises:
        Missing: it has no meta.json.
        Unreadable: that is damaged, or of another version.
    """
    file = folder / META
    content = files.read(file, tokenizers.MOST)
    found = schema.decode(content, _Format, file)["format"]
    if found != FORMAT:
        raise Unreadable(file, f"format {found}, expected {FORMAT}: prepare it again")
    meta = schema.decode(content, Meta, file)
    vocabulary, known = meta["vocabulary"], tokenizers.size(meta["tokenizer"])
    if vocabulary != known:
        raise Unreadable(file, f"vocabulary={vocabulary}: expected the tokenizer's, {known}")
    if meta["dtype"] == "uint16" and vocabulary > 1 << 16:
        raise Unreadable(file, f"dtype='uint16': expected 'uint32' for {vocabulary} tokens")
    return meta


_Stamp = tuple[Count, Count, Count, Count, Count]
_Checked = Annotated[dict[Digest, _Stamp], Field(max_length=1000)]


class TokenFile:
    """An open file of tokens.

    Attributes:
        stamp: what it was when it was opened: inode, size, times of the last write and of the last
            change of any kind, which nobody can set back, and the vocabulary.
    """

    def __init__(self, path: Path, meta: Meta) -> None:
        self.path, self._file, self._vocabulary = path, files.opened(path), meta["vocabulary"]
        self._dtype = np.dtype(meta["dtype"]).newbyteorder("<")  # on any machine
        self.stamp = self._now()

    def _now(self) -> _Stamp:
        found = os.fstat(self._file.fileno())
        times = found.st_mtime_ns, found.st_ctime_ns
        return found.st_ino, found.st_size, *times, self._vocabulary

    def ids(self) -> NDArray[Any]:
        """Return the file's tokens, mapped into memory."""
        count = self.stamp[1] // self._dtype.itemsize
        return (
            np.memmap(self._file, self._dtype, "r", shape=(count,))
            if count
            else np.empty(0, self._dtype)
        )

    def untouched(self) -> bool:
        """Whether nothing was written to it since; another file may have taken its name."""
        return self._now()[1:3] == self.stamp[1:3]

    def check(self, count: int, digest: str, say: Callable[[str], None]) -> None:
        """Refuse other tokens than those that were prepared."""
        size, expected = self.stamp[1], count * self._dtype.itemsize
        if size != expected:
            raise Unreadable(self.path, f"is damaged: {size} bytes, expected {expected}")
        if size < REMEMBERED:
            self._read_through(digest)
        elif _checked().get(digest) != self.stamp:
            say(f"checking {size / 1e9:.1f} GB of tokens in {self.path}")
            self._read_through(digest)
            _remember(digest, self.stamp)

    def _read_through(self, digest: str) -> None:
        highest = -1

        def see(block: memoryview) -> None:
            nonlocal highest
            highest = max(highest, int(np.frombuffer(block, self._dtype).max()))

        if files.digest(self.path, see) != digest:
            reason = f"is damaged: its SHA-256 is not {META}'s; prepare it again"
            raise Unreadable(self.path, reason)
        if highest >= self._vocabulary:
            reason = f"is damaged: token {highest}, expected below {self._vocabulary}"
            raise Unreadable(self.path, reason)


def opened(
    folder: Path, meta: Meta, say: Callable[[str], None] = lambda line: None, *, check: bool = True
) -> list[TokenFile]:
    """The files of tokens of the splits.

    Args:
        say: called with a line before a large file is read.
        check: see that they are those that were prepared, bit for bit.

    Raises:
        Missing: one is not there.
    """
    found = {split: TokenFile(folder / f"{split}.bin", meta) for split in SPLITS}
    for split, file in found.items() if check else ():
        file.check(meta[split], meta["sha256"][split], say)
    return list(found.values())


def _checked() -> dict[str, _Stamp]:
    """Digests of the large files that were read through, and their stamps then."""
    with suppress(Unreadable):
        return schema.load(cache() / CHECKED, _Checked)
    return {}


def _remember(digest: str, stamp: _Stamp) -> None:
    latest = dict([*_checked().items(), (digest, stamp)][-100:])
    with suppress(Unwritable):
        files.write(cache() / CHECKED, json.dumps(latest), folders=True)


def cache() -> Path:
    """Return the folder of downloads and of tokens prepared by name.

    It is in ``$JETFIRE_TOKENS``, which the command line sets where ``$JETFIRE_CACHE`` is for one
    run alone, else in the cache.
    """
    return Path(os.environ.get("JETFIRE_TOKENS") or files.cache()) / "data"
