"""The settings of the flight recorder: `--record DIR[,key=value...]`. Pure."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

#: The smallest recording, in bytes.
LEAST_BYTE_SIZE = 1 << 20

#: The largest input that is recorded by value, in bytes: inputs are copied while nothing else of the server runs.
MOST_TENSOR_BYTE_SIZE = 8 << 20

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}

_FORMAT = "DIR[,size=1GiB][,rate=N][,rate:MODEL=N][,tensors=value|digest][,tensor-limit=1MiB]"


class BadRecordSetting(ValueError):
    """A text is no setting of the recorder. The message is one line that names what is expected."""


class RecordSettings(msgspec.Struct, frozen=True):
    """What is recorded, and where."""

    folder: Path
    #: The most bytes of all files together.
    byte_size: int = 1 << 30
    #: One request of this number is recorded; 0 for none but requests to the models in `model_rates`.
    rate: int = 1
    #: Models with rates of their own.
    model_rates: tuple[tuple[str, int], ...] = ()
    #: Whether tensors are recorded by their SHA-256 in place of their bytes.
    input_digests: bool = False
    output_digests: bool = False
    #: Larger tensors are not recorded by value.
    tensor_limit: int = 1 << 20


def parse_record_settings(text: str) -> RecordSettings:
    """Return the settings in the value of `--record`. Raises `BadRecordSetting`."""
    folder, *words = text.split(",")
    if not folder or "\0" in folder or "=" in folder:
        raise BadRecordSetting(f"'{text}' does not begin with a folder: {_FORMAT}")
    found = RecordSettings(Path(folder))
    rates: dict[str, int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadRecordSetting(f"'{word}' is not of the form KEY=VALUE: {_FORMAT}")
        match key:
            case "size":
                found = msgspec.structs.replace(found, byte_size=_byte_size(word, value, LEAST_BYTE_SIZE, 1 << 50))
            case "tensor-limit":
                limit = _byte_size(word, value, 0, MOST_TENSOR_BYTE_SIZE)
                found = msgspec.structs.replace(found, tensor_limit=limit)
            case "rate":
                found = msgspec.structs.replace(found, rate=_rate(word, value))
            case "tensors":
                digests = _digests(word, value)
                found = msgspec.structs.replace(found, input_digests=digests, output_digests=digests)
            case "inputs":
                found = msgspec.structs.replace(found, input_digests=_digests(word, value))
            case "outputs":
                found = msgspec.structs.replace(found, output_digests=_digests(word, value))
            case _ if key.startswith("rate:") and key != "rate:":
                rates[key.removeprefix("rate:")] = _rate(word, value)
            case _:
                keys = "size, rate, rate:MODEL, tensors, inputs, outputs, tensor-limit"
                raise BadRecordSetting(f"there is no setting '{key}': the settings are {keys}")
    return msgspec.structs.replace(found, model_rates=tuple(rates.items()))


def _digests(word: str, value: str) -> bool:
    if value not in ("value", "digest"):
        raise BadRecordSetting(f"'{word}' is wrong: the tensors are recorded by 'value' or by 'digest'")
    return value == "digest"


def _rate(word: str, value: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", value, re.ASCII) is None:
        raise BadRecordSetting(f"'{word}' is wrong: a rate is a whole number, 1 for each request, 0 for none")
    return int(value)


def _byte_size(word: str, value: str, least: int, most: int) -> int:
    found = re.fullmatch(r"([0-9]{1,15})([kmgt]ib)?", value.lower(), re.ASCII)
    if found is None:
        raise BadRecordSetting(f"'{word}' is wrong: a size is a number of bytes, or one with KiB, MiB, GiB or TiB")
    size = int(found[1]) * _UNITS[found[2] or ""]
    if not least <= size <= most:
        raise BadRecordSetting(f"'{word}' is out of range: it must be from {least} to {most} bytes")
    return size
