"""The command line: `jetfire COMMAND`, and a console script `jetfire-COMMAND` for some of them.

Only Typer is imported here: `--help` answers at once, and torch, Triton, NumPy and matplotlib load
when a command needs them. A command is a function below with `@app.command`; its console script is
a function that calls `run` with the command's name, named in pyproject.toml.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from jetfire.ops.errors import JetfireError, JetfireWarning, UsageError

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A workbench for low-precision transformer-training kernels.",
    epilog="Exit codes: 0 ok · 1 internal error · 2 usage · 3 wrong result · 4 performance "
    "regression · 5 no such device · 6 timeout · 130 interrupted.",
)


@app.callback()
def _root() -> None:
    """A workbench for low-precision transformer-training kernels."""


def _integer(option: str) -> Callable[[str], int]:
    """A parser of one option's integer, whose error names the option and the text."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"{option} {text}: expected an integer") from None
        if not -(2**62) <= number < 2**62:
            raise UsageError(f"{option} {text}: expected an integer of at most 62 bits")
        return number

    return parse


Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback where something fails.")]
Ops = Annotated[
    list[str] | None, typer.Argument(metavar="OP...", help="Ops by name, or [b]all[/b].")
]
StrictProfile = Annotated[
    bool, typer.Option("--strict-profile", help="Fail where no profile was tuned for a problem.")
]
Size = "a size, a list 512,1024 or a sweep 1024:8192:1024"


def _strict(asked: bool) -> None:
    if asked:
        os.environ["JETFIRE_STRICT_PROFILE"] = "1"


