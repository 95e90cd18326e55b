"""The tuner's HTML report: its figures' data, its tables; that it loads and runs nothing else."""

import json
import math
import os
import re
import sys
from html.parser import HTMLParser

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from jetfire.core import files
from jetfire.core.errors import UsageError

pytest.importorskip("plotly", reason="the report is drawn by plotly")
from jetfire.report import curves, tuning
from jetfire.report import tuning_charts as charts
from jetfire.report.text import significant
from jetfire.tuner import options
from jetfire.tuner.saved_study import SavedStudy, clean

SPACE = {"tile_m": [64, 128, 256], "stages": [3, 4], "flag": [False, True]}
DEFAULT = {"tile_m": 128, "stages": 3, "flag": False, "warps": 4}
PEAKS = {"int8_tops": 1000.0, "copy_gbps": 4000.0}
FLOPS, BYTES = 2 * 4096**3, 4 * 4096**2
HOSTILE = "</script><script>alert(1)</script> & <a href='http://x.example'>y</a>\nsecond line"


def config(tile_m=128, stages=3, flag=False):
    return {"tile_m": tile_m, "stages": stages, "flag": flag, "warps": 4}


def trial(outcome="ok", ms=None, joules=None, objective="time", message="", **fields):
    chosen = config(**fields)
    values = {"time": [ms], "energy": [joules], "both": [ms, joules]}[objective]
    measured = outcome in ("ok", "slow") and None not in values
    return create_trial(
        state=TrialState.COMPLETE if measured else TrialState.FAIL,
        values=values if measured else None,
        params={name: chosen[name] for name in SPACE},
        distributions={name: CategoricalDistribution(v) for name, v in SPACE.items()},
        user_attrs={
            "outcome": outcome,
            "message": message,
            "config": chosen,
            "ms": ms,
            "ms_p20": ms and ms * 0.9,
            "ms_p80": ms and ms * 1.1,
            "joules": joules,
            "seconds": 2.0,
            "owner": "host:1:2",
        },
    )


def study_of(trials, name="h200/gemm/triton", **attributes):
    objective = attributes.get("objective", "time")
    directions = ["minimize"] * (2 if objective == "both" else 1)
    study = optuna.create_study(study_name=name, directions=directions)
    known = {
        "op": "gemm",
        "kernel": "triton",
        "problem": {"m": 4096, "n": 4096, "k": 4096, "block": 32},
        "device": {
            "name": "NVIDIA H200",
            "capability": [9, 0],
            "driver": "580.1",
            "cuda": "13.0",
            "torch": "2.11",
            "triton": "3.6",
            "timer": 7,
            "date": "2026-11-20",
        },
        "default": DEFAULT,
        "objective": "time",
        "space": SPACE,
        "source": "cafe42",
        "strategy": "tpe",
        "peaks": PEAKS,
        "flops": FLOPS,
        "bytes": BYTES,
    }
    for key, value in {**known, **attributes}.items():
        study.set_user_attr(key, value)
    study.add_trials(trials)
    return study


TRIALS = [
    trial(ms=1.0),
    trial("compile", message=HOSTILE, tile_m=256),
    trial(ms=2.0, tile_m=64),
    trial("slow", ms=9.0, tile_m=64, stages=4),
    trial(ms=0.5, tile_m=256, stages=4),
    trial("wrong", message="q differs", flag=True),
    trial(ms=0.6, tile_m=256, stages=4, flag=True),
]
FINAL = {
    "config": config(256, 4),
    "ms": 0.52,
    "ms_p20": 0.51,
    "ms_p80": 0.55,
    "default_ms": 1.04,
    "before_ms": 0.78,
    "gain": 2.0,
    "kept": False,
    "vs_peer": {"cublas_bf16": 1.25, "copy": 0.000345},
}


class Page(HTMLParser):
    """A page's figures, tables (by class), elements and the text of everything else."""

    def __init__(self, text):
        super().__init__()
        self.figures, self.tables, self.tags, self.scripts, self.words = {}, [], [], [], ""
        self.in_cell = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "table":
            self.tables.append((attrs.get("class"), []))
        if tag == "tr":
            self.tables[-1][1].append([])
        if tag in ("td", "th"):
            self.tables[-1][1][-1].append("")
            self.in_cell = True
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
            attrs = self.tags[-1][1]
            if attrs.get("type") == "application/json":
                self.figures[attrs["id"].removesuffix("-data")] = json.loads(data)
        elif self.cdata_elem is None:
            self.words += data
            if self.in_cell:
                self.tables[-1][1][-1][-1] += data

    def table(self, name, place=0):
        return [rows for label, rows in self.tables if label == name][place]

    def pairs(self, name, place=0):
        return dict(self.table(f"pairs {name}", place))


