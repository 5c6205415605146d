"""`naiad traffic`: shows and changes the traffic rule of a model of a running server.

`naiad rollout`: guarded rollouts of a running server.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kernel.errors import BadOption, ServingError
from kernel.records.recording_format import segment_name
from kernel.tools.client import base_url, call, download, model_path
from kernel.tools.printing import pretty_json, table_text
from kernel.traffic.rollout_states import reason_text
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
    shadow: str | None = None,
    file: Path | None = None,
    worst: Path | None = None,
    reset: bool = False,
    as_json: bool = False,
) -> None:
    """Change the rule if that is asked for, and print it as it is then. Raises `BadOption`."""
    members = changes_of(weights, labels, key, file, shadow)
    if reset and members:
        raise BadOption("--reset cannot be used with another change")
    if "labels" in members and file is None:
        members["labels"] = {**_call(url, model, "traffic")["rule"].get("labels", {}), **members["labels"]}
    found = _call(url, model, "traffic/reset", {}) if reset else _call(url, model, "traffic", members or None)
    if worst is not None:
        _write_worst(worst, _address(url, model, "traffic/shadow/worst"))
    typer.echo(pretty_json(found) if as_json else traffic_text(found), nl=as_json)


def _call(url: str, model: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return what the server at `url` says of a model. Raises `ClientError` if it does not, or refuses."""
    return call(_address(url, model, path), body)


def _address(url: str, model: str, path: str) -> str:
    return f"{base_url(url)}{model_path(model)}/{path}"


def _write_worst(folder: Path, address: str) -> None:
    """Write a recording that `naiad replay` reads. Raises `BadOption`, `ClientError`."""
    content = download(address)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / segment_name(1)
        path.write_bytes(content)
    except OSError as error:
        raise BadOption(f"'{folder}' cannot be written: {error.strerror}") from None
    typer.echo(f"the requests that differ most are in '{folder}': naiad replay {folder} --to HOST:PORT", err=True)


#: The members of a rule without content.
_EMPTY: dict[str, Any] = {
    "labels": {}, "weights": {}, "rules": [], "key": "", "salt": "", "shadow": None, "outputs": {}, "rollout": {},
    "feedback": None,
}  # fmt: skip


def changes_of(
    weights: Sequence[str], labels: Sequence[str], key: str | None, file: Path | None, shadow: str | None = None
) -> dict[str, Any]:
    """Return the members of the rule that the command line sets. Raises `BadOption`."""
    if file is not None:
        if weights or labels or key is not None or shadow is not None:
            raise BadOption("--file replaces the whole rule: give no other change with it")
        try:
            settings = read_toml(file.read_bytes())
        except OSError as error:
            raise BadOption(f"'{file}' cannot be read: {error.strerror}") from None
        except ServingError as error:
            raise BadOption(f"'{file}': {error.message}") from None
        every: dict[str, Any] = msgspec.to_builtins(TrafficSettings())
        return {**_EMPTY, **every, **settings.as_dict()}
    members: dict[str, Any] = {}
    if weights:
        members["weights"] = dict(_pair(text, "TARGET=WEIGHT") for text in weights)
    if labels:
        members["labels"] = dict(_pair(text, "LABEL=VERSION") for text in labels)
    if key is not None:
        members["key"] = key
    if shadow is not None:
        members["shadow"] = _shadow(shadow)
    return members


def _shadow(text: str) -> dict[str, Any] | None:
    """Return the member of the rule for `TARGET[=PERCENT]` or `off`. Raises `BadOption`."""
    if text == "off":
        return None
    target, found, percent = text.partition("=")
    if not target or (found and re.fullmatch(r"[0-9]{1,3}(?:\.[0-9]{1,6})?", percent) is None):
        raise BadOption(f"expected --shadow TARGET, TARGET=PERCENT or off, not '{text}'")
    return {"to": target, "percent": float(percent)} if found else {"to": target}


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
    if (shadow := found.get("shadow")) is not None:
        lines.append(shadow_text(shadow))
    if (feedback := found.get("feedback")) is not None:
        lines.append(feedback_text(feedback))
    return "".join(lines)


def shadow_text(found: dict[str, Any]) -> str:
    """Return what is printed of a shadow."""
    state = found["trouble"] or ("" if found["active"] else "it has ended")
    lines = [
        f"shadow: {found['to']}, {found.get('percent', 100):g} % of the requests{': ' if state else ''}{state}\n",
        f"pairs: {found['pairs']}, different {found['different']}, chosen {found['sampled']}\n",
        *(f"not compared: {count}, {reason}\n" for reason, count in found["dropped"].items()),
    ]
    rows = [
        (
            name or "(errors)",
            str(each["compared"]),
            ", ".join(f"{count} {kind}" for kind, count in each["different"].items()) or "0",
            *(f"{each['distance'][quantile]:g}" for quantile in ("p50", "p90", "p99", "largest")),
        )
        for name, each in found["outputs"].items()
    ]
    if rows:
        head = ("Output", "Compared", "Different", "Distance p50", "p90", "p99", "largest")
        lines.append(table_text(head, rows))
    lines += [f"worst: {each['why']}{_distance(each['distance'])}\n" for each in found["worst"][:5]]
    return "".join(lines)


