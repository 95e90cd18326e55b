"""The op of matmul.py's kernel, which is called as it is."""

from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from jetfire.core.kernel import PythonKernel
from jetfire.core.problem import Problem
from jetfire.core.tensors import Spec
from jetfire.measure import bounds
from jetfire.measure.op import StandardOp

spec = spec_from_file_location("matmul", Path(__file__).with_name("matmul.py"))
author = module_from_spec(spec)
spec.loader.exec_module(author)


@dataclass(frozen=True)
class ForeignProblem(Problem):
    """a (m×m bf16) and b (m×n bf16) to c (m×n bf16)."""


class ForeignMatmul(StandardOp):
    name = "foreign_matmul"
    summary = "product of BF16 matrices"
    Problem = ForeignProblem

    def reads(self, problem):
        return {
            name: Spec("bf16", (problem.m, k)) for name, k in (("a", problem.m), ("b", problem.n))
        }

    def writes(self, problem):
        return {"c": Spec("bf16", (problem.m, problem.n))}

    def reference(self, problem, inputs):
        a, b = inputs["a"].double(), inputs["b"].double()
        noise = bounds.higham(problem.m) * (a.abs() @ b.abs())
        return bounds.of_float("c", a @ b, "bf16", noise)


class Author(PythonKernel):
    op, name = "foreign_matmul", "author"

    def results(self, problem, config, inputs):
        raise NotImplementedError("it writes its output itself")

    def launch(self, problem, config, inputs, outputs):
        author.matmul(inputs["a"], inputs["b"], outputs["c"])


OP, KERNELS = ForeignMatmul(), (Author(),)