def write(studies, file):
    files.write(file, tuning.render([SavedStudy.of(study) for study in studies]))


def page_of(*studies):
    return Page(tuning.render([SavedStudy.of(study) for study in studies]))


def traces(figure):
    return {t["name"]: t for t in figure["data"]}


def test_history_has_every_trial_where_it_belongs():
    figure = page_of(study_of(TRIALS, final=FINAL)).figures["study-0-history"]
    found = traces(figure)
    assert (found["ok"]["x"], found["ok"]["y"]) == ([0, 2, 4, 6], [1.0, 2.0, 0.5, 0.6])
    assert (found["slow"]["x"], found["slow"]["y"]) == ([3], [9.0])
    assert found["best so far"]["x"] == [0, 2, 4, 6, 6.5]
    assert found["best so far"]["y"] == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert found["best so far"]["line"]["shape"] == "hv"
    assert (found["compile"]["x"], found["compile"]["yaxis"]) == ([1], "y2")
    assert "second line" in found["compile"]["hovertext"][0]
    levels = {n: t["y"] for n, t in found.items() if "final comparison" in n}
    assert levels == {
        "default 1.040 ms (final comparison)": [1.04, 1.04],
        "best 0.5200 ms (final comparison)": [0.52, 0.52],
    }
    layout = figure["layout"]
    assert layout["yaxis"]["type"] == "log"
    assert layout["yaxis"]["title"]["text"] == "time per call (ms)"
    assert layout["yaxis"]["domain"][1] < layout["yaxis2"]["domain"][0]
    assert 10 ** layout["yaxis"]["range"][0] < 0.5 < 9 < 10 ** layout["yaxis"]["range"][1]


def test_importance_is_highest_for_the_field_that_decides():
    trials = [
        trial(
            ms=(1.0 + 0.001 * i) * {64: 3, 128: 2, 256: 1}[tile],
            tile_m=tile,
            stages=stages,
            flag=flag,
        )
        for i in range(4)
        for tile in SPACE["tile_m"]
        for stages in (3, 4)
        for flag in (False, True)
    ]
    (bar,) = page_of(study_of(trials)).figures["study-0-importance"]["data"]
    shares = dict(zip(bar["y"], bar["x"], strict=True))
    assert set(shares) == set(SPACE)
    assert math.isclose(sum(shares.values()), 1.0)
    assert shares["tile_m"] > 0.8
    assert bar["y"][-1] == "tile_m"  # Plotly draws the last on top


def test_importance_of_two_objectives_is_told_apart():
    trials = [
        trial(ms=float(tile), joules=float(stages), objective="both", tile_m=tile, stages=stages)
        for tile in SPACE["tile_m"]
        for stages in (3, 4)
    ]
    found = traces(page_of(study_of(trials, objective="both")).figures["study-0-importance"])
    time = dict(zip(found["time"]["y"], found["time"]["x"], strict=True))
    energy = dict(zip(found["energy"]["y"], found["energy"]["x"], strict=True))
    assert time["tile_m"] > time["stages"]
    assert energy["stages"] > energy["tile_m"]


def test_parallel_coordinates_rank_values_and_leave_out_what_never_varies():
    figure = page_of(study_of(TRIALS, final=FINAL)).figures["study-0-parallel"]
    names = figure["layout"]["xaxis"]["ticktext"]
    assert names == ["tile_m", "stages", "flag", "time per call (ms)"]
    labels = {(a["x"], a["text"]): a["y"] for a in figure["layout"]["annotations"]}
    assert labels[0, "64"] < labels[0, "128"] < labels[0, "256"]
    assert labels[2, "False"] < labels[2, "True"]
    found = traces(figure)
    assert found["default"]["line"]["dash"] == "dash"
    best, default = found["best"]["y"], found["default"]["y"]
    assert 2 / 3 < best[0] < 1
    assert 1 / 3 < default[0] < 2 / 3
    assert best[3] == 0.0  # its time is the least
    assert math.isclose(default[3], math.log(1.0 / 0.5) / math.log(9.0 / 0.5))
    lines = [t for t in figure["data"] if t["name"] == "trials"]
    assert sum(t["y"].count(None) for t in lines) == 5  # the measured ones
    assert len({t["line"]["color"] for t in lines}) == len(lines) > 1


