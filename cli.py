"""The command line: `jetfire COMMAND`, and a console script `jetfire-COMMAND` for some of them.

Only Typer is imported here: `--help` and completion answer at once, and so does what is refused:
options are checked before torch, Triton, NumPy and matplotlib load. A command is a function below
with `@app.command`; its console script is a function that calls `run` with the command's name,
named in pyproject.toml. `execute` is where every command and every error ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from jetfire import __version__
from jetfire.core import broken, files, terminal
from jetfire.core import options as o
from jetfire.core.errors import JetfireError, JetfireWarning, UsageError, nearest, refused, unknown

HELP = ["-h", "--help"]


def _show_version(asked: bool) -> None:
    """Print the versions of ours and of what compiles kernels, none of which is imported."""
    if not asked:
        return
    from importlib import metadata

    found = []
    for name in ("torch", "triton"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"jetfire {__version__} ({', '.join(found)}, Python {python})")
    raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_show_version, help="Show the versions."),
]


class _Command(TyperCommand):
    """A command that refuses empty words, and says so where an option's last word alone counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # nothing is run: words are being completed
            return super().parse_args(ctx, args)
        found: Any = self.make_parser(ctx).parse_args(args=list(args))
        values, _, given = found
        for param in dict.fromkeys(given):
            _refuse_empty(param, values.get(param.name))
            times = given.count(param)
            if times > 1 and not (getattr(param, "multiple", True) or param.is_flag):
                terminal.note(f"{param.opts[0]} is given {times} times: the last one counts")
        return super().parse_args(ctx, args)


def _refuse_empty(param: Any, value: Any) -> None:
    """Refuse a word without anything in it: a variable of a script that is not set, mostly.

    As a path it would be the current folder, as a name or a list of names the default.
    """
    texts = value if isinstance(value, list | tuple) else [value]
    for text in texts:
        if isinstance(text, str) and not text.strip() and param.name != "prompt":
            long = (name for name in param.opts if name.startswith("--"))
            name = next(long, param.metavar or param.name)
            raise UsageError(f"{name} {text!r}: expected a value")


class _Group(TyperGroup):
    """Commands by name; one that there is not is named with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            raise unknown(f"no command {args[0]!r}", args[0], self.commands)
        return super().resolve_command(ctx, args)


class _Verbs(TyperGroup):
    """A command with verbs, which runs itself where the first word is none of them.

    Attributes:
        what: what that first word is then, and the names that it may have.
    """

    what: tuple[str, o.Names]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        verbs = [name for name, command in self.commands.items() if not command.hidden]
        if not args or args[0] not in verbs:
            if args and not ctx.resilient_parsing:
                self._check(args[0], verbs)
            args = [_RUN, *args]
        return super().parse_args(ctx, args)

    def _check(self, word: str, verbs: Sequence[str]) -> None:
        """Refuse what is a verb misspelt, before its own words are taken for something else."""
        what, names = self.what
        known = [*names(), *verbs]
        if word not in known and nearest(word, known) in verbs:
            raise unknown(f"no {what} or verb {word!r}", word, known)


class _Training(_Verbs):
    what = "preset", o.PRESETS


class _Tuning(_Verbs):
    what = "op", o.OPS


class _Run(_Command):
    """A group's own command, whose usage does not show the name of one that nobody types."""

    def get_usage(self, ctx: Any) -> str:
        return super().get_usage(ctx).replace(f" {_RUN} ", " ")


_RUN = "run"
_VERBS = ("prepare", "study", "plot", "sample", "export", "bench", "tune")
app = typer.Typer(
    cls=_Group,
    add_completion=False,
    context_settings={"help_option_names": HELP},
    help="A workbench for low-precision transformer-training kernels.",
    epilog="Exit codes: 0 ok · 1 internal error · 2 usage · 3 wrong result · 4 performance "
    "regression · 5 no such device · 6 timeout · 130 interrupted.",
)
train = typer.Typer(cls=_Training, add_completion=False, help="Train GPT-2 in INT8, INT4 or BF16.")
tune = typer.Typer(
    cls=_Tuning, add_completion=False,
    help="Search tile sizes on this device, and list what was found.",
)  # fmt: skip


@app.callback()
def _root(version: Version = False) -> None:
    """A workbench for low-precision transformer-training kernels."""


def _strict(asked: bool) -> None:
    if asked:
        os.environ["JETFIRE_STRICT_PROFILE"] = "1"


