"""Ctrl-C and SIGTERM, deferred where half a step would be worse than none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[None]:
    """Defer a first Ctrl-C or SIGTERM until the end of the block; a second one acts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def hold(number: int, frame: Any) -> None:
        held.append(number)
        if len(held) > 1 and callable(handler := previous[signal.Signals(number)]):
            handler(number, frame)

    # Blocking alone is not enough: a signal that this thread blocks goes to another thread.
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
    """Start processes with both signals blocked, until they call `ignore`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore() -> None:
    """Ignore both signals in a child: they reach the whole process group, and its parent acts."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
