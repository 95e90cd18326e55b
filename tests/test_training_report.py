"""Training runs in the documents: logs made small, curves of several seeds, tables of the logs."""

import gzip
import json
import math

import pytest

from jetfire.core.errors import UsageError
from jetfire.gpt2.training import curves, keep, log
from jetfire.gpt2.training.finished import addition
from jetfire.gpt2.training.settings import EARLIER
from jetfire.measure.results import Results
from jetfire.report import documents, watched
from jetfire.report.curves import apart
from jetfire.report.runs import _order
from jetfire.report.watched import WatchedRun

DEVICE = {"name": "NVIDIA H200", "kind": "cuda"}


def records(recipe="bf16", seed=0, validation=(4.0, 3.0, 3.5), ms=8.0, device="NVIDIA H200"):
    settings = {
        "preset": "gpt2-124m",
        "recipe": recipe,
        "layers": 2,
        "width": 64,
        "context": 128,
        "dropout": 0.0,
        "batch": 4,
        "accumulate": 2,
        "steps": 30,
        "seed": seed,
        "data": "/somewhere/text",
        "compile": recipe == "bf16",
        "graph": recipe != "bf16",
    }
    head = {
        "kind": "run",
        "settings": settings,
        "device": {"name": device, "processes": 1},
        "parameters": 12_300_000,
        "tokens": {"train": 4_560_000},
        "command": ["train", "-o", "/elsewhere/run"],
    }
    steps = [
        {
            "kind": "step",
            "step": i,
            "loss": 5 - i / 1000 + 1e-9,
            "ms": 900.0 if i == 1 else ms,
            "peak_gib": 1.5,
        }
        for i in range(1, 31)
    ]
    evaluations = [
        {"kind": "evaluation", "step": 10 * (i + 1), "loss": loss}
        for i, loss in enumerate(validation)
    ]
    return [head, *steps, *evaluations, {"kind": "end", "step": 30}]


def write(folder, name="run", **changes):
    run = folder / name
    run.mkdir(parents=True)
    text = "".join(json.dumps(record) + "\n" for record in records(**changes))
    (run / log.NAME).write_text(text)
    return run


@pytest.fixture
def place(tmp_path):
    """A results file without rows, beside it the kept logs of four runs and one of another GPU."""
    file = tmp_path / "results" / "h200.json"
    file.parent.mkdir()
    file.write_text(Results(DEVICE, []).to_json())
    several = {
        "bf16-0": {},
        "bf16-1": {"seed": 1, "validation": (4.0, 3.2, 3.5)},
        "int8-0": {"recipe": "int8-block32", "validation": (4.0, 3.1, 3.6), "ms": 5.0},
        "int8-1": {"recipe": "int8-block32", "seed": 1, "validation": (4.0, 3.41, 3.6), "ms": 5.0},
        "other": {"device": "NVIDIA A100", "validation": (1.0,)},
    }
    for name, changes in several.items():
        keep.write(write(tmp_path, name, **changes), file.parent / "training", 1, 1)
    return file


def test_a_kept_log_is_small_and_names_no_place(tmp_path):
    run = write(tmp_path)
    assert keep.main([str(run), "-o", str(tmp_path / "kept"), "--every", "10"]) == 0
    file = tmp_path / "kept" / "run.jsonl.gz"
    first = file.read_bytes()
    keep.write(run / log.NAME, tmp_path / "kept", 10, 1)
    assert file.read_bytes() == first
    text = gzip.decompress(first).decode()
    assert "where" not in text
    head, *rest = log.read(file)
    assert (head["settings"]["data"], head["command"][-1]) == ("text", "run")
    assert head["kept"] == {"every": 10, "digits": 7, "runs_at_once": 1}
    assert [r["step"] for r in rest if r["kind"] == "step"] == [1, 10, 20, 30]
    assert rest[0]["loss"] == 4.999
    assert [r["kind"] for r in rest if r["kind"] != "step"] == [*["evaluation"] * 3, "end"]


def test_a_damaged_packed_log_is_named(tmp_path):
    file = tmp_path / "run.jsonl.gz"
    for content in (b"no gzip", gzip.compress(b'{"kind": "run"}\n' * 99)[:-12]):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"run\.jsonl\.gz: expected a run's folder"):
            log.read(file)


