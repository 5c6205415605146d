"""The config.pbtxt that goes with an engine. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from backends.tensorrt.autofill import autofill

if TYPE_CHECKING:
    from backends.base import Config
    from backends.tensorrt.signature import EngineSignature


def config_text(model: str, signature: EngineSignature, filename: str) -> str:
    """Return a complete configuration of a model with the engine in `filename`, as a person would write it.

    Raises `Unsupported` for tensors that no client can send.
    """
    profiles = [str(profile.index) for profile in signature.profiles]
    group: Config = {"kind": "KIND_GPU", "count": 1}
    if len(profiles) > 1:
        group["profile"] = profiles
    filled = autofill({"name": model, "instance_group": [group]}, signature)
    lines = [f"name: {_text(model)}", 'backend: "tensorrt"', f"max_batch_size: {filled['max_batch_size']}"]
    if filename != "model.plan":
        lines.append(f"default_model_filename: {_text(filename)}")
    for key in ("input", "output"):
        lines += [
            f"{key} [",
            *(f"  {_entry(entry)}," for entry in filled[key][:-1]),
            f"  {_entry(filled[key][-1])}",
            "]",
        ]
    lines.append("instance_group [ { kind: KIND_GPU count: 1" + _profiles(group) + " } ]")
    if "dynamic_batching" in filled:
        lines.append("dynamic_batching { }")
    return "\n".join(lines) + "\n"


def _entry(entry: dict[str, Any]) -> str:
    parts = [f"name: {_text(entry['name'])} data_type: {entry['data_type']} dims: {_numbers(entry['dims'])}"]
    if "reshape" in entry:
        parts.append(f"reshape {{ shape: {_numbers(entry['reshape']['shape'])} }}")
    if entry.get("is_shape_tensor"):
        parts.append("is_shape_tensor: true")
    return "{ " + " ".join(parts) + " }"


def _profiles(group: Config) -> str:
    names = group.get("profile", [])
    return f" profile: [ {', '.join(map(_text, names))} ]" if names else ""


def _numbers(values: list[int]) -> str:
    return f"[ {', '.join(map(str, values))} ]" if values else "[ ]"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
