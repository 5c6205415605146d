"""The last two minutes: samples of counters, in memory that does not grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.testing import model_spec
from protocols.http.dashboard import history as module
from protocols.http.dashboard.history import SAMPLES, History, ServerSample
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    from kernel.serving.model import Model

S = 1_000_000_000


class HistoryLab:
    """A history, and models whose counters the test sets."""

    def __init__(self, *names: str) -> None:
        self.lab = FrontDoorLab()
        self.models = {name: self.model(name) for name in names}
        self.history = History()
        self.now_ns = S

    def model(self, name: str) -> Model:
        """Return a new model with this name."""
        self.lab.add_model(model_spec(name), lambda request: None)
        [model] = self.lab.catalog.ready_models(name)
        return model

    def sample(self, times: int = 1, **server: float) -> None:
        for _ in range(times):
            self.now_ns += 2 * S
            self.history.begin(self.now_ns)
            for model in self.models.values():
                self.history.add(model)
            figures = {"queue": 0, "tensor_byte_size": 0, "cpu_s": 0.0} | server
            self.history.end(ServerSample(int(figures["queue"]), int(figures["tensor_byte_size"]), figures["cpu_s"]))

    def figures(self, name: str) -> module.Figures | None:
        return self.history.shown(self.now_ns, (name, "1")).model


def test_rates_and_durations_are_those_between_two_samples() -> None:
    lab = HistoryLab("a", "idle")
    lab.sample()
    statistics = lab.models["a"].statistics
    statistics.success.count += 20
    statistics.fail.count += 3
    statistics.refused += 1
    statistics.durations.counts[2] += 20  # between 0.5 and 1 ms
    lab.sample(cpu_s=0.5, queue=7, tensor_byte_size=64)
    lab.sample(cpu_s=0.5)
    found = lab.figures("a")
    assert found is not None
    assert found["rate"] == [0, 12, 0]
    assert found["failure_rate"] == [0, 2, 0]
    assert found["p50_ms"][0] is None
    assert found["p50_ms"][1] == pytest.approx(0.75)
    assert found["p50_ms"][2] is None
    assert lab.figures("idle") is None
    shown = lab.history.shown(lab.now_ns + 500_000_000, None)
    assert shown.ages_ms == [4500, 2500, 500]
    assert shown.server == {
        "rate": [0, 12, 0], "failure_rate": [0, 2, 0], "queue": [0, 7, 0], "tensor_byte_size": [0, 64, 0],
        "cpu": [0, 0.25, 0],
    }  # fmt: skip
    assert shown.model is None


def test_what_was_counted_before_the_first_sample_is_no_rate() -> None:
    lab = HistoryLab("a")
    lab.models["a"].statistics.success.count = 1000
    lab.sample(2)
    assert lab.history.shown(lab.now_ns, None).server["rate"] == [0, 0]


def test_samples_are_forgotten_after_two_minutes_and_an_idle_model_needs_no_memory_then() -> None:
    lab = HistoryLab("a")
    lab.sample()
    lab.models["a"].statistics.success.count += 10
    lab.sample(SAMPLES)
    found = lab.figures("a")
    assert found is not None
    assert found["rate"] == [5, *[0] * (SAMPLES - 1)]
    lab.sample()
    assert lab.figures("a") is None
    assert len(lab.history.shown(lab.now_ns, None).ages_ms) == SAMPLES


def test_a_model_that_is_gone_keeps_its_history_until_it_is_old() -> None:
    lab = HistoryLab("a")
    lab.sample()
    lab.models["a"].statistics.fail.count += 4
    lab.sample()
    del lab.models["a"]
    lab.sample(3)
    found = lab.figures("a")
    assert found is not None
    assert found["failure_rate"] == [0, 2, 0, 0, 0]
    lab.sample(SAMPLES)
    assert lab.figures("a") is None


def test_a_model_that_is_loaded_again_has_no_negative_rate() -> None:
    lab = HistoryLab("a")
    lab.sample()
    lab.models["a"].statistics.success.count += 10
    lab.sample()
    lab.models["a"].statistics.success.count = 1
    lab.sample()
    found = lab.figures("a")
    assert found is not None
    assert found["rate"] == [0, 5, 0]


def test_of_many_models_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MODELS", 2)
    lab = HistoryLab("a", "b", "c")
    lab.sample()
    for _ in range(3):
        for model in lab.models.values():
            model.statistics.success.count += 2
        lab.sample()
    assert [lab.figures(name) is not None for name in "abc"] == [True, True, False]
    lab.models = {"c": lab.models["c"]}
    lab.sample(SAMPLES)
    lab.models["c"].statistics.success.count += 2
    lab.sample()
    found = lab.figures("c")
    assert found is not None
    assert found["rate"][-1] == 1
