"""`Flag`: the description of a flag of the command line. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.command.flags.values import Kind


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag of `naiad run`. Name and meaning are tritonserver's, if it has the flag."""

    #: Without the dashes.
    name: str
    kind: Kind
    #: Text for the help; empty if the flag has no effect.
    help: str = ""
    #: Path of the option in `ServerOptions`, such as "http.max_input_size"; empty if the flag has no effect.
    option: str = ""
    #: The flag can be given several times, and the option is a tuple.
    repeat: bool = False
    #: tritonserver does not have the flag, or has another default.
    ours: bool = False
    #: A second name, which the help does not show.
    alias: str = ""
    #: The default that the help shows, if the option's default is not the right text.
    default: str = ""
    #: A log line for each use of the flag: why it has no effect, or which flag replaces it.
    note: str = ""
    #: For a flag without effect: the value that already describes this server, so that no note is needed.
    silent_value: object = None


class FlagGroup(msgspec.Struct, frozen=True):
    """Flags that the help shows together, under a title and an explanation."""

    title: str
    text: str
    flags: tuple[Flag, ...]
