"""gather_rows: the reference against indexing, kernels against the reference."""

import runpy
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.workloads import RAGGED
from jetfire.ops.gather_rows import wanted
from jetfire.reference.gather_rows import gather_rows
from jetfire.reference.nibbles import pack, unpack

OP = registry.get("gather_rows")
KERNEL = registry.get_kernel("gather_rows", "triton")
MODULE = import_module(type(KERNEL).__module__)
run_ptx = runpy.run_path(str(Path(__file__).with_name("ptx.py")))["run"]
FORMS = ({}, {"wide": True}, {"rows": 80}, {"rows": 80, "wide": True}, {"rows": 80, "repeat": True})


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["q"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def launched(problem, inputs):
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(KERNEL, problem, KERNEL.default(problem, Device.of(inputs["q"])), inputs, outputs)
    return outputs["codes"]


def test_reference_takes_rows_of_the_matrix_whose_codes_were_packed():
    codes = torch.randint(-8, 8, (6, 10), dtype=torch.int8)
    q = pack(codes)
    assert torch.equal(gather_rows(q), codes)
    assert torch.equal(gather_rows(q, transpose=True), codes.t())
    assert torch.equal(gather_rows(q, wide=True), 16 * codes)
    rows = torch.tensor([4, -1, 5, 9, -1, 1], dtype=torch.int32)
    counts = torch.tensor([2, 5], dtype=torch.int32)
    zeros = torch.zeros(10, dtype=torch.int8)
    expected = torch.stack([codes[4], zeros, codes[5], codes[3], zeros])
    assert torch.equal(gather_rows(q, rows, counts), expected)
    repeat = torch.tensor([1, 5, 16, 3, 1, 7], dtype=torch.int8)
    repeated = expected.int() * repeat[:5, None]
    assert repeated.abs().max() <= 128
    assert torch.equal(gather_rows(q, rows, counts, repeat), repeated.to(torch.int8))


def test_inputs_ask_for_rows_of_both_halves_and_for_zeros():
    problem = OP.Problem(70, 6, rows=500)
    rows, counts = (OP.inputs(problem, torch.device("cpu"))[name] for name in ("rows", "counts"))
    high, end = counts.tolist()
    assert end == wanted(problem) < 500
    assert -1 in rows[:high]
    assert -1 in rows[high:end]
    assert rows[:high].max() < 70 <= rows[high:end].max() < 140
    assert OP.bytes(problem) == end * (3 + 6 + 4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 2), (33, 70), (150, 264)])
def test_triton_gives_the_reference_bytes(device, m, n, transpose, form):
    problem = OP.Problem(m, n, transpose=transpose, **form)
    check(problem, OP.inputs(problem, device))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transpose", [False, True])
def test_the_cpu_kernel_gives_the_reference_bytes(transpose, form):
    problem = OP.Problem(33, 70, transpose=transpose, **form)
    check(
        problem, OP.inputs(problem, torch.device("cpu")), kernel=registry.kernels(OP.name)["torch"]
    )


@pytest.mark.parametrize("rows", [79, 81])
def test_columns_that_are_no_words(device, rows):
    """Transposed, a row of the output begins anywhere."""
    problem = OP.Problem(40, 72, rows=rows, transpose=True)
    check(problem, OP.inputs(problem, device))


def test_every_config(device):
    for transpose, configs in (
        (False, [(1, 256, 1), (64, 64, 2), (4, 1024, 16), (256, 32, 4)]),
        (True, [(256, 64, 2), (32, 1024, 8), (64, 128, 1), (4, 2048, 4)]),
    ):
        problem = OP.Problem(20, 320, rows=32, repeat=True, transpose=transpose)
        inputs = OP.inputs(problem, device)
        for config in configs:
            check(problem, inputs, KERNEL.Config(*config))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("offset", "stride"), [(1, 64), (4, 64), (16, 64), (0, 61)])
def test_row_strided_views(device, offset, stride, transpose):
    problem = OP.Problem(20, 64, rows=24, repeat=True, transpose=transpose)
    inputs = OP.inputs(problem, device)
    flat = torch.randint(-128, 128, (2000,), dtype=torch.int8, device=device)
    inputs["q"] = flat[offset : offset + 20 * stride].view(20, stride)[:, :32]
    check(problem, inputs)


