"""Without a GPU the Triton kernels run on Triton's interpreter, which must be chosen on import."""

import json
import os
import sys
from collections.abc import Callable, Iterator
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


def _unload() -> Iterator[Callable[[], None]]:
    """Kernels that were loaded are gone after it, or once it is called: of ops, and as modules."""
    from jetfire import ops
    from jetfire.fuzz import load

    path, modules = list(sys.path), set(sys.modules)

    def unload() -> None:
        load.cache_clear()
        ops.kernels.cache_clear()
        added = tuple(f"{folder}{os.sep}" for folder in set(sys.path) - set(path))
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if name.startswith("jetfire_loaded_") or file.startswith(added):
                del sys.modules[name]

    yield unload
    unload()


unload = pytest.fixture(_unload, name="unload")
unload_after_all = pytest.fixture(_unload, scope="module", name="unload_after_all")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors on a busy machine: two threads wait for each other ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with encoder.json and vocab.bpe as GPT-2's, of 11 merges."""
    merges = ["Ġ t", "h e", "Ġt he", "Ġ a", "i n", "r e", "o n", "Ġa n", "in g", "Ġ Ġ", "Ċ Ċ"]
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = [*map(chr, shown), *(chr(256 + i) for i in range(256 - len(shown)))]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<|endoftext|>"]
    folder = tmp_path_factory.mktemp("gpt2")
    ids = {token: i for i, token in enumerate(tokens)}
    (folder / "encoder.json").write_text(json.dumps(ids))
    lines = ["#version: 0.2", *merges, ""]
    (folder / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the first GPU, else the CPU under Triton's interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
