"""How `transformers` keeps each family's model: the weights' names, and what config.json says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from jetfire.core import schema
from jetfire.core.files import Unreadable
from jetfire.core.schema import Plain, Scalar
from jetfire.gpt2.data.tokenizers import GPT2_VOCABULARY
from jetfire.gpt2.data.vocabulary import Vocabulary
from jetfire.gpt2.model.shape import Context, Depth, Dropout, Hidden, LlamaShape, Shape, Width

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """How transformers stores one family: its config.json, and the names of its weights.

    Attributes:
        title: the family's name; architecture: the class of theirs that has a head.
        config: the type of config.json.
        same: settings of it under which their model is ours, each with the values that are
            accepted. An export has the first, and what is absent is the first.
        sizes: of its settings, that of our shape which each is; usual: those that may be absent.
        why_not: returns why ours cannot be of a config, or None.
        prefix: before the names of all weights but the head's, in files with a head.
        outside, layers: our names → theirs, of parameters outside the blocks, and of what a block
            has; block: before the number of one.
        buffers: how names end of what is no parameter, in files of older versions.
        transposes: whether linear layers' weights are in×out.
    """

    shape: type[Shape]
    title: str
    architecture: str
    config: Any
    same: Mapping[str, tuple[Any, ...]]
    sizes: Mapping[str, str]
    usual: Mapping[str, Any]
    why_not: Callable[[Config], str | None]
    prefix: str
    outside: Mapping[str, str]
    block: str
    layers: Mapping[str, str]
    buffers: tuple[str, ...]
    transposes: bool = False

    def names(self, shape: Shape) -> dict[str, tuple[str, bool]]:
        """Our parameters' names → theirs without the prefix, and whether to transpose."""
        found, linears = {}, shape.linears()
        for ours in shape.parameters():
            if ours in self.outside:
                found[ours] = self.outside[ours], False
                continue
            _, number, layer, part = ours.split(".")
            turned = self.transposes and layer in linears and part == "weight"
            found[ours] = f"{self.block}.{number}.{self.layers[layer]}.{part}", turned
        return found

    def described(self, shape: Shape) -> dict[str, Any]:
        """Return the config.json of a shape."""
        end = GPT2_VOCABULARY - 1 if shape.vocabulary == GPT2_VOCABULARY else None
        return {
            "architectures": [self.architecture],
            **{name: values[0] for name, values in self.same.items()},
            **{theirs: getattr(shape, ours) for theirs, ours in self.sizes.items()},
            "torch_dtype": "float32",
            **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
        }


class _GPT2Sizes(TypedDict):
    """What of GPT2Config says how large a model is."""

    n_layer: Depth
    n_head: Depth
    n_embd: Width
    n_positions: Context
    vocab_size: Vocabulary


class _GPT2Config(_GPT2Sizes, total=False):
    """A config.json's sizes, and what of it must be as ours is, or may be."""

    n_inner: int | None
    resid_pdrop: Dropout
    model_type: Scalar
    activation_function: Scalar
    layer_norm_epsilon: Scalar
    scale_attn_weights: Scalar
    scale_attn_by_inverse_layer_idx: Scalar
    add_cross_attention: Scalar
    tie_word_embeddings: Scalar


def _why_no_gpt2(config: Config) -> str | None:
    width = config["n_embd"]
    if (inner := config.get("n_inner") or 4 * width) != 4 * width:
        return f"n_inner {inner}: expected {4 * width}, four times n_embd"
    if width % config["n_head"]:
        return f"n_embd {width}: expected a multiple of n_head"
    return None


class _LlamaSizes(TypedDict):
    """What of LlamaConfig says how large a model is, and the eps, whose default is not ours."""

    num_hidden_layers: Depth
    num_attention_heads: Depth
    hidden_size: Width
    intermediate_size: Hidden
    max_position_embeddings: Context
    vocab_size: Vocabulary
    rms_norm_eps: Scalar


class _LlamaConfig(_LlamaSizes, total=False):
    """A config.json's sizes, and what of it must be as ours is, or may be."""

    num_key_value_heads: Depth | None
    head_dim: int | None
    tie_word_embeddings: bool
    attention_dropout: Dropout
    model_type: Scalar
    hidden_act: Scalar
    rope_theta: Scalar
    rope_scaling: Plain
    rope_parameters: Plain
    attention_bias: Scalar
    mlp_bias: Scalar


