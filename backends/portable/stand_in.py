"""A module in place of `msgspec`, for workers on interpreters without it: what the code of workers uses of msgspec.

`messages` are the same bytes. It takes about 20 times longer than msgspec, which is compiled.
"""

from __future__ import annotations

import json
import types
from typing import Any, Callable

from backends.portable.converters import Converters, WrongMessage
from backends.portable.msgpack_bytes import MalformedMessage, pack, unpack
from backends.portable.structs import Struct, StructMeta, asdict, replace


class _DecodeError(ValueError):
    """See `msgspec.DecodeError`."""


class _ValidationError(_DecodeError):
    """See `msgspec.ValidationError`."""


class _MsgpackEncoder:
    """See `msgspec.msgpack.Encoder`."""

    def __init__(self, *, enc_hook: Callable[[Any], Any] | None = None) -> None:
        self._hook = enc_hook

    def encode(self, value: Any) -> bytes:
        """Return the bytes of `value`. Raises `UnicodeEncodeError`, `OverflowError`, and what the hook raises."""
        out = bytearray()
        pack(value, out, self._other)
        return bytes(out)

    def _other(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(kind, StructMeta):
            if not kind.__struct_options__["array_like"]:
                raise TypeError(f"Encoding objects of type {kind.__name__} is unsupported")
            values = [getattr(value, field) for field in kind.__struct_fields__]
            return values if kind.tag is None else [kind.tag, *values]
        for base in (str, int, float, list, tuple, dict):
            if isinstance(value, base):  # of a class of its own
                plain: Any = base
                return plain(value)
        if self._hook is None:
            raise TypeError(f"Encoding objects of type {kind.__name__} is unsupported")
        return self._hook(value)


class _MsgpackDecoder:
    """See `msgspec.msgpack.Decoder`."""

    def __init__(self, kind: Any = Any, *, dec_hook: Callable[[type, Any], Any] | None = None) -> None:
        self._convert = Converters(dec_hook or _no_hook).of(kind)

    def decode(self, data: Any) -> Any:
        """Return the message in `data`, a buffer. Raises `DecodeError`."""
        try:
            return self._convert(unpack(data))
        except MalformedMessage as error:
            raise _DecodeError(str(error)) from None
        except WrongMessage as error:
            raise _ValidationError(str(error)) from None


def _no_hook(kind: type, value: Any) -> Any:
    raise WrongMessage(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _json_decode(data: Any, *, type: Any = Any) -> Any:
    """See `msgspec.json.decode`. `type` may be `dict`, `list` or `Any`."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise _DecodeError(f"JSON is malformed: {error}") from None
    if type not in (Any, found.__class__):
        raise _ValidationError(f"Expected `{type.__name__}`, got `{found.__class__.__name__}`")
    return found


def _json_encode(value: Any) -> bytes:
    """See `msgspec.json.encode`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def make_stand_in() -> types.ModuleType:
    """Return the module."""
    module: Any = types.ModuleType("msgspec", "Stands in for msgspec in a worker of the server; see stand_in.py.")
    module.Struct = Struct
    module.DecodeError = module.MsgspecError = _DecodeError
    module.ValidationError = _ValidationError
    module.structs = types.SimpleNamespace(asdict=asdict, replace=replace)
    module.msgpack = types.SimpleNamespace(Encoder=_MsgpackEncoder, Decoder=_MsgpackDecoder)
    module.json = types.SimpleNamespace(encode=_json_encode, decode=_json_decode)
    made: types.ModuleType = module
    return made
