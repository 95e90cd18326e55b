"""`jetfire compare`: matching, noise, regressions and exit codes."""

import csv
import dataclasses
import io
import json

import pytest
from rich.console import Console

from jetfire.bench import compare
from jetfire.bench.compare import Pair, match, parse_share
from jetfire.cli import execute
from jetfire.core.errors import UsageError
from jetfire.measure.results import Results, Row


def row(ms, spread=0.01, **changes) -> Row:
    times = {} if ms is None else {"ms_p20": ms * (1 - spread), "ms_p80": ms * (1 + spread)}
    fields = {
        "op": "gemm",
        "kernel": "triton",
        "role": "kernel",
        "problem": {"m": 8, "n": 8},
        "config": {"tile_m": 64},
        "ok": ms is not None,
        "ms": ms,
        **times,
    }
    return Row(**{**fields, **changes})


def peer(ms, **changes) -> Row:
    return row(ms, **{"kernel": "copy", "role": "peer", "config": None, "ok": None, **changes})


OTHER = {"m": 9, "n": 9}
WRONG = {"ok": False, "error": "c: 1 elements off"}


def save(path, *rows, **device):
    path.write_text(Results({"name": "GPU", **device}, list(rows)).to_json())
    return str(path)


@pytest.fixture
def gate(tmp_path, capsys):
    """What the gate of 5% says of two lists of rows: its exit code, stdout and stderr."""

    def judge(before, after, *words, share="5%"):
        files = save(tmp_path / "a.json", *before), save(tmp_path / "b.json", *after)
        code = execute(None, ["compare", *files, "--fail-on-regression", share, *words])
        captured = capsys.readouterr()
        assert captured.err.count("\n") <= 1
        return code, captured.out, captured.err

    return judge


@pytest.mark.parametrize(
    ("before", "after", "verdict", "regressed"),
    [
        (row(1.0), row(1.2), "slower", True),
        (row(1.0), row(1.03), "slower", False),  # beyond noise, within the share
        (row(1.0, 0.2), row(1.2, 0.2), "noise", False),  # beyond the share, within noise
        (row(1.0), row(0.8), "faster", False),
        (row(1.0), row(None), "broken", True),
        (row(1.0), row(0.8, **WRONG), "broken", True),  # its time is that of a wrong result
        (row(None), row(1.0), "mended", False),
        (row(None), row(None), "broken", False),
        (row(1.0, **WRONG), row(0.5, **WRONG), "broken", False),
    ],
)
def test_verdicts(before, after, verdict, regressed):
    pair = Pair(before, after)
    assert pair.verdict == verdict
    assert pair.regressed(0.05) is regressed


def test_spans_that_touch_are_noise():
    before = row(1.0, ms_p20=0.9, ms_p80=1.1)
    assert Pair(before, row(1.2, ms_p20=1.1, ms_p80=1.3)).verdict == "noise"
    assert Pair(before, row(1.2, ms_p20=1.11, ms_p80=1.3)).verdict == "slower"
    assert Pair(before, row(0.8, ms_p20=0.7, ms_p80=0.9)).verdict == "noise"
    assert Pair(before, row(0.8, ms_p20=0.7, ms_p80=0.89)).verdict == "faster"


def test_few_samples_leave_it_unsure_and_the_gate_as_strict(gate):
    """Spans that are apart are a regression, as ever, though the interval holds 1."""
    few, many = ([row(1.0, samples=n), row(1.07, samples=n)] for n in (2, 20))
    pair = Pair(*few)
    assert pair.interval[0] < 1 < pair.interval[1]
    assert pair.verdict == "unsure"
    assert pair.regressed(0.05)
    assert Pair(*many).verdict == "slower"
    assert Pair(*reversed(many)).verdict == "faster"
    for before, after in (few, many):
        code, shown, said = gate([before], [after])
        assert code == 4
        assert "takes 1.07× as long" in said
        assert "–1.0" in shown or "–1.1" in shown


def test_an_interval_that_excludes_1_is_noise_where_the_spans_overlap():
    pair = Pair(row(1.0, 0.05, samples=1000), row(1.05, 0.05, samples=1000))
    assert 1 < pair.interval[0] < 1.05 < pair.interval[1]
    assert pair.verdict == "noise"


