"""The runner, which checks, then times, every kernel of a problem against its peers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from jetfire.core import broken, lookup, registry, terminal
from jetfire.core.device import Device
from jetfire.core.errors import NoDeviceError, UsageError, first_line, unknown
from jetfire.core.kernel import Kernel
from jetfire.core.launch import interpreted, needs_another_device, report, verify
from jetfire.core.lookup import Found
from jetfire.core.op import Check
from jetfire.core.tensors import Tensors
from jetfire.measure import peers as peer_ops
from jetfire.measure import timer
from jetfire.measure.nvml import Nvml
from jetfire.measure.plan import Case, Note
from jetfire.measure.proof import Guard, Sets
from jetfire.measure.results import MOST_ROWS, Row, problem_text
from jetfire.measure.timer import Timing

# Sets of inputs for kernels with stages. A stage moves fewer bytes than the whole launch; with so
# many sets even the smallest one worth a figure, 4608×5120 nibbles to bytes (35 MB), finds an
# H200's L2 cache cold.
STAGED_SETS = 4
STAGE = "/"  # between a kernel's name and that of its stage


@dataclass(frozen=True)
class Options:
    """The options of a measurement.

    Attributes:
        kernels, peers: names to keep; None keeps all.
        config: config fields that replace the profile's or the default's.
        data: the inputs' distribution, as `jetfire.measure.data.Source` takes it.
        rounds, sample_ms, budget_s, power_ms: as in `jetfire.measure.timer.time_calls`.
        schedules: measure each schedule of the kernels that have several, and no other kernel.
        debug: print the traceback of a kernel or a peer that fails.
    """

    kernels: Sequence[str] | None = None
    peers: Sequence[str] | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    data: str = "normal"
    seed: int = 0
    rounds: int = 20
    sample_ms: float = timer.SAMPLE_MS
    budget_s: float = 30.0
    power_ms: float = 200.0
    schedules: bool = False
    debug: bool = False


@dataclass(frozen=True)
class Choice:
    """A kernel with its config to measure, or with the reason why it is left out."""

    kernel: Kernel
    config: Any
    profile: str | None
    reason: str | None
    label: str


def choices(case: Case, device: Device, options: Options) -> list[Choice]:
    """Return the kernels of a problem, each with its config, or with why it is left out.

    Warn of stale profiles, and of a problem that no kernel was tuned for.

    Raises:
        UsageError: profiles are strict, and one of the kernels was not tuned for it.
    """
    chosen: list[Choice] = []
    used: list[tuple[Kernel, Found]] = []
    for name, kernel in registry.kernels(case.op.name).items():
        if options.kernels is not None and name not in options.kernels:
            continue
        if options.kernels is None and interpreted(kernel, device):
            no_gpu = "Triton's interpreter is no GPU: --kernel triton times it all the same"
            chosen.append(Choice(kernel, None, None, no_gpu, name))
            continue
        found, configs = _configs(case, kernel, device, options)
        for config, profile in configs:
            reason = kernel.legal(case.problem, config, device)
            label = f"{name} {config.schedule}" if options.schedules else name
            chosen.append(Choice(kernel, config, profile, reason, label))
            if reason is None and profile is not None and not options.schedules:
                used.append((kernel, found))
    tuned = any(found.source == "tuned" for _, found in used)
    for kernel, found in used:
        if found.stale or lookup.strict() or not tuned:
            report(case.op, kernel, case.problem, device, found)
    return chosen


def _configs(
    case: Case, kernel: Kernel, device: Device, options: Options
) -> tuple[Found, list[tuple[Any, str | None]]]:
    """Return what profiles have, and the config to measure or one per schedule, with its source."""
    found = lookup.find(case.op, kernel, case.problem, device)
    if options.schedules:
        return found, [
            (found.config, found.source)
            if found.source == "tuned" and found.config.schedule == config.schedule
            else (config, "default")
            for config in kernel.schedules(case.problem, device)
        ]
    known = found.config.as_dict()
    given = {name: value for name, value in options.config.items() if name in known}
    if not given:
        return found, [(found.config, found.source)]
    return found, [(kernel.Config.parse({**known, **given}), None)]


def check_device(work: Sequence[tuple[Case, Options]], device: Device) -> None:
    """Refuse work of which nothing runs on this device, but some on another.

    Raises:
        NoDeviceError: no kernel takes any of the problems here, and an architecture takes one; or
            none has a choice of schedules that is to be measured.
    """
    found = [(case, choice) for case, options in work for choice in choices(case, device, options)]
    if any(choice.reason is None for _, choice in found):
        return
    if any(options.schedules for _, options in work):
        reasons = dict.fromkeys(f"{choice.kernel.name}: {choice.reason}" for _, choice in found)
        raise NoDeviceError(
            f"--suite promotion: no kernel with a choice of schedules runs on {device.label}"
            f"{': ' if reasons else ''}{'; '.join(reasons)}"
        )
    for case, choice in found:
        if needs_another_device(choice.kernel, case.problem, device):
            raise NoDeviceError(
                f"{case.op.name}/{choice.label} does not run on {device.label}: {choice.reason}"
            )


def check_config(work: Sequence[tuple[Case, Options]], device: Device) -> None:
    """Refuse a config field that none of the kernels has, or none of those that run here.

    Where none runs here, that is for `check_device` to say.

    Raises:
        UsageError: the message lists the fields that they have.
    """
    names = dict.fromkeys(name for _, options in work for name in options.config)
    if not names:
        return
    chosen = [
        (kernel, case, options)
        for case, options in work
        for kernel in registry.kernels(case.op.name).values()
        if options.kernels is None or kernel.name in options.kernels
    ]
    every = [one[0] for one in chosen]
    running = [one[0] for one in chosen if _runs(*one, device)]
    for kernels in (every, running or every):
        fields = dict.fromkeys(n for kernel in kernels for n in kernel.Config.__dataclass_fields__)
        for name in names:
            if name not in fields:
                if not fields:
                    raise UsageError(f"no config field {name!r}: these kernels have none")
                raise unknown(f"no config field {name!r}", name, fields)


def _runs(kernel: Kernel, case: Case, options: Options, device: Device) -> bool:
    """Return whether a chosen kernel takes a problem on a device, with its default config."""
    if options.kernels is None and interpreted(kernel, device):
        return False
    default = kernel.default(case.problem, device)
    return kernel.legal(case.problem, default, device) is None


def check_rows(work: Sequence[tuple[Case, Options]], there: int) -> None:
    """Refuse, before measuring, more rows than a results file has room for.

    Args:
        there: the number of rows that the file holds already.

    Raises:
        UsageError: there may be more rows than `MOST_ROWS`.
    """
    most = there
    for case, options in work:
        kernels = registry.kernels(case.op.name).keys()
        most += len(kernels if options.kernels is None else kernels & set(options.kernels))
        most += min(peer_ops.MOST if options.peers is None else len(options.peers), peer_ops.MOST)
    if most > MOST_ROWS:
        held = f", {there} of which are there already" if there else ""
        raise UsageError(
            f"that is up to {most} rows{held}: expected at most {MOST_ROWS} in a results file; "
            "give fewer sizes or values, or --kernel and --peer"
        )


def sets_of(case: Case, device: Device) -> int:
    """Return the number of input sets to rotate among."""
    sets = timer.input_sets(case.op.bytes(case.problem), device.l2_bytes)
    staged = any(_has_stages(kernel) for kernel in registry.kernels(case.op.name).values())
    return max(sets, STAGED_SETS) if staged and device.kind == "cuda" else sets


def _has_stages(kernel: Kernel) -> bool:
    return type(kernel).stages is not Kernel.stages


def memory_needed(case: Case, device: Device) -> int:
    """Return the bytes that all sets twice, peers' BF16 operands and float64 checks take."""
    tensors = [tensor for side in case.op.on_meta(case.problem) for tensor in side.values()]
    elements = sum(t.numel() for t in tensors)
    nbytes = sum(t.nbytes for t in tensors)
    return sets_of(case, device) * (2 * nbytes + 2 * 2 * elements) + 3 * 8 * elements


