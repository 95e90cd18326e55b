"""What is generated from a results file: the same for the same rows, and stale when they change."""

import dataclasses
from pathlib import Path

import pytest

from jetfire.cli import execute
from jetfire.core.files import write
from jetfire.measure.results import Results, Row
from jetfire.report import curves, documents, int8, plot
from jetfire.report.chart import KERNEL_COLOURS, MARKERS
from jetfire.report.documents import BEGIN, END
from jetfire.report.text import COUNTS, error_text, plural, scaled

DEVICE = {
    "name": "NVIDIA H200",
    "kind": "cuda",
    "driver": "1",
    "peaks": {
        "copy_gbps": 4000.0,
        "int8_tops": 1000.0,
        "bf16_tflops": 700.0,
        "how": {"copy_gbps": "a copy"},
    },
}


def gemm_row(name, role, tflops, block, m, n, k, **fields):
    problem = {
        "m": m,
        "n": n,
        "k": k,
        "block": block,
        "out": "bf16",
        "rounding": "nearest",
        "layout": "q",
        "bias": False,
        "accumulate": False,
        **fields,
    }
    ms = 2 * m * n * k / tflops / 1e9
    ratios = {"cublas_bf16": tflops / 700} if role == "kernel" else None
    return Row(
        "gemm",
        name,
        role,
        problem,
        ok=role == "kernel" or None,
        ms=ms,
        tflops=tflops,
        gbps=1.0,
        roofline=tflops / 1000,
        vs_peer=ratios,
    )


def small_row(name, role, gbps, n, mode="fwd", m=8192, **fields):
    rounding = "stochastic" if mode == "bwd" else "nearest"
    problem = {
        "m": m,
        "n": n,
        "block": 32,
        "mode": mode,
        "rounding": rounding,
        "layout": "q",
        **fields,
    }
    ratios = {"compile": 1.5} if role == "kernel" and n == 4096 else {}
    return Row(
        "gelu",
        name,
        role,
        problem,
        ok=role == "kernel" or None,
        ms=2 * m * n / gbps / 1e6,
        gbps=gbps,
        roofline=gbps / 4000,
        vs_peer=ratios,
    )


def sample() -> Results:
    rows = []
    for size in (4096, 8192):
        for block in (32, 64, 128):
            rows.append(gemm_row("triton", "kernel", 5.0 * block, block, size, size, size))
            rows.append(gemm_row("cublas_bf16", "peer", 700, block, size, size, size))
    rows.append(gemm_row("triton", "kernel", 111, 32, 8192, 8192, 8192, out="int8"))
    for out, inp in ((2304, 768), (768, 768), (3072, 768), (768, 3072)):
        rows.append(gemm_row("triton", "kernel", 350, 32, 8192, out, inp))
        rows.append(gemm_row("cublas_bf16", "peer", 700, 32, 8192, out, inp))
    for n in (4096, 16384):
        rows.append(small_row("triton", "kernel", 3000, n))
        rows.append(small_row("compile", "peer", 2000, n))
    rows.append(small_row("triton", "kernel", 2500, 768))
    rows.append(small_row("triton", "kernel", 2000, 768, "bwd"))
    for size in (2048, 1024):
        rows.append(small_row("triton", "kernel", 3000, size, m=size))
    return Results(DEVICE, rows)


@pytest.fixture
def place(tmp_path):
    file = tmp_path / "h200.json"
    write(file, sample().to_json())
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nrest\n")
    return file, readme


def arguments(place, *more):
    return [str(place[0]), "--readme", str(place[1]), *more]


def test_a_readme_whose_marker_names_another_file_stays(place):
    readme = place[1]
    for name, changes in (("h200.json", True), ("h100.json", False)):
        text = f"{BEGIN.replace(' -->', f' {name} -->')}\nold\n{END}\n"
        readme.write_text(text)
        assert execute("report", arguments(place)) == 0
        assert (readme.read_text() != text) == changes
        assert readme.read_text().startswith(text.partition("\n")[0])


def test_a_readme_that_is_not_there_is_refused(place, capsys):
    place[1].unlink()
    assert execute("report", arguments(place)) == 2
    assert "No such file or directory" in capsys.readouterr().err
    place[1].write_bytes(b"\xff")
    assert execute("report", arguments(place)) == 2
    assert "expected UTF-8" in capsys.readouterr().err


