"""Arguments of wrong types and values, and tensors that cannot be written: one true line."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from jetfire import ops
from jetfire.core.arguments import checked, mistake
from jetfire.core.errors import UsageError
from jetfire.nn import (
    AdamW,
    Int4,
    Int4Block,
    Int4Conv1D,
    Int4Linear,
    Int8Block,
    Int8Conv1D,
    Int8GELU,
    Int8LayerNorm,
    Int8Linear,
    Int8LlamaBlock,
    convert,
    linear_cross_entropy,
    quantised_weights,
    tied_embedding,
)
from jetfire.nn.flow import StreamBlock
from jetfire.tests import functions

WRONG = {
    "none": None,
    "text": "text",
    "array": np.ones((40, 64), np.float32),
    "list": [1.0, 2.0],
    "float": 1.5,
    "nan": math.nan,
    "integer": 3,
    "negative": -1,
    "bool": True,
    "object": object(),
    "dtype": torch.float32,
    "module": nn.ReLU(),
    "complex": torch.ones(40, 64) * 1j,
    "integers": torch.ones(40, 64, dtype=torch.int64),
    "floats": torch.ones(40, 64),
    "scalar": torch.ones(()),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(1).to("meta"),
}


def told(function, keywords, allowed=()):
    """None where a call works, else the one line in which it was refused."""
    try:
        function(**keywords)
    except (UsageError, *allowed) as error:
        message, ours = str(error), isinstance(error, UsageError)
    else:
        return None
    assert message == message.strip() != ""
    assert message.isprintable()
    assert len(message) < 200 or not ours
    return message


@pytest.fixture(scope="module")
def arguments():
    return functions.arguments()


@pytest.mark.parametrize("name", functions.names())
def test_functions(arguments, name):
    """Whatever an argument is: it works, or it is refused, and where its type is wrong by name."""
    function = getattr(ops, name)
    for good in arguments[name]:
        for key, value in good.items():
            values = [*WRONG.values(), *with_wrong_parts(value)]
            for keywords in ({**good, key: wrong} for wrong in values):
                mistaken = mistake(function, (), keywords)
                message = told(function, keywords)
                assert message is None or mistaken is None or message == mistaken
                assert mistaken is None or mistaken.startswith(key)


def with_wrong_parts(value):
    """Yield a quantised value with each of its parts replaced."""
    for part in getattr(value, "_fields", ()):
        for wrong in WRONG.values():
            yield value._replace(**{part: wrong})


CONSTRUCTORS = {
    Int8Linear: {
        "in_features": 64,
        "out_features": 32,
        "bias": True,
        "block": 32,
        "device": None,
        "dtype": None,
    },
    Int8LayerNorm: {"width": 64, "eps": 1e-5, "block": 32, "device": None, "dtype": None},
    Int8GELU: {"approximate": "tanh", "block": 32},
    Int8Block: {"width": 64, "heads": 2, "dropout": 0.1, "block": 32, "device": None},
    Int8LlamaBlock: {
        "width": 64,
        "heads": 2,
        "kv_heads": 1,
        "hidden": 96,
        "dropout": 0.1,
        "bias": True,
        "window": 8,
        "eps": 1e-5,
        "theta": 10000.0,
        "block": 32,
        "flow": 32,
        "device": None,
    },
    Int8Conv1D: {
        "weight": nn.Parameter(torch.ones(64, 32)),
        "bias": nn.Parameter(torch.ones(32)),
        "block": 32,
    },
    Int4Linear: {
        "in_features": 64,
        "out_features": 32,
        "bias": True,
        "int4": Int4(),
        "device": None,
        "dtype": None,
    },
    Int4Conv1D: {
        "weight": nn.Parameter(torch.ones(64, 32)),
        "bias": nn.Parameter(torch.ones(32)),
        "int4": Int4(),
    },
    Int4Block: {
        "width": 64,
        "heads": 2,
        "dropout": 0.1,
        "int4": Int4(),
        "flow": 32,
        "device": None,
    },
    Int4: {"group": 32, "gradient": "sampled"},
}


@pytest.mark.parametrize("kind", CONSTRUCTORS)
def test_constructors(kind):
    """A layer that was given nonsense says so at once, in our words or, of sizes, in torch's."""
    x = torch.ones(4, 64)
    for key in CONSTRUCTORS[kind]:
        for name, wrong in WRONG.items():
            keywords = {**CONSTRUCTORS[kind], key: wrong}
            if key == "device" and isinstance(wrong, int):
                continue  # the number of a GPU

            def build(keywords=keywords):
                layer = kind(**keywords)
                if isinstance(layer, nn.Module) and not isinstance(layer, StreamBlock):
                    layer(x[:, : getattr(layer, "in_features", 64)])

            message = told(build, {}, allowed=(RuntimeError,))
            if key == "eps" and name in ("nan", "negative"):
                assert "eps=" in message