def memory_free(device: Device) -> int | None:
    """Return the bytes that can still be allocated, or None where the system does not say."""
    if device.kind == "cuda":
        # Memory that the caching allocator holds without use can be used again.
        held = torch.cuda.memory_reserved(device.index) - torch.cuda.memory_allocated(device.index)
        return torch.cuda.mem_get_info(device.index)[0] + held
    try:
        with open("/proc/meminfo") as info:
            for line in info:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def memory_lack(case: Case, device: Device) -> str | None:
    """Return why a problem is left out for its memory; None where there is enough of it."""
    needed, free = memory_needed(case, device), memory_free(device)
    if free is None or needed <= free:
        return None
    return f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def _arch(device: Device) -> str:
    return "interpreted" if device.capability is None else "sm_{}{}".format(*device.capability)


class Runner:
    """A runner that measures problems on one device.

    Args:
        monitor: reads clock and power; without one rows have neither.
    """

    def __init__(
        self,
        device: Device,
        peaks: Mapping[str, Any],
        options: Options,
        note: Note,
        monitor: Nvml | None = None,
    ) -> None:
        self.device = device
        self.peaks = peaks
        self.options = options
        self.note = note
        self._noted: set[str] = set()
        self._compiles = 0
        self.monitor = monitor
        self.guard = Guard(device)

    def _note_once(self, text: str) -> None:
        """Make a note once, where it holds for many problems alike."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def measure(self, case: Case, options: Options | None = None) -> list[Row]:
        """Return rows of every legal kernel, then of every peer; none where memory is too small.

        The given options replace the runner's, here and later.
        """
        self.options = options or self.options
        legal = []
        for choice in choices(case, self.device, self.options):
            if choice.reason is None:
                legal.append(choice)
                config, source = problem_text(choice.config.as_dict()), choice.profile or "given"
                terminal.decision(f"{case}: {choice.label}: {source} config {config}".rstrip())
            else:
                self._note_once(f"{case.op.name}: {choice.label} left out: {choice.reason}")
        if not legal:
            return []
        if lack := memory_lack(case, self.device):
            self.note(f"{case}: left out: {lack}")
            return []
        try:
            return self._measure(case, legal)
        except torch.OutOfMemoryError:
            self.note(f"{case}: left out: out of memory")
            return []
        finally:
            if self._compiles >= peer_ops.COMPILES:
                peer_ops.forget_compiled()
                self._compiles = 0
            if self.device.kind == "cuda":
                torch.cuda.empty_cache()

    def _measure(self, case: Case, legal: Sequence[Choice]) -> list[Row]:
        where, options = self.device.torch_device, self.options
        count = sets_of(case, self.device)
        sets = Sets.drawn(case.op, case.problem, where, count, options.seed, options.data)
        rows = self._verified(case, legal, sets)
        variants: dict[str, Sequence[Callable[[], object]]] = {}
        for choice, row in zip(legal, rows, strict=True):
            if row.ok:
                variants[choice.label] = sets.calls(choice.kernel, choice.config)
                variants |= _stages(choice, sets)
        peers = self._peers(case, sets.inputs) if variants else {}
        runs: dict[str, Callable[[], object]] = {}
        timings = timer.time_calls(
            {**variants, **peers},
            where,
            options.rounds,
            options.sample_ms,
            budget_s=options.budget_s,
            monitor=self.monitor,
            power_ms=options.power_ms,
            timed=runs.__setitem__,
        )
        for name in peers:
            self._note_launches(case, name, timings[name])
        proved = [
            self._proved(case, choice, row, sets, runs[choice.label]) if row.ok else row
            for choice, row in zip(legal, rows, strict=True)
        ]
        return self._rows(case, legal, proved, timings, list(peers))

    def _note_launches(self, case: Case, label: str, timing: Timing) -> None:
        """Note what could not be captured in a graph on a GPU."""
        if self.device.kind == "cuda" and not timing.graph:
            self.note(f"{case}: {label} could not be captured in a graph: launches are included")

    def _rows(
        self,
        case: Case,
        legal: Sequence[Choice],
        rows: Sequence[Row],
        timings: Mapping[str, Timing],
        peers: Sequence[str],
    ) -> list[Row]:
        found = []
        for choice, row in zip(legal, rows, strict=True):
            if row.ok:
                timing = timings[choice.label]
                row = _split(timed(case, row, timing, self.peaks), choice.label, timings)
                vs_peer = {name: timings[name].ms / timing.ms for name in peers}
                row = replace(row, vs_peer=vs_peer)
                self._note_launches(case, choice.label, timing)
            found.append(row)
        for name in peers:
            peer = Row(case.op.name, name, "peer", case.problem.as_dict(), data=self.options.data)
            found.append(timed(case, peer, timings[name], None))
        return found

    def _verified(self, case: Case, legal: Sequence[Choice], sets: Sets) -> list[Row]:
        """Return each kernel's row without times, once its outputs are compared with the reference.

        The reference's results are gone when anything is timed.
        """
        inputs = sets.inputs[0]
        expected = case.op.reference(case.problem, inputs)

        def check(choice: Choice) -> Check:
            kernel, config = choice.kernel, choice.config
            return verify(case.op, kernel, case.problem, config, inputs, expected)

        return [self._checked(case, choice, partial(check, choice)) for choice in legal]

    def _proved(
        self, case: Case, choice: Choice, row: Row, sets: Sets, run: Callable[[], object]
    ) -> Row:
        """Return a row with what is wrong with the calls that were timed; else as it is."""
        prove = partial(sets.proved, choice.kernel, choice.config, run)
        proved = self._checked(case, choice, prove, " after timing")
        return row if proved.ok else proved

    def _checked(
        self, case: Case, choice: Choice, checked: Callable[[], Check], when: str = ""
    ) -> Row:
        """Return a kernel's row without times, with what a check of it finds or raises."""
        row = Row(
            case.op.name,
            choice.kernel.name,
            "kernel",
            case.problem.as_dict(),
            config=choice.config.as_dict(),
            profile=choice.profile,
            data=self.options.data,
            ok=False,
        )
        try:
            check = self.guard.judged(checked())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.options.debug:
                traceback.print_exc()
            whose = f"{case.op.name} {choice.label} ({_arch(self.device)})"
            if compiler := broken.explained(error, whose):
                self.note(str(compiler))
                terminal.details(compiler.details)
                return replace(row, error=str(compiler))
            row = replace(row, error=first_line(error) + when)
        else:
            row = replace(row, ok=check.ok, rel_err=check.rel_err)
            if not check.ok:
                row = replace(row, error=(check.message or "wrong result") + when)
        if not row.ok:
            self.note(f"{case}: {choice.label} is wrong: {row.error}")
        return row

    def _peers(
        self, case: Case, inputs: Sequence[Tensors]
    ) -> dict[str, Sequence[Callable[[], object]]]:
        """Return each peer's calls, one per set of inputs; note the peers that cannot run."""
        factories = self._factories(case, inputs)
        wanted = self.options.peers
        for name in wanted or ():
            if name not in factories[0]:
                offered = ", ".join(factories[0])
                self._note_once(
                    f"{case.op.name}: no peer {name} on {self.device.kind}: there are {offered}"
                )
        found: dict[str, Sequence[Callable[[], object]]] = {}
        for name in factories[0]:
            if wanted is not None and name not in wanted:
                continue
            try:
                self._compiles += name == "compile"
                calls = [factory[name]() for factory in factories]
                for call in calls[:1]:
                    call()
                found[name] = calls
            except torch.OutOfMemoryError:
                self.note(f"{case}: peer {name} left out: out of memory")
            except peer_ops.Unsupported as error:
                self._note_once(f"{case.op.name}: peer {name} left out: {error}")
            except Exception as error:
                if self.options.debug:
                    traceback.print_exc()
                self._note_once(f"{case.op.name}: peer {name} left out: {first_line(error)}")
        return found

    def _factories(
        self, case: Case, inputs: Sequence[Tensors]
    ) -> list[Mapping[str, peer_ops.Factory]]:
        """Return the op's peers for each set of inputs."""
        return [case.op.peers(case.problem, tensors) for tensors in inputs]


