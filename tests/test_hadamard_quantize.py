"""hadamard_quantize: kernels against the reference, bit for bit; the CUDA kernel's machine code."""

import dataclasses
import itertools
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jetfire.core import registry, workloads
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.machine_code import audit
from jetfire.core.problem import MOST_IN_CODES
from jetfire.core.tensors import Quantized4, dtype_of
from jetfire.kernels_cuda.hadamard_quantize import rows
from jetfire.kernels_cuda.hadamard_rows import Matrix, RowsConfig
from jetfire.ops import int4_quantize, int4_quantize_backward, int8_quantize
from jetfire.reference.hadamard import GROUPS, transform
from jetfire.reference.nibbles import narrow, unpack
from jetfire.tests.audited import loop_of, together

OP = registry.get("hadamard_quantize")
ROWS = registry.get_kernel("hadamard_quantize", "rows")
CAPABILITIES = ((8, 0), (8, 9), (9, 0))
GRADIENTS = [
    {"mode": "bwd", "given": given, "gathered": gathered}
    for given in ("codes", "x", "wide")
    for gathered in (False, True)
]
# A gradient in codes, as training makes it: of kept rows, rounded stochastically.
CODES = {**GRADIENTS[1], "out": "int8", "rounding": "stochastic"}
# Of each kind: groups of a thread, between lanes and between runs; one lane or many rows a warp.
CONFIGS = (
    RowsConfig(8, 4, 32, 4),
    RowsConfig(8, 1, 4, 1, prefetch=False),
    RowsConfig(8, 2, 16, 2, blocks=4, prefetch=False),
    RowsConfig(16, 2, 32, 8),
    RowsConfig(16, 1, 8, 2),
    RowsConfig(32, 1, 32, 4),
    RowsConfig(32, 1, 4, 16, prefetch=False),
)
# The same of codes, for the blocks that each has.
OF_CODES = (
    RowsConfig(16, 1, 16, 16, 2),
    RowsConfig(16, 1, 4, 4, prefetch=False),
    RowsConfig(8, 2, 8, 16, 2),
    RowsConfig(32, 1, 4, 16, 1),
    RowsConfig(32, 1, 16, 16, 1, prefetch=False),
    RowsConfig(16, 2, 8, 16, 1),
    RowsConfig(8, 4, 8, 8, 1),
)


@pytest.fixture
def kernel(device):
    """That of the device: the CPU's, or the CUDA kernel."""
    if device.type == "cpu":
        return registry.get_kernel("hadamard_quantize", "torch")
    problem = OP.Problem(32, 64)
    found = Device.parse(str(device))
    if (reason := ROWS.legal(problem, ROWS.default(problem, found), found)) is not None:
        pytest.skip(reason)
    return ROWS


def check(kernel, problem, inputs, config=None):
    config = config or kernel.default(problem, Device.of(inputs.get("x", inputs.get("dx_hat"))))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def run(kernel, problem, inputs):
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(kernel, problem, kernel.default(problem, Device.of(inputs["x"])), inputs, outputs)
    return outputs


