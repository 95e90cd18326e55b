"""A prepared folder: what its meta.json says, and whether its tokens are those that it tells of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from jetfire.core import files, schema
from jetfire.core.files import MIB, Unreadable, Unwritable
from jetfire.core.schema import Count, Digest
from jetfire.gpt2 import tokenizers
from jetfire.gpt2.tokenizers import Description, Vocabulary

FORMAT, META = 1, "meta.json"
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
# A file of tokens from this size on is read through again only where it was written to since, as
# the file CHECKED in the cache says. Smaller ones take less than a second.
REMEMBERED, CHECKED = 512 * MIB, "checked.json"


class Digests(TypedDict):
    train: Digest
    validation: Digest


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


def dtype_of(meta: Meta) -> np.dtype[Any]:
    """What the tokens are, little-endian on any machine."""
    return np.dtype(meta["dtype"]).newbyteorder("<")


def check(folder: Path, meta: Meta, say: Callable[[str], None] = lambda line: None) -> None:
    """See that the files of tokens are those that were prepared, bit for bit.

    Args:
        say: called with a line before a large file is read.

    Raises:
        Missing: one is not there.
        Unreadable: one is damaged.
    """
    for split in SPLITS:
        file = _File.of(folder / f"{split}.bin", meta["vocabulary"])
        expected = meta[split] * dtype_of(meta).itemsize
        if file.size != expected:
            raise Unreadable(file.path, f"is damaged: {file.size} bytes, expected {expected}")
        digest = meta["sha256"][split]
        if file.size < REMEMBERED:
            file.check(digest, dtype_of(meta))
        elif _checked().get(digest) != file.stamp:
            say(f"checking {file.size / 1e9:.1f} GB of tokens in {file.path}")
            file.check(digest, dtype_of(meta))
            _remember(digest, file.stamp)


_Stamp = tuple[Count, Count, Count, Count, Count]
_Checked = Annotated[dict[Digest, _Stamp], Field(max_length=1000)]


@dataclass(frozen=True)
class _File:
    """A file of tokens.

    Attributes:
        stamp: inode, size, times of the last write and of the last change of any kind, which
            nobody can set back, and the vocabulary.
    """

    path: Path
    stamp: _Stamp

    @classmethod
    def of(cls, path: Path, vocabulary: int) -> _File:
        with files.opened(path) as file:
            found = os.fstat(file.fileno())
        times = found.st_mtime_ns, found.st_ctime_ns
        return cls(path, (found.st_ino, found.st_size, *times, vocabulary))

    @property
    def size(self) -> int:
        return self.stamp[1]

    def check(self, digest: str, dtype: np.dtype[Any]) -> None:
        """
        Raises:
            Unreadable: it has another digest, or a token that its vocabulary has not.
        """
        highest = -1

        def see(block: memoryview) -> None:
            nonlocal highest
            highest = max(highest, int(np.frombuffer(block, dtype).max()))

        if files.digest(self.path, see) != digest:
            reason = f"is damaged: its SHA-256 is not {META}'s; prepare it again"
            raise Unreadable(self.path, reason)
        if highest >= self.stamp[-1]:
            reason = f"is damaged: token {highest}, expected below {self.stamp[-1]}"
            raise Unreadable(self.path, reason)


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
