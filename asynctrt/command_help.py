"""The help of a command, laid out so that it can be read in a terminal of 80 columns.

Typer puts names, values and texts side by side: with the names of a server's flags, a text has 20 columns.
Here a flag has a line of its own, and its text stands below it.
"""

import inspect
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

WIDTH_MAX: Final = 100
"""Longer lines are hard to read, however wide the terminal is."""

INDENT: Final = 6


def show_help(out: Console, command: Any, context: Any) -> None:
    """Print how a command is used, what it does, its arguments, its flags by panels, and examples.

    :param command: typer's command; only what its versions have in common is looked at.
    :param context: what it was called in.
    """
    width = min(out.width, WIDTH_MAX)

    def say(text: str, indent: int = 0) -> None:
        out.print(Padding(text, (0, 0, 0, indent), expand=False), width=width, highlight=False)

    kinds = _kinds(command.callback)
    panels: dict[str, list[Any]] = {}
    for parameter in command.get_params(context):
        panel = getattr(parameter, "rich_help_panel", None)
        panels.setdefault(panel or ("Options" if _is_flag(parameter) else "Arguments"), []).append(parameter)
    arguments = [_head(parameter, kinds) for parameter in panels.get("Arguments", [])]
    say(f"[bold]Usage:[/] {escape(context.command_path)} {' '.join([*arguments, escape('[OPTIONS]')])}\n")
    say(f"{command.help or ''}\n")
    for panel in sorted(panels, key=lambda name: name not in ("Arguments", "Options")):
        say(f"[bold]{escape(panel)}[/]")
        for parameter in panels[panel]:
            say(_head(parameter, kinds), 2)
            say(_text(parameter), INDENT)
        say("")
    if command.epilog:
        first, *examples = command.epilog.split("\n\n")
        say(f"[bold]{first}[/]")
        for example in examples:
            out.print(f"  {escape(example)}", highlight=False, soft_wrap=True)


def _is_flag(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _kinds(function: Any) -> dict[str, Any]:
    """Return the type of each parameter, without what typer is told of it."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        kind, *_ = get_args(parameter.annotation) or (parameter.annotation,)
        if get_origin(kind) in (Union, UnionType):
            kind = next(part for part in get_args(kind) if part is not type(None))
        found[parameter.name] = kind
    return found


def _head(parameter: Any, kinds: dict[str, Any]) -> str:
    """Return a flag with its other names and a word for its value; or the name of an argument."""
    if not _is_flag(parameter):
        name = escape((parameter.metavar or parameter.name).upper())
        more = "..." if parameter.nargs != 1 else ""
        return f"[cyan]{name}{more}[/]" if parameter.required else f"[cyan]\\[{name}{more}][/]"
    names = ", ".join([*sorted(parameter.opts, key=len), *parameter.secondary_opts])
    kind = kinds.get(parameter.name, bool)
    if kind is bool:
        return f"[cyan]{names}[/]"
    value = parameter.metavar or _word(kind)
    return f"[cyan]{names}[/] [yellow]{escape(value)}[/]"


def _word(kind: Any) -> str:
    """Return a word for the values of a type."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return f"{_word(get_args(kind)[0])} (may be repeated)"
    return {int: "<number>", float: "<number>", Path: "<path>"}.get(kind, "<text>")


def _text(parameter: Any) -> str:
    """Return what a parameter means, with its default, unless that is nothing or the text has it."""
    text = parameter.help or ""
    default = parameter.default
    if default is None or default is False or "Default:" in text or not _is_flag(parameter):
        return text
    if parameter.secondary_opts:
        default = parameter.opts[0]
    return f"{text} \\[default: {escape(str(default))}]" if default is not True else text
