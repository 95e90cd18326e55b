"""A training step of any model that FSDP2 has sharded over processes, each with its own batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from jetfire.gpt2.bench.subjects import RATE
from jetfire.gpt2.training.parallel import Group, equalise
from jetfire.models.cases import ModelCase
from jetfire.models.subject import ModelSubject
from jetfire.nn import AdamW, gather_codes
from jetfire.nn.conversion import transformer_blocks
from jetfire.nn.products import own_part

# As torch's users have it; reduced in fp32, as the gradients of INT8 weights are.
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Fused blocks want norms and biases in fp32, and INT8 weights are quantised from it.
_FP32 = MixedPrecisionPolicy()


class ShardedSubject(ModelSubject):
    """A model of which FSDP2 gathers `case.unit` blocks at a time, and all that is in none at once.

    Torch's own in BF16 compute with parameters that are gathered in BF16. Of recipes the blocks'
    INT8 weights are gathered as codes and all else of a block in fp32, under autocast to BF16; what
    is outside the blocks is gathered as torch's own is.

    Args:
        group: the processes, of which each makes this one.
    """

    def __init__(
        self, case: ModelCase, name: str, device: torch.device, seed: int, group: Group
    ) -> None:
        self.group, self.unit = group, case.unit
        super().__init__(case, name, device, seed + group.rank)  # a batch of its own

    def _prepared(self) -> Callable[..., object]:
        equalise(self.model, self.group)
        blocks = list(transformer_blocks(self.model).values())
        if self.variant.compiled:
            for block in blocks:
                block.compile()
            _compile_loss(self.model)
        if self.recipe:
            gather_codes(self.model, self.group.world)
        mesh = init_device_mesh(self.device.type, (self.group.world,))
        for first in range(0, len(blocks), self.unit):
            unit = blocks[first : first + self.unit]
            fully_shard(unit, mesh=mesh, mp_policy=_FP32 if self.recipe else _BF16)
        fully_shard(self.model, mesh=mesh, mp_policy=_BF16)
        return self.model

    def _optimizer(self) -> torch.optim.AdamW:
        """Return torch's fused AdamW; for recipes ours, which updates the process's own parts.

        Codes are not made in the update but of the shards, when they are gathered next.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        options: dict[str, Any] = {"lr": RATE, "capturable": self.replays}
        if self.recipe:
            return AdamW(parameters, model=self.model, **options)
        return torch.optim.AdamW(parameters, fused=True, **options)

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bool(self.recipe))

    def _of_all(self, loss: torch.Tensor) -> torch.Tensor:
        return self.group.add(loss.float().clone()) / self.group.world

    def standing(self) -> Iterable[torch.Tensor]:
        """Return this process's parts of them."""
        return map(own_part, super().standing())

    def gathered(self) -> int:
        """Return the bytes that this process sends to be gathered in forward and backward."""
        with _gathers() as counted:
            self.accumulate()
        self.forget()
        return counted.bytes


def _compile_loss(model: Any) -> None:
    """Compile the loss of transformers' language models, of which no block is a part.

    Its logits are a step's widest tensors, of which fp32 is made; the model would be no peer of one
    that is compiled whole.
    """
    if hasattr(model, "loss_function"):
        model.loss_function = torch.compile(model.loss_function)


class _Gathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d" and "allgather_base" in func.name():
            self.bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


@contextmanager
def _gathers() -> Iterator[_Gathers]:
    """Count what is gathered; what is compiled runs as it was written meanwhile."""
    stance = torch.compiler.set_stance("force_eager")
    # Backward in a thread of its own would be none of the mode's.
    with stance, torch.autograd.set_multithreading_enabled(False), _Gathers() as counted:
        yield counted
