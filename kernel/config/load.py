"""Text → `ModelConfig`: a config.pbtxt, or JSON as in /config. Every error is a `BadConfig`.

A model without config.pbtxt has an empty message. `autofill.py` fills in missing fields, and `check.py`
checks the values; this module only parses.

Configurations of load requests are read in Triton by protobuf's `JsonStringToMessage`. Beyond the standard it takes
keys without quotes, strings in single quotes, one comma behind the last member or element, numbers that end with a
point, any character behind a backslash, and all white space of C. It takes no comments. (Tried with Triton 2.51.) Such
JSON is made standard JSON first.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor

from kernel.config.generated.model_config_pb2 import DESCRIPTOR, ModelConfig
from kernel.errors import BadConfig, failing_as

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

#: The longest text that is parsed. Real files have a few KiB; parsing 4 MiB takes seconds.
MAX_BYTE_SIZE = 4 << 20

#: The most characters of protobuf's error text that an error of ours repeats.
_MAX_REASON_LENGTH = 300

#: The most characters of a wrong line that an error shows.
_MAX_LINE_LENGTH = 120

_MODEL_CONFIG = DESCRIPTOR.message_types_by_name["ModelConfig"]


def from_pbtxt(text: bytes | None, source: str) -> ModelConfig:
    """Parse the bytes of a config.pbtxt, or return an empty message for None.

    `source` is the file's path; errors name it with line and column.
    """
    if text is None:
        return ModelConfig()
    error_prefix = f"failed to read text proto from {source}"
    _check_size(text, error_prefix)
    with failing_as(partial(_text_error, text, error_prefix), passes=BadConfig):
        return text_format.Parse(_decoded(text, error_prefix), ModelConfig())


def _text_error(text: bytes, error_prefix: str, error: Exception) -> BadConfig:
    """Return the error for a config.pbtxt. Protobuf also raises errors of Python, such as ValueError for an enum."""
    if isinstance(error, text_format.ParseError):
        line, column = error.GetLine(), error.GetColumn()
        where = "" if line is None else f":{line}:{column or 1}"
        # The text of protobuf starts with the position, which `where` has already.
        reason = _shortened(str(error).split(" : ", 1)[-1])
        shown = _wrong_line(text, line, column)
        if shown and shown not in reason:  # protobuf quotes the line in some of its errors
            reason = f"{reason.rstrip('.')}, in the line: {shown}"
        return BadConfig(f"{error_prefix}{where}: {reason}")
    return BadConfig(f"{error_prefix}{_place_of_value(text, error)}: {_reason(error)}")


def from_json(text: str | bytes, error_prefix: str) -> ModelConfig:
    """Parse a configuration in JSON: the override of a load request, or the configuration from a backend.

    Unknown fields are errors. Enum values are accepted in any case, and a repeated field takes a single value without
    brackets as a list of one (as in Triton, whose protobuf reads both). Error texts start with `error_prefix`.
    """
    _check_size(text, error_prefix)
    # Besides its own errors, protobuf raises some errors of Python: OverflowError for 1e999.
    with failing_as(lambda error: BadConfig(f"{error_prefix}: {_reason(error)}"), passes=BadConfig):
        parsed = _parsed(text)
        if not isinstance(parsed, dict):
            raise BadConfig(f"{error_prefix}: expected a JSON object")
        parsed = _as_protobuf_reads(_MODEL_CONFIG, parsed)
        return json_format.ParseDict(parsed, ModelConfig())


def _parsed(text: str | bytes) -> Any:
    """Return the value of JSON, or of what Triton reads beyond it. Raises ValueError for anything else."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        relaxed = standard_json(text if isinstance(text, str) else text.decode())
        try:
            return json.loads(relaxed, object_pairs_hook=_without_duplicates, strict=False)
        except json.JSONDecodeError:
            raise error from None  # its position is that in the given text


def _reason(error: Exception) -> str:
    """Return the text of an error of protobuf."""
    return "nested too deeply" if isinstance(error, RecursionError) else _shortened(str(error) or type(error).__name__)


def _place_of_value(text: bytes, error: Exception) -> str:
    """Return the line and column of the value that ends the error's text, as `:2:7`; "" if it is not in the file."""
    value = str(error).rpartition(" ")[2].encode(errors="replace")
    begin = text.find(value) if value else -1
    if begin < 0:
        return ""
    return _position(text, begin)


def _position(text: bytes, offset: int) -> str:
    """Return the line and column of a byte of the file, as `:2:7`."""
    line, column = text.count(b"\n", 0, offset) + 1, offset - text.rfind(b"\n", 0, offset)
    return f":{line}:{column}"