@app.command()
def bench(
    op: Ops = None,
    m: Annotated[
        str | None, typer.Option(metavar="SIZES", help=f"Rows: {Size}. (4096; on the CPU 512)")
    ] = None,
    n: Annotated[str | None, typer.Option(metavar="SIZES", help="Columns (as m).")] = None,
    k: Annotated[str | None, typer.Option(metavar="SIZES", help="Inner size (as m).")] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="A model's shapes, e.g. gpt2-350m.")
    ] = None,
    block: Annotated[
        list[str] | None, typer.Option(metavar="B,...", help="Block sizes (32,64,128).")
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(metavar="fwd|bwd", help="Direction (fwd).")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=V,...", help="Any other problem field (see --list)."),
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these kernels.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=V", help="Override a config field.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these peers; none for none.")
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="NAME", help="The inputs' distribution; --list has them.")
    ] = "normal",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")
    ] = "auto",
    format_: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="table, json, csv or md (table).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save as .json/.csv/.md.")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Add to -o FILE.json, replacing the same rows.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the rows: .png, .svg or .pdf.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The committed measurements, instead of OP: results, or a part of it: targets, "
            "gemm, elementwise, int4; promotion; training; export.",
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List ops, kernels, workloads, peers; measure nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be measured.")
    ] = False,
    seed: Annotated[
        int, typer.Option(parser=_integer("--seed"), metavar="INT", help="Inputs' seed.")
    ] = 0,
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=_integer("--rounds"), metavar="INT", help="Samples a row (20; on the CPU 7)."
        ),
    ] = None,
    remeasure_peaks: Annotated[
        bool, typer.Option("--remeasure-peaks", help="Measure the device's peaks anew.")
    ] = False,
    strict_profile: StrictProfile = False,
    debug: Debug = False,
) -> None:
    """Check every kernel of an op, then time it against its peers."""
    from jetfire.bench import command

    _strict(strict_profile)
    if list_:
        print(command.listing())
        return
    asked = command.Asked(
        ops=op or (), m=m, n=n, k=k, workload=workload, block=block or (),
        mode=tuple(mode or ("fwd",)), settings=set_ or (), kernels=kernel or (),
        config=config or (), peers=peer or (), data=data, device=device, format=format_,
        output=output, append=append, plot=plot, dry_run=dry_run, seed=seed, rounds=rounds,
        remeasure_peaks=remeasure_peaks, suite=suite, debug=debug,
    )  # fmt: skip
    if suite == "training":
        from jetfire.gpt2 import bench as training

        training.suite(asked)
        return
    if suite == "export":
        from jetfire.export import suite as exports

        exports.suite(asked)
        return
    command.bench(asked)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Results to compare with.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Results to judge.")],
    fail_on_regression: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Exit 4 if a kernel is slower by more, e.g. 5%, broken or missing.",
        ),
    ] = None,
    ignore_config: Annotated[
        bool, typer.Option("--ignore-config", help="Match rows whose configs differ.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Match the rows of two results files and show what got faster and slower."""
    from jetfire.bench.compare import compare as compare_files

    compare_files(before, after, fail_on_regression, config=not ignore_config)


@app.command(name="list")
def list_command(debug: Debug = False) -> None:
    """List ops, kernels, workloads and peers."""
    from jetfire.bench import command

    print(command.listing())


Sizes = Annotated[str | None, typer.Option(metavar="SIZES", help=f"As in bench: {Size}.")]
Blocks = Annotated[list[str] | None, typer.Option(metavar="B,...", help="Block sizes.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=V,...", help="Any other problem field."),
]
Workload = Annotated[str | None, typer.Option(metavar="NAME", help="A model's shapes.")]
ModeOption = Annotated[str, typer.Option(metavar="fwd|bwd", help="Direction.")]
KernelNames = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these kernels.")]
DeviceName = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(parser=_integer("--seed"), metavar="INT", help="Seed.")]


def _duration(option: str, text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m`` or ``1h``."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{option} {text}: expected a time such as 90, 90s, 10m or 1h")
    return seconds


def _shard(text: str | None) -> tuple[int, int]:
    """The index and the count of ``0/4``."""
    index, _, count = (text or "0/1").partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UsageError(f"--shard {text}: expected I/N with 0 ≤ I < N")
    return int(index), int(count)


def _asked(
    op: list[str] | None, m: str | None, n: str | None, k: str | None, workload: str | None,
    block: list[str] | None, mode: str, settings: list[str] | None, default_m: str,
) -> Any:  # fmt: skip
    """The problems of the shape options that several commands share."""
    from jetfire.bench import command, plan

    if workload is None and m is None:
        m = default_m
    asked = command.Asked(ops=op or (), m=m, n=n, k=k, workload=workload, block=block or (),
                          mode=(mode,), settings=settings or ())  # fmt: skip
    return plan.cases(command.request_of(asked), command.note)


@app.command()
def tune(
    op: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP...",
            help="Ops by name, or [b]all[/b]; or [b]show[/b] [OP...]: list the profiles.",
        ),
    ] = None,
    m: Sizes = None, n: Sizes = None, k: Sizes = None, workload: Workload = None,
    block: Blocks = None, mode: ModeOption = "fwd", set_: Setting = None,
    kernel: KernelNames = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every problem that profiles are shipped for.")
    ] = False,
    unseen: Annotated[
        int,
        typer.Option(parser=_integer("--unseen"), metavar="N", help="Tune N random shapes that no "
                     "profile is for, keep nothing, and say how far off the profiles are."),
    ] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="--unseen: its rows.")
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only what has no profile yet, or a stale one.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Only every Nth problem, from the Ith (0/4 to 3/4)."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(parser=_integer("--trials"), metavar="INT", help="Configs a kernel and "
                     "problem, those of earlier runs included; instead of --effort's."),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Wall-clock time in all: 90, 90s, 10m, 1h.")
    ] = "10m",
    effort: Annotated[
        str, typer.Option(metavar="NAME", help="quick (40 configs) or full (250).")
    ] = "quick",
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="tpe, gp, random or exhaustive.")
    ] = "tpe",
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="time, energy or both.")
    ] = "time",
    space: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=V,...", help="Search only these values of a config field."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these peers; none for none.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL|FILE|DIR", help="Where studies are kept: a database's URL "
                     "(sqlite:///…, postgresql://…), FILE.journal or a folder (JETFIRE_STUDIES)."),
    ] = None,
    trial_timeout: Annotated[
        str, typer.Option(metavar="TIME", help="What a config may take to be checked and timed.")
    ] = "30s",
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the searches as a page.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE.json.gz", help="Keep the trials for --replay.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json.gz", help="Search recorded trials; no device, no profile."),
    ] = None,
    data: Annotated[str, typer.Option(metavar="NAME", help="The inputs' distribution.")] = "normal",
    device: DeviceName = "auto", seed: Seed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be searched.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="show: as JSON.")] = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Search tile sizes on this device; the best are kept as a profile that bench and nn load.

    Every trial is durable: after an interruption the same command goes on where it was.
    """
    if op and op[0] == "show":
        from jetfire.ops.device import Device
        from jetfire.tuner.show import show

        show(op[1:], None if device == "auto" else Device.parse(device), as_json)
        return
    if trials is not None and trials < 1:
        raise UsageError(f"--trials {trials}: expected at least 1")
    from jetfire.tuner import command

    if replay is not None:
        if op:
            raise UsageError(f"--replay {replay}: it says itself of which op it is: leave out OP")
        print(command.replay(replay, strategy, trials, seed))
        return
    from jetfire.bench import plan
    from jetfire.ops.device import Device

    default_m = "4096" if Device.parse(device).kind == "cuda" else "256"
    if unseen < 0:
        raise UsageError(f"--unseen {unseen}: expected at least 1")
    if output is not None and not unseen:
        raise UsageError(f"-o {output}: expected --unseen N, whose rows it holds")
    if all_ or unseen:
        from jetfire.tuner import shipped

        modes = mode != "fwd"
        other = all_ or block or kernel or missing or shard or space
        if m or n or k or workload or set_ or modes or (unseen and other):
            what = "--unseen: only OP narrows" if unseen else "--all: only OP and --block narrow"
            raise UsageError(f"{what} its problems")
        cases = shipped.cases(plan.parse_list(op or []), plan.parse_list(block or []))
    else:
        cases = _asked(op, m, n, k, workload, block, mode, set_, default_m)
    peers = plan.parse_list(peer or [])
    command.tune(
        command.Asked(
            cases=cases, kernels=plan.parse_list(kernel or []), device=device,
            budget_s=_duration("--budget", budget), trials=trials, effort=effort,
            strategy=strategy, objective=objective, seed=seed, data=data,
            space=plan.parse_settings("--space", space or []), storage=storage,
            trial_s=_duration("--trial-timeout", trial_timeout),
            peers=[] if peers == ["none"] else (peers or None), report=report, record=record,
            missing=missing, shard=_shard(shard), dry_run=dry_run,
            unseen=unseen, output=output, keep=not unseen,
        )
    )  # fmt: skip


@app.command()
def fuzz(
    op: Ops = None, kernel: KernelNames = None,
    against: Annotated[
        str | None, typer.Option(metavar="KERNEL", help="Compare the kernels with this one.")
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            parser=_integer("--examples"), metavar="INT",
            help="Of each kernel (200; on the CPU 500, interpreted 60).",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wall-clock time in all: 90, 90s, 10m, 1h. (30m)"),
    ] = None,
    largest: Annotated[
        int | None,
        typer.Option(
            parser=_integer("--largest"), metavar="INT",
            help="Largest size drawn (2048; on the CPU 400, interpreted 130).",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            parser=_integer("--jobs"), metavar="INT",
            help="Processes that run cases (8 a GPU, at most one for two cores; on the CPU 1).",
        ),
    ] = None,
    reproduce: Annotated[
        str | None, typer.Option(metavar="ID", help="Run a saved failure again: its ID, or a file.")
    ] = None,
    load: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Python whose KERNELS join those of their ops."),
    ] = None,
    sanitizer: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            help="Under compute-sanitizer: memcheck, racecheck, initcheck or synccheck.",
        ),
    ] = None,
    device: DeviceName = "auto",
    interpreter: Annotated[
        bool, typer.Option("--interpreter", help="Triton kernels on the CPU, interpreted.")
    ] = False,
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help="table or json.")
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save as JSON.")
    ] = None,
    seed: Seed = 0, debug: Debug = False,
) -> None:  # fmt: skip
    """Random problems, configs, values and layouts against the reference; failures are saved."""
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
    from jetfire.fuzz import command

    if reproduce is not None:
        command.reproduce(reproduce, device, load or (), sanitizer)
        return
    command.fuzz(
        command.Asked(
            ops=() if not op or "all" in op else op, kernels=kernel or (), against=against,
            examples=examples, largest=largest, seed=seed,
            budget_s=None if budget is None else _duration("--budget", budget), jobs=jobs,
            device=device, load=load or (), sanitizer=sanitizer, format=format_,
            output=output,
        )
    )  # fmt: skip


@app.command()
def export(
    op: Ops = None, m: Sizes = None, n: Sizes = None, k: Sizes = None, workload: Workload = None,
    block: Blocks = None, mode: ModeOption = "fwd", set_: Setting = None,
    kernel: Annotated[
        str | None, typer.Option(metavar="NAME", help="A GPU kernel (the fastest tuned one).")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cuda (source), cubin (compiled code in C), torch (a "
                     "PyTorch extension), wheel, or hf (Hugging Face's kernels); cuda for a CUDA "
                     "kernel, cubin for a Triton one."),
    ] = None,
    arch: Annotated[str, typer.Option(metavar="SM", help="Architecture, e.g. 9.0a.")] = "9.0a",
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of function, library and package (jetfire_OP)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="A new or empty folder.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Build and test what was written.")
    ] = True,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Write a tuned kernel that needs neither Jetfire nor its tools; build and test it."""
    from jetfire.bench import plan
    from jetfire.bench.audit import capability_of
    from jetfire.export import command

    if output is None:
        raise UsageError("export: expected -o DIR")
    capability = capability_of(arch)
    known = {f for o in plan.choose_ops(op or []) for f in o.Problem.__dataclass_fields__}
    blocks = block or (["32"] if "block" in known else None)
    cases = _asked(op, m, n, k, workload, blocks, mode, set_, "4096")
    command.run(
        command.Asked(cases=cases, kernel=kernel, target=target, capability=capability,
                      folder=output, name=name, check=check)
    )  # fmt: skip


