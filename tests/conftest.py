"""Without a GPU the Triton kernels run on Triton's interpreter, which must be chosen on import."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# As the command line has it, before torch is loaded: spinning threads starve each other where
# several test processes share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The tests' processes have the cores between them, and so have those that they start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from jetfire.core.interpreter import hold_to_tensors
from jetfire.tests.quick_interpreter import quicken

# What a script runs in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def gpus_from(turn: int, visible: str | None) -> str:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, or all where it is unset, from another one on."""
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    names = [*map(str, range(count))] if visible is None else visible.split(",")
    first = turn % max(1, len(names))
    return ",".join(names[first:] + names[:first])


# Of several processes each sees all GPUs, and begins with another: a test of one takes the first.
if "PYTEST_XDIST_WORKER" in os.environ:
    turn = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    if order := gpus_from(turn, os.environ.get("CUDA_VISIBLE_DEVICES")):
        os.environ["CUDA_VISIBLE_DEVICES"] = order

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # torch's own keeps a traceback for each kind of device that it may find later: 2.5 ms.
    torch.manual_seed = torch.default_generator.manual_seed


if "TRITON_INTERPRET" in os.environ and find_spec("triton"):
    quicken()
    hold_to_tensors()

# Modules and tests are no garbage: looking for some while they are loaded takes 5 s per process.
gc.disable()
# Afterwards it is looked for every 50,000 objects, not 700: tests that compile took 12 % longer.
gc.set_threshold(50_000)

# What tests read, among it an op that is none of this tree's, with its own test.
collect_ignore = ["data"]


def pytest_addoption(parser: pytest.Parser) -> None:
    dtypes = ["bfloat16", "float16", "float64"]
    parser.addoption("--default-dtype", choices=dtypes, help="under which our own code is run")
    parser.addoption("--default-device", choices=["meta", "cuda"], help="the same of devices")


# What makes a test's own tensors.
_OF_A_SHAPE = ("empty", "eye", "full", "ones", "rand", "randn", "zeros")
_OF_VALUES = ("arange", "as_tensor", "linspace", "logspace", "randint", "randperm", "tensor")


def _as_ever(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors, under torch's own defaults."""

    @wraps(make)
    def call(*args: Any, **options: Any) -> Any:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return make(*args, **{"device": "cpu", **options})
        finally:
            torch.set_default_dtype(dtype)

    return call


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Have the collector of garbage pass over what was there before a module's tests.

    The suite's modules and tests are a million objects, which a full collection takes a second
    for: 95 of 255 s in a process that ran a quarter of the tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _defaults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change the defaults that the command line names: our code must not mind them.

    A test makes its tensors as ever, for it says what they are by what it asserts.
    """
    dtype, device = (request.config.getoption(f"--default-{name}") for name in ("dtype", "device"))
    if dtype is None and device is None:
        yield
        return
    makers = {name: _as_ever(getattr(torch, name)) for name in _OF_A_SHAPE + _OF_VALUES}
    if hasattr(request.module, "torch"):
        monkeypatch.setattr(request.module, "torch", SimpleNamespace(**{**vars(torch), **makers}))
    torch.set_default_dtype(getattr(torch, dtype or "float32"))
    torch.set_default_device(device)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _named() -> Iterator[None]:
    """What a command has loaded is known to it alone."""
    before = os.environ.get("JETFIRE_LOAD", "")
    yield
    os.environ["JETFIRE_LOAD"] = before


def pytest_collection_finish() -> None:
    gc.enable()


# Compiled beside the tests of several processes, which wait and sleep: these left at least 62 s of
# two cores' time idle, 40 s of it at the end, and now leave 6 s.
BESIDE = "test_crosscompile.py"
_beside: list[subprocess.Popen[bytes]] = []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Start what `BESIDE` asks for, once, where it is among the tests: its own come last."""
    if _beside or not any(BESIDE in name for name in ids):
        return
    root = node.config._tmp_path_factory.getbasetemp()
    empty = {f"JETFIRE_{name}": str(root / "beside" / name) for name in ("PROFILES", "STUDIES")}
    _beside.append(
        subprocess.Popen(
            [sys.executable, Path(__file__).parent / "processes" / "crosscompile.py", root],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # where it fails, the test makes them again, and says so
            env={**os.environ, **empty, "OMP_NUM_THREADS": "1"},
            process_group=0,
        )
    )


def pytest_sessionfinish() -> None:
    for process in _beside:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.name == BESIDE)
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    if "quiet" not in config.option.markexpr:
        reasons["quiet"] = "asserts times: ask for it with -m quiet where nothing else runs"
    for item in items:
        for marker, reason in reasons.items():
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give back memory that a test of a GPU left in torch's cache: others' processes share it.

    Ten of them ran out of the 80 GB of one, in a test of RoPE and in those that followed.
    """
    if "gpu" in item.keywords and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


SHIPPED = Path(__file__).parent.parent / "profiles"


@pytest.fixture(autouse=True, scope="session")
def _no_tokens() -> Iterator[None]:
    """Tokens are prepared in a test's own cache, not among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JETFIRE_TOKENS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels run with their defaults, whatever is tuned; what needs profiles makes its own."""
    from jetfire.core import profiles

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
    from jetfire.core import profiles

    monkeypatch.setattr(profiles, "SHIPPED", SHIPPED)
    profiles.forget()
    yield SHIPPED
    monkeypatch.undo()
    profiles.forget()


def _unload() -> Iterator[Callable[[], None]]:
    """Kernels that were loaded are gone after it, or once it is called: of ops, and as modules."""
    from jetfire.core import loaded

    path, modules, named = list(sys.path), set(sys.modules), os.environ.get(loaded.VARIABLE, "")

    def unload() -> None:
        os.environ[loaded.VARIABLE] = named
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
def python() -> Iterator[Callable[..., Any]]:
    """Runs `python` beside the tests, as `forked.Python` does."""
    from jetfire.tests.forked import Python

    beside = Python()
    yield beside
    beside.close()


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
