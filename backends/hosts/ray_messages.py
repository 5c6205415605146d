"""What a server and its broker say, over a pair of sockets. The broker is the one process of a server that imports Ray.

The launcher's end is a `backends.hosts.link.Link`, so both sides also send heartbeats.
"""

from __future__ import annotations

import msgspec

from backends.hosts.messages import AgentMessage, Beat

#: After how many heartbeats without anything received a broker is given up. Ray's import and its calls may hold the
#: interpreter for seconds on a busy machine, and nothing but new placements depends on the broker.
BROKER_LOST_BEATS = 120


class Begin(AgentMessage, frozen=True, tag=True, array_like=True):
    """The first message: connect with the cluster, and find the placements again that an earlier broker has made."""

    #: As `ray.init(address)`.
    address: str
    held: tuple[str, ...]


class Place(AgentMessage, frozen=True, tag=True, array_like=True):
    """Let Ray place an agent. It responds with `Placed` or `Gone`, maybe after hours."""

    #: Unique in the cluster.
    name: str
    cpus: float
    gpus: float
    #: In bytes.
    memory: int
    #: Ray's own names of other resources, and how much of each.
    custom: dict[str, float]
    spread: bool
    #: How long the agent waits for its server, in seconds.
    lease_s: float
    #: Certificate, key, and the server's authority: files on the agent's host; none without TLS.
    certificate: tuple[str, str, str] | None = None


class EndPlacement(AgentMessage, frozen=True, tag=True, array_like=True):
    """End an agent, or the wait for a place. There is no response."""

    name: str


class ClusterNode(msgspec.Struct, frozen=True, array_like=True):
    """A host of the cluster."""

    host: str
    #: Ray's names of what it has in all.
    resources: dict[str, float]


class Cluster(AgentMessage, frozen=True, tag=True, array_like=True):
    """The cluster responds, and has these hosts."""

    nodes: tuple[ClusterNode, ...]


class NoCluster(AgentMessage, frozen=True, tag=True, array_like=True):
    """The cluster does not respond: agents serve on, and nothing can be placed."""

    text: str


class Placed(AgentMessage, frozen=True, tag=True, array_like=True):
    """An agent listens on a host. The token came through Ray."""

    name: str
    host: str
    port: int
    token: str


class Gone(AgentMessage, frozen=True, tag=True, array_like=True):
    """An agent could not be placed, or has ended before it said where it is."""

    name: str
    text: str
    #: Whether it will never be placed, because what was asked for is wrong.
    refused: bool = False


ToBroker = Beat | Begin | Place | EndPlacement
FromBroker = Beat | Cluster | NoCluster | Placed | Gone

to_broker_decoder = msgspec.msgpack.Decoder(ToBroker)
from_broker_decoder = msgspec.msgpack.Decoder(FromBroker)


class PlacedAgent(msgspec.Struct, frozen=True):
    """What a placed agent is started with: a line of JSON on its standard input."""

    host: str
    token: str
    lease_s: float
    #: As `Place.certificate`.
    certificate: tuple[str, str, str] | None = None
