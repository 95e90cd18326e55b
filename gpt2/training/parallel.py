"""Several processes that train one model, a GPU each, as torchrun starts them: DDP or FSDP2.

The first process alone prints, logs and writes. What decides the course of a run (losses, norms,
a request to stop) is reduced over all of them, so that all take the same course and end alike.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jetfire.core.device import Device
from jetfire.core.environment import torchrun
from jetfire.core.errors import JetfireError, JetfireWarning, UsageError
from jetfire.gpt2.training.settings import Settings, check_processes
from jetfire.nn import check_agreement, gather_codes
from jetfire.nn.captured import release_all
from jetfire.nn.products import is_dtensor, own_part
from jetfire.nn.squares import total_norm

T = TypeVar("T")
# The others wait while the first prepares data; torchrun ends them if it dies.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Group:
    """The processes of a run, as one of them sees them; by default it is the only one.

    Attributes:
        host: carries the processes' own messages, on the CPU; None without torchrun.
    """

    rank: int = 0
    world: int = 1
    host: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank."""
        if self.host is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.host)
        return values

    def any(self, flag: bool) -> bool:
        """Whether anyone's flag is set."""
        if self.host is None:
            return flag
        flags = torch.tensor(int(flag), dtype=torch.int64, device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.host)
        return bool(flags)

    def once(self, work: Callable[[], T]) -> T:
        """Have the first process do it, and give everyone what it returned.

        Raises:
            JetfireError: in the first process; the others end silently with its exit code.
        """
        outcome: list[Any] = [None, None]
        error: JetfireError | None = None
        if self.leads:
            try:
                outcome[0] = work()
            except JetfireError as caught:
                error, outcome[1] = caught, caught.exit_code
        if self.host is not None:
            dist.broadcast_object_list(outcome, src=0, group=self.host)
        if error is not None:
            raise error
        if outcome[1] is not None:
            raise SystemExit(outcome[1])
        result: T = outcome[0]
        return result

    def each(self, work: Callable[[], T]) -> T:
        """Do it in every process; if it fails in any, none goes on."""
        result: Any = None
        error: JetfireError | None = None
        try:
            result = work()
        except JetfireError as caught:
            error = caught
        codes = self.gather(None if error is None else error.exit_code)
        failed = next((rank for rank, code in enumerate(codes) if code is not None), None)
        if error is not None and failed == self.rank:
            raise error
        if failed is not None:
            raise SystemExit(codes[failed])
        return result

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Enclose what fails in every process or in none: the first one says why."""
        try:
            yield
        except JetfireError as error:
            if self.leads:
                raise
            raise SystemExit(error.exit_code) from None

    def check_agreement(self, strict: bool) -> None:
        """Warn of kernels whose results may differ between the processes.

        Raises:
            UsageError: there are such kernels, and `strict` is set.
        """
        if self.host is not None:
            check_agreement(strict=strict, group=self.host)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, in place, on the tensors' device."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def add_each(self, tensors: Sequence[torch.Tensor]) -> None:
        """`add` each, all in one operation; they are of one dtype."""
        if self.world > 1:
            with dist._coalescing_manager():
                for tensor in tensors:
                    dist.all_reduce(tensor)


ALONE = Group()


@contextmanager
def joined(device: str) -> Iterator[tuple[Device, Group]]:
    """This process's device and the run's processes, for as long as the run takes.

    Raises:
        UsageError: torchrun gives each process its GPU, and one was named.
        NoDeviceError: there are more processes than GPUs.
    """
    if not torchrun():
        own = Device.parse(device)
        if own.kind == "cuda":
            torch.cuda.set_device(own.torch_device)
        yield own, ALONE
        return
    own = _own_device(device, int(os.environ["LOCAL_RANK"]))
    cuda = own.kind == "cuda"
    if cuda:
        torch.cuda.set_device(own.torch_device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", device_id=own.torch_device if cuda else None
    )
    host = dist.new_group(backend="gloo", timeout=_PATIENCE)
    if dist.get_rank():
        warnings.simplefilter("ignore", JetfireWarning)
    try:
        yield own, Group(dist.get_rank(), dist.get_world_size(), host)
    except RuntimeError as error:
        if "by peer" in str(error):  # a connection was ended by one that has said why
            raise SystemExit(1) from None
        raise
    except (JetfireError, SystemExit):
        _leave()
        raise
    # Not after other errors: it would wait for processes that are elsewhere.
    _leave()


def _leave() -> None:
    """Leave the processes, with no graph of their collectives: an error's frames hold steps."""
    release_all()
    dist.destroy_process_group()


def _own_device(device: str, rank: int) -> Device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return Device.parse("cpu")
    if device not in ("auto", "cuda"):
        raise UsageError(f"--device {device}: expected auto, cpu or cuda: torchrun chooses which")
    return Device.parse(f"cuda:{rank}")


def spread(model: nn.Module, settings: Settings, group: Group, device: torch.device) -> nn.Module:
    """Return the module to call for the loss of this process's sequences.

    DDP wraps the model; FSDP2 shards it in place, each block and the rest, so that an optimizer
    must be made afterwards. Either averages gradients over the processes in backward.
    """
    check_processes(settings, group.world, group.host is not None)
    if settings.parallel == "ddp":
        return DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
    if settings.parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        gather_codes(model, group.world)
        mesh = init_device_mesh(device.type, (group.world,))
        blocks: Any = model.blocks
        for block in blocks:
            fully_shard(block, mesh=mesh)
        # With the table, which both ends of the model read.
        fully_shard(model, mesh=mesh)
    return model


def equalise(model: nn.Module, group: Group) -> None:
    """Give every process the first one's parameters, as DDP does.

    They are so from one seed, but for GPUs of different makes.
    """
    if group.world > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)


def unreduced(forward: nn.Module) -> AbstractContextManager[None]:
    """Have DDP leave gradients where they are, for a later backward to reduce their sum.

    FSDP2 reduces each micro-batch's: what it would leave is whole gradients, unsharded.
    """
    if isinstance(forward, DistributedDataParallel):
        return forward.no_sync()
    return nullcontext()


def reshard(model: nn.Module) -> None:
    """Shard again what a forward without backward has left gathered."""
    sharded: Any = model if hasattr(model, "reshard") else None
    if sharded is not None:
        sharded.reshard()


def norm(tensors: list[torch.Tensor], group: Group) -> torch.Tensor:
    """The 2-norm of all elements, on every process, whether tensors are sharded or not."""
    own = total_norm([own_part(tensor) for tensor in tensors])
    if any(is_dtensor(tensor) for tensor in tensors):
        return group.add(own.square()).sqrt()
    return own
