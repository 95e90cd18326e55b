"""`jetfire train` and its verbs on runs: from options to a run's folder, text and exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from jetfire import terminal
from jetfire.bench.results import write_text
from jetfire.gpt2 import (
    checkpoint,
    corpora,
    data,
    graph,
    log,
    parallel,
    prepare,
    tokenizers,
    weights,
)
from jetfire.gpt2 import sample as sampling
from jetfire.gpt2.asked import Asked, no_run
from jetfire.gpt2.checkpoint import Checkpoint
from jetfire.gpt2.display import Display
from jetfire.gpt2.model import GPT2, Shape
from jetfire.gpt2.parallel import Group
from jetfire.gpt2.settings import Settings, resumed
from jetfire.gpt2.step import autocast
from jetfire.gpt2.train import Training, algorithms
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError
from jetfire.terminal import note

SETTINGS, TOKENIZER, PROCESSES = "settings.json", "tokenizer", "processes"


class Stop:
    """Ctrl-C and SIGTERM stop a run after the step under way; a second one ends it at once."""

    def __init__(self, silent: bool = False) -> None:
        self.asked, self.silent = False, silent

    def __call__(self) -> bool:
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if not self.silent:
            note("stopping after this step; again to stop at once")

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._ask) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


@dataclass(frozen=True)
class Run:
    """A run's folder, its settings, and the checkpoint that it goes on from, if any."""

    folder: Path
    settings: Settings
    saved: Checkpoint | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else trains in the folder meanwhile; one in which nothing began is removed."""
        lock = FileLock(self.folder / ".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"{self.folder}: another process is training there") from None
        except OSError as error:
            raise UsageError(f"-o {self.folder}: cannot be written: {error.strerror}") from None
        try:
            checkpoint.tidy(self.folder)
            yield
        finally:
            lock.release()
            if {path.name for path in self.folder.iterdir()} <= {".lock"}:
                shutil.rmtree(self.folder, ignore_errors=True)

    def begin(self, tokens: data.Tokens, processes: int) -> None:
        """From here on the folder holds a run, which can be resumed and, elsewhere, sampled."""
        kept, description = self.folder / TOKENIZER, tokens.meta["tokenizer"]
        kept.mkdir(exist_ok=True)
        if "ranks" in description:
            shutil.copyfile(tokens.folder / description["ranks"], kept / description["ranks"])
        write_text(kept / "meta.json", json.dumps(description) + "\n")
        begun = {**self.settings.as_dict(), PROCESSES: processes}
        text = json.dumps(begun, indent=1) + "\n"
        write_text(self.folder / SETTINGS, text)


def _free_folder(settings: Settings) -> Path:
    """runs/PRESET-RECIPE, or with the first number that is free."""
    name, number = f"{settings.preset}-{settings.recipe}", 1
    while (folder := Path("runs", name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def _begun(folder: Path) -> dict[str, Any] | None:
    """The settings of the run that a folder holds; None if it holds none."""
    try:
        found = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / SETTINGS}: cannot be read: {error}") from None
    if not isinstance(found, dict) or "accumulate" not in found:
        raise UsageError(f"{folder / SETTINGS}: is damaged: expected the settings of a run")
    return dict(found)


def run_of(asked: Asked, group: Group) -> Run:
    """The run that the options name.

    Raises:
        UsageError: they name none, or one that cannot go on so.
    """
    if asked.resume:
        return _resumed(asked, asked.given(), group)
    settings = asked.begun()
    parallel.check(settings, group)
    folder = asked.output or _free_folder(settings)
    if _begun(folder) is not None or checkpoint.listed(folder):
        raise UsageError(f"-o {folder}: holds a run: --resume goes on with it; or name another")
    return Run(folder, settings)


def _shared_out(before: dict[str, Any], processes: int, run: Path, world: int) -> dict[str, Any]:
    """Settings under which as many processes as there are now train on the same sequences."""
    micros = int(before["accumulate"]) * processes
    if micros % world:
        raise UsageError(
            f"--resume with {world} processes: {run} has {micros} micro-batches a step: "
            f"expected a number of processes that divides them"
        )
    return {**before, "accumulate": micros // world}


def _resumed(asked: Asked, given: dict[str, Any], group: Group) -> Run:
    if asked.output is None or asked.init is not None:
        wanted = "-o RUN, the run to go on with" if asked.output is None else "no --init"
        raise UsageError(f"--resume: expected {wanted}")
    saved = checkpoint.find(asked.output)
    begun = _begun(asked.output)
    if saved is not None:
        begun = {**saved.state["settings"], PROCESSES: saved.state.get(PROCESSES, 1)}
    if begun is None:
        raise UsageError(f"--resume: {asked.output} holds no run")
    processes = int(begun.pop(PROCESSES, 1))
    before = _shared_out(begun, processes, asked.output, group.world)
    settings = resumed(before, given, str(asked.output))
    parallel.check(settings, group)
    if saved is not None and saved.step > settings.steps:
        raise UsageError(f"steps={settings.steps}: {asked.output} is at step {saved.step} already")
    if saved is None:
        note(f"{asked.output} has no checkpoint: beginning at its first step")
    return Run(asked.output, settings, saved)


def _prepared(settings: Settings) -> Path:
    """Where the run's tokens are; text is prepared on first use, into the cache.

    Raises:
        UsageError: there is no such data.
    """
    folder = Path(settings.data)
    if not (folder / "meta.json").is_file():
        chosen = None if settings.tokenizer == "auto" else settings.tokenizer
        output = None
        if settings.data not in corpora.NAMED:
            digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
            output = prepare.cache() / f"{folder.stem}-{digest}-{settings.tokenizer}"
        folder = prepare.prepare(settings.data, chosen, output, show=True)
    return folder


def _tokens(settings: Settings, folder: Path) -> data.Tokens:
    """
    Raises:
        UsageError: they are damaged, or a split is too short for one sequence.
    """
    tokens = data.open_tokens(folder)
    tokens.require(settings.context)
    return tokens


def _load(training: Training, run: Run, init: Path | None) -> None:
    """Parameters, and all else where the run goes on."""
    if run.saved is not None:
        kept = run.saved.state.get("tokens")
        if kept != training.tokens_seen:
            raise UsageError(
                f"data {run.settings.data}: {training.tokens_seen}: {run.folder} was begun with "
                f"{kept}; --resume needs the same tokens"
            )
        training.restore(run.saved)
    elif init is not None:
        saved = checkpoint.find(init)
        if saved is not None:
            training.initialise(saved.model(), saved.path)
        else:
            weights.load(training.model, init)
        if training.group.leads:
            note(f"initialised from {init if saved is None else saved.path}")


def _header(kind: str, training: Training, run: Run, device: Device) -> dict[str, Any]:
    return log.header(
        kind, run.settings.as_dict(), device, training.peak, training.group.world,
        step=training.done,
        parameters=sum(p.numel() for p in training.model.parameters()),
        vocabulary=training.vocabulary,
        tokens=training.tokens_seen, flops_per_token=training.flops, graphed=training.graphed,
    )  # fmt: skip


def _announce(training: Training, run: Run, device: Device) -> None:
    one = run.settings
    million = sum(p.numel() for p in training.model.parameters()) / 1e6
    going = f"from step {training.done} " if training.done else ""
    where, how = device.label, list[str]()
    if one.parallel != "none":
        where, how = f"{training.group.world} × {where}", [one.parallel]
    if device.kind == "cuda":
        how.append("CUDA graph" if training.graphed else "no CUDA graph")
    if how:
        where += f" ({', '.join(how)})"
    note(
        f"{one.preset} ({million:.1f} M parameters), {one.recipe}, on {where}; "
        f"{training.tokens_per_step} tokens a step, {going}to step {one.steps}; in {run.folder}"
    )
    if training.peak is not None:
        note(f"MFU is of {training.peak.tflops:g} TFLOP/s in BF16 ({training.peak.source})")


def train(asked: Asked) -> None:
    """Train, and print what the run came to. With torchrun, in each of its processes.

    Raises:
        JetfireError: with the exit code of what went wrong; the last checkpoint stands.
    """
    with parallel.joined(asked.device) as (device, group):
        run = group.once(lambda: run_of(asked, group))
        with group.alike():
            graph.used(run.settings, device.torch_device)  # or says now why it cannot be
        _train(asked, run, device, group)
    if asked.sample and group.leads:
        sample(run.folder, "", asked.sample, device=asked.device)


def _train(asked: Asked, run: Run, device: Device, group: Group) -> None:
    begin = time.monotonic()
    folder = group.once(lambda: _prepared(run.settings))
    tokens = group.each(lambda: _tokens(run.settings, folder))
    with ExitStack() as stack:
        group.once(lambda: stack.enter_context(run.held()))
        stack.enter_context(algorithms(run.settings))
        outcome = Outcome()

        def made() -> Training:
            training = Training(run.settings, tokens, device, run.folder, outcome, group)
            _load(training, run, asked.init)
            return training

        training = group.each(made)
        group.once(lambda: _begin(training, run, device, outcome, stack))
        stop = Stop(silent=not group.leads)
        with stop.listening(), group.alike():
            training.run(stop)
        outcome({"kind": "end", "step": training.done, "best": training.best,
                 "seconds": round(time.monotonic() - begin, 1)})  # fmt: skip
    if group.leads:
        print(outcome.summary(run))


def _begin(
    training: Training, run: Run, device: Device, outcome: Outcome, stack: ExitStack
) -> None:
    """Say what is trained, and have the outcome's records logged and shown."""
    done = run.saved.step if run.saved else 0
    _announce(training, run, device)
    run.begin(training.tokens, training.group.world)
    journal = stack.enter_context(closing(log.Log(run.folder, done if run.saved else None)))
    journal.write(_header("run" if journal.empty else "resume", training, run, device))
    display = stack.enter_context(Display(done, run.settings.steps))
    outcome.readers += [journal.write, display.show]


