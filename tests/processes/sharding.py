"""What tests/test_sharding.py starts twice: a toy trained whole, and divided in many ways.

Arguments: the rank; a folder for the store, checkpoints and outcomes.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from jetfire.core.errors import UsageError
from jetfire.gpt2.model import tensors
from jetfire.gpt2.model.gpt2 import GPT2, Shape
from jetfire.gpt2.training import parallel, settings
from jetfire.nn import (
    AdamW,
    Int8Block,
    Int8Conv1D,
    Int8Linear,
    Stream,
    convert,
    gather_codes,
    gathered,
    linear,
    watch,
)
from jetfire.nn.gathered import CodedShard, GatheredWeight
from jetfire.nn.products import own_part
from jetfire.ops import int8_quantize
from jetfire.tests.processes.leaving import leave

RANK, HOME = int(sys.argv[1]), Path(sys.argv[2])
WORLD, WIDTH, STEPS = 2, 64, 3
OUTCOMES: dict[str, Any] = {}


class Toy(nn.Module):
    """Two layers beside the stream, and `transformers`' kind: of each, shards hold whole blocks."""

    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        weight, bias = torch.randn((WIDTH, WIDTH)) / 8, torch.zeros(WIDTH)
        self.last = Int8Conv1D(nn.Parameter(weight), nn.Parameter(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x + self.down(nn.functional.gelu(self.up(x)))))


def toy(seed: int = 0, recipe: str = "int8-block32", hidden: int = 4 * WIDTH) -> Toy:
    torch.manual_seed(seed)
    model = Toy(hidden)
    convert(model, recipe)
    return model


class Layers(nn.Module):
    """A fused Llama of `transformers` without its embeddings: shards hold whole blocks."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=32,
        )
        llama = LlamaModel(config)
        self.layers, self.norm, self.rotary = llama.layers, llama.norm, llama.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x, position_embeddings=angles, attention_mask=None)
        return self.norm(x)


def llama() -> Layers:
    torch.manual_seed(0)
    model = Layers()
    assert len(convert(model, "int8-block32", fused=True).fused) == 2
    return model


def batch(rank: int, step: int, micro: int = 0) -> torch.Tensor:
    """Two sequences of whole blocks: the codes of a rank's tokens depend on no other's."""
    torch.manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn((2, 32, WIDTH))


def loss_of(model: Callable, rank: int, step: int, micro: int = 0) -> torch.Tensor:
    x = batch(rank, step, micro)  # after which rounding's numbers are those of this batch
    return (model(x).float() - x.flip(-1)).square().mean()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: tensors.whole(p.detach()).clone() for n, p in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: tensors.whole(p.grad).clone() for n, p in model.named_parameters()}


# --- in one process -----------------------------------------------------------------------------


def alone(
    make: Callable,
    micros: int = 1,
    clip: float = 0.0,
    ranks: Sequence[int] = range(WORLD),
    hidden: int = 4 * WIDTH,
    model: nn.Module | None = None,
) -> dict:
    """Steps of the mean of ranks' gradients, each rank's summed by itself."""
    model = toy(hidden=hidden) if model is None else model
    optimizer, losses, first = make(model), [], None
    for step in range(STEPS):
        gradients, row = [], []
        for rank in ranks:
            model.zero_grad()
            for micro in range(micros):
                loss = loss_of(model, rank, step, micro)
                loss.backward()
                row.append(float(loss.detach()))
            gradients.append([p.grad for p in model.parameters()])
        for p, *parts in zip(model.parameters(), *gradients, strict=True):
            p.grad = sum(parts) / len(parts)
        first = first or gradients_of(model)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(row)
    return {"losses": losses, "gradients": first, "parameters": whole(model)}


# --- FSDP2 --------------------------------------------------------------------------------------


class Gathered(TorchDispatchMode):
    """Counts the bytes that this process sends to be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func.namespace == "c10d" and "allgather_base" in func.name():
            self.bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def sharded(model: nn.Module, codes: bool = True, mesh=None, **options) -> nn.Module:
    if codes:
        gather_codes(model)
    mesh = init_device_mesh("cpu", (WORLD,)) if mesh is None else mesh
    for part in model.layers if isinstance(model, Layers) else (model.up, model.down):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def together(
    model: nn.Module, make: Callable, micros: int = 1, clip: float = 0.0, of: int = RANK
) -> dict:
    """Steps on the batches of this rank, or of another."""
    optimizer, losses, first = make(model), [], None
    for step in range(STEPS):
        optimizer.zero_grad()
        row = []
        for micro in range(micros):
            if micros > 1:
                model.set_requires_gradient_sync(micro == micros - 1)
            loss = loss_of(model, of, step, micro)
            loss.backward()
            row.append(float(loss.detach()))
        first = first or gradients_of(model)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(row)
    return {"losses": losses, "gradients": first, "parameters": whole(model)}


