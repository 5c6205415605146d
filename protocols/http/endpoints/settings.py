"""Trace and log settings over HTTP: their names and types in request and response bodies.

`kernel.settings` checks the values. Settings that Triton does not know are ignored, as in Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocols.access import check_traced_model
from protocols.http.bodies import read_control_text
from protocols.http.json.document import ABSENT, as_array, as_bool, as_string, as_unsigned, member, parse
from protocols.http.responses import json_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.settings import TraceChange, TraceValues
    from protocols.http import web
    from protocols.http.call import HttpCall

_TRACE_NUMBERS = ("trace_rate", "trace_count", "log_frequency")

_LOG_SETTINGS: tuple[tuple[str, Callable[[Any], bool | int | str]], ...] = (
    ("log_info", as_bool),
    ("log_warning", as_bool),
    ("log_error", as_bool),
    ("log_verbose_level", as_unsigned),
    ("log_format", as_string),
)


async def get_trace(call: HttpCall) -> web.Response:
    """Return the settings of a model, or of the server where the path names no model."""
    return _trace_response(call.kernel.trace.get(_traced_model(call)))


async def update_trace(call: HttpCall) -> web.Response:
    model = _traced_model(call)
    change = _trace_change(parse(await read_control_text(call)))
    return _trace_response(call.kernel.trace.update(change, model))


async def get_log(call: HttpCall) -> web.Response:
    return json_response(call.kernel.log.values)


async def update_log(call: HttpCall) -> web.Response:
    document = parse(await read_control_text(call))
    change: dict[str, bool | int | str] = {}
    if member(document, "log_file") not in (ABSENT, None):
        change["log_file"] = ""  # refused with any value
    for name, read in _LOG_SETTINGS:
        value = member(document, name)
        if value not in (ABSENT, None):
            change[name] = read(value)
    # Over gRPC this setting has another name in Triton.
    return json_response(call.kernel.log.update(change, format_name="--log_format"))


def _traced_model(call: HttpCall) -> str:
    name = call.names.get("model", "")
    if name:
        check_traced_model(call.kernel, name)
    return name


def _trace_change(document: Any) -> TraceChange:
    """Return the settings that `document` changes, in the order in which Triton looks at them."""
    change: TraceChange = {}
    if member(document, "trace_file") is not ABSENT:
        change["trace_file"] = [""]  # refused with any value, even null
    levels = member(document, "trace_level")
    if levels is None:
        change["trace_level"] = None
    elif levels is not ABSENT:
        change["trace_level"] = [as_string(level) for level in as_array(levels)]
    for name in _TRACE_NUMBERS:
        text = member(document, name)
        if text is not ABSENT:
            change[name] = None if text is None else [as_string(text)]
    return change


def _trace_response(values: TraceValues) -> web.Response:
    """Return the settings as texts. Where one has several values, Triton repeats its name in the JSON object."""
    shown: dict[str, object] = {name: ",".join(texts) for name, texts in values.as_dict().items()}
    shown["trace_level"] = values.trace_level
    return json_response(shown)
