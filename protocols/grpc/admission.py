"""Which calls are refused to clients that do not send the secret header of a restriction. Pure.

Every RPC belongs to one of Triton's nine categories; a call is refused before its handler is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.restricted import Category

if TYPE_CHECKING:
    from protocols.grpc.h2.headers import RequestHead
    from protocols.restricted import Restriction, Restrictions

_INFERENCE_SERVICE = "inference.GRPCInferenceService"

_RPCS: dict[Category, tuple[str, ...]] = {
    Category.HEALTH: ("ServerLive", "ServerReady", "ModelReady"),
    Category.METADATA: ("ServerMetadata", "ModelMetadata"),
    Category.INFERENCE: ("ModelInfer", "ModelStreamInfer"),
    Category.SHARED_MEMORY: tuple(
        f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")
    ),
    Category.MODEL_CONFIG: ("ModelConfig",),
    Category.MODEL_REPOSITORY: ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    Category.STATISTICS: ("ModelStatistics",),
    Category.TRACE: ("TraceSetting",),
    Category.LOGGING: ("LogSettings",),
}

#: The category of each call by its path.
CATEGORIES: dict[str, Category] = {
    **{f"/{_INFERENCE_SERVICE}/{name}": category for category, names in _RPCS.items() for name in names},
    "/grpc.health.v1.Health/Check": Category.HEALTH,
    "/grpc.health.v1.Health/Watch": Category.HEALTH,
    # Which services there are is metadata of the server; Triton has no reflection.
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Category.METADATA,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Category.METADATA,
}


class Admission:
    """Refuses calls. Made only where anything is restricted."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions: dict[str, Restriction] = {}
        for path, category in CATEGORIES.items():
            restriction = restrictions.of(category)
            if restriction is not None:
                self._restrictions[path] = restriction

    def refusal(self, request_head: RequestHead) -> str | None:
        """Return the error text for a call without the header that it needs, None for a call that is allowed."""
        restriction = self._restrictions.get(request_head.path)
        if restriction is None:
            return None
        name = restriction.header.lower()
        # Of a header that is sent twice Triton's multimap returns the first.
        value = next((value for found, value in request_head.fields if found == name), None)
        if restriction.admits(None if value is None else value.encode("latin-1")):
            return None
        return restriction.message
