"""The fuzzer passes right kernels, catches planted bugs, and its cases replay."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch

from jetfire.core import registry, schema
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.op import Op
from jetfire.core.tensors import bits
from jetfire.fuzz import Example, InProcess, Outcome, fuzz_kernel, run
from jetfire.fuzz.draw import INTERPRETED, VARIANTS, FuzzExtent, FuzzTarget, usual
from jetfire.fuzz.example import Other, is_huge
from jetfire.fuzz.run import at_edges, inconsistency, run_case
from jetfire.fuzz.search import ENDED, PairReport, run_batch, run_huge
from jetfire.fuzz.simplify import simplify
from jetfire.reference.cross_entropy import IGNORED
from jetfire.reference.sample_rows import factors

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def here() -> Device:
    return Device.parse("auto")


@pytest.fixture(scope="module")
def right(here):
    return registry.get_kernel("quantize", "torch" if here.kind == "cpu" else "triton")


def decoded(text):
    """The case that a text holds."""
    return schema.decode(text.encode(), Example, Path("case"))


def test_a_right_kernel_passes(here, right):
    report = fuzz_kernel(registry.get("quantize"), right, here, examples=40, largest=70)
    assert report.failures == []
    assert report.examples == 40
    assert report.coverage["ragged"]
    assert report.coverage["strided"]


class _LastColumnUnwritten:
    """The named kernel of quantize, but for one missing column of wide outputs."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def launch(self, problem, config, inputs, outputs):
        if problem.n > 40 and "q" in outputs:
            kept = outputs["q"][:, -1].clone()
            self._kernel.launch(problem, config, inputs, outputs)
            outputs["q"][:, -1] = kept
        else:
            self._kernel.launch(problem, config, inputs, outputs)


def test_a_planted_bug_is_caught_and_made_small(here, right, monkeypatch):
    mutant = _LastColumnUnwritten(right)
    monkeypatch.setitem(registry.kernels("quantize"), right.name, mutant)
    report = fuzz_kernel(registry.get("quantize"), mutant, here, examples=500, seed=1, failures=1)
    (failure,) = report.failures
    assert failure.kind == "unwritten"
    case = failure.case
    assert (case.problem["m"], case.problem["n"]) == (1, 41)
    assert (case.layout, case.offset, case.data, case.data_seed) == ({}, 0, "normal", 0)
    assert run_case(case, here).kind == "unwritten"
    monkeypatch.undo()
    assert run_case(decoded(case.as_json()), here).kind is None


class _Wrong:
    """The named kernel of quantize, but for what `spoil` does to the outputs of a problem."""

    def __init__(self, kernel, spoil):
        self._kernel, self._spoil = kernel, spoil

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def launch(self, problem, config, inputs, outputs):
        self._kernel.launch(problem, config, inputs, outputs)
        self._spoil(problem, outputs)


def test_one_fault_hides_no_other(here, right, monkeypatch):
    """Of any problem with 9 rows; and of those in blocks of 128, which few others show."""

    def spoil(problem, outputs):
        if problem.m > 8:
            next(iter(outputs.values()))[-1] = 5
        elif problem.block == 128 and "scale" in outputs:
            outputs["scale"] *= 2

    mutant = _Wrong(right, spoil)
    monkeypatch.setitem(registry.kernels("quantize"), right.name, mutant)
    report = fuzz_kernel(registry.get("quantize"), mutant, here, examples=200, largest=70)
    small = [
        (failure.case.problem["m"], failure.case.problem["block"]) for failure in report.failures
    ]
    assert sorted(small) == [(1, 128), (9, 32)]
    assert set(report.failing) >= {"wrong q", "wrong scale"}


def test_of_examples_that_fail_alike_some_are_made_small():
    """And of those that end a worker there are few."""
    op, kernel = registry.get("quantize"), registry.get_kernel("quantize", "triton")
    wrong = Recorder(lambda case: Outcome(None if case.empty else "wrong", "q: 1 of 2 differ"))
    report = fuzz_kernel(op, kernel, H200, examples=100, executor=wrong)
    assert (report.examples, report.failing) == (100, {"wrong q": 96})
    assert len(wrong.cases) < 200
    assert len(report.failures) == 1
    lost = Recorder(lambda case: Outcome("crash", "Segmentation fault: 11"))
    report = fuzz_kernel(op, kernel, H200, examples=100, executor=lost)
    assert report.failing == {"crash": ENDED}


