"""Random problems, configs, values and strides against the reference, shrunk by Hypothesis."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from jetfire import ops
from jetfire.ops.data import DISTRIBUTIONS
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError, WrongResultError
from jetfire.ops.op import Check, Kernel, Op, Tensors
from jetfire.ops.run import verify
from jetfire.ops.workloads import RAGGED

_BATCH = 25


@dataclass(frozen=True)
class Case:
    """One example, enough to run it again.

    Attributes:
        problem, config: fields of the op's Problem and the kernel's Config.
        data: the distribution of the inputs; data_seed: its seed.
        padding: columns by which each matrix input's rows are further apart than they are wide.
    """

    op: str
    kernel: str
    problem: Mapping[str, Any]
    config: Mapping[str, Any]
    data: str
    data_seed: int
    padding: int

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Raises UsageError where the text is not a case."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise UsageError(f"--replay: not a case that jetfire fuzz printed ({error})") from None


@dataclass(frozen=True)
class Failure:
    """A shrunk case whose outputs were wrong, or that raised."""

    case: Case
    message: str


class _Wrong(AssertionError):
    """What Hypothesis shrinks."""


def widen(inputs: Tensors, padding: int) -> Tensors:
    """The same values with every matrix a view of rows `padding` elements further apart."""
    if padding == 0:
        return inputs
    wide = {}
    for name, tensor in inputs.items():
        if tensor.dim() == 2 and not name.endswith("scale"):
            rows, columns = tensor.shape
            tensor = tensor.new_empty((rows, columns + padding))[:, :columns].copy_(tensor)
        wide[name] = tensor
    return wide


def run_case(case: Case, device: Device) -> Check:
    """Run one case into poisoned outputs and compare with the reference."""
    op, kernel = ops.get(case.op), ops.get_kernel(case.op, case.kernel)
    problem = op.Problem.parse(case.problem)
    config = kernel.Config.parse(case.config)
    inputs = op.inputs(problem, device.torch_device, case.data_seed, case.data)
    return verify(op, kernel, problem, config, widen(inputs, case.padding))


def _values(annotation: Any, largest: int) -> st.SearchStrategy[Any]:
    """A Problem field's values: choices, flags, fractions, or sizes with the ragged ones often."""
    if isinstance(annotation, UnionType):  # `int | None`
        return st.one_of(st.none(), _values(get_args(annotation)[0], largest))
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if annotation is bool:
        return st.booleans()
    if annotation is float:
        return st.sampled_from((1e-5, 0.1, 0.5, 0.9))
    ragged = [size for size in RAGGED if size <= largest]
    return st.one_of(st.integers(1, largest), st.sampled_from(ragged))


def _draw_case(data: st.DataObject, op: Op, kernel: Kernel, device: Device, largest: int) -> Case:
    hints = get_type_hints(op.Problem)
    fields = {name: data.draw(_values(hint, largest), label=name) for name, hint in hints.items()}
    try:
        problem = op.Problem.parse(op.fitted(fields))
    except UsageError:
        assume(False)
    config = kernel.default(problem, device)
    if data.draw(st.booleans(), label="config from the space"):
        space = kernel.space(problem, device)
        drawn = {k: data.draw(st.sampled_from(list(v)), label=k) for k, v in space.items()}
        config = dataclasses.replace(config, **drawn)
    assume(kernel.legal(problem, config, device) is None)
    return Case(
        op.name,
        kernel.name,
        problem.as_dict(),
        config.as_dict(),
        data.draw(st.sampled_from(list(DISTRIBUTIONS)), label="data"),
        data.draw(st.integers(0, 2**31), label="data_seed"),
        data.draw(st.sampled_from((0, 0, 1, 16)), label="padding"),
    )


def fuzz_kernel(
    op: Op,
    kernel: Kernel,
    device: Device,
    examples: int,
    seed: int,
    largest: int,
    deadline: float,
) -> tuple[int, Failure | None]:
    """Examples run, and the first failure, shrunk.

    Args:
        examples: at most so many.
        largest: the largest dimension drawn.
        deadline: `time.monotonic()` after which no further batch starts.
    """
    ran = 0
    failing: list[tuple[Case, str]] = []

    def one(data: st.DataObject) -> None:
        nonlocal ran
        case = _draw_case(data, op, kernel, device, largest)
        ran += 1
        try:
            check = run_case(case, device)
        except Exception as error:  # Triton's own (out of resources, compilation) derive from it
            check = Check(False, float("inf"), f"{type(error).__name__}: {error}".splitlines()[0])
        if not check.ok:
            failing.append((case, check.message))
            raise _Wrong(check.message)

    batch = 0
    while ran < examples and time.monotonic() < deadline:
        wanted = min(_BATCH, examples - ran)
        test = settings(
            max_examples=wanted,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )(given(st.data())(one))
        before = ran
        try:
            hypothesis_seed(
                random.Random(f"{seed}:{op.name}:{kernel.name}:{batch}").getrandbits(64)
            )(test)()
        except Unsatisfiable:
            break  # nothing drawn was legal: a kernel for another device
        except _Wrong:
            # The last failing run is the one Hypothesis shrank to.
            return ran, Failure(*failing[-1])
        if ran == before:
            break
        batch += 1
    return ran, None


def fuzz(
    op_names: Sequence[str],
    kernel_names: Sequence[str],
    device: Device,
    examples: int = 100,
    seed: int = 0,
    largest: int = 300,
    budget_s: float = float("inf"),
    progress: Any = None,
) -> list[Failure]:
    """Fuzz kernels of ops; each gets `examples`, or an equal part of the budget.

    Args:
        kernel_names: only these; empty means every kernel that is legal somewhere on the device.
        progress: called with (op, kernel, examples run, failure or None) after each kernel.

    Raises:
        UsageError: an op or a kernel is unknown, or none of them runs on the device.
    """
    pairs = [
        (ops.get(name), kernel)
        for name in op_names
        for kernel in ops.kernels(ops.get(name).name).values()
        if not kernel_names or kernel.name in kernel_names
    ]
    known = {
        kernel.name for name in op_names for kernel in ops.kernels(ops.get(name).name).values()
    }
    for name in kernel_names:
        if name not in known:
            raise UsageError(
                f"no kernel {name!r} in these ops: expected {', '.join(sorted(known))}"
            )
    failures, total = [], 0
    for op, kernel in pairs:
        now = time.monotonic()
        deadline = now + (budget_s / len(pairs)) if budget_s != float("inf") else float("inf")
        ran, failure = fuzz_kernel(op, kernel, device, examples, seed, largest, deadline)
        total += ran
        if failure is not None:
            failures.append(failure)
        if progress is not None:
            progress(op.name, kernel.name, ran, failure)
    if total == 0:
        raise UsageError(f"none of these kernels runs on {device.label}")
    return failures


def replay(text: str, device: Device) -> None:
    """Run one printed case again.

    Raises:
        WrongResultError: it still fails.
    """
    check = run_case(Case.from_json(text), device)
    if not check.ok:
        raise WrongResultError(check.message)
