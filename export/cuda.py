"""CUDA kernels as readable CUDA C++: one file per config, its parameters fixed, with host code.

To add a kernel:

* a `Host` in `HOSTS` of the module ``host`` in its folder (core/host.py): which sources and
  `config.cuh` a config has, what its constants mean, what sizes and addresses must be;
* a template beside it: the C function, of the common subset of C and C++, for `.cu` and
  for the C file of `embedded` alike. It sees `plan`, `variant` (export.host.CompiledVariant),
  `names` of the function's tensors, `codes` (what error codes begin with), `prototype`,
  `check_alignment`, `several`, `takes_workspace`, `language` and what `Host.values` gives; what it
  may call is said in
  kernels_cuda/gemm/wgmma.j2. In a `.cu` the kernel's source has declared its constants and argument
  structs; for C the template does.

A launch of several kernels has a namespace for each, ``<name>_kernel``, in which its constants are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jetfire.core import registry
from jetfire.core.errors import UsageError
from jetfire.core.host import Code, Host, hosts
from jetfire.core.kernel import Kernel
from jetfire.export import compiled, flatten
from jetfire.export.c_text import capital, comment, fields, hang, unless
from jetfire.export.compiled import Compiled
from jetfire.export.foreign import Foreign
from jetfire.export.host import CompiledVariant, aligned, contract, variants
from jetfire.export.library import Library, header, parameters
from jetfire.export.plan import ExportPlan, TunedProblem
from jetfire.export.render import render
from jetfire.kernels_cuda.compile import compile_cubin


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


# --- C declarations ------------------------------------------------------------------------------


def prototype(plan: ExportPlan, symbol: str, workspace: bool, end: str, before: str = "") -> str:
    """Return the exported function's prototype, under any name."""
    items = parameters(plan, workspace=workspace)
    return "\n".join(hang(f"{before}int {symbol}(", items, f"){end}"))


def _call(plan: ExportPlan, function: str, workspace: bool) -> str:
    """The end of one such function that calls another."""
    names = [*(p.name for p in plan.signature.parameters), *plan.signature.dims]
    names += ["workspace"] if workspace else []
    lines = hang(f"return {function}(", [*names, "stream"], ");", 2)
    return "\n".join(f"  {line}" for line in lines)


def _alignment(plan: ExportPlan, host: Host, workspace: bool) -> str:
    """Return an error code unless all addresses are multiples of 16."""
    bits = [f"(uintptr_t){name}" for name in aligned(plan, host, workspace)]
    result = f"{plan.name.upper()}_BAD_ALIGNMENT"
    lines = unless("(", bits, ") % 16 != 0", result, 2, " | ")
    return "\n".join(f"  {line}" for line in lines)


def dims(plan: ExportPlan) -> str:
    """The sizes as parameters."""
    return ", ".join(f"int {dim}" for dim in plan.signature.dims)


# --- one config ----------------------------------------------------------------------------------


def _where_from(plan: ExportPlan, tuned: TunedProblem) -> str:
    """Say how a config was found, in a sentence."""
    entry, asked, found = tuned.entry, plan.sizes(tuned.problem), plan.sizes_tuned(tuned)
    nearest = "" if found == asked else f" (nearest tuned: {fields(found)})"
    return (
        f"{fields(asked)}{nearest}: {entry.ms:.4g} ms, found by {entry.trials:d} trials of "
        f"{Foreign(entry.strategy).comment()} {tuned.where.comment()}."
    )


def _head(plan: ExportPlan, variant: CompiledVariant, build: str, what: str) -> str:
    """Say what a file is, where its constants come from and how it is built."""
    paragraphs = [
        f"{capital(plan.op.summary)}; {fields(plan.fixed)}.",
        "",
        f"This is kernel {plan.kernel.name} of Jetfire with the constants that were tuned for",
        *(_where_from(plan, tuned) for tuned in variant.tuned),
        "",
        f"Build: {build}",
        "",
        what,
    ]
    lines = [line for text in paragraphs for line in comment(text) or ["//"]]
    return "\n".join(lines)


def _shown(variant: CompiledVariant, code: Code) -> dict[str, object]:
    """Return what the template shows of one kernel."""
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


def host_values(
    plan: ExportPlan, variant: CompiledVariant, *, several: bool, workspace: bool
) -> dict[str, object]:
    """Return what the template of a launch sees of a config, but for `language`."""
    return {
        **variant.values,
        "plan": plan,
        "variant": variant,
        "names": [p.name for p in plan.signature.parameters],
        "aligned": aligned(plan, variant.host),
        "codes": plan.name.upper(),
        "prototype": prototype(plan, variant.symbol, workspace, " {"),
        "check_alignment": _alignment(plan, variant.host, workspace),
        "several": several,
        "takes_workspace": workspace,
    }


def _include(plan: ExportPlan, several: bool) -> str:
    return f"{plan.name}_configs.h" if several else f"{plan.name}.h"