@app.command(cls=_Command)
def bench(
    op: o.Ops = None,
    m: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help=f"Rows: {o.SIZE}. (4096; on the CPU 512)"),
    ] = None,
    n: Annotated[list[str] | None, typer.Option(metavar="SIZES", help="Columns (as m).")] = None,
    k: Annotated[list[str] | None, typer.Option(metavar="SIZES", help="Inner size (as m).")] = None,
    workload: o.Workload = None, block: o.Blocks = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--mode"), metavar="fwd|bwd", help="Direction (fwd).",
                     autocompletion=o.completing(("fwd", "bwd"))),
    ] = None,
    set_: o.Setting = None, kernel: o.Kernels = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=V", help="Override a config field.")
    ] = None,
    peer: o.Peers = None, data: o.Data = "normal", device: o.Device = "auto",
    format_: o.Format = None, output: o.Rows = None, append: o.Append = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the rows: .png, .svg or .pdf.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=o.completing(o.SUITES),
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
    seed: o.Seed = 0,
    rounds: Annotated[
        int | None,
        typer.Option(parser=o.integer("--rounds", 1), metavar="INT",
                     help="Samples a row (20; on the CPU 7)."),
    ] = None,
    remeasure_peaks: Annotated[
        bool, typer.Option("--remeasure-peaks", help="Measure the device's peaks anew.")
    ] = False,
    strict_profile: o.StrictProfile = False, debug: o.Debug = False, version: Version = False,
) -> None:  # fmt: skip
    """Check every kernel of an op, then time it against its peers."""
    from jetfire.bench import command

    _strict(strict_profile)
    if list_:
        print(command.listing())
        return
    asked = command.BenchOptions(
        ops=op or (), m=o.joined(m), n=o.joined(n), k=o.joined(k), workload=workload,
        block=block or (), mode=tuple(mode or ("fwd",)), settings=set_ or (), kernels=kernel or (),
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


@app.command(cls=_Command)
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
    debug: o.Debug = False,
) -> None:
    """Match the rows of two results files and show what got faster and slower."""
    from jetfire.bench.compare import compare as compare_files

    compare_files(before, after, fail_on_regression, config=not ignore_config)


@app.command(name="list", cls=_Command)
def list_command(debug: o.Debug = False) -> None:
    """List ops, kernels, workloads and peers."""
    from jetfire.bench import command

    print(command.listing())


def _request(
    op: list[str] | None, m: list[str] | None, n: list[str] | None, k: list[str] | None,
    workload: str | None, block: list[str] | None, mode: str, settings: list[str] | None,
    kernels: Sequence[str],
) -> Any:  # fmt: skip
    """The shape options that several commands share, checked; no torch is loaded."""
    from jetfire.bench import command
    from jetfire.measure import plan

    asked = command.BenchOptions(
        ops=op or (), m=o.joined(m), n=o.joined(n), k=o.joined(k), workload=workload,
        block=block or (), mode=(mode,), settings=settings or (),
    )  # fmt: skip
    request = command.request_of(asked)
    plan.check_kernels(request.ops, kernels)
    plan.check(request)
    return request


def _cases(request: Any, default_m: int) -> Any:
    """The problems of a request; those of one size where it names none."""
    from jetfire.measure import plan

    if request.workload is None and "m" not in request.sizes:
        request = dataclasses.replace(request, sizes={**request.sizes, "m": [default_m]})
    return plan.cases(request, terminal.note)


