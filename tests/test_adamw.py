"""adamw: the update against float64 and torch's own, the codes against quantize to the bit."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.core.tensors import Quantized
from jetfire.ops import int8_adamw, int8_quantize
from jetfire.reference.adamw import rounded

OP = registry.get("adamw")
KERNEL = registry.get_kernel("adamw", "triton")


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["param"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (33, 50), (70, 160), (129, 128)])
def test_any_shape(device, block, m, n):
    problem = OP.Problem(m, n, block=block)
    check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize(("tile_n", "slices"), [(128, 1), (128, 2), (256, 4)])
def test_slices_of_a_block(device, tile_n, slices):
    problem = OP.Problem(140, 300, block=128)
    config = KERNEL.Config(128, tile_n, 16, slices=slices)
    inputs = OP.inputs(problem, device, data="outlier")
    inputs["grad"][100, 7], inputs["grad"][130, 200] = math.nan, math.inf
    inputs["exp_avg"][130, 200] = inputs["exp_avg_sq"][130, 200] = math.nan
    check(problem, inputs, config)


def test_slices_are_of_one_block():
    device, problem = Device(kind="cuda", capability=(9, 0)), OP.Problem(256, 256, block=64)
    for config in (KERNEL.Config(128, 128, 8, slices=2), KERNEL.Config(64, 64, 8, slices=8)):
        assert "expected 1, or a power of two" in KERNEL.legal(problem, config, device)
    config = KERNEL.Config(32, 32, 16, slices=2)
    assert KERNEL.legal(OP.Problem(32, 32), config, device) is None
    config = KERNEL.Config(32, 32, 32, slices=2)
    assert "an element per thread" in KERNEL.legal(OP.Problem(32, 32), config, device)


@pytest.mark.parametrize("data", ["outlier", "gradient"])
@pytest.mark.parametrize("layout", ["none", "q", "qt"])
def test_layouts_and_guards(device, layout, data):
    problem = OP.Problem(45, 96, layout=layout, guarded=True)
    check(problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize(
    ("tile_m", "tile_n", "warps"), [(16, 128, 8), (1, 512, 4), (8, 32, 1), (32, 64, 16)]
)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 700), (33, 50), (129, 128)])
def test_a_step_alone_in_tiles_that_are_no_blocks(device, m, n, tile_m, tile_n, warps):
    problem = OP.Problem(m, n, block=128, layout="none", guarded=n == 50)
    config = KERNEL.Config(tile_m, tile_n, warps)
    check(problem, OP.inputs(problem, device, data="heavy"), config)


def test_a_step_alone_is_not_cut_and_asks_no_block():
    device = Device(kind="cuda", capability=(9, 0))
    for block in (32, 128):
        problem = OP.Problem(256, 256, block=block, layout="none")
        config = KERNEL.Config(block, 128, 8, slices=2)
        reason = KERNEL.legal(problem, config, device)
        assert reason == "slices=2: expected 1 with layout=none"
        assert KERNEL.default(problem, device) == KERNEL.Config(16, 128, 8, 80)
        space = KERNEL.space(problem, device)
        assert {1, 16} < set(space["tile_m"])
        assert space["slices"] == (1,)
    assert KERNEL.space(OP.Problem(256, 256), device) == KERNEL.choices
    reason = KERNEL.legal(OP.Problem(256, 256), KERNEL.Config(16, 128, 8), device)
    assert reason == "tile_m=16: expected a power of two that is a multiple of 32"


def test_a_step_alone_moves_28_bytes_of_an_element():
    problem = OP.Problem(4096, 4096, layout="none", guarded=True)
    assert OP.bytes(problem) == 28 * 4096**2 + 4 * 4
    assert list(OP.writes(problem)) == ["param", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("layout", ["none", "qt"])
def test_the_peer_makes_the_same_step(device, layout):
    problem = OP.Problem(40, 140, layout=layout)
    inputs = OP.inputs(problem, device)
    step, param = OP.fused(problem, inputs)
    step()
    expected = OP.reference(problem, inputs)["param"]
    assert torch.allclose(param.double(), expected, rtol=1e-5, atol=1e-7)
    assert (OP.eager(problem, inputs)() is None) == (layout == "none")


@pytest.mark.parametrize("step", [1, 2, 10, 499, 501, 1000, 10**5, 10**6])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.0, 0.5), (0.95, 0.99999)])
def test_bias_corrections_at_any_step(device, step, beta1, beta2):
    problem = OP.Problem(2, 8, beta1=beta1, beta2=beta2, decay=0.0)
    inputs = OP.inputs(problem, device) | {"step": torch.tensor(float(step), device=device)}
    check(problem, inputs)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("step", [1, 10, 400, 700, 10**6])
def test_a_bias_correction_is_accurate(device, beta, step):
    """Read from the update: without gradient noise p moves by rate·m/(1 − beta^t)."""
    problem = OP.Problem(1, 1, beta1=beta, beta2=0.0, eps=1.0, decay=0.0)
    zero = torch.zeros((1, 1), device=device)
    inputs = {
        "param": zero,
        "grad": zero,
        "exp_avg": zero + 1,
        "exp_avg_sq": zero,
        "rate": torch.tensor(1.0, device=device),
        "step": torch.tensor(float(step), device=device),
    }
    outputs = OP.outputs(problem, inputs)
    KERNEL.launch(problem, KERNEL.default(problem, Device.of(zero)), inputs, outputs)
    expected = -rounded(beta) / -math.expm1(step * math.log(rounded(beta))) if beta else 0.0
    assert float(outputs["param"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # 0/0, in the padding
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_a_second_moment_beyond_fp32_is_infinite_and_moves_nothing(device, name):
    """As it is kept: the gradient's square overflows, with which float64 would divide."""
    kernel = registry.get_kernel("adamw", name)
    problem = OP.Problem(2, 40, guarded=True)
    inputs = OP.inputs(problem, device if name == "triton" else torch.device("cpu"))
    inputs["grad"][0, 3], inputs["exp_avg_sq"][0, 3] = 3e36, 0.0
    inputs["grad"][1, 3] = 1e38  # once it is scaled, it is beyond fp32 itself
    inputs["grad_scale"].fill_(2.0**-3)
    config = kernel.default(problem, Device.of(inputs["param"]))
    check(problem, inputs, config, kernel)
    moved = OP.reference(problem, inputs)
    assert moved["exp_avg_sq"][0, 3] == math.inf
    assert torch.isinf(moved["exp_avg"][1, 3])
    decayed = inputs["param"][0, 3].double() * (1 - rounded(problem.decay) * float(inputs["rate"]))
    assert moved["param"][0, 3] == decayed


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_an_update_may_overflow_where_the_new_param_would_not(device, name):
    """It is beyond fp32 by itself, and has the param's sign: they would meet within its range."""
    kernel = registry.get_kernel("adamw", name)
    problem = OP.Problem(2, 40, beta1=0.99, eps=0.1)
    inputs = OP.inputs(problem, device if name == "triton" else torch.device("cpu"))
    inputs["rate"].fill_(0.1)
    inputs["step"].fill_(1.0)
    inputs["grad"][0, 3] = inputs["exp_avg_sq"][0, 3] = 0.0
    inputs["param"][0, 3], inputs["exp_avg"][0, 3] = -3e38, -4e36
    expected = OP.reference(problem, inputs)
    assert float(expected["param"][0, 3]) == pytest.approx(0.96e38, rel=1e-2)
    assert expected["param_over"].nonzero().tolist() == [[0, 3]]
    check(problem, inputs, kernel.default(problem, Device.of(inputs["param"])), kernel)


