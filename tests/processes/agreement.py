"""What tests/test_agreement.py starts twice: a tuned call of an own op, and the check after it.

Arguments: the rank; a folder for the store and outcomes; the profile's rows per call and digest.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from jetfire.core import profiles, registry
from jetfire.core.device import Device
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.measure import provenance
from jetfire.nn import check_agreement
from jetfire.ops import row_logsumexp
from jetfire.tests.processes.leaving import leave

RANK, HOME, ROWS, DIGEST = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
OP, CPU = registry.get("row_logsumexp"), Device.parse("cpu")
ORIGIN = provenance.of(registry.get_kernel(OP.name, "torch"), CPU, None)
PROBLEM, TIMES = OP.Problem(64, 8).as_dict(), (1.0, 1.0, 1.0, 9, 1.0, None, "time", {}, 3, "tpe")
ENTRY = profiles.Entry("torch", PROBLEM, {"rows": ROWS}, *TIMES, ORIGIN, DIGEST or None)
profiles.save(profiles.user_folder(), CPU, OP.name, [ENTRY])

dist.init_process_group("gloo", init_method=f"file://{HOME}/store", rank=RANK, world_size=2)
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
(HOME / f"{RANK}.json").write_text(json.dumps({"warned": warned, "refused": refused}))
leave()
