"""`jetfire train bench`."""

from __future__ import annotations

from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire train bench gpt2-350m --recipe int8 -o step.json"


def run(
    case: Annotated[
        str,
        o.argument(
            "CASE",
            "block, llama-block, wide (4 layers of width 4096), a preset, hf:NAME, a transformers "
            "config.json, or MODULE:FUNCTION.",
            o.CASES,
            o.MODELS,
        ),
    ],
    recipes: Annotated[
        o.Texts,
        o.listed("--recipe", "NAME,...", "As for training, but bf16 (the INT8 ones).", o.MEASURED),
    ] = None,
    settings: Annotated[
        o.Texts,
        o.option(
            "--set",
            "KEY=V,...",
            "layers, heads, width, batch, context, vocabulary, accumulate; of Llama and hf: "
            "kv_heads and hidden too; of hf: run, parallel=fsdp (unit=N), adapters=RANK; of a "
            "preset's recipes: logits, optimizer, weights.",
        ),
    ] = None,
    peers: Annotated[
        o.Texts,
        o.listed(
            "--peer",
            "NAME",
            "Only these beside eager, or none: compile, fp8_tensorwise, fp8_rowwise, …",
            o.STEP_PEERS,
            o.MODEL_PEERS,
        ),
    ] = None,
    device: o.Device = "auto",
    format: o.Format = None,
    output: o.Rows = None,
    append: o.Append = False,
    dry_run: o.DryBench = False,
    rounds: Annotated[
        o.Count, o.integer("--rounds", "Samples a row (12; on the CPU 5).", 1)
    ] = None,
    strict_profile: o.StrictProfile = False,
    seed: o.Seed = 0,
    debug: o.Debug = False,
) -> None:
    """Time training steps against BF16 eager and torch.compile; measure their memory."""
    from jetfire.bench import command
    from jetfire.gpt2.bench import cases
    from jetfire.gpt2.training.settings import split
    from jetfire.models import cases as models
    from jetfire.models import sources

    asked = o.collect(command.BenchOptions, locals())
    chosen = recipes or ()
    if sources.named_here(case):
        if models.check_bench(case, asked.settings, chosen, asked.peers):
            from jetfire.models import parallel

            parallel.bench(asked, case, chosen)
        else:
            from jetfire.models import bench as others

            others.bench(asked, case, chosen)
        return
    cases.case_of(case, split(asked.settings), chosen)
    cases.peers_of(asked.peers)
    from jetfire.gpt2.bench import steps as training

    training.bench(asked, case, chosen)