WINNER = {"kernels": "<b>f</b>", "dram_pct": 80.0, "stall_wait": 2.0, "stall_gmma": 1.0}
USUAL = {"kernels": "g", "dram_pct": 80.0, "stall_wait": 6.0, "stall_selected": 1.0}


def test_the_winner_s_stalls_stand_beside_the_default_s():
    counted = {**FINAL, "counters": WINNER, "default_counters": USUAL}
    page = page_of(study_of(TRIALS, final=counted))
    figure = page.figures["study-0-stalls"]
    found = traces(figure)
    assert {name: dict(zip(t["y"], t["x"], strict=True)) for name, t in found.items()} == {
        "wait": {"winner": 2.0, "default": 6.0},
        "gmma": {"winner": 1.0, "default": 0.0},
    }
    assert figure["layout"]["barmode"] == "stack"
    head, *rows = page.table("counters")
    assert [row[0] for row in rows] == ["winner", "default"]
    assert rows[0][head.index("DRAM rate")] == "80%"
    assert "The largest difference is in warps that wait for a fixed latency (wait)" in page.words
    assert "Launched: <b>f</b>" in page.words


@pytest.mark.parametrize("default", [None, WINNER])
def test_a_winner_may_be_counted_alone(default):
    counted = {**FINAL, "counters": WINNER, "default_counters": default}
    page = page_of(study_of(TRIALS, final=counted))
    assert len(page.table("counters")) == 2
    assert "limited by DRAM, at 80% of the peak" in page.words


def test_a_study_without_counters_has_no_such_part():
    page = page_of(study_of(TRIALS, final=FINAL))
    assert "study-0-stalls" not in page.figures
    assert "Why is it fast" not in page.words


def test_roofline_of_a_matrix_product():
    figure = page_of(study_of(TRIALS, final=FINAL)).figures["study-0-roofline"]
    found = traces(figure)
    intensity, ridge = FLOPS / BYTES, 1000e12 / 4000e9
    slope, level = found["copy 4000 GB/s"], found["INT8 peak 1000 TOPS"]
    assert math.isclose(slope["x"][1], ridge)
    assert math.isclose(slope["y"][1], 1000.0)
    assert math.isclose(slope["y"][0], slope["x"][0] * 4.0)
    assert level["y"] == [1000.0, 1000.0]
    assert found["ok"]["x"] == [intensity] * 4
    assert math.isclose(found["best"]["y"][0], FLOPS / 0.5e-3 / 1e12)
    assert math.isclose(found["default"]["y"][0], FLOPS / 1e-3 / 1e12)


def test_memory_bound_op_is_held_against_the_copy_bandwidth():
    page = page_of(study_of(TRIALS, flops=0.0))
    found = traces(page.figures["study-0-roofline"])
    assert found["copy 4000 GB/s"]["x"] == [4000.0, 4000.0]
    assert math.isclose(found["best"]["x"][0], BYTES / 0.5e-3 / 1e9)
    assert "memory-bound" in page.words


@pytest.mark.parametrize("flops", [FLOPS, 0.0])
@pytest.mark.parametrize("peaks", [None, {}, {"copy_gbps": 4000.0}])
def test_peaks_that_were_not_measured_draw_no_roof(flops, peaks):
    page = page_of(study_of(TRIALS, flops=flops, peaks=peaks))
    names = list(traces(page.figures["study-0-roofline"]))
    assert not any("INT8" in name for name in names)
    assert any("copy" in name for name in names) == bool(peaks)
    assert ("peaks were not measured" in page.words) == (not peaks)


