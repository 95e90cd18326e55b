"""`jetfire train study`: pairs and intervals, runs that go on, fail or are others', the record."""

import csv
import dataclasses
import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jetfire.cli import execute
from jetfire.core.errors import NoDeviceError, UsageError
from jetfire.gpt2.training import log, study, study_record
from jetfire.gpt2.training.arms import Arm
from jetfire.gpt2.training.finished import addition
from jetfire.gpt2.training.settings import EARLIER, make
from jetfire.gpt2.training.study_record import StudyRun, difference
from jetfire.measure.noise import quantile
from jetfire.measure.results import Results
from jetfire.report import documents
from jetfire.report import study as texts
from jetfire.tests import forked
from jetfire.tests.given import changed

LIMIT_S = 3600
SMALL = (
    "layers=1,heads=2,width=32,context=16,batch=4,warmup=2,evaluate_every=4,"
    "evaluate_batches=1,checkpoint_every=4"
)


# --- pairs and intervals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (9, 2.26216),
        (30, 2.04227),
        (120, 1.97993),
        (1000, 1.96234),
        (10**8, 1.96234),
    ],
)
def test_quantiles_are_those_of_printed_tables(freedom, expected):
    assert quantile(freedom) == pytest.approx(expected, rel=1e-5)


def test_an_interval_is_over_seeds():
    """0.1, 0.3 and 0.2: mean 0.2, deviation 0.1, and t of two degrees of freedom 4.30265."""
    found = difference({2: 0.2, 0: 0.1, 1: 0.3}, {0: [9.0], 1: [9.0], 2: [9.0]})
    half = 4.30265 * 0.1 / math.sqrt(3)
    assert found["mean"] == pytest.approx(0.2)
    assert [found["low"], found["high"]] == pytest.approx([0.2 - half, 0.2 + half], abs=1e-5)
    assert (found["over"], found["seeds"], found["values"]) == ("seeds", [0, 1, 2], [0.1, 0.3, 0.2])


def test_the_interval_of_one_seed_is_over_its_steps():
    """1, 2, 3 and 4: deviation √(5/3), and t of three degrees of freedom 3.18245."""
    found = difference({7: 2.5}, {7: [1.0, 2.0, 3.0, 4.0]})
    half = 3.18245 * math.sqrt(5 / 3) / 2
    assert [found["low"], found["high"]] == pytest.approx([2.5 - half, 2.5 + half], abs=1e-4)
    assert (found["over"], found["seeds"]) == ("steps", [7])
    for alone in ({7: [1.0]}, None):
        found = difference({7: 2.5}, alone)
        assert (found["mean"], found["low"], found["high"], found["over"]) == (2.5, *[None] * 3)


DIGESTS = {"train": "1" * 64, "validation": "2" * 64}
SOURCE = {"name": "text", "files": 3, "bytes": 9999, "sha256": "3" * 64}


def write(
    folder: Path,
    recipe="bf16",
    seed=0,
    apart=0.0,
    end=True,
    device="NVIDIA H200",
    steps=20,
    tokens=DIGESTS,
    kind="cuda",
    **changes,
) -> Path:
    """Write a run's folder as a run leaves it; its losses are 5 − step/10 + seed + apart."""
    head = {key: changes.pop(key) for key in ("runs_at_once",) if key in changes}
    named = Arm.parse(recipe, "--recipe")
    values = {"recipe": named.recipe, "seed": seed, "steps": steps, "order": "shuffled"}
    values |= {**named.settings, **changes}
    run = folder / f"{recipe}-seed{seed}"
    run.mkdir(parents=True)
    records = [
        {
            "kind": "run",
            "settings": make("tiny", values).as_dict(),
            "versions": {"torch": "2"},
            "device": {"name": device, "kind": kind, "processes": 1},
            "commit": "abc",
            "tokens": {"train": 40961, "validation": 1000, "sha256": tokens},
            "sources": [SOURCE],
            **head,
        },
        *(
            {
                "kind": "step",
                "step": step,
                "loss": 5 - step / 10 + seed + apart * step,
                "ms": 8.0 + (step == 1),
            }
            for step in range(1, steps + 1)
        ),
        {"kind": "evaluation", "step": 10, "loss": 2.5 + seed},
        {"kind": "evaluation", "step": steps, "loss": 3.0 + seed + apart},
    ]
    if end:
        records.append({"kind": "end", "step": steps})
    (run / log.NAME).write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def made(folder: Path, window=(17, 20), asked=()) -> study_record.StudyRecord:
    """The record of a folder, written and read again."""
    found = study_record.make(study.begun(folder), window, "bf16", asked)
    study_record.write(found, folder / "study.json")
    again = study_record.read(folder / "study.json")
    assert again == found
    return again


