"""Parameters of a model's configuration that are for this server: their names begin with `naiad.`. Pure.

They are in `parameters`, because config.pbtxt has no fields for what Triton does not have:

    parameters { key: "naiad.execution_timeout" value { string_value: "2.5" } }

All other parameters are the backend's. Two have a form of their own:

- `naiad.autoscale` (`min=1,max=4,up_after=500ms,down_after=30s`) says how many instances a model may have, and when
  their number changes.
- `naiad.openai_fields` (`logit_bias,response_format`) says what a model for OpenAI's API does with requests, beside
  sampling. A model gets the whole request, and the server cannot know what it does with each field. What changes only
  how text is sampled is left to the model. What changes the form or the meaning of a response is refused unless the
  model declares it here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.config.fair_queuing import FAIR_BY, FAIR_WEIGHTS, QUOTA, FairQueuing, fair_queuing
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig

AUTOSCALE = "naiad.autoscale"

#: The form that errors show.
_FORM = "min=1,max=4,up_after=500ms,down_after=30s (max is needed; the others are the defaults)"

_AUTOSCALE_NAMES = ("min", "max", "up_after", "down_after")

_INSTANCE_COUNT = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)

_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m)", re.ASCII)

_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9}


class AutoscaleSettings(msgspec.Struct, frozen=True):
    """When a model gets another instance, and when it loses one."""

    #: The most instances.
    max: int
    #: The fewest instances, at least 1.
    min: int = 1
    #: An instance is added when requests have waited, and no instance was idle, for this time.
    up_after_ns: int = 500 * 10**6
    #: An instance is removed when there was always an idle one for this time.
    down_after_ns: int = 30 * 10**9


def autoscale_settings(config: ModelConfig) -> AutoscaleSettings | None:
    """Return the settings of a normalised configuration, or None without the parameter. Raises `BadConfig`."""
    if AUTOSCALE not in config.parameters:
        return None
    settings = _parsed(config.name, config.parameters[AUTOSCALE].string_value)
    if config.HasField("ensemble_scheduling"):
        raise BadConfig(f"parameter '{AUTOSCALE}' is for models with instances; '{config.name}' is an ensemble")
    if config.HasField("sequence_batching"):
        raise BadConfig(
            f"parameter '{AUTOSCALE}' cannot be used with sequence_batching (model '{config.name}'): a sequence stays "
            "on its instance"
        )
    groups = [group for group in config.instance_group if not group.passive]
    if len(groups) > 1 or any(len(group.gpus) > 1 for group in groups):
        raise BadConfig(
            f"parameter '{AUTOSCALE}' needs one instance group, on at most one GPU, because it changes the count of "
            f"that group; model '{config.name}' has more"
        )
    return settings


def _parsed(model: str, text: str) -> AutoscaleSettings:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (each.strip() for each in part.partition("="))
        pattern = _INSTANCE_COUNT if name in ("min", "max") else _DURATION
        matched = pattern.fullmatch(value)
        if name not in _AUTOSCALE_NAMES or name in found or matched is None:
            raise _wrong(model, text, f"'{part.strip()}'")
        found[name] = int(value) if pattern is _INSTANCE_COUNT else int(matched[1]) * _UNITS_NS[matched[2]]
    least, most = found.get("min", 1), found.get("max")
    if most is None:
        raise _wrong(model, text, "no max")
    if least > most:
        raise _wrong(model, text, f"a min of {least} above the max of {most}")
    settings = AutoscaleSettings(most, least)
    up_after_ns = found.get("up_after", settings.up_after_ns)
    down_after_ns = found.get("down_after", settings.down_after_ns)
    if not up_after_ns or not down_after_ns:
        raise _wrong(model, text, "a time of 0")
    return AutoscaleSettings(most, least, up_after_ns, down_after_ns)


def _wrong(model: str, text: str, what: str) -> BadConfig:
    return BadConfig(
        f"parameter '{AUTOSCALE}' of model '{model}' must have the form {_FORM}, with counts from 1 to 9999 and times "
        f"in ms, s or m; found {what} in '{text}'"
    )


OPENAI_FIELDS = "naiad.openai_fields"

#: Fields of requests.
DECLARABLE_FIELDS = frozenset(
    (
        "add_generation_prompt", "allowed_token_ids", "audio", "bad_words", "chat_template_kwargs",
        "continue_final_message", "dimensions", "documents", "function_call", "functions", "ignore_eos",
        "logit_bias", "logprobs", "min_p", "min_tokens", "modalities", "parallel_tool_calls",
        "reasoning_effort", "repetition_penalty", "response_format", "skip_special_tokens",
        "stop_token_ids", "structured_outputs", "suffix", "tool_choice", "tools", "top_k", "top_logprobs",
        "verbosity", "web_search_options",
    )
)  # fmt: skip

#: Parts of messages, and a prompt of token ids in place of text.
DECLARABLE_PARTS = frozenset(("file", "image_url", "input_audio", "prompt_token_ids"))


def openai_fields(config: ModelConfig) -> frozenset[str]:
    """Return what the model declares; nothing without the parameter. Raises `BadConfig` for an unknown name."""
    if OPENAI_FIELDS not in config.parameters:
        return frozenset()
    return declared_fields(config.parameters[OPENAI_FIELDS].string_value, config.name)


def declared_fields(text: str, model: str) -> frozenset[str]:
    """Return the names in the value of the parameter of `model`. Raises `BadConfig` for an unknown name."""
    names = frozenset(name for part in text.split(",") if (name := part.strip()))
    known = DECLARABLE_FIELDS | DECLARABLE_PARTS
    if unknown := sorted(names - known):
        raise BadConfig(
            f"parameter '{OPENAI_FIELDS}' of model '{model}' must be names with commas between; '{unknown[0]}' is none "
            f"of {', '.join(sorted(known))}"
        )
    return names


def tokenizer_path(config: ModelConfig) -> str:
    """Return the folder with the model's tokenizer, relative to the model's folder; empty if the model names none.

    Raises `BadConfig` for a path that leaves the model's folder.
    """
    if TOKENIZER not in config.parameters:
        return ""
    path = config.parameters[TOKENIZER].string_value
    if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise BadConfig(
            f"parameter '{TOKENIZER}' of model '{config.name}' must be a folder within the model's own, such as "
            f"'tokenizer' or '.'; found '{path}'"
        )
    return path


_PREFIX = "naiad."

#: Seconds that an execution may take; 0 for no limit. Takes precedence over --execution-timeout.
EXECUTION_TIMEOUT = _PREFIX + "execution_timeout"

#: The name of an installed scheduler, and of an installed batching rule (`kernel/extensions.py`).
SCHEDULER = _PREFIX + "scheduler"

BATCHING = _PREFIX + "batching"

#: Whether a batch may start before `max_queue_delay_microseconds` have passed, when no more requests are expected.
QUEUE_DELAY = _PREFIX + "queue_delay"

FIXED, ADAPTIVE = "fixed", "adaptive"

#: Names of modules, with commas between, that are imported once before the workers of the model are forked.
PRELOAD = _PREFIX + "preload"

#: The name of the process that the model's instances share with other models that have the same name here.
WORKER = _PREFIX + "worker"

#: How many batches an instance executes at the same time: for backends that can, as Python models with `async def
#: execute` do. The backend reads it.
CONCURRENCY = _PREFIX + "concurrency"

#: `true` if an execution may be repeated: then a request that ends a worker is found and refused, and the others of its
#: batch are executed again (docs/poison-requests.md).
ISOLATE_POISON = _PREFIX + "isolate_poison"

#: How much memory a worker of the model may use: `512MiB`, `2GiB`, or a number of bytes (docs/memory-limits.md).
MEMORY_LIMIT = _PREFIX + "memory_limit"

#: What starts the workers of the model, and the name of the host that they run on (docs/remote-workers.md).
LAUNCHER = _PREFIX + "launcher"

HOST = _PREFIX + "host"

#: What a cluster reserves for each worker of the model: `gpus=1, cpus=4, memory=8GiB, tpu=1`; and whether workers of
#: one model are on few hosts (`pack`) or on many (`spread`).
RESOURCES = _PREFIX + "resources"

PLACEMENT = _PREFIX + "placement"

PLACEMENTS = ("pack", "spread")

#: `false` if a request must not be sent to another worker after its host was lost.
RETRY_ON_WORKER_LOSS = _PREFIX + "retry_on_worker_loss"

#: The most batches that an instance may execute at the same time.
MAX_CONCURRENCY = 1024

#: The folder, within the model's own, with its tokenizer and chat template; `.` for the model's folder itself.
TOKENIZER = _PREFIX + "tokenizer"

#: The name of the parser that finds calls of tools in the model's text.
TOOL_PARSER = _PREFIX + "tool_parser"

#: The parsers that the server has; packages may have more.
TOOL_PARSERS = ("hermes", "llama3", "mistral", "pythonic", "qwen3")

_NAMES = (
    EXECUTION_TIMEOUT, SCHEDULER, BATCHING, QUEUE_DELAY, AUTOSCALE, FAIR_BY, FAIR_WEIGHTS, QUOTA, PRELOAD, WORKER,
    CONCURRENCY, ISOLATE_POISON, MEMORY_LIMIT, OPENAI_FIELDS, LAUNCHER, HOST, RESOURCES, PLACEMENT,
    RETRY_ON_WORKER_LOSS, TOKENIZER, TOOL_PARSER,
)  # fmt: skip

_WORKER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)

#: A number as it is written, of at most six digits.
_COUNT = re.compile(r"[0-9]{1,6}", re.ASCII)

#: A size as it is written: `512MiB`, `2GiB`, `1000000000`. A worker without a model takes some 30 MiB.
_BYTE_SIZE = re.compile(r"([0-9]{1,15})(KiB|MiB|GiB|)", re.ASCII)

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_LEAST_MEMORY = 64 << 20

#: A resource of a cluster, and how much of it, as they are written: `gpus`, `accelerator_type:H100`; `1`, `0.25`.
_RESOURCE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)

_AMOUNT = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,4})?", re.ASCII)

#: Seconds as they are written: `90`, `2.5`. Nine digits are thirty years.
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


class ModelParameters(msgspec.Struct, frozen=True):
    """The values of the parameters that are for this server."""

    #: None if the model does not say it; 0 for no limit.
    execution_timeout_ns: int | None = None
    #: Empty if the configuration decides which of our schedulers the model has.
    scheduler: str = ""
    #: Empty if the model has no rule of its own for batches.
    batching: str = ""
    #: None if the number of instances does not change with the load.
    autoscale: AutoscaleSettings | None = None
    #: None if the model serves all requests in their order.
    fair: FairQueuing | None = None
    #: "" for workers of the model's own.
    worker: str = ""
    #: `FIXED` or `ADAPTIVE`.
    queue_delay: str = ADAPTIVE
    isolates_poison: bool = False
    #: 0 for no limit.
    memory_limit_byte_size: int = 0
    #: "" for the launcher of the server, and for any host.
    launcher: str = ""
    host: str = ""
    retries_on_worker_loss: bool = True
    #: Names of resources of a cluster and how much of each a worker needs, memory in bytes; `pack`, `spread`, or "".
    resources: tuple[tuple[str, float], ...] = ()
    placement: str = ""


def model_parameters(config: ModelConfig) -> ModelParameters:
    """Return the parameters that are for this server. Raises `BadConfig` for a wrong value, or an unknown name."""
    for name in sorted(config.parameters):
        if name.startswith(_PREFIX) and name not in _NAMES:
            raise BadConfig(
                f"model '{config.name}' has an unknown parameter '{name}'; known with this prefix: {', '.join(_NAMES)}"
            )
    timeout_ns: int | None = None
    if EXECUTION_TIMEOUT in config.parameters:
        timeout_ns = _seconds(config, EXECUTION_TIMEOUT)
    scheduler, batching = _name(config, SCHEDULER), _name(config, BATCHING)
    if scheduler and config.HasField("ensemble_scheduling"):
        raise BadConfig(f"parameter '{SCHEDULER}' is for models with instances; '{config.name}' is an ensemble")
    if batching and not config.HasField("dynamic_batching"):
        raise BadConfig(f"parameter '{BATCHING}' needs dynamic_batching, which model '{config.name}' does not have")
    preloaded_modules(config)
    openai_fields(config)
    tokenizer_path(config)
    worker = _worker(config) if WORKER in config.parameters else ""
    _check_concurrency(config, shares_worker=bool(worker))
    return ModelParameters(
        timeout_ns,
        scheduler,
        batching,
        autoscale_settings(config),
        fair_queuing(config),
        worker,
        _queue_delay(config),
        _isolates_poison(config),
        _memory_limit(config),
        _name(config, LAUNCHER),
        _name(config, HOST),
        _truth(config, RETRY_ON_WORKER_LOSS, default=True),
        _resources(config),
        _placement(config),
    )


def _resources(config: ModelConfig) -> tuple[tuple[str, float], ...]:
    """Return the parameter `naiad.resources`, sorted by name. Raises `BadConfig`."""
    if RESOURCES not in config.parameters:
        return ()
    text = config.parameters[RESOURCES].string_value
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, amount = (each.strip() for each in part.partition("="))
        pattern = _BYTE_SIZE if name == "memory" else _AMOUNT
        match = pattern.fullmatch(amount)
        if not equals or not _RESOURCE_NAME.fullmatch(name) or name in found or match is None:
            raise BadConfig(
                f"parameter '{RESOURCES}' of model '{config.name}' must have the form gpus=1, cpus=4, memory=8GiB, "
                f"NAME=AMOUNT, each name once; found '{text}'"
            )
        found[name] = float(int(match[1]) * _UNITS[match[2]]) if name == "memory" else float(amount)
    return tuple(sorted(found.items()))


def _placement(config: ModelConfig) -> str:
    """Return the parameter `naiad.placement`; "" without it. Raises `BadConfig`."""
    if PLACEMENT not in config.parameters:
        return ""
    text = config.parameters[PLACEMENT].string_value
    if text not in PLACEMENTS:
        raise BadConfig(f"parameter '{PLACEMENT}' of model '{config.name}' must be pack or spread; found '{text}'")
    return text


def _truth(config: ModelConfig, name: str, *, default: bool) -> bool:
    """Return the truth value of a parameter; `default` if the model does not have it. Raises `BadConfig`."""
    if name not in config.parameters:
        return default
    text = config.parameters[name].string_value
    if text not in ("true", "false"):
        raise BadConfig(f"parameter '{name}' of model '{config.name}' must be 'true' or 'false'; found '{text}'")
    return text == "true"


def _name(config: ModelConfig, name: str) -> str:
    """Return the name that a parameter holds; empty if the model does not have the parameter."""
    if name not in config.parameters:
        return ""
    text = config.parameters[name].string_value
    if not text:
        raise BadConfig(f"parameter '{name}' of model '{config.name}' must be a name; found an empty string_value")
    return text


def preloaded_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the modules that are imported before workers are forked. Raises `BadConfig`."""
    if PRELOAD not in config.parameters:
        return ()
    text = config.parameters[PRELOAD].string_value
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise BadConfig(
                f"parameter '{PRELOAD}' of model '{config.name}' must be names of modules with commas between, such as "
                f"'torch,transformers'; found '{text}'"
            )
    return names


