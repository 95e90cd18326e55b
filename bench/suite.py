"""The committed measurements: what `docs/results/h200.json` holds, in parts of a few minutes each.

`results` is all of it. The parts go into one file with `--append`:

- ``targets``: every op at 8192×4096 and 8192×16384 in each rounding and layout, against
  torch.compile, with power; the GEMM at 8192³ with each output, ragged, and as a wgrad.
- ``gemm``: the GEMM over the linear layers of GPT-2 and Llama, forward and backward, and squares.
- ``elementwise``: every other op over GPT-2's shapes, forward and backward, and squares.
- ``int4``: the product of packed 4-bit codes and the whole of a linear layer in 4 bits, forward
  and backward by stage, at the INT4 paper's six shapes; each of the layer's other ops alone.

Three are apart: `promotion`, which only a Hopper GPU can measure, is the GEMM at 8192³ with each
schedule of the promotion, on three kinds of data, speed beside SQNR (`jetfire.bench.promotion`);
`training`, steps and blocks of GPT-2, is measured by `jetfire.gpt2.bench`; `export`, exported
kernels beside the workbench's own launch of them, by `jetfire.export.suite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jetfire.core import registry, workloads
from jetfire.core.errors import unknown
from jetfire.measure import plan
from jetfire.measure.plan import Case, Request
from jetfire.ops.sample_rows import capacity

if TYPE_CHECKING:
    from jetfire.measure.runner import Options

GPT2 = tuple(name for name in workloads.MODELS if name.startswith("gpt2-"))
PARTS = ("targets", "gemm", "elementwise", "int4")
NAMES = ("results", *PARTS, "promotion", "training", "export")
# torch.compile takes 3 to 10 s a function and shape: it is timed once for each, not for each block.
COMPILED = ("eager", "compile", "copy")
# The steps of a linear layer in 4 bits, and the layer.
INT4 = ("bit_split", "gather_rows", "hadamard_gemm", "hadamard_quantize", "int4_gemm",
        "sample_rows")  # fmt: skip
GEMM_PEERS = ("cublas_bf16", "fp8_scaled_mm_block")
GEMM_KERNELS = ("wgmma", "gluon")
# As a linear layer has them: activations, activations with outliers and gradients, times weights.
# Of two such operands the few places where outliers or large rows meet would decide everything.
PROMOTION_DATA = ("normal", "outlier/normal", "gradient/normal")
PROMOTION_PEERS = ("cublas_bf16", "fp8_scaled_mm", "fp8_scaled_mm_block")


@dataclass(frozen=True)
class Entry:
    """Requests that are measured alike.

    Attributes:
        peers, kernels: those to time; None is all.
        rounds, power_ms, schedules: as in `jetfire.measure.runner.Options`.
        data: the inputs' distribution; None is the user's.
    """

    request: Request
    peers: Sequence[str] | None
    rounds: int = 10
    power_ms: float = 0.0
    schedules: bool = False
    data: str | None = None
    kernels: Sequence[str] | None = None


def _elementwise() -> list[str]:
    return [name for name in registry.names() if name not in ("gemm", *INT4)]


def _has_blocks(op: str) -> bool:
    return "block" in registry.get(op).Problem.__dataclass_fields__


def _settings(op: str, mode: str) -> list[dict[str, list[str]]]:
    """The roundings and layouts worth a row each: all of quantize's, one by one for the others."""
    fields = registry.get(op).Problem.__dataclass_fields__
    if op == "quantize":
        return [{"rounding": ["nearest", "stochastic"], "layout": ["q", "qt", "both"]}]
    base = {"rounding": ["stochastic" if mode == "bwd" else "nearest"]}
    found = [base if "rounding" in fields else {}]
    if "rounding" in fields and mode == "fwd":
        found.append({"rounding": ["stochastic"]})
    if "layout" in fields:
        found.append({**found[0], "layout": ["both"]})
    if "stats" in fields and mode == "fwd":
        found.append({**base, "stats": ["given"]})
    return found


def _targets() -> list[Entry]:
    found = []
    for n in (4096, 16384):
        for op in _elementwise():
            for mode in registry.get(op).modes:
                shape = {"m": [8192], "n": [n]}
                for i, settings in enumerate(_settings(op, mode)):
                    alone = Request([op], [mode], shape, settings=settings)
                    if i == 0 or "stats" in settings:
                        blocks = ["32"] if _has_blocks(op) else None
                        first = replace(alone, blocks=blocks, settings=_firsts(settings))
                        found.append(Entry(first, COMPILED, 20, 200.0))
                    found.append(Entry(alone, ("copy",), 20))
    square = {"m": [8192]}
    found.append(Entry(Request(["gemm"], sizes=square), None, 10, 200.0))
    roundings = {"out": ["int8"], "rounding": ["nearest", "stochastic"], "layout": ["q", "both"]}
    found.append(Entry(Request(["gemm"], sizes=square, settings=roundings), ("cublas_bf16",), 6))
    other = {"out": ["fp16", "fp32"]}
    found.append(Entry(Request(["gemm"], sizes=square, settings=other), ("cublas_bf16",), 6))
    ragged = {"m": [8191], "n": [8193], "k": [8200]}
    found.append(Entry(Request(["gemm"], sizes=ragged), ("cublas_bf16",), 6, kernels=GEMM_KERNELS))
    gradient = {"m": [4096], "n": [4096], "k": [8192]}
    for settings in ({"out": ["bf16"]}, {"out": ["fp32"], "accumulate": ["true"]}):
        request = Request(["gemm"], sizes=gradient, settings=settings)
        found.append(Entry(request, ("cublas_bf16",), kernels=GEMM_KERNELS))
    return found


