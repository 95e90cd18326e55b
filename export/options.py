"""The options of an export: what is wrong with them is refused before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetfire.core.device import Device
from jetfire.core.errors import unknown
from jetfire.core.files import check_new
from jetfire.export import naming, targets
from jetfire.measure.plan import Case


@dataclass(frozen=True)
class ExportOptions:
    """The options of `jetfire export`; None where one was not given.

    Attributes:
        device: it stands for the architecture, as `target_device` returns it.
    """

    folder: Path
    device: Device
    cases: Sequence[Case] = ()
    kernel: str | None = None
    target: str | None = None
    name: str | None = None
    check: bool = True

    def __post_init__(self) -> None:
        """Refuse what can be refused without a look at the cases, which have been checked.

        Raises:
            UsageError: there is no such target, or the name or the folder is taken.
        """
        if self.target is not None and self.target not in targets.NAMES:
            raise unknown(f"--target {self.target}", self.target, targets.NAMES)
        if self.name is not None:
            naming.check(self.name)
        check_new("-o", self.folder)