def timed(case: Case, row: Row, timing: Timing, peaks: Mapping[str, Any] | None) -> Row:
    """Return a row with its times, and its `roofline` where the device's peaks are known."""
    flops, nbytes = case.op.flops(case.problem), case.op.bytes(case.problem)
    roofline = None
    if peaks is not None:
        floor_ms = max(flops / peaks["int8_tops"] / 1e9, nbytes / peaks["copy_gbps"] / 1e6)
        roofline = floor_ms / timing.ms
    tflops = flops / timing.ms / 1e9 if flops else None
    return with_times(row, timing, tflops=tflops, gbps=nbytes / timing.ms / 1e6, roofline=roofline)


def with_times(row: Row, timing: Timing, **more: Any) -> Row:
    """Return a row with what a timing says, and further fields in place of its own."""
    said: dict[str, Any] = {
        "ms": timing.ms,
        "ms_p20": timing.ms_p20,
        "ms_p80": timing.ms_p80,
        "samples": timing.samples,
        "sm_mhz": timing.sm_mhz,
        "watts": timing.watts,
        "joules": timing.joules,
        "throttled": None if timing.throttled is None else list(timing.throttled),
        "graph": timing.graph,
    }
    return replace(row, **{**said, **more})


def _stages(choice: Choice, sets: Sets) -> dict[str, Sequence[Callable[[], object]]]:
    """Return the calls of each stage of a kernel, named after both, once each has run."""
    if not _has_stages(choice.kernel):
        return {}
    found = [
        choice.kernel.stages(sets.problem, choice.config, inputs, outputs)
        for inputs, outputs in zip(sets.inputs, sets.outputs, strict=True)
    ]
    for stages in found:
        for run in stages.values():
            run()
    return {f"{choice.label}{STAGE}{name}": [s[name] for s in found] for name in found[0]}


def _split(row: Row, label: str, timings: Mapping[str, Timing]) -> Row:
    """Return a row with its stages' times in milliseconds, if it has stages."""
    prefix = f"{label}{STAGE}"
    times = {
        name.removeprefix(prefix): t.ms for name, t in timings.items() if name.startswith(prefix)
    }
    return replace(row, extra={**row.extra, "stages": times}) if times else row