def _firsts(settings: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: values[:1] for name, values in settings.items()}


def _gemm() -> list[Entry]:
    squares = Request(["gemm"], sizes={"m": [512, *workloads.SQUARES]})
    models = [Request(["gemm"], ["fwd", "bwd"], workload=name) for name in (*GPT2, "llama-7b")]
    return [
        Entry(squares, None),
        *(Entry(request, GEMM_PEERS, 6, kernels=GEMM_KERNELS) for request in models),
    ]


def _small() -> list[Entry]:
    both = ("fwd", "bwd")
    names = _elementwise()
    squares = Request(names, both, {"m": workloads.SQUARES}, blocks=["32"])
    models = [Request(names, both, workload=name) for name in GPT2]
    return [Entry(request, ("copy",)) for request in (squares, *models)]


def _promotion() -> list[Entry]:
    square = Request(["gemm"], sizes={"m": [8192]})
    return [
        Entry(square, PROMOTION_PEERS, 10, schedules=True, data=data) for data in PROMOTION_DATA
    ]


def _int4() -> list[Entry]:
    gemm = Request(["int4_gemm"], workload="int4-paper", settings={"operands": ["packed"]})
    layer = Request(["hadamard_gemm"], ["fwd", "bwd"], workload="int4-paper")
    return [
        Entry(gemm, None, 10, 200.0),
        Entry(layer, ("cublas_fp16",), 10),
        *(Entry(request, COMPILED, 20, 200.0) for request in _int4_compiled()),
        *(Entry(request, ("copy",), 20) for request in _int4_others()),
    ]


def _int4_compiled() -> list[Request]:
    """One of each memory-bound op and direction, at 8192×8192."""
    square = {"m": [8192], "n": [8192]}
    return [
        Request(["hadamard_quantize"], sizes=square),
        Request(["hadamard_quantize"], ["bwd"], square, settings={"gathered": ["true"]}),
        Request(["hadamard_quantize"], ["bwd"], square, settings={"given": ["x"]}),
        Request(["bit_split"], sizes=square),
        *_gathers(),
        Request(["sample_rows"], sizes={"m": [8192, 16384]},
                settings={"product": ["dgrad", "wgrad"]}),
    ]  # fmt: skip


def _gathers() -> list[Request]:
    """Of 8192 tokens' split gradient those kept, as each product reads them; all of a weight."""
    found = []
    repeated = {"repeat": ["true"], "transpose": ["true"]}
    for product, other in (("dgrad", {"wide": ["true"]}), ("wgrad", repeated)):
        settings = {"rows": [str(capacity(8192, 2, product, "half"))], **other}
        shape = {"m": [2 * 8192], "n": [8192]}
        found.append(Request(["gather_rows"], sizes=shape, settings=settings))
    weight = {"transpose": ["false", "true"], "wide": ["true"]}
    found.append(Request(["gather_rows"], sizes={"m": [8192], "n": [8192]}, settings=weight))
    return found


def _int4_others() -> list[Request]:
    settings = {"group": ["1", "32", "128", "1024"], "layout": ["packed", "both"]}
    square = {"m": [8192], "n": [8192]}
    return [
        Request(["hadamard_quantize"], sizes=square, settings=settings),
        Request(["bit_split"], sizes=square, settings={"bits": ["4"]}),
    ]


def entries(name: str) -> list[Entry]:
    """A suite's entries.

    Raises:
        UsageError: there is no such suite.
    """
    parts = {
        "targets": _targets, "gemm": _gemm, "elementwise": _small, "int4": _int4,
        "promotion": _promotion,
    }  # fmt: skip
    if name == "results":
        return [entry for part in PARTS for entry in parts[part]()]
    if name not in parts:
        raise unknown(f"--suite {name}", name, NAMES)
    return parts[name]()


def _unsaid(text: str) -> None:
    """That an op of a list has no backward needs no telling here."""


def cases(name: str, options: Options) -> list[tuple[Case, Options]]:
    """Every problem of a suite once a kind of data, with the options of the first entry with it."""
    found: dict[tuple[Case, str], tuple[Case, Options]] = {}
    for entry in entries(name):
        chosen = replace(
            options, peers=entry.peers, rounds=entry.rounds, power_ms=entry.power_ms, recheck=False,
            schedules=entry.schedules, data=entry.data or options.data, kernels=entry.kernels,
        )  # fmt: skip
        for case in plan.cases(entry.request, _unsaid):
            found.setdefault((case, chosen.data), (case, chosen))
    return list(found.values())
