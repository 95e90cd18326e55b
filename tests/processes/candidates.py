"""What tests/test_candidates.py starts: `jetfire`, with candidates before all other kernels."""

from jetfire.cli import main
from jetfire.kernels_cuda.tiles import TmaKernel

TmaKernel.candidate = False
main()
