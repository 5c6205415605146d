"""Each message has one base, which says who takes it, and is handled by those."""

from __future__ import annotations

import socket

import pytest

from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.worker.loop import Worker

#: Those between kernel and worker; front doors in processes of their own have others with the same base.
KINDS = [kind for kind in wire.kinds_of(wire.Message) if kind.__module__ == wire.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_is_accepted_by_those_whom_its_base_names(kind: type[wire.Message]) -> None:
    both_ways = kind in (wire.Transfer, wire.Chunk)
    assert (kind in wire.kinds_of(wire.ToWorker)) == (both_ways or not issubclass(kind, wire.ToKernel))
    assert (kind in wire.kinds_of(wire.ToKernel)) == issubclass(kind, wire.ToKernel)


def test_bases_are_no_messages() -> None:
    kinds = wire.kinds_of(wire.Message)
    assert not {wire.Message, wire.ToWorker, wire.Urgent, wire.ToKernel, wire.StartResponse} & {*kinds}
    assert {wire.Hello, wire.Execute, wire.Cancel, wire.Chunk} <= {*kinds}
    assert len(kinds) == len({*kinds})


def test_a_worker_handles_each_message_that_the_kernel_may_send() -> None:
    kernel, worker = socket.socketpair()
    with kernel:
        made = Worker(BlockingChannel(worker))
        # `Stop` ends the loop, and a model with sequences adds what ends one.
        handled = {*made._handlers, wire.Stop, wire.EndSequence}
        assert handled == {*wire.kinds_of(wire.ToWorker)}
        made.close()


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(ValueError, match="Executed"):
        wire.to_worker_decoder.decode(wire.encoder.encode(wire.Executed(1)))
    with pytest.raises(ValueError, match="Execute"):
        wire.to_kernel_decoder.decode(wire.encoder.encode(wire.Execute(1, [])))
