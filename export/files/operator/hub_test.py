"""The self-test's checks for pytest; needs `kernels`, a GPU and a variant in build/."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import selftest


@pytest.mark.kernels_ci
@pytest.mark.parametrize("check", selftest.CHECKS, ids=lambda check: check.__name__)
def test_kernel(check: Callable[[], None]) -> None:
    check()