def test_a_record_pairs_runs_by_seed(tmp_path):
    for recipe, seed, apart in (
        ("int8", 0, 0.01),
        ("int8", 1, 0.03),
        ("int8", 5, 9.0),
        ("int8-block32", 1, 0.02),
    ):
        write(tmp_path, recipe, seed, apart)
    for seed in (0, 1, 2):
        write(tmp_path, "bf16", seed)
    write(tmp_path, "int8-block32", 0, end=False)
    (tmp_path / "other").mkdir()
    found = made(tmp_path, asked=["int8-seed0", "int8-block64-seed0"])
    assert list(found["recipes"]) == ["bf16", "int8", "int8-block32"]
    base, int8, lone = found["recipes"].values()
    assert base["paired_difference"] is base["validation_difference"] is None
    assert [run["training_loss"] for run in base["runs"]] == pytest.approx([3.15, 4.15, 5.15])
    # Losses of 3.3, 3.2, 3.1 and 3: deviation √(0.05/3), and half of it the mean's.
    assert base["runs"][0]["standard_error"] == pytest.approx(math.sqrt(0.05 / 3) / 2, abs=1e-6)
    apart = int8["paired_difference"]
    assert (apart["seeds"], apart["values"]) == ([0, 1], pytest.approx([0.185, 0.555]))
    assert apart["mean"] == pytest.approx(0.37)
    # Two values 0.37 apart: half of that and t of one degree of freedom.
    assert apart["high"] - apart["mean"] == pytest.approx(12.7062 * 0.185, rel=1e-4)
    assert int8["validation_difference"]["values"] == pytest.approx([0.01, 0.03])
    assert [run["seed"] for run in int8["runs"]] == [0, 1, 5]
    apart = lone["paired_difference"]
    # 0.34, 0.36, 0.38 and 0.40 over four steps.
    half = 3.18245 * 0.02 * math.sqrt(5 / 3) / 2
    assert [apart["low"], apart["high"]] == pytest.approx([0.37 - half, 0.37 + half], abs=1e-5)
    assert apart["over"] == "steps"
    assert lone["validation_difference"]["low"] is None
    assert found["unfinished"] == ["int8-block32-seed0", "int8-block64-seed0"]


def test_a_record_goes_on_where_its_runs_are_gone(tmp_path):
    """Parts of a study, each with its own logs, make the record that all of them make."""
    wanted = [(recipe, seed) for recipe in ("bf16", "int8") for seed in (0, 1, 2)]
    wanted += [("int8-block32", 1), ("int8-block32", 2)]
    for part, pairs in {
        "whole": wanted,
        "first": [("bf16", 0), ("bf16", 1), ("int8", 0), ("int8", 1), ("int8-block32", 1)],
        "second": [("bf16", 2), ("int8", 2), ("int8-block32", 2)],
    }.items():
        for recipe, seed in pairs:
            write(tmp_path / part, recipe, seed, 0.01 * (1 + seed) * (recipe != "bf16"))
    whole, first, second = (made(tmp_path / part) for part in ("whole", "first", "second"))
    file = tmp_path / "result.json"
    found = study_record.added(second, first, file)
    assert found == whole
    assert study_record.added(found, first, file) == whole
    # A lone seed keeps the interval over its steps.
    lone = first["recipes"]["int8-block32"]["paired_difference"]
    write(tmp_path / "third", "bf16", 7)
    found = study_record.added(made(tmp_path / "third"), first, file)
    assert found["recipes"]["int8-block32"]["paired_difference"] == lone
    # Also where the base's log alone is gone; not where the base was run anew.
    write(tmp_path / "fourth", "int8-block32", 1, 0.02)
    found = study_record.added(made(tmp_path / "fourth"), first, file)
    assert found["recipes"]["int8-block32"]["paired_difference"] == lone
    write(tmp_path / "fifth", "bf16", 1, 0.5)
    found = study_record.added(made(tmp_path / "fifth"), first, file)
    anew = found["recipes"]["int8-block32"]["paired_difference"]
    assert anew["mean"] == pytest.approx(lone["mean"] - 0.5 * 18.5)
    assert anew["over"] is None
    other = study_record.added(found, {**first, "device": "NVIDIA A100"}, file)
    assert study_record.added(found, other, file)["device"] == other["device"]


def test_a_record_of_earlier_versions_is_gpt2_s(tmp_path):
    """When there was one family of models and one optimizer, none was said."""
    for part, seeds in {"whole": (0, 1), "first": (0,), "second": (1,)}.items():
        for recipe, seed in itertools.product(("bf16", "int8"), seeds):
            write(tmp_path / part, recipe, seed, 0.01 * (recipe == "int8"))
    whole, _, second = (made(tmp_path / part) for part in ("whole", "first", "second"))
    file = tmp_path / "first" / "study.json"
    kept = json.loads(file.read_text())
    for name in EARLIER:
        del kept["settings"][name]
    file.write_text(json.dumps(kept))
    assert study_record.added(second, study_record.read(file), file) == whole


