"""CUDA kernels as readable CUDA C++: one file per config, its parameters fixed, with host code.

To add a kernel:

* a `Host` in `HOSTS` of the module ``host`` in its folder (core/host.py): which sources and
  `config.cuh` a config has, what its constants mean, what sizes and addresses must be;
* a template beside it: the C function, of the common subset of C and C++, for `.cu` and
  for the C file of compiled code alike. It sees `plan`, `variant` (`CompiledVariant`),
  `names` of the function's tensors, `codes` (what error codes begin with), `prototype`, `aligned`,
  `several`, `takes_workspace`, `language` and what `Host.values` gives; what it may call is said in
  kernels_cuda/gemm/wgmma.j2. In a `.cu` the kernel's source has declared its constants and argument
  structs; for C the template does.

A launch of several kernels has a namespace for each, ``<name>_kernel``, in which its constants are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jetfire.core import registry
from jetfire.core.errors import UsageError
from jetfire.core.host import Code, Host, hosts
from jetfire.core.kernel import Kernel
from jetfire.core.machine_code import Cubin
from jetfire.export import flatten
from jetfire.export.c_text import capital, comment, fields, hang
from jetfire.export.foreign import Foreign
from jetfire.export.library import Compiled, Library, code_files, dims, prototype, with_header
from jetfire.export.plan import ExportPlan, TunedProblem
from jetfire.export.render import render
from jetfire.kernels_cuda.compile import compile_cubin
from jetfire.report.text import time_text


def takes(kernel: Kernel) -> bool:
    """Return whether there is host code for a kernel."""
    return kernel.name in hosts(kernel.op)


def host_of(kernel: Kernel) -> Host:
    """Return a kernel's host code; raise UsageError where there is none."""
    if not takes(kernel):
        known = ", ".join(f"{op}/{name}" for op in registry.names() for name in hosts(op))
        raise UsageError(
            f"{kernel.op}/{kernel.name} has no form as CUDA C++: expected one of {known}"
        )
    return hosts(kernel.op)[kernel.name]


@dataclass(frozen=True)
class CompiledVariant:
    """One config as it is compiled, for all problems of a plan that have the same code.

    Attributes:
        symbol: the C function that launches it.
        tuned: those problems; at least one.
    """

    symbol: str
    host: Host
    tuned: tuple[TunedProblem, ...]
    codes: tuple[Code, ...]

    @property
    def problem(self) -> Any:
        return self.tuned[0].problem

    @property
    def config(self) -> Any:
        return self.tuned[0].config

    @property
    def multiples(self) -> dict[str, int]:
        return self.host.multiples(self.problem, self.config)

    def reason(self, dim: str) -> str:
        return self.host.reason(self.problem, self.config, dim)


def _variants(plan: ExportPlan, host: Host) -> tuple[CompiledVariant, ...]:
    """Return a variant for each different code, in the order of the plan's problems.

    Raises:
        UsageError: a problem of the plan does not keep to what its own code asks of sizes.
    """
    alike: dict[tuple[Code, ...], list[TunedProblem]] = {}
    for tuned in plan.tuned:
        for dim, multiple in host.multiples(tuned.problem, tuned.config).items():
            if (size := getattr(tuned.problem, dim)) % multiple:
                raise UsageError(
                    f"{plan.op.name}/{plan.kernel.name}: {dim}={size}: an exported one takes "
                    f"multiples of {multiple}"
                )
        alike.setdefault(host.codes(tuned.problem, tuned.config), []).append(tuned)

    def symbol(first: TunedProblem) -> str:
        sizes = "x".join(map(str, plan.sizes(first.problem).values()))
        return plan.name if len(alike) == 1 else f"{plan.name}_{sizes}"

    return tuple(
        CompiledVariant(symbol(group[0]), host, tuple(group), codes)
        for codes, group in alike.items()
    )


