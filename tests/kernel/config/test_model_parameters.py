"""Parameters of a configuration that are for this server: what they mean, and that a wrong one refuses the model."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from kernel.config.check import check_config
from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.config.model_parameters import model_parameters
from kernel.config.spec import model_spec
from kernel.errors import BadConfig


def config(**parameters: str) -> ModelConfig:
    made = ModelConfig(name="m", backend="identity")
    for name, value in parameters.items():
        made.parameters[name.replace("__", ".")].string_value = value
    return made


@pytest.mark.parametrize(
    ("text", "timeout_ns"),
    [("2.5", 2_500_000_000), ("0", 0), ("90", 90_000_000_000), ("0.000000001", 1), ("999999999", 999_999_999 * 10**9)],
)
def test_an_execution_timeout_is_given_in_seconds(text: str, timeout_ns: int) -> None:
    made = config(naiad__execution_timeout=text)
    check_config(made, "m")
    assert model_spec(made).execution_timeout_ns == timeout_ns


def test_without_parameters_the_server_decides() -> None:
    assert model_parameters(config(other="x")).execution_timeout_ns is None


@pytest.mark.parametrize(
    "text", ["", " ", "-1", "1e3", "nan", "inf", "2.5s", "1.", ".5", "٣", "1" * 10, "0." + "1" * 10]
)
def test_a_wrong_value_refuses_the_model(text: str) -> None:
    with pytest.raises(BadConfig) as caught:
        check_config(config(naiad__execution_timeout=text), "m")
    assert caught.value.message == (
        "parameter 'naiad.execution_timeout' of model 'm' must be a number of seconds such as 2.5, or 0 for no limit; "
        f"found '{text}'"
    )


def test_an_unknown_name_with_our_prefix_refuses_the_model() -> None:
    with pytest.raises(BadConfig, match="unknown parameter 'naiad.execution_timout'; known with this prefix: naiad.ex"):
        check_config(config(naiad__execution_timout="3"), "m")


def test_a_scheduler_and_a_batching_rule_are_named() -> None:
    made = config(naiad__scheduler="mine", naiad__batching="rule", other="x")
    made.dynamic_batching.SetInParent()
    check_config(made, "m")
    spec = model_spec(made)
    assert (spec.scheduler, spec.batching_rule) == ("mine", "rule")
    assert spec.parameters == {"naiad.batching": "rule", "naiad.scheduler": "mine", "other": "x"}


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (config(naiad__scheduler=""), "must be a name; found an empty string_value"),
        (config(naiad__batching="rule"), "needs dynamic_batching, which model 'm' does not have"),
    ],
)
def test_a_name_must_be_there_and_a_rule_needs_a_batcher(made: ModelConfig, text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        check_config(made, "m")


def test_models_share_a_worker_by_its_name() -> None:
    assert model_parameters(config(naiad__worker="small-1_x.y")).worker == "small-1_x.y"
    assert model_parameters(config()).worker == ""


@pytest.mark.parametrize(("text", "may_end_early"), [(None, True), ("adaptive", True), ("fixed", False)])
def test_a_queue_delay_may_be_fixed(text: str | None, *, may_end_early: bool) -> None:
    made = config() if text is None else config(naiad__queue_delay=text)
    made.dynamic_batching.max_queue_delay_microseconds = 500
    batching = model_spec(made).dynamic_batching
    assert batching is not None
    assert batching.delay_may_end_early is may_end_early


def test_a_wrong_queue_delay_refuses_the_model() -> None:
    made = config(naiad__queue_delay="no")
    made.dynamic_batching.max_queue_delay_microseconds = 500
    with pytest.raises(BadConfig, match="of model 'm' must be 'adaptive' or 'fixed'; found 'no'"):
        check_config(made, "m")
    with pytest.raises(BadConfig, match="needs dynamic_batching with max_queue_delay_microseconds, which model 'm'"):
        check_config(config(naiad__queue_delay="fixed"), "m")


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "ä", "x" * 65])
def test_a_wrong_name_of_a_worker_refuses_the_model(name: str) -> None:
    with pytest.raises(BadConfig) as caught:
        check_config(config(naiad__worker=name), "m")
    assert caught.value.message == (
        "parameter 'naiad.worker' of model 'm' must be a name of at most 64 letters, digits, '_', '-' and '.'; "
        f"found '{name}'"
    )


def test_instances_that_choose_their_devices_share_no_worker() -> None:
    made = config(naiad__worker="small")
    made.instance_group.add(name="g", kind=ModelInstanceGroup.KIND_MODEL)
    with pytest.raises(BadConfig) as caught:
        check_config(made, "m")
    assert caught.value.message == (
        "model 'm' cannot share worker 'small' (parameter naiad.worker): its instance group 'g' is "
        "KIND_MODEL, and only instances of KIND_CPU and KIND_GPU share a worker"
    )


@pytest.mark.parametrize("text", ["", "0", "1025", "-1", "2.0", "many", "1" * 7])
def test_a_wrong_concurrency_refuses_the_model(text: str) -> None:
    with pytest.raises(BadConfig) as caught:
        check_config(config(naiad__concurrency=text), "m")
    assert caught.value.message == (
        f"parameter 'naiad.concurrency' of model 'm' must be a number from 1 to 1024; found '{text}'"
    )


def test_a_model_that_executes_one_batch_at_a_time_has_no_concurrency() -> None:
    shared, sequences = config(naiad__concurrency="2", naiad__worker="w"), config(naiad__concurrency="2")
    sequences.sequence_batching.SetInParent()
    ensemble = config(naiad__concurrency="2")
    ensemble.ensemble_scheduling.SetInParent()
    for made, reason in (
        (shared, "shares a worker process with other models (parameter naiad.worker), which executes"),
        (sequences, "has sequence_batching, in which an instance executes"),
        (ensemble, "is an ensemble; its models have a concurrency of their own, it executes"),
    ):
        with pytest.raises(BadConfig) as caught:
            model_parameters(made)
        assert caught.value.message == (
            f"parameter 'naiad.concurrency' must be 1: model 'm' {reason} one batch at a time; found '2'"
        )
        made.parameters["naiad.concurrency"].string_value = "1"
        model_parameters(made)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("sequence_batching {}", "has sequence_batching"),
        ("model_transaction_policy { decoupled: true }", "is decoupled"),
        ('parameters { key: "naiad.worker" value { string_value: "w" } }', "shares a worker process"),
        ('parameters { key: "naiad.scheduler" value { string_value: "s" } }', "has a scheduler of its own"),
    ],
)
def test_only_a_model_whose_executions_can_be_repeated_isolates_poison_requests(more: str, reason: str) -> None:
    isolates = ModelConfig(name="m")
    isolates.parameters["naiad.isolate_poison"].string_value = "true"
    assert model_parameters(isolates).isolates_poison
    text_format.Merge(more, isolates)
    with pytest.raises(BadConfig, match=f"parameter 'naiad.isolate_poison' cannot be 'true': model 'm' {reason}"):
        model_parameters(isolates)
    isolates.parameters["naiad.isolate_poison"].string_value = "false"
    assert not model_parameters(isolates).isolates_poison
    isolates.parameters["naiad.isolate_poison"].string_value = "1"
    with pytest.raises(BadConfig, match="must be 'true' or 'false'; found '1'"):
        model_parameters(isolates)


@pytest.mark.parametrize(("text", "byte_size"), [("512MiB", 512 << 20), ("2GiB", 2 << 30), ("100000000", 100_000_000)])
def test_a_limit_of_memory_is_a_size(text: str, byte_size: int) -> None:
    assert model_parameters(config(naiad__memory_limit=text)).memory_limit_byte_size == byte_size


@pytest.mark.parametrize("text", ["", "1", "63MiB", "1 GiB", "1GB", "-1GiB", "1.5GiB", "٣GiB", "9" * 16])
def test_a_wrong_limit_of_memory_refuses_the_model(text: str) -> None:
    with pytest.raises(BadConfig, match=f"must be a size of at least 64MiB, .*; found '{text}'"):
        model_parameters(config(naiad__memory_limit=text))


def test_a_model_that_shares_a_process_has_no_limit_of_memory_of_its_own() -> None:
    with pytest.raises(BadConfig, match="cannot have a limit of memory"):
        model_parameters(config(naiad__memory_limit="1GiB", naiad__worker="w"))


def test_a_model_names_its_launcher_and_its_host() -> None:
    found = model_parameters(config(naiad__launcher="agent", naiad__host="far"))
    assert (found.launcher, found.host) == ("agent", "far")
    assert (model_parameters(config()).launcher, model_parameters(config()).host) == ("", "")
    found = model_parameters(config(naiad__resources="gpus=1, cpus=0.5,memory=2GiB, tpu=3", naiad__placement="spread"))
    assert found.resources == (("cpus", 0.5), ("gpus", 1.0), ("memory", float(2 << 30)), ("tpu", 3.0))
    assert found.placement == "spread"
    for wrong in ("", "gpus", "gpus=", "gpus=x", "gpus=1,gpus=1", "memory=2GB", "a b=1", "gpus=-1"):
        with pytest.raises(BadConfig, match=r"'naiad.resources' of model 'm' must have the form gpus=1.* found"):
            model_parameters(config(naiad__resources=wrong))
    with pytest.raises(BadConfig, match=r"'naiad.placement' of model 'm' must be pack or spread; found 'x'"):
        model_parameters(config(naiad__placement="x"))
    with pytest.raises(BadConfig, match=r"'naiad.launcher' of model 'm' must be a name; found an empty string_value"):
        model_parameters(config(naiad__launcher=""))


@pytest.mark.parametrize(("text", "retries"), [("true", True), ("false", False)])
def test_requests_are_retried_after_the_loss_of_a_host_unless_the_model_forbids_it(text: str, *, retries: bool) -> None:
    assert model_parameters(config(naiad__retry_on_worker_loss=text)).retries_on_worker_loss is retries


def test_a_wrong_word_for_retries_is_refused() -> None:
    assert model_parameters(config()).retries_on_worker_loss
    with pytest.raises(BadConfig, match=r"retry_on_worker_loss' of model 'm' must be 'true' or 'false'; found 'yes'"):
        model_parameters(config(naiad__retry_on_worker_loss="yes"))
