"""CUDA C++ kernels without a GPU: the compile cache, and the machine code of `wgmma`."""

import itertools
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock

from jetfire.bench import audit as audit_command
from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.errors import UsageError
from jetfire.core.machine_code import audits as audits_of
from jetfire.kernels_cuda import compile as compiler
from jetfire.kernels_cuda.compile import CompileError, compile_cubin, header
from jetfire.kernels_cuda.gemm import wgmma
from jetfire.measure.plan import Case


def missing():
    """Why nothing can be compiled here; None where it can."""
    try:
        compiler._nvrtc_version()
    except UsageError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
KERNEL = '#include "config.cuh"\nextern "C" __global__ void f(int* x) { *x = VALUE; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of an empty cache."""
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    return compiler.cache_folder()


@pytest.fixture
def source(tmp_path):
    """A kernel that takes no time to compile."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.cu").write_text(KERNEL)
    return folder / "tiny.cu"


@pytest.fixture
def compiled(monkeypatch):
    """The config of each compilation, as they happen."""
    seen, original = [], compiler._compile

    def record(source, config, architecture):
        seen.append((config, architecture))
        return original(source, config, architecture)

    monkeypatch.setattr(compiler, "_compile", record)
    return seen


def test_the_same_code_is_compiled_once(cache, source, compiled):
    first = compile_cubin(source, header({"VALUE": 1}), "sm_90a")
    assert first.startswith(b"\x7fELF")
    assert compile_cubin(source, header({"VALUE": 1}), "sm_90a") == first
    assert len(compiled) == 1
    assert [file.read_bytes() for file in cache.glob("*.cubin")] == [first]


def test_whatever_the_code_depends_on_is_in_its_key(cache, source, compiled, monkeypatch):
    def count(value=1, architecture="sm_90a"):
        compile_cubin(source, header({"VALUE": value}), architecture)
        return len(compiled), len(list(cache.glob("*.cubin")))

    assert count() == (1, 1)
    assert count(value=2) == (2, 2)
    assert count(architecture="sm_80") == (3, 3)
    source.write_text(KERNEL.replace("VALUE;", "VALUE + 1;"))
    assert count() == (4, 4)
    (source.parent / "new.cuh").write_text("#pragma once\n")
    compiler._sources.cache_clear()
    assert count() == (5, 5)
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--maxrregcount=64"))
    assert count() == (6, 6)
    version = compiler._nvrtc_version()
    monkeypatch.setattr(compiler, "_nvrtc_version", lambda: (*version, "next"))
    assert count() == (7, 7)
    assert count() == (7, 7)


CHILD = """
import sys
from pathlib import Path
from jetfire.kernels_cuda import compile as compiler
original = compiler._compile
def record(*arguments):
    print("compiled", flush=True)
    return original(*arguments)
compiler._compile = record
compiler._nvrtc_version()
print("ready", flush=True)
sys.stdin.readline()
cubin = compiler.compile_cubin(Path(sys.argv[1]), compiler.header({"VALUE": 1}), "sm_90a")
print(len(cubin), cubin[:8].hex(), flush=True)
"""


def start(source):
    """A process that is about to compile, and waits for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_process_waits_for_the_one_that_compiles_and_takes_its_code(cache, source, compiled):
    cubin = compile_cubin(source, header({"VALUE": 1}), "sm_90a")
    [file] = cache.glob("*.cubin")
    file.unlink()
    process = start(source)
    with FileLock(f"{file}.lock"):
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(0.5)
        assert process.poll() is None
        file.write_bytes(cubin + bytes(8))  # as no compiler here would leave it
    out, _ = process.communicate(timeout=60)
    assert out == f"{len(cubin) + 8} {cubin[:8].hex()}\n"


def test_processes_that_want_the_same_code_compile_it_once(cache, source):
    with ThreadPoolExecutor(3) as pool:
        processes = list(pool.map(start, [source] * 3))
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert sorted(len(found) for found in lines) == [1, 1, 2]
    assert len({found[-1] for found in lines}) == 1
    assert [file.suffix for file in cache.iterdir() if file.suffix != ".lock"] == [".cubin"]


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"^cannot \w+ .*file/cubin: Not a directory$"):
        compile_cubin(source, header({"VALUE": 1}), "sm_90a")


def test_a_source_that_does_not_compile_says_where_and_leaves_nothing(cache, source):
    with pytest.raises(CompileError, match=r"tiny.cu for sm_90a does not compile:\n(.|\n)*VALUE"):
        compile_cubin(source, header({}), "sm_90a")
    assert not list(cache.glob("*.cubin"))


def test_without_cupy_one_line_says_what_to_install(cache, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    compiler._nvrtc_version.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"^CUDA kernels need CuPy .*\[cuda\]'$"):
            compile_cubin(source, header({"VALUE": 1}), "sm_90a")
    finally:
        compiler._nvrtc_version.cache_clear()


HOPPER = target_device((9, 0))
OUTPUTS = (
    {"out": "bf16"},
    {"out": "fp32", "accumulate": True, "bias": True},
    {"out": "fp32", "squares": True},
    {"out": "int8"},
    {"out": "int8", "layout": "qt"},
    {"out": "int8", "layout": "both", "rounding": "stochastic", "bias": True},
)
DEFAULT_OUTPUTS = (OUTPUTS[0], OUTPUTS[-1])
# Configs of each block, output and schedule. One costs a second of one core.
PER_KIND = 1


