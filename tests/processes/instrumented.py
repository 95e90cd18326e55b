"""What tests/test_sanitizers.py starts: Gluon kernels are compiled with consan, for sm_90.

Arguments: OP/KERNEL of each, for a problem that it takes. Prints a JSON line per launch.
"""

import json
import re
import sys

from triton.backends.nvidia.compiler import CUDABackend

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.fuzz.sanitize import serve_instrumented
from jetfire.kernels_triton.crosscompile import record_launches

serve_instrumented()
CUDABackend.make_cubin = lambda *args: b""  # ptxas takes four times as long as all before it
DEVICE = target_device((9, 0))


def problems(op, kernel):
    """One problem of each mode that a kernel takes."""
    for mode in op.modes:
        fields = ({"block": block, "out": out} for block in (32, 128) for out in ("bf16", "fp32"))
        fields = ({k: v for k, v in f.items() if hasattr(op.Problem, k)} for f in fields)
        found = (p for f in fields for p in op.problems(mode, {**dict.fromkeys(op.dims, 512), **f}))
        yield next(p for p in found if not kernel.legal(p, kernel.default(p, DEVICE), DEVICE))


for name in sys.argv[1:]:
    op, kernel = registry.get(name.partition("/")[0]), registry.get_kernel(*name.split("/"))
    for problem in dict.fromkeys(problems(op, kernel)):
        config = kernel.default(problem, DEVICE)
        for launch in record_launches(op.name, kernel.name, problem, config, (9, 0))[0]:
            code = launch.compiled.asm
            found = {
                "kernel": name,
                "function": launch.compiled.metadata.name,
                "buffers": "ttg.local_alloc" in code["ttgir"],
                "calls": len(re.findall("call.*__triton_consan_", code["llir"])),
                "asserts": code["ptx"].count("__assertfail"),
                "says": re.findall(r'c"([ -~]*?)\\00', code["llir"]),
            }
            print(json.dumps(found), flush=True)
