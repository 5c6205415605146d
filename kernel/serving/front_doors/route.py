"""Where the requests go that name a model, and perhaps a version of it. Pure.

A front door knows a route, and not the version that executes a request: `Kernel.submit` decides that, once, for each
request. What was prepared for a route holds for every version that it may lead to, because a request for a version
with another signature is checked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.errors import ServingError
    from kernel.serving.model import Model
    from kernel.serving.request import Request


class Wait(msgspec.Struct, frozen=True):
    """A rule cannot decide yet: the request waits until `WaitingRequests.decide_again` is called for the rule."""

    #: When the request is refused with `error`, in monotonic nanoseconds.
    until_ns: int
    error: ServingError


class SecondReceiver(Protocol):
    """Gets a request beside the version that executes it, such as a version that is tried with copies of requests."""

    def receive(self, request: Request) -> None:
        """Look at a checked `request` with placed tensors, before its version gets it. Never waits, and never raises.

        The request itself belongs to its version. `kernel.serving.routes.second.second_copy` makes one to submit.
        """


class WithSecond(msgspec.Struct, frozen=True):
    """A rule has chosen `model`, whose response the client gets, and a second receiver."""

    model: Model
    second: SecondReceiver


class RouteRule(Protocol):
    """Decides which version executes a request. A route without a rule leads to one version."""

    def choose(self, request: Request) -> Model | Wait | WithSecond:
        """Return the version for `request`, perhaps with a second receiver, or that the request has to wait.

        Called in `Kernel.submit`; never waits. Called once for each request, and once more after each wait. Raises
        `ServingError` to refuse the request.
        """

    def choose_for(self, request: Request, parent: Request) -> Model | None:
        """Return the version for a request without a version that is made for `parent`; None for the newest one.

        `request` says which sequence it belongs to; it may be `parent` itself. Never waits. Raises `ServingError`.
        """


class ModelRoute(msgspec.Struct, frozen=True):
    """The way of requests with one name and version, as long as the catalog has the same generation."""

    #: The signature: the specification of the versions that execute the requests.
    spec: ModelSpec
    #: The version that executes the requests; for a route with a rule, those for which it makes no difference.
    model: Model
    rule: RouteRule | None = None

    @property
    def in_flight(self) -> int:
        """How many requests have no final response yet."""
        return self.model.in_flight


def route_to(model: Model, rule: RouteRule | None = None) -> ModelRoute:
    """Return the route to a version, or to what `rule` chooses.

    Requests of a sequence that another version has begun go to that one, whatever the route is.
    """
    return ModelRoute(model.spec, model, rule or model.rule)
