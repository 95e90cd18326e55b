"""What a kernel is: the contract of `kernels_*` with the launcher, the tuner and the fuzzer."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jetfire.core import sources
from jetfire.core.device import Device
from jetfire.core.errors import unknown
from jetfire.core.problem import hints_of, parse_field
from jetfire.core.tensors import Tensors

if TYPE_CHECKING:
    import torch

    from jetfire.core.machine_code import Cubin


@dataclass(frozen=True)
class Config:
    """Tile sizes, stages, warps: what the tuner may choose; each kernel derives its own."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """A config from texts or values; unknown names are usage errors."""
        hints = hints_of(cls)
        for name in fields:
            if name not in hints:
                raise unknown(f"no config field {name!r}", name, hints)
        return cls(**{k: parse_field(k, hints[k], v) for k, v in fields.items()})


class Kernel(ABC):
    """An implementation of an op for some devices."""

    op: ClassVar[str]
    name: ClassVar[str]
    Config: ClassVar[type[Any]]

    @abstractmethod
    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        """None where this runs and is right; else the reason for a no, in one line.

        The only judge: the launcher, the tuner and the tests all ask here.
        """

    @abstractmethod
    def default(self, problem: Any, device: Device) -> Any:
        """The config to use where no profile knows better."""

    @abstractmethod
    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        """Config field → the values a tuner may try."""

    def schedules(self, problem: Any, device: Device) -> list[Any]:
        """A config for each ``schedule`` of `space`, the best known; none where there is none."""
        names = self.space(problem, device).get("schedule", ())
        config = self.default(problem, device)
        return [dataclasses.replace(config, schedule=name) for name in names]

    @abstractmethod
    def launch(self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        """Write `outputs` from `inputs` on the current stream, without synchronising.

        Inputs begin anywhere that their elements can, as outputs do that are updated
        (`Op.updated`); other outputs are new: contiguous, from a multiple of 16 bytes on.
        """

    def stages(
        self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors
    ) -> dict[str, Callable[[], None]]:
        """What a launch does, by name and in order, where that is several ops'; else nothing.

        Once all have been called each may be called again by itself, in any order: what it reads
        is still there.
        """
        return {}

    def parts(self, workload: str) -> list[tuple[str, Any]]:
        """Other ops, each with a problem that is solved for a workload of a composite.

        Profiles of these ops are shipped for these problems alone.
        """
        return []

    def noise(self, problem: Any, config: Any, inputs: Tensors) -> torch.Tensor | None:
        """What a config's own rounding may add to an element before it is stored.

        Returns:
            An absolute bound for each block of the output, ⌈m/block⌉×⌈n/block⌉, at least fp32;
            None where the op's tolerance is enough.
        """
        return None

    def estimate(self, problem: Any, config: Any, device: Device) -> float | None:
        """Microseconds that a launch should take, to tell configs apart by; None where unknown."""
        return None

    def device_code(self) -> dict[str, str]:
        """The code that a device runs, without comments, by file or by file and name."""
        return sources.device_code(self._classes())

    def source_hash(self) -> str:
        """12 hex digits that change with `device_code`: `core.sources` says with what not."""
        return sources.digest(self._classes())

    def _classes(self) -> tuple[type, ...]:
        own = type(self).__mro__
        return tuple(cls for cls in own if issubclass(cls, Kernel) and cls is not Kernel)

    def cubins(self, problem: Any, config: Any, capability: tuple[int, int]) -> list[Cubin] | None:
        """The machine code of every function that a launch runs, in order; no device is needed.

        Args:
            capability: an architecture on which `legal` takes the config.

        Returns:
            None where there is none: a CPU kernel.

        Raises:
            UsageError: a compiler is missing.
        """
        return None
