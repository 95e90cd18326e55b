"""What a command loads before it says no, and what completes it: never torch, which takes 2 s."""

import dataclasses
import inspect
import json
import pkgutil
import subprocess
import sys
from inspect import isfunction
from pathlib import Path

import pytest

from jetfire.cli import execute
from jetfire.commands import options
from jetfire.commands.completion import SCRIPTS
from jetfire.core import registry

HEAVY = ("torch", "triton", "optuna", "matplotlib", "cupy", "hypothesis", "transformers")
# What is refused with torch unloaded: words, and what is said.
REFUSED = {
    "bench gemm --m x": "--m x: expected a size",
    "bench gemm --m 64 --kernel nope": "no kernel 'nope': expected one of int_mm",
    "bench gemm --m 64 --peer nope": "no peer 'nope'",
    "bench gemm --m 64 --data nope": "--data nope",
    "bench gemm --m 64 --device tpu": "device 'tpu'",
    "bench gemm --set out=int7": "out=int7",
    "bench gemm --block 33": "block=33",
    "bench gemm --mode up": "--mode up",
    "bench gemm --workload nope": "no workload 'nope'",
    "bench gemm --config tile_m": "--config tile_m",
    "bench gemm --plot x.bmp": "--plot x.bmp",
    "bench gemm --rounds 0": "--rounds 0",
    "bench --suite nope": "--suite nope",
    "bench gemm --profile nope": "--profile nope: expected ncu",
    "bench gemm --m 64 --profile-run -o x.json": "--profile-run: nothing is timed: leave out -o",
    "compare nope.json nope.json": "nope.json: No such file",
    "history nope.json": "nope.json: No such file",
    "history nope.json --format xml": "--format xml: expected one of table, json, csv, md",
    "history nope.json --report x.pdf": "--report x.pdf: expected a file named .html",
    "history nope.json --fail-on-regression 5": "--fail-on-regression 5: expected a share",
    "tune gemm --m x": "--m x",
    "tune gemm --kernel nope": "no kernel 'nope'",
    "tune gemm --strategy nope": "--strategy nope",
    "tune gemm --objective nope": "--objective nope",
    "tune gemm --effort nope": "--effort nope",
    "tune gemm --unseen 3 --profile ncu": "--profile ncu: expected no --unseen",
    "tune gemm --trials 0": "--trials 0",
    "tune gemm --budget soon": "--budget soon",
    "tune gemm --report x.pdf": "--report x.pdf: expected a file named .html",
    "tune gemm --record x.zip": "--record x.zip: expected a file named .json or .json.gz",
    "tune gemm -o x.json": "-o x.json: expected --unseen N",
    "tune gemm --max-noise 0 --dry-run": "--max-noise 0: expected a share above 0",
    "tune gemm --storage foo://x --dry-run": "cannot open --storage foo://x: ",
    "tune --unseen 0": "--unseen 0",
    "tune --all --m 64": "--all: only OP and --block narrow",
    "tune show gmem": "no op 'gmem' (did you mean gemm?)",
    "tune show gemm --kernel nope": "no kernel 'nope'",
    "tune shwo": "no op or verb 'shwo' (did you mean show?)",
    "fuzz --examples 0": "--examples 0: expected at least 1",
    "fuzz gelu --kernel nope": "no kernel 'nope'",
    "fuzz gelu --against nope": "no kernel 'nope'",
    "fuzz nope": "no op 'nope'",
    "fuzz --sanitizer memchek": "--sanitizer memchek (did you mean memcheck?)",
    "fuzz --format xml": "--format xml",
    "fuzz --device tpu": "device 'tpu'",
    "export gemm": "export: expected -o DIR",
    "export gemm -o new --target nope": "--target nope",
    "export gemm -o new --name printf": "--name printf: the C library",
    "export gemm -o new --arch hopper": "--arch hopper",
    "export gemm -o new --kernel nope": "no kernel 'nope'",
    "export gemm -o / --m 64": "-o /: expected a new or empty folder",
    "train tiney": "no preset 'tiney' (did you mean tiny?)",
    "train smaple run": "no preset or verb 'smaple' (did you mean sample?)",
    "train tiny --set nope=1": "no setting 'nope'",
    "train tiny --recipe nope": "no recipe 'nope'",
    "train tiny --recipe int4-hq --set width=48,heads=2": "width=48: group=32",
    "train tiny --set parallel=ddp": "parallel=ddp: expected to be started by torchrun",
    "train tiny --set graph=true,parallel=fsdp": "parallel=fsdp: expected to be started by",
    "train tiny --sample -5": "--sample -5: expected at least 0",
    "train tiny --data /none": "no such file, folder or corpus",
    "train tiny --init /none": "--init /none: no such folder",
    "train tiny --device tpu": "device 'tpu'",
    "train --resume": "--resume: expected -o RUN",
    "train --resume -o /none": "--resume: /none holds no run",
    "train sample /none": "/none: expected a run with a checkpoint",
    "train sample . --tokens 0": "--tokens 0",
    "train sample . --temperature -1": "--temperature -1: expected 0 or a positive number",
    "train export /none -o new": "/none: expected a run with a checkpoint",
    "train plot /none -o x.bmp": "-o x.bmp",
    "train prepare /none": "/none: no such file, folder or corpus",
    "train bench nope": "no case 'nope'",
    "train bench tiny --recipe nope": "--recipe nope",
    "train bench tiny --peer nope": "--peer nope",
    "train bench tiny --set layer=1": "--set layer=1",
    "train bench hf:gpt2-35m": "no model 'hf:gpt2-35m' (did you mean hf:gpt2-350m?)",
    "train bench hf:gpt2-350m --set run=graphs": "--set run=graphs (did you mean graph?)",
    "train bench hf:gpt2-350m --set layer=1": "--set layer=1 (did you mean layers?)",
    "train bench hf:gpt2-350m --peer nope": "--peer nope: expected one of eager, compile, reduce",
    "train bench hf:gpt2-350m --recipe nope": "--recipe nope",
    "train bench none.json": "none.json: No such file",
    "train bench hf:gpt2-350m --set parallel=ddp": "--set parallel=ddp: expected fsdp",
    "train bench a:b --set batch=2": "--set batch=2: a:b has its own sizes: expected run or paral",
    "train study nope -o new": "no preset 'nope'",
    "train study tiny -o new --recipe nope": "--recipe nope: expected one of bf16, int8, int8-bl",
    "train study tiny -o new --set seed=1": "--set seed=…: expected --seed",
    "train study tiny -o new --window 9": "--window 9: expected FIRST:LAST",
    "train study tiny -o new --base nope": "--base nope",
    "train plan nope": "no preset 'nope'",
    "train plan tiny --memory x": "--memory x: expected a size such as 141GiB",
    "train plan tiny --set compile=true": "compile=true: what torch.compile keeps",
    "train tune nope": "no case 'nope'",
    "train tune tiny --recipe bf16": "--recipe bf16",
    "advise nope": "no model 'nope': expected one of hf:gpt2-124m",
    "advise gpt2-350": "no model 'gpt2-350' (did you mean gpt2-350m?)",
    "advise tiny --recipe int4-hq": "--recipe int4-hq: expected int8-block32 or int8-block64 or",
    "advise tiny --set batch=0": "--set batch=0: expected an integer of at least 1",
    "advise tiny --format md": "--format md: expected table or json or csv",
    "advise tiny --least-sqnr x": "--least-sqnr x: expected 0 or a positive number",
    "advise tiny --data /none": "--data /none: expected a folder that jetfire train prepare",
    "advise tiny --device tpu": "device 'tpu'",
    "new gelu": "new gelu: there is such an op already",
    "audit gemm --arch 75": "architecture sm_75",
    "audit gemm --kernel nope": "no kernel 'nope'",
    "audit gemm --m x": "--m x",
    "completion tcsh": "no completion for the shell 'tcsh'",
    "report nope.json": "nope.json: No such file",
    "report nope.json --chek": "no option --chek (did you mean --check?)",
    "frob": "no command 'frob'",
}
# A process for all: what one command loaded all the later ones would show.
RUN = """
import contextlib, io, json, sys
from jetfire.cli import execute

said = {}
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = execute(None, words.split())
    said[words] = code, errors.getvalue(), [name for name in HEAVY if name in sys.modules]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    code = RUN.replace("HEAVY", repr(HEAVY))
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(REFUSED)),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path_factory.mktemp("here"),
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", REFUSED)
def test_a_usage_error_loads_nothing_heavy(said, words):
    code, errors, loaded = said[words]
    assert code == (5 if words == "audit gemm --arch 75" else 2)
    assert errors.count("\n") == 1
    assert REFUSED[words] in errors
    assert loaded == []


def test_listing_loads_nothing_heavy():
    code = (
        "import sys; from jetfire.cli import execute; code = execute(None, ['list']); "
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("0 []\n")
    assert "kernels: int_mm, wgmma, mma, gluon, triton" in done.stdout


def test_kernels_are_named_without_being_imported():
    for op in registry.names():
        assert registry.kernel_names(op) == tuple(registry.kernels(op))


def test_kernels_that_are_not_named_as_usual_are_imported(monkeypatch, tmp_path):
    from jetfire.core import declared

    package = tmp_path / "odd"
    package.mkdir()
    for text in ("KERNELS = tuple(made())", "class A:\n    name = f()\nKERNELS = (A(),)", "(", ""):
        (package / "__init__.py").write_text(text)
        declared._tree.cache_clear()
        assert declared.names(package) is None
    monkeypatch.setattr(declared, "names", lambda package: None)
    registry._declared.cache_clear()
    assert registry.kernel_names("gemm") == tuple(registry.kernels("gemm"))
    registry._declared.cache_clear()


SOURCES = [name for name, one in vars(options).items() if name.isupper() and isfunction(one)]


@pytest.mark.parametrize("name", SOURCES)
def test_the_names_that_complete_an_option_are_found(name):
    """A module or an attribute that is called otherwise now would leave it without completion."""
    found = getattr(options, name)()
    assert found
    assert all(type(one) is str for one in found)


def test_names_that_stand_apart_are_those_of_their_modules():
    from jetfire.tuner import options as tuner_options
    from jetfire.tuner import strategies

    assert tuple(strategies.STRATEGIES) == tuner_options.STRATEGIES


BENCH, TUNE = "bench.command.BenchOptions", "tuner.options.TuneOptions"
# The options classes that a command fills, and its parameters that are no field of theirs.
FILLED = {
    "bench": ([BENCH], "listing load strict_profile version"),
    "audit": ([BENCH], "arch load"),
    "tune.run": ([BENCH, TUNE], "shipped budget trial_timeout replay load version"),
    "tune.show": ([BENCH], "load"),
    "fuzz": (["fuzz.command.FuzzOptions"], "budget reproduce load interpreter debug version"),
    "export": ([BENCH, "export.options.ExportOptions"], "arch load version"),
    "advise": (["models.options.AdviseOptions"], ""),
    "train.run": (["gpt2.training.options.TrainOptions"], "sample strict_profile debug version"),
    "train.plan": (["gpt2.training.plan.PlanOptions"], "debug"),
    "train.study": (["gpt2.training.study.StudyOptions"], "debug"),
    "train.bench": ([BENCH], "case recipes strict_profile"),
    "train.tune": ([TUNE], "case recipes settings corpus budget debug"),
}


@pytest.mark.parametrize("command", FILLED)
def test_a_parameter_is_called_as_the_field_that_it_fills(command):
    """One misspelt would be passed over."""
    classes, others = FILLED[command]
    found = [pkgutil.resolve_name(f"jetfire.{name}") for name in classes]
    fields = {field.name for one in found for field in dataclasses.fields(one)}
    run = pkgutil.resolve_name(f"jetfire.commands.{command}.run")
    assert inspect.signature(run).parameters.keys() - fields == set(others.split())


COMPLETED = {
    "jetfire b": ["bench"],
    "jetfire bench ge": ["gelu", "gemm"],
    "jetfire-bench gemm,qu": ["gemm,quantize", "gemm,quantize_dlogits", "gemm,quantize_qkv"],
    "jetfire-bench gemm --kernel w": ["wgmma"],
    "jetfire-bench gemm --peer cub": ["cublas_bf16", "cublas_fp16"],
    "jetfire-bench --workload gpt2-1": ["gpt2-124m", "gpt2-1558m"],
    "jetfire-bench --pee": ["--peer"],
    "jetfire-bench --data out": ["outlier"],
    "jetfire-bench --format j": ["json"],
    "jetfire bench --suite e": ["elementwise", "export"],
    "jetfire-tune sh": ["show"],
    "jetfire-tune show ge": ["gelu", "gemm"],
    "jetfire-tune gemm --strategy g": ["gp"],
    "jetfire-tune gemm --effort q": ["quick"],
    "jetfire-tune gemm --objective e": ["energy"],
    "jetfire-fuzz --sanitizer m": ["memcheck"],
    "jetfire-export gemm --target t": ["torch"],
    "jetfire-train s": ["shakespeare-char", "study", "sample"],
    "jetfire-train tiny --recipe int8-": [
        "int8-block32",
        "int8-block64",
        "int8-block128",
        "int8-kept4",
        "int8-fallback",
    ],
    "jetfire-train sample --te": ["--temperature"],
    "jetfire-train prepare sh": ["shakespeare", "shakespeare-char"],
    "jetfire-train prepare python --tokenizer b": ["byte"],
    "jetfire-train bench w": ["wide"],
    "jetfire-train bench --peer compile_": ["compile_own_loss", "compile_causal"],
    "jetfire train tune gpt2-1": ["gpt2-124m", "gpt2-1558m"],
    "jetfire d": ["doctor"],
    "jetfire-train plan gpt2-1": ["gpt2-124m", "gpt2-1558m"],
    "jetfire-train plan tiny --recipe int4-n": ["int4-naive"],
    "jetfire completion z": ["zsh"],
    "jetfire nope ": [],
}
COMPLETE = """
import contextlib, io, json, os, sys
from jetfire.cli import execute

