"""`jetfire doctor`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

from jetfire.commands import options as o
from jetfire.core import terminal
from jetfire.core.errors import JetfireError

EPILOG = "Example: jetfire doctor --json"


def run(
    as_json: Annotated[bool, o.flag("--json", "As JSON.")] = False, debug: o.Debug = False
) -> None:
    """Look at what this machine has of what is needed: each part is ok, or what to do."""
    from jetfire.core import doctor

    findings = doctor.examine()
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in findings], indent=1))
    else:
        width = max(len(one.part) for one in findings)
        for one in findings:
            text = f"ok: {one.found}" if one.ok else f"{one.found}: {one.remedy}"
            print(f"{one.part:{width}}  {terminal.line(text)}")
    wrong = [one.part for one in findings if not one.ok]
    if wrong:
        raise JetfireError(f"doctor: missing or broken: {', '.join(wrong)}")