def test_summary_and_provenance_say_the_final_figures():
    page = page_of(study_of(TRIALS, final=FINAL))
    result, provenance = page.pairs("result"), page.pairs("provenance")
    assert result["config (the best, of the final comparison)"] == (
        "tile_m=256 stages=4 flag=False warps=4"
    )
    assert result["time per call"] == "0.5200 ms (p20–p80: 0.5100–0.5500)"
    assert result["gain over the default"] == "2.000× (1.040 ms)"
    assert result["gain over the config in use before"] == "1.500× (0.7800 ms)"
    assert result["gain over cublas_bf16"] == "1.250×"
    assert result["gain over copy"] == "0.0003450×"
    assert result["trials"] == "7: 4 ok, 1 slow, 1 compile, 1 wrong"
    assert result["time spent on trials"] == "14.0 s"
    assert provenance["kernel source"] == "cafe42"
    assert provenance["compute capability"] == "9.0"
    assert {provenance[k] for k in ("driver", "cuda", "torch", "triton", "timer")} == {
        "580.1",
        "13.0",
        "2.11",
        "3.6",
        "7",
    }
    assert provenance["peaks"] == "copy 4000 GB/s, INT8 1000 TOPS"


def test_peaks_of_a_busy_machine_say_so():
    page = page_of(study_of(TRIALS, peaks={**PEAKS, "busy": "others did <b>much</b>"}))
    assert page.pairs("provenance")["peaks"] == (
        "copy 4000 GB/s, INT8 1000 TOPS; meanwhile others did <b>much</b>"
    )


def test_incumbent_that_was_kept_is_named():
    final = {**FINAL, "kept": True, "default_ms": None}
    result = page_of(study_of(TRIALS, final=final)).pairs("result")
    assert any("incumbent, kept" in name for name in result)
    assert result["gain over the default"] == "unknown: it was not measured"


def test_trials_table_has_a_row_each_and_marks_the_best_and_the_default():
    head, *rows = page_of(study_of(TRIALS, final=FINAL)).table("trials")
    assert head == ["", "trial", "outcome", "ms", "p20–p80", "seconds", *SPACE, "message"]
    assert [row[:4] for row in rows] == [
        ["default", "0", "ok", "1.000"],
        ["", "1", "compile", "–"],
        ["", "2", "ok", "2.000"],
        ["", "3", "slow", "9.000"],
        ["best", "4", "ok", "0.5000"],
        ["", "5", "wrong", "–"],
        ["", "6", "ok", "0.6000"],
    ]
    assert rows[4][4:] == ["0.4500–0.5500", "2.0", "256", "4", "False", ""]
    assert rows[1][-1] == HOSTILE.split("\n")[0]