MODEL = nn.Sequential(nn.Linear(32, 32))


def refused(function, *args, **options):
    with pytest.raises(UsageError) as error:
        function(*args, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: ops.int8_quantize(x.numpy()),
            "x is of type numpy.ndarray: expected a tensor",
        ),
        (lambda x: ops.int8_quantize(x.tolist()), "x is of type list: expected a tensor"),
        (
            lambda x: ops.int8_quantize(x, rounding="stochastic", seed=3),
            "seed=3: expected a tensor or None",
        ),
        (lambda x: ops.int8_quantize(x, block=32.0), "block=32.0: expected 32 or 64 or 128"),
        (
            lambda x: ops.int8_quantize(x, rounding="up" * 99),
            f"rounding={'up' * 19}u…: expected nearest or stochastic",
        ),
        (lambda x: ops.int4_quantize(x, 0.5), "step=0.5: expected a tensor"),
        (lambda x: convert(MODEL, None), "recipe=None: expected text or a Recipe"),
        (lambda x: convert(None, "bf16"), "model=None: expected a Module"),
        (lambda x: convert(MODEL, "bf16", skip="head"), "skip='head': expected a tuple, each text"),
        (lambda x: linear_cross_entropy(x, None, x), "weight=None: expected a tensor"),
        (lambda x: tied_embedding(x, x.long(), None), "tied=None: expected a TiedGradient"),
        (lambda x: quantised_weights(x), "model is of type torch.Tensor: expected a Module"),
        (lambda x: AdamW(MODEL.parameters(), model=None), "model=None: expected a Module"),
        (
            lambda x: AdamW(MODEL.parameters(), lr="3", model=MODEL),
            "lr='3': expected a number or a tensor",
        ),
        (
            lambda x: AdamW(MODEL.parameters(), model=MODEL, seed="3"),
            "seed='3': expected an integer",
        ),
        (lambda x: Int8Linear(32, 32)(x.numpy()), "input of type ndarray: expected a tensor"),
        (lambda x: Int8Block(32, 2)(x, 1), "stream of type Tensor: expected a Stream"),
        (lambda x: Int8Block(32, 0), "width=32: expected a multiple of heads=0"),
        (
            lambda x: Int4(group=32.0),
            "group=32.0: expected a power of two from 1 to 1024, or 'search'",
        ),
        (
            lambda x: Int8Conv1D(nn.Parameter(x), nn.Parameter(x)),
            "weight of shape (32, 32), bias of (32, 32): expected in×out and out",
        ),
    ],
)
def test_messages(call, message):
    assert refused(call, torch.ones(32, 32)) == message


