"""What tests/test_model_parallel.py starts twice: sharded steps, their blocks compiled."""

import json
import warnings
from functools import partialmethod
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from jetfire.core.device import Device
from jetfire.gpt2.training.parallel import Group
from jetfire.models import bench
from jetfire.models.sharded import ShardedSubject
from jetfire.nn import gpt2_block
from jetfire.tests.processes.leaving import leave

SIZES = "layers=2,width=128,heads=4,vocabulary=64,batch=2,context=16"
CPU = Device.parse("cpu")


def subject(name: str, run: str, group: Group) -> ShardedSubject:
    recipes = [name] if name.startswith("int8") else []
    case = bench.case_of("hf:gpt2-124m", [SIZES, f"run={run}"], recipes, CPU)
    return ShardedSubject(case, name, torch.device("cpu"), 0, group)


def flowed_of(name: str, group: Group) -> int:
    """Return how many of a step's blocks run fused."""
    with mock.patch.object(gpt2_block, "flowed", side_effect=gpt2_block.flowed) as flowed:
        subject(name, "eager", group).call()
    return flowed.call_count


def compiled(name: str, group: Group) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    made = subject(name, "compile", group)
    loss = float(made.first()["loss"])
    graphs = [counters["stats"]["unique_graphs"]]
    made.call()
    graphs.append(counters["stats"]["unique_graphs"])
    return {"loss": loss, "graphs": graphs, "breaks": sum(counters["graph_break"].values())}


def main(rank: int, home: Path) -> NoReturn:
    """Write what was found as JSON; the processes meet in a store in the same folder."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(home / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = Group(rank, 2, dist.group.WORLD)
    eager = float(subject("eager", "eager", group).first()["loss"])
    outcomes: dict[str, Any] = {"eager": {"loss": eager}}
    flows = {name: flowed_of(name, group) for name in ("int8-block32", "int8-block32-fused")}
    # Traced whole and run by an eager backend: no compiler is needed.
    usual_compile = torch.compile
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")
    torch.compile = lambda function, **_: usual_compile(function, backend="aot_eager")
    for name in ("compile", "int8-block32", "int8-block32-fused"):
        outcomes[name] = {**compiled(name, group), "flowed": flows.get(name, 0)}
    (home / f"{rank}.json").write_text(json.dumps(outcomes))
    leave()
