"""The progress of loading many models: how many are ready, which load, and which took longest. Pure."""

from __future__ import annotations

import msgspec

#: How many of the models that load are named.
_NAMED = 3

#: Bytes and the name of a unit, the largest first.
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def bytes_text(byte_size: int, received: int | None = None) -> str:
    """Return a size for people, or how much of it has been received: `3.4 GB`, `1.2 of 3.4 GB`."""
    unit, name = next(pair for pair in _UNITS if byte_size >= pair[0] or pair is _UNITS[-1])
    part = "" if received is None else f"{min(received, byte_size) / unit:,.1f} of "
    return f"{part}{byte_size / unit:,.1f} {name}"


class LoadStep(msgspec.Struct, frozen=True):
    """A moment of the loading, as it is shown."""

    total: int
    #: How many loads have ended, those included that failed.
    ended: int
    failed: int
    elapsed_ns: int
    #: The models that load now, longest first.
    loading: list[str]
    #: The load that took longest until now, ended or not, and how long; "" before the first has begun.
    slowest: str
    slowest_ns: int
    #: The models that are copied from clouds now, and how much of them has been received: `1.2 of 3.4 GB`.
    copying: list[str] = []
    copied: str = ""

    @property
    def text(self) -> str:
        """One line about it: `12 of 40 models loaded, 1 failed; loading 'a', 'b'; slowest so far 'c' (2.1 s)`."""
        parts = [f"{self.ended - self.failed} of {self.total} models loaded"]
        if self.failed:
            parts[0] += f", {self.failed} failed"
        if self.copying:
            parts.append(f"{self.copied} copied of {_named(self.copying)}")
        if self.loading:
            parts.append(f"loading {_named(self.loading)}")
        if self.slowest:
            parts.append(f"slowest so far '{self.slowest}' ({self.slowest_ns / 1e9:.1f} s)")
        return "; ".join(parts)


def _named(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(f"'{name}'" for name in names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class LoadProgress:
    """The loads of the models that are served from the start. A model loads from when it has got its turn.

    Before `begin` and after `close` loads are not counted: clients and polls ask for them.
    """

    def __init__(self) -> None:
        self._total = 0
        self._begun_ns = 0
        self._ended = 0
        self._failed = 0
        #: Name → when its load began, in order.
        self._loading: dict[str, int] = {}
        self._slowest = ("", 0)
        #: Name → how many bytes of it are here, and how many there are.
        self._copying: dict[str, tuple[int, int]] = {}

    def begin(self, total: int, now_ns: int) -> None:
        """Count `total` models from now on."""
        self._total = total
        self._begun_ns = now_ns

    def close(self) -> None:
        """Count no longer."""
        self._total = 0
        self._loading.clear()
        self._copying.clear()

    def copies(self, name: str, received: int, byte_size: int) -> None:
        """A model's files are received from a cloud, before it loads."""
        if received >= byte_size:
            self._copying.pop(name, None)
        elif self._total:
            self._copying[name] = (received, byte_size)

    def loads(self, name: str, now_ns: int) -> None:
        """A model's load has got its turn. A second version of the same model changes nothing."""
        if self._total:
            self._loading.setdefault(name, now_ns)

    def ended(self, name: str, now_ns: int, *, failed: bool = False) -> None:
        """A model is ready, or could not be loaded."""
        if not self._total:
            return
        self._ended += 1
        self._failed += failed
        self._copying.pop(name, None)
        begun_ns = self._loading.pop(name, now_ns)
        if now_ns - begun_ns > self._slowest[1]:
            self._slowest = (name, now_ns - begun_ns)

    def step(self, now_ns: int) -> LoadStep | None:
        """Return how far the loading is; None if nothing is counted."""
        if not self._total:
            return None
        slowest = self._slowest
        for name, begun_ns in self._loading.items():
            if now_ns - begun_ns > slowest[1]:
                slowest = (name, now_ns - begun_ns)
        received, byte_size = (sum(each[place] for each in self._copying.values()) for place in (0, 1))
        return LoadStep(
            self._total, self._ended, self._failed, now_ns - self._begun_ns, list(self._loading), *slowest,
            list(self._copying), bytes_text(byte_size, received),
        )  # fmt: skip