class _Training(TyperGroup):
    """`jetfire train`: its verbs, and training itself where the first word is none of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = [name for name, command in self.commands.items() if not command.hidden]
        return super().parse_args(ctx, args if args and args[0] in known else [_RUN, *args])


class _Run(TyperCommand):
    """Training, whose usage does not show the name of a command that nobody types."""

    def get_usage(self, ctx: Any) -> str:
        return super().get_usage(ctx).replace(f" {_RUN} ", " ")


_RUN = "run"
train = typer.Typer(cls=_Training, add_completion=False, help="Train GPT-2 in INT8, INT4 or BF16.")
app.add_typer(train, name="train")
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint's.")
]


@train.command(
    _RUN,
    cls=_Run,
    hidden=True,
    epilog="Other verbs, each with --help: jetfire train prepare (text to tokens), plot (loss "
    "curves), sample (text of a run's model), export (weights for transformers), bench (a step "
    "against BF16), tune (the kernels of a step).",
)
def _train(
    preset: Annotated[
        str | None,
        typer.Argument(metavar="PRESET", help="tiny, shakespeare-char, gpt2-124m, -350m, -774m, "
                       "-1558m."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="bf16, int8-block32, -block64, -block128, int4-hq-lss, "
                     "int4-hq, int4-naive (int8-block32)."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="Any other setting: batch, rate, …"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(parser=_integer("--steps"), metavar="INT", help="Optimizer steps."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="python, shakespeare, shakespeare-char, "
                     "openwebtext; a prepared folder; a text file."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="RUN", help="Folder of the run's log and "
                     "checkpoints (runs/PRESET-RECIPE)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with -o RUN from its last checkpoint.")
    ] = False,
    init: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Begin with the weights of a run, a checkpoint or a "
                     "transformers GPT-2."),
    ] = None,
    sample: Annotated[
        int,
        typer.Option(parser=_integer("--sample"), metavar="INT", help="Tokens to write at the "
                     "end."),
    ] = 0,
    strict_profile: StrictProfile = False, device: DeviceName = "auto",
    seed: Annotated[
        int | None, typer.Option(parser=_integer("--seed"), metavar="INT", help="Seed (0).")
    ] = None,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Train GPT-2: `jetfire-train PRESET`. Ctrl-C writes a checkpoint; --resume goes on from it."""
    from jetfire.gpt2 import command

    _strict(strict_profile)
    command.train(
        command.Asked(
            preset=preset, recipe=recipe, settings=set_ or (), steps=steps, data=data,
            output=output, resume=resume, init=init, device=device, seed=seed, sample=sample,
        )
    )  # fmt: skip