def test_hostile_texts_stay_texts():
    line = " ".join(HOSTILE.split())
    study = study_of(
        [trial("crash", message=HOSTILE), *TRIALS],
        name=HOSTILE,
        op=line,
        kernel=line,
        problem={"m": line},
        device={"name": line},
        source=line,
        strategy=line,
        final=FINAL,
    )
    plain, hostile = page_of(study_of(TRIALS)), page_of(study, study)
    elements = ("script", "a", "table")
    counts = {tag: sum(t == tag for t, _ in hostile.tags) for tag in elements}
    assert counts["script"] == sum(t == "script" for t, _ in plain.tags) + 4  # four more charts
    assert counts["a"] == 2  # the index's own
    assert all("alert(1)" not in s or s.startswith("{") for s in hostile.scripts)
    hover = traces(hostile.figures["study-0-history"])["crash"]["hovertext"][0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in hover
    assert "<a" not in hover
    assert hostile.pairs("provenance")["kernel source"] == line
    assert hostile.pairs("provenance")["study"] == line


def test_page_loads_nothing():
    page = page_of(study_of(TRIALS), study_of(TRIALS, name="b"))
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith("#")
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert sum(len(script) > 1_000_000 for script in page.scripts) == 1  # Plotly, once
    style = re.search(r"<style>(.*?)</style>", tuning.render([]), re.S)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_every_chart_has_its_place_and_its_data():
    page = page_of(study_of(TRIALS), study_of(TRIALS, name="b"))
    places = [a["id"] for t, a in page.tags if a.get("class") == "plot"]
    assert len(places) == len(set(places)) == 8
    assert set(places) == set(page.figures)


def test_several_studies_have_an_index_and_a_mean():
    other = {**FINAL, "default_ms": 0.52 * 8}
    page = page_of(study_of(TRIALS, final=FINAL), study_of(TRIALS, "b", final=other), study_of([]))
    head, *rows = page.table("index")
    assert head[-3:] == ["default ms", "best ms", "gain"]
    assert [row[-3:] for row in rows] == [
        ["1.040", "0.5200", "2.000×"],
        ["4.160", "0.5200", "8.000×"],
        ["–", "–", "–"],
    ]
    assert "4.000× over 2 of 3 studies" in page.words
    links = [a["href"] for t, a in page.tags if t == "a"]
    sections = ["#" + a["id"] for t, a in page.tags if a.get("class") == "study"]
    assert links == sections


def test_one_study_is_open_and_has_no_index():
    page = page_of(study_of(TRIALS))
    assert next(a for t, a in page.tags if a.get("class") == "study").get("open", "no") is None
    assert all(name != "index" for name, _ in page.tables)


def test_without_a_final_the_best_trial_is_shown():
    page = page_of(study_of(TRIALS))
    result = page.pairs("result")
    assert "config (the best trial; there was no final comparison)" in result
    assert result["gain over the default"] == "2.000× (1.000 ms)"
    names = list(traces(page.figures["study-0-history"]))
    assert "default 1.000 ms (trial 0)" in names
    assert "best 0.5000 ms (trial 4)" in names


def test_no_trials():
    page = page_of(study_of([]))
    assert page.figures == {}
    assert page.pairs("result")["trials"] == "0: none"
    assert "There are no trials." in page.words


def test_all_failed():
    trials = [trial(outcome, message=outcome) for outcome in ("illegal", "timeout", "crash")]
    page = page_of(study_of(trials))
    assert list(page.figures) == ["study-0-history"]
    figure = page.figures["study-0-history"]
    assert {name: t["x"] for name, t in traces(figure).items()} == {
        "illegal": [0],
        "timeout": [1],
        "crash": [2],
    }
    assert figure["layout"]["yaxis"]["visible"] is False
    assert "none: no config was measured to the end" in page.words


def test_default_that_failed_is_marked():
    page = page_of(study_of([trial("timeout"), trial(ms=1.0, tile_m=64)]))
    assert [row[0] for row in page.table("trials")[1:]] == ["default", "best"]
    assert page.pairs("result")["gain over the default"] == "unknown: it was not measured"


def test_one_trial():
    page = page_of(study_of([trial(ms=1.0)]))
    assert set(page.figures) == {"study-0-history", "study-0-roofline"}
    assert "Nothing can be said" in page.words
    assert "Every config tried was the same." in page.words


def test_equal_times_say_nothing_of_importance():
    page = page_of(study_of([trial(ms=1.0), trial(ms=1.0, tile_m=64)]))
    assert "study-0-importance" not in page.figures
    assert set(traces(page.figures["study-0-parallel"])["best"]["y"][-2:]) == {0.0, None}


def test_only_slow_trials_are_no_result():
    page = page_of(study_of([trial("slow", ms=3.0), trial("slow", ms=4.0, tile_m=64)]))
    assert "none: no config was measured to the end" in page.words
    assert "best so far" not in traces(page.figures["study-0-history"])


def test_energy_objective_is_told_in_joules():
    trials = [
        trial(ms=1.0, joules=0.4, objective="energy"),
        trial(ms=2.0, joules=0.2, objective="energy", tile_m=64),
        trial("slow", ms=9.0, objective="energy", tile_m=256),
    ]
    page = page_of(study_of(trials, objective="energy"))
    figure = page.figures["study-0-history"]
    assert traces(figure)["ok"]["y"] == [0.4, 0.2]
    assert traces(figure)["slow"]["yaxis"] == "y2"  # stopped before its energy was read
    assert figure["layout"]["yaxis"]["title"]["text"] == "energy per call (J)"
    assert page.pairs("result")["time per call"].startswith("2.000 ms")
    assert page.pairs("result")["energy per call"] == "0.2000 J"
    assert page.table("trials")[0][5] == "J"


def test_both_objectives_have_their_front():
    points = [(1.0, 0.5), (2.0, 0.2), (3.0, 0.3), (1.5, 0.4), (0.9, 0.9)]
    trials = [
        trial(
            ms=ms, joules=joules, objective="both", tile_m=(64, 128, 256)[i % 3], stages=3 + i // 3
        )
        for i, (ms, joules) in enumerate(points)
    ]
    page = page_of(study_of(trials, objective="both"))
    figure = page.figures["study-0-time"]
    front = traces(figure)["Pareto front"]
    assert (front["x"], front["y"]) == ([0.9, 1.0, 1.5, 2.0], [0.9, 0.5, 0.4, 0.2])
    assert traces(figure)["best"]["x"] == [2.0]  # of the least product
    assert figure["layout"]["xaxis"]["title"]["text"] == "time per call (ms)"
    assert figure["layout"]["yaxis"]["title"]["text"] == "energy per call (J)"
    assert "study-0-time" not in page_of(study_of(TRIALS)).figures


def test_unfinished_trials_are_counted_apart():
    study = study_of(TRIALS)
    study.ask({name: CategoricalDistribution(v) for name, v in SPACE.items()})
    study.tell(study.ask(), state=TrialState.FAIL)
    again = create_trial(state=TrialState.FAIL, user_attrs={"config": config(256, 4)})
    study.add_trial(again)  # of the best's config, given up
    page = page_of(study)
    assert [row[0] for row in page.table("trials")[1:]].count("best") == 1
    assert page.pairs("result")["trials"].endswith("2 lost, 1 running")
    found = traces(page.figures["study-0-history"])
    assert (found["running"]["x"], found["lost"]["x"]) == ([7], [8, 9])


def test_study_of_another_tool_is_shown_as_far_as_it_goes():
    study = optuna.create_study(study_name="other")
    study.optimize(lambda t: t.suggest_float("x", 1, 2), n_trials=3)
    page = page_of(study)
    assert "unknown kernel" in page.words
    assert len(page.table("trials")) == 4


def test_same_study_gives_the_same_bytes(tmp_path):
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    write([study_of(TRIALS, final=FINAL)], first)
    write([study_of(TRIALS, final=FINAL)], second)
    assert first.read_bytes() == second.read_bytes()
    write([study_of([])], first)
    assert first.read_bytes() != second.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.html", "b.html"]


def test_text_that_no_file_can_hold(tmp_path):
    message = "bad \udcff byte, \x1b[31mred\x1b[0m, \x00"
    write([study_of([trial("crash", message=message)])], tmp_path / "a.html")
    assert "bad ? byte,  red ," in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert clean("a\r\n\tb\nc") == "a \n b\nc"


@pytest.mark.parametrize("place", ["missing/report.html", "file/report.html", "folder"])
def test_unwritable_place_is_one_line(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        write([study_of([])], tmp_path / place)
    assert str(tmp_path / place) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_failure_leaves_the_old_report(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = tmp_path / "report.html"
    file.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        write([study_of([])], file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_page_without_plotly_is_refused_before_anything_runs(monkeypatch, tmp_path):
    for module in [m for m in sys.modules if m.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "plotly", None)
    needs = r"^needs plotly, which is not installed: pip install 'jetfire\[html\]'$"
    with pytest.raises(UsageError, match=needs):
        options.TuneOptions(report=tmp_path / "page.html")
    with pytest.raises(UsageError, match=needs):
        tuning.render([])
    with pytest.raises(UsageError, match=needs):
        curves.page([], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 100, ["0.1", "1", "10", "100"]),
        (0.2, 1.0, ["0.2", "0.5", "1"]),
        (0.101, 0.104, ["0.101", "0.102", "0.103", "0.104"]),
    ],
)
def test_log_axes_have_round_ticks(low, high, expected):
    values, texts = charts.log_ticks(low, high)
    assert texts == expected
    assert [float(text) for text in texts] == values


def test_number_has_four_digits():
    assert [significant(v, 4) for v in (0.012345, 1, 1234.5, 0, 1e-7, 14399.137)] == [
        "0.01235",
        "1.000",
        "1234",
        "0",
        "0.0000001000",
        "14400",
    ]


def test_value_that_equals_another_is_another_when_its_type_is():
    trials = [trial(ms=1.0, stages=3, flag=True), trial(ms=2.0, stages=3, flag=False)]
    saved = SavedStudy.of(study_of(trials, space={**SPACE, "flag": [1, 0]}))
    assert saved.fields == {"flag": [False, True]}
    assert saved.fixed == {"tile_m": 128, "stages": 3, "warps": 4}