@pytest.mark.parametrize("layout", ["packed", "wide", "both"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_codes_are_bit_equal(device, kernel, layout, dtype):
    for m, n, group in ((1, 2, 1), (33, 130, 2), (5, 1024, 1024), (70, 96, 32), (3, 1600, 64)):
        problem = OP.Problem(m, n, group=group, dtype=dtype, layout=layout)
        check(kernel, problem, OP.inputs(problem, device, data="outlier"))


@pytest.mark.parametrize("fields", GRADIENTS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_gradients_are_bit_equal(device, kernel, fields, dtype):
    for m, n, group in ((1, 2, 1), (33, 130, 2), (5, 1024, 1024), (70, 96, 32)):
        problem = OP.Problem(m, n, group=group, dtype=dtype, **fields)
        check(kernel, problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_of_a_gradient_are_bit_equal(device, kernel, block, rounding):
    fields = {"mode": "bwd", "out": "int8", "out_block": block, "rounding": rounding}
    shapes = ((1, 2, 1), (33, 130, 2), (5, 512, 128), (70, 96, 32), (129, 1632, 32))
    for (m, n, group), dtype in itertools.product(shapes, ("bf16", "fp16", "fp32")):
        for gathered in (False, True):
            problem = OP.Problem(m, n, group=group, dtype=dtype, gathered=gathered, **fields)
            check(kernel, problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_codes_of_a_gradient_are_those_of_the_gradient(device, dtype, gathered):
    """As two calls make them, which round in between."""
    problem = OP.Problem(70, 192, mode="bwd", dtype=dtype, gathered=gathered)
    inputs = OP.inputs(problem, device, data="outlier")
    given = {name: inputs[name] for name in ("slots", "unit") if gathered}
    q = Quantized4(inputs["q"], None, torch.ones(1, device=device))
    seed = torch.tensor([-3], device=device)
    floats = int4_quantize_backward(inputs["dx_hat"], q=q, **given)
    for block, rounding in itertools.product((32, 64, 128), ("nearest", "stochastic")):
        expected = int8_quantize(floats, block=block, rounding=rounding, seed=seed)
        options = {"out_block": block, "rounding": rounding, "seed": seed}
        found = int4_quantize_backward(inputs["dx_hat"], q=q, **given, out="int8", **options)
        assert found.block == block
        assert torch.equal(found.q, expected.q)
        assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_what_was_clipped_is_told_alike(device, dtype, gathered):
    """By packed codes, wide ones, and what was quantised."""
    problem = OP.Problem(70, 192, mode="bwd", given="x", dtype=dtype, gathered=gathered)
    inputs = OP.inputs(problem, device, data="outlier")
    more = {name: inputs[name] for name in ("slots", "unit") if gathered}
    expected, _ = int4_quantize_backward(
        inputs["dx_hat"], x=inputs["x"], step=inputs["step"], **more
    )
    for layout in ("packed", "wide", "both"):
        codes = int4_quantize(inputs["x"], inputs["step"], layout=layout)
        found = int4_quantize_backward(inputs["dx_hat"], q=codes, **more)
        assert torch.equal(found, expected), layout


def test_the_low_half_of_a_wide_code_tells_nothing(device, kernel):
    problem = OP.Problem(4, 256, mode="bwd", given="wide", group=1, dtype="fp32")
    inputs = OP.inputs(problem, device)
    every = torch.arange(-128, 128, device=device).to(torch.int8)
    inputs["wide"] = every.expand(4, 256).contiguous()
    check(kernel, problem, inputs)
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    config = kernel.default(problem, Device.of(inputs["wide"]))
    launch(kernel, problem, config, inputs, outputs)
    clipped = (every < -112) | (every >= 112)
    assert torch.equal(outputs["dx"], inputs["dx_hat"].masked_fill(clipped, 0.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_block_that_is_not_finite_has_codes_of_zero_and_no_other_has(device, kernel, value):
    """3e38 is finite: its groups' sums are not."""
    problem = OP.Problem(70, 256, **{**CODES, "gathered": False})
    inputs = OP.inputs(problem, device)
    for row, column in ((0, 0), (33, 255), (69, 130)):
        bad = {**inputs, "dx_hat": inputs["dx_hat"].clone()}
        bad["dx_hat"][row, column // 32 * 32 : column // 32 * 32 + 32] = value
        bad["q"] = torch.zeros_like(inputs["q"])
        check(kernel, problem, bad)
        outputs = OP.poison(problem, OP.outputs(problem, bad))
        launch(kernel, problem, kernel.default(problem, Device.of(bad["q"])), bad, outputs)
        wrong = torch.zeros_like(outputs["dx_scale"], dtype=torch.bool)
        wrong[row // 32, column // 32] = True
        assert torch.equal(outputs["dx_scale"].isnan(), wrong)


@pytest.mark.parametrize("unit", [0.0, 1.0, math.nan, math.inf])
def test_codes_where_rows_were_dropped_and_the_gradient_was_not_finite(device, kernel, unit):
    """NaN of a row that is not there reaches no block in which all of it is clipped.

    Nor does that of what lies beyond the matrix: the last block of columns has half of its own.
    """
    for m, n, group in ((64, 96, 32), (37, 80, 16), (5, 130, 2)):
        problem = OP.Problem(m, n, **{**CODES, "group": group})
        inputs = OP.inputs(problem, device)
        inputs["unit"].fill_(unit)
        check(kernel, problem, inputs)
        inputs["slots"].fill_(-1)
        check(kernel, problem, inputs)
        inputs["q"].fill_(0x77)  # two sevens
        check(kernel, problem, inputs)
        inputs["q"][0, 0] = 0
        check(kernel, problem, inputs)


def test_gradients_from_none_to_the_largest(device, kernel):
    """Blocks below 2^-100 have no scale; where all are alike and negative codes are -127."""
    problem = OP.Problem(64, 128, **{**CODES, "gathered": False, "group": 1, "dtype": "fp32"})
    inputs = OP.inputs(problem, device)
    inputs["q"].fill_(0)
    for factor in (0.0, 2.0**-110, 2.0**-99, 1.0, 2.0**120):
        check(kernel, problem, {**inputs, "dx_hat": inputs["dx_hat"].sign() * factor * 1.7})
        check(kernel, problem, {**inputs, "dx_hat": torch.full_like(inputs["dx_hat"], -factor)})


def test_inputs_stay_as_they_are(device, kernel):
    """One row of one group needs no transposition, and so might be worked on where it is."""
    for fields in ({"layout": "both"}, *GRADIENTS, CODES):
        problem = OP.Problem(1, 64, group=64, dtype="fp32", **fields)
        inputs = OP.inputs(problem, device)
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        check(kernel, problem, inputs)
        assert all(torch.equal(tensor, before[name]) for name, tensor in inputs.items())


@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_row_strided_views_of_every_alignment(device, kernel, before):
    """What lies around a view is NaN, so that an element too many shows."""
    for fields in ({"layout": "both"}, *GRADIENTS, CODES):
        problem = OP.Problem(33, 90, group=2, **fields)
        inputs = OP.inputs(problem, device)
        for name in {"x", "dx_hat"} & set(inputs):
            wide = torch.nn.functional.pad(inputs[name], (before, 8 + before), value=math.nan)
            inputs[name] = wide[:, before : before + 90]
        for name, columns in (("q", 45), ("wide", 90)):
            if name in inputs:
                wide = torch.nn.functional.pad(inputs[name], (before, 8 + before), value=99)
                inputs[name] = wide[:, before : before + columns]
        check(kernel, problem, inputs)


def test_a_gradient_may_have_other_floats_than_what_was_quantised(device, kernel):
    """A weight in fp32 and its gradient in bf16; and the other way round."""
    for given, taken in (("fp32", "bf16"), ("bf16", "fp32")):
        problem = OP.Problem(9, 192, mode="bwd", given="x", dtype=taken)
        inputs = OP.inputs(problem, device)
        inputs["x"] = inputs["x"].to(dtype_of(given))
        check(kernel, problem, inputs)
        wider = dataclasses.replace(problem, dtype="fp32")
        check(kernel, wider, inputs)


@pytest.mark.parametrize("group", [1, 8, 32, 128])
def test_faults_show_in_the_scale_and_the_next_launch_is_clean(device, kernel, group):
    problem = OP.Problem(40, 256, group=group, layout="both")
    inputs = OP.inputs(problem, device)
    for row, column, value in ((0, 0, math.nan), (39, 255, math.inf), (17, 130, -math.inf)):
        bad = {**inputs, "x": inputs["x"].clone()}
        bad["x"][row, column] = value
        check(kernel, problem, bad)
        assert math.isnan(run(kernel, problem, bad)["scale"].item())
        check(kernel, problem, inputs)
    for value in (0.0, -1.0, math.nan, math.inf, 1e-42):
        bad = {**inputs, "step": torch.full((1,), value, device=device)}
        check(kernel, problem, bad)
        assert math.isnan(run(kernel, problem, bad)["scale"].item())


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, math.inf, 1e-42, 2.0**-131])
def test_a_step_that_is_not_usable_clips_nothing_and_has_no_gradient(device, kernel, step):
    """2^-131 is one: in fp32 (1/√32)/step is infinite."""
    problem = OP.Problem(3, 64, mode="bwd", given="x", dtype="fp32")
    inputs = {**OP.inputs(problem, device), "step": torch.full((1,), step, device=device)}
    check(kernel, problem, inputs)
    outputs = run(kernel, problem, inputs)
    assert torch.equal(outputs["dstep"], torch.zeros_like(outputs["dstep"]))
    assert torch.equal(outputs["dx"], transform(inputs["dx_hat"], 32))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_values_that_overflow_are_clipped(device, kernel, dtype):
    """Where a difference overflows its code is an end; where a group's sum does, it shows."""
    problem = OP.Problem(2, 64, dtype=dtype)
    inputs = OP.inputs(problem, device)
    inputs["x"][:, :32] = 3e38
    inputs["x"][0, 1:32:2] *= -1  # their sums are 0, their differences are not
    check(kernel, problem, inputs)
    alone = {**inputs, "x": inputs["x"][:1]}
    check(kernel, dataclasses.replace(problem, m=1), alone)


def test_a_gradient_that_was_not_finite_shows_where_rows_were_dropped(device, kernel):
    problem = OP.Problem(64, 96, mode="bwd", gathered=True)
    inputs = OP.inputs(problem, device)
    inputs["unit"].fill_(math.nan)
    check(kernel, problem, inputs)
    for given in ("codes", "x", "wide"):
        none = dataclasses.replace(problem, given=given)
        inputs = OP.inputs(none, device)
        inputs["slots"].fill_(-1)
        check(kernel, none, inputs)


def test_ties_go_to_even(device, kernel):
    """Halves of a step from −9.5 to 9.5, in a group of one, which changes no value."""
    x = torch.arange(-9.5, 10.0, 0.5, device=device)[None, :-1].contiguous()
    problem = OP.Problem(*x.shape, group=1, dtype="fp32", layout="wide")
    outputs = run(kernel, problem, {"x": x, "step": torch.ones(1, device=device)})
    assert torch.equal(outputs["wide"].float(), 16 * x.round().clamp(-8, 7))


def test_the_check_sees_one_wrong_element():
    problem, cpu = OP.Problem(64, 256, layout="both"), torch.device("cpu")
    inputs = OP.inputs(problem, cpu)
    expected = OP.reference(problem, inputs)
    right = {name: t.clone() for name, t in expected.items()}
    assert OP.check(problem, right, expected).ok
    for name in expected:
        wrong = {**right, name: right[name].clone()}
        wrong[name].view(-1)[-1] += 1
        assert f"{name}: 1 of" in OP.check(problem, wrong, expected).message


def test_the_check_sees_one_element_missing_from_the_steps_gradient():
    problem, cpu = OP.Problem(8, 8192, mode="bwd", given="x", dtype="fp32"), torch.device("cpu")
    inputs = OP.inputs(problem, cpu)
    inputs["dx_hat"] = inputs["dx_hat"].abs() + 1
    expected = OP.reference(problem, inputs)
    wrong = expected["dstep"].float()
    from jetfire.reference.hadamard_quantize import step_terms

    terms = step_terms(inputs["dx_hat"], inputs["x"], inputs["step"], 32)[1]
    assert OP.check(problem, {"dx": expected["dx"], "dstep": wrong}, expected).ok
    wrong[3] -= terms[3].abs().max().float()
    assert "dstep: 1 elements" in (
        OP.check(problem, {"dx": expected["dx"], "dstep": wrong}, expected).message
    )


def test_what_is_refused():
    for fields, message in (
        ({"n": 33}, "n=33: expected an even number"),
        ({"n": 96, "group": 64}, "group=64: expected a power of two that divides n=96, at most 32"),
        ({"n": 96, "group": 48}, "group=48: expected one of 1, 2, 4, .*, 1024"),
        ({"n": 4096, "group": 2048}, "group=2048: expected one of 1, 2"),
        ({"n": 64, "layout": "q"}, "layout=q: expected packed or wide or both"),
        ({"n": 64, "out": "int8"}, "out=int8 mode=fwd given=codes: expected mode=bwd given=codes"),
        ({"n": 64, **GRADIENTS[2], "out": "int8"}, "out=int8 mode=bwd given=x: expected"),
        ({"n": 64, **GRADIENTS[4], "out": "int8"}, "out=int8 mode=bwd given=wide: expected"),
        ({"n": 64, "mode": "bwd", "out_block": 64}, "out_block=64 out=float: expected out=int8"),
        ({"n": 64, "rounding": "stochastic"}, "rounding=stochastic out=float: expected out=int8"),
        (
            {"n": 1024, **CODES, "group": 512, "out_block": 64},
            "group=512 out_block=64: expected a group of at most 256",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            OP.Problem.parse({"m": 4, **fields})


def test_a_function_says_what_codes_of_a_gradient_need():
    problem = OP.Problem(4, 64, mode="bwd")
    inputs = OP.inputs(problem, torch.device("cpu"))
    q, step = Quantized4(inputs["q"], None, torch.ones(1)), torch.ones(1)
    wide = Quantized4(None, inputs["dx_hat"].to(torch.int8), torch.ones(1))
    for options, message in (
        ({"q": q, "out": "int8"}, "seed: expected an int64 tensor of one element"),
        ({"q": q, "out": "bf16"}, "out=bf16: expected float or int8"),
        ({"q": q, "out": "int8", "rounding": "up"}, "rounding=up: expected nearest or stochastic"),
        ({"q": q, "out": "int8", "out_block": 16}, "out_block=16: expected 32 or 64 or 128"),
        ({"q": wide, "out": "int8"}, "q holds wide codes alone: expected packed ones"),
        (
            {"x": inputs["dx_hat"], "step": step, "out": "int8"},
            "out=int8 with x and step: expected q alone",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            int4_quantize_backward(inputs["dx_hat"], **options)


def test_what_was_saved_before_there_were_codes_has_the_same_text():
    fields = {"group", "dtype", "mode", "layout", "given", "gathered"}
    assert set(OP.Problem(4, 64, mode="bwd").as_dict()) == {"m", "n", *fields}
    codes = OP.Problem(4, 64, **CODES)
    assert set(codes.as_dict()) == {"m", "n", *fields, "out", "out_block", "rounding"}
    assert OP.Problem.parse(codes.as_dict()) == codes


@pytest.mark.parametrize("block", [32, 128])
def test_a_peer_quantises_alike(block):
    """To nearest, of which the peer's are the same but for ties and last places."""
    fields = {**CODES, "rounding": "nearest", "out_block": block}
    problem = OP.Problem(60, 128, dtype="fp32", **fields)
    inputs = OP.inputs(problem, torch.device("cpu"))
    expected = OP.reference(problem, inputs)
    q, scale = OP.peers(problem, inputs)["eager"]()()
    assert int((q.int() - expected["dx"].int()).abs().max()) <= 1
    assert torch.allclose(scale, expected["dx_scale"], rtol=1e-4)


@pytest.mark.parametrize("fields", [{"layout": "both"}, {"layout": "wide"}, *GRADIENTS], ids=str)
def test_peers_do_alike(fields):
    """The torch peer in fp32, whose product with H rounds otherwise."""
    problem = OP.Problem(60, 128, dtype="fp32", **fields)
    inputs = OP.inputs(problem, torch.device("cpu"))
    expected = OP.reference(problem, inputs)
    found = OP.peers(problem, inputs)["eager"]()()
    if problem.mode == "bwd":
        unlike = (found[0] - expected["dx"]).abs() > 1e-4
        assert unlike.float().mean() < 0.01  # where a code fell on the other side
        assert len(found) == (2 if problem.given == "x" else 1)
        return
    codes = narrow(found[0]) if problem.layout == "wide" else unpack(found[0])
    exact = narrow(expected["wide"])
    assert int((codes.int() - exact.int()).abs().max()) <= 1
    assert (codes == exact).float().mean() > 0.999


def test_shapes_are_those_of_inputs_and_weights():
    shapes = OP.shapes(workloads.MODELS["gpt2-124m"])
    assert {"m": 8192, "n": 768} in shapes
    assert {"m": 768, "n": 3072} in shapes
    assert {"m": 3072, "n": 768} in shapes


# The CUDA kernel.


def cubin_of(problem, config, capability=(9, 0), matrices=None):
    matrices = matrices or ROWS.matrices(problem, config)
    return ROWS.program(problem, config, matrices).cubin(capability)


def compiled(problem, config, capability):
    """Its audit, labels and all, or skip where it cannot be compiled or read."""
    try:
        return audit(cubin_of(problem, config, capability))
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("fields", "capability", "most"),
    [
        ({}, (8, 0), 14),
        ({}, (8, 9), 14),
        ({}, (9, 0), 14),
        ({"group": 1024}, (9, 0), 25),
        ({"layout": "both"}, (9, 0), 15),
        (GRADIENTS[0], (9, 0), 16),
        (GRADIENTS[1], (9, 0), 19),
        (GRADIENTS[2], (9, 0), 34),
        (GRADIENTS[3], (8, 0), 37),
        (GRADIENTS[3], (9, 0), 37),
        (GRADIENTS[4], (9, 0), 17),
        (GRADIENTS[5], (9, 0), 23),
        (CODES, (8, 0), 37),
        (CODES, (9, 0), 36),
        ({**CODES, "gathered": False}, (9, 0), 33),
        ({**CODES, "rounding": "nearest"}, (9, 0), 28),
    ],
    ids=str,
)
def test_machine_code(fields, capability, most):
    """Accesses of sixteen bytes, no spills, and few instructions an element in the loop.

    On an H200 2.5 bytes an element, those of BF16 and of a nibble, leave time for 17.
    """
    problem = OP.Problem(8192, 8192, **fields)
    config = ROWS.default(problem, target_device(capability))
    found = compiled(problem, config, capability)
    assert found.spills == found.stack_bytes == 0
    assert found.registers <= rows.registers(config)
    elements = config.elements * config.chunks
    matrices = 1 + (problem.given == "x") + problem.gathered if problem.mode == "bwd" else 1
    # The first tile's, and in the loop the next one's.
    assert len(re.findall(r"LDG\.E\.128", found.sass)) == 2 * matrices * elements // 8
    assert 5 * elements < loop_of(found.sass) <= most * elements


# That a config may have to hold; and what an fp32 weight's gradient is made of.
MOST = ({"layout": "both"}, GRADIENTS[3], {**GRADIENTS[4], "dtype": "fp32"})


def of_config(config):
    """The legal ones of its cases."""
    device = target_device((9, 0))
    problems = [
        OP.Problem(64, 2048, group=min(config.tile, 1024), **{"dtype": "bf16", **fields})
        for fields in MOST
    ]
    for block in (32, 64, 128):
        group = min(config.tile, MOST_IN_CODES // block)
        problems.append(OP.Problem(64, 2048, group=group, **CODES, out_block=block))
    return [(p, config) for p in problems if ROWS.legal(p, config, device) is None]


def of_any_rows(fields):
    problem = OP.Problem(64, 2048, **fields)
    config = ROWS.default(problem, target_device((9, 0)))
    matrices = tuple((k, anywhere(x)) for k, x in ROWS.matrices(problem, config))
    return problem, config, (9, 0), matrices


@pytest.fixture(scope="module")
def audits():
    cases = [case for config in (*CONFIGS, *OF_CODES) for case in of_config(config)]
    return together(cubin_of, [*cases, *map(of_any_rows, (*MOST, CODES))])


@pytest.mark.parametrize("config", [*CONFIGS, *OF_CODES], ids=str)
def test_no_config_spills(audits, config):
    assert of_config(config) or config in CONFIGS
    for case in of_config(config):
        assert audits[case].spills == 0, case


@pytest.mark.parametrize("fields", [*MOST, CODES], ids=str)
def test_rows_that_lie_anywhere_do_not_spill(audits, fields):
    assert audits[of_any_rows(fields)].spills == 0


def anywhere(matrix):
    """Of rows that begin at any of its elements."""
    return Matrix(matrix.kind, max(1, matrix.bits // 8))


def refused(problem):
    """Why no CUDA kernel runs here at all."""
    return ROWS.legal(problem, ROWS.default(problem, target_device((9, 0))), target_device((9, 0)))


def test_legality_has_reasons():
    device = target_device((8, 0))
    problem = OP.Problem(64, 2048)
    if (reason := ROWS.legal(problem, RowsConfig(), device)) is not None:
        pytest.skip(reason)
    turing = dataclasses.replace(device, capability=(7, 5))
    grouped = OP.Problem(64, 2048, group=1024)
    gradient = OP.Problem(64, 2048, dtype="fp32", **GRADIENTS[3])
    codes = OP.Problem(64, 2048, **CODES, out_block=64)
    of_weight = OP.Problem(64, 2048, dtype="fp32", **GRADIENTS[4])
    crowded = {"elements": 32, "chunks": 1, "warps": 8, "blocks": 3, "prefetch": False}
    for asked, where, fields, word in (
        (problem, turing, {}, "sm_80"),
        (problem, Device(kind="cpu"), {}, "sm_80"),
        (problem, device, {"elements": 4}, "elements=4: expected one of"),
        (problem, device, {"lanes": 64}, "lanes=64"),
        (problem, device, {"elements": 32, "chunks": 2}, "64 elements per thread"),
        (grouped, device, {"lanes": 16}, "tiles of 512 columns: expected at least group=1024"),
        (gradient, device, {"warps": 8, "blocks": 4}, "registers"),
        (of_weight, device, crowded, "needs 84 registers"),
        (OP.Problem(1, 2**25), device, {}, "at most 16777216"),
        (codes, device, {}, "4 rows: expected a multiple of out_block=64"),
        (codes, device, {"lanes": 4, "warps": 8}, "32 columns to a run: expected a multiple of"),
    ):
        config = dataclasses.replace(RowsConfig(), **fields)
        assert word in ROWS.legal(asked, config, where), (fields, word)


def test_every_problem_has_a_legal_default_that_wastes_little():
    device = target_device((9, 0))
    if (reason := refused(OP.Problem(64, 64))) is not None:
        pytest.skip(reason)
    sizes = {shape["n"] for model in workloads.MODELS.values() for shape in OP.shapes(model)}
    for n, group, dtype in itertools.product(sorted(sizes), GROUPS, ("bf16", "fp32")):
        for fields in ({}, *GRADIENTS):
            if n % group == 0:
                problem = OP.Problem(64, n, group=group, dtype=dtype, **fields)
                config = ROWS.default(problem, device)
                assert ROWS.legal(problem, config, device) is None, problem
                if group <= 32:
                    assert rows.idle(problem, config) <= n / 8, (problem, config)


def test_every_problem_in_codes_has_a_legal_default():
    device = target_device((9, 0))
    if (reason := refused(OP.Problem(64, 64))) is not None:
        pytest.skip(reason)
    for n, block, dtype in itertools.product((64, 768, 4096), (32, 64, 128), ("bf16", "fp32")):
        for group, gathered in itertools.product(GROUPS, (False, True)):
            if n % group == 0 and group * block <= MOST_IN_CODES:
                fields = {**CODES, "gathered": gathered, "out_block": block}
                problem = OP.Problem(64, n, group=group, dtype=dtype, **fields)
                config = ROWS.default(problem, device)
                assert ROWS.legal(problem, config, device) is None, problem
                assert config.rows == block


def test_accesses_are_as_wide_as_rows_allow():
    config = RowsConfig(16, 2)

    def found(n, offset=0, pitch=None, **fields):
        problem = OP.Problem(4, n, group=2, layout="both", **fields)
        inputs = {"x": torch.empty(4 * 2048, dtype=torch.bfloat16)}
        inputs["x"] = inputs["x"].as_strided((4, n), (pitch or n, 1), offset)
        outputs = OP.outputs(problem, inputs)
        matrices = dict(rows.matrices_of(problem, config, inputs, outputs))
        return tuple(matrices[name].access for name in ("x", "q", "wide"))

    assert found(1024) == (16, 8, 16)
    assert found(1024, pitch=1028) == (8, 8, 16)
    assert found(1024, offset=1) == (2, 8, 16)
    assert found(1020) == (8, 2, 4)
    assert found(1022) == (4, 1, 2)
    assert found(30, pitch=32) == (4, 1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{"layout": "both"}, *GRADIENTS], ids=str)
def test_every_config_group_and_ragged_size_is_bit_equal(device, kernel, fields):
    cases, where = [], Device.parse(str(device))
    for i, (config, group) in enumerate(itertools.product(CONFIGS, GROUPS)):
        sizes = [k * group for k in (1, 2, 3, 13, 101) if k * group % 2 == 0]
        problem = OP.Problem(
            (1, 37, 129, 1000)[i % 4],
            sizes[i % len(sizes)],
            group=group,
            dtype=("bf16", "fp16", "fp32")[i % 3],
            **fields,
        )
        if ROWS.legal(problem, config, where) is None:
            cases.append((problem, config))
    assert len(cases) > 20
    ROWS.cubins(*cases[0], where.capability)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: ROWS.cubins(*case, where.capability), cases))
    for problem, config in cases:
        check(kernel, problem, OP.inputs(problem, device, data="heavy"), config)


@pytest.mark.gpu
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_codes_of_every_config_group_and_ragged_size_are_bit_equal(device, kernel, block, gathered):
    cases, where = [], Device.parse(str(device))
    groups = [group for group in GROUPS if group * block <= MOST_IN_CODES]
    fields = {"mode": "bwd", "gathered": gathered, "out": "int8", "out_block": block}
    for i, (config, group) in enumerate(itertools.product(OF_CODES, groups)):
        sizes = [k * group for k in (1, 2, 3, 13, 101) if k * group % 2 == 0]
        problem = OP.Problem(
            (1, 37, 129, 1000)[i % 4],
            sizes[i % len(sizes)],
            group=group,
            dtype=("bf16", "fp16", "fp32")[i % 3],
            rounding=("nearest", "stochastic")[i % 2],
            **fields,
        )
        if ROWS.legal(problem, config, where) is None:
            cases.append((problem, config))
    assert len(cases) >= (20, 8, 3)[(32, 64, 128).index(block)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: ROWS.cubins(*case, where.capability), cases))
    for problem, config in cases:
        for data in ("heavy", "nonfinite"):
            check(kernel, problem, OP.inputs(problem, device, data=data), config)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{"layout": "both"}, *GRADIENTS, CODES], ids=str)
def test_large_ones_are_bit_equal(device, kernel, fields):
    """Of more blocks than an H200 runs at once, and more than 2^31 bytes of gradient."""
    for m, n, group in ((8192, 8192, 32), (70000, 4096, 128), (16384, 768, 256)):
        dtype = "bf16" if m != 70000 else "fp32"
        problem = OP.Problem(m, n, group=group, dtype=dtype, **fields)
        if problem.mode == "fwd" or m < 70000:
            check(kernel, problem, OP.inputs(problem, device))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device, kernel):
    m, n = 65537, 32800
    problem = OP.Problem(m, n)
    x = torch.randn(64, n, device=device).bfloat16().repeat(m // 64 + 1, 1)[:m]
    inputs = {"x": x, "step": torch.full((1,), 0.6, device=device)}
    outputs = run(kernel, problem, inputs)
    assert outputs["scale"].item() == pytest.approx(0.6)
    for top in (0, 32768, 65473):
        part = OP.Problem(64, n)
        expected = OP.reference(part, {**inputs, "x": x[top : top + 64]})
        assert torch.equal(outputs["q"][top : top + 64], expected["q"])
        assert torch.equal(outputs["squares"][top : top + 64], expected["squares"])


@pytest.mark.gpu
def test_it_can_be_captured(device, kernel):
    for fields in ({"layout": "both"}, GRADIENTS[3], CODES):
        problem = OP.Problem(512, 768, **fields)
        inputs = OP.inputs(problem, device)
        config = kernel.default(problem, Device.parse(str(device)))
        outputs = OP.outputs(problem, inputs)
        kernel.launch(problem, config, inputs, outputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.launch(problem, config, inputs, outputs)
        expected = {name: t.clone() for name, t in outputs.items()}
        for _ in range(3):
            OP.poison(problem, outputs)
            graph.replay()
            assert all(torch.equal(t, expected[name]) for name, t in outputs.items())
