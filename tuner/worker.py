"""Child processes that compile and measure; whatever happens to one costs its config alone."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from jetfire.core import broken
from jetfire.core.device import Device
from jetfire.core.errors import UsageError, first_line
from jetfire.core.kernel import Config, Kernel
from jetfire.core.launch import run, verify
from jetfire.core.op import Check, Op
from jetfire.core.tensors import Tensors
from jetfire.measure.nvml import Nvml
from jetfire.measure.proof import Guard, Sets
from jetfire.measure.timer import Call, Timing, input_sets, time_calls
from jetfire.tuner.trial import Comparison, Measurement, Outcome

# A config this many times slower than the best, at first sight, is not timed any closer.
HOPELESS = 3.0
POWER_MS = 200.0
# With fewer no order statistic bounds the median with 95% confidence: see `search.beats`.
LEAST_ROUNDS = 6
POWER_RUNS = 6
MOST_ROUNDS = 1000  # where timing goes on until the noise is small
# Peers that take seconds to compile are left to the bench.
SLOW_PEERS = ("compile", "eager")


@dataclass(frozen=True)
class Job:
    """A problem to measure configs of.

    Attributes:
        energy: read the energy of each config too.
        peers: those to compare with in the end; None for all that need no compiling.
        same_bits: where given, a config whose outputs differ in a bit from this one's is wrong.
        max_noise: what to time until, as of `time_calls`; None for a fixed number of samples.
    """

    op: Op
    kernel: Kernel
    problem: Any
    seed: int
    data: str
    energy: bool
    peers: Sequence[str] | None = None
    same_bits: Config | None = None
    max_noise: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other jobs, in any process."""
        what = type(self.op), type(self.kernel), self.problem
        return (*what, self.seed, self.data, self.energy, self.same_bits, self.max_noise)