def _source(plan: ExportPlan, variant: CompiledVariant, *, several: bool, workspace: bool) -> bytes:
    """A config's `.cu`."""
    architecture = variant.host.architecture(plan.capability)
    build = (
        f"nvcc -std=c++17 -O3 -gencode arch=compute_{architecture},code=sm_{architecture} "
        f"-c {variant.symbol}.cu"
    )
    what = "In order: the constants, what the kernel is made of, the kernel, its launch."
    return render(
        "cuda/kernel.cu.j2",
        head=_head(plan, variant, build, what),
        kernels=[_shown(variant, code) for code in variant.codes],
        include=_include(plan, several),
        language="cuda",
        **host_values(plan, variant, several=several, workspace=workspace),
    )


def _compiled(plan: ExportPlan, variant: CompiledVariant, several: bool) -> list[Compiled]:
    """A config's kernels, in the order of `Host.codes`."""
    end = variant.symbol.removeprefix(plan.name) if several else ""
    architecture = f"sm_{variant.host.architecture(plan.capability)}"
    return [
        Compiled(
            name=f"{code.name}{end}",
            function=code.name,
            code=compile_cubin(code.source, code.header, architecture),
            threads=code.threads,
            shared_bytes=code.shared_bytes,
            about=f"Tuned for {fields(plan.sizes(variant.problem))}.",
        )
        for code in variant.codes
    ]


def _launcher(
    plan: ExportPlan,
    variant: CompiledVariant,
    kernels: list[Compiled],
    *,
    several: bool,
    workspace: bool,
) -> bytes:
    """A config's `.c`."""
    build = f"cc -std=c11 -O2 -I $CUDA_HOME/include -c {variant.symbol}.c"
    what = (
        f"The machine code is in {plan.name}_code.c. It is launched by CUDA's driver, which the "
        "first call opens: nothing of CUDA is linked."
    )
    return render(
        "cuda/kernel.c.j2",
        head=_head(plan, variant, build, what),
        name=plan.name,
        capability=plan.capability,
        kernels=kernels,
        tensor_maps=variant.host.tensor_maps,
        launched=list(zip(variant.codes, kernels, strict=True)),
        include=_include(plan, several),
        language="c",
        **host_values(plan, variant, several=several, workspace=workspace),
    )


# --- all -----------------------------------------------------------------------------------------


def _dispatch(
    plan: ExportPlan, found: tuple[CompiledVariant, ...], ending: str, *, workspace: bool
) -> dict[str, bytes]:
    """Return several configs' prototypes in a header, and the function that chooses."""
    values: dict[str, object] = {
        "plan": plan,
        "variants": found,
        "codes": plan.name.upper(),
        "dims": dims(plan),
        "prototype": prototype(plan, plan.name, workspace, " {"),
        "prototypes": {v.symbol: prototype(plan, v.symbol, workspace, ";") for v in found},
        "call": _call(plan, f"nearest({', '.join(plan.signature.dims)})->launch", workspace),
        "launch_type": prototype(plan, "Launch", workspace, ";", "typedef "),
        "takes_workspace": workspace,
    }
    return {
        f"{plan.name}_configs.h": render("host/configs.h.j2", **values),
        f"{plan.name}.{ending}": render("host/dispatch.j2", **values),
    }


def library(plan: ExportPlan) -> Library:
    """Return a plan's function as CUDA C++.

    Raises:
        UsageError: there is no host code for the kernel, or not for such sizes.
    """
    return _library(plan, "cu", lambda variant, **shared: _source(plan, variant, **shared))


def compiled_library(plan: ExportPlan) -> Library:
    """Return the same host code in C, around machine code: the workbench's own.

    Raises:
        UsageError: there is no host code for the kernel, not for such sizes, or no compiler.
    """
    found = variants(plan, host_of(plan.kernel))
    kernels = {variant.symbol: _compiled(plan, variant, len(found) > 1) for variant in found}
    made = _library(
        plan,
        "c",
        lambda variant, **shared: _launcher(plan, variant, kernels[variant.symbol], **shared),
    )
    code = compiled.files(
        plan.name, plan.capability, [each for some in kernels.values() for each in some]
    )
    return replace(
        made, files={**made.files, **code}, c_sources=(*made.c_sources, f"{plan.name}_code.c")
    )


def _library(plan: ExportPlan, ending: str, file: Callable[..., bytes]) -> Library:
    host = host_of(plan.kernel)
    found = variants(plan, host)
    workspace = any(variant.workspace for variant in found)
    said = contract(plan, found)
    shared = {"several": len(found) > 1, "workspace": workspace}
    files = {
        f"{plan.name}.h": header(
            plan,
            workspace=workspace,
            any_size=True,
            contract=said,
            zeros=host.zeros,
            runtime=ending == "cu",
        )
    }
    if len(found) > 1:
        files |= _dispatch(plan, found, ending, workspace=workspace)
    for variant in found:
        files[f"{variant.symbol}.{ending}"] = file(variant, **shared)
    sources = tuple(name for name in files if name.endswith(f".{ending}"))
    return Library(
        files=files,
        cuda_sources=sources if ending == "cu" else (),
        c_sources=sources if ending == "c" else (),
        architecture=host.architecture(plan.capability),
        workspace=workspace,
        any_size=True,
        contract=said,
        zeros=host.zeros,
    )
