"""Traffic rules over HTTP: which versions of a model get which requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument, Unsupported
from kernel.observe.access import peer_text
from protocols.http.bodies.reading import read_control_text
from protocols.http.call import peer_of
from protocols.http.json.document import parse
from protocols.http.responses import json_response

if TYPE_CHECKING:
    from kernel.serving.front_doors.interface import TrafficControl
    from protocols.http import web
    from protocols.http.call import HttpCall


async def report(call: HttpCall) -> web.Response:
    """Return the rule of a model, where it comes from, and what its labels and weights mean now."""
    return json_response(_control(call).report(call.names["model"]))


async def change(call: HttpCall) -> web.Response:
    """Replace members of the rule, and return what `report` returns."""
    members = parse(await read_control_text(call))
    if not isinstance(members, dict):
        raise InvalidArgument("the traffic rule must be a JSON object with 'labels', 'weights', 'rules', 'key', 'salt'")
    _control(call).change(call.names["model"], members, _by(call))
    return await report(call)


async def reset(call: HttpCall) -> web.Response:
    """Give the model the rule of its file again, and return what `report` returns."""
    await read_control_text(call)
    _control(call).reset(call.names["model"], _by(call))
    return await report(call)


def _control(call: HttpCall) -> TrafficControl:
    if call.kernel.traffic is None:
        raise Unsupported("this server has no traffic rules")
    return call.kernel.traffic


def _by(call: HttpCall) -> str:
    """Return who changes the rule, for the history."""
    return f"HTTP {peer_text(peer_of(call.http))}"
