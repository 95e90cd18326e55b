"""The promotion's curve: SQNR, the suite, its rows apart from others, its table and its plot."""

import dataclasses
import json
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch

from jetfire.bench import suite
from jetfire.bench.promotion import PromotionRunner, sqnr
from jetfire.cli import execute
from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.files import write
from jetfire.core.kernel import Config, Kernel
from jetfire.core.suites import Timed
from jetfire.measure import peaks
from jetfire.measure.data import DISTRIBUTIONS, OPERANDS
from jetfire.measure.plan import Case
from jetfire.measure.results import Results, Row
from jetfire.measure.runner import Options
from jetfire.ops.gemm import OP as GEMM
from jetfire.ops.gemm import PROMOTION_PEERS
from jetfire.reference.quantize import block_amax, quantize
from jetfire.report import documents, int8
from jetfire.report.plot import plot, promotion_figure

CPU = Device.parse("cpu")
PEAKS = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1}
OPTIONS = Options(rounds=2, sample_ms=0.01, schedules=True)


@dataclasses.dataclass(frozen=True)
class ScheduledConfig(Config):
    tile: int = 64
    schedule: Literal["exact", "telescoped"] = "exact"


class Scheduled(Kernel):
    """The reference, and with the other schedule the reference and some noise."""

    op, name, Config = "gemm", "wgmma", ScheduledConfig

    def __init__(self, noise: float = 2.0**-13, tile: int = 64) -> None:
        self.size = noise
        self.tile = tile

    def legal(self, problem, config, device):
        return None

    def default(self, problem, device):
        return ScheduledConfig(self.tile)

    def space(self, problem, device):
        return {"tile": (32, 64), "schedule": ("exact", "telescoped")}

    def launch(self, problem, config, inputs, outputs):
        c = GEMM.reference(problem, inputs)["c"]
        if config.schedule == "telescoped":
            c = c * (1 + self.size * torch.sign(torch.arange(c.shape[1]).double() % 2 - 0.5))
        outputs["c"].copy_(c)

    def noise(self, problem, config, inputs):
        """What the default's schedule adds, and no more."""
        if config.schedule == "exact":
            return None
        return block_amax(GEMM.reference(problem, inputs)["c"], problem.block) * 2.0**-13


@pytest.fixture
def kernels(monkeypatch):
    def install(*found):
        by_name = {kernel.name: kernel for kernel in found}
        monkeypatch.setattr(registry, "kernels", lambda _: by_name)

    install(Scheduled(), registry.get_kernel("gemm", "int_mm"))
    return install


def case(size: int = 128, block: int = 32) -> Case:
    return Case(GEMM, GEMM.Problem(size, size, size, block=block))


def test_sqnr_in_closed_form():
    truth = torch.tensor([3.0, 4.0, 0.0, 0.5], dtype=torch.float64)[:, None].expand(4, 6)
    factor = torch.tensor([1.1, 1.01, 1.0, 1.001], dtype=torch.float64)[:, None]
    whole, middle = sqnr(truth * factor, truth)
    power, noise = 9 + 16 + 0.25, 0.3**2 + 0.04**2 + 0.0005**2
    assert whole == pytest.approx(10 * math.log10(power / noise))
    assert middle == pytest.approx(40)  # of 20, 40 and 60 dB; the row of zeros has none
    assert sqnr(truth, truth) == (math.inf, math.inf)
    assert sqnr(-truth, truth)[0] == pytest.approx(-20 * math.log10(2))
    assert all(math.isnan(value) for value in sqnr(truth * math.nan, truth))


def test_sqnr_over_several_slabs():
    truth = torch.ones(3000, 2, dtype=torch.float64)
    out = truth.clone()
    out[2999] = 1.5
    assert sqnr(out, truth)[0] == pytest.approx(10 * math.log10(3000 / 0.25))


@pytest.mark.parametrize("data", [*DISTRIBUTIONS, "outlier/normal"])
def test_the_floats_are_those_behind_the_codes(data):
    problem = GEMM.Problem(70, 40, 50, block=32, bias=True)
    floats = GEMM.floats(problem, torch.device("cpu"), 7, data)
    inputs = GEMM.inputs(problem, torch.device("cpu"), 7, data)
    assert floats["a"].shape == (70, 50)
    assert floats["b"].shape == (40, 50)
    for name in "ab":
        codes, scale = quantize(floats[name], 32)
        assert torch.equal(codes, inputs[name])
        assert torch.equal(scale.nan_to_num(-1), inputs[f"{name}_scale"].nan_to_num(-1))


