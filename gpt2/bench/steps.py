"""Training against torch's own: rows `gpt2_step`, `gpt2_block`, `llama_step`, `llama_block`.

A row's kernel is the recipe. A step is forward, backward and clipped fused AdamW; a block is
forward and backward. Every variant is checked against BF16 eager in the same process, its memory is
measured in eager calls, and then all are timed in turns: recipes as CUDA graphs, as one GPU trains
them; a compiled step as torch launches it, a compiled block with and without a graph, of which the
faster is the peer. A step's problem names the recipes' `optimizer` where it is not AdamW with fp32
moments, which the peers have whatever it is. Rows have these fields beside the usual ones:

- peak_gib, activation_gib: as `jetfire.gpt2.bench.subjects.Probe` has them; peer_peak_gib and
  peer_activation_gib the peers' {name: GiB}.
- noise: of a recipe whose gradients are right on average alone, how far one call's gradient is from
  BF16 eager's, relatively, at the most. `rel_err` is then how far its part along BF16 eager's is.
- first_step_s: wall time of the variant's first call in the process, compiling included.
- ms_graph, ms_launched: with and without a CUDA graph, where both were timed.
- alone: true where not all variants fit on the device at once, so that each was timed alone.

`tflops` counts 6 for each weight and token, the head's included, and 12·layers·width·context a
token for attention, whatever the recipe.
"""

from __future__ import annotations

import gc
import math
import shlex
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from jetfire.bench import command
from jetfire.bench.progress import watch
from jetfire.core import terminal
from jetfire.core.device import Device
from jetfire.core.errors import NoDeviceError, UsageError, first_line
from jetfire.core.suites import STEADY_MS
from jetfire.gpt2.bench.cases import (
    EAGER,
    PEERS,
    SUITE,
    StepProblem,
    TorchVariant,
    TrainingCase,
    TrainingWork,
    case_of,
    peers_of,
    problem_of,
)
from jetfire.gpt2.bench.subjects import Probe, RecipeError, Subject, Tensors, maker, probe
from jetfire.gpt2.training import settings
from jetfire.measure import timer
from jetfire.measure.nvml import Nvml
from jetfire.measure.peers import forget_compiled
from jetfire.measure.plan import Note
from jetfire.measure.results import Row
from jetfire.measure.runner import with_times
from jetfire.measure.timer import Timing
from jetfire.nn.recipes import RECIPES

# Of the loss and of each gradient, against BF16 eager's. Models of 1 to 24 layers are off by 1e-4
# and by 0.04 to 0.10; a kernel that leaves half of its output unwritten is off by 0.7.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 0.002, 0.2
# Stochastic rounding's noise lies across, and grows with the width: Llama's last keys are off by
# 0.08 at 512 and 0.12 at 2048, of which 0.01 is along, and by 0.29 at 4096. So what is right to
# this part along BF16 eager's may be off by more; a part left out, or added, is off along it.
UNBIASED, NOISE_TOLERANCE = 0.05, 0.4
# The same of what came through attention alone. There the forward's rounding moves the gradient
# too, in any implementation: the more, the wider (0.01 at 512, both ours and with operands rounded
# in torch; 0.05 at 4096).
ATTENTION_UNBIASED = 0.08
# Of a gradient in 4 bits: how far from 1 is its part along BF16 eager's, over that one's norm. Most
# of its error, of 0.3 to 1.8, is noise, which lies across. Models of 2 to 24 layers are off by up
# to 0.19; `int4-naive`, which rounds to nearest and so has a bias, by 0.36 in Llama's gated MLP, on
# the GPU and by the CPU's reference alike; what came through attention alone, whose weights 4 bits
# change, by 0.55.
ALONG_TOLERANCE, ATTENTION_TOLERANCE = 0.45, 0.7
_ATTENTION = (
    *(f"{name}.weight" for name in ("qkv", "query", "key", "value", "projection", "positions")),
)
CPU_FLOPS = 1e12  # of a call that a CPU is asked for: a minute of INT8 at most
SAMPLE_MS = 100.0  # some steps, so that the host runs ahead of the GPU as it does in training


