"""Peers: what each computes, where each runs, and a reason where it cannot."""

import pytest
import torch

from jetfire.measure import peers

CPU = torch.device("cpu")


def test_every_peer_is_named():
    on_cpu = {*peers.gemm(8, 8, 8, CPU), *peers.elementwise(lambda: None, 8, CPU)}
    on_cuda = peers.gemm(8, 8, 8, torch.device("cuda", 0))
    assert on_cpu | set(on_cuda) | {"compile"} == set(peers.NAMES)


def test_cpu_products_have_the_shape_and_the_type():
    made = {name: factory()() for name, factory in peers.gemm(5, 7, 3, CPU).items()}
    assert {name: (tuple(c.shape), c.dtype) for name, c in made.items()} == {
        "fp32_matmul": ((5, 7), torch.float32),
        "bf16_matmul": ((5, 7), torch.bfloat16),
    }
    assert all(c.abs().sum() > 0 for c in made.values())


def test_a_factory_makes_fresh_operands():
    factory = peers.gemm(4, 4, 4, CPU)["fp32_matmul"]
    assert not torch.equal(factory()(), factory()())


def test_copy_moves_the_bytes_that_it_is_told():
    copied = peers.elementwise(lambda: None, 1000, CPU)["copy"]()()
    assert 2 * copied.nbytes == pytest.approx(1000, abs=8)
    assert copied.any()


def test_eager_is_the_function_given():
    def function() -> int:
        return 3

    assert peers.elementwise(function, 8, CPU)["eager"]() is function


def test_e4m3_fills_its_range_tile_by_tile():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    x[:2, 128:256] = 0
    x[2:4, :128] *= 1e-6
    codes, scale = peers.to_e4m3(x, 2, 128)
    assert codes.shape == x.shape
    assert scale.shape == (3, 3)
    assert float(codes[:2, :128].float().abs().max()) == 448
    wide = scale.repeat_interleave(2, 0)[:5].repeat_interleave(128, 1)[:, :300]
    back = codes.float() * wide
    assert torch.equal(back[:2, 128:256], torch.zeros(2, 128))
    # Half a unit of 3 bits, or of the subnormals' 2^-9.
    assert bool(((back - x).abs() <= x.abs() / 16 + wide * 2.0**-10 * 1.001).all())


def test_peers_of_given_floats_multiply_them():
    a, b = torch.randn(5, 40), torch.randn(7, 40)
    made = {name: factory()() for name, factory in peers.gemm_of(a, b).items()}
    assert torch.equal(made["fp32_matmul"], a @ b.t())
    assert torch.equal(made["bf16_matmul"], a.bfloat16() @ b.bfloat16().t())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cublas_bf16", "fp8_scaled_mm", "fp8_scaled_mm_block"])
def test_gpu_peers_of_given_floats_multiply_them(name):
    device = torch.device("cuda", 0)
    if name.startswith("fp8") and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    a, b = (1e-3 * torch.randn(rows, 384, device=device) for rows in (256, 512))
    product = peers.gemm_of(a, b)[name]()()
    expected = a.double() @ b.double().t()
    error = float((product.double() - expected).norm() / expected.norm())
    assert error < (0.06 if name.startswith("fp8") else 0.004)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(peers.gemm(8, 8, 8, torch.device("cuda", 0))))
def test_gpu_products_run_and_are_finite(name):
    device = torch.device("cuda", 0)
    if name.startswith("fp8") and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs sm_90")
    product = peers.gemm(256, 512, 384, device)[name]()()
    assert product.shape == (256, 512)
    assert bool(product.float().isfinite().all())
    assert bool(product.float().abs().sum() > 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "says"),
    [("fp8_scaled_mm", "FP8"), ("fp8_scaled_mm_block", "FP8"), ("int8_torch", "m > 16")],
)
def test_gpu_reasons_for_a_ragged_shape(name, says):
    with pytest.raises(peers.Unsupported, match=says):
        peers.gemm(7, 33, 31, torch.device("cuda", 0))[name]()


@pytest.mark.gpu
def test_compiled_is_eager_and_can_be_forgotten():
    device = torch.device("cuda", 0)
    x = torch.randn(64, 64, device=device)
    made = peers.elementwise(lambda: torch.nn.functional.gelu(x), x.nbytes * 2, device)
    torch.testing.assert_close(made["compile"]()(), made["eager"]()())
    peers.forget_compiled()