def test_runs_of_several_seeds_are_one_curve(place, tmp_path):
    files = sorted((place.parent / "training").glob("*-?.jsonl.gz"))
    ours, theirs = curves.grouped(files)
    assert ours.mean.label == "gpt2-124m bf16, 2 seeds, best validation 3.1000"
    assert ours.mean.validation == pytest.approx([4.0, 3.1, 3.5])
    assert [len(group.runs) for group in (ours, theirs)] == [2, 2]
    assert apart(ours.mean, theirs.mean)[1] == pytest.approx([0, 5, 100 / 35], abs=1e-3)
    same = write(tmp_path, "again")
    assert [len(g.runs) for g in curves.grouped([tmp_path / "bf16-0", same])] == [1, 1]
    curves.plot(files, tmp_path / "a.svg")
    curves.plot(files, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    curves.plot(files, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    # Of each group: the mean, its validation loss and two runs, and the difference to the first.
    assert [page.count(f'"legendgroup":"{group}"') for group in range(3)] == [5, 5, 0]


def watch_record(step, ratios):
    """A line of a log; ratios of gradients by layer, of weights 40 dB, of inputs none."""
    rest = {"zeros": 0.1, "clipped": 0.001, "largest": 1e-5}
    layers = {
        layer: {"weight": {"sqnr": 40.0, **rest}, "gradient": {"sqnr": sqnr, **rest}}
        for layer, sqnr in ratios.items()
    }
    worst = {"layer": "tokens", "kind": "gradient", "sqnr": None}
    return {"kind": "watch", "step": step, "worst": worst, "layers": layers}


LAYERS = ["tokens", "blocks.0.qkv", "blocks.0.down", "blocks.2.qkv", "blocks.10.qkv"]


def test_a_map_has_layers_of_one_name_together_and_the_lowest_of_steps(monkeypatch):
    lines = [watch_record(5 * i, dict.fromkeys(LAYERS, 30.0 - i)) for i in range(1, 6)]
    del lines[4]["layers"]["tokens"]
    lines[1]["layers"]["blocks.10.qkv"]["gradient"]["sqnr"] = 7.0
    lines[2]["layers"]["blocks.10.qkv"]["gradient"]["sqnr"] = None
    run = WatchedRun.of("a run", lines)
    assert run.layers == ["tokens", LAYERS[1], LAYERS[3], LAYERS[4], LAYERS[2]]
    assert run.sqnr["gradient"][3].tolist() == pytest.approx([29, 7, math.nan, 26, 25], nan_ok=True)
    assert run.title("gradient") == "gradients of outputs\nlowest 7.0 dB: blocks.10.qkv, step 10"
    assert run.title("input") == "inputs\nnothing seen"
    assert [run.span(kind) for kind in ("gradient", "weight")] == [(7.0, 29.0), (34.0, 40.0)]
    monkeypatch.setattr(watched, "COLUMNS", 2)
    run = WatchedRun.of("a run", lines)
    assert run.steps == [5, 20]
    assert run.title("gradient") == "gradients of outputs\nlowest 7.0 dB: blocks.10.qkv, step 10"
    assert run.sqnr["gradient"][[0, 1, 3]].tolist() == [[27, 26], [27, 25], [7, 25]]
    assert WatchedRun.of("not watched", records()) is None


def test_two_watched_runs_of_one_name_are_both_drawn():
    first, second = (WatchedRun.of("a run", [watch_record(5, {LAYERS[0]: 30.0})]) for _ in range(2))
    assert watched.worst([first, second]) == [first, second]


def test_what_was_watched_is_drawn_below_the_losses(tmp_path):
    def drawn(run, suffix):
        curves.plot([run], tmp_path / f"plot{suffix}")
        return (tmp_path / f"plot{suffix}").read_bytes()

    run = write(tmp_path)
    unwatched = {suffix: drawn(run, suffix) for suffix in (".svg", ".html")}
    with (run / log.NAME).open("a") as file:
        for step in (10, 20):
            print(json.dumps(watch_record(step, dict.fromkeys(LAYERS, 50.0 - step))), file=file)
    for suffix, before in unwatched.items():
        after = drawn(run, suffix)
        for text in (b"signal to quantisation noise", b"lowest 30.0 dB: blocks.0.down, step 20"):
            assert text in after
            assert text not in before
    assert drawn(run, ".svg") == drawn(run, ".svg")


def test_of_many_watched_runs_the_worst_have_maps(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(watched, "MAPPED", 1)
    runs = [write(tmp_path, name) for name in ("good", "bad")]
    for run, ratio in zip(runs, (30.0, 20.0), strict=True):
        with (run / log.NAME).open("a") as file:
            print(json.dumps(watch_record(10, dict.fromkeys(LAYERS, ratio))), file=file)
    curves.plot(runs, tmp_path / "plot.svg")
    assert "of 2 watched runs the 1 with the lowest ratios have maps" in capsys.readouterr().err
    text = (tmp_path / "plot.svg").read_text()
    assert "lowest 20.0 dB" in text
    assert "lowest 30.0 dB" not in text


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_name_is_drawn_as_it_is(suffix, tmp_path):
    """What two $ enclose is no mathematics; nothing ends a page's script."""
    run = write(tmp_path, r"$\frac$-<b>")
    with (run / log.NAME).open("a") as file:
        print(json.dumps(watch_record(10, dict.fromkeys(LAYERS, 30.0))), file=file)
    curves.plot([run], tmp_path / f"plot{suffix}")
    text = (tmp_path / f"plot{suffix}").read_text()
    assert text.count(r"$\frac$-&lt;b&gt;") >= 2
    if suffix == ".html":  # Plotly, too, would read a tag
        assert r'"$\\frac$-\u0026lt;b\u0026gt;: ' in text


def test_logs_of_earlier_versions_are_gpt2_s(tmp_path):
    new, old = write(tmp_path, "new"), write(tmp_path, "old", seed=1)
    head, *rest = (new / log.NAME).read_text().splitlines()
    begun = json.loads(head)
    begun["settings"] |= EARLIER
    (new / log.NAME).write_text("\n".join([json.dumps(begun), *rest]) + "\n")
    (group,) = curves.grouped([new, old])
    assert len(group.runs) == 2


def test_runs_that_were_watched_unlike_are_one_curve(tmp_path):
    def watching(seed, every):
        run = write(tmp_path, f"run-{seed}", seed=seed)
        head, *rest = map(json.loads, (run / log.NAME).read_text().splitlines())
        head["settings"]["watch"] = every
        (run / log.NAME).write_text("".join(json.dumps(line) + "\n" for line in (head, *rest)))
        return run

    (group,) = curves.grouped([watching(0, 0), watching(1, 10), write(tmp_path, "old", seed=2)])
    assert len(group.runs) == 3


def test_the_page_has_the_figures_of_the_logs(place):
    readme = place.with_name("README.md")
    readme.write_text(f"{documents.BEGIN}\n{documents.END}\n")
    written = documents.report(place, readme, False, addition)
    assert place.with_name("h200-training-124m.svg") in written
    assert documents.report(place, readme, True, addition) == []
    page = place.with_suffix(".md").read_text()
    assert "by step, a line per recipe; below, validation loss over bf16's](h200-tr" in page
    assert "30 steps of 1024 tokens" in page
    first = "| bf16 | torch.compile | 3.5000 (3.5000 to 3.5000) | – | 3.1000 (3.0000 to 3.2000) |"
    assert f"{first} – | 8.00 | 128000 | – | 1.50 |" in page
    assert "| +0.1550 (+5.00%) | 5.00 | 204800 | 1.60× | 1.50 |" in page
    assert "| gpt2-124m, 30 steps, int8-block32 | 2 | 3.2550 (3.1000 to 3.4100)" in (
        readme.read_text()
    )
    changed = {"validation": (4.0, 2.9, 3.5)}
    keep.write(write(place.parent, "bf16-0", **changed), place.parent / "training", 1, 1)
    stale = {path.name for path in documents.report(place, readme, True, addition)}
    assert stale == {"h200.md", "README.md", "h200-training-124m.svg"}


def test_runs_that_shared_a_gpu_have_no_times(place):
    for name, shared in (("bf16", {"runs_at_once": 3}), ("int8", {})):
        for file in (place.parent / "training").glob(f"{name}-*.gz"):
            lines = gzip.decompress(file.read_bytes()).decode().splitlines(keepends=True)
            head = json.dumps({**json.loads(lines[0]), **shared}) + "\n"  # as the run says itself
            file.write_bytes(gzip.compress("".join([head, *lines[1:]]).encode()))
            if not shared:  # as whoever keeps it says
                keep.write(file, file.parent, 1, 3)
    section = addition(Results(DEVICE), place).sections[0].markdown()
    assert "Several runs shared a GPU" in section
    assert "ms per step" not in section


def test_an_unfinished_run_is_refused(place):
    run = write(place.parent, "cut")
    text = (run / log.NAME).read_text()
    (run / log.NAME).write_text(text.replace('"kind": "end"', '"kind": "fault"'))
    keep.write(run, place.parent / "training", 1, 1)
    with pytest.raises(UsageError, match=r"cut\.jsonl\.gz: expected a finished run's log"):
        addition(Results(DEVICE), place)


def test_recipes_are_in_the_order_of_their_list():
    names = ["int4-naive", "old", "int8-block128", "int4-hq-lss", "bf16", "int8-block32", "int4-hq"]
    assert sorted(names, key=_order) == [
        "bf16",
        "int8-block32",
        "int8-block128",
        "int4-hq-lss",
        "int4-hq",
        "int4-naive",
        "old",
    ]
