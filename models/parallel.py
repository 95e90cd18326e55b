"""`jetfire train bench MODEL --set parallel=fsdp`: a step that FSDP2 spreads over processes.

One process starts one for each GPU of the device's model, or two on a CPU, and has their rows. Each
of them measures as `jetfire.models.bench` does, in lock-step: what one leaves out all leave out,
and of every sample the slowest process's time counts. Rows are the first process's, and so is their
memory. Beside the other fields they have

- gathered_of_fp32: the bytes that are gathered in a step, of those that fp32 parameters would be.
"""

from __future__ import annotations

import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import torch

from jetfire.bench import command
from jetfire.core import terminal
from jetfire.core.device import Device
from jetfire.core.environment import torchrun
from jetfire.core.errors import (
    JetfireError,
    JetfireWarning,
    NoDeviceError,
    UsageError,
    WrongResultError,
    first_line,
)
from jetfire.core.processes import Worker
from jetfire.gpt2.bench import steps as training
from jetfire.gpt2.bench.cases import EAGER, TorchVariant
from jetfire.gpt2.bench.steps import Deviation
from jetfire.gpt2.bench.subjects import Probe, Subject, Tensors
from jetfire.gpt2.training.parallel import ALONE, Group, joined
from jetfire.measure.results import Row
from jetfire.models.bench import ModelBench, case_of
from jetfire.models.cases import SPREAD_PEERS, ModelCase, parallel_of
from jetfire.models.sharded import ShardedSubject

_ON_CPU = 2  # processes
# For processes to end, and, once one has lost its connection, for the one that knows why to say so.
_GRACE_S = 5.0
_TROUBLE_S = 60.0  # for the others to come to where one failed, or to fail too
_KINDS = {kind.exit_code: kind for kind in (UsageError, WrongResultError, NoDeviceError)}


def bench(asked: command.BenchOptions, word: str, recipes: Sequence[str]) -> None:
    """Measure one model's step, spread over processes.

    Raises:
        JetfireError: with the exit code of what went wrong.
    """
    parallel, texts = parallel_of(asked.settings)
    if torchrun():
        raise UsageError(f"parallel={parallel}: expected no torchrun: bench starts the processes")
    device = Device.parse(asked.device)
    count = len(device.alike()) if device.kind == "cuda" else _ON_CPU
    if count == 1:
        terminal.note(f"parallel={parallel}: one process, as there is one {device.name}")
    case = replace(case_of(word, texts, recipes, device), parallel=parallel, processes=count)
    training.run(asked, [case], training.command_again(asked, word, case.recipes), ParallelBench)


class ParallelBench(ModelBench):
    """Has other processes measure."""

    variants: ClassVar[Mapping[str, TorchVariant]] = SPREAD_PEERS

    def measure(self, case: Any) -> list[Row]:
        """Return rows of the recipes, then of the peers, of the first process.

        Raises:
            JetfireError: what went wrong in one of them, or that it died.
        """
        if self.cuda:
            torch.cuda.empty_cache()  # of what measured the peaks, on the first one's GPU
        devices = [one.index for one in self.device.alike()] * (1 if self.cuda else case.processes)
        where = _Meeting(self.device.kind, devices, _free_port())
        options = {
            "rounds": self.rounds,
            "seed": self.seed,
            "sample_ms": self.sample_ms,
            "chosen": self.chosen,
            "debug": self.debug,
        }
        workers: list[Worker] = []
        wait_s = 0.0
        try:
            for rank in range(case.processes):
                workers.append(Worker(_process, case, options, where, rank, parent=True))
            rows, wait_s = self._heard(workers), _GRACE_S
            return rows
        finally:
            for worker in workers:
                worker.close(wait_s)

    def _heard(self, workers: Sequence[Worker]) -> list[Row]:
        """Pass on what the processes say until all have ended; return the first one's rows."""
        left = {worker.connection: rank for rank, worker in enumerate(workers)}
        rows: list[Row] = []
        failures: list[_Failure] = []
        troubles: dict[int, _Failure] = {}
        while left:
            patience = _GRACE_S if failures else _TROUBLE_S if troubles else None
            ready = wait(list(left), patience)
            if not ready:  # those that are left wait for one that failed
                failures += troubles.values()
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = left[connection]
                said = _said(workers[rank], f"process {rank} of {len(workers)}")
                if isinstance(said, str):
                    self.note(said)
                    continue
                if isinstance(said, _Trouble):
                    troubles[rank] = said.why
                    continue
                troubles.pop(rank, None)
                if said is None:
                    continue
                del left[connection]
                if isinstance(said, _Failure):
                    failures.append(said)
                elif rank == 0:
                    rows = said
        if failures:
            raise min(failures, key=lambda failure: failure.follows).error()
        return rows


@dataclass(frozen=True)
class _Meeting:
    """What processes must know to find each other.

    Attributes:
        devices: the index of each one's device.
    """

    kind: str
    devices: Sequence[int]
    port: int


@dataclass(frozen=True)
class _Failure:
    """Why a process ended.

    Attributes:
        follows: how sure it is that another process's end was the cause: 0 it failed itself, 1 it
            died, 2 it lost its connection, 3 it was told to end.
    """

    text: str
    exit_code: int = 1
    details: str = ""
    follows: int = 0

    def error(self) -> JetfireError:
        found = _KINDS.get(self.exit_code, JetfireError)(self.text)
        found.details = self.details
        return found


