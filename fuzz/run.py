"""One case: its tensors among guard zones, two launches into two poisons, and every check."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.interpreter import found_in, hold_to_tensors
from jetfire.core.kernel import Kernel
from jetfire.core.launch import launch
from jetfire.core.op import Op
from jetfire.core.tensors import Tensors, bits
from jetfire.core.tensors import poison as op_poison
from jetfire.fuzz.example import Example, Kind, Mode, Outcome
from jetfire.fuzz.memory import INPUT_FILL, OUTPUT_FILL, Placed, fill_bytes, place, shown
from jetfire.measure.check import first
from jetfire.measure.edges import throughout
from jetfire.measure.runner import memory_free

# What outputs hold before the second launch; before the first, it is what `Op.poison` fills in.
SECOND_POISON = 0x5B
# A float64 reference and its temporaries, for each byte that the op must move.
REFERENCE_BYTES = 12
ALIGNED = 16  # bytes, as a new output is: and so elements enough
MOST_GRADED = 1 << 20  # elements of an input, beyond which autograd in float64 takes too long
# Seeds at their ends: either word of a key, and its sign.
SEEDS = (0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63))
LARGE = 2**30  # bytes to move, from which on it is asked whether they fit
# What says that memory lacks, of torch's allocator, of the driver that is to load a kernel, and of
# cuBLAS that wants its workspace.
LACKING = ("out of memory", "OUT_OF_MEMORY", "STATUS_ALLOC_FAILED")
# And what a launch and cuBLAS may say instead, on a GPU that has so little left.
VAGUE, LITTLE = ("CUDA error: unknown error", "STATUS_EXECUTION_FAILED"), 2**29


@dataclass(frozen=True)
class _Setting:
    """A case's objects, and its inputs: as they were made, and laid out as the case says."""

    case: Example
    op: Op
    kernel: Kernel
    problem: Any
    config: Any
    device: Device
    mode: Mode
    made: Tensors
    placed: dict[str, Placed]


class _Found(Exception):
    """What is wrong."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.outcome = Outcome(kind, message)


def run_case(case: Example, device: Device, mode: Mode | None = None) -> Outcome:
    """Run a case and say what is wrong with it, if anything is."""
    outcome = _outcome_of(case, device, mode or Mode())
    _give_back(device)
    return outcome


def _outcome_of(case: Example, device: Device, mode: Mode) -> Outcome:
    from jetfire.fuzz import empty

    if device.interpreted:
        hold_to_tensors()
    try:
        if case.empty and mode.host:
            return Outcome("skipped", "no kernel sees an empty tensor")
        if case.empty:
            return empty.run(case, device)
        setting = _prepare(case, device, mode)
        return Outcome("skipped", "too little memory") if setting is None else _run(setting)
    except _Found as found:
        return found.outcome
    except Exception as error:  # Triton's own (out of resources, compilation) derive from it
        if _lacks_memory(error, device):
            return Outcome("skipped", f"too little memory: {error}")
        if beyond := found_in(error):
            return Outcome("bounds", str(beyond))
        return Outcome("raised", f"{type(error).__name__}: {error}")


def _lacks_memory(error: Exception, device: Device) -> bool:
    """Return whether the device's memory was taken, by other jobs for example."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in LACKING):
        return True
    return any(words in text for words in VAGUE) and _left(device) < LITTLE


def _left(device: Device) -> float:
    """Return the bytes of a GPU that nobody holds."""
    if device.kind != "cuda":
        return math.inf
    with contextlib.suppress(Exception):  # of a context that is broken
        return float(torch.cuda.mem_get_info(device.index)[0])
    return math.inf


def _give_back(device: Device) -> None:
    """Give other jobs the memory that torch's allocator holds on to after a large case.

    Of sixteen workers on an H100 that kept it, up to 81 of 605 examples of a kernel were skipped,
    for want of memory.
    """
    if device.kind == "cuda" and torch.cuda.memory_reserved(device.index) >= LARGE:
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()


def _prepare(case: Example, device: Device, mode: Mode) -> _Setting | None:
    """Prepare a case; None where the device lacks the memory."""
    op, kernel = registry.get(case.op), registry.get_kernel(case.op, case.kernel)
    problem, config = op.Problem.parse(case.problem), kernel.Config.parse(case.config)
    if device.kind == "cuda":
        torch.cuda.set_device(device.index)
    needed = op.bytes(problem) * REFERENCE_BYTES
    if needed >= LARGE:
        if device.kind == "cuda":
            torch.cuda.empty_cache()
        free = memory_free(device)
        if free is not None and needed >= free:
            return None
    source = torch.device("cpu") if mode.host else device.torch_device
    made = op.inputs(problem, source, case.data_seed, case.data)
    if case.edges:
        made = at_edges(op, problem, made, case.data_seed)
    placed = {}
    for name, tensor in made.items():
        padding, offset = case.layout.get(name, (0, 0))
        where = place(tensor.shape, tensor.dtype, source, INPUT_FILL, padding, offset, mode.guard)
        where.view.copy_(tensor)
        placed[name] = where
    return _Setting(case, op, kernel, problem, config, device, mode, made, placed)