@tune.command(_RUN, cls=_Run, hidden=True)
def _tune(
    op: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP...", autocompletion=o.completing(o.OPS, ("show",)),
            help="Ops by name, or [b]all[/b]; or [b]show[/b] [OP...]: list the profiles.",
        ),
    ] = None,
    m: o.Sizes = None, n: o.Sizes = None, k: o.Sizes = None, workload: o.Workload = None,
    block: o.Blocks = None, mode: o.Mode = "fwd", set_: o.Setting = None, kernel: o.Kernels = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every problem that profiles are shipped for.")
    ] = False,
    unseen: Annotated[
        int | None,
        typer.Option(parser=o.integer("--unseen", 1), metavar="N", help="Tune N random shapes that "
                     "no profile is for, keep nothing, and say how far off the profiles are."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="--unseen: its rows.")
    ] = None,
    missing: o.Missing = False, shard: o.Shard = None, trials: o.Trials = None,
    budget: o.Budget = "10m",
    effort: Annotated[
        str,
        typer.Option(metavar="NAME", help="quick (40 configs) or full (250).",
                     autocompletion=o.completing(o.EFFORTS)),
    ] = "quick",
    strategy: o.Strategy = "tpe",
    objective: Annotated[
        str,
        typer.Option(metavar="NAME", help="time, energy or both.",
                     autocompletion=o.completing(o.OBJECTIVES)),
    ] = "time",
    space: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=V,...", help="Search only these values of a config field."),
    ] = None,
    peer: o.Peers = None,
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
    data: o.Data = "normal", device: o.Device = "auto", seed: o.Seed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be searched.")
    ] = False,
    debug: o.Debug = False, version: Version = False,
) -> None:  # fmt: skip
    """Search tile sizes on this device; the best are kept as a profile that bench and nn load.

    Every trial is durable: after an interruption the same command goes on where it was.
    """
    from jetfire.measure import plan
    from jetfire.tuner import options

    if "show" in (op or ()):
        raise UsageError(f"tune {' '.join(op or ())}: expected show first: jetfire tune show OP")
    peers = plan.parse_list(peer or [])
    asked = options.TuneOptions(
        cases=(), kernels=plan.parse_list(kernel or []), device=device,
        budget_s=o.duration("--budget", budget), trials=trials, effort=effort,
        strategy=strategy, objective=objective, seed=seed, data=data,
        space=plan.parse_settings("--space", space or []), storage=storage,
        trial_s=o.duration("--trial-timeout", trial_timeout),
        peers=[] if peers == ["none"] else (peers or None), report=report, record=record,
        missing=missing, shard=o.shard(shard), dry_run=dry_run, unseen=unseen or 0, output=output,
        keep=not unseen,
    )  # fmt: skip
    options.check(asked)
    if output is not None and not unseen:
        raise UsageError(f"-o {output}: expected --unseen N, whose rows it holds")
    if replay is not None:
        if op:
            raise UsageError(f"--replay {replay}: it says itself of which op it is: leave out OP")
        from jetfire.tuner import command

        print(command.replay(replay, strategy, trials, seed))
        return
    shipped = all_ or unseen
    if shipped:
        other = all_ or block or kernel or missing or shard or space
        if m or n or k or workload or set_ or mode != "fwd" or (unseen and other):
            what = "--unseen: only OP narrows" if unseen else "--all: only OP and --block narrow"
            raise UsageError(f"{what} its problems")
    request = _request(op or (["all"] if shipped else None), m, n, k, workload, block, mode, set_,
                       asked.kernels)  # fmt: skip
    from jetfire.core.device import Device
    from jetfire.tuner import command

    if shipped:
        from jetfire.tuner.shipped import cases as shipped_cases

        cases = shipped_cases(request.ops, request.blocks or ())
        if not cases:
            names = ", ".join(request.ops)
            raise UsageError(f"{names}: has nothing to tune: it launches the kernels of other ops")
    else:
        cases = _cases(request, 4096 if Device.parse(device).kind == "cuda" else 256)
    command.tune(dataclasses.replace(asked, cases=cases))


@tune.command(cls=_Command)
def show(
    op: o.Ops = None, m: o.Sizes = None, n: o.Sizes = None, k: o.Sizes = None,
    workload: o.Workload = None, block: o.Blocks = None, set_: o.Setting = None,
    kernel: o.Kernels = None, device: o.Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """List the profiles: of all ops and devices, or of what the options leave."""
    from jetfire.core import device as devices
    from jetfire.measure import plan
    from jetfire.tuner import show as profiles

    devices.check_name(device)
    kernels = plan.parse_list(kernel or [])
    request = _request(op or ["all"], m, n, k, workload, block, "fwd", set_, kernels)
    where = None if device == "auto" else devices.Device.parse(device)
    profiles.show(plan.parse_list(op or []), where, as_json, profiles.Wanted.of(request, kernels))


@app.command(cls=_Command)
def fuzz(
    op: o.Ops = None, kernel: o.Kernels = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="KERNEL", help="Compare the kernels with this one.",
                     autocompletion=o.complete_kernel),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            parser=o.integer("--examples", 1), metavar="INT",
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
            parser=o.integer("--largest", 1), metavar="INT",
            help="Largest size drawn (2048; on the CPU 400, interpreted 130).",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            parser=o.integer("--jobs", 1), metavar="INT",
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
            parser=o.choice("--sanitizer", lambda: o.SANITIZERS), metavar="TOOL",
            autocompletion=o.completing(o.SANITIZERS),
            help="Under compute-sanitizer: memcheck, racecheck, initcheck or synccheck.",
        ),
    ] = None,
    device: o.Device = "auto",
    interpreter: Annotated[
        bool, typer.Option("--interpreter", help="Triton kernels on the CPU, interpreted.")
    ] = False,
    format_: Annotated[
        str,
        typer.Option("--format", parser=o.choice("--format", lambda: ("table", "json")),
                     metavar="NAME", help="table or json.",
                     autocompletion=o.completing(("table", "json"))),
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save as JSON.")
    ] = None,
    seed: o.Seed = 0, debug: o.Debug = False, version: Version = False,
) -> None:  # fmt: skip
    """Random problems, configs, values and layouts against the reference; failures are saved."""
    from jetfire.core import device as devices
    from jetfire.measure import plan

    devices.check_name(device)
    chosen = [found.name for found in plan.choose_ops(op or ["all"])]
    kernels = plan.parse_list(kernel or [])
    if not load:  # or it may bring them
        plan.check_kernels(chosen, [*kernels, *([against] if against else [])])
    budget_s = None if budget is None else o.duration("--budget", budget)
    if interpreter and device not in ("auto", "cpu"):
        raise UsageError(f"--interpreter --device {device}: expected cpu, where it interprets")
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
    from jetfire.fuzz import command

    if reproduce is not None:
        command.reproduce(reproduce, device, load or (), sanitizer)
        return
    command.fuzz(
        command.FuzzOptions(
            ops=chosen if op else (), kernels=kernels, against=against,
            examples=examples, largest=largest, seed=seed, budget_s=budget_s, jobs=jobs,
            device=device, load=load or (), sanitizer=sanitizer, format=format_, output=output,
        )
    )  # fmt: skip