def test_without_eps_the_padding_stays_out_of_the_scales(device):
    problem = OP.Problem(5, 7, eps=0.0)
    check(problem, OP.inputs(problem, device))


@pytest.mark.parametrize("layout", ["none", "both"])
def test_row_strided_gradient(device, layout):
    problem = OP.Problem(33, 64, layout=layout)
    inputs = OP.inputs(problem, device)
    wide = torch.full((33, 72), math.nan, device=device)
    wide[:, 8:] = inputs["grad"]
    check(problem, inputs | {"grad": wide[:, 8:]})


@pytest.mark.parametrize("layout", ["none", "both"])
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_found_inf_leaves_all_as_it_was(device, name, layout):
    kernel = registry.get_kernel("adamw", name)
    problem = OP.Problem(40, 64, layout=layout, guarded=True)
    inputs = OP.inputs(problem, device if name == "triton" else torch.device("cpu"))
    inputs["found_inf"].fill_(1)
    inputs["grad_scale"].fill_(math.nan)
    inputs["grad"][3, 5] = math.inf
    check(problem, inputs, kernel=kernel)  # whose bounds are 0


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
def test_a_step_alone_is_the_step_to_the_bit(device, layout):
    tensors = arguments(70, 300, device)
    alone = [tensor.clone() for tensor in tensors]
    assert int8_adamw(*alone, layout="none") is None
    int8_adamw(*tensors, layout=layout)
    assert all(map(torch.equal, alone, tensors))


