"""What tests of fused blocks do with a small language model of `transformers`, on the CPU."""

import torch

TOKENS = 96


class Doubled(torch.nn.Module):
    """A layer in place of another, with twice its output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def batch():
    torch.manual_seed(1)
    return torch.randint(TOKENS, (2, 32))


def step(model, seed=3, **options):
    """The loss, and the gradients by name."""
    model.zero_grad()
    torch.manual_seed(seed)
    ids = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, **options).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def logits(model, ids=None, **options):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model.eval()(batch() if ids is None else ids, **options).logits.float()


def error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def near(ours, theirs, most):
    for name, gradient in ours.items():
        assert error(gradient, theirs[name]) < most, name
