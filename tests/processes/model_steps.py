"""What tests/test_model_parallel.py starts twice: sharded steps, their blocks compiled.

Arguments: the rank; a folder for the store and what was found, as JSON.
"""

import json
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

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

RANK, HOME = int(sys.argv[1]), Path(sys.argv[2])
SIZES = "layers=3,width=128,heads=4,vocabulary=64,batch=2,context=16"
CPU = Device.parse("cpu")
FLOWED: list[int] = []


def subject(name: str, run: str) -> ShardedSubject:
    recipes = [name] if name.startswith("int8") else []
    case = bench.case_of("hf:gpt2-124m", [SIZES, f"run={run}"], recipes, CPU)
    return ShardedSubject(case, name, torch.device("cpu"), 0, GROUP)


def flowed_of(name: str) -> int:
    """Return how many of a step's blocks run fused."""
    FLOWED.clear()
    subject(name, "eager").call()
    return len(FLOWED)


def compiled(name: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    made = subject(name, "compile")
    loss, graphs = float(made.first()["loss"]), []
    for _ in range(2):
        graphs.append(counters["stats"]["unique_graphs"])
        made.call()
    return {"loss": loss, "graphs": graphs, "breaks": sum(counters["graph_break"].values())}


def counting(*given: Any) -> Any:
    FLOWED.append(1)
    return usual_flowed(*given)


torch.set_num_threads(1)
store = dist.FileStore(str(HOME / "store"), 2)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
GROUP = Group(RANK, 2, dist.group.WORLD)
outcomes: dict[str, Any] = {"eager": {"loss": float(subject("eager", "eager").first()["loss"])}}
usual_flowed, gpt2_block.flowed = gpt2_block.flowed, counting
flows = {name: flowed_of(name) for name in ("int8-block32", "int8-block32-fused")}
gpt2_block.flowed = usual_flowed
# Traced whole and run by an eager backend: no compiler is needed.
usual_compile = torch.compile
nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")
torch.compile = lambda function, **_: usual_compile(function, backend="aot_eager")
for name in ("compile", "int8-block32", "int8-block32-fused"):
    outcomes[name] = {**compiled(name), "flowed": flows.get(name, 0)}
(HOME / f"{RANK}.json").write_text(json.dumps(outcomes))
leave()
