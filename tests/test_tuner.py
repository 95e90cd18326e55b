"""The tuner without a device: spaces, strategies, the loop, the last word, the command."""

import csv
import dataclasses
import gzip
import io
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from rich.console import Console

from jetfire import cli
from jetfire.core import profiles, registry, workloads
from jetfire.core.device import Device, target_device
from jetfire.core.errors import JetfireError, UsageError, WrongResultError
from jetfire.core.files import write
from jetfire.core.kernel import Config, Kernel
from jetfire.kernels_cuda.hadamard_gemm.staged import plan
from jetfire.measure import provenance
from jetfire.measure.plan import BLOCKS, Case, check_peers
from jetfire.measure.timer import Timing
from jetfire.ops.bit_split import BitSplitProblem
from jetfire.ops.gather_rows import GatherRowsProblem
from jetfire.ops.hadamard_quantize import HadamardQuantizeProblem
from jetfire.ops.int4_gemm import Int4GemmProblem
from jetfire.ops.sample_rows import SampleRowsProblem
from jetfire.report.text import plural
from jetfire.tuner import command, problems
from jetfire.tuner import display as display_module
from jetfire.tuner import space as space_module
from jetfire.tuner.display import SearchDisplay
from jetfire.tuner.options import TuneOptions
from jetfire.tuner.recording import Recording, ReplayRunner, replayed
from jetfire.tuner.search import (
    GRACE_S,
    Final,
    FinishedSearch,
    Limits,
    SearchTarget,
    beats,
    best_for_all,
    decide,
    search,
)
from jetfire.tuner.space import Space
from jetfire.tuner.strategies import RANDOM_FIRST, STRATEGIES, Exhausted
from jetfire.tuner.study import Identity, Study
from jetfire.tuner.trial import Comparison, Measurement, RunnerError

DATA = Path(__file__).parent / "data"
TRANSPOSE = registry.get("transpose")
PROBLEM = TRANSPOSE.Problem(m=64, n=64, block=32)
HERE = Device("cpu", name="Some CPU")
FOREVER = Limits(10**9, math.inf)


@dataclass(frozen=True)
class ToyConfig(Config):
    tile: int = 64
    warps: int = 4
    fast: bool = False
    order: Literal["row", "column"] = "row"


FIELDS = {
    "tile": (16, 32, 64, 128, 256),
    "warps": (1, 2, 4, 8),
    "fast": (False, True),
    "order": ("row", "column"),
}


def reason(config):
    return "too few warps for it" if config.tile > 64 * config.warps else None


class Toy(Kernel):
    """Runs nowhere."""

    op = "transpose"
    name = "toy"
    Config = ToyConfig

    def legal(self, problem, config, device):
        return reason(config)

    def default(self, problem, device):
        return ToyConfig()

    def space(self, problem, device):
        return FIELDS

    def launch(self, problem, config, inputs, outputs):
        raise AssertionError

    def source_hash(self):
        return "0123456789ab"


TOY = Toy()


def toy_space(fields=FIELDS, legal=reason):
    return Space(fields, ToyConfig(), legal)


def cost(config):
    """Least for one legal config."""
    far = abs(math.log2(config.tile / 128)) + abs(math.log2(config.warps / 4))
    return 1.0 + 0.3 * far + 0.2 * config.fast + 0.1 * (config.order == "row")


def measured(config):
    return Measurement("ok", cost(config), joules=2.0 / cost(config), seconds=1.0)


def study_with(strategy, space, seed=0, first=(), objective="time", storage=None):
    """A study of the toy, in memory."""
    identity = Identity(TOY, PROBLEM, HERE, space, objective, "normal")
    sampler = STRATEGIES[strategy](space, seed, first)
    return Study(identity, sampler, storage or optuna.storages.InMemoryStorage(), print, {})


def play(study, count=10**9, fate=measured):
    """Ask and tell, one after the other, until there are none left; the configs in order."""
    asked = []
    for _ in range(count):
        try:
            number, config = study.ask()
        except Exhausted:
            break
        asked.append(config)
        study.finish(number, config, fate(config))
    return asked


def states(study):
    return Counter(t.state for t in study.optuna.get_trials(deepcopy=False))


# The recorded spaces.


@cache
def recorded(name):
    return Recording.load(DATA / f"gemm-{name}-h200.json.gz")


@cache
def recorded_space(name):
    return recorded(name).space()


SEARCHES = 20


def gaps(name, strategy):
    """How far above the optimum searches of 15% of the space end; they know no default."""
    recording, space = recorded(name), recorded_space(name)
    for seed in range(SEARCHES):
        identity = Identity(recording.kernel, recording.problem, HERE, space, "time", "normal")
        sampler = STRATEGIES[strategy](space, seed, ())
        study = Study(identity, sampler, optuna.storages.InMemoryStorage(), print, {})
        trials = math.ceil(0.15 * len(space.pool))
        search(study, ReplayRunner(recording.trials), Limits(trials, math.inf), lambda *_: None)
        times = [m.ms for _, m in study.finished() if m.outcome == "ok"]
        assert len(study.finished()) == trials
        yield min(times) / recording.optimum_ms - 1


@cache
def median_of_random(name):
    return statistics.median(gaps(name, "random"))


