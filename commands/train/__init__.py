"""`jetfire train`, which trains, and its verbs."""

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Verbs, add
from jetfire.commands.train import bench, export, plan, plot, prepare, run, sample, study, tune


class TrainVerbs(Verbs):
    what = "preset", o.PRESETS


app = typer.Typer(
    cls=TrainVerbs, add_completion=False, help="Train GPT-2 or Llama in INT8, INT4 or BF16."
)
add(app, run, prepare, study, plot, sample, export, bench, tune, plan)