@train.command()
def prepare(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME|PATH...", help="python, shakespeare, shakespeare-char, "
                       "openwebtext; text files and folders of them."),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="byte, char or gpt2 (what that text usually gets)."),
    ] = None,
    vocabulary: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With GPT-2's encoder.json and vocab.bpe, instead of "
                     "a download."),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="A local copy of what would be downloaded."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="For the tokens (the cache, or "
                     "beside you)."),
    ] = None,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Turn text into tokens that training maps into memory; prints their folder."""
    from jetfire.gpt2.prepare import run as prepare_text

    prepare_text(names, tokenizer, vocabulary, from_, output)


@train.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders or logs.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help=".png, .svg, .pdf or .html.")
    ],
    debug: Debug = False,
) -> None:
    """Draw loss curves of runs over each other."""
    from jetfire.gpt2.curves import plot as draw

    draw(runs, output)


@train.command()
def sample(
    run: RunFolder,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="What the text begins with (a new document).")
    ] = "",
    tokens: Annotated[
        int, typer.Option(parser=_integer("--tokens"), metavar="INT", help="How many to write.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 takes the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int,
        typer.Option(parser=_integer("--top-k"), metavar="INT", help="Draw among so many of the "
                     "likeliest."),
    ] = 200,
    device: DeviceName = "auto", seed: Seed = 0, debug: Debug = False,
) -> None:  # fmt: skip
    """Write text with a run's model."""
    from jetfire.gpt2 import command

    command.sample(run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed,
                   device=device)  # fmt: skip