def test_a_step_that_is_not_usable_has_no_gradient_to_compare_with():
    """The example that failed on a right tree: (1/√group)/step overflows in fp32."""
    fields = {"m": 2, "n": 32, "dtype": "fp32", "mode": "bwd", "given": "x", "gathered": True}
    problem = registry.get("hadamard_quantize").Problem.parse(fields)
    case = Example("hadamard_quantize", "torch", problem.as_dict(), {}, "subnormal", 1)
    assert run_case(case, Device.parse("cpu")) == Outcome()


def test_a_row_of_one_column_has_the_gradient_that_rounding_leaves_it():
    """x − mean is 0 there; where x was code·scale in an FMA it is what rounding took from x."""
    op = registry.get("layernorm")
    problem = op.Problem(1, 1, mode="bwd", stats="row", eps=1e-12)
    inputs = op.inputs(problem, torch.device("cpu"))
    outputs = op.reference(problem, inputs)
    found = {name: outputs[name].float() for name in ("dweight", "dbias")}
    dy = float(inputs["dy"][0, 0] * inputs["dy_scale"][0, 0])
    x = float(inputs["x"][0, 0]) * float(inputs["x_scale"][0, 0])
    residue = (x - float(inputs["mean"][0])) * float(inputs["rstd"][0])
    assert 1e-3 < abs(residue) < 1
    for times, wrong in ((1, False), (100, True)):
        found["dweight"] = torch.full((1,), dy * times * residue, dtype=torch.float32)
        assert (inconsistency(op, problem, inputs, found) is not None) == wrong


@pytest.mark.parametrize("name", registry.names())
def test_every_backward_has_a_check_of_its_gradients_or_says_why_not(name):
    op = registry.get(name)
    checked = type(op).gradients is not Op.gradients
    assert (checked or bool(op.no_gradients)) == ("bwd" in op.modes)
    assert not (checked and op.no_gradients)


def test_a_backward_without_a_check_of_its_gradients_is_a_fault(here, monkeypatch):
    op = registry.get("gelu")
    monkeypatch.delattr(type(op), "gradients")
    problem = op.Problem(3, 5, mode="bwd")
    outcome = run_case(Example("gelu", "torch", problem.as_dict(), {}), here)
    assert outcome.kind == "raised"
    assert "gelu has a backward and no check of its gradients" in outcome.message


def test_a_kernel_for_another_device_is_passed_over():
    old, op = Device(kind="cuda", capability=(7, 0)), registry.get("quantize")
    report = fuzz_kernel(op, registry.get_kernel("quantize", "triton"), old, examples=10)
    assert report.examples == 0


def test_a_case_is_its_json(here, right):
    problem = registry.get("quantize").Problem(3, 5)
    config = right.default(problem, here).as_dict()
    case = Example("quantize", right.name, problem.as_dict(), config, layout={"x": (3, 1)})
    assert decoded(case.as_json()) == case
    assert dataclasses.replace(case, data_seed=1).id != case.id
    assert InProcess(here).run(case).kind is None
    with pytest.raises(UsageError, match="op is missing"):
        decoded("{}")


class Recorder:
    """An executor that runs nothing and finds everything right, or as `outcome` says."""

    def __init__(self, outcome=lambda case: Outcome()):
        self.cases = []
        self._outcome = outcome

    def run(self, case):
        self.cases.append(case)
        return self._outcome(case)

    def late(self):
        return None

    def close(self):
        pass


H200 = target_device((9, 0))
GPU_KERNELS = [
    (name, kernel.name)
    for name in registry.names()
    for kernel in registry.kernels(name).values()
    if type(kernel).__module__.startswith(("jetfire.kernels_cuda", "jetfire.kernels_triton"))
]