def _distance(distance: float | None) -> str:
    return "" if distance is None else f", {distance:.3g} times the tolerance"


def feedback_text(found: dict[str, Any]) -> str:
    """Return what is printed of rewards."""
    rows = []
    for each in found["versions"]:
        difference = each["difference"] or {"mean": None, "interval": None}
        rows.append(
            (
                f"{each['model']} {each['version']}",
                str(each["rewards"]),
                f"{each['mean']:.6g}",
                _interval(each["interval"]),
                "-" if difference["mean"] is None else f"{difference['mean']:+.6g}",
                _interval(difference["interval"]) if difference["mean"] is not None else "-",
            )
        )
    lines = [f"feedback: {found['remembered']} requests wait for rewards, {found['unknown']} rewards had unknown ids\n"]
    if found.get("without_room"):
        lines.append(f"not remembered: {found['without_room']} requests, the memory budget of the server had no room\n")
    if rows:
        lines.append(table_text(("Version", "Rewards", "Mean", "95 %", "Difference", "95 %"), rows))
    return "".join(lines)


def _interval(ends: Sequence[float] | None) -> str:
    return "too few" if ends is None else f"{ends[0]:.6g} to {ends[1]:.6g}"


rollout_cli = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Replace a version of a model step by step: the server compares both, and goes back by itself.",
)

Name = Annotated[str, typer.Argument(metavar="MODEL")]