def optimizer(kind: str = "default") -> Callable:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "ours":
            return AdamW(model.parameters(), 1e-2, model=model)
        if kind == "ours8":  # without layers in INT8, as sharded ones: what is small is torch's
            return AdamW(model.parameters(), 1e-2, model=nn.Module(), bits=8)
        options = {} if kind == "default" else {kind: True}
        return torch.optim.AdamW(model.parameters(), 1e-2, **options)

    return make


def fsdp() -> None:
    OUTCOMES["alone"] = alone(optimizer())
    OUTCOMES["alone-fused"] = alone(optimizer("fused"))
    OUTCOMES["alone-micros"] = alone(optimizer(), micros=2)
    OUTCOMES["alone-clipped"] = alone(optimizer("foreach"), clip=0.5)
    OUTCOMES["codes"] = together(sharded(toy()), optimizer())
    OUTCOMES["kept"] = together(sharded(toy(), reshard_after_forward=False), optimizer("fused"))
    OUTCOMES["ours"] = together(sharded(toy()), optimizer("ours"))
    OUTCOMES["alone-ours8"] = alone(optimizer("ours8"))
    OUTCOMES["ours8"] = together(sharded(toy()), optimizer("ours8"))
    OUTCOMES["micros"] = together(sharded(toy()), optimizer(), micros=2)
    OUTCOMES["clipped"] = together(sharded(toy()), optimizer("foreach"), clip=0.5)
    offload = CPUOffloadPolicy(pin_memory=False)
    OUTCOMES["offload"] = together(sharded(toy(), offload_policy=offload), optimizer())
    OUTCOMES["alone-blocks"] = alone(optimizer(), model=llama())
    OUTCOMES["blocks"] = together(sharded(llama()), optimizer())


def bf16() -> None:
    """Forward of one process with what FSDP2 casts in BF16, and weights quantised from fp32."""
    model = toy()
    codes = ("up.weight", "down.weight", "last.weight")
    cast = {n: p if n in codes else p.bfloat16() for n, p in model.named_parameters()}

    def in_bf16(x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, cast, (x.bfloat16(),))

    OUTCOMES["bf16-alone"] = float(loss_of(in_bf16, RANK, 0).detach())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    OUTCOMES["bf16"] = together(sharded(toy(), mp_policy=policy), optimizer())
    OUTCOMES["bf16-micros"] = together(sharded(toy(), mp_policy=policy), optimizer(), micros=2)


def bytes_gathered() -> None:
    found = {}
    for codes in (True, False):
        model = sharded(toy(), codes)
        with Gathered() as gathered:
            loss_of(model, RANK, 0).backward()
        found[codes] = gathered.bytes
    OUTCOMES["bytes"] = found


def evaluation() -> None:
    """Before training without gradients, between steps in inference mode; and in that alone."""
    model = sharded(toy())
    with torch.no_grad():
        before = float(loss_of(model, RANK, 0))
    model.reshard()
    trained = together(model, optimizer())
    with torch.inference_mode():
        after = float(loss_of(model, RANK, 0))
    model.reshard()
    again = loss_of(model, RANK, 0)
    again.backward()
    alone, found = sharded(toy()), []
    for _ in range(2):
        with torch.inference_mode():
            found.append(float(loss_of(alone, RANK, 0)))
        alone.reshard()
    OUTCOMES["evaluation"] = {
        "first": [before, *found, trained["losses"][0][0]],
        "last": [after, float(again.detach())],
    }


