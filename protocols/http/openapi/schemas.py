"""The schemas of the OpenAPI document that no model changes: JSON Schema of what the endpoints read and write. Pure.

They describe what clients should send; members that are not named are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.settings import LOG_FORMATS, TRACE_LEVELS
from protocols.http.openapi.paths import ref
from shm.datatypes import DATATYPES, MAX_SIZE

if TYPE_CHECKING:
    from protocols.http.openapi.paths import Part

_UINT64_MAX = 2**64 - 1

STRING: Part = {"type": "string"}
BOOLEAN: Part = {"type": "boolean"}
COUNT: Part = {"type": "integer", "minimum": 0, "maximum": _UINT64_MAX}

#: What an element of each datatype is in JSON; those that are missing cannot be sent in JSON.
ELEMENTS: dict[str, Part] = {
    "BOOL": BOOLEAN,
    "BYTES": STRING,
    "FP32": {"type": "number", "format": "float"},
    "FP64": {"type": "number", "format": "double"},
} | {
    row.name: {
        "type": "integer",
        "minimum": 0 if row.name.startswith("U") else -(1 << (8 * row.byte_size - 1)),
        "maximum": (1 << (8 * row.byte_size - (0 if row.name.startswith("U") else 1))) - 1,
    }
    for row in DATATYPES.values()
    if "INT" in row.name
}


def array(items: Part) -> Part:
    """Return the schema of an array of any length."""
    return {"type": "array", "items": items}


def obj(properties: dict[str, Part], required: tuple[str, ...] = (), **more: object) -> Part:
    """Return the schema of an object."""
    found: Part = {"type": "object", "properties": properties, **more}
    return {**found, "required": list(required)} if required else found


def _nullable(schema: Part) -> Part:
    return {"anyOf": [schema, {"type": "null"}]}


_SHAPE = array({"type": "integer", "minimum": 0, "maximum": MAX_SIZE})
_REGION_OF_TENSOR = {
    "shared_memory_region": {"type": "string", "description": "A registered region that holds the tensor."},
    "shared_memory_offset": COUNT,
    "shared_memory_byte_size": COUNT,
}
_DURATION = obj({"count": COUNT, "ns": COUNT}, ("count", "ns"))
_DURATIONS = {"type": "object", "additionalProperties": _DURATION}
_DIGITS = {"type": "string", "pattern": "^[0-9]{1,9}$"}
_METADATA_TENSORS = array(
    obj({"name": STRING, "datatype": STRING, "shape": array({"type": "integer"})}, ("name", "datatype", "shape"))
)

_INFERENCE: dict[str, Part] = {
    "Parameters": obj(
        {
            "sequence_id": {"anyOf": [COUNT, STRING]},
            "sequence_start": BOOLEAN,
            "sequence_end": BOOLEAN,
            "priority": COUNT,
            "timeout": {**COUNT, "description": "Microseconds that the request may wait in its queue."},
            "binary_data_output": {
                "type": "boolean",
                "description": "Send outputs as binary data, not in JSON.",
            },
        },
        description="Others go to the model as they are; names that begin with triton_ are reserved.",
        additionalProperties={"anyOf": [STRING, {"type": "integer"}, {"type": "number"}, BOOLEAN]},
        propertyNames={"pattern": "^(?!triton_)"},
    ),
    "InferRequest": obj(
        {
            "id": STRING,
            "parameters": ref("Parameters"),
            "inputs": array(ref("InferInput")),
            "outputs": array(ref("RequestedOutput")),
        },
        ("inputs",),
    ),
    "InferInput": obj(
        {
            "name": STRING,
            "datatype": {"enum": list(DATATYPES)},
            "shape": _SHAPE,
            "parameters": obj({"binary_data_size": COUNT, **_REGION_OF_TENSOR}),
            "data": {"type": "array", "description": "The elements, row by row; nested arrays are read as flat ones."},
        },
        ("name", "datatype", "shape"),
        description="Has one of: data, parameters.binary_data_size, parameters.shared_memory_region.",
    ),
    "RequestedOutput": obj(
        {
            "name": STRING,
            "parameters": obj(
                {
                    "binary_data": BOOLEAN,
                    "classification": {**COUNT, "description": "How many of the best classes; 0 for the tensor."},
                    **_REGION_OF_TENSOR,
                }
            ),
        },
        ("name",),
    ),
    "InferResponse": obj(
        {
            "id": STRING,
            "model_name": STRING,
            "model_version": STRING,
            "parameters": {"type": "object"},
            "outputs": array(
                obj(
                    {
                        "name": STRING,
                        "datatype": {"enum": list(DATATYPES)},
                        "shape": _SHAPE,
                        "parameters": obj({"binary_data_size": COUNT}),
                        "data": {"type": "array"},
                    },
                    ("name", "datatype", "shape"),
                )
            ),
        },
        ("model_name", "model_version", "outputs"),
    ),
    "GenerateRequest": obj(
        {"id": STRING, "parameters": {"type": "object", "description": "Its members are read as if beside it."}},
        description="Members that are inputs of the model become tensors, others its parameters.",
    ),
    "GenerateResponse": obj(
        {"id": STRING, "model_name": STRING, "model_version": STRING},
        ("model_name", "model_version"),
        description="Outputs and parameters are members, too: a single element alone, others as a flat array.",
    ),
}

_SETTINGS: dict[str, Part] = {
    "TraceSettings": obj({"trace_level": array(STRING)}, ("trace_level",), additionalProperties=STRING),
    "TraceChange": obj(
        {
            "trace_level": _nullable(array({"enum": list(TRACE_LEVELS)})),
            "trace_rate": _nullable(_DIGITS),
            "trace_count": _nullable({"type": "string", "pattern": "^(-1|[0-9]{1,9})$"}),
            "log_frequency": _nullable(_DIGITS),
        },
        description="null clears a setting back to what it inherits.",
    ),
    "LogSettings": obj(
        {
            "log_file": STRING,
            "log_info": BOOLEAN,
            "log_warning": BOOLEAN,
            "log_error": BOOLEAN,
            "log_verbose_level": COUNT,
            "log_format": STRING,
        },
        ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"),
    ),
    "LogChange": obj(
        {
            "log_info": _nullable(BOOLEAN),
            "log_warning": _nullable(BOOLEAN),
            "log_error": _nullable(BOOLEAN),
            "log_verbose_level": _nullable(COUNT),
            "log_format": _nullable({"enum": list(LOG_FORMATS)}),
        }
    ),
    "Rollout": obj(
        {
            "to": COUNT,
            "stable": COUNT,
            "steps": array({"type": "integer", "minimum": 1, "maximum": 100}),
            "every_s": {"type": "number"},
            "least_requests": COUNT,
            "step_timeout_s": {"type": "number"},
            "load_timeout_s": {"type": "number"},
            "hang_s": {"type": "number"},
            "guards": array({"type": "string", "description": "errors, latency, outputs or metric:NAME."}),
            "shadow_percent": {"type": "number"},
            "differences": {"type": "number"},
            "slow_ms": {"type": "number"},
            "key": STRING,
        },
        ("to",),
    ),
    "Reward": obj({"id": STRING, "reward": {"type": "number"}}, ("id", "reward")),
    "TrafficRule": obj(
        {
            "labels": {"type": "object", "description": "Label -> number of a version, or model and version."},
            "weights": {"type": "object", "additionalProperties": COUNT},
            "rules": array({"type": "object"}),
            "key": {"type": "string", "description": "header:NAME, parameter:NAME, request-id or sequence."},
            "salt": STRING,
            "shadow": obj(
                {
                    "to": {"type": "string", "description": "The label or version that gets copies of requests."},
                    "percent": {"type": "number"},
                    "waiting": COUNT,
                },
                ("to",),
            ),
            "feedback": obj({"ids": COUNT, "minutes": {"type": "number"}}),
            "rollout": {"type": "object", "description": "Defaults of rollouts, and automatic."},
            "outputs": {"type": "object", "description": "Output -> how it is compared: close, exact, top1, order."},
        }
    ),
}

_REPOSITORY: dict[str, Part] = {
    "IndexRequest": obj({"ready": {"type": "boolean", "description": "List READY versions only."}}),
    "Index": array(
        obj(
            {
                "name": STRING,
                "version": STRING,
                "state": {"enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
                "reason": STRING,
            },
            ("name",),
        )
    ),
    "LoadRequest": obj(
        {
            "parameters": obj(
                {"config": {"type": "string", "description": "A model configuration in JSON."}},
                description="file:<path> holds a file of the model in base64.",
                patternProperties={"^file:": {"type": "string", "contentEncoding": "base64"}},
                additionalProperties=False,
            )
        }
    ),
    "UnloadRequest": obj({"parameters": obj({"unload_dependents": BOOLEAN})}),
}

_SHARED_MEMORY: dict[str, Part] = {
    "SystemRegions": array(
        obj(
            {"name": STRING, "key": STRING, "offset": COUNT, "byte_size": COUNT},
            ("name", "key", "offset", "byte_size"),
        )
    ),
    "SystemRegistration": obj({"key": STRING, "offset": COUNT, "byte_size": COUNT}, ("key", "byte_size")),
    "CudaRegions": array(obj({"name": STRING, "device_id": COUNT, "byte_size": COUNT}, ("name", "byte_size"))),
    "CudaRegistration": obj(
        {
            "raw_handle": obj({"b64": {"type": "string", "contentEncoding": "base64"}}, ("b64",)),
            "byte_size": COUNT,
            "device_id": COUNT,
        },
        ("raw_handle", "byte_size", "device_id"),
    ),
}

#: By name, for `operation.ref`.
SCHEMAS: dict[str, Part] = {
    "Error": obj({"error": STRING}, ("error",)),
    "ServerMetadata": obj(
        {"name": STRING, "version": STRING, "extensions": array(STRING)}, ("name", "version", "extensions")
    ),
    "ModelMetadata": obj(
        {
            "name": STRING,
            "versions": array(STRING),
            "platform": STRING,
            "inputs": _METADATA_TENSORS,
            "outputs": _METADATA_TENSORS,
        },
        ("name", "versions", "platform", "inputs", "outputs"),
    ),
    "ModelConfig": obj(
        {"name": STRING, "backend": STRING, "max_batch_size": {"type": "integer"}},
        ("name",),
        description="Triton's ModelConfig message in JSON.",
    ),
    "Statistics": obj(
        {
            "model_stats": array(
                obj(
                    {
                        "name": STRING,
                        "version": STRING,
                        "last_inference": {**COUNT, "description": "Milliseconds since 1970, 0 for never."},
                        "inference_count": COUNT,
                        "execution_count": COUNT,
                        "inference_stats": _DURATIONS,
                        "response_stats": {"type": "object", "additionalProperties": _DURATIONS},
                        "batch_stats": array(obj({"batch_size": COUNT}, ("batch_size",))),
                        "memory_usage": array({"type": "object"}),
                        "instance_memory": {
                            "type": "object",
                            "additionalProperties": array({"type": "object"}),
                            "description": "The memory by instance, if backends report it.",
                        },
                        "instance_hosts": {
                            "type": "object",
                            "additionalProperties": STRING,
                            "description": "The hosts of instances that are not on the machine of the server.",
                        },
                    },
                    ("name", "version", "last_inference", "inference_count", "execution_count", "inference_stats"),
                )
            )
        },
        ("model_stats",),
    ),
    **_INFERENCE,
    **_SETTINGS,
    **_REPOSITORY,
    **_SHARED_MEMORY,
}
