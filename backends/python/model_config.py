"""`pb_utils.ModelConfig`: the configuration that a model's `auto_complete_config` completes.

Each change is checked against the existing configuration. A contradiction raises `ValueError` with Triton's text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    Tensor = dict[str, Any]


class ModelConfig:
    """A model configuration in Triton's JSON format. All methods change it in place."""

    def __init__(self, model_config: str) -> None:
        """`model_config` is JSON. Missing fields get their defaults."""
        self._config: dict[str, Any] = json.loads(model_config)
        self._config.setdefault("max_batch_size", 0)
        for kind in ("input", "output"):
            for tensor in self._config.setdefault(kind, []):
                tensor.setdefault("data_type", "TYPE_INVALID")
                # protobuf writes 64-bit integers as strings.
                tensor["dims"] = [int(dim) for dim in tensor.get("dims", ())]

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration; the caller must not change it."""
        return self._config

    @property
    def _model(self) -> str:
        return f"model '{self._config['name']}'"

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch size. Raises `ValueError` if the configuration has a larger one."""
        configured = self._config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function "
                f"for {self._model} specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Use the dynamic batcher. Raises `ValueError` if the configuration has another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config "
                    f"function for {self._model} tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Tensor) -> None:
        """Add an input, with the keys `name`, `data_type`, `dims` and, if needed, `optional`.

        Raises `ValueError` for unknown or missing keys, and for a contradiction to the configured input of that name.
        """
        self._check_keys("input", input, ("name", "data_type", "dims", "optional"))
        configured = self._configured("input", input["name"])
        if configured is None:
            self._config["input"].append(input)
            return
        self._check_same("input", configured, input)
        optional = input.get("optional")
        if optional is not None and configured.get("optional", optional) != optional:
            raise ValueError(
                f"{self._model}, tensor '{input['name']}': the model expects optional {optional} "
                f"but the model configuration specifies optional {configured['optional']}"
            )
        configured.update(input)

    def add_output(self, output: Tensor) -> None:
        """Add an output, with the keys `name`, `data_type` and `dims`. Raises `ValueError` as `add_input` does."""
        self._check_keys("output", output, ("name", "data_type", "dims"))
        configured = self._configured("output", output["name"])
        if configured is None:
            self._config["output"].append(output)
            return
        self._check_same("output", configured, output)
        configured.update(output)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, bool]) -> None:
        """Set `decoupled`. Raises `ValueError` for unknown keys and for a contradiction to the configuration."""
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(
                f"model transaction property in auto-complete-config function for {self._model} "
                "contains property other than 'decoupled'."
            )
        policy: dict[str, bool] = self._config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for {self._model}, "
                f"which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    def _configured(self, kind: str, name: str) -> Tensor | None:
        tensors: list[Tensor] = self._config[kind]
        return next((tensor for tensor in tensors if tensor["name"] == name), None)

    def _check_keys(self, kind: str, tensor: Tensor, known: tuple[str, ...]) -> None:
        function = f"in auto-complete-config function for {self._model}"
        if set(tensor) - set(known):
            listed = ", ".join(f"'{key}'" for key in known[:-1]) + f" and '{known[-1]}'"
            named = tensor.get("name", "")
            raise ValueError(f"{kind} '{named}' {function} contains property other than {listed}.")
        if "name" not in tensor:
            raise ValueError(f"{kind} {function} is missing 'name' property.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{tensor['name']}' {function} is missing '{key}' property.")

    def _check_same(self, kind: str, configured: Tensor, given: Tensor) -> None:
        """Check datatype and dims against the configured ones, if there are any."""
        name = given["name"]
        if configured["data_type"] not in ("TYPE_INVALID", given["data_type"]):
            raise ValueError(
                f"unable to load {self._model}, configuration expects datatype {configured['data_type']} "
                f"for {kind} '{name}', model provides {given['data_type']}"
            )
        if configured["dims"] and configured["dims"] != given["dims"]:
            raise ValueError(
                f"{self._model}, tensor '{name}': the model expects dims {given['dims']} "
                f"but the model configuration specifies dims {configured['dims']}"
            )