@dataclass(frozen=True)
class Deviation:
    """How far a call is from BF16 eager's.

    Attributes:
        error: the largest relative error of a gradient; of noisy ones, of their part along it.
        noise: the largest relative error of a noisy gradient; None of others.
        wrong: what is wrong, in a line; empty if nothing is.
    """

    error: float
    noise: float | None = None
    wrong: str = ""


def compared(
    ours: Tensors,
    theirs: Tensors,
    noisy: bool = False,
    attention: tuple[str, ...] = _ATTENTION,
    loss_tolerance: float = LOSS_TOLERANCE,
) -> Deviation:
    """Compare a call's loss and gradients with those of BF16 eager.

    Args:
        noisy: whether gradients are right on average, not each time.
        attention: what the names of those end with that may have come through attention alone.
    """
    errors, noises, wrong, far = [0.0], [0.0], "", 0.0
    for name, its in theirs.items():
        left, right = ours[name].double(), its.double()
        error = float((left - right).norm() / right.norm())
        if name == "loss":
            if not abs(error) <= loss_tolerance:
                what = f"loss {float(left):.4f}: BF16 eager's is {float(right):.4f}"
                return Deviation(error, wrong=what)
            continue
        along = abs(float((left * right).sum() / right.square().sum()) - 1)
        off, limit, what = error, GRADIENT_TOLERANCE, "relative error"
        if noisy:
            off, what = along, "relative error along it"
            limit = ATTENTION_TOLERANCE if name.endswith(attention) else ALONG_TOLERANCE
        elif along <= (ATTENTION_UNBIASED if name.endswith(attention) else UNBIASED):
            limit = NOISE_TOLERANCE
        errors.append(off)
        noises.append(error)
        if not off / limit <= max(far, 1.0):
            part = "" if noisy else f" ({along:.2f} along it)"
            far, wrong = off / limit, f"{name}: {what} {off:.2g}{part} against BF16 eager's"
            if math.isnan(off):
                return Deviation(off, off if noisy else None, wrong)
    return Deviation(max(errors), max(noises) if noisy else None, wrong)


