"""Prepared tokens, mapped into memory, and what a step and an evaluation read of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jetfire.gpt2 import prepare as preparation
from jetfire.gpt2 import tokenizers
from jetfire.gpt2.prepare import prepare
from jetfire.gpt2.tokenizers import Tokenizer
from jetfire.ops.errors import UsageError

__all__ = ["Tokens", "batch", "evaluation", "open_tokens", "prepare"]

Array = NDArray[Any]
# Ids of files up to this size are all looked at when they are opened; of larger ones, this much.
CHECKED = 256 << 20


@dataclass(frozen=True)
class Tokens:
    """A prepared folder.

    Attributes:
        train, validation: 1-D read-only maps of uint16 or uint32 ids, all below `vocabulary`.
        meta: its meta.json (`prepare._write` says what is in it).
    """

    folder: Path
    train: Array
    validation: Array
    vocabulary: int
    meta: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens; read when asked for, as training does not need it.

        Raises:
            UsageError: the folder's tokenizer is missing or damaged.
        """
        return tokenizers.load(self.meta["tokenizer"], self.folder)

    def require(self, context: int, vocabulary: int | None = None) -> None:
        """
        Raises:
            UsageError: a split has no window of that context, or a model of that vocabulary does
                not know all tokens.
        """
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


def open_tokens(folder: Path | str) -> Tokens:
    """
    Raises:
        UsageError: the folder is missing, is not of prepared tokens, or is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"data {folder}: no such folder: expected one that `prepare` made")
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        made, vocabulary = meta["format"], int(meta["vocabulary"])
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        sizes = {split: int(meta[split]) for split in ("train", "validation")}
    except OSError as error:
        raise UsageError(
            f"data {folder}: meta.json: {error.strerror}: expected a folder that `prepare` made"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"data {folder}: meta.json is damaged: {error!r}") from None
    if made != preparation.FORMAT:
        raise UsageError(
            f"data {folder}: format {made}, expected {preparation.FORMAT}: prepare it again"
        )
    arrays = {split: _map(folder / f"{split}.bin", dtype, size) for split, size in sizes.items()}
    for split, array in arrays.items():
        highest = _highest(array)
        if highest >= vocabulary:
            raise UsageError(
                f"data {folder}: {split}.bin is damaged: token {highest}, expected below "
                f"{vocabulary}"
            )
    return Tokens(folder, arrays["train"], arrays["validation"], vocabulary, meta)


def _map(path: Path, dtype: np.dtype[Any], size: int) -> Array:
    try:
        found = path.stat().st_size
        if found != size * dtype.itemsize:
            raise UsageError(
                f"data {path.parent}: {path.name} is damaged: {found} bytes, expected "
                f"{size * dtype.itemsize}"
            )
        return np.memmap(path, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)
    except OSError as error:
        raise UsageError(f"data {path.parent}: {path.name}: {error.strerror}") from None


def _highest(array: Array) -> int:
    """The highest id; of a large file, of evenly spread parts."""
    if not len(array):
        return -1
    if array.nbytes <= CHECKED:
        return int(array.max())
    part = CHECKED // array.itemsize // 64
    starts = [i * (len(array) - part) // 63 for i in range(64)]
    return max(int(array[start : start + part].max()) for start in starts)


def batch(
    tokens: Array, context: int, rows: int, *, seed: int, step: int, micro: int = 0, rank: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(ids, targets), int64 rows×context, of windows that the arguments alone decide.

    Philox counts in 256 bits: 64 each for micro-batch, step and process, 64 for its own draws; so
    no two batches of a run share a draw, and step 1000 is had without the 999 before it.

    Raises:
        UsageError: there are too few tokens for one window.
    """
    if len(tokens) <= context:
        raise UsageError(f"{len(tokens)} tokens: expected more than context={context}")
    generator = np.random.Philox(key=seed % 2**64, counter=[0, micro, step, rank])
    # Modulo, not Generator.integers, whose draws may change between versions of NumPy; the bias
    # is below 2^-24 for any number of tokens that fits a disk.
    starts = generator.random_raw(rows) % np.uint64(len(tokens) - context)
    return _windows(tokens, starts.astype(np.int64), context, torch.device(device))


def evaluation(
    tokens: Array, context: int, rows: int, batches: int, *, device: torch.device | str = "cpu"
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`batches` batches as `batch` gives, of windows evenly spread, the same for every run.

    Windows overlap where there are fewer than rows·batches apart.

    Raises:
        UsageError: there are too few tokens for one window.
    """
    if len(tokens) <= context:
        raise UsageError(f"{len(tokens)} tokens: expected more than context={context}")
    last, count = len(tokens) - context - 1, rows * batches
    starts = np.arange(count, dtype=np.int64) * last // max(1, count - 1)
    for part in starts.reshape(batches, rows):
        yield _windows(tokens, part, context, torch.device(device))


def _windows(
    tokens: Array, starts: NDArray[np.int64], context: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    found = np.stack([tokens[start : start + context + 1] for start in starts.tolist()])
    both = torch.from_numpy(found.astype(np.int64))
    ids, targets = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    if device.type != "cuda":
        return ids.to(device), targets.to(device)
    # The copies are queued; the allocator of pinned memory keeps each block until it is copied.
    return (
        ids.pin_memory().to(device, non_blocking=True),
        targets.pin_memory().to(device, non_blocking=True),
    )
