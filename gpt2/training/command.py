"""`jetfire train` and its verbs on runs: from options to a run's folder, text and exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
from typing_extensions import Unpack

from jetfire.core import terminal
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.terminal import note
from jetfire.gpt2.data import prepare, tokenizers
from jetfire.gpt2.data import tokens as data
from jetfire.gpt2.model import sample as sampling
from jetfire.gpt2.model import weights
from jetfire.gpt2.model.families import model_of
from jetfire.gpt2.model.language_model import check_fits
from jetfire.gpt2.model.sample import Sampling
from jetfire.gpt2.training import checkpoint, graph, log, parallel, plan
from jetfire.gpt2.training.checkpoint import MODEL, Checkpoint
from jetfire.gpt2.training.display import RunSummary, TrainingDisplay, announce
from jetfire.gpt2.training.header import header
from jetfire.gpt2.training.loggers import Logger
from jetfire.gpt2.training.loop import Training
from jetfire.gpt2.training.options import RunRequest, no_run
from jetfire.gpt2.training.parallel import Group
from jetfire.gpt2.training.runs import TOKENIZER, Run, opened
from jetfire.gpt2.training.settings import Settings
from jetfire.gpt2.training.step import autocast
from jetfire.gpt2.training.stop import Stop


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Raise a UsageError in place of what torch and NumPy raise where there is not."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        lacking = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not lacking and "DefaultCPUAllocator" not in str(error):
            raise
        said = " ".join(str(error).split())[:150]
        wanted = getattr(error, "__notes__", ["expected a smaller batch, context or model"])
        raise UsageError(f"out of memory ({said}): {wanted[0]}") from None


@_enough_memory()
def train(asked: RunRequest) -> Path:
    """Train, print what the run came to, return its folder. With torchrun, in each process.

    Raises:
        JetfireError: with the exit code of what went wrong; the last checkpoint stands.
    """
    outcome = RunSummary()
    with parallel.joined(asked.device) as (device, group), ExitStack() as stack:
        run, folder = group.once(lambda: _opened(asked, device, group, stack))
        _train(run, folder, device, group, outcome)
        if group.leads:
            outcome.show(run)
    return run.folder


def _opened(asked: RunRequest, device: Device, group: Group, stack: ExitStack) -> tuple[Run, Path]:
    """Open the run until the stack ends, and return it and the folder of its tokens."""
    run = stack.enter_context(opened(asked, group))
    graph.used(run.settings, device.torch_device)  # or says now why it cannot be
    check_fits(run.settings.shape(1), device)
    return run, prepare.folder_of(run.settings.data, run.settings.tokenizer)


def _train(run: Run, folder: Path, device: Device, group: Group, outcome: RunSummary) -> None:
    """Train a run on the tokens in a folder."""
    # The first process alone reads them all, to see if they are whole.
    tokens = group.each(lambda: data.open_tokens(folder, note, check=group.leads))
    with group.alike():
        tokens.require(run.settings.context)
    with (
        algorithms(run.settings),
        _planned(run.settings, tokens.vocabulary, device),
        ExitStack() as stack,
    ):
        training = group.each(
            lambda: Training(run.settings, tokens, device, run.folder, outcome, group)
        )
        group.each(lambda: training.load(run))
        group.once(lambda: _begin(training, run, device, outcome, stack))
        stop = Stop(silent=not group.leads)
        with stop.listening(), group.alike():
            training.run(stop)
        outcome.end(training)


@contextmanager
def algorithms(settings: Settings) -> Iterator[None]:
    """Use, where asked for, only algorithms that give the same bits again."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling every new tensor would cost a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextmanager
def _planned(settings: Settings, vocabulary: int, device: Device) -> Iterator[None]:
    """Note on the error of a GPU that is full what the run needs by its sizes, and what less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if device.kind == "cuda":
            where = device.torch_device
            free = torch.cuda.mem_get_info(where)[0] + torch.cuda.memory_reserved(where)
            error.add_note(plan.advice(settings, vocabulary, free))
        raise


def _begin(
    training: Training, run: Run, device: Device, outcome: RunSummary, stack: ExitStack
) -> None:
    """Say what is trained, and have the outcome's records logged and shown."""
    done = run.saved.step if run.saved else 0
    loggers = [stack.enter_context(Logger(name, run)) for name in run.loggers]
    run.begin(training.tokens, training.group.world)
    announce(training, run, device)
    journal = stack.enter_context(closing(log.Log(run.folder)))
    head = header("run" if journal.empty else "resume", training, device)
    journal.write({**head, "cut": True} if journal.cut else head)
    display = stack.enter_context(TrainingDisplay(done, run.settings.steps))
    outcome.readers += [journal.write, display.show, *loggers]


def _trained(path: Path) -> Checkpoint:
    """The newest checkpoint of a run, or the one in the folder."""
    saved = checkpoint.find(path, (MODEL,))
    if saved is None:
        raise no_run(path)
    return saved


@_enough_memory()
def sample(
    path: Path,
    prompt: str,
    count: int,
    *,
    device: str = "auto",
    **how: Unpack[Sampling],
) -> None:
    """Print the prompt and what a run's model writes after it, in BF16 whatever its recipe."""
    saved, where = _trained(path), Device.parse(device)
    kept = saved.path.parent.parent / TOKENIZER
    tokenizer = tokenizers.kept(kept)
    if tokenizer.vocabulary != saved.shape.vocabulary:
        raise UsageError(
            f"{kept}: {tokenizer.vocabulary} tokens: expected the model's, {saved.shape.vocabulary}"
        )
    check_fits(saved.shape, where)
    with where.torch_device:
        model = model_of(saved.shape, "bf16")
    saved.load(model)
    with autocast(where.torch_device):
        text = sampling.text(model, tokenizer, prompt, count, **how)
    terminal.result({"text": text}, lambda: terminal.show(text))


def export(path: Path, output: Path) -> None:
    """Write a run's weights as `transformers` reads them, and print the folder.

    Raises:
        UsageError: there is no checkpoint, or the folder holds what is not to be written over, or
            cannot be written.
    """
    weights.check_replaceable(output)
    saved = _trained(path)
    folder = weights.save_transformers(output, saved.shape, saved.model())
    terminal.result({"folder": folder}, lambda: print(folder))
