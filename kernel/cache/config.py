"""The cache that the command line asks for: --cache-config=NAME,KEY=VALUE and --response-cache-byte-size. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

LOCAL = "local"

#: The setting, of every cache outside of the server, with the file of the key that signs responses.
SIGNING_KEY_FILE = "signing_key_file"


class CacheChoice(msgspec.Struct, frozen=True):
    """A cache by its name, with its settings as they were written."""

    name: str
    settings: dict[str, str]


def parse_cache_config(values: Iterable[str], local_byte_size: int = 0) -> CacheChoice | None:
    """Return the cache of these values of --cache-config, or a local one of `local_byte_size` bytes; None for none.

    Raises `InvalidArgument`. Of a setting that is given twice, the last value counts (Triton).
    """
    found: dict[str, dict[str, str]] = {}
    for value in values:
        name, _, setting = value.partition(",")
        key, equals, chosen = setting.partition("=")
        if not (name and key and equals and chosen):
            raise InvalidArgument(f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {value}")
        found.setdefault(name, {})[key] = chosen
    if len(found) > 1:
        raise InvalidArgument("found multiple cache configurations, but only a single cache is currently supported")
    if local_byte_size and not found:
        return CacheChoice(LOCAL, {"size": str(local_byte_size)})
    return next((CacheChoice(name, settings) for name, settings in found.items()), None)


def local_byte_size(settings: dict[str, str], budget_byte_size: int) -> int:
    """Return the size of a local cache from its settings. Raises `InvalidArgument`.

    It counts in the server's budget, of which it may take at most half: the rest is for requests.
    """
    refuse_unknown(LOCAL, settings, ("size",))
    text = settings.get("size", "")
    if not text.isascii() or not text.isdigit() or not 0 < len(text) < 20 or int(text) < 1:
        raise InvalidArgument(
            f"--cache-config=local needs a size in bytes, such as --cache-config=local,size=1048576; got '{text}'"
        )
    if int(text) > budget_byte_size // 2:
        raise InvalidArgument(
            f"--cache-config=local,size={text} is more than half of the {budget_byte_size} bytes that tensors may take "
            "together (--memory-byte-size), expected at most half"
        )
    return int(text)


def refuse_unknown(cache: str, settings: dict[str, str], known: Iterable[str]) -> None:
    """Raise `InvalidArgument` if a setting is not one of `known`."""
    names = tuple(known)
    for name in settings:
        if name not in names:
            raise InvalidArgument(f"cache '{cache}' has no setting '{name}'; its settings are {', '.join(names)}")
