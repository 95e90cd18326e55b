"""Kernel and Config: the contract of `kernels_*` with the launcher, the tuner and the fuzzer."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

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
    """The tuner's choices for a launch: tile sizes, stages, warps. Each kernel derives its own."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Return a config from texts or values; unknown names are usage errors."""
        hints = hints_of(cls)
        for name in fields:
            if name not in hints:
                raise unknown(f"no config field {name!r}", name, hints)
        return cls(**{k: parse_field(k, hints[k], v) for k, v in fields.items()})


class Kernel(ABC):
    """An implementation of an op for some devices.

    Attributes:
        backend: what it is written in: cpu (torch, for the CPU alone), cuda, triton, or python for
            any other call.
        candidate: it is not tuned yet for all problems that profiles are shipped for, so it runs
            where no other kernel takes the problem, or where it was tuned for just this problem on
            this device, and no other one was that is faster.
        choices: the values that a tuner may try for each config field.
    """

    op: ClassVar[str]
    name: ClassVar[str]
    Config: ClassVar[type[Any]]
    backend: ClassVar[Literal["cpu", "cuda", "triton", "python"]] = "python"
    candidate: ClassVar[bool] = False
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @abstractmethod
    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        """Return None where a config runs and is right; else the reason for a no, in one line.

        This is the only judge: the launcher, the tuner and the tests all ask here.
        """

    @abstractmethod
    def default(self, problem: Any, device: Device) -> Any:
        """Return the config to use where no profile has a better one."""

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        """Return the values that a tuner may try for each config field, of a problem."""
        return dict(self.choices)

    def outside(self, config: Any) -> str | None:
        """Return which field of a config has a value that `choices` has not, or None."""
        for name, values in self.choices.items():
            if getattr(config, name) not in values:
                return f"{name}={getattr(config, name)}: expected one of {values}"
        return None

    def schedules(self, problem: Any, device: Device) -> list[Any]:
        """Return the best known config of each ``schedule`` in `space`; empty without schedules."""
        names = self.space(problem, device).get("schedule", ())
        config = self.default(problem, device)
        return [dataclasses.replace(config, schedule=name) for name in names]

    @abstractmethod
    def launch(self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        """Write `outputs` from `inputs` on the current stream, without synchronising.

        Inputs, and outputs that are updated (`Op.updated`), are aligned to their elements alone.
        Other outputs are new: contiguous, and aligned to 16 bytes.
        """

    def stages(
        self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors
    ) -> dict[str, Callable[[], None]]:
        """Return a launch's steps by name and in order, where they are several ops'; else none.

        Once all have been called, each may be called again by itself, in any order: its inputs are
        still there.
        """
        return {}

    def parts(self, workload: str) -> list[tuple[str, Any]]:
        """Return the other ops that a composite launches for a workload, each with its problem.

        Profiles of these ops are shipped for these problems alone.
        """
        return []

    def noise(self, problem: Any, config: Any, inputs: Tensors) -> torch.Tensor | None:
        """Return a bound on what a config's own rounding may add to an element before it is stored.

        Returns:
            An absolute bound per block of the output, ⌈m/block⌉×⌈n/block⌉, at least fp32; None
            where the op's tolerance is enough.
        """
        return None

    def estimate(self, problem: Any, config: Any, device: Device) -> float | None:
        """Return a launch's expected microseconds, to compare configs by; None where unknown."""
        return None

    def device_code(self) -> dict[str, str]:
        """Return the code that a device runs, without comments, by file or by file and name."""
        return sources.device_code(self._classes())

    def source_hash(self) -> str:
        """Return 12 hex digits that change with `device_code`; `core.sources` says what counts."""
        return sources.digest(self._classes())

    def _classes(self) -> tuple[type, ...]:
        own = type(self).__mro__
        return tuple(cls for cls in own if issubclass(cls, Kernel) and cls is not Kernel)

    def cubins(self, problem: Any, config: Any, capability: tuple[int, int]) -> list[Cubin] | None:
        """Return the machine code of every function that a launch runs, in order, without a device.

        Args:
            capability: an architecture on which `legal` takes the config.

        Returns:
            None where there is none, as for a CPU kernel.

        Raises:
            UsageError: a compiler is missing.
        """
        return None


class PythonKernel(Kernel):
    """A kernel that is any Python call: of torch, of a library, of another kernel language.

    What it returns is copied into the outputs, which counts in its time. One that writes into them
    has a `launch` of its own.
    """

    Config = Config

    @abstractmethod
    def results(self, problem: Any, config: Any, inputs: Tensors) -> Tensors:
        """Return the op's outputs by name, and what else there is."""

    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        return self.outside(config)

    def default(self, problem: Any, device: Device) -> Any:
        return self.Config()

    def launch(self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        import torch

        with torch.no_grad():
            found = self.results(problem, config, inputs)
            for name, out in outputs.items():
                out.copy_(found[name])
