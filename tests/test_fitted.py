"""Tables at a terminal's width: what has no room is left out or wrapped, and no value is cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from jetfire.bench import compare
from jetfire.core import terminal
from jetfire.core.profiles import Entry
from jetfire.fuzz import command as fuzz
from jetfire.measure.results import Row
from jetfire.report import show
from jetfire.report.fitted import BETWEEN, FittedTable
from jetfire.report.table import Table
from jetfire.tuner import display
from jetfire.tuner import show as profiles

WIDTHS = (60, 80, 100, 120)
PROBLEM = {"m": 16384, "n": 16384, "k": 16384, "block": 128}
ROW = Row(
    "gemm",
    "fp8_scaled_mm_block",
    "kernel",
    PROBLEM,
    ok=True,
    ms=1.0804,
    ms_p20=1.0541,
    ms_p80=1.0964,
    samples=20,
    tflops=714.2,
    roofline=0.541,
    vs_peer={"cublas_bf16": 1.432},
    rel_err=1.7e-3,
    sm_mhz=1388,
    throttled=["power"],
    watts=694,
    sqnr_db=31.4,
    extra={"peak_gib": 41.12, "activation_gib": 12.34},
)
ROWS = [
    ROW,
    replace(ROW, kernel="wgmma", ms=1.54, ok=False),
    replace(ROW, kernel="mma", ms=3.02, ms_p20=3.01, ms_p80=3.03),
]


def printed(table, width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def shown(table, width):
    """Return the shown columns by name, as the texts of their cells, put together again."""
    columns, widths = table._fitting(width)
    lines = printed(table, width).splitlines()
    assert max(map(len, lines)) <= width, "\n".join(lines)
    if not columns:  # each row stands as lines
        return dict.fromkeys(range(len(table.head)), "".join("".join(lines).split()))
    found, start = {}, 0
    for i, wide in zip(columns, widths, strict=True):
        texts = "".join(line[start : start + wide] for line in lines[1:] if "─" not in line)
        found[i] = "".join(texts.split())
        start += wide + BETWEEN
    return found


def whole(table, width):
    """Assert that no text of a shown column is cut, and return the names of the shown ones."""
    found = shown(table, width)
    for i, text in found.items():
        for line in table._lines:
            if not line.title:
                assert "".join(line.cells[i].plain.split()) in text
    return [table.head[i] for i in found]


@pytest.mark.parametrize("width", WIDTHS)
def test_bench_shows_every_value_with_its_unit(width):
    table = show.table(ROWS)
    names = whole(table, width)
    text = printed(table, width)
    assert {"kernel", "time", "error"} <= set(names)
    for value in ("1.08 ms", "1.7e-03", "WRONG", "fp8_scaled_mm_block"):
        assert value in text
    assert ("714 TFLOP/s" in text) is ("rate" in names)
    assert ("1.43× cublas_bf16" in text) is ("× peer" in names)


def test_the_least_important_columns_go_first():
    names = [whole(show.table(ROWS), width) for width in (300, 120, 100, 80, 60)]
    assert [*names[0]] == [*show.cells(ROW)]
    for wide, narrow in pairwise(names):
        gone = [name for name in show.SPARE if name not in narrow]
        assert gone == [*show.SPARE[: len(gone)]]
        assert set(narrow) <= set(wide)
    assert "left out, for the width: p20–p80" in printed(show.table(ROWS), 100)
    assert "left out" not in printed(show.table(ROWS), 300)


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_shows_times_with_units_and_the_whole_verdict(width):
    table = compare.table([compare.Pair(ROW, row) for row in ROWS])
    whole(table, width)
    text = printed(table, width)
    assert {"broken", "slower", "noise"} <= set(text.split())
    assert "3.02 ms" in text


def entry(**fields):
    return Entry(
        kernel="wgmma",
        problem=PROBLEM,
        config={"tile_m": 128, "tile_n": 256, "stages": 4, "warps": 8, "swizzle": "grouped"},
        ms=1.54,
        ms_p20=1.5,
        ms_p80=1.6,
        samples=9,
        default_ms=2.0,
        joules=None,
        objective="time",
        vs_peer={"cublas_bf16": 1.43},
        trials=1,
        strategy="tpe",
        provenance={"date": "2026-11-24"},
        **fields,
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_profiles_show_the_whole_config(width):
    rows = [profiles._row("gemm", entry(), {})]
    table = Table(profiles.COLUMNS, rows, left=(0, 1, 2, 5, 6, 7)).rich((1, 2), profiles.SPARE)
    names = whole(table, width)
    assert {"kernel", "problem", "config", "time", "state"} <= set(names)
    text = shown(table, width)[2]
    assert "tile_m=128tile_n=256stages=4warps=8swizzle=grouped" in text


TABLES = {
    "tune": Table(
        display.COLUMNS,
        [
            (
                "gemm 16384×16384×16384",
                "fp8_scaled_mm_block",
                "tile_m=128 tile_n=256 stages=4 warps=8",
                "1.54 ms",
                "2.09 ms",
                "1.357×",
                "1.43× cublas_bf16\n1.10× compile",
                "250",
                "13",
                "written",
            )
        ],
        left=(0, 1, 2, 6, 9),
    ).rich((0, 2), display.SPARE),
    "plan": Table(
        ("would fit", "GiB"), [("--recipe int8-block32 --set batch=4,accumulate=16", "71.25")]
    ).rich(),
    "words": Table(("what", "value"), [("x" * 200, "1.54 ms"), ("y", "714 TFLOP/s")]).rich(),
}


@pytest.mark.parametrize("width", [10, 20, *WIDTHS])
@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_cut(name, width):
    whole(TABLES[name], width)


def test_where_words_have_no_room_beside_one_another_they_stand_under_one_another():
    lines = printed(TABLES["tune"], 60).splitlines()
    assert "time: 1.54 ms" in lines
    assert "profile: written" in lines
    assert "failed: 13" in lines


@pytest.mark.parametrize("width", WIDTHS)
def test_a_title_of_rows_wraps_too(width):
    table = FittedTable(("kernel", "time"), (0,))
    table.add_section("m=16384 n=16384 k=16384 block=128 rounding=stochastic out_block=64 " * 2)
    table.add_row("mma", "3.02 ms")
    text = printed(table, width)
    assert text.split().count("out_block=64") == 2
    assert "3.02 ms" in text


def test_a_title_s_words_stay_whole():
    """Columns go before a word does: `rounding=` and `stochastic` stood on two lines."""
    table = FittedTable(("kernel", "time", "p20–p80", "rate"), (0,), spare=("p20–p80",))
    table.add_section("64×64 mode=bwd rounding=stochastic")
    table.add_row("torch", "513 µs", "512.3–520.5", "26.5 MB/s")
    for width in (80, 50):
        assert "rounding=stochastic" in printed(table, width).split()
    assert "left out, for the width: p20–p80" in printed(table, 50)
    table.add_section("/a/path/" * 12)  # has no room as it is, and takes none from the columns
    assert "kernel" in printed(table, 80)
    assert "left out" not in printed(table, 80)


def test_wide_characters_count_as_the_terminal_does():
    table = Table(("設定", "time"), [("核" * 30, "1.54 ms")]).rich()
    for line in printed(table, 40).splitlines():
        assert len(line) + sum(c in "設定核" for c in line) <= 40


@pytest.mark.parametrize("width", WIDTHS)
def test_fuzz_shows_its_result(width, monkeypatch, capsys):
    wide = Console(width=width)
    monkeypatch.setattr(terminal, "console", lambda width: wide)
    pair = {
        "op": "hadamard_quantize",
        "kernel": "portable",
        "examples": 200,
        "asked": 200,
        "seconds": 12.0,
        "configs": 14,
        "coverage": dict.fromkeys(fuzz.COUNTED, 100),
        "failures": [{"kind": "wrong"}, {"kind": "out of bounds"}],
        "differing": 3,
        "compared": 190,
    }
    summary = {
        "pairs": [pair],
        "against": "triton",
        "finished": True,
        "short": [],
        "seed": 0,
        "device": "cpu",
        "out_of_time": False,
        "elsewhere": [],
    }
    fuzz._print_table(summary)
    text = capsys.readouterr().out
    assert "hadamard_quantize" in text
    assert "portable" in text
    assert "3 of 190" in text
    assert "wrong, out of bounds" in " ".join(text.split())
