"""`jetfire compare`: matching, noise, regressions and exit codes."""

import pytest

from jetfire.bench import compare
from jetfire.bench.compare import Pair, match, parse_share
from jetfire.bench.results import Results, Row
from jetfire.cli import execute
from jetfire.core.files import write
from jetfire.ops.errors import UsageError


def row(ms, spread=0.01, **changes) -> Row:
    times = {} if ms is None else {"ms_p20": ms * (1 - spread), "ms_p80": ms * (1 + spread)}
    fields = {"op": "gemm", "kernel": "triton", "role": "kernel", "problem": {"m": 8, "n": 8},
              "config": {"tile_m": 64}, "ok": ms is not None, "ms": ms, **times}  # fmt: skip
    return Row(**{**fields, **changes})


def save(path, *rows):
    write(path, Results({"name": "GPU"}, list(rows)).to_json())
    return str(path)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "regressed"),
    [
        (row(1.0), row(1.2), "slower", True),
        (row(1.0), row(1.03), "slower", False),  # beyond noise, within the share
        (row(1.0, 0.2), row(1.2, 0.2), "noise", False),  # beyond the share, within noise
        (row(1.0), row(0.8), "faster", False),
        (row(1.0), row(None), "broken", True),
        (row(None), row(1.0), "faster", False),
    ],
)
def test_verdicts(before, after, verdict, regressed):
    pair = Pair(before, after)
    assert pair.verdict == verdict
    assert pair.regressed(0.05) is regressed


def test_match_by_config_or_without():
    old, new = Results({}, [row(1.0)]), Results({}, [row(2.0, config={"tile_m": 128})])
    pairs, alone = match(old, new)
    assert not pairs
    assert len(alone) == 2
    pairs, alone = match(old, new, config=False)
    assert [pair.ratio for pair in pairs] == [2.0]
    assert not alone


def test_without_configs_a_doubled_row_is_refused():
    twice = Results({}, [row(1.0), row(1.0, config={"tile_m": 128})])
    with pytest.raises(UsageError, match="twice"):
        match(twice, twice, config=False)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.1", 0.1), ("0", 0.0)])
def test_shares(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["x", "-5%", "%", "nan", "2000%"])
def test_bad_shares(text):
    with pytest.raises(UsageError, match="expected a share"):
        parse_share(text)


def test_exit_codes(tmp_path, capsys):
    a = save(tmp_path / "a.json", row(1.0), row(1.0, kernel="copy", role="peer", config=None))
    slow = save(tmp_path / "b.json", row(1.5), row(1.0, kernel="copy", role="peer", config=None))
    peer = save(tmp_path / "c.json", row(1.0), row(1.5, kernel="copy", role="peer", config=None))
    assert execute(None, ["compare", a, slow]) == 0
    assert "1.500" in capsys.readouterr().out
    assert execute(None, ["compare", a, slow, "--fail-on-regression", "5%"]) == 4
    message = capsys.readouterr().err
    assert message.startswith("jetfire: 1 of 2 rows regressed by more than 5.0%")
    assert message.count("\n") == 1
    assert execute(None, ["compare", a, slow, "--fail-on-regression", "60%"]) == 0
    assert execute(None, ["compare", a, peer, "--fail-on-regression", "5%"]) == 0


def test_nothing_in_common(tmp_path, capsys):
    a = save(tmp_path / "a.json", row(1.0))
    b = save(tmp_path / "b.json", row(1.0, op="quantize"))
    assert execute(None, ["compare", a, b]) == 2
    assert "no row of one" in capsys.readouterr().err


def test_worst_comes_first():
    from rich.console import Console

    pairs = [Pair(row(1.0), row(1.1)), Pair(row(1.0, problem={"m": 9, "n": 9}),
                                            row(3.0, problem={"m": 9, "n": 9}))]  # fmt: skip
    console = Console(width=160)
    with console.capture() as capture:
        console.print(compare.table(pairs))
    text = capture.get()
    assert text.index("9×9") < text.index("8×8")
