"""The runner that measures on the devices at hand."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection as mp_connection
from typing import Any

from jetfire.core import interrupts
from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.processes import Patience, Worker
from jetfire.tuner import worker as workers
from jetfire.tuner.trial import Comparison, Measurement, Outcome, RunnerError
from jetfire.tuner.worker import BEGUN, START, Job, NotSetUp

COMPILERS = 16
COMPILE_S = 120.0
START_S = 90.0  # to import torch, and to make a problem's inputs and its reference's results
# To prove every finalist, on new inputs: each needs the reference's results for these.
PROVE_S = 120.0
# Half a second for each of six readings of up to twenty configs and peers (`worker.POWER_RUNS`).
POWER_S = 60.0
# A config given up may hang: to start another worker takes no longer than to wait so long for it.
DROPPED_S = 3.0


@dataclass
class _Task:
    """A trial on its way.

    Attributes:
        patience: what the worker has for the stage it is at, which began at `began`.
        ready: the worker has begun with it; before, it starts or sets up the job.
        spent: seconds that its compilation took.
        dropped: nobody waits for it any more, but its worker is still at it.
        again: a worker died or hung before it began with it, and another one is to.
    """

    number: int
    config: Config
    patience: Patience = field(init=False)
    began: float = 0.0
    ready: bool = False
    spent: float = 0.0
    dropped: bool = False
    again: bool = False


class _Seat:
    """A worker's place: the worker, started again when it has died, and what it does.

    Args:
        limit: seconds that the worker may take for a config.
        queue: trials that wait for such a worker.
    """

    def __init__(
        self,
        target: Callable[..., None],
        argument: object,
        what: str,
        limit: float,
        queue: deque[_Task],
    ) -> None:
        self._target, self._argument = target, argument
        self.what, self.limit, self.queue = what, limit, queue
        self.worker: Worker | None = None
        self.task: _Task | None = None

    def ask(self, *request: object) -> Worker:
        """Send a request, to a new worker if there is none that lives."""
        if self.worker is not None:
            try:
                self.worker.ask(*request)
                return self.worker
            except OSError:  # it was killed while it had nothing to do
                self.dismiss()
        with interrupts.deferred():
            self.worker = Worker(self._target, self._argument)
        self.worker.ask(*request)
        return self.worker

    def dismiss(self) -> None:
        """Kill the worker; the next request starts another."""
        if self.worker is not None:
            self.worker.close()
        self.worker = self.task = None


class DeviceRunner:
    """Compiles in parallel processes and measures in one process a device, one config at a time.

    Args:
        devices: of one model; each gets its own worker.
        trial_s: seconds that a config may take to be checked and timed.
        compilers: processes that compile; by default as many as there are cores to spare, up to 16.
    """

    def __init__(
        self, devices: Sequence[Device], trial_s: float, compilers: int | None = None
    ) -> None:
        self.trial_s = trial_s
        names = [d.kind if d.kind == "cpu" else f"cuda:{d.index}" for d in devices]
        self._to_compile: deque[_Task] = deque()
        self._to_measure: deque[_Task] = deque()
        self._measuring = [
            _Seat(workers.measure_configs, name, "check and time", trial_s, self._to_measure)
            for name in names
        ]
        capability = devices[0].capability
        spare = max(1, _cores() - len(devices))
        count = min(COMPILERS, spare) if compilers is None else compilers
        self._compiling = [
            _Seat(workers.compile_configs, capability, "compile", COMPILE_S, self._to_compile)
            for _ in range(count if capability else 0)
        ]
        self._seats = [*self._compiling, *self._measuring]
        self.capacity = len(self._seats)
        self._done: list[tuple[int, Measurement]] = []
        self._trouble: str | None = None
        self.job: Job | None = None

    def start(self) -> None:
        """Start every worker, and wait for those that measure to be ready."""
        for seat in self._seats:
            seat.ask(START)
        for seat in self._measuring:
            # One that dies or hangs so early does so again at its first trial, which says it.
            if seat.worker is not None and self._answers(seat.worker, START_S):
                with contextlib.suppress(EOFError, OSError):
                    seat.worker.answer()

    def begin(self, job: Job) -> None:
        """Measure this job's configs from now on."""
        self.cancel()
        self.job, self._trouble = job, None

    def submit(self, number: int, config: Config) -> None:
        task = _Task(number, config)
        with interrupts.deferred():
            self._seats[0].queue.append(task)
            self._hand_out()

    def wait(self, timeout: float) -> list[tuple[int, Measurement]]:
        end = self.now() + timeout
        while not self._done and (left := end - self.now()) > 0:
            waiting = any(seat.queue for seat in self._seats)
            if not waiting and all(task.dropped for _, task in self._busy()):
                break  # nothing comes that somebody waits for
            self._step(left)
            if self._trouble is not None:
                raise RunnerError(self._trouble)
        done, self._done = self._done, []
        return done

    def cancel(self) -> None:
        self._to_compile.clear()
        self._to_measure.clear()
        self._done.clear()
        # To wait for what a worker is at costs less than to start another one.
        for _, task in self._busy():
            task.dropped = True

    def compare(
        self, configs: Sequence[Config], budget_s: float, rounds: int, peers: bool
    ) -> Comparison:
        self.cancel()
        seat = self._measuring[0]
        end = self.now() + DROPPED_S
        while seat.task is not None and (left := end - self.now()) > 0:
            self._step(left)
        try:
            if seat.task is not None:
                seat.dismiss()
            worker = seat.ask("compare", self.job, list(configs), budget_s, rounds, peers)
            answer, usable = self._compared(worker, budget_s)
        except BaseException:
            seat.dismiss()
            raise
        if not usable:
            seat.dismiss()
        if isinstance(answer, NotSetUp):
            raise RunnerError(answer.reason)
        if not isinstance(answer, Comparison):
            raise RunnerError(answer.message)
        return answer

    def _compared(self, worker: Worker, budget_s: float) -> tuple[Any, bool]:
        limits = {"start": START_S, "end": self.trial_s + budget_s, "prove": PROVE_S}
        if self.job is not None and self.job.energy:
            limits["end"] += POWER_S
        try:
            for what, limit in limits.items():
                if not self._answers(worker, limit):
                    raise RunnerError(f"the final comparison did not {what} in {limit:.0f} s")
                if (answer := worker.answer()) != BEGUN:
                    break
        except (EOFError, OSError):
            raise RunnerError(f"the final comparison crashed: {worker.last_words()}") from None
        return answer

    def _answers(self, worker: Worker, limit: float) -> bool:
        """Wait so many seconds for what a worker says."""
        patience = Patience(worker, limit, self.now())
        while (left := patience.left(self.now())) > 0:
            if worker.connection.poll(left):
                return True
        return worker.connection.poll(0.0)  # it may be this process that was kept from running

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        for seat in self._seats:
            seat.dismiss()

    def _busy(self) -> list[tuple[_Seat, _Task]]:
        return [(seat, seat.task) for seat in self._seats if seat.task is not None]

    def _hand_out(self) -> None:
        if (job := self.job) is None:
            return
        for seat in self._seats:
            if seat.task is None and seat.queue:
                task = seat.queue.popleft()
                request = ("measure", job) if seat in self._measuring else (job.kernel, job.problem)
                self._begin(task, seat.ask(*request, task.config), START_S)
                task.ready, seat.task = False, task

    def _begin(self, task: _Task, worker: Worker, limit: float) -> None:
        task.began = self.now()
        task.patience = Patience(worker, limit, task.began)

    def _step(self, timeout: float) -> None:
        """Wait for the next answer, death or time limit, and act on it."""
        busy, now = self._busy(), self.now()
        by_connection = {
            seat.worker.connection: seat for seat, _ in busy if seat.worker is not None
        }
        wait_s = max(0.0, min([timeout, *(task.patience.left(now) for _, task in busy)]))
        ready = mp_connection.wait(list(by_connection), wait_s)
        with interrupts.deferred():  # half a message read would be lost, and the rest misread
            for connection in ready:
                self._receive(by_connection[connection])  # type: ignore[index]
            for seat, task in busy:
                late = seat.task is task and task.patience.left(self.now()) <= 0
                # It may have answered, or died, while we were kept waiting.
                if late and not (seat.worker is not None and seat.worker.connection.poll(0.0)):
                    what = seat.what if task.ready else "start"
                    self._end(seat, "timeout", f"took over {task.patience.limit:g} s to {what}")
            self._hand_out()

    def _receive(self, seat: _Seat) -> None:
        task, worker = seat.task, seat.worker
        if task is None or worker is None:
            return
        try:
            said = worker.answer()
        except (EOFError, OSError):
            outcome: Outcome = "compile" if seat in self._compiling else "crash"
            self._end(seat, outcome, worker.last_words())
            return
        if said == BEGUN:
            self._begin(task, worker, seat.limit)
            task.ready = True
            return
        answer, usable = said
        seat.task = None
        if not usable:
            seat.dismiss()
        if task.dropped:
            return
        if isinstance(answer, NotSetUp):
            self._trouble = answer.reason
        elif answer is None:  # compiled
            task.spent = self.now() - task.began
            self._to_measure.append(task)
        else:
            seconds = answer.seconds + task.spent
            self._done.append((task.number, replace(answer, seconds=seconds)))

    def _end(self, seat: _Seat, outcome: Outcome, message: str) -> None:
        """End the trial of a worker that died or hangs; the next trial gets another worker.

        Before it has begun with the config that is not to blame: another worker tries, once.
        """
        task = seat.task
        assert task is not None
        seat.dismiss()
        if task.dropped:
            return
        if task.ready:
            seconds = self.now() - task.began + task.spent
            # A compiler's limit is its own: it is the same another time.
            lacked = outcome == "timeout" and seat in self._measuring
            limit = self.trial_s if lacked else None
            found = Measurement(outcome, message=message, seconds=seconds, limit=limit)
            self._done.append((task.number, found))
        elif task.again:
            self._trouble = message
        else:
            task.again = True
            seat.queue.appendleft(task)


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