def _queue_delay(config: ModelConfig) -> str:
    """Return how long a batch waits for more requests. Raises `BadConfig`."""
    if QUEUE_DELAY not in config.parameters:
        return ADAPTIVE
    text = config.parameters[QUEUE_DELAY].string_value
    if text not in (FIXED, ADAPTIVE):
        raise BadConfig(
            f"parameter '{QUEUE_DELAY}' of model '{config.name}' must be '{ADAPTIVE}' or '{FIXED}'; found '{text}'"
        )
    if not config.dynamic_batching.max_queue_delay_microseconds:
        raise BadConfig(
            f"parameter '{QUEUE_DELAY}' needs dynamic_batching with max_queue_delay_microseconds, which model "
            f"'{config.name}' does not have"
        )
    return text


def _isolates_poison(config: ModelConfig) -> bool:
    """Return whether requests that end workers are found and refused. Raises `BadConfig`."""
    isolates = _truth(config, ISOLATE_POISON, default=False)
    reason = ""
    if config.HasField("sequence_batching"):
        reason = "has sequence_batching, and a request of a sequence is never executed again"
    elif config.HasField("ensemble_scheduling"):
        reason = "is an ensemble: set it in the models of its steps"
    elif config.model_transaction_policy.decoupled:
        reason = "is decoupled, and a request that may have several responses is never executed again"
    elif SCHEDULER in config.parameters:
        reason = f"has a scheduler of its own (parameter {SCHEDULER})"
    elif WORKER in config.parameters:
        reason = f"shares a worker process with other models (parameter {WORKER}), which may have ended it"
    if isolates and reason:
        raise BadConfig(f"parameter '{ISOLATE_POISON}' cannot be 'true': model '{config.name}' {reason}")
    return isolates


