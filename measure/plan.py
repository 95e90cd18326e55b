"""The plan of a measurement: the problems that a user's request stands for."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jetfire.core import registry, workloads
from jetfire.core.device import Device
from jetfire.core.errors import UsageError, unknown
from jetfire.core.op import Op
from jetfire.core.problem import MOST_ELEMENTS
from jetfire.measure import peers as peer_ops

BLOCKS = ("32", "64", "128")
EVERYWHERE = 1024  # a size that every op takes
MOST_PROBLEMS = 10_000  # per command: hours, at one second each
Note = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """An op and one of its problems."""

    op: Op
    problem: Any

    def __str__(self) -> str:
        return f"{self.op.name} {self.problem}"


@dataclass(frozen=True)
class Request:
    """A user's request of what to measure.

    Attributes:
        sizes: sizes by dimension; those missing follow `m`.
        workload: a named set of shapes, instead of sizes.
        blocks: block sizes; None is all three where an op has blocks.
        settings: further problem fields, each with the values to try.
        peers: those to measure; None is all.
        config: config fields in place of the profile's or the default's.
    """

    ops: Sequence[Op]
    modes: Sequence[str] = ("fwd",)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    workload: str | None = None
    blocks: Sequence[str] | None = None
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    peers: Sequence[str] | None = None
    config: Mapping[str, str] = field(default_factory=dict)

    def on(self, device: Device) -> Request:
        """Return the request with a device's size, or the only op's workload, if it has neither."""
        on_gpu = device.kind == "cuda"
        if on_gpu and not self.workload and not self.sizes and len(self.ops) == 1:
            return replace(self, workload=self.ops[0].workload).sized(4096)
        return self.sized(4096 if on_gpu else 512)

    def sized(self, m: int) -> Request:
        """Return the request with a size where it has none."""
        if self.workload is not None or "m" in self.sizes:
            return self
        return replace(self, sizes={**self.sizes, "m": [m]})


def parse_sizes(option: str, text: str) -> list[int]:
    """Return the sizes of ``512``, ``512,1024``, ``1024:8192:1024`` (with 8192) or a list of those.

    Raises:
        UsageError: it is none of these, a size is below 1 or beyond what any device holds, or there
            are more than `MOST_PROBLEMS`.
    """
    sizes: list[int] = []
    for part in text.split(","):
        texts = [number.strip() for number in part.split(":")]
        digits = all(number.isascii() and number.isdecimal() for number in texts)
        numbers = [int(number) for number in texts] if digits and len(part) < 100 else []
        if len(numbers) not in (1, 3) or min(numbers) < 1:
            raise UsageError(
                f"{option} {text}: expected a size of at least 1, a list such as 512,1024 "
                "or a sweep start:stop:step such as 1024:8192:1024"
            )
        start, stop, step = numbers if len(numbers) == 3 else (numbers[0], numbers[0], 1)
        if stop < start:
            raise UsageError(f"{option} {text}: the sweep stops before it starts")
        if stop > MOST_ELEMENTS:
            raise UsageError(f"{option} {text}: expected a size of at most {MOST_ELEMENTS}")
        swept = range(start, stop + 1, step)
        if len(sizes) + len(swept) > MOST_PROBLEMS:
            count = len(sizes) + len(swept)
            raise UsageError(
                f"{option} {text}: that is {count} sizes: expected at most {MOST_PROBLEMS}; "
                "take a larger step"
            )
        sizes.extend(swept)
    return list(dict.fromkeys(sizes))


def parse_list(texts: Sequence[str]) -> list[str]:
    """Return the values of an option given several times, or once with commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def parse_settings(option: str, texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values by field of texts ``field=value`` or ``field=v1,v2``.

    Raises:
        UsageError: there is no ``=``, or nothing on one side of it.
    """
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not (name and equals and parse_list([values])):
            raise UsageError(f"{option} {text}: expected field=value or field=value,value")
        found = [*settings.get(name, ()), *parse_list([values])]
        settings[name] = list(dict.fromkeys(found))
    return settings


def parse_config(texts: Sequence[str]) -> dict[str, str]:
    """Return the fields of `--config`, each with its one value.

    Raises:
        UsageError: one has several.
    """
    settings = parse_settings("--config", texts)
    for name, values in settings.items():
        if len(values) > 1:
            raise UsageError(f"--config {name}={','.join(values)}: expected one value")
    return {name: values[0] for name, values in settings.items()}


def _fields(op: Op) -> list[str]:
    return [f.name for f in dataclasses.fields(op.Problem)]


def _check_names(request: Request, note: Note) -> None:
    """Refuse a field or dimension that no op has; note the ops that lack one."""
    chosen = request.ops
    asked = [*request.settings, *(("block",) if request.blocks else ())]
    for name in asked:
        lacking = [op.name for op in chosen if name not in _fields(op)]
        if len(lacking) == len(chosen):
            known = list(dict.fromkeys(n for op in chosen for n in _fields(op)))
            raise unknown(f"no problem field {name!r}", name, known)
        if lacking:
            note(f"{', '.join(lacking)}: no field {name!r}, measured without it")
    for dim in request.sizes:
        if all(dim not in op.dims for op in chosen):
            known = list(dict.fromkeys(d for op in chosen for d in op.dims))
            raise UsageError(f"--{dim}: {chosen[0].name} has only {' and '.join(known)}")


def _check_count(request: Request) -> None:
    """Refuse more problems than anyone waits for: all sizes, times all values of all fields."""
    most = 0
    for op in request.ops:
        sizes = [len(request.sizes.get(dim, (0,))) for dim in op.dims]
        values = [len(v) for name, v in request.settings.items() if name in _fields(op)]
        blocks = len(request.blocks or BLOCKS) if "block" in _fields(op) else 1
        most += math.prod([*sizes, *values, blocks, len(request.modes)])
    if most > MOST_PROBLEMS:
        raise UsageError(
            f"that is {most} problems: expected at most {MOST_PROBLEMS}; give fewer sizes or values"
        )


def _holdable(op: Op, problem: Any) -> Case:
    """Return a case; UsageError where one of its matrices is larger than any device's memory."""
    sides = sorted(getattr(problem, dim) for dim in op.dims)[-2:]
    if math.prod(sides) > MOST_ELEMENTS:
        shape = "×".join(map(str, sides))
        raise UsageError(
            f"{op.name} {shape}: expected at most {MOST_ELEMENTS} elements in a matrix"
        )
    return Case(op, problem)


def _shapes(op: Op, sizes: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    found = []
    for m in sizes["m"]:
        others = [sizes.get(dim, [m]) for dim in op.dims[1:]]
        found += [
            dict(zip(op.dims, (m, *rest), strict=True)) for rest in itertools.product(*others)
        ]
    return found


def _problems(op: Op, request: Request, mode: Any) -> tuple[list[Any], list[UsageError]]:
    """Return an op's problems in a mode, and the errors of the sizes that it refuses."""
    known = _fields(op)
    values = {name: tried for name, tried in request.settings.items() if name in known}
    if "block" in known:
        values["block"] = request.blocks or BLOCKS
    shapes = None if request.workload else _shapes(op, request.sizes)
    found, refused = [], []
    for combination in itertools.product(*values.values()):
        fields = dict(zip(values, combination, strict=True))
        if shapes is None:
            found += workloads.problems(op, str(request.workload), mode, fields)
            continue
        for shape in shapes:
            try:
                found += op.problems(mode, {**fields, **shape})
            except UsageError as error:
                op.problems(mode, {**fields, **dict.fromkeys(op.dims, EVERYWHERE)})
                refused.append(error)
    return found, refused


def check_peers(names: Sequence[str]) -> None:
    """Raise UsageError where a name is no peer's."""
    for name in names:
        if name not in peer_ops.NAMES:
            raise unknown(f"no peer {name!r}", name, peer_ops.NAMES, ", or none")


def kept_peers(names: Sequence[str] | None) -> list[str] | None:
    """Return the peers to measure, of the names given: ``none`` is none; None is all.

    Raises:
        UsageError: a name is no peer's.
    """
    if names == ["none"]:
        return []
    check_peers(names or ())
    return list(names or ()) or None


def choose_ops(names: Sequence[str]) -> list[Op]:
    """Return the ops of some names.

    Raises:
        UsageError: none are given, or one does not exist.
    """
    given = parse_list(names)
    if not given:
        raise UsageError(f"which op? expected one of {', '.join(registry.names())}, or all")
    every = [name for n in given for name in (registry.names() if n == "all" else (n,))]
    return [registry.get(name) for name in dict.fromkeys(every)]


def parse(
    ops: Sequence[str],
    m: Sequence[str] = (),
    n: Sequence[str] = (),
    k: Sequence[str] = (),
    workload: str | None = None,
    block: Sequence[str] = (),
    mode: Sequence[str] = ("fwd",),
    settings: Sequence[str] = (),
    kernels: Sequence[str] = (),
    peers: Sequence[str] = (),
    config: Sequence[str] = (),
) -> Request:
    """Return what a command's options ask for, which some device could measure.

    Args:
        ops: names of ops; ``all`` is every one.
        kernels: further names, which are checked.
        config: texts ``field=value``, of which the fields are not checked: that loads kernels.

    Raises:
        UsageError: a name, size or value means nothing to any of the ops.
    """
    given = {"m": m, "n": n, "k": k}
    sizes = {dim: parse_sizes(f"--{dim}", ",".join(texts)) for dim, texts in given.items() if texts}
    modes, fields = parse_list(mode), parse_settings("--set", settings)
    fixed = parse_config(config)
    chosen, kept = choose_ops(ops), kept_peers(peers)
    if workload is not None:
        if workload not in workloads.names():
            raise unknown(f"no workload {workload!r}", workload, workloads.names())
        if sizes:
            raise UsageError(f"--workload {workload} has its own sizes: leave out --m --n --k")
    for name in modes:
        if name not in ("fwd", "bwd"):
            raise UsageError(f"--mode {name}: expected fwd, bwd or fwd,bwd")
    for name in fields:
        if name in ("m", "n", "k", "block", "mode"):
            raise UsageError(f"--set {name}=…: expected --{name}, which sets it")
    request = Request(chosen, modes, sizes, workload, block or None, fields, kept, fixed)
    registry.check_kernels(request.ops, kernels)
    cases(request.sized(EVERYWHERE), lambda note: None)  # which is made again for the device
    return request


def cases(request: Request, note: Note) -> list[Case]:
    """Return the problems to measure, grouped by op and shape, each once.

    One of several ops may refuse a size that others take: it is noted and left out.

    Raises:
        UsageError: a name, size or value means nothing to any of the ops.
    """
    chosen = request.ops
    _check_names(request, note)
    _check_count(request)
    found = []
    refusals: list[UsageError] = []
    for op in chosen:
        for mode in request.modes:
            if len(chosen) > 1 and mode not in op.modes and mode in ("fwd", "bwd"):
                note(f"{op.name}: no mode {mode!r}, left out")
                continue
            problems, refused = _problems(op, request, mode)
            if refused and len(chosen) == 1:
                raise refused[0]
            for text in dict.fromkeys(map(str, refused)):
                note(f"{op.name}: {text}: left out")
            refusals += refused
            found += [_holdable(op, problem) for problem in problems]
    if refusals and not found:
        raise refusals[0]
    found = list(dict.fromkeys(found))
    # Problems of one shape stand together, whatever the order of the given fields.
    shape_of = {
        case: (case.op.name, *(getattr(case.problem, d) for d in case.op.dims)) for case in found
    }
    order = {shape: i for i, shape in enumerate(dict.fromkeys(shape_of.values()))}
    return sorted(found, key=lambda case: order[shape_of[case]])
