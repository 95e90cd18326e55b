"""`jetfire train export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire train export runs/int8 -o weights"


def run(
    run: o.Run,
    output: Annotated[
        Path, o.option("--output -o", "FOLDER", "For the weights, in place of an earlier export's.")
    ],
    debug: o.Debug = False,
) -> None:
    """Write a run's weights as transformers' GPT-2 or Llama reads them."""
    from jetfire.gpt2.training.options import no_run

    if not run.is_dir():
        raise no_run(run)
    from jetfire.gpt2.training import command

    command.export(run, output)
