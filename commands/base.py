"""The kinds of commands, and how a module becomes one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from jetfire.commands import option_files
from jetfire.commands import options as o
from jetfire.core import terminal
from jetfire.core.errors import UsageError, nearest, unknown

RUN = "run"  # the module, and so the command, of what a group does without a verb
FILE = "jetfire.options"  # in a context: the file of options, and its keys


@cache
def _of_every_command() -> list[Any]:
    """Return the parameters that all commands have, as Typer makes them."""
    app = typer.Typer(add_completion=False)
    app.command()(o.every_command)
    return typer.main.get_command(app).params


class Command(TyperCommand):
    """A command with the options of all, some of them from a file where one is named.

    It refuses empty words, and says so where an option's last word alone counts.
    """

    def __init__(self, *args: Any, params: Any = None, **more: Any) -> None:
        super().__init__(*args, params=[*(params or ()), *_of_every_command()], **more)

    def table(self, file: Path) -> dict[str, Any]:
        """Return what a file says of the command's options, by key."""
        return option_files.read(file)

    def _from_file(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the words that a file stands for, if `--options` names one."""
        found: Any = self.make_parser(ctx).parse_args(args=list(args))
        values, _, order = found
        if not (name := values.get("options")):
            return []
        given = {one.name: values[one.name] for one in order if _is_given(one, values)}
        file, params = Path(name), option_files.keys(self.params)
        words = option_files.words(file, self.table(file), params, given)
        ctx.meta[FILE] = file, list(words)
        said = list(chain(*words.values()))
        terminal.decision(f"{file}: {shlex.join(said)}")
        return said

    def invoke(self, ctx: Any) -> Any:
        with _naming_the_file(ctx):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # nothing is run: words are being completed
            return super().parse_args(ctx, args)
        args = [*self._from_file(ctx, args), *args]
        with _naming_the_file(ctx):
            return self._parsed(ctx, args)

    def _parsed(self, ctx: Any, args: list[str]) -> list[str]:
        found: Any = self.make_parser(ctx).parse_args(args=list(args))
        values, _, given = found
        for param in dict.fromkeys(given):
            _refuse_empty(param, values.get(param.name))
            times = given.count(param)
            if times > 1 and not (getattr(param, "multiple", True) or param.is_flag):
                terminal.note(f"{param.opts[0]} is given {times} times: the last one counts")
        return super().parse_args(ctx, args)


def _is_given(param: Any, values: Mapping[str, Any]) -> bool:
    """Return whether words stand for a parameter; the parser lists arguments without any, too."""
    value = values.get(param.name)
    words = isinstance(value, str | tuple | list) and bool(value)
    return words or param.param_type_name == "option"


@contextmanager
def _naming_the_file(ctx: Any) -> Iterator[None]:
    """Name the file of options, too, in an error on one that it gave."""
    try:
        yield
    except UsageError as error:
        file, keys = ctx.meta.get(FILE, (None, ()))
        if str(error).startswith(tuple(f"--{key} " for key in keys)):
            error.args = (f"{file}: {error}",)
        raise


def _refuse_empty(param: Any, value: Any) -> None:
    """Refuse a word without anything in it: a variable of a script that is not set, mostly.

    As a path it would be the current folder, as a name or a list of names the default.
    """
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str) and not text.strip() and param.name != "prompt":
            long = (name for name in param.opts if name.startswith("--"))
            name = next(long, param.metavar or param.name)
            raise UsageError(f"{name} {text!r}: expected a value")


class Commands(TyperGroup):
    """Commands by name; one that there is not is named with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            raise unknown(f"no command {args[0]!r}", args[0], self.commands)
        return super().resolve_command(ctx, args)


class Verbs(TyperGroup):
    """A command with verbs, which runs itself where the first word is none of them.

    Attributes:
        what: what that first word is then, and the names that it may have.
    """

    what: tuple[str, o.Names]

    @property
    def verbs(self) -> list[str]:
        """The names of the verbs, in the order of the help."""
        return [name for name, command in self.commands.items() if not command.hidden]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.verbs:
            if args and not ctx.resilient_parsing:
                what, names = self.what
                known = [*names(), *self.verbs]
                # A verb misspelt is refused, before its own words are taken for something else.
                if args[0] not in known and nearest(args[0], known) in self.verbs:
                    raise unknown(f"no {what} or verb {args[0]!r}", args[0], known)
            args = [RUN, *args]
        return super().parse_args(ctx, args)


class OwnCommand(Command):
    """A group's own command, whose usage does not show the name of one that nobody types."""

    def get_usage(self, ctx: Any) -> str:
        return super().get_usage(ctx).replace(f" {RUN} ", " ")


def add(app: typer.Typer, *modules: ModuleType) -> None:
    """Add commands, each called as its module, of which `run` is run and `EPILOG` ends the help.

    A module's `COMMAND` is its kind, where that is one of its own.
    """
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        own = name == RUN
        kind = getattr(module, "COMMAND", OwnCommand if own else Command)
        app.command(name, cls=kind, hidden=own, epilog=module.EPILOG)(module.run)
