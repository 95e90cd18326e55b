"""Swap the linear layers of any model for INT8 or INT4 ones, over the same parameters or frozen."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.problem import Block
from jetfire.nn import recipes
from jetfire.nn.fallback import Fallback
from jetfire.nn.frozen import FrozenInt8Linear
from jetfire.nn.fused_block import say_causal, unmasked
from jetfire.nn.head import Int8Head
from jetfire.nn.int4 import Int4Conv1D, Int4Linear
from jetfire.nn.linear import Int8Conv1D, Int8Linear
from jetfire.nn.loss import causal_lm_loss
from jetfire.nn.products import FLOATS
from jetfire.nn.recipes import Recipe

# What linear layers are replaced by.
CONVERTED = (Int8Linear, Int8Conv1D, FrozenInt8Linear, Int4Linear, Int4Conv1D)


@dataclass(frozen=True)
class Report:
    """What `convert` did.

    Attributes:
        converted: names of the modules replaced.
        left: name → why it stays as it is, for every other module that has a matrix of its own,
            layers that were converted before among them.
        fused: names of the blocks with INT8 between their layers too.
        single: name → why there is none, for every other block of `transformers`' where it was
            asked for: its linear layers are converted one by one.
        losses: names of the language models with such blocks whose loss is `causal_lm_loss`; "" is
            the model itself.
    """

    converted: tuple[str, ...]
    left: dict[str, str]
    fused: tuple[str, ...] = ()
    single: dict[str, str] = field(default_factory=dict)
    losses: tuple[str, ...] = ()

    def __str__(self) -> str:
        count, blocks = len(self.converted), len(self.fused)
        lines = [f"converted {count} linear layer{'s' * (count != 1)}"]
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        loss = " and the loss" if self.losses else ""
        lines += [f"fused {blocks} block{'s' * (blocks != 1)}{loss}"] if self.fused else []
        for reason in dict.fromkeys(self.single.values()):
            first, *others = (name for name, why in self.single.items() if why == reason)
            more = f" and {len(others)} more" if others else ""
            lines.append(f"not fused {first}{more}: {reason}")
        return "\n".join(lines)


@checked
def convert(
    model: nn.Module,
    recipe: str | Recipe = "int8",
    skip: tuple[str, ...] = (),
    head: bool | None = None,
    frozen: bool = False,
    fused: bool = False,
    keep: tuple[str, ...] | list[str] = (),
) -> Report:
    """Replace every linear layer of a model by a recipe's over the same parameters, in place.

    `torch.nn.Linear` and `transformers`' Conv1D are. Names and shapes of parameters, and so
    optimizers and state dicts, stay as they are, but for two buffers: with fallback a layer has a
    threshold, ``….fallback.threshold``, and an INT4 layer that searches its group has that,
    ``….searched``. A module that has two names is replaced under both. Converting a model again
    changes nothing.

    `torch.nn.MultiheadAttention` multiplies by its weights itself: its projections stay as they
    are. A `torch.nn.TransformerEncoderLayer` no longer takes torch's fused path in evaluation,
    which reads the weights of its linear layers and calls none of them.

    Layers that `peft` put beside those that it wraps stay as they are.

    Args:
        skip: names of modules to leave, with all that is in them.
        head: whether the output head is replaced too: a linear layer that the model gives as
            `get_output_embeddings()`, or whose weight is an embedding's. None replaces it with
            `fused` alone, in the blocks of the recipe's `head`.
        frozen: whether layers keep their weights as INT8 codes alone and do not learn
            (`FrozenInt8Linear`). Nothing else is frozen. A layer's float weight is freed as it is
            replaced, where nobody else holds it. Attention has no mask where a fused model's has
            none.
        fused: whether the blocks of `transformers`' GPT-2, Llama, Mistral, Qwen2 and Qwen3 also
            have INT8 between their layers, as `Int8Block` has: under BF16 autocast, of fp32
            parameters. Their language models' loss reads the logits as they are, not made fp32.
        keep: modules to leave as `skip` does, by patterns of their names (``"*.down_proj"``), or
            ``"first"`` and ``"last"``: the first and the last of the model's blocks.

    Raises:
        UsageError: there is no such recipe or module, or the model is itself a linear layer, or
            `frozen` or `fused` with a recipe that is not INT8, or both.
    """
    recipe = recipes.get(recipe) if isinstance(recipe, str) else recipe
    _expect_possible(model, recipe, frozen, fused)
    for given in (skip, keep):
        if isinstance(given, str):  # whose letters may be names of modules; `checked` says which
            raise UsageError(f"{given!r}: expected a tuple of names")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    skipped = _skipped(model, names, skip, keep)
    heads = _heads(model)
    block = recipe.head if head is None and fused else recipe.block if head else None
    stays = {module: _why_a_head_stays(module, block) for module in heads if not head}
    others = _others(model, frozen)
    places = _places(model)
    converted: list[str] = []
    left: dict[str, str] = {}
    while places:
        module = next(iter(places))
        new: nn.Module | None = None
        for name in places.pop(module):  # so that a frozen layer's weight goes with its module
            states = name in skipped, stays.get(module), others.get(module)
            reason = _why_not(module, recipe, *states)
            if reason is not None:
                left[name] = reason
                continue
            if new is None:
                own = replace(recipe, block=block) if module in heads else recipe
                new = _replacement(module, own, frozen, module in heads)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
            converted.append(name)
    _leave_fused_path(model)
    if frozen and converted:
        attend_causally(model)
    if not fused:
        return Report(tuple(converted), left)
    blocks = _fuse(model, recipe, skipped)
    return Report(tuple(converted), left, *blocks, _fuse_losses(model, blocks[0]))


def _expect_possible(model: nn.Module, recipe: Recipe, frozen: bool, fused: bool) -> None:
    """Raise a UsageError that says what `convert` cannot do with a model or a recipe."""
    for name, asked in (("frozen", frozen), ("fused", fused)):
        if asked and recipe.block is None:
            raise UsageError(f"{name}=True with recipe={recipe.name}: expected an INT8 recipe")
    if frozen and recipe.fallback is not None:
        raise UsageError(f"frozen=True with recipe={recipe.name}: expected one without fallback")
    if frozen and fused:
        raise UsageError("frozen=True fused=True: expected one of them")
    if _is_linear(model) or isinstance(model, CONVERTED):
        raise UsageError(
            f"convert: the model is itself a {type(model).__name__}: expected a module that has it"
        )


def _skipped(
    model: nn.Module, names: Sequence[str], skip: Sequence[str], keep: Sequence[str]
) -> set[str]:
    """Return the names of the modules that are asked to be left, and of all that is in them."""
    for name in skip:
        if name not in names:
            raise UsageError(f"skip={name!r}: expected the name of a module")
    roots = set(skip)
    ends = _ends(model)
    for pattern in keep:
        found = [ends[pattern]] if pattern in ends else fnmatch.filter(names, pattern)
        if not found:
            raise UsageError(f"keep={pattern!r}: expected a pattern of modules' names, first, last")
        roots.update(found)
    return {name for name in names if any(f"{name}.".startswith(f"{root}.") for root in roots)}


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's blocks by name: the modules of the longest list; empty where it has none."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():  # outer ones first: experts of a layer are no blocks
        inner = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and not inner:
            lists.append((name, module))
    name, blocks = max(lists, key=lambda named: len(named[1]), default=("", nn.ModuleList()))
    return {f"{name}.{i}" if name else str(i): block for i, block in enumerate(blocks)}


def _ends(model: nn.Module) -> dict[str, str]:
    """Return the names of the first and the last block."""
    names = list(transformer_blocks(model))
    return {"first": names[0], "last": names[-1]} if names else {}


def _fuse(
    model: nn.Module, recipe: Recipe, skipped: set[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Give blocks INT8 between their layers; return which, and why not of the others."""
    blocks = {
        name: module
        for name, module in model.named_modules()
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    }
    fused, single = [], {}
    for name, block in blocks.items():
        kind = type(block)
        if name in skipped:
            single[name] = "asked to"
        elif recipe.flow is None:
            single[name] = f"recipe {recipe.name} has no flow"
        elif _is_fused(block):
            single[name] = "fused already"
        elif (form := _form_of(kind)) is None:
            single[name] = f"{kind.__name__} has no such form"
        elif (reason := form.why_not(block, recipe.flow)) is not None:
            single[name] = reason
        else:
            form.fuse(block, recipe.flow)
            fused.append(name)
    _say_causal(model, [name for name, block in blocks.items() if _is_fused(block)])
    return tuple(fused), single


