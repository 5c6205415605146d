"""`Struct`: classes with fields, as far as workers use those of msgspec.

Options that only save time or memory there (`gc`) change nothing here.

From unpacked values to typed objects: a converter for each type that messages have. Pure.

Annotations are texts (`from __future__ import annotations`), and are read here without evaluating them: Python 3.9
could not evaluate `int | str`.
"""

from __future__ import annotations

import ast
import sys
import typing
from typing import Any, Callable, Optional, Union

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


Converter = Callable[[Any], Any]

_SIMPLE = (str, int, bool, float, bytes, type(None))

_GENERIC: dict[str, Any] = {"Optional": Optional, "Union": Union, "list": list, "dict": dict, "tuple": tuple}


class WrongMessage(ValueError):
    """A message that does not have the type that is expected."""


class Converters:
    """The converters of one decoder."""

    def __init__(self, hook: Callable[[type, Any], Any]) -> None:
        """`hook` makes objects of classes that are not known here, as the `dec_hook` of msgspec."""
        self._hook = hook
        self._structs: dict[StructMeta, Converter] = {}

    def of(self, kind: Any) -> Converter:
        """Return what converts to `kind`, a type. Raises `TypeError` for one that messages do not have."""
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return lambda value: value
        if isinstance(kind, StructMeta):
            return self._struct(kind)
        if kind in _SIMPLE:
            return _simple((kind,))
        if _is_union(kind):
            return self._union(arguments)
        if kind in (list, dict):
            return _simple((kind,))
        if origin is list:
            return self._list(self.of(arguments[0]))
        if origin is tuple:
            if len(arguments) != 2 or arguments[1] is not Ellipsis:
                raise TypeError(f"{kind} is not known on this interpreter")
            items = self._list(self.of(arguments[0]))
            return lambda value: tuple(items(value))
        if origin is dict:
            return _dict(self.of(arguments[0]), self.of(arguments[1]))
        if isinstance(kind, type):
            return lambda value: self._hooked(kind, value)
        raise TypeError(f"{kind} is not known on this interpreter")

    def _hooked(self, kind: type, value: Any) -> Any:
        try:
            return self._hook(kind, value)
        except ValueError as error:
            raise WrongMessage(str(error)) from error

    @staticmethod
    def _list(item: Converter) -> Converter:
        def convert(value: Any) -> Any:
            if type(value) is not list:
                raise _wrong("array", value)
            return [item(each) for each in value]

        return convert

    def _union(self, kinds: tuple[Any, ...]) -> Converter:
        """Return the converter of a union: the tag says which struct a value is, its type what else it is."""
        structs = [kind for kind in kinds if isinstance(kind, StructMeta)]
        simple = tuple(kind for kind in kinds if kind in _SIMPLE)
        others = [kind for kind in kinds if kind not in structs and kind not in simple]
        if len(others) + bool(structs) > 1:
            raise TypeError(f"a union of {kinds} is not known on this interpreter")
        if others:
            rest = self.of(others[0])
        elif len(structs) > 1:
            rest = self._tagged(structs)
        elif structs:
            rest = self._struct(structs[0])
        else:
            return _simple(simple)
        if not simple:
            return rest
        known = set(simple)
        return lambda value: value if type(value) in known else rest(value)

    def _tagged(self, structs: list[StructMeta]) -> Converter:
        by_tag = {kind.tag: self._struct(kind) for kind in structs}

        def convert(value: Any) -> Any:
            if type(value) is not list or not value:
                raise _wrong("array", value)
            found = by_tag.get(value[0]) if type(value[0]) is str else None
            if found is None:
                raise WrongMessage(f"Invalid value {value[0]!r} - at `$[0]`")
            return found(value)

        return convert

    def _struct(self, kind: StructMeta) -> Converter:
        if kind in self._structs:
            return self._structs[kind]
        made: Any = kind
        tag, least = kind.tag, required_count(made)
        fields: list[Converter] = []

        def convert(value: Any) -> Any:
            if type(value) is not list:
                raise _wrong("array", value)
            if tag is not None:
                if not value or value[0] != tag:
                    raise WrongMessage(f"Invalid value {value[:1]!r} - at `$[0]`")
                value = value[1:]
            if len(value) < least:
                raise WrongMessage(f"Expected `array` of at least length {least}, got {len(value)}")
            return made(*[field(each) for field, each in zip(fields, value)])

        self._structs[kind] = convert  # first: classes may refer to one another
        fields.extend([self.of(each) for each in field_types(kind)])
        return convert


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) is Union or type(kind).__name__ == "UnionType"


def _simple(kinds: tuple[Any, ...]) -> Converter:
    """A number without a fraction is taken for a float where only that is expected, as msgspec does."""
    known = set(kinds)
    widens = float in known and int not in known

    def convert(value: Any) -> Any:
        if type(value) in known:
            return value
        if widens and type(value) is int:
            return float(value)
        raise _wrong(" | ".join(sorted(kind.__name__ for kind in kinds)), value)

    return convert


def _dict(key: Converter, item: Converter) -> Converter:
    def convert(value: Any) -> Any:
        if type(value) is not dict:
            raise _wrong("object", value)
        return {key(name): item(each) for name, each in value.items()}

    return convert


def _wrong(expected: str, value: Any) -> WrongMessage:
    return WrongMessage(f"Expected `{expected}`, got `{type(value).__name__}`")


# ---- annotations -----------------------------------------------------------------------------


def field_types(kind: Any) -> list[Any]:
    """Return the types of the fields of a struct, in their order. Raises `TypeError` for one that is not known.

    Names are looked up in the modules of the classes, so it is called while these are imported: later the names of the
    modules may be a model's (`backends/python/model_modules.py`).
    """
    found = {}
    for each in reversed(kind.__mro__):
        if isinstance(each, StructMeta) and each is not Struct:
            names = {**vars(typing), **vars(sys.modules[each.__module__])}
            for field, annotation in each.__struct_annotations__.items():
                if field in kind.__struct_fields__:  # no constant of the class
                    found[field] = _type_of(ast.parse(annotation, mode="eval").body, names)
    return [found[field] for field in kind.__struct_fields__]


def _type_of(node: ast.AST, names: dict[str, Any]) -> Any:
    """Return the type that an annotation names, in a module with these `names`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_type_of(node.left, names), _type_of(node.right, names)]
    if isinstance(node, ast.Constant) and (node.value is None or node.value is Ellipsis):
        return type(None) if node.value is None else Ellipsis
    if isinstance(node, ast.Subscript):
        generic = _GENERIC.get(ast.unparse(node.value))
        inner = node.slice
        inner = getattr(inner, "value", inner) if type(inner).__name__ == "Index" else inner  # Python 3.8
        arguments = tuple(_type_of(each, names) for each in (inner.elts if isinstance(inner, ast.Tuple) else [inner]))
        if generic is not None:
            return generic[arguments if len(arguments) > 1 else arguments[0]]
    if isinstance(node, ast.Name):
        found = names.get(node.id, getattr(typing, node.id, _BUILTINS.get(node.id)))
        if found is not None:
            return found
    raise TypeError(f"the annotation '{ast.unparse(node)}' is not known on this interpreter")


_BUILTINS = {kind.__name__: kind for kind in (str, int, bool, float, bytes, list, dict)}
