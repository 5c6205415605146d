"""`naiad traffic`: shows and changes the traffic rule of a model of a running server."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from kernel.command.infer.connection import ClientError, base_url, call
from kernel.command.start_messages import table_text
from kernel.errors import ServingError
from kernel.options import BadOption
from kernel.traffic.settings import TrafficSettings, read_toml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def show_traffic(
    url: str,
    model: str,
    *,
    weights: Sequence[str] = (),
    labels: Sequence[str] = (),
    key: str | None = None,
    file: Path | None = None,
    reset: bool = False,
    as_json: bool = False,
) -> int:
    """Change the rule if that is asked for, and print it as it is then. Returns the exit code. Raises `BadOption`."""
    members = changes_of(weights, labels, key, file)
    if reset and members:
        raise BadOption("--reset cannot be used with another change")
    path = f"/v2/models/{urllib.parse.quote(model, safe='')}/traffic"
    try:
        address = f"{base_url(url)}{path}"
        if "labels" in members and file is None:
            members["labels"] = {**call(address)["rule"].get("labels", {}), **members["labels"]}
        if reset:
            address, members = f"{address}/reset", {}
        found = call(address, members) if members or reset else call(address)
    except ClientError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        typer.echo(traffic_text(found), nl=False)
    return 0


def changes_of(weights: Sequence[str], labels: Sequence[str], key: str | None, file: Path | None) -> dict[str, Any]:
    """Return the members of the rule that the command line sets. Raises `BadOption`."""
    if file is not None:
        if weights or labels or key is not None:
            raise BadOption("--file replaces the whole rule: give no other change with it")
        try:
            settings = read_toml(file.read_bytes())
        except OSError as error:
            raise BadOption(f"'{file}' cannot be read: {error.strerror}") from None
        except ServingError as error:
            raise BadOption(f"'{file}': {error.message}") from None
        every: dict[str, Any] = msgspec.to_builtins(TrafficSettings())
        empty = {"labels": {}, "weights": {}, "rules": [], "key": "", "salt": ""}
        return {**empty, **every, **settings.as_dict()}
    members: dict[str, Any] = {}
    if weights:
        members["weights"] = dict(_pair(text, "TARGET=WEIGHT") for text in weights)
    if labels:
        members["labels"] = dict(_pair(text, "LABEL=VERSION") for text in labels)
    if key is not None:
        members["key"] = key
    return members


def _pair(text: str, form: str) -> tuple[str, int]:
    name, found, number = text.rpartition("=")
    if not (found and name and number.isascii() and number.isdigit() and len(number) <= 18):
        raise BadOption(f"expected {form} with a whole number, not '{text}'")
    return name, int(number)


def traffic_text(found: dict[str, Any]) -> str:
    """Return what is printed for the report of a server."""
    rule = found["rule"]
    sources = {"none": "no rule: the newest version gets all requests", "file": "traffic.toml", "client": "a client"}
    lines = [f"{found['model']}: {sources[found['source']]}\n"]
    if "file_error" in found:
        lines.append(f"traffic.toml has no effect: {found['file_error']}\n")
    if rule.get("key"):
        lines.append(f"key: {rule['key']}\n")
    counts: dict[tuple[str, str], int] = {}
    for each in found["requests"]:
        place = each["model"], str(each["version"])
        counts[place] = counts.get(place, 0) + each["count"]
    rows = [
        (
            each["text"],
            f"{each['model']} {each['version']}".rstrip(),
            str(each["weight"]),
            f"{each['share'] / 100:g} %",
            str(counts.get((each["model"], each["version"]), 0)),
            each["trouble"],
        )
        for each in found["targets"]
    ]
    if rows:
        lines.append(table_text(("Target", "Version", "Weight", "Share", "Requests", "Trouble"), rows))
    for match in rule.get("rules", ()):
        where = next(f"{kind} {match[kind]}" for kind in ("header", "parameter", "sequence") if match.get(kind))
        values = f" = {' or '.join(match['is'])}" if match.get("is") else ""
        lines.append(f"rule: {where}{values} -> {match['to']}\n")
    return "".join(lines)
