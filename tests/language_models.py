"""What tests of fused blocks do with a small language model of `transformers`, on the CPU."""

import torch
from functorch.compile import default_partition, make_boxed_func
from torch._dynamo.backends.common import aot_autograd

TOKENS = 96


class Doubled(torch.nn.Module):
    """A layer in place of another, with twice its output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def doubling(layer, own=True):
    """Make a layer one of a subclass, in place, whose forward gives twice the output if `own`."""
    kind = type(layer)

    class Sub(kind):
        if own:

            def forward(self, *args, **kwargs):
                made = kind.forward(self, *args, **kwargs)
                return (2 * made[0], *made[1:]) if isinstance(made, tuple) else 2 * made

    layer.__class__ = Sub


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


def compiled(model, partition=default_partition, **options):
    """Compile a model for a backend that keeps its graphs, forward and backward; return those.

    A function parts the two from what was traced of both.
    """
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model.compile(backend=aot_autograd(fw_compiler=compiler, partition_fn=partition), **options)
    return graphs


def calls(graphs, name):
    """Return the calls of operators whose names hold some text."""
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    return [node for node in nodes if node.op == "call_function" and name in str(node.target)]


def attends_causally(graphs):
    """Return whether attention in some graphs is causal and has no mask."""
    found = calls(graphs, "scaled_dot_product")
    kinds = {(True in n.args, n.kwargs.get("attn_mask") is None) for n in found}
    assert kinds in ({(True, True)}, {(False, False)})
    return kinds == {(True, True)}
