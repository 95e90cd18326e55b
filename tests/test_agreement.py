"""Whether the processes of a job launch kernels of the same bits: two, with a folder each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jetfire.commands.new import EXAMPLES
from jetfire.core.device import Device
from jetfire.nn import check_agreement
from jetfire.nn.agreement import _Launch, differences

SCRIPT = Path(__file__).parent / "processes" / "agreement.py"
CPU = Device.parse("cpu")
RUNS = (EXAMPLES / "row_logsumexp.py").read_text()
RUNS = RUNS.replace("    never_empty", '    same_bits_over = "runs"\n    never_empty')
A, B = "a" * 64, "b" * 64


# Of each the op, and the rows per call and the digest in each process's profile.
CASES = {
    "other configs": (RUNS, ((16, ""), (64, ""))),
    "other digests": (RUNS, ((16, A), (16, B))),
    "one digest": (RUNS, ((16, A), (64, A))),
    "one result": (RUNS.replace('"runs"', '"configs"'), ((16, ""), (64, ""))),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What two processes say in each case."""
    home = tmp_path_factory.mktemp("agreement")
    for name, (text, _) in CASES.items():
        (home / name).mkdir()
        (home / name / "own.py").write_text(text)
    profiles = {name: of_ranks for name, (_, of_ranks) in CASES.items()}
    (home / "cases.json").write_text(json.dumps(profiles))
    words = [sys.executable, str(SCRIPT)]
    started = [subprocess.Popen([*words, str(rank), str(home)]) for rank in range(2)]
    try:
        assert [process.wait(timeout=600) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return {
        name: [json.loads((home / name / f"{rank}.json").read_text()) for rank in range(2)]
        for name in CASES
    }


def test_processes_of_other_configs(told):
    first, second = told["other configs"]
    (line,) = first["warned"]
    assert line == (
        "results may differ in bits: row_logsumexp (m=64 n=8): "
        f"torch rows=16 on {CPU.label} in rank 0, torch rows=64 on {CPU.label} in rank 1: "
        "give all processes the same profiles (JETFIRE_PROFILES), and GPUs of one kind"
    )
    assert second["warned"] == []  # the first speaks for all
    assert first["refused"] == second["refused"] == line


def test_processes_of_other_digests(told):
    first, second = told["other digests"]
    (line,) = first["warned"]
    assert f"rows=16 on {CPU.label} (digest aaaaaaaa) in rank 0, " in line
    assert f"rows=16 on {CPU.label} (digest bbbbbbbb) in rank 1: " in line
    assert first["refused"] == second["refused"] == line


@pytest.mark.parametrize("name", ["one digest", "one result"])
def test_processes_of_other_configs_that_give_the_same_bits(name, told):
    assert told[name] == [{"warned": [], "refused": ""}] * 2


def launched(*of_ranks):
    """Launches of one problem in ranks, of which each is what decides, and a digest."""
    return {
        rank: {("gemm", "m=8"): _Launch((decides,), digest, f"{decides} {digest}")}
        for rank, (decides, digest) in enumerate(of_ranks)
    }


@pytest.mark.parametrize(
    ("of_ranks", "agree"),
    [
        ([("one", None), ("one", None)], True),
        ([("one", A), ("one", None), ("one", A)], True),
        ([("one", A), ("two", A)], True),
        ([("one", A), ("one", B)], False),
        ([("one", A), ("two", None)], False),
        ([("one", None), ("two", None)], False),
        ([("one", None)], True),
    ],
)
def test_what_agrees(of_ranks, agree):
    assert (differences(launched(*of_ranks)) == []) == agree


def test_a_line_per_op_names_its_ranks():
    ranks = launched(*[("one", None)] * 5, ("two", None), ("two", None))
    for rank, kind in enumerate("0000011"):
        ranks[rank]["gemm", "m=9"] = ranks[rank]["add", "m=7"] = _Launch((kind,), None, kind)
    ranks[6]["gelu", "m=1"] = _Launch(("its alone",), None, "its alone")  # of a shard, say
    assert differences(ranks) == [
        "gemm (m=8): one None in ranks 0, 1, 2 and 2 more, two None in ranks 5, 6; and 1 more",
        "add (m=7): 0 in ranks 0, 1, 2 and 2 more, 1 in ranks 5, 6",
    ]


def test_a_process_alone_agrees():
    check_agreement(strict=True)
