"""Models of a process execute one at a time, in the order in which they ask."""

from __future__ import annotations

import threading

import pytest

from backends.worker.shared.turn import Turn


class Model:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def enter_turn(self) -> None:
        self._log.append(f"{self.name} in")

    def leave_turn(self) -> None:
        self._log.append(f"{self.name} out")


def test_a_model_that_goes_on_costs_no_change() -> None:
    turn, log = Turn(), list[str]()
    a, b = Model("a", log), Model("b", log)
    for model in (a, a, b, a):
        with turn.of(model):
            pass
    assert log == ["a in", "a out", "b in", "b out", "a in"]


def test_the_turn_goes_to_those_who_wait_in_their_order() -> None:
    turn, order = Turn(), list[str]()
    waiting: list[threading.Thread] = []
    models = [Model(name, []) for name in "abc"]

    def take(model: Model) -> None:
        with turn.of(model):
            order.append(model.name)

    with turn.of(Model("first", [])):
        for number, model in enumerate(models, 1):
            thread = threading.Thread(target=take, args=(model,))
            thread.start()
            waiting.append(thread)
            while len(turn._waiting) < number:  # one after the other
                pass
    for thread in waiting:
        thread.join(30)
    assert order == list("abc")


def test_a_model_whose_turn_fails_gives_it_on() -> None:
    turn, log = Turn(), list[str]()
    with pytest.raises(KeyError), turn.of(Model("a", log)):
        raise KeyError
    with turn.of(Model("b", log)):
        assert log == ["a in", "a out", "b in"]


def test_a_model_that_has_ended_takes_away_what_it_has_changed_once() -> None:
    turn, log = Turn(), list[str]()
    a, b = Model("a", log), Model("b", log)
    with turn.of(a):
        pass
    turn.forget(a)
    turn.forget(b)
    with turn.of(b):
        assert log == ["a in", "a out", "b in"]
