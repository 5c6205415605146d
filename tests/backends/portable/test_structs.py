"""Structs of the stand-in behave as those of msgspec, as far as workers use them."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any, ClassVar

import msgspec
import pytest

from backends.portable import structs


def kinds(base: Any, helpers: Any) -> tuple[Any, Any, Any, Any]:
    """Return the same classes with either base, and `replace` and `asdict`."""

    class Point(base, frozen=True):  # type: ignore[misc, call-arg]
        count: ClassVar[int] = 3
        x: int
        y: int = 2

        @property
        def total(self) -> int:
            return int(self.x + self.y)

    class Place(Point, frozen=True):  # type: ignore[call-arg]
        names: list[str] = []

    class Loose(base, eq=False, weakref=True):  # type: ignore[misc, call-arg]
        x: int = 0

    return Point, Place, Loose, helpers


BOTH = pytest.mark.parametrize(
    "made", [kinds(structs.Struct, structs), kinds(msgspec.Struct, msgspec.structs)], ids=["ours", "msgspec"]
)


@BOTH
def test_fields_are_given_by_position_and_by_name(made: Any) -> None:
    point, place, _, _ = made
    assert (point(1).total, point(1, 5).total, point(y=1, x=1).total, point.count) == (3, 6, 2, 3)
    assert place(1, names=["a"]).names == ["a"]
    assert point.__struct_fields__ == ("x", "y")
    assert place.__struct_fields__ == ("x", "y", "names")
    assert repr(place(1)) == "Place(x=1, y=2, names=[])"


@BOTH
@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"x": 2}), ((1,), {"z": 2})])
def test_wrong_arguments_are_refused(made: Any, args: tuple[int, ...], kwargs: dict[str, int]) -> None:
    with pytest.raises(TypeError):
        made[0](*args, **kwargs)


@BOTH
def test_an_empty_default_is_made_for_each_object(made: Any) -> None:
    first, second = made[1](1), made[1](1)
    first.names.append("a")
    assert second.names == []


@BOTH
def test_equality_and_hash(made: Any) -> None:
    point, place, loose, _ = made
    assert point(1) == point(1) != point(2)
    assert point(1) != place(1)
    assert hash(point(1)) == hash(point(1))
    assert loose() != loose()
    assert len({loose(), loose()}) == 2


@BOTH
def test_a_frozen_one_cannot_be_changed_and_others_have_only_their_fields(made: Any) -> None:
    point, _, loose, _ = made
    with pytest.raises(AttributeError):
        point(1).x = 2
    changed = loose()
    changed.x = 5
    assert changed.x == 5
    with pytest.raises(AttributeError):
        changed.other = 1


@BOTH
def test_replace_asdict_and_copies(made: Any) -> None:
    point, _, _, helpers = made
    assert helpers.replace(point(1), y=9) == point(1, 9)
    assert helpers.asdict(point(1)) == {"x": 1, "y": 2}
    assert copy.copy(point(1, 7)) == point(1, 7)
    with pytest.raises(TypeError):
        helpers.replace(point(1), z=9)


def test_there_are_unions_of_structs_on_each_python() -> None:
    point, place, loose, _ = kinds(structs.Struct, structs)
    assert set(typing.get_args(point | place | loose | None)) == {point, place, loose, type(None)}
    assert set(typing.get_args(None | point)) == {point, type(None)}


def test_an_option_that_is_not_known_is_refused() -> None:
    with pytest.raises(TypeError, match="'rename' of structs is not known"):

        class _Renamed(structs.Struct, rename="camel"):
            x: int


class Sent(structs.Struct):
    x: int = 0


def test_objects_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Sent(4))) == Sent(4)
