"""A run's folder: what damages it, who may train in it, and what a run goes on from."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from jetfire.cli import execute
from jetfire.core import files
from jetfire.core.errors import UsageError
from jetfire.gpt2.data import prepare, prepared
from jetfire.gpt2.data import tokens as data
from jetfire.gpt2.model import tensors
from jetfire.gpt2.training import checkpoint, command, log
from jetfire.gpt2.training.loop import Training
from jetfire.gpt2.training.options import RunRequest
from jetfire.gpt2.training.parallel import Group
from jetfire.gpt2.training.runs import opened
from jetfire.gpt2.training.settings import make
from jetfire.tests.given import changed

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = (
    "layers=1,heads=2,width=32,context=16,batch=4,warmup=2,evaluate_every=4,"
    "evaluate_batches=1,checkpoint_every=4,keep=3,recipe=bf16"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A run of eight steps with checkpoints at 4 and 8, one of twelve, and one of another width."""
    home = tmp_path_factory.mktemp("home")
    (home / "text.txt").write_text(" ".join(str(i) for i in range(4000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETFIRE_CACHE", str(home / "cache"))
        for name, steps, more in (("run", 8, ""), ("whole", 12, ""), ("wide", 8, "width=64")):
            words = [
                "tiny",
                "--data",
                str(home / "text.txt"),
                "--steps",
                str(steps),
                "--set",
                changed(SETTINGS, more),
                "-o",
                str(home / name),
                "--device",
                "cpu",
            ]
            assert execute("train", words) == 0
    return home


@pytest.fixture
def run(home, tmp_path, monkeypatch) -> Path:
    """A copy of the run of eight steps, with a cache of its own."""
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(home / "cache", tmp_path / "cache")
    return Path(shutil.copytree(home / "run", tmp_path / "run"))


def resume(run: Path, *words: str) -> int:
    return execute("train", ["--resume", "-o", str(run), "--device", "cpu", *words])


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["norm"]) for r in log.read(run) if r["kind"] == "step"]


def saved(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def flip(file: Path, at: int = -5) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Files by path, with their content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- checkpoints --------------------------------------------------------------------------------


def other_step(run: Path, home: Path) -> None:
    shutil.copy(saved(run, 4) / "state.json", saved(run, 8) / "state.json")


def other_checkpoint(run: Path, home: Path) -> None:
    shutil.rmtree(saved(run, 8))
    shutil.copytree(saved(run, 4), saved(run, 8))


def other_run(run: Path, home: Path) -> None:
    shutil.rmtree(saved(run, 8))
    shutil.copytree(saved(home / "wide", 8), saved(run, 8))


DAMAGES = {
    "a bit of the model": lambda run, _: flip(saved(run, 8) / "model.safetensors"),
    "a bit of the header": lambda run, _: flip(saved(run, 8) / "model.safetensors", 100),
    "a bit of the optimizer": lambda run, _: flip(saved(run, 8) / "optimizer.safetensors"),
    "a bit of the state": lambda run, _: flip(saved(run, 8) / "state.json", -30),
    "a bit of the sums": lambda run, _: flip(saved(run, 8) / "SHA256SUMS", 3),
    "no sums": lambda run, _: (saved(run, 8) / "SHA256SUMS").unlink(),
    "no optimizer": lambda run, _: (saved(run, 8) / "optimizer.safetensors").unlink(),
    "no state": lambda run, _: (saved(run, 8) / "state.json").unlink(),
    "an empty model": lambda run, _: os.truncate(saved(run, 8) / "model.safetensors", 0),
    "a state of another step": other_step,
    "a checkpoint of another step": other_checkpoint,
    "a checkpoint of another width": other_run,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(damage, run, home, capsys):
    damage(run, home)
    capsys.readouterr()
    assert resume(run, "--steps", "12") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "older checkpoint" in line]
    assert len(said) == 1
    assert said[0].startswith(f"jetfire: {saved(run, 8)}/")
    assert said[0].endswith(": taking step-00000004, an older checkpoint")
    # The cosine is of eight steps up to step 4, and of twelve after it.
    assert [step for step, *_ in losses(run)] == list(range(1, 13))
    assert losses(run)[:4] == losses(home / "run")[:4]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000008",
        "step-00000008.damaged",
        "step-00000012",
    ]
    for path in checkpoint.listed(run):
        checkpoint.open_checkpoint(path)


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ("optimizer=adamw8", "F32"),
        ("optimizer=adamw8,weights=bf16,recipe=int8-block32,accumulate=2", "BF16"),
    ],
)
def test_moments_in_8_bits_go_on_bit_for_bit(more, kind, run, home):
    """Weights in BF16 too, whose rounding is a function of the step."""
    folder = run.parent / "run8"
    words = ["--steps", "8", "--set", changed(SETTINGS, more), "-o", str(folder)]
    assert execute("train", ["tiny", "--data", str(home / "text.txt"), *words]) == 0
    files = [saved(folder, 8) / f"{name}.safetensors" for name in ("optimizer", "model")]
    whole, expected = losses(folder), [file.read_bytes() for file in files]
    assert of_moment(files[0]) == "I8"
    assert of_weight(files[1]) == kind
    assert whole[-1] != losses(home / "run")[-1]
    flip(files[1])
    assert resume(folder) == 0
    assert losses(folder) == whole
    assert [file.read_bytes() for file in files] == expected


