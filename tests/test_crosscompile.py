"""Every GPU kernel's default config, compiled for four architectures: it fits, no spills."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from filelock import FileLock

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.kernel import Kernel

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0)]
SHAPE = {"m": 8192, "n": 4096, "k": 4096}
# On sm_90 each of these is compiled too, as far as an op has such fields.
VARIATIONS = (
    {"layout": "both", "rounding": "stochastic"},
    {"block": 128, "rounding": "stochastic"},
    {"approximate": "erf"},
    {"block": 32, "out_block": 128, "layout": "both", "rounding": "stochastic"},
    {"block": 128, "out_block": 32, "rounding": "stochastic"},
)
# And each of these backward, of an op that may add to a residual stream.
STREAMS = (
    {"residual": True, "layout": "both"},
    {"residual": True, "out_block": 128, "layout": "both"},
    {"residual": True, "block": 128, "layout": "q"},
)
# The audits as a module, with garbage looked for every 50,000 objects, as in the tests: Triton's
# syntax trees are none, and looking for some among them took 5% of the time.
AUDIT = """
import gc, runpy
gc.set_threshold(50_000)
runpy.run_module("jetfire.bench.audit", run_name="__main__", alter_sys=True)
"""
# Of ops that round or have blocks only where they write codes; a product's backward is two more.
ROUNDED = {"out": "int8", "rounding": "stochastic"}
VARIATIONS_OF = {
    "gemm": (
        ("fwd", {"block": 128}),
        ("fwd", {**ROUNDED, "layout": "both"}),
        ("fwd", {**ROUNDED, "layout": "both", "block": 128, "out_block": 32}),
    ),
    "int4_gemm": (
        ("fwd", {"out": "int8", "operands": "wide", "bias": True}),
        ("fwd", {"out": "int8", "out_block": 128}),
    ),
    "hadamard_quantize": (
        ("fwd", {"layout": "both"}),
        ("bwd", {**ROUNDED, "gathered": True}),
        ("bwd", {**ROUNDED, "out_block": 128}),
        ("bwd", {"given": "wide", "dtype": "fp32"}),
    ),
}


def problems(op, capability):
    """The op's default problems, and on sm_90 those of each mode and their variations."""
    shape = {dim: SHAPE[dim] for dim in op.dims}
    if capability != (9, 0):
        return op.problems(op.modes[0], shape)
    found = [p for mode in op.modes for p in op.problems(mode, shape)]
    if variations := VARIATIONS_OF.get(op.name):
        return found + [p for mode, v in variations for p in op.problems(mode, {**shape, **v})]
    for variation in VARIATIONS:
        fields = {k: v for k, v in variation.items() if k in op.Problem.__dataclass_fields__}
        found += [p for mode in op.modes for p in op.problems(mode, {**shape, **fields})]
    if op.name == "sample_rows":  # whose draws of both products are functions of their own
        found += op.problems("fwd", {**shape, "product": "both"})
    if op.name in ("adamw", "adamw8"):
        found += op.problems("fwd", {**shape, "layout": "none", "guarded": True})
    if op.name == "gemm":
        found += op.problems("fwd", {**shape, "out": "fp32", "squares": True})
    if op.name == "bit_split_codes":
        found += op.problems("fwd", {**shape, "sums": True})
    if "residual" in op.Problem.__dataclass_fields__:
        found += [p for stream in STREAMS for p in op.problems("bwd", {**shape, **stream})]
    return dict.fromkeys(found)


def specs():
    found = []
    for op in map(registry.get, registry.names()):
        for kernel in registry.kernels(op.name).values():
            if type(kernel).cubins is not Kernel.cubins:
                for capability in CAPABILITIES:
                    for problem in problems(op, capability):
                        spec = {"op": op.name, "kernel": kernel.name, "capability": capability}
                        found.append({**spec, "problem": problem.as_dict()})
    return found


def made():
    """Every spec's answer, from one process a core."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", AUDIT, "--specs"]
    wanted = specs()
    workers = min(os.cpu_count() or 1, 4)

    def work(part):
        lines = "\n".join(map(json.dumps, part))
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(work, [wanted[i::workers] for i in range(workers)])
        return [answer for part in parts for answer in part]


def audits_in(folder):
    """Every spec's answer, made once for all processes that share a folder: others wait for it."""
    file = folder / "crosscompile.json"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            part = file.with_suffix(".part")
            part.write_text(json.dumps(made()))
            part.replace(file)
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # where conftest.py has had them made meanwhile
    return audits_in(root)


def label(answer):
    fields = " ".join(f"{name}={value}" for name, value in answer["problem"].items())
    return f"{answer['op']}/{answer['kernel']} {fields} on sm_{answer['capability']}"


def test_every_op_compiles_for_every_architecture(audits):
    assert len(audits) == len(specs())
    for op in {answer["op"] for answer in audits}:
        for capability in CAPABILITIES:
            taken = [
                answer
                for answer in audits
                if (answer["op"], tuple(answer["capability"])) == (op, capability)
                and answer.get("audits")
            ]
            assert taken, f"no kernel of {op} takes {capability}"


