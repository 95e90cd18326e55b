"""Whether the processes of one job launch kernels that give the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from jetfire.core import calls, lookup
from jetfire.core.calls import Planned
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.kernel import Kernel

_REMEDY = "give all processes the same profiles (JETFIRE_PROFILES), and GPUs of one kind"


@dataclass(frozen=True)
class _Launch:
    """How a process solves a problem.

    Attributes:
        decides: of kernel, architecture and config what the bits depend on (`Op.same_bits`).
        digest: of the outputs when the config was tuned for this problem; None where unknown.
        text: all of it, for people.
    """

    decides: tuple[Any, ...]
    digest: str | None
    text: str


# By op and problem.
_Launches = Mapping[tuple[str, str], _Launch]


def launches() -> _Launches:
    """Return how this process has solved every problem since `profiles.forget`."""
    return {(call.op.name, str(call.problem)): _launch(call) for call in calls.planned()}


def _launch(call: Planned) -> _Launch:
    kernel, device = call.kernel, call.device
    config = " ".join(f"{name}={value}" for name, value in call.config.as_dict().items())
    scope = call.op.same_bits(call.problem)
    if type(kernel).noise is not Kernel.noise:
        scope = "runs"
    decides = {
        "kernels": (),
        "configs": (kernel.name, device.capability),
        "runs": (kernel.name, device.capability, config),
    }
    digest, text = _digest(call), f"{kernel.name} {config}".strip()
    known = f" (digest {digest[:8]})" if digest else ""
    return _Launch(decides[scope], digest, f"{text} on {device.label}{known}")


def _digest(call: Planned) -> str | None:
    found = lookup.exact(call.op, call.kernel, call.problem, call.device)
    if found is None or found.stale or found.config != call.config or found.entry is None:
        return None
    same = found.entry.problem == call.problem.as_dict()  # an eps or a decay too
    return found.entry.digest if same else None


def differences(ranks: Mapping[int, _Launches]) -> list[str]:
    """Return a line per op whose results may differ between ranks, of its first such problem."""
    found: dict[str, list[str]] = {}
    for op, problem in dict.fromkeys(key for held in ranks.values() for key in held):
        given = {rank: held[op, problem] for rank, held in ranks.items() if (op, problem) in held}
        if not _same_bits(given.values()):
            found.setdefault(op, []).append(f"{op} ({problem}): {_shares(given)}")
    more = {op: len(lines) - 1 for op, lines in found.items()}
    return [lines[0] + f"; and {more[op]} more" * bool(more[op]) for op, lines in found.items()]


def _same_bits(given: Collection[_Launch]) -> bool:
    """Return whether launches give equal bits: by equal digests, else by all that decides."""
    known = [launch.digest for launch in given if launch.digest is not None]
    if len(set(known)) > 1:
        return False
    return len(known) == len(given) or len({launch.decides for launch in given}) == 1


def _shares(given: Mapping[int, _Launch]) -> str:
    shares: dict[str, list[int]] = {}
    for rank, launch in given.items():
        shares.setdefault(launch.text, []).append(rank)
    return ", ".join(f"{text} in {_ranks(ranks)}" for text, ranks in shares.items())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"ranks {', '.join(map(str, ranks[:3]))}{more}"


def check_agreement(*, strict: bool = False, group: dist.ProcessGroup | None = None) -> None:
    """Compare the kernels that the processes of a job launch, after the first step of each.

    Processes whose profiles or GPUs differ may solve a problem by other kernels or configs. Where
    these give other bits (`Op.same_bits`), or were tuned to outputs of other digests, the first
    process warns in a line per op. All processes of the group call this; a process alone agrees.

    Args:
        strict: have all of them raise instead.
        group: the processes, by default all.

    Raises:
        UsageError: bits may differ, and `strict` is set.
    """
    if not dist.is_initialized():
        return
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (dist.get_rank(), launches()), group=group)
    found = differences(dict(every))
    if found and strict:
        raise UsageError(f"results may differ in bits: {' | '.join(found)}: {_REMEDY}")
    for line in found if dist.get_rank(group) == 0 else ():
        warnings.warn(
            f"results may differ in bits: {line}: {_REMEDY}", JetfireWarning, stacklevel=2
        )
