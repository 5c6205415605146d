"""The HTTP front door: every request of port 8000 goes through `_answer`, the only place that knows errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion10, HttpVersion11, web

from kernel.errors import ServingError
from protocols.http.body import BodyTooSlow, TooManyChunks
from protocols.http.bugs import log_bug
from protocols.http.call import Call
from protocols.http.lane.lane import Lane
from protocols.http.listener import Listener
from protocols.http.replies import error_reply
from protocols.http.routes import find_endpoint, request_path
from protocols.status import HTTP_STATUS

if TYPE_CHECKING:
    import socket

    from kernel.router import Kernel

#: Triton's default of --http-max-input-size.
DEFAULT_MAX_INPUT_SIZE = 64 << 20


class HttpServer:
    """Serves Triton's HTTP API on a bound socket. A `protocols.frontend.FrontDoor`."""

    def __init__(
        self,
        kernel: Kernel,
        sock: socket.socket,
        *,
        max_input_size: int = DEFAULT_MAX_INPUT_SIZE,
        lane: bool = True,
    ) -> None:
        """The server owns `sock` from `start` on. `max_input_size` is in bytes, see `Call`.

        Without `lane` aiohttp answers inference requests, too, only slower.
        """
        self._kernel = kernel
        self._max_input_size = max_input_size
        self._listener = Listener(sock, "HTTPService", self._answer, Lane(kernel, max_input_size) if lane else None)

    @property
    def title(self) -> str:
        return self._listener.title

    async def start(self) -> None:
        await self._listener.start()

    async def stop(self, grace_s: float) -> None:
        await self._listener.stop(grace_s)

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        if not _well_framed(http):
            return _closing(error_reply(400, "Bad Request", plain=True))
        found = find_endpoint(request_path(http.raw_path))
        if found is None:
            return error_reply(404, "Not Found", plain=True)
        endpoint, names = found
        handler = endpoint.handlers.get(http.method)
        if handler is None:
            return error_reply(405, "Method Not Allowed", plain=endpoint.plain_errors)
        call = Call(http, self._kernel, names, self._max_input_size, plain_errors=endpoint.plain_errors)
        try:
            return await handler(call)
        except ServingError as error:
            return error_reply(
                HTTP_STATUS[error.code], error.message, plain=call.plain_errors, headers=call.error_headers
            )
        except BodyTooSlow:
            return _closing(error_reply(408, "Request Timeout", plain=True))
        except TooManyChunks as error:
            return _closing(error_reply(400, str(error), plain=call.plain_errors))
        except ConnectionError:
            raise  # the client has gone, aiohttp cleans up
        except Exception:
            return _bug(http)


def _bug(http: web.BaseRequest) -> web.StreamResponse:
    """Answer for the exception that is being handled."""
    text = log_bug(f"{http.method} {http.raw_path}")
    if http.writer.output_size > 0:
        raise ConnectionError("the response has been begun, an error cannot be sent any more")
    return error_reply(500, text)


def _well_framed(http: web.BaseRequest) -> bool:
    """Whether the request is HTTP/1.1, or HTTP/1.0 without what that version cannot frame (RFC 9112, 6.1)."""
    return http.version == HttpVersion11 or (http.version == HttpVersion10 and "Transfer-Encoding" not in http.headers)


def _closing(reply: web.Response) -> web.Response:
    reply.force_close()
    return reply
