"""What a flag is: its name, its values, the option that it sets, or why it has no effect here. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.command.flags.values import Kind


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag of `python -m kernel run`. Names and meanings are tritonserver's, where it has the flag."""

    #: Without the dashes.
    name: str
    kind: Kind
    #: For the help; empty where the flag has no effect.
    help: str = ""
    #: Path of the option in `ServerOptions`, such as "http.max_input_size". Empty where the flag has no effect.
    option: str = ""
    #: Whether it can be given more than once; the option is a tuple.
    repeat: bool = False
    #: Whether tritonserver has no such flag, or another default.
    ours: bool = False
    #: Another name, which the help does not show.
    alias: str = ""
    #: What the help shows as default where the option's own default does not say it.
    default: str = ""
    #: What is said in the log when the flag is given: why it has no effect, or what to use instead.
    note: str = ""
    #: A value which asks for what is so anyway: nothing is said then.
    moot: object = None


class FlagGroup(msgspec.Struct, frozen=True):
    """Flags that the help shows together, under a title and a line about them."""

    title: str
    text: str
    flags: tuple[Flag, ...]
