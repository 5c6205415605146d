"""Flags as Python keywords, `http_port=0` for `--http-port=0`, with defaults for an embedded server. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.command.flags.read import FLAGS, read_flags

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kernel.options import ServerOptions

    #: The value of a flag, or several values for a repeated flag; None is the same as no flag.
    Keyword = str | int | float | Path | Sequence[str | int | float | Path] | None

_FRONT_DOORS = ("http", "grpc", "metrics")


def read_keywords(flags: Mapping[str, Keyword], environment: Mapping[str, str]) -> tuple[ServerOptions, list[str]]:
    """Return the options for `flags`, and lines for the log, as `read_flags`. Raises `BadOption`.

    Three defaults differ from the command line: a front door is open only if it has a port or its name is True
    (`http=True` is short for `allow_http=True`), it listens on 127.0.0.1, and the server does not poll.
    """
    given = {
        f"allow_{name}" if name in _FRONT_DOORS else name: value for name, value in flags.items() if value is not None
    }
    for door in _FRONT_DOORS:
        given.setdefault(f"allow_{door}", f"{door}_port" in given)
    for door in ("http", "grpc"):  # the default address of metrics is that of HTTP
        given.setdefault(f"{door}_address", "127.0.0.1")
    given.setdefault("busy_poll_us", 0)  # polling would keep the interpreter from the program's own threads
    return read_flags([word for name, value in given.items() for word in _words(name, value)], environment)


def _words(name: str, value: Keyword) -> Iterable[str]:
    """Return the words of the command line for one keyword."""
    flag = name.replace("_", "-")
    values = value if isinstance(value, (list, tuple)) else (value,)
    if flag in FLAGS and not FLAGS[flag].kind.metavar:  # a flag without a value
        return [f"--{flag}" for each in values if each]
    return [f"--{flag}={str(each).lower() if isinstance(each, bool) else each}" for each in values]
