"""What a rollout does and when: the body of `POST /v2/models/M/rollout`, with its defaults. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kernel.errors import InvalidArgument
from kernel.traffic.settings import is_key

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Percent of the requests, ascending.
STEPS = (1, 5, 25, 50, 100)

_Version = Annotated[int, msgspec.Meta(ge=0)]
_Steps = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=100)], ...], msgspec.Meta(min_length=1, max_length=50)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=30 * 24 * 3600)]


class RolloutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checked rollout."""

    #: The version that is to get all requests.
    to: _Version
    #: The version that has them; None: the one with the largest share.
    stable: _Version | None = None
    steps: _Steps = STEPS
    #: The least time of a step.
    every_s: _Seconds = 600.0
    #: The least number of requests of the candidate in a step.
    least_requests: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)] = 300
    #: How long a step may last without a verdict; then the rollout pauses.
    step_timeout_s: _Seconds = 7200.0
    #: How long the candidate may take to become READY.
    load_timeout_s: _Seconds = 600.0
    #: How long the candidate may execute without an end of any execution.
    hang_s: Annotated[float, msgspec.Meta(gt=0, le=24 * 3600)] = 30.0
    guards: tuple[str, ...] = ("errors", "latency")
    #: Slower responses count for the guard `latency`, in milliseconds of execution; None: the 99 % quantile of the
    #: stable version, found at the begin.
    slow_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: As in `TrafficSettings`; None for the key of the model's traffic rule.
    key: str | None = None


#: The guards that there are.
GUARD_NAMES = ("errors", "latency")


def read_rollout(document: Mapping[str, Any]) -> RolloutSettings:
    """Return the rollout that `document` describes. Raises `InvalidArgument` with what was expected."""
    try:
        settings = msgspec.convert(document, RolloutSettings)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error)) from None
    if any(later <= earlier for earlier, later in zip(settings.steps, settings.steps[1:], strict=False)):
        raise InvalidArgument(f"the steps must ascend, and are {list(settings.steps)}")
    for name in settings.guards:
        if name not in GUARD_NAMES:
            raise InvalidArgument(f"'{name}' is no guard: expected {' or '.join(GUARD_NAMES)}")
    if not settings.guards or len(set(settings.guards)) < len(settings.guards):
        raise InvalidArgument(f"a rollout needs one or more different guards: {', '.join(GUARD_NAMES)}")
    if settings.key is not None and not is_key(settings.key):
        raise InvalidArgument(
            f"'{settings.key}' is no key: expected header:NAME, parameter:NAME, request-id or sequence"
        )
    if settings.stable == settings.to:
        raise InvalidArgument(f"version {settings.to} cannot be both the stable version and the candidate")
    return settings
