"""Exports for PyTorch: complete, readable, built from a clean folder, traced without a GPU."""

import ast
import base64
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.cpp_extension import include_paths

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.errors import UsageError
from jetfire.export import plan as plans
from jetfire.export import samples, targets
from jetfire.export.folder import implement
from jetfire.export.library import Library, parameters, with_header
from jetfire.export.manifest import version
from jetfire.export.signature import signature_of
from jetfire.export.target import cuda_home, run
from jetfire.export.targets import operators
from jetfire.measure.plan import Case

SM90 = target_device((9, 0))
# One of each kind: sizes read off shapes, off none, updated tensors, many of them, one output.
PROBLEMS = {
    "gemm": {"m": 4096, "n": 4096, "k": 4096, "block": 128},
    "quantize": {"m": 8192, "n": 4096, "block": 32},
    "adamw": {"m": 2304, "n": 768, "block": 32, "layout": "both"},
    "dropout": {"m": 1024, "n": 1024, "block": 32},
    "column_sum": {"m": 8192, "n": 768, "block": 32},
    "int4_gemm": {
        "m": 768,
        "n": 768,
        "k": 9344,
        "operands": "wide",
        "product": "wgrad",
        "out": "fp32",
    },
}
SCHEMAS = {
    "gemm": "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> Tensor",
    "quantize": "(Tensor x) -> (Tensor, Tensor)",
    "adamw": "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor rate, Tensor step) -> (Tensor, Tensor, Tensor, Tensor)",
    "dropout": "(Tensor q, Tensor scale, Tensor seed) -> (Tensor, Tensor)",
    "column_sum": "(Tensor qt, Tensor scale_t) -> Tensor",
}
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def _has_headers():
    try:
        return cuda_home().is_dir()
    except UsageError:
        return False


needs_headers = pytest.mark.skipif(not _has_headers(), reason="needs CUDA's headers")
needs_compilers = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("c++")), reason="needs C and C++ compilers"
)


def plan_of(op_name, name=None, **fields):
    op = registry.get(op_name)
    problem = op.Problem(**(fields or PROBLEMS[op_name]))
    return plans.make([Case(op, problem)], None, SM90, name)


def hand_made(plan, *, cuda=False, workspace=False):
    """A library that can only fail: for what stands around one."""
    name, contract = plan.name, ("All addresses are multiples of 16.", "Blocks are square.")
    sizes = ", ".join(f"int {dim}" for dim in plan.signature.dims)
    code = f'#include "{name}.h"\n'
    code += "#include <cuda_runtime.h>\n" if cuda else "#include <cuda.h>\n"
    arguments = ", ".join(parameters(plan, workspace=workspace))
    failing = "cudaFree(nullptr) ? 4 : 3" if cuda else "4"
    code += f"int {name}({arguments}) {{ return {failing}; }}\n"
    code += f'const char* {name}_error(int code) {{ return code == 4 ? "no CUDA" : "made up"; }}\n'
    if workspace:
        code += f"size_t {name}_workspace_bytes({sizes}) {{ return 64; }}\n"
    file = f"{name}.{'cu' if cuda else 'c'}"
    made = Library(
        files={file: code.encode()},
        cuda_sources=(file,) if cuda else (),
        c_sources=() if cuda else (file,),
        architecture="90a",
        workspace=workspace,
        any_size=cuda,
        contract=contract,
    )
    return with_header(plan, made)


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", SCHEMAS)
def test_operators_take_inputs_in_order_and_return_what_they_allocate(name):
    op = registry.get(name)
    assert signature_of(op, op.Problem(**PROBLEMS[name])).schema == SCHEMAS[name]


def test_a_size_that_no_shape_shows_is_an_argument():
    op = registry.get("int4_gemm")
    signature = signature_of(op, op.Problem(m=768, n=768, k=4096))
    assert signature.dim_from("k") is None
    assert signature.schema.endswith(", SymInt k) -> Tensor")


