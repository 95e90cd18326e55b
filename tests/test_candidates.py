"""Training steps with CUDA's candidates in place of Triton's kernels, in a process of their own.

There the first call of CUDA in autograd's thread is a candidate's.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jetfire.core import registry

SCRIPT = Path(__file__).parent / "processes" / "candidates.py"
LLAMA = "width=256,heads=4,kv_heads=4,hidden=384,batch=2,context=128"
GPT2 = "width=256,heads=4,batch=2,context=128"
CASES = [
    ("block", GPT2, "int8"),
    ("llama-block", LLAMA, "int8"),
    ("gpt2-124m", f"layers=2,vocabulary=512,{GPT2}", "int8"),
    ("gpt2-124m", f"layers=2,vocabulary=512,{GPT2}", "int4-hq-bs"),
    ("llama-160m", f"layers=2,vocabulary=512,optimizer=adamw8,{LLAMA}", "int8-block32"),
]


def candidates():
    """(op, kernel) of each."""
    for op in registry.names():
        yield from ((op, k.name) for k in registry.kernels(op).values() if k.candidate)


def benched(folder, case, sizes, recipe):
    """The rows of a step, and the kernels that its ops chose."""
    rows = folder / f"{case}-{recipe}.json"
    words = ["train", "bench", case, "--recipe", recipe, "--set", sizes, "--peer", "eager"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, "--rounds", "2", "--verbose", "-o", rows],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    chosen = re.findall(r"^jetfire: (\w+) .*: (\w+), \w+ \w+\(", done.stderr, re.MULTILINE)
    return json.loads(rows.read_text())["rows"], set(chosen)


@pytest.mark.gpu
def test_steps_by_candidates_are_as_near_to_bf16_s(tmp_path):
    chosen = set()
    for case in CASES:
        rows, used = benched(tmp_path, *case)
        chosen |= used
        assert all(row["ok"] for row in rows if row["kernel"] != "eager"), (case, rows)
    assert set(candidates()) <= chosen
