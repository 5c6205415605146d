"""Inputs that a model keeps are left alone until it lets them go."""

from __future__ import annotations

import numpy as np

from backends.transport import wire
from backends.worker.held_inputs import HeldInputs


class Bench:
    def __init__(self) -> None:
        self.sent: list[wire.ToKernel] = []
        self.foreign_held = 0
        self.held = HeldInputs(self.sent.append, self._foreign)

    def _foreign(self) -> None:
        self.foreign_held += 1

    def array(self, number: int, *, foreign: bool = False) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        data = self.held.watch(number, memoryview(bytearray(64)), foreign=foreign)
        return np.frombuffer(data, np.float32).reshape(4, 4)[1:].reshape(-1)


def test_nothing_is_said_of_inputs_that_were_used_and_dropped() -> None:
    bench = Bench()
    bench.array(1)
    bench.array(1, foreign=True)
    assert bench.held.watched
    bench.held.answered([1])
    bench.held.report_freed()
    assert not bench.held.watched
    assert bench.sent == []
    assert bench.foreign_held == 0


def test_an_input_is_held_as_long_as_any_array_over_it_lives() -> None:
    bench = Bench()
    kept = bench.array(1)
    bench.array(2)
    bench.held.answered([1, 2])
    assert bench.sent == [wire.InputsHeld([1])]
    part = kept[2:].view(np.uint8)
    del kept
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1])]
    del part
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1]), wire.InputsFreed([1])]
    bench.held.report_freed()
    assert len(bench.sent) == 2


def test_a_request_is_free_when_the_last_of_its_inputs_is() -> None:
    bench = Bench()
    first, second = bench.array(1), bench.array(1)
    bench.held.answered([1])
    del first
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1])]
    del second
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1]), wire.InputsFreed([1])]


def test_a_request_without_an_answer_is_not_judged() -> None:
    bench = Bench()
    bench.array(1)
    kept = bench.array(2)
    bench.held.answered([1])
    assert bench.sent == []
    assert bench.held.watched
    del kept


def test_a_model_that_keeps_a_clients_memory_is_told_of_once_for_each_answer() -> None:
    bench = Bench()
    kept = bench.array(1, foreign=True)
    bench.held.answered([1])
    assert bench.foreign_held == 1
    assert bench.sent == []
    bench.held.answered([1])
    assert bench.foreign_held == 1
    del kept


def test_whoever_answers_while_it_uses_its_inputs_does_not_keep_them() -> None:
    bench = Bench()
    used = bench.array(1, foreign=True)
    bench.held.answered([1], finally_used=False)
    assert bench.foreign_held == 0
    del used