@pytest.mark.parametrize("target", ["torch", "wheel", "hf"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_written_reads_well_and_stands_alone(name, target, shipped):
    plan = plan_of(name)
    library = hand_made(plan, cuda=name == "gemm", workspace=name in ("gemm", "adamw"))
    files = targets.get(target).files(plan, library, samples.record(plan))
    for file, content in files.items():
        if file.endswith(".bin") or content in library.files.values():
            continue
        text = content.decode()
        assert not re.search(r"^\s*(?:import|from) jetfire\b(?!_)", text, re.MULTILINE), file
        if file.endswith((".py", ".cpp", ".h")):
            long = [line for line in text.splitlines() if len(line) > 100]
            assert not long, (file, long)
            assert not re.search(r"[ \t]$|\n\n\n\n|\A\n|\n\n\Z", text, re.MULTILINE), file
        if file.endswith(".py"):
            ast.parse(text, file)
        if file.endswith(".toml"):
            tomllib.loads(text)
    recorded = {file for file in files if file.endswith(".bin")}
    written = sum(p.role != "input" for p in plan.signature.parameters)
    read = sum(p.role != "output" for p in plan.signature.parameters)
    assert len(recorded) == written + read


def test_hugging_face_names_are_checked(shipped):
    plan = plan_of("quantize", "Quantize_")
    with pytest.raises(UsageError, match="--name Quantize_: for hf, expected a letter or digit"):
        targets.get("hf").files(plan, hand_made(plan), samples.record(plan))


def traced(function, *given, **dynamic):
    """The shapes that a function's results have when traced, as text."""

    class Module(torch.nn.Module):
        def forward(self, *given):
            return function(*given)

    program = torch.export.export(Module(), given, dynamic_shapes=dynamic or None)
    (call,) = (
        node
        for node in program.graph.nodes
        if node.op == "call_function" and "getitem" not in str(node.target)
    )
    return call


@needs_headers
@needs_compilers
def test_torch_is_built_and_traced(shipped, tmp_path, monkeypatch):
    """As its README says, of compiled code; all in one test, since it takes half a minute."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    plan = plan_of("quantize", "quantize_torch")
    target = targets.get("torch")
    library = implement(plan, "torch")
    assert library.c_sources
    assert not library.cuda_sources
    write(tmp_path, target.files(plan, library, samples.record(plan)))
    target.build(plan, tmp_path)
    call = target.call(plan, tmp_path)
    module = sys.modules["quantize_torch"]
    schema = torch.ops.quantize_torch.quantize_torch.default._schema
    assert str(schema) == f"quantize_torch::quantize_torch{SCHEMAS['quantize']}"

    with FakeTensorMode():
        q, scale = module.quantize_torch(torch.empty(100, 200, dtype=torch.bfloat16))
    assert (q.shape, q.dtype) == ((100, 200), torch.int8)
    assert (scale.shape, scale.dtype) == ((4, 7), torch.float32)

    with FakeTensorMode():
        found = module.quantize_torch(torch.empty(0, 200, dtype=torch.bfloat16))
    assert [tuple(t.shape) for t in found] == [(0, 200), (0, 7)]

    x = torch.zeros(96, 160, dtype=torch.bfloat16)
    rows = torch.export.Dim("rows", min=64)
    node = traced(module.quantize_torch, x, given=({0: rows},))
    q, scale = node.meta["val"]
    assert str(scale.shape[0]) == f"(({q.shape[0]} + 31)//32)"

    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        call(plan.problem, {"x": x}, {})

    from quantize_torch import development

    q, scale = torch.zeros(96, 160, dtype=torch.int8), torch.zeros(3, 5)
    wrong = {
        r"quantize_torch: x: expected a CUDA tensor, given one that is none": (x, q, scale),
        r"quantize_torch: x: expected 2 dimensions, given a shape of \(15360\)": (
            x.flatten(),
            q,
            scale,
        ),
        r"x: expected bfloat16, given float32": (x.float(), q, scale),
        r"x: expected a contiguous tensor, given strides of \(1, 96\)": (
            x.T.contiguous().T,
            q,
            scale,
        ),
    }
    for message, given in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            development.quantize_torch(*given)


# Shapes of what a call returns, and how often the C function was called by then.
EMPTY = """
#include <cstdio>
#include "operator.cpp"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
extern "C" AOTITorchError torch_cuda_stream_synchronize(void*, int32_t) { return 0; }

static int calls;
extern "C" const char* NAME_error(int) { return "an error"; }
extern "C" int NAME(const uint16_t*, int8_t*, float*, int, int, CUstream_st*) {
  calls++;
  return 0;
}

int main() {
  for (const int64_t rows : {0, 64})
    for (const int64_t columns : {96, 0}) {
      const auto [q, scale] = Kernel::run(Tensor{{rows, columns}, ScalarType::BFloat16});
      printf("%s %s %d\\n", text_of(q.shape).c_str(), text_of(scale.shape).c_str(), calls);
    }
}
"""


@needs_compilers
def test_an_empty_batch_gives_an_empty_result_without_a_launch(shipped, tmp_path):
    """In C++ as in the fake: with shapes in place of tensors, since there is no GPU."""
    plan = plan_of("quantize", "empty")
    write(tmp_path, targets.get("torch").files(plan, hand_made(plan), samples.record(plan)))
    fake = tmp_path / "fake" / "torch" / "csrc" / "stable"
    fake.mkdir(parents=True)
    stable = Path(__file__).parent / "fakes" / "stable.h"
    for name in ("accelerator", "library", "ops", "tensor"):
        (fake / f"{name}.h").write_text(f'#include "{stable}"\n')
    (tmp_path / "csrc" / "empty.cpp").write_text(re.sub(r"NAME(?=[(_])", "empty", EMPTY))
    includes = [f"-I{folder}" for folder in (tmp_path / "fake", *include_paths())]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    command = ["c++", "-std=c++17", *warnings, *includes, "empty.cpp", "-o", "run", "-ldl"]
    subprocess.run(command, cwd=tmp_path / "csrc", check=True)
    found = subprocess.run([tmp_path / "csrc" / "run"], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        "(0, 96) (0, 3) 0",
        "(0, 0) (0, 0) 0",
        "(64, 96) (2, 3) 1",
        "(64, 0) (2, 0) 1",
    ]


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_exports_of_other_configs_have_other_versions(shipped):
    found = {}
    for k in (4096, 256):
        plan = plan_of("gemm", m=4096, n=4096, k=k, block=128)
        library, sample = implement(plan, "wheel"), samples.record(plan)
        for name in ("torch", "wheel", "hf"):
            files = targets.get(name).files(plan, library, sample)
            (manifest,) = (json.loads(files[f]) for f in files if f.endswith("manifest.json"))
            found.setdefault(plan.configs, set()).add(manifest["version"])
        project = targets.get("wheel").files(plan, library, sample)["pyproject.toml"].decode()
        found[plan.configs].add(tomllib.loads(project)["project"]["version"])
    one, other = found.values()
    assert len(one) == len(other) == 1
    assert one != other


BARE_MODULE = """\
#include <Python.h>

PyMODINIT_FUNC PyInit_development(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "development", nullptr, 0, nullptr};
  return PyModule_Create(&definition);
}
"""


@needs_nvcc
@needs_compilers
def test_torch_is_built_of_cuda_sources(shipped, tmp_path):
    """With nvcc, and CUDA's runtime linked in; the binding, which takes longest to compile and is
    no other than that of compiled code, is left empty."""
    plan = plan_of("gemm", "gemm_torch")
    target = targets.get("torch")
    library = hand_made(plan, cuda=True, workspace=True)
    write(tmp_path, target.files(plan, library, samples.record(plan)))
    (tmp_path / "csrc" / "pybind.cpp").write_text(BARE_MODULE)
    run([sys.executable, "setup.py", "build_ext", "--inplace"], tmp_path, operators.environment())
    target.call(plan, tmp_path)
    check_dependencies(tmp_path / "gemm_torch" / "_C.so")
    schema = torch.ops.gemm_torch.gemm_torch.default._schema
    assert str(schema) == f"gemm_torch::gemm_torch{SCHEMAS['gemm']}"


@pytest.fixture(scope="module")
def three_sizes():
    op = registry.get("gemm")
    return [Case(op, op.Problem(m=s, n=s, k=s, block=128)) for s in (1024, 2048, 4096)]


def test_the_wheels_table_is_the_compiled_one(three_sizes, shipped):
    plan = plans.make(three_sizes, "wgmma", SM90, None)
    files = targets.get("wheel").files(plan, implement(plan, "wheel"), samples.record(plan))
    entries = json.loads(files["jetfire_gemm/profile.json"])["entries"]
    code = files["csrc/jetfire_gemm.cu"].decode()
    # Of a config that streams there follows the function that says how large a workspace is.
    rows = re.findall(r"^ +\{(\d+), (\d+), (\d+), (\w+)[,}]", code, re.MULTILINE)
    assert [tuple(map(int, row[:3])) for row in rows] == [
        tuple(entry["problem"][dim] for dim in "mnk") for entry in entries
    ]
    for one in range(len(rows)):
        for other in range(one):
            same = entries[one]["config"] == entries[other]["config"]
            assert (rows[one][3] == rows[other][3]) == same
    for row in rows:
        assert f"csrc/{row[3]}.cu" in files


@needs_headers
@needs_compilers
def test_a_wheel_is_built_and_imported_away_from_its_sources(shipped, tmp_path):
    plan = plan_of("adamw", "adamw_wheel")
    target = targets.get("wheel")
    library = hand_made(plan, workspace=True)
    write(tmp_path, target.files(plan, library, samples.record(plan)))
    target.build(plan, tmp_path)
    (product,) = target.products(tmp_path)
    system = f"linux_{platform.machine()}"
    assert str(product) == f"dist/adamw_wheel-{version(library)}-py3-none-{system}.whl"
    names = set(zipfile.ZipFile(tmp_path / product).namelist())
    assert {"__init__.py", "_C.so", "profile.json", "selftest.py", "benchmark.py"} <= {
        name.removeprefix("adamw_wheel/") for name in names
    }
    assert not any("csrc" in name or name.endswith((".cpp", ".o")) for name in names)

    target.call(plan, tmp_path)
    module = sys.modules["adamw_wheel"]
    assert module.profile() == json.loads(json.dumps(plan.provenance()))
    schema = torch.ops.adamw_wheel.adamw_wheel.default._schema
    assert [a.alias_info.is_write for a in schema.arguments if a.alias_info] == [True] * 3
    with FakeTensorMode():
        m = [torch.empty(64, 96) for _ in range(4)]
        found = module.adamw_wheel(*m, torch.empty(1), torch.empty(1))
    assert [tuple(t.shape) for t in found] == [(64, 96), (2, 3), (96, 64), (3, 2)]


def load_as_kernels_does(variant):
    """By the package's documented rules: `metadata.json` names a module that nothing else has."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    return name, operators.imported(name, variant / "__init__.py")


@needs_nvcc
@needs_compilers
def test_a_hugging_face_variant_is_built_and_loads(shipped, tmp_path):
    plan = plan_of("gemm", "Gemm_hub")
    target = targets.get("hf")
    library = hand_made(plan, cuda=True, workspace=True)
    write(tmp_path, target.files(plan, library, samples.record(plan)))
    target.build(plan, tmp_path)
    (product,) = target.products(tmp_path)
    assert re.fullmatch(
        rf"build/torch-stable-abi211-cu\d+-{platform.machine()}-linux", str(product)
    )
    variant = tmp_path / product
    metadata = json.loads((variant / "metadata.json").read_text())
    build = tomllib.loads((tmp_path / "build.toml").read_text())
    check_metadata(metadata, build["general"], variant)
    check_build(build, tmp_path)
    (binary,) = variant.glob("*.so")
    assert binary.name == f"{metadata['id']}.abi3.so"
    check_dependencies(binary)

    name, module = load_as_kernels_does(variant)
    assert module.__all__ == ["Gemm_hub"]
    a, b = torch.zeros(256, 384, dtype=torch.int8), torch.zeros(128, 384, dtype=torch.int8)
    node = traced(module.Gemm_hub, a, torch.zeros(2, 3), b, torch.zeros(1, 3))
    assert str(node.target) == f"{name}.Gemm_hub.default"
    assert (node.meta["val"].shape, node.meta["val"].dtype) == ((256, 128), torch.bfloat16)
    # Older versions of the package look one folder down.
    older = operators.imported("older", variant / "gemm_hub" / "__init__.py")
    assert older.Gemm_hub is module.Gemm_hub


def check_metadata(metadata, general, variant):
    assert metadata["name"] == general["name"] == "gemm-hub"
    assert re.fullmatch(r"_gemm_hub_cuda_[0-9a-f]{7}", metadata["id"])
    assert metadata["version"] == general["version"]
    assert metadata["license"] == general["license"] == "mit"
    assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    assert metadata["python-depends"] == []
    assert metadata["digest"]["algorithm"] == "sha256"
    files = {
        str(file.relative_to(variant)): base64.b64encode(
            hashlib.sha256(file.read_bytes()).digest()
        ).decode()
        for file in variant.rglob("*")
        if file.is_file() and file.name != "metadata.json" and file.suffix != ".pyc"
    }
    assert metadata["digest"]["files"] == files


def check_build(build, folder):
    """The keys of kernel-builder's fifth edition, which refuses others."""
    assert build["general"].keys() == {"name", "version", "edition", "license", "backends"}
    assert (build["general"]["edition"], build["general"]["backends"]) == (5, ["cuda"])
    assert build["torch"].keys() == {"src", "include", "pyext", "stable-abi"}
    assert build["torch"]["stable-abi"] == {"cuda": operators.TORCH}
    (kernel,) = build["kernel"].values()
    assert kernel.keys() <= {
        "backend",
        "cuda-capabilities",
        "cxx-flags",
        "depends",
        "include",
        "src",
    }
    assert (kernel["backend"], kernel["depends"]) == ("cuda", ["torch"])
    for file in (*build["torch"]["src"], *kernel["src"]):
        assert (folder / file).is_file()
        # Its CMake project has C++ and CUDA alone.
        assert file.endswith((".cpp", ".cu", ".h"))
    package = folder / "torch-ext" / build["general"]["name"].replace("-", "_")
    text = (package / "__init__.py").read_text()
    assert "from ._ops import add_op_namespace_prefix, ops\n" in text
    assert re.findall(r"register_fake\((.+?)\(", text) == ["add_op_namespace_prefix"]


def check_dependencies(binary):
    """Of libraries PyTorch's alone, and no symbol of CUDA's runtime for others to find."""
    listed = subprocess.run(["readelf", "-dW", binary], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", listed.stdout))
    system = {
        "libc",
        "libm",
        "libdl",
        "librt",
        "libpthread",
        "libstdc++",
        "libgcc_s",
        "ld-linux-x86-64",
    }
    assert needed - system == {"libtorch"}
    symbols = subprocess.run(["nm", "-D", binary], capture_output=True, text=True, check=True)
    assert not re.search(r" \w cuda\w+$", symbols.stdout, re.MULTILINE)
    assert re.search(r" w aoti_torch_get_current_cuda_stream$", symbols.stdout, re.MULTILINE)
