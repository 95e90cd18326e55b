"""Self-test on recorded tensors: exit code 0 where all is well; needs the GPU that it is for."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
SAMPLES = HERE / "samples"
Function = Callable[..., Any]


def load_variant() -> Any:
    """The module of the variant in build/, as the package `kernels` loads it, or as it would."""
    if importlib.util.find_spec("kernels") is not None:
        from kernels import get_local_kernel

        return get_local_kernel(HERE)
    (metadata,) = HERE.glob("build/*/metadata.json")
    name = json.loads(metadata.read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, metadata.with_name("__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_package() -> Any:
    """The package: that of which this is a part, a built variant's, or the one beside this."""
    if __package__:
        return importlib.import_module(__package__)
    if (HERE / "torch-ext").is_dir():
        return load_variant()
    (manifest,) = HERE.glob("*/manifest.json")
    return importlib.import_module(manifest.parent.name)


package = load_package()
MANIFEST: dict[str, Any] = package._MANIFEST
NAME: str = MANIFEST["name"]
function: Function = getattr(package, NAME)
TENSORS: dict[str, dict[str, Any]] = {t["name"]: t for t in MANIFEST["tensors"]}
INPUTS = [name for name, t in TENSORS.items() if t["role"] != "output"]  # in the operator's order
UPDATED = [name for name, t in TENSORS.items() if t["role"] == "updated"]
RETURNED = [name for name, t in TENSORS.items() if t["role"] == "output"]
SIZES: dict[str, int] = dict(zip(MANIFEST["sizes"], MANIFEST["recorded"], strict=True))
NUMBERS = [SIZES[name] for name in MANIFEST["numbers"]]  # that no shape shows


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, TENSORS[name]["dtype"])
    return found


def load(name: str, prefix: str = "") -> torch.Tensor:
    """A recorded tensor."""
    content = bytearray((SAMPLES / f"{prefix}{name}.bin").read_bytes())
    shape = package._shape(TENSORS[name], dict(enumerate(MANIFEST["recorded"])))
    return torch.frombuffer(content, dtype=dtype_of(name)).reshape(shape).cuda()


def arguments() -> list[Any]:
    """Return the arguments of one call, which may update them: no other call gets the same."""
    return [*map(load, INPUTS), *NUMBERS]


def results(given: list[Any], returned: Any) -> dict[str, torch.Tensor]:
    """What a call wrote, by name."""
    if isinstance(returned, torch.Tensor):
        returned = (returned,)
    updated = {name: given[INPUTS.index(name)] for name in UPDATED}
    return updated | dict(zip(RETURNED, returned or (), strict=True))


def run(called: Function) -> dict[str, torch.Tensor]:
    given = arguments()
    return results(given, called(*given))


def written(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that a call must write."""
    return tensor[tuple(slice(size) for size in TENSORS[name]["written"])].contiguous()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def check_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in (*UPDATED, *RETURNED):
        got, want = (bits(written(name, each[name])) for each in (found, expected))
        assert torch.equal(got, want), f"{name}: other bits"


@cache
def reference() -> dict[str, torch.Tensor]:
    """A first run's results, which others must repeat."""
    return run(function)


def test_recorded() -> None:
    for name in (*UPDATED, *RETURNED):
        tolerance = TENSORS[name]["tolerance"]
        want = written(name, load(name, "expected_"))
        got = written(name, reference()[name])
        if tolerance == 0:
            wrong = (bits(got) != bits(want)).reshape(-1, dtype_of(name).itemsize).any(1)
            assert not wrong.any(), f"{name}: {wrong.sum()} of {wrong.numel()} elements differ"
            continue
        same = (got == want) | (got.isnan() & want.isnan())
        if not same.all():
            difference = torch.where(same, 0, got.double() - want.double()).norm()
            error = (difference / want.double().nan_to_num(0, 0, 0).norm()).item()
            assert error <= tolerance, f"{name}: error {error:.1e}, at most {tolerance:.1e}"


def test_repeats() -> None:
    check_same_bits(run(function), reference())


def test_opcheck() -> None:
    torch.library.opcheck(getattr(package.ops, NAME).default, tuple(arguments()))


def test_compile() -> None:
    backend = "inductor" if importlib.util.find_spec("triton") else "aot_eager"
    compiled = torch.compile(lambda *given: function(*given), fullgraph=True, backend=backend)
    check_same_bits(run(compiled), reference())


def test_graph() -> None:
    reference()
    given, fresh = arguments(), arguments()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(given, function(*given))
    for _ in range(2):
        for index in range(len(INPUTS)):
            given[index].copy_(fresh[index])
        for name in RETURNED:
            bits(found[name]).fill_(0xFF)
        graph.replay()
        check_same_bits(found, reference())


def refusal(given: list[Any]) -> str:
    """What is said of arguments; empty where they are taken."""
    try:
        function(*given)
    except RuntimeError as error:
        return str(error)
    return ""


def test_refuses() -> None:
    for index, name in enumerate(INPUTS):
        tensor = arguments()[index]
        moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
        wrong = {
            "expected a contiguous tensor": torch.stack([tensor, tensor], -1)[..., 0],
            "expected an address": moved.reshape(tensor.shape).copy_(tensor),
            "dimensions|expected a shape": tensor.unsqueeze(0),
            f"expected {TENSORS[name]['dtype']}": tensor.double(),
        }
        for message, bad in wrong.items():
            if tensor.numel() == 1 and "contiguous" in message:
                continue  # a tensor of one element always is
            given = arguments()
            given[index] = bad
            said = refusal(given)
            assert f"{NAME}: {name}: " in said, f"{said!r}, where it should say {message!r}"
            assert any(part in said for part in message.split("|")), said


def test_development() -> None:
    """The binding for development builds does the same."""
    development = importlib.import_module(f"{NAME}.development")
    given = arguments()
    found = {name: torch.empty_like(reference()[name]) for name in RETURNED}
    for name in RETURNED:
        bits(found[name]).fill_(0xFF)
    scratch = []
    if MANIFEST["workspace"]:
        size = development.workspace_bytes(*MANIFEST["recorded"])
        scratch = [torch.zeros(size, dtype=torch.uint8, device="cuda")]
    stream = torch.cuda.current_stream().cuda_stream
    tensors = [*given[: len(INPUTS)], *(found[name] for name in RETURNED)]
    getattr(development, NAME)(*tensors, *NUMBERS, *scratch, stream=stream)
    check_same_bits(results(given, tuple(found.values())), reference())


CHECKS: list[Callable[[], None]] = [
    test_recorded,
    test_repeats,
    test_opcheck,
    test_compile,
    test_graph,
    test_refuses,
]
if (HERE / "csrc" / "pybind.cpp").exists():
    CHECKS.append(test_development)


def main() -> int:
    """Run all; 1 where one failed."""
    failed = 0
    for check in CHECKS:
        try:
            check()
        except Exception as error:
            failed += 1
            print(f"{check.__name__}: FAILED: {type(error).__name__}: {error}")
        else:
            print(f"{check.__name__}: ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