def test_each_operand_may_have_its_own_distribution():
    floats = GEMM.floats(case(64).problem, torch.device("cpu"), 3, "gradient/normal")
    assert float(floats["a"].abs().max()) < 0.1
    assert float(floats["b"].square().mean()) == pytest.approx(1, abs=0.1)
    for data in ("nope/normal", "normal/nope", "normal/"):
        with pytest.raises(UsageError, match=f"data '{data}': expected one of normal"):
            GEMM.floats(case(64).problem, torch.device("cpu"), 3, data)


def test_every_schedule_is_measured_and_no_other_kernel(kernels):
    notes: list[str] = []
    rows = PromotionRunner(CPU, PEAKS, OPTIONS, notes.append).measure(case(256))
    assert notes == []
    assert [row.label for row in rows] == [
        "wgmma exact",
        "wgmma telescoped",
        "fp32_matmul",
        "bf16_matmul",
    ]
    exact, telescoped, fp32, bf16 = rows
    assert [row.schedule for row in rows] == ["exact", "telescoped", None, None]
    assert all(row.curve == "promotion" and row.ms for row in rows)
    assert set(exact.vs_peer or {}) == {"fp32_matmul", "bf16_matmul"}
    assert exact.ok
    assert exact.schedule_err < 2.0**-23
    assert telescoped.schedule_err == pytest.approx(2.0**-13, rel=1e-3)
    # Of values of variance 1, a uniform error of a step of `scale` leaves scale²/12.
    inputs = GEMM.inputs(case(256).problem, torch.device("cpu"))
    steps = sum(float(inputs[f"{name}_scale"].square().mean()) for name in "ab")
    assert exact.sqnr_db == pytest.approx(-10 * math.log10(steps / 12), abs=0.3)
    assert telescoped.sqnr_db == pytest.approx(exact.sqnr_db, abs=0.01)
    assert exact.row_sqnr_db == pytest.approx(exact.sqnr_db, abs=0.5)
    # BF16 has 8 bits: each operand and the output err by up to 2^-9 of themselves.
    assert fp32.sqnr_db > 120
    assert 48 < bf16.sqnr_db < 54


def test_gradients_lose_their_small_rows_to_the_large_ones(kernels):
    options = dataclasses.replace(OPTIONS, data="gradient/normal")
    row = PromotionRunner(CPU, PEAKS, options, print).measure(case(block=128))[0]
    assert row.data == "gradient/normal"
    assert row.row_sqnr_db < row.sqnr_db - 10


def test_a_wrong_schedule_is_no_point(kernels):
    kernels(Scheduled(noise=0.1))
    notes: list[str] = []
    rows = PromotionRunner(CPU, PEAKS, OPTIONS, notes.append).measure(case())
    assert [row.ok for row in rows] == [True, False, None, None]
    assert (rows[1].sqnr_db, rows[1].schedule_err, rows[1].ms) == (None, None, None)
    assert rows[1].curve == "promotion"
    assert "wgmma telescoped is wrong" in notes[0]


def test_the_suite_has_every_block_and_kind_of_data():
    cases = suite.cases("promotion", Options(data="heavy"))
    assert {(c.problem.block, o.data) for c, o in cases} == {
        (block, data) for block in (32, 64, 128) for data in OPERANDS
    }
    assert len(cases) == 9
    assert {(c.problem.m, c.problem.n, c.problem.k, c.problem.out) for c, _ in cases} == {
        (8192, 8192, 8192, "bf16")
    }
    assert all(o.schedules and "cublas_bf16" in o.peers for _, o in cases)
    others = [o for c, o in suite.cases("results", Options(data="heavy"))]
    assert not any(o.schedules for o in others)
    assert {o.data for o in others} == {"heavy"}


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_without_a_kernel_that_has_schedules_it_is_refused(more, capsys):
    assert execute("bench", ["--suite", "promotion", "--device", "cpu", *more]) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "no kernel with a choice of schedules runs on" in captured.err
    assert "wgmma: needs sm_90" in captured.err


def test_its_data_are_its_own(capsys):
    assert execute("bench", ["--suite", "promotion", "--data", "heavy"]) == 2
    assert "says itself what is measured" in capsys.readouterr().err


