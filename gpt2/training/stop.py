"""How a run and a study of runs stop; no torch is loaded for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jetfire.core.terminal import note


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