@dataclass
class TrainingBench:
    """Measures cases on one device.

    Attributes:
        variants: what recipes are measured against, by name.
        lets_go: whether variants, once compared, may be let go where not all fit at once.
        chosen: those that are wanted beside eager; None for all.
    """

    device: Device
    note: Note
    rounds: int
    seed: int = 0
    power_ms: float = STEADY_MS
    sample_ms: float = SAMPLE_MS
    chosen: Collection[str] | None = None
    debug: bool = False
    variants: ClassVar[Mapping[str, TorchVariant]] = PEERS
    lets_go: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.where = self.device.torch_device
        self.monitor = Nvml.open(self.where)
        self.cuda = self.device.kind == "cuda"
        # Eager is what recipes are checked against; on the CPU compiling would need a compiler.
        wanted = self.variants if self.chosen is None else self.chosen
        self.peers = [n for n in self.variants if n == EAGER or (self.cuda and n in wanted)]

    def measure(self, case: TrainingWork) -> list[Row]:
        """Rows of the recipes, then of the peers; none where BF16 eager does not fit."""
        try:
            return self._measure(case)
        except torch.OutOfMemoryError:
            self.note(f"{case}: left out: out of memory")
            return []
        finally:
            self._free()

    def _measure(self, case: TrainingWork) -> list[Row]:
        subjects, probes, rows = self._probed(case)
        names = [name for name in probes if name in self.variants or rows[name].ok]
        if any(name not in self.variants for name in names):
            timed = self._all_timed(case, names, subjects, rows)
            rows = {n: timed.get(n, row) for n, row in rows.items()}
            rows = {n: row for n, row in rows.items() if n in timed or row.ok is False}
        peers = {name: rows[name] for name in self.variants if name in rows}
        return [
            _with_peers(row, peers, probes) if row.role == "kernel" else row
            for row in rows.values()
        ]

    def _all_timed(
        self,
        case: TrainingWork,
        names: Sequence[str],
        subjects: dict[str, Subject],
        rows: Mapping[str, Row],
    ) -> dict[str, Row]:
        """Return variants' rows with times: in turns where all fit on the device at once."""
        for name in subjects.keys() - names:
            del subjects[name]
        if len(subjects) == len(names):
            try:
                return self._in_turns(case, subjects, rows)
            except torch.OutOfMemoryError:
                if not self.lets_go:
                    raise
            self._let_go(case, subjects)
        return self._one_by_one(case, names, subjects, rows)

    def _in_turns(
        self, case: TrainingWork, subjects: Mapping[str, Subject], rows: Mapping[str, Row]
    ) -> dict[str, Row]:
        """Return the rows of variants that are timed in turns."""
        timings = self._timings(case, subjects)
        return {
            name: self._timed(case, rows[name], timings, subject)
            for name, subject in subjects.items()
        }

    def _one_by_one(
        self,
        case: TrainingWork,
        names: Sequence[str],
        subjects: dict[str, Subject],
        rows: Mapping[str, Row],
    ) -> dict[str, Row]:
        """Return the rows of variants of which each is timed alone, made anew if it was let go."""
        make = self._maker(case)
        found: dict[str, Row] = {}
        for name in sorted(names, key=lambda name: name not in subjects):
            try:
                if name not in subjects:
                    subjects[name] = make(name)()
                    subjects[name].first()
                row = self._in_turns(case, {name: subjects[name]}, rows)[name]
                found[name] = replace(row, extra={**row.extra, "alone": True})
            except torch.OutOfMemoryError as error:
                self._failed(case, name, error)
            subjects.pop(name, None)
            self._free(subjects)
        return found

    def _probed_with_room(
        self, case: TrainingWork, make: Callable[[], Subject], subjects: dict[str, Subject]
    ) -> tuple[Subject, Probe]:
        """Probe a variant; let go of the others where it does not fit beside them.

        GPT-2 1558M takes 46 GiB in BF16 eager and 23 in INT8. Beside what stands of these two, 80
        have no room for torch.compile's (H100).
        """
        try:
            return self._probe(make)
        except torch.OutOfMemoryError:
            if not (self.lets_go and subjects):
                raise
        self._let_go(case, subjects)  # the frames of the error, which held the variant, are gone
        return self._probe(make)

    def _let_go(self, case: TrainingWork, subjects: dict[str, Subject]) -> None:
        """Let go of variants, each of which will be made anew to be timed alone."""
        self.note(f"{case}: no room for all at once: each variant is timed alone")
        subjects.clear()
        self._free()

    def _free(self, subjects: Collection[str] = ()) -> None:
        """Free the memory of all but the subjects that are alive."""
        if not subjects:
            forget_compiled()
        gc.collect()  # compiled models are cycles
        if self.cuda:
            torch.cuda.empty_cache()

    def _timings(self, case: TrainingWork, subjects: Mapping[str, Subject]) -> dict[str, Timing]:
        return timer.time_calls(
            {name: [call] for name, call in self._variants(case, subjects).items()},
            self.where,
            self.rounds,
            self.sample_ms,
            budget_s=60.0,
            monitor=self.monitor,
            power_ms=self.power_ms,
            capture=False,
            untimed=1,
            agree=self._agreed,
        )

    def _probed(
        self, case: TrainingWork
    ) -> tuple[dict[str, Subject], dict[str, Probe], dict[str, Row]]:
        """Every variant that runs, what is known of it, and its row as yet without times."""
        make = self._maker(case)
        subjects: dict[str, Subject] = {}
        probes: dict[str, Probe] = {}
        rows: dict[str, Row] = {}
        refused: list[RecipeError] = []
        # Peers last: what a process does once counts for the first recipe's first step.
        for name in (*case.recipes, *self._peers_of(case)):
            role = "peer" if name in self.variants else "kernel"
            if role == "peer" and len(refused) == len(case.recipes):
                raise refused[0]
            row = Row(case.op, name, role, case.as_dict(), data="normal")  # type: ignore[arg-type]
            try:
                subjects[name], probes[name] = self._probed_with_room(case, make(name), subjects)
            except Exception as error:
                if name == EAGER:
                    raise
                self._failed(case, name, error)
                if isinstance(error, RecipeError):
                    refused.append(error)
                elif role == "kernel" and not isinstance(error, torch.OutOfMemoryError):
                    rows[name] = replace(row, ok=False, error=first_line(error))
                continue
            rows[name] = replace(row, extra=_memory(probes[name]))
        for name in probes:
            if name not in self.variants:
                found = self._compared(case, name, probes[name].outputs, probes[EAGER].outputs)
                noise = {} if found.noise is None else {"noise": found.noise}
                rows[name] = replace(
                    rows[name],
                    ok=not found.wrong,
                    rel_err=found.error,
                    error=found.wrong,
                    extra={**rows[name].extra, **noise},
                )
                if found.wrong:
                    self.note(f"{case}: {name} is wrong: {found.wrong}")
        return subjects, {n: replace(p, outputs={}) for n, p in probes.items()}, rows

    def _probe(self, make: Callable[[], Subject]) -> tuple[Subject, Probe]:
        return probe(make, self.where)

    def _agreed(self, value: float) -> float:
        """Return the largest of all processes' values: there is one process."""
        return value

    def _compared(self, case: Any, name: str, ours: Tensors, theirs: Tensors) -> Deviation:
        """Compare a recipe's first call with BF16 eager's."""
        return compared(ours, theirs, RECIPES[name].noisy)

    def _peers_of(self, case: Any) -> list[str]:
        """Return the peers that a case has: a block has no loss."""
        step = isinstance(case.problem, StepProblem)
        return [name for name in self.peers if step or not PEERS[name].own_loss]

    def _failed(self, case: TrainingWork, name: str, error: Exception) -> None:
        if self.debug:
            traceback.print_exception(error)
        reason = str(error) if isinstance(error, RecipeError) else first_line(error)
        self.note(f"{case}: {name} left out: {reason}")

    def _maker(self, case: Any) -> Callable[[str], Callable[[], Subject]]:
        """Return what makes a variant of a name; all have the same data."""
        return maker(case, self.where, self.seed)

    def _variants(
        self, case: TrainingWork, subjects: Mapping[str, Subject]
    ) -> dict[str, Callable[[], object]]:
        """The calls to time, by the variant's name and how it is run.

        A CUDA graph of a step reads weights' codes where they were captured. After a launched step,
        which makes others, its first replay copies them. That is not counted (`untimed`): training
        replays alone. With it three steps of 350M took 121 ms, and without a pause 107 (H200).
        """
        found: dict[str, Callable[[], object]] = {
            f"{name} launched": partial(_call, subject) for name, subject in subjects.items()
        }
        if not self.cuda:
            return found
        for name, subject in subjects.items():
            if name == EAGER or not subject.captures:
                continue
            try:
                if timer.synchronises(subject.call):
                    raise RuntimeError("it waits for the device")
                found[f"{name} graph"] = subject.capture()
            except (RuntimeError, UsageError) as error:
                self._failed(case, f"{name} as a CUDA graph", error)
        return found

    def _timed(
        self, case: TrainingWork, row: Row, timings: Mapping[str, Timing], subject: Subject
    ) -> Row:
        """Return the row with its times, unless the subject has come to be wrong."""
        if row.role == "kernel" and (fault := subject.fault()):
            self.note(f"{case}: {row.kernel} is wrong: {fault} after timing")
            return replace(row, ok=False, error=f"{fault} after timing")
        kinds = {
            kind: timings[key]
            for kind in ("graph", "launched")
            if (key := f"{row.kernel} {kind}") in timings
        }
        kind = min(kinds, key=lambda kind: kinds[kind].ms)
        if row.role == "kernel" and "graph" in kinds:
            kind = "graph"
        timing, more = kinds[kind], {}
        if len(kinds) > 1:
            more = {f"ms_{name}": one.ms for name, one in kinds.items()}
        return with_times(
            row,
            timing,
            tflops=case.flops / timing.ms / 1e9,
            graph=kind == "graph" or subject.replays,
            extra={**row.extra, **more, "tokens_per_s": case.tokens / timing.ms * 1e3},
        )


