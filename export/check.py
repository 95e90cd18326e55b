"""Whether an export can run here, and how fast it is beside the workbench's own launch."""

from __future__ import annotations

from jetfire.export.plan import Plan


def runs_here(plan: Plan) -> bool:
    """There is a GPU of the plan's architecture."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == plan.capability
