"""Runners of cases: in this process, or in one that may crash or hang at no one else's cost."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.processes import Worker
from jetfire.core.sanitizer import under_consan
from jetfire.fuzz import sanitize
from jetfire.fuzz.example import Example, Mode, Outcome, is_huge
from jetfire.fuzz.run import run_case

START_S = 120.0  # to import torch and the kernels, and to open the device
CASE_S = 60.0
HUGE_TIMES = 5  # as long for a matrix of more than 2^31 elements


class Executor(Protocol):
    """Runs cases."""

    def run(self, case: Example) -> Outcome: ...

    def late(self) -> Outcome | None:
        """Return what was found out about a case after its outcome."""
        ...

    def close(self) -> None: ...


class InProcess:
    """Runs cases here: fast, for kernels that neither crash nor hang."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def run(self, case: Example) -> Outcome:
        return run_case(case, self._device)

    def late(self) -> None:
        pass

    def close(self) -> None:
        pass


class Isolated:
    """Runs cases in a worker, which is started again where a case has ended it.

    Args:
        case_s: seconds that a case may take, compilation included.
        sanitizer: the tool that it runs under, if any.
    """

    def __init__(
        self, device: Device, case_s: float = CASE_S, sanitizer: sanitize.Tool | None = None
    ) -> None:
        self._device, self._case_s = device, case_s
        self._sanitizer = sanitizer
        self._worker: Worker | None = None
        self._session: sanitize.SanitizerSession | None = None
        self._last: Example | None = None  # that this worker ran

    def run(self, case: Example) -> Outcome:
        before = self._last
        outcome = self._look(case)
        if outcome.kind != "sanitizer" or before is None:
            return outcome
        # It may have come late, of the case before: it is of the one that has it again.
        for suspect in (case, before):
            again = self._look(suspect, sanitize.LATE_S)
            if again.kind == "sanitizer":
                return replace(again, case=suspect)
        return outcome

    def late(self) -> Outcome | None:
        if self._session is None or self._last is None:
            return None
        outcome = self._told(self._last, Outcome(), self._session.said(sanitize.LATE_S))
        return replace(outcome, case=self._last) if outcome.failed else None

    def _look(self, case: Example, wait_s: float = sanitize.DELAY_S) -> Outcome:
        """Return what comes of a case and, after so many seconds, what a sanitizer said."""
        outcome, usable = self._answer(case)
        self._last = case
        session, said = self._session, []
        if session is not None:
            said.append(session.said(wait_s))
        if not usable:
            if self._sanitizer == "consan" and self._worker is not None:
                said.append(sanitize.assertions(self._worker.printed()))
            self._end_worker()
            said += [session.said()] if session is not None else []
            self.close()
        return self._told(case, outcome, " · ".join(filter(None, said)))

    def _told(self, case: Example, outcome: Outcome, said: str) -> Outcome:
        """The outcome, once a sanitizer has said something of the case too."""
        if self._sanitizer is None or not said:
            return outcome
        left, known = sanitize.sift(self._sanitizer, case.op, case.kernel, said)
        return Outcome("sanitizer", left) if left else replace(outcome, known=known)

    def _answer(self, case: Example) -> tuple[Outcome, bool]:
        """Return what the worker says, and whether it is fit for more."""
        worker = self._ready()
        case_s = self._case_s * (HUGE_TIMES if is_huge(case) else 1)
        try:
            worker.ask(case)
            for what, limit in (("start", START_S), ("answer", case_s)):
                if not worker.connection.poll(limit):
                    return Outcome("timeout", f"no {what} in {limit:.0f} s"), False
                answer = worker.answer()
            outcome, usable = answer
            return outcome, usable
        except (EOFError, OSError):
            return Outcome("crash", worker.last_words()), False
        except BaseException:  # Ctrl-C: it is at something that nobody waits for
            self.close()
            raise

    def _ready(self) -> Worker:
        """A worker that has begun.

        Raises:
            UsageError: it cannot start.
        """
        if self._worker is not None:
            return self._worker
        mode = Mode()
        if self._sanitizer is not None:
            mode = sanitize.mode(self._sanitizer)
            if self._sanitizer != "consan":
                self._session = sanitize.SanitizerSession(self._sanitizer)
        under = self._session.command() if self._session else ()
        self._worker = Worker(serve, self._device, mode, under=under)
        reason: str | None = f"no worker started in {START_S:.0f} s"
        if self._worker.connection.poll(START_S):
            try:
                reason = self._worker.answer()
            except EOFError:
                reason = self._worker.last_words()
        if reason is not None:
            self.close()
            raise UsageError(reason)
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = self._last = None

    def close(self) -> None:
        self._end_worker()
        if self._session is not None:
            self._session.close()
        self._session = None


def serve(connection: Connection, device: Device, mode: Mode) -> None:
    """Answer with None once it has started, or with why not; then cases.

    A case is answered with None once its kernels have been imported: from here on the time is its
    own. Then with its outcome, and whether the worker is fit for more: not after an error that
    leaves the device's context unusable.
    """
    try:
        if not device.works():
            raise UsageError(f"{device.label} is unusable")
    except UsageError as error:
        connection.send(str(error))
        return
    if device.kind == "cpu":  # on a busy machine other threads are waited for, ten times as long
        torch.set_num_threads(1)
    elif under_consan():
        sanitize.serve_instrumented()
    connection.send(None)
    while True:
        (case,) = connection.recv()
        registry.kernels(case.op)
        connection.send(None)
        outcome = run_case(case, device, mode)
        usable = device.works()
        if outcome.kind == "raised" and not usable:  # an illegal address, say
            outcome = replace(outcome, kind="crash")
        connection.send((outcome, usable))