def test_match_by_config_or_without():
    old, new = Results({}, [row(1.0)]), Results({}, [row(2.0, config={"tile_m": 128})])
    apart = match(old, new)
    assert (apart.pairs, apart.gone, apart.new) == ([], old.rows, new.rows)
    together = match(old, new, config=False)
    assert [pair.ratio for pair in together.pairs] == [2.0]
    assert not together.gone + together.new


def test_a_doubled_row_is_refused():
    configs = Results({}, [row(1.0), row(1.0, config={"tile_m": 128})])
    with pytest.raises(UsageError, match=r"twice, with several configs: leave out --ignore-conf"):
        match(configs, configs, config=False)
    same = Results({}, [row(1.0), row(2.0)])
    with pytest.raises(UsageError, match=r"gemm triton m=8 n=8 is there twice$"):
        match(same, same)
    with pytest.raises(UsageError, match="twice"):
        match(Results({}, [row(1.0)]), same)


@pytest.mark.parametrize(("counts", "file"), [((2, 1), "a.json"), ((1, 2), "b.json")])
def test_the_file_that_has_a_row_twice_is_named(counts, file, gate, tmp_path):
    before, after = ([row(1.0)] * count for count in counts)
    said = f"jetfire: {tmp_path / file}: gemm triton m=8 n=8 is there twice\n"
    assert gate(before, after) == (2, "", said)


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), ("0.1", 0.1), ("0", 0.0), ("5 %", 0.05), (".5%", 0.005), ("150%", 1.5)],
)
def test_shares(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "",
        "-5%",
        "-0",
        "%",
        "nan",
        "nan%",
        "inf",
        "2000%",
        "5",
        "1",
        "5%%",
        "1e-2",
        "1_0%",
        "٥%",
    ],
)
def test_bad_shares(text):
    with pytest.raises(UsageError, match=r"expected a share such as 5% or 0\.05"):
        parse_share(text)


def test_without_a_gate_it_only_shows(tmp_path, capsys):
    a = save(tmp_path / "a.json", row(1.0), peer(1.0))
    b = save(tmp_path / "b.json", row(1.5), peer(1.0), row(1.0, problem=OTHER))
    assert execute(None, ["compare", a, b]) == 0
    shown = capsys.readouterr().out
    assert "1.500" in shown
    assert f"in {b} and not in {a}: gemm triton m=9 n=9\n" in shown


def test_the_gate_judges_kernels_by_the_share(gate):
    assert gate([row(1.0), peer(1.0)], [row(1.5), peer(1.0)])[0] == 4
    _, _, said = gate([row(1.0), peer(1.0)], [row(1.5), peer(1.0)])
    assert said == (
        "jetfire: 1 of 1 kernel row regressed: 1 slower by more than 5%, "
        "gemm triton m=8 n=8 takes 1.50× as long\n"
    )
    assert gate([row(1.0)], [row(1.5)], share="60%")[0] == 0
    assert gate([row(1.0), peer(1.0)], [row(1.0), peer(1.5)])[0] == 0


def test_a_row_that_is_missing_is_a_regression(gate):
    code, shown, said = gate([row(1.0), row(1.0, problem=OTHER)], [row(1.0)])
    assert code == 4
    assert said == ("jetfire: 1 of 2 kernel rows regressed: 1 missing, gemm triton m=9 n=9\n")
    assert "not in" in shown


def test_rows_added_and_peers_that_are_missing_are_fine(gate):
    assert gate([row(1.0)], [row(1.0), row(1.0, problem=OTHER)])[0] == 0
    assert gate([row(1.0), peer(1.0)], [row(1.0)])[0] == 0


def test_a_second_file_of_peers_alone_has_lost_every_kernel(gate):
    code, _, said = gate([row(1.0), row(1.0, problem=OTHER), peer(1.0)], [peer(1.0)])
    assert code == 4
    assert "2 of 2 kernel rows regressed: 2 missing" in said


def test_a_kernel_that_became_a_peer_is_judged(gate):
    assert gate([row(1.0)], [row(2.0, role="peer", ok=None)])[0] == 4


def test_a_row_that_lost_its_time_is_a_regression(gate):
    code, shown, said = gate([row(1.0), peer(1.0)], [row(None, ok=True), peer(1.0)])
    assert code == 4
    assert "1 broken, gemm triton m=8 n=8" in said
    assert "broken" in shown


