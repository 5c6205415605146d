"""A worker that calls models of the kernel, played."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.helper.process import Helper
from backends.supervision.handle import WorkerHandle
from backends.transport import wire
from kernel.loop.busy_poll import LoopPoller
from shm.tensor import RequestedOutput, Tensor
from tests.backends.supervision.played_worker import (
    Bench,
    run_on,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.errors import ServingError
    from kernel.serving.calls import Execution
    from kernel.serving.request import Request


class PlayedCalls:
    """Takes calls as `kernel.serving.calls.Calls` does; the test responds to them."""

    def __init__(self) -> None:
        self.calls: list[Request] = []
        self.executions: list[Execution | None] = []
        self.ended_calls: list[Request] = []
        self.requeued_calls: list[Request] = []
        self.refusal: ServingError | None = None

    def submit(self, call: Request, execution: Execution | None, *, streaming: bool, namespace: str = "") -> None:
        if self.refusal is not None:
            call.release_leases()
            raise self.refusal
        call.leased = any(tensor.span is not None for tensor in call.inputs)
        self.calls.append(call)
        self.executions.append(execution)

    def requeued(self, call: Request) -> None:
        self.requeued_calls.append(call)

    def ended(self, call: Request) -> None:
        self.ended_calls.append(call)

    def error_of(self, call: Request, error: ServingError, *, was_refused: bool = False) -> ServingError:
        return error


class CallBench(Bench):
    """A bench whose model may call others."""

    async def start(self) -> None:
        await super().start()
        self.calls = PlayedCalls()
        self.model.instances.forget(self.handle)
        self.session.arena_byte_size = 1 << 15
        self.handle = WorkerHandle(
            "m_0", self.session, self.model, LoopPoller(self.polling), Helper(self.worker, 1 << 20), None,
            self.calls,  # type: ignore[arg-type]  # a double
        )  # fmt: skip
        self.model.instances.add(self.handle)


def calling(scenario: Callable[[CallBench], Awaitable[None]]) -> None:
    """Run a scenario with a worker that may call."""
    run_on(CallBench(), scenario)


def submit(
    number: int, *inputs: Tensor, parents: tuple[int, ...] = (1,), trace_parent: int = 0, **more: bool
) -> wire.Submit:
    ref = wire.RequestMessage(0, list(inputs), [RequestedOutput("OUT")], "id", 3, 7, 0, 9, {"a": 1})
    return wire.Submit(number, "other", "2", ref, list(parents), trace_parent=trace_parent, **more)


SMALL = Tensor("IN", "UINT8", [4], b"abcd")
