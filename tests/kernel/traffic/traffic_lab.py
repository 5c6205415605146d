"""A kernel with versions of models that execute nothing, and traffic rules, for tests of this folder."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import SequenceBatching
from kernel.serving.catalog import ModelState
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.serving.sequence_model import loaded_model
from kernel.testing import FakeInstance, RecordingSink, model_spec
from kernel.traffic.control import Traffic
from kernel.traffic.shadow import ShadowParts
from schedulers.direct import direct
from schedulers.sequence import sequence
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    from kernel.serving.model import Model


class TrafficLab:
    """A kernel with versions 3 and 4 of model `m`."""

    def __init__(self, *, sequences: bool = False, versions: tuple[int, ...] = (3, 4)) -> None:
        self.front = FrontDoorLab()
        self.kernel = self.front.kernel
        self.catalog = self.front.catalog
        self.sequences = sequences
        self.traffic = Traffic(
            self.kernel.rules,
            self.front.clock,
            self.kernel.budget,
            draw=random.Random(7).random,
            utc=lambda: datetime(2026, 11, 28, tzinfo=UTC),
        )
        self.kernel.traffic = self.traffic
        self.traffic.shadow_parts = ShadowParts(self.kernel.submit_copy, self.front.helpers, self.kernel.budget)
        self.models = {version: self.add(version) for version in versions}

    def add(self, version: int, name: str = "m", dims: tuple[int, ...] = (1,)) -> Model:
        """Add a READY version."""
        batching = SequenceBatching(slot_count=4, max_idle_ns=1 << 40) if self.sequences else None
        spec = model_spec(name, dims=dims, sequence_batching=batching, max_batch_size=4 if self.sequences else 0)
        schedule: Any = sequence if self.sequences else direct
        model = loaded_model(spec, ModelConfig(), version, schedule, self.front.clock)
        model.start()
        model.instances.add(FakeInstance(f"{name}_{version}"))
        self.catalog.set_state(name, version, ModelState.READY, "", model)
        return model

    def rule(self, **members: Any) -> None:
        """Let a client set the rule of `m`."""
        self.traffic.change("m", members, "a test")

    def request(self, headers: dict[str, str] | None = None, **fields: Any) -> Request:
        sink = RecordingSink()
        sink.headers = headers or {}
        shape = [1, 1] if self.sequences else [1]
        return Request("m", [Tensor("IN", "FP32", shape, bytes(4))], sink, **fields)

    def send(self, headers: dict[str, str] | None = None, *, respond: bool = True, **fields: Any) -> str:
        """Submit a request; returns the model and version that have it, and responds. Or the error."""
        request = self.request(headers, **fields)
        self.kernel.submit(request)
        if request.finished:
            [error] = request.sink.errors  # type: ignore[attr-defined]  # a RecordingSink
            return str(error.message)
        found = [model for model in self.catalog.executing_models() if request in model.live.instance_of]
        assert len(found) == 1, "each request is executed by one version"
        if respond:
            request.respond(Response("m", "", "", outputs=[]))
        return f"{found[0].name}:{found[0].version}"
