"""Name the argument of a failed call whose type is not the one that its annotation asks for.

Types are looked at only once a call has failed. A model calls these functions some hundred times
per step, and a call that succeeds pays 0.2 µs.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache, wraps
from numbers import Integral, Real
from typing import (
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from jetfire.core.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

# Words for what an annotation asks for, by the name of its type.
_NAMES = {
    "Iterable": "an iterable",
    "Tensor": "a tensor",
    "bool": "True or False",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "NoneType": "None",
    "Quantized": "a Quantized, as int8_quantize returns",
    "Quantized4": "a Quantized4, as int4_quantize returns",
}
_VALUES = (_NAMES["Quantized"], _NAMES["Quantized4"])
_SHOWN = (bool, int, float, str, type(None))
_LONGEST = 40  # characters of a value in a message


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function: where a call fails, name the first argument of a type not allowed.

    Raises:
        UsageError: instead of the error that such an argument led to.
    """

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except Exception as error:
            wrong = mistake(function, args, options)
            if wrong is None:
                if isinstance(error, TypeError) and (note := _on_values(function, args, options)):
                    error.add_note(note)
                raise
            raise UsageError(wrong) from error

    return call


def mistake(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> str | None:
    """Return one line on the first argument of another type than its annotation, or None.

    None also where the arguments do not fit the parameters: Python's own error says that.
    """
    signature, hints = _parameters(function)
    try:
        given = signature.bind(*args, **options).arguments
    except TypeError:
        return None
    for name, value in given.items():
        if name in hints and (wrong := _mistaken(name, value, hints[name])) is not None:
            return wrong
    return None


def _on_values(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> str | None:
    """Return a note on arguments that do not fit a function of quantised matrices, or None."""
    signature, hints = _parameters(function)
    values = [name for name in signature.parameters if _name(hints.get(name)) in _VALUES]
    try:
        signature.bind(*args, **options)
    except TypeError:
        if values:
            named = " and ".join(values)
            return f"{named}: codes, scales and block are one value, as int8_quantize returns"
    return None


def _mistaken(name: str, value: Any, hint: Any) -> str | None:
    """Say what is wrong with a value, or with a field of one that is a NamedTuple."""
    if not fits(value, hint):
        named = any(get_origin(choice) is Literal for choice in _choices(hint))
        return f"{name}{shown(value, named)}: expected {_described(hint)}"
    if hasattr(value, "_fields") and type(value) in _choices(hint):
        _, hints = _parameters(cast("Callable[..., Any]", type(value)))
        parts = ((f"{name}.{key}", part, hints[key]) for key, part in value._asdict().items())
        return next((wrong for part in parts if (wrong := _mistaken(*part)) is not None), None)
    return None


@cache
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return a function's signature and its parameters' annotations, without ``*`` and ``**``."""
    import torch  # the function's module may not have imported it

    signature = inspect.signature(function)
    hints = get_type_hints(function, localns={"torch": torch, "Tensor": torch.Tensor})
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in signature.parameters.items():
        if parameter.kind in several:
            hints.pop(name, None)
    return signature, hints


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; an annotation that is none is its only member."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def fits(value: Any, hint: Any) -> bool:
    """Return whether an annotation allows a value; one that is not understood allows all."""
    return any(_fits(value, choice) for choice in _choices(hint))


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if origin is tuple:
        parts = [part for part in get_args(hint) if part is not ...]
        return isinstance(value, tuple | list) and all(fits(one, parts[0]) for one in value)
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        kind: Any = Integral if hint is int else Real
        number = isinstance(value, kind) or type(value).__name__ in ("SymInt", "SymFloat")
        return number and not isinstance(value, bool)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def _described(hint: Any) -> str:
    """Return what an annotation allows, for a message."""
    return " or ".join(dict.fromkeys(_name(choice) for choice in _choices(hint)))


def _name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a tuple, each {_described(get_args(hint)[0])}"
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    return _NAMES.get(name, f"a {name}")


def shown(value: Any, named: bool = False) -> str:
    """Return a value for a message: a number or a text as it is, for anything else its type.

    Args:
        named: a name was expected; messages show names without quotes.
    """
    if isinstance(value, _SHOWN):
        text = str(value) if named and str(value).isprintable() else repr(value)
        return f"={text if len(text) <= _LONGEST else f'{text[: _LONGEST - 1]}…'}"
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f" is of type {module}{kind.__qualname__}"
