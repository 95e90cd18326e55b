"""Prepared tokens, mapped into memory, and what a step and an evaluation read of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jetfire.core.errors import UsageError
from jetfire.core.files import Missing, Unreadable
from jetfire.gpt2.data import prepared, tokenizers
from jetfire.gpt2.data.prepare import prepare
from jetfire.gpt2.data.prepared import Meta, TokenFile
from jetfire.gpt2.data.tokenizers import Tokenizer

__all__ = ["Tokens", "batch", "evaluation", "open_tokens", "prepare", "shuffled"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Tokens:
    """A prepared folder.

    Attributes:
        train, validation: 1-D read-only maps of uint16 or uint32 ids, all below `vocabulary`.
        meta: its meta.json.
    """

    folder: Path
    train: Array
    validation: Array
    meta: Meta
    files: Sequence[TokenFile] = field(default=(), repr=False)

    @property
    def vocabulary(self) -> int:
        return self.meta["vocabulary"]

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens; read when asked for, as training does not need it.

        Raises:
            UsageError: the folder's tokenizer is missing or damaged.
        """
        return tokenizers.load(self.meta["tokenizer"], self.folder)

    def require(self, context: int, vocabulary: int | None = None) -> None:
        """Refuse a context that a split has no window of, and tokens that a model does not know."""
        for name, array in (("train", self.train), ("validation", self.validation)):
            if len(array) <= context:
                raise UsageError(
                    f"data {self.folder}: {len(array)} {name} tokens: expected more than "
                    f"context={context}"
                )
        if vocabulary is not None and self.vocabulary > vocabulary:
            raise UsageError(
                f"data {self.folder}: vocabulary {self.vocabulary}: expected at most the model's, "
                f"{vocabulary}"
            )

    def check_untouched(self) -> None:
        """Refuse mapped files that were written to since; others may have taken their names."""
        for file in self.files:
            if not file.untouched():
                raise UsageError(f"data {file.path}: was written to while it was trained on")


def open_tokens(
    folder: Path | str, say: Callable[[str], None] = lambda line: None, *, check: bool = True
) -> Tokens:
    """Open a prepared folder, whose files of tokens are checked.

    Args:
        say: called with a line before a large file is checked.
        check: read the files of tokens through; without it another process does.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"data {folder}: no such folder: expected one that `prepare` made")
    try:
        meta = prepared.read_meta(folder)
        files = prepared.opened(folder, meta, say, check=check)
    except Missing as error:
        raise UsageError(f"data {error}: expected a folder that `prepare` made") from None
    except Unreadable as error:
        raise UsageError(f"data {error}") from None
    train, validation = (file.ids() for file in files)
    return Tokens(folder, train, validation, meta, files)


def batch(
    tokens: Array,
    context: int,
    rows: int,
    *,
    seed: int,
    step: int,
    micro: int = 0,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets), int64 rows×context, of windows that the arguments alone decide.

    Philox counts in 256 bits: 64 each for micro-batch, step and process, 64 for its own draws; so
    no two batches of a run share a draw, and step 1000 is had without the 999 before it.
    """
    if len(tokens) <= context:
        raise UsageError(f"{len(tokens)} tokens: expected more than context={context}")
    generator = np.random.Philox(key=seed % 2**64, counter=[0, micro, step, rank])
    # Modulo, not Generator.integers, whose draws may change between versions of NumPy; the bias
    # is below 2^-24 for any number of tokens that fits a disk.
    starts = generator.random_raw(rows) % np.uint64(len(tokens) - context)
    return _windows(tokens, starts.tolist(), context, torch.device(device))


def shuffled(
    tokens: Array,
    context: int,
    rows: int,
    *,
    seed: int,
    first: int,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `batch` does, of windows that share no target until all have been read.

    Args:
        first: rows that the run has read before these.
    """
    if len(tokens) <= context:
        raise UsageError(f"{len(tokens)} tokens: expected more than context={context}")
    count = (len(tokens) - 1) // context
    rounds = (divmod(row, count) for row in range(first, first + rows))
    starts = [int(_permutation(count, seed, epoch)[place]) * context for epoch, place in rounds]
    return _windows(tokens, starts, context, torch.device(device))


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> Array:
    """Return the order in which an epoch reads so many windows: that of as many random numbers."""
    # No process of `batch` has this rank, so no batch has these numbers.
    generator = np.random.Philox(key=seed % 2**64, counter=[0, 0, epoch, 1 << 32])
    return generator.random_raw(count).argsort(kind="stable")


def evaluation(
    tokens: Array, context: int, rows: int, batches: int, *, device: torch.device | str = "cpu"
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`batches` batches as `batch` gives, of windows evenly spread, the same for every run.

    Windows overlap where there are fewer than rows·batches apart.
    """
    if len(tokens) <= context:
        raise UsageError(f"{len(tokens)} tokens: expected more than context={context}")
    last, apart = len(tokens) - context - 1, max(1, rows * batches - 1)
    for first in range(0, rows * batches, rows):
        starts = [place * last // apart for place in range(first, first + rows)]
        yield _windows(tokens, starts, context, torch.device(device))


def _windows(
    tokens: Array, starts: Sequence[int], context: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    found = np.stack([tokens[start : start + context + 1] for start in starts])
    both = torch.from_numpy(found.astype(np.int64))
    ids, targets = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    if device.type != "cuda":
        return ids.to(device), targets.to(device)
    # The copies are queued; the allocator of pinned memory keeps each block until it is copied.
    return (
        ids.pin_memory().to(device, non_blocking=True),
        targets.pin_memory().to(device, non_blocking=True),
    )