@app.command(cls=_Command)
def export(
    op: o.Ops = None, m: o.Sizes = None, n: o.Sizes = None, k: o.Sizes = None,
    workload: o.Workload = None, block: o.Blocks = None, mode: o.Mode = "fwd",
    set_: o.Setting = None,
    kernel: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A GPU kernel (the fastest tuned one).",
                     autocompletion=o.complete_kernel),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cuda (source), cubin (compiled code in C), torch (a "
                     "PyTorch extension), wheel, or hf (Hugging Face's kernels); cuda for a CUDA "
                     "kernel, cubin for a Triton one.", autocompletion=o.completing(o.TARGETS)),
    ] = None,
    arch: Annotated[
        str,
        typer.Option(metavar="SM", help="Architecture, e.g. 9.0a.",
                     autocompletion=o.completing(o.ARCHITECTURES)),
    ] = "9.0a",
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Of function, library and package "
                     "(jetfire_OP)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="A new or empty folder.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Build and test what was written.")
    ] = True,
    debug: o.Debug = False, version: Version = False,
) -> None:  # fmt: skip
    """Write a tuned kernel that needs neither Jetfire nor its tools; build and test it."""
    from jetfire.core.device import capability_of
    from jetfire.export import options
    from jetfire.measure import plan

    if output is None:
        raise UsageError("export: expected -o DIR")
    asked = options.ExportOptions(
        cases=(),
        kernel=kernel,
        target=target,
        capability=capability_of(arch),
        folder=output,
        name=name,
        check=check,
    )
    chosen = plan.choose_ops(op or [])
    if len(chosen) > 1:
        raise UsageError(f"export takes one op, given {', '.join(one.name for one in chosen)}")
    options.check(asked)
    has_blocks = "block" in chosen[0].Problem.__dataclass_fields__
    blocks = block or (["32"] if has_blocks else None)
    request = _request(op, m, n, k, workload, blocks, mode, set_, [kernel] if kernel else [])
    cases = _cases(request, 4096)
    from jetfire.export import command

    command.run(dataclasses.replace(asked, cases=cases))


@train.command(
    _RUN,
    cls=_Run,
    hidden=True,
    epilog="Other verbs, each with --help: jetfire train prepare (text to tokens), study (recipes "
    "× seeds, paired), plot (loss curves), sample (text of a run's model), export (weights for "
    "transformers), bench (a step against BF16), tune (the kernels of a step).",
)
def _train(
    preset: Annotated[
        str | None,
        typer.Argument(metavar="PRESET", help="tiny, shakespeare-char, gpt2-124m, -350m, -774m, "
                       "-1558m.", autocompletion=o.completing(o.PRESETS, _VERBS)),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="bf16, int8, int8-block32, -block64, -block128, int4-hq-lss, int4-hq, int4-naive"
            " (int8).",
            autocompletion=o.completing(o.RECIPES),
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="Any other setting: batch, rate, …"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(parser=o.integer("--steps", 1), metavar="INT", help="Optimizer steps."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="python, shakespeare, shakespeare-char, "
                     "openwebtext; a prepared folder; a text file.",
                     autocompletion=o.completing(o.CORPORA)),
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
        typer.Option(parser=o.integer("--sample", 0), metavar="INT", help="Tokens to write at the "
                     "end."),
    ] = 0,
    strict_profile: o.StrictProfile = False, device: o.Device = "auto",
    seed: Annotated[
        int | None, typer.Option(parser=o.integer("--seed", 0), metavar="INT", help="Seed (0).")
    ] = None,
    debug: o.Debug = False, version: Version = False,
) -> None:  # fmt: skip
    """Train GPT-2: `jetfire-train PRESET`. Ctrl-C writes a checkpoint; --resume goes on from it."""
    from jetfire.gpt2 import options

    _strict(strict_profile)
    asked = options.TrainOptions(
        preset=preset, recipe=recipe, settings=set_ or (), steps=steps, data=data,
        output=output, resume=resume, init=init, device=device, seed=seed, sample=sample,
    )  # fmt: skip
    try:
        options.check(asked)
    except UsageError as error:
        if os.environ.get("RANK", "0") != "0":  # of torchrun's processes the first one says it
            raise typer.Exit(error.exit_code) from None
        raise
    from jetfire.gpt2 import command

    command.train(asked)


