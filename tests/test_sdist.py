"""The source distribution: all that the checkout has, so that its tests run unpacked."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tracked():
    """Return the files that git has, but for the link to the tree itself."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no checkout: which files there are is not known")
    return {name for name in done.stdout.splitlines() if name != ".typings/jetfire"}


@pytest.fixture(scope="module")
def unpacked(tracked, tmp_path_factory):
    """Build the distribution in a copy, and return the folder that it unpacks to."""
    pytest.importorskip("setuptools", "77")
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("made")
    for name in tracked:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(made)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    (archive,) = made.glob("jetfire-*.tar.gz")
    # By tar: Python 3.11.2, which is Debian 12's, knows none of the filters that 3.12 asks for.
    subprocess.run(["tar", "xf", archive, "-C", made], check=True)
    return made / archive.name.removesuffix(".tar.gz")


def test_it_holds_what_the_checkout_does(tracked, unpacked):
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert tracked <= found
    built = {name for name in found - tracked if "egg-info/" not in name}
    assert built <= {"PKG-INFO", "setup.cfg"}


def test_its_tests_run(unpacked):
    """Those of a few files, with the package imported from there."""
    subprocess.run(["make", "-s", ".typings/jetfire"], cwd=unpacked, check=True)
    files = ["tests/test_report.py", "tests/test_sdist.py"]
    words = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=unpacked,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(unpacked / ".typings")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " failed" not in done.stdout