def _memory_limit(config: ModelConfig) -> int:
    """Return how much memory a worker may use, in bytes; 0 for no limit. Raises `BadConfig`."""
    if MEMORY_LIMIT not in config.parameters:
        return 0
    text = config.parameters[MEMORY_LIMIT].string_value
    found = _BYTE_SIZE.fullmatch(text)
    byte_size = int(found[1]) * _UNITS[found[2]] if found else 0
    if byte_size < _LEAST_MEMORY:
        raise BadConfig(
            f"parameter '{MEMORY_LIMIT}' of model '{config.name}' must be a size of at least 64MiB, such as 512MiB, "
            f"2GiB, or a number of bytes; found '{text}'"
        )
    if WORKER in config.parameters:
        raise BadConfig(
            f"model '{config.name}' cannot have a limit of memory (parameter {MEMORY_LIMIT}): it shares a worker "
            f"process with other models (parameter {WORKER})"
        )
    return byte_size


def _worker(config: ModelConfig) -> str:
    """Return the name of the process that the model shares with others. Raises `BadConfig`."""
    name = config.parameters[WORKER].string_value
    if not _WORKER_NAME.fullmatch(name):
        raise BadConfig(
            f"parameter '{WORKER}' of model '{config.name}' must be a name of at most 64 letters, digits, '_', '-' and "
            f"'.'; found '{name}'"
        )
    for group in config.instance_group:
        if group.kind == group.KIND_MODEL:
            raise BadConfig(
                f"model '{config.name}' cannot share worker '{name}' (parameter {WORKER}): its instance group "
                f"'{group.name}' is KIND_MODEL, and only instances of KIND_CPU and KIND_GPU share a worker"
            )
    return name


