"""Without a GPU the Triton kernels run on Triton's interpreter, which must be chosen on import."""

import os
from collections.abc import Iterator
from pathlib import Path

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


SHIPPED = Path(__file__).parent.parent / "profiles"


@pytest.fixture(scope="session", autouse=True)
def _no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels run with their defaults, whatever is tuned; what needs profiles makes its own."""
    from jetfire.ops import profiles

    empty = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETFIRE_PROFILES", str(empty / "profiles"))
        patch.setenv("JETFIRE_STUDIES", str(empty / "studies"))
        patch.setattr(profiles, "SHIPPED", empty / "shipped")
        profiles.forget()
        yield
    profiles.forget()


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the profiles that the package ships, found by lookups as users find them."""
    from jetfire.ops import profiles

    monkeypatch.setattr(profiles, "SHIPPED", SHIPPED)
    profiles.forget()
    yield SHIPPED
    monkeypatch.undo()
    profiles.forget()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the first GPU, else the CPU under Triton's interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
