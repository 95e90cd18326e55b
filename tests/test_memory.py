"""What is held at the peak of forward and backward, counted by torch operator on the CPU.

What an operator holds while it runs is not seen: of attention's backward, an fp32 query gradient.
"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jetfire.nn import Int8Block, Stream, TiedGradient, linear_cross_entropy, sizes
from jetfire.nn import loss as loss_module
from jetfire.nn.loss import mean_linear_cross_entropy
from jetfire.ops import int8_quantize

pytestmark = pytest.mark.usefixtures("one_thread")


def storages(tree):
    """The storages of a tree's tensors, by identity."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in found}


class Held(TorchDispatchMode):
    """Counts bytes of the storages that operators make while it is on, until they are freed.

    Attributes:
        now, peak: bytes held now, and at most since the peak was last set to `now`.
    """

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = storages((args, kwargs))
        for key, storage in storages(out).items():
            if key not in known and key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.now += self.sizes[key]
                weakref.finalize(storage, self.freed, key)
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, key):
        self.now -= self.sizes.pop(key)


def test_a_block_s_peak():
    """Per token and element of the stream, in bytes, where there are four tokens per element.

    Kept from forward: 6 of the weights' codes (24·width², both ways), 8 of query, key, value and
    output, 4 of FC1's output, and of codes 1 each: the streams' two, four products' inputs but
    GELU's. And the block's output, 2. Forward ends with FC2, whose input and output are 5 and which
    reads a stream of 2. At the peak of backward FC2's input has a gradient of 4, and GELU's input
    one of 4, transposed.
    """
    torch.manual_seed(0)
    tokens, width = 1024, 256
    block = Int8Block(width, 2, block=128, flow=32)
    block.adds_gradients = True
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(tokens, width).bfloat16().requires_grad_()
    x.grad = torch.zeros_like(x)
    gradient = torch.randn(tokens, width).bfloat16()
    unit = tokens * width
    with Held() as held:
        y = block(Stream.of(x, 32), 2).x
        forward, kept = held.peak / unit, held.now / unit
        held.peak = held.now
        y.backward(gradient)
    scales = 0.2  # and statistics
    assert 25 <= kept <= 25 + scales
    assert 31 <= forward <= 31 + scales
    assert 33 <= held.peak / unit <= 33 + scales


@pytest.fixture
def keys(monkeypatch):
    """Give the head's backward one key after another, so that parts of rows have known ones."""

    def given(count, device, training):
        return torch.arange(first[0], first[0] + count, device=device)

    first = [7]
    monkeypatch.setattr(loss_module, "keys_for_backward", given)
    return first


@pytest.fixture
def short_parts(monkeypatch):
    """Have it take 256 rows at once, of 1024."""
    monkeypatch.setattr(sizes, "LOGITS", 1)
    monkeypatch.setattr(sizes, "ROWS", 256)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "parts", "size"),
    [
        (16384, 50304, 2, 8192),
        (8192, 50304, 1, 8192),
        (20000, 50304, 2, 10112),
        (4096, 151936, 1, 4096),
        (65536, 512, 1, 65536),
        (100, 512, 1, 128),
        (0, 512, 1, 128),
    ],
)
def test_the_head_s_rows_at_once(rows, vocabulary, parts, size):
    assert sizes.head_parts(rows, vocabulary) == (parts, size)


def head(rows, width, vocabulary):
    """Inputs of the loss, its weight's codes, and a gradient."""
    x = torch.randn(rows, width).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    targets[::5] = -100
    codes = int8_quantize(weight.detach(), block=128, layout="both")
    return x, weight, targets, codes, torch.rand(rows)


@pytest.mark.parametrize(("rows", "size"), [(1024, 256), (900, 384)])
def test_the_head_s_gradient_is_of_all_parts(keys, short_parts, rows, size):
    """Each part's is that of a loss of its rows, with a key of its own; the weight's is the sum."""
    torch.manual_seed(0)
    x, weight, targets, codes, gradient = head(rows, 40, 200)
    loss = linear_cross_entropy(x, weight, targets, codes=codes)
    dx, dw = torch.autograd.grad(loss, (x, weight), gradient)
    sums = torch.zeros_like(weight)
    for begin in range(0, rows, size):
        part = slice(begin, begin + size)
        own = x.detach()[part].requires_grad_()
        of_part = linear_cross_entropy(own, weight, targets[part], codes=codes)
        assert torch.equal(loss[part], of_part)
        expected, more = torch.autograd.grad(of_part, (own, weight), gradient[part])
        assert torch.equal(dx[part], expected)
        sums += more
        keys[0] += 1
    torch.testing.assert_close(dw, sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "size"), [(1024, 256), (900, 384)])
