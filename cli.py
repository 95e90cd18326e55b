"""The command line: `jetfire COMMAND`, and a console script `jetfire-COMMAND` for some of them.

Only Typer is imported here: `--help` and completion answer at once, and so does what is refused:
options are checked before torch, Triton, NumPy and matplotlib load. A command is a function in
`commands`; its console script is a function that calls `run` with the command's name, named in
pyproject.toml. `execute` is where every command and every error ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer

from jetfire.commands import (
    advise,
    audit,
    bench,
    compare,
    completion,
    export,
    fuzz,
    train,
    tune,
)
from jetfire.commands import list as list_
from jetfire.commands import options as o
from jetfire.commands.base import Commands, add
from jetfire.commands.completion import completion_variable
from jetfire.core import broken, files, terminal
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
add(app, bench, compare, list_, fuzz, export, advise, audit, completion)
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
    if completion_variable(name) in os.environ:
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
