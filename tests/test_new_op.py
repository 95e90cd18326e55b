"""An op of five new files: every verb takes it, and no other file changes.

In a copy of the tree, by processes that import no other.
"""

import filecmp
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetfire.tests import forked

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "new_op"
FILES = {path.relative_to(DATA / "files") for path in (DATA / "files").rglob("*.py")}
SIZES = ("--m", "40", "--n", "70", "--block", "32")
# A command that interprets Triton as quickly as the tests do, with forked workers.
INTERPRETING = """import sys, pytest
from jetfire import cli
from jetfire.tests import forked, quick_interpreter
quick_interpreter.quicken()
forked.fork_workers(pytest.MonkeyPatch())
sys.exit(cli.execute(None, sys.argv[1:]))"""
EXPORTED = ("--m", "256", "--n", "256", "--block", "32", "--kernel", "triton")


def files(root):
    """The package's, its tests, profiles and results, and those at the root, by their places."""
    folders = [path.parent for path in root.glob("*/__init__.py")]
    folders += [root / name for name in ("tests", "docs", "profiles")]
    inner = [path for folder in folders for path in folder.rglob("*")]
    every = (path for path in (*root.glob("[!.]*"), *inner) if path.is_file())
    return {path.relative_to(root) for path in every if path.parent.name != "__pycache__"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The copy's root, and what runs a Python program or a command of `jetfire` in it."""
    folder = tmp_path_factory.mktemp("copy")
    root = folder / "jetfire"
    for path in (*files(ROOT), *FILES):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy((DATA / "files" if path in FILES else ROOT) / path, root / path)
    kept = {name: str(folder / name.lower()) for name in ("PROFILES", "STUDIES", "FUZZ", "CACHE")}
    python = forked.Python(
        **{f"JETFIRE_{name}": place for name, place in kept.items()},
        PYTHONPATH=str(folder),
        TRITON_CACHE_DIR=str(folder / "triton"),
        CUDA_VISIBLE_DEVICES="",
    )

    def run(*words, interpret=False, code=0):
        more = {"TRITON_INTERPRET": "1"} if interpret else {}
        done = python(*words, folder=root, **more)
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def jetfire(*words, **options):
        start = ("-c", INTERPRETING) if "interpret" in options else ("-m", "jetfire.cli")
        return run(*start, *words, **options)

    assert run("-c", "import jetfire; print(jetfire.__path__[0])").strip() == str(root)
    yield SimpleNamespace(root=root, folder=folder, run=run, jetfire=jetfire)
    python.close()
    # No verb has changed a file, in the copy of each process that ran some: what they wrote is
    # elsewhere. And this tree knows nothing of the op.
    assert not FILES & files(ROOT)
    assert files(root) == files(ROOT) | FILES
    assert all(filecmp.cmp(ROOT / path, root / path, False) for path in files(ROOT))


def test_it_is_five_files():
    """A reference, the op, a kernel for the GPU, one for the CPU, and their test."""
    homes = [path.parts[0] for path in sorted(FILES)]
    assert homes == ["kernels_cpu", "kernels_triton", "ops", "reference", "tests"]


def test_its_own_tests_and_those_of_all_ops(copy):
    """Who imports whom, which functions there are, and what they say of wrong arguments."""
    files = [
        f"tests/test_{name}.py"
        for name in ("softsign", "house", "defaults", "arguments", "shipped")
    ]
    chosen = "softsign or (house and not layers) or every_function or shipped"  # a layer is no op
    out = copy.run("-m", "pytest", "-v", "-p", "no:cacheprovider", *files, "-k", chosen)
    passed = [line for line in out.splitlines() if "PASSED" in line]
    for name in ("test_softsign.py", "test_functions[int8_softsign]", "test_every_function_is"):
        assert any(name in line for line in passed), name


def test_list(copy):
    _, _, entry = copy.jetfire("list").partition("  softsign ")
    assert "kernels: torch, triton" in entry.partition("  swiglu ")[0]


def test_bench(copy):
    """Checked and timed both ways, beside peers."""
    file = copy.folder / "bench.json"
    words = ("--mode", "fwd,bwd", "--kernel", "torch,triton", "--peer", "eager", "--rounds", "1")
    copy.jetfire("bench", "softsign", *SIZES, *words, "-o", file, interpret=True)
    rows = {
        (row["kernel"], row["problem"]["mode"]): row for row in json.loads(file.read_text())["rows"]
    }
    for mode in ("fwd", "bwd"):
        for name in ("torch", "triton"):
            row = rows[name, mode]
            assert row["ok"]
            assert row["ms"] > 0
            assert row["vs_peer"]["eager"] > 0


def test_tune(copy):
    """The best of some configs is what bench then takes."""
    words = ("--kernel", "triton", "--trials", "2", "--space", "warps=1,2", "--peer", "none")
    copy.jetfire("tune", "softsign", *SIZES, *words, interpret=True)
    words = ("--kernel", "triton", "--peer", "none", "--rounds", "1", "--strict-profile")
    out = copy.jetfire("bench", "softsign", *SIZES, *words, "--format", "json", interpret=True)
    (row,) = json.loads(out)["rows"]
    assert row["profile"] == "tuned"


def fuzzed(copy, *words):
    """The kinds of failures that are found of each kernel."""
    file = copy.folder / "fuzz.json"
    options = ("--largest", "48", "--interpreter", "-o", file)
    copy.jetfire("fuzz", "softsign", *options, *words, interpret=True, code=3)
    pairs = json.loads(file.read_text())["pairs"]
    assert all(pair["examples"] for pair in pairs)
    return {pair["kernel"]: {one["kind"] for one in pair["failures"]} for pair in pairs}


def test_fuzz(copy):
    """The kernels are right, and one that is wrong is found."""
    found = fuzzed(copy, "--load", DATA / "wrong_kernel.py", "--examples", "10")
    assert found == {"torch": set(), "triton": set(), "wrong-kernel": {"wrong"}}


def test_fuzz_of_gradients(copy):
    """One that the reference has wrong too is found by autograd of the forward."""
    words = ("--kernel", "wrong-gradient", "--examples", "30")
    found = fuzzed(copy, "--load", DATA / "wrong_gradient.py", *words)
    assert found == {"wrong-gradient": {"gradient"}}


def test_audit(copy):
    """Both ways, compiled for another machine."""
    out = copy.jetfire("audit", "softsign", *SIZES, "--mode", "fwd,bwd", "--arch", "90")
    assert out.count("softsign_kernel") == 2


@pytest.fixture(scope="module")
def tuned(copy):
    copy.run(DATA / "tuned.py")


@pytest.mark.parametrize("target", ["cubin", "torch"])
def test_export(copy, tuned, target):
    """As files: others' exports are built and run by tests of their own."""
    folder = copy.folder / target
    copy.jetfire("export", "softsign", *EXPORTED, "--target", target, "--no-check", "-o", folder)
    assert "softsign" in (folder / "README.md").read_text()


def test_compile(copy):
    copy.run(DATA / "compiled.py")


def test_shipped_profiles(copy):
    """`make profiles` tunes it, for the shapes of every known model both ways."""
    code = """from jetfire.tuner import problems
print(*(case.problem.mode for case in problems.cases(["softsign"])))
print(*problems.commands())"""
    modes, commands = copy.run("-c", code).splitlines()
    assert modes.split().count("fwd") == modes.split().count("bwd") > 10
    assert " softsign " in commands
