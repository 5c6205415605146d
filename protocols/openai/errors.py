"""Errors of the OpenAI front door: their statuses, and bodies as OpenAI's and Triton's clients read them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import ErrorCode, InvalidArgument, ModelNotFound, NoAvailableVersion, ServingError
from protocols.status import TOO_MANY_REQUESTS, http_status

if TYPE_CHECKING:
    from collections.abc import Mapping

#: OpenAI's names for kinds of errors, by status; others are `invalid_request_error`.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    TOO_MANY_REQUESTS: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}

#: Bodies that Triton's clients compare have `error` as their only member with these statuses.
_ERROR_ALONE = (401, 413)

#: The most characters of the text of an error. It may repeat what a client has sent, or what a chat template says.
MAX_MESSAGE = 2048

_encoder = msgspec.json.Encoder()


class ApiError(InvalidArgument):
    """A request that this front door refuses itself."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None, kind: str = ""
    ) -> None:
        """`param` is the field that is wrong. `kind` is pydantic's name for what is wrong with it, for status 422."""
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} (and more)")
        self.status = status
        self.param = param
        self.code_text = code
        self.kind = kind
        #: After how many seconds the client may try again; 0 where that would not help.
        self.retry_after_s = 0


class Mismatch(Exception):
    """A value does not fit its field. The message and the kind are pydantic's, which clients of Triton read."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def invalid_field(name: str, kind: str, message: str) -> ApiError:
    """Return the error for a field with a wrong value: 422, as in Triton."""
    return ApiError(message, 422, param=name, kind=kind)


def refused_field(name: str, reason: str) -> ApiError:
    """Return the error for a field that has no effect here, and must not be ignored."""
    return ApiError(f"'{name}' is not supported: {reason}", param=name, code="unsupported_parameter")


def unknown_model(name: str, status: int = 400) -> ApiError:
    """Return Triton's error for a model that does not exist."""
    return ApiError(f"Unknown model: {name}", status, param="model", code="model_not_found")


def status_of(error: ServingError) -> int:
    """Return the status of a response with `error`. Clients repeat requests with 409 and from 500 on, so that what is
    not supported is 400."""
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, (ModelNotFound, NoAvailableVersion)) or error.code is ErrorCode.UNSUPPORTED:
        return 400
    return http_status(error)


def error_members(error: ServingError) -> dict[str, Any]:
    """Return what stands in the member `error` of a body, and of an event within a stream."""
    status = status_of(error)
    members: dict[str, Any] = {"message": error.text, "type": _TYPES.get(status, "invalid_request_error")}
    if isinstance(error, ApiError):
        return members | {"param": error.param, "code": error.code_text}
    missing = isinstance(error, (ModelNotFound, NoAvailableVersion))
    return members | {"param": "model" if missing else None, "code": "model_not_found" if missing else None}


def error_body(error: ServingError) -> bytes:
    """Return the body of a response with `error`.

    `error` is what OpenAI's clients read, `detail` what Triton's tests and other clients of its front end read.
    """
    members = error_members(error)
    if status_of(error) in _ERROR_ALONE:
        return _encoder.encode({"error": members})
    detail: str | list[Mapping[str, Any]] = members["message"]
    if isinstance(error, ApiError) and error.kind:
        detail = [{"type": error.kind, "loc": ["body", *(error.param or "").split(".")], "msg": error.text}]
        members["message"] = f"{error.param}: {error.text}" if error.param else error.text
    return _encoder.encode({"error": members, "detail": detail})


def error_event(error: ServingError) -> bytes:
    """Return the event that ends a stream with `error`: neither `[DONE]` nor a chunk follows."""
    return b"data: %b\n\n" % _encoder.encode({"error": error_members(error)})