def _run(s: _Setting) -> Outcome:
    outputs = _launch(s, s.kernel, s.config)
    if not s.mode.initialised:
        return Outcome()
    try:
        expected = s.op.reference(s.problem, s.made)
    except Exception as error:
        if _lacks_memory(error, s.device):
            raise
        raise _Found("raised", f"the reference: {type(error).__name__}: {error}") from None
    noise = s.kernel.noise(s.problem, s.config, s.made)  # that its own rounding may add
    again = outputs if s.mode.host else _launch(s, s.kernel, s.config, SECOND_POISON)
    pairs = {k: (a, _written(s, again)[k]) for k, a in _written(s, outputs).items()}
    _check_written(s, pairs)
    check = s.op.check(s.problem, outputs, expected, noise)
    if not check.ok:
        raise _Found("wrong", check.message)
    for name, (a, b) in pairs.items():
        if count := _differing(a, b):
            raise _Found("nondeterministic", f"{name}: {count} from run to run")
    if not s.mode.host:
        _check_in_place(s, outputs)
    if (wrong := inconsistency(s.op, s.problem, s.made, outputs)) is not None:
        raise _Found("gradient", wrong)
    return Outcome() if s.case.other is None else _compare(s, outputs, expected, noise)


def _launch(s: _Setting, kernel: Kernel, config: Any, poison: int | None = None) -> Tensors:
    """Return the outputs of a launch, once nothing but them has been written.

    Args:
        poison: a byte that they are filled with; None for what the op fills in. With a byte, those
            that are updated are inputs in place; else the kernel reads them of inputs apart.
    """
    placed, device = _outputs(s, poison), s.device.torch_device
    here = {name: where.to(device) for name, where in s.placed.items()}
    before = {k: where.buffer.clone() for k, where in s.placed.items() if where is here[k]}
    given = {name: where.view for name, where in here.items()}
    views = {name: where.view for name, where in placed.items()}
    updated = s.op.updated(s.problem) if poison is not None else ()
    launch(kernel, s.problem, config, {**given, **{k: views[k] for k in updated}}, views)
    if s.device.kind == "cuda":
        torch.cuda.synchronize(s.device.index)
    if not s.mode.initialised:
        return views
    source = next(iter(s.made.values())).device
    back = {name: where.to(source) for name, where in placed.items()}
    for name, where in back.items():
        written = int((where.outside() != OUTPUT_FILL).sum())
        if written:
            raise _Found("guard", f"{name}: {written} bytes written outside of it")
    for name, where in here.items():
        was = before.get(name, s.placed[name].buffer)
        if not torch.equal(where.buffer.to(source), was):
            raise _Found("input", f"{name} was changed")
    return {name: where.view for name, where in back.items()}


def _outputs(s: _Setting, poison: int | None) -> dict[str, Placed]:
    """Room for outputs on the device."""
    meta = {name: tensor.to("meta") for name, tensor in s.made.items()}
    source = next(iter(s.made.values())).device
    updated = s.op.updated(s.problem)
    placed = {}
    for name, like in s.op.outputs(s.problem, meta).items():
        offset = s.case.offset * (1 if name in updated else ALIGNED)
        how = OUTPUT_FILL, 0, offset, s.mode.guard
        placed[name] = place(like.shape, like.dtype, source, *how)
    if poison is None:
        s.op.poison(s.problem, {name: where.view for name, where in placed.items()})
    for name, where in placed.items():
        if name in updated:
            where.view.copy_(s.made[name])
        elif poison is not None:
            fill_bytes(where.view, poison)
    device = s.device.torch_device
    return {
        name: where.to(device)
        if s.mode.initialised or name in updated
        else where.on(torch.empty_like(where.buffer, device=device))
        for name, where in placed.items()
    }


def _written(s: _Setting, outputs: Tensors) -> Tensors:
    return s.op.written(s.problem, s.made, outputs)


