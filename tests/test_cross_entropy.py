"""cross_entropy: the reference against torch's own, kernels against the reference."""

import math

import pytest
import torch
from torch.nn import functional

from jetfire import ops as ours
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.workloads import RAGGED
from jetfire.reference import cross_entropy as reference

OP = registry.get("cross_entropy")
KERNEL = registry.get_kernel("cross_entropy", "triton")
CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize(
    "kernel", [KERNEL, registry.get_kernel("cross_entropy", "torch")], ids=["triton", "torch"]
)


def default(kernel, problem, inputs):
    return kernel.default(problem, Device.of(inputs["logits"]))


def check(kernel, problem, inputs, config=None):
    if kernel.name == "torch":
        inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
    config = config or default(kernel, problem, inputs)
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def run(kernel, problem, inputs):
    if kernel.name == "torch":
        inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(kernel, problem, default(kernel, problem, inputs), inputs, outputs)
    return outputs


@pytest.mark.parametrize("valid", [None, 90, 1])
@pytest.mark.parametrize("data", ["normal", "outlier", "gradient"])
def test_reference_is_torch_in_float64(valid, data):
    problem = OP.Problem(40, 100, dtype="fp32", mode="bwd", valid=valid)
    inputs = OP.inputs(problem, CPU, data=data)
    inputs["targets"][:3] = -100
    leaf = inputs["logits"].double().requires_grad_()
    within, targets = leaf[:, : problem.columns], inputs["targets"]
    expected = functional.cross_entropy(within, targets, reduction="none")
    loss, lse = reference.forward(leaf.detach(), targets, problem.columns)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(expected, leaf, inputs["dloss"].double())
    found = reference.backward(leaf.detach(), targets, lse, inputs["dloss"], problem.columns)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("m", "n", "valid"), [(1, 1, None), (5, 65, None), (4, 1100, 1030), (3, 640, 512)]
)
def test_kernels_are_within_their_rounding(device, kernel, mode, dtype, m, n, valid):
    problem = OP.Problem(m, n, dtype=dtype, mode=mode, valid=valid)
    for data in ("outlier", "gradient"):
        check(kernel, problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_every_config(device, mode):
    problem = OP.Problem(2, 2500, mode=mode, valid=2301)
    inputs = OP.inputs(problem, device, data="heavy")
    for tiles in [(512, 1), (512, 2), (1024, 4), (2048, 8), (4096, 2), (4096, 16)]:
        check(KERNEL, problem, inputs, KERNEL.Config(*tiles))


@BOTH
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("offset", [0, 1])
def test_row_strided_views(device, kernel, mode, offset):
    problem = OP.Problem(3, 600, mode=mode)
    inputs = OP.inputs(OP.Problem(3, 700, mode=mode), device)
    inputs["logits"] = inputs["logits"][:, offset : offset + 600]
    inputs["targets"] %= 600
    check(kernel, problem, inputs)


@BOTH
def test_ignored_and_impossible_targets(device, kernel):
    problem = OP.Problem(6, 70, dtype="fp32", valid=60)
    inputs = OP.inputs(problem, device)
    inputs["targets"][:] = torch.tensor([-100, 59, 60, -1, 70, 2**40])
    check(kernel, problem, inputs)
    outputs = run(kernel, problem, inputs)
    assert outputs["loss"][0] == 0
    assert outputs["loss"].isnan().tolist() == [False, False, True, True, True, True]
    assert outputs["lse"].isfinite().all()
    inputs |= {"lse": outputs["lse"].to(device), "dloss": torch.full((6,), 3.0, device=device)}
    inputs["dloss"][0] = math.nan
    backward = OP.Problem(6, 70, dtype="fp32", mode="bwd", valid=60)
    check(kernel, backward, inputs)
    gradient = run(kernel, backward, inputs)["dlogits"]
    assert (gradient[:, 60:] == 0).all()
    assert (gradient[0] == 0).all()
    assert gradient[1].isfinite().all()
    assert gradient[2:, :60].isnan().all()


@BOTH
def test_infinities_and_nan(device, kernel):
    """−∞ counts for nothing, in whole tiles too; ∞, NaN and rows of −∞ alone show as NaN."""
    problem = OP.Problem(5, 1100, dtype="fp32")
    inputs = OP.inputs(problem, device)
    inputs["targets"][:] = 1099
    inputs["logits"][0, :1050] = -math.inf
    inputs["logits"][1, 7] = math.inf
    inputs["logits"][2, 1098] = math.nan
    inputs["logits"][3] = -math.inf
    check(kernel, problem, inputs)
    outputs = {name: tensor.cpu() for name, tensor in run(kernel, problem, inputs).items()}
    expected = functional.cross_entropy(
        inputs["logits"].double().cpu(), inputs["targets"].cpu(), reduction="none"
    )
    torch.testing.assert_close(
        outputs["loss"].double(), expected, rtol=0, atol=1e-5, equal_nan=True
    )
    assert expected.isnan().tolist() == [False, True, True, True, False]
    backward = OP.Problem(5, 1100, dtype="fp32", mode="bwd")
    check(
        kernel,
        backward,
        {**inputs, "lse": outputs["lse"].to(device), "dloss": torch.ones(5, device=device)},
    )


@BOTH
def test_large_logits_do_not_overflow(device, kernel):
    for mode in ("fwd", "bwd"):
        problem = OP.Problem(4, 300, dtype="fp32", mode=mode)
        inputs = OP.inputs(problem, device)
        inputs["logits"] = inputs["logits"] * 1e4
        if mode == "bwd":
            inputs["lse"] = torch.logsumexp(inputs["logits"].double(), 1).float()
        check(kernel, problem, inputs)


@BOTH
def test_rows_in_rising_order(device, kernel):
    """The maximum rises in every tile: the most that the running sum is rescaled."""
    problem = OP.Problem(1, 5000, dtype="fp32")
    inputs = OP.inputs(problem, device)
    inputs["logits"] = torch.linspace(-20, 20, 5000, device=device)[None]
    check(kernel, problem, inputs)


@BOTH
def test_backward_in_place(device, kernel):
    problem = OP.Problem(3, 700, mode="bwd", valid=650)
    inputs = OP.inputs(problem, device)
    if kernel.name == "torch":
        inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
    expected = run(kernel, problem, inputs)["dlogits"]
    wide = torch.full((3, 720), 7.0, dtype=torch.bfloat16, device=inputs["logits"].device)
    wide[:, :700] = inputs["logits"]
    inputs["logits"] = wide[:, :700]
    config = default(kernel, problem, inputs)
    launch(kernel, problem, config, inputs, {"dlogits": inputs["logits"]})
    assert torch.equal(wide[:, :700], expected)
    assert (wide[:, 700:] == 7.0).all()


def test_gradients_of_a_row_sum_to_zero(device):
    problem = OP.Problem(4, 1000, dtype="fp32", mode="bwd")
    inputs = OP.inputs(problem, device)
    sums = run(KERNEL, problem, inputs)["dlogits"].double().sum(1)
    assert (sums.abs() <= 1e-5 * inputs["dloss"].abs()).all()


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_bytes_are_of_what_is_read_and_written(mode):
    """Of the padding too."""
    problem = OP.Problem(5, 70, mode=mode, valid=60)
    inputs = OP.inputs(problem, CPU)
    moved = [*inputs.values(), *OP.outputs(problem, inputs).values()]
    assert OP.bytes(problem) == sum(tensor.nbytes for tensor in moved)
    for name, tensor in OP.on_meta(problem)[0].items():
        assert (tensor.dtype, tensor.shape) == (inputs[name].dtype, inputs[name].shape), name


def test_the_check_sees_one_column_left_out():
    problem = OP.Problem(4, 5000, dtype="fp32")
    inputs = OP.inputs(problem, CPU)
    expected = OP.reference(problem, inputs)
    inputs["logits"][2, inputs["targets"][2] - 1] = -math.inf
    loss, lse = reference.forward(inputs["logits"], inputs["targets"], 5000)
    assert not OP.check(problem, {"loss": loss.float(), "lse": lse.float()}, expected).ok


def test_what_is_refused():
    with pytest.raises(UsageError, match="valid=0: expected an integer of at least 1"):
        OP.Problem(4, 8, valid=0)
    assert OP.Problem.parse({"m": 4, "n": 8, "valid": "none"}) == OP.Problem(4, 8)
    assert OP.Problem.parse({"m": 4, "n": 8, "valid": "7"}) == OP.Problem(4, 8, valid=7)
    assert [OP.Problem(4, 8, valid=valid).columns for valid in (None, 7, 8, 9)] == [8, 7, 8, 8]
    problem, h200 = OP.Problem(64, 64), target_device((9, 0))
    for config, reason in (
        ((256, 1), "tile_n=256"),
        ((1000, 4), "tile_n=1000"),
        ((512, 3), "warps=3"),
        ((512, 4), "4 columns per thread"),
        ((4096, 1), "128 columns per thread"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)


@pytest.mark.parametrize("valid", [None, 80])
def test_the_peers_are_the_same_function(valid):
    for mode in ("fwd", "bwd"):
        problem = OP.Problem(45, 100, dtype="fp32", mode=mode, valid=valid)
        inputs = OP.inputs(problem, CPU)
        expected = OP.reference(problem, inputs)["loss" if mode == "fwd" else "dlogits"]
        found = OP.peers(problem, inputs)["eager"]()()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def rows(device):
    """Logits (a view), targets, lse and dloss of a padded vocabulary of 60."""
    inputs = OP.inputs(OP.Problem(7, 90, dtype="fp32", mode="bwd", valid=60), device)
    inputs["targets"][3] = -100
    inputs["logits"] = inputs["logits"][:, :70]
    return tuple(inputs.values())


def test_the_functions_are_torchs_own(rows):
    logits, targets, _, dloss = rows
    leaf = logits.double().requires_grad_()
    expected = functional.cross_entropy(leaf[:, :60], targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected, leaf, dloss.double())
    loss, lse = ours.cross_entropy(logits, targets, valid=60)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    found = ours.cross_entropy_backward(logits, targets, lse, dloss, valid=60)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-5, atol=1e-6)
    kept = logits.clone()
    assert ours.cross_entropy_backward(kept, targets, lse, dloss, valid=60, inplace=True) is kept
    assert torch.equal(kept, found)


def test_the_operators(rows):
    logits, targets, lse, dloss = rows
    found = torch.ops.jetfire
    torch.library.opcheck(found.cross_entropy.default, (logits, targets, 60))
    backward = (logits, targets, lse, dloss, 60)
    torch.library.opcheck(found.cross_entropy_backward.default, backward)
    contiguous = (logits.clone(), *backward[1:])
    torch.library.opcheck(found.cross_entropy_backward_inplace.default, contiguous)

    def step(logits):
        loss, lse = ours.cross_entropy(logits * 1, targets, valid=60)
        into = logits * 1
        ours.cross_entropy_backward(into, targets, lse, dloss, valid=60, inplace=True)
        return loss, into

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for one, other in zip(compiled(logits), step(logits), strict=True):
        assert torch.equal(one, other)


def test_the_functions_refuse_in_one_line(rows):
    logits, targets, lse, dloss = rows
    for message, given in (
        (r"logits is int64: expected bfloat16 or float16 or float32", (targets, targets)),
        (r"targets is int32 \(7,\): expected int64 \(7,\)", (logits, targets.int())),
        (r"targets is int64 \(6,\): expected int64 \(7,\)", (logits, targets[:6])),
        (r"lse is float32 \(6,\): expected float32 \(7,\)", (logits, targets, lse[:6], dloss)),
    ):
        function = ours.cross_entropy if len(given) == 2 else ours.cross_entropy_backward
        with pytest.raises(UsageError, match=message):
            function(*given)
    for valid in (0, 71):
        with pytest.raises(UsageError, match=f"valid={valid}: expected 1 to 70"):
            ours.cross_entropy(logits, targets, valid=valid)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("size", RAGGED)
def test_ragged(device, mode, size):
    for m, n in [(size, 100), (100, size)]:
        problem = OP.Problem(m, n, mode=mode)
        check(KERNEL, problem, OP.inputs(problem, device))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_more_than_two_to_the_31_elements(device, mode):
    """Rows are independent, so some of them alone are compared."""
    m, n = 42700, 50304
    problem = OP.Problem(m, n, mode=mode, valid=50257)
    small = OP.inputs(OP.Problem(4, n, mode=mode, valid=50257), device)
    inputs = {name: t.repeat(m // 4, *(1,) * (t.dim() - 1)) for name, t in small.items()}
    outputs = run(KERNEL, problem, inputs)
    for top in (0, 2**31 // n // 4 * 4, m - 4):
        some = OP.Problem(4, n, mode=mode, valid=50257)
        found = {name: out[top : top + 4] for name, out in outputs.items()}
        result = OP.check(some, found, OP.reference(some, small))
        assert result.ok, result.message
