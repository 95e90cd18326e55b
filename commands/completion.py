"""`jetfire completion`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from jetfire.commands import options as o
from jetfire.core import terminal
from jetfire.core.errors import unknown

EPILOG = 'Example: eval "$(jetfire completion bash)"'
SCRIPTS = ("bench", "tune", "fuzz", "export", "train")  # pyproject.toml has a jetfire-X for each


def completion_variable(program: str) -> str:
    """Return what the shell sets in the environment to ask a program for completions."""
    return f"_{program}_COMPLETE".replace("-", "_").upper()


def run(
    shell: Annotated[
        o.Text, o.argument("SHELL", "bash, zsh, fish, powershell or pwsh ($SHELL).", o.SHELLS)
    ] = None,
    install: Annotated[
        bool, o.flag("--install", "Have the shell's start-up files load it.")
    ] = False,
    debug: o.Debug = False,
) -> None:
    """Print what completes `jetfire` and each `jetfire-X`: eval "$(jetfire completion bash)"."""
    from typer.completion import get_completion_script
    from typer.completion import install as install_script

    name = Path(os.environ.get("SHELL", "")).name if shell is None else shell
    if name not in o.SHELLS:
        raise unknown(f"no completion for the shell {name!r}", name, o.SHELLS)
    found: dict[str, str] = {}
    for program in ("jetfire", *(f"jetfire-{command}" for command in SCRIPTS)):
        variable = completion_variable(program)
        if install:
            _, file = install_script(shell=name, prog_name=program, complete_var=variable)
            found[program] = str(file)
        else:
            script = get_completion_script(prog_name=program, complete_var=variable, shell=name)
            found[program] = f"{script}\n"
    what = "files" if install else "scripts"
    terminal.result({what: found}, lambda: print(*found.values(), sep="\n"))
