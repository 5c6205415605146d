"""Health of the server and of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument, ModelNotFound, ModelNotReady, NoAvailableVersion
from protocols.http.responses import empty_response

if TYPE_CHECKING:
    from protocols.http import web
    from protocols.http.call import HttpCall


async def live(call: HttpCall) -> web.Response:
    return empty_response(plain=True, status=200 if call.kernel.live() else 400)


async def ready(call: HttpCall) -> web.Response:
    return empty_response(plain=True, status=200 if await call.kernel.server_is_ready() else 400)


async def model_ready(call: HttpCall) -> web.Response:
    """Respond whether a version is ready; one that does not exist is not ready (Triton)."""
    try:
        found = await call.kernel.model_is_ready(call.names["model"], call.names["version"])
    except (ModelNotFound, NoAvailableVersion, ModelNotReady):
        found = False
    if not found:
        raise InvalidArgument("Model version not ready")
    return empty_response(plain=True)