def test_a_record_pairs_optimizers_too(tmp_path):
    """Arms of one recipe: their runs say which optimizer they had, and the common settings none."""
    arms = {"bf16": 0.0, "int8": 0.01, "int8+adamw8": 0.03}
    for arm, seed in itertools.product(arms, (0, 1)):
        write(tmp_path, arm, seed, arms[arm])
    found = made(tmp_path)
    assert list(found["recipes"]) == ["bf16", "int8", "int8+adamw8"]
    assert "optimizer" not in found["settings"]
    ours = found["recipes"]["int8+adamw8"]
    assert [run["settings"] for run in ours["runs"]] == [{"optimizer": "adamw8"}] * 2
    assert ours["paired_difference"]["values"] == pytest.approx([0.03 * 18.5] * 2)
    assert found["recipes"]["int8"]["paired_difference"]["values"] == pytest.approx([0.185] * 2)
    other = study_record.make(study.begun(tmp_path), (17, 20), "int8+adamw8")
    assert other["recipes"]["int8+adamw8"]["paired_difference"] is None
    assert other["recipes"]["int8"]["paired_difference"]["mean"] == pytest.approx(-0.02 * 18.5)


@pytest.mark.parametrize("later", [["int8+adamw8"], ["bf16", "int8+adamw8"]])
@pytest.mark.parametrize("old", [True, False])
def test_an_arm_is_added_to_a_record_of_other_arms(later, old, tmp_path):
    """As where the record was made when there was one optimizer."""
    for arm in dict.fromkeys(("bf16", "int8", *later)):
        write(tmp_path / "whole", arm)
        if arm in ("bf16", "int8"):
            write(tmp_path / "first", arm)
        if arm in later:
            write(tmp_path / "second", arm)
    whole, _, second = (made(tmp_path / part) for part in ("whole", "first", "second"))
    file = tmp_path / "first" / "study.json"
    if old:
        kept = json.loads(file.read_text())
        del kept["settings"]["optimizer"]
        file.write_text(json.dumps(kept))
    found = study_record.added(second, study_record.read(file), file)
    assert list(found["recipes"]) == ["bf16", "int8", "int8+adamw8"]
    for name, losses in found["recipes"].items():
        assert losses["runs"] == whole["recipes"][name]["runs"]
    assert found["settings"] == whole["settings"]
    assert found["recipes"]["int8+adamw8"]["paired_difference"]["mean"] == 0.0


def test_an_optimizer_that_no_arm_names_is_that_of_all(tmp_path):
    write(tmp_path, "bf16", optimizer="adamw8")
    write(tmp_path, "int8", optimizer="adamw8")
    write(tmp_path, "int8+adamw")
    found = made(tmp_path)
    assert list(found["recipes"]) == ["bf16", "int8", "int8+adamw"]
    write(tmp_path, "int8-block32")
    with pytest.raises(UsageError, match=r"block32-seed0: was begun with optimizer=adamw: expe.*8"):
        made(tmp_path)


def test_a_run_with_another_optimizer_than_its_name_says_is_refused(tmp_path):
    write(tmp_path, "int8+adamw8", optimizer="adamw")
    with pytest.raises(UsageError, match="of another name: expected int8-seed0"):
        made(tmp_path)


def test_arms_are_named_one_way():
    assert Arm.parse("int8+adamw8", "").name == "int8+adamw8"
    assert Arm.parse("int8", "").settings == {}
    words = asked_for(Path("s"), "bf16", "int8+adamw8").words(Arm("int8", ("adamw8",)), 1)
    assert words[:5] == ["tiny", "--recipe", "int8", "--seed", "1"]
    assert words[5:] == ["--set", "order=shuffled", "--set", "optimizer=adamw8"]
    chance = Arm.parse("bf16+deterministic", "")
    assert asked_for(Path("s")).words(chance, 1)[-2:] == ["--set", "deterministic=true"]
    run = asked_for(Path("s")).run(chance, 1).begun()
    assert chance.names(run)
    assert not chance.names(dataclasses.replace(run, deterministic=False))
    assert Arm.of(run) == chance


def test_an_arm_s_settings_take_the_place_of_all_runs():
    asked = asked_for(Path("s"), settings=["order=drawn,optimizer=adamw8,batch=2"])
    assert asked.run(Arm("int8"), 0).given()["optimizer"] == "adamw8"
    own = asked.run(Arm("int8", ("adamw", "bf16weights")), 0).given()
    expected = {"order": "drawn", "optimizer": "adamw", "batch": "2", "weights": "bf16"}
    assert own == {**expected, "preset": "tiny", "recipe": "int8", "seed": 0}


@pytest.mark.parametrize(
    ("changes", "window", "says"),
    [
        ({"batch": 4}, (17, 20), "batch=8"),
        ({"tokens": {"train": "4" * 64, "validation": "2" * 64}}, (17, 20), "data=111111111111"),
        ({}, (16, 20), r"window=\(17, 20\)"),
    ],
)
def test_a_record_of_another_study_is_kept(changes, window, says, tmp_path):
    write(tmp_path / "one", batch=8)
    write(tmp_path / "other", **{"batch": 8, **changes})
    first, second = made(tmp_path / "one"), made(tmp_path / "other", window)
    if "batch" in changes:  # which changes how many tokens are read
        second["tokens"] = first["tokens"]
    with pytest.raises(UsageError, match=f"result.json: holds a study with {says}"):
        study_record.added(second, first, tmp_path / "result.json")


