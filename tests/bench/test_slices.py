"""Slices of load in which two states of a server alternate."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter

import pytest

from bench.load import BadResponse, Spec
from bench.slices import OpenConnections, alternate, process_cpu_ns

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class OneResponseEach:
    """Responds to each request of a connection, and counts them."""

    def __init__(self, response: bytes = RESPONSE) -> None:
        self._response = response
        self.requests: Counter[int] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve, args=(number,)) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def _serve(self, number: int) -> None:
        connection, _ = self._listener.accept()
        with connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                self.requests[number] += 1
                connection.sendall(self._response)

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        self._listener.close()


def spec(port: int) -> Spec:
    return Spec("http", port, 2, ["m"], 0.0, os.getpid())


def test_as_many_requests_are_sent_as_are_wanted_and_all_have_their_responses() -> None:
    server = OneResponseEach()
    with OpenConnections(spec(server.port)) as connections:
        for count in (1, 2, 7):
            before = server.requests.total()
            connections.exchange(count)
            assert server.requests.total() - before == count
    server.close()


def test_a_response_that_is_an_error_ends_the_measurement() -> None:
    server = OneResponseEach(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
    with OpenConnections(spec(server.port)) as connections, pytest.raises(BadResponse, match="500 No"):
        connections.exchange(2)
    server.close()


def test_both_states_are_measured_as_often_in_an_order_that_no_drift_favours() -> None:
    states: list[bool] = []

    def measure(state: bool) -> float:
        states.append(state)
        return 11.0 if state else 10.0

    found = alternate(measure, 0.0, random.Random(1))
    assert len(found.groups) == 4
    measured = states[2:]  # the first of each state is dropped
    groups = {tuple(measured[place : place + 4]) for place in range(0, len(measured), 4)}
    assert groups == {(True, False, False, True), (False, True, True, False)}
    assert all(group.before == (10.0, 10.0) and group.now == (11.0, 11.0) for group in found.groups)
    excess, difference = found.excess(), found.difference()
    assert excess.low == excess.value == excess.high == pytest.approx(0.1)
    assert (found.before, difference.value) == (10.0, 1.0)
    assert found.excess(1.0).value == pytest.approx(0.2)


def test_slices_that_were_disturbed_and_a_steady_drift_do_not_change_the_result() -> None:
    generator = random.Random(1)
    speed = 1.0

    def measure(state: bool) -> float:
        nonlocal speed
        speed *= 1.0001
        disturbance = generator.random() if generator.random() < 0.5 else 0.0
        return speed * (1.1 if state else 1.0) * (1 + disturbance + 0.01 * generator.random())

    excess = alternate(measure, 0.0, random.Random(1), least_groups=60).excess()
    assert excess.value == pytest.approx(0.1, abs=0.01)
    assert excess.low < 0.1 < excess.high
    assert excess.high - excess.low < 0.03


def test_the_processor_time_of_a_process_is_that_of_all_its_threads() -> None:
    before_ns = process_cpu_ns(os.getpid())
    own_ns = time.thread_time_ns()

    def work() -> None:
        begin_ns = time.thread_time_ns()
        while time.thread_time_ns() - begin_ns < 20_000_000:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert time.thread_time_ns() - own_ns < 20_000_000
    assert process_cpu_ns(os.getpid()) - before_ns >= 20_000_000


def test_a_process_that_has_ended_has_no_processor_time() -> None:
    with pytest.raises(OSError, match="Invalid argument|No such process"):
        process_cpu_ns(1 << 22)
