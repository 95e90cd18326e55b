"""Without a GPU the Triton kernels run on Triton's interpreter, which must be chosen on import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the first GPU, else the CPU under Triton's interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
