"""What a run and a study of runs share and need no torch for: their tokens, and how they stop."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from jetfire.core.terminal import note
from jetfire.gpt2.data import corpora, prepare
from jetfire.gpt2.data.prepared import META
from jetfire.gpt2.training.settings import Settings


class Stop:
    """Ctrl-C and SIGTERM stop a run after the step under way; a second one ends it at once."""

    def __init__(self, silent: bool = False) -> None:
        self.asked, self.silent = False, silent

    def __call__(self) -> bool:
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if not self.silent:
            note("stopping after this step; again to stop at once")

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._ask) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def prepared_data(settings: Settings) -> Path:
    """Return the folder of a run's tokens; text is prepared on first use, into the cache.

    Raises:
        UsageError: there is no such data.
    """
    folder = Path(settings.data)
    if not (folder / META).exists():
        chosen = None if settings.tokenizer == "auto" else settings.tokenizer
        output = None
        if settings.data not in corpora.NAMED:
            digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
            output = prepare.cache() / f"{folder.stem[:100]}-{digest}-{settings.tokenizer}"
        folder = prepare.prepare(settings.data, chosen, output, show=True)
    return folder
