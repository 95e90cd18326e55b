"""What tests/test_agreement.py starts twice: tuned calls of own ops, and the check after each.

Arguments: the rank; a folder with cases.json. Each case is a fork's, which knows no other's op,
profiles or process group: torch is imported once for all of them.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jetfire.core import profiles, registry
from jetfire.core.device import Device
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.measure import provenance
from jetfire.nn import check_agreement
from jetfire.tests.processes.leaving import leave

RANK, HOME = int(sys.argv[1]), Path(sys.argv[2])
CPU = Device.parse("cpu")
TIMES = (1.0, 1.0, 1.0, 9, 1.0, None, "time", {}, 3, "tpe")


def tune(rows: int, digest: str) -> None:
    """Give this process a profile of so many rows per call and such a digest."""
    op = registry.get("row_logsumexp")
    origin = provenance.of(registry.get_kernel(op.name, "torch"), CPU)
    problem = op.Problem(64, 8).as_dict()
    entry = profiles.Entry("torch", problem, {"rows": rows}, *TIMES, origin, digest or None)
    profiles.save(profiles.user_folder(), CPU, op, [entry])


def told(folder: Path, rows: int, digest: str) -> dict[str, Any]:
    """Return what the check says after a call of the op in own.py."""
    os.environ["JETFIRE_LOAD"] = str(folder / "own.py")
    os.environ["JETFIRE_PROFILES"] = str(folder / f"profiles-{RANK}")
    from jetfire.ops import row_logsumexp

    tune(rows, digest)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=RANK, world_size=2)
    row_logsumexp(torch.ones((64, 8), dtype=torch.float32, device="cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_agreement()
    warned = [str(one.message) for one in caught if issubclass(one.category, JetfireWarning)]
    refused = ""
    try:
        check_agreement(strict=True)
    except UsageError as error:
        refused = str(error)
    return {"warned": warned, "refused": refused}


def forked(folder: Path, rows: int, digest: str) -> None:
    """Keep what a fork is told; raise if it fails."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, folder.name
        return
    try:
        (folder / f"{RANK}.json").write_text(json.dumps(told(folder, rows, digest)))
        leave()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


for name, of_ranks in json.loads((HOME / "cases.json").read_text()).items():
    forked(HOME / name, *of_ranks[RANK])