def near_the_optimum(name, strategy):
    """The median is within 3%, and below that of random searches.

    It is once more than half of the searches are: the rest, which take minutes, are not run.
    """
    assert len(recorded_space(name).pool) >= 400
    near = (gap <= 0.03 and gap < median_of_random(name) for gap in gaps(name, strategy))
    assert sum(itertools.islice(filter(None, near), SEARCHES // 2 + 1)) > SEARCHES // 2


@pytest.mark.parametrize("name", ["triton", "wgmma"])
def test_tpe_is_near_the_optimum_soon(name):
    near_the_optimum(name, "tpe")


def test_a_replay_decides_as_the_tuner_does():
    recording = recorded("triton")
    found = replayed(recording, "gp", 60, 0)
    assert found == replayed(recording, "gp", 60, 0)
    ms = found.final.timing.ms
    assert ms == recording.trials[found.final.config].ms
    assert ms <= recording.trials[recording.base].ms  # it began with the default
    assert found.trials == 60
    assert found.seconds > sum(sorted(m.seconds for m in recording.trials.values())[:60])
    short = replayed(recording, "gp", 60, 0, budget_s=found.seconds / 4)
    assert 0 < short.trials < 30


def test_a_replay_of_an_unknown_strategy():
    said = r"^--strategy luck: expected one of tpe, gp, random, exhaustive$"
    with pytest.raises(UsageError, match=said):
        replayed(recorded("triton"), "luck", 3, 0)


def test_a_replay_of_which_nothing_is_right():
    recording = recorded("triton")
    broken = {config: Measurement("crash") for config in recording.trials}
    elsewhere = dataclasses.replace(recording.base, stages=9)
    for base, why in ((recording.base, "crash"), (elsewhere, "not recorded")):
        failing = dataclasses.replace(recording, trials=broken, base=base)
        with pytest.raises(WrongResultError, match=f"^no config is right: {why}$"):
            replayed(failing, "random", 3, 0)


# Spaces.


def test_legality_is_asked_once_a_point():
    asked = Counter()

    def judge(config):
        asked[config] += 1
        return reason(config)

    space = toy_space(legal=judge)
    for _ in range(2):
        assert list(space.points()) == space.pool
        for point in space.pool:
            assert space.legal(point)
            list(space.neighbours(point))
    play(study_with("tpe", space, first=[space.point(ToyConfig().as_dict())]))
    assert len(asked) == space.size == 80
    assert set(asked.values()) == {1}


@st.composite
def spaces(draw):
    """A few values of some fields, of whose combinations any may be illegal."""
    fields = {
        name: tuple(draw(st.lists(st.sampled_from(values), min_size=1, unique=True)))
        for name, values in FIELDS.items()
        if draw(st.booleans())
    } or {"tile": (16, 64)}
    illegal = draw(st.sets(st.integers(0, math.prod(map(len, fields.values())) - 1)))
    combinations = [dict(zip(fields, c, strict=True)) for c in itertools.product(*fields.values())]
    bad = {dataclasses.replace(ToyConfig(), **combinations[i]) for i in illegal}
    return toy_space(fields, lambda config: "drawn" if config in bad else None)


def differing(a, b):
    return sum(x != y for x, y in zip(a, b, strict=True))


@settings(max_examples=60, deadline=None)
@given(spaces())
def test_points_configs_and_parameters_tell_the_same(space):
    every = list(itertools.product(*(range(len(v)) for v in space.fields.values())))
    assert space.size == len(every)
    assert space.whole
    assert space.pool == [p for p in every if space.reason(space.config(p)) is None]
    for point in every:
        config = space.config(point)
        assert space.point(space.parameters(point)) == point
        assert space.point(config.as_dict()) == point
        assert space.parameters(point).items() <= config.as_dict().items()
        kept = {n: v for n, v in space.base.as_dict().items() if n not in space.fields}
        assert kept.items() <= config.as_dict().items()
        assert space.legal(point) == (space.reason(config) is None)
        others = list(space.neighbours(point))
        assert len(set(others)) == len(others)
        assert set(others) == {p for p in space.pool if differing(p, point) == 1}
    cube = space.unit(every)
    assert cube.shape == (len(every), len(space.fields))
    assert cube.min() == 0
    assert cube.max() <= 1


def test_what_lies_outside_has_no_point():
    space = toy_space()
    assert space.point(ToyConfig(tile=48).as_dict()) is None
    assert space.point({"tile": 64}) is None
    assert space.point({**ToyConfig().as_dict(), "more": 1}) == (2, 2, 0, 0)


def test_limits():
    space = Space.of(TOY, PROBLEM, HERE, {"tile": ["256", "16", "256"], "fast": ["True"]})
    assert space.fields == {**FIELDS, "tile": (256, 16), "fast": (True,)}
    assert space.base == ToyConfig()
    assert {space.config(p).fast for p in space.pool} == {True}
    assert len(play(study_with("exhaustive", space))) == len(space.pool) == 12
    assert Space.of(TOY, PROBLEM, HERE, {"fast": ["true", "False"]}).fields["fast"] == (True, False)
    assert Space.of(TOY, PROBLEM, HERE).fields == FIELDS
    says = r"^--space stages: toy does not search it: expected one of tile, warps, fast, order$"
    with pytest.raises(UsageError, match=says):
        Space.of(TOY, PROBLEM, HERE, {"stages": ["3"]})
    with pytest.raises(UsageError, match=r"^--space warps=3: expected one of 1, 2, 4, 8$"):
        Space.of(TOY, PROBLEM, HERE, {"warps": ["1", "3"]})
    with pytest.raises(UsageError, match=r"^--space fast=maybe: expected false or true$"):
        Space.of(TOY, PROBLEM, HERE, {"fast": ["maybe"]})


@dataclass(frozen=True)
class WideConfig(Config):
    a: int = 0
    b: int = 0
    c: int = 0


def wide_space(judge):
    return Space({name: tuple(range(40)) for name in "abc"}, WideConfig(), judge)


def test_of_a_large_product_the_pool_is_a_sample():
    assert space_module.WHOLE < 40**3
    asked = Counter()

    def judge(config):
        asked[config] += 1
        return None if (config.a + config.b + config.c) % 3 == 0 else "no"

    space = wide_space(judge)
    assert not space.whole
    assert len(space.pool) == len(set(space.pool)) == space_module.POOL
    assert all(judge(space.config(point)) is None for point in space.pool)
    assert len(asked) < 40**3 / 3
    assert space.pool == wide_space(judge).pool
    rare = wide_space(lambda c: None if c.a == c.b == c.c else "no")
    assert 30 < len(rare.pool) <= 40


def test_gp_sees_the_order_of_times_alone():
    """However many times slower the slow ones are, it tries the same configs."""

    def steep(config):
        return Measurement("ok", cost(config) ** 9, seconds=1.0)

    assert play(study_with("gp", toy_space()), 40) == play(study_with("gp", toy_space()), 40, steep)


def test_a_field_of_one_value_does_not_count_for_gp():
    fields = {"tile": FIELDS["tile"], "warps": FIELDS["warps"]}
    one = {**fields, "fast": (False,), "order": ("row",)}
    searches = [play(study_with("gp", toy_space(each), 3), 18) for each in (fields, one)]
    assert searches[0] == searches[1]


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_beyond_the_pool_a_search_goes_on_around_its_best(strategy):
    def far(config):
        return (abs(config.a - 31) + abs(config.b - 7) + abs(config.c - 20)) / 10

    space = wide_space(lambda config: None)
    space.__dict__["pool"] = space.pool[:30]
    study = study_with(strategy, space)
    # The study parses configs of the toy's: ask and tell what the sampler gives.
    tried = []
    for _ in range(60):
        trial = study.optuna.ask(distributions_of(space))
        tried.append(point := space.point(trial.params))
        trial.set_user_attr("outcome", "ok")
        study.optuna.tell(trial, 1.0 + far(space.config(point)))
    assert len(set(tried)) == 60
    assert set(tried) - set(space.pool)
    values = [far(space.config(point)) for point in tried]
    assert min(values) < min(far(space.config(point)) for point in space.pool)


def distributions_of(space):
    return {
        n: optuna.distributions.CategoricalDistribution(values)
        for n, values in space.fields.items()
    }


# Strategies.

FATES = {
    0: measured,
    1: lambda config: Measurement("slow", 9.0, seconds=0.1),
    2: lambda config: Measurement("crash", message="it crashed"),
    3: lambda config: Measurement("timeout", message="it hung"),
}


@pytest.mark.parametrize("objective", ["time", "energy", "both"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_point_twice_and_none_illegal(strategy, objective):
    """With several under way, some that fail, and some that are given up and come again."""
    space = toy_space()
    first = [space.point(ToyConfig(tile=16).as_dict()), space.point(ToyConfig().as_dict())]
    study = study_with(strategy, space, 3, first, objective)
    rng, under_way, asked, again = np.random.default_rng(5), {}, [], []
    while True:
        try:
            number, config = study.ask()
        except Exhausted:
            break
        assert reason(config) is None
        assert config not in under_way.values()
        asked.append(config)
        under_way[number] = config
        if len(asked) == 30:
            again += under_way.values()
            study.give_up()
            under_way.clear()
        elif len(under_way) == 4:
            done = int(rng.choice(list(under_way)))
            study.finish(done, ended := under_way.pop(done), FATES[int(rng.integers(4))](ended))
    assert asked[:2] == [space.config(point) for point in first]
    assert set(asked) == {space.config(point) for point in space.pool}
    assert Counter(asked) - Counter(again) == Counter(set(asked))
    assert states(study)[TrialState.RUNNING] == len(under_way) <= 4
    with pytest.raises(Exhausted):
        study.ask()
    study.give_up()
    assert states(study)[TrialState.RUNNING] == 0
    assert len(study.ask()) == 2  # what was given up is there again


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_that_is_exhausted_leaves_no_trial(strategy):
    """Asked through Optuna, without the study's own look at what is left."""
    space = toy_space({"tile": (16, 32), "warps": (1, 2)})
    study = study_with(strategy, space)
    assert len(play(study)) == 4
    with pytest.raises(Exhausted):
        study.optuna.ask(distributions_of(space))
    assert states(study) == {TrialState.COMPLETE: 4, TrialState.FAIL: 1}
    assert len(study.finished()) == 4


def test_exhaustive_goes_in_order():
    space = toy_space()
    first = [space.pool[7]]
    expected = [space.config(p) for p in dict.fromkeys([*first, *space.pool])]
    assert play(study_with("exhaustive", space, first=first)) == expected


def test_exhaustive_of_a_large_product_does_not_end_with_the_pool():
    space = wide_space(lambda c: None if c.b == 3 and c.c == 5 else "no")
    space.__dict__["pool"] = []
    sampler = STRATEGIES["exhaustive"](space, 0, ())
    study = optuna.create_study(sampler=sampler)
    for i in range(40):
        trial = study.ask(distributions_of(space))
        assert trial.params == {"a": i, "b": 3, "c": 5}
        study.tell(trial, 1.0)
    with pytest.raises(Exhausted):
        study.ask(distributions_of(space))


@pytest.mark.parametrize("strategy", ["tpe", "gp", "random"])
def test_the_seed_decides(strategy):
    one, same, other = (play(study_with(strategy, toy_space(), s), 30) for s in (7, 7, 8))
    assert one == same
    assert one != other
    if strategy != "random":  # the models choose, not the dice alone
        dice = play(study_with("random", toy_space(), 7), 30)
        assert one[:RANDOM_FIRST] == dice[:RANDOM_FIRST]
        assert one[RANDOM_FIRST:] != dice[RANDOM_FIRST:]
    for seed in (-1, 2**62 - 1):
        assert len(play(study_with(strategy, toy_space(), seed), 12)) == 12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_study_that_others_add_to(strategy):
    """Two tuners of different strategies and seeds, in turn, then one that comes later."""
    storage, space = optuna.storages.InMemoryStorage(), toy_space()
    mine = study_with(strategy, space, 1, storage=storage)
    theirs = study_with("random", space, 2, storage=storage)
    asked = []
    for _ in range(12):
        asked += play(mine, 1) + play(theirs, 1)
    number, running = theirs.ask()
    late = study_with(strategy, space, 1, storage=storage)
    asked += [running, *play(late)]
    assert Counter(asked) == Counter(space.config(point) for point in space.pool)
    theirs.finish(number, running, measured(running))
    assert len(late.finished()) == len(space.pool)
    assert late.best(1) == [min(asked, key=cost)]


def test_a_model_learns_from_others():
    """What other tuners measured is as good as its own: no random start, a good guess at once."""
    space = toy_space()
    best = min(map(space.config, space.pool), key=cost)
    for strategy in ("tpe", "gp"):
        left = []
        for seed in range(5):
            storage = optuna.storages.InMemoryStorage()
            known = study_with("random", space, seed, storage=storage)
            play(known, 25, lambda c: Measurement("crash") if c == best else measured(c))
            study = study_with(strategy, space, seed, storage=storage)
            if best not in dict(known.finished()):
                left.append(best in play(study, 8))
        assert left
        assert sum(left) > len(left) / 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fields_of_one_value(strategy):
    space = toy_space({"tile": (64,), "warps": (1, 2, 4), "order": ("row",), "fast": (False, True)})
    found = play(study_with(strategy, space, first=[(0, 2, 0, 1)]))
    assert len(found) == 6
    assert found[0] == ToyConfig(64, 4, True, "row")
    assert {config.tile for config in found} == {64}
    only = toy_space({"tile": (64,)})
    assert play(study_with(strategy, only)) == [ToyConfig()]


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_failures_are_kept_away_from(strategy):
    """Large tiles fail, which a model sees and dice do not."""

    def failures(name, seed):
        study = study_with(name, toy_space(legal=lambda _: None), seed)
        found = play(study, 36, lambda c: Measurement("crash") if c.tile > 64 else measured(c))
        return sum(config.tile > 64 for config in found[2 * RANDOM_FIRST :])

    counts = {n: statistics.mean(failures(n, s) for s in range(8)) for n in (strategy, "random")}
    assert counts[strategy] < 0.8 * counts["random"]


def test_no_more_is_under_way_than_a_strategy_can_do_without():
    for trials, most in ((10, 4), (50, 10), (400, 17)):
        runner = Clockwork(17)
        searched(runner, Limits(trials, math.inf))
        assert runner.most == min(most, len(toy_space().pool))


def test_an_unknown_strategy():
    with pytest.raises(
        UsageError, match=r"^--strategy luck: expected one of tpe, gp, random, exhaustive$"
    ):
        TuneOptions(strategy="luck")


# The loop.


class Clockwork:
    """Measures several at once on a clock of its own, as a device would."""

    def __init__(self, capacity=1, seconds=lambda config: 1.0, fate=measured):
        self.capacity, self.seconds, self.fate = capacity, seconds, fate
        self.clock, self.most = 0.0, 0
        self.ends, self.configs = {}, {}

    def submit(self, number, config):
        self.ends[number] = self.clock + self.seconds(config)
        self.configs[number] = config
        self.most = max(self.most, len(self.ends))

    def wait(self, timeout):
        end = self.clock + timeout
        self.clock = min(end, *self.ends.values(), end)
        done = [number for number, when in self.ends.items() if when <= self.clock]
        for number in done:
            del self.ends[number]
        return [(number, self.fate(self.configs[number])) for number in done]

    def cancel(self):
        self.ends.clear()

    def now(self):
        return self.clock


def searched(runner, limits, strategy="random", study=None):
    """The study, and the configs of which progress was told."""
    study, told = study or study_with(strategy, toy_space()), []
    search(study, runner, limits, lambda config, measurement: told.append(config))
    return study, told


def given_up(study):
    """Trials that failed without an outcome: their configs may be tried again."""
    return [
        t
        for t in study.optuna.get_trials()
        if t.state == TrialState.FAIL and "outcome" not in t.user_attrs
    ]


@pytest.mark.parametrize("capacity", [1, 4])
def test_a_search_ends_with_its_trials(capacity):
    runner = Clockwork(capacity, lambda config: config.tile / 16)
    study, told = searched(runner, Limits(11, math.inf))
    assert states(study) == {TrialState.COMPLETE: 11}
    assert sorted(map(str, told)) == sorted(str(config) for config, _ in study.finished())
    assert runner.most == capacity
    # Those of this run count for the next one.
    study, told = searched(runner, Limits(16, math.inf), study=study)
    assert (len(told), len(study.finished())) == (5, 16)
    study, told = searched(runner, Limits(16, math.inf), study=study)
    assert (told, len(study.finished())) == ([], 16)


def test_a_search_ends_with_its_space():
    study, told = searched(Clockwork(8), FOREVER)
    assert len(told) == len(set(told)) == len(study.space.pool)
    assert given_up(study) == []


def test_results_that_come_together_are_all_told():
    runner = Clockwork(4)
    _, told = searched(runner, Limits(16, math.inf))
    assert runner.clock == 4
    assert len(set(told)) == 16


def test_a_search_ends_at_its_deadline():
    runner = Clockwork(3, lambda config: 2.0)
    study, told = searched(runner, Limits(100, 7.0))
    assert runner.clock == 7
    assert len(told) == 9
    assert runner.ends == {}
    assert len(given_up(study)) == 3
    assert states(study) == {TrialState.COMPLETE: 9, TrialState.FAIL: 3}
    # They are asked for again.
    runner.clock = 0
    searched(runner, FOREVER, study=study)
    finished = [config for config, _ in study.finished()]
    assert Counter(finished) == Counter(study.space.config(p) for p in study.space.pool)


def test_something_is_tried_however_little_time_there_is():
    study, told = searched(Clockwork(1, lambda config: GRACE_S - 1), Limits(100, 0.0))
    assert len(told) == 1
    assert given_up(study) == []
    runner = Clockwork(2, lambda config: GRACE_S + 1)
    late, told = searched(runner, Limits(100, 0.0))
    assert (told, runner.clock) == ([], GRACE_S)
    assert len(given_up(late)) == 2
    runner = Clockwork()
    searched(runner, Limits(100, 0.0), study=study)  # of which something is known
    assert runner.clock == 0
    assert len(study.finished()) == 1


def test_a_replay_gives_up_at_its_deadline_too():
    space = toy_space()
    every = {config: measured(config) for config in map(space.config, space.pool)}
    runner = ReplayRunner(every, slots=2)
    study, told = searched(runner, Limits(100, 3.5), study=study_with("exhaustive", space))
    assert len(told) == 3
    assert runner.now() == 3.5
    assert len(given_up(study)) == 2
    searched(runner, Limits(100, 4.5), study=study)
    assert [config for config, _ in study.finished()] == list(every)[:4]


def test_failures_are_logged_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("JETFIRE_STUDIES", str(tmp_path))
    wrong = Measurement("wrong", message="qt: 7 of 9 differ\nsecond line")
    study, _ = searched(Clockwork(fate=lambda c: wrong if c.fast else measured(c)), FOREVER)
    failed = [config for config, m in study.finished() if not m.measured]
    assert len(failed) == sum(config.fast for config, _ in study.finished()) > 10
    text = study.log.read_text()
    assert text.count("qt: 7 of 9 differ\nsecond line\n") == len(failed)
    assert all(str(config.as_dict()) in text for config in failed)
    assert study.best(3) == sorted(study.best(3), key=cost)


class Breaking(Clockwork):
    """Fails at one of its methods, after some calls."""

    def __init__(self, where, after, error):
        super().__init__(3)
        self.where, self.left, self.error = where, after, error

    def _step(self, name):
        if name == self.where:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def submit(self, number, config):
        self._step("submit")
        super().submit(number, config)

    def wait(self, timeout):
        self._step("wait")
        return super().wait(timeout)


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "^C"]
)
@pytest.mark.parametrize("where", ["submit", "wait"])
def test_whatever_ends_a_search_leaves_no_trial_running(where, error):
    study, runner = study_with("random", toy_space()), Breaking(where, 4, error)
    with pytest.raises(type(error)):
        searched(runner, FOREVER, study=study)
    assert states(study)[TrialState.RUNNING] == 0
    assert runner.ends == {}
    assert len(given_up(study)) > 0
    searched(Clockwork(), FOREVER, study=study)
    assert len(study.finished()) == len(study.space.pool)


def test_progress_that_fails_leaves_no_trial_running():
    study = study_with("random", toy_space())
    with pytest.raises(ZeroDivisionError):
        search(study, Clockwork(3), FOREVER, lambda *_: 1 // 0)
    assert states(study) == {TrialState.COMPLETE: 1, TrialState.FAIL: 2}


@pytest.mark.parametrize("strategy", ["tpe", "gp", "random"])
def test_both_objectives_find_the_least_product_and_the_pareto_set(strategy):
    def fate(config):
        ms = cost(config)
        return Measurement("ok", ms, joules=1.0 + abs(ms - 1.4))

    study = study_with(strategy, toy_space(), objective="both")
    search(study, Clockwork(2, fate=fate), Limits(40, math.inf), lambda *_: None)
    done = dict(study.finished())
    assert study.best(1) == [min(done, key=lambda c: done[c].ms * done[c].joules)]
    pareto = {(t.values[0], t.values[1]) for t in study.optuna.best_trials}
    assert len(pareto) > 1
    for ms, joules in pareto:
        assert not any(
            m.ms <= ms and m.joules <= joules and (m.ms, m.joules) != (ms, joules)
            for m in done.values()
        )


def test_a_time_without_an_energy_is_no_value():
    study = study_with("random", toy_space(), objective="energy")
    play(study, 3, lambda c: Measurement("slow", 5.0))
    assert states(study) == {TrialState.FAIL: 3}
    assert study.best(1) == []
    assert len(study.finished()) == 3


# The last word.


def samples(ms, seed=0, noise=0.0, drift=None, count=15):
    """A timing; the drift is another one's too, the noise is its own."""
    rng = np.random.default_rng(seed)
    values = ms * np.exp(rng.normal(0, noise, count)) * (1.0 if drift is None else drift[:count])
    return Timing.of(values)


def drifting(seed, count=15):
    """A clock that wanders by 3% a round."""
    return np.exp(np.cumsum(np.random.default_rng(1000 + seed).normal(0, 0.03, count)))


def wins(gain, noise, count=15, tries=200):
    """How often a challenger that is so much faster is said to be."""
    found = 0
    for seed in range(tries):
        drift = drifting(seed, count)
        held = samples(1.0, 2 * seed, noise, drift, count)
        found += beats(samples(1 - gain, 2 * seed + 1, noise, drift, count), held, "time")
    return found / tries


def test_a_gain_must_exceed_the_noise():
    assert wins(0.01, 0.001) == 1
    assert wins(0.01, 0.05) < 0.1
    assert wins(0.1, 0.05) > 0.9
    assert wins(0.0, 0.05) < 0.05
    assert wins(0.0, 0.0) == 0
    assert wins(-0.05, 0.001) == 0


def test_a_gain_below_half_a_percent_is_not_worth_it():
    assert wins(0.002, 0.0005) == 0
    assert wins(0.004, 0.0) == 0
    assert wins(0.006, 0.0) == 1


def test_a_winners_median_is_the_lesser_one():
    """Else a profile would name a gain below 1: the rounds of a busy machine differ widely."""
    held = Timing.of(range(1, 10))
    ahead = [value - 0.1 for value in range(2, 10)]
    assert beats(Timing.of([0.9, *ahead]), held, "time")
    late = Timing.of([100.0, *ahead])  # faster in eight of nine rounds
    assert late.ms > held.ms
    assert not beats(late, held, "time")


def test_fewer_samples_must_all_agree():
    held = Timing.of([1.0, 1.1, 1.2])
    assert beats(Timing.of([0.98, 1.07, 1.17]), held, "time")
    assert not beats(Timing.of([0.90, 1.00, 1.21]), held, "time")
    # A tuner that had to hurry has fewer of one than of the other: the first of both are paired.
    assert beats(Timing.of([0.98, 1.07, 1.17]), Timing.of([1.0, 1.1, 1.2, 1.1, 1.1]), "time")
    assert wins(0.01, 0.001, count=4) == 1


def powered(timing, watts):
    """With the power read in six runs."""
    return dataclasses.replace(timing, watts=watts, energies=(watts * timing.ms / 1e3,) * 6)


def test_runs_join_with_the_power_of_each():
    runs = [dataclasses.replace(Timing.of([ms] * 3), watts=w) for ms, w in ((1, 500), (2, 600))]
    joined = Timing.joined(runs)
    assert joined.values == (1, 1, 1, 2, 2, 2)
    assert (joined.ms, joined.samples, joined.watts) == (1.5, 6, 550)
    assert joined.energies == (0.5, 1.2)
    assert Timing.joined([runs[0], Timing.of([1.0])]).energies == ()


def test_energy_must_be_saved_in_more_than_one_reading():
    held = dataclasses.replace(
        powered(Timing.of([1.0] * 9), 600.0), energies=(0.60, 0.59, 0.61, 0.60, 0.62, 0.58)
    )
    noisy = dataclasses.replace(held, energies=(0.50, 0.66, 0.55, 0.65, 0.57, 0.50))
    frugal = dataclasses.replace(held, energies=(0.57, 0.56, 0.58, 0.57, 0.59, 0.55))
    assert not beats(noisy, held, "energy")
    assert beats(frugal, held, "energy")


def test_what_is_compared_is_the_objective():
    quick, frugal = Timing.of([1.0] * 9), Timing.of([1.2] * 9)
    quick, frugal = powered(quick, 600.0), powered(frugal, 450.0)
    assert beats(quick, frugal, "time")
    assert not beats(frugal, quick, "time")
    assert beats(frugal, quick, "energy")  # 0.54 J against 0.6 J
    assert not beats(quick, frugal, "energy")
    assert beats(quick, frugal, "both")  # 0.6 against 0.648 ms·J
    unread = dataclasses.replace(quick, watts=None, energies=())
    assert not beats(unread, frugal, "energy")
    assert not beats(frugal, unread, "energy")


class Comparer:
    """Compares by known timings; None of one stands for a wrong result.

    Args:
        crashing: configs that end a comparison they are in; two that must be in it together.
        choking: a peer does.
    """

    def __init__(self, timings, crashing=(), together=(), flukes=0, choking=False):
        self.choking = choking
        self.timings, self.crashing, self.together = timings, crashing, together
        self.flukes, self.asked = flukes, []

    def compare(self, configs, budget_s, rounds=15, peers=True):
        self.asked.append((list(configs), peers))
        if self.flukes:
            self.flukes -= 1
            raise RunnerError("killed from outside")
        for config in configs:
            if config in self.crashing:
                raise RunnerError(f"tile {config.tile} crashed")
        if self.together and set(self.together) <= set(configs):
            raise RunnerError("out of memory")
        good = {c: found for c in configs if (found := self.timings[c]) is not None}
        failed = {c: "wrong" for c in configs if c not in good}
        if peers and self.choking:
            raise RunnerError("a peer ran out of memory")
        found = {"cublas_bf16": Timing.of([2.0] * 15)} if peers else {}
        return Comparison(good, found, failed)


A, B, C, D, E = (ToyConfig(tile=tile) for tile in (16, 32, 64, 128, 256))


def timed(**ms):
    """Quiet timings of the configs by their names."""
    configs = {"a": A, "b": B, "c": C, "d": D, "e": E}
    return {
        configs[name]: None if value is None else samples(value, seed, 0.0005)
        for seed, (name, value) in enumerate(ms.items())
    }


def test_the_best_finalist_wins():
    runner = Comparer(timed(a=1.0, b=0.9, c=0.8))
    final = decide(runner, [B, C], A, A, False, "time", 5.0)
    assert final.config == C
    assert not final.kept
    assert final.timing == runner.timings[C]
    assert final.default == final.before == runner.timings[A]
    assert final.gain == pytest.approx(1.25, rel=0.01)
    assert final.vs_peer == {"cublas_bf16": pytest.approx(2.5, rel=0.01)}
    assert runner.asked == [([A, B, C], True)]  # once, and all in turn
    assert final.as_dict() == {
        "config": C.as_dict(),
        "ms": final.timing.ms,
        "ms_p20": final.timing.ms_p20,
        "ms_p80": final.timing.ms_p80,
        "joules": None,
        "default_ms": runner.timings[A].ms,
        "before_ms": runner.timings[A].ms,
        "gain": final.gain,
        "kept": False,
        "vs_peer": final.vs_peer,
    }
    json.dumps(final.as_dict(), allow_nan=False)


def test_the_incumbent_is_kept_unless_it_is_beaten():
    final = decide(Comparer(timed(a=1.0, b=0.8, c=0.798)), [C], A, B, True, "time", 5.0)
    assert (final.config, final.kept) == (B, True)
    assert final.timing == final.before
    final = decide(Comparer(timed(a=1.0, b=0.8, c=0.78)), [C], A, B, True, "time", 5.0)
    assert (final.config, final.kept) == (C, False)
    assert final.before.ms == pytest.approx(0.8, rel=0.01)


def test_the_default_beats_a_bad_incumbent():
    final = decide(Comparer(timed(a=1.0, b=1.5, c=1.1)), [C], A, B, True, "time", 5.0)
    assert (final.config, final.kept, final.gain) == (A, False, 1.0)


def test_the_nearest_problems_config_is_timed_but_need_not_be_beaten():
    final = decide(Comparer(timed(a=1.0, b=0.5, c=0.9)), [C], A, B, False, "time", 5.0)
    assert (final.config, final.kept) == (B, False)  # it was timed: it may win
    final = decide(Comparer(timed(a=1.0, b=1.5, c=0.9)), [C], A, B, False, "time", 5.0)
    assert final.config == C
    assert final.before.ms == pytest.approx(1.5, rel=0.01)
    final = decide(Comparer(timed(a=1.0, b=1.5, c=0.999)), [C], A, B, False, "time", 5.0)
    assert (final.config, final.kept) == (A, True)  # the default is what has to be beaten


def test_a_default_that_fails():
    final = decide(Comparer(timed(a=None, b=0.9, c=0.8)), [B, C], A, A, False, "time", 5.0)
    assert final.config == C
    assert final.default is final.before is final.gain is None
    assert not final.kept
    assert final.failed == {A: "wrong"}
    assert final.as_dict()["default_ms"] is None
    with pytest.raises(WrongResultError, match=r"^no config is right: wrong$"):
        decide(Comparer(timed(a=None, b=None)), [B], A, A, False, "time", 5.0)


def test_what_is_known_to_fail_is_not_run_again():
    runner = Comparer(timed(b=0.9))
    final = decide(runner, [B], A, A, False, "time", 5.0, {A: "it hung"})
    assert runner.asked == [([B], True)]
    assert final.failed == {A: "it hung"}
    with pytest.raises(WrongResultError, match=r"^no config is right: it hung$"):
        decide(runner, [], A, A, False, "time", 5.0, {A: "it hung"})


def test_a_comparison_that_crashes_goes_on_without_the_culprits():
    runner = Comparer(timed(a=1.0, b=0.9, d=0.7, e=0.8), crashing=(B, D))
    final = decide(runner, [B, D, E], A, A, False, "time", 5.0)
    assert final.config == E
    assert final.failed == {c: f"tile {c.tile} crashed" for c in (B, D)}
    all_of_them = [A, B, D, E]
    alone = [([config], False) for config in all_of_them]
    assert runner.asked == [(all_of_them, True), (all_of_them, False), *alone, ([A, E], True)]


def test_a_peer_that_ends_a_comparison_is_left_out():
    final = decide(Comparer(timed(a=1.0, b=0.9), choking=True), [B], A, A, False, "time", 5.0)
    assert final.config == B
    assert (final.vs_peer, final.failed) == ({}, {})
    reason = "the comparison failed beside them: a peer ran out of memory"
    assert final.left_out == [f"all peers: {reason}"]


def test_a_comparison_whose_worker_was_killed_is_repeated():
    runner = Comparer(timed(a=1.0, b=0.9), flukes=1)
    final = decide(runner, [B], A, A, False, "time", 5.0)
    assert final.config == B
    assert final.failed == {}
    assert runner.asked == [([A, B], True), ([A, B], False)]


def test_finalists_that_do_not_run_together():
    runner = Comparer(timed(a=1.0, b=0.9), together=(A, B))
    with pytest.raises(JetfireError, match="run alone but not in turn: out of memory"):
        decide(runner, [B], A, A, False, "time", 5.0)


@pytest.mark.parametrize(("objective", "winner"), [("time", A), ("energy", B), ("both", C)])
def test_the_objective_decides(objective, winner):
    watts = {A: 700.0, B: 300.0, C: 420.0}
    plain = timed(a=1.0, b=1.6, c=1.2)  # 0.7, 0.48, 0.504 J; 0.7, 0.77, 0.60 ms·J
    runner = Comparer({c: powered(t, watts[c]) for c, t in plain.items()})
    final = decide(runner, [B, C], A, A, False, objective, 5.0)
    assert final.config == winner
    assert final.kept == (winner == A)
    assert final.as_dict()["joules"] == pytest.approx(watts[winner] * final.timing.ms / 1e3)


# One config for several problems.

TWO_PROBLEMS = [{A: 1.0, B: 1.3, C: 1.2}, {A: 2.0, B: 1.0, C: 1.25}]


@pytest.mark.parametrize(
    ("how", "best", "ratios"), [("mean", "B", [1.3, 1.0]), ("worst", "C", [1.2, 1.25])]
)
def test_one_config_for_all(how, best, ratios):
    assert best_for_all(TWO_PROBLEMS, how) == ({"B": B, "C": C}[best], ratios)


def test_one_config_for_all_is_right_for_all():
    first, second = ({**times} for times in TWO_PROBLEMS)
    del first[B]
    assert best_for_all([first, second], "mean") == (C, [1.2, 1.25])
    with pytest.raises(WrongResultError, match="no config is right for all 2 problems"):
        best_for_all([{A: 1.0}, {B: 1.0}], "mean")


# Recordings.


def small_recording():
    """Of the real kernel, since a file names it."""
    kernel = registry.get_kernel("transpose", "triton")
    fields = {"tile_m": [32, 64], "warps": [1, 2, 4]}
    base = kernel.default(PROBLEM, HERE)
    space = Space(fields, base, lambda _: None)
    configs = [space.config(point) for point in space.pool]
    fates = [
        Measurement("ok", 0.0123456789, 0.012, 0.013, 0.5, seconds=1.23456),
        Measurement("slow", 1.0, seconds=0.1),
        Measurement("crash", seconds=2.0),
        Measurement("ok", 0.02, 0.019, 0.021, seconds=1.0),
        Measurement("timeout", seconds=30.0),
    ]
    trials = dict(zip(configs, fates, strict=False))
    return Recording(kernel, PROBLEM, {"name": "Some CPU"}, fields, base, trials)


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
def test_a_recording_comes_back(tmp_path, name):
    recording, file = small_recording(), tmp_path / name
    write(file, recording.render(file))
    found = Recording.load(file)
    assert (found.kernel, found.problem, found.device, found.fields, found.base) == (
        recording.kernel,
        recording.problem,
        recording.device,
        recording.fields,
        recording.base,
    )
    assert list(found.trials) == list(recording.trials)
    for kept, made in zip(found.trials.values(), recording.trials.values(), strict=True):
        assert kept.outcome == made.outcome
        assert kept.joules == made.joules
        for field in ("ms", "ms_p20", "ms_p80", "seconds"):
            rounded = getattr(made, field)
            assert getattr(kept, field) == (rounded and pytest.approx(rounded, rel=1e-3))
    assert found.optimum_ms == pytest.approx(0.0123456789, rel=1e-4)
    assert len(found.space().pool) == 5  # one of six was not recorded
    assert file.read_bytes()[:2] == (b"\x1f\x8b" if name.endswith(".gz") else b'{"')
    content = file.read_bytes()
    write(file, found.render(file))
    assert file.read_bytes() == content
    with pytest.raises(UsageError, match=f"^{tmp_path}/no/{name}: cannot be written: No such file"):
        command.replay(file, "random", 1, 0, tmp_path / "no" / name)


def plain():
    """A recording's content, to be broken."""
    return json.loads(gzip.decompress((DATA / "gemm-triton-h200.json.gz").read_bytes()))


def changed(**fields):
    return json.dumps({**plain(), **fields}).encode()


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


WHOLE = (DATA / "gemm-triton-h200.json.gz").read_bytes()


def row(**places):
    """A file whose second trial differs in some places of the first."""
    first, second, *rest = plain()["trials"]
    for place, value in places.items():
        first[int(place[1:])] = value
    return changed(trials=[second, first, *rest])


BROKEN = {
    "empty.json": (b"", "no JSON: EOF while parsing a value"),
    "text.json": (b"hello", "no JSON: expected value at line 1"),
    "binary.json": (WHOLE, "no JSON: expected value"),
    "list.json": (b"[1, 2]", "[1, 2]: expected a JSON object"),
    "other.json": (b'{"rows": []}', "schema 'None': this version reads schema 1"),
    "deep.json": (b"[" * 100_000, "no JSON: recursion limit exceeded"),
    "plain.json.gz": (changed(), "Not a gzipped file"),
    "empty.json.gz": (b"", "no JSON: EOF"),
    "cut.json.gz": (WHOLE[: len(WHOLE) // 2], "Compressed file ended before"),
    "flipped.json.gz": (flipped(WHOLE, 10), "Error -3 while decompressing"),
    "sum.json.gz": (flipped(WHOLE, len(WHOLE) - 5), "CRC check failed"),
    "bomb.json.gz": (gzip.compress(bytes(33 << 20)), "more than 33554432 bytes"),
    "schema.json": (changed(schema=99), "schema '99': this version reads schema 1"),
    "op.json": (changed(op="gem"), "no op 'gem'"),
    "path.json": (changed(op="../gemm"), "op='../gemm': expected letters, digits and _ . + -"),
    "kernel.json": (changed(kernel="gone"), "no kernel 'gone'"),
    "base.json": (changed(base={"tile": 1}), "no config field 'tile'"),
    "form.json": (changed(base=[]), "base=[]: expected a JSON object"),
    "problem.json": (changed(problem={"m": 0, "n": 1, "k": 1}), "m=0: expected an integer"),
    "field.json": (changed(fields={"tile": [1]}), "no config field 'tile'"),
    "values.json": (changed(fields={"tile_m": []}), "fields.tile_m=[]: expected"),
    "value.json": (changed(fields={"tile_m": ["big"]}), "tile_m=big: expected an integer"),
    "short.json": (changed(trials=[[1, 2]]), "trials.0.outcome is missing"),
    "rank.json": (row(_0=99), "trials.1: expected ranks of tile_m, tile_n, warps, stages, group"),
    "before.json": (row(_0=-1), "trials.1.ranks.0=-1: expected greater than or equal to 0"),
    "fate.json": (row(_5=7), "trials.1: expected ranks of"),
    "negative.json": (row(_6=-1.0), "trials.1.ms=-1.0: expected greater than"),
    "nan.json": (row(_7=math.nan), "trials.1.ms_p20=nan: expected a finite number"),
    "endless.json": (row(_10=math.inf), "trials.1.seconds=inf: expected a finite number"),
    "outcomes.json": (changed(outcomes=["fine"]), "outcomes.0='fine': expected 'ok', 'slow'"),
    "none.json": (changed(trials=[]), "none of its configs was timed"),
    "untimed.json": (changed(trials=[[1, 2, 1, 2, 1, 0, None, None, None, None, 1]]), "none of"),
}


def tune(capsys, *words):
    """The command in this process: exit code, stdout, lines on stderr."""
    code = cli.execute("tune", [*map(str, words)])
    out, errors = capsys.readouterr()
    assert "Traceback" not in errors, errors
    return code, out, errors.splitlines()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_recording_is_one_clear_line(capsys, tmp_path, name):
    content, says = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    code, out, errors = tune(capsys, "--replay", tmp_path / name)
    assert (code, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith(f"jetfire: recording {tmp_path / name}: ")
    assert says in errors[0]


def test_a_pipe_is_no_recording(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    code, _, errors = tune(capsys, "--replay", tmp_path / "pipe.json")
    assert (code, errors) == (2, [f"jetfire: recording {tmp_path}/pipe.json: no regular file"])


def test_a_recording_of_a_large_product_is_searched_whole(tmp_path):
    """However many combinations its fields have, it is the recorded ones that are looked at."""
    content = plain()
    content["fields"] = {
        **content["fields"],
        "tile_m": list(range(1, 801)),
        "group": [8, *range(9, 99)],
    }
    (tmp_path / "r.json").write_text(json.dumps(content))
    recording = Recording.load(tmp_path / "r.json")
    space = recording.space()
    assert space.size > 50 * space_module.WHOLE
    assert space.whole
    assert len(space.pool) == len(recording.trials) == len(content["trials"])
    assert list(space.points()) == space.pool == sorted(space.pool)
    found = replayed(recording, "exhaustive", 10**6, 0)
    assert (found.trials, found.final.timing.ms) == (len(recording.trials), recording.optimum_ms)


def test_the_command_replays(capsys, tmp_path):
    file = DATA / "gemm-wgmma-h200.json.gz"
    code, out, errors = tune(capsys, "--replay", file, "--strategy", "gp", "--seed", 1)
    assert (code, errors) == (0, [])
    assert out.count("\n") == 1
    assert out.startswith("gemm/wgmma m=8192 n=3072 k=1024 block=128")
    assert "gp found 0.048653 ms after 80 of 530 configs, the optimum is 0.048653 ms" in out
    code, out, _ = tune(capsys, "--replay", file, "--strategy", "random", "--trials", 5)
    assert (code, "after 5 of 530 configs" in out) == (0, True)
    code, _, errors = tune(capsys, "--replay", file, "--strategy", "luck")
    assert code == 2
    assert errors == ["jetfire: --strategy luck: expected one of tpe, gp, random, exhaustive"]
    code, _, errors = tune(capsys, "--replay", tmp_path / "no.json")
    assert code == 2
    assert errors == [f"jetfire: recording {tmp_path}/no.json: No such file or directory"]


# What profiles are shipped for.


@pytest.fixture(scope="module")
def shipped_cases():
    return problems.cases()


def test_every_op_block_and_model_is_shipped(shipped_cases):
    assert len(shipped_cases) == len(set(shipped_cases))
    found = {(case.op.name, case.problem) for case in shipped_cases}
    names = [n for n in registry.names() if n not in problems.parts()]
    names = [name for name in names if not registry.get(name).composite]
    for name, block, workload in itertools.product(names, BLOCKS, problems.WORKLOADS):
        op = registry.get(name)
        # A square GEMM is the same backward, but for the sums that wgrad may add to.
        for mode in op.modes[:1] if (name, workload) == ("gemm", "square") else op.modes:
            fields = {"block": block} if "block" in op.Problem.__dataclass_fields__ else {}
            wanted = workloads.problems(op, workload, mode, fields)
            assert wanted
            assert {(name, problem) for problem in wanted} <= found
    assert set(problems.WORKLOADS) == {*workloads.MODELS, "square"}


def test_every_output_of_the_gemm_is_shipped(shipped_cases):
    gemms = [case.problem for case in shipped_cases if case.op.name == "gemm"]
    squares = {
        (p.m, p.block, p.out) for p in gemms if p.m == p.n == p.k and p.m in workloads.SQUARES
    }
    assert squares >= set(
        itertools.product(workloads.SQUARES, (32, 64, 128), ("bf16", "fp16", "fp32", "int8"))
    )
    for model in workloads.MODELS.values():
        for out_features, in_features in model.linears():
            for out in ("bf16", "int8"):
                forward = (model.tokens, out_features, in_features, out)
                assert {p.block for p in gemms if (p.m, p.n, p.k, p.out) == forward} == {
                    32,
                    64,
                    128,
                }


def test_every_launch_of_a_layer_in_4_bits_is_shipped():
    """Of models what a step in training asks for, of the paper's layers what the bench times."""
    found = {(case.op.name, case.problem) for case in problems.cases(tuple(problems.parts()))}
    assert {name for name, _ in found} == set(problems.parts())
    layer = registry.get("hadamard_gemm")
    paper = workloads.problems(layer, "int4-paper", "fwd", {})
    paper += workloads.problems(layer, "int4-paper", "bwd", {})
    assert {(stage.op, stage.problem) for problem in paper for stage in plan(problem)} <= found
    for model in workloads.MODELS.values():
        m = model.tokens
        for n, k in model.linears():
            assert {
                ("hadamard_quantize", HadamardQuantizeProblem(m, k, layout="both")),
                ("hadamard_quantize", HadamardQuantizeProblem(n, k, dtype="fp32", layout="both")),
                ("hadamard_quantize", HadamardQuantizeProblem(m, k, mode="bwd", gathered=True)),
                ("gather_rows", GatherRowsProblem(n, k, transpose=True, wide=True)),
                ("int4_gemm", Int4GemmProblem(m, n, k, operands="wide")),
                ("int4_gemm", Int4GemmProblem(m, n, k)),
                ("bit_split", BitSplitProblem(m, n)),
                ("sample_rows", SampleRowsProblem(m, product="wgrad")),
            } <= found


def test_every_op_with_something_to_tune_is_in_one_command():
    names = []
    for words in map(str.split, problems.commands()):
        ops = words[: min(i for i, word in enumerate(words) if word.startswith("--"))]
        options = dict(zip(words[len(ops) :: 2], words[len(ops) + 1 :: 2], strict=True))
        names += ops
        assert int(options.pop("--trials")) > 0
        check_peers([options.pop("--peer")])
        kernel = options.pop("--kernel", None)
        assert all(kernel is None or kernel in registry.kernels(op) for op in ops)
        assert options == {}
    assert sorted(names) == [n for n in registry.names() if not registry.get(n).composite]


@pytest.mark.parametrize("names", [(), tuple(problems.parts())], ids=["shipped", "int4"])
def test_a_kernel_takes_each_shipped_problem(names):
    device = target_device((9, 0))
    for case in problems.cases(names):
        kernels = registry.kernels(case.op.name).values()
        assert any(
            kernel.legal(case.problem, kernel.default(case.problem, device), device) is None
            and kernel.space(case.problem, device)
            for kernel in kernels
        ), str(case)


def test_ops_and_blocks_narrow_what_is_shipped(shipped_cases):
    some = problems.cases(["gelu", "add"], ["64"])
    assert some == [
        c
        for name in ("gelu", "add")
        for c in shipped_cases
        if c.op.name == name and c.problem.block == 64
    ]
    with pytest.raises(UsageError, match="block=33"):
        problems.cases([], ["33"])


# The command.

SERVER = """
import contextlib, io, json, os, sys
import pytest
from jetfire import cli
from jetfire.core import profiles
from jetfire.tests import forked
from jetfire.tuner import worker
forked.fork_workers(pytest.MonkeyPatch())
worker.MOST_ROUNDS = 50  # of its forked workers: an interpreted kernel's noise stays
for line in sys.stdin:
    words, environment = json.loads(line)
    os.environ.update(environment)
    profiles.forget()
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.execute("tune", words)
    print(json.dumps([code, out.getvalue(), errors.getvalue()]), flush=True)
"""
SMALL = ("transpose", "--m", "64", "--block", "32", "--device", "cpu", "--peer", "none")


@contextmanager
def serving():
    """A process with Triton's interpreter, GPU or not, that runs one command after another."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server():
    with serving() as process:
        yield process


@pytest.fixture
def interpreted(server, tmp_path):
    """`jetfire-tune` there, with studies and profiles of the test's own."""
    environment = {
        "JETFIRE_PROFILES": str(tmp_path / "profiles"),
        "JETFIRE_STUDIES": str(tmp_path / "studies"),
    }

    def tune(*words):
        server.stdin.write(json.dumps([[*map(str, words)], environment]) + "\n")
        server.stdin.flush()
        code, out, errors = json.loads(server.stdout.readline())
        assert "Traceback" not in errors, errors
        return code, out, errors.splitlines()

    return tune


def entries(tmp_path):
    files = list((tmp_path / "profiles").rglob("*.json"))
    return [entry for file in files for entry in json.loads(file.read_text())["entries"]]


def test_a_search_from_end_to_end(interpreted, tmp_path, capsys, monkeypatch):
    page, kept = tmp_path / "r.html", tmp_path / "r.json.gz"
    journal = tmp_path / "t.journal"
    arguments = (*SMALL, "--storage", journal)
    code, out, errors = interpreted(*arguments, "--trials", 3, "--report", page, "--record", kept)
    assert code == 0, errors[-3:]
    (entry,) = entries(tmp_path)
    assert (entry["kernel"], entry["trials"], entry["strategy"]) == ("triton", 3, "tpe")
    assert entry["problem"] == PROBLEM.as_dict()
    assert entry["ms_p20"] <= entry["ms"] <= entry["ms_p80"]
    assert entry["ms"] <= entry["default_ms"]  # the default's own, or what beat it
    assert errors[0] == f"jetfire: [1/1] transpose/triton {PROBLEM}"
    assert any("trial 1: " in line for line in errors)
    assert "64×64 block=32" in out
    assert "written" in out
    assert "defaults' speed, geometric mean of 1" in out
    assert not (tmp_path / "studies").exists()
    recording = Recording.load(kept)
    assert len(recording.trials) == 3
    default = recording.kernel.default(PROBLEM, HERE)
    assert next(iter(recording.trials)) == default == recording.base
    assert "<html" in page.read_text()
    # The profile is listed, and looked up.
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "profiles"))
    profiles.forget()
    code, out, _ = tune(capsys, "show", "transpose", "--json")
    assert code == 0
    shown = [record for record in json.loads(out)["profiles"] if not record["shipped"]]
    assert [record["config"] for record in shown] == [entry["config"]]
    assert shown[0]["state"] == "current"
    profiles.forget()
    # The same command has nothing to do; one that wants more goes on.
    code, _, errors = interpreted(*arguments, "--trials", 3)
    assert code == 0
    assert "tuned already, 3 trials: a higher --trials goes on" in errors[-1]
    before = journal.read_bytes()
    code, _, errors = interpreted(*arguments, "--missing", "--trials", 5)
    assert code == 0
    assert "nothing to tune: the shard is empty, or all has its profile already" in errors[-1]
    assert journal.read_bytes() == before
    for words in (["--trials", 3], ["--trials", 5, "--missing"]):
        code, out, _ = interpreted(*arguments, *words, "--format", "json")
        assert (code, json.loads(out)["searches"]) == (0, [])
    code, out, errors = interpreted(*arguments, "--trials", 5)
    assert code == 0, errors[-3:]
    assert "3 trials known" in errors[0]
    (entry,) = entries(tmp_path)
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(journal))
    )
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    assert [t.state for t in study.get_trials()] == [TrialState.COMPLETE] * 5
    assert len({tuple(t.params.items()) for t in study.get_trials()}) == 5
    assert study.user_attrs["final"]["config"] in [entry["config"], default.as_dict()]
    assert study.user_attrs["strategy"] == "tpe"


def test_all_problems_get_one_config(interpreted, tmp_path):
    """Also those that have a profile of their own."""
    every = ("transpose", "--m", "32,64", "--block", "32", "--device", "cpu", "--peer", "none")
    search = (*every, "--trials", 2, "--seed", 1)
    code, _, errors = interpreted(*search)
    assert code == 0, errors[-3:]
    code, out, errors = interpreted(*search, "--for-all", "worst")
    assert code == 0, errors[-3:]
    found = entries(tmp_path)
    assert sorted(entry["problem"]["m"] for entry in found) == [32, 64]
    assert len({json.dumps(entry["config"]) for entry in found}) == 1
    assert out.count("written") == 2
    said = [line for line in errors if "one config for 2 problems" in line]
    assert said[0].startswith("jetfire: transpose/triton: one config for 2 problems: ")
    assert len(said) == 1
    # Nothing is searched again, and there is nothing to decide on one problem alone.
    assert not any("trial " in line for line in errors)


def test_a_peer_that_was_asked_for_and_left_out_is_named(interpreted):
    peer = ("--peer", "cublas_bf16", "--trials", 2)
    code, _, errors = interpreted(*SMALL[: SMALL.index("--peer")], *peer)
    assert code == 0, errors[-3:]
    said = [line for line in errors if "left out" in line]
    assert len(said) == 1
    reason = (
        "left out of the final comparison: peer cublas_bf16: transpose has none of that name on cpu"
    )
    assert said[0].endswith(reason)


def test_a_small_space_is_searched_whole(interpreted, tmp_path):
    code, _, errors = interpreted(
        *SMALL,
        "--space",
        "tile_m=32",
        "--space",
        "tile_n=32,32",
        "--space",
        "warps=1,2",
        "--trials",
        9,
    )
    assert code == 0, errors[-3:]
    (entry,) = entries(tmp_path)
    assert (entry["trials"], entry["strategy"]) == (2, "exhaustive")


@pytest.mark.parametrize("warps", ["1", "1,2"])
def test_a_space_of_nothing_legal_says_why(interpreted, warps):
    limits = ["tile_m=256", "tile_n=256", f"warps={warps}"]
    words = [word for limit in limits for word in ("--space", limit)]
    code, out, errors = interpreted(*SMALL, "--dry-run", *words)
    why = "2048 elements per thread: expected 1 to 64"
    assert (code, out, len(errors)) == (2, "", 1)
    assert errors[0].endswith(f"triton: no config within --space is legal (the first: {why})")


def test_a_dry_run_measures_nothing(interpreted, tmp_path):
    code, out, errors = interpreted(*SMALL, "--dry-run", "--space", "warps=4,8")
    assert (code, errors) == (0, [])
    assert out.splitlines()[0].endswith("(CPU): 1 search")
    assert out.splitlines()[1] == f"transpose/triton {PROBLEM}: 48 configs, 24 legal"
    assert list(tmp_path.iterdir()) == []


def test_missing_skips_what_is_tuned(interpreted, tmp_path):
    """Half of the problems have a profile."""
    kernel = registry.get_kernel("transpose", "triton")
    cpu = Device.parse("cpu")
    origin = provenance.of(kernel, cpu)
    tuned = profiles.Entry(
        "triton",
        PROBLEM.as_dict(),
        kernel.default(PROBLEM, cpu).as_dict(),
        1.0,
        1.0,
        1.0,
        9,
        1.0,
        None,
        "time",
        {},
        3,
        "tpe",
        origin,
    )
    stale = dataclasses.replace(
        tuned, problem={**PROBLEM.as_dict(), "block": 64}, provenance={**origin, "source": "old"}
    )
    profiles.save(tmp_path / "profiles", cpu, registry.get("transpose"), [tuned, stale])
    every = ("transpose", "--m", "64", "--block", "32,64,128", "--device", "cpu", "--dry-run")
    assert len(interpreted(*every)[1].splitlines()) == 4
    code, out, _ = interpreted(*every, "--missing")
    assert code == 0
    assert [line.split(":")[0].split("=")[-1] for line in out.splitlines()[1:]] == ["64", "128"]


def test_shards_split_all_the_work(interpreted):
    every = ("transpose", "gelu", "--m", "64,128", "--device", "cpu", "--dry-run")

    def searches(*words):
        code, out, errors = interpreted(*every, *words)
        assert code == 0, errors
        return out.splitlines()[1:]

    whole = searches()
    parts = [searches("--shard", f"{i}/3") for i in range(3)]
    assert len(whole) == 12
    assert sorted(line for part in parts for line in part) == sorted(whole)
    assert {len(part) for part in parts} == {4}


BAD = {
    ("--effort", "heroic"): "--effort heroic: expected quick or full",
    ("--objective", "money"): "--objective money: expected time or energy or both",
    ("--strategy", "luck"): "--strategy luck: expected one of tpe, gp, random, exhaustive",
    ("--shard", "3/3"): "--shard 3/3: expected I/N with 0 ≤ I < N",
    ("--shard", "1"): "--shard 1: expected I/N",
    ("--shard", "-1/2"): "--shard -1/2: expected I/N",
    ("--shard", "0/0"): "--shard 0/0: expected I/N",
    ("--space", "stages=3"): "triton does not search it: expected tile_m or tile_n or warps",
    ("--space", "tile_m=33"): "--space tile_m=33: expected one of 32, 64, 128, 256",
    ("--space", "tile_m"): "--space tile_m: expected field=value",
    ("--budget", "soon"): "--budget soon: expected a time",
    ("--budget", "0"): "--budget 0: expected a time",
    ("--budget", "nan"): "--budget nan: expected a time",
    ("--budget", "-5m"): "--budget -5m: expected a time",
    ("--trial-timeout", "1x"): "--trial-timeout 1x: expected a time",
    ("--trials", "0"): "--trials 0: expected at least 1",
    ("--trials", "many"): "--trials many: expected an integer",
    ("--seed", "x"): "--seed x: expected an integer",
    ("--data", "bogus"): "--data bogus: expected one of normal",
    ("--kernel", "bogus"): "no kernel 'bogus': expected torch or triton",
    ("--storage", "foo://bar"): "cannot open --storage foo://bar: ",
    ("--max-noise", "0"): "--max-noise 0: expected a share above 0 and below 100%",
    ("--max-noise", "0.0%"): "--max-noise 0.0%: expected a share above 0 and below 100%",
    ("--max-noise", "100%"): "--max-noise 100%: expected a share above 0 and below 100%",
    ("--max-noise", "200%"): "--max-noise 200%: expected a share above 0 and below 100%",
    ("--device", "tpu"): "device 'tpu': expected auto, cpu, cuda or cuda:N",
    ("--block", "33"): "block=33: expected 32 or 64 or 128",
    ("--workload", "gpt9"): "no workload 'gpt9'",
    ("--report", "/no/such/r.html"): "/no/such/r.html: cannot be written: No such file",
    ("--record", "/no/such/r.json"): "/no/such/r.json: cannot be written: No such file",
    ("--objective", "energy"): "has no energy counter to read",
    ("--objective", "both"): "has no energy counter to read",
    ("--nonsense",): "no option --nonsense: expected one of --m",
    ("--all",): "only OP and --block narrow",
}


def test_a_bad_option_is_one_line(interpreted, tmp_path):
    for words, says in BAD.items():
        code, out, errors = interpreted(*SMALL, *words)
        errors = [text for text in errors if "is given 2 times" not in text]  # of --device
        assert (code, out, len(errors)) == (2, "", 1), (words, code, errors)
        assert says in errors[0], words
    assert not (tmp_path / "profiles").exists()
    code, _, errors = interpreted("nonsense")
    assert (code, len(errors)) == (2, 1)
    assert "nonsense" in errors[0]


def test_a_field_that_no_kernel_searches_is_refused_without_its_device(capsys):
    words = ("gemm", "--m", "64", "--block", "32", "--kernel", "wgmma", "--device", "cpu")
    code, out, errors = tune(capsys, *words, "--space", "foo=1")
    assert (code, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith("jetfire: --space foo: no kernel searches it: expected one of ")
    assert "stages" in errors[0]
    code, _, errors = tune(capsys, *words, "--space", "stages=3")
    assert code == 5
    assert "no kernel to tune for these problems" in errors[0]


def test_all_takes_ops_and_blocks(interpreted):
    code, out, errors = interpreted(
        "transpose", "--all", "--block", "64", "--dry-run", "--device", "cpu"
    )
    assert code == 0, errors
    count = len(problems.cases(["transpose"], ["64"]))
    assert out.splitlines()[0].endswith(f": {plural(count, *command.SEARCHES)}")
    assert len(out.splitlines()) == 1 + count
    for option in (
        ("--m", "64"),
        ("--n", "64"),
        ("--k", "64"),
        ("--set", "rounding=nearest"),
        ("--workload", "gpt2-350m"),
    ):
        code, _, errors = interpreted("--all", *option, "--device", "cpu", "--dry-run")
        assert (code, len(errors)) == (2, 1)
        assert "only OP and --block narrow" in errors[0]


def test_what_the_options_default_to():
    """As the help says: quick, tpe, time; profiles are written."""
    asked = TuneOptions([], [], "cpu", 600.0)
    assert (asked.effort, asked.strategy, asked.objective, asked.keep) == (
        "quick",
        "tpe",
        "time",
        True,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", "luck"),
        ("effort", "none"),
        ("objective", "fame"),
        ("for_all", "none"),
        ("bits", "other"),
        ("data", "nope"),
    ],
)
def test_names_are_refused_by_the_function_too(name, value):
    option = f"--{name.replace('_', '-')} {value}: expected"
    with pytest.raises(UsageError, match=f"^{option}"):
        command.tune(TuneOptions([], [], "cpu", 600.0, **{name: value}))


# What a person sees.


@pytest.fixture
def clock(monkeypatch):
    """The display's."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(display_module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_lines_where_there_is_no_terminal(capsys):
    with SearchDisplay("time", 2) as display:
        display.begin("gemm/triton m=1", 4, 60.0, [])
        display.trial(C, Measurement("ok", 2.0))
        display.trial(A, Measurement("ok", 3.0))  # no better: no line
        display.trial(B, Measurement("crash", message="first line\nsecond line"))
        display.trial(D, Measurement("slow", 9.0))
        display.trial(E, Measurement("ok", 1.0))
        display.begin("gemm/wgmma m=1", 4, 60.0, [(A, Measurement("ok", 2.0))])
        display.trial(B, Measurement("wrong"))
        display.note("[bold]as it is[/bold]")
        display.note("two\nlines \x1b[2J")
    out, errors = capsys.readouterr()
    assert out == ""
    text = display_module.config_text
    assert errors.splitlines() == [
        "jetfire: [1/2] gemm/triton m=1",
        f"jetfire: trial 1: 2.000 ms (1.00× the first) {text(C)}",
        f"jetfire: crash: {text(B)}: first line",
        f"jetfire: trial 5: 1.000 ms (2.00× the first) {text(E)}",
        "jetfire: [2/2] gemm/wgmma m=1, 1 trial known",
        f"jetfire: wrong: {text(B)}:",
        "jetfire: [bold]as it is[/bold]",
        "jetfire: two lines \\x1b[2J",
    ]
    assert text(C) == "tile=64 warps=4 fast=False order=row"


def rendered(display):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    console.print(display.table())
    return console.file.getvalue()


def test_the_table_of_a_search(clock):
    display = SearchDisplay("time", 3)
    assert "best so far" not in rendered(display)
    known = [(A, Measurement("ok", 4.0)), (B, Measurement("timeout"))]
    display.begin("gemm/triton m=4096", 10, 600.0, known)
    text = rendered(display)
    assert "[1/3] gemm/triton m=4096" in text
    assert "2 of 10: ok 1 · timeout 1" in text
    assert "at most 10:00" in text  # the budget: nothing is known of how fast it goes
    clock.seconds += 20
    for config, found in (
        (C, Measurement("ok", 2.5)),
        (D, Measurement("slow", 9.0)),
        (E, Measurement("ok", 3.0)),
        (B, Measurement("wrong")),
    ):
        display.trial(config, found)
    text = rendered(display)
    assert "2.500 ms (1.60× the first)" in text
    assert display_module.config_text(C) in text
    assert "6 of 10: ok 3 · slow 1 · timeout 1 · wrong 1" in text
    assert "at most 0:20" in text  # 5 s each, 4 to go
    clock.seconds += 575
    assert "at most 0:05" in rendered(display)
    clock.seconds += 60
    assert "at most 0:00" in rendered(display)


@pytest.mark.parametrize(("objective", "unit"), [("energy", "J"), ("both", "ms·J")])
def test_the_table_of_other_objectives(objective, unit):
    display = SearchDisplay(objective, 1)
    display.begin("gemm/triton", 10, 600.0, [(A, Measurement("ok", 4.0))])  # without an energy
    assert "best so far" not in rendered(display)
    display.trial(B, Measurement("ok", 2.0, joules=0.5))
    value = {"energy": "0.5000", "both": "1.000"}[objective]
    assert f"{value} {unit} (1.00× the first)" in rendered(display)


def test_a_terminal_gets_the_table_and_lines_above_it():
    file = io.StringIO()
    display = SearchDisplay("time", 1)
    display._console = Console(file=file, force_terminal=True, width=100, color_system=None)
    with display:
        display.begin("gemm/triton", 10, 600.0, [])
        display.trial(C, Measurement("ok", 2.5))
        display.trial(B, Measurement("crash", message="only counted"))
        display.note("a [1/2] line")
        display._live.refresh()
    text = file.getvalue()
    assert "jetfire: a [1/2] line" in text
    assert "2.500 ms (1.00× the first)" in text
    assert "ok 1 · crash 1" in text
    assert "only counted" not in text


def outcome(config=E, default=C, ms=0.5, default_ms=1.0, saved=True, peers=None, trials=()):
    timing = Timing.of([ms] * 5)
    before = None if default_ms is None else Timing.of([default_ms] * 5)
    final = Final(
        config,
        timing,
        before,
        before,
        False,
        {n: Timing.of([v] * 5) for n, v in (peers or {}).items()},
        {},
    )
    space = Space({}, default, lambda config: None)
    target = SearchTarget(Case(TRANSPOSE, PROBLEM), TOY, space)
    return FinishedSearch(target, None, final, trials, saved)


def test_the_summary(capsys):
    trials = [(A, Measurement("ok", 1.0)), (B, Measurement("slow", 5.0)), (D, Measurement("crash"))]
    display_module.show(
        [
            outcome(peers={"compile": 1.5, "copy": 0.25}, trials=trials),
            outcome(config=C, ms=2.0, default_ms=2.0, saved=False),
            outcome(default_ms=None),
        ],
        HERE,
    )
    out, errors = capsys.readouterr()
    assert errors == ""
    lines = [line.split("  ") for line in out.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert [*display_module.COLUMNS] in rows
    assert rows[3] == [
        f"transpose 64×64 block={PROBLEM.block}",
        "toy",
        "tile=256",
        "500 µs",
        "1.00 ms",
        "2.000×",
        "3.00× compile",
        "3",
        "1",
        "written",
    ]
    assert rows[4] == ["0.50× copy"]
    assert rows[5][2:6] == ["the default", "2.00 ms", "2.00 ms", "1.000×"]
    assert rows[5][-1] == "stays"
    assert rows[6][3:5] == ["500 µs", "fails"]
    # Of two: the third has no default to compare with.
    assert out.splitlines()[-1] == (
        "Some CPU (CPU): 1.414× the defaults' speed, geometric mean of 2"
    )
    display_module.show([outcome(default_ms=None)], HERE)
    assert "geometric mean" not in capsys.readouterr().out


def test_the_summary_in_other_formats(capsys):
    tuned = [outcome(peers={"compile": 1.5, "copy": 0.25}, trials=[(A, Measurement("ok", 1.0))])]
    display_module.show(tuned, HERE, "json")
    (search,) = json.loads(capsys.readouterr().out)["searches"]
    assert search["gain"] == 2.0
    display_module.show(tuned, HERE, "csv")
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (line["kernel"], line["ms"], line["vs_peer.copy"]) == ("toy", "0.5", "0.5")
    display_module.show(tuned, HERE, "md")
    *_, head, _, row = capsys.readouterr().out.splitlines()
    assert head.startswith("| problem | kernel |")
    assert "3.00× compile<br>0.50× copy" in row
    assert row.count("|") == head.count("|")


def test_changes_name_only_what_differs():
    assert display_module.changes(ToyConfig(fast=True, order="column"), ToyConfig()) == (
        "fast=true order=column"
    )
    assert display_module.changes(ToyConfig(), ToyConfig()) == "the default"


# The rest of the recorded spaces: here, so that two processes share what takes long.


@pytest.mark.parametrize("name", ["triton", "wgmma"])
def test_gp_is_near_the_optimum_soon(name):
    near_the_optimum(name, "gp")
