"""A model, an ensemble or a server is ready if the models concerned say so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel import errors
from kernel.serving.health import ModelHealth
from tests.kernel.kernel_bench import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator


class Check:
    """A health check whose result the test says."""

    def __init__(self, problem: str = "") -> None:
        self.result = problem
        self.count = 0

    async def problem(self) -> str:
        self.count += 1
        return self.result


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def ready(bench: Bench) -> tuple[bool, bool]:
    """Return whether the model and the server are ready."""

    async def ask() -> tuple[bool, bool]:
        return await bench.kernel.model_is_ready("m"), await bench.kernel.server_is_ready()

    return asyncio.run(ask())


def test_a_model_is_ready_if_all_its_instances_are(bench: Bench) -> None:
    assert ready(bench) == (True, True)
    first, second = Check(), Check()
    bench.model.health.add("m_0", first)
    bench.model.health.add("m_1", second)
    assert ready(bench) == (True, True)
    second.result = "no"
    assert ready(bench) == (False, False)
    bench.model.health.remove("m_1", second)
    assert ready(bench) == (True, True)


def test_a_model_that_is_not_ready_otherwise_is_not_asked(bench: Bench) -> None:
    check = Check()
    bench.model.health.add("m_0", check)
    bench.model.instances.lost(bench.instance, [])
    assert ready(bench) == (False, False)
    assert check.count == 0
    with pytest.raises(errors.ModelNotFound):
        asyncio.run(bench.kernel.model_is_ready("other"))


def test_without_strict_readiness_models_do_not_count_for_the_server() -> None:
    bench = Bench(strict_readiness=False)
    bench.model.health.add("m_0", Check("no"))
    assert ready(bench) == (False, True)
    bench.close()


def test_the_log_has_each_change_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    health, check = ModelHealth(), Check("not yet")
    health.add("m_0", check)

    async def ask(count: int) -> None:
        for _ in range(count):
            await health.ready()

    asyncio.run(ask(2))
    check.result = ""
    asyncio.run(ask(2))
    assert caplog.messages == ["not yet", "Model 'm_0' is ready again (user-defined check)"]


def test_the_check_of_a_new_worker_stays_when_the_old_one_goes() -> None:
    health, old, new = ModelHealth(), Check(), Check()
    health.add("m_0", old)
    health.add("m_0", new)
    health.remove("m_0", old)
    asyncio.run(health.ready())
    assert (old.count, new.count) == (0, 1)