def test_no_default_config_spills(audits):
    spilled = [
        f"{label(answer)}, {answer['config']}: {audit['spills']} local loads and stores"
        for answer in audits
        for audit in answer.get("audits", ())
        if audit["spills"]
    ]
    assert not spilled, "\n".join(spilled)


def test_every_launch_fits_its_architecture(audits):
    for answer in audits:
        device = target_device(tuple(answer["capability"]))
        for audit in answer.get("audits", ()):
            assert audit["shared_bytes"] <= device.shared_bytes, label(answer)
            assert audit["registers"] * 32 * audit["warps"] <= 65536, label(answer)


def test_every_function_that_is_launched_is_part_of_what_a_profile_was_tuned_for(audits):
    """A function that no hash covers could change under its kernel's profiles unseen."""
    code_of = cache(lambda op, kernel: registry.get_kernel(op, kernel).device_code())
    for answer in audits:
        code = code_of(answer["op"], answer["kernel"])
        cuda = "\n".join(text for place, text in code.items() if place.endswith((".cu", ".cuh")))
        for name in {audit["name"] for audit in answer.get("audits", ())}:
            found = any(place.endswith(f".py:{name}") for place in code) or f" {name} (" in cuda
            assert found, f"{label(answer)}: {name}"


def test_memory_bound_kernels_read_and_write_sixteen_bytes_at_once(audits):
    """The default configs of aligned shapes: at least one LDG and one STG for 16 bytes a thread.

    An INT8 tile of 64 elements per thread in 8 loads would be one of 8 bytes each.
    """
    for answer in audits:
        if answer["kernel"] != "triton":  # CUDA's kernels read boxes by TMA
            continue
        if answer["op"] in ("column_sum", "quantize", "dequantize", "transpose", "dropout"):
            (audit,) = answer["audits"]
            per_thread = (
                answer["config"]["tile_m"] * answer["config"]["tile_n"] // (32 * audit["warps"])
            )
            # Vectors of the codes, of the floats if any, and at most two scales and a seed.
            widest = 16 // (4 if answer["op"] == "dequantize" else 1)
            assert audit["instructions"]["LDG"] <= per_thread * 2 // 16 + 3, label(answer)
            assert audit["instructions"]["STG"] <= per_thread * 2 // widest + 3, label(answer)


def test_adamw_reads_and_writes_sixteen_bytes_at_once(audits):
    """Four floats in and three out, of four elements each, and codes four at a time.

    A slice of a block is read again; and beside all that there are four scalars and two scales.
    """
    for answer in audits:
        if (answer["op"], answer["kernel"]) == ("adamw", "triton"):
            (audit,) = answer["audits"]
            config = answer["config"]
            tile = config["tile_m"] * config["tile_n"] // config["slices"]
            vectors = tile // (32 * audit["warps"]) // 4
            again = vectors if config["slices"] > 1 else 0
            assert audit["instructions"]["LDG"] <= 4 * vectors + again + 4, label(answer)
            assert audit["instructions"]["STG"] <= 5 * vectors + 2, label(answer)


def test_cross_entropy_reads_and_writes_sixteen_bytes_at_once(audits):
    """Of BF16: vectors of eight logits, and what a row has beside: target, its logit, lse, dloss.

    Forward has two loads of a tile in its code, the loop's and that of the row's end.
    """
    for answer in audits:
        if answer["op"] == "cross_entropy":
            (audit,) = answer["audits"]
            vectors = answer["config"]["tile_n"] // (32 * audit["warps"]) // 8
            found = audit["instructions"]
            if answer["problem"]["mode"] == "fwd":
                assert found["LDG"] <= 2 * vectors + 2, label(answer)
            else:
                assert (found["LDG"], found["STG"]) == (vectors + 3, vectors), label(answer)


def test_a_kernel_that_is_refused_says_why(audits):
    for answer in audits:
        if "refused" in answer:
            assert answer["refused"], label(answer)


def test_a_program_of_32_warps_can_start():
    """A thread may take 64 registers, as its SM has no more; this tile's would take 127."""
    tile = [f"config.{name}" for name in ("tile_m=256", "tile_n=256", "warps=32")]
    fields = ["m=256", "n=256", "mode=bwd", "rounding=stochastic", "layout=both"]
    done = subprocess.run(
        [sys.executable, "-m", "jetfire.bench.audit", "add", "triton", "90", *fields, *tile],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        check=True,
    )
    assert json.loads(done.stdout)["registers"] == 64


def test_the_interpreter_is_refused():
    """Interpreted Triton kernels have no machine code to audit: one line says so."""
    line = json.dumps(next(spec for spec in specs() if spec["kernel"] == "triton"))
    done = subprocess.run(
        [sys.executable, "-m", "jetfire.bench.audit", "--specs"],
        input=line,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode != 0
    assert "needs a process without TRITON_INTERPRET=1" in done.stderr
