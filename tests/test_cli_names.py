"""A name that is none of those known: what is meant is suggested, wherever a name is given."""

import pytest

from jetfire.cli import execute
from jetfire.commands import options
from jetfire.core import registry
from jetfire.core.errors import UsageError, nearest, unknown
from jetfire.measure.runner import Runner

NEAR = [
    (["bench", "gmem"], "no op 'gmem' (did you mean gemm?): expected one of adamw, "),
    (["bench", "GEMM"], "no op 'GEMM' (did you mean gemm?)"),
    (["bench", "hadamard"], "no op 'hadamard' (did you mean hadamard_pack?)"),
    (["bench", "gemm", "--kernel", "wgma"], "no kernel 'wgma' (did you mean wgmma?)"),
    (["bench", "gemm", "--peer", "cublas_fp61"], "(did you mean cublas_fp16?)"),
    (["bench", "gemm", "--workload", "gpt2-350"], "'gpt2-350' (did you mean gpt2-350m?)"),
    (["bench", "gemm", "--data", "outliers"], "--data outliers (did you mean outlier?)"),
    (["bench", "gemm", "--format", "jsno"], "--format jsno (did you mean json?)"),
    (["bench", "gemm", "--set", "roundign=nearest"], "'roundign' (did you mean rounding?)"),
    (["bench", "gemm", "--set", "out=bf61"], "out=bf61 (did you mean bf16?)"),
    (["bench", "gemm", "--config", "tile_mm=64"], "'tile_mm' (did you mean tile_m?)"),
    (["bench", "--suite", "element"], "--suite element (did you mean elementwise?)"),
    (["tune", "gemm", "--strategy", "tpee"], "--strategy tpee (did you mean tpe?)"),
    (["tune", "gemm", "--effort", "fulll"], "--effort fulll (did you mean full?)"),
    (["tune", "gemm", "--objective", "engery"], "--objective engery (did you mean energy?)"),
    (["export", "gemm", "--target", "toch", "-o", "x"], "--target toch (did you mean torch?)"),
    (["train", "gpt2-124"], "no preset 'gpt2-124' (did you mean gpt2-124m?)"),
    (["train", "tiny", "--recipe", "int8_block32"], "(did you mean int8-block32?)"),
    (["train", "tiny", "--recipe", "int9"], "no recipe 'int9' (did you mean int8?)"),
    (["train", "tiny", "--set", "parallel=dpd"], "parallel=dpd (did you mean ddp?)"),
    (["train", "bench", "widee"], "no case 'widee' (did you mean wide?)"),
    (["train", "bench", "tiny", "--set", "layer=2"], "--set layer=2 (did you mean layers?)"),
    (["train", "bench", "tiny", "--recipe", "int8-blok32"], "(did you mean int8-block32?)"),
    (["train", "bench", "tiny", "--peer", "egaer"], "--peer egaer (did you mean eager?)"),
    (["train", "prepare", "shakspeare"], "(did you mean shakespeare?)"),
    (["train", "prepare", "python", "--tokenizer", "bytes"], "'bytes' (did you mean byte?)"),
]


@pytest.mark.parametrize(("words", "says"), NEAR, ids=[" ".join(words) for words, _ in NEAR])
def test_what_is_nearly_a_name_is_suggested(words, says, capsys, monkeypatch):
    monkeypatch.setattr(Runner, "measure", lambda *_: pytest.fail("measured all the same"))
    assert execute(None, words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_what_is_far_from_any_name_or_a_number_is_given_no_suggestion():
    assert nearest("matmul", registry.names()) is None
    assert nearest("33", ["32", "64"]) is None
    assert nearest("", registry.names()) is None
    assert nearest("gemm" * 10**6, registry.names()) is None
    assert nearest("Int4-GEMM", registry.names()) == "int4_gemm"


@pytest.mark.parametrize(
    ("known", "also", "accepted"),
    [
        (["a"], "", "expected a"),
        (["a", "b"], "", "expected a or b"),
        (["a", "b", "c", "d"], "", "expected one of a, b, c, d"),
        (["a", "b"], ", or none", "expected one of a, b, or none"),
    ],
)
def test_what_is_accepted_ends_the_line(known, also, accepted):
    assert str(unknown("no x 'zz'", "zz", known, also)) == f"no x 'zz': {accepted}"


@pytest.mark.parametrize("text", [f"0/{'9' * 5000}", f"{'9' * 5000}/1", "0/1_0", "٠/١"])
def test_a_shard_is_of_few_plain_digits(text):
    with pytest.raises(UsageError, match="expected I/N with 0 ≤ I < N"):
        options.shard(text)
