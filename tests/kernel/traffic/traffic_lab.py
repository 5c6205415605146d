"""A kernel with versions of models that execute nothing, and traffic rules, for tests of this folder."""

from __future__ import annotations

import json
import random
import struct
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import SequenceBatching
from kernel.observe.execution_reports import ExecutionTimes
from kernel.serving.batch import Batch
from kernel.serving.catalog import ModelState
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.serving.sequence_model import loaded_model
from kernel.testing import FakeInstance, RecordingSink, model_spec
from kernel.traffic.control import Traffic
from kernel.traffic.rollouts import LOOK_NS
from kernel.traffic.shadow import PARAMETER, ShadowParts
from schedulers.direct import direct
from schedulers.sequence import sequence
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from kernel.serving.model import Model
    from kernel.traffic.rollouts import ModelLoads
    from kernel.traffic.shadow import Shadow


class TrafficLab:
    """A kernel with versions 3 and 4 of model `m`."""

    def __init__(
        self,
        *,
        sequences: bool = False,
        decoupled: bool = False,
        versions: tuple[int, ...] = (3, 4),
        loads: ModelLoads | None = None,
    ) -> None:
        self.front = FrontDoorLab()
        self.kernel = self.front.kernel
        self.catalog = self.front.catalog
        self.sequences = sequences
        self.decoupled = decoupled
        self.traffic = Traffic(
            self.kernel.rules,
            self.front.clock,
            self.kernel.budget,
            loads,
            draw=random.Random(7).random,
            utc=lambda: datetime(2026, 11, 28, tzinfo=UTC),
        )
        self.kernel.traffic = self.traffic
        self.traffic.shadow_parts = ShadowParts(self.kernel.submit_copy, self.front.helpers, self.kernel.budget)
        self.models = {version: self.add(version) for version in versions}

    def add(self, version: int, name: str = "m", dims: tuple[int, ...] = (1,)) -> Model:
        """Add a READY version."""
        batching = SequenceBatching(slot_count=4, max_idle_ns=1 << 40) if self.sequences else None
        spec = model_spec(
            name,
            dims=dims,
            sequence_batching=batching,
            max_batch_size=4 if self.sequences else 0,
            decoupled=self.decoupled,
        )
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


MS = 1_000_000


class RolloutLab(TrafficLab):
    """Executes requests of both versions in the test."""

    def start(self, **members: Any) -> None:
        members = {"to": 4, "steps": [50, 100], "every_s": 0, "least_requests": 5, **members}
        self.traffic.start_rollout("m", members, "a test")

    def execute(self, count: int, *, ms: float = 1, error: ServingError | None = None, only: int | None = None) -> None:
        """Execute requests of clients; those of version `only`, or of both, are slow or fail as said."""
        for _ in range(count):
            request = self.request()
            self.kernel.submit(request)
            [model] = [model for model in self.catalog.executing_models() if request in model.live.instance_of]
            changed = only is None or model.version == only
            if error is not None and changed:
                request.fail(error)
                continue
            took_ns = round((ms if changed else 1) * MS)
            model.statistics.record_execution(Batch([request]), ExecutionTimes(0, 0, took_ns, took_ns), took_ns, 0)
            self.respond(request)

    def respond(self, request: Any) -> None:
        outputs = [Tensor("OUT", "FP32", [1], struct.pack("f", 1))]
        request.respond(Response("m", "", "", outputs=outputs))

    def look(self) -> dict[str, Any]:
        self.front.clock.advance(LOOK_NS)
        status = self.traffic.rollouts.status("m")
        assert status is not None
        return status

    def pairs(self, count: int, value: float) -> None:
        """Execute requests of clients at version 3, whose copies version 4 answers with `value` in place of 1."""
        while count:
            request = self.request()
            self.kernel.submit(request)
            if request in self.models[4].live.instance_of:
                self.respond(request)
                continue
            count -= 1
            for each, number in ((request, 1.0), (None, value)):
                found = each or next(iter(self.models[4].live.instance_of))
                outputs = [Tensor("OUT", "FP32", [1], struct.pack("f", number))]
                found.respond(Response("m", "", "", outputs=outputs))


class Keeper:
    """Keeps the last document as text."""

    def __init__(self) -> None:
        self.text = ""

    def save(self, document: dict[str, Any]) -> None:
        self.text = json.dumps(document)


RULE: dict[str, Any] = {"labels": {"canary": 4}, "weights": {"3": 1}, "shadow": {"to": "canary"}}


class ShadowLab(TrafficLab):
    """Version 3 has the clients, version 4 is its shadow."""

    def __init__(self, **rule: Any) -> None:
        super().__init__()
        self.rule(**{**RULE, **rule})

    @property
    def shadow(self) -> Shadow:
        found = self.traffic.shadow_of("m")
        assert found is not None
        return found

    def report(self) -> dict[str, Any]:
        self.shadow.check()
        found: dict[str, Any] = self.traffic.report("m")["shadow"]
        return found

    def ask(self, **fields: Any) -> Request:
        request = self.request(**fields)
        self.kernel.submit(request)
        return request

    def copies(self) -> list[Request]:
        return [each for each in self.models[4].live.instance_of if PARAMETER in each.parameters]

    def answer(self, request: Request, value: float | ServingError) -> None:
        if isinstance(value, float):
            outputs = [Tensor("OUT", "FP32", [1], struct.pack("f", value))]
            request.respond(Response("m", "", request.id, outputs=outputs))
        else:
            request.fail(value)

    def pair(self, first: float | ServingError, second: float | ServingError, **fields: Any) -> None:
        self.answer(self.ask(**fields), first)
        for copy in self.copies():
            self.answer(copy, second)