class Bench:
    """A job's inputs, outputs and expected results on one device.

    Args:
        begin: is called where a comparison's timing is done, and its proof begins.
    """

    def __init__(self, job: Job, device: Device, begin: Callable[[], None]) -> None:
        self.job, self.device, self.begin = job, device, begin
        op, problem = job.op, job.problem
        where = device.torch_device
        count = input_sets(op.bytes(problem), device.l2_bytes)
        self.sets = Sets.drawn(op, problem, where, count, job.seed, job.data)
        self.inputs = self.sets.draw(job.seed)  # to check on: a proof draws those of the sets anew
        self.expected = op.reference(problem, self.inputs)
        self.guard = Guard(device)
        self.monitor = Nvml.open(where)
        self.least_ms = float("inf")
        self.bits = None if job.same_bits is None else self._bits_of(job.same_bits)

    def measure(self, config: Config) -> Measurement:
        """Check a config, have a first look at its time, then time it where that is worth it."""
        begin = time.perf_counter()
        try:
            found = self._measure(config)
        except Exception as error:
            found = Measurement(outcome_of(error), message=self._said(error))
        return replace(found, seconds=time.perf_counter() - begin)

    def _measure(self, config: Config) -> Measurement:
        if reason := self._wrong(self._verified(config)):
            return Measurement("wrong", message=reason)
        where = self.device.torch_device
        calls = {"config": self.sets.calls(self.job.kernel, config)}
        first = time_calls(calls, where, rounds=2, sample_ms=0.0, warm_ms=0.0)["config"].ms
        if first > HOPELESS * self.least_ms:
            return Measurement("slow", first)
        self.least_ms = min(self.least_ms, first)
        timing = time_calls(
            calls,
            where,
            rounds=self._rounds(7),
            budget_s=5.0,
            max_noise=self.job.max_noise,
            monitor=self.monitor,
            power_ms=POWER_MS if self.job.energy else 0.0,
        )["config"]
        return Measurement("ok", timing.ms, timing.ms_p20, timing.ms_p80, timing.joules)

    def _verified(self, config: Config) -> Check:
        job = self.job
        check = verify(job.op, job.kernel, job.problem, config, self.inputs, self.expected)
        if check.ok and self.bits is not None:
            for name, got in self._written(self._run(config)).items():
                if not torch.equal(got, self.bits[name]):
                    message = f"{name}: not the bits of the config in use"
                    return replace(check, ok=False, message=message)
        return check

    def _wrong(self, check: Check) -> str | None:
        """Return what is wrong with a config, by a check of its results, or None."""
        found = self.guard.judged(check)
        return None if found.ok else found.message or "wrong result"

    def _failed(
        self, configs: Sequence[Config], check: Callable[[Config], Check]
    ) -> dict[Config, str]:
        """Return what is wrong with configs; one that raises costs none of the others."""
        failed = {}
        for config in configs:
            try:
                reason = self._wrong(check(config))
            except Exception as error:
                if self.device.kind == "cuda":
                    torch.cuda.synchronize()  # raises what the device does not survive
                reason = self._said(error)
            if reason is not None:
                failed[config] = reason
        return failed

    def _written(self, outputs: Tensors) -> dict[str, torch.Tensor]:
        """Return the bytes of what a launch must write."""
        written = self.job.op.written(self.job.problem, self.inputs, outputs)
        return {name: _as_bytes(tensor) for name, tensor in written.items()}

    def _run(self, config: Config) -> Tensors:
        return run(self.job.op, self.job.kernel, self.job.problem, config, self.inputs)

    def _bits_of(self, config: Config) -> dict[str, torch.Tensor]:
        """Return the bytes that a config writes.

        Raises:
            UsageError: it writes others when it is run once more.
        """
        first, second = self._written(self._run(config)), self._written(self._run(config))
        if changed := [name for name in first if not torch.equal(first[name], second[name])]:
            raise UsageError(f"--bits same: {changed[0]} is not the same in two runs of one config")
        return first

    def _digest(self, config: Config) -> str:
        """Return the SHA-256 of the bytes that a config writes, by the outputs' names in order."""
        total = hashlib.sha256()
        for name, tensor in sorted(self._written(self._run(config)).items()):
            total.update(name.encode())
            total.update(tensor.cpu().numpy().tobytes())
        return total.hexdigest()

    def _rounds(self, usual: int) -> int:
        """Return the samples to take, or the most of them where the noise is to be small."""
        return usual if self.job.max_noise is None else MOST_ROUNDS

    def _said(self, error: Exception) -> str:
        """Return all that is known of an exception; of a compiler's its place first."""
        whose = f"{self.job.op.name} {self.job.kernel.name} ({self.device.name})"
        if found := broken.explained(error, whose):
            return f"{found}\n{found.details}"
        return f"{type(error).__name__}: {error}"

    def compare(
        self, configs: Sequence[Config], budget_s: float, rounds: int, peers: bool
    ) -> Comparison:
        """Time configs in turn, checked before and after, and the peers if they are wanted."""
        failed = self._failed(configs, self._verified)
        sound = [config for config in configs if config not in failed]
        calls = {str(config): self.sets.calls(self.job.kernel, config) for config in sound}
        rivals, left_out = self._peers() if calls and peers else ({}, [])
        runs: dict[str, Call] = {}
        variants = {**calls, **{f"peer {name}": thunks for name, thunks in rivals.items()}}
        timings = self._in_turn(variants, budget_s, rounds, runs.__setitem__)

        def prove(config: Config) -> Check:
            return self.sets.proved(self.job.kernel, config, runs[str(config)])

        self.begin()
        wrong = self._failed(sound, prove)
        failed |= {config: f"{reason}, after timing" for config, reason in wrong.items()}
        for config in sound:
            if config not in failed and self.job.energy and not timings[str(config)].energies:
                failed[config] = "its power could not be read"
        right = [config for config in sound if config not in failed]
        return Comparison(
            {config: timings[str(config)] for config in right},
            {name: timings[f"peer {name}"] for name in rivals},
            failed,
            {config: self._digest(config) for config in right},
            left_out,
        )

    def _in_turn(
        self,
        variants: Mapping[str, Sequence[Call]],
        budget_s: float,
        rounds: int,
        timed: Callable[[str, Call], object],
    ) -> dict[str, Timing]:
        """Time variants; `timed` as `time_calls` has it."""
        where = self.device.torch_device
        if not self.job.energy:
            return time_calls(
                variants,
                where,
                self._rounds(rounds),
                budget_s=budget_s,
                max_noise=self.job.max_noise,
                monitor=self.monitor,
                least_rounds=LEAST_ROUNDS,
                timed=timed,
            )
        # Power is one reading a run: several runs, so that its noise is known.
        runs = [
            time_calls(
                variants,
                where,
                LEAST_ROUNDS // 2,
                monitor=self.monitor,
                power_ms=POWER_MS,
                timed=timed,
            )
            for _ in range(POWER_RUNS)
        ]
        return {name: Timing.joined([run[name] for run in runs]) for name in variants}

    def _peers(self) -> tuple[dict[str, Sequence[Callable[[], object]]], list[str]]:
        """Return the peers, prepared for each set of inputs, and why others are left out."""
        factories = [self.job.op.peers(self.job.problem, inputs) for inputs in self.sets.inputs]
        wanted = self.job.peers
        found: dict[str, Sequence[Callable[[], object]]] = {}
        missing = [name for name in wanted or () if name not in factories[0]]
        op, kind = self.job.op.name, self.device.kind
        left_out = [f"peer {name}: {op} has none of that name on {kind}" for name in missing]
        for name in factories[0]:
            left = name in SLOW_PEERS if wanted is None else name not in wanted
            if left:
                continue
            try:
                thunks = [factory[name]() for factory in factories]
                thunks[0]()
                found[name] = thunks
            except Exception as error:
                if wanted is not None:  # else the bench says why
                    left_out.append(f"peer {name}: {first_line(error)}")
        return found, left_out


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes, in the order of its rows."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def outcome_of(error: BaseException) -> Outcome:
    """Return the kind of failure that an exception stands for."""
    if isinstance(error, UsageError):
        return "illegal"
    # Triton's and NVRTC's; Triton says only at the launch that shared memory does not suffice.
    if type(error).__name__ in ("CompilationError", "CompileError", "OutOfResources", "PTXASError"):
        return "compile"
    return "crash"


