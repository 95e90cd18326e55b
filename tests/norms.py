"""What tests of the residual stream's kernels share: LayerNorm's, RMSNorm's, and in part add's."""

import dataclasses

import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import launch, verify


def choices(op, problem, device, every=False):
    """The kernels that run here, each with its default config, or wider and smaller ones too."""
    where = Device.of(torch.empty(0, device=device))
    found = []
    for kernel in registry.kernels(op.name).values():
        default = kernel.default(problem, where)
        configs = [default]
        if kernel.name == "tiles":
            other = {"stages": 3, "resident": 1}
        elif kernel.space(problem, where):
            other = {"tile_n": 2 * default.tile_n, "warps": 2 * default.warps}
        else:
            other = {}
        if every and other:
            configs.append(dataclasses.replace(default, **other))
        found += [(kernel, c) for c in configs if kernel.legal(problem, c, where) is None]
    assert found
    return found


def verified(op, problem, device, every=False, inputs=None, **kwargs):
    inputs = inputs or op.inputs(problem, device, **kwargs)
    expected = op.reference(problem, inputs)
    for kernel, config in choices(op, problem, device, every):
        result = verify(op, kernel, problem, config, inputs, expected)
        assert result.ok, f"{kernel.name} {config} {problem}: {result.message}"


def replay(op, problem, kernel, config, inputs):
    """Replays of a graph and launches on other streams at once give the bits of one launch."""
    expected = op.outputs(problem, inputs)
    launch(kernel, problem, config, inputs, expected)
    outputs = [op.poison(problem, op.outputs(problem, inputs)) for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outputs[:2]:
            launch(kernel, problem, config, inputs, out)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        for stream, out in zip(streams[1:], outputs[2:], strict=True):
            with torch.cuda.stream(stream):
                launch(kernel, problem, config, inputs, out)
    torch.cuda.synchronize()
    for out in outputs:
        for name, tensor in out.items():
            assert torch.equal(tensor, expected[name]), name