@pytest.mark.parametrize("transpose", [False, True])
def test_tiles_beyond_the_count_are_left_alone(device, transpose):
    """At a count of 0 nothing is written, and what `rows` holds beyond is not looked at."""
    problem = OP.Problem(8, 64, rows=512, transpose=transpose)
    inputs = OP.inputs(problem, device)
    for count in (0, 1, 128, 512):
        inputs["counts"][1] = count
        inputs["rows"][:count] = 3
        inputs["rows"][count:] = 2**30
        check(problem, inputs)
        found = launched(problem, inputs)
        found = found.t() if transpose else found
        assert bool((found[-(-count // 128) * 128 :] == -128).all())


def rows_of(words):
    """Four words of bytes as they lie in memory: int8 [count, 4·words]."""
    return np.stack(words, -1).view(np.int8)


def test_the_assembly_is_what_the_interpreter_runs():
    generator = np.random.default_rng(0)
    words = [generator.integers(0, 2**32, 3000, dtype=np.uint32) for _ in range(4)]
    repeats = [generator.integers(0, 17, 3000).astype(np.int32) for _ in range(4)]
    codes = [unpack(torch.tensor(rows_of([word]))).numpy() for word in words]
    repeated = [c * r.astype(np.int8)[:, None] for c, r in zip(codes, repeats, strict=True)]
    for asm, expected, given in (
        (MODULE._UNPACK, codes[0], ()),
        (MODULE._WIDEN, 16 * codes[0], ()),
        (MODULE._REPEAT, repeated[0], [repeats[0]] * 4),
    ):
        assert (rows_of(run_ptx(asm.value, 2, words[0], *given)) == expected).all()
    for asm, expected, given in (
        (MODULE._TRANSPOSE, codes, ()),
        (MODULE._TRANSPOSE_WIDE, [16 * c for c in codes], ()),
        (MODULE._TRANSPOSE_REPEAT, repeated, repeats),
    ):
        found = rows_of(run_ptx(asm.value, 8, *words, *given)).reshape(-1, 8, 4)
        assert (found == np.stack(expected, -1)).all()


def test_what_is_refused():
    for fields, reason in (
        ({"n": 7}, "n=7: expected an even number"),
        ({"repeat": True}, "repeat=true rows=none"),
        ({"rows": 4, "repeat": True, "wide": True}, "repeat=true wide=true"),
    ):
        with pytest.raises(UsageError, match=reason):
            OP.Problem(**{"m": 8, "n": 8, **fields})
    h200 = target_device((9, 0))
    for transpose, config, reason in (
        (False, (3, 512, 4), "tile_m=3"),
        (False, (16, 16, 4), "tile_n=16"),
        (False, (16, 512, 3), "warps=3"),
        (False, (16, 32, 4), "4 codes per thread"),
        (True, (4, 512, 4), "16 codes per thread"),
        (True, (256, 1024, 4), "2048 codes per thread"),
        (True, (2, 2048, 1), "tile_m=2"),
    ):
        problem = OP.Problem(64, 64, transpose=transpose)
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)
        assert KERNEL.legal(problem, KERNEL.default(problem, h200), h200) is None


@pytest.mark.parametrize("form", FORMS)
def test_the_peer_is_the_same_in_torch(form):
    for transpose in (False, True):
        problem = OP.Problem(45, 100, transpose=transpose, **form)
        inputs = OP.inputs(problem, torch.device("cpu"))
        assert torch.equal(
            OP.peers(problem, inputs)["eager"]()(), OP.reference(problem, inputs)["codes"]
        )


@pytest.mark.gpu
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("size", RAGGED)
def test_ragged(device, size, transpose):
    for m, n in [(size, 100), (100, size + size % 2)]:
        for form in FORMS:
            problem = OP.Problem(m, n, transpose=transpose, **form)
            check(problem, OP.inputs(problem, device))


@pytest.mark.gpu
@pytest.mark.parametrize("transpose", [False, True])
def test_more_than_two_to_the_31_elements(device, transpose):
    m, n, rows = 65537, 32772, 65600
    problem = OP.Problem(m, n, rows=rows, repeat=True, transpose=transpose)
    inputs = {
        "q": torch.randint(-128, 128, (m, n // 2), dtype=torch.int8, device=device),
        "rows": torch.randint(2 * m, (rows,), dtype=torch.int32, device=device),
        "counts": torch.tensor([9, rows], dtype=torch.int32, device=device),
        "repeat": torch.randint(17, (rows,), dtype=torch.int8, device=device),
    }
    found = launched(problem, inputs)
    found = found.t() if transpose else found
    for top in (0, 32768, rows - 64):
        part = {name: inputs[name][top : top + 64] for name in ("rows", "repeat")}
        assert torch.equal(
            found[top : top + 64], gather_rows(inputs["q"], counts=torch.tensor([0, 64]), **part)
        )
