"""A run that came to its end, as its log tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jetfire.core.errors import UsageError
from jetfire.gpt2 import log
from jetfire.gpt2.curves import Curve


@dataclass(frozen=True)
class FinishedRun:
    """A finished run's log."""

    file: Path
    records: list[log.Record]

    @classmethod
    def read(cls, file: Path) -> FinishedRun:
        """
        Raises:
            UsageError: it is no log, or of a run that did not come to its end.
        """
        run = cls(file, log.read(file))
        if not run.ended:
            raise UsageError(f"{file}: expected a finished run's log, with an evaluation")
        return run

    @property
    def ended(self) -> bool:
        """Whether it came to its end, and was evaluated."""
        kinds = {record["kind"] for record in self.records}
        return self.records[-1]["kind"] == "end" and {"evaluation", "step"} <= kinds

    @property
    def head(self) -> log.Record:
        return self.records[0]

    def setting(self, name: str) -> Any:
        return self.head["settings"][name]

    def _of(self, kind: str) -> list[log.Record]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def final(self) -> float:
        return float(self._of("evaluation")[-1]["loss"])

    @property
    def best(self) -> float:
        return min(float(record["loss"]) for record in self._of("evaluation"))

    @property
    def ms(self) -> float | None:
        """Milliseconds a step, the median; None where the run had not the GPU to itself."""
        if log.shared(self.records):
            return None
        return median(record["ms"] for record in self._of("step"))

    @property
    def tokens(self) -> int:
        """A step's."""
        s, processes = self.head["settings"], self.head["device"]["processes"]
        return int(s["batch"] * s["accumulate"] * s["context"] * processes)

    @property
    def peak_gib(self) -> float:
        return max(float(record["peak_gib"]) for record in self._of("step"))

    @property
    def how(self) -> str:
        """The way in which its steps were run."""
        if self.setting("graph"):
            return "CUDA graph"
        return "torch.compile" if self.setting("compile") else "eager"

    def curve(self) -> Curve:
        return Curve.of(self.file, self.records, self.setting("recipe"))
