"""A log's first line: what a process says of itself before its first step."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from jetfire.core.checkout import commit
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.training.log import RUNS_AT_ONCE, Record
from jetfire.gpt2.training.state import Trained


def header(kind: str, training: Trained, device: Device) -> Record:
    """Return the header of a run that begins or goes on, `kind` "run" or "resume"."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "jetfire"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    peak, processes = training.peak, training.group.world
    return {
        "kind": kind,
        "settings": training.settings.as_dict(),
        "versions": versions,
        "device": {"name": device.label, "kind": device.kind, "processes": processes},
        "runs_at_once": _runs_at_once(),
        "peak": None if peak is None else {"bf16_tflops": peak.tflops, "from": peak.source},
        "commit": commit(),
        "command": [os.path.basename(sys.argv[0]), *map(_text, sys.argv[1:])],
        "step": training.done,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "vocabulary": training.vocabulary,
        "tokens": training.tokens_seen,
        "sources": training.tokens.meta.get("sources", []),
        "flops_per_token": training.flops,
        "graphed": training.graphed,
    }


def _runs_at_once() -> int:
    given = os.environ.get(RUNS_AT_ONCE, "1")
    if not re.fullmatch("[1-9][0-9]{0,8}", given):
        raise UsageError(f"{RUNS_AT_ONCE}={given[:50]!r}: expected how many runs share the device")
    return int(given)


def _text(argument: str) -> str:
    """An argument that JSON can hold: a path's bytes need be no text."""
    return os.fsencode(argument).decode(errors="replace")
