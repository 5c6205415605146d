"""Trace and log settings over gRPC: which fields of a message they are, and of which types.

Values are checked by `kernel.settings`. Settings that Triton does not know are ignored, as it does here
and not over HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, Unavailable
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.traced_models import check_traced_model

if TYPE_CHECKING:
    from kernel.serving.front_doors.interface import KernelInterface
    from kernel.settings import TraceChange
    from protocols.access.restricted import AdminAccess
    from protocols.grpc.rpc import Caller

#: What can be asked for, in the order in which Triton looks at it. A change of the file is refused.
_TRACE_SETTINGS = ("trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency")

#: The same for logs, with the field of the value and what Triton calls it.
_LOG_SETTINGS = (
    ("log_info", "bool_param", "boolean"),
    ("log_warning", "bool_param", "boolean"),
    ("log_error", "bool_param", "boolean"),
    ("log_verbose_level", "uint32_param", "int32"),
    ("log_format", "string_param", "string"),
)


class SettingsRpcs:
    """Both RPCs change the settings that the request names, and return all of them.

    Those who may not administer the server may read, but not change them.
    """

    def __init__(self, kernel: KernelInterface, admin: AdminAccess) -> None:
        self._kernel = kernel
        self._admin = admin

    def _check_admin(self, caller: Caller) -> None:
        """Raise `Unavailable`, as for a restricted protocol, unless this client may administer the server."""
        refusal = self._admin.refusal(caller.header, caller.peer)
        if refusal is not None:
            raise Unavailable(refusal)

    async def trace(self, message: pb.TraceSettingRequest, caller: Caller) -> pb.TraceSettingResponse:
        """Change and return the settings of a model, or of the server for an empty name."""
        if message.settings:
            self._check_admin(caller)
        if message.model_name:
            check_traced_model(self._kernel, message.model_name)
        change: TraceChange = {}
        for name in _TRACE_SETTINGS:
            if name in message.settings:
                texts = list(message.settings[name].value)
                # Without values a setting is cleared; the file cannot even be cleared.
                change[name] = texts or (None if name != "trace_file" else [""])
        if change:
            values = self._kernel.trace.update(change, message.model_name, got="got: ")
        else:
            values = self._kernel.trace.get(message.model_name)
        response = pb.TraceSettingResponse()
        for name, texts in values.as_dict().items():
            response.settings[name].value.extend(texts)
        return response

    async def log(self, message: pb.LogSettingsRequest, caller: Caller) -> pb.LogSettingsResponse:
        if message.settings:
            self._check_admin(caller)
        change = _log_change(message)
        values = self._kernel.log.update(change) if change else self._kernel.log.values
        response = pb.LogSettingsResponse()
        for name, value in msgspec.structs.asdict(values).items():
            setting = response.settings[name]
            match value:
                case bool():
                    setting.bool_param = value
                case int():
                    setting.uint32_param = value
                case _:
                    setting.string_param = value
        return response


def _log_change(message: pb.LogSettingsRequest) -> dict[str, bool | int | str]:
    change: dict[str, bool | int | str] = {}
    if "log_file" in message.settings:
        change["log_file"] = message.settings["log_file"].string_param
    for name, field, kind in _LOG_SETTINGS:
        if name not in message.settings:
            continue
        setting = message.settings[name]
        match setting.WhichOneof("parameter_choice"):
            case "bool_param" if field == "bool_param":
                change[name] = setting.bool_param
            case "uint32_param" if field == "uint32_param":
                change[name] = setting.uint32_param
            case "string_param" if field == "string_param":
                change[name] = setting.string_param
            case _:
                raise InvalidArgument(f"expect {kind} for '{name}'")
    return change
