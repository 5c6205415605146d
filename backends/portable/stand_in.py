"""A module in place of `msgspec`, for workers on interpreters without it: what the code of workers uses of msgspec.

`messages` are the same bytes. It takes about 20 times longer than msgspec, which is compiled.

MessagePack in plain Python: the part of it that the messages of workers use. Pure.

Values are None, bool, int, float, str, bytes, list and dict. There are no extension types and no timestamps: a message
with one is refused.
"""

from __future__ import annotations

import json
import struct
import types
from typing import Any, Callable

from backends.portable.structs import Converters, Struct, StructMeta, WrongMessage, asdict, replace

#: Prefixes whose meaning is in the byte itself, as the specification of MessagePack has them.
_FIXMAP, _FIXARRAY, _FIXSTR, _NIL, _FALSE, _TRUE = 0x80, 0x90, 0xA0, 0xC0, 0xC2, 0xC3

#: Prefix → how the number after it is packed.
_NUMBERS = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}

#: Prefixes of bytes, texts, arrays and maps whose length follows → how the length is packed.
_BINS = {0xC4: _NUMBERS[0xCC], 0xC5: _NUMBERS[0xCD], 0xC6: _NUMBERS[0xCE]}

_STRS = {0xD9: _NUMBERS[0xCC], 0xDA: _NUMBERS[0xCD], 0xDB: _NUMBERS[0xCE]}

_ARRAYS = {0xDC: _NUMBERS[0xCD], 0xDD: _NUMBERS[0xCE]}

_MAPS = {0xDE: _NUMBERS[0xCD], 0xDF: _NUMBERS[0xCE]}

_UNSIGNED = ((0xCC, 1 << 8), (0xCD, 1 << 16), (0xCE, 1 << 32), (0xCF, 1 << 64))

_SIGNED = ((0xD0, 1 << 7), (0xD1, 1 << 15), (0xD2, 1 << 31), (0xD3, 1 << 63))

#: How deep arrays and maps may be in one another. Messages have at most six levels.
MAX_DEPTH = 64


class MalformedMessage(ValueError):
    """Bytes that are no message."""


def pack(value: Any, out: bytearray, other: Callable[[Any], Any]) -> None:
    """Append the bytes of `value` to `out`. `other` returns what to pack in place of a value of another type.

    Raises `UnicodeEncodeError` for a text that UTF-8 cannot carry, and `OverflowError` for an integer that does not fit
    into 64 bits.
    """
    kind = type(value)
    if kind is str:
        data = value.encode()
        _pack_head(len(data), out, _FIXSTR, 32, (0xD9, 0xDA, 0xDB))
        out += data
    elif value is None:
        out.append(_NIL)
    elif kind is bool:
        out.append(_TRUE if value else _FALSE)
    elif kind is int:
        _pack_int(value, out)
    elif kind is float:
        out.append(0xCB)
        out += _NUMBERS[0xCB].pack(value)
    elif kind is list or kind is tuple:
        _pack_head(len(value), out, _FIXARRAY, 16, (None, 0xDC, 0xDD))
        for each in value:
            pack(each, out, other)
    elif kind is bytes or kind is bytearray:
        _pack_head(len(value), out, None, 0, (0xC4, 0xC5, 0xC6))
        out += value
    elif kind is dict:
        _pack_head(len(value), out, _FIXMAP, 16, (None, 0xDE, 0xDF))
        for key, each in value.items():
            pack(key, out, other)
            pack(each, out, other)
    elif kind is memoryview:
        _pack_head(value.nbytes, out, None, 0, (0xC4, 0xC5, 0xC6))
        out += value
    else:
        pack(other(value), out, other)


def _pack_int(value: int, out: bytearray) -> None:
    if -32 <= value < 128:
        out.append(value & 0xFF)
        return
    size = value if value >= 0 else -value - 1
    for prefix, limit in _UNSIGNED if value >= 0 else _SIGNED:
        if size < limit:
            out.append(prefix)
            out += _NUMBERS[prefix].pack(value)
            return
    raise OverflowError("can't serialize ints that have more than 64 bits")


def _pack_head(length: int, out: bytearray, fixed: int | None, fixed_limit: int, prefixes: tuple[Any, ...]) -> None:
    """Append a prefix with `length`: in the byte itself below `fixed_limit`, else in 1, 2 or 4 bytes that follow."""
    if fixed is not None and length < fixed_limit:
        out.append(fixed | length)
        return
    for prefix, (number, limit) in zip(prefixes, _UNSIGNED):
        if prefix is not None and length < limit:
            out.append(prefix)
            out += _NUMBERS[number].pack(length)
            return
    raise OverflowError(f"a value of {length} bytes or elements does not fit into a message")


def unpack(data: Any) -> Any:
    """Return the value in `data`, a buffer. Raises `MalformedMessage`."""
    reader = _Reader(bytes(data))
    try:
        value = reader.value(0)
    except (IndexError, struct.error):
        raise MalformedMessage("Input data was truncated") from None
    except UnicodeDecodeError:
        raise MalformedMessage("MessagePack data is malformed: a text is not UTF-8") from None
    if reader.position != len(reader.data):
        raise MalformedMessage(f"MessagePack data is malformed: trailing characters (byte {reader.position})")
    return value


class _Reader:
    """Bytes, and how many of them were read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def value(self, depth: int) -> Any:
        prefix = self.data[self.position]
        self.position += 1
        if prefix < _FIXMAP:
            return prefix
        if prefix >= 0xE0:
            return prefix - 256
        if prefix < _FIXARRAY:
            return self._map(prefix & 0xF, depth)
        if prefix < _FIXSTR:
            return self._array(prefix & 0xF, depth)
        if prefix < _NIL:
            return self._bytes(prefix & 0x1F).decode()
        if prefix in _CONSTANTS:
            return _CONSTANTS[prefix]
        if prefix in _NUMBERS:
            return self._number(_NUMBERS[prefix])
        if prefix in _STRS:
            return self._bytes(self._number(_STRS[prefix])).decode()
        if prefix in _BINS:
            return self._bytes(self._number(_BINS[prefix]))
        if prefix in _ARRAYS:
            return self._array(self._number(_ARRAYS[prefix]), depth)
        if prefix in _MAPS:
            return self._map(self._number(_MAPS[prefix]), depth)
        raise MalformedMessage(f"MessagePack data is malformed: invalid opcode '\\x{prefix:02x}'")

    def _number(self, form: struct.Struct) -> Any:
        (number,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return number

    def _bytes(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise MalformedMessage("Input data was truncated")
        found = self.data[self.position : end]
        self.position = end
        return found

    def _array(self, length: int, depth: int) -> list[Any]:
        self._check(length, depth)
        return [self.value(depth + 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[Any, Any]:
        self._check(2 * length, depth)
        found: dict[Any, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if type(key) in (list, dict):
                raise MalformedMessage("MessagePack data is malformed: a key of a map is an array or a map")
            found[key] = self.value(depth + 1)
        return found

    def _check(self, length: int, depth: int) -> None:
        """Refuse a length that the rest of the bytes cannot have, before memory is taken for it."""
        if length > len(self.data) - self.position:
            raise MalformedMessage("Input data was truncated")
        if depth >= MAX_DEPTH:
            raise MalformedMessage(f"MessagePack data is malformed: more than {MAX_DEPTH} levels")


_CONSTANTS = {_NIL: None, _FALSE: False, _TRUE: True}


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
