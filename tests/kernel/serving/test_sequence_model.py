"""Versions with sequences: which version gets a request, and when a version is done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import SequenceBatching
from kernel.errors import InternalError, InvalidRequest, ModelNotReady, NoAvailableVersion, Unavailable, Unsupported
from kernel.serving.catalog import Catalog, ModelState
from kernel.serving.events import Submitted
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.serving.sequence_model import SequenceModel, loaded_model
from kernel.testing import FakeClock, FakeInstance, RecordingSink, model_spec
from schedulers.direct import direct
from schedulers.sequence import sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.spec import ModelSpec
    from kernel.observe.limited_log import LimitedLog
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet


def version(number: int, *, idle_ns: int = 1 << 40, schedule: Any = sequence) -> SequenceModel:
    """Return a version with one instance, which executes nothing until the test lets it."""
    spec = model_spec(max_batch_size=4, sequence_batching=SequenceBatching(slot_count=4, max_idle_ns=idle_ns))
    made = loaded_model(spec, ModelConfig(), number, schedule, FakeClock())
    assert isinstance(made, SequenceModel)
    made.start()
    made.instances.add(FakeInstance(f"m_{number}"))
    return made


def request(id: int | str, *, start: bool = False, end: bool = False, model_version: str = "") -> Request:
    return Request(
        "model", [], RecordingSink(), model_version, correlation_id=id, sequence_start=start, sequence_end=end
    )


def submit(model: Model, id: int | str, **more: Any) -> Model:
    """Submit a request, and return the version that has it."""
    submitted = request(id, **more)
    model.submit(submitted)
    assert isinstance(submitted.owner, Model)
    return submitted.owner


def test_a_sequence_that_begins_again_and_again_is_logged_a_few_times(
    caplog: pytest.LogCaptureFixture, log_two_lines: Callable[[str], LimitedLog]
) -> None:
    log_two_lines("kernel.serving.sequence_model._conflicts")
    model = version(1)
    for _ in range(10):
        submit(model, 7, start=True)
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == [
        "sequence 7 for model 'model' has a conflict"
    ] * 2


def test_only_models_with_sequence_batching_have_sequences() -> None:
    assert type(loaded_model(model_spec(), ModelConfig(), 1, direct, FakeClock())) is Model
    assert type(version(1)) is SequenceModel


def test_a_new_version_gets_new_sequences_and_the_former_one_keeps_its_own() -> None:
    old, new = version(1), version(2)
    assert submit(old, 1, start=True) is old
    new.follows(old)
    assert new.continues(request(1))
    assert not new.continues(request(1, start=True))
    assert submit(new, 1) is old
    assert submit(new, 2, start=True) is new
    assert submit(new, 1, model_version="1") is old
    with pytest.raises(InvalidRequest, match="START flag"):
        submit(new, 1, model_version="2")
    assert submit(new, 1, start=True) is new, "a sequence that begins again does so in the new version"
    assert submit(new, 1) is new


def test_a_version_follows_several_ones() -> None:
    first, second, third = version(1), version(2), version(3)
    submit(first, 1, start=True)
    second.follows(first)
    submit(second, 2, start=True)
    third.follows(second)
    assert submit(third, 1) is first
    assert submit(third, 2) is second
    first.abandon(Unavailable("over"))
    with pytest.raises(InvalidRequest, match="START flag"):
        submit(third, 1)
    assert third.former == [second]


def test_a_retired_version_takes_only_requests_of_its_sequences_and_is_done_after_the_last() -> None:
    async def scenario() -> None:
        old = version(1)
        submit(old, 1, start=True)
        retired = asyncio.create_task(old.retire())
        await asyncio.sleep(0)
        assert old.finishes_sequences
        assert old.unfinished == "1 requests and 1 sequences"
        with pytest.raises(ModelNotReady):
            submit(old, 2, start=True)
        assert submit(old, 1, end=True) is old
        old.abandon(Unavailable("over"))
        await retired
        assert not old.finishes_sequences

    asyncio.run(scenario())


def test_a_request_for_a_retired_version_goes_to_the_one_after_it() -> None:
    async def scenario() -> None:
        old, new = version(1), version(2)
        submit(old, 1, start=True)
        new.follows(old)
        retired = asyncio.create_task(old.retire())
        await asyncio.sleep(0)
        assert submit(old, 2, start=True) is new, "such as a request that was prepared for the old one"
        old.abandon(Unavailable("over"))
        await retired

    asyncio.run(scenario())


def test_an_unloaded_version_is_found_only_while_it_has_sequences() -> None:
    async def scenario() -> None:
        old, catalog = version(1), Catalog()
        catalog.set_state("model", 1, ModelState.READY, "", old)
        submit(old, 1, start=True)
        catalog.set_state("model", 1, ModelState.UNLOADING, "", old)
        assert catalog.finishing("model") is None, "it is not retired yet"
        retired = asyncio.create_task(old.retire())
        await asyncio.sleep(0)
        with pytest.raises(NoAvailableVersion):
            catalog.resolve("model")
        assert catalog.finishing("model") is catalog.finishing("model", "1") is old
        assert catalog.finishing("model", "2") is catalog.finishing("other") is None
        old.abandon(Unavailable("over"))
        await retired
        assert catalog.finishing("model") is None

    asyncio.run(scenario())


def test_a_retired_instance_is_left_when_its_last_sequence_is_over() -> None:
    async def scenario() -> None:
        model = version(1)
        [instance] = model.instances.serving
        submit(model, 1, start=True)
        assert instance.record.batches == {}
        model.inbox.close()
        model.sequences.placed(next(iter(model.sequences)), instance, 0)
        model.instances.retire(instance)
        left = asyncio.create_task(model.instances.left(instance))
        await asyncio.sleep(0)
        assert not left.done()
        assert model.instances.has_room(instance, 1)
        model.abandon(Unavailable("over"))
        await left
        assert not model.instances.has_room(instance, 1)

    asyncio.run(scenario())


def test_a_scheduler_that_fails_ends_all_sequences() -> None:
    class Failing:
        async def __call__(self, spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: object) -> None:
            while True:
                if isinstance(await inbox.next(), Submitted):
                    raise RuntimeError("cannot run")

    model = version(1, schedule=Failing())
    submitted = request(1, start=True)
    model.submit(submitted)
    assert isinstance(submitted.sink, RecordingSink)
    assert [type(error) for error in submitted.sink.errors] == [InternalError]
    assert len(model.sequences) == 0
    model.check()


def test_an_id_that_is_a_text_has_at_most_128_bytes() -> None:
    model = version(1)
    submit(model, "ä" * 64, start=True)
    with pytest.raises(Unsupported, match="string correlation ID cannot be longer than 128 characters"):
        submit(model, "ä" * 64 + "x", start=True)