def test_a_mean_in_parts_is_that_of_all_rows(keys, monkeypatch, rows, size):
    """Its gradients are those of each part's losses, times the mean's own gradient."""
    monkeypatch.setattr(sizes, "ROWS_IN_PARTS", 256)
    torch.manual_seed(0)
    x, weight, targets, codes, _ = head(rows, 40, 200)
    loss = mean_linear_cross_entropy(x, weight, targets, 200, None, codes, True)
    dx, dw = torch.autograd.grad(loss, (x, weight), torch.tensor(0.5))
    count = (targets != -100).sum()
    total, sums = torch.zeros(()), torch.zeros_like(weight)
    for begin in range(0, rows, size):
        part = slice(begin, begin + size)
        own = x.detach()[part].requires_grad_()
        of_part = linear_cross_entropy(own, weight, targets[part], 200, codes=codes)
        total += of_part.detach().sum()
        share = count.float().reciprocal().expand(len(of_part)).contiguous()
        expected, more = torch.autograd.grad(of_part, (own, weight), share)
        assert torch.equal(dx[part], expected * 0.5)
        sums += more
        keys[0] += 1
    torch.testing.assert_close(loss, total / count)
    torch.testing.assert_close(dw, sums * 0.5, rtol=1e-5, atol=1e-8)


def test_a_mean_in_parts_keeps_nothing_per_logit(monkeypatch):
    """At the peak a part's logits and their gradient's codes stand, in evaluation logits alone."""
    monkeypatch.setattr(sizes, "ROWS_IN_PARTS", 256)
    torch.manual_seed(0)
    rows, width, vocabulary = 1024, 32, 2048
    x, weight, targets, codes, _ = head(rows, width, vocabulary)
    given = x, weight, targets, vocabulary, None, codes
    gradients = (2 * 2 / vocabulary + 2 * 4 / rows) * width  # as above; dw's sum is made anew
    for wide, training in ((2 + 2, True), (2, False)):
        with Held() as held, torch.set_grad_enabled(training):
            loss = mean_linear_cross_entropy(*given, training)
            peak, kept = held.peak / (rows * vocabulary), held.now / (rows * vocabulary)
        assert wide / 4 <= peak <= wide / 4 + gradients + 0.01
        assert kept <= gradients
        assert loss.requires_grad == training


def test_a_mean_in_parts_makes_no_gradient_that_nobody_asks_for():
    x, weight, targets, codes, _ = head(256, 40, 200)
    tied = TiedGradient()
    given = targets, 200, tied, codes, True
    mean_linear_cross_entropy(x, weight.detach(), *given).backward()
    assert x.grad is not None
    assert tied.take() is None
    mean_linear_cross_entropy(x.detach(), weight, *given).backward()
    assert weight.grad is None
    assert tied.take().shape == weight.shape


def test_the_head_s_peak(short_parts):
    """Beside bf16 logits, in bytes per logit: a part's codes, both ways, and the two gradients."""
    torch.manual_seed(0)
    rows, width, vocabulary = 1024, 32, 2048
    x, weight, targets, codes, gradient = head(rows, width, vocabulary)
    gradients = 2 * 2 / vocabulary + 4 / rows  # dx's parts and whole one in bf16, dw in fp32
    gradients *= width
    with Held() as held:
        loss = linear_cross_entropy(x, weight, targets, codes=codes)
        kept, held.peak = held.now, held.now
        found = torch.autograd.grad(loss, (x, weight), gradient)
    assert found[1].shape == weight.shape
    assert 2 / 4 <= (held.peak - kept) / (rows * vocabulary) <= 2 / 4 + gradients + 0.01
