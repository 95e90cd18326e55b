"""`jetfire tune`, which searches, and its verbs."""

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Verbs, add
from jetfire.commands.tune import run, show


class TuneVerbs(Verbs):
    what = "op", o.OPS


app = typer.Typer(
    cls=TuneVerbs,
    add_completion=False,
    help="Search tile sizes on this device, and list what was found.",
)
add(app, run, show)
