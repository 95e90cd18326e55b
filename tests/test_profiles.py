"""Profiles: written whole, found exactly or nearest, and never a crash."""

import ast
import dataclasses
import errno
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import timeit
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from jetfire import cli
from jetfire.commands import options
from jetfire.core import launch, lookup, profiles, registry, schema, terminal, workloads
from jetfire.core.device import Device, target_device
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.kernel import Config, Kernel
from jetfire.core.launch import choose, command_for
from jetfire.core.lookup import find
from jetfire.core.profiles import Entry
from jetfire.measure import plan, provenance, runner
from jetfire.measure.plan import Case
from jetfire.tests import forked
from jetfire.tuner.show import show

GEMM = registry.get("gemm")
H200 = Device("cuda", 0, "NVIDIA H200", (9, 0), 132, 227 << 10, 50 << 20)
CPU = Device("cpu", name="Some CPU")


@dataclass(frozen=True)
class ToyConfig(Config):
    tile: int = 1


class Toy(Kernel):
    """Takes tiles of at most m."""

    op = "gemm"
    Config = ToyConfig

    def __init__(self, name="toy", values=(1, 2, 4, 8)):
        self.name, self.values = name, values

    def legal(self, problem, config, device):
        return None if config.tile <= problem.m else "the tile is larger than m"

    def default(self, problem, device):
        return ToyConfig()

    def space(self, problem, device):
        return {"tile": self.values} if self.values else {}

    def launch(self, problem, config, inputs, outputs):
        raise AssertionError

    def source_hash(self):
        return "0123456789ab"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The user's folder; nothing is shipped."""
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "user"))
    monkeypatch.delenv(lookup.STRICT, raising=False)
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(launch, "_said", set())
    profiles.forget()
    yield tmp_path / "user"
    profiles.forget()


@pytest.fixture
def toy(monkeypatch):
    """The only kernel that there is."""
    kernel = Toy()
    monkeypatch.setattr(registry, "kernels", lambda _: {"toy": kernel})
    return kernel


def entry(problem, tile=2, kernel="toy", source="0123456789ab", ms=1.0, **more):
    values = {
        "kernel": kernel,
        "problem": problem.as_dict(),
        "config": {"tile": tile},
        "ms": ms,
        "ms_p20": 0.9,
        "ms_p80": 1.1,
        "samples": 20,
        "default_ms": 1.5,
        "joules": None,
        "objective": "time",
        "vs_peer": {"cublas_bf16": 1.25},
        "trials": 50,
        "strategy": "tpe",
        "provenance": {
            "gpu": "NVIDIA H200",
            "capability": (9, 0),
            "source": source,
            "date": "2026-01-02",
        },
    }
    return Entry(**{**values, **more})


def gemm(m=64, n=64, k=64, **fields):
    return GEMM.Problem(m, n, k, **fields)


def save(*entries, folder=None, device=H200):
    return profiles.save(folder or profiles.user_folder(), device, GEMM, entries)


def warned(call):
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is JetfireWarning]


# Files.


def test_a_profile_is_read_as_it_was_written(folder):
    entries = [entry(gemm(m), joules=0.1) for m in (256, 32, 64)]
    file = save(*entries)
    assert file == folder / "nvidia-h200" / "gemm.json"
    assert profiles.read(file) == tuple(entries[i] for i in (1, 2, 0))
    content = json.loads(file.read_text())
    assert content["schema"] == profiles.SCHEMA == 2
    assert (content["device"], content["capability"], content["op"]) == (
        "NVIDIA H200",
        [9, 0],
        "gemm",
    )
    lines = file.read_text().splitlines()
    assert len(content["provenance"]) == 1
    assert sum(line.startswith('{"kernel"') for line in lines) == 3


def test_the_order_of_saving_leaves_no_trace():
    every = itertools.product((128, 64, 1024), (32, 128), ("b", "a"))
    entries = [entry(gemm(m, block=block), kernel=kernel) for m, block, kernel in every]
    text = save(*entries).read_bytes()
    for e in reversed(entries):
        assert save(e).read_bytes() == text


def test_saving_replaces_the_same_problem_of_the_same_kernel():
    save(entry(gemm(), ms=1.0), entry(gemm(), kernel="other", ms=2.0))
    old = entry(gemm(), ms=3.0)
    del old.problem["accumulate"]  # as in a file from before that field
    save(old)
    file = save(entry(gemm(), ms=4.0))
    assert {e.kernel: e.ms for e in profiles.read(file)} == {"toy": 4.0, "other": 2.0}


def save_many(first, count, fatal):
    if fatal:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    for i in range(first, first + count):
        profiles.save(profiles.user_folder(), H200, GEMM, [entry(gemm(m=i))])


def written(*writers):
    """The exit codes of processes that save at once, of each one's first, count and fate."""
    processes = [forked.start(save_many, *words) for words in writers]
    for process in processes:
        process.join(900)
    return [process.exitcode for process in processes]


def test_two_processes_that_save_at_once_lose_nothing():
    assert written((1, 20, False), (101, 20, False)) == [0, 0]
    file = profiles.path(profiles.user_folder(), H200, "gemm")
    assert {e.problem["m"] for e in profiles.read(file)} == {*range(1, 21), *range(101, 121)}


