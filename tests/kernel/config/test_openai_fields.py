from __future__ import annotations

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.model_parameters import model_parameters, openai_fields
from kernel.errors import BadConfig


def config(text: str) -> ModelConfig:
    found = ModelConfig(name="m")
    found.parameters["naiad.openai_fields"].string_value = text
    return found


def test_the_names_stand_with_commas_between() -> None:
    assert openai_fields(config("tools, logit_bias,image_url")) == {"tools", "logit_bias", "image_url"}
    assert openai_fields(config("")) == openai_fields(ModelConfig(name="m")) == frozenset()


def test_a_name_that_is_none_of_them_is_an_error_of_the_configuration() -> None:
    with pytest.raises(BadConfig, match="must be names with commas between; 'temperature' is none of add_generation"):
        model_parameters(config("tools,temperature"))