def sample():
    """Problems, configs and paths to memory, dealt from the legal space so that each tile comes."""
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    draw = random.Random(0)
    kinds = list(itertools.product((32, 64, 128), OUTPUTS, ("exact", "telescoped")))
    for at, (block, output, schedule) in enumerate(kinds):
        problem = op.Problem(4096, 4096, 4096, block=block, **output)
        space = kernel.space(problem, HOPPER)
        tiles = list(itertools.product(space["groups"], space["rows"], space["tile_n"]))
        draw.shuffle(tiles)
        found = 0
        for groups, rows, tile_n in tiles:
            for _ in range(200):  # stages and clusters until one fits
                fields = {name: draw.choice(list(values)) for name, values in space.items()}
                fields |= {"groups": groups, "rows": rows, "tile_n": tile_n, "schedule": schedule}
                config = kernel.Config(**fields)
                if kernel.legal(problem, config, HOPPER) is None:
                    wide = (at + found) % 3 != 2  # or memory that the copy engine cannot write
                    yield problem, config, wgmma.TmaOutputs(wide, wide and problem.layout != "q")
                    found += 1
                    break
            if found == PER_KIND:
                break
        assert found, f"{problem}, {schedule}: no legal config"


def machine_code(case):
    return wgmma.program(*case).cubin((9, 0))


def defaults():
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    for block, output in itertools.product((32, 64, 128), DEFAULT_OUTPUTS):
        problem = op.Problem(4096, 4096, 4096, block=block, **output)
        config = kernel.default(problem, HOPPER)
        assert kernel.legal(problem, config, HOPPER) is None, f"{problem}; {config}"
        yield problem, config, wgmma.TmaOutputs(True, problem.layout != "q")


def audited(cases, folder):
    """(problem, config, path) and audit of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETFIRE_CACHE", str(folder))
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            return list(zip(cases, audits_of(list(pool.map(machine_code, cases))), strict=True))


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    return audited(list(sample()), tmp_path_factory.mktemp("cache"))


def label(case):
    problem, config, path = case
    return f"{problem}; {config}; {path}"


def main_loop(sass):
    """The instructions of the shortest loop that multiplies."""
    code, places, loops = sass.splitlines(), {}, []
    for at, line in enumerate(code):
        places[int(re.match(r"\s*/\*([0-9a-f]+)\*/", line)[1], 16)] = at
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", line)
        if target and int(target[1], 16) in places:  # it branches back
            loops.append(code[places[int(target[1], 16)] : at + 1])
    return min((loop for loop in loops if "IGMMA" in "".join(loop)), key=len)


def spilled(audits, least=0):
    """A line for each that spills: all its local loads and stores, and those of the main loop.

    Up to `least` of a tile, two of them in the main loop, pass where TMA cannot write; up to five,
    none in the main loop, where the sums of other blocks meet transposed codes at a tile's end.
    """
    lines = []
    for case, found in audits:
        inside = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in main_loop(found.sass))
        accepted = 0 if case[2] is None or case[2].out else least
        if case[1].stream and case[0].layout != "q" and inside == 0:
            accepted = max(accepted, 5)
        if inside > min(accepted, 2) or found.spills > accepted:
            lines.append(f"{found.spills} spills, {inside} in the main loop: {label(case)}")
    return "\n".join(lines)


def test_wgmma_multiplies_on_the_tensor_cores(audits):
    for (problem, config, path), found in audits:
        issued = sum("IGMMA" in line for line in main_loop(found.sass))
        assert issued == 4 * config.rows, label((problem, config, path))


def test_wgmma_spills_nothing_anywhere_in_its_space(audits):
    assert not spilled(audits, least=64)


def test_wgmma_defaults_spill_nothing(tmp_path):
    assert not spilled(audited(list(defaults()), tmp_path))


def test_wgmma_fits_an_sm(audits):
    for case, found in audits:
        threads = 32 * found.warps
        consumer, producer = wgmma.REGISTERS[case[1].groups]
        assert found.shared_bytes <= HOPPER.shared_bytes, label(case)
        assert found.registers * threads <= 65536, label(case)
        # setmaxnreg deals what the warps have at launch, in eights.
        assert consumer % 8 == producer % 8 == 0, label(case)
        held = 128 * (case[1].groups * consumer + producer)
        assert held <= found.registers // 8 * 8 * threads, label(case)


def test_shared_memory_that_is_counted_otherwise_does_not_compile(cache, monkeypatch):
    problem = registry.get("gemm").Problem(4096, 4096, 4096, block=128)
    config = wgmma.WgmmaConfig(groups=2, tile_n=64, stages=3, schedule="exact")
    counted = wgmma.shared_bytes(problem, config)
    monkeypatch.setattr(wgmma, "shared_bytes", lambda *_: counted + 16)
    with pytest.raises(CompileError, match="counts shared memory otherwise"):
        registry.get_kernel("gemm", "wgmma").cubins(problem, config, (9, 0))


def test_audit_shows_cuda_kernels(capsys):
    op = registry.get("gemm")
    audit_command.run([Case(op, op.Problem(4096, 4096, 4096, block=128))], ["wgmma"], [HOPPER])
    rows = [line for line in capsys.readouterr().out.splitlines() if "wgmma" in line]
    assert len(rows) == 2  # of the two launches of the default's large clusters
    for row in rows:
        assert "IGMMA" in row
        assert "sm_90" in row


def test_every_source_is_part_of_what_a_profile_was_tuned_for():
    """A file that no kernel's hash covers could change under its profiles unseen."""
    for file in sorted(compiler.ROOT.glob("*/*.cu")):
        kernels = registry.kernels(file.parent.name).values()
        assert any(str(file) in kernel.device_code() for kernel in kernels), file
