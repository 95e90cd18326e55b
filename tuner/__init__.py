"""Search a kernel's configs on the device at hand with Optuna, and keep the best as a profile."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from jetfire.bench.timer import VERSION as TIMER_VERSION
from jetfire.bench.timer import Timing, input_sets, time_calls
from jetfire.ops import profiles
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError
from jetfire.ops.op import Config, Kernel, Op
from jetfire.ops.run import launch, verify

# A challenger must beat the incumbent by more than this in the final, interleaved comparison.
LEAST_GAIN = 0.01
FINALISTS = 3


@dataclass(frozen=True)
class Trial:
    """One config's fate: ``ok`` with milliseconds, or ``illegal``, ``wrong`` or ``failed``."""

    config: Config
    outcome: str
    ms: float | None
    message: str = ""


@dataclass(frozen=True)
class Winner:
    """The final comparison's best config beside the default's time in the same run."""

    config: Config
    timing: Timing
    default: Timing
    trials: list[Trial]


class Tuner:
    """Tunes one kernel for one problem on one device.

    Args:
        seed: of the inputs and of the search.
        data: the inputs' distribution.
    """

    def __init__(
        self, op: Op, kernel: Kernel, problem: Any, device: Device, seed: int = 0,
        data: str = "normal",
    ) -> None:  # fmt: skip
        self.op, self.kernel, self.problem, self.device, self.seed = (
            op,
            kernel,
            problem,
            device,
            seed,
        )
        sets = input_sets(op.bytes(problem), device.l2_bytes)
        self._inputs = [
            op.inputs(problem, device.torch_device, seed + i, data) for i in range(sets)
        ]
        self._outputs = [op.outputs(problem, inputs) for inputs in self._inputs]
        self._expected = op.reference(problem, self._inputs[0])
        self._known: dict[Config, Trial] = {}

    def _calls(self, config: Config) -> list[Callable[[], object]]:
        def call(i: int) -> Callable[[], object]:
            return lambda: launch(
                self.kernel, self.problem, config, self._inputs[i], self._outputs[i]
            )

        return [call(i) for i in range(len(self._inputs))]

    def measure(self, config: Config) -> Trial:
        """Check a config, then time it; a config already measured is not measured again."""
        if config not in self._known:
            self._known[config] = self._measure(config)
        return self._known[config]

    def _measure(self, config: Config) -> Trial:
        reason = self.kernel.legal(self.problem, config, self.device)
        if reason is not None:
            return Trial(config, "illegal", None, reason)
        try:
            check = verify(
                self.op, self.kernel, self.problem, config, self._inputs[0], self._expected
            )
            if not check.ok:
                return Trial(config, "wrong", None, check.message)
            timing = time_calls(
                {"config": self._calls(config)}, self.device.torch_device, rounds=5, sample_ms=1.0
            )["config"]
        except Exception as error:  # Triton's own (out of resources, compilation) derive from it
            return Trial(config, "failed", None, f"{type(error).__name__}: {error}".splitlines()[0])
        return Trial(config, "ok", timing.ms)

    def search(
        self, trials: int, budget_s: float, progress: Callable[[Trial], None] = lambda _: None
    ) -> Winner:
        """Ask Optuna's TPE for configs until either limit, then compare the best with the default.

        Raises:
            UsageError: the kernel takes no config for this problem here.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed))
        space = self.kernel.space(self.problem, self.device)
        default = self.kernel.default(self.problem, self.device)
        study.enqueue_trial({k: v for k, v in default.as_dict().items() if k in space})
        deadline = time.monotonic() + budget_s
        try:
            for _ in range(trials):
                if time.monotonic() > deadline:
                    break
                asked = study.ask()
                chosen = {k: asked.suggest_categorical(k, list(v)) for k, v in space.items()}
                trial = self.measure(self.kernel.Config.parse({**default.as_dict(), **chosen}))
                progress(trial)
                if trial.ms is None:
                    study.tell(asked, state=optuna.trial.TrialState.FAIL)
                else:
                    study.tell(asked, trial.ms)
        except KeyboardInterrupt:
            if not any(trial.ms for trial in self._known.values()):
                raise
        return self._final(default)

    def _final(self, default: Config) -> Winner:
        tried = list(self._known.values())
        good = sorted((t for t in tried if t.ms is not None), key=lambda t: t.ms or 0.0)
        if self.measure(default).ms is None or not good:
            message = self.measure(default).message
            raise UsageError(f"{self.op.name}/{self.kernel.name}, {self.problem}: {message}")
        finalists = list(dict.fromkeys([default, *(t.config for t in good[:FINALISTS])]))
        timings = time_calls(
            {str(i): self._calls(c) for i, c in enumerate(finalists)}, self.device.torch_device
        )
        best = min(range(len(finalists)), key=lambda i: timings[str(i)].ms)
        if timings[str(best)].ms > timings["0"].ms * (1 - LEAST_GAIN):
            best = 0
        return Winner(finalists[best], timings[str(best)], timings["0"], tried)


def save(kernel: Kernel, problem: Any, device: Device, winner: Winner, folder: Path) -> Path:
    """Put a winner into the device's profile of the op, atomically and under a lock.

    Raises:
        UsageError: the folder cannot be written.
    """
    file = profiles.path(folder, device, kernel.op)
    entry = {
        "kernel": kernel.name,
        "problem": problem.as_dict(),
        "config": winner.config.as_dict(),
        "ms": winner.timing.ms,
        "ms_p20": winner.timing.ms_p20,
        "ms_p80": winner.timing.ms_p80,
        "default_ms": winner.default.ms,
        "torch": torch.__version__,
        "timer": TIMER_VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{file}.lock"):
            profiles.read.cache_clear()
            kept = [
                e for e in profiles.read(file)
                if (e["kernel"], e["problem"]) != (entry["kernel"], entry["problem"])
            ]  # fmt: skip
            content = {
                "schema": profiles.SCHEMA,
                "device": device.name,
                "op": kernel.op,
                "entries": [*kept, entry],
            }
            handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
            with os.fdopen(handle, "w") as out:
                json.dump(content, out, indent=1)
            os.replace(temporary, file)
    except OSError as error:
        raise UsageError(f"cannot write profile {file}: {error.strerror}") from None
    profiles.read.cache_clear()
    return file
