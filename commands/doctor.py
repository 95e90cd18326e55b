"""`jetfire doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jetfire.commands import options as o
from jetfire.core import terminal
from jetfire.core.errors import JetfireError

if TYPE_CHECKING:
    from jetfire.core.doctor import Finding

EPILOG = "Example: jetfire doctor --json"


def run(debug: o.Debug = False) -> None:
    """Look at what this machine has of what is needed: each part is ok, or what to do."""
    from jetfire.core import doctor

    findings = doctor.examine()
    terminal.result({"parts": findings}, lambda: _show(findings))
    wrong = [one.part for one in findings if not one.ok]
    if wrong:
        raise JetfireError(f"doctor: missing or broken: {', '.join(wrong)}")


def _show(findings: Sequence[Finding]) -> None:
    width = max(len(one.part) for one in findings)
    for one in findings:
        text = f"ok: {one.found}" if one.ok else f"{one.found}: {one.remedy}"
        print(f"{one.part:{width}}  {terminal.line(text)}")