@pytest.mark.parametrize(("op", "kernel"), GPU_KERNELS)
def test_what_is_drawn_for_a_gpu(op, kernel):
    """Legal problems of every kind, in few variants; one beyond 2^31 elements."""
    op, kernel, seen = registry.get(op), registry.get_kernel(op, kernel), Recorder()
    report = fuzz_kernel(op, kernel, H200, examples=30, largest=512, executor=seen)
    assert report.examples == len(seen.cases) == 30
    assert len(report.variants) <= 3 * (2 * VARIANTS)  # sizes may have defaults of their own
    drawn = ("ragged", "whole", "moved", "tall", "edges")
    for kind in (*drawn, *([] if op.name == "hadamard_gemm" else ["empty"])):
        assert report.coverage[kind], kind
    for case in seen.cases:
        if not case.empty:
            problem, config = op.Problem.parse(case.problem), kernel.Config.parse(case.config)
            assert kernel.legal(problem, config, H200) is None
        assert decoded(case.as_json()) == case
    again = Recorder()
    fuzz_kernel(op, kernel, H200, examples=30, largest=512, executor=again)
    assert again.cases == seen.cases

    huge = Recorder()
    run_huge(FuzzTarget(op, kernel, H200, FuzzExtent(largest=512)), 0, huge)
    assert all(is_huge(case) for case in huge.cases)
    assert len(huge.cases) == (0 if op.name == "sample_rows" else 1)


def test_what_is_drawn_for_a_cpu():
    """Nothing is compiled: flags are drawn for each example, and each kind of size in turn."""
    op, seen = registry.get("gemm"), Recorder()
    fuzz_kernel(op, registry.get_kernel("gemm", "int_mm"), Device(kind="cpu"), executor=seen)
    problems = [case.problem for case in seen.cases if not case.empty]
    flags = {(p["out"], p["block"], p["bias"], p["accumulate"]) for p in problems}
    assert len(flags) > 30  # of 42
    assert {(out, True, True) for out in ("bf16", "fp16", "fp32")} <= {
        (p["out"], p["bias"], p["accumulate"]) for p in problems
    }
    for dim in op.dims:
        assert sum(p[dim] > 2**16 for p in problems) >= 2, dim
    assert any(case.data_seed for case in seen.cases)


def test_every_pair_of_blocks_is_drawn():
    """Where codes are written; and a product's other outputs have one block."""
    for name, kernel in (("gemm", "int_mm"), ("gelu", "torch")):
        op, seen = registry.get(name), Recorder()
        fuzz_kernel(op, registry.get_kernel(name, kernel), Device(kind="cpu"), executor=seen)
        problems = [op.Problem.parse(case.problem) for case in seen.cases if not case.empty]
        codes = [p for p in problems if getattr(p, "out", "int8") == "int8"]
        assert {(p.block, p.out_block) for p in codes} == set(
            itertools.product((32, 64, 128), repeat=2)
        )
        assert all(p.block == p.out_block for p in problems if p not in codes)


@pytest.mark.parametrize(
    ("wrong", "drawn", "small"),
    [
        (lambda block, out_block: True, (128, 64), (32, 32)),
        (lambda block, out_block: block == 64, (64, 128), (64, 64)),
        (lambda block, out_block: out_block != block, (64, 128), (32, 128)),
        (lambda block, out_block: out_block < block, (128, 64), (128, 64)),
    ],
)
def test_two_blocks_shrink_to_one_where_that_fails_too(wrong, drawn, small):
    op = registry.get("gelu")

    def fails(case):
        problem = op.Problem.parse(case.problem)
        return problem.m > 3 and wrong(problem.block, problem.out_block)

    problem = op.Problem(70, 90, block=drawn[0], out_block=drawn[1], mode="bwd", layout="both")
    case = simplify(Example("gelu", "torch", problem.as_dict(), {}), Device(kind="cpu"), fails)
    expected = op.Problem(4, 1, block=small[0], out_block=small[1])
    assert case.problem == expected.as_dict()