def test_weights_go_on_in_other_bits(run):
    """A run in FP32 goes on in BF16, and back."""
    both = "optimizer=adamw8,recipe=int8-block32"
    for steps, weights, kind in ((10, "bf16", "BF16"), (12, "fp32", "F32")):
        words = ["--steps", str(steps), "--set", f"{both},weights={weights}"]
        assert resume(run, *words) == 0
        assert of_weight(saved(run, steps) / "model.safetensors") == kind
    assert losses(run)[-1][1] < losses(run)[7][1]


def test_moments_go_on_in_other_bits(run):
    for steps, optimizer, kind in ((10, "adamw8", "I8"), (12, "adamw", "F32")):
        assert resume(run, "--steps", str(steps), "--set", f"optimizer={optimizer}") == 0
        assert of_moment(saved(run, steps) / "optimizer.safetensors") == kind
    assert losses(run)[-1][1] < losses(run)[7][1]


def test_a_checkpoint_that_holds_moments_of_other_bits_than_it_says(run, capsys):
    state, sums = saved(run, 8) / "state.json", saved(run, 8) / "SHA256SUMS"
    digest = files.digest(state)
    state.write_text(state.read_text().replace('"optimizer": "adamw"', '"optimizer": "adamw8"'))
    sums.write_text(sums.read_text().replace(digest, files.digest(state)))
    assert resume(run) == 0
    assert "contract.weight/exp_avg is F32" in capsys.readouterr().err


def of_weight(file: Path) -> str:
    """As `of_moment`, of the matrix; a vector's is always fp32."""
    found = tensors.header(file)
    assert found["blocks.0.contract.bias"].dtype == "F32"
    return found["blocks.0.contract.weight"].dtype


def of_moment(file: Path) -> str:
    """The dtype of a moment of a matrix that is large enough for codes."""
    return tensors.header(file)["blocks.0.contract.weight/exp_avg"].dtype


def test_going_on_from_an_older_checkpoint_is_bit_for_bit(run, home):
    flip(saved(run, 8) / "model.safetensors")
    assert resume(run) == 0
    assert losses(run) == losses(home / "run")
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"):
        assert (saved(run, 8) / name).read_bytes() == (saved(home / "run", 8) / name).read_bytes()