class Called(TorchDispatchMode):
    """Counts calls of Jetfire's operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func.namespace == "jetfire":
            self.counts[func._schema.name.removeprefix("jetfire::")] += 1
        return func(*args, **(kwargs or {}))


def transposes() -> None:
    """How many products transpose a weight in forward, and in backward."""
    model = sharded(toy())
    with Called() as forward:
        loss = loss_of(model, RANK, 0)
    with Called() as backward:
        loss.backward()
    OUTCOMES["transposes"] = [
        sum(count for name, count in called.counts.items() if "transpose" in name)
        for called in (forward, backward)
    ]


def quantised() -> None:
    """How many shards are quantised per step, of one micro-batch and of two."""
    shards: list[torch.Tensor] = []
    usual = gathered.int8_quantize

    def counting(rows: torch.Tensor, **options: Any) -> Any:
        shards.append(rows)
        return usual(rows, **options)

    gathered.int8_quantize = counting
    found = OUTCOMES["quantised"] = {}
    for micros in (1, 2):
        shards.clear()
        together(sharded(toy()), optimizer(), micros=micros)
        found[micros] = len(shards) / STEPS
    gathered.int8_quantize = usual


def changes(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Ways to change a weight, whose shard is a DTensor's."""
    weight = model.up.weight
    stepped = optimizer("fused")(model)
    weight.grad = torch.ones_like(weight)
    halved = {name: tensor / 2 for name, tensor in model.state_dict().items()}
    return {
        "nothing": lambda: None,
        "a step": stepped.step,
        "load_state_dict": lambda: model.load_state_dict(halved),
        "in place": weight.neg_,
        "several at once": lambda: torch._foreach_add_([weight], 1.0),
        "the process's part": lambda: own_part(weight).mul_(RANK + 2),
        "a state dict's tensor": lambda: model.state_dict()["up.weight"].add_(1.0),
        "its part": lambda: own_part(model.state_dict()["up.weight"]).add_(1.0),
        "a collective": lambda: dist.broadcast(own_part(weight), 0),
    }


def renewed() -> None:
    """Whether a weight's codes differ after a change, and are those of the weight as it is then."""
    model = sharded(toy())
    loss_of(model, RANK, 0).backward()  # there are codes
    model.zero_grad()
    OUTCOMES["renewed"] = {}

    def codes() -> tuple[torch.Tensor, ...]:
        model.up.unshard()
        found = tuple(part.clone() for part in model.up.weight.codes.tensors)
        model.up.reshard()
        return found

    for name, change in changes(model).items():
        before = codes()
        with torch.no_grad():
            change()
        after, expected = codes(), int8_quantize(tensors.whole(model.up.weight.detach())).tensors
        OUTCOMES["renewed"][name] = (
            not all(map(torch.equal, before, after)),
            all(map(torch.equal, after, expected)),
        )


def watched() -> None:
    """What is divided over processes is passed over."""
    model = sharded(toy())
    with watch(model) as seen:
        loss_of(model, RANK, 0).backward()
    OUTCOMES["watched"] = [len(seen.weight), len(seen.input)]


def memory() -> None:
    """Whether a layer's gathered codes are there: in its forward, after it, in its backward."""
    model, seen = sharded(toy()), {}
    held: list[GatheredWeight] = []
    quantised = linear.quantised_gradient

    def there() -> bool:
        return all(t.untyped_storage().size() == t.nbytes for t in held[0].codes.tensors)

    def forward(module: nn.Module, *_: Any) -> None:
        held.append(module.weight)
        seen["forward"] = there()

    def backward(*args: Any) -> Any:  # of `last`, of `down`, at last of `up`
        seen["backward"] = there()
        return quantised(*args)

    model.up.register_forward_pre_hook(forward)
    model.down.register_forward_pre_hook(lambda *_: seen.update(between=there()))
    linear.quantised_gradient = backward
    loss_of(model, RANK, 0).backward()
    linear.quantised_gradient = quantised
    seen["after"] = there()
    OUTCOMES["memory"] = {**seen, "kind": type(held[0]).__name__}


def checkpoints() -> None:
    """To a model that knows no codes, which the parent loads, and from one."""
    model = sharded(toy())
    together(model, optimizer())
    dcp.save({"model": model.state_dict()}, checkpoint_id=HOME / "sharded")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    saved = HOME / f"state-{RANK}.pt"
    torch.save(model.state_dict(), saved)
    again = torch.load(saved, weights_only=True)
    local = again["up.weight"].to_local()
    OUTCOMES["checkpoint"] = {
        "whole": whole(model),
        "full": {name: (type(t).__name__, t) for name, t in full.items()},
        "loaded": (type(local).__name__, torch.equal(local, own_part(model.up.weight))),
    }
    from_meta(model)
    plain = toy(seed=5, recipe="bf16")
    dcp.save({"model": plain.state_dict()}, checkpoint_id=HOME / "plain")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=HOME / "plain")
    model.load_state_dict(state["model"])
    OUTCOMES["from-plain"] = {
        "expected": plain.state_dict(),
        "found": whole(model),
        "kind": type(own_part(model.up.weight)).__name__,
        "loss": float(loss_of(model, RANK, 0).detach()),
        "loss-alone": float(loss_of(toy(seed=5), RANK, 0).detach()),
    }


