"""Save a profile for an H200, as tuning there would: of the default config, with made-up times."""

from jetfire.core import profiles, registry
from jetfire.core.device import target_device
from jetfire.measure import provenance

SIZES = {"m": 256, "n": 256}

op, device = registry.get("softsign"), target_device((9, 0))
kernel = registry.get_kernel("softsign", "triton")
for mode in op.modes:
    (problem,) = op.problems(mode, SIZES)
    entry = profiles.Entry(
        kernel=kernel.name,
        problem=problem.as_dict(),
        config=kernel.default(problem, device).as_dict(),
        ms=1.0,
        ms_p20=1.0,
        ms_p80=1.0,
        samples=9,
        default_ms=1.0,
        joules=None,
        objective="time",
        vs_peer={},
        trials=1,
        strategy="tpe",
        provenance=provenance.of(kernel, device),
    )
    profiles.save(profiles.user_folder(), device, op, [entry])
