"""The options of a search: what is wrong with them is refused before torch and Optuna load."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jetfire.core import registry
from jetfire.core.errors import UsageError, first_line, unknown
from jetfire.core.files import check_output
from jetfire.measure import data, ncu
from jetfire.measure.plan import Case, check_peers
from jetfire.report.page import check_page
from jetfire.tuner.trial import OBJECTIVES, Objective

BITS = ("same",)
FOR_ALL = ("mean", "worst")
STRATEGIES = ("tpe", "gp", "random", "exhaustive")


@dataclass(frozen=True)
class Effort:
    """How much is worth spending on a search.

    Attributes:
        trials: configs.
        finalists: those that are measured again.
        rounds, rounds_s: samples of each in that comparison, and seconds that they may take.
    """

    trials: int
    finalists: int
    rounds: int
    rounds_s: float


EFFORTS = {"quick": Effort(40, 3, 15, 4.0), "full": Effort(250, 6, 40, 20.0)}


def without_password(url: str) -> str:
    """Return a database's URL as it may be shown."""
    return re.sub(r"(://[^/@:]*:)[^/@]*@", r"\1***@", url)


def check_storage(text: str | None) -> None:
    """Refuse the URL of a database of an unknown kind; what is no URL is a file or a folder.

    Raises:
        UsageError: there is no such kind, or the URL has no meaning.
    """
    if text is None or "://" not in text:
        return
    from sqlalchemy.engine import make_url

    try:
        make_url(text).get_dialect()
    except Exception as error:  # a database's own package may raise any
        shown = without_password(text)
        reason = first_line(error).replace(text, shown)
        raise UsageError(
            f"cannot open --storage {shown}: {reason}: expected a URL such as sqlite:///FILE or "
            "postgresql://…"
        ) from None


@dataclass(frozen=True)
class TuneOptions:
    """The options of `jetfire tune` as they were given.

    Attributes:
        keep: whether the studies are saved, and the winners in the user's profiles.
        for_all: one config for all problems of a kernel, by one of `FOR_ALL`.
        bits: ``same``: only configs whose outputs are bit-equal to those of the config in use.
        max_noise: the most that a time's noise (`measure.timer.noise`) may be, as a share of it.
        profile: ``ncu``: what reads the counters of the winner and the default.
        unseen: instead of `cases`, so many problems of the ops of `cases` that no profile is for.
        output: the file for the rows of `unseen`.
    """

    cases: Sequence[Case] = ()
    kernels: Sequence[str] = ()
    device: str = "auto"
    budget_s: float = 600.0
    trials: int | None = None
    effort: str = "quick"
    strategy: str = "tpe"
    objective: Objective = "time"
    seed: int = 0
    data: str = "normal"
    space: Mapping[str, Sequence[str]] = field(default_factory=dict)
    storage: str | None = None
    trial_s: float = 30.0
    peers: Sequence[str] | None = None
    report: Path | None = None
    record: Path | None = None
    missing: bool = False
    shard: tuple[int, int] = (0, 1)
    for_all: str | None = None
    bits: str | None = None
    max_noise: float | None = None
    profile: str | None = None
    keep: bool = True
    unseen: int = 0
    output: Path | None = None
    format: str = "table"
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Refuse options of which one is wrong on any device, or two contradict each other.

        Raises:
            UsageError: a name is none of those there are, or a file cannot be written.
            NoDeviceError: there is no such profiler here.
        """
        data.check(self.data, f"--data {self.data}")
        check_peers(self.peers or ())
        if self.cases:
            registry.check_kernels(dict.fromkeys(case.op for case in self.cases), self.kernels)
        for option, name, known in (
            ("--effort", self.effort, EFFORTS),
            ("--strategy", self.strategy, STRATEGIES),
            ("--objective", self.objective, OBJECTIVES),
            ("--for-all", self.for_all or "mean", FOR_ALL),
            ("--bits", self.bits or "same", BITS),
        ):
            if name not in known:
                raise unknown(f"{option} {name}", name, known)
        if self.for_all and (self.unseen or self.missing or self.shard != (0, 1)):
            raise UsageError(
                f"--for-all {self.for_all}: expected no --unseen, --missing or --shard"
            )
        if self.profile and self.unseen:
            raise UsageError(
                f"--profile {self.profile}: expected no --unseen, which keeps no winner"
            )
        if self.max_noise is not None and self.objective != "time":
            raise UsageError(f"--objective {self.objective}: expected time with --max-noise")
        check_storage(self.storage)
        check_page(self.report)
        check_output("--record", self.record, ".json", ".json.gz")
        check_output("-o", self.output, ".json")
        if self.profile is not None:
            ncu.check(self.device)
