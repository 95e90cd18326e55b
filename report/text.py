"""Short texts for numbers and fields, the same in every table, chart and page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetfire.measure.results import Row

NOTHING = "–"  # stands in a cell without a value
NO_GPU = "this is the CPU: no figure here says anything about a GPU"
# Units by their size in the first of its kind.
COUNTS = (("trillion", 1e12), ("billion", 1e9), ("million", 1e6))
TIMES = (("s", 1e3), ("ms", 1.0), ("µs", 1e-3), ("ns", 1e-6))
OPERATIONS = (("TFLOP/s", 1.0), ("GFLOP/s", 1e-3), ("MFLOP/s", 1e-6), ("kFLOP/s", 1e-9))
BYTES = (("GB/s", 1.0), ("MB/s", 1e-3), ("kB/s", 1e-6), ("B/s", 1e-9))
SIZES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
Units = Sequence[tuple[str, float]]


def fixed(value: float | None, digits: int = 0) -> str:
    """Return a value with so many digits behind the point, where all of a column have them."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Return a value rounded to so many significant digits, without an exponent."""
    if value is None or value == 0 or not math.isfinite(value):
        return NOTHING if value is None else f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def unit_of(value: float, units: Units) -> tuple[str, float]:
    """Return the largest unit of which a value has one or more; else the smallest."""
    return next((unit for unit in units if float(f"{value:.2e}") >= unit[1]), units[-1])


def scaled(value: float | None, units: Units) -> str:
    """Return a value in the unit that suits it: three digits, as the third differs by run."""
    if value is None:
        return NOTHING
    name, size = unit_of(value, units)
    return f"{significant(value / size)} {name}"


def time_text(ms: float | None) -> str:
    return scaled(ms, TIMES)


def size_text(size: float | None) -> str:
    """Return a number of bytes."""
    return scaled(size, SIZES)


def rate_text(row: Row) -> str:
    """Return the operations per second of a row, of a memory-bound op the bytes."""
    return scaled(row.gbps, BYTES) if row.tflops is None else scaled(row.tflops, OPERATIONS)


def spread_text(row: Row) -> str:
    """Return the 20th and the 80th percentile, in the unit of the time."""
    if row.ms is None or row.ms_p20 is None or row.ms_p80 is None:
        return ""
    _, size = unit_of(row.ms, TIMES)
    return f"{significant(row.ms_p20 / size, 4)}–{significant(row.ms_p80 / size, 4)}"


def interval_text(found: tuple[float, float] | None) -> str:
    """Return ``1.184–1.203``, the ends of a ratio's confidence interval."""
    return NOTHING if found is None else f"{found[0]:.3f}–{found[1]:.3f}"


def times(ratio: float | None, digits: int = 2) -> str:
    """Return ``1.25×``."""
    return NOTHING if ratio is None else f"{ratio:.{digits}f}×"


def share(part: float | None) -> str:
    """Return ``63%``, with a digit more where there are few."""
    return NOTHING if part is None else f"{part:.0%}" if part >= 0.095 else f"{part:.1%}"


def plural(count: int, one: str, several: str | None = None) -> str:
    """Return ``1 problem`` or ``3 problems``.

    Args:
        several: where that is not `one` with an s.
    """
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def error_text(error: float | None) -> str:
    """Return a relative error; ``exact`` for none, nothing where it is not known."""
    return "" if error is None else "exact" if error == 0 else f"{error:.1e}"


def with_share(count: int, total: int) -> str:
    """Return ``44 (90%)``."""
    return f"{count} ({count / total:.0%})"


def gib(row: Row, name: str) -> str:
    """Return a row's field of memory in GiB."""
    return fixed(row.extra.get(name), 2)


def data_text(data: str | None) -> str:
    """Return ``outlier × normal``: the operands' distributions, or the one of both."""
    return (data or "any").replace("/", " × ")


def fields_text(fields: Mapping[str, Any]) -> str:
    """Return ``tile_m=128 stages=3``, each value as Python writes it."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


def where(device: Mapping[str, Any]) -> str:
    """Return a device's name, with what a CPU's figures are worth."""
    return f"{device.get('name')}{f' – {NO_GPU}' if device.get('kind') == 'cpu' else ''}"
