"""The traffic rule of a model: labels, weights, and which requests go to which version. Pure.

It is the content of `traffic.toml` beside the model's config.pbtxt, and the body of `POST /v2/models/M/traffic`:

    key = "header:x-user-id"
    [labels]
    stable = 3
    canary = 4
    [weights]
    stable = 95
    canary = 5
    [[rules]]
    header = "x-tenant"
    is = ["acme"]
    to = "canary"
    [shadow]
    to = "canary"
    percent = 10
    [outputs]
    PROBS = "top1"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kernel.errors import InvalidArgument

#: The most bytes of a rule in JSON: the history and the state file have it many times.
MOST_BYTE_SIZE = 256 << 10

#: Where the sum of all weights is more, shares are no longer exact.
MAX_WEIGHT = 1_000_000

#: Clients name a label where a version number can be. It cannot be taken for the beginning of a number.
LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")

_NUMBER = re.compile(r"[0-9]{1,18}")

#: Where the key of stickiness comes from.
_KEY = re.compile(r"(?:header|parameter):[!-~]{1,256}|request-id|sequence|")

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Version = Annotated[int, msgspec.Meta(ge=0)]


class LabelTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a label names where that is not a version of the same model."""

    model: _Text
    #: None for the newest version that is READY.
    version: _Version | None = None


class MatchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename={"values": "is"}):
    """Sends requests to a target: those with a header or a parameter, or those of sequences. One of three is given."""

    #: A label or the number of a version.
    to: str
    header: _Text | None = None
    parameter: _Text | None = None
    sequence: bool = False
    #: Values, one of which the header or parameter must have; with none it only must be there.
    values: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=64)] = ()


Comparing = Literal["close", "exact", "top1", "order", "ignore"]

_Tolerance = Annotated[float, msgspec.Meta(ge=0, le=1e300)]


class OutputRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an output of two versions is compared. `kernel.traffic.comparing` has the tolerances of the datatypes."""

    #: `close`: each element within the tolerances; integers, BOOL and BYTES equal. `exact`: equal bytes. `top1`: the
    #: same best class in each row of the last dimension. `order`: the same `top` best classes in the same order.
    compare: Comparing = "close"
    #: None: that of the datatype.
    relative: _Tolerance | None = None
    absolute: _Tolerance | None = None
    #: Only for `order`.
    top: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5


class ShadowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A target that also gets copies of requests, whose responses are compared and go nowhere."""

    #: A label or the number of a version.
    to: str
    #: Of the requests that other versions execute.
    percent: Annotated[float, msgspec.Meta(gt=0, le=100)] = 100.0
    #: The most pairs that wait for a response or for their comparison.
    waiting: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64


class FeedbackSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Clients report rewards for requests by their ids."""

    #: How many requests are remembered at most, and how long. An id takes about 300 bytes.
    ids: Annotated[int, msgspec.Meta(ge=1, le=200_000)] = 20_000
    minutes: Annotated[float, msgspec.Meta(gt=0, le=7 * 24 * 60)] = 60.0


class TrafficSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A checked traffic rule. Equal values decide the same for requests with equal keys."""

    labels: Annotated[dict[str, _Version | LabelTarget], msgspec.Meta(max_length=16)] = {}
    #: Label or number → weight. The share is the weight divided by the sum. The first target is the one that others
    #: take requests from: if the weight of another one grows, no key moves from it to the first.
    weights: Annotated[dict[str, Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT)]], msgspec.Meta(max_length=16)] = {}
    #: The first that matches decides.
    rules: Annotated[tuple[MatchRule, ...], msgspec.Meta(max_length=32)] = ()
    #: `header:NAME`, `parameter:NAME`, `request-id` or `sequence`: requests with an equal key go to the same target.
    #: Empty: each request is drawn for itself.
    key: str = ""
    #: Another salt chooses other keys for the same share.
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""
    #: Gets copies of requests beside the version that executes them; None: nothing does.
    shadow: ShadowSettings | None = None
    #: Output → how it is compared, where that is not `close` with the tolerances of its datatype.
    outputs: Annotated[dict[_Text, OutputRule], msgspec.Meta(max_length=64)] = {}
    #: None: no client reports rewards.
    feedback: FeedbackSettings | None = None
    #: Members of `kernel.traffic.rollout_states.RolloutSettings` for rollouts of the model that do not set them, and
    #: `automatic`: whether one begins when a version above the stable one is READY. `kernel.traffic.control` checks it.
    rollout: dict[str, Any] = {}

    def target(self, text: str) -> tuple[str, str]:
        """Return the model, "" for the own one, and the version, "" for the newest, that a label or number names."""
        found = self.labels.get(text)
        if found is None:
            return "", text
        if isinstance(found, int):
            return "", str(found)
        return found.model, "" if found.version is None else str(found.version)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON and TOML have it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def read_toml(text: bytes) -> TrafficSettings:
    """Return the rule in a `traffic.toml`. Raises `InvalidArgument` with what is wrong and what was expected."""
    try:
        document = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"it is not TOML: {error}") from None
    except RecursionError:
        raise InvalidArgument("it is not TOML: too many tables are inside one another") from None
    return read_settings(document)


