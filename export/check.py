"""Whether an export can run here."""

from __future__ import annotations

from jetfire.export.plan import ExportPlan


def runs_here(plan: ExportPlan) -> bool:
    """Return whether the current GPU, on which exports are run, is of the plan's architecture."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == plan.capability
