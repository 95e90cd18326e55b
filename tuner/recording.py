"""A space with what became of each of its configs, in a small file: for tests and `--replay`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetfire import ops
from jetfire.core.files import write
from jetfire.ops.errors import UsageError
from jetfire.ops.op import Config, Kernel
from jetfire.tuner.space import Space
from jetfire.tuner.trial import OUTCOMES, Measurement

SCHEMA = 1
# What a file that is cut, damaged or of another kind raises; EOFError, zlib.error and gzip's
# OSError come from unpacking it.
_BROKEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError, EOFError, zlib.error,
           OSError)  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """Measurements of one kernel's configs for one problem.

    Attributes:
        device: as `jetfire.bench.command.device_record` has it.
        fields: those searched, with their values.
        base: all the fields of the default config.
        trials: config → what became of it.
    """

    kernel: Kernel
    problem: Any
    device: Mapping[str, Any]
    fields: Mapping[str, Sequence[Any]]
    base: Config
    trials: Mapping[Config, Measurement]

    def space(self) -> Space:
        """The recorded configs, and no others."""
        return Space(self.fields, self.base, lambda c: None if c in self.trials else "not recorded")

    @property
    def optimum_ms(self) -> float:
        """The least time of all."""
        return min(m.ms for m in self.trials.values() if m.outcome == "ok" and m.ms is not None)

    def save(self, file: Path) -> None:
        """Write it, gzipped where the name ends in .gz.

        Raises:
            UsageError: it cannot be written.
        """
        space = self.space()
        trials = []
        for config, m in self.trials.items():
            point = space.point(config.as_dict())
            assert point is not None
            ms = [None if v is None else float(f"{v:.5g}") for v in (m.ms, m.ms_p20, m.ms_p80)]
            trials.append([*point, OUTCOMES.index(m.outcome), *ms, m.joules, round(m.seconds, 3)])
        content = {
            "schema": SCHEMA, "op": self.kernel.op, "kernel": self.kernel.name,
            "problem": self.problem.as_dict(), "device": dict(self.device),
            "fields": {name: list(values) for name, values in self.fields.items()},
            "base": self.base.as_dict(), "outcomes": OUTCOMES, "trials": trials,
        }  # fmt: skip
        text = json.dumps(content, separators=(",", ":"))
        packed = file.suffix == ".gz"
        write(file, gzip.compress(text.encode(), mtime=0) if packed else text)

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read one.

        Raises:
            UsageError: it cannot be read, or is no recording.
        """
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
        try:
            return cls._parsed(json.loads(gzip.decompress(data) if file.suffix == ".gz" else data))
        except UsageError as error:
            raise UsageError(f"recording {file}: {error}") from None
        except _BROKEN as error:
            raise UsageError(
                f"{file} is no recording of the tuner: {type(error).__name__}: {error}"
            ) from None

    @classmethod
    def _parsed(cls, content: Any) -> Recording:
        if content["schema"] != SCHEMA:
            raise UsageError(f"schema {content['schema']}, expected {SCHEMA}")
        kernel = ops.get_kernel(content["op"], content["kernel"])
        base, fields = kernel.Config.parse(content["base"]), content["fields"]
        space = Space(fields, base, lambda _: None)
        trials = {}
        for row in content["trials"]:
            point, rest = tuple(row[: len(fields)]), row[len(fields) :]
            outcome, ms, ms_p20, ms_p80, joules, seconds = rest
            trials[space.config(point)] = Measurement(
                content["outcomes"][outcome], ms, ms_p20, ms_p80, joules, seconds=seconds
            )
        if not any(m.outcome == "ok" for m in trials.values()):
            raise UsageError("none of its configs was timed")
        problem = ops.get(content["op"]).Problem.parse(content["problem"])
        return cls(kernel, problem, content["device"], fields, base, trials)
