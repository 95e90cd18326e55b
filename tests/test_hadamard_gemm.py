"""hadamard_gemm: the reference against torch, the staged kernel against the reference."""

import pytest
import torch

from jetfire.cli import execute
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.tensors import poison
from jetfire.measure import peaks, plan
from jetfire.measure.results import Results
from jetfire.reference import hadamard_gemm as reference
from jetfire.reference.hadamard import transform
from jetfire.reference.nibbles import narrow, unpack

OP = registry.get("hadamard_gemm")
KERNEL = registry.get_kernel("hadamard_gemm", "staged")
FORWARD = ("quantize_x", "quantize_w", "gemm")
BACKWARD = (
    "bit_split",
    "dgrad_sample",
    "dgrad_gather",
    "dgrad_gemm",
    "dgrad_hadamard",
    "wgrad_sample",
    "wgrad_gather_g",
    "wgrad_gather_x",
    "wgrad_gemm",
    "wgrad_hadamard",
)

PAPER = [
    (4608, 5120, 6144),
    (5120, 6144, 8192),
    (6144, 6144, 9216),
    (7168, 6656, 8704),
    (8192, 7680, 9728),
    (15360, 8704, 10752),
]


def check(problem, inputs):
    result = verify(OP, KERNEL, problem, KERNEL.Config(), inputs)
    assert result.ok, f"{problem}: {result.message}"


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("m", "n", "k", "group", "data"),
    [
        (1, 2, 2, 1, "normal"),
        (130, 66, 96, 32, "heavy"),
        (300, 64, 128, 128, "gradient"),
        (257, 34, 64, 8, "outlier"),
    ],
)
def test_staged_is_exact(device, mode, dtype, m, n, k, group, data):
    problem = OP.Problem(m, n, k, group=group, dtype=dtype, mode=mode)
    check(problem, OP.inputs(problem, device, data=data))


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("group", [1, 32])
def test_forward_is_the_product_to_4_bits(group):
    """Steps of 0.3 σ lose about a tenth of each operand's norm, by rounding and clipping."""
    problem = OP.Problem(96, 80, 256, group=group)
    x, w, *steps = OP.inputs(problem, torch.device("cpu")).values()
    c = reference.forward(x, w, *(s / 2 for s in steps), group)["c"]
    assert c.dtype == torch.bfloat16
    assert 0.1 < error(c, x.double() @ w.double().t()) < 0.2


def test_backward_is_unbiased():
    """Over draws: the exact products of the codes that x and w have, transformed back."""
    m, n, k, group = 24, 16, 32, 8
    problem = OP.Problem(m, n, k, group=group, mode="bwd")
    inputs = OP.inputs(problem, torch.device("cpu"), data="gradient/normal")
    g = inputs["g"].double()
    codes = {"x": unpack(inputs["q"]), "w": narrow(inputs["wt"]).t()}
    values = {name: codes[name].double() * inputs[f"{name}_scale"] for name in "xw"}
    passed = {name: (codes[name] > -8) & (codes[name] < 7) for name in "xw"}
    exact = {
        "dx": transform((g @ values["w"]) * passed["x"], group),
        "dw": transform((g.t() @ values["x"]) * passed["w"], group),
    }
    given = [inputs[name] for name in ("g", "q", "squares", "x_scale", "w", "w_scale", "wt")]
    draws = {name: [] for name in exact}
    for i in range(400):
        seeds = tuple(torch.tensor([1000 * i + j]) for j in range(3))
        found = reference.backward(*given, seeds, group)
        for name in exact:
            draws[name].append(found[name].double())
    for name, values in draws.items():
        sample = torch.stack(values)
        noise = sample.std(dim=0) / len(sample) ** 0.5
        # bf16 rounds what is stored by a part in 512 at most, of either sign.
        rounding = exact[name].abs().amax() * 2**-8
        assert bool(((sample.mean(dim=0) - exact[name]).abs() <= 4.5 * noise + rounding).all())
        assert bool((noise > 0).any())


def test_a_gradient_of_zero_or_with_a_fault(device):
    problem = OP.Problem(64, 32, 64, mode="bwd")
    inputs = OP.inputs(problem, device)
    inputs["g"].zero_()
    check(problem, inputs)
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, KERNEL.Config(), inputs, outputs)
    assert not any(bool(t.any()) for t in outputs.values())
    inputs["g"][5, 3] = torch.inf
    check(problem, inputs)
    launch(KERNEL, problem, KERNEL.Config(), inputs, outputs)
    assert bool(outputs["dx"].isnan().all())
    assert bool(outputs["dw"].isnan().any())


