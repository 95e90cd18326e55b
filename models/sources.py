"""Models by the words that name them: transformers' configs, a config.json, one's own function.

Nothing is downloaded, and no code runs but that of transformers and of the function that was named.
Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from jetfire.core import schema
from jetfire.core.errors import (
    JetfireError,
    UsageError,
    first_line,
    nearest,
    not_installed,
    unknown,
)
from jetfire.core.files import MIB
from jetfire.core.schema import Name, Plain, also, most
from jetfire.gpt2.bench import cases
from jetfire.gpt2.bench.cases import StepProblem
from jetfire.gpt2.training.settings import PRESETS

if TYPE_CHECKING:
    import torch
    from torch import nn

HF = "hf:"
# By our name: transformers' common one, and the most that is accepted.
SIZES = {
    "layers": ("num_hidden_layers", 1024),
    "heads": ("num_attention_heads", 1024),
    "kv_heads": ("num_key_value_heads", 1024),
    "width": ("hidden_size", 2**17),
    "hidden": ("intermediate_size", 2**19),
    "vocabulary": ("vocab_size", 2**21),
}
BATCH = {"batch": 2**16, "context": 2**20}


def _gpt2(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads}


def _llama(layers: int, width: int, hidden: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
    }


# A config without its defaults, sequences and tokens of each.
NAMED: dict[str, tuple[dict[str, Any], int, int]] = {
    "gpt2-124m": (_gpt2(12, 768, 12), 16, 1024),
    "gpt2-350m": (_gpt2(24, 1024, 16), 8, 1024),
    "gpt2-12x1024": (_gpt2(12, 1024, 16), 8, 1024),
    "llama-4x4096": (_llama(4, 4096, 11008, 32), 4, 2048),
    "llama-8x2048": (_llama(8, 2048, 8192, 8), 4, 2048),
}

_IGNORED = frozenset(
    {"model_type", "auto_map", "attn_implementation", "quantization_config", "torch_dtype", "dtype"}
)

# What is fed to a model: arguments by name or in order, or a function of the model that is trained.
Batch = Any


class ModelSource(ABC):
    """Where a model and one batch for it come from.

    Attributes:
        name: the words that name it.
        own: its function is the user's: it can only be run, not traced.
    """

    name: str
    own = False

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return what a row's problem says of the model, `model` first."""

    def load(self) -> None:  # noqa: B027  # most sources have nothing to import
        """Import what `make` needs: a module may draw from torch's generator as it is imported.

        Raises:
            UsageError: there is no such module.
        """

    @abstractmethod
    def make(self, device: torch.device) -> tuple[nn.Module, Batch]:
        """Return the model in training mode with fp32 parameters, and its batch, on a device.

        Both are drawn from torch's generator: the same seed gives the same.

        Raises:
            UsageError: there is no such model.
        """

    @abstractmethod
    def sample(self, batch: int, context: int, layers: int) -> ModelSource:
        """Return it with at most so many sequences, tokens and layers; a user's own as it is."""


@dataclass(frozen=True)
class ConfigSource(ModelSource):
    """A causal language model that transformers makes of a config, with random weights.

    Attributes:
        config: the fields of a config.json.
        sizes: by `SIZES`, what replaces the config's own.
        batch, context: sequences, and tokens of each.
    """

    name: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch: int = 8
    context: int = 1024

    def fields(self) -> dict[str, Any]:
        made = self._made()
        sizes = {ours: size for ours in SIZES if (size := _size_of(made, ours)) is not None}
        return {"model": self.name, **sizes, "batch": self.batch, "context": self.context}

    def sample(self, batch: int, context: int, layers: int) -> ConfigSource:
        sizes = {**self.sizes, "layers": min(layers, self.fields().get("layers", layers))}
        return replace(
            self, sizes=sizes, batch=min(batch, self.batch), context=min(context, self.context)
        )

    def make(self, device: torch.device) -> tuple[nn.Module, Batch]:
        import torch

        made = self._made()
        longest = getattr(made, "max_position_embeddings", None)
        if type(longest) is int:
            made.max_position_embeddings = max(longest, self.context)
        try:
            with device:
                model = _transformers().AutoModelForCausalLM.from_config(
                    made, dtype=torch.float32, attn_implementation="sdpa"
                )
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            raise _unusable(self.name, error) from error
        if getattr(model, "loss_type", "") is None:
            # The class's name does not tell GPT-2's: its warning of that, in the step, would break
            # a compiled graph in four.
            model.loss_type = "ForCausalLM"
        ids = torch.randint(made.vocab_size, (self.batch, self.context), device=device)
        return model.train(), {"input_ids": ids, "labels": ids, "use_cache": False}

    def _made(self) -> Any:
        """Return the config as transformers has it."""
        auto, kind = _transformers().models.auto, str(self.config["model_type"])
        kinds, causal = auto.configuration_auto.CONFIG_MAPPING, _causal(auto)
        if kind not in causal:
            hint = f" (did you mean {near}?)" if (near := nearest(kind, causal)) else ""
            raise UsageError(
                f"{self.name}: model_type={kind!r}{hint}: expected that of a causal "
                "language model in transformers"
            )
        known = kinds[kind].attribute_map
        own = {ours: known.get(theirs, theirs) for ours, (theirs, _) in SIZES.items()}
        fields = {k: v for k, v in self.config.items() if not _ignored(k)}
        sizes, heads, kv_heads = dict(self.sizes), *map(fields.get, (own["heads"], own["kv_heads"]))
        if "heads" in sizes and kv_heads is not None and kv_heads == heads:
            sizes.setdefault("kv_heads", sizes["heads"])
        if {"width", "heads"} & sizes.keys():
            fields.pop("head_dim", None)
        given = {own[ours]: size for ours, size in sizes.items()}
        try:
            made = kinds[kind](**{**fields, **given})
        except Exception as error:  # transformers' validators raise errors of their own
            raise _unusable(self.name, error) from error
        _expect_heads_that_fit(made, self.sizes)
        usual = kinds[kind]()
        for ours in self.sizes:
            if not hasattr(usual, SIZES[ours][0]):
                raise UsageError(f"--set {ours}={self.sizes[ours]}: {kind} has no such size")
        return made


