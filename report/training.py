"""What the documents say of training: tables of the rows that `jetfire.gpt2.bench` measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from jetfire.core.schema import Line, Size
from jetfire.measure.results import Results, Row
from jetfire.report.rows import grouped, ratio
from jetfire.report.table import Section, Table
from jetfire.report.text import fixed, gib, times

STEP, LLAMA_STEP, MODEL = "gpt2_step", "llama_step", "model_step"
BLOCK, LLAMA_BLOCK = "gpt2_block", "llama_block"
OPS = (STEP, LLAMA_STEP, BLOCK, LLAMA_BLOCK, MODEL)
EAGER, COMPILE = "eager", "compile"
OWN_LOSS, CAUSAL = "compile_own_loss", "compile_causal"
REDUCE_OVERHEAD, GRAPH = "reduce_overhead", "graph"
TENSORWISE, ROWWISE = "fp8_tensorwise", "fp8_rowwise"
NAMES = {
    EAGER: "BF16 eager",
    COMPILE: "BF16 torch.compile",
    OWN_LOSS: "BF16 torch.compile, our loss",
    CAUSAL: "BF16 torch.compile, attention without a mask",
    REDUCE_OVERHEAD: "BF16 torch.compile, reduce-overhead",
    GRAPH: "BF16 torch.compile, the step as one CUDA graph",
    TENSORWISE: "FP8 torchao tensorwise, torch.compile",
    ROWWISE: "FP8 torchao rowwise, torch.compile",
}
_RATIOS = ["× eager", "× compile", "× FP8"]
_SMALLER = ["smaller than eager's", "than compile's"]


class TrainingProblem(TypedDict):
    """The fields of a step's or a block's problem that the tables show."""

    width: Size
    batch: Size
    context: Size
    layers: NotRequired[Size]
    accumulate: NotRequired[Size]
    heads: NotRequired[Size]
    kv_heads: NotRequired[Size]
    hidden: NotRequired[Size]
    logits: NotRequired[Line]
    optimizer: NotRequired[Line]
    weights: NotRequired[Line]


class ModelStepProblem(TypedDict):
    """The fields of the step of any model that the tables show; a user's own has no sizes."""

    model: Line
    run: Line
    batch: NotRequired[Size]
    context: NotRequired[Size]
    parallel: NotRequired[Line]
    processes: NotRequired[Size]
    unit: NotRequired[Size]
    adapters: NotRequired[Size]


def step_text(row: Row) -> str:
    """Return ``4 layers of width 4096, 4×1024 tokens``."""
    p = row.problem
    if "model" in p:
        sizes = f", {p['batch']}×{p['context']} tokens" if "batch" in p else ""
        spread = f", {p['parallel']} of {p['processes']}" if "parallel" in p else ""
        spread += f", units of {p['unit']} blocks" if "unit" in p else ""
        adapted = f", adapters of rank {p['adapters']}" if "adapters" in p else ""
        return f"{p['model']}{sizes}, run {p['run']}{spread}{adapted}"
    micros = f"{p['accumulate']} micro-batches of " if p.get("accumulate", 1) > 1 else ""
    layers = f"{p['layers']} layers" if "layers" in p else "one block"
    gated = f" ({p['hidden']}, {p['kv_heads']} of {p['heads']} heads)" if "hidden" in p else ""
    named = (name for name in ("logits", "optimizer", "weights") if name in p)
    state = "".join(f", {name} {p[name]}" for name in named)
    tokens = f"{p['batch']}×{p['context']} tokens"
    return f"{layers} of width {p['width']}{gated}, {micros}{tokens}{state}"


def _problems(results: Results, *ops: str) -> dict[str, list[Row]]:
    """Return the timed rows of some ops by problem."""
    timed = (row for row in results.rows if row.op in ops and row.ms is not None)
    return grouped(timed, step_text)