def _where_from(plan: ExportPlan, tuned: TunedProblem) -> str:
    """Say how a config was found, in a sentence."""
    entry, asked, found = tuned.entry, plan.sizes(tuned.problem), plan.sizes_tuned(tuned)
    nearest = "" if found == asked else f" (nearest tuned: {fields(found)})"
    other = "" if tuned.own else " That time is of two launches at once; this is one."
    return (
        f"{fields(asked)}{nearest}: {time_text(entry.ms)}, found by {entry.trials:d} trials of "
        f"{Foreign(entry.strategy).comment()} {tuned.where.comment()}.{other}"
    )


def _shown(variant: CompiledVariant, code: Code) -> dict[str, object]:
    """Return what the template of a `.cu` shows of one kernel."""
    source = flatten.read(code.source)
    defined = (f"constexpr int {name} = {value};" for name, value in source.defined.items())
    namespace = f"{code.name}_kernel" if len(variant.codes) > 1 else ""
    return {
        "name": code.name,
        "comment": source.comment,
        "constants": flatten.constants("\n".join([code.header, *defined]), variant.host.notes),
        "headers": flatten.used(source.headers, source.body),
        "functions": flatten.functions(code.header),
        "body": source.body,
        "namespace": namespace,
        "scope": f"{namespace}::" if namespace else "",
        "shared": code.shared_bytes > 0,
        "threads": code.threads_named,
    }


