"""What tests/test_candidates.py starts: `jetfire`, with candidates before all other kernels."""

from jetfire.cli import main
from jetfire.core import registry

for op in registry.names():
    for kernel in registry.kernels(op).values():
        type(kernel).candidate = False
main()