@pytest.mark.parametrize(("mode", "names"), [("fwd", FORWARD), ("bwd", BACKWARD)])
def test_stages_are_the_launch(device, mode, names):
    problem = OP.Problem(70, 32, 64, mode=mode)
    inputs = OP.inputs(problem, device)
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    stages = KERNEL.stages(problem, KERNEL.Config(), inputs, outputs)
    assert tuple(stages) == names
    for run in stages.values():
        run()
    expected = OP.reference(problem, inputs)
    assert OP.check(problem, outputs, expected).ok
    poison(outputs["c" if mode == "fwd" else "dw"])
    stages[names[-1]]()  # any of them again, by itself
    assert OP.check(problem, outputs, expected).ok


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_replays_as_a_graph_without_waiting_for_the_device(device, mode):
    problem = OP.Problem(512, 256, 384, mode=mode)
    inputs = OP.inputs(problem, device)
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, KERNEL.Config(), inputs, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(KERNEL, problem, KERNEL.Config(), inputs, outputs)
    for tensor in OP.inputs(problem, device, seed=1).items():
        inputs[tensor[0]].copy_(tensor[1])
    OP.poison(problem, outputs)
    graph.replay()
    result = OP.check(problem, outputs, OP.reference(problem, inputs))
    assert result.ok, result.message


def test_refuses_in_one_line():
    with pytest.raises(
        UsageError,
        match=r"^group=64: expected a power of two that divides k=96, "
        r"at most 32$",
    ):
        OP.Problem(8, 8, 96, group=64)
    with pytest.raises(UsageError, match=r"^k=33: expected an even number"):
        OP.Problem(8, 8, 33, group=1)
    with pytest.raises(UsageError, match=r"^n=7: expected an even number"):
        OP.Problem(8, 7, 32, mode="bwd")
    assert OP.Problem(8, 7, 32).n == 7


def test_legal_where_every_stage_is():
    problem, config = OP.Problem(64, 64, 64), KERNEL.Config()
    for capability in ((8, 0), (8, 9), (9, 0)):
        assert KERNEL.legal(problem, config, target_device(capability)) is None
    assert KERNEL.legal(problem, config, Device(kind="cpu")) is None
    old = Device(kind="cuda", capability=(7, 0))
    assert KERNEL.legal(problem, config, old).startswith("quantize_x: no kernel of hadamard_")


@pytest.fixture
def peaks_known(monkeypatch):
    found = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1, "how": {}}
    monkeypatch.setattr(peaks, "cached", lambda *_: found)


def test_the_bench_splits_its_time_by_stage(peaks_known, tmp_path, capsys):
    file = tmp_path / "rows.json"
    words = "hadamard-gemm --m 64 --mode fwd,bwd --rounds 2 --peer fp32_matmul --device cpu"
    assert execute("bench", [*words.split(), "-o", str(file)]) == 0
    rows = [row for row in Results.load(file).rows if row.role == "kernel"]
    assert [tuple(row.extra["stages"]) for row in rows] == [FORWARD, BACKWARD]
    assert all(ms > 0 for row in rows for ms in row.extra["stages"].values())
    text = capsys.readouterr().out
    for line in ("staged fwd", "staged bwd", "wgrad_gather_x", "all in turn"):
        assert line in text
    assert execute("bench", [*words.split(), "--format", "md"]) == 0
    assert "| staged bwd | 64×64×64 |" in capsys.readouterr().out
    assert Results.load(file).to_csv().splitlines()[0].count("stages.") == len(FORWARD + BACKWARD)


def test_the_bench_takes_the_paper_s_layers_on_a_gpu():
    asked = plan.parse(["hadamard-gemm"], mode=["fwd,bwd"])
    gpu, cpu = target_device((9, 0)), Device(kind="cpu")
    problems = [case.problem for case in plan.cases(asked.on(gpu), print)]
    assert [(p.m, p.n, p.k) for p in problems[::2]] == PAPER
    assert {p.mode for p in problems} == {"fwd", "bwd"}
    assert asked.on(cpu).sizes == {"m": [512]}
    given = plan.parse(["hadamard-gemm"], k=["64"])
    assert given.on(gpu).sizes == {"m": [4096], "k": [64]}


def test_commands_that_need_a_kernel_s_own_code_say_so(tmp_path, capsys):
    for words, says in (
        (
            ["export", "hadamard-gemm", "--kernel", "staged", "-o", str(tmp_path / "out")],
            "it launches the kernels of other ops; export those",
        ),
        (["audit", "hadamard-gemm", "--m", "64"], "no kernel with machine code takes these"),
        (["tune", "hadamard-gemm", "--m", "64", "--device", "cpu"], "staged: has nothing to tune"),
    ):
        assert execute(None, words) == 2
        assert says in capsys.readouterr().err.splitlines()[-1]
