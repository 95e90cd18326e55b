"""`--bits same`, the digest of outputs, and `--max-noise`, at the bench that measures configs."""

import hashlib
from dataclasses import dataclass, replace

import pytest
import torch

from jetfire.core import profiles, registry
from jetfire.core.device import Device
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.kernel import Config, Kernel
from jetfire.measure import provenance
from jetfire.tests.test_tuner import SMALL, entries, interpreted, server
from jetfire.tuner import worker
from jetfire.tuner.worker import Bench, Job

__all__ = ["interpreted", "server"]  # fixtures

GEMM, CPU = registry.get("gemm"), Device.parse("cpu")
PROBLEM = GEMM.Problem(m=32, n=32, k=32, block=32, out="fp32")


@dataclass(frozen=True)
class RoundingConfig(Config):
    off: bool = False
    fickle: bool = False


class Rounding(Kernel):
    """Writes the reference's result, or in one element its neighbour."""

    op, name, Config = "gemm", "rounding", RoundingConfig

    def legal(self, problem, config, device):
        return None

    def default(self, problem, device):
        return RoundingConfig()

    def launch(self, problem, config, inputs, outputs):
        self.runs = getattr(self, "runs", 0) + 1
        outputs["c"].copy_(GEMM.reference(problem, inputs)["c"])
        if config.off or (config.fickle and self.runs % 2):
            at = outputs["c"].view(-1)[:1]
            at.copy_(torch.nextafter(at, at + 1))


def bench(**options):
    job = Job(GEMM, Rounding(), PROBLEM, 0, "normal", False, (), **options)
    return Bench(job, CPU, begin=lambda: None)


def test_a_peer_that_fails_is_left_out_with_its_reason(monkeypatch):
    def fails():
        raise RuntimeError("no such library\nat all")

    monkeypatch.setattr(type(GEMM), "peers", lambda *_: {"cublas_bf16": fails})
    asked = replace(bench().job, peers=("cublas_bf16", "int_mm"))
    found = Bench(asked, CPU, begin=lambda: None).compare([RoundingConfig()], 0.0, 2, True)
    assert list(found.left_out) == [
        "peer int_mm: gemm has none of that name on cpu",
        "peer cublas_bf16: RuntimeError: no such library",
    ]
    unasked = Bench(replace(asked, peers=None), CPU, begin=lambda: None)
    assert not unasked.compare([RoundingConfig()], 0.0, 2, True).left_out  # the bench says why


def test_a_config_of_other_bits_is_wrong_where_they_are_to_be_the_same():
    off, same = RoundingConfig(off=True), RoundingConfig()
    assert bench().measure(off).outcome == "ok"
    told = bench(same_bits=same).measure(off)
    assert (told.outcome, told.message) == ("wrong", "c: not the bits of the config in use")
    assert bench(same_bits=same).measure(same).outcome == "ok"
    assert bench(same_bits=off).measure(off).outcome == "ok"  # the config in use, not the reference
    found = bench(same_bits=same).compare([same, off], 1.0, 6, False)
    assert list(found.configs) == [same]
    assert found.failed == {off: "c: not the bits of the config in use"}


def test_a_config_whose_bits_change_is_no_measure_of_others():
    with pytest.raises(
        UsageError, match="--bits same: c is not the same in two runs of one config"
    ):
        bench(same_bits=RoundingConfig(fickle=True))


def test_a_digest_is_of_the_outputs():
    same, off = RoundingConfig(), RoundingConfig(off=True)
    found = bench().compare([same, off], 1.0, 6, False).digests
    inputs = GEMM.inputs(PROBLEM, torch.device("cpu"), 0, "normal")
    right = GEMM.reference(PROBLEM, inputs)["c"].float().numpy()
    assert found[same] == hashlib.sha256(b"c" + right.tobytes()).hexdigest()
    assert found[off] != found[same]


def test_timing_goes_on_until_the_noise_is_small(monkeypatch):
    monkeypatch.setattr(worker, "MOST_ROUNDS", 9)
    one = RoundingConfig()

    def samples(max_noise):
        found = bench(max_noise=max_noise).compare([one], 60.0, 7, False)
        return found.configs[one].samples

    # Six are the fewest that tell of a noise; of 0% there is never as little.
    assert [samples(None), samples(1e9), samples(0.0)] == [7, 6, 9]
    asked = []
    real = worker.time_calls

    def spy(*args, **options):
        asked.append((options["rounds"], options.get("max_noise")))
        return real(*args, **options)

    monkeypatch.setattr(worker, "time_calls", spy)
    for max_noise in (None, 0.5):
        assert bench(max_noise=max_noise).measure(RoundingConfig()).outcome == "ok"
    assert asked == [(2, None), (7, None), (2, None), (9, 0.5)]


def test_the_command_keeps_a_digest(interpreted, tmp_path):
    options = ("--bits", "same", "--max-noise", "0.0001%", "--trials", 1, "--trial-timeout", "300s")
    code, _, errors = interpreted(*SMALL, *options)
    assert code == 0, errors[-3:]
    (entry,) = entries(tmp_path)
    op = registry.get("transpose")
    problem = op.Problem.parse(entry["problem"])
    inputs = op.inputs(problem, torch.device("cpu"), 0, "normal")
    total = hashlib.sha256()
    for name, tensor in sorted(op.reference(problem, inputs).items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    assert entry["digest"] == total.hexdigest()
    assert any("the noise is" in line and "still, after" in line for line in errors)


def test_a_profile_from_before_has_no_digest(tmp_path):
    origin = provenance.of(Rounding(), CPU)
    config = RoundingConfig().as_dict()
    times = (1.0, 1.0, 1.0, 9, 1.0, None, "time", {}, 3, "tpe")
    made = profiles.Entry("rounding", PROBLEM.as_dict(), config, *times, origin, "0" * 64)
    profiles.save(tmp_path, CPU, registry.get("gemm"), [made])
    file = profiles.path(tmp_path, CPU, "gemm")
    text = file.read_text()
    for digest, expected in ((', "digest": "' + "0" * 64 + '"', "0" * 64), ("", None)):
        file.write_text(text.replace(', "digest": "' + "0" * 64 + '"', digest))
        profiles.forget()
        assert profiles.read(file)[0].digest == expected
    file.write_text(text.replace("0" * 64, "none"))
    profiles.forget()
    with pytest.warns(JetfireWarning, match="digest='none': expected"):
        assert profiles.read(file) == ()