found = {}
for line in json.load(sys.stdin):
    program, _, words = line.partition(" ")
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    variable = f"_{program}_COMPLETE".replace("-", "_").upper()
    os.environ[variable] = "complete_bash"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        execute(program.partition("-")[2] or None, [])
    del os.environ[variable]
    found[line] = out.getvalue().split(), [name for name in HEAVY if name in sys.modules]
print(json.dumps(found))
"""


def test_completion_knows_every_name_and_loads_nothing_heavy():
    code = COMPLETE.replace("HEAVY", repr((*HEAVY, "numpy")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(COMPLETED)),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    found["jetfire nope "][0] = []  # some version lists the commands, some nothing
    loaded = {line: modules for line, (_, modules) in found.items() if modules}
    # GPT-2's tokenizers are arrays.
    assert {tuple(modules) for modules in loaded.values()} <= {("numpy",)}
    assert {line: sorted(names) for line, (names, _) in found.items()} == {
        line: sorted(names) for line, names in COMPLETED.items()
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_is_printed_for_each_program(shell, capsys):
    assert execute(None, ["completion", shell]) == 0
    out = capsys.readouterr().out
    for program in ("jetfire", *(f"jetfire-{name}" for name in SCRIPTS)):
        assert f"_{program}_COMPLETE".replace("-", "_").upper() in out


def test_completion_is_for_the_shell_in_use_and_can_be_installed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SHELL", "/usr/bin/bash")
    assert execute(None, ["completion"]) == 0
    assert (
        "complete -o default -F _jetfire_train_completion jetfire-train" in capsys.readouterr().out
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert execute(None, ["completion", "--install"]) == 0
    files = capsys.readouterr().out.split()
    assert len(files) == 1 + len(SCRIPTS)
    assert all("complete -o default" in Path(file).read_text() for file in files)
    monkeypatch.setenv("HOME", "/dev/null")
    assert execute(None, ["completion", "--install"]) == 2
    assert capsys.readouterr().err == "jetfire: /dev/null: File exists\n"


@pytest.mark.parametrize("name", [None, *SCRIPTS])
def test_short_help_and_the_version(name, capsys):
    assert execute(name, ["-h"]) == 0
    short = capsys.readouterr().out
    assert execute(name, ["--help"]) == 0
    assert capsys.readouterr().out == short
    assert "Usage: jetfire" in short
    assert "--version" in short
    assert execute(name, ["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("jetfire 0.1.0 (torch 2.")
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["train", "sample", "-h"], ["tune", "show", "-h"], ["list", "-h"]]
)
def test_verbs_have_short_help(words, capsys):
    assert execute(None, words) == 0
    assert f"Usage: jetfire {' '.join(words[:-1])} " in capsys.readouterr().out


def test_the_version_loads_nothing():
    code = (
        "import sys; from jetfire.cli import execute; code = execute(None, ['--version']); "
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("0 []\n")
