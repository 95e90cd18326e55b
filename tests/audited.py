"""Audits that many tests ask for one at a time, made together."""

import re

import pytest

from jetfire.core.errors import UsageError
from jetfire.core.machine_code import Cubin, audits, functions_of


def alone(code):
    """Return the cubin of the only function of an ELF file."""
    (name,) = functions_of(code)
    return Cubin(name, code, 0, 0)


def together(cubin_of, cases):
    """Return the audit of each case's function by the case; skip where none can be made.

    nvdisasm takes 0.2 s to begin, which is more than it takes for most functions.

    Args:
        cubin_of: compiles one case, whose parts are its arguments.
    """
    cases = list(dict.fromkeys(cases))
    try:
        return dict(zip(cases, audits([cubin_of(*case) for case in cases]), strict=True))
    except UsageError as error:
        pytest.skip(str(error))


def loop_of(sass):
    """Instructions of the longest loop."""
    labels, length, longest = {}, 0, 0
    for line in sass.splitlines():
        if found := re.match(r"\s*(\.L_\w+):", line):
            labels[found[1]] = length
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            length += 1
            if (jump := re.search(r"BRA.*(\.L_\w+)", line)) and jump[1] in labels:
                longest = max(longest, length - labels[jump[1]])
    return longest
