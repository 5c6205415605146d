"""`Struct`: classes with fields, as far as workers use those of msgspec.

Options that only save time or memory there (`gc`) change nothing here.
"""

from __future__ import annotations

from typing import Any, Union

_REQUIRED = object()
_EMPTY = (list, dict, set)
_OPTIONS = {"array_like": False, "tag": None, "frozen": False, "eq": True}
#: Options that are accepted, and change nothing that a worker could notice.
_IGNORED = frozenset({"omit_defaults", "gc", "cache_hash"})

#: Options that add a slot.
_SLOTS = {"weakref": "__weakref__", "dict": "__dict__"}

_set = object.__setattr__


class StructMeta(type):
    """Makes classes from their annotations: a field for each, in their order, after those of the base class."""

    __struct_fields__: tuple[str, ...]
    #: Those of the class itself, by its field names, as they are written.
    __struct_annotations__: dict[str, str]
    __struct_defaults__: tuple[Any, ...]
    __struct_options__: dict[str, Any]

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], **options: Any) -> Any:
        base: Any = next((each for each in bases if isinstance(each, StructMeta)), None)
        fields = dict(zip(base.__struct_fields__, base.__struct_defaults__)) if base else {}
        added = []
        for field, annotation in space.get("__annotations__", {}).items():
            if str(annotation).startswith("ClassVar") or (field.startswith("__") and field.endswith("__")):
                continue
            if field not in fields:
                added.append(field)
            fields[field] = space.pop(field, _REQUIRED)
        unknown = options.keys() - _OPTIONS.keys() - _IGNORED - _SLOTS.keys()
        if unknown:
            raise TypeError(f"{name}: the option {sorted(unknown)[0]!r} of structs is not known on this interpreter")
        space["__slots__"] = (*added, *(slot for option, slot in _SLOTS.items() if options.get(option)))
        made: Any = super().__new__(cls, name, bases, space)
        made.__struct_annotations__ = dict(space.get("__annotations__", {}))
        made.__struct_fields__ = tuple(fields)
        made.__struct_defaults__ = tuple(fields.values())
        made.__struct_options__ = {
            **(base.__struct_options__ if base else _OPTIONS),
            **{key: value for key, value in options.items() if key in _OPTIONS},
        }
        if made.__struct_options__["frozen"]:
            made.__setattr__ = made.__delattr__ = _immutable
            made.__hash__ = _hash
        elif "__hash__" not in space:
            made.__hash__ = None if made.__struct_options__["eq"] else object.__hash__
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, space)

    def __or__(cls, other: Any) -> Any:
        """Return the union of two types; Python 3.9 has none of its own."""
        return Union[cls, other]

    def __ror__(cls, other: Any) -> Any:
        return Union[other, cls]

    @property
    def tag(cls) -> str | None:
        """What the first element of a message of this class is; None if it has none."""
        tag = cls.__struct_options__["tag"]
        return cls.__name__ if tag is True else tag


class Struct(metaclass=StructMeta):
    """See `msgspec.Struct`. Empty lists, dicts and sets as defaults are made for each object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        fields = cls.__struct_fields__
        if len(args) > len(fields):
            raise TypeError("Extra positional arguments provided")
        for field, value in zip(fields, args):
            _set(self, field, value)
        for index in range(len(args), len(fields)):
            field = fields[index]
            if field in kwargs:
                value = kwargs.pop(field)
            else:
                value = cls.__struct_defaults__[index]
                if value is _REQUIRED:
                    raise TypeError(f"Missing required argument {field!r}")
                if not value and type(value) in _EMPTY:
                    value = type(value)()
            _set(self, field, value)
        if kwargs:
            name = next(iter(kwargs))
            again = "provided twice" if name in fields else "unexpected"
            raise TypeError(f"Argument {name!r} {again}")
        after = getattr(self, "__post_init__", None)
        if after is not None:
            after()

    def __repr__(self) -> str:
        values = ", ".join(f"{field}={getattr(self, field)!r}" for field in type(self).__struct_fields__)
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        cls = type(self)
        if not cls.__struct_options__["eq"]:
            return self is other
        if type(other) is not cls:
            return NotImplemented
        return all(getattr(self, field) == getattr(other, field) for field in cls.__struct_fields__)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field) for field in type(self).__struct_fields__)


def _immutable(self: Any, *_: Any) -> None:
    raise AttributeError(f"immutable type: {type(self).__name__!r}")


def _hash(self: Any) -> int:
    return hash((type(self), *(getattr(self, field) for field in type(self).__struct_fields__)))


def asdict(struct: Struct) -> dict[str, Any]:
    """See `msgspec.structs.asdict`."""
    return {field: getattr(struct, field) for field in type(struct).__struct_fields__}


def replace(struct: Struct, **changes: Any) -> Any:
    """See `msgspec.structs.replace`."""
    unknown = changes.keys() - set(type(struct).__struct_fields__)
    if unknown:
        raise TypeError(f"`{type(struct).__name__}` has no field {sorted(unknown)[0]!r}")
    return type(struct)(**{**asdict(struct), **changes})


def required_count(kind: type[Struct]) -> int:
    """Return how many fields a message must at least have: up to the last one without a default."""
    return max((index + 1 for index, value in enumerate(kind.__struct_defaults__) if value is _REQUIRED), default=0)
