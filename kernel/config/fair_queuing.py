"""Fair queuing by client, as the parameters of a model's configuration set it. Pure.

    parameters { key: "naiad.fair_by" value { string_value: "header:x-api-key" } }
    parameters { key: "naiad.fair_weights" value { string_value: "gold=4, silver=2, *=1" } }
    parameters { key: "naiad.quota" value { string_value: "gold=64, *=16" } }

`*` stands for all other clients. Requests without the header or parameter are of one client, whose name is empty.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.config.generated.model_config_pb2 import ModelConfig

#: What a client is known by: `header:NAME` or `parameter:NAME`.
FAIR_BY = "naiad.fair_by"

#: How much of the model each client gets if several have requests queued: `NAME=NUMBER, ...`; 1 if it is not named.
FAIR_WEIGHTS = "naiad.fair_weights"

#: How many requests of each client may be queued or in flight: `NUMBER`, or `NAME=NUMBER, ...`; 0 for no limit.
QUOTA = "naiad.quota"

_OTHERS = "*"

#: `header:` and a name of HTTP, or `parameter:` and any name.
_CLIENT_KEY = re.compile(r"header:[!#$%&'*+.^_`|~0-9A-Za-z-]+|parameter:.+", re.DOTALL)

#: Up to nine digits, six decimals.
_WEIGHT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)


class FairQueuing(msgspec.Struct, frozen=True):
    """How a model divides itself among clients. Names of clients are values of the header or the parameter."""

    #: The header, in lower case, that names the client; empty if a parameter does.
    header: str = ""
    #: The parameter that names the client; empty if a header does.
    parameter: str = ""
    #: Client → weight, above 0.
    weights: dict[str, float] = {}
    default_weight: float = 1.0
    #: Client → how many of its requests may be queued or in flight; 0 for no limit.
    quotas: dict[str, int] = {}
    default_quota: int = 0

    @property
    def has_quotas(self) -> bool:
        return bool(self.default_quota or any(self.quotas.values()))

    def weight(self, client: str) -> float:
        return self.weights.get(client, self.default_weight)

    def quota(self, client: str) -> int:
        return self.quotas.get(client, self.default_quota)


def fair_queuing(config: ModelConfig) -> FairQueuing | None:
    """Return the settings of a model, None if it has none. Raises `BadConfig` for a wrong value."""
    values = {name: config.parameters[name].string_value for name in (FAIR_BY, FAIR_WEIGHTS, QUOTA)
              if name in config.parameters}  # fmt: skip
    if not values:
        return None
    if FAIR_BY not in values:
        raise BadConfig(f"model '{config.name}' has the parameter '{next(iter(values))}', which needs '{FAIR_BY}'")
    key = values[FAIR_BY]
    if not _CLIENT_KEY.fullmatch(key):
        raise BadConfig(
            f"parameter '{FAIR_BY}' of model '{config.name}' must be 'header:' and the name of a header, or "
            f"'parameter:' and the name of a parameter of requests; found '{key}'"
        )
    _check_scheduler(config)
    weights = _by_client(config.name, FAIR_WEIGHTS, values, _WEIGHT, "a number above 0 such as 2.5")
    if any(float(text) == 0 for text in weights.values()):
        raise BadConfig(f"parameter '{FAIR_WEIGHTS}' of model '{config.name}' has a weight of 0; weights are above 0")
    quotas = _by_client(config.name, QUOTA, values, _COUNT, "a whole number, 0 for no limit")
    kind, _, name = key.partition(":")
    return FairQueuing(
        header=name.lower() if kind == "header" else "",
        parameter=name if kind == "parameter" else "",
        default_weight=float(weights.pop(_OTHERS, 1)),
        weights={client: float(text) for client, text in weights.items()},
        default_quota=int(quotas.pop(_OTHERS, 0)),
        quotas={client: int(text) for client, text in quotas.items()},
    )


def _check_scheduler(config: ModelConfig) -> None:
    """Refuse schedulers that serve in another order. The order of clients would break the order of requests."""
    for field in ("sequence_batching", "ensemble_scheduling"):
        if config.HasField(field):
            raise BadConfig(f"parameter '{FAIR_BY}' is for models without {field}, which model '{config.name}' has")
    if config.dynamic_batching.preserve_ordering:
        raise BadConfig(
            f"parameter '{FAIR_BY}' of model '{config.name}' contradicts preserve_ordering: clients get shares, "
            "so requests are not served in their order"
        )


def _by_client(
    model: str, parameter: str, values: Mapping[str, str], number: re.Pattern[str], wanted: str
) -> dict[str, str]:
    """Return client → text of its number. A text without names is for all clients."""
    text = values.get(parameter)
    if text is None:
        return {}
    if number.fullmatch(text.strip()):
        return {_OTHERS: text.strip()}
    found: dict[str, str] = {}
    for part in text.split(","):
        client, equals, value = part.strip().rpartition("=")  # names may have a "="
        if not equals or not client or not number.fullmatch(value) or client in found:
            raise BadConfig(
                f"parameter '{parameter}' of model '{model}' must be a list of CLIENT=NUMBER with commas, where * "
                f"stands for all other clients and the number is {wanted}, each client once; found '{part.strip()}'"
            )
        found[client] = value
    return found