@dataclass(frozen=True)
class _Trouble:
    """A failure that is told at once, in case the others never come to where it is shared.

    None, told later, takes it back.
    """

    why: _Failure


_Said = str | list[Row] | _Failure | _Trouble | None


def _said(worker: Worker, who: str) -> _Said:
    """Return what a process says; that it failed, where it has died."""
    try:
        said: _Said = worker.answer()
    except (EOFError, OSError):
        text, _, details = worker.last_words().partition("\n")
        return _Failure(f"{who}: {text}", details=details, follows=1)
    if isinstance(said, _Failure) and said.exit_code == 1:
        return replace(said, text=f"{who}: {said.text}")
    return said


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


# In each of the processes.


def _process(
    connection: Connection, case: ModelCase, options: dict[str, Any], where: _Meeting, rank: int
) -> None:
    """Measure as one of several processes."""

    def note(text: str) -> None:
        if rank == 0:
            connection.send(text)

    if where.kind == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // case.processes))
    try:
        with _noting_warnings(note), _met(where, rank) as (device, group):
            more = {"power_ms": 0.0, "group": group, "tell": connection.send, **options}
            rows = ShardedBench(device, note, **more).measure(case)
            group.gather(None)  # the last one's last word to the others
        connection.send(rows)
    except (Exception, SystemExit) as error:
        connection.send(_failure(error, options["debug"]))


@contextmanager
def _noting_warnings(note: Callable[[str], object]) -> Iterator[None]:
    """Pass warnings of ours on as notes."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: Any, *rest: Any, **more: Any) -> None:
            if issubclass(category, JetfireWarning):
                note(str(message))
            else:
                usual(message, category, *rest, **more)

        warnings.showwarning = show
        yield


@contextmanager
def _met(where: _Meeting, rank: int) -> Iterator[tuple[Device, Group]]:
    """Join the others as a process of torchrun's does, which is told by the environment."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(where.devices[rank]),
        "WORLD_SIZE": str(len(where.devices)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(where.port),
    }
    with joined(where.kind) as found:
        yield found


def _failure(error: BaseException, debug: bool) -> _Failure:
    details = traceback.format_exc() if debug else ""
    if isinstance(error, SystemExit):  # of what another one has said
        return _Failure("it ended", details=details, follows=3)
    if isinstance(error, JetfireError):
        return _Failure(str(error), error.exit_code, details or error.details)
    lost = any(word in str(error) for word in ("by peer", "onnection"))
    return _Failure(first_line(error), details=details, follows=2 if lost else 0)


@dataclass
class ShardedBench(ModelBench):
    """Measures as one of several processes, which all call the same in the same order.

    Attributes:
        tell: is told of a `_Trouble`, and None when it is over.
    """

    group: Group = ALONE
    tell: Callable[[_Trouble | None], object] = lambda _: None
    variants: ClassVar[Mapping[str, TorchVariant]] = SPREAD_PEERS
    lets_go: ClassVar[bool] = False  # the others would not know

    def _maker(self, case: Any) -> Callable[[str], Callable[[], Subject]]:
        return lambda name: partial(ShardedSubject, case, name, self.where, self.seed, self.group)

    def _agreed(self, value: float) -> float:
        return max(self.group.gather(value))

    def _probe(self, make: Callable[[], Subject]) -> tuple[Subject, Probe]:
        """Leave out what fails in any of the processes."""
        found, error = None, None
        try:
            found = super()._probe(make)
        except Exception as caught:
            error = caught
            self.tell(_Trouble(_failure(error, self.debug)))
        full = isinstance(error, torch.OutOfMemoryError)
        said = self.group.gather(None if error is None else (full, first_line(error)))
        if error is not None:
            self.tell(None)
            raise error
        for rank, failed in enumerate(said):
            if failed is not None:
                kind = torch.OutOfMemoryError if failed[0] else JetfireError
                raise kind(f"process {rank}: {failed[1]}")
        assert found is not None
        return found

    def _probed(self, case: Any) -> tuple[dict[str, Subject], dict[str, Probe], dict[str, Row]]:
        """Count what is gathered beside: BF16 eager gathers all, in half of fp32's bytes."""
        subjects, probes, rows = super()._probed(case)
        if self.group.world > 1:
            sent = {
                name: subject.gathered()
                for name, subject in subjects.items()
                if isinstance(subject, ShardedSubject)
            }
            if not sent[EAGER]:
                raise UsageError(
                    f"{case.source.name}: FSDP gathers nothing, as it finds no tensor in what the "
                    "model returns: expected a tensor, a tuple, a dict or another pytree"
                )
            for name, count in sent.items():
                extra = {"gathered_of_fp32": count / (2 * sent[EAGER])}
                rows[name] = replace(rows[name], extra={**rows[name].extra, **extra})
        return subjects, probes, rows

    def _compared(self, case: Any, name: str, ours: Tensors, theirs: Tensors) -> Deviation:
        """Judge as the first process does."""
        return self.group.gather(super()._compared(case, name, ours, theirs))[0]
