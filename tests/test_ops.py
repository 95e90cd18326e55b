"""The contract of ops: discovery, problems, inputs, workloads, devices."""

import subprocess
import sys

import pytest
import torch

from jetfire import ops
from jetfire.core import registry, workloads
from jetfire.core.device import Device, capability_of, target_device
from jetfire.core.errors import NoDeviceError, UsageError
from jetfire.measure.data import DISTRIBUTIONS, Source

INT8_OPS = (
    "adamw",
    "adamw8",
    "add",
    "column_sum",
    "dequantize",
    "dropout",
    "gelu",
    "gemm",
    "layernorm",
    "quantize",
    "quantize_qkv",
    "rmsnorm",
    "swiglu",
    "transpose",
)
SMALL = {"m": 40, "n": 70, "k": 33}


def small(op, **fields):
    return {**{dim: SMALL[dim] for dim in op.dims}, **fields}


def test_every_int8_op_is_found_with_triton_and_cpu_kernels():
    assert set(INT8_OPS) <= set(registry.names())
    for name in INT8_OPS:
        found = registry.kernels(name)
        assert "triton" in found
        assert any(
            kernel.legal(problem, kernel.default(problem, cpu), cpu) is None
            for cpu in [Device(kind="cpu")]
            for problem in [registry.get(name).Problem.parse(small(registry.get(name)))]
            for kernel in found.values()
        ), f"{name} has no kernel for the CPU"


