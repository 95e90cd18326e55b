"""The committed measurements: what `docs/results/h200.json` holds, in parts of a few minutes each.

`results` is all of it. The parts go into one file with `--append`:

- ``targets``: every op at 8192×4096 and 8192×16384 in each rounding and layout, against
  torch.compile, with power; the GEMM at 8192³ with each output, ragged, and as a wgrad.
- ``gemm``: the GEMM over the linear layers of GPT-2 and Llama, forward and backward, and squares.
- ``elementwise``: every other op over GPT-2's shapes, forward and backward, and squares.
- ``int4``: the product of packed 4-bit codes and the whole of a linear layer in 4 bits, forward
  and backward by stage, at the INT4 paper's six shapes; each of the layer's other ops alone.

What a part has of an op the op says (`Op.timed`). Three suites are apart: `promotion`, which only a
Hopper GPU can measure, is the GEMM at 8192³ with each schedule of the promotion, on three kinds of
data, speed beside SQNR (`jetfire.bench.promotion`); `training`, steps and blocks of GPT-2, is
measured by `jetfire.gpt2.bench`; `export`, exported kernels beside the workbench's own launch of
them, by `jetfire.export.suite`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from jetfire.core import registry, workloads
from jetfire.core.errors import UsageError
from jetfire.core.op import Op
from jetfire.core.suites import COMPILED, PARTS, STEADY_MS, Timed
from jetfire.measure import plan
from jetfire.measure.plan import Case, Request

if TYPE_CHECKING:
    from jetfire.bench.command import BenchOptions
    from jetfire.measure.runner import Options

GPT2 = tuple(name for name in workloads.MODELS if name.startswith("gpt2-"))
NAMES = ("results", *PARTS, "promotion", "training", "export")
PLAIN = {"rounding", "layout"}  # fields that do not change what torch.compile makes


Entry = tuple[Op, Timed]


def _memory_bound(op: Op) -> Iterator[Timed]:
    """Yield what the suites measure of a memory-bound op.

    First are two widths in each setting, beside torch.compile where a setting changes what that
    compiles; then squares and GPT-2's shapes.
    """
    blocks = ("32",) if "block" in op.Problem.__dataclass_fields__ else None
    for turn, n in enumerate((4096, 16384)):
        for mode in op.modes:
            for i, settings in enumerate(op.settings(mode)):
                sizes = {"m": [8192], "n": [n]}
                alone = Timed("targets", turn, (mode,), sizes, settings=settings, rounds=20)
                if i == 0 or settings.keys() - PLAIN:
                    first = {name: values[:1] for name, values in settings.items()}
                    made = replace(alone, blocks=blocks, settings=first, peers=COMPILED)
                    yield replace(made, power_ms=STEADY_MS)
                yield replace(alone, peers=("copy",))
    every = Timed("elementwise", modes=op.modes, peers=("copy",))
    yield replace(every, sizes={"m": workloads.SQUARES}, blocks=blocks)
    for turn, name in enumerate(GPT2, start=1):
        yield replace(every, turn=turn, workload=name)


def check(asked: BenchOptions) -> None:
    """Refuse options that say what a suite says itself: what is measured, and of some the data.

    Raises:
        UsageError: there is such an option.
    """
    names = "ops m n k workload block settings kernels config peers rounds"
    chosen = [getattr(asked, name) for name in names.split()]
    apart = asked.suite in ("training", "export")
    own_data = apart or any(timed.data is not None for _, timed in entries(str(asked.suite)))
    if any(chosen) or tuple(asked.mode) != ("fwd",) or (own_data and asked.data != "normal"):
        raise UsageError(
            f"--suite {asked.suite} says itself what is measured: leave out OP and its options"
        )


def _part(name: str) -> list[Entry]:
    found = []
    for op in map(registry.get, registry.names()):
        own = op.timed()
        timed = _memory_bound(op) if own is None else own
        found += [(op, one) for one in timed if one.part == name]
    return sorted(found, key=lambda entry: entry[1].turn)


def entries(name: str) -> list[Entry]:
    """Return a suite's ops, each with problems of it that are measured alike."""
    if name == "results":
        return [entry for part in PARTS for entry in _part(part)]
    return _part(name)


def cases(name: str, options: Options) -> list[tuple[Case, Options]]:
    """Return the problems of a suite with their options.

    Each comes once per distribution of data, with the options of the first entry that has it.
    """
    found: dict[tuple[Case, str], tuple[Case, Options]] = {}
    for op, timed in entries(name):
        chosen = replace(
            options,
            peers=timed.peers,
            rounds=timed.rounds,
            power_ms=timed.power_ms,
            schedules=timed.schedules,
            data=timed.data or options.data,
            kernels=timed.kernels,
        )
        request = Request(
            [op], timed.modes, timed.sizes, timed.workload, timed.blocks, timed.settings
        )
        # That an op of a suite has no backward goes without saying.
        for case in plan.cases(request, lambda note: None):
            found.setdefault((case, chosen.data), (case, chosen))
    return list(found.values())