def test_nan_stays_in_its_block(device):
    problem = OP.Problem(64, 64)
    inputs = OP.inputs(problem, device)
    inputs["grad"][5, 7] = math.nan
    check(problem, inputs)


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_follows_torch_for_several_steps(device, name):
    """To 5e-6 of the rate and 2^-23 of a weight a step: powf of CUDA's own is off by 4 units."""
    kernel = registry.get_kernel("adamw", name)
    if name == "torch" and device.type != "cpu":
        pytest.skip("runs on the CPU only")
    generator = torch.Generator(device).manual_seed(3)

    def normal():
        return torch.randn((40, 64), device=device, generator=generator)

    start = normal()
    theirs = start.clone().requires_grad_()
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    rate = torch.tensor(1e-2, device=device)
    optimizer = torch.optim.AdamW([theirs], lr=rate, fused=True, **options)
    problem = OP.Problem(40, 64, guarded=True, beta2=0.95, decay=0.1)
    zeros = torch.zeros_like(start)
    state = {"param": start, "exp_avg": zeros, "exp_avg_sq": zeros}
    for step, (scale, failed) in enumerate([(1, 0), (1, 0), (7.5, 0), (1, 0), (2, 0), (1, 1)]):
        guards = {
            "grad_scale": torch.tensor(float(scale), device=device),
            "found_inf": torch.tensor(float(failed), device=device),
        }
        optimizer.grad_scale, optimizer.found_inf = guards.values()
        gradient = normal()
        theirs.grad = gradient.clone()
        optimizer.step()
        inputs = {
            **state,
            **guards,
            "grad": gradient,
            "rate": rate,
            "step": torch.tensor(step + 1.0, device=device),
        }
        outputs = OP.outputs(problem, inputs)
        kernel.launch(problem, kernel.default(problem, Device.of(start)), inputs, outputs)
        state = {key: outputs[key] for key in state}
        bound = (step + 1) * (2.0**-23 * start.abs() + 5e-6 * 1e-2)
        assert ((state["param"] - theirs).abs() <= bound).all(), f"step {step + 1}"
    assert not torch.equal(state["param"], start)


def arguments(m, n, device):
    problem = OP.Problem(m, n)
    inputs = OP.inputs(problem, device)
    return [inputs[k] for k in ("param", "grad", "exp_avg", "exp_avg_sq", "rate", "step")]


def test_function_writes_in_place_and_gives_the_codes(device):
    tensors = arguments(40, 70, device)
    before, version = tensors[0].clone(), tensors[0]._version
    codes = int8_adamw(*tensors, block=64)
    assert not torch.equal(tensors[0], before)
    assert tensors[0]._version > version
    expected = int8_quantize(tensors[0], block=64, layout="both")
    assert codes.block == expected.block == 64
    for ours, theirs in zip(codes.tensors, expected.tensors, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
def test_function_writes_into_codes_that_it_is_given(device, layout):
    tensors = arguments(40, 70, device)
    codes = int8_adamw(*tensors, layout=layout)
    again = int8_adamw(*tensors, layout=layout, out=codes)
    assert all(a is b for a, b in zip(codes, again, strict=True))
    expected = int8_quantize(tensors[0], layout=layout)
    for ours, theirs in zip(codes.tensors, expected.tensors, strict=True):
        assert torch.equal(ours, theirs)


def test_bad_inputs(device):
    tensors = arguments(4, 8, device)
    param, grad, *moments, rate, step = tensors
    guard = torch.ones((), device=device)
    both = int8_quantize(param, layout="both")
    refused = [
        (
            r"grad has shape \(4, 7\): expected \(4, 8\)",
            [param, grad[:, :7], *moments, rate, step],
            {},
        ),
        (
            r"exp_avg has strides \(16, 1\): expected a contiguous tensor",
            [param, grad, torch.zeros((4, 16), device=device)[:, :8], moments[1], rate, step],
            {},
        ),
        ("param is bfloat16: expected float32", [param.bfloat16(), *tensors[1:]], {}),
        ("rate: expected a float32 tensor of one element", [*tensors[:4], rate.double(), step], {}),
        ("step: expected a float32 tensor of one element", [*tensors[:5], step.expand(2)], {}),
        ("grad_scale and found_inf: expected both or neither", tensors, {"found_inf": guard}),
        (
            "out: expected q int8 .4, 8., scale float32 .1, 1., contiguous",
            tensors,
            {"layout": "q", "out": Quantized(param, grad)},
        ),
        (
            "out: expected q int8 .4, 8., scale float32 .1, 1., contiguous",
            tensors,
            {"layout": "q", "out": both},
        ),
        (
            "scale_t float32 .1, 1., contiguous, in blocks of 64, on ",
            tensors,
            {"block": 64, "out": both},
        ),
        (
            "out with layout=none: expected None, as no codes are written",
            tensors,
            {"layout": "none", "out": both},
        ),
        ("layout=packed: expected none or q or qt or both", tensors, {"layout": "packed"}),
        ("beta1=1.0: expected at least 0 and less than 1", tensors, {"beta1": 1.0}),
        ("decay=-1.0: expected a finite number of at least 0", tensors, {"decay": -1}),
    ]
    for message, given, options in refused:
        with pytest.raises(UsageError, match=message):
            int8_adamw(*given, **options)
