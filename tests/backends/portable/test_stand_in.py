"""What stands in for msgspec reads and writes the same bytes as msgspec, for every message."""

from __future__ import annotations

import contextlib
import importlib
import sys
import typing
from typing import TYPE_CHECKING, Any, Union

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.portable.stand_in import make_stand_in
from backends.transport import wire
from shm.lease import Lease, RegionNumber

if TYPE_CHECKING:
    from types import ModuleType

_OURS = ("backends", "kernel", "shm", "msgspec")


def with_stand_in(*names: str) -> list[Any]:
    """Import modules of ours with the stand-in in place of msgspec; the modules of this process stay as they are."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _OURS}
    for name in kept:
        del sys.modules[name]
    sys.modules["msgspec"] = make_stand_in()
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
            del sys.modules[name]
        sys.modules.update(kept)


PORTABLE: Any
PORTABLE, MSGSPEC = with_stand_in("backends.transport.wire", "msgspec")

_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=40),
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    bytes: st.binary(max_size=300),
    type(None): st.none(),
    Lease: st.builds(RegionNumber, st.integers(0, 2**63)),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type that messages have."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin is Union or type(kind).__name__ == "UnionType":
        return st.one_of([values(each) for each in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=20)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=20).map(tuple)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=20)
    fields = typing.get_type_hints(kind, {**vars(sys.modules[kind.__module__]), "Callable": Any})
    return st.builds(kind, **{name: values(fields[name]) for name in kind.__struct_fields__})


def plain(value: Any) -> Any:
    """Return a message as lists and values, whichever classes it has."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if hasattr(value, "__struct_fields__"):
        return type(value).__name__, *(plain(getattr(value, name)) for name in value.__struct_fields__)
    return (type(value).__name__, getattr(value, "region_number", value))


TO_WORKER = wire.kinds_of(wire.ToWorker)
TO_KERNEL = wire.kinds_of(wire.ToKernel)


@pytest.mark.parametrize("kind", sorted({*TO_WORKER, *TO_KERNEL}, key=str))
def test_a_message_is_the_same_bytes(kind: type[wire.Message]) -> None:
    @settings(max_examples=40)
    @given(values(kind))
    def check(message: wire.Message) -> None:
        encoded = wire.encoder.encode(message)
        decoder = PORTABLE.to_worker_decoder if kind in TO_WORKER else PORTABLE.to_kernel_decoder
        wire_decoder = wire.to_worker_decoder if kind in TO_WORKER else wire.to_kernel_decoder
        decoded = decoder.decode(encoded)
        assert type(decoded).__name__ == kind.__name__
        assert PORTABLE.encoder.encode(decoded) == encoded
        assert plain(decoded) == plain(wire_decoder.decode(encoded))

    check()


@given(values(wire.Execute), st.data())
def test_bytes_that_are_no_message_are_refused_and_end_nothing(message: wire.Execute, data: st.DataObject) -> None:
    encoded = wire.encoder.encode(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(MSGSPEC.DecodeError):
        PORTABLE.to_worker_decoder.decode(encoded[:cut])
    changed = bytearray(encoded)
    changed[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MSGSPEC.DecodeError):
        assert PORTABLE.to_worker_decoder.decode(bytes(changed)) is not None


@given(values(wire.Execute), st.data())
def test_what_msgspec_takes_is_taken(message: wire.Execute, data: st.DataObject) -> None:
    changed = bytearray(wire.encoder.encode(message))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.to_worker_decoder.decode(bytes(changed))
    except (msgspec.DecodeError, ValueError):
        return
    assert PORTABLE.to_worker_decoder.decode(bytes(changed)) is not None


@pytest.mark.parametrize(
    "value", [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1, -1, -32, -33, -128, -129, -(2**31) - 1]
)
def test_integers_have_the_shortest_form(value: int) -> None:
    assert PORTABLE.encoder.encode(value) == msgspec.msgpack.encode(value)


@pytest.mark.parametrize("size", [0, 15, 16, 31, 32, 255, 256, 65535, 65536])
def test_lengths_have_the_shortest_form(size: int) -> None:
    for value in ("x" * size, b"x" * size, [None] * size, {str(index): None for index in range(size)}):
        assert PORTABLE.encoder.encode(value) == msgspec.msgpack.encode(value)
        assert MSGSPEC.msgpack.Decoder().decode(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_an_integer_that_does_not_fit_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        PORTABLE.encoder.encode(value)


def test_a_text_that_utf8_cannot_carry_is_refused_as_by_msgspec() -> None:
    for encoder in (PORTABLE.encoder, wire.encoder):
        with pytest.raises(UnicodeEncodeError):
            encoder.encode("\udc80")


def test_what_cannot_be_in_a_message_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="a message cannot contain a object"):
        PORTABLE.encoder.encode(object())
    with pytest.raises(MSGSPEC.DecodeError, match="levels"):
        MSGSPEC.msgpack.Decoder().decode(b"\x91" * 100 + b"\xc0")
    with pytest.raises(MSGSPEC.DecodeError, match="truncated"):
        MSGSPEC.msgpack.Decoder().decode(b"\xdd\xff\xff\xff\xff")


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(MSGSPEC.ValidationError, match="Hello"):
        PORTABLE.to_worker_decoder.decode(wire.encoder.encode(wire.Hello("7", 1)))


def test_json_is_read_and_written() -> None:
    assert MSGSPEC.json.decode('{"a": [1, 2.5, "\u00fc"]}', type=dict) == {"a": [1, 2.5, "\u00fc"]}
    assert MSGSPEC.json.encode({"a": "\u00fc"}) == msgspec.json.encode({"a": "\u00fc"})
    with pytest.raises(MSGSPEC.DecodeError):
        MSGSPEC.json.decode("{", type=dict)
    with pytest.raises(MSGSPEC.ValidationError, match="Expected `dict`"):
        MSGSPEC.json.decode("[]", type=dict)


def test_the_modules_of_this_process_are_not_those_with_the_stand_in() -> None:
    stand_in: ModuleType = MSGSPEC
    assert sys.modules["msgspec"] is msgspec is not stand_in
    assert sys.modules["backends.transport.wire"] is wire is not PORTABLE
