"""One optimizer step, with nothing in it that makes the host wait for the device.

So the host runs ahead of a GPU, and the whole step can be captured in a CUDA graph: the rate, the
clipping and the verdict on non-finite gradients stay in tensors on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from jetfire.gpt2.training import parallel
from jetfire.gpt2.training.parallel import ALONE, Group
from jetfire.gpt2.training.settings import Settings
from jetfire.nn import AdamW, Int8Block, Int8LlamaBlock, Watched, gradient_norm, watch
from jetfire.nn.sizes import moment_scales

Micro = tuple[torch.Tensor, torch.Tensor]


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Make torch's random numbers (dropout, stochastic rounding) a function of the step."""
    words = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(words[0]) >> 1)


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; CPUs compute in fp32, which most do faster."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def narrow(model: nn.Module) -> None:
    """Keep in bf16, in place, the parameters whose moments AdamW keeps in 8 bits."""
    for parameter in model.parameters():
        if moment_scales(parameter.shape) is not None:
            parameter.data = parameter.data.bfloat16()


class Step:
    """Forward and backward of every micro-batch, then a clipped AdamW update.

    A step whose loss or gradient is not finite changes no parameter, and neither does any after it
    (`failed`): a host that reads losses late finds the model as it was before the fault.

    Args:
        model: ids, targets → mean loss in nats; its parameters are updated in place.
        group: whose losses and gradients are averaged; the model is spread over it.
        split: gradients are reduced after the last backward, by `reduce`, rather than within it, so
            that what comes before and what comes after can be captured. For parallel=none and ddp.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        device: torch.device,
        group: Group = ALONE,
        *,
        split: bool = False,
    ) -> None:
        self.model, self.device, self.group, self.split = model, device, group, split
        self.sharded = settings.parallel == "fsdp"
        if settings.weights == "bf16":
            narrow(model)
        if split:
            parallel.equalise(model, group)
            self.spread = model
        else:
            self.spread = parallel.spread(model, settings, group, device)
        # What the loss of a micro-batch is divided by; DDP and FSDP2 divide by the processes.
        self.shares = settings.accumulate * (group.world if split else 1)
        self.clip = settings.clip or float("inf")
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.forward = torch.compile(self.spread) if settings.compile else self.spread
        self.rate = torch.zeros((), dtype=torch.float32, device=device)
        self.failed = torch.zeros((), dtype=torch.float32, device=device)
        self.optimizer = self._optimizer(settings)
        # DDP and FSDP2 wait for autograd's accumulation, and reduce what it leaves.
        alone = settings.parallel == "none" and not settings.compile
        for module in model.modules():
            if isinstance(module, Int8Block | Int8LlamaBlock):
                module.adds_gradients = alone
                module.squares_gradients = alone and settings.accumulate == 1

    def _optimizer(self, settings: Settings) -> torch.optim.AdamW:
        """Return the fused AdamW: matrices decay, biases and norms' weights do not.

        Torch's own for BF16, with which recipes are compared, and for what is compiled.
        """
        groups = [
            {
                "params": [p for p in self.parameters if p.dim() >= 2],
                "weight_decay": settings.decay,
            },
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        options: dict[str, Any] = {
            "lr": self.rate,
            "betas": (settings.beta1, settings.beta2),
            "capturable": self.device.type == "cuda",
        }
        # What is compiled quantises its weights itself.
        model = nn.Module() if settings.compile else self.model
        optimizer: torch.optim.AdamW
        if settings.moment_bits == 8:
            narrow_ones: dict[str, Any] = {"rounding": "stochastic", "seed": settings.seed}
            optimizer = AdamW(groups, model=model, bits=8, **narrow_ones, **options)
        elif settings.precision.plain or settings.compile:
            optimizer = torch.optim.AdamW(groups, fused=True, **options)
        else:
            optimizer = AdamW(groups, model=model, **options)
        # What GradScaler would set: the fused update divides by the one and minds the other.
        optimizer.grad_scale = torch.ones((), dtype=torch.float32, device=self.device)  # type: ignore[attr-defined]
        optimizer.found_inf = self.failed  # type: ignore[attr-defined]
        return optimizer

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps from here on; a CUDA graph reads it where it is."""
        self.rate.fill_(rate)

    def __call__(self, micros: Sequence[Micro]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss of the micro-batches and norm of their gradient, fp32 scalars on the device.

        Both are those of all processes' micro-batches.
        """
        loss = self.gradients(micros)
        self.reduce(loss, self.gradients_made())
        return loss, self.update(loss)

    def gradients(self, micros: Sequence[Micro]) -> torch.Tensor:
        """Make the micro-batches' gradients; gives this process's share of the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, (ids, targets) in enumerate(micros, 1):
            more = number < len(micros)
            with parallel.unreduced(self.spread) if more else nullcontext():
                loss += self.gradient(ids, targets)
        return loss if self.split else loss / self.group.world

    def gradients_made(self) -> list[torch.Tensor]:
        """Return the parameters' gradients, in order, of those that have one."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def reduce(self, loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Make of all processes' shares the loss and, if backward has not, the gradients."""
        values = [loss, *gradients] if self.split else [loss]
        for dtype in dict.fromkeys(value.dtype for value in values):
            self.group.add_each([value for value in values if value.dtype == dtype])

    def gradient(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Add a micro-batch's share to the gradients; gives its share of the loss."""
        with autocast(self.device):
            loss = self.forward(ids, targets) / self.shares
        loss.backward()
        return loss.detach()

    def watched(self, ids: torch.Tensor, targets: torch.Tensor) -> Watched:
        """See what quantisation does to a micro-batch, of a step that is yet to be taken.

        The model runs by itself, not compiled, and its gradients are dropped: the step is what it
        is without, and may be a CUDA graph's.
        """
        self.optimizer.zero_grad(set_to_none=True)  # or blocks would add to what is there
        with watch(self.model) as seen:
            with autocast(self.device):
                loss = self.model(ids, targets) / self.shares
            torch.autograd.grad(loss, self.parameters)
        return seen

    @torch.no_grad()
    def update(self, loss: torch.Tensor) -> torch.Tensor:
        """Clip, and move the parameters if all is finite; gives the norm before clipping."""
        if self.sharded:
            norm = parallel.norm(self.gradients_made(), self.group)
        else:
            norm = gradient_norm(self.parameters)
        self.failed.copy_(torch.maximum(self.failed, (~torch.isfinite(norm + loss)).float()))
        scale: torch.Tensor = self.optimizer.grad_scale  # type: ignore[attr-defined]
        scale.copy_((norm / self.clip).clamp(min=1.0))
        self.optimizer.step()
        return norm
