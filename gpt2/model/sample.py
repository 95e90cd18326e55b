"""Text from a model: one token after another, drawn from what the model predicts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from typing_extensions import TypedDict, Unpack

from jetfire.core.errors import JetfireError, UsageError
from jetfire.gpt2.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from jetfire.gpt2.model.language_model import LanguageModel


class Sampling(TypedDict, total=False):
    """How `generate` draws."""

    temperature: float
    top_k: int | None
    seed: int


@torch.no_grad()
def generate(
    model: LanguageModel,
    ids: torch.Tensor,
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 200,
    seed: int = 0,
) -> torch.Tensor:
    """The ids, int64 rows×length, with `count` more in each row, on the model's device.

    What is longer than the model's context is seen from its end. The model is in evaluation mode
    meanwhile. The caller chooses the autocast.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest; None among all.
    """
    _check(ids, count, temperature, top_k)
    device = model.tokens.weight.device
    ids = ids.to(device)
    generator = torch.Generator(device).manual_seed(seed)
    training = model.training
    model.eval()
    try:
        for _ in range(count):
            logits = model(ids[:, -model.shape.context :])[:, -1].float()
            if not bool(logits.isfinite().all()):
                raise JetfireError("cannot sample: the model predicts NaN or Inf")
            following = _draw(logits, temperature, top_k, generator)
            ids = torch.cat([ids, following], dim=1)
    finally:
        model.train(training)
    return ids


def _draw(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> torch.Tensor:
    """int64 rows×1 from logits rows×vocabulary."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)


def _check(ids: torch.Tensor, count: int, temperature: float, top_k: int | None) -> None:
    if ids.dim() != 2 or not ids.numel():
        raise UsageError("sampling needs a prompt of at least one token")
    if count < 1:
        raise UsageError(f"{count} tokens to sample: expected at least 1")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UsageError(f"temperature {temperature}: expected 0 or a positive number")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top-k {top_k}: expected at least 1")


def text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    **how: Unpack[Sampling],
) -> str:
    """The prompt and `count` tokens after it, as text.

    Without a prompt a document begins: after the separator, or a newline where there is none.

    Raises:
        UsageError: the prompt has a character that the vocabulary lacks, or see `generate`.
    """
    start = tokenizer.encode(prompt).astype("int64").tolist()
    given = len(start)
    if not start:
        newline = tokenizer.separator is None
        start = tokenizer.encode("\n").tolist() if newline else [tokenizer.separator]
        given = 0
    begun = torch.tensor([start], dtype=torch.int64, device="cpu")
    ids = generate(model, begun, count, **how)[0].tolist()
    return tokenizer.decode(ids if given else ids[len(start) :])