def _ratios(row: Row) -> list[str]:
    """Return what `_RATIOS` heads; of the two in FP8 the faster counts."""
    return [times(ratio(row, *peers)) for peers in ((EAGER,), (COMPILE,), (TENSORWISE, ROWWISE))]


def _smaller(row: Row) -> list[str]:
    """Return two peers' activation memory over this row's."""
    own = row.extra.get("activation_gib")
    theirs = row.extra.get("peer_activation_gib") or {}
    found = (theirs.get(peer) for peer in (EAGER, COMPILE))
    return [times(peer / own if own and peer is not None else None) for peer in found]


def _section(results: Results, ops: Sequence[str], title: str, text: str) -> Section:
    """Return the recipes and peers of each problem."""
    lines = [
        [
            problem,
            NAMES.get(row.kernel, row.kernel),
            fixed(row.ms, 2),
            ("graph" if row.graph else "launched") + (", alone" if row.extra.get("alone") else ""),
            fixed(row.tflops),
            *_ratios(row),
            gib(row, "peak_gib"),
            gib(row, "activation_gib"),
            *_smaller(row),
            fixed(row.joules, 1),
            fixed(row.extra.get("first_step_s"), 1),
        ]
        for problem, rows in _problems(results, *ops).items()
        for row in rows
    ]
    head = ["", "", "ms", "", "TFLOP/s", *_RATIOS, "peak GiB", "activations GiB", *_SMALLER]
    return Section(title, text, [Table([*head, "J", "first, s"], lines)])


_MEMORY = (
    "Activations: the peak of forward and backward beyond parameters, gradients and optimizer "
    "state, in eager calls; an INT8 recipe's include its weights' codes, as BF16's do its casts."
)


def steps(results: Results) -> Section:
    text = (
        "Forward, backward and clipped fused AdamW of GPT-2 or Llama (50304 tokens of vocabulary, "
        "fp32 parameters), all in turns in one process after loss and gradients were checked "
        "against BF16 eager's. × is the peer's time over the row's; FP8 is torchao's float8 "
        "training under torch.compile, the faster of its two recipes. INT8 runs as a CUDA graph, "
        "torch.compile as it launches; what is alone had no room beside the others, and was timed "
        "before or after them. TFLOP/s count 6 for each weight and token, "
        f"and attention. {_MEMORY} J is the board's energy per step; first is the variant's first "
        "call in its process, compiling included: kernels that an earlier row needed are there."
    )
    return _section(results, [STEP, LLAMA_STEP], "Training steps", text)


def blocks(results: Results) -> Section:
    text = (
        "Forward and backward of one transformer block: input and its gradient BF16, parameters "
        f"fp32, weights quantised (or cast) in each call. Otherwise as above. {_MEMORY}"
    )
    return _section(results, [BLOCK, LLAMA_BLOCK], "Transformer block", text)


def models(results: Results) -> Section:
    text = (
        "Forward, backward and fused AdamW of models of transformers (fp32 parameters, BF16 "
        "autocast), in turns in one process after loss and gradients were checked against BF16 "
        "eager's. Recipes are converted by jetfire.nn.convert and run as the problem says: eager, "
        "under torch.compile, or under its mode reduce-overhead. TFLOP/s count the linear layers' "
        "products. Otherwise as above."
    )
    return _section(results, [MODEL], "Training steps of other models", text)


def sections(results: Results) -> list[Section]:
    return [steps(results), models(results), blocks(results)]


def readme(results: Results) -> Table:
    """Return the README's table of training: recipe int8, a line per problem."""
    lines = [
        [
            f"{problem}, {row.kernel}",
            fixed(row.ms, 1),
            *_ratios(row),
            gib(row, "activation_gib"),
            *_smaller(row),
        ]
        for problem, rows in _problems(results, *OPS).items()
        for row in rows
        if row.role == "kernel" and row.kernel in ("int8", "int8-fused")
    ]
    first = "training step (of one block: forward and backward)"
    return Table([first, "ms", *_RATIOS, "activations GiB", *_SMALLER], lines)
