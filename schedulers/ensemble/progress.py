"""The progress of one request to an ensemble: which tensors exist, which steps can start, what can be sent. Pure.

*Iterations.* The request itself is the first iteration. Each response of a decoupled step begins an iteration of its
own, with the tensors of the response; the steps that read these are executed once for each iteration. The static check
makes sure that all inputs of a step belong to the same stream of responses, and all outputs of the ensemble too.

*Order.* Responses of the ensemble have the order of the iterations, however fast the steps after a decoupled step are.

*Backpressure.* An iteration is consumed when all that was made from it was: its calls have ended, its responses were
taken by the client, and the iterations that began from it are consumed. Then the step that began it may send another
response.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from shm.tensor import Tensor

if TYPE_CHECKING:
    from schedulers.ensemble.plan import EnsemblePlan, Route


class SequenceValues(msgspec.Struct, frozen=True):
    """What a request or response says of its sequence."""

    correlation_id: int | str = 0
    start: bool = False
    end: bool = False


class Placed(msgspec.Struct, gc=False):
    """A tensor of the ensemble. Holds the lease of its span."""

    tensor: Tensor
    #: Whether its shape begins with a batch dimension.
    batched: bool
    #: What the model that made it says of the sequence; None if it says nothing.
    sequence: SequenceValues | None = None
    #: What the client gets instead, if it asked for classes or for a place: each tensor, and whether it has classes.
    for_client: list[tuple[Tensor, bool]] = []

    def shared(self) -> Placed:
        """Return the same tensor with a lease of its own, and without what only the client gets."""
        tensor = self.tensor
        span = None if tensor.span is None else tensor.span.shared()
        return Placed(Tensor("", tensor.datatype, tensor.shape, tensor.data, span), self.batched, self.sequence)

    def release(self) -> None:
        """Release all leases."""
        self.tensor.release()
        for tensor, _ in self.for_client:
            tensor.release()


class Iteration:
    """The tensors that belong together: of the request, or made from one response of a decoupled step."""

    __slots__ = ("begun_by", "parent", "pending", "started", "tensors", "uses")

    def __init__(self, uses: dict[str, int], parent: Iteration | None = None, begun_by: StepCall | None = None) -> None:
        #: Tensors that are there; None for one that its step, or the client, has left out.
        self.tensors: dict[str, Placed | None] = {}
        #: How often each tensor will be read; a tensor that was read that often is dropped.
        self.uses = uses
        self.started: set[int] = set()
        self.parent = parent
        self.begun_by = begun_by
        #: What was made from it and is not consumed: calls, iterations, and its response.
        self.pending = 0


class StepCall(msgspec.Struct, eq=False):
    """One execution of a step."""

    step: int
    iteration: Iteration
    #: Whether the model of the step is decoupled. Set by the driver.
    decoupled: bool = False
    #: Whether credit for each response is given when it arrives, not when it is consumed. Set by the driver.
    prepaid: bool = False
    responses: int = 0


class EnsembleProgress:
    """The state of one request to an ensemble. Owns the leases of all tensors in it, until `drop`."""

    def __init__(self, plan: EnsemblePlan, route: Route, sender: int | None = None) -> None:
        """`sender` is the decoupled step whose responses become the ensemble's, see `EnsemblePlan.sender`."""
        self._plan = plan
        self._route = route
        self._sender = sender
        self._root = Iteration(dict(route.uses))
        #: Iterations that may have tensors.
        self._living = {self._root: None}
        #: Iterations whose outputs are not sent, in order.
        self._unsent: deque[Iteration] = deque([] if sender is not None else [self._root])
        #: Iterations whose responses the client has not taken, in order.
        self._unconsumed: deque[Iteration] = deque()
        #: How many calls have not ended.
        self.in_flight = 0
        #: How many responses of the ensemble were sent.
        self.sent = 0
        #: Whether an output of the ensemble has arrived since `next_outputs` has found none to send.
        self.may_send = True
        #: Calls whose step may send one more response for each time that it is in the list. The driver empties it.
        self.credits: list[StepCall] = []
        self._call_count = 0

    @property
    def stuck(self) -> bool:
        """Whether a request without a call in flight cannot end well: an output is missing, or no step could start.

        An ensemble that is decoupled may send no response at all.
        """
        return not self._call_count or bool(self._unsent) or (not self.sent and not self._plan.spec.decoupled)

    # ---- tensors that arrive -----------------------------------------------------------------

    def begin(self, inputs: dict[str, Placed | None]) -> list[StepCall]:
        """Begin with the inputs of the request; returns the steps that can start. Takes over the leases."""
        for name in self._plan.optional_inputs:
            inputs.setdefault(name, None)
        return self._arrived(self._root, inputs)

    def responded(self, call: StepCall, outputs: dict[str, Placed]) -> list[StepCall]:
        """A call got a response with these tensors of the ensemble; returns the steps that can start.

        Takes over the leases. A tensor that the step should write and that is not among `outputs` counts as left out.
        """
        call.responses += 1
        iteration = call.iteration
        tensors = {name: outputs.get(name) for name in self._plan.steps[call.step].outputs.values()}
        if not call.decoupled:
            return self._arrived(iteration, tensors)
        if call.prepaid:
            self.credits.append(call)
        iteration.pending += 1
        begun = Iteration(dict(self._route.uses), iteration, call)
        begun.pending = 1  # until it is known what is made from it
        if call.step == self._sender:
            begun.pending += 1
            self._unsent.append(begun)
        self._living[begun] = None
        ready = self._arrived(begun, tensors)
        self._consumed(begun)
        return ready

    def ended(self, call: StepCall) -> None:
        """A call has ended: it got its final response, or it was never submitted."""
        self.in_flight -= 1
        iteration = call.iteration
        if iteration.begun_by is None:  # usual: what `_consumed` does, without a call
            iteration.pending -= 1
        else:
            self._consumed(iteration)

    def _arrived(self, iteration: Iteration, tensors: dict[str, Placed | None]) -> list[StepCall]:
        route, steps = self._route, self._plan.steps
        present, started = iteration.tensors, iteration.started
        for name, placed in tensors.items():
            if name in route.uses:
                present[name] = placed
                if name in route.outputs:
                    self.may_send = True
            elif placed is not None:
                placed.release()
        ready: list[StepCall] = []
        for name in tensors:
            for step in route.readers.get(name, ()):
                if step in started:
                    continue
                for tensor in steps[step].inputs.values():
                    if tensor not in present:
                        break
                else:
                    started.add(step)
                    ready.append(StepCall(step, iteration))
        count = len(ready)
        iteration.pending += count
        self.in_flight += count
        self._call_count += count
        return ready

    # ---- tensors that are read ---------------------------------------------------------------

    def inputs_of(self, call: StepCall) -> list[tuple[str, Placed]]:
        """Return the inputs of a call with leases for it, once; those that were left out are not among them."""
        taken: list[tuple[str, Placed]] = []
        inputs = self._plan.steps[call.step].inputs
        tensors, uses = call.iteration.tensors, call.iteration.uses
        seen: dict[str, Placed | None] = {}
        for name, tensor in inputs.items():
            if tensor in seen:  # two inputs read the same tensor
                again = seen[tensor]
                placed = None if again is None else again.shared()
            else:  # as `_read`, without a call for each input
                left = uses[tensor] = uses[tensor] - 1
                placed = tensors[tensor] if left else tensors.pop(tensor)
                if left and placed is not None:
                    placed = placed.shared()
                seen[tensor] = placed
            if placed is not None:
                taken.append((name, placed))
        return taken

    def _read(self, iteration: Iteration, tensor: str) -> Placed | None:
        """Return a tensor with a lease for the reader: the last one gets the lease of the tensor itself."""
        left = iteration.uses[tensor] = iteration.uses[tensor] - 1
        if not left:
            return iteration.tensors.pop(tensor)
        placed = iteration.tensors[tensor]
        return None if placed is None else placed.shared()

    def _send(self, iteration: Iteration, tensor: str) -> Placed | None:
        """Return an output with a lease for the response."""
        whole = iteration.tensors[tensor]
        placed = self._read(iteration, tensor)
        if placed is not whole and placed is not None and whole is not None:
            placed.for_client, whole.for_client = whole.for_client, []
        return placed

    def next_outputs(self) -> list[tuple[str, Placed]] | None:
        """Return the outputs of the next response of the ensemble with their leases, or None if it is not complete.

        Outputs that were left out are not among them.
        """
        self.may_send = False
        if not self._unsent:
            return None
        iteration = self._unsent[0]
        outputs = self._route.outputs
        for name in outputs:
            if name not in iteration.tensors:
                return None
        self.may_send = True
        self._unsent.popleft()
        self._unconsumed.append(iteration)
        self.sent += 1
        found = [(name, self._send(iteration, name)) for name in outputs]
        return [(name, placed) for name, placed in found if placed is not None]

    # ---- backpressure ------------------------------------------------------------------------

    def consumed(self, count: int) -> None:
        """The client took `count` responses of the ensemble."""
        for _ in range(min(count, len(self._unconsumed))):
            self._consumed(self._unconsumed.popleft())

    def prepay(self, call: StepCall) -> int:
        """Give the credit for later responses of a call at once. Returns that for those which have arrived."""
        call.prepaid = True
        return sum(iteration.begun_by is call for iteration in self._living)

    def _consumed(self, iteration: Iteration | None) -> None:
        """One thing that was made from `iteration` is consumed."""
        while iteration is not None:
            iteration.pending -= 1
            if iteration.pending or iteration.begun_by is None:
                return
            if not iteration.begun_by.prepaid:
                self.credits.append(iteration.begun_by)
            del self._living[iteration]
            for placed in iteration.tensors.values():  # what a step would have read that could not start
                if placed is not None:
                    placed.release()
            iteration = iteration.parent

    # ---- the end -----------------------------------------------------------------------------

    def drop(self) -> None:
        """Release all tensors: the request has failed."""
        for iteration in self._living:
            for placed in iteration.tensors.values():
                if placed is not None:
                    placed.release()
            iteration.tensors.clear()
        self._unsent.clear()

    def check(self) -> None:
        """Recompute the invariants."""
        assert self.in_flight >= 0
        for iteration in self._living:
            for name, placed in iteration.tensors.items():
                assert placed is None or iteration.uses[name] > 0, f"tensor '{name}' is kept and nobody will read it"