@pytest.mark.parametrize(
    ("record", "words", "says"),
    [
        ('{"schema": 1}', [], "result.json: "),
        (None, ["--set", "batch=4"], "result.json: holds a study with batch=8"),
        (None, ["--window", "16:20"], "result.json: holds a study with window="),
        (None, ["--base", "int8"], "result.json: holds a study with base=bf16"),
    ],
)
def test_a_record_that_cannot_go_on_is_refused_before_anything_runs(
    record, words, says, tmp_path, capsys
):
    file = tmp_path / "result.json"
    if record is None:
        write(tmp_path / "one", batch=8)
        record = json.dumps(made(tmp_path / "one"))
    file.write_text(record)
    window = [] if "--window" in words else ["--window", "17:20"]
    batch = [] if "--set" in words else ["--set", "batch=8"]
    usual = ["--steps", "20", *batch, *window, "--record", str(file)]
    folder = tmp_path / "new"
    assert execute("train", ["study", "tiny", *usual, *words, "-o", str(folder)]) == 2
    captured = capsys.readouterr().err
    assert says in captured
    assert captured.count("\n") == 1
    assert not folder.exists()
    assert file.read_text() == record


@pytest.mark.parametrize(
    ("words", "given", "names"),
    [
        (["--base", "int4-hq"], "int4-hq", "bf16, int8"),
        (["--base", "bf16", "--recipe", "int8"], "bf16", "int8"),
        (["--base", "int8+adamw8", "--seed", "0,1"], "int8+adamw8", "bf16, int8"),
    ],
)
def test_a_base_without_runs_is_refused_before_anything_runs(words, given, names, home, capsys):
    assert run(*words) == 2
    assert capsys.readouterr().err == f"jetfire: --base {given}: expected one of {names}\n"
    assert not (home / "study").exists()


def test_a_base_is_a_recipe_of_the_command_the_folder_or_the_record(tmp_path):
    def asked(*recipes, **more):
        one = asked_for(tmp_path / "new", *recipes, steps=20, window="17:20")
        return dataclasses.replace(one, **more)

    study.check(asked("bf16", "int8", base="int8"))
    study.check(asked("int8"))  # its base is another command's
    write(tmp_path / "one")
    made(tmp_path / "one")
    study.check(asked("int8", base="bf16", output=tmp_path / "one"))
    study.check(asked("int8", base="bf16", record=tmp_path / "one" / "study.json"))
    with pytest.raises(UsageError, match="--base bf16: expected one of int8"):
        study.check(asked("int8", base="bf16"))


def test_a_record_says_what_was_trained_on_what(tmp_path):
    run = write(tmp_path, compile="true")
    write(tmp_path, "int8", runs_at_once=2)
    moved = write(tmp_path, "int8-block32")
    lines = (moved / log.NAME).read_text().splitlines()
    other = {
        **json.loads(lines[0]),
        "kind": "resume",
        "step": 5,
        "device": {"name": "NVIDIA H100", "kind": "cuda", "processes": 1},
    }
    lines.insert(6, json.dumps(other))
    (moved / log.NAME).write_text("\n".join(lines) + "\n")
    found = made(tmp_path)
    assert found["device"] == "NVIDIA H200, NVIDIA H100"
    assert (found["preset"], found["window"], found["base"]) == ("tiny", (17, 20), "bf16")
    assert (found["tokens"], found["epochs"], found["fresh"]) == (20480, 0.5, True)
    assert found["data"]["tokens"]["sha256"] == DIGESTS
    assert found["data"]["sources"] == [SOURCE]
    assert found["settings"]["batch"] == 16
    assert not found["settings"].keys() & {"seed", "recipe", "data", "compile"}
    times = {name: one["runs"][0]["ms"] for name, one in found["recipes"].items()}
    assert times == {"bf16": 8.0, "int8": None, "int8-block32": None}
    assert found["recipes"]["bf16"]["runs"][0]["settings"] == {"compile": True}
    assert texts.table(found).rows[0] == ["bf16", "1", "3.1500", "–", "3.0000", "–", "8.0"]
    (own,) = found["recipes"]["bf16"]["runs"]
    found["recipes"]["bf16"]["runs"].append({**own, "settings": {"compile": False}})
    assert texts.table(found).rows[0][-1] == "–"  # two ways to run have no time in common
    text = texts.explained(found)
    assert "steps 17 to 20, each token read once (0.50 epochs)" in text
    assert "Brackets are over its steps" in text
    shutil.rmtree(run)
    assert made(tmp_path)["recipes"]["int8"]["paired_difference"] is None