def from_meta(of: nn.Module) -> None:
    """A model that had no memory is given another's shards."""
    with torch.device("meta"):
        model = sharded(toy())
    shards = {n: tensors.as_sharded(tensors.whole(p), p) for n, p in of.state_dict().items()}
    model.load_state_dict(shards, assign=True)
    found = []
    for one in (of, model):
        with Gathered() as gathered:
            loss = loss_of(one, RANK, 0)
        found.append((float(loss.detach()), gathered.bytes))
    OUTCOMES["assigned"] = found


def gpt2() -> None:
    """As jetfire-train shards it: what it embeds by is gathered as it is."""
    how = settings.make("tiny", {"recipe": "int8-block32", "parallel": "fsdp"})
    shape = Shape(layers=2, heads=2, width=WIDTH, context=32, vocabulary=61)
    losses = []
    for spread in (False, True):
        torch.manual_seed(2)
        model = GPT2(shape, "int8-block32")
        if spread:
            group = parallel.Group(RANK, WORLD, dist.group.WORLD)
            parallel.spread(model, how, group, torch.device("cpu"))
        torch.manual_seed(RANK)
        ids = torch.randint(shape.vocabulary, (2, 33))
        losses.append(float(model(ids[:, :-1], ids[:, 1:]).detach()))
    coded = [n for n, p in model.named_parameters() if type(own_part(p)) is CodedShard]
    OUTCOMES["gpt2"] = {"losses": losses, "coded": coded}


# --- tensor parallelism -------------------------------------------------------------------------


def divided(model: nn.Module, mesh=None) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,)) if mesh is None else mesh
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel() -> None:
    """All processes train on the same tokens. Of 96 hidden features, shards cut a block."""
    for name, hidden in (("tp", 4 * WIDTH), ("tp-cut", 96)):
        OUTCOMES[name] = together(divided(toy(hidden=hidden)), optimizer(), of=0)
        OUTCOMES[f"{name}-alone"] = alone(optimizer(), ranks=(0,), hidden=hidden)
    model, x = divided(toy()), batch(0, 0)
    found = {"compiled": (torch.compile(model, backend="aot_eager")(x), model(x))}
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = (model(x), toy()(x))
    found["sequence"] = sequence_parallel(x)
    OUTCOMES["tp-outputs"] = {n: tuple(y.detach() for y in pair) for n, pair in found.items()}


def sequence_parallel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process's tokens of two layers, which it alone gives and gets, and of one's."""
    alone, parted = (nn.Sequential(model.up, model.down) for model in (toy(), toy()))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(1)),
        "1": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(parted, init_device_mesh("cpu", (WORLD,)), plan)
    own = slice(RANK * 16, RANK * 16 + 16)
    return parted(x[:, own]).clone(), alone(x)[:, own]  # a clone waits for the others' part


def two_dimensions() -> None:
    """FSDP2 over what tensor parallelism divided, here by one."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("data", "tensor"))
    model = sharded(divided(toy(), mesh["tensor"]), mesh=mesh["data"])
    OUTCOMES["2d-kinds"] = [type(own_part(p)).__name__ for p in model.parameters()]
    OUTCOMES["2d"] = together(model, optimizer())


def refused() -> None:
    """In a line that is the same in every process."""
    said = OUTCOMES["refused"] = {}

    def refuse(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except UsageError as error:
            said[name] = str(error)

    by_columns = sharded(toy(), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    refuse("columns", lambda: by_columns(batch(0, 0)))
    int4 = divided(toy(recipe="int4-naive"))
    refuse("int4", lambda: int4(batch(0, 0)))
    block = Int8Block(WIDTH, 2)
    mesh = init_device_mesh("cpu", (WORLD,))
    parallelize_module(block, mesh, {"qkv": ColwiseParallel()})
    stream = Stream.of(batch(0, 0).flatten(0, 1).bfloat16(), 32)
    refuse("block", lambda: block(stream, 2))
    layer = Int8Linear(WIDTH, WIDTH)
    distribute_module(layer, mesh)
    refuse("replicated", lambda: layer(batch(0, 0)))
    layer = Int8Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    refuse("plain", lambda: layer(batch(0, 0)))


torch.set_num_threads(1)
store = dist.FileStore(str(HOME / "store"), WORLD)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)
for part in (
    fsdp,
    bf16,
    bytes_gathered,
    evaluation,
    memory,
    transposes,
    quantised,
    renewed,
    watched,
    checkpoints,
    gpt2,
    tensor_parallel,
    two_dimensions,
    refused,
):
    part()
torch.save(OUTCOMES, HOME / f"{RANK}.pt")
leave()
