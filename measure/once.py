"""A checked kernel run once more, for a profiler: `bench --profile-run`, and what ncu runs.

The process that ncu starts is this module; its one argument is the JSON of a `RunSpec`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NotRequired

import torch
from typing_extensions import TypedDict

from jetfire.core import registry, schema, terminal
from jetfire.core.device import Device
from jetfire.core.errors import JetfireError, WrongResultError
from jetfire.core.schema import Fields, Line, Name
from jetfire.measure.plan import Case
from jetfire.measure.proof import Sets
from jetfire.measure.results import Row
from jetfire.measure.runner import Choice, Options, Runner


class RunSpec(TypedDict):
    """What ncu is to see; without an op a launch of torch's, to see whether it sees anything."""

    device: Line
    op: NotRequired[Name]
    kernel: NotRequired[Name]
    problem: NotRequired[Fields]
    config: NotRequired[Fields]
    seed: NotRequired[int]
    data: NotRequired[Line]


def range_name(op: str, kernel: str) -> str:
    """Return the name of the NVTX range around a kernel's run."""
    return f"jetfire {op} {kernel}"


@contextmanager
def profiled(name: str, device: Device) -> Iterator[None]:
    """Have a profiler see what is launched within: an NVTX range, and CUDA's profiler is on.

    On a CPU neither exists.
    """
    if device.kind != "cuda":
        yield
        return
    torch.cuda.synchronize(device.index)
    torch.cuda.profiler.start()
    torch.cuda.nvtx.range_push(name)
    try:
        yield
        torch.cuda.synchronize(device.index)
    finally:
        torch.cuda.nvtx.range_pop()
        torch.cuda.profiler.stop()


class OnceRunner(Runner):
    """A runner that times nothing: each kernel that is right runs once where profilers see it."""

    def _measure(self, case: Case, legal: Sequence[Choice]) -> list[Row]:
        options, where = self.options, self.device.torch_device
        sets = Sets.drawn(case.op, case.problem, where, 1, options.seed, options.data)
        rows = self._verified(case, legal, sets)
        for choice, row in zip(legal, rows, strict=True):
            if row.ok:
                (call,) = sets.calls(choice.kernel, choice.config)
                with profiled(range_name(case.op.name, choice.label), self.device):
                    call()
        return rows

    def run(self, case: Case, kernel: str, config: Fields) -> None:
        """Run one kernel with one config.

        Raises:
            WrongResultError: it is wrong, and was not run again.
        """
        found = registry.kernels(case.op.name)[kernel]
        choice = Choice(found, found.Config.parse(config), None, None, kernel)
        (row,) = self._measure(case, [choice])
        if not row.ok:
            raise WrongResultError(row.error)


def main(text: str) -> None:
    """Run what a `RunSpec` says."""
    spec = schema.decode(text.encode(), RunSpec, Path("spec"))
    device = Device.parse(spec["device"])
    if "op" not in spec:
        numbers = torch.empty(1 << 20, dtype=torch.float32, device=device.torch_device)
        with profiled("jetfire", device):
            numbers.fill_(1.0)
        return
    op = registry.get(spec["op"])
    options = Options(data=spec.get("data", "normal"), seed=spec.get("seed", 0))
    runner = OnceRunner(device, {}, options, lambda text: None)
    case = Case(op, op.Problem.parse(spec.get("problem", {})))
    runner.run(case, spec["kernel"], spec.get("config", {}))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except JetfireError as error:
        terminal.error(str(error))
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        terminal.error(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