def test_another_seed_draws_other_examples():
    op, kernel, drawn = registry.get("quantize"), registry.get_kernel("quantize", "triton"), []
    for seed in (0, 0, 1):
        seen = Recorder()
        fuzz_kernel(op, kernel, H200, examples=30, seed=seed, executor=seen)
        drawn.append([case.as_json() for case in seen.cases])
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_how_much_is_drawn_is_a_matter_of_who_runs_it():
    op, plain = registry.get("quantize"), Device(kind="cpu")
    triton, torch = (registry.get_kernel("quantize", name) for name in ("triton", "torch"))
    interpreting = dataclasses.replace(plain, interpreted=True)
    assert usual(op, triton, plain) is None
    assert usual(op, triton, interpreting) == INTERPRETED
    assert usual(op, torch, interpreting) == usual(op, torch, plain) == FuzzExtent()
    assert usual(op, triton, H200).largest > FuzzExtent().largest
    assert list(FuzzExtent(examples=60, batch=25).batches()) == [(0, 25), (1, 25), (2, 10)]
    longer = [wanted for _, wanted in FuzzExtent(examples=1200, batch=10).batches()]
    assert longer == [*[10] * 20, *[40] * 20, 160, 40]
    many = [wanted for _, wanted in FuzzExtent(examples=4000).batches()]
    assert many == [*[25] * 5, *[100] * 5, *[400] * 5, 1375]
    assert next(itertools.islice(FuzzExtent(examples=None, batch=10).batches(), 40, None)) == (
        40,
        160,
    )