@train.command(name="export")
def export_weights(
    run: RunFolder,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="For the weights.")
    ],
    debug: Debug = False,
) -> None:
    """Write a run's weights as transformers' GPT-2 reads them."""
    from jetfire.gpt2 import command

    command.export(run, output)


@train.command(name="bench")
def _bench_training(
    case: Annotated[
        str,
        typer.Argument(metavar="CASE", help="block, wide (4 layers of width 4096), or a preset."),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="As for training, but bf16 (the INT8 ones)."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="layers, heads, width, batch, context, "
                     "vocabulary, accumulate."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these of eager (always there) and compile."),
    ] = None,
    device: DeviceName = "auto",
    format_: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="table, json, csv or md (table).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save as .json/.csv/.md.")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Add to -o FILE.json, replacing the same rows.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be measured.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=_integer("--rounds"), metavar="INT", help="Samples a row (12; on the CPU 5)."
        ),
    ] = None,
    strict_profile: StrictProfile = False, seed: Seed = 0, debug: Debug = False,
) -> None:  # fmt: skip
    """Time training steps against BF16 eager and torch.compile; measure their memory."""
    from jetfire.bench import command
    from jetfire.gpt2 import bench as training

    _strict(strict_profile)
    asked = command.Asked(
        ops=(), settings=set_ or (), peers=peer or (), device=device, format=format_,
        output=output, append=append, dry_run=dry_run, rounds=rounds, seed=seed, debug=debug,
    )  # fmt: skip
    training.bench(asked, case, recipe or ())


@train.command(name="tune")
def _tune_training(
    preset: Annotated[
        str,
        typer.Argument(metavar="PRESET", help="As for training."),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="As for training, but bf16 (int8-block32)."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=V,...", help="As for training.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="As for training; its vocabulary alone matters."),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Wall-clock time in all: 90, 90s, 10m, 1h.")
    ] = "10m",
    trials: Annotated[
        int | None,
        typer.Option(parser=_integer("--trials"), metavar="INT", help="Configs a problem (40)."),
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only what has no profile yet, or a stale one.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Only every Nth problem, from the Ith (0/4 to 3/4)."),
    ] = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="tpe, gp, random or exhaustive.")
    ] = "tpe",
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these peers; none for none.")
    ] = None,
    device: DeviceName = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be searched.")
    ] = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Tune every kernel that a training step calls, for its shapes, as `jetfire tune` does."""
    if trials is not None and trials < 1:
        raise UsageError(f"--trials {trials}: expected at least 1")
    from jetfire.bench import plan
    from jetfire.gpt2 import tuning
    from jetfire.tuner.session import Asked

    peers = plan.parse_list(peer or [])
    asked = Asked(
        cases=(), kernels=(), device=device, budget_s=_duration("--budget", budget), trials=trials,
        strategy=strategy, peers=[] if peers == ["none"] else (peers or None), missing=missing,
        shard=_shard(shard), dry_run=dry_run,
    )  # fmt: skip
    tuning.run(asked, tuning.runs_of(preset, plan.parse_list(recipe or []), set_ or (), data))


@app.command()
def audit(
    op: Ops = None, m: Sizes = None, n: Sizes = None, k: Sizes = None, block: Blocks = None,
    mode: ModeOption = "fwd", set_: Setting = None, kernel: KernelNames = None,
    arch: Annotated[
        list[str] | None, typer.Option(metavar="SM,...", help="Architectures (80,89,90,100).")
    ] = None,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Compile GPU kernels for any architecture; show registers, spills, instructions."""
    from jetfire.bench import audit as auditor
    from jetfire.bench import plan

    cases = _asked(op or ["all"], m, n, k, None, block, mode, set_, "4096")
    names = plan.parse_list(kernel or [])
    auditor.run(cases, names, plan.parse_list(arch or ["80,89,90,100"]))