def _size_of(config: Any, ours: str) -> int | None:
    """Return a config's size by its name in `SIZES`; None where it has none."""
    found = getattr(config, SIZES[ours][0], None)
    return found if type(found) is int else None


def _expect_heads_that_fit(config: Any, given: Mapping[str, int]) -> None:
    """Raise a UsageError where heads that were given do not go together with the other sizes."""
    heads, kv_heads = _size_of(config, "heads"), _size_of(config, "kv_heads")
    if {"heads", "kv_heads"} & given.keys() and heads and kv_heads and heads % kv_heads:
        raise UsageError(f"--set kv_heads={kv_heads}: expected a divisor of heads={heads}")
    width = _size_of(config, "width")
    rotates = hasattr(config, "rope_parameters") or hasattr(config, "rope_theta")
    if {"heads", "width"} & given.keys() and heads and width and rotates:
        of_head = getattr(config, "head_dim", None) or width // heads
        if of_head % 2:
            what = f"width={width},heads={heads}"
            raise UsageError(f"--set {what}: expected an even size of a head, not {of_head}")


def _ignored(key: str) -> bool:
    """Return whether a config's field is none of its model, but of code, weights or dtypes."""
    return key.startswith("_") or key in _IGNORED


def _causal(auto: Any) -> set[str]:
    """Return the types of the causal language models that transformers has."""
    return set(auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _unusable(name: str, error: Exception) -> UsageError:
    said = first_line(error.__cause__ or error)[:300].rstrip(".")  # of a validator's, the reason
    return UsageError(f"{name}: {said}: expected a causal language model that transformers makes")


def _transformers() -> Any:
    """Return transformers, which stays off the network.

    Raises:
        UsageError: it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
        import transformers.models.auto.modeling_auto
    except ImportError:
        raise not_installed("transformers", "hf") from None
    transformers.logging.set_verbosity_error()
    return transformers


@dataclass(frozen=True)
class FunctionSource(ModelSource):
    """A user's function without arguments: a model, and a batch for it.

    The batch is a dict of arguments by name, a list or a tuple of arguments, a tensor, or a
    function of the model that returns the loss.
    """

    name: str
    own = True

    def fields(self) -> dict[str, Any]:
        return {"model": self.name}

    def sample(self, batch: int, context: int, layers: int) -> FunctionSource:
        return self

    def make(self, device: torch.device) -> tuple[nn.Module, Batch]:
        import torch
        from torch import nn
        from torch.utils._pytree import tree_map_only

        try:
            made = self._function()()
        except JetfireError:
            raise
        except (Exception, SystemExit) as error:  # it may end its process, but not ours
            raise UsageError(f"{self.name}: {first_line(error)}") from error
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise UsageError(
                f"{self.name} returned {_kinds(made)}: expected a torch.nn.Module and a batch"
            )
        model, batch = made
        return model.to(device).train(), tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device), batch
        )

    def load(self) -> None:
        self._function()

    def _function(self) -> Callable[[], Any]:
        """Return the function; modules are looked for in the current folder too.

        Raises:
            UsageError: there is no such module or function.
        """
        module, _, name = self.name.partition(":")
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            found = getattr(importlib.import_module(module), name, None)
        except (Exception, SystemExit) as error:  # it may end its process, but not ours
            raise UsageError(f"{self.name}: {first_line(error)}") from error
        if not callable(found):
            raise UsageError(f"{self.name}: expected a function {name} in {module}")
        return found


def _kinds(made: Any) -> str:
    parts = made if isinstance(made, tuple) else (made,)
    return " and ".join(type(part).__name__ for part in parts[:4]) or "nothing"


@dataclass(frozen=True)
class PresetSource(ModelSource):
    """A preset of `jetfire train`: our own GPT-2 or Llama, in BF16."""

    name: str
    problem: StepProblem

    def fields(self) -> dict[str, Any]:
        sizes = dataclasses.asdict(self.problem)
        del sizes["accumulate"]
        return {"model": self.name, **sizes}

    def sample(self, batch: int, context: int, layers: int) -> PresetSource:
        p = self.problem
        smaller = replace(
            p,
            batch=min(batch, p.batch),
            context=min(context, p.context),
            layers=min(layers, p.layers),
        )
        return replace(self, problem=smaller)

    def make(self, device: torch.device) -> tuple[nn.Module, Batch]:
        import torch

        from jetfire.gpt2.model.families import model_of

        p = self.problem
        with device:
            model = model_of(p.shape, "bf16")
        ids, targets = torch.randint(p.vocabulary, (2, p.batch, p.context), device=device)
        return model.train(), (ids, targets)


# From words.


def names() -> list[str]:
    """Return the named models, ``hf:…``."""
    return [HF + name for name in NAMED]


def named_here(word: str) -> bool:
    """Return whether a word names a model in one of this module's ways, presets aside."""
    return ":" in word or word.endswith(".json")


def parse(
    word: str, changes: Mapping[str, str], presets: bool = False, others: Sequence[str] = ("run",)
) -> ModelSource:
    """Return the source of a word, some of its sizes changed; no torch is loaded.

    Args:
        changes: sizes by name, as texts.
        presets: whether those of `jetfire train` are accepted too.
        others: what a user may set beside sizes.

    Raises:
        UsageError: it names nothing, or a size is out of bounds.
    """
    if presets and word in PRESETS:
        problem = cases.problem_of(word, changes)
        assert isinstance(problem, StepProblem)
        return PresetSource(word, problem)
    if word.startswith(HF):
        name = word.removeprefix(HF)
        if name not in NAMED:
            raise unknown(f"no model {word!r}", word, names())
        config, batch, context = NAMED[name]
        source = ConfigSource(word, config, batch=batch, context=context)
        return _sized(source, changes, others)
    if word.endswith(".json"):
        path = Path(word)
        return _sized(ConfigSource(path.name, schema.load(path, _Config, MIB)), changes, others)
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", word):
        for name, text in changes.items():
            raise UsageError(
                f"--set {name}={text}: {word} has its own sizes: expected {' or '.join(others)} "
                "alone"
            )
        return FunctionSource(word)
    known = [*names(), *(PRESETS if presets else ())]
    raise unknown(f"no model {word!r}", word, known, ", a config.json or MODULE:FUNCTION")


def _sized(source: ConfigSource, changes: Mapping[str, str], others: Sequence[str]) -> ConfigSource:
    bounds = {**{name: most for name, (_, most) in SIZES.items()}, **BATCH}
    sizes = {name: _size(name, text, bounds, others) for name, text in changes.items()}
    batch, context = sizes.pop("batch", source.batch), sizes.pop("context", source.context)
    return replace(source, sizes=sizes, batch=batch, context=context)


def _size(name: str, text: str, bounds: Mapping[str, int], others: Sequence[str]) -> int:
    if name not in bounds:
        raise unknown(f"--set {name}={text}", name, [*bounds, *others])
    if not re.fullmatch("[0-9]{1,18}", text) or not 1 <= int(text) <= bounds[name]:
        raise UsageError(f"--set {name}={text}: expected an integer from 1 to {bounds[name]}")
    return int(text)


_Few = Annotated[int, Field(ge=1, le=1024)] | None
_Width = Annotated[int, Field(ge=1, le=2**17)] | None
_Hidden = Annotated[int, Field(ge=1, le=2**19)] | None
_Many = Annotated[int, Field(ge=1, le=2**24)] | None


class _Bounds(TypedDict, total=False):
    """Sizes by the names that families of models give them, each such as a device may hold."""

    num_hidden_layers: _Few
    n_layer: _Few
    num_layers: _Few
    n_layers: _Few
    num_attention_heads: _Few
    n_head: _Few
    num_heads: _Few
    num_key_value_heads: _Few
    num_experts: _Few
    num_local_experts: _Few
    n_routed_experts: _Few
    hidden_size: _Width
    n_embd: _Width
    d_model: _Width
    head_dim: _Width
    intermediate_size: _Hidden
    n_inner: _Hidden
    ffn_dim: _Hidden
    moe_intermediate_size: _Hidden
    vocab_size: _Many
    max_position_embeddings: _Many
    n_positions: _Many


class _Typed(TypedDict):
    """What a config.json must have."""

    model_type: Name


_Config: Any = Annotated[dict[Name, Plain], most(1000), also(_Typed), also(_Bounds)]
