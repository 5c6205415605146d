"""Flags as keywords of Python, `http_port=0` for `--http-port=0`, with defaults for a server within a program. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.command.flags.read import FLAGS, read_flags

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kernel.options import ServerOptions

    #: The value of a flag, or the values of one that is given several times; None for one that is not given.
    Keyword = str | int | float | Path | Sequence[str | int | float | Path] | None

DOORS = ("http", "grpc", "metrics")


def read_keywords(flags: Mapping[str, Keyword], environment: Mapping[str, str]) -> tuple[ServerOptions, list[str]]:
    """Return the options that flags ask for, and what is to be said of them in the log.

    Front doors are closed but those that have a port or are asked for (`http=True` is `allow_http=True`), and
    listen on this machine only, unless they have an address. The server does not poll, unless it is told to.
    Raises `BadOption`.
    """
    given = {f"allow_{name}" if name in DOORS else name: value for name, value in flags.items() if value is not None}
    for door in DOORS:
        given.setdefault(f"allow_{door}", f"{door}_port" in given)
    for door in ("http", "grpc"):  # the metrics listen where HTTP does
        given.setdefault(f"{door}_address", "127.0.0.1")
    given.setdefault("busy_poll_us", 0)  # the program's own threads need the interpreter meanwhile
    return read_flags([word for name, value in given.items() for word in _words(name, value)], environment)


def _words(name: str, value: Keyword) -> Iterable[str]:
    """Return what would be typed at the command line."""
    flag = name.replace("_", "-")
    values = value if isinstance(value, (list, tuple)) else (value,)
    if flag in FLAGS and not FLAGS[flag].kind.metavar:  # a flag without value: it is there, or not
        return [f"--{flag}" for each in values if each]
    return [f"--{flag}={str(each).lower() if isinstance(each, bool) else each}" for each in values]
