"""Options of a command that a TOML file says: `--options FILE.toml`.

A file may be a stranger's: nothing in it is run, and one that would name code to load is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from jetfire.core.errors import UsageError, unknown
from jetfire.core.problem import value_text

MOST_KEYS, MOST_BYTES = 100, 1 << 16
# How a command speaks is said where it is called.
ELSEWHERE = ("json", "quiet", "verbose", "options", "debug", "version", "load")

_CODE = "no file says what code is run"
_FUNCTION = re.compile(r"(?!hf:)[^/]*:[^/]*")  # MODULE:FUNCTION, which is imported and called


def read(file: Path) -> dict[str, Any]:
    """Return a file's values by key: text, numbers, booleans, lists and tables of these.

    Raises:
        Unreadable: it cannot be read, or holds anything else.
    """
    from jetfire.core import schema

    kind = Annotated[dict[schema.Line, schema.Plain], schema.most(MOST_KEYS)]
    return schema.load_toml(file, kind, MOST_BYTES)


def keys(params: list[Any]) -> dict[str, Any]:
    """Return a command's parameters by the keys that stand for them.

    An option's is its long name, and that of a word without a flag what the usage calls it.
    """
    found = {}
    for param in params:
        long = [name[2:] for name in param.opts if name.startswith("--")]
        name = long[0] if long else re.findall("[a-z]+", str(param.metavar).lower())[0]
        if name not in ELSEWHERE:
            found[name] = param
    return found


def words(
    file: Path, table: Mapping[str, Any], params: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the words, by key, that say what a table does, without those given anyway.

    Args:
        table: as `read` returns it.
        params: as `keys` returns them.
        given: by a parameter's name what the command line says of it.

    Raises:
        UsageError: a key is not known, or its value is of a wrong type.
    """
    found = {}
    for key, value in _unsaid(table, params, given).items():
        if key == "load":
            raise UsageError(f"{file}: load: {_CODE}: expected --load FILE.py")
        if key in ELSEWHERE:
            raise UsageError(f"{file}: {key}: expected --{key} on the command line")
        if key not in params:
            raise unknown(f"{file}: no option {key!r}", key, params or ["an empty file"])
        found[key] = _words(f"{file}: {key}={value!r}", key, value, params[key], given)
    return found


def _unsaid(
    table: Mapping[str, Any], params: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a table without what the command line says of the same settings by other names.

    `--seed 1` and `--set seed=1` say the same.
    """
    fields = _fields(given.get(params["set"].name)) if "set" in params else []
    found = {key: value for key, value in table.items() if key not in fields}
    if isinstance(values := found.get("set"), dict):
        options = {key for key, param in params.items() if param.name in given}
        found["set"] = {name: value for name, value in values.items() if name not in options}
    return found


def _fields(texts: Sequence[str] | None) -> list[str]:
    """Return the names in an option's ``FIELD=VALUE,...``."""
    return re.findall("(?:^|,)([^,=]+)=", ",".join(texts or ()))


def _words(where: str, key: str, value: Any, param: Any, given: Mapping[str, Any]) -> list[str]:
    """Return what a key's value is on the command line; nothing where that says it anyway.

    Args:
        where: the beginning of an error.
    """
    is_given, option = param.name in given, param.param_type_name == "option"
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise UsageError(f"{where}: expected true or false")
        words = [f"--{key}"] if value else list(param.secondary_opts[:1])
        return [] if is_given else words
    if "=V" in str(param.metavar):  # of FIELD=VALUE the command line may say some
        if not isinstance(value, dict):
            raise UsageError(f"{where}: expected a table of names and values")
        fields = {name: ",".join(_texts(where, entry)) for name, entry in value.items()}
        said = _fields(given.get(param.name))
        return [f"--{key}={name}={text}" for name, text in fields.items() if name not in said]
    several = param.multiple if option else param.nargs == -1
    if isinstance(value, list) and not several:
        raise UsageError(f"{where}: expected one value")
    texts = _texts(where, value)
    if not option and any(map(_FUNCTION.fullmatch, texts)):
        raise UsageError(f"{where}: {_CODE}: expected it on the command line")
    words = [f"--{key}={text}" for text in texts] if option else texts
    return [] if is_given else words


def _texts(where: str, value: Any) -> list[str]:
    """Return a value, or each of a list, as a word."""
    parts = value if isinstance(value, list) else [value]
    if any(isinstance(part, dict | list) for part in parts):
        raise UsageError(f"{where}: expected text, a number or a list of these")
    return list(map(value_text, parts))
