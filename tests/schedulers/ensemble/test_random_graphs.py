"""Random ensembles in a kernel with fake models: responses in any order, errors, cancellations, streams.

Each request gets exactly one final response with the right values, and no block is held at the end.
"""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import pytest

from kernel.config.spec import EnsembleSpec
from kernel.errors import InternalError
from schedulers.testing import KernelLab, spec_of, step
from shm.arena import Arena
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from kernel.serving.request import Request
    from kernel.testing import RecordingSink
    from schedulers.testing import Call

FLOATS = 1500


class RandomGraph:
    """An ensemble of random steps. Each step adds its inputs and one; a stream sends 0 to 3 responses, with numbers."""

    def __init__(self, seed: int, arena: Arena) -> None:
        self.random = random.Random(seed)
        self.arena = arena
        self.lab = KernelLab()
        self.streaming = self.random.random() < 0.4
        self.limit = self.random.choice((0, 0, 1, 2))
        for inputs in (1, 2, 3):
            names = " ".join(f"I{number}" for number in range(inputs))
            self.lab.add(spec_of(f"m{inputs}", names, "OUT", dims=(-1,)))
        self.lab.add(spec_of("stream", "I0", "OUT", dims=(-1,), decoupled=True))
        tensors = ["t0"] if self.streaming else ["A", "B"]
        steps = [step("stream", {"I0": "A"}, {"OUT": "t0"})] if self.streaming else []
        self.sources: dict[str, list[str]] = {}
        for number in range(1, self.random.randint(2, 7)):
            used = [self.random.choice(tensors) for _ in range(self.random.randint(1, 3))]
            name = f"t{number}"
            maps = {f"I{index}": source for index, source in enumerate(used)}
            steps.append(step(f"m{len(used)}", maps, {"OUT": name}))
            self.sources[name] = used
            tensors.append(name)
        self.outputs = self.random.sample(list(self.sources), self.random.randint(1, min(3, len(self.sources))))
        ensemble = EnsembleSpec(tuple(steps), self.limit)
        spec = spec_of(
            "e", "A" if self.streaming else "A B", " ".join(self.outputs), dims=(-1,), decoupled=self.streaming,
            ensemble=ensemble,
        )  # fmt: skip
        self.lab.add(spec)

    def tensor(self, name: str, value: float) -> Tensor:
        block = self.arena.take(FLOATS * 4)
        assert block is not None
        block.view()[:4] = struct.pack("<f", value)
        return Tensor(name, "FP32", [FLOATS], None, block.span)

    def expected(self, name: str, first: dict[str, float]) -> float:
        if name in first:
            return first[name]
        return 1 + sum(self.expected(source, first) for source in self.sources[name])

    def submit(self) -> tuple[Request, RecordingSink, list[str]]:
        wanted = self.random.sample(self.outputs, self.random.randint(0, len(self.outputs)))
        inputs = [self.tensor("A", 10)] if self.streaming else [self.tensor("A", 10), self.tensor("B", 100)]
        request, sink = self.lab.submit(
            "e", *inputs, outputs=[RequestedOutput(name) for name in wanted], streaming=self.streaming
        )
        return request, sink, wanted or self.outputs

    def move(self) -> None:
        """Let a random call go on."""
        call = self.random.choice(self.lab.calls)
        if self.random.random() < 0.02:
            call.fail(InternalError("by chance"))
        elif call.model.name == "stream":
            self.stream(call)
        else:
            call.respond(self.tensor("OUT", 1 + sum(value_of(tensor) for tensor in call.request.inputs)))

    def stream(self, call: Call) -> None:
        sent = call.request.response_count
        if sent == 3 or self.random.random() < 0.2:
            call.finish()
        else:
            call.respond(self.tensor("OUT", sent), final=False)


def value_of(tensor: Tensor) -> float:
    value: float = struct.unpack("<f", tensor.raw()[:4])[0]
    return value


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_random_ensembles_give_the_right_values_and_all_memory_back(start: int) -> None:
    for seed in range(start, start + 100):
        with Arena("tensors", 1 << 22) as arena:
            graph = RandomGraph(seed, arena)
            requests = [graph.submit() for _ in range(graph.random.randint(1, 3))]
            for _ in range(10_000):
                if not graph.lab.calls:
                    break
                if graph.random.random() < 0.01:
                    graph.random.choice(requests)[0].cancel()
                graph.move()
                graph.lab.check()
            for request, sink, wanted in requests:
                assert request.finished, f"seed {seed}"
                assert [response.final for response in sink.responses].count(True) == 1, f"seed {seed}"
                numbers = 0
                for response in sink.responses:
                    if response.outputs is None:
                        continue
                    first = {"t0": float(numbers)} if graph.streaming else {"A": 10.0, "B": 100.0}
                    found = {tensor.name: value_of(tensor) for tensor in response.outputs}
                    assert found == {name: graph.expected(name, first) for name in wanted}, f"seed {seed}"
                    numbers += 1
                    response.release()
            assert arena.allocator.block_count == 0, f"seed {seed}"
