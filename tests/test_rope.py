"""rope: kernels against the reference, bit for bit; its gradient; what models call it."""

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.core.workloads import RAGGED
from jetfire.ops import rotary_embedding

OP = registry.get("rope")
KERNEL = registry.get_kernel("rope", "triton")


def check(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["x"]))
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("m", "heads", "head"), [(1, 1, 2), (33, 3, 64), (70, 5, 80), (17, 2, 128)]
)
def test_triton_is_bit_equal(device, dtype, inverse, m, heads, head):
    problem = OP.Problem(m, heads, head=head, inverse=inverse, dtype=dtype)
    check(problem, OP.inputs(problem, device, data="heavy"))


def test_every_config_gives_the_same_bits(device):
    problem = OP.Problem(37, 7, head=48)
    inputs = OP.inputs(problem, device)
    for config in [(1, 1, 1), (16, 2, 4), (8, 8, 2), (64, 4, 8)]:
        check(problem, inputs, KERNEL.Config(*config))


def test_row_strided_views(device):
    """Query and key of a product whose rows are longer, and tables of a model's."""
    problem = OP.Problem(45, 2)
    inputs = OP.inputs(problem, device)
    for name, columns in (("x", 192), ("cos", 64), ("sin", 40)):
        tensor = inputs[name]
        wide = torch.zeros((45, columns), dtype=tensor.dtype, device=device)
        wide[:, : tensor.shape[1]] = tensor
        inputs[name] = wide[:, : tensor.shape[1]]
    check(problem, inputs)


def test_columns_of_longer_rows_are_turned_in_place(device):
    problem = OP.Problem(45, 2)
    inputs = OP.inputs(problem, device)
    expected = OP.reference(problem, inputs)["y"]
    wide = torch.randn((45, 192), dtype=torch.bfloat16, device=device)
    beside = wide[:, 128:].clone()
    wide[:, :128] = inputs["x"]
    x = wide[:, :128]
    KERNEL.launch(problem, KERNEL.default(problem, Device.of(x)), {**inputs, "x": x}, {"y": x})
    assert torch.equal(x, expected)
    x.copy_(inputs["x"])
    assert rotary_embedding(x, inputs["cos"], inputs["sin"], inplace=True) is x
    assert torch.equal(x, expected)
    assert torch.equal(wide[:, 128:], beside)


def test_what_cannot_be_written_is_not_turned_in_place():
    cos, sin = tables(4, 32)
    with pytest.raises(UsageError, match="x requires grad"):
        rotary_embedding(torch.zeros((4, 32), requires_grad=True), cos, sin, inplace=True)
    with pytest.raises(UsageError, match=r"x has strides \(0, 1\): expected rows that do not"):
        rotary_embedding(torch.zeros((1, 32)).expand(4, 32), cos, sin, inplace=True)


def tables(m, head, device="cpu"):
    angles = torch.arange(m, device=device)[:, None] * 100.0 ** -torch.linspace(0, 1, head // 2)
    return angles.cos(), angles.sin()


def test_it_is_a_complex_product():
    x = torch.randn(40, 3 * 32, dtype=torch.float32)
    cos, sin = tables(40, 32)
    pairs = torch.complex(*x.unflatten(1, (3, 2, 16)).unbind(2))
    turned = pairs.to(torch.complex128) * torch.complex(cos, sin)[:, None]
    expected = torch.stack([turned.real, turned.imag], dim=2).flatten(1)
    found = rotary_embedding(x, cos, sin)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    back = rotary_embedding(found, cos, sin, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


def test_it_is_what_transformers_does():
    llama = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="needs transformers"
    )
    cos, sin = tables(24, 32)
    query, key = torch.randn(24, 4 * 32), torch.randn(24, 2 * 32)
    whole = (torch.cat([t, t], dim=1)[None] for t in (cos, sin))
    heads = (t.view(1, 24, -1, 32).transpose(1, 2) for t in (query, key))
    for ours, theirs in zip((query, key), llama.apply_rotary_pos_emb(*heads, *whole), strict=True):
        expected = theirs.transpose(1, 2).reshape(24, -1)
        torch.testing.assert_close(rotary_embedding(ours, cos, sin), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inverse", [False, True])
def test_gradient(device, inverse):
    x = torch.randn(20, 64, device=device, requires_grad=True)
    cos, sin = (table.to(device) for table in tables(20, 32))
    g = torch.randn(20, 64, device=device)
    (found,) = torch.autograd.grad(rotary_embedding(x, cos, sin, inverse=inverse), x, g)
    wide = x.detach().double().requires_grad_()
    first, second = wide.unflatten(1, (2, 2, 16)).unbind(2)
    c, s = cos.double()[:, None], (-sin if inverse else sin).double()[:, None]
    y = torch.stack([first * c - second * s, second * c + first * s], dim=2).flatten(1)
    (expected,) = torch.autograd.grad(y, wide, g.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_bad_inputs(device):
    x, cos = torch.zeros((4, 96), device=device), torch.zeros((4, 32), device=device)
    with pytest.raises(UsageError, match="x has 96 columns: expected whole heads of 64"):
        rotary_embedding(x, cos, cos)
    with pytest.raises(UsageError, match=r"sin has shape \(3, 32\): expected 4 rows"):
        rotary_embedding(x, cos, cos[:3])
    with pytest.raises(UsageError, match="cos is bfloat16: expected float32"):
        rotary_embedding(x, cos.bfloat16(), cos)
    with pytest.raises(UsageError, match="head=33: expected an even number"):
        OP.Problem(4, 2, head=33)


@pytest.mark.gpu
@pytest.mark.parametrize("size", RAGGED)
def test_ragged(device, size):
    problem = OP.Problem(size, 5, head=128)
    check(problem, OP.inputs(problem, device))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    m, heads = 2**20 + 1, 17
    x = torch.randn((m, heads * 128), device=device, dtype=torch.bfloat16)
    cos, sin = (torch.randn((m, 64), device=device) for _ in range(2))
    found = rotary_embedding(x, cos, sin)
    for rows in (slice(0, 64), slice(m - 65, m)):
        expected = OP.reference(
            OP.Problem(x[rows].shape[0], heads, head=128),
            {"x": x[rows], "cos": cos[rows], "sin": sin[rows]},
        )
        assert torch.equal(found[rows], expected["y"])
