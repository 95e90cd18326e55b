"""Text to token ids and back: bytes, a text's own characters, or GPT-2's byte-pair encoding.

A tokenizer is kept beside the tokens it made (`save`, `load`), so that a prepared folder can be
read and sampled from without the files or the download that it came from.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from jetfire.core import files, schema
from jetfire.core.errors import UsageError, not_installed
from jetfire.core.files import MIB, Missing, Unreadable
from jetfire.core.schema import Digest
from jetfire.gpt2.data.vocabulary import LARGEST

NAMES = ("byte", "char", "gpt2")
END_OF_TEXT = "<|endoftext|>"
RANKS = "gpt2.tiktoken"
GPT2_VOCABULARY = 50257
Id = Annotated[int, Field(ge=0, lt=LARGEST)]
MOST = 64 * MIB  # bytes of a file


class BytesKept(TypedDict):
    name: Literal["byte"]


class CharactersKept(TypedDict):
    name: Literal["char"]
    characters: Annotated[str, StringConstraints(min_length=1, max_length=0x110000)]


class Gpt2Kept(TypedDict):
    """GPT-2's tokenizer as kept; `ranks` has this one name, so that it can name no other file."""

    name: Literal["gpt2"]
    ranks: Literal["gpt2.tiktoken"]
    end: Id
    sha256: NotRequired[Digest]


# What `Tokenizer.save` returns, and `load` takes.
Description = Annotated[BytesKept | CharactersKept | Gpt2Kept, Field(discriminator="name")]
# Radford et al. (2019) split text so before merging; tiktoken's form of the pattern.
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Bytes:
    """UTF-8 bytes."""

    name, vocabulary = "byte", 256
    separator: int | None = None

    def encode(self, text: str) -> NDArray[np.uint32]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(map(int, ids)).decode(errors="replace")

    def save(self, folder: Path) -> Description:
        return {"name": "byte"}


class Characters:
    """The distinct characters of a text, in the order of their code points."""

    name = "char"
    separator: int | None = None

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocabulary = len(self.characters)
        self._points = np.array([ord(c) for c in self.characters], dtype=np.uint32)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Refuses a character that is not in the vocabulary."""
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points)
        known = np.append(self._points, np.uint32(0))[ids] == points
        known &= ids < self.vocabulary
        if not known.all():
            unknown = text[int(np.argmin(known))]
            raise UsageError(
                f"character {unknown!r} is not in the vocabulary: expected of "
                f"{self.characters[:100]!r}{'…' if self.vocabulary > 100 else ''}"
            )
        return ids.astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def save(self, folder: Path) -> Description:
        return {"name": "char", "characters": self.characters}


class Gpt2:
    """GPT-2's byte-pair encoding, through tiktoken.

    Args:
        ranks: bytes of each token → its id, which is also its merge's rank.
        end: id of <|endoftext|>.

    Raises:
        ValueError: they do not number tokens from 0 and then the end of text, or do not have every
            byte among them: tiktoken would panic, or decode other text.
    """

    name = "gpt2"

    def __init__(self, ranks: Mapping[bytes, int], end: int) -> None:
        if sorted(ranks.values()) != list(range(end)):
            raise ValueError(
                f"{len(ranks)} tokens, and {end} ends text: expected ids from 0 to {end}"
            )
        if b"" in ranks or any(bytes([value]) not in ranks for value in range(256)):
            raise ValueError("expected each of the 256 bytes to be a token, and nothing to be none")
        self.ranks, self.end = dict(ranks), end
        self.separator: int | None = end
        self.vocabulary = len(self.ranks) + 1
        self._encoding = tiktoken().Encoding(
            "gpt2", pat_str=_PATTERN, mergeable_ranks=self.ranks, special_tokens={END_OF_TEXT: end}
        )

    def encode(self, text: str) -> NDArray[np.uint32]:
        """<|endoftext|> in the text is text, not the separator. Releases the GIL while it works."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # The pattern's engine gives up on several 100 000 white spaces in a row before a word.
            if len(text) < 2:
                raise
            middle = len(text) // 2
            return np.concatenate([self.encode(text[:middle]), self.encode(text[middle:])])

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([int(i) for i in ids], errors="replace")

    def save(self, folder: Path) -> Description:
        lines = (
            base64.b64encode(token).decode() + f" {rank}\n"
            for token, rank in sorted(self.ranks.items(), key=lambda item: item[1])
        )
        files.write(folder / RANKS, "".join(lines))
        digest = files.digest(folder / RANKS)
        return {"name": "gpt2", "ranks": "gpt2.tiktoken", "end": self.end, "sha256": digest}