@pytest.mark.parametrize("eps", [-1e-5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["int8_layernorm", "int8_add", "int8_adamw", "int8_adamw8"])
def test_eps(name, eps):
    message = refused(getattr(ops, name), **{**functions.call(name), "eps": eps})
    assert message == f"eps={eps}: expected a finite number of at least 0"


@pytest.mark.parametrize("p", [-0.1, 1.0, math.nan])
def test_probability(p):
    keywords = {**functions.call("int8_dropout"), "p": p}
    assert refused(ops.int8_dropout, **keywords).startswith(f"p={p}: expected")


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("name", ["int8_adamw", "int8_adamw8"])
def test_a_step_of_adamw_is_counted_from_one(name, step):
    keywords = functions.call(name, step=torch.tensor([step]))
    before = keywords["param"].clone()
    message = f"step={step:g}: expected at least 1, for it counts this step too"
    assert refused(getattr(ops, name), **keywords) == message
    assert torch.equal(keywords["param"], before)


def test_odd_k_of_wide_codes(arguments):
    a = ops.Quantized4(None, torch.ones(4, 33, dtype=torch.int8), torch.ones(1))
    message = "k=33: expected an even number, for wide codes too"
    assert refused(ops.int4_gemm, a, a) == message


def test_slots_that_name_no_row():
    keywords = functions.call("int4_quantize_backward", gathered=True)
    few = {**keywords, "dx_hat": keywords["dx_hat"][:3]}
    assert "expected rows of dx_hat, which has 3" in refused(ops.int4_quantize_backward, **few)


def test_other_errors_are_left_as_they_are():
    @checked
    def fails(number: int) -> None:
        raise ZeroDivisionError(number)

    with pytest.raises(ZeroDivisionError, match="3"):
        fails(3)
    with pytest.raises(UsageError, match=r"^number='3': expected an integer$") as error:
        fails("3")
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
        fails()


def test_a_call_that_succeeds_is_not_looked_at(monkeypatch):
    monkeypatch.setattr("jetfire.core.arguments.mistake", None)
    ops.int8_quantize(torch.ones(32, 32))


# What is written in place


def leaf(x):
    return x.clone().requires_grad_()


# Calls that write arguments: the function's name, options, and what is written.
IN_PLACE = {
    "int8_gemm": ({"accumulate": True, "out": "fp32"}, ("c",)),
    "int8_gelu_backward": ({"layout": "both", "inplace": True}, ("dy",)),
    "cross_entropy_backward": ({"dtype": "fp32", "inplace": True}, ("logits",)),
    "int8_adamw": ({}, ("param", "exp_avg", "exp_avg_sq")),
    "int8_adamw8": ({}, ("param", "exp_avg_scale", "exp_avg_sq_scale")),
    "add_rows": ({"k": functions.M}, ("table",)),
}


def writing(name):
    """The arguments of a call that writes some."""
    return functions.call(name, **IN_PLACE[name][0])


@pytest.mark.parametrize(
    "name", ["int8_gemm", "cross_entropy_backward", "int8_adamw", "int8_adamw8", "add_rows"]
)
def test_a_leaf_that_requires_grad_is_not_written(name):
    function = getattr(ops, name)
    for key in IN_PLACE[name][1]:
        keywords = writing(name)
        whole = leaf(keywords[key])
        for x in (whole, whole.view_as(whole)):
            before = x.detach().clone()
            message = refused(function, **{**keywords, key: x})
            assert message.startswith(key)
            assert "requires grad: expected torch.no_grad()" in message
            assert torch.equal(x, before)
        with torch.no_grad():
            function(**{**keywords, key: whole})
        assert not torch.equal(whole, before)


def test_what_is_no_leaf_is_added_to_with_its_gradient():
    keywords = writing("int8_gemm")
    x = leaf(keywords["c"])
    y = ops.int8_gemm(**{**keywords, "c": 3 * x})
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_rows_that_overlap_are_not_written():
    keywords = writing("cross_entropy_backward")
    for wide in (
        keywords["logits"][:1].expand(functions.M, -1),
        torch.zeros(9999).as_strided((functions.M, functions.N), (functions.N - 1, 1)),
    ):
        message = refused(ops.cross_entropy_backward, **{**keywords, "logits": wide})
        strides = f"({wide.stride(0)}, 1)"
        assert message == f"logits has strides {strides}: expected rows that do not overlap"
    padded = torch.zeros(functions.M, functions.N + 8)[:, : functions.N]
    found = ops.cross_entropy_backward(**{**keywords, "logits": padded})
    assert found is padded


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("int8_gemm", "bias", "c"),
        ("int8_gelu_backward", "x", "dy"),
        ("cross_entropy_backward", "lse", "logits"),
        ("cross_entropy_backward", "dloss", "logits"),
        ("int8_adamw", "exp_avg_sq", "exp_avg"),
        ("int8_adamw", "grad", "param"),
        ("int8_adamw", "rate", "exp_avg"),
        ("add_rows", "gradient", "table"),
    ],
)
def test_what_is_written_shares_no_memory_with_another_argument(name, one, other):
    keywords = writing(name)
    x = keywords[other]
    if isinstance(x, ops.Quantized):
        keywords[one] = keywords[one]._replace(q=x.q)
    else:
        shape = keywords[one].shape if one in keywords else (functions.N,)
        keywords[one] = x.flatten()[: math.prod(shape)].view(shape)
    message = refused(getattr(ops, name), **keywords)
    assert message == f"{one} and {other} share memory: expected another {other}, which is written"


def test_codes_are_written_apart():
    keywords = functions.call("int8_adamw", m=functions.N)
    out = ops.int8_adamw(**keywords)
    message = refused(ops.int8_adamw, **keywords, out=out._replace(qt=out.q))
    assert message == "qt and q share memory: expected another q, which is written"
    whole = torch.zeros(2, *out.q.shape, dtype=torch.int8)
    ops.int8_adamw(**keywords, out=out._replace(q=whole[0], qt=whole[1]))
    assert torch.equal(whole[1], whole[0].t())