def _why_no_llama(config: Config) -> str | None:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if width % heads or width // heads % 2:
        return f"hidden_size {width}: expected num_attention_heads times an even number"
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        return f"num_key_value_heads {kv_heads}: expected a divisor of num_attention_heads"
    if (head := config.get("head_dim") or width // heads) != width // heads:
        return f"head_dim {head}: expected {width // heads}, hidden_size / num_attention_heads"
    return None


LAYOUTS = {
    "gpt2": Layout(
        shape=Shape,
        title="GPT-2",
        architecture="GPT2LMHeadModel",
        config=_GPT2Config,
        same={
            "model_type": ("gpt2",),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "layer_norm_epsilon": (1e-5,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        sizes={
            "n_layer": "layers",
            "n_head": "heads",
            "n_embd": "width",
            "n_positions": "context",
            "vocab_size": "vocabulary",
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), "dropout"),
        },
        usual={"dropout": 0.1},
        why_not=_why_no_gpt2,
        prefix="transformer.",
        outside={
            "tokens.weight": "wte.weight",
            "positions.weight": "wpe.weight",
            "norm.weight": "ln_f.weight",
            "norm.bias": "ln_f.bias",
        },
        block="h",
        layers={
            "norm1": "ln_1",
            "norm2": "ln_2",
            "qkv": "attn.c_attn",
            "projection": "attn.c_proj",
            "expand": "mlp.c_fc",
            "contract": "mlp.c_proj",
        },
        buffers=(".attn.bias", ".attn.masked_bias"),  # causal masks
        transposes=True,
    ),
    "llama": Layout(
        shape=LlamaShape,
        title="Llama",
        architecture="LlamaForCausalLM",
        config=_LlamaConfig,
        same={
            "model_type": ("llama",),
            "hidden_act": ("silu",),
            "rms_norm_eps": (1e-5,),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            # The last of them is both of the others from version 5 on.
            "rope_theta": (10000.0,),
            "rope_scaling": (None,),
            "rope_parameters": ({"rope_theta": 10000.0, "rope_type": "default"}, None),
        },
        sizes={
            "num_hidden_layers": "layers",
            "num_attention_heads": "heads",
            "num_key_value_heads": "kv_heads",
            "hidden_size": "width",
            "intermediate_size": "hidden",
            "max_position_embeddings": "context",
            "vocab_size": "vocabulary",
            "tie_word_embeddings": "tied",
            "attention_dropout": "dropout",
        },
        usual={"tied": False},
        why_not=_why_no_llama,
        prefix="model.",
        outside={
            "tokens.weight": "embed_tokens.weight",
            "norm.weight": "norm.weight",
            "head.weight": "lm_head.weight",
        },
        block="layers",
        layers={
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
            "value": "self_attn.v_proj",
            "projection": "self_attn.o_proj",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        },
        buffers=(".rotary_emb.inv_freq",),
    ),
}


class _Typed(TypedDict, total=False):
    """The family that a config.json is of; the first ones of GPT-2 do not say."""

    model_type: Scalar


def shape_of(file: Path) -> Shape:
    """Return the sizes that a config.json tells of.

    Raises:
        Missing, Unreadable: it is missing or damaged, or not of a model that ours can be.
    """
    name = schema.load(file, _Typed).get("model_type", "gpt2")
    _check(file, "model_type", name, tuple(LAYOUTS))
    layout = LAYOUTS[name]
    config = schema.load(file, layout.config)
    for name, accepted in layout.same.items():
        _check(file, name, config.get(name, accepted[0]), accepted)
    if (reason := layout.why_not(config)) is not None:
        raise Unreadable(file, f"has {reason}")
    given = {ours: config.get(theirs) for theirs, ours in layout.sizes.items()}
    known = {ours: size for ours, size in given.items() if size is not None}
    return layout.shape(**{**layout.usual, **known})


def _check(file: Path, name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if value not in accepted:
        wanted = " or ".join(map(repr, accepted))
        raise Unreadable(file, f"has {name} {repr(value)[:50]}: expected {wanted}")
