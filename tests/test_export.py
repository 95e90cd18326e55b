"""Exported kernels: complete, refused clearly, and right when launched without the package."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

from jetfire import ops
from jetfire.bench.plan import Case
from jetfire.export import command
from jetfire.ops import profiles, run
from jetfire.ops.errors import JetfireWarning, UsageError

EXPORT = """
import json, sys
from pathlib import Path
from jetfire import ops
from jetfire.export import export
from jetfire.ops.device import target_device
from jetfire.ops.errors import JetfireError
name, fields, capability, folder = json.loads(sys.argv[1])
op, kernel = ops.get(name), ops.get_kernel(name, "triton")
problem = op.Problem.parse(fields)
config = kernel.default(problem, target_device(tuple(capability)))
try:
    print(*export(op, kernel, problem, config, tuple(capability), Path(folder)), sep="\\n")
except JetfireError as error:
    sys.exit(f"{error}")
"""


def run_export(folder, capability=(9, 0), name="quantize", **fields):
    arguments = json.dumps([name, fields, capability, str(folder)])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", EXPORT, arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_writes_code_and_contract(tmp_path):
    done = run_export(tmp_path / "out", m=256, n=512, block=64, layout="both")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "launch.json").read_text())
    (launch,) = manifest["launches"]
    assert (tmp_path / "out" / launch["file"]).read_bytes()[:4] == b"\x7fELF"
    named = {a["tensor"] for a in launch["arguments"] if "tensor" in a}
    assert named == {"x", "q", "scale", "qt", "scale_t"} == set(manifest["tensors"])
    assert manifest["tensors"]["qt"] == {"dtype": "int8", "shape": [512, 256]}
    # Every parameter that the machine code takes is accounted for.
    ptx = next((tmp_path / "out").glob("*.ptx")).read_text()
    parameters = ptx.split(".entry")[1].split(")")[0].count(".param")
    assert parameters == len(launch["arguments"]) + launch["null_pointers"]


def test_refuses_a_folder_with_content(tmp_path):
    (tmp_path / "mine").write_text("keep")
    done = run_export(tmp_path, m=256, n=512)
    assert done.returncode != 0
    assert "expected a new or empty folder" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.gpu
def test_runs_without_the_package(tmp_path, device):
    fields = {"m": 300, "n": 512, "block": 32, "rounding": "stochastic"}
    capability = torch.cuda.get_device_capability(device)
    done = run_export(tmp_path / "out", capability, **fields)
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("load", tmp_path / "out" / "load.py")
    load = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(load)
    op = ops.get("quantize")
    problem = op.Problem.parse(fields)
    inputs = op.inputs(problem, device)
    outputs = op.outputs(problem, inputs)
    addresses = {name: t.data_ptr() for name, t in {**inputs, **outputs}.items()}
    load.Exported(tmp_path / "out").launch(addresses, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    result = op.check(problem, outputs, op.reference(problem, inputs))
    assert result.ok, result.message


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """What is exported, where there is no profile."""
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "user"))
    monkeypatch.delenv(profiles.STRICT, raising=False)
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(run, "_said", set())
    profiles.forget()
    found = []
    monkeypatch.setattr(command, "export", lambda *call: found.append(call) or [])
    yield found
    profiles.forget()


def quantize_case():
    op = ops.get("quantize")
    return Case(op, op.Problem.parse({"m": 256, "n": 512, "block": 64}))


def test_a_config_that_was_not_tuned_is_told_of_once(exported, tmp_path):
    with pytest.warns(JetfireWarning, match=r"no profile for m=256 n=512 .*the default is used"):
        command.run([quantize_case()], "triton", (9, 0), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", JetfireWarning)
        command.run([quantize_case()], "triton", (9, 0), tmp_path)
    assert len(exported) == 2


def test_a_config_that_was_not_tuned_is_an_error_where_profiles_are_strict(
    exported, tmp_path, monkeypatch
):
    monkeypatch.setenv(profiles.STRICT, "1")
    with pytest.raises(UsageError, match=r"no profile for m=256 n=512 .*; tune it: jetfire-tune"):
        command.run([quantize_case()], "triton", (9, 0), tmp_path)
    assert exported == []