def _wrong_line(text: bytes, line: int | None, column: int | None) -> str:
    """Return the line with the error, or the part around `column` of a long line; empty if `line` is unknown."""
    lines = text.decode().split("\n")
    if line is None or not 1 <= line <= len(lines):
        return ""
    shown = lines[line - 1]
    begin = max(0, (column or 1) - 1 - _MAX_LINE_LENGTH // 2) if len(shown) > _MAX_LINE_LENGTH else 0
    return shown[begin : begin + _MAX_LINE_LENGTH].strip()


def _shortened(reason: str) -> str:
    """Return the begin and end of protobuf's error text: it may quote a very long line of the file."""
    if len(reason) <= _MAX_REASON_LENGTH:
        return reason
    half = _MAX_REASON_LENGTH // 2
    return f"{reason[:half]} ... {reason[-half:]}"


def _check_size(text: str | bytes, error_prefix: str) -> None:
    if len(text) > MAX_BYTE_SIZE:
        raise BadConfig(f"{error_prefix}: {len(text)} bytes, at most {MAX_BYTE_SIZE} are allowed")


def _decoded(text: bytes, error_prefix: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BadConfig(f"{error_prefix}{_position(text, error.start)}: not UTF-8") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"duplicate key '{name}'")
        found[name] = value
    return found


#: Texts that the protobuf of Triton reads as a bool in JSON (`safe_strtob`). Python's protobuf takes none.
_BOOLS = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(("false", "f", "no", "n", "0"), False)


def _as_protobuf_reads(descriptor: Descriptor, given: Any) -> Any:
    """Return `given`, a message in JSON, as Triton's protobuf reads it.

    Enum values are in upper case, texts such as "true" are bools, a repeated field with one value is a list.

    Empty maps are left out. For a map protobuf imports a module that takes 0.5 MiB, and configurations from workers
    have all maps.
    """
    if not isinstance(given, dict):
        return given
    by_name = descriptor.fields_by_name
    by_json_name = {field.json_name: field for field in descriptor.fields}
    converted = {}
    for name, value in given.items():
        field = by_name.get(name) or by_json_name.get(name)
        if value != {} or field is None or not _is_map(field):
            converted[name] = value if field is None else _field_value(field, value)
    return converted


def _is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map. `GetOptions` imports the module."""
    return field.message_type is not None and bool(field.message_type.has_options)  # no other message has options


def _field_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and _is_map(field):
        entry = field.message_type.fields_by_name["value"]
        return {key: _field_value(entry, each) for key, each in value.items()} if isinstance(value, dict) else value
    if isinstance(value, list):
        return [_single_value(field, each) for each in value]
    value = _single_value(field, value)
    return [value] if field.is_repeated and value is not None else value


def _single_value(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None and isinstance(value, str):
        return value.upper()
    if field.type == FieldDescriptor.TYPE_BOOL and isinstance(value, str):
        return _BOOLS.get(value.lower(), value)
    if field.message_type is not None:
        return _as_protobuf_reads(field.message_type, value)
    return value


_TOKEN = re.compile(
    r"""
      (?P<space> [ \t\n\v\f\r]++ )
    | (?P<double> "(?:[^"\\]|\\.)*+" )
    | (?P<single> '(?:[^'\\]|\\.)*+' )
    | (?P<word> [A-Za-z_$][A-Za-z0-9_$]*+ )
    | (?P<number> -?[0-9][0-9.eE+-]*+ )
    | (?P<open> ["'] )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)

_ESCAPE = re.compile(r"\\(.)|(\")", re.DOTALL)

#: What the standard allows behind a backslash.
_ESCAPED = frozenset('"\\/bfnrtu')

#: Words that are values, and so no keys.
_VALUES = frozenset({"true", "false", "null"})


def standard_json(text: str) -> str:
    """Return `text` as standard JSON, if it is what Triton reads; anything else is returned so that no parser takes it.

    Takes time in proportion to the length.
    """
    tokens: list[tuple[str, str]] = []
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        assert kind is not None
        if kind == "open":  # a string without an end: nothing behind it can be read
            return text
        if kind != "space":
            tokens.append((kind, found.group()))
    parts: list[str] = []
    for place, (kind, token) in enumerate(tokens):
        before = tokens[place - 1][1] if place else ""
        after = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        parts.append(_standard(kind, token, before, after))
    return " ".join(parts)


def _standard(kind: str, token: str, before: str, after: str) -> str:
    """Return a token as the standard has it, by the tokens before and after it."""
    match kind:
        case "double":
            return f'"{_ESCAPE.sub(_escaped, token[1:-1])}"' if "\\" in token else token
        case "single":
            return f'"{_ESCAPE.sub(_escaped, token[1:-1])}"'
        case "word" if before in ("{", ",") and after == ":" and token not in _VALUES:
            return f'"{token}"'
        case "number" if token.endswith("."):
            return f"{token}0"
        case "other" if token == "," and after in ("}", "]") and before not in ("", ",", "[", "{", ":"):
            return ""
    return token


def _escaped(found: re.Match[str]) -> str:
    """Return what is behind a backslash as the standard has it, or a quote within single quotes."""
    if found[2]:
        return '\\"'
    return found[0] if found[1] in _ESCAPED else found[1]