def test_a_row_that_was_broken_and_is_is_no_regression_but_wrong(gate):
    pair = [row(1.0), row(None, problem=OTHER)]
    code, shown, said = gate(pair, pair)
    assert code == 3
    assert said == "jetfire: 1 of 2 kernel rows broken in both files: gemm triton m=9 n=9\n"
    assert "broken" in shown
    assert "faster" not in shown
    assert gate(pair, [row(2.0), pair[1]])[0] == 4
    assert gate([pair[0]], pair)[0] == 0  # a baseline without it says nothing of it
    assert gate(pair, [row(1.0), row(1.0, problem=OTHER)])[0] == 0


def test_all_that_is_wrong_is_said_in_a_line_the_worst_first(gate):
    sizes = [{"m": m, "n": 1} for m in range(4)]
    before = [row(1.0, problem=size) for size in sizes]
    after = [row(1.2, problem=sizes[0]), row(3.0, problem=sizes[1]), row(None, problem=sizes[2])]
    code, _, said = gate(before, after)
    assert code == 4
    assert said == (
        "jetfire: 4 of 4 kernel rows regressed: 2 slower by more than 5%, gemm triton m=1 n=1 "
        "takes 3.00× as long; 1 broken, gemm triton m=2 n=1; 1 missing, gemm triton m=3 n=1\n"
    )


def test_slower_within_noise_passes_with_a_note(gate):
    code, _, said = gate([row(1.0)], [row(3.0, 0.9), row(1.0, problem=OTHER)])
    assert code == 0
    assert said == (
        "jetfire: 1 of 1 kernel row slower by more than 5%, but within noise: "
        "gemm triton m=8 n=8 takes 3.00× as long\n"
    )
    assert gate([row(1.0)], [row(1.04, 0.9)])[2] == ""


def test_ignored_configs_are_matched_and_judged(gate):
    before, after = [row(1.0), peer(1.0)], [row(1.5, config={"tile_m": 128}), peer(1.0)]
    code, _, said = gate(before, after)
    assert code == 4
    assert "1 missing, gemm triton m=8 n=8 (there with another config: --ignore-config" in said
    code, _, said = gate(before, after, "--ignore-config")
    assert code == 4
    assert "takes 1.50× as long" in said
    assert gate(before, after, "--ignore-config", share="60%")[0] == 0


def test_a_row_of_one_file_that_has_another_config_in_the_other_says_so(tmp_path, capsys):
    a = save(tmp_path / "a.json", row(1.0), row(1.0, problem=OTHER), peer(1.0))
    b = save(tmp_path / "b.json", row(1.0, config={"tile_m": 128}), peer(1.0))
    assert execute(None, ["compare", a, b]) == 0
    shown = capsys.readouterr().out
    changed = "gemm triton m=8 n=8 (there with another config: --ignore-config matches them)"
    assert f"in {a} and not in {b}: {changed}, gemm triton m=9 n=9\n" in shown
    assert f"in {b} and not in {a}: {changed}\n" in shown
    assert execute(None, ["compare", a, b, "--ignore-config"]) == 0
    assert "config" not in capsys.readouterr().out


def test_nothing_in_common_but_for_the_config_says_so(gate):
    code, _, said = gate([row(1.0)], [row(1.0, config={"tile_m": 128})])
    assert code == 2
    assert "does: gemm triton m=8 n=8 (there with another config: --ignore-config" in said


def test_rows_on_other_data_are_not_the_same(gate):
    code, _, said = gate([row(1.0, data="normal"), peer(1.0)], [row(1.0, data="heavy"), peer(1.0)])
    assert code == 4
    assert "1 missing, gemm triton m=8 n=8 (there with data heavy)" in said


def test_files_of_two_devices_are_shown_and_not_judged(tmp_path, capsys):
    a = save(tmp_path / "a.json", row(1.0))
    b = save(tmp_path / "b.json", row(1.0), name="another GPU")
    assert execute(None, ["compare", a, b]) == 0
    assert "on GPU → another GPU" in capsys.readouterr().out
    assert execute(None, ["compare", a, b, "--fail-on-regression", "5%"]) == 2
    assert "is of GPU, " in capsys.readouterr().err


def test_times_of_another_timer_are_told(tmp_path, capsys):
    a, b = (
        save(tmp_path / "a.json", row(1.0), timer=3),
        save(tmp_path / "b.json", row(1.0), timer=4),
    )
    assert execute(None, ["compare", a, b]) == 0
    assert "different versions of the timer" in capsys.readouterr().err