def _parse_error(error: Any) -> str:
    """Typer's usage error as one line with what was given and what is accepted."""
    context = getattr(error, "ctx", None)
    known: Any = getattr(context, "command", None)
    option = getattr(error, "option_name", None)
    text = " ".join(str(error.format_message()).split())
    if type(error).__name__ == "NoSuchOption" and known is not None:
        names = [name for p in known.params for name in p.opts if name.startswith("--")]
        return f"no option {option}: expected one of {', '.join(names)}"
    if hasattr(known, "commands"):
        given = f"{text.rstrip('.')}: " if text else ""
        return f"{given}expected one of {', '.join(known.commands)}"
    return text


def _is_usage_error(error: BaseException) -> bool:
    """Typer's own, whose classes moved between versions."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _fail(message: str, code: int) -> int:
    print(f"jetfire: {' '.join(message.split())}", file=sys.stderr)
    return code


def _warn_in_a_line() -> None:
    """Have our own warnings printed as our errors are."""
    usual = warnings.showwarning

    def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
        if issubclass(category, JetfireWarning):
            _fail(str(message), 0)
        else:
            usual(message, category, *where, **more)

    warnings.showwarning = show


def _share_cores() -> None:
    """Have OpenMP's threads wait for each other asleep, unless the user has said how they wait.

    It is read when torch loads, and worker processes inherit it. By default they spin for
    milliseconds, on cores that other programs want: on 2 cores with 4 busy processes torch's
    512×512 GELU took 12.0 ms instead of 0.2, and 20 steps of tiny 86 s instead of 17. Without any
    spinning a quiet machine of 16 cores took 55 µs instead of 23; with 1000 turns, 23.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")


def execute(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run `jetfire` or one of its commands and return the exit code; every error ends here."""
    _share_cores()
    words = list(sys.argv[1:] if arguments is None else arguments)
    group: Any = typer.main.get_command(app)
    target = group if command is None else group.commands[command]
    name = "jetfire" if command is None else f"jetfire-{command}"
    if command is None and not words:
        words = ["--help"]
    try:
        with warnings.catch_warnings():
            _warn_in_a_line()
            code = target.main(args=words, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        if code == 130:  # some versions of Typer turn Ctrl-C into a result
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has had enough; keep Python from failing again on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if type(error).__name__ == "Abort":  # Typer's name for Ctrl-C
            return _fail("interrupted", 130)
        if "--debug" in words:
            traceback.print_exc()
        if isinstance(error, JetfireError):
            return _fail(str(error), error.exit_code)
        if _is_usage_error(error):
            return _fail(_parse_error(error), 2)
        return _fail(f"internal error: {type(error).__name__}: {error} (--debug shows more)", 1)


def run(command: str | None = None) -> None:
    """`execute` as a console script."""
    sys.exit(execute(command))


def main() -> None:
    """Console script `jetfire`."""
    run()


def bench_main() -> None:
    """Console script `jetfire-bench`: the same function as `jetfire bench`."""
    run("bench")


def tune_main() -> None:
    """Console script `jetfire-tune`: the same function as `jetfire tune`."""
    run("tune")


def fuzz_main() -> None:
    """Console script `jetfire-fuzz`: the same function as `jetfire fuzz`."""
    run("fuzz")


def export_main() -> None:
    """Console script `jetfire-export`: the same function as `jetfire export`."""
    run("export")


def train_main() -> None:
    """Console script `jetfire-train`: the same function as `jetfire train`."""
    run("train")


if __name__ == "__main__":
    main()