def _call(subject: Subject) -> None:
    """Call it and drop its gradients: of six variants of a model they are a fifth of the memory."""
    subject.call()
    subject.forget()


def _memory(found: Probe) -> dict[str, Any]:
    return {
        "peak_gib": _gib(found.peak),
        "activation_gib": _gib(found.activation),
        "first_step_s": found.first_s,
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def _with_peers(row: Row, peers: Mapping[str, Row], probes: Mapping[str, Probe]) -> Row:
    """A recipe's row beside its peers'."""
    extra = {
        **row.extra,
        "peer_peak_gib": {name: _gib(probes[name].peak) for name in peers},
        "peer_activation_gib": {name: _gib(probes[name].activation) for name in peers},
    }
    ratios = None
    if row.ms is not None:
        ratios = {name: peer.ms / row.ms for name, peer in peers.items() if peer.ms is not None}
    return replace(row, vs_peer=ratios, extra=extra)


def suite(asked: command.BenchOptions) -> None:
    """`jetfire bench --suite training`.

    Raises:
        JetfireError: with the exit code of what went wrong.
    """
    cases = [TrainingCase(problem_of(name)) for name in SUITE]
    run(asked, cases, "jetfire bench --suite training")


def bench(asked: command.BenchOptions, name: str, recipes: Sequence[str]) -> None:
    """`jetfire train bench NAME`: one problem, what is in `asked.settings` changed.

    Raises:
        JetfireError: with the exit code of what went wrong.
    """
    case = case_of(name, settings.split(asked.settings), recipes)
    run(asked, [case], command_again(asked, name, case.recipes))


def command_again(asked: command.BenchOptions, name: str, recipes: Sequence[str]) -> str:
    """Return the command line that measures the same."""
    words = ["jetfire train bench", shlex.quote(name), f"--recipe {','.join(recipes)}"]
    words += [
        f"--set {shlex.quote(f'{key}={value}')}"
        for key, value in settings.split(asked.settings).items()
    ]
    words += [f"--peer {name}" for name in asked.peers]
    words += [f"--device {asked.device}"] if asked.device != "auto" else []
    words += [f"--rounds {asked.rounds}"] if asked.rounds else []
    return " ".join([*words, f"--seed {asked.seed}"])


def run(
    asked: command.BenchOptions,
    cases: Sequence[TrainingWork],
    again: str,
    kind_of_bench: type[TrainingBench] = TrainingBench,
) -> None:
    """Measure, show and save."""
    if asked.plot is not None:
        raise UsageError(f"--plot {asked.plot}: training has no chart: expected -o FILE")
    peers = peers_of(asked.peers, kind_of_bench.variants)
    existing = command.existing_rows(asked)
    device = Device.parse(asked.device)
    if asked.dry_run:
        terminal.planned([f"{case}: {', '.join(case.recipes)}" for case in cases])
        return
    for case in cases if device.kind == "cpu" else ():
        if case.flops > CPU_FLOPS:
            raise NoDeviceError(
                f"{case} is for a GPU: expected one, or a smaller case: jetfire "
                "train bench tiny runs here"
            )
    for peer in peers if asked.peers and device.kind == "cpu" else ():
        if peer != EAGER:
            terminal.note(f"{peer} left out: runs on a GPU only")
    rounds = asked.rounds or (12 if device.kind == "cuda" else 5)
    # On the CPU a sample is one call.
    sample_ms = SAMPLE_MS if device.kind == "cuda" else 0.01
    made = kind_of_bench(
        device,
        terminal.note,
        rounds,
        asked.seed,
        sample_ms=sample_ms,
        chosen=peers if asked.peers else None,
        debug=asked.debug,
    )
    known = existing is not None and existing.device.get("name") == device.name
    peaks = existing.device.get("peaks") if existing is not None and known else None
    if peaks and "busy" in peaks:
        peaks = None
    output = command.Output(asked, device, existing, again, peaks)
    with output.kept():
        for case in watch(cases):
            output.add(made.measure(case))