@train.command(cls=_Command)
def prepare(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME|PATH...", help="python, shakespeare, shakespeare-char, "
                       "openwebtext; text files and folders of them.",
                       autocompletion=o.completing(o.CORPORA)),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="byte, char or gpt2 (what that text usually gets).",
                     autocompletion=o.completing(o.TOKENIZERS)),
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
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Turn text into tokens that training maps into memory; prints their folder."""
    from jetfire.gpt2.prepare import run as prepare_text

    prepare_text(names, tokenizer, vocabulary, from_, output)


@train.command(
    name="study",
    cls=_Command,
    epilog="Example: jetfire train study gpt2-124m --recipe bf16,int8 --seed 0,1,2,3 --steps 5000 "
    "--set batch=16,accumulate=1 --data tokens -o runs/study",
)
def _study(
    preset: o.Preset,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Of the runs, FOLDER/RECIPE-seedN: "
                     "begun, gone on with, and compared."),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--recipe"), metavar="NAME,...",
                     help="As for training (bf16,int8).", autocompletion=o.completing(o.RECIPES)),
    ] = None,
    seed: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--seed"), metavar="INT,...", help="Seeds of each (0)."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(parser=o.integer("--steps", 1), metavar="INT", help="Optimizer steps."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="As for training.",
                     autocompletion=o.completing(o.CORPORA)),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="As for training, of all runs "
                     "(order=shuffled)."),
    ] = None,
    base: Annotated[
        str,
        typer.Option(metavar="NAME", help="The recipe that others are compared with.",
                     autocompletion=o.completing(o.RECIPES)),
    ] = "bf16",
    window: Annotated[
        str | None,
        typer.Option(metavar="FIRST:LAST", help="The steps whose mean training loss counts (the "
                     "last fifth)."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For the result, .json (FOLDER/study.json)."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(parser=o.integer("--jobs", 1), metavar="INT", help="Runs at a time (one on "
                     "each GPU)."),
    ] = None,
    strict_profile: o.StrictProfile = False, device: o.Device = "auto", debug: o.Debug = False,
) -> None:  # fmt: skip
    """Train recipes × seeds; compare losses, paired by seed. The same command again goes on."""
    from jetfire.gpt2 import study
    from jetfire.measure import plan

    number = o.integer("--seed", 0)
    seeds = [number(text) for text in plan.parse_list(seed or ["0"])]
    asked = study.StudyOptions(
        preset=preset, output=output, recipes=plan.parse_list(recipe or ["bf16,int8"]),
        seeds=list(dict.fromkeys(seeds)), settings=set_ or (), steps=steps, data=data,
        device=device, jobs=jobs, base=base, window=window, record=record,
        strict_profile=strict_profile,
    )  # fmt: skip
    study.check(asked)
    study.study(asked)


@train.command(cls=_Command)
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders or logs.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help=".png, .svg, .pdf or .html.")
    ],
    debug: o.Debug = False,
) -> None:
    """Draw loss curves of runs over each other."""
    from jetfire.gpt2.curves import plot as draw

    draw(runs, output)


@train.command(cls=_Command)
def sample(
    run: o.Run,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="What the text begins with (a new document).")
    ] = "",
    tokens: Annotated[
        int,
        typer.Option(parser=o.integer("--tokens", 1), metavar="INT", help="How many to write."),
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option(parser=o.number("--temperature"), metavar="T", help="0 takes the likeliest "
                     "token."),
    ] = 0.8,
    top_k: Annotated[
        int,
        typer.Option(parser=o.integer("--top-k", 1), metavar="INT", help="Draw among so many of "
                     "the likeliest."),
    ] = 200,
    device: o.Device = "auto", seed: o.Seed = 0, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Write text with a run's model."""
    from jetfire.core import device as devices
    from jetfire.gpt2.options import no_run

    devices.check_name(device)
    if not run.is_dir():
        raise no_run(run)
    from jetfire.gpt2 import command

    command.sample(run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed,
                   device=device)  # fmt: skip