@dataclass(frozen=True)
class _Export:
    """A plan's function in one language, ``cuda`` or ``c``."""

    plan: ExportPlan
    language: str

    @cached_property
    def host(self) -> Host:
        return host_of(self.plan.kernel)

    @cached_property
    def variants(self) -> tuple[CompiledVariant, ...]:
        return _variants(self.plan, self.host)

    @property
    def ending(self) -> str:
        return "cu" if self.language == "cuda" else "c"

    @property
    def architecture(self) -> str:
        return self.host.architecture(self.plan.capability)

    @cached_property
    def workspace(self) -> bool:
        return any(self.host.workspace(v.problem, v.config) for v in self.variants)

    @property
    def aligned(self) -> tuple[str, ...]:
        """Return which of the function's pointers must lie at multiples of 16."""
        names = [p.name for p in self.plan.signature.parameters] + ["workspace"] * self.workspace
        return tuple(name for name in names if name in self.host.aligned)

    @cached_property
    def contract(self) -> tuple[str, ...]:
        """What callers must keep to, in sentences."""
        multiples: dict[str, int] = {}
        for variant in self.variants:
            for dim, multiple in variant.multiples.items():
                multiples[dim] = max(multiple, multiples.get(dim, 1))
        most = self.host.most(self.plan.problem)
        asked = []
        for dim in dict.fromkeys([*multiples, *most]):
            bounds = [f"a multiple of {multiples[dim]}"] if dim in multiples else []
            bounds += [f"at most {most[dim]}"] if dim in most else []
            asked.append(f"{dim} {' and '.join(bounds)}")
        loose = any(variant.multiples != multiples for variant in self.variants)
        beside = " (but for the sizes that were tuned)" if loose else ""
        *first, last = self.aligned
        return (
            f"The addresses of {', '.join(first)} and {last} are multiples of 16.",
            f"Sizes: up to 2^30, {', '.join(asked)}{beside}; any that keep to this will do."
            if asked
            else "Sizes: any up to 2^30.",
            *self.host.sentences(self.plan.problem),
        )

    def compiled(self, variant: CompiledVariant) -> list[Compiled]:
        """A config's kernels, in the order of `Host.codes`."""
        end = variant.symbol.removeprefix(self.plan.name)
        about = f"Tuned for {fields(self.plan.sizes(variant.problem))}."
        found = []
        for code in variant.codes:
            content = compile_cubin(code.source, code.header, f"sm_{self.architecture}")
            cubin = Cubin(code.name, content, code.shared_bytes, code.threads // 32)
            found.append(Compiled(f"{code.name}{end}", cubin, about))
        return found

    def head(self, variant: CompiledVariant) -> str:
        """Say what a file is, where its constants come from and how it is built."""
        plan = self.plan
        if self.language == "cuda":
            target = f"arch=compute_{self.architecture},code=sm_{self.architecture}"
            build = f"nvcc -std=c++17 -O3 -gencode {target}"
            what = "In order: the constants, what the kernel is made of, the kernel, its launch."
        else:
            build = "cc -std=c11 -O2 -I $CUDA_HOME/include"
            what = (
                f"The machine code is in {plan.name}_code.c. It is launched by CUDA's driver, "
                "which the first call opens: nothing of CUDA is linked."
            )
        paragraphs = [
            f"{capital(plan.op.summary)}; {fields(plan.fixed)}.",
            "",
            f"This is kernel {plan.kernel.name} of Jetfire with the constants that were tuned for",
            *(_where_from(plan, tuned) for tuned in variant.tuned),
            "",
            f"Build: {build} -c {variant.symbol}.{self.ending}",
            "",
            what,
        ]
        return "\n".join(comment(text) or "//" for text in paragraphs)

    def source(self, variant: CompiledVariant, kernels: list[Any]) -> bytes:
        """A config's `.cu` or `.c`; `kernels` as their template shows them."""
        plan, several = self.plan, len(self.variants) > 1
        return render(
            f"cuda/kernel.{self.ending}.j2",
            **self.host.values(variant.problem, variant.config),
            plan=plan,
            variant=variant,
            head=self.head(variant),
            kernels=kernels,
            launched=list(zip(variant.codes, kernels, strict=True)),
            language=self.language,
            include=f"{plan.name}_configs.h" if several else f"{plan.name}.h",
            names=[p.name for p in plan.signature.parameters],
            aligned=self.aligned,
            codes=plan.name.upper(),
            prototype=prototype(plan, variant.symbol, self.workspace, " {"),
            several=several,
            takes_workspace=self.workspace,
        )

    def dispatch(self) -> dict[str, bytes]:
        """Return several configs' prototypes in a header, and the function that chooses."""
        plan, workspace = self.plan, self.workspace
        passed = [*(p.name for p in plan.signature.parameters), *plan.signature.dims]
        passed += [*(["workspace"] if workspace else []), "stream"]
        nearest = f"  return nearest({', '.join(plan.signature.dims)})->launch("
        values: dict[str, object] = {
            "plan": plan,
            "variants": self.variants,
            "codes": plan.name.upper(),
            "language": self.language,
            "dims": dims(plan),
            "prototype": prototype(plan, plan.name, workspace, " {"),
            "prototypes": {
                v.symbol: prototype(plan, v.symbol, workspace, ";") for v in self.variants
            },
            "call": hang(nearest, passed, ");"),
            "launch_type": prototype(plan, "Launch", workspace, ";", "typedef "),
            "takes_workspace": workspace,
        }
        return {
            f"{plan.name}_configs.h": render("host/configs.h.j2", **values),
            f"{plan.name}.{self.ending}": render("host/dispatch.j2", **values),
        }

    def library(self) -> Library:
        plan, runtime = self.plan, self.language == "cuda"
        files = self.dispatch() if len(self.variants) > 1 else {}
        code: list[Compiled] = []
        for variant in self.variants:
            kernels: list[Any] = (
                [_shown(variant, each) for each in variant.codes]
                if runtime
                else self.compiled(variant)
            )
            files[f"{variant.symbol}.{self.ending}"] = self.source(variant, kernels)
            code += [] if runtime else kernels
        files |= {} if runtime else code_files(plan, code)
        sources = tuple(name for name in files if name.endswith(f".{self.ending}"))
        found = Library(
            files=files,
            cuda_sources=sources if runtime else (),
            c_sources=() if runtime else sources,
            architecture=self.architecture,
            workspace=self.workspace,
            any_size=True,
            contract=self.contract,
            zeros=self.host.zeros,
        )
        return with_header(plan, found)


def library(plan: ExportPlan) -> Library:
    """Return a plan's function as CUDA C++.

    Raises:
        UsageError: there is no host code for the kernel, or not for such sizes.
    """
    return _Export(plan, "cuda").library()


def compiled_library(plan: ExportPlan) -> Library:
    """Return the same host code in C, around machine code: the workbench's own.

    Raises:
        UsageError: there is no host code for the kernel, not for such sizes, or no compiler.
    """
    return _Export(plan, "c").library()
