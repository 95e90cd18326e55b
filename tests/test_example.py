"""The examples run at toy size, and do what they say."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import jetfire

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

FINETUNE = Path(jetfire.__file__).parent / "examples" / "finetune.py"
PACKAGES = 10
TOY = (
    f"--packages {PACKAGES} --pages 40 --vocabulary 400 --length 16 --layers 1 --heads 2 "
    "--width 32 --batch 8 --pretrain 2 --steps 3 --seed 0 --rate 0.01"
)


@pytest.fixture(scope="module")
def finetuned(one_thread, tmp_path_factory):
    """What it prints and writes."""
    folder = tmp_path_factory.mktemp("finetune")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(sys, "argv", [str(FINETUNE), *TOY.split(), "-o", str(folder)])
        runpy.run_path(str(FINETUNE), run_name="__main__")
    return printed.getvalue(), json.loads((folder / "accuracy.json").read_text())


def test_finetune_makes_a_table_of_all_recipes(finetuned):
    printed, found = finetuned
    expected = {f"{m} {r}" for m in ("bert", "gpt2") for r in ("bf16", "int8", "int4-hq-lss")}
    assert found.keys() == expected
    assert all(len(scores) == 1 for scores in found.values())
    assert all(0 <= score <= 1 for scores in found.values() for score in scores)
    assert {
        line.split("|")[1].strip() for line in printed.splitlines() if "| 0." in line
    } == found.keys()
    assert "(chance 0.100)" in printed


def test_finetune_names_as_many_packages_as_asked_for(finetuned):
    line = next(line for line in finetuned[0].splitlines() if "test pages of" in line)
    train, test, packages = map(int, re.findall(r"\d+", line)[:3])
    assert packages == PACKAGES == len(line.partition(":")[2].split())
    assert 0.9 * 40 * PACKAGES < train + test <= 40 * PACKAGES
    assert train > test > 0


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FINETUNE.parent))
    import finetune

    return finetune


def test_pages_name_no_package_and_stay_on_their_side(example, tmp_path, monkeypatch):
    """Of a file all pages are to train on, or all to test; what two packages share is left out."""
    both = "Shared by two packages. " * 10
    for name in ("alpha", "beta"):
        (tmp_path / name).mkdir()
        for i in range(30):
            text = f"{name.upper()} page {i}, of {name}. " * 10
            parts = f'"""{text}"""\n\ndef f():\n    """{both if i == 0 else text + "Second."}"""\n'
            (tmp_path / name / f"m{i}.py").write_text(parts)
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(example, "packages_distributions", lambda: {"alpha": [], "beta": []})
    names, pages = example.corpus(2, 60)
    assert sorted(names) == ["alpha", "beta"]
    assert len(pages) == 2 * 59
    assert not any(re.search("alpha|beta|Shared", page.text, re.IGNORECASE) for page in pages)
    sides = {}
    for page in pages:
        number = re.search(r"page (\d+)", page.text)[1]
        sides.setdefault((page.label, number), set()).add(page.test)
    assert all(len(side) == 1 for side in sides.values())
    assert {True, False} == {page.test for page in pages}
    with pytest.raises(SystemExit, match="2 packages have 60 pages: expected 3 to"):
        example.corpus(3, 60)