def test_other_products_than_the_gemm_have_a_table():
    found = sample()
    fields = {"m": 64, "n": 64, "k": 64, "block": 128, "percent": 5}
    row = Row("fallback_gemm", "wgmma", "kernel", fields, ms=1.0, tflops=5.0, ok=True)
    found.rows.append(dataclasses.replace(row, vs_peer={"cublas_bf16": 1.5}))
    page = documents.page(found, "h200.json", [])
    line = "| fallback_gemm 64×64×64 block=128 percent=5 | wgmma | 1.00 ms | 5.00 TFLOP/s | 1.50× "
    assert line in page
    assert "| fallback_gemm fwd" not in page


def test_large_counts_and_errors():
    assert scaled(52.8e12, COUNTS) == "52.8 trillion"
    assert scaled(124e6, COUNTS) == "124 million"
    assert [error_text(error) for error in (None, 0.0, 1.72e-3)] == ["", "exact", "1.7e-03"]


def test_a_count_is_told_with_its_noun():
    assert [plural(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert plural(1, "search", "searches") == "1 search"
    assert plural(3, "search", "searches") == "3 searches"


def test_figures_are_those_of_the_rows():
    page = documents.page(sample(), "h200.json", [])
    assert "| triton, block 128 | 640 | 640 |" in page
    assert "| cublas_bf16 | 700 | 700 |" in page
    assert "| gpt2-124m fwd | " in page
    assert "0.50×" in page  # 350 against 700 TFLOP/s
    assert "| 3000 | 75% | 1.50× |" in page
    assert "| gelu bwd 8192×768 | 50 | – | – |" in page
    assert "4000 GB/s: a copy" in page


def test_a_page_of_several_runs_says_their_days_and_timers():
    first, second = ({**DEVICE, "timer": t, "date": f"2026-01-0{t}"} for t in (4, 6))
    row = gemm_row("triton", "kernel", 350, 64, 8192, 2304, 768)
    results = Results(second, [row])
    page = documents.page(results, "h200.json", [])
    assert "Triton None; 2026-01-06.\n" in page
    results.merge(Results(first, [dataclasses.replace(row, kernel="wgmma")]))
    page = documents.page(results, "h200.json", [])
    assert "Triton None; 2026-01-04 to 2026-01-06, timer 4, 6.\n" in page


def test_the_mean_of_products_is_of_their_ratios_however_long_each_takes():
    results = Results(DEVICE, [])
    linears = ((2304, 768, 350), (768, 768, 1400), (3072, 768, 1400), (768, 3072, 1400))
    for out, inp, tflops in linears:
        results.rows.append(gemm_row("triton", "kernel", tflops, 64, 8192, out, inp))
        results.rows.append(gemm_row("cublas_bf16", "peer", 700, 64, 8192, out, inp))
    table = part(documents.page(results, "h200.json", []), "GEMM, GPT-2's layers")
    mean = [line for line in table.splitlines() if "geometric mean" in line]
    assert mean == ["| each product, geometric mean | – | 1.41× | – |"]  # of ½, 2, 2 and 2
    assert "0.145, 1.14×" in table  # together: of 3, 1, 4 and 4 parts of the work, 12 / (6 + 4.5)
    del results.rows[-1]  # a product without a peer leaves no ratio of the four
    assert "geometric mean" not in documents.page(results, "h200.json", [])


def test_products_of_few_rows_have_the_ratios_to_their_peers():
    results = Results(DEVICE, [])
    for name, tflops, bf16, fp8 in (("triton", 100, 0.6, 0.4), ("wgmma", 200, 1.25, 0.75)):
        row = gemm_row(name, "kernel", tflops, 128, 64, 4096, 1024)
        ratios = {"cublas_bf16": bf16, "fp8_scaled_mm_block": fp8}
        results.rows.append(dataclasses.replace(row, vs_peer=ratios))
    results.rows.append(gemm_row("wgmma", "kernel", 200, 128, 256, 4096, 1024))  # more rows
    results.rows.append(gemm_row("wgmma", "kernel", 200, 128, 64, 64, 64))  # as few columns
    table = part(documents.page(results, "h200.json", []), "GEMM, few rows")
    lines = [line for line in table.splitlines() if "block=" in line]
    assert lines == ["| 64×4096×1024 block=128 | 2.68 µs | 20% | 1.25× | 0.75× |"]


def test_codes_are_compared_with_floats_of_the_same_product():
    results = Results(DEVICE, [])
    codes = {"out": "int8", "out_block": 32}
    for tflops, fields in (
        (500, {}),
        (400, codes),
        (999, {"out": "int8"}),
        (999, {**codes, "rounding": "stochastic"}),
    ):
        results.rows.append(gemm_row("wgmma", "kernel", tflops, 128, 8192, 2304, 768, **fields))
    results.rows.append(gemm_row("wgmma", "kernel", 500, 128, 8192, 768, 768))  # without codes
    results.rows.append(gemm_row("wgmma", "kernel", 500, 128, 8192, 768, 3072))
    results.rows.append(gemm_row("wgmma", "kernel", 625, 128, 8192, 768, 3072, **codes))
    table = part(documents.page(results, "h200.json", []), "GEMM, INT8 out")
    assert [line for line in table.splitlines() if "×" in line] == [
        "| gpt2-124m | 8192×2304×768 | 58.0 µs | 72.5 µs | 0.80× |",
        "| gpt2-124m | 8192×768×3072 | 77.3 µs | 61.8 µs | 1.25× |",
        "| geometric mean |  |  |  | 1.00× |",
    ]


def test_pairs_of_blocks_are_rows_of_their_own():
    """They are told by both, and are in no table of one block."""
    results = sample()
    plain = documents.page(results, "h200.json", [])
    results.rows.append(small_row("triton", "kernel", 1234, 4096, block=128, out_block=32))
    square = {"block": 128, "out": "int8", "out_block": 32}
    results.rows.append(gemm_row("triton", "kernel", 777, m=8192, n=8192, k=8192, **square))
    page = documents.page(results, "h200.json", [])
    lines = [line for line in page.splitlines() if "out_block" in line]
    assert any("gelu block=128 mode=fwd" in line and "| 1234 |" in line for line in lines)
    assert any("out=int8 out_block=32, triton | – | – | 777" in line for line in lines)
    for title in ("Memory-bound ops by width", "GEMM, squares"):
        assert part(page, title) == part(plain, title)


def test_a_pass_with_the_stream_is_not_compared_with_one_without():
    """LayerNorm's backward adds its gradient to the residual stream's if `residual`."""
    results = sample()
    for name, role, gbps, own in (
        ("gluon", "kernel", 1000, {}),
        ("tiles", "kernel", 2000, {"residual": True}),
        ("compile", "peer", 1000, {}),
    ):
        row = small_row(name, role, gbps, 4096, mode="bwd", stats="row", **own)
        results.rows.append(dataclasses.replace(row, op="layernorm"))
    page = documents.page(results, "h200.json", [])
    lines = [line for line in page.splitlines() if "| 8192×4096 |" in line and "layernorm" in line]
    assert ["residual=true" in line for line in lines] == [False, True]
    assert ["1.00×" in line for line in lines] == [True, False]
    assert "| layernorm bwd 8192×4096 | 25 |" in part(page, "Memory-bound ops by width")


def readme_of(results):
    return int8.readme(results).markdown()


def part(page, title):
    return page.split(f"## {title}\n")[1].split("\n#")[0]


def test_a_row_may_name_the_equal_block():
    row = small_row("triton", "kernel", 1, 64, out_block=32, approximate="tanh")
    assert "out_block" not in documents._problem(row, Path("h200.json"))


def test_readme_table_names_what_it_is_faster_than():
    table = readme_of(sample())
    assert "| GEMM 8192³, block 128 | 1.72 ms | 640 TFLOP/s | 64% | 0.91× cublas_bf16 |" in table
    assert "gelu" not in table  # the page has the others


def test_one_size_is_no_plot():
    results = sample()
    assert "memory-bound" in int8.plots(results)
    results.rows.pop()
    assert "memory-bound" not in int8.plots(results)


def test_wrong_rows_are_named_and_not_shown_as_figures():
    results = sample()
    results.rows = [dataclasses.replace(row, ok=False, ms=None) for row in results.rows[:1]]
    page = documents.page(results, "h200.json", [])
    assert "1 row is wrong" in page


def test_written_once_then_nothing_is_stale(place, capsys):
    assert execute("report", arguments(place, "--check")) == 1
    assert "README.md: stale" in capsys.readouterr().out
    assert execute("report", arguments(place)) == 0
    written = {path.name: path.read_bytes() for path in place[0].parent.iterdir()}
    assert {"h200.md", "h200-gemm.svg", "h200-memory-bound.svg"} <= set(written)
    capsys.readouterr()
    assert execute("report", arguments(place, "--check")) == 0
    assert execute("report", arguments(place)) == 0
    assert capsys.readouterr().out == ""
    assert {path.name: path.read_bytes() for path in place[0].parent.iterdir()} == written
    readme = place[1].read_text()
    assert readme.startswith("# Title\n\n")
    assert readme.endswith("\n\nrest\n")
    assert "old" not in readme


@pytest.mark.parametrize("name", ["h200.md", "h200-gemm.svg", "README.md"])
def test_a_change_is_found(place, name, capsys):
    execute("report", arguments(place))
    path = place[0].parent / name
    path.write_text(path.read_text().replace("700", "701").replace("rows sha256", "rows"))
    path.write_text(path.read_text().replace(f"{BEGIN}\n", f"{BEGIN}\nmore\n"))
    capsys.readouterr()
    assert execute("report", arguments(place, "--check")) == 1
    assert capsys.readouterr().out == f"{path}: stale\n"


def test_a_changed_row_makes_everything_of_it_stale(place):
    execute("report", arguments(place))
    results = Results.load(place[0])
    results.rows = [
        dataclasses.replace(row, ms=row.ms * 1.1, tflops=(row.tflops or 0) / 1.1)
        for row in results.rows
    ]
    write(place[0], results.to_json())
    stale = {path.name for path in documents.report(place[0], place[1], check=True)}
    assert {"h200.md", "README.md", "h200-gemm.svg", "h200-memory-bound.svg"} == stale


def test_a_readme_without_markers_is_refused(place, capsys):
    place[1].write_text("# no markers\n")
    assert execute("report", arguments(place)) == 2
    assert f"{place[1]}: expected the markers" in capsys.readouterr().err


def test_the_readme_above_docs_results_is_found(tmp_path):
    file = tmp_path / "docs" / "results" / "h200.json"
    file.parent.mkdir(parents=True)
    write(file, sample().to_json())
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    assert execute("report", [str(file)]) == 0
    assert "GEMM 8192³" in (tmp_path / "README.md").read_text()


def test_a_colour_is_a_block_and_a_marker_a_kernel():
    labels = [f"{kernel}, block {block}" for block in (32, 128) for kernel in ("wgmma", "triton")]
    series = [plot.Series(label, "kernel", ()) for label in labels]
    *styles, peer = plot._styles([*series, plot.Series("cublas_bf16", "peer", ())])
    colours, markers = ([style[name] for style in styles] for name in ("color", "marker"))
    assert colours == [KERNEL_COLOURS[i] for i in (0, 0, 1, 1)]
    assert markers == [MARKERS[i] for i in (0, 1, 0, 1)]
    assert peer["color"] not in colours
    # Where only one of the two varies, the colour does.
    assert len({style["color"] for style in plot._styles(series[:2])}) == 2
    assert plot._styles([]) == []


def test_more_kernels_than_markers_have_the_colours():
    kernels = range(len(MARKERS) + 1)
    labels = [f"op{i}, {mode}" for i in kernels for mode in ("fwd", "bwd")]
    styles = plot._styles([plot.Series(label, "kernel", ()) for label in labels])
    assert [style["color"] for style in styles] == [
        KERNEL_COLOURS[i] for i in kernels for _ in "ab"
    ]
    assert [style["marker"] for style in styles] == [*MARKERS[:2]] * len(kernels)


def test_a_run_that_diverged_does_not_flatten_the_others():
    def group(name, last):
        curve = curves.Curve(name, [1, 2, 3], [6.0, 5.0, 4.0], [1, 3], [6.0, last])
        return curves.CurveGroup.of(name, [curve])

    base, near, far = group("bf16", 4.0), group("int8", 4.1), group("naive", 6.5)
    assert [curves._near(base.mean, one) for one in (base, near, far)] == [True, True, False]
