"""Which scheduler a model gets."""

from __future__ import annotations

import msgspec
import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import DynamicBatching
from kernel.errors import InternalError
from kernel.serving.model import Model
from kernel.testing import FakeClock, model_spec
from schedulers.direct import direct
from schedulers.dynamic import dynamic
from schedulers.registry import choose_scheduler, scheduler_for


def test_a_model_without_batching_is_served_in_the_order_of_arrival() -> None:
    assert scheduler_for(model_spec()) is direct


def test_a_model_with_dynamic_batching_has_the_dynamic_batcher() -> None:
    assert scheduler_for(model_spec(max_batch_size=4, dynamic_batching=DynamicBatching())) is dynamic


def test_what_is_no_coroutine_function_is_refused_when_the_model_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, text in ((3, "it is a int"), (lambda *_: None, "its call returned NoneType")):
        monkeypatch.setattr("schedulers.registry.extension", lambda group, name, found=found: found)
        spec = msgspec.structs.replace(model_spec(), scheduler="wrong")
        model = Model(spec, ModelConfig(), 1, choose_scheduler, FakeClock())
        with pytest.raises(InternalError, match=f"scheduler 'wrong' must be an `async def` function, {text}"):
            model.start()
