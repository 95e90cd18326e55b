"""What a stranger wrote in a profile stays text: nothing in an export runs or goes by it."""

import ast
import dataclasses
import json
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from jetfire.cli import execute
from jetfire.core import profiles, registry
from jetfire.core.device import target_device
from jetfire.core.errors import UsageError
from jetfire.export import cuda, samples, targets
from jetfire.export import plan as plans
from jetfire.export.foreign import Foreign
from jetfire.export.library import Library, with_header
from jetfire.export.render import render
from jetfire.export.target import cuda_home
from jetfire.export.targets import c_library
from jetfire.measure.plan import Case

HOSTILE = {
    "quotes": "\"; system(\"touch x\"); //'; import os; os.system('x') #",
    "a triple quote": '"""\nimport os\n"""',
    "the end of a comment": "*/ int x = system(0); /*",
    "a line": "x\nint y = system(0);\n#include </etc/passwd>",
    "other lines": "x\r#error\x0b#error\x0c#error\x85#error\u2028#error\u2029#error",
    "the next line": "x\\",
    "the next line, as a trigraph": "x??/",
    "shells and make": "$(touch x) `touch x` ${HOME} $$(shell touch x) ; rm -rf . # \t",
    "formats": "%s %n {0} {before} {{ 7*7 }} {% raw %} {self.x}",
    "Markdown": "| a | <script>x</script> [x](javascript:x) ![x](x) `x` **x** # &lt; \\",
    "direction": "\u202egpu\u202c \u2066x\u2069 \u200f\ufeff",
    "a terminal": "\x1b[2J\x07\x00",
    "no UTF-8": "\udcff \ud83d",
    "length": "x" * 2000 + " y" * 2000,
}
PLAIN = "NVIDIA H200"


def with_text(plan, text):
    """The same plan with a text wherever its profile may hold one."""

    def changed(tuned):
        fields = ("gpu", "driver", "cuda", "torch", "triton", "source", "date", "jetfire")
        entry = dataclasses.replace(
            tuned.entry,
            kernel=text,
            objective=text,
            strategy=text,
            vs_peer={text: 1.0},
            problem={name: str(value) for name, value in tuned.entry.problem.items()},
            provenance=dict.fromkeys(fields, text),
        )
        return dataclasses.replace(tuned, entry=entry)

    return dataclasses.replace(plan, tuned=tuple(map(changed, plan.tuned)))


SHIPPED = Path(__file__).parent.parent / "profiles"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(autouse=True)
def _forget():
    yield
    profiles.forget()


@pytest.fixture(scope="module")
def plan():
    """A GEMM at sizes of a profile's own, and at others."""
    op = registry.get("gemm")
    cases = [Case(op, op.Problem(m, 4096, 4096, block=128)) for m in (4096, 4352)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "SHIPPED", SHIPPED)
        profiles.forget()
        with warnings.catch_warnings(action="ignore"):  # one size is not tuned, which is told once
            made = plans.make(cases, "wgmma", target_device((9, 0)), None)
    profiles.forget()
    return made


@pytest.fixture(scope="module")
def sample(plan):
    return samples.record(plan)


def written(plan, target, sample):
    """The files of an export, but for its tensors; not of `cuda`, around an empty library."""
    library = cuda.library(plan) if target == "cuda" else empty(plan)
    files = targets.get(target).files(plan, library, sample)
    return {name: content for name, content in files.items() if not name.endswith(".bin")}


def empty(plan):
    contract = ("All addresses are multiples of 16.",)
    file = f"{plan.name}.c"
    return with_header(plan, Library({file: b"\n"}, (), (file,), "90", False, False, contract))


@pytest.fixture(scope="module")
def usual(plan, sample):
    """Target → the files of an export of a harmless profile."""
    known = with_text(plan, PLAIN)
    return {name: written(known, name, sample) for name in targets.NAMES}


def program(name, content):
    """What a compiler makes of C or C++ before all else: comments, and they alone, are gone."""
    language = "c" if name.endswith(".c") else "c++"
    command = ["gcc", "-E", "-P", "-dD", "-fpreprocessed", "-trigraphs", "-x", language, "-"]
    done = subprocess.run(command, input=content, capture_output=True, check=True)
    return done.stdout


class _Blank(ast.NodeTransformer):
    """Takes a text out of a tree where it is a constant."""

    def __init__(self, text):
        self.text = text

    def visit_Constant(self, node):
        return ast.Constant("somewhere") if node.value == self.text else node


def syntax(content, text):
    return ast.dump(_Blank(text).visit(ast.parse(content)))


def elements(content):
    """What a Markdown file consists of: nothing but text may stand in a table's last column."""
    tokens = MarkdownIt("commonmark").enable("table").parse(content.decode())
    kinds = [
        (token.type, [child.type for child in token.children or () if child.type != "text_special"])
        for token in tokens
    ]
    return [(kind, list(dict.fromkeys(inner))) for kind, inner in kinds]


