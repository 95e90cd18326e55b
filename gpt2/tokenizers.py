"""Text to token ids and back: bytes, a text's own characters, or GPT-2's byte-pair encoding.

A tokenizer is kept beside the tokens it made (`save`, `load`), so that a prepared folder can be
read and sampled from without the files or the download that it came from.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jetfire.ops.errors import UsageError

NAMES = ("byte", "char", "gpt2")
END_OF_TEXT = "<|endoftext|>"
RANKS = "gpt2.tiktoken"
GPT2_VOCABULARY = 50257
# Radford et al. (2019) split text so before merging; tiktoken's form of the pattern.
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Tokenizer(Protocol):
    """What the data, the training and the sampling need of a tokenizer.

    Attributes:
        vocabulary: ids are 0 … vocabulary - 1.
        separator: id between documents, or None.
    """

    name: str
    vocabulary: int
    separator: int | None

    def encode(self, text: str) -> NDArray[np.uint32]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, folder: Path) -> dict[str, Any]:
        """Put what `load` needs into the folder and the returned description."""


class Bytes:
    """UTF-8 bytes."""

    name, vocabulary = "byte", 256
    separator: int | None = None

    def encode(self, text: str) -> NDArray[np.uint32]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(map(int, ids)).decode(errors="replace")

    def save(self, folder: Path) -> dict[str, Any]:
        return {"name": self.name}


class Characters:
    """The distinct characters of a text, in the order of their code points."""

    name = "char"
    separator: int | None = None

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocabulary = len(self.characters)
        self._points = np.array([ord(c) for c in self.characters], dtype=np.uint32)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """
        Raises:
            UsageError: a character is not in the vocabulary.
        """
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = np.searchsorted(self._points, points)
        known = np.append(self._points, np.uint32(0))[ids] == points
        known &= ids < self.vocabulary
        if not known.all():
            unknown = text[int(np.argmin(known))]
            raise UsageError(
                f"character {unknown!r} is not in the vocabulary: expected of {self.characters!r}"
            )
        return ids.astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def save(self, folder: Path) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters}


class Gpt2:
    """GPT-2's byte-pair encoding, through tiktoken.

    Args:
        ranks: bytes of each token → its id, which is also its merge's rank.
        end: id of <|endoftext|>.
    """

    name = "gpt2"

    def __init__(self, ranks: Mapping[bytes, int], end: int) -> None:
        import tiktoken

        self.ranks = dict(ranks)
        self.separator: int | None = end
        self.vocabulary = max(end, *self.ranks.values()) + 1
        self._encoding = tiktoken.Encoding(
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

    def save(self, folder: Path) -> dict[str, Any]:
        lines = (
            base64.b64encode(token).decode() + f" {rank}\n"
            for token, rank in sorted(self.ranks.items(), key=lambda item: item[1])
        )
        (folder / RANKS).write_text("".join(lines))
        return {"name": self.name, "ranks": RANKS, "end": self.separator}


def gpt2(vocabulary: Path | None = None) -> Gpt2:
    """GPT-2's tokenizer from a folder with `encoder.json` and `vocab.bpe`, else downloaded.

    Raises:
        UsageError: the folder lacks the files or they contradict each other, or there is no
            download to be had.
    """
    if vocabulary is not None:
        return Gpt2(*_read_gpt2(vocabulary))
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever its HTTP library raises
        reason = " ".join(str(error).split())[:120]
        raise UsageError(
            f"cannot download the gpt2 tokenizer ({reason}): expected a network, or "
            "--vocabulary FOLDER with encoder.json and vocab.bpe; or --tokenizer byte"
        ) from None
    return Gpt2(encoding._mergeable_ranks, encoding.eot_token)


def _byte_names() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte → the byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _read_gpt2(folder: Path) -> tuple[dict[bytes, int], int]:
    """Ranks and <|endoftext|>'s id from OpenAI's two files, checked against each other."""
    encoder, merges = folder / "encoder.json", folder / "vocab.bpe"
    try:
        ids: dict[str, int] = json.loads(encoder.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(
            f"--vocabulary {folder}: {error.strerror}: {error.filename}: expected encoder.json "
            "and vocab.bpe"
        ) from None
    except ValueError as error:
        raise UsageError(f"--vocabulary {folder}: encoder.json or vocab.bpe: {error}") from None
    names = _byte_names()
    try:
        end = ids[END_OF_TEXT]
        ranks = {
            bytes(names[c] for c in token): i for token, i in ids.items() if token != END_OF_TEXT
        }
        made = [line.split() for line in lines if line and not line.startswith("#version")]
        expected = [ids[first + second] for first, second in made]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--vocabulary {folder}: encoder.json and vocab.bpe do not belong together: {error!r}"
        ) from None
    if len(ranks) != 256 + len(expected) or expected != list(range(256, 256 + len(expected))):
        raise UsageError(
            f"--vocabulary {folder}: expected encoder.json to number 256 bytes and then "
            f"vocab.bpe's {len(expected)} merges in their order"
        )
    return ranks, end


def load(description: Mapping[str, Any], folder: Path) -> Tokenizer:
    """What `save` put there.

    Raises:
        UsageError: the folder's tokenizer is missing or damaged.
    """
    try:
        name = description["name"]
        if name == "byte":
            return Bytes()
        if name == "char":
            return Characters(description["characters"])
        if name != "gpt2":
            raise ValueError(f"tokenizer {name!r}, expected one of {', '.join(NAMES)}")
        lines = (folder / description["ranks"]).read_text().splitlines()
        ranks = {base64.b64decode(word): int(rank) for word, rank in map(str.split, lines)}
        return Gpt2(ranks, int(description["end"]))
    except (OSError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UsageError(f"data {folder}: cannot load its tokenizer: {error}") from None