def _seconds(config: ModelConfig, name: str) -> int:
    """Return the value of a parameter in seconds as nanoseconds."""
    text = config.parameters[name].string_value
    if not _SECONDS.fullmatch(text):
        raise BadConfig(
            f"parameter '{name}' of model '{config.name}' must be a number of seconds such as 2.5, or 0 for no limit; "
            f"found '{text}'"
        )
    return round(float(text) * 1e9)


def _check_concurrency(config: ModelConfig, *, shares_worker: bool) -> None:
    """Raise `BadConfig` for a concurrency that is not a number, or that the model cannot have."""
    if CONCURRENCY not in config.parameters:
        return
    text = config.parameters[CONCURRENCY].string_value
    if not _COUNT.fullmatch(text) or not 1 <= int(text) <= MAX_CONCURRENCY:
        raise BadConfig(
            f"parameter '{CONCURRENCY}' of model '{config.name}' must be a number from 1 to {MAX_CONCURRENCY}; found "
            f"'{text}'"
        )
    if int(text) == 1:
        return
    reason = ""
    if config.HasField("sequence_batching"):
        reason = "has sequence_batching, in which an instance executes"
    elif config.HasField("ensemble_scheduling"):
        reason = "is an ensemble; its models have a concurrency of their own, it executes"
    elif shares_worker:
        reason = "shares a worker process with other models (parameter naiad.worker), which executes"
    if reason:
        raise BadConfig(
            f"parameter '{CONCURRENCY}' must be 1: model '{config.name}' {reason} one batch at a time; found '{text}'"
        )
