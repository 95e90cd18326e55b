"""Compiled kernels as C: arrays of bytes, for a launcher to give to CUDA's driver.

A launcher includes ``embedded/driver.c.j2``, which says what it takes and gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jetfire.export.c_text import hang
from jetfire.export.render import render

_A_LINE = 16


@dataclass(frozen=True)
class Compiled:
    """One kernel function's machine code, and what all launches of it have in common.

    Attributes:
        name: in the C files: lower case, an identifier, the file's own.
        function: in the ELF file.
        code: the ELF file.
        threads: of a block.
        shared_bytes: of a block, given at launch.
        about: what it is, in a line of a comment.
    """

    name: str
    function: str
    code: bytes = field(repr=False)
    threads: int
    shared_bytes: int
    about: str

    def entry(self, export: str) -> list[str]:
        """The initialiser of a kernel in a launcher's table."""
        values = (f"{export}_{self.name}", f'"{self.function}"', self.threads, self.shared_bytes)
        return hang(f"[{self.name.upper()}] = {{", list(map(str, values)), "},", 4)

    @property
    def lines(self) -> Iterator[str]:
        """The bytes as lines of C."""
        for i in range(0, len(self.code), _A_LINE):
            yield ", ".join(f"0x{byte:02x}" for byte in self.code[i : i + _A_LINE]) + ","


def files(name: str, capability: tuple[int, int], kernels: Sequence[Compiled]) -> dict[str, bytes]:
    """Return the texts of ``<name>_code.c`` and ``<name>_code.h``."""
    return {
        f"{name}_code.{ending}": render(
            f"embedded/code.{ending}.j2", name=name, capability=capability, kernels=kernels
        )
        for ending in ("c", "h")
    }
