"""The command line: `jetfire COMMAND`, and a console script `jetfire-COMMAND` for some of them.

Of libraries only Typer is imported here, so that `--help` and completion answer at once. Options
are refused before torch, Triton, NumPy or matplotlib load. A command is a function in
`commands`; its console script is a function that calls `run` with the command's name, named in
pyproject.toml. `execute` is where every command and every error ends.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from jetfire.commands import (
    advise,
    audit,
    bench,
    compare,
    completion,
    doctor,
    export,
    fuzz,
    history,
    new,
    report,
    train,
    tune,
)
from jetfire.commands import list as list_
from jetfire.commands import options as o
from jetfire.commands.base import Commands, add
from jetfire.commands.completion import completion_variable
from jetfire.core import broken, environment, terminal
from jetfire.core.errors import JetfireError, JetfireWarning, refused, unknown

HELP = ["-h", "--help"]

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    context_settings={"help_option_names": HELP},
    help="A workbench for low-precision transformer-training kernels.",
    epilog="Exit codes: 0 ok · 1 internal error · 2 usage · 3 wrong result · 4 performance "
    "regression · 5 no such device · 6 timeout · 130 interrupted.",
)
add(app, bench, compare, history, list_, fuzz, export)
add(app, advise, audit, report, new, completion, doctor)
app.add_typer(tune.app, name="tune")
app.add_typer(train.app, name="train")


@app.callback()
def _root(version: o.Version = False) -> None:
    """A workbench for low-precision transformer-training kernels."""


# From words to an exit code.


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


def _fail(message: str, code: int, details: str = "") -> int:
    error = {"message": terminal.line(message), "exit_code": code}
    terminal.manner.document["error"] = error | ({"details": details} if details else {})
    terminal.error(message)
    terminal.details(details)
    return code


def _failed(error: Exception) -> int:
    """Say in a line what went wrong, and return the exit code that docs/commands.md has for it."""
    if not isinstance(error, JetfireError):
        error = broken.explained(error) or error
    if isinstance(error, JetfireError):
        return _fail(str(error), error.exit_code, error.details)
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


@cache
def _commands() -> Any:
    """Return all commands, as Typer makes them of their modules."""
    return typer.main.get_command(app)


def execute(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run `jetfire` or one of its commands and return the exit code; every error ends here."""
    environment.share_cores()
    words = list(sys.argv[1:] if arguments is None else arguments)
    group = _commands()
    target = group if command is None else group.commands[command]
    name = "jetfire" if command is None else f"jetfire-{command}"
    if completion_variable(name) in os.environ:
        from typer.completion import completion_init

        completion_init()
    elif command is None and not words:
        words = ["--help"]
    with terminal.streams(), environment.caches():
        with terminal.speaking(words) as manner:
            code = _outcome(target, words, name)
        if manner.json and environment.leads():
            try:
                terminal.print_document(manner.document)
            except JetfireError as error:  # stdout cannot be written
                code = _failed(error)
        return code


def _outcome(target: Any, words: list[str], name: str) -> int:
    """Run a command, and return the exit code."""
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