def test_a_writer_killed_before_the_end_leaves_the_old_file():
    file = save(entry(gemm(8)))
    text = file.read_bytes()
    assert written((1, 1, True)) == [-signal.SIGKILL]
    assert file.read_bytes() == text
    assert len(profiles.read(save(entry(gemm(9))))) == 2  # no lock is left either
    assert not list(file.parent.glob(".*.part"))


def test_a_full_disk_is_one_line_and_leaves_the_old_file(monkeypatch):
    file = save(entry(gemm(8)))
    text = file.read_bytes()

    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UsageError, match=r"gemm.json: cannot be written: No space left"):
        save(entry(gemm(9)))
    assert file.read_bytes() == text
    assert not list(file.parent.glob(".*.part"))


def test_no_lock_is_left_and_none_follows_a_link(tmp_path):
    file = save(entry(gemm(8)))
    assert list(file.parent.iterdir()) == [file]
    (tmp_path / "mine").write_text("my own")
    lock = file.with_suffix(".lock")
    lock.symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match=r"gemm.lock: cannot be written: "):
        save(entry(gemm(9)))
    assert (tmp_path / "mine").read_text() == "my own"


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^cannot write profile "):
        save(entry(gemm()), folder=tmp_path / "file")


def edited(change):
    def made(text):
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return made