def _check_written(s: _Setting, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Check that no element still holds what it was filled with before each launch.

    A poison alone may be what a kernel computes, NaN say.
    """
    updated = s.op.updated(s.problem)
    for name, (a, b) in pairs.items():
        if name in updated or a is b:
            continue
        poison = op_poison(torch.empty(1, dtype=a.dtype, device=a.device))
        second = torch.empty_like(poison)
        fill_bytes(second, SECOND_POISON)
        left = (bits(a) == bits(poison)) & (bits(b) == bits(second))
        if bool(left.any()):
            raise _Found(
                "unwritten",
                f"{name}: {int(left.sum())} of {left.numel()} elements, first at {first(left)}",
            )


def _check_in_place(s: _Setting, outputs: Tensors) -> None:
    """Check that outputs in the place of inputs that a caller may give up have the same bits."""
    taken = s.op.in_place(s.problem, {name: where.view for name, where in s.placed.items()})
    if not taken:
        return
    given = {k: where.on(where.buffer.clone()).view for k, where in s.placed.items()}
    views = {name: where.view for name, where in _outputs(s, None).items()}
    views |= {output: given[place] for output, place in taken.items()}
    launch(s.kernel, s.problem, s.config, given, views)
    for name, view in views.items():
        if message := _differing(outputs[name], view, nan=True):
            how = " and ".join(f"{output} in place of {place}" for output, place in taken.items())
            raise _Found("wrong", f"{name}, with {how}: {message}")


def _differing(a: torch.Tensor, b: torch.Tensor, nan: bool = False) -> str:
    """Return how many elements differ, and the first one; empty where none does.

    Args:
        nan: NaN equals any other NaN.
    """
    mask = bits(a) != bits(b)
    if nan and a.is_floating_point():
        mask &= ~(torch.isnan(a) & torch.isnan(b))
    if not bool(mask.any()):
        return ""
    at = first(mask)
    return (
        f"{int(mask.sum())} of {mask.numel()} differ, first at {at}: "
        f"{shown(a, at)} and {shown(b, at)}"
    )


def _compare(
    s: _Setting, outputs: Tensors, expected: Tensors, noise: torch.Tensor | None
) -> Outcome:
    """Compare with another config's or kernel's outputs: the same bits where the op says so."""
    assert s.case.other is not None
    kernel = registry.get_kernel(s.case.op, s.case.other.kernel)
    config = kernel.Config.parse(s.case.other.config)
    kind: Kind = "config" if kernel.name == s.kernel.name else "kernel"
    theirs = _launch(s, kernel, config)
    their_noise = kernel.noise(s.problem, config, s.made)
    same = s.op.same_bits(s.problem)
    exact = same == "kernels" or (same == "configs" and kind == "config")
    mine, others = _written(s, outputs), _written(s, theirs)
    if exact and noise is None and their_noise is None:
        for name, a in mine.items():
            if message := _differing(a, others[name], nan=True):
                raise _Found(kind, f"{name}: {message} of {kernel.name} {config}")
    else:
        check = s.op.check(s.problem, theirs, expected, their_noise)
        if not check.ok:
            raise _Found(kind, f"{kernel.name} {config}: {check.message}")
    differing = sum(int((bits(a) != bits(others[name])).sum()) for name, a in mine.items())
    return Outcome(None, "", differing, sum(a.numel() for a in mine.values()))


def at_edges(op: Op, problem: Any, inputs: Tensors, seed: int) -> Tensors:
    """Put some inputs at the ends of what they may be, where others are what a training has.

    A step is the first or the millionth, lists of rows are empty or ask for one row alone
    (`Op.edges`); seeds are negative, for every op. The same for the same seed.
    """
    rng = Random(seed)
    rare = {
        name: throughout(rng, SEEDS, x) for name, x in inputs.items() if name.startswith("seed")
    }
    rare |= op.edges(problem, inputs, rng)
    return inputs | {name: value.to(inputs[name]) for name, value in rare.items()}


def inconsistency(op: Op, problem: Any, inputs: Tensors, outputs: Tensors) -> str | None:
    """Return what is wrong with a backward's outputs, by `Op.gradients`; None where nothing is.

    Raises:
        NotImplementedError: the op does not say what its gradients are, nor why not.
    """
    if "bwd" not in op.modes or op.no_gradients or getattr(problem, "mode", "bwd") != "bwd":
        return None
    if max(tensor.numel() for tensor in inputs.values()) > MOST_GRADED:
        return None
    for gradient in op.gradients(problem, inputs, outputs):
        usable = torch.isfinite(gradient.exact) & torch.isfinite(gradient.got.double())
        off = (gradient.got.double() - gradient.exact).abs() > gradient.allowed
        off &= usable
        if bool(off.any()):
            at = tuple(int(i) for i in off.nonzero()[0])
            return (
                f"{gradient.name}: {int(off.sum())} elements off, first at {at}: "
                f"{float(gradient.got[at]):.6g} where autograd has {float(gradient.exact[at]):.6g}"
            )
    return None
