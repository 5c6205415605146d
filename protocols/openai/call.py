"""What a handler of this front door gets: one HTTP request, and what all requests of a server share."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec

from protocols.http.bodies import read_body_into
from protocols.openai.errors import ApiError
from protocols.openai.meter import GenerationMeter

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.observe.generation_statistics import GenerationStatistics
    from kernel.serving.interface import KernelInterface
    from kernel.serving.route import ModelRoute
    from protocols.http import web
    from protocols.http.request_rules import RequestRules
    from protocols.openai.api_keys import ApiKey, KeyUse
    from protocols.openai.generation import GenerationIntake, SilenceWatch
    from protocols.openai.meter import GenerationCounts
    from protocols.openai.plans import GenerationPlan
    from protocols.openai.preparing import TextTasks

#: The header with the id of a request, which clients log.
REQUEST_ID_HEADER = "x-request-id"

#: The most characters of an id that a client gives.
_MAX_ID = 128


class DoorSettings(msgspec.Struct, frozen=True):
    """What all requests of a server share."""

    kernel: KernelInterface
    intake: GenerationIntake
    silence: SilenceWatch
    rules: RequestRules
    #: The largest body in bytes.
    max_input_size: int
    #: None if the operator has not said it.
    default_max_tokens: int | None
    #: Returns the time in seconds since the epoch.
    now_s: Callable[[], float]
    #: When a model was first seen, in seconds since the epoch.
    created_s: Callable[[str], int]
    texts: TextTasks
    counts: GenerationCounts
    #: The models that clients are loading over this front door.
    loading: set[str] = msgspec.field(default_factory=set)

    def statistics_of(self, name: str, version: str) -> GenerationStatistics:
        """Return the statistics of a model version."""
        return self.counts.of(name, version, self.kernel.catalog.ready_names())

    def meter(
        self, route: ModelRoute, plan: GenerationPlan, begin_ns: int, use: KeyUse | None, *, ready: bool
    ) -> GenerationMeter:
        """Return what counts the tokens of a client's request, which came at `begin_ns`, and in the use of its key."""
        statistics = self.statistics_of(route.spec.name, route.model.version_text)
        whole = not route.spec.decoupled
        return GenerationMeter(statistics, plan.choices, begin_ns, use, stream=plan.stream, ready=ready, whole=whole)


class OpenAiCall:
    """One HTTP request. `names` are parts of the path, such as the model."""

    __slots__ = ("door", "http", "key", "key_use", "names", "request_id", "response_headers")

    def __init__(
        self,
        http: web.BaseRequest,
        names: dict[str, str],
        door: DoorSettings,
        response_headers: dict[str, str],
        key: ApiKey | None = None,
        key_use: KeyUse | None = None,
    ) -> None:
        self.http = http
        #: The API key of the client; None if it needs none.
        self.key = key
        #: Of an inference with a key that has limits: what it has used.
        self.key_use = key_use
        self.names = names
        self.door = door
        self.request_id = request_id_of(http)
        #: Headers of every response; a handler adds them itself only where it begins to send.
        self.response_headers = {**response_headers, REQUEST_ID_HEADER: self.request_id}

    def admits(self, model: str) -> bool:
        """Whether the client's key is for `model`."""
        return self.key is None or self.key.admits(model)

    def check_model(self, model: str) -> None:
        """Raise `ApiError` if the client's key is not for `model`."""
        if self.key is not None and not self.key.admits(model):
            raise ApiError(f"The API key '{self.key.name}' is not for model '{model}'", 403, param="model",
                           code="model_not_allowed")  # fmt: skip

    async def read_body(self, add: Callable[[bytes], None]) -> None:
        """Call `add` with each part of the body. Raises `ServingError`."""
        if self.http.headers.get("Content-Encoding", "identity") != "identity":
            raise ApiError("Unsupported content-encoding, only 'identity' is supported.")
        await read_body_into(self.http, self.door.max_input_size, self._too_large, add)

    def _too_large(self, byte_size: int) -> ServingError:
        return ApiError(
            f"Request size of {byte_size} bytes exceeds the maximum allowed input size of {self.door.max_input_size} "
            "bytes. Use --http-max-input-size to increase the limit.",
            413,
            code="content_too_large",
        )


def request_id_of(http: web.BaseRequest) -> str:
    """Return the client's id of a request if it is short and printable, else a new one."""
    given = http.headers.get(REQUEST_ID_HEADER, "")
    return given if 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable() else uuid.uuid4().hex
