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

from bench.load import Spec
from bench.load_clients import BadResponse
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


def test_both_states_are_measured_as_often_and_each_pair_one_directly_after_the_other() -> None:
    states: list[bool] = []

    def measure(state: bool) -> float:
        states.append(state)
        return 11.0 if state else 10.0

    found = alternate(measure, 0.0, random.Random(1))
    assert len(found.before) == len(found.now) == 6
    measured = states[2:]  # the first of each state is dropped
    assert all(first is not second for first, second in zip(measured[::2], measured[1::2], strict=True))
    assert all(measured[place] is measured[place + 3] for place in range(0, len(measured), 4)), "A B B A"
    assert found.excess.median == pytest.approx(0.1)
    assert (found.difference.low, found.difference.high) == (1.0, 1.0)


def test_a_steady_drift_of_the_machine_does_not_change_the_result() -> None:
    speed = 1.0

    def measure(state: bool) -> float:
        nonlocal speed
        speed *= 1.02
        return speed * (1.1 if state else 1.0)

    found = alternate(measure, 0.0, random.Random(1), least_pairs=40)
    assert found.excess.median == pytest.approx(0.1, abs=0.025)


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
