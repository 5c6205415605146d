"""Flags as environment variables: `NAIAD_HTTP_PORT=9000` is `--http-port=9000`. Pure.

A flag on the command line takes precedence over its variable.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kernel.command.flags.values import BadValue, parse_switch
from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kernel.command.flags.flag import Flag

PREFIX = "NAIAD_"

#: Between several values of a flag that can be repeated.
_SEPARATOR = re.compile(r"[;\n]")

#: Variables that Kubernetes gives to the containers beside a service whose name begins with naiad, such as
#: NAIAD_SERVICE_HOST, NAIAD_PORT_8000_TCP_ADDR and NAIAD_HTTP_PORT=tcp://10.0.0.7:8000.
_OF_KUBERNETES = re.compile(
    rf"{PREFIX}(?:.*_)?(?:SERVICE_(?:HOST|PORT)(?:_.*)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_.*)?)?)"
)
_ADDRESS_OF_KUBERNETES = re.compile(r"(?:tcp|udp|sctp)://")

#: Variables of ours that stand for no flag.
_OTHERS = frozenset({f"{PREFIX}WORKER", f"{PREFIX}BENCH_CACHE", f"{PREFIX}URL"})


def variable_of(flag: Flag) -> str:
    """Return the name of the flag's variable."""
    return PREFIX + flag.name.upper().replace("-", "_")


def flags_of_environment(
    environment: Mapping[str, str], flags: Collection[Flag]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return flag name → texts for the variables of `flags`, and a log line for each variable that is not a flag.

    An empty variable is the same as none. Raises `BadOption`, whose message names the variable.
    """
    by_variable = {variable_of(flag): flag for flag in flags}
    found: dict[str, list[str]] = {}
    notes: list[str] = []
    for name, text in sorted(environment.items()):
        if not name.startswith(PREFIX) or not text or _ADDRESS_OF_KUBERNETES.match(text):
            continue
        flag = by_variable.get(name)
        if flag is not None:
            if texts := _texts(name, flag, text):
                found[flag.name] = texts
        elif name not in _OTHERS and _OF_KUBERNETES.fullmatch(name) is None:
            import difflib  # imported late: right variables need none of it

            names = [each.removeprefix(PREFIX) for each in by_variable]
            close = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
            notes.append(f"the environment variable {name} has no effect: it stands for no flag{hint}")
    return found, notes


def _texts(name: str, flag: Flag, text: str) -> list[str]:
    """Return the values of a flag in the text of its variable, after a check of each."""
    try:
        if not flag.kind.metavar:  # a flag without a value
            return [""] if parse_switch(text) else []
        texts = [part.strip() for part in _SEPARATOR.split(text)] if flag.repeat else [text]
        texts = [each for each in texts if each]
        for each in texts:
            flag.kind.parse(each)
    except BadValue as error:
        raise BadOption(f"environment variable {name}: {error}") from None
    return texts
