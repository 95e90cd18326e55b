"""The op of softmax.py's kernel, which is called as it is."""

from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from jetfire.core.kernel import PythonKernel
from jetfire.core.problem import Problem
from jetfire.core.tensors import Spec
from jetfire.measure import bounds
from jetfire.measure.op import StandardOp

spec = spec_from_file_location("softmax", Path(__file__).with_name("softmax.py"))
author = module_from_spec(spec)
spec.loader.exec_module(author)


@dataclass(frozen=True)
class ForeignProblem(Problem):
    """x to y, m×n fp32."""


class ForeignSoftmax(StandardOp):
    name = "foreign_softmax"
    summary = "softmax of rows"
    Problem = ForeignProblem

    def reads(self, problem):
        return {"x": Spec("fp32", (problem.m, problem.n))}

    def writes(self, problem):
        return {"y": Spec("fp32", (problem.m, problem.n))}

    def reference(self, problem, inputs):
        y = torch.softmax(inputs["x"].double(), dim=1)
        return bounds.of_float("y", y, "fp32", 2e-5 * y)


class Author(PythonKernel):
    op, name = "foreign_softmax", "author"

    def results(self, problem, config, inputs):
        raise NotImplementedError("it writes its output itself")

    def launch(self, problem, config, inputs, outputs):
        author.softmax(inputs["x"], outputs["y"])


OP, KERNELS = ForeignSoftmax(), (Author(),)
