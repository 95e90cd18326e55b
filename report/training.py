"""What the documents say of training: tables of the rows that `jetfire.gpt2.bench` measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from jetfire.core.schema import Line, Size
from jetfire.measure.results import Results, Row
from jetfire.report import show
from jetfire.report.table import MarkdownTable

STEP, BLOCK, MODEL = "gpt2_step", "gpt2_block", "model_step"
OPS = (STEP, BLOCK, MODEL)
EAGER, COMPILE, OWN_LOSS = "eager", "compile", "compile_own_loss"
REDUCE_OVERHEAD = "reduce_overhead"
TENSORWISE, ROWWISE = "fp8_tensorwise", "fp8_rowwise"
NAMES = {
    EAGER: "BF16 eager",
    COMPILE: "BF16 torch.compile",
    OWN_LOSS: "BF16 torch.compile, our loss",
    REDUCE_OVERHEAD: "BF16 torch.compile, reduce-overhead",
    TENSORWISE: "FP8 torchao tensorwise, torch.compile",
    ROWWISE: "FP8 torchao rowwise, torch.compile",
}
_RATIOS = ["× eager", "× compile", "× FP8"]


class TrainingProblem(TypedDict):
    """The fields of a step's or a block's problem that the tables show."""

    width: Size
    batch: Size
    context: Size
    layers: NotRequired[Size]
    accumulate: NotRequired[Size]


class ModelStepProblem(TypedDict):
    """The fields of the step of any model that the tables show; a user's own has no sizes."""

    model: Line
    run: Line
    batch: NotRequired[Size]
    context: NotRequired[Size]


def problem_type(op: str) -> type:
    """Return the type of the problems of one of `OPS`."""
    return ModelStepProblem if op == MODEL else TrainingProblem


def _rows(results: Results, ops: Sequence[str]) -> list[Row]:
    return [row for row in results.rows if row.op in ops and row.ms is not None]


def problem_text(row: Row) -> str:
    """``4 layers of width 4096, 4×1024 tokens``."""
    p = row.problem
    if "model" in p:
        sizes = f", {p['batch']}×{p['context']} tokens" if "batch" in p else ""
        return f"{p['model']}{sizes}, run {p['run']}"
    micros = f"{p['accumulate']} micro-batches of " if p.get("accumulate", 1) > 1 else ""
    layers = f"{p['layers']} layers" if "layers" in p else "one block"
    return f"{layers} of width {p['width']}, {micros}{p['batch']}×{p['context']} tokens"


def _ratios(row: Row) -> list[str]:
    """What `_RATIOS` heads; of the two in FP8 the faster counts."""
    of = row.vs_peer or {}
    fp8 = [of[peer] for peer in (TENSORWISE, ROWWISE) if peer in of]
    found = (of.get(EAGER), of.get(COMPILE), min(fp8, default=None))
    return ["–" if ratio is None else f"{ratio:.2f}×" for ratio in found]


def _gib(row: Row, name: str) -> str:
    return show.number(row.extra.get(name), 2)


def _smaller(row: Row, peer: str) -> str:
    """The peer's activation memory over this row's."""
    own = row.extra.get("activation_gib")
    theirs = (row.extra.get("peer_activation_gib") or {}).get(peer)
    return "–" if not own or theirs is None else f"{theirs / own:.2f}×"


def _problems(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(problem_text(row), []).append(row)
    return found


def _table(results: Results, op: str, title: str, text: str) -> MarkdownTable | None:
    """Recipes and peers of each problem."""
    lines = [
        [
            problem, NAMES.get(row.kernel, row.kernel), show.number(row.ms, 2),
            "graph" if row.graph else "launched", show.number(row.tflops),
            *_ratios(row), _gib(row, "peak_gib"), _gib(row, "activation_gib"),
            *(_smaller(row, peer) for peer in (EAGER, COMPILE)),
            show.number(row.joules, 1), show.number(row.extra.get("first_step_s"), 1),
        ]
        for problem, rows in _problems(_rows(results, (op,))).items()
        for row in rows
    ]  # fmt: skip
    if not lines:
        return None
    head = ["", "", "ms", "", "TFLOP/s", *_RATIOS, "peak GiB", "activations GiB",
            "smaller than eager's", "than compile's", "J", "first, s"]  # fmt: skip
    return MarkdownTable(title, text, head, lines)


_MEMORY = (
    "Activations: the peak of forward and backward beyond parameters, gradients and optimizer "
    "state, in eager calls; an INT8 recipe's include its weights' codes, as BF16's do its casts."
)


def steps(results: Results) -> MarkdownTable | None:
    text = (
        "Forward, backward and clipped fused AdamW of GPT-2 (50304 tokens of vocabulary, fp32 "
        "parameters), all in turns in one process after loss and gradients were checked against "
        "BF16 eager's. × is the peer's time over the row's; FP8 is torchao's float8 training under "
        "torch.compile, the faster of its two recipes. INT8 runs as a CUDA graph, "
        "torch.compile as it launches. TFLOP/s count 6 for each weight and token, "
        f"and attention. {_MEMORY} J is the board's energy a step; first is the variant's first "
        "call in its process, compiling included: kernels that an earlier row needed are there."
    )
    return _table(results, STEP, "Training steps", text)


def blocks(results: Results) -> MarkdownTable | None:
    text = (
        "Forward and backward of one transformer block: input and its gradient BF16, parameters "
        f"fp32, weights quantised (or cast) in each call. Otherwise as above. {_MEMORY}"
    )
    return _table(results, BLOCK, "Transformer block", text)


def models(results: Results) -> MarkdownTable | None:
    text = (
        "Forward, backward and fused AdamW of models of transformers (fp32 parameters, BF16 "
        "autocast), in turns in one process after loss and gradients were checked against BF16 "
        "eager's. Recipes are converted by jetfire.nn.convert and run as the problem says: eager, "
        "under torch.compile, or under its mode reduce-overhead. TFLOP/s count the linear layers' "
        "products. Otherwise as above."
    )
    return _table(results, MODEL, "Training steps of other models", text)


def readme(results: Results) -> str:
    """The README's table of training: one line a recipe and problem; empty without rows."""
    lines = [
        [
            f"{problem}, {row.kernel}", show.number(row.ms, 1),
            *_ratios(row), _gib(row, "activation_gib"),
            *(_smaller(row, peer) for peer in (EAGER, COMPILE)),
        ]
        for problem, rows in _problems(_rows(results, OPS)).items()
        for row in rows
        if row.role == "kernel"
    ]  # fmt: skip
    if not lines:
        return ""
    head = ["training step (of one block: forward and backward)", "ms", *_RATIOS,
            "activations GiB", "smaller than eager's", "than compile's"]  # fmt: skip
    return "\n" + MarkdownTable("", "", head, lines).markdown()
