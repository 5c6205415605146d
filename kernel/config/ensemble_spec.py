"""`EnsembleSpec`: the steps of an ensemble, as the scheduler sees them. Built once, from a checked configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig

#: `model_version` of a step that uses the newest version.
_NEWEST = -1


class EnsembleStep(msgspec.Struct, frozen=True):
    """A model that the ensemble executes once all its input tensors are there."""

    model_name: str
    #: The version as a request names it; empty for the newest that is ready.
    model_version: str
    #: Input of the step's model → tensor of the ensemble.
    inputs: dict[str, str]
    #: Output of the step's model → tensor of the ensemble.
    outputs: dict[str, str]
    #: The repository in which the model is looked for first, with --model-namespacing; else empty.
    namespace: str = ""


class EnsembleSpec(msgspec.Struct, frozen=True):
    """The steps of an ensemble. A tensor is written by one step or is an input of the ensemble."""

    steps: tuple[EnsembleStep, ...] = ()
    #: The most requests that one step executes at the same time, of all requests to the ensemble; 0 for no limit.
    max_inflight_requests: int = 0
    #: The version of the ensemble itself, for its responses. Set when it is loaded.
    version_text: str = "1"

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models of the steps, each once, in the order of the steps."""
        return tuple(dict.fromkeys(step.model_name for step in self.steps))


def ensemble_spec(config: ModelConfig, namespace: str = "") -> EnsembleSpec | None:
    """Return the steps of a checked configuration; None if the model is not an ensemble.

    `namespace` is the repository of the ensemble if repositories are namespaces.
    """
    if not config.HasField("ensemble_scheduling"):
        return None
    scheduling = config.ensemble_scheduling
    return EnsembleSpec(
        tuple(
            EnsembleStep(
                step.model_name,
                "" if step.model_version == _NEWEST else str(step.model_version),
                dict(sorted(step.input_map.items())),
                dict(sorted(step.output_map.items())),
                namespace,
            )
            for step in scheduling.step
        ),
        scheduling.max_inflight_requests,
    )