def _is_fused(block: nn.Module) -> bool:
    """Return whether a block is one that `_fuse` made."""
    return type(block).__module__.startswith("jetfire.")


def attend_causally(model: nn.Module) -> None:
    """Have attention without a mask, in place, where a fused model's has none.

    Blocks stay as they are.
    """
    known = [name for name, module in model.named_modules() if _form_of(type(module)) is not None]
    for name in known:
        _before_forward(model.get_submodule(name), unmasked)
    _say_causal(model, known)


def _say_causal(model: nn.Module, blocks: Sequence[str]) -> None:
    """Have models say where their mask is causal alone whose blocks are all among those named."""
    for name, module in model.named_modules():
        own = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        if isinstance(module, nn.ModuleList) and own and set(own) <= set(blocks):
            owner = model.get_submodule(name.rpartition(".")[0])
            if hasattr(owner, "config"):
                _before_forward(owner, say_causal)


def _before_forward(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Call a hook before a module's forward, once though it is asked for again."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _fuse_losses(model: nn.Module, fused: Sequence[str]) -> tuple[str, ...]:
    """Have causal language models with fused blocks use `causal_lm_loss`; return their names.

    Not where the model was given a loss of its own. `transformers`' makes fp32 of the logits, 4
    bytes each, and as much again for their gradient: the widest tensors of a step.
    """
    found = []
    for name, module in model.named_modules():
        language_model = any(
            base.__module__.startswith("transformers.models.")
            and base.__name__.endswith(("ForCausalLM", "LMHeadModel"))
            for base in type(module).__mro__
        )
        inside = any(block.startswith(f"{name}." if name else "") for block in fused)
        if language_model and inside and not hasattr(module, "_loss_function"):
            module.loss_function = causal_lm_loss
            found.append(name)
    return tuple(found)


def _form_of(kind: type) -> Any:
    """Return the module that has the fused form of a block of `transformers`'; None if none has.

    It imports `transformers`, as the model has.
    """
    from jetfire.nn.decoder_block import FAMILIES

    name = FAMILIES.get(kind.__name__, "gpt2" if kind.__name__ == "GPT2Block" else None)
    if name is None or kind.__module__ != f"transformers.models.{name}.modeling_{name}":
        return None
    return import_module(f"jetfire.nn.{'gpt2_block' if name == 'gpt2' else 'decoder_block'}")


def _places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the modules that have a matrix of their own, each with its names."""
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if any(is_lazy(p) or p.dim() > 1 for p in module.parameters(recurse=False)):
            places.setdefault(module, []).append(name)
    return places


def _leave_fused_path(model: nn.Module) -> None:
    """Have torch's encoder layers call the converted layers in them.

    In evaluation without gradients they call none, unless their activation is neither ReLU nor
    GELU: which is what they are told here. Nor do they take nested tensors then, which an encoder
    makes of padded batches.
    """
    for module in model.modules():
        if not any(isinstance(part, CONVERTED) for part in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_conv1d(module)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether something else runs with it, `torch.nn.utils.weight_norm` for instance.

    Or as its state dict is made or loaded: what takes its place would have no such hook.
    """
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))