@pytest.mark.parametrize(
    "said",
    [
        "Triton Error [CUDA]: out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
@pytest.mark.parametrize("where", ["launch", "reference"])
def test_memory_that_others_have_taken_is_no_kernel_s_fault(said, where, monkeypatch):
    def fail(*_):
        raise RuntimeError(said)

    monkeypatch.setattr(run if where == "launch" else type(registry.get("add")), where, fail)
    outcome = run_case(Example("add", "torch", {"m": 2, "n": 2}, {}), Device.parse("cpu"))
    assert outcome.kind == "skipped"
    assert said in outcome.message


def test_what_does_not_fit_in_memory_is_another_huge_problem_s_turn():
    seen = Recorder(lambda case: Outcome("skipped", "too little memory"))
    op = registry.get("quantize")
    report = run_huge(FuzzTarget(op, registry.get_kernel("quantize", "triton"), H200), 0, seen)
    assert len({case.id for case in seen.cases}) > 1
    assert report.failures == []
    assert report.coverage["skipped"] == len(seen.cases)
    assert report.coverage["huge"] == 0


def test_a_failure_keeps_its_kind_while_it_shrinks():
    """A smaller case that fails in another way is another bug."""

    def outcome(case):
        if case.problem["n"] > 40:
            return Outcome("guard", "written")
        return Outcome("wrong", "off") if case.problem["n"] > 30 else Outcome()

    def first(case):
        return outcome(case) if case.problem["n"] > 40 or seen.failed else Outcome()

    class Seen(Recorder):
        failed = False

        def run(self, case):
            found = super().run(case)
            self.failed |= found.failed
            return found

    seen = Seen(first)
    op = registry.get("quantize")
    report = fuzz_kernel(
        op, registry.get_kernel("quantize", "triton"), H200, examples=200, executor=seen, failures=1
    )
    (failure,) = report.failures
    assert (failure.kind, failure.case.problem["n"]) == ("guard", 41)


def test_the_parts_of_a_batch_add_up_to_it(monkeypatch):
    """Failures that are alike are told once, whichever parts they are in."""

    def outcome(case):
        size = case.problem["n"]
        return Outcome("guard" if size > 400 else "wrong", "off") if size > 40 else Outcome()

    def parts(seconds):
        monkeypatch.setattr("jetfire.fuzz.search.PART_S", seconds)
        return list(run_batch(target, 0, 50, 3, Recorder(outcome)))

    kernel = registry.get_kernel("quantize", "triton")
    target = FuzzTarget(registry.get("quantize"), kernel, H200, FuzzExtent(largest=512))
    (whole,) = parts(math.inf)
    each = parts(0.0)
    assert [part.examples for part in each] == [1] * whole.examples
    assert whole.failing.keys() == {"wrong", "guard"}
    assert sum(len(part.failures) for part in each) == len(whole.failures) == 2
    total = PairReport("quantize", "triton")
    for part in each:
        total.merge(part)
    times = {"seconds": 0.0, "shrinking_s": 0.0}
    assert dataclasses.replace(total, **times) == dataclasses.replace(whole, **times)


def test_nothing_is_begun_after_the_deadline():
    seen = Recorder()
    op = registry.get("quantize")
    kernel = registry.get_kernel("quantize", "triton")
    report = fuzz_kernel(op, kernel, H200, examples=50, executor=seen, deadline=0.0)
    assert (report.examples, seen.cases) == (0, [])


class _Ends(Recorder):
    """An executor that cannot start a worker after some answers."""

    def __init__(self, outcome, answers):
        super().__init__(outcome)
        self._left = answers

    def run(self, case):
        self._left -= 1
        if self._left < 0:
            raise UsageError("no worker started in 120 s")
        return super().run(case)


def test_an_executor_that_fails_loses_no_failure():
    op, kernel = registry.get("quantize"), registry.get_kernel("quantize", "triton")
    ends = _Ends(lambda case: Outcome("wrong", "off"), 1)
    (failure,) = fuzz_kernel(op, kernel, H200, examples=50, executor=ends).failures
    assert (failure.kind, [failure.case]) == ("wrong", ends.cases)


def test_an_executor_that_fails_first_is_an_error():
    op, kernel = registry.get("quantize"), registry.get_kernel("quantize", "triton")
    ends = _Ends(lambda case: Outcome(), 10)
    with pytest.raises(UsageError, match="no worker started in 120 s"):
        fuzz_kernel(op, kernel, H200, examples=50, executor=ends)
    assert len(ends.cases) == 10
    with pytest.raises(UsageError, match="no worker started in 120 s"):
        run_huge(FuzzTarget(op, kernel, H200), 0, _Ends(lambda case: Outcome(), 0))


class _Named:
    """A kernel under another name."""

    def __init__(self, kernel, name):
        self._kernel, self.name = kernel, name

    def __getattr__(self, name):
        return getattr(self._kernel, name)


def test_a_variant_with_the_same_config_is_another_kernel(here, right, monkeypatch):
    op, variant = registry.get("quantize"), _Named(right, "variant")
    monkeypatch.setitem(registry.kernels("quantize"), "variant", variant)
    report = fuzz_kernel(op, variant, here, examples=10, largest=40, against=right)
    assert report.coverage["compared"] == 10
    assert report.compared > 0


def test_a_smaller_case_is_one_that_the_other_kernel_takes(right, monkeypatch):
    class Even(_Named):
        def legal(self, problem, config, device):
            odd = "n is odd" if problem.n % 2 else None
            return odd or self._kernel.legal(problem, config, device)

    cpu = Device.parse("cpu")
    torch = registry.get_kernel("quantize", "torch")
    monkeypatch.setitem(registry.kernels("quantize"), "even", Even(torch, "even"))
    problem = registry.get("quantize").Problem(64, 64)
    case = Example("quantize", "torch", problem.as_dict(), {}, other=Other("even", {}))
    seen = []

    def fails(case):
        seen.append(case)
        return case.other is not None and case.problem["n"] > 10

    small = simplify(case, cpu, fails)
    assert not [case for case in seen if case.other and case.problem["n"] % 2]
    assert small.problem["n"] == 12
    assert small.other == Other("even", {})


@pytest.mark.parametrize("name", registry.names())
def test_edges_are_inputs_like_the_others(name):
    """Of the same shapes and dtypes, the same for the same seed; matrices stay, but for logits."""
    op, cpu = registry.get(name), torch.device("cpu")
    flags = {"accumulate": True, "bias": True, "guarded": True, "rows": 40, "repeat": True}
    flags |= {"given": "x", "gathered": True, "stats": "given", "rounding": "stochastic"}
    known = op.Problem.__dataclass_fields__
    for mode in op.modes:
        for product in ("dgrad", "wgrad") if "product" in known else (None,):
            drawn = {**flags, "mode": mode, "product": product, "operands": "wide", "out": "fp32"}
            fields = {k: v for k, v in drawn.items() if k in known and v is not None}
            if name in ("gemm", "int4_gemm"):
                fields |= {"rounding": "nearest"} if name == "gemm" else {"bias": product is None}
            if name == "hadamard_quantize":
                fields |= {"rounding": "nearest", "out": "float"}
            problem = op.Problem.parse({**dict.fromkeys(op.dims, 256), **fields})
            inputs, changed = op.inputs(problem, cpu), set()
            for seed in range(8):
                found = at_edges(op, problem, inputs, seed)
                again = at_edges(op, problem, inputs, seed)
                for key, was in inputs.items():
                    assert (found[key].shape, found[key].dtype) == (was.shape, was.dtype), key
                    assert torch.equal(bits(found[key]), bits(again[key]))
                    changed |= set() if torch.equal(bits(found[key]), bits(was)) else {key}
            assert not changed & {"x", "a", "b", "q", "qt", "dy", "grad", "param"}
            assert all(key in changed for key in inputs if key.startswith("seed"))
            assert changed or name in ("column_sum", "dequantize", "measured_step", "transpose")


def test_edges_of_a_gradient_in_codes_have_other_seeds_and_rows():
    op = registry.get("hadamard_quantize")
    fields = {"mode": "bwd", "gathered": True, "out": "int8", "rounding": "stochastic"}
    problem = op.Problem(64, 96, **fields)
    inputs = op.inputs(problem, torch.device("cpu"))
    found = [at_edges(op, problem, inputs, seed) for seed in range(8)]
    for name in ("seed", "slots", "unit"):
        assert any(not torch.equal(bits(one[name]), bits(inputs[name])) for one in found), name
    assert all(torch.equal(one["q"], inputs["q"]) for one in found)


def test_edges_of_targets_are_other_targets_in_32_bits():
    op = registry.get("cross_entropy")
    problem = op.Problem(64, 100, valid=90)
    inputs = op.inputs(problem, torch.device("cpu"))
    drawn = torch.cat([at_edges(op, problem, inputs, seed)["targets"] for seed in range(16)])
    known, words = (drawn >= 0) & (drawn < 90), drawn.int()
    assert ((words >= 0) & (words < 90) & ~known).any()
    assert ((words == IGNORED) & (drawn != IGNORED)).any()
    assert {0, 89, 90, -1, IGNORED} <= set(drawn.tolist())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_edges_of_logits_are_rows_far_from_0(dtype):
    """A whole row below any number that a maximum might begin at, or above where exp overflows."""
    op = registry.get("cross_entropy")
    problem = op.Problem(64, 100, dtype=dtype)
    inputs = op.inputs(problem, torch.device("cpu"))
    for seed in range(4):
        logits = at_edges(op, problem, inputs, seed)["logits"]
        assert (logits.amax(1) < -3e4).any()
        assert (logits.amin(1) > 3e4).any()
        assert (logits.abs().amax(1) < 10).any()


@pytest.mark.parametrize("product", ["dgrad", "wgrad", "both"])
def test_edges_of_sizes_are_rows_that_weigh_the_same(product):
    """Two parts' weights, of 2^30 each, then sum to 2^31 for each row that is to be kept."""
    op = registry.get("sample_rows")
    problem = op.Problem(200, product=product)
    inputs = op.inputs(problem, torch.device("cpu"))
    alike = 0
    for seed in range(32):
        found = at_edges(op, problem, inputs, seed)
        scores = found["squares"] * torch.tensor(factors(200, 2)).square()
        if product != "dgrad":
            scores *= found["x_squares"].repeat(2)
        alike += len(scores.unique()) == 1 and bool(scores.all())
    assert 0 < alike < 32


def test_a_share_of_0_is_not_an_empty_tensor():
    fields = {"m": 8, "n": 8, "k": 8, "block": 128, "percent": 0}
    assert not Example("fallback_gemm", "triton", fields, {}).empty
    assert Example("fallback_gemm", "triton", {**fields, "k": 0}, {}).empty
    assert Example("gather_rows", "triton", {"m": 8, "n": 8, "rows": 0}, {}).empty


@pytest.mark.parametrize(
    ("message", "left", "lacks"),
    [
        ("CUDA error: unknown error", 2**28, True),
        ("CUDA error: unknown error", 2**33, False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasDgemm(`", 2**28, True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasDgemm(`", 2**33, False),
        ("CUDA error: an illegal memory access was encountered", 2**28, False),
        ("Triton Error [CUDA]: out of memory", 2**33, True),
    ],
)
def test_a_vague_error_is_the_memory_s_only_where_little_is_left(monkeypatch, message, left, lacks):
    case, device = Example("gelu", "torch", {"m": 2, "n": 2}, {}), target_device((9, 0))

    def fails(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(run, "_prepare", fails)
    monkeypatch.setattr(run, "_give_back", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (left, 2**36))
    assert run.run_case(case, device).kind == ("skipped" if lacks else "raised")