class Outcome:
    """Passes a run's records on, and keeps what the summary needs of them."""

    def __init__(self) -> None:
        self.readers: list[Callable[[dict[str, Any]], None]] = []
        self.first: float | None = None
        self.records: dict[str, dict[str, Any]] = {}

    def __call__(self, record: dict[str, Any]) -> None:
        if record["kind"] == "step" and self.first is None:
            self.first = record["loss"]
        self.records[record["kind"]] = record
        for read in self.readers:
            read(record)

    def summary(self, run: Run) -> str:
        one, end = run.settings, self.records["end"]
        moved = ""
        if "step" in self.records:
            moved = f"loss {self.first:.4f} → {self.records['step']['loss']:.4f}, "
        if end["best"] is not None:
            best = end["best"]
            moved += f"best validation loss {best['loss']:.4f} at step {best['step']}, "
        took = f"{end['step']} steps, {end['seconds']:.1f} s"
        return f"{one.preset} {one.recipe}: {moved}{took}; {run.folder}"


def _trained(path: Path) -> Checkpoint:
    """The newest checkpoint of a run, or the one in the folder."""
    saved = checkpoint.find(path)
    if saved is None:
        raise no_run(path)
    return saved


def sample(
    path: Path, prompt: str, count: int, *, temperature: float = 0.8, top_k: int | None = 200,
    seed: int = 0, device: str = "auto",
) -> None:  # fmt: skip
    """Print the prompt and what a run's model writes after it, in BF16 whatever its recipe.

    Raises:
        UsageError: there is no checkpoint, or an option is out of range.
    """
    saved, where = _trained(path), Device.parse(device)
    kept = saved.path.parent.parent / TOKENIZER
    try:
        description = json.loads((kept / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{kept}: cannot load the run's tokenizer: {error}") from None
    with where.torch_device:
        model = GPT2(Shape(**saved.state["shape"]), "bf16")
    checkpoint.load_model(model, saved.model(), saved.path)
    with autocast(where.torch_device):
        text = sampling.text(
            model, tokenizers.load(description, kept), prompt, count, temperature=temperature,
            top_k=top_k, seed=seed,
        )  # fmt: skip
    terminal.show(text)


def export(path: Path, output: Path) -> None:
    """Write a run's weights as `transformers` reads them, and print the folder.

    Raises:
        UsageError: there is no checkpoint, or the folder cannot be written.
    """
    saved = _trained(path)
    print(weights.save_transformers(output, saved.state["shape"], saved.model()))