Url = Annotated[str, typer.Option("--url", "-u", help="Address of the server's HTTP port.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_Guards = Annotated[
    str | None,
    typer.Option("--guard", metavar="NAME,...", help="errors, latency, outputs, metric:NAME; default: errors,latency."),
]

_ShadowPercent = Annotated[
    float | None,
    typer.Option("--shadow-percent", help="For outputs: the share of requests that both execute; default 100."),
]

_Differences = Annotated[
    float | None, typer.Option("--differences", help="For outputs: percent of pairs that may differ; default 0.1.")
]

_URL = "127.0.0.1:8000"

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

#: The exit code of `status`, for pipelines.
EXIT_CODES = {"done": 0, "aborted": 1, "loading": 2, "step": 2, "paused": 3}


@rollout_cli.command()
def start(
    model: Name,
    to: Annotated[int, typer.Option("--to", min=0, metavar="VERSION", help="The version that is to replace it.")],
    stable: Annotated[
        int | None, typer.Option("--stable", min=0, metavar="VERSION", help="Default: that with the largest share.")
    ] = None,
    steps: Annotated[str | None, typer.Option("--steps", metavar="PERCENT,...", help="Default: 1,5,25,50,100.")] = None,
    every: Annotated[
        str | None, typer.Option("--every", metavar="TIME", help="The least time of a step: 30s, 10m (default), 2h.")
    ] = None,
    least_requests: Annotated[
        int | None,
        typer.Option("--least-requests", min=0, help="The least requests of the new version in a step; default 300."),
    ] = None,
    step_timeout: Annotated[
        str | None, typer.Option("--step-timeout", metavar="TIME", help="A step without a verdict pauses then: 2h.")
    ] = None,
    hang: Annotated[
        str | None,
        typer.Option("--hang", metavar="TIME", help="A version that ends no execution for so long is stopped: 30s."),
    ] = None,
    guard: _Guards = None,
    shadow_percent: _ShadowPercent = None,
    differences: _Differences = None,
    slow_ms: Annotated[
        float | None,
        typer.Option(
            "--slow-ms", help="Executions that count as slow; default: the slowest 1 % of the stable version."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", help="header:NAME, parameter:NAME, request-id or sequence; default: the rule's."),
    ] = None,
    url: Url = _URL,
    as_json: AsJson = False,
) -> None:
    """Begin a rollout to a version, which the server loads if it has not.

    What is not given comes from `rollout` of the model's traffic rule.
    """
    given = {
        "to": to,
        "stable": stable,
        "steps": None if steps is None else [_whole(text) for text in steps.split(",")],
        "every_s": None if every is None else seconds(every),
        "least_requests": least_requests,
        "step_timeout_s": None if step_timeout is None else seconds(step_timeout),
        "hang_s": None if hang is None else seconds(hang),
        "guards": None if guard is None else guard.split(","),
        "shadow_percent": shadow_percent,
        "differences": differences,
        "slow_ms": slow_ms,
        "key": key,
    }
    document = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(_ask(url, model, "rollout", document, as_json=as_json))


@rollout_cli.command()
def status(model: Name, url: Url = _URL, as_json: AsJson = False) -> None:
    """Show where a rollout is. The exit code is 0 done, 1 aborted, 2 running, 3 paused."""
    raise typer.Exit(_ask(url, model, "rollout", None, as_json=as_json, by_phase=True))


@rollout_cli.command()
def history(model: Name, url: Url = _URL, as_json: AsJson = False) -> None:
    """Show the last changes of the traffic of a model, newest first: when, who, why, and the weights from then on."""
    found = _call(url, model, "traffic")["history"]
    if as_json:
        typer.echo(pretty_json(found))
        return
    rows = [
        (each["time"], each["by"], _weights(each["rule"]), each["reason"] or _changed(each["rule"], former))
        for each, former in zip(found, [*(each["rule"] for each in found[1:]), None], strict=True)
    ]
    typer.echo(table_text(("Time", "By", "Weights", "Reason"), rows), nl=False)


@rollout_cli.command()
def pause(model: Name, url: Url = _URL, as_json: AsJson = False) -> None:
    """Stay at the present step. The guards go on, and can stop the rollout."""
    raise typer.Exit(_ask(url, model, "rollout/pause", {}, as_json=as_json))


@rollout_cli.command()
def resume(model: Name, url: Url = _URL, as_json: AsJson = False) -> None:
    """Go on with a rollout that is paused."""
    raise typer.Exit(_ask(url, model, "rollout/resume", {}, as_json=as_json))


@rollout_cli.command()
def promote(model: Name, url: Url = _URL, as_json: AsJson = False) -> None:
    """Give the new version all requests now, whatever the guards say."""
    raise typer.Exit(_ask(url, model, "rollout/promote", {}, as_json=as_json))


@rollout_cli.command()
def abort(model: Name, url: Url = _URL, as_json: AsJson = False) -> None:
    """Give the stable version all requests again, also after the end of the rollout."""
    raise typer.Exit(_ask(url, model, "rollout/abort", {}, as_json=as_json))


def seconds(text: str) -> float:
    """Return a time such as `30s`, `10m` or `2h` in seconds. Raises `BadOption`."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(s|m|h|)", text)
    if found is None:
        raise BadOption(f"'{text}' is no time: expected a number with s, m or h, such as 30s, 10m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 3):
        raise BadOption(f"--steps are whole numbers of percent such as 1,5,25,50,100, not '{text}'")
    return int(text)


def _weights(rule: dict[str, Any] | None) -> str:
    if rule is None:
        return "no rule"
    return " ".join(f"{target}={weight}" for target, weight in rule.get("weights", {}).items()) or "-"


def _changed(rule: dict[str, Any] | None, former: dict[str, Any] | None) -> str:
    """Return which members of the rule a change without a reason has changed."""
    if rule is None or former is None:
        return ""
    return ", ".join(name for name in _EMPTY if rule.get(name) != former.get(name))


def _ask(url: str, model: str, path: str, body: dict[str, Any] | None, *, as_json: bool, by_phase: bool = False) -> int:
    """Ask a server and print where the rollout is. Returns the exit code. Raises `BadOption`."""
    found = _call(url, model, path, body)
    if as_json:
        typer.echo(pretty_json(found))
    elif found is None:
        typer.echo(f"model '{model}' had no rollout")
    else:
        typer.echo(rollout_text(model, found), nl=False)
    return (1 if found is None else EXIT_CODES[found["phase"]]) if by_phase else 0


def rollout_text(model: str, found: dict[str, Any]) -> str:
    """Return what is printed for the state of a rollout."""
    lines = [
        f"{model}: version {found['candidate']} in place of {found['stable']}: {found['described']}, "
        f"{found['seconds_in_phase']:g} s\n",
        f"reason: {reason_text(found['reason'], found.get('by', ''))}\n",
    ]
    verdict = found["verdict"]
    if found["phase"] in ("loading", "step", "paused") and verdict is not None:
        lines.append(f"verdict: {verdict['decision']}\n")
        lines += [f"  {sentence}\n" for sentence in verdict["sentence"].split("; ")]
    rows = [
        (
            name,
            f"{each['candidate_bad']} of {each['candidate']}",
            "-" if name == "outputs" else f"{each['stable_bad']} of {each['stable']}",
        )
        for name, each in found["guards"].items()
    ]
    lines.append(table_text(("Bad events", f"Version {found['candidate']}", f"Version {found['stable']}"), rows))
    return "".join(lines)
