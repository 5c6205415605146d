"""Whoever waits reads; urgent messages reach their handler from any thread."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.transport.framing import frame
from backends.worker.message_reader import KernelGone, KernelMessageReader

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bench:
    """A mailbox and the kernel's end of its socket."""

    def __init__(self) -> None:
        self.kernel, worker = socket.socketpair()
        self.channel = BlockingChannel(worker)
        self.urgent: list[wire.ToWorker] = []
        self.mailbox = KernelMessageReader(self.channel, dict.fromkeys(wire.kinds_of(wire.Urgent), self.urgent.append))

    def send(self, *messages: wire.Message) -> None:
        self.kernel.sendall(b"".join(frame(wire.encoder.encode(message)) for message in messages))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.kernel.close()
    made.channel.close()


def test_messages_for_the_main_thread_come_in_order(bench: Bench) -> None:
    bench.send(wire.EndSequence(1), wire.Execute(2, []), wire.Stop())
    assert [type(bench.mailbox.next()) for _ in range(3)] == [wire.EndSequence, wire.Execute, wire.Stop]


def test_urgent_messages_are_handled_while_others_wait(bench: Bench) -> None:
    bench.send(wire.Execute(1, []), wire.Cancel([7]))
    bench.mailbox.poll()
    assert bench.urgent == [wire.Cancel([7])]
    assert isinstance(bench.mailbox.next(), wire.Execute)


def test_polling_without_messages_does_not_wait(bench: Bench) -> None:
    bench.mailbox.poll()
    assert bench.urgent == []


def test_a_second_thread_is_woken_by_what_the_main_thread_reads(bench: Bench) -> None:
    woken = threading.Event()

    def wait_for_credit() -> None:
        bench.mailbox.wait_until(lambda: bool(bench.urgent))
        woken.set()

    waiter = threading.Thread(target=wait_for_credit)
    waiter.start()
    bench.send(wire.Credit(1, 5), wire.Stop())
    assert isinstance(bench.mailbox.next(), wire.Stop)
    waiter.join(60)
    assert woken.is_set()


def test_the_main_thread_is_woken_by_what_a_second_thread_reads(bench: Bench) -> None:
    reading = threading.Event()
    receive = bench.channel.receive

    def receive_slowly(*, wait: bool = True) -> list[bytes] | None:
        reading.set()
        return receive(wait=wait)

    bench.channel.receive = receive_slowly  # type: ignore[method-assign]
    reader = threading.Thread(target=bench.mailbox.wait_until, args=[lambda: bool(bench.urgent)])
    reader.start()
    assert reading.wait(60)
    taken: list[wire.ToWorker] = []
    main = threading.Thread(target=lambda: taken.append(bench.mailbox.next()))
    main.start()
    bench.send(wire.EndSequence(1))
    main.join(60)
    assert taken == [wire.EndSequence(1)]
    bench.send(wire.Credit(1, 5))
    # Whichever of the two reads it: the credit is the second thread's.
    bench.mailbox.wait_until(lambda: bool(bench.urgent))
    reader.join(60)
    assert not reader.is_alive()


def test_the_end_of_the_connection_ends_every_wait(bench: Bench) -> None:
    bench.send(wire.Stop())
    bench.kernel.close()
    assert isinstance(bench.mailbox.next(), wire.Stop)
    with pytest.raises(KernelGone):
        bench.mailbox.next()


class ScriptedChannel:
    """Receives what it is told to, and notes whether it was to wait for it."""

    def __init__(self, *received: list[bytes] | None) -> None:
        self._received = list(received)
        self.waited: list[bool] = []

    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        """Find the next script entry, as a socket with the first bytes of a message: perhaps not a whole one."""
        assert timeout_ms == 0, "it polls without waiting"
        return [(0, 1)]

    def receive(self, *, wait: bool = True) -> list[bytes] | None:
        self.waited.append(wait)
        return self._received.pop(0)


_MESSAGE = wire.encoder.encode(wire.EndSequence(1))
_HOUR_NS = 3_600 * 10**9


def _mailbox(poll_ns: int, *received: list[bytes] | None) -> tuple[KernelMessageReader, list[bool]]:
    channel = ScriptedChannel(*received)
    mailbox = KernelMessageReader(channel, {})  # type: ignore[arg-type]  # what it uses of a channel
    mailbox.poll_ns = poll_ns
    return mailbox, channel.waited


@pytest.fixture
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process wants the processor: polling does not pause."""
    monkeypatch.setattr("backends.worker.message_reader.yield_processor", lambda: (time.monotonic_ns(), 0))


@pytest.mark.usefixtures("idle_machine")
def test_a_worker_polls_when_its_last_wait_was_short() -> None:
    mailbox, waited = _mailbox(_HOUR_NS, [_MESSAGE], [], [], [_MESSAGE])
    mailbox.next()
    assert waited == [True]
    mailbox.next()
    assert waited == [True, False, False, False]


def test_a_worker_whose_last_wait_was_long_sleeps() -> None:
    mailbox, waited = _mailbox(1, [_MESSAGE], [_MESSAGE])
    mailbox.next()
    mailbox.next()
    assert waited == [True, True]


def test_a_worker_that_polls_in_vain_sleeps_and_goes_on_to_sleep() -> None:
    mailbox, waited = _mailbox(_HOUR_NS, [_MESSAGE], [], [_MESSAGE], [_MESSAGE])
    mailbox.next()
    mailbox.poll_ns = 1
    mailbox.next()
    assert waited == [True, False, True]
    mailbox.next()
    assert waited == [True, False, True, True]


def test_a_worker_that_may_not_poll_sleeps() -> None:
    mailbox, waited = _mailbox(_HOUR_NS, [_MESSAGE], [_MESSAGE])
    mailbox.next()
    mailbox.poll_ns = 0
    mailbox.next()
    assert waited == [True, True]


@pytest.mark.usefixtures("idle_machine")
def test_the_end_of_the_connection_is_seen_while_polling() -> None:
    mailbox, waited = _mailbox(_HOUR_NS, [_MESSAGE], [], None)
    mailbox.next()
    with pytest.raises(KernelGone):
        mailbox.next()
    assert waited == [True, False, False]