def read_settings(document: Mapping[str, Any]) -> TrafficSettings:
    """Return the rule that `document` describes. Raises `InvalidArgument`."""
    labels = document.get("labels")
    for label, found in labels.items() if isinstance(labels, Mapping) else ():
        if not isinstance(found, (int, Mapping)) or isinstance(found, bool):
            raise InvalidArgument(
                f"label '{label}' names no version: expected its number, or the name of another model as "
                '{ model = "NAME" } or { model = "NAME", version = NUMBER }'
            )
    outputs = document.get("outputs")
    if isinstance(outputs, Mapping):  # `PROBS = "top1"` is short for `PROBS = { compare = "top1" }`
        long = {name: {"compare": rule} if isinstance(rule, str) else rule for name, rule in outputs.items()}
        document = {**document, "outputs": long}
    try:
        settings = msgspec.convert(document, TrafficSettings)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error)) from None
    _check(settings)
    return settings


def changed(settings: TrafficSettings, members: Mapping[str, Any]) -> TrafficSettings:
    """Return `settings` with the members of a document in place of its own. Raises `InvalidArgument`."""
    if not members:
        raise InvalidArgument(f"expected one or more of {', '.join(TrafficSettings.__struct_fields__)}")
    return read_settings({**settings.as_dict(), **members})


def is_key(text: str) -> bool:
    """Whether a text can say where keys come from; an empty one does."""
    return _KEY.fullmatch(text) is not None


def _check(settings: TrafficSettings) -> None:
    try:
        byte_size = len(msgspec.json.encode(settings))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a text of the traffic rule is no Unicode: {error.reason}") from None
    if byte_size > MOST_BYTE_SIZE:
        raise InvalidArgument(f"a traffic rule may have {MOST_BYTE_SIZE} bytes in JSON, and this one has {byte_size}")
    for label in settings.labels:
        if LABEL.fullmatch(label) is None:
            raise InvalidArgument(
                f"'{label}' cannot be a label: expected a letter or '_', then at most 63 letters, digits, '_', '-', '.'"
            )
    shadow = () if settings.shadow is None else (settings.shadow.to,)
    for place, texts in (
        ("weights", settings.weights),
        ("rules", [rule.to for rule in settings.rules]),
        ("shadow", shadow),
    ):
        for text in texts:
            if text not in settings.labels and _NUMBER.fullmatch(text) is None:
                known = ", ".join(settings.labels) or "none"
                raise InvalidArgument(
                    f"'{text}' in '{place}' names no target: expected the number of a version or a label "
                    f"(the labels are: {known})"
                )
    if settings.weights and not sum(settings.weights.values()):
        raise InvalidArgument("one of the weights must be greater than 0")
    for number, rule in enumerate(settings.rules, 1):
        if (rule.header is not None) + (rule.parameter is not None) + rule.sequence != 1:
            raise InvalidArgument(f"rule {number} needs one of 'header', 'parameter' and 'sequence = true'")
        if rule.sequence and rule.values:
            raise InvalidArgument(f"rule {number} cannot have 'is': a sequence has no value that could be compared")
    if not is_key(settings.key):
        raise InvalidArgument(
            f"'{settings.key}' is no key: expected header:NAME, parameter:NAME, request-id or sequence"
        )