def _heads(model: nn.Module) -> set[nn.Module]:
    """Return output heads: what the model says is one, what shares an embedding's weight."""
    found = set()
    with suppress(NotImplementedError):  # a model without a head may say so by it
        if (head := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
            found.add(head)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return found | {m for m in model.modules() if id(getattr(m, "weight", None)) in tables}


def _why_a_head_stays(module: Any, block: Block | None) -> str | None:
    """Return why an output head that nobody asked for is not replaced; None if it is.

    Args:
        block: side of the blocks in which it may be; None if it may not.
    """
    if block is None or not _is_linear(module):
        return "the output head"
    if _is_conv1d(module) and module.weight.shape[1] % block:  # there is no `Int8Head` of it
        return f"the output head, {module.weight.shape[1]} outputs: no multiple of {block}"
    return None


def _others(model: nn.Module, frozen: bool) -> dict[nn.Module, str]:
    """Return modules that are another's to call or to read, and why they are left."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            found[module.out_proj] = (
                "MultiheadAttention multiplies by its weight itself and never calls it"
            )
        base = getattr(module, "base_layer", None)
        if not isinstance(base, nn.Module) or not type(module).__module__.startswith("peft."):
            continue
        for adapter in set(module.modules()) - {module} - set(base.modules()):
            found[adapter] = "an adapter"
        if frozen and _is_conv1d(base):
            found[base] = "an adapter expects its weight in×out: freeze it before"
    return found


def _why_not(
    module: nn.Module, recipe: Recipe, skipped: bool, head: str | None, other: str | None
) -> str | None:
    """Return why a module with a matrix is not replaced; None if it is.

    Args:
        head: why it is not, being an output head; None if it is none, or is replaced.
        other: why it is not, being another's to call or to read.
    """
    kind = type(module)
    if isinstance(module, Int8Linear | Int8Conv1D | FrozenInt8Linear):
        return f"{kind.__name__} already, in blocks of {module.block}"
    if isinstance(module, Int4Linear | Int4Conv1D):
        return f"{kind.__name__} already, group={module.int4.group} {module.int4.gradient}"
    if other is not None:
        return other
    if not _is_linear(module):
        linear = isinstance(module, nn.Linear)
        return f"{kind.__name__}, {'a kind of its own' if linear else 'not a linear layer'}"
    if skipped:
        return "asked to"
    if recipe.plain:
        return f"recipe {recipe.name}"
    if head is not None:
        return head
    if _has_hooks(module):
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward was replaced"
    if {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}:
        return "it has more than a weight and a bias"
    own = module._parameters
    if "weight" not in own or ("bias" not in own and module.bias is not None):
        return "its weight or its bias is no parameter"
    matrix: Any = module.weight
    dtype = matrix.dtype
    if dtype not in FLOATS:
        return f"weight of {str(dtype).removeprefix('torch.')}"
    if recipe.int4 is not None:
        outputs, inputs = matrix.shape[:: -1 if _is_conv1d(module) else 1]
        return recipe.int4.why_not(inputs, outputs)
    return None


def _replacement(module: Any, recipe: Recipe, frozen: bool, head: bool) -> nn.Module:
    """Return a layer over the parameters of another, with the attributes that others gave that."""
    new = _layer(module, recipe, frozen, head)
    for name, value in vars(module).items():
        # Names that the new layer has are its own. One of them is a compiled layer's code: taken
        # over, it would run the old layer.
        if not hasattr(new, name):
            setattr(new, name, value)
    return new.train(module.training)


def _layer(module: Any, recipe: Recipe, frozen: bool, head: bool) -> nn.Module:
    new: nn.Module
    weight, bias, transposed = module.weight, module.bias, _is_conv1d(module)
    if (int4 := recipe.int4) is not None:
        return Int4Conv1D(weight, bias, int4) if transposed else Int4Linear.over(module, int4)
    block = recipe.block
    assert block is not None
    if frozen:
        new = FrozenInt8Linear(weight.t() if transposed else weight, bias, block)
    elif transposed:
        new = Int8Conv1D(weight, bias, block, recipe.fallback, recipe.kept)
    else:
        kind = Int8Head if head and module.out_features % block else Int8Linear
        sizes = module.in_features, module.out_features
        new = kind(*sizes, bias is not None, block, device="meta", kept=recipe.kept)
        new.weight, new.bias = weight, bias
        if recipe.fallback is not None:
            new.fallback = Fallback(recipe.fallback, weight.device)
    return new
