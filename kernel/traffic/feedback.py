"""Rewards that clients report for requests, by the version that has executed them: experiments between versions. Pure.

The server remembers which version has got which request id, for a limited time and number of requests. A reward ends
the memory of its request, so that each request counts at most once. The ids count in the memory budget of the server.

The intervals may be looked at after each reward: they are asymptotic confidence sequences (Waudby-Smith, Arbour, Sinha,
Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", 2021, equation 5). At a given
time they are about one and a half times as wide as the usual ones. Those are right only if the number of rewards is
fixed before anybody looks.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.traffic.settings import FeedbackSettings
    from shm.blocks import ByteBudget

#: The probability that any interval is ever wrong.
_ALPHA = 0.05

#: The number of rewards for which the intervals are narrowest.
_NARROWEST = 1000

_RHO_2 = (-2 * math.log(_ALPHA) + math.log(1 - 2 * math.log(_ALPHA))) / _NARROWEST

#: Fewer rewards have no interval: the mean is not near a normal distribution yet.
LEAST_REWARDS = 30

#: Longer ids are not remembered.
MOST_ID_LENGTH = 128

#: The most rewards of one message, and the largest reward.
MOST_REWARDS = 1000

MOST_REWARD = 1e12


class Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client has got of a request."""

    id: str
    reward: float


def read_rewards(document: Any) -> list[Reward]:
    """Return the rewards of a message: one with `id` and `reward`, or a list of them. Raises `InvalidArgument`."""
    try:
        found = msgspec.convert(document if isinstance(document, list) else [document], list[Reward])
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"expected an object with the 'id' of a request and its 'reward', or a list of them: {error}"
        ) from None
    if len(found) > MOST_REWARDS:
        raise InvalidArgument(f"a message may have {MOST_REWARDS} rewards, and this one has {len(found)}")
    for each in found:
        if not math.isfinite(each.reward) or abs(each.reward) > MOST_REWARD:
            raise InvalidArgument(f"the reward of '{each.id}' must be a number of at most {MOST_REWARD:g}")
    return found


class Rewards:
    """The rewards of one version: their number, mean and variance (Welford)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, reward: float) -> None:
        """Count one reward."""
        self.count += 1
        delta = reward - self.mean
        self.mean += delta / self.count
        self._squares += delta * (reward - self.mean)

    @property
    def variance(self) -> float:
        """The variance of one reward; 0 for fewer than two."""
        return self._squares / (self.count - 1) if self.count > 1 else 0.0

    def half_width(self) -> float | None:
        """Return how far the true mean is from the mean at most; None for too few rewards."""
        return None if self.count < LEAST_REWARDS else half_width(self.count, self.variance)


def half_width(count: float, variance: float) -> float:
    """Return the half of the interval after `count` rewards with this variance."""
    scaled = count * _RHO_2 + 1
    return math.sqrt(variance * 2 * scaled / (count * count * _RHO_2) * math.log(math.sqrt(scaled) / _ALPHA))


#: How many requests are forgotten in one piece of work: it takes less than 5 ms.
_FORGOTTEN_AT_ONCE = 5000


#: What an id takes beside its characters, in bytes: measured.
_ENTRY_BYTE_SIZE = 240


def _byte_size(id: str) -> int:
    return _ENTRY_BYTE_SIZE + (len(id) if id.isascii() else 4 * len(id))


class Feedback:
    """The requests that are remembered of one model, and the rewards of its versions."""

    def __init__(self, settings: FeedbackSettings, budget: ByteBudget) -> None:
        self.settings = settings
        self._budget = budget
        self._longest_ns = round(settings.minutes * 60e9)
        #: Request id → version, and when it was chosen; the oldest first.
        self._versions: OrderedDict[str, tuple[tuple[str, int], int]] = OrderedDict()
        self._rewards: dict[tuple[str, int], Rewards] = {}
        #: Rewards for ids that are not remembered: unknown, too old, or counted already.
        self.unknown = 0
        #: Requests that are not remembered because the memory budget had no room.
        self.without_room = 0

    def remember(self, id: str, version: tuple[str, int], now_ns: int) -> None:
        """Remember which version gets a request. The oldest are forgotten for it."""
        if len(id) > MOST_ID_LENGTH:
            return
        versions = self._versions
        self._forget(id)  # it is the newest now
        if len(versions) >= self.settings.ids:
            self._forget(next(iter(versions)))
        self._forget_old(now_ns, 2)  # more than come, so that they end where nobody asks for the table
        if not self._budget.has_room(byte_size := _byte_size(id)):
            self.without_room += 1
            return
        self._budget.add(byte_size)
        versions[id] = version, now_ns

    def _forget(self, id: str) -> tuple[tuple[str, int], int] | None:
        found = self._versions.pop(id, None)
        if found is not None:
            self._budget.remove(_byte_size(id))
        return found

    def reward(self, rewards: Sequence[Reward], now_ns: int) -> int:
        """Count rewards; returns how many of them were for requests that are remembered."""
        counted = 0
        for each in rewards:
            found = self._forget(each.id)
            if found is None or now_ns - found[1] > self._longest_ns:
                self.unknown += 1
                continue
            self._rewards.setdefault(found[0], Rewards()).add(each.reward)
            counted += 1
        return counted

    def forget_old(self, now_ns: int) -> None:
        """Forget requests that are too old, at most `_FORGOTTEN_AT_ONCE` of them."""
        self._forget_old(now_ns, _FORGOTTEN_AT_ONCE)

    def _forget_old(self, now_ns: int, most: int) -> None:
        versions = self._versions
        for _ in range(most):
            if not versions or now_ns - next(iter(versions.values()))[1] <= self._longest_ns:
                return
            self._forget(next(iter(versions)))

    def forget_some(self) -> bool:
        """Forget the oldest requests, at most `_FORGOTTEN_AT_ONCE`. Returns whether some are left."""
        self._forget_old(sys.maxsize, _FORGOTTEN_AT_ONCE)
        return bool(self._versions)

    def by_version(self) -> Mapping[tuple[str, int], Rewards]:
        """Return the rewards by model and version."""
        return self._rewards

    def as_dict(self) -> dict[str, Any]:
        """Return the table for JSON: the version with the most rewards first, and each other one against it."""
        rows = sorted(self._rewards.items(), key=lambda each: -each[1].count)
        return {
            "remembered": len(self._versions),
            "unknown": self.unknown,
            "without_room": self.without_room,
            "versions": [
                {
                    "model": model,
                    "version": version,
                    "rewards": each.count,
                    "mean": each.mean,
                    "interval": _interval(each.mean, each.half_width()),
                    "difference": None if number == 0 else _difference(each, rows[0][1]),
                }
                for number, ((model, version), each) in enumerate(rows)
            ],
        }


def _interval(mean: float, half: float | None) -> list[float] | None:
    return None if half is None else [mean - half, mean + half]


def _difference(one: Rewards, other: Rewards) -> dict[str, Any]:
    """Return the difference of two means with its interval: the sum of both intervals holds at any time."""
    halves = one.half_width(), other.half_width()
    half = None if halves[0] is None or halves[1] is None else halves[0] + halves[1]
    return {"mean": one.mean - other.mean, "interval": _interval(one.mean - other.mean, half)}