def test_names_and_get_import_no_torch():
    code = """import sys
from jetfire import ops
from jetfire.core import registry
assert [registry.get(name) for name in registry.names()] and dir(ops)
sys.exit('torch' in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_names_say_what_is_accepted():
    with pytest.raises(UsageError, match=r"no op 'gem' \(did you mean gemm\?\): expected one of "):
        registry.get("gem")
    with pytest.raises(UsageError, match=r"gemm has no kernel .cutlass.: expected one of .*triton"):
        registry.get_kernel("gemm", "cutlass")
    with pytest.raises(AttributeError):
        _ = ops.no_such_function


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"m": -1}, "m=-1: expected an integer of at least 1"),
        ({"m": 0}, "m=0: expected an integer of at least 1"),
        ({"m": "ten"}, "m=ten: expected an integer"),
        ({"block": 48}, "block=48: expected 32 or 64 or 128"),
        ({"out": "fp64"}, r"out=fp64 \(did you mean fp16\?\): expected one of bf16, fp16"),
        ({"bias": "maybe"}, "bias=maybe: expected true or false"),
        ({"tile": 3}, "no problem field 'tile': expected one of m, n, k"),
    ],
)
def test_problem_refuses_in_one_line(fields, message):
    op = registry.get("gemm")
    with pytest.raises(UsageError, match=message):
        op.Problem.parse({**small(op), **fields})


def test_problem_parses_text_and_round_trips():
    op = registry.get("gemm")
    problem = op.Problem.parse({"m": "4", "n": "5", "k": "6", "block": "64", "bias": "true"})
    assert problem.as_dict()["block"] == 64
    assert problem.bias is True
    assert op.Problem.parse(problem.as_dict()) == problem
    with pytest.raises(UsageError, match="'k' is missing"):
        op.Problem.parse({"m": 4, "n": 5})


@pytest.mark.parametrize("name", INT8_OPS)
def test_bytes_count_every_input_and_output_once(name):
    op = registry.get(name)
    for mode in op.modes:
        for problem in op.problems(mode, small(op)):
            inputs = op.inputs(problem, torch.device("cpu"))
            outputs = op.outputs(problem, inputs)
            moved = sum(t.nbytes for t in [*inputs.values(), *outputs.values()])
            assert op.bytes(problem) == moved
            for made, said in zip((inputs, outputs), op.on_meta(problem), strict=True):
                assert list(made) == list(said)
                for key, tensor in made.items():
                    assert (tensor.dtype, tensor.shape) == (said[key].dtype, said[key].shape), key


@pytest.mark.parametrize("name", INT8_OPS)
def test_inputs_repeat_from_a_seed_and_reference_covers_the_outputs(name):
    op = registry.get(name)
    for mode in op.modes:
        problem = op.problems(mode, small(op))[0]
        first, again, other = (
            op.inputs(problem, torch.device("cpu"), seed=seed) for seed in (3, 3, 4)
        )
        assert all(torch.equal(first[k], again[k]) for k in first)
        assert any(not torch.equal(first[k], other[k]) for k in first)
        outputs = op.outputs(problem, first)
        wrong = {k: torch.zeros_like(t) for k, t in outputs.items()}
        assert not op.check(problem, wrong, op.reference(problem, first)).ok


@pytest.mark.parametrize("data", DISTRIBUTIONS)
def test_distributions_have_the_character_of_their_name(data):
    x = Source(data, torch.device("cpu"), 0).floats(512, 512)
    assert bool(torch.isfinite(x).all()) == (data != "nonfinite")
    assert torch.equal(
        x.nan_to_num(), Source(data, torch.device("cpu"), 0).floats(512, 512).nan_to_num()
    )
    columns, rows = x.square().mean(0).sqrt(), x.square().mean(1).sqrt()
    kurtosis = float((x.double() ** 4).mean() / (x.double() ** 2).mean() ** 2)
    if data == "normal":
        assert 2.8 < kurtosis < 3.2
    if data == "outlier":
        assert columns.max() / columns.median() > 30
    if data == "heavy":
        assert kurtosis > 6
    if data == "gradient":
        assert (rows == 0).float().mean() > 0.03
        assert rows.max() / rows[rows > 0].min() > 1e3
    if data == "one_hot":
        assert ((x != 0).sum(dim=1) == 1).all()
    if data == "constant":
        assert (x == x[0, 0]).all()
        assert x[0, 0] != 0
    if data == "alternating":
        assert (x[1:] == -x[:-1]).all()
        assert (x[:, 1:] == -x[:, :-1]).all()
        assert (x != 0).all()
    if data == "shifted":
        tiles = x.view(4, 128, 4, 128)
        mean, deviation = tiles.mean(dim=(1, 3)).abs(), tiles.std(dim=(1, 3))
        assert (mean > 10 * deviation).all()
        assert mean.max() > 5
        assert x.min() < 0 < x.max()
    if data == "halves":
        halves = [2 * most * x.double() / x.abs().max() for most in (127, 98, 7)]
        assert any((steps - steps.round()).abs().max() < 1e-9 for steps in halves)
        assert (x.view(16, 32, 16, 32).abs().amax(dim=(1, 3)) == x.abs().max()).all()
    if data == "zeros":
        assert not x.any()
    if data == "subnormal":
        amax = x.abs().view(16, 32, 16, 32).amax(dim=(1, 3))
        for least, most in ((0, 2.0**-126), (2.0**-126, 2.0**-100), (2.0**-100, 2.0**-95)):
            assert ((amax > least) & (amax < most)).any()
    if data == "largest":
        most = torch.finfo(torch.bfloat16).max
        assert 0.1 < (x.abs() == most).float().mean() < 0.15
        assert 0.1 < (x == 0).float().mean() < 0.15
        assert x[x != 0].abs().min() > most / 20
        assert torch.isfinite(x.bfloat16()).all()


def test_values_that_are_not_finite_are_few_and_in_chosen_places():
    seen = torch.zeros(512, 512)
    for seed in range(20):
        x = Source("nonfinite", torch.device("cpu"), seed).floats(512, 512)
        bad = ~torch.isfinite(x)
        assert bad.any()
        assert bad.view(16, 32, 16, 32).any(dim=3).any(dim=1).sum() <= 16 + 3
        seen += bad
    rows, columns = seen.nonzero().unbind(1)
    places = {(r, c) for r, c in zip(rows.tolist(), columns.tolist(), strict=True) if r != 256}
    assert places == {(0, 0), (31, 31), (511, 511)}
    assert (seen[256] > 0).all()


def test_fp16_holds_the_largest_values():
    source = Source("largest", torch.device("cpu"), 0)
    x = source.floats(64, 64, dtype="fp16")
    assert x.dtype == torch.float16
    assert torch.isfinite(x).all()
    assert x.abs().max() > 60000


def test_workloads_give_legal_problems_and_refuse_unknown_names():
    for name in INT8_OPS:
        op = registry.get(name)
        for workload in workloads.names():
            for problem in workloads.problems(op, workload, op.modes[0], {"block": 64}):
                assert problem.block == 64
    with pytest.raises(UsageError, match=r"no workload 'gpt5' \(did you mean gpt2-350m\?\)"):
        workloads.problems(registry.get("gemm"), "gpt5", "fwd", {})


def test_gemm_backward_is_dgrad_and_wgrad():
    dgrad, wgrad = registry.get("gemm").problems("bwd", {"m": 10, "n": 20, "k": 30, "block": 32})
    assert (dgrad.m, dgrad.n, dgrad.k) == (10, 30, 20)
    assert (wgrad.m, wgrad.n, wgrad.k, wgrad.accumulate) == (20, 30, 10, True)


def test_devices_are_parsed_or_refused():
    assert Device.parse("cpu").kind == "cpu"
    with pytest.raises(UsageError, match="expected auto, cpu, cuda or cuda:N"):
        Device.parse("tpu")
    with pytest.raises(NoDeviceError, match="CUDA devices"):
        Device.parse("cuda:99")
    with pytest.raises(NoDeviceError, match="expected one of sm_80"):
        target_device((7, 0))


def test_legal_names_the_limit():
    op, kernel = registry.get("quantize"), registry.get_kernel("quantize", "triton")
    problem = op.Problem(64, 64, block=64)
    config = kernel.default(problem, target_device((9, 0)))
    assert kernel.legal(problem, config, target_device((9, 0))) is None
    odd = kernel.Config.parse({**config.as_dict(), "tile_m": 96})
    assert "tile_m=96" in kernel.legal(problem, odd, target_device((9, 0)))
    assert "CUDA" in kernel.legal(problem, config, Device(kind="cpu"))


def test_every_default_config_survives_its_text():
    for name in registry.names():
        op = registry.get(name)
        problem = op.Problem.parse(dict.fromkeys(op.dims, 4096))
        for kernel in registry.kernels(name).values():
            for capability in ((8, 0), (9, 0)):
                config = kernel.default(problem, target_device(capability))
                texts = {field: str(value) for field, value in config.as_dict().items()}
                assert kernel.Config.parse(texts) == config, (name, kernel.name)


def test_architectures_are_parsed_or_refused():
    assert {capability_of(text) for text in ("90", "9.0", "9.0a", "sm_90", "sm_90a")} == {(9, 0)}
    assert capability_of("100") == (10, 0)
    for text in ("9", "9.0b", "", "a", "sm_", "٩٠", "9" * 5000):  # which int refuses
        with pytest.raises(UsageError, match=": expected an architecture such as 90"):
            capability_of(text)
