"""The speed of an export beside the workbench's own launch of the same config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from jetfire.core.device import Device
from jetfire.core.errors import JetfireError, WrongResultError
from jetfire.core.op import Check
from jetfire.core.processes import Worker
from jetfire.core.tensors import Tensors
from jetfire.export import targets
from jetfire.export.plan import ExportPlan, TunedProblem
from jetfire.measure import timer
from jetfire.measure.nvml import Nvml
from jetfire.measure.plan import Case
from jetfire.measure.results import Row
from jetfire.measure.runner import sets_of, timed

LAUNCH = "launch"  # what a row compares with: `Kernel.launch`
ROUNDS = 20
TIMEOUT_S = 900.0  # for the process's start and all problems

Call = Callable[[Any, Tensors, Tensors], Tensors]


def row_of(plan: ExportPlan, tuned: TunedProblem, target_name: str) -> Row:
    """The row of one problem, as yet without times."""
    exact = tuned.own and tuned.entry.problem == tuned.problem.as_dict()
    return Row(
        plan.op.name,
        plan.kernel.name,
        "kernel",
        tuned.problem.as_dict(),
        config=tuned.config.as_dict(),
        profile="tuned" if exact else "nearest",
        data="normal",
        ok=False,
        export=target_name,
    )


def measure(
    plan: ExportPlan, target_name: str, folder: Path, peaks: Mapping[str, Any] | None = None
) -> list[Row]:
    """Return a row for each problem: its `vs_peer` has the workbench's time over the export's.

    In a process of its own: several exports may define the same operators, and what an export does
    to its process should be nobody else's.

    Args:
        folder: built.
        peaks: the device's, for the rows' `roofline`.

    Raises:
        WrongResultError: its results are wrong, or it has none: it does not load, the GPU refused
            it, its process ended or took longer than `TIMEOUT_S`.
        NoDeviceError: there is no GPU.
    """
    worker = Worker(_serve, plan, target_name, folder, peaks, parent=True)
    try:
        if not worker.connection.poll(TIMEOUT_S):
            raise _failed(plan, target_name, f"took over {TIMEOUT_S:g} s")
        answer = worker.answer()
    except (EOFError, OSError):
        raise _failed(plan, target_name, worker.last_words()) from None
    finally:
        worker.close()
    if isinstance(answer, JetfireError):
        raise answer
    rows: list[Row] = answer
    return rows


def _failed(plan: ExportPlan, target_name: str, why: str) -> WrongResultError:
    line = " ".join(why.split())[:500]
    return WrongResultError(f"{plan.op.name}/{plan.kernel.name} as {target_name}: {line}")


def _serve(connection: Connection, plan: ExportPlan, target_name: str, *others: Any) -> None:
    connection.send(_answer(plan, target_name, *others))


def _answer(
    plan: ExportPlan, target_name: str, folder: Path, peaks: Mapping[str, Any] | None
) -> list[Row] | JetfireError:
    """The rows, or what went wrong: an error that is not Jetfire's own is the export's."""
    try:
        return _rows(plan, target_name, folder, peaks)
    except JetfireError as error:
        return error
    except Exception as error:
        return _failed(plan, target_name, f"{type(error).__name__}: {error}")


def _rows(
    plan: ExportPlan, target_name: str, folder: Path, peaks: Mapping[str, Any] | None
) -> list[Row]:
    call = targets.get(target_name).call(plan, folder)
    return [_row(plan, tuned, target_name, call, peaks) for tuned in plan.tuned]


def _row(
    plan: ExportPlan,
    tuned: TunedProblem,
    target_name: str,
    call: Call,
    peaks: Mapping[str, Any] | None,
) -> Row:
    device = Device.parse("cuda")
    case, where = Case(plan.op, tuned.problem), device.torch_device
    inputs = [plan.op.inputs(tuned.problem, where, seed) for seed in range(sets_of(case, device))]

    def launch(problem: Any, inputs: Tensors, outputs: Tensors) -> Tensors:
        plan.kernel.launch(problem, tuned.config, inputs, outputs)
        return outputs

    calls: dict[str, Call] = {LAUNCH: launch, target_name: call}
    expected = plan.op.reference(tuned.problem, inputs[0])
    row = row_of(plan, tuned, target_name)
    for name, function in calls.items():
        check = _checked(plan, tuned, function, inputs[0], expected)
        if not check.ok:
            raise WrongResultError(f"{case} as {name}: {check.message}")
        row = replace(row, ok=True, rel_err=check.rel_err)
    sets = [(tensors, plan.op.outputs(tuned.problem, tensors)) for tensors in inputs]
    variants: dict[str, Sequence[Callable[[], object]]] = {
        name: [partial(function, tuned.problem, *tensors) for tensors in sets]
        for name, function in calls.items()
    }
    timings = timer.time_calls(variants, where, ROUNDS, monitor=Nvml.open(where))
    row = timed(case, row, timings[target_name], peaks)
    return replace(row, vs_peer={LAUNCH: timings[LAUNCH].ms / timings[target_name].ms})


def _checked(
    plan: ExportPlan, tuned: TunedProblem, call: Call, inputs: Tensors, expected: Tensors
) -> Check:
    """Check one call into poisoned outputs against the reference."""
    problem = tuned.problem
    outputs = plan.op.poison(problem, plan.op.outputs(problem, inputs))
    written = call(problem, inputs, outputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    noise = plan.kernel.noise(problem, tuned.config, inputs)
    return plan.op.check(problem, written, expected, noise)
