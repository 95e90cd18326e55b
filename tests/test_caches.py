"""Where caches are: each its own folder, or one for this run alone where that cannot be written."""

import os
from pathlib import Path

import pytest

from jetfire.core import environment, files
from jetfire.core.device import Device
from jetfire.gpt2.data import prepared
from jetfire.kernels_cuda import compile as compiler
from jetfire.measure import peaks
from jetfire.measure.load import Load

NOWHERE = "/proc/nobody"
NAMES = ("TRITON_HOME", "CUPY_CACHE_DIR", "MPLCONFIGDIR", "JETFIRE_CACHE", "JETFIRE_TOKENS")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in (*NAMES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def folders() -> dict[str, str]:
    """The variables that are set for a run."""
    before = dict(os.environ)
    with environment.caches():
        found = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert os.environ == before
    return found


def test_one_variable_moves_all_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache() == tmp_path / "jetfire"
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "ours"))
    assert files.cache() == tmp_path / "ours"
    assert prepared.cache() == tmp_path / "ours" / "data"
    assert compiler.cache_folder() == tmp_path / "ours" / "cubin"
    monkeypatch.setattr(peaks, "measure", lambda _: {"copy_gbps": 1.0})
    peaks.cached(Load(Device("cpu")))
    assert (tmp_path / "ours" / "peaks.json").exists()


def test_a_home_that_can_be_written_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders() == {}


def test_without_a_home_all_is_for_this_run_but_tokens(monkeypatch):
    """Training was refused wherever a kernel of CUDA C++ was to be compiled for it."""
    monkeypatch.setenv("HOME", NOWHERE)
    with environment.caches():
        run = Path(os.environ["TRITON_HOME"])
        assert run.is_dir()
        assert compiler.cache_folder() == run / "cubin"
        assert files.cache() == run
        assert prepared.cache() == Path(NOWHERE, ".cache", "jetfire", "data")
    assert not run.exists()


def test_a_cache_beside_a_home_that_cannot_be_written_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", NOWHERE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    assert set(folders()) == {"TRITON_HOME", "CUPY_CACHE_DIR", "MPLCONFIGDIR"}


@pytest.mark.parametrize("place", [NOWHERE, "file"])
def test_a_cache_that_cannot_be_written_is_replaced_alone(place, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    found = folders()
    assert set(found) == {"JETFIRE_CACHE", "JETFIRE_TOKENS"}
    assert found["JETFIRE_TOKENS"] == str(tmp_path / place / "jetfire")


def test_folders_that_are_given_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", NOWHERE)
    monkeypatch.setenv("TRITON_HOME", "theirs")
    monkeypatch.setenv("JETFIRE_CACHE", "/proc/mine")
    found = folders()
    assert (found["TRITON_HOME"], found["JETFIRE_CACHE"]) == ("theirs", "/proc/mine")
    assert "JETFIRE_TOKENS" not in found
    monkeypatch.delenv("JETFIRE_CACHE")
    monkeypatch.setenv("JETFIRE_TOKENS", str(tmp_path))
    assert folders()["JETFIRE_TOKENS"] == str(tmp_path)
