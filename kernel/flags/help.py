"""Prints the help of `naiad run --help`: the flags in groups, wrapped to the width of the terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from kernel.flags.known import GROUPS, IGNORED
from kernel.flags.read import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.flags.flag import Flag, FlagGroup

#: The column in which explanations begin. A longer flag has its own line.
_INDENT = 30

#: The widest line, also in a wider terminal: longer lines are hard to read.
_MAX_WIDTH = 100

#: Replaces spaces in a default, so that wrapping does not split the default.
_NO_BREAK = "\N{NO-BREAK SPACE}"

_INTRODUCTION = """\
Serve a model repository until Ctrl-C or SIGTERM.

Usage: naiad run [FOLDER | FILE]... [--FLAG VALUE | --FLAG=VALUE]...

  naiad run                              demo models
  naiad run models                       a folder of models
  naiad run resnet.onnx service.py       files, as models resnet and service
  naiad run models/resnet                one model of a folder
  naiad run models --model-control-mode explicit --load-model resnet
                                         the same; more can be loaded later

Flags have tritonserver's names, meanings and [defaults]. A + marks a flag that
tritonserver does not have, or for which it has another default. Each flag is an
environment variable, too: NAIAD_HTTP_PORT=9000 is --http-port=9000. Between
several values of a flag is a semicolon. The command line takes precedence."""


def print_help(console: Console | None = None) -> None:
    """Print the help to standard output."""
    console = console or Console(highlight=False)
    width = min(console.width, _MAX_WIDTH)
    lines = [Text(_INTRODUCTION)]
    for group in GROUPS:
        lines += _heading(group, width)
        for flag in group.flags:
            lines += _explained(flag, width)
    lines += _heading(IGNORED, width)
    lines += _by_reason(IGNORED, width)
    for line in lines:
        console.print(line, soft_wrap=True)


def _heading(group: FlagGroup, width: int) -> Iterator[Text]:
    yield Text(f"\n{group.title}", style="bold")
    for line in textwrap.wrap(group.text, width - 2):
        yield Text(f"  {line}", style="dim")
    if group.text:
        yield Text("")


def _explained(flag: Flag, width: int) -> Iterator[Text]:
    head = Text(f"  --{flag.name}", style="cyan")
    if flag.kind.metavar:
        head.append(f" {flag.kind.metavar}", style="dim")
    words = [flag.help]
    if flag.ours:
        words.insert(0, "+")
    if flag.repeat:
        words.append("Can be repeated.")
    if default := _default(flag):
        words.append(f"[{default}]".replace(" ", _NO_BREAK))
    body = textwrap.wrap(" ".join(words), width - _INDENT, break_on_hyphens=False, break_long_words=False)
    body = [line.replace(_NO_BREAK, " ") for line in body]
    if len(head.plain) <= _INDENT - 2:
        head.append(" " * (_INDENT - len(head.plain)))
        yield head.append(body.pop(0), style="default")
    else:
        yield head
    for line in body:
        yield Text(" " * _INDENT + line)


def _default(flag: Flag) -> str:
    """Return the default of a flag as one would type it; empty if the flag has no default."""
    if flag.default or flag.repeat or not flag.kind.metavar:
        return flag.default
    if flag.option.endswith((".tls", ".mutual")):
        return "false"
    value: Any = DEFAULTS
    for name in flag.option.split("."):
        value = getattr(value, name, "")
    match value:
        case bool():
            return "true" if value else "false"
        case int() | str():
            return str(value)
    return ""


def _by_reason(group: FlagGroup, width: int) -> Iterator[Text]:
    flags: dict[str, list[str]] = {}
    for flag in group.flags:
        flags.setdefault(flag.note.partition(" (")[0], []).append(f"--{flag.name}")
    for number, (reason, names) in enumerate(flags.items()):
        if number:
            yield Text("")
        for line in textwrap.wrap(f"{reason[0].upper()}{reason[1:]}:", width - 2):
            yield Text(f"  {line}")
        for line in textwrap.wrap("  ".join(names), width - 6, break_on_hyphens=False):
            yield Text(f"      {line}", style="cyan")