@pytest.mark.parametrize(
    ("changes", "often"),
    [({}, 0.5), ({"steps": 40}, 1.0), ({"steps": 41}, 1.025), ({"order": "drawn"}, 0.5)],
)
def test_tokens_are_fresh_where_none_is_read_twice(changes, often):
    """40 steps of 16 windows of 64 targets, which 40961 tokens have."""
    one = make("tiny", {"order": "shuffled", "steps": 20, **changes})
    assert study_record.epochs(one, 40961) == pytest.approx(often, rel=1e-4)
    assert study_record.fresh(one, 40961) == (changes in ({}, {"steps": 40}))
    assert not study_record.fresh(make("tiny", {"order": "shuffled", "steps": 40}), 40960)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 30}, "steps=30: expected 20"),
        ({"batch": 8}, "batch=8: expected 16"),
        ({"block": "64"}, "block=64: expected recipe"),
        ({"tokens": {"train": "4" * 64, "validation": "2" * 64}}, "other tokens: expected the"),
        ({"device": "AMD", "kind": "cpu"}, "device cpu: expected cuda"),
    ],
)
def test_runs_of_another_study_are_refused(changes, says, tmp_path):
    write(tmp_path)
    write(tmp_path, "int8", **changes)
    with pytest.raises(UsageError, match=rf"int8-seed0: was begun with {says}.*, as bf16-seed0"):
        made(tmp_path)


def test_a_renamed_run_and_a_log_with_a_hole_are_refused(tmp_path):
    run = write(tmp_path)
    lines = (run / log.NAME).read_text().splitlines(keepends=True)
    (run / log.NAME).write_text("".join(lines[:18] + lines[19:]))
    with pytest.raises(UsageError, match=r"log\.jsonl: expected the loss of step 18"):
        made(tmp_path)
    run.rename(tmp_path / "bf16-seed3")
    with pytest.raises(UsageError, match="bf16-seed3: holds a run of another name: expected bf16-"):
        made(tmp_path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda found: found.update(schema=2), "schema '2': this version reads schema 1"),
        (lambda found: found.pop("window"), "window is missing"),
        (lambda found: found["recipes"]["bf16"].update(runs=[]), "at least 1"),
        (lambda found: found["recipes"]["bf16"]["runs"][0].update(ms=-1.0), "ms=-1.0: expected"),
        (lambda found: found.update(device="\x1b[2J"), "text without control characters"),
    ],
)
def test_a_damaged_record_is_refused_in_a_line(damage, says, tmp_path):
    write(tmp_path)
    made(tmp_path)
    file = tmp_path / "study.json"
    found = json.loads(file.read_text())
    damage(found)
    file.write_text(json.dumps(found))
    with pytest.raises(UsageError, match=says) as error:
        study_record.read(file)
    assert "\n" not in str(error.value)


def test_a_bench_s_file_is_no_record(tmp_path, capsys):
    file = tmp_path / "g.json"
    content = {"schema": 1, "device": {"name": "AMD EPYC"}, "rows": []}
    file.write_text(json.dumps(content))
    words = ["study", "tiny", "--record", str(file), "-o", str(tmp_path / "new")]
    assert execute("train", words) == 2
    said = "has no recipes: expected a study's record"
    assert capsys.readouterr().err == f"jetfire: {file}: {said}\n"
    assert json.loads(file.read_text()) == content


def test_the_page_and_the_readme_have_the_study(tmp_path):
    file = tmp_path / "results" / "h200.json"
    file.parent.mkdir()
    file.write_text(Results({"name": "NVIDIA H200", "kind": "cuda"}, []).to_json())
    for recipe, seed, apart in (
        ("bf16", 0, 0),
        ("bf16", 1, 0),
        ("int8", 0, 0.01),
        ("int8", 1, 0.01),
    ):
        write(tmp_path / "runs", recipe, seed, apart)
    study_record.write(made(tmp_path / "runs"), file.with_name("study-tiny.json"))
    write(tmp_path / "elsewhere", device="NVIDIA A100")
    study_record.write(made(tmp_path / "elsewhere"), file.with_name("study-a100.json"))
    readme = file.with_name("README.md")
    readme.write_text(f"{documents.BEGIN}\n{documents.END}\n")
    documents.report(file, readme, False, addition)
    assert documents.report(file, readme, True, addition) == []
    row = "| int8 | 2 | 3.8350 | +0.1850 [+0.1850, +0.1850] | 3.5100 | +0.0100 [+0.0100, +0.0100] |"
    page = file.with_suffix(".md").read_text()
    assert "## Study of recipes, tiny\n\n20 steps of 1024 tokens, 0.0 M in all, of python's" in page
    for text in (page, readme.read_text()):
        assert text.count(row) == text.count("minus bf16's | validation loss") == 1
    assert "| tiny, 0.0 M tokens: recipe | seeds |" in readme.read_text()
    # Of two devices it is beside the results of the first, and says which runs were on the other.
    found = study_record.read(file.with_name("study-tiny.json"))
    found["device"] += ", NVIDIA A100"
    for run in found["recipes"]["int8"]["runs"]:
        run["device"] = "NVIDIA A100"
    found["settings"]["outliers"] = 50.0
    study_record.write(found, file.with_name("study-tiny.json"))
    documents.report(file, readme, False, addition)
    page = file.with_suffix(".md").read_text()
    rate = f"{found['settings']['rate']:g}"
    assert f"## Study of recipes, tiny with outliers ×50, rate {rate}\n" in page
    assert "| bf16 | 2 |" in page
    assert "| int8 (NVIDIA A100) | 2 |" in page
    file.with_name("study-tiny.json").write_text("{}")
    with pytest.raises(UsageError, match=r"study-tiny\.json: schema 'None'"):
        documents.report(file, readme, True, addition)