@pytest.mark.parametrize("verb", [["--resume", "-o"], ["sample"], ["export"]], ids=lambda v: v[0])
def test_without_a_whole_checkpoint_nothing_is_taken(verb, run, capsys, tmp_path):
    for step in (4, 8):
        flip(saved(run, step) / "model.safetensors")
    before = snapshot(run)
    capsys.readouterr()
    more = ["-o", str(tmp_path / "out")] if verb == ["export"] else []
    assert execute("train", [*verb, str(run), *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"jetfire: {saved(run, 8)}/model.safetensors: is damaged: its SHA-256 is not that in "
        f"SHA256SUMS; no older checkpoint of {run} is whole\n"
    )
    assert snapshot(run) == before
    assert not (tmp_path / "out").exists()


def test_other_verbs_take_an_older_checkpoint_and_change_nothing(run, home, capsys, tmp_path):
    flip(saved(run, 8) / "model.safetensors")
    before = snapshot(run)
    for name, path, words in (
        ("older", run, []),
        ("oldest", saved(run, 4), []),
    ):
        capsys.readouterr()
        assert execute("train", ["export", str(path), "-o", str(tmp_path / name), *words]) == 0
        assert ("taking step-00000004" in capsys.readouterr().err) == (path == run)
    assert snapshot(tmp_path / "older") == snapshot(tmp_path / "oldest")
    assert execute("train", ["sample", str(saved(run, 8)), "--tokens", "2"]) == 2
    assert "is damaged" in capsys.readouterr().err
    words = ["tiny", "--data", str(home / "text.txt"), "--set", SETTINGS, "--steps", "1"]
    assert execute("train", [*words, "--init", str(run), "-o", str(tmp_path / "new")]) == 0
    assert "taking step-00000004" in capsys.readouterr().err
    bad = [*words, "--init", str(saved(run, 8)), "-o", str(tmp_path / "other")]
    assert execute("train", bad) == 2
    assert not (tmp_path / "other").exists()
    assert snapshot(run) == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_export_is_written_over_nothing_but_an_earlier_one(name, run, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text('{"mine": 1}')
    before = snapshot(tmp_path)
    for out, taken in ((tmp_path / "out", name), (saved(run, 8), "model.safetensors")):
        capsys.readouterr()
        assert execute("train", ["export", str(run), "-o", str(out)]) == 2
        wanted = "expected a new or empty folder"
        reason = f"its {taken} is of no earlier export"
        assert capsys.readouterr().err == f"jetfire: -o {out}: {reason}: {wanted}\n"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("more", ["", "family=llama,kv_heads=1,hidden=48", "dropout=0.1"])
def test_an_earlier_export_is_replaced(more, run, home, tmp_path):
    """Also one in whose folder a killed export left its config.json beside earlier weights."""
    small, wide, out = tmp_path / "small", tmp_path / "wide", tmp_path / "out"
    words = ["tiny", "--data", str(home / "text.txt"), "--set", changed(SETTINGS, more)]
    assert execute("train", [*words, "--steps", "1", "-o", str(tmp_path / "new")]) == 0
    assert execute("train", ["export", str(tmp_path / "new"), "-o", str(small)]) == 0
    assert execute("train", ["export", str(home / "wide"), "-o", str(wide)]) == 0
    out.mkdir()
    (out / "README.md").write_text("mine")
    for path, kept in ((tmp_path / "new", small), (home / "wide", wide), (run, None)):
        assert execute("train", ["export", str(path), "-o", str(out)]) == 0
        if kept is not None:
            assert snapshot(out) == {**snapshot(kept), "README.md": b"mine"}
    shutil.copy(small / "config.json", out)
    assert execute("train", ["export", str(home / "wide"), "-o", str(out)]) == 0
    assert snapshot(out) == {**snapshot(wide), "README.md": b"mine"}


def test_the_optimizer_is_not_needed_to_sample(run, capsys):
    (saved(run, 8) / "optimizer.safetensors").unlink()
    capsys.readouterr()
    assert execute("train", ["sample", str(run), "--tokens", "2"]) == 0
    assert capsys.readouterr().err == ""


def test_a_model_cannot_have_a_terminal_obey_it(run, capsys, monkeypatch):
    monkeypatch.setattr(command.sampling, "text", lambda *_, **__: "a\x1b[2J\n")
    capsys.readouterr()
    for terminal, shown in ((False, "a\x1b[2J\n\n"), (True, "a\\x1b[2J\n\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=terminal: answer)
        assert execute("train", ["sample", str(run)]) == 0
        assert capsys.readouterr().out == shown


def test_checkpoints_of_earlier_versions_are_taken_unchecked(run, capsys):
    for step in (4, 8):
        path = saved(run, step)
        (path / "SHA256SUMS").unlink()
        state = json.loads((path / "state.json").read_text())
        del state["sums"]
        (path / "state.json").write_text(json.dumps(state))
    capsys.readouterr()
    assert resume(run, "--steps", "9") == 0
    said = f"jetfire: {saved(run, 8)}: has no SHA256SUMS, as earlier versions wrote none: its files"
    assert capsys.readouterr().err.splitlines()[0].startswith(said)
    # What needs no digests is seen all the same.
    shutil.copy(saved(run, 4) / "state.json", saved(run, 8) / "state.json")
    shutil.rmtree(saved(run, 9))
    assert resume(run) == 0
    assert "is of step 4, not step-00000008's" in capsys.readouterr().err


def test_sums_are_as_sha256sum_has_them(run):
    import subprocess

    where = saved(run, 8)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=where, check=True)


def test_settings_that_are_damaged_are_a_checkpoint_s(run, home, capsys):
    begun = json.loads((run / "settings.json").read_text())
    (run / "settings.json").write_text(json.dumps(begun | {"layers": 10**9}))
    capsys.readouterr()
    assert resume(run, "--steps", "12") == 0
    assert "layers=1000000000: expected" in capsys.readouterr().err
    for content in ("{", "[]", "{}", json.dumps(begun | {"processes": 0})):
        (run / "settings.json").write_text(content)
        assert resume(run, "--steps", "12") == 0
        assert "settings.json: " in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    (run / "settings.json").write_text("{")
    (run / "log.jsonl").unlink()
    assert resume(run) == 2
    assert capsys.readouterr().err.startswith(f"jetfire: {run / 'settings.json'}: no JSON")


# --- tokens -------------------------------------------------------------------------------------


def test_tokens_of_a_text_that_are_damaged_are_prepared_again(run, home, tmp_path):
    (folder,) = (tmp_path / "cache" / "data").glob("text-*-byte")
    flip(folder / "train.bin")
    assert resume(run, "--steps", "12") == 0
    data.open_tokens(folder)


def test_a_prepared_folder_that_is_damaged_is_refused(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    folder = prepare.prepare(home / "text.txt", "byte", tmp_path / "tokens")
    run = tmp_path / "run"
    words = ["tiny", "--data", str(folder), "--steps", "2", "--set", SETTINGS, "-o", str(run)]
    assert execute("train", words) == 0
    stat = (folder / "train.bin").stat()
    flip(folder / "train.bin")
    os.utime(folder / "train.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    before = snapshot(run)
    capsys.readouterr()
    assert resume(run, "--steps", "4") == 2
    said = f"jetfire: data {folder}/train.bin: is damaged: its SHA-256 is not meta.json's"
    assert capsys.readouterr().err.startswith(said)
    assert snapshot(run) == before


def test_tokens_that_change_while_they_are_trained_on_stop_the_run(
    home, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    folder = prepare.prepare(home / "text.txt", "byte", tmp_path / "tokens")
    launch = Training._launch

    def spoil(self, step):
        if step == 6:
            with (folder / "train.bin").open("r+b") as file:
                file.write(b"\0\0")
        return launch(self, step)

    monkeypatch.setattr(Training, "_launch", spoil)
    run = tmp_path / "run"
    words = ["tiny", "--data", str(folder), "--steps", "8", "--set", SETTINGS, "-o", str(run)]
    assert execute("train", words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"jetfire: data {folder}/train.bin: was written to while it was trained on"
    assert checkpoint.find(run).step == 4


def test_a_data_folder_names_no_file_but_its_own(home, gpt2_files, tmp_path, monkeypatch, capsys):
    """A rank file named ../../.bashrc replaced that file once."""
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    folder = prepare.prepare(home / "text.txt", "gpt2", tmp_path / "tokens", vocabulary=gpt2_files)
    (tmp_path / ".bashrc").write_text("mine")
    meta = json.loads((folder / "meta.json").read_text())
    meta["tokenizer"]["ranks"] = "../../.bashrc"
    (folder / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "a").mkdir()
    words = ["tiny", "--data", str(folder), "--steps", "2", "--set", SETTINGS]
    assert execute("train", [*words, "-o", str(tmp_path / "a" / "run")]) == 2
    assert "ranks='../../.bashrc': expected 'gpt2.tiktoken'" in capsys.readouterr().err
    assert (tmp_path / ".bashrc").read_text() == "mine"
    assert list((tmp_path / "a").iterdir()) == []


# --- the log ------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a damaged one"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(left, run, capsys):
    shutil.rmtree(run / "checkpoints")
    if left != "nothing":
        (run / "checkpoints").mkdir()
    if left == "a damaged one":
        (run / "checkpoints" / "step-00000008.damaged").mkdir()
    before = snapshot(run)
    capsys.readouterr()
    assert resume(run) == 2
    said = capsys.readouterr().err
    assert said == (
        f"jetfire: --resume: the log of {run} has 8 steps, and its checkpoints are gone: put "
        f"{run / 'checkpoints'} back, or begin another run with -o\n"
    )
    assert snapshot(run) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(
    run, home, capsys, monkeypatch
):
    """The log keeps what it had, of which only what came after counts."""
    shutil.rmtree(saved(run, 4))
    shutil.rmtree(saved(run, 8))
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    killed = "".join(lines[:3]) + lines[3][:20]
    (run / "log.jsonl").write_text(killed)
    assert resume(run) == 0
    assert "has no checkpoint: beginning at its first step" in capsys.readouterr().err
    assert (run / "log.jsonl").read_text().startswith(killed + "\n")
    assert losses(run) == losses(home / "run")
    assert capsys.readouterr().err == ""


def test_garbage_in_the_log_is_a_warning(run, home, capsys):
    lines = (run / "log.jsonl").read_text().splitlines()
    lines[3:3] = ["garbage", "\x1b[31m"]
    text = "\n".join(lines) + "\n"
    (run / "log.jsonl").write_text(text)
    capsys.readouterr()
    assert resume(run, "--steps", "12") == 0
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith(f"jetfire: {run}/log.jsonl: lines 4, 5 passed over: line 4: no JSON")
    assert (run / "log.jsonl").read_text().startswith(text)
    assert execute("train", ["plot", str(run), "-o", str(run / "loss.svg")]) == 0
    assert "lines 4, 5 passed over" in capsys.readouterr().err


def test_a_log_that_is_no_file_does_not_stop_the_others_from_being_looked_at(run, capsys):
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")
    assert resume(run, "--steps", "12") == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("log.jsonl: cannot be written: no regular file")
    )


# --- one process at a time ----------------------------------------------------------------------


def test_a_folder_is_held_before_it_is_looked_at(home, tmp_path, capsys, monkeypatch):
    """A second trainer begins while the first prepares its data, and once it is there."""
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "runs" / "one"
    words = [
        "tiny",
        "--data",
        str(home / "text.txt"),
        "--steps",
        "4",
        "--set",
        SETTINGS,
        "-o",
        str(run),
    ]
    real, codes = prepare.folder_of, []

    def meanwhile(*given):
        monkeypatch.setattr(prepare, "folder_of", real)
        codes.append(execute("train", words))
        codes.append(execute("train", ["--resume", "-o", str(run)]))
        return real(*given)

    monkeypatch.setattr(prepare, "folder_of", meanwhile)
    assert execute("train", words) == 0
    assert codes == [2, 2]
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [f"jetfire: {run}: another process is training there"] * 2
    assert [step for step, *_ in losses(run)] == [1, 2, 3, 4]
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoints",
        "log.jsonl",
        "settings.json",
        "tokenizer",
    ]


def test_options_are_the_run_s_settings(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "train", asked.append)
    words = [
        "tiny",
        "--recipe",
        "bf16",
        "--steps",
        "7",
        "--seed",
        "11",
        "--data",
        "python",
        "--set",
        "rate=0.5",
        "--set",
        "batch=2",
        "-o",
        f"{tmp_path}/run",
    ]
    assert execute("train", words) == 0
    with opened(asked[0], Group()) as run:
        one = run.settings
    assert (one.preset, one.recipe, one.steps, one.seed) == ("tiny", "bf16", 7, 11)
    assert (one.data, one.rate, one.batch, run.folder) == ("python", 0.5, 2, tmp_path / "run")


def test_a_folder_in_which_nothing_began_is_removed(tmp_path, capsys):
    asked = RunRequest(tmp_path / "runs" / "a" / "b", make("tiny", {}))
    with opened(asked, Group()) as run:
        assert [p.name for p in run.folder.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with opened(RunRequest(tmp_path / "mine", make("tiny", {})), Group()):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_what_killed_processes_left_is_tidied(run):
    left = [run / ".settings.json.x1y2.part", run / "tokenizer" / ".meta.json.x1y2.part"]
    for path in left:
        path.write_text("half")
    (run / "checkpoints" / ".step-00000012.x1y2.part" / "new").mkdir(parents=True)
    (run / ".tokenizer.x1y2.part" / "new").mkdir(parents=True)
    (run / ".lock").touch()
    assert resume(run) == 0
    assert [str(p) for p in run.rglob("*") if ".part" in str(p) or p.name == ".lock"] == []


def test_what_others_left_half_done_is_theirs(tmp_path):
    """As `jetfire-train tiny -o .` finds a download of somebody's."""
    steps = tmp_path / "checkpoints"
    (steps / ".step-00000012.x1y2.part" / "new").mkdir(parents=True)
    theirs = [
        tmp_path / ".film.mkv.part",
        tmp_path / ".film.x1y2.part",
        tmp_path / ".settings.json.old.x1y2.part",
        steps / ".notes.x1y2.part",
        steps / ".step-00000012.damaged.x1y2.part",
        steps / ".step-12.x1y2.part",
    ]
    for path in theirs:
        path.write_text("mine")
    with opened(RunRequest(tmp_path, make("tiny", {})), Group()):
        pass
    assert all(path.read_text() == "mine" for path in theirs)
    assert {p for p in tmp_path.rglob("*") if p != steps} == {*theirs}


def test_a_tokenizer_of_somebody_else_is_not_replaced(tmp_path):
    """As `jetfire-train tiny -o .` finds one beside a model of another program's."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "meta.json").write_text("{}")  # of a run killed as it began
    asked = RunRequest(tmp_path, make("tiny", {}))
    with opened(asked, Group()):
        pass
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("mine")
    with pytest.raises(UsageError, match="tokenizer is something else"), opened(asked, Group()):
        pass
    shutil.rmtree(tmp_path / "tokenizer")
    (tmp_path / "tokenizer").write_text("mine")
    with pytest.raises(UsageError, match="tokenizer is something else"), opened(asked, Group()):
        pass


def test_a_checkpoint_that_was_being_replaced_is_put_back(tmp_path):
    steps = tmp_path / "checkpoints"
    (steps / ".step-00000008.x1y2.part" / "old").mkdir(parents=True)
    checkpoint.clean(tmp_path)
    assert os.listdir(steps) == ["step-00000008"]


@pytest.mark.parametrize(
    "name",
    ["checkpoints", "tokenizer", "log.jsonl", "settings.json", ".lock", "tokenizer/meta.json"],
)
def test_nothing_is_written_through_a_link(name, run, home, tmp_path, capsys):
    outside = tmp_path / "outside"
    if (run / name).is_dir():
        shutil.move(run / name, outside)
    else:
        outside.write_text("mine")
        (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    before = snapshot(tmp_path)
    code = resume(run, "--steps", "9")
    err = capsys.readouterr().err
    assert code == (0 if name in ("settings.json", "tokenizer/meta.json") else 2), err
    after = snapshot(tmp_path)
    for path in before:
        if not path.startswith(("run/", "cache/")):
            assert after[path] == before[path]
    assert after.keys() - before.keys() <= {p for p in after if p.startswith(("run/", "cache/"))}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 1 TiB"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lack_of_memory_is_the_user_s_to_mend(error, run, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(Training, "_launch", fail)
    assert resume(run, "--steps", "9") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"jetfire: out of memory ({error}")
    assert last.endswith("expected a smaller batch, context or model")


def test_the_cache_may_be_one_that_cannot_be_written(home, tmp_path, monkeypatch):
    """What was read through is then read through again the next time."""
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    folder = prepare.prepare(home / "text.txt", "byte", tmp_path / "tokens")
    monkeypatch.setattr(prepared, "REMEMBERED", 0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "file"))
    said = []
    for _ in range(2):
        data.open_tokens(folder, said.append)
    assert len(said) == 4