def small_suite(part="promotion") -> list[suite.Entry]:
    timed = Timed(
        part,
        sizes={"m": [64]},
        blocks=["32", "64"],
        peers=["bf16_matmul"],
        rounds=2,
        schedules=True,
    )
    return [(registry.get("gemm"), replace(timed, data=data)) for data in ("normal", "outlier")]


def test_the_command_adds_points_and_replaces_them(kernels, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    monkeypatch.setattr(suite, "_part", small_suite)
    file = tmp_path / "r.json"
    ordinary = Row(
        "gemm",
        "wgmma",
        "kernel",
        case(64).problem.as_dict(),
        data="normal",
        ms=1.0,
        config=ScheduledConfig().as_dict(),
    )
    write(file, Results({"name": CPU.name}, [ordinary]).to_json())
    words = ["--suite", "promotion", "--device", "cpu", "-o", str(file), "--append"]
    assert execute("bench", words) == 0
    shown = capsys.readouterr().out
    assert "SQNR dB" in shown
    assert "wgmma telescoped" in shown
    assert "data=outlier" in shown
    first = Results.load(file).rows
    assert replace(first[0], run=None) == ordinary
    assert len(first) == 1 + 2 * 2 * 3
    assert all(row.sqnr_db is not None for row in first[1:])
    kernels(Scheduled(tile=32))  # another config is the same point of the curve
    assert execute("bench", words) == 0
    again = Results.load(file).rows
    assert [row.key() for row in again] == [row.key() for row in first]
    assert {row.config["tile"] for row in again[1:] if row.config} == {32}
    assert len({row.key(config=False) for row in again}) == len(again)


def test_a_dry_run_names_the_schedules(kernels, monkeypatch, capsys):
    monkeypatch.setattr(suite, "_part", small_suite)
    assert execute("bench", ["--suite", "promotion", "--device", "cpu", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "wgmma exact (default) tile=64 schedule=exact" in shown
    assert "wgmma telescoped (default) tile=64 schedule=telescoped" in shown
    assert "int_mm" not in shown


TOPS = {
    ("exact", 32): 500,
    ("exact", 64): 900,
    ("exact", 128): 1400,
    ("telescoped", 32): 800,
    ("telescoped", 64): 1150,
    ("telescoped", 128): 1300,
}
PEERS = {"cublas_bf16": (700, 50.0), "fp8_scaled_mm": (1300, 28.0)}


def points() -> list[Row]:
    found = []
    for lost, data in enumerate(OPERANDS):
        for block in (32, 64, 128):
            problem = GEMM.Problem(8192, 8192, 8192, block=block).as_dict()
            for schedule in ("exact", "telescoped"):
                tops = TOPS[schedule, block] + lost
                found.append(
                    Row(
                        "gemm",
                        "wgmma",
                        "kernel",
                        problem,
                        config={"schedule": schedule},
                        data=data,
                        ok=True,
                        ms=2 * 8192**3 / tops / 1e9,
                        tflops=tops,
                        curve="promotion",
                        vs_peer={"cublas_bf16": tops / 700},
                        sqnr_db=40.04 - block / 32 - lost,
                        row_sqnr_db=12.5,
                        schedule_err=(lost + 1) * 1e-4,
                    )
                )
            for name, (tops, quality) in PEERS.items():
                found.append(
                    Row(
                        "gemm",
                        name,
                        "peer",
                        problem,
                        data=data,
                        ms=2 * 8192**3 / tops / 1e9,
                        tflops=tops,
                        curve="promotion",
                        sqnr_db=quality - lost,
                        row_sqnr_db=quality,
                    )
                )
    return found


def plain() -> list[Row]:
    return [
        dataclasses.replace(
            row,
            curve=None,
            sqnr_db=None,
            row_sqnr_db=None,
            schedule_err=None,
            ms=2 * row.ms,
            tflops=row.tflops / 2,
            roofline=0.5,
        )
        for row in points()
        if row.data == "normal" and row.schedule != "exact"
    ]


DEVICE = {"name": "NVIDIA H200", "kind": "cuda"}


def test_the_reports_section():
    page = documents.page(Results(DEVICE, points()), "h200.json", [])
    assert "## What a promotion costs" in page
    assert "GEMM 8192×8192×8192, BF16 out" in page
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert lines[0] == (
        "| K per promotion |  | TOPS | × cuBLAS | normal, dB | outlier × normal, dB | "
        "gradient × normal, dB | gradient × normal, median row, dB | own error |"
    )
    assert lines[1] == ("| 32 | wgmma exact | 500 | 0.71× | 39.0 | 38.0 | 37.0 | 12.5 | 3.0e-04 |")
    assert lines[6] == (
        "| 128 | wgmma telescoped | 1300 | 1.86× | 36.0 | 35.0 | 34.0 | 12.5 | 3.0e-04 |"
    )
    assert lines[7] == "| – | cublas_bf16 | 700 | – | 50.0 | 49.0 | 48.0 | 50.0 | – |"
    assert len(lines) == 1 + 6 + 2


def test_the_curve_changes_nothing_else():
    before, after = Results(DEVICE, plain()), Results(DEVICE, [*plain(), *points()])
    assert int8.readme(after) == int8.readme(before)
    link = "- [What a promotion costs](#what-a-promotion-costs)\n"
    page = documents.page(after, "x.json", []).replace(link, "")
    begin = page.index("## What a promotion costs")
    end = page.index("## ", begin + 1) if "## " in page[begin + 1 :] else len(page)
    assert (page[:begin] + page[end:]).rstrip() == documents.page(before, "x.json", []).rstrip()


def test_the_report_draws_it_and_finds_it_stale(tmp_path):
    file = tmp_path / "h200.json"
    write(file, Results(DEVICE, [*plain(), *points()]).to_json())
    documents.report(file, None, check=False)
    drawn = (tmp_path / "h200-promotion.svg").read_text()
    for text in (
        "wgmma exact",
        "wgmma telescoped",
        "fp8_scaled_mm",
        "K 64",
        "outlier × normal data",
        "SQNR, dB",
        "TOPS",
    ):
        assert text in drawn, text
    assert documents.report(file, None, check=True) == []
    changed = [
        dataclasses.replace(row, sqnr_db=row.sqnr_db and row.sqnr_db - 1)
        for row in Results.load(file).rows
    ]
    write(file, Results(DEVICE, changed).to_json())
    stale = documents.report(file, None, check=True)
    assert {path.name for path in stale} == {"h200.md", "h200-promotion.svg"}


def test_the_plot_option_draws_the_curve(tmp_path):
    plot(points(), DEVICE, tmp_path / "p.svg")
    plot(points(), DEVICE, tmp_path / "q.svg")
    assert "SQNR, dB" in (tmp_path / "p.svg").read_text()
    assert (tmp_path / "p.svg").read_bytes() == (tmp_path / "q.svg").read_bytes()


def test_no_point_is_above_its_chart():
    """The charts share an axis; the first one's points do not say how far it goes."""
    rows = points()
    rows[-3] = dataclasses.replace(rows[-3], tflops=5000.0)
    limits = {ax.get_ylim() for ax in promotion_figure(rows, DEVICE).axes}
    assert len(limits) == 1
    ((low, high),) = limits
    assert low == 0
    assert high > 5000


def test_files_from_before_the_curve_are_read(tmp_path):
    file = tmp_path / "r.json"
    content = json.loads(Results(DEVICE, points()[:1]).to_json())
    for name in ("curve", "sqnr_db", "row_sqnr_db", "schedule_err"):
        del content["rows"][0][name]
    file.write_text(json.dumps(content))
    (row,) = Results.load(file).rows
    assert (row.curve, row.sqnr_db, row.row_sqnr_db, row.schedule_err) == (None,) * 4


@pytest.mark.gpu
@pytest.mark.parametrize("data", OPERANDS)
def test_the_curve_on_the_gpu(data):
    device = Device.parse("cuda")
    if device.capability != (9, 0):
        pytest.skip("needs sm_90")
    options = dataclasses.replace(OPTIONS, data=data, peers=PROMOTION_PEERS)
    rows = PromotionRunner(device, {"copy_gbps": 4e3, "int8_tops": 1900}, options, print).measure(
        case(512)
    )
    by_label = {row.label: row for row in rows}
    assert {"wgmma exact", "wgmma telescoped", *PROMOTION_PEERS} == set(by_label)
    assert by_label["wgmma exact"].schedule_err <= 1e-6
    assert by_label["wgmma telescoped"].schedule_err <= 1e-3
    assert 45 < by_label["cublas_bf16"].sqnr_db < 56
    assert by_label["wgmma exact"].sqnr_db == pytest.approx(
        by_label["wgmma telescoped"].sqnr_db, abs=0.1
    )
    if data == "normal":
        assert by_label["wgmma exact"].sqnr_db > by_label["fp8_scaled_mm"].sqnr_db + 5