@train.command(name="export", cls=_Command)
def export_weights(
    run: o.Run,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="For the weights.")
    ],
    debug: o.Debug = False,
) -> None:
    """Write a run's weights as transformers' GPT-2 reads them."""
    from jetfire.gpt2.options import no_run

    if not run.is_dir():
        raise no_run(run)
    from jetfire.gpt2 import command

    command.export(run, output)


@train.command(name="bench", cls=_Command)
def _bench_training(
    case: Annotated[
        str,
        typer.Argument(metavar="CASE", help="block, wide (4 layers of width 4096), a preset, "
                       "hf:NAME, a transformers config.json, or MODULE:FUNCTION.",
                       autocompletion=o.completing(o.CASES, o.MODELS)),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--recipe"), metavar="NAME,...",
                     help="As for training, but bf16 (the INT8 ones).",
                     autocompletion=o.completing(o.MEASURED)),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="layers, heads, width, batch, context, "
                     "vocabulary, accumulate; of hf: kv_heads, hidden and run too."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--peer"), metavar="NAME",
                     help="Only these beside eager: compile, fp8_tensorwise, fp8_rowwise, …",
                     autocompletion=o.completing(o.STEP_PEERS)),
    ] = None,
    device: o.Device = "auto", format_: o.Format = None, output: o.Rows = None,
    append: o.Append = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be measured.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=o.integer("--rounds", 1), metavar="INT", help="Samples a row (12; on the CPU 5)."
        ),
    ] = None,
    strict_profile: o.StrictProfile = False, seed: o.Seed = 0, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Time training steps against BF16 eager and torch.compile; measure their memory."""
    from jetfire.bench import command
    from jetfire.core import device as devices
    from jetfire.gpt2 import cases, settings
    from jetfire.models import cases as models
    from jetfire.models import sources

    _strict(strict_profile)
    devices.check_name(device)
    asked = command.BenchOptions(
        ops=(), settings=set_ or (), peers=peer or (), device=device, format=format_,
        output=output, append=append, dry_run=dry_run, rounds=rounds, seed=seed, debug=debug,
    )  # fmt: skip
    command.file_format(asked)
    if sources.named_here(case):
        models.check(case, asked.settings, recipe or (), asked.peers)
        from jetfire.models import bench as others

        others.bench(asked, case, recipe or ())
        return
    cases.problem_of(case, settings.split(asked.settings))
    cases.recipes_of(recipe or ())
    cases.peers_of(asked.peers)
    from jetfire.gpt2 import bench as training

    training.bench(asked, case, recipe or ())


@train.command(name="tune", cls=_Command)
def _tune_training(
    preset: o.Preset,
    recipe: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--recipe"), metavar="NAME,...",
                     help="As for training, but bf16 (int8).",
                     autocompletion=o.completing(o.MEASURED)),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=V,...", help="As for training.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="As for training; its vocabulary alone matters.",
                     autocompletion=o.completing(o.CORPORA)),
    ] = None,
    budget: o.Budget = "10m", trials: o.Trials = None, missing: o.Missing = False,
    shard: o.Shard = None, strategy: o.Strategy = "tpe", peer: o.Peers = None,
    device: o.Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be searched.")
    ] = False,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Tune every kernel that a training step calls, for its shapes, as `jetfire tune` does."""
    from jetfire.gpt2.cases import runs_of
    from jetfire.measure import plan
    from jetfire.tuner import options

    peers = plan.parse_list(peer or [])
    asked = options.TuneOptions(
        cases=(), kernels=(), device=device, budget_s=o.duration("--budget", budget), trials=trials,
        strategy=strategy, peers=[] if peers == ["none"] else (peers or None), missing=missing,
        shard=o.shard(shard), dry_run=dry_run,
    )  # fmt: skip
    options.check(asked)
    runs = runs_of(preset, plan.parse_list(recipe or []), set_ or (), data)
    from jetfire.gpt2 import tuning

    tuning.run(asked, runs)


