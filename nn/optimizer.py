"""AdamW that leaves INT8 layers the codes of their new weights: the next forward quantises nothing.

torch's fused update and then quantisation move a weight of fp32 through memory three times; one
kernel that does both moves 30 bytes per element where they move 38. Without codes it moves 28 where
torch's, with a `grad_scale`, moves 32: that one writes the gradient back. With moments in 8 bits it
moves 18, and 2.06 bytes are kept per element where fp32's moments take 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import ParamsT, register_optimizer_step_post_hook

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.problem import Block, Rounding
from jetfire.core.tensors import Quantized
from jetfire.nn import moments
from jetfire.nn.linear import quantised_weights
from jetfire.nn.made import Stamp, stamp, weights_changed
from jetfire.nn.products import QuantisedWeight, is_dtensor, own_part
from jetfire.nn.streams import branches
from jetfire.ops import int8_adamw, int8_adamw8

_REFUSED = ("amsgrad", "maximize", "foreach", "differentiable")
_LANES = 3  # weights that are updated beside each other, so that one's end overlaps the next
# Without codes a matrix is updated here where this is faster. On a CPU of two cores ours takes 2.6
# times as long as torch's (`jetfire bench adamw --m 4096 --n 1024 --set layout=none --set
# guarded=true --device cpu`).
_FASTER_ON = ("cuda",)
# The fewest numbers: each takes a launch of its own, where torch's of many small ones is few.
_LEAST = 2**18
_TILE = (16, 128)  # of a matrix with fewer rows or columns most of such a tile would be empty


@dataclass(eq=False)
class _Weight:
    """An INT8 layer's weight.

    Attributes:
        codes: what every update writes into, so that a CUDA graph finds them where they were.
        stamp: the weight's when they were made.
    """

    weight: nn.Parameter
    cache: QuantisedWeight
    block: Block
    codes: Quantized | None = None
    stamp: Stamp | None = None

    def room(self) -> Quantized | None:
        """Return what to write codes into: the layer's own at first, so that there is one copy.

        None where they are of another shape, block or device than the weight has now.
        """
        found = self.codes or self.cache.latest
        fits = (
            found is not None
            and found.q is not None
            and found.q.shape == self.weight.shape
            and found.block == self.block
            and found.q.device == self.weight.device
        )
        return found if fits else None

    def written(self, codes: Quantized) -> None:
        self.codes, self.stamp = codes, stamp(self.weight)

    def leave(self) -> None:
        """Give the layer the codes, as those of the weight when they were made."""
        assert self.codes is not None
        assert self.stamp is not None
        self.cache.put(self.weight, self.block, self.codes, self.stamp)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, fused, whose step also quantises the weights of a model's INT8 layers.

    With 32 bits state and state dict are those of torch's, either loads the other's. On a GPU large
    parameters of two dimensions and more in fp32 are updated by the same kernel, without codes.
    What is sharded, small or not fp32 is updated by torch. `grad_scale` and `found_inf`, where they
    are set, have the fused update's meaning; but torch's update also overwrites a gradient with the
    unscaled one, which ours leaves as it is. `torch.compile` runs a step as it is.

    With 8 bits the moments of fp32 parameters of two dimensions and more are INT8 codes
    (`jetfire.reference.adamw8`), where a row has 128 numbers and the whole 4096 at least. Those of
    all others, a thousandth of GPT-2, are torch's. Of a DTensor each process keeps the codes of
    its rows, which are those of one process; one that is divided otherwise is torch's. A state
    dict, ours or torch's, loads in whatever bits it was kept, and is then kept in these. Into
    torch's AdamW one of 8 bits must not be loaded: it takes the codes for moments, without a word.

    Parameters in bf16 are torch's, which rounds them to nearest: an update below half of the last
    place, a 256th of a weight and more, is lost. With `rounding="stochastic"` those whose moments
    are codes are rounded so that it is made in the mean, and need no copy in fp32. The bits are
    drawn by `seed`, the parameter's number among all and its count of steps: a run that goes on
    draws what it would have drawn, and processes with the same parameters draw the same.

    Args:
        model: what has the INT8 layers.
        bits: 32 or 8; rounding: `nearest` or `stochastic`; a group of parameters may have its own.
        seed: of what is drawn.
    """

    @checked
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        model: nn.Module,
        bits: Literal[8, 32] = 32,
        rounding: Rounding = "nearest",
        seed: int = 0,
        capturable: bool = False,
        **refused: Any,
    ) -> None:
        for name in refused:
            if name not in _REFUSED:
                raise TypeError(f"AdamW() got an unexpected keyword argument {name!r}")
        self._bits, self._rounding, self._seed = bits, rounding, index(seed)
        self._keys: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}
        super().__init__(
            params, lr, betas, eps, weight_decay, capturable=capturable, fused=True, **refused
        )
        self._int8 = {p: _Weight(p, *rest) for p, rest in quantised_weights(model).items()}
        self._updated: list[_Weight] = []  # by the step that runs
        self._last: list[_Weight] = []  # by the one before

    def __getstate__(self) -> dict[str, Any]:
        own = {"_bits": self._bits, "_rounding": self._rounding, "_seed": self._seed}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy or what was pickled knows no model, and so writes no codes of weights. torch calls
        # this with the groups and the state alone, too, which it has loaded.
        empty: dict[str, Any] = {"_int8": {}, "_updated": [], "_last": [], "_keys": {}}
        for name, value in empty.items():
            self.__dict__.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add as torch does; amsgrad, maximize, foreach and differentiable are refused."""
        own = {"bits": self._bits, "rounding": self._rounding}
        super().add_param_group({**own, **param_group})
        group = self.param_groups[-1]
        expect.choice("bits", group["bits"], Literal[8, 32])
        expect.choice("rounding", group["rounding"], Rounding)
        for name in _REFUSED:
            if group[name]:
                raise UsageError(f"{name}={group[name]}: expected False, or torch.optim.AdamW")
        if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
            raise UsageError("betas are tensors: expected numbers, or torch.optim.AdamW")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load that of this or any `torch.optim.AdamW` without amsgrad and maximize."""
        for group in state_dict["param_groups"]:
            for name in ("amsgrad", "maximize"):
                if group.get(name):
                    raise UsageError(f"state of {name}=True: expected False, or torch.optim.AdamW")
        # Which implementation wrote it is no matter: counts belong where the fused one reads them.
        own = {"fused": True, "foreach": None, "differentiable": False}
        own["capturable"] = self.defaults["capturable"]
        groups = [
            {**group, **own, **{name: mine[name] for name in ("bits", "rounding")}}
            for group, mine in zip(state_dict["param_groups"], self.param_groups, strict=False)
        ]
        groups += state_dict["param_groups"][len(groups) :]  # more than there are: torch says so
        super().load_state_dict({**state_dict, "param_groups": groups})
        for state, given in moments.loaded(self, state_dict):  # torch loads all as bf16
            there = {name: state[name].device for name in given if name != "step"}
            state.update({n: given[n].to(device, copy=True) for n, device in there.items()})
        moments.fit(self)

    # `torch.compile` calls `_init_group` while it traces a step, and once more when that runs.
    step = torch.compiler.disable(torch.optim.AdamW.step)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Collect a group's tensors for torch's update, less those that are updated here."""
        in_codes = [p for p in group["params"] if self._in_codes(group, p)]
        rest = set(group["params"]).difference(in_codes)
        left = {**group, "params": [p for p in group["params"] if p in rest]}
        found = super()._init_group(left, *lists)
        params, grads, exp_avgs, exp_avg_sqs, _, steps = lists
        rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True))
        ours = [row for row in rows if self._takes(*row)]
        if ours:
            mine = {row[0] for row in ours}
            others = [row for row in rows if row[0] not in mine]
            for i, column in enumerate((params, grads, exp_avgs, exp_avg_sqs, steps)):
                column[:] = [row[i] for row in others]
        ours += [(p, *moments.row(p, self.state[p])) for p in in_codes]
        if ours:
            self._update(group, ours)
        _have_own_parts(params, grads, exp_avgs, exp_avg_sqs)
        return found

    def _takes(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        step: torch.Tensor,
    ) -> bool:
        """Return whether a parameter with moments in fp32 is updated here.

        The op takes fp32 matrices, all but grad contiguous.
        """
        whole = (param, exp_avg, exp_avg_sq)
        return (
            (param in self._int8 or _in_tiles(param, grad) is not None)
            and all(
                x.dtype == torch.float32 and x.device == param.device for x in (*whole, grad, step)
            )
            and param.dim() >= 2
            and param.numel() > 0
            and all(x.is_contiguous() for x in whole)
            and grad.layout == torch.strided
            and (grad.is_contiguous() or (grad.dim() == 2 and grad.stride(1) == 1))
        )

    def _in_codes(self, group: dict[str, Any], param: torch.Tensor) -> bool:
        """Return whether a parameter is updated now, and its moments are codes."""
        if param.grad is None or param.grad.layout != torch.strided:
            return False
        state = self.state[param]
        if not state and group["bits"] == 8:
            state.update(moments.zeros(param, group["rounding"] == "stochastic") or {})
        return moments.SCALES[0] in state

    def _update(self, group: dict[str, Any], rows: Sequence[tuple[Any, ...]]) -> None:
        """Make a step of some parameters: each with gradient, what is kept of it, and its count."""
        steps = [row[-1] for row in rows]
        torch._foreach_add_(steps, 1)
        devices = dict.fromkeys(row[0].device for row in rows)
        scalars = {device: self._scalars(group, device) for device in devices}
        shared = dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        shared |= {"eps": group["eps"], "decay": group["weight_decay"]}
        seeds = self._seeds([(row[0], row[-1]) for row in rows if row[0].dtype != torch.float32])
        with ExitStack() as stack:
            lanes = {device: stack.enter_context(branches(device, _LANES)) for device in scalars}
            for i, (param, *state, step) in enumerate(rows):
                mine, lane = self._int8.get(param), lanes[param.device][i % _LANES]
                room = mine.room() if mine else None
                # Codes that are made here for the first time must belong to the current stream.
                with nullcontext() if mine and room is None else lane:
                    options = {**shared, **scalars[param.device], "step": step}
                    if param in seeds:
                        options["seed"] = seeds[param]
                    codes = _stepped(mine, room, param, state, **options)
                if mine:
                    assert codes is not None
                    mine.written(codes)
                    self._updated.append(mine)
        if all("found_inf" in of for of in scalars.values()):
            failed = {device: (of["found_inf"] != 0).float() for device, of in scalars.items()}
            torch._foreach_sub_(steps, [failed[row[0].device] for row in rows])

    def _seeds(
        self, counted: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Return a seed for each parameter in bf16, of its count of steps, all on its device."""
        if not counted:
            return {}
        every = (param for group in self.param_groups for param in group["params"])
        numbers = {param: number for number, param in enumerate(every)}
        found: dict[torch.Tensor, torch.Tensor] = {}
        for device in dict.fromkeys(param.device for param, _ in counted):
            here = [pair for pair in counted if pair[0].device == device]
            own = tuple(numbers[param] for param, _ in here)
            if (device, own) not in self._keys:  # a graph may not copy them from the host
                high = [(self._seed * 1_000_003 + number) % 2**31 << 32 for number in own]
                self._keys[device, own] = torch.tensor(high, dtype=torch.int64, device=device)
            keys = torch.stack([step for _, step in here]).long() + self._keys[device, own]
            found |= {param: keys[i : i + 1] for i, (param, _) in enumerate(here)}
        return found

    def _scalars(self, group: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
        """Return rate and, where one is set, both guards on a device, without waiting for it."""

        def there(x: Any) -> torch.Tensor:
            if isinstance(x, torch.Tensor):
                return x.to(device, torch.float32, non_blocking=True)
            return torch.full((), float(x), dtype=torch.float32, device=device)

        found = {"rate": there(group["lr"])}
        guards = {"grad_scale": 1.0, "found_inf": 0.0}
        given = {name: getattr(self, name, None) for name in guards}
        if any(guard is not None for guard in given.values()):
            found |= {n: there(guards[n] if x is None else x) for n, x in given.items()}
        return found

    def _leave_codes(self) -> None:
        """Leave codes with all that the step updated."""
        self._last, self._updated = self._updated, []
        for mine in self._last:
            mine.leave()


def _stepped(
    mine: _Weight | None,
    room: Quantized | None,
    param: torch.Tensor,
    state: Sequence[torch.Tensor],
    **options: Any,
) -> Quantized | None:
    """Make a parameter's step, with moments as they are kept; return an INT8 weight's codes."""
    where: dict[str, Any] = {"layout": "none"}
    if mine is not None:
        where = {"block": mine.block, "out": room}
    if len(state) > 3:
        return int8_adamw8(*map(moments.matrix, (param, *state)), **where, **options)
    given = (param, *state)
    if mine is None and (shape := _in_tiles(param, state[0])) is not None:
        given = tuple(tensor.view(shape) for tensor in given)
    return int8_adamw(*given, **where, **options)


def _in_tiles(param: torch.Tensor, grad: torch.Tensor) -> tuple[int, int] | None:
    """Return the shape in which a parameter without codes is updated here; None where torch's.

    An update is of each number alone, so a matrix too thin for a tile is viewed as a wider one.
    """
    plain = type(param) in (torch.Tensor, nn.Parameter) and param.device.type in _FASTER_ON
    if not plain or param.dim() < 2 or param.numel() < _LEAST:
        return None
    rows, columns = param.shape[0], param.numel() // param.shape[0]
    if rows >= _TILE[0] and columns >= _TILE[1]:
        return rows, columns
    if param.numel() % _TILE[1] == 0 and grad.is_contiguous():
        return param.numel() // _TILE[1], _TILE[1]
    return None


def _have_own_parts(*columns: list[torch.Tensor]) -> None:
    """Put this process's parts in the place of rows of DTensors that are divided alike.

    An update needs no more. One of DTensors took the host 30 ms for the 292 parameters of GPT-2
    350M (beside an H100, with a profiler running).
    """
    for i, row in enumerate(zip(*columns, strict=True)):
        placed = [(t.device_mesh, t.placements) for t in row if is_dtensor(t)]
        if len(placed) == len(row) and all(other == placed[0] for other in placed):
            for column, tensor in zip(columns, row, strict=True):
                column[i] = own_part(tensor)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if isinstance(optimizer, AdamW):
        optimizer._leave_codes()


# Registered after that of `products`, which has every code made anew: hooks run in that order.
register_optimizer_step_post_hook(_after_step)


@contextmanager
def replaying(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Enclose the replay of a CUDA graph of a training step, the last that the optimizer ran.

    The graph reads codes of the weights where they were captured, and renews them: they are made
    anew before it if someone else has changed the weights, and serve whoever reads them after it.
    """
    weights = optimizer._last if isinstance(optimizer, AdamW) else []
    with torch.no_grad():
        for mine in weights:
            found = mine.cache.of(mine.weight, mine.block)
            assert mine.codes is not None
            if found is not mine.codes:
                for to, source in zip(mine.codes.tensors, found.tensors, strict=True):
                    to.copy_(source)
    try:
        yield
    finally:
        weights_changed()  # a replay that was interrupted may have changed them all the same
    for mine in weights:
        assert mine.codes is not None
        mine.written(mine.codes)
        mine.leave()