# Ids are 0 … `vocabulary` - 1; `separator` stands between documents, where it is not None. `save`
# puts what `load` needs into a folder and the description that it returns.
Tokenizer = Bytes | Characters | Gpt2


def gpt2(vocabulary: Path | None = None) -> Gpt2:
    """GPT-2's tokenizer from a folder with `encoder.json` and `vocab.bpe`, else downloaded."""
    library = tiktoken()
    if vocabulary is not None:
        return _read_gpt2(vocabulary)
    try:
        encoding = library.get_encoding("gpt2")
    except Exception as error:  # whatever its HTTP library raises
        reason = " ".join(str(error).split())[:120]
        raise UsageError(
            f"cannot download the gpt2 tokenizer ({reason}): expected a network, or "
            "jetfire-train prepare with --vocabulary FOLDER (encoder.json and vocab.bpe) "
            "or --tokenizer byte"
        ) from None
    return Gpt2(encoding._mergeable_ranks, encoding.eot_token)


def tiktoken() -> Any:
    """Return the library.

    Raises:
        UsageError: it is not installed; names the extra that brings it.
    """
    try:
        import tiktoken as library
    except ImportError:
        raise not_installed("tiktoken", "text") from None
    return library


def _read_gpt2(folder: Path) -> Gpt2:
    """Return the tokenizer of OpenAI's two files, which tiktoken checks against each other."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    merges, ids = folder / "vocab.bpe", folder / "encoder.json"
    try:
        # tiktoken keeps copies of what it read, and takes them only where they have this digest.
        digests = [hashlib.sha256(files.read(path, MOST)).hexdigest() for path in (merges, ids)]
    except Missing as error:
        raise UsageError(f"--vocabulary {error}: expected encoder.json and vocab.bpe") from None
    except Unreadable as error:
        raise UsageError(f"--vocabulary {error}") from None
    try:
        ranks = data_gym_to_mergeable_bpe_ranks(str(merges), str(ids), digests[0], digests[1])
        return Gpt2(ranks, len(ranks))
    except Exception as error:  # an assertion, or whatever a file of another kind leads to
        said = f" ({str(error)[:100]!r})" if str(error) else ""
        raise UsageError(
            f"--vocabulary {folder}: expected GPT-2's encoder.json and vocab.bpe, which belong "
            f"together{said}"
        ) from None


def load(description: Description, folder: Path) -> Tokenizer:
    """What `save` put there.

    Raises:
        Unreadable: the folder's tokenizer is missing or damaged.
    """
    if description["name"] == "byte":
        return Bytes()
    if description["name"] == "char":
        return Characters(description["characters"])
    file = folder / RANKS
    content = _content(description, file)
    try:
        pairs = [line.split() for line in content.splitlines()]
        ranks = {base64.b64decode(word, validate=True): int(rank) for word, rank in pairs}
        if len(ranks) != len(pairs):
            raise ValueError("a token is there twice")
        return Gpt2(ranks, description["end"])
    except (ValueError, binascii.Error) as error:
        raise Unreadable(file, f"is no list of tokens: {str(error)[:100]}") from None


def _content(description: Gpt2Kept, file: Path) -> bytes:
    """Return the content of the file that `Gpt2.save` wrote."""
    content = files.read(file, MOST)
    digest = hashlib.sha256(content).hexdigest()
    if description.get("sha256", digest) != digest:
        raise Unreadable(file, "is not what was written: its SHA-256 is another")
    return content


def size(description: Description) -> int:
    """Return the vocabulary of a tokenizer that was kept, without loading it."""
    if description["name"] == "byte":
        return Bytes.vocabulary
    if description["name"] == "char":
        return len(set(description["characters"]))
    return description["end"] + 1


def keep(description: Description, source: Path, folder: Path) -> None:
    """Keep a prepared folder's tokenizer in another folder too, as `kept` reads it.

    Raises:
        Unreadable: its file is missing or damaged.
        Unwritable: the folder cannot be written.
    """
    if description["name"] == "gpt2":
        files.write(folder / RANKS, _content(description, source / RANKS))
    files.write(folder / "meta.json", json.dumps(description) + "\n")


def may_keep(folder: Path) -> bool:
    """Return whether a folder is not there, or holds nothing but what `keep` puts there."""
    try:
        return {*os.listdir(folder)} <= {"meta.json", RANKS}
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def kept(folder: Path) -> Tokenizer:
    """The tokenizer that `keep` put there.

    Raises:
        Unreadable: it is missing or damaged.
    """
    kind: Any = Description
    return load(schema.load(folder / "meta.json", kind, MOST), folder)