@app.command(
    cls=_Command,
    epilog="Example: jetfire advise hf:gpt2-350m --set batch=16 --format json",
)
def advise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="hf:NAME, a transformers config.json, MODULE:FUNCTION (which is called), or a "
            "preset.",
            autocompletion=o.completing(o.MODELS, o.PRESETS),
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            parser=o.some("--recipe"),
            metavar="NAME,...",
            help="Blocks to compare (int8-block32, -block64, -block128).",
            autocompletion=o.completing(o.ADVISED),
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="Sizes, as in train bench."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Prepared tokens for the SQNR (random ones)."),
    ] = None,
    sqnr: Annotated[
        bool, typer.Option("--sqnr/--no-sqnr", help="Compute the SQNR of the products.")
    ] = True,
    least: Annotated[
        float,
        typer.Option(
            "--least-sqnr",
            parser=o.number("--least-sqnr"),
            metavar="DB",
            help="Keep a layer of which a product has less: 20 dB is an error of a tenth.",
        ),
    ] = 20.0,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="table, json or csv.",
            autocompletion=o.completing(("table", "json", "csv")),
        ),
    ] = "table",
    device: o.Device = "auto",
    seed: o.Seed = 0,
    debug: o.Debug = False,
) -> None:
    """Say by layer what INT8 takes and loses beside BF16 and FP8, and what to convert."""
    from jetfire.measure import plan
    from jetfire.models import options

    asked = options.AdviseOptions(
        model=model,
        settings=set_ or (),
        recipes=list(dict.fromkeys(plan.parse_list(recipe or []))) or options.RECIPES,
        data=data,
        sqnr=sqnr,
        least=least,
        format=format_,
        device=device,
        seed=seed,
        debug=debug,
    )
    options.check(asked)
    from jetfire.models.advise import advise as advise_on

    advise_on(asked)


@app.command(cls=_Command)
def audit(
    op: o.Ops = None, m: o.Sizes = None, n: o.Sizes = None, k: o.Sizes = None,
    block: o.Blocks = None, mode: o.Mode = "fwd", set_: o.Setting = None, kernel: o.Kernels = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--arch"), metavar="SM,...",
                     help="Architectures (80,89,90,100).",
                     autocompletion=o.completing(o.ARCHITECTURES)),
    ] = None,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Compile GPU kernels for any architecture; show registers, spills, instructions."""
    from jetfire.core.device import capability_of, target_device
    from jetfire.measure import plan

    names = plan.parse_list(kernel or [])
    wanted = plan.parse_list(arch or ["80,89,90,100"])
    targets = [target_device(capability_of(text)) for text in wanted]
    request = _request(op or ["all"], m, n, k, None, block, mode, set_, names)
    cases = _cases(request, 4096)
    from jetfire.bench import audit as auditor

    auditor.run(cases, names, targets)


@app.command(cls=_Command)
def completion(
    shell: Annotated[
        str | None,
        typer.Argument(metavar="SHELL", help="bash, zsh, fish, powershell or pwsh ($SHELL).",
                       autocompletion=o.completing(o.SHELLS)),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Have the shell's start-up files load it.")
    ] = False,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Print what completes `jetfire` and each `jetfire-X`: eval "$(jetfire completion bash)"."""
    from typer.completion import get_completion_script
    from typer.completion import install as install_script

    name = Path(os.environ.get("SHELL", "")).name if shell is None else shell
    if name not in o.SHELLS:
        raise unknown(f"no completion for the shell {name!r}", name, o.SHELLS)
    for program in ("jetfire", *(f"jetfire-{command}" for command in SCRIPTS)):
        variable = _completion_variable(program)
        if install:
            _, file = install_script(shell=name, prog_name=program, complete_var=variable)
            print(file)
        else:
            script = get_completion_script(prog_name=program, complete_var=variable, shell=name)
            print(script, end="\n\n")


@app.command(cls=_Command, epilog="Example: jetfire report docs/results/h200.json --check")
def report(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="Results of `jetfire bench`.")],
    readme: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md",
            help="Put the short tables between its two markers, too; for docs/results/FILE.json "
            "the README.md above.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a file is stale.")
    ] = False,
    debug: o.Debug = False,
) -> None:
    """Write the page, the plots and the README's tables of a results file."""
    from jetfire.gpt2.finished import addition
    from jetfire.report import documents

    stale = documents.report(file, readme or documents.readme_of(file), check, addition)
    for path in stale:
        print(f"{path}: {'stale' if check else 'written'}")
    if stale and check:
        raise typer.Exit(1)


app.add_typer(tune, name="tune")
app.add_typer(train, name="train")


# From words to an exit code.

SCRIPTS = ("bench", "tune", "fuzz", "export", "train")  # pyproject.toml has a jetfire-X for each


def _completion_variable(program: str) -> str:
    """Return what the shell sets in the environment to ask a program for completions."""
    return f"_{program}_COMPLETE".replace("-", "_").upper()