# --- where runs are done ------------------------------------------------------------------------


def asked_for(folder: Path, *recipes: str, **more) -> study.StudyOptions:
    return study.StudyOptions("tiny", folder, recipes or ("bf16", "int8"), (0, 1), **more)


@pytest.mark.parametrize(
    ("device", "visible", "count", "expected"),
    [
        ("auto", None, 2, ["0", "1"]),
        ("cuda", "3,GPU-5", 2, ["3", "GPU-5"]),
        ("cuda:1", "3,5", 2, ["5"]),
        ("auto", None, 0, [None]),
        ("cpu", None, 2, [None]),
    ],
)
def test_every_visible_gpu_is_a_place(device, visible, count, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert study.places(device) == expected
    with pytest.raises(NoDeviceError, match=f"device 'cuda:2': this machine has {count} CUDA"):
        study.places("cuda:2")


@pytest.mark.parametrize(
    ("jobs", "at_once"), [(None, 1), (1, 1), (3, 2), (9, 2)], ids=["each GPU", "one", "three", "9"]
)
def test_runs_take_turns_on_the_gpus(jobs, at_once, tmp_path, monkeypatch):
    """Of two GPUs; a run ends at the third look at it."""
    running, most, began = [], [], []

    class Fake:
        said = ""

        def __init__(self, name, words, place, shared):
            self.name, self.place, self.looks = name, place, 0
            running.append(self)
            began.append((name, words[0], shared))
            most.append([fake.place for fake in running])

        @property
        def code(self):
            self.looks += 1
            return None if self.looks < 3 else 0

        def close(self):
            running.remove(self)

    monkeypatch.setattr(study, "Child", Fake)
    monkeypatch.setattr(study, "places", lambda device: ["0", "1"])
    monkeypatch.setattr(study, "_record", lambda asked: None)
    monkeypatch.setattr(study, "_POLL_S", 0.0)
    asked = asked_for(tmp_path, jobs=jobs)
    workers = study.Workers(asked, {"int8-seed0"})
    workers.run(asked.pairs)
    workers.verdict()
    wanted = min(jobs or 2, 4)
    assert max(map(len, most)) == wanted
    places = next(one for one in most if len(one) == wanted)
    assert sorted(places) == sorted(["0", "1", "0", "1"][:wanted])
    assert began == [
        ("bf16-seed0", "tiny", at_once),
        ("int8-seed0", "--resume", at_once),
        ("bf16-seed1", "tiny", at_once),
        ("int8-seed1", "tiny", at_once),
    ]


def test_a_failure_has_the_first_ones_code(tmp_path):
    for code, expected in ((2, 2), (5, 5), (-9, 1), (77, 1)):
        workers = study.Workers(asked_for(tmp_path), set())
        workers.failed = [("int8-seed0", code, "why"), ("bf16-seed1", 3, "")]
        with pytest.raises(study.StudyFailed, match=f"2 of 4 runs failed.*{code}: why") as error:
            workers.verdict()
        assert error.value.exit_code == expected


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A current folder with a text, and a cache of its own."""
    (tmp_path / "text.txt").write_text(" ".join(str(i) for i in range(4000)))
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


WORDS = ["tiny", "--data", "text.txt", "--device", "cpu", "-o", "study", "--set"]


def run(*words: str, steps: int = 8, more: str = "") -> int:
    own = ["--steps", str(steps), *words]
    return execute("train", ["study", *WORDS, changed(SMALL, more), *own])


@pytest.fixture
def here(monkeypatch, one_thread):
    """Runs of a study in this process, which has torch: one of their own takes 4 s to begin."""

    class Here:
        said = ""

        def __init__(self, name, words, place, at_once):
            self.name, self.place = name, place
            self.code = execute("train", [*words, "--device", "cpu"])

        def close(self):
            pass

    monkeypatch.setattr(study, "Child", Here)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    found = log.read(folder)
    return [(r["step"], r["loss"], r["norm"]) for r in found if r["kind"] == "step"]


def logs(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob(f"*/{log.NAME}")}


@pytest.mark.usefixtures("here")
def test_two_calls_make_one_study(home, capsys):
    assert run("--recipe", "bf16", "--seed", "0,1") == 0
    assert "recipe" in capsys.readouterr().out
    first, before = study_record.read(home / "study" / "study.json"), logs(home / "study")
    assert list(first["recipes"]) == ["bf16"]
    # The first command's runs stay as they are, in the record of the second too.
    words = ["--recipe", "int8-block32,bf16", "--window", "5:8", "--record", "result.json"]
    assert run(*words) == 0
    said = capsys.readouterr()
    assert "1 of 2 runs to do" in said.err
    assert "Of a single seed" not in said.out
    assert "Brackets are over its steps" in said.out
    found = study_record.read(home / "result.json")
    assert {name: len(one["runs"]) for name, one in found["recipes"].items()} == {
        "bf16": 2,
        "int8-block32": 1,
    }
    assert (found["window"], found["fresh"], found["unfinished"]) == ((5, 8), True, [])
    ours, theirs = (losses(home / "study" / f"{name}-seed0") for name in ("int8-block32", "bf16"))
    apart = [a - b for (_, a, _), (_, b, _) in zip(ours[4:], theirs[4:], strict=True)]
    paired = found["recipes"]["int8-block32"]["paired_difference"]
    assert paired["mean"] == pytest.approx(sum(apart) / 4, abs=1e-6)
    assert (paired["over"], paired["seeds"]) == ("steps", [0])
    assert abs(apart[0]) < 0.1  # of the same batches and weights
    after = logs(home / "study")
    assert {name: after[name] for name in before} == before
    # All are finished: nothing is run, no data is looked for, and the table is printed again.
    (home / "text.txt").write_text("other")
    shutil.rmtree(home / "cache")
    assert run(*words) == 0
    assert logs(home / "study") == after
    assert study_record.read(home / "result.json") == found
    # Another run now would be of another text.
    (home / "text.txt").write_text(" ".join(str(i) for i in range(5000)))
    assert run("--recipe", "int8-block64") == 2
    assert "was begun with other tokens than those in" in capsys.readouterr().err
    assert logs(home / "study") == after


@pytest.mark.usefixtures("here")
def test_optimizers_are_compared_as_recipes_are(home, capsys):
    words, more = ["--window", "5:8"], "width=128"
    assert run("--recipe", "bf16,int8-block32+adamw8", *words, more=more) == 0
    assert run("--recipe", "int8-block32", *words, more=more) == 0
    capsys.readouterr()
    assert run("--recipe", "bf16,int8-block32+adamw8", *words, more=more) == 0
    assert "int8-block32+adamw8" in capsys.readouterr().out
    found = study_record.read(home / "study" / "study.json")
    assert list(found["recipes"]) == ["bf16", "int8-block32", "int8-block32+adamw8"]
    ours = log.read(home / "study" / "int8-block32+adamw8-seed0")[0]["settings"]
    assert (ours["recipe"], ours["optimizer"]) == ("int8-block32", "adamw8")
    ours, theirs = list(found["recipes"].values())[1:]
    apart = [one["paired_difference"]["mean"] for one in (ours, theirs)]
    assert 0 < abs(apart[0] - apart[1]) < 0.1


def test_other_settings_are_refused_before_anything_runs(home, capsys):
    write(home / "study", steps=8)
    before = logs(home / "study")
    assert run("--recipe", "bf16", steps=9) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "study/bf16-seed0: was begun with " in said
    assert "as asked for; move it away, or name another -o FOLDER" in said
    assert run("--recipe", "int8", steps=9) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert logs(home / "study") == before
    assert not (home / "study" / "study.json").exists()


@pytest.mark.usefixtures("here")
def test_tokens_that_are_read_again_are_told(home, capsys):
    more = ["--recipe", "bf16", "--set", "order=drawn", "--window", "1:2"]
    assert run(*more, steps=2) == 0
    said = capsys.readouterr()
    assert "tokens are read again within a run (order=drawn, 0.01 epochs): expected order=s" in (
        said.err
    )
    assert "of tokens read again too (0.01 epochs)" in said.out


@pytest.mark.usefixtures("one_thread")
def test_a_failed_run_is_told_and_the_others_go_on(home, capsys, request, monkeypatch):
    monkeypatch.setattr(study.processes, "started", forked.Started)
    (home / "study" / "bf16-seed0").mkdir(parents=True)
    with study.files.locked(home / "study" / "bf16-seed0" / ".lock"):
        assert run("--recipe", "bf16", "--seed", "0,1") == 2
    said = capsys.readouterr().err
    assert "jetfire: bf16-seed0: failed with exit code 2" in said
    assert "bf16-seed1: tiny bf16: loss" in said
    last = said.splitlines()[-1]
    assert last.startswith("jetfire: 1 of 2 runs failed; the same command tries again; bf16-seed0,")
    assert last.endswith("exit code 2: study/bf16-seed0: another process is training there")
    found = study_record.read(home / "study" / "study.json")
    assert [one["seed"] for one in found["recipes"]["bf16"]["runs"]] == [1]
    assert found["unfinished"] == ["bf16-seed0"]
    request.getfixturevalue("here")
    assert run("--recipe", "bf16", "--seed", "0,1") == 0
    assert study_record.read(home / "study" / "study.json")["unfinished"] == []


class Real:
    """A study as a terminal starts it, whose runs are processes of their own kind too."""

    def __init__(self, words):
        command = [sys.executable, "-m", "jetfire.cli", "train", *words]
        kept = subprocess.PIPE
        self._process = subprocess.Popen(command, stderr=kept, stdout=kept, text=True)
        self.pid = self._process.pid

    def runs(self):
        return self._process.poll() is None

    def end(self, limit_s):
        out, err = self._process.communicate(timeout=limit_s)
        return self._process.returncode, out, err


def until_step(process, run: Path, step: int) -> None:
    """Wait for a step's line in the run's log."""
    while process.runs():
        try:
            if losses(run)[-1][0] >= step:
                return
        except (UsageError, IndexError):  # no log yet, or no step in it
            pass
        time.sleep(0.002)
    pytest.fail(f"step {step} was not reached: {process.end(LIMIT_S)[2]}")


def freed(run: Path) -> None:
    """Wait until no process trains there."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            with study.files.locked(run / ".lock"):
                return
        except study.files.Busy:
            time.sleep(0.01)
    pytest.fail(f"{run}: something goes on training")


@pytest.mark.usefixtures("one_thread")
def test_a_study_that_is_ended_goes_on(home, capsys, request, monkeypatch):
    """The one that is killed, with which its runs are to end, has nothing that is a fork."""
    pace, steps = "evaluate_every=0,checkpoint_every=10", 400
    words = ["--recipe", "bf16", "--seed", "0,1"]
    broken, done = home / "study" / "bf16-seed0", 0
    monkeypatch.setattr(study.processes, "started", forked.Started)
    for how in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        asked = ["study", *WORDS, changed(SMALL, pace), *words, "--steps", str(steps)]
        process = Real(asked) if how == signal.SIGKILL else forked.Command("train", asked)
        until_step(process, broken, done + 20)
        os.kill(process.pid, how)
        code, _, said = process.end(LIMIT_S)
        freed(broken)
        assert "2 of 2 runs to do" in said
        done = losses(broken)[-1][0]
        assert done < steps
        assert not (home / "study" / "bf16-seed1").exists()
        if how == signal.SIGKILL:
            assert code == -signal.SIGKILL
            continue
        assert code == 130, said
        assert said.endswith("stopped before all runs were finished; the same command goes on\n")
        saved = sorted(path.name for path in (broken / "checkpoints").iterdir())
        assert saved[-1] == f"step-{done:08d}"  # not only every tenth
    request.getfixturevalue("here")
    assert run(*words, steps=steps, more=pace) == 0
    assert "2 of 2 runs to do" in capsys.readouterr().err
    found = study_record.read(home / "study" / "study.json")
    assert [one["seed"] for one in found["recipes"]["bf16"]["runs"]] == [0, 1]
    # As if it had not been ended.
    whole = ["--recipe", "bf16", "--steps", str(steps), "-o", "whole"]
    settings = changed(SMALL, f"{pace},order=shuffled")
    assert execute("train", [*WORDS, settings, *whole]) == 0
    assert losses(home / "whole") == losses(broken)


def test_one_study_at_a_time_runs_in_a_folder(home, capsys):
    (home / "study").mkdir()
    with study.files.locked(home / "study" / ".lock"):
        assert run("--recipe", "bf16") == 2
    assert capsys.readouterr().err == "jetfire: study: another study is running there\n"


def test_a_killed_run_before_its_first_record_is_begun_again(tmp_path):
    run = write(tmp_path, end=False)
    (run / log.NAME).write_text('{"kind": "ru')
    assert StudyRun.read(run) is None
    settings = make("tiny", {"recipe": "bf16", "steps": 20}).as_dict()
    (run / "settings.json").write_text(json.dumps({**settings, "processes": 1}))
    found = StudyRun.read(run)
    assert found is not None
    assert (found.finished, found.records, found.seed) == (False, [], 0)
    (run / "settings.json").write_text(json.dumps({**settings, "width": 7}))
    with pytest.raises(UsageError, match="bf16-seed0: width=7: expected a multiple of heads"):
        StudyRun.read(run)


RECORDS = Path(__file__).parents[1] / "docs" / "results"


def test_a_study_in_every_format(capsys):
    record = json.loads((RECORDS / "study-124m.json").read_text())
    study.show(record, "json")
    found = json.loads(capsys.readouterr().out)
    assert found["preset"] == record["preset"]
    for name, told in found["recipes"].items():
        mean, row = told.pop("means"), texts.table(record).rows[[*record["recipes"]].index(name)]
        assert [f"{mean[of]:.4f}" for of in ("training_loss", "final_validation_loss")] == [
            row[2],
            row[4],
        ]
        assert mean["ms"] is None or f"{mean['ms']:.1f}" == row[-1]
    assert found == record
    study.show(record, "csv")
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == sum(len(found["runs"]) for found in record["recipes"].values())
    assert {line["recipe"] for line in lines} == {*record["recipes"]}
    for line in lines:
        for which in ("paired_difference", "validation_difference"):
            known = record["recipes"][line["recipe"]][which] or {}
            for of in ("mean", "low", "high", "over"):
                assert line[f"{which}.{of}"] == ("" if known.get(of) is None else str(known[of]))
    study.show(record, "md")
    out = capsys.readouterr().out
    assert texts.explained(record) in out
    devices = {
        name: ", ".join(dict.fromkeys(run["device"] for run in found["runs"]))
        for name, found in record["recipes"].items()
    }
    for name, device in devices.items():  # which is said where it is not the base's
        label = name if device == devices[record["base"]] else f"{name} ({device})"
        assert f"| {label} |" in out
