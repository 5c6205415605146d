"""`is_ready` of a model."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import pytest

from backends.python.backend import PythonBackend
from backends.transport import wire
from tests.backends.worker.threaded_worker import Bench, request

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab


def problem(lab: Lab) -> str:
    """Ask the model, and return why it is not ready."""
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    lab.backend.check_health(found.put)
    return found.get(timeout=20)


@pytest.mark.parametrize("define", ["def", "async def"])
@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("return True", ""),
        ("return False", "Model 'lab_0_0' is not ready (user-defined check failed)."),
        (
            "return 1",
            "Model 'lab_0_0' is not ready: is_ready() must return a boolean value, found <class 'int'>.",
        ),
        ("return None", "Model 'lab_0_0' is not ready: is_ready() must return a boolean value, found <class 'None"),
        ("1 / 0", "Model 'lab_0_0' is not ready: is_ready() failed: ZeroDivisionError: division by zero\n\nAt:\n"),
        ("raise SystemExit", "Model 'lab_0_0' is not ready: is_ready() failed: SystemExit: <EMPTY MESSAGE>\n\nAt:\n"),
    ],
)
def test_a_model_says_whether_it_is_ready(lab: Lab, define: str, statement: str, reason: str) -> None:
    lab.load(f"""
        class TritonPythonModel:
            def execute(self, requests):
                return [text(1)]

            {define} is_ready(self):
                {statement}
    """)
    assert lab.backend.checks_health
    for _ in range(2):
        assert problem(lab).startswith(reason)
        assert reason or not problem(lab)


def test_a_model_without_is_ready_is_not_asked(lab: Lab) -> None:
    lab.load("def execute(self, requests): return [text(1)]")
    assert not lab.backend.checks_health


def test_a_worker_asks_its_model_between_batches(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    worker = Bench()
    monkeypatch.setattr("backends.worker.loop.backend_class", lambda name, arguments: PythonBackend)
    lab.write(
        """
class TritonPythonModel:
    executed = 0

    def execute(self, requests):
        self.executed += 1
        return [text(1)]

    def is_ready(self):
        return self.executed == 1
"""
    )
    worker.hello()
    config = '{"name": "lab", "backend": "python", "output": [{"name": "OUT"}]}'
    worker.send(wire.Load(config, str(lab.dir), 1, "lab_0_0"))
    assert worker.next(wire.Loaded).checks_health
    worker.send(wire.CheckHealth(1), wire.Execute(1, [request(1)]), wire.CheckHealth(2))
    assert worker.next(wire.HealthChecked).problem == "Model 'lab_0_0' is not ready (user-defined check failed)."
    worker.next(wire.Executed)
    assert worker.next(wire.HealthChecked) == wire.HealthChecked(2)
    worker.stop()
