"""`jetfire fuzz`: what was tried, what failed, and the line that replays it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from jetfire import ops
from jetfire.fuzz import Failure, fuzz, replay
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError, WrongResultError


def run(
    op_names: Sequence[str], kernel_names: Sequence[str], device: Device, examples: int,
    budget_s: float, seed: int, largest: int, case: str | None,
) -> None:  # fmt: skip
    """Fuzz ops, or replay one case.

    Raises:
        WrongResultError: a kernel was wrong; each shrunk case has been printed.
    """
    if case is not None:
        replay(case, device)
        print("ok")
        return
    if examples < 1 or largest < 1:
        raise UsageError(f"--examples {examples} --largest {largest}: expected at least 1")

    def report(op: str, kernel: str, ran: int, failure: Failure | None) -> None:
        if ran == 0:
            print(f"jetfire: {op} {kernel}: not legal on {device.label}", file=sys.stderr)
            return
        outcome = "ok" if failure is None else f"WRONG: {failure.message}"
        print(f"{op} {kernel}: {ran} examples, {outcome}", flush=True)
        if failure is not None:
            how = "--interpreter " if device.interpreted else ""
            print(f"  jetfire-fuzz {how}--replay {shlex.quote(failure.case.as_json())}", flush=True)

    names = op_names or ops.names()
    failures = fuzz(names, kernel_names, device, examples, seed, largest, budget_s, report)
    if failures:
        raise WrongResultError(f"{len(failures)} kernels were wrong (seed {seed})")
    print(f"jetfire: no mismatch on {device.label} (seed {seed})", file=sys.stderr)
