"""`jetfire tune show`."""

from __future__ import annotations

from jetfire.commands import options as o

EPILOG = "Example: jetfire tune show gemm --m 8192 --block 32"


def run(
    ops: o.Ops = None,
    m: o.M = None,
    n: o.N = None,
    k: o.K = None,
    workload: o.Workload = None,
    block: o.Blocks = None,
    settings: o.Setting = None,
    kernels: o.Kernels = None,
    device: o.Device = "auto",
    format: o.Format = None,
    load: o.Load = None,
    debug: o.Debug = False,
) -> None:
    """List the profiles: of all ops and devices, or of what the options leave."""
    from jetfire.core.device import Device
    from jetfire.core.errors import UsageError
    from jetfire.measure import plan
    from jetfire.tuner import show as profiles

    if "mode" in plan.parse_settings("--set", settings or []):
        raise UsageError(
            "--set mode=…: tune show lists the profiles of all modes: expected --m, --n, --k, "
            "--workload, --block, --kernel, or --set with another field"
        )
    request = o.request(locals(), ops=ops or ["all"])
    where = None if device == "auto" else Device.parse(device)
    wanted = profiles.Wanted.of(request, kernels or [])
    profiles.show(plan.parse_list(ops or []), where, wanted, format or "table")
