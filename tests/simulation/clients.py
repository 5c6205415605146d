"""Clients of the simulation: each sends one request and records what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.request import Request
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from kernel.serving.response import Response
    from tests.simulation.plan import RequestPlan
    from tests.simulation.versions import SimulatedVersion
    from tests.simulation.world import World


class Client:
    """The sink of one request, and what the simulation knows of the request."""

    peer = ""

    def __init__(self, world: World, number: int, model: int, plan: RequestPlan) -> None:
        self._world = world
        self.number = number
        self.model = model
        self.plan = plan
        self.request: Request
        #: The version that took the request; None if the request was refused.
        self.version: SimulatedVersion | None = None
        self.refusal: ServingError | None = None
        self.responses: list[Response] = []
        self.error: ServingError | None = None
        #: Whether the model has given the final response, and whether the client has got it.
        self.ended = self.final = False
        self.left = False
        #: Its place among the requests that are queued at its version. A lost worker's requests come first again.
        self.order = 0
        #: Whether the scheduler has handled the event by which the request was queued.
        self.settled = False
        #: When it was queued for the last time.
        self.queued_ns = 0
        self.dispatched_ns: int | None = None
        #: How often it was given to an instance.
        self.dispatches = 0

    def __repr__(self) -> str:
        return f"r{self.number}"

    @property
    def is_inner(self) -> bool:
        """Whether it is a request of an ensemble's step."""
        return False

    @property
    def has_left(self) -> bool:
        """Whether nobody waits for the response any more."""
        return self.left

    @property
    def waits(self) -> bool:
        """Whether the request was accepted and has no final response."""
        return self.version is not None and not self.final

    def make(self, name: str, *, batching: bool, streaming: bool) -> Request:
        """Return the request."""
        plan = self.plan
        shape = [plan.rows, plan.width] if batching else [plan.width]
        count = plan.rows * plan.width if batching else plan.width
        self.request = Request(
            name,
            [Tensor("IN", "FP32", shape, bytes(4 * count))],
            self,
            id=str(self.number),
            parameters=dict(plan.parameters),
            correlation_id=plan.correlation_id,
            sequence_start=plan.start,
            sequence_end=plan.end,
            priority=plan.priority,
            timeout_us=plan.timeout_us,
            streaming=streaming,
        )
        return self.request

    def header(self, name: str) -> str:
        """Return a header of the request, which is a parameter in the plan."""
        return str(self.plan.parameters.get(name, ""))

    # ---- kernel.serving.response.Sink ----------------------------------------------------------

    def send(self, response: Response) -> None:
        """Take a response. The client reads it later, or never if it has left."""
        world = self._world
        if response.refused:
            world.check(self.refusal is None, "%s is refused twice", self)
            self.refusal = response.error
            return
        self.responses.append(response)
        world.check(not self.final, "%s got a response after its final one", self)
        if response.error is not None:
            self.error = self.error or response.error
        world.tell("%s gets %s", self, _text(response))
        if response.final:
            self.final = True
            world.responded(self)
        if self.left or not self.plan.reading_ns:
            self._read(response)
        else:
            world.after(self.plan.reading_ns, lambda: self._read(response))

    def _read(self, response: Response) -> None:
        response.release()
        if not self.left:
            self.request.consumed()

    def leave(self) -> None:
        """Disconnect, if the final response has not come."""
        if not self.left and self.waits:
            self.left = True
            self._world.tell("the client of %s disconnects", self)
            self._world.kernel.cancel(self.request)


class InnerRequest(Client):
    """The request of a step, which an ensemble has submitted for a client's."""

    def __init__(self, world: World, request: Request, plan: RequestPlan, model: int) -> None:
        super().__init__(world, -1, model, plan)
        self.request = request

    def __repr__(self) -> str:
        return f"r{self.request.id} for {self.request.model_name}"

    @property
    def is_inner(self) -> bool:
        return True

    @property
    def has_left(self) -> bool:
        return self.request.cancelled


def _text(response: Response) -> str:
    what = f"the error '{response.error.message}'" if response.error is not None else "a response"
    if response.empty:
        return "the end of its responses"
    return what if response.final else f"{what}, more follow"