@needs_gcc
@pytest.mark.parametrize("target", targets.NAMES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_an_export_is_the_same_program_whatever_its_profile_says(plan, sample, usual, target, kind):
    hostile = with_text(plan, HOSTILE[kind])
    found = written(hostile, target, sample)
    assert found.keys() == usual[target].keys()
    changed = {name for name in found if found[name] != usual[target][name]}
    assert any(name.endswith("README.md") for name in changed)
    for name in changed:
        content, before = found[name], usual[target][name]
        if name.endswith((".c", ".cu")):
            assert program(name, content) == program(name, before), name
        elif name.endswith(".py"):
            where = hostile.tuned[0].where.text
            assert where not in content.decode() or where.isprintable()
            assert syntax(content, where) == syntax(before, f"on {PLAIN}, {PLAIN}"), name
        elif name.endswith(".md"):
            assert elements(content) == elements(before), name
        else:
            assert name.endswith("profile.json"), name
            assert json.loads(content) == json.loads(json.dumps(hostile.provenance()))


# What is admitted in a profile: text without control characters.
ADMITTED = '"\'\\ */ ??/ `x` $(x) ${x} %s {0} {{ 7*7 }} {% raw %} """ | <b> # // \\'


def in_profiles(folder, text):
    """The shipped profiles of the GEMM, of a device of that name."""
    made = folder / "nvidia-h200" / "gemm.json"
    made.parent.mkdir(parents=True)
    content = json.loads((SHIPPED / "nvidia-h200" / "gemm.json").read_text())
    for origin in content["provenance"].values():
        origin.update(gpu=text, date=text)
    made.write_text(json.dumps(content))


@needs_gcc
def test_a_hostile_profile_is_exported_and_compiles(tmp_path, monkeypatch, capsys):
    in_profiles(tmp_path / "user", ADMITTED)
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "user"))
    profiles.forget()
    words = ["gemm", "--m", "4096", "--block", "128", "--no-check", "-o", str(tmp_path / "out")]
    assert execute("export", words) == 0, capsys.readouterr().err
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert profile["entries"][0]["provenance"]["gpu"] == ADMITTED
    checks = ["-fsyntax-only", "-Wall", "-Wextra", "-Wcomment", "-Wtrigraphs", "-Werror"]
    for name in ("benchmark.c", "selftest.c"):
        command = ["gcc", "-std=c11", *checks, "-isystem", str(cuda_home() / "include"), name]
        subprocess.run(command, cwd=tmp_path / "out", check=True)


def test_a_profile_with_a_line_too_many_is_not_exported(tmp_path, monkeypatch, capsys):
    in_profiles(tmp_path / "user", 'x\n__attribute__((constructor)) void f() { system("x"); }')
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "user"))
    profiles.forget()
    words = ["gemm", "--m", "4096", "--block", "128", "--no-check", "-o", str(tmp_path / "out")]
    assert execute("export", words) == 2
    assert "skipped: " in (errors := capsys.readouterr().err)
    assert "expected text without control characters" in errors
    assert not (tmp_path / "out").exists()


# Alone.


@settings(max_examples=300, deadline=None)
@given(st.text() | st.sampled_from(list(HOSTILE.values())))
def test_text_in_each_language(text):
    found = Foreign(text)
    assert ast.literal_eval(found.python()) == text
    comment = found.comment()
    assert comment.isprintable()
    assert not comment.endswith("\\")
    assert not {"??", "*/", "\\ "} & {comment[i : i + 2] for i in range(len(comment))}
    cell = found.markdown()
    assert cell.isprintable()
    (tokens,) = (t for t in MarkdownIt("commonmark").parse(f"x {cell}") if t.type == "inline")
    assert {child.type for child in tokens.children} <= {"text", "text_special"}


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_plain_text_stays_as_it_is(text):
    plain = "".join(filter(str.isalnum, text)) + " (R) v1.0, 2026-01-02 @ 2.7 GHz; a/b"
    found = Foreign(plain)
    assert found.comment() == found.markdown() == plain
    assert found.python() == f'"{plain}"'


def test_what_is_not_escaped_is_not_printed():
    found = Foreign("NVIDIA H200")
    for wrong in (str, "{}".format, "".__add__, "%s".__mod__, lambda x: f"{x}", ", ".join):
        with pytest.raises(TypeError):
            wrong(found)
    with pytest.raises(TypeError, match="without being escaped"):
        render("build.toml.j2", hub_name=found)


@pytest.mark.parametrize("name", ["", "1x", "a-b", "a b", "a\n", "x;", "é"])
def test_a_plan_has_no_name_that_is_no_identifier(plan, name):
    with pytest.raises(UsageError, match="expected a C identifier"):
        dataclasses.replace(plan, name=name)


def test_a_toolkit_in_an_odd_folder_is_no_command(tmp_path, monkeypatch, plan, sample):
    """The Makefile takes CUDA_HOME for a folder, whatever it is called."""
    home = tmp_path / "a b; touch $(shell touch made) `touch made`"
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda.h").write_text("#define FOUND 1\n")
    monkeypatch.setenv("CUDA_HOME", str(home))
    folder = tmp_path / "out"
    folder.mkdir()
    for name, content in written(with_text(plan, PLAIN), "cubin", sample).items():
        (folder / name).write_bytes(content)
    source = "#include <cuda.h>\nint found = FOUND;\n"
    (folder / f"{plan.name}.c").write_text(source)
    c_library.run(["make", *c_library._home(folder), f"lib{plan.name}.so"], folder)
    assert (folder / f"lib{plan.name}.so").is_file()
    assert not list(tmp_path.rglob("made"))
