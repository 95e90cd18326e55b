"""`jetfire list`."""

from __future__ import annotations

from jetfire.commands import options as o

EPILOG = "Example: jetfire list | less"


def run(load: o.Load = None, debug: o.Debug = False) -> None:
    """List ops, kernels, workloads and peers."""
    from jetfire.bench import catalogue

    catalogue.show()
