"""`jetfire tune`: search, show, save."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jetfire import ops
from jetfire.bench.plan import Case
from jetfire.bench.progress import watch
from jetfire.ops import profiles
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError
from jetfire.tuner import Trial, Tuner, Winner, save


def tune(
    cases: Sequence[Case], kernel_names: Sequence[str], device: Device, trials: int,
    budget_s: float, seed: int, data: str,
) -> None:  # fmt: skip
    """Tune every kernel that takes each problem, and save the winners in the user's profiles.

    Raises:
        UsageError: no kernel takes any of the problems here, or the profile cannot be written.
    """
    table = Table(title=f"{device.label}: tuned configs")
    for column in ("problem", "kernel", "config", "ms", "default ms", "gain", "trials"):
        table.add_column(column, overflow="fold")
    searched = [
        (case, kernel)
        for case in cases
        for kernel in _kernels(case, kernel_names, device)
        if len(kernel.space(case.problem, device)) > 0
    ]
    if not searched:
        raise UsageError(f"no kernel with a config to tune takes these problems on {device.label}")
    for case, kernel in watch(searched):
        tuner = Tuner(case.op, kernel, case.problem, device, seed, data)
        winner = tuner.search(trials, budget_s / len(searched), _say)
        file = save(kernel, case.problem, device, winner, profiles.user_folder())
        table.add_row(*_row(case, kernel.name, winner))
        print(f"jetfire: saved in {file}", file=sys.stderr)
    Console().print(table)


def _kernels(case: Case, names: Sequence[str], device: Device) -> list[ops.Kernel]:
    found = [ops.get_kernel(case.op.name, name) for name in names] or list(
        ops.kernels(case.op.name).values()
    )
    return [
        kernel
        for kernel in found
        if kernel.legal(case.problem, kernel.default(case.problem, device), device) is None
    ]


def _say(trial: Trial) -> None:
    fields = " ".join(f"{k}={v}" for k, v in trial.config.as_dict().items())
    outcome = f"{trial.ms:.4f} ms" if trial.ms is not None else f"{trial.outcome}: {trial.message}"
    print(f"  {fields}: {outcome}", file=sys.stderr)


def _row(case: Case, kernel: str, winner: Winner) -> tuple[str, ...]:
    fields = " ".join(f"{k}={v}" for k, v in winner.config.as_dict().items())
    gain = winner.default.ms / winner.timing.ms
    return (
        str(case), kernel, fields, f"{winner.timing.ms:.4f}", f"{winner.default.ms:.4f}",
        f"{gain:.2f}×", str(len(winner.trials)),
    )  # fmt: skip
