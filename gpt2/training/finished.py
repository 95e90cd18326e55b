"""The finished runs and studies beside a results file, of which its documents tell."""

from __future__ import annotations

from pathlib import Path

from jetfire.core.errors import UsageError
from jetfire.gpt2.training import log, study_record
from jetfire.measure.results import Results
from jetfire.report import runs
from jetfire.report.documents import Addition
from jetfire.report.runs import FOLDER, FinishedRun


def read(file: Path) -> FinishedRun:
    """Return the run of a log."""
    run = FinishedRun(file, log.read(file))
    if not run.ended:
        raise UsageError(f"{file}: expected a finished run's log, with an evaluation")
    return run


def addition(results: Results, file: Path) -> Addition:
    """Return what the runs and studies beside a results file add to its documents.

    The runs are the logs in training/*.jsonl.gz (`jetfire.gpt2.training.keep`), the studies
    study-*.json (`jetfire train study --record`); those of other devices add nothing. A study of
    several devices is beside the results of the one that began it.
    """
    device = results.device.get("name")
    kept = map(read, sorted((file.parent / FOLDER).glob("*.jsonl.gz")))
    studies = map(study_record.read, sorted(file.parent.glob("study-*.json")))
    return runs.addition(
        [run for run in kept if run.head["device"]["name"] == device],
        [record for record in studies if record["device"].split(", ")[0] == device],
        file,
    )
