"""Fair shares and quotas of clients: what the parameters mean, and which values refuse the model."""

from __future__ import annotations

import pytest

from kernel.config.check import check_config
from kernel.config.fair_queuing import FairQueuing
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import model_spec
from kernel.errors import BadConfig


def config(by: str = "", weights: str = "", quota: str = "") -> ModelConfig:
    made = ModelConfig(name="m", backend="identity")
    for name, value in (("fair_by", by), ("fair_weights", weights), ("quota", quota)):
        if value:
            made.parameters[f"naiad.{name}"].string_value = value
    return made


def test_a_model_without_the_parameters_serves_in_order() -> None:
    assert model_spec(config()).fair is None


@pytest.mark.parametrize(
    ("by", "weights", "quota", "expected"),
    [
        ("header:X-Api-Key", "", "", FairQueuing(header="x-api-key")),
        ("parameter:tenant", "", "16", FairQueuing(parameter="tenant", default_quota=16)),
        (
            "parameter:a b",
            "gold=4, k==0.5 ,*=2",
            "gold=64,*=0",
            FairQueuing("", "a b", {"gold": 4, "k=": 0.5}, 2, {"gold": 64}, 0),
        ),
        ("header:x", "3", "gold=1", FairQueuing("x", "", {}, 3, {"gold": 1}, 0)),
    ],
)
def test_clients_weights_and_quotas_are_read(by: str, weights: str, quota: str, expected: FairQueuing) -> None:
    made = config(by, weights, quota)
    check_config(made, "m")
    assert model_spec(made).fair == expected


def test_what_is_not_named_has_the_value_of_all_others() -> None:
    fair = FairQueuing(parameter="t", weights={"gold": 4}, quotas={"gold": 0}, default_quota=3)
    assert [fair.weight("gold"), fair.weight("x"), fair.quota("gold"), fair.quota("x")] == [4, 1, 0, 3]
    assert fair.has_quotas
    assert not FairQueuing(parameter="t", quotas={"x": 0}).has_quotas


@pytest.mark.parametrize(
    ("by", "weights", "quota", "text"),
    [
        ("", "gold=4", "", "'naiad.fair_weights', which needs 'naiad.fair_by'"),
        ("tenant", "", "", "must be 'header:' and the name of a header, or 'parameter:'"),
        ("header:a b", "", "", "found 'header:a b'"),
        ("parameter:", "", "", "found 'parameter:'"),
        ("header:x", "gold=0", "", "has a weight of 0"),
        ("header:x", "gold", "", "list of CLIENT=NUMBER with commas, .* a number above 0 such as 2.5, .* found 'gold'"),
        ("header:x", "a=1,a=2", "", "each client once; found 'a=2'"),
        ("header:x", "=1", "", "found '=1'"),
        ("header:x", "a=-1", "", "found 'a=-1'"),
        ("header:x", "", "1.5", "a whole number, 0 for no limit, .* found '1.5'"),
        ("header:x", "", "a=1,,", "found ''"),
    ],
)
def test_a_wrong_value_refuses_the_model(by: str, weights: str, quota: str, text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        check_config(config(by, weights, quota), "m")


def test_models_that_serve_in_another_order_are_refused() -> None:
    ordered = config("header:x")
    ordered.dynamic_batching.preserve_ordering = True
    sequence = config("header:x")
    sequence.sequence_batching.SetInParent()
    for made, text in ((ordered, "contradicts preserve_ordering"), (sequence, "for models without sequence_batching")):
        with pytest.raises(BadConfig, match=text):
            check_config(made, "m")