def _parse_error(error: Any) -> str:
    """Typer's usage error as one line with what was given and what is accepted."""
    known: Any = getattr(getattr(error, "ctx", None), "command", None)
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and known is not None:
        names = [name for p in known.params for name in p.opts if name.startswith("--")]
        return str(unknown(f"no option {option}", str(option), names))
    text = " ".join(str(error.format_message()).split())
    if known is not None and ("unexpected extra" in text or text.startswith("Missing")):
        usage = " ".join(known.get_usage(error.ctx).removeprefix("Usage: ").split())
        return f"{text.rstrip('.')}: expected {usage}"
    if hasattr(known, "commands"):
        given = f"{text.rstrip('.')}: " if text else ""
        return f"{given}expected one of {', '.join(known.commands)}"
    return text


def _is_usage_error(error: BaseException) -> bool:
    """Typer's own, whose classes moved between versions."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _fail(message: str, code: int) -> int:
    terminal.note(message)
    return code


def _failed(error: Exception) -> int:
    """Say in a line what went wrong, and return the exit code that README.md documents for it."""
    if not isinstance(error, JetfireError):
        error = broken.explained(error) or error
    if isinstance(error, JetfireError):
        code = _fail(str(error), error.exit_code)
        terminal.details(error.details)
        return code
    if _is_usage_error(error):
        return _fail(_parse_error(error), 2)
    if isinstance(error, OSError) and error.strerror:  # no disk, no rights, no such program
        return _fail(refused(error), 2)
    if isinstance(error, RecursionError) and "JSON" in str(error):
        return _fail("a JSON file is nested too deeply to be one of ours", 2)
    # torch's and CuPy's own are of no common type, and torch has one of no type.
    full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if full or "can't allocate memory" in str(error):
        return _fail("out of memory: expected smaller sizes", 2)
    return _fail(f"internal error: {type(error).__name__}: {error} (--debug shows more)", 1)


def _warn_in_a_line() -> None:
    """Have our own warnings printed as our errors are."""
    usual = warnings.showwarning

    def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
        if issubclass(category, JetfireWarning):
            terminal.note(str(message))
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


@contextlib.contextmanager
def _caches() -> Iterator[None]:
    """Have what is compiled kept in a folder for this run alone, where its own cannot be written.

    Triton and CuPy fail without their caches, and so would kernels, as if they were wrong. Tokens,
    which are to be kept, are looked for and refused where they would be.
    """
    missing = _unwritable()
    if not missing:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="jetfire-", ignore_cleanup_errors=True) as folder:
        replaced = dict.fromkeys(missing, folder)
        if "JETFIRE_CACHE" in missing and "JETFIRE_TOKENS" not in os.environ:
            replaced["JETFIRE_TOKENS"] = str(files.cache())
        os.environ |= replaced
        try:
            yield
        finally:
            for name in replaced:
                del os.environ[name]


def _unwritable() -> list[str]:
    """Return the variables of caches whose usual folders cannot be written."""
    found = []
    if not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
        found = [name for name in _AT_HOME if name not in os.environ]
    if not os.environ.get("JETFIRE_CACHE") and not _holds_files(files.cache()):
        found.append("JETFIRE_CACHE")
    return found


def _holds_files(folder: Path) -> bool:
    """Say whether a folder can hold files, or be made, by making one that is gone again.

    To root `os.access` grants /proc too.
    """
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".jetfire-", dir=place):
            return True
    except OSError:
        return False


_AT_HOME = ("TRITON_HOME", "CUPY_CACHE_DIR", "MPLCONFIGDIR")  # caches of others, in the home


@cache
def _commands() -> Any:
    """Return all commands, as Typer makes them of the functions above."""
    return typer.main.get_command(app)


def execute(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run `jetfire` or one of its commands and return the exit code; every error ends here."""
    _share_cores()
    words = list(sys.argv[1:] if arguments is None else arguments)
    group = _commands()
    target = group if command is None else group.commands[command]
    name = "jetfire" if command is None else f"jetfire-{command}"
    if _completion_variable(name) in os.environ:
        from typer.completion import completion_init

        completion_init()
    elif command is None and not words:
        words = ["--help"]
    with terminal.streams(), _caches():
        try:
            with warnings.catch_warnings():
                _warn_in_a_line()
                code = target.main(
                    args=words, prog_name=name, standalone_mode=False, help_option_names=HELP
                )
            sys.stdout.flush()
            if code == 130:  # some versions of Typer turn Ctrl-C into a result
                raise KeyboardInterrupt
            return code if isinstance(code, int) else 0
        except KeyboardInterrupt:
            return _fail("interrupted", 130)
        except Exception as error:
            if type(error).__name__ == "Abort":  # Typer's name for Ctrl-C
                return _fail("interrupted", 130)
            if "--debug" in words:
                traceback.print_exc()
            return _failed(error)


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
