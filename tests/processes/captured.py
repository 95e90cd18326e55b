"""Train a sharded model by steps that are captured, and by steps that are launched.

One of the processes that torchrun starts: captured.py launched|compiled FILE.
"""

import os
import sys

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from jetfire.nn import AdamW, CapturedStep, convert, gather_codes
from jetfire.nn.captured import release_all

STEPS = 8
KEPT = []  # graphs that outlive their models


def losses(how: str, device: torch.device, captured: bool) -> list[float]:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(3))).to(device)
    convert(model, "int8-block32")
    if how == "compiled":
        for one in model:
            one.compile()
    assert len(gather_codes(model)) == 6
    for one in model:
        fully_shard(one)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), 1e-2, model=model, capturable=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        loss = (y.float() - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    take = CapturedStep(step, optimizer) if captured else step
    KEPT.append(take)
    found = []
    for number in range(STEPS):
        drawn = torch.Generator().manual_seed(2 * number + distributed.get_rank())
        torch.manual_seed(number)
        found.append(take(torch.randn((64, 128), generator=drawn).to(device)))
    return [float(loss) for loss in found]


def main() -> None:
    how, file = sys.argv[1:]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    found = {name: losses(how, device, name == "captured") for name in ("launched", "captured")}
    if distributed.get_rank() == 0:
        torch.save(found, file)
    release_all()  # or the next line would wait for ever
    distributed.destroy_process_group()


main()
