"""The kinds of commands, and how a module becomes one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from jetfire.commands import options as o
from jetfire.core import terminal
from jetfire.core.errors import UsageError, nearest, unknown

RUN = "run"  # the module, and so the command, of what a group does without a verb


class Command(TyperCommand):
    """A command that refuses empty words, and says so where an option's last word alone counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # nothing is run: words are being completed
            return super().parse_args(ctx, args)
        found: Any = self.make_parser(ctx).parse_args(args=list(args))
        values, _, given = found
        for param in dict.fromkeys(given):
            _refuse_empty(param, values.get(param.name))
            times = given.count(param)
            if times > 1 and not (getattr(param, "multiple", True) or param.is_flag):
                terminal.note(f"{param.opts[0]} is given {times} times: the last one counts")
        return super().parse_args(ctx, args)


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
    """Add commands, each called as its module, of which `run` is run and `EPILOG` ends the help."""
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        own = name == RUN
        kind = OwnCommand if own else Command
        app.command(name, cls=kind, hidden=own, epilog=module.EPILOG)(module.run)
