"""Other tuners' tables: Kernel Tuner's caches and T4 are searched as our recordings are."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetfire.core.errors import UsageError
from jetfire.core.files import write
from jetfire.tests.test_tuner import small_recording, tune
from jetfire.tests.test_tuner_hostile import damaged, errors_kept, few, mutated
from jetfire.tuner import caches
from jetfire.tuner.recording import Recording, replayed

SPENT = {"compile_time": 500.0, "verification_time": 100.0, "benchmark_time": 400}
FATES = {
    (32, "a"): {"time": 2.5, **SPENT},
    (16, "a"): {"time": 4, "times": [3.0, 5.0]},
    (8, "b"): {"time": "InvalidConfig"},
    (32, "b"): {"time": "CompilationFailedConfig"},
    (16, "b"): {"__error__": "RuntimeFailedConfig"},
}
# What is needed of T4's results-schema.json, version 1.0.0.
REQUIRED = ["configuration", "correctness", "invalidity", "times"]
INVALID = ("timeout", "compile", "runtime", "correctness", "constraints", "correct")


def cache(fates=FATES, **changed):
    """A cache as Kernel Tuner writes it; filter_width is one that has one value."""
    rows = {
        f"{size},{kind},15": {"size": size, "kind": kind, "filter_width": 15, **fate}
        for (size, kind), fate in fates.items()
    }
    return {
        "device_name": "Some GPU",
        "kernel_name": "convolution",
        "problem_size": [4096, 2048],
        "tune_params_keys": ["size", "kind", "filter_width"],
        "tune_params": {"size": [32, 16, 8], "kind": ["a", "b"], "filter_width": [15]},
        "cache": rows,
        **changed,
    }


def t4(**changed):
    """Results as T4, the second without a time of its own."""
    first = {
        "configuration": {"size": 32, "kind": "a"},
        "times": {"compilation_time": 250.0, "validation": 750.0, "runtimes": [1.0, 2.0]},
        "invalidity": "correct",
        "correctness": 1,
        "objectives": ["time"],
        "measurements": [
            {"name": "GFLOP/s", "value": 9.0, "unit": ""},
            {"name": "time", "value": 2.5, "unit": "miliseconds"},
        ],
        **changed,
    }
    second = {
        "configuration": {"kind": "b", "size": 16},
        "times": {"runtimes": [9.0, 1.0, 2.0]},
        "invalidity": "correct",
        "correctness": 1,
    }
    late = {**second, "configuration": {"size": 8, "kind": "b"}, "invalidity": "timeout"}
    return {"schema_version": "1.0.0", "results": [first, second, late]}


def loaded(folder, content, name="table.json"):
    (folder / name).write_text(json.dumps(content))
    return Recording.load(folder / name)


def told(recording):
    return [(c.as_dict(), m.outcome, m.ms) for c, m in recording.trials.items()]


def test_a_cache_is_a_recording(tmp_path):
    found = loaded(tmp_path, cache())
    assert found.title == "kernel_tuner/convolution 4096×2048"
    assert found.device == {"name": "Some GPU"}
    assert found.fields == {"size": [8, 16, 32], "kind": ["a", "b"], "filter_width": [15]}
    fates = [("ok", 2.5), ("ok", 4.0), ("illegal", None), ("compile", None), ("crash", None)]
    assert told(found) == [
        ({"size": size, "kind": kind, "filter_width": 15}, *fate)
        for (size, kind), fate in zip(FATES, fates, strict=True)
    ]
    assert [m.seconds for m in found.trials.values()] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert len(found.space().pool) == 5  # no other combination
    best = replayed(found, "exhaustive", 9, 0)
    assert (best.final.timing.ms, best.trials, best.final.config.as_dict()["size"]) == (2.5, 5, 32)


@pytest.mark.parametrize("strategy", ["tpe", "gp", "random"])
def test_a_search_of_a_cache_begins_at_random(tmp_path, strategy):
    """There is no default in it: other seeds begin with other configs."""
    fates = {(size, "a"): {"time": 1 + abs(size - 20)} for size in range(1, 61)}
    found = loaded(tmp_path, cache(fates))
    assert len({replayed(found, strategy, 1, seed).final.config for seed in range(5)}) > 1
    assert replayed(found, strategy, 30, 0) == replayed(found, strategy, 30, 0)


def test_t4_is_a_recording(tmp_path):
    found = loaded(tmp_path, t4(), "some.t4.json")
    assert found.title == "t4/some"
    assert told(found) == [
        ({"size": 32, "kind": "a"}, "ok", 2.5),
        ({"size": 16, "kind": "b"}, "ok", 2.0),
        ({"size": 8, "kind": "b"}, "timeout", None),
    ]
    assert next(iter(found.trials.values())).seconds == 1.0


@pytest.mark.parametrize("name", ["r.t4.json", "r.t4.json.gz"])
def test_a_recording_of_ours_as_t4(tmp_path, name):
    ours, file = small_recording(), tmp_path / name
    write(file, ours.render(file))
    text = file.read_bytes()
    content = json.loads(gzip.decompress(text) if name.endswith(".gz") else text)
    assert content["schema_version"] == "1.0.0"
    assert content["metadata"]["kernel"] == "transpose/triton"
    for result in content["results"]:
        assert set(REQUIRED) <= set(result)
        assert result["invalidity"] in INVALID
        assert all(set(m) == {"name", "value", "unit"} for m in result["measurements"])
    found = Recording.load(file)
    # A rough time is a time there.
    fates = ["ok", "ok", "crash", "ok", "timeout"]
    assert told(found) == [
        (config.as_dict(), fate, m.ms)
        for (config, m), fate in zip(ours.trials.items(), fates, strict=True)
    ]


def test_the_command_takes_and_makes_them(capsys, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(cache()))
    again = tmp_path / "again.t4.json.gz"
    code, out, errors = tune(
        capsys, "--replay", tmp_path / "c.json", "--trials", 5, "--record", again
    )
    assert (code, errors) == (0, [])
    said = "tpe found 2.5000 ms after 5 of 5 configs, the optimum is 2.5000 ms (0.0% more)\n"
    assert out == f"kernel_tuner/convolution 4096×2048: {said}"
    code, out, errors = tune(capsys, "--replay", again, "--trials", 5)
    assert (code, out, errors) == (0, f"t4/again: {said}", [])
    code, out, errors = tune(
        capsys, "--replay", tmp_path / "c.json", "--record", tmp_path / "own.json"
    )
    assert (code, out, len(errors)) == (2, "", 1)
    assert "no kernel of ours: expected a file named .t4.json or .t4.json.gz" in errors[0]


NO_TIME = {**t4()["results"][1], "times": {}}
OTHER = {**t4()["results"][1], "configuration": {"size": 1}}
BROKEN = {
    "keys": (cache(tune_params_keys=["a b"]), "tune_params_keys.0='a b': expected"),
    "keyword": (cache({(1, "a"): {"time": 1.0, "if": 3}}, tune_params_keys=["if"]), "parameter if"),
    "missing": (cache(tune_params_keys=["gone"]), "configuration={}: expected"),
    "entry": (cache(cache={"1": 7}), "cache.0=7: expected a JSON object"),
    "empty": (cache(cache={}), "cache={}: expected"),
    "list": (cache(cache={"1": {"size": [1], "time": 1.0}}), "size=[1]: expected"),
    "word": (cache({(1, "a"): {"time": "soon"}}), "invalidity='soon': expected"),
    "none": (cache({(1, "a"): {}}), "config 0: expected a time in ms"),
    "negative": (cache({(1, "a"): {"time": -1.0}}), "time.0=-1.0: expected greater than"),
    "failed": (cache({(1, "a"): {"time": "InvalidConfig"}}), "none of its configs was timed"),
    "untimed": ({"results": [NO_TIME]}, "config 0: expected a time in ms"),
    "other": (
        {"results": [*t4()["results"], OTHER]},
        "config 3: expected size, kind, as the first",
    ),
    "nothing": ({"results": []}, "results=[]: expected"),
    "unit": (
        t4(measurements=[{"name": "time", "value": 2.5, "unit": "s"}]),
        "time.0='2.5 s': expected a number",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_one_clear_line(capsys, tmp_path, name):
    content, says = BROKEN[name]
    (tmp_path / "t.json").write_text(json.dumps(content))
    code, out, errors = tune(capsys, "--replay", tmp_path / "t.json")
    assert (code, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith(f"jetfire: recording {tmp_path / 't.json'}: ")
    assert says in errors[0]


MANY = [[]] * 5000


@pytest.mark.parametrize(
    "content",
    [
        cache(cache={str(i): [] for i in range(5000)}),
        cache({(str(i), "a"): {"time": "x"} for i in range(5000)}),
        {"results": MANY},
        t4(measurements=MANY),
        t4(configuration={f"k{i}": 1 for i in range(5000)}),
    ],
    ids=["entries", "words", "results", "measurements", "configuration"],
)
def test_a_table_of_many_faults_keeps_few(tmp_path, monkeypatch, content):
    kept = errors_kept(monkeypatch)
    with pytest.raises(UsageError, match="expected"):
        loaded(tmp_path, content)
    assert max(kept) <= 10


@few
@given(st.data())
def test_any_table(capsys, tmp_path, data):
    content = data.draw(st.sampled_from([cache(), t4()]))
    file = tmp_path / "t.json"
    if data.draw(st.booleans()):
        file.write_text(json.dumps(data.draw(mutated(content))))
    else:
        file.write_bytes(data.draw(damaged(json.dumps(content).encode())))
    code, out, errors = tune(capsys, "--replay", file, "--trials", 3, "--strategy", "random")
    assert (code == 0) == (out != "")
    assert len(errors) == (code != 0)


def test_a_table_of_too_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "MOST", 100)
    with pytest.raises(UsageError, match="more than 100 bytes"):
        loaded(tmp_path, cache())
