"""The report's INT4 tables: of just the rows that there are, and nothing where there are none."""

import pytest

from jetfire.core import registry, workloads
from jetfire.core.files import write
from jetfire.measure.results import Results, Row
from jetfire.report import documents, int4
from jetfire.report.documents import BEGIN, END
from jetfire.report.table import filled

DEVICE = {
    "name": "NVIDIA H200",
    "kind": "cuda",
    "peaks": {"copy_gbps": 4000.0, "int8_tops": 1900.0, "bf16_tflops": 700.0},
}


def row(op, problem, ms, ratio, **fields):
    return Row(
        op,
        "wgmma",
        "kernel",
        problem.as_dict(),
        ok=True,
        ms=ms,
        gbps=3000.0,
        roofline=0.75,
        vs_peer={"cublas_fp16": ratio, "compile": 3.0},
        **fields,
    )


def layer_rows():
    found = []
    for mode, op, ms in (
        ("fwd", "int4_gemm", 1.0),
        ("fwd", "hadamard_gemm", 2.0),
        ("bwd", "hadamard_gemm", 4.0),
    ):
        for i, problem in enumerate(workloads.problems(registry.get(op), "int4-paper", mode, {})):
            stages = {"first": ms / 4, "second": 3 * ms / 4} if op == "hadamard_gemm" else None
            extra = {"extra": {"stages": stages}} if stages else {}
            # Half of the ratios are a quarter of the others': the mean is half of the larger one.
            found.append(row(op, problem, ms, ms * 4 ** (i % 2), **extra))
            found.append(row(op, problem, 9.0, 0.1))  # a slower kernel
    return found


def small_rows():
    quantise = registry.get("hadamard_quantize")
    return [
        row("hadamard_quantize", quantise.Problem(8192, 8192), 0.05, 1.0),
        row("hadamard_quantize", quantise.Problem(8192, 8192, mode="bwd", given="x"), 0.06, 1.0),
        row("sample_rows", registry.get("sample_rows").Problem(8192), 0.02, 1.0),
    ]


def test_layers_have_times_ratios_and_their_means():
    [table] = int4.layers(Results(DEVICE, layer_rows())).tables
    assert table.head == [
        "m×n×k",
        "GEMM, packed codes",
        "× FP16",
        "forward",
        "× FP16",
        "backward",
        "× FP16",
    ]
    first, *_, last = table.rows
    assert first == ["4608×5120×6144", "1.00 ms", "1.00×", "2.00 ms", "2.00×", "4.00 ms", "4.00×"]
    assert last == ["geometric mean", "", "2.00×", "", "4.00×", "", "8.00×"]
    assert len(table.rows) == 7


def test_no_mean_where_a_shape_is_missing():
    rows = [r for r in layer_rows() if r.problem["m"] != 15360]
    results = Results(DEVICE, rows)
    *_, largest, last = int4.layers(results).tables[0].rows
    assert largest == ["15360×8704×10752", *["–"] * 6]
    assert last[2] == "–"
    assert int4.readme(results).rows == []


def test_stages_are_shares_of_their_sum():
    text = int4.stages(Results(DEVICE, layer_rows())).markdown()
    assert "| wgmma fwd | 4608×5120×6144 |" in text
    assert "| second | 1.50 ms 75% |" in text
    assert "| second | 3.00 ms 75% |" in text
    assert "| all in turn | 4.00 ms |" in text


def test_memory_bound_ops_are_described_by_what_is_not_their_default():
    [table] = int4.memory_bound(Results(DEVICE, small_rows())).tables
    assert [line[0] for line in table.rows] == [
        "hadamard_quantize fwd group=32 layout=packed",
        "hadamard_quantize bwd given=x",
        "sample_rows",
    ]
    assert table.rows[0][1:] == ["wgmma", "8192×8192", "50.0", "3000", "75%", "3.00×"]
    assert table.rows[2][2] == "8192"


def test_nothing_without_rows():
    empty = Results(DEVICE)
    assert filled(int4.sections(empty)) == []
    assert int4.readme(empty).rows == []


@pytest.mark.parametrize("some", [True, False])
def test_the_pages_hold_them(tmp_path, some):
    file, readme = tmp_path / "h200.json", tmp_path / "README.md"
    write(file, Results(DEVICE, layer_rows() + small_rows() if some else []).to_json())
    readme.write_text(f"{BEGIN}\n{END}\n")
    documents.report(file, readme, check=False)
    page = file.with_suffix(".md").read_text()
    assert ("## INT4: a linear layer by stage" in page) is some
    assert ("hadamard_quantize" in page) is some
    lines = readme.read_text()
    assert ("| 2.00× FP16 cuBLAS | 1.00× to 4.00× |" in lines) is some
    assert ("| 75% of copy bandwidth | 3000 GB/s |" in lines) is some
    assert documents.report(file, readme, check=True) == []