# Said once a worker has started and made what it needs: from here on its time is the config's.
BEGUN = "begun"
START = "start"  # a request for nothing but that


@dataclass(frozen=True)
class NotSetUp:
    """Why a job's inputs or expected results cannot be made: no config is to blame."""

    reason: str


def compile_configs(connection: Connection, capability: tuple[int, int]) -> None:
    """Answer ``(kernel, problem, config)`` with None, or why the config does not compile.

    Every request is answered by `BEGUN` first, then by a pair: the answer, and that the worker is
    fit for more.
    """
    while True:
        request = connection.recv()
        connection.send(BEGUN)
        if request == (START,):
            continue
        kernel, problem, config = request
        begin = time.perf_counter()
        answer = None
        try:
            kernel.cubins(problem, config, capability)
        except Exception as error:
            outcome: Outcome = "illegal" if outcome_of(error) == "illegal" else "compile"
            message = f"{type(error).__name__}: {error}"
            answer = Measurement(outcome, message=message, seconds=time.perf_counter() - begin)
        connection.send((answer, True))


def measure_configs(connection: Connection, device_name: str) -> None:
    """Answer ``("measure", job, config)``, ``("compare", job, configs, budget_s, rounds, peers)``.

    An answer is a Measurement or a Comparison. As in `compile_configs` it comes after `BEGUN`, and
    with whether the worker is fit for more: not after an error that leaves the device's context
    unusable. Before a Comparison there is a second `BEGUN`, once it is timed and is to be proved.
    Where the job cannot be set up there is no `BEGUN`, and the answer is a NotSetUp.
    """
    device = Device.parse(device_name)
    if device.kind == "cuda":
        torch.cuda.set_device(device.index)
    bench: Bench | None = None
    while True:
        request = connection.recv()
        if request == (START,):
            connection.send(BEGUN)
            continue
        verb, job, *rest = request
        begin = time.perf_counter()
        try:
            if bench is None or bench.job.key != job.key:
                bench = None
                if device.kind == "cuda":
                    torch.cuda.empty_cache()
                bench = Bench(job, device, lambda: connection.send(BEGUN))
        except Exception as error:
            connection.send((NotSetUp(f"{type(error).__name__}: {error}"), device.works()))
            continue
        connection.send(BEGUN)
        try:
            answer = getattr(bench, verb)(*rest)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - begin
            answer = Measurement(outcome_of(error), message=message, seconds=seconds)
        connection.send((answer, device.works()))