BROKEN = {
    "cut": (lambda text: text[: len(text) // 2], "."),
    "empty": (lambda _: "", "no JSON: EOF while parsing"),
    "list": (lambda _: "[]", r"\[\]: expected a JSON object"),
    "deep": (lambda _: "[" * 100_000, "."),
    "old": (edited(lambda c: c.update(schema=1)), "schema '1': this version reads schema 2"),
    "new": (edited(lambda c: c.update(schema=3)), "schema '3': this version reads schema 2"),
    "no schema": (edited(lambda c: c.pop("schema")), "schema 'None': this"),
    "no entries": (edited(lambda c: c.pop("entries")), "entries is missing"),
    "no ms": (edited(lambda c: c["entries"][0].pop("ms")), "ms is missing"),
    "text for ms": (edited(lambda c: c["entries"][0].update(ms="fast")), "ms='fast'"),
    "no time": (edited(lambda c: c["entries"][0].update(ms=math.nan)), "ms=nan"),
    "text for config": (edited(lambda c: c["entries"][0].update(config="x")), "config='x'"),
    "no provenance": (edited(lambda c: c.update(provenance={})), "is missing"),
    **{
        f"{name} {value}": (edited(lambda c, n=name, v=value: c["entries"][0].update({n: v})), said)
        for name, value, said in (
            ("kernel", [], r"kernel=\[\]"),
            ("joules", math.nan, "joules=nan"),
            ("ms_p80", 10**400, "ms_p80=1000"),
            ("default_ms", 0, "default_ms=0"),
            ("samples", 1.5, "samples=1.5"),
            ("trials", math.inf, "trials=inf"),
            ("trials", True, "trials=True"),
            ("objective", None, "objective=None"),
            ("strategy", 1, "strategy=1"),
            ("problem", {"m": {}}, r"problem.m=\{\}: expected a finite number"),
            ("vs_peer", {"copy": "x"}, "vs_peer.copy='x': expected a number"),
            ("provenance", [], "provenance '\\[\\]' is missing"),
            ("config", {"tile": math.inf}, "config.tile=inf: expected a finite number"),
            ("config", {"tile": "\ud800"}, "no JSON: unexpected end of hex escape"),
        )
    },
    "capability": (
        edited(lambda c: next(iter(c["provenance"].values())).update(capability=9)),
        r"provenance.*capability=9: expected a list",
    ),
    "entries of text": (
        edited(lambda c: c.update(entries=["x"])),
        "entries.0='x': expected a JSON object",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named_once_and_skipped(toy, kind):
    change, reason = BROKEN[kind]
    file = save(entry(gemm()))
    broken = change(file.read_text())
    file.write_text(broken)
    profiles.forget()
    sought = []
    told = warned(lambda: sought.extend(find(GEMM, toy, gemm(m), H200).source for m in (64, 8)))
    assert sought == ["default", "default"]
    assert len(told) == 1
    assert re.search(rf"profile {file} skipped: .*{reason}", told[0])
    with pytest.warns(JetfireWarning, match=r"kept as gemm.json.old"):
        save(entry(gemm()))
    assert file.with_name("gemm.json.old").read_text() == broken
    assert find(GEMM, toy, gemm(), H200).source == "tuned"


def test_what_was_kept_before_is_not_overwritten():
    file = save(entry(gemm()))
    names = ["gemm.json.old", "gemm.json.old-2", "gemm.json.old-3"]
    for name in names:
        file.write_text(f"not JSON, to be {name}")
        with pytest.warns(JetfireWarning, match=f"kept as {name}:"):
            save(entry(gemm()))
    kept = [file.with_name(name).read_text() for name in names]
    assert kept == [f"not JSON, to be {name}" for name in names]


def test_problems_of_other_types_have_an_order():
    others = [{"m": 64, "rows": "x"}, {"m": 64, "rows": 3}, {"m": "x"}, {"m": 2.5}, {"m": True}]
    file = save(*(dataclasses.replace(entry(gemm()), problem=other) for other in others))
    assert [e.problem for e in profiles.read(file)] == [others[i] for i in (4, 3, 1, 0, 2)]


def test_a_default_that_failed_has_no_time(toy, capsys):
    file = save(entry(gemm(), default_ms=None))
    assert [(e.default_ms, e.gain) for e in profiles.read(file)] == [(None, None)]
    assert find(GEMM, toy, gemm(), H200).source == "tuned"
    show([], None)
    assert "1.00 ms" in (text := capsys.readouterr().out)
    assert "×" not in text.replace("64×64×64", "").replace("× peer", "").replace("1.25×", "")
    with terminal.speaking(["--json"]) as manner:
        show([], None)
    assert manner.document["profiles"][0]["gain"] is None


def test_a_folder_that_cannot_be_read_is_skipped(toy, folder):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("no folder")
    assert find(GEMM, toy, gemm(), H200).source == "default"


# Lookup.


def test_what_was_tuned_is_found(toy):
    save(entry(gemm(), tile=8))
    found = find(GEMM, toy, gemm(), H200)
    assert (found.config, found.source, found.stale) == (ToyConfig(8), "tuned", False)
    assert found.entry == entry(gemm(), tile=8)
    assert find(GEMM, toy, gemm(), CPU).source == "default"
    assert find(GEMM, Toy("other"), gemm(), H200).source == "default"


def test_the_users_come_before_those_shipped(toy):
    save(entry(gemm(), tile=2), entry(gemm(96), tile=2), folder=profiles.SHIPPED)
    assert find(GEMM, toy, gemm(), H200).config.tile == 2
    save(entry(gemm(), tile=4))
    assert find(GEMM, toy, gemm(), H200).config.tile == 4
    save(entry(gemm(128), tile=8))
    # Exact in shipped, before near in user.
    assert find(GEMM, toy, gemm(96), H200).source == "tuned"
    assert find(GEMM, toy, gemm(120), H200).config.tile == 8
    assert find(GEMM, toy, gemm(97), H200).config.tile == 2  # nearest of both together
    save(entry(gemm(), tile=1024))
    found = find(GEMM, toy, gemm(), H200)
    assert (found.config.tile, found.source) == (2, "tuned")  # the user's is illegal


def test_a_changed_source_is_stale_and_used(toy):
    save(entry(gemm(), tile=4, source="ffffffffffff"))
    found = find(GEMM, toy, gemm(), H200)
    assert (found.config.tile, found.source, found.stale) == (4, "tuned", True)
    assert find(GEMM, toy, gemm(80), H200).stale


@pytest.mark.parametrize("config", [{"tile": 0}, {"size": 3}, {"tile": 999}])
def test_a_config_that_the_kernel_no_longer_takes_is_passed_over(toy, config):
    save(entry(gemm(), config=config), entry(gemm(256), tile=4))
    found = find(GEMM, toy, gemm(), H200)
    assert (found.config.tile, found.source) == (4, "nearest")


def test_a_problem_of_another_version_is_passed_over(toy):
    save(dataclasses.replace(entry(gemm()), problem={"m": 64, "rows": 3}), entry(gemm(), tile=8))
    assert find(GEMM, toy, gemm(), H200).config.tile == 8


def test_the_nearest_is_of_the_same_block_and_output(toy):
    save(
        entry(gemm(64, block=64), tile=8),
        entry(gemm(64, out="fp32"), tile=8),
        entry(gemm(128), tile=4),
    )
    found = find(GEMM, toy, gemm(65), H200)
    assert (found.config.tile, found.source) == (4, "nearest")
    assert find(GEMM, toy, gemm(65, block=128), H200).source == "default"


def test_a_pair_of_blocks_has_its_own(toy):
    """The nearest is of the same two blocks; the text of equal ones is what it always was."""
    same, pair = (gemm(block=128, out="int8", **more) for more in ({}, {"out_block": 32}))
    file = save(entry(same, tile=8), entry(pair, tile=4))
    assert file.read_text().count('"out_block"') == 1
    assert [kept.problem for kept in profiles.read(file)] == [same.as_dict(), pair.as_dict()]
    for m, source in ((64, "tuned"), (65, "nearest")):
        for problem, tile in ((same, 8), (pair, 4)):
            found = find(GEMM, toy, dataclasses.replace(problem, m=m), H200)
            assert (found.config.tile, found.source) == (tile, source)
    for more in ({"out_block": 64}, {"block": 64, "out_block": 32}, {"block": 32}):
        other = gemm(**{"block": 128, "out": "int8", **more})
        assert find(GEMM, toy, other, H200).source == "default"
    assert lookup._place(GEMM, same) == lookup._place(GEMM, pair)
    missed = warned(lambda: choose(GEMM, gemm(block=64, out="int8", out_block=128), H200))
    assert "no profile for m=64 n=64 k=64 block=64 out_block=128 on NVIDIA H200" in missed[0]


def test_problems_saved_before_there_were_two_blocks_are_as_they_were(monkeypatch):
    shipped = Path(launch.__file__).parent.parent / "profiles"
    entries = [(f.stem, entry) for f in shipped.glob("*/*.json") for entry in profiles.read(f)]
    assert len(entries) > 500
    for name, kept in entries:
        problem = registry.get(name).Problem.parse(kept.problem)
        assert json.dumps(problem.as_dict()) == json.dumps(kept.problem)


def test_a_field_that_matters_less_is_a_distance():
    op = GEMM
    place = lookup._place
    same = gemm(out="int8", layout="q", rounding="nearest")
    for other in (gemm(out="int8", layout="qt"), gemm(out="int8", bias=True)):
        assert math.dist(place(op, same), place(op, other)) == pytest.approx(lookup.OTHER_FIELD)
    both = gemm(out="int8", layout="both", rounding="stochastic")
    assert math.dist(place(op, same), place(op, both)) == pytest.approx(
        math.hypot(lookup.OTHER_FIELD, lookup.OTHER_FIELD)
    )
    assert lookup._other_fields(registry.get("cross_entropy")) == ()  # `valid` has many values


def test_a_profile_is_for_any_floats(toy):
    """An eps decides what is computed, not how long it takes."""
    toy.op, op = "layernorm", registry.get("layernorm")

    def keep(problem, tile):
        folder = profiles.user_folder()
        return profiles.save(folder, H200, op, [entry(problem, tile=tile)])

    def norm(**fields):
        return op.Problem(64, 64, **fields)

    keep(norm(eps=1e-5), 4)
    found = find(op, toy, norm(eps=1e-6), H200)
    assert (found.config.tile, found.source) == (4, "tuned")
    assert find(op, toy, norm(eps=1e-5, layout="both"), H200).source == "nearest"
    file = keep(norm(eps=1e-6), 8)  # in the other's place
    assert [kept.config for kept in profiles.read(file)] == [{"tile": 8}]


def test_what_is_too_far_is_not_used(toy):
    save(entry(gemm(64), tile=8))
    factor = 2**lookup.FARTHEST
    assert find(GEMM, toy, gemm(int(64 * factor)), H200).source == "nearest"
    assert find(GEMM, toy, gemm(int(64 * factor) + 1), H200).source == "default"
    assert len(lookup.nearest(GEMM, toy, gemm(64 * 1000), H200, 3)) == 1


H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
A100 = dataclasses.replace(H200, name="NVIDIA A100", capability=(8, 0))


def save_for(device, *entries):
    provenance = {"gpu": device.name, "capability": device.capability, "source": "0123456789ab"}
    entries = [dataclasses.replace(one, provenance=provenance) for one in entries]
    return profiles.save(profiles.user_folder(), device, GEMM, entries)


def test_another_device_of_the_architecture_has_what_this_one_lacks(toy):
    save(entry(gemm(), tile=8), entry(gemm(90), tile=2))
    found = find(GEMM, toy, gemm(), H100)
    assert (found.config.tile, found.source, found.entry.gpu) == (8, "nearest", "NVIDIA H200")
    assert lookup.exact(GEMM, toy, gemm(), H100) is None  # no time of the H200's is the H100's
    assert find(GEMM, toy, gemm(), A100).source == "default"
    save_for(H100, entry(gemm(90), tile=4))
    assert find(GEMM, toy, gemm(90), H100).source == "tuned"
    assert find(GEMM, toy, gemm(), H100).config.tile == 8  # the very problem, before a near one
    assert find(GEMM, toy, gemm(), H200).source == "tuned"
    # Another device counts as another field that differs.
    assert find(GEMM, toy, gemm(88), H100).config.tile == 4
    assert find(GEMM, toy, gemm(66), H100).config.tile == 4
    save_for(H100, entry(gemm(90 * 8), tile=1))
    assert find(GEMM, toy, gemm(64, bias=True), H100).config.tile == 4
    near = lookup.nearest(GEMM, toy, gemm(64), H100, 4)
    assert [e.config["tile"] for e in near] == [8, 4, 2, 1]


def test_kernels_of_another_device_compare_among_each_other(toy, monkeypatch):
    fast = Toy("fast")
    monkeypatch.setattr(registry, "kernels", lambda op: {"toy": toy, "fast": fast})
    save(entry(gemm(), tile=2, ms=2.0), entry(gemm(), tile=4, ms=1.0, kernel="fast"))
    told = warned(lambda: chosen(gemm(), H100))
    assert told[0].startswith(
        "gemm: no profile for m=64 n=64 k=64 block=32 on NVIDIA H100 80GB HBM3: that of "
        "NVIDIA H200 is used; tune it: jetfire-tune gemm"
    )
    assert chosen(gemm(), H100) == ("fast", 4)
    save_for(H100, entry(gemm(), tile=8, ms=3.0))
    assert chosen(gemm(), H100) == ("toy", 8)  # an H200's time says nothing of an H100's


def chosen(problem, device):
    kernel, config = choose(GEMM, problem, device)
    return kernel.name, config.tile


def test_what_the_kernel_expects_to_be_slower_than_its_default_is_passed_over(toy, monkeypatch):
    save(entry(gemm(64), tile=8), entry(gemm(70), tile=4), entry(gemm(80), tile=2))
    expected = {1: 10.0, 8: 10.0 * lookup.MODEL_SLACK + 0.1, 4: None, 2: 9.0}
    monkeypatch.setattr(toy, "estimate", lambda problem, config, device: expected[config.tile])
    assert find(GEMM, toy, gemm(65), H200).config.tile == 4  # of which it has no opinion
    expected[4] = 11.0
    assert find(GEMM, toy, gemm(65), H200).config.tile == 2
    expected[2] = 11.0
    assert find(GEMM, toy, gemm(65), H200).source == "default"
    # A config that it cannot estimate is taken from near by; from afar only where it cannot
    # estimate its default either.
    expected[4] = None
    assert find(GEMM, toy, gemm(128), H200).config.tile == 4
    assert find(GEMM, toy, gemm(160), H200).source == "default"
    expected[1] = None
    assert find(GEMM, toy, gemm(160), H200).source == "nearest"
    expected[1] = 10.0
    # What was measured at the very shape is not doubted.
    assert find(GEMM, toy, gemm(64, bias=True), H200).config.tile == 8
    assert find(GEMM, toy, gemm(64), H200).source == "tuned"


def test_the_nearest_for_a_tuner_are_legal_and_differ(toy):
    save(
        *(entry(gemm(m), tile=tile) for m, tile in ((64, 2), (65, 2), (70, 4), (80, 1000), (90, 8)))
    )
    found = lookup.nearest(GEMM, toy, gemm(64), H200, 3)
    assert [e.config["tile"] for e in found] == [2, 4, 8]
    assert len(lookup.nearest(GEMM, toy, gemm(64), H200, 2)) == 2
    assert lookup.nearest(GEMM, toy, gemm(64), H200, 0) == []


sizes = st.builds(gemm, *[st.integers(1, 300)] * 3, block=st.sampled_from((32, 64)))


@settings(max_examples=30, deadline=None)
@given(tuned=st.lists(st.tuples(sizes, st.integers(1, 300)), max_size=8), wanted=sizes)
def test_nothing_legal_is_nearer(tuned, wanted):
    kernel = Toy()
    every: dict = {}
    for problem, tile in tuned:
        where = profiles.sort_of(problem), lookup._place(GEMM, problem)
        one = lookup._Tuned(entry(problem, tile), True, ToyConfig(tile), False, *where)
        every.setdefault(lookup._kind(GEMM, problem), []).append(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_tuned", lambda *_: every)
        found = find(GEMM, kernel, wanted, H200)

    def distance(problem):
        return math.hypot(*(math.log2(getattr(problem, d) / getattr(wanted, d)) for d in "mnk"))

    near = [
        distance(problem)
        for problem, tile in tuned
        if tile <= wanted.m and problem.block == wanted.block
    ]
    near = [d for d in near if d <= lookup.FARTHEST]
    assert (found.source == "default") == (not near)
    if near:
        assert distance(gemm(**found.entry.problem)) == pytest.approx(min(near))
        assert (found.source == "tuned") == (min(near) == 0)


def test_an_architecture_has_the_profiles_of_its_devices(toy):
    save(entry(gemm(), tile=4))
    assert find(GEMM, toy, gemm(), target_device((9, 0))).config.tile == 4
    assert find(GEMM, toy, gemm(), target_device((8, 0))).source == "default"


def gpt2_350m(*token_counts):
    """The distinct GEMMs of a training step, for several sizes of batch."""
    model = workloads.MODELS["gpt2-350m"]
    return list(
        dict.fromkeys(
            problem
            for tokens in token_counts
            for mode in GEMM.modes
            for shape in GEMM.shapes(dataclasses.replace(model, tokens=tokens))
            for problem in GEMM.problems(mode, shape)
        )
    )


@pytest.fixture
def lookups(monkeypatch):
    """Look up 25 problems among 600 entries, of which one has been looked up: their sources."""
    gluon, triton = (registry.get_kernel("gemm", name) for name in ("gluon", "triton"))
    kinds = itertools.product((gluon, triton), (32, 64, 128), ("bf16", "fp16", "fp32", "int8"))
    entries = [
        entry(problem, kernel=kernel.name, config=kernel.default(problem, H200).as_dict())
        for kernel, block, out in kinds
        for n, k in itertools.product((1024, 2048, 3072, 4096, 8192), repeat=2)
        for problem in (gemm(8192, n, k, block=block, out=out),)
    ]
    assert len(entries) == 600
    save(*entries)
    wanted = gpt2_350m(8192, 8000, 4096, 2048)[:25]
    assert len(wanted) == 25
    find(GEMM, gluon, wanted[0], H200)
    monkeypatch.setattr(schema, "load", None)  # nothing is read from here on

    return lambda: [find(GEMM, gluon, problem, H200).source for problem in wanted]


def test_lookups_after_the_first_read_nothing(lookups):
    assert {"tuned", "nearest"} <= set(lookups())


@pytest.mark.quiet
def test_25_lookups_among_600_entries_take_under_a_millisecond(lookups):
    assert min(timeit.repeat(lookups, number=1, repeat=20)) < 1e-3


def test_importing_nn_loads_torch_pydantic_and_us_alone_and_reads_no_profile(folder):
    file = profiles.path(folder, H200, "gemm")
    file.parent.mkdir(parents=True)
    file.write_text("{")
    code = (
        "import sys, torch; before = set(sys.modules); import jetfire.nn; "
        "print(({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names), 'torch._dynamo' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found, dynamo = ast.literal_eval(done.stdout)
    schema_s = {"annotated_types", "pydantic", "pydantic_core", "typing_inspection"}
    assert {name for name in found - schema_s if not name.startswith("_sysconfig")} == {"jetfire"}
    assert not dynamo


# What a model and the bench make of them.


def test_a_miss_is_told_once_with_the_command(toy):
    problem = gemm(4096, 1024, 2048, out="fp32", accumulate=True)
    told = warned(lambda: choose(GEMM, problem, H200))
    assert told == [
        "gemm: no profile for m=4096 n=1024 k=2048 block=32 on NVIDIA H200: the default is used; "
        "tune it: jetfire-tune gemm --m 4096 --n 1024 --k 2048 --block 32 --set out=fp32 "
        "--set accumulate=true"
    ]
    assert warned(lambda: choose(GEMM, gemm(), H200)) == []


def test_the_nearest_is_told_of(toy):
    save(entry(gemm(80, 32)))
    (told,) = warned(lambda: choose(GEMM, gemm(64, 64), H200))
    assert "the nearest is used (m=80 n=32);" in told


def test_a_stale_profile_is_told_of_once(toy):
    save(entry(gemm(), source="ffffffffffff"), entry(gemm(128), source="ffffffffffff"))
    (told,) = warned(lambda: choose(GEMM, gemm(), H200))
    assert told.startswith("gemm/toy: its source has changed since it was tuned on NVIDIA H200; ")
    assert warned(lambda: choose(GEMM, gemm(128), H200)) == []


def test_strict_makes_a_miss_an_error(toy, monkeypatch):
    save(entry(gemm()))
    monkeypatch.setenv(lookup.STRICT, "1")
    choose(GEMM, gemm(), H200)
    for problem in (gemm(80), gemm(4096)):
        with pytest.raises(UsageError, match=r"no profile for m=\d+ .*; tune it: jetfire-tune"):
            choose(GEMM, problem, H200)


@pytest.mark.parametrize("word", ["1", "true", "True", "YES", "on"])
def test_profiles_are_strict_by_any_word_for_on(monkeypatch, word):
    monkeypatch.setenv(lookup.STRICT, word)
    assert lookup.strict()


@pytest.mark.parametrize("word", ["", "0", "false", "False", "NO", "off"])
def test_profiles_are_not_strict_by_any_word_for_off(monkeypatch, word):
    monkeypatch.setenv(lookup.STRICT, word)
    assert not lookup.strict()


@pytest.mark.parametrize("word", ["2", "strict", " 1", "truee"])
def test_what_is_no_word_for_on_or_off_is_refused(monkeypatch, capsys, word):
    monkeypatch.setenv(lookup.STRICT, word)
    with pytest.raises(UsageError):
        lookup.strict()
    assert cli.execute("bench", DRY) == 2
    assert capsys.readouterr().err == (
        f"jetfire: JETFIRE_STRICT_PROFILE={word!r}: "
        "expected one of 1, true, yes, on, or one of 0, false, no, off\n"
    )


def test_nothing_is_told_where_there_is_nothing_to_tune(monkeypatch):
    monkeypatch.setenv(lookup.STRICT, "1")
    monkeypatch.setattr(registry, "kernels", lambda _: {"toy": Toy(values=())})
    assert warned(lambda: choose(GEMM, gemm(), H200)) == []


def test_nothing_is_told_of_interpreted_kernels(monkeypatch):
    monkeypatch.setenv(lookup.STRICT, "1")
    triton = registry.get_kernel("gemm", "triton")
    monkeypatch.setattr(registry, "kernels", lambda _: {"triton": triton})
    here = dataclasses.replace(CPU, interpreted=True)
    assert warned(lambda: choose(GEMM, gemm(), here)) == []


def test_the_fastest_is_chosen_of_kernels_tuned_for_a_problem(monkeypatch):
    kernels = {name: Toy(name) for name in ("first", "second", "third")}
    monkeypatch.setattr(registry, "kernels", lambda _: kernels)
    save(entry(gemm(), kernel="second", ms=2.0))
    with pytest.warns(JetfireWarning):  # nobody knows that the first is slower
        assert choose(GEMM, gemm(), H200)[0].name == "first"
    save(entry(gemm(), kernel="first", ms=3.0), entry(gemm(), kernel="third", ms=1.0, tile=4))
    kernel, config = choose(GEMM, gemm(), H200)
    assert (kernel.name, config.tile) == ("third", 4)
    save(entry(gemm(), kernel="third", ms=1.0, tile=999))
    assert choose(GEMM, gemm(), H200)[0].name == "second"


def test_times_are_compared_that_one_gpu_has(monkeypatch):
    """Of an architecture both GPUs' are known, of the slower one for the second kernel alone."""
    kernels = {name: Toy(name) for name in ("first", "second")}
    monkeypatch.setattr(registry, "kernels", lambda _: kernels)
    save_for(H100, entry(gemm(), kernel="second", ms=3.0))
    save(entry(gemm(), kernel="first", ms=2.0), entry(gemm(), kernel="second", ms=1.0, tile=4))
    kernel, config = choose(GEMM, gemm(), target_device((9, 0)))
    assert (kernel.name, config.tile) == ("second", 4)


def test_a_candidate_runs_where_it_was_tuned_and_no_other_kernel_is_known_as_faster(monkeypatch):
    kernels = {name: Toy(name) for name in ("candidate", "first")}
    kernels["candidate"].candidate = True
    monkeypatch.setattr(registry, "kernels", lambda _: kernels)
    save_for(H100, entry(gemm(), kernel="candidate", ms=1.0))
    with pytest.warns(JetfireWarning):
        assert choose(GEMM, gemm(), H200)[0].name == "first"
    save(entry(gemm(), kernel="candidate", ms=2.0))
    assert choose(GEMM, gemm(), H200)[0].name == "candidate"
    save(entry(gemm(), kernel="first", ms=1.5))
    assert choose(GEMM, gemm(), H200)[0].name == "first"
    save(entry(gemm(), kernel="first", ms=2.5))
    assert choose(GEMM, gemm(), H200)[0].name == "candidate"


def test_a_choice_is_made_once_until_profiles_change(toy, monkeypatch):
    asked = []
    legal = Toy.legal
    monkeypatch.setattr(Toy, "legal", lambda *given: asked.append(given) or legal(*given))
    with pytest.warns(JetfireWarning):
        first = choose(GEMM, gemm(), H200)
    count = len(asked)
    assert choose(GEMM, gemm(), H200) is first
    assert len(asked) == count
    save(entry(gemm(), tile=8))
    assert choose(GEMM, gemm(), H200)[1].tile == 8


def every_problem():
    for name in registry.names():
        op = registry.get(name)
        for mode in op.modes:
            for fields in ({}, {"m": "33"}):
                yield from op.problems(mode, {**dict.fromkeys(op.dims, "96"), **fields})
    yield from (
        gemm(33, out="int8", layout="both", rounding="stochastic", bias=True),
        gemm(5, 6, 7),
        gemm(33, out="int8", block=128, out_block=32),
    )
    for name in ("gelu", "layernorm", "add"):
        yield from registry.get(name).problems("bwd", {"m": 5, "n": 6, "out_block": 128})
        yield from registry.get(name).problems("bwd", {"m": 5, "n": 6, "rounding": "nearest"})
    yield from registry.get("layernorm").problems(
        "fwd", {"m": 5, "n": 6, "stats": "given", "eps": 1e-6}
    )
    yield from registry.get("dropout").problems("bwd", {"m": 5, "n": 6, "p": 0.25})


@pytest.mark.parametrize("problem", list(every_problem()), ids=str)
def test_the_command_tunes_just_the_problem(problem):
    op = next(op for op in map(registry.get, registry.names()) if op.Problem is type(problem))
    script, *words = command_for(op, problem).split()
    assert script == "jetfire-tune"
    command = typer.main.get_command(cli.app).commands["tune"].commands["run"]
    given = command.make_context("tune", words).params
    request = options.request(given, mode=[given["mode"]])
    assert plan.cases(request.sized(4096), print) == [Case(op, problem)]


def test_the_bench_says_where_a_config_comes_from(toy):
    save(entry(gemm(), tile=4), entry(gemm(1024), tile=8))
    case, options = Case(GEMM, gemm()), runner.Options()
    (choice,) = runner.choices(case, H200, options)
    assert (choice.config.tile, choice.profile) == (4, "tuned")
    (told,) = warned(lambda: runner.choices(Case(GEMM, gemm(1000)), H200, options))
    assert "the nearest is used (m=1024)" in told
    given = runner.Options(config={"tile": "2"})
    assert warned(lambda: runner.choices(Case(GEMM, gemm(9, block=64)), H200, given)) == []


def test_the_bench_asks_for_no_second_kernel_to_be_tuned(monkeypatch):
    kernels = {name: Toy(name) for name in ("first", "second")}
    monkeypatch.setattr(registry, "kernels", lambda _: kernels)
    save(entry(gemm(), kernel="first"))
    case = Case(GEMM, gemm())
    assert warned(lambda: runner.choices(case, H200, runner.Options())) == []
    monkeypatch.setenv(lookup.STRICT, "1")
    with pytest.raises(UsageError, match="no profile"):
        runner.choices(case, H200, runner.Options())


DRY = ["gemm", "--m", "64", "--block", "32", "--device", "cpu", "--dry-run"]


def test_the_command_line_warns_in_a_line(toy, capsys):
    assert cli.execute("bench", DRY) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jetfire: gemm: no profile for m=64 n=64 k=64 block=32 on ")


def test_a_strict_command_line_exits_2(toy, capsys, monkeypatch):
    monkeypatch.setenv(lookup.STRICT, "0")
    assert cli.execute("bench", [*DRY, "--strict-profile"]) == 2
    assert "tune it: jetfire-tune gemm --m 64" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_file_in_place_of_the_users_folder_is_a_line(toy, folder, monkeypatch, capsys, inside):
    folder.write_text("")
    monkeypatch.setenv("JETFIRE_PROFILES", str(folder / inside))
    expected = f"JETFIRE_PROFILES={folder / inside}: expected a folder: Not a directory"
    for words in (DRY, DRY[:-1]):
        assert cli.execute("bench", words) == 2
        assert capsys.readouterr().err == f"jetfire: {expected}\n"


# What is shown.


def test_show_lists_the_users_then_those_shipped(toy, capsys):
    save(entry(gemm(), tile=4), entry(gemm(128), kernel="gone"))
    save(entry(gemm(), source="ffffffffffff"), folder=profiles.SHIPPED)
    show([], None)
    text = capsys.readouterr().out
    assert text.index("user: ") < text.index("shipped: ")
    for part in (
        "NVIDIA H200",
        "64×64×64",
        "tile=4",
        "1.00 ms",
        "1.50×",
        "1.25× cublas_bf16",
        "2026-01-02",
        "no kernel",
        "stale",
    ):
        assert part in text
    assert "\x1b" not in text


def test_show_as_json(toy, capsys):
    save(entry(gemm(), tile=4))
    save(entry(gemm()), device=CPU)
    with terminal.speaking(["--json"]) as manner:
        show(["gemm"], H200)
    (record,) = manner.document["profiles"]
    assert (record["op"], record["state"], record["gain"]) == ("gemm", "current", 1.5)
    assert not record["shipped"]
    assert record["config"] == {"tile": 4}


def test_show_says_where_it_found_nothing(capsys):
    show(["gemm"], H200)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no profile of gemm on NVIDIA H200 in " in shown.err
    with pytest.raises(UsageError, match="no op 'nope'"):
        show(["nope"], None)


def test_provenance_names_what_times_depend_on(monkeypatch):
    kernel = registry.get_kernel("gemm", "triton")
    monkeypatch.setattr(provenance, "driver_of", lambda _: "580.1")
    made = provenance.of(kernel, H200)
    assert set(made) == {
        "gpu",
        "capability",
        "driver",
        "cuda",
        "torch",
        "triton",
        "source",
        "timer",
        "date",
        "jetfire",
    }
    assert (made["gpu"], made["capability"], made["driver"]) == ("NVIDIA H200", (9, 0), "580.1")
    assert made["source"] == kernel.source_hash()
    assert json.loads(json.dumps(made)) == {**made, "capability": [9, 0]}


def shown(capsys, *words):
    """The profiles that `tune show` lists with some options: kernel, m, block and out of each."""
    assert cli.execute("tune", ["show", "gemm", *words, "--json"]) == 0
    return [
        (record["kernel"], *(record["problem"][name] for name in ("m", "block", "out")))
        for record in json.loads(capsys.readouterr().out)["profiles"]
    ]


def test_show_lists_what_the_options_leave(folder, capsys):
    kept = [
        entry(
            gemm(m, n, k, block=block, out=out),
            kernel=kernel,
            config=registry.get_kernel("gemm", kernel).default(gemm(), H200).as_dict(),
        )
        for m, n, k, block, out, kernel in (
            (64, 64, 64, 32, "bf16", "gluon"),
            (64, 64, 64, 64, "int8", "gluon"),
            (8192, 3072, 1024, 32, "bf16", "gluon"),
            (96, 64, 64, 32, "bf16", "triton"),
        )
    ]
    save(*kept)
    assert len(shown(capsys)) == 4
    assert shown(capsys, "--m", "64") == [("gluon", 64, 32, "bf16"), ("gluon", 64, 64, "int8")]
    assert shown(capsys, "--m", "64,96", "--block", "32") == [
        ("gluon", 64, 32, "bf16"),
        ("triton", 96, 32, "bf16"),
    ]
    assert shown(capsys, "--m", "64", "--m", "96", "--kernel", "triton") == [
        ("triton", 96, 32, "bf16")
    ]
    assert shown(capsys, "--set", "out=int8") == [("gluon", 64, 64, "int8")]
    codes = ("--set", "out=int8", "--set")
    assert shown(capsys, *codes, "out_block=64") == [("gluon", 64, 64, "int8")]
    assert shown(capsys, *codes, "out_block=32") == []
    assert shown(capsys, "--set", "bias=TRUE") == []
    assert shown(capsys, "--workload", "gpt2-350m") == [("gluon", 8192, 32, "bf16")]
    assert shown(capsys, "--n", "3072") == [("gluon", 8192, 32, "bf16")]
    assert cli.execute("tune", ["show", "gemm", "--m", "65"]) == 0
    assert "no profile of gemm that the options leave in" in capsys.readouterr().err
    assert cli.execute("tune", ["show", "gemm", "--budget", "5m"]) == 2
    assert "no option --budget: expected one of --m" in capsys.readouterr().err
