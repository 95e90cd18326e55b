"""Ctrl-C and SIGTERM, held back where half a step would be worse than none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[None]:
    """Until the end of this a first Ctrl-C or SIGTERM waits; a second one does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def hold(number: int, frame: Any) -> None:
        held.append(number)
        if len(held) > 1 and callable(handler := previous[signal.Signals(number)]):
            handler(number, frame)

    # Other threads take what this one blocks, so that blocking alone would not do.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for number in SIGNALS:
            previous[number] = signal.signal(number, hold)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


@contextmanager
def blocked() -> Iterator[None]:
    """Processes started in here have both signals blocked, until they call `ignore`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore() -> None:
    """Leave it to the parent, for signals that reach a whole process group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
