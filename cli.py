"""The command line: `jetfire COMMAND`, and a console script `jetfire-COMMAND` for some of them.

Only Typer is imported here: `--help` answers at once, and torch, Triton, NumPy and matplotlib load
when a command needs them. A command is a function below with `@app.command`; its console script is
a function that calls `run` with the command's name, named in pyproject.toml.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jetfire.ops.errors import JetfireError, UsageError

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
            return int(text)
        except ValueError:
            raise UsageError(f"{option} {text}: expected an integer") from None

    return parse


Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback where something fails.")]
Ops = Annotated[
    list[str] | None, typer.Argument(metavar="OP...", help="Ops by name, or [b]all[/b].")
]
Size = "a size, a list 512,1024 or a sweep 1024:8192:1024"


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
        str, typer.Option(metavar="NAME", help="normal, outlier, heavy or gradient.")
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
            "gemm, elementwise.",
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
    debug: Debug = False,
) -> None:
    """Check every kernel of an op, then time it against its peers."""
    from jetfire.bench import command

    if list_:
        print(command.listing())
        return
    command.bench(
        command.Asked(
            ops=op or (), m=m, n=n, k=k, workload=workload, block=block or (),
            mode=tuple(mode or ("fwd",)), settings=set_ or (), kernels=kernel or (),
            config=config or (), peers=peer or (), data=data, device=device, format=format_,
            output=output, append=append, plot=plot, dry_run=dry_run, seed=seed, rounds=rounds,
            remeasure_peaks=remeasure_peaks, suite=suite, debug=debug,
        )
    )  # fmt: skip


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Results to compare with.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Results to judge.")],
    fail_on_regression: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Exit 4 if a kernel is slower by more, e.g. 5%."),
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


def execute(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run `jetfire` or one of its commands and return the exit code; every error ends here."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    group: Any = typer.main.get_command(app)
    target = group if command is None else group.commands[command]
    name = "jetfire" if command is None else f"jetfire-{command}"
    if command is None and not words:
        words = ["--help"]
    try:
        code = target.main(args=words, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
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


if __name__ == "__main__":
    main()