@pytest.mark.parametrize("other", [[], [row(1.0, op="quantize")]])
def test_nothing_in_common(other, gate):
    code, _, said = gate([row(1.0)], other)
    assert code == 2
    assert "no row of one" in said


def test_nothing_to_judge(gate):
    code, _, said = gate([peer(1.0)], [peer(1.0), row(1.0)])
    assert code == 2
    assert "the first file has no kernel's row" in said


def test_a_forged_span_is_refused(tmp_path, capsys):
    a = save(tmp_path / "a.json", row(1.0))
    content = json.loads((tmp_path / "a.json").read_text())
    content["rows"][0].update(ms=9.0, ms_p20=0.5, ms_p80=2.0)
    (tmp_path / "b.json").write_text(json.dumps(content))
    assert execute(None, ["compare", a, str(tmp_path / "b.json")]) == 2
    assert "expected ms from ms_p20 to ms_p80" in capsys.readouterr().err


def shown(pairs):
    console = Console(width=160)
    with console.capture() as capture:
        console.print(compare.table(pairs))
    return capture.get()


def test_worst_comes_first():
    tiny = {"m": 7, "n": 7}
    pairs = [
        Pair(row(1.0), row(1.1)),
        Pair(row(1.0, problem=OTHER), row(3.0, problem=OTHER)),
        Pair(row(1e9, problem=tiny), row(1e-9, problem=tiny)),
    ]
    text = shown(pairs)
    assert text.index("9×9") < text.index("8×8") < text.index("7×7")


def test_a_table_tells_its_rows_apart():
    """By data and schedule, and where a version of the op has a field that the other lacks."""
    pairs = [
        Pair(one, one)
        for one in (
            row(1.0, data="normal"),
            row(1.0, data="heavy"),
            row(1.0, export="wheel"),
            row(1.0, problem={"m": 8, "n": 8, "group": 32}),
        )
    ]
    text = shown(pairs)
    assert "data=normal" in text
    assert "data=heavy" in text
    assert "triton as wheel" in text
    assert "8×8 group=32" in text
    kernels = [dataclasses.replace(pair.after, data=None) for pair in pairs[:1]]
    assert "data=" not in shown([Pair(one, one) for one in kernels])


def test_every_format_has_what_the_table_has(tmp_path, capsys):
    before = row(1.0, samples=30), row(1.0, problem=OTHER), row(3.0, kernel="old")
    after = row(1.5, 0.02, samples=30), row(None, problem=OTHER, **WRONG), row(4.0, kernel="fresh")
    files = save(tmp_path / "a.json", *before), save(tmp_path / "b.json", *after)
    assert execute(None, ["compare", *files, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    interval = Pair(before[0], after[0]).interval
    assert interval is not None
    assert [one["interval"] for one in found["pairs"]] == [[*interval], None]
    assert execute(None, ["compare", *files, "--format", "csv"]) == 0
    slower, broken, gone, new = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [float(slower[name]) for name in ("ratio_low", "ratio_high")] == [*interval]
    assert [float(slower[f"before_ms{which}"]) for which in ("", "_p20", "_p80")] == [1, 0.99, 1.01]
    assert [float(slower[f"after_ms{which}"]) for which in ("", "_p20", "_p80")] == [
        1.5,
        1.47,
        1.53,
    ]
    assert [broken[name] for name in ("ratio_low", "after_ms", "after_ms_p20")] == [""] * 3
    assert (gone["kernel"], gone["before_ms_p20"], gone["after_ms"]) == ("old", "2.97", "")
    assert (new["kernel"], new["before_ms"], new["after_ms_p80"]) == ("fresh", "", "4.04")
    assert execute(None, ["compare", *files, "--format", "md"]) == 0
    _, gone, new = (part.splitlines() for part in capsys.readouterr().out.split("### ")[1:])
    assert gone[0] == f"In {files[0]} and not in {files[1]}"
    assert new[0] == f"In {files[1]} and not in {files[0]}"
    assert [text.strip() for text in gone[4].split("|")[3:5]] == ["old", "3.00 ms"]
    assert [text.strip() for text in new[4].split("|")[3:5]] == ["fresh", "4.00 ms"]
