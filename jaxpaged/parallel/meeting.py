"""How the hosts of one engine find each other.

Host 0, the leader, listens at the coordinator's address. The others connect to it and say who they
are and how they were started; when all are there, and were started alike, each is told where to
find JAX's own coordinator and the socket with its commands. Followers listen nowhere. Commands are
encrypted with a key that is told on meeting, so that nobody who comes later can read or send any.

JAX notices missing and doubled processes too, but by ending the process with a stack trace.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

AGAIN_MS = 500  # how often a follower says that it is there
HEARTBEAT_MS, SILENCE_MS = 2000, 10000  # a host that says nothing for so long is gone
ORPHANED = "the process that started this one is gone"
EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
)


class JoinError(OSError):
    """The hosts did not come together; one line that says what to change."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A follower asks to be taken in."""

    host_id: int
    started_with: dict[str, str]


class Leave(msgspec.Struct, tag=True, frozen=True):
    """A follower waits no longer."""


class Wait(msgspec.Struct, tag=True, frozen=True):
    """The leader has taken a follower in; others are missing."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The leader has not, or gives up; one line."""

    reason: str


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """All hosts are there."""

    jax_coordinator: str
    commands: str  # ZeroMQ address
    commands_key: bytes  # public half of the leader's key


class Value(msgspec.Struct, tag=True, frozen=True):
    """A host's number, or the smallest of all hosts'."""

    value: int


Message = Hello | Leave | Wait | Refused | Welcome | Value


@dataclass(frozen=True)
class Place:
    """Where this host stands in its group."""

    coordinator: str  # HOST:PORT of host 0
    num_hosts: int
    host_id: int
    parent: int | None = None  # process id: a follower ends when its parent has

    def is_orphan(self) -> bool:
        """Whether the process that started this one is gone."""
        return self.parent is not None and self.parent != os.getppid()


@dataclass(frozen=True)
class Link:
    """A connection for commands, to the follower or the leader at its other end."""

    name: str
    commands: zmq.Socket
    monitor: zmq.Socket
    connections: frozenset[int]  # file descriptors: this one's, not those of who comes later

    def is_lost(self) -> bool:
        """Take an event from the monitor; whether it says that the connection has ended."""
        event = recv_monitor_message(self.monitor)
        return event["event"] == zmq.EVENT_DISCONNECTED and event["value"] in self.connections


@dataclass(frozen=True)
class Meeting:
    """All hosts, together."""

    jax_coordinator: str
    messages: zmq.Socket  # ROUTER of the leader, DEALER of a follower
    members: Mapping[int, bytes]  # by host id, the followers' identities; the leader's alone
    links: list[Link]  # to the followers, or the one to the leader
    reserved: socket.socket | None = None  # has JAX's coordinator's port until that listens there


def meet(place: Place, started_with: Mapping[str, str], timeout: float) -> Meeting:
    """Come together with the other hosts.

    Args:
        started_with: what must be equal on all hosts, by the name that an error gives it.
        timeout: seconds until all hosts must be there.

    Raises:
        JoinError: one line.
    """
    context, clock = zmq.Context(), _Clock(timeout)
    context.linger = 1000  # ms: a refusal may be on its way
    try:
        return (_follow if place.host_id else _lead)(context, place, started_with, clock)
    except BaseException:
        context.destroy()
        raise


class _Clock:
    """Counts down to the time when all hosts must be there."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    def left_ms(self, at_most: float = float("inf")) -> int:
        return int(min(at_most, max(0, (self._end - time.monotonic()) * 1000)))


def _lead(
    context: zmq.Context,
    place: Place,
    started_with: Mapping[str, str],
    clock: _Clock,
) -> Meeting:
    address, port = _resolve(place.coordinator)
    name = place.coordinator.rpartition(":")[0]
    if name != address and ipaddress.ip_address(address).is_loopback:
        log.warning(
            "%s is %s here, which no other machine reaches: let --distributed-coordinator name "
            "an address of this one's network",
            name,
            address,
        )
    meeting = context.socket(zmq.ROUTER)
    meeting.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        meeting.bind(f"tcp://{address}:{port}")
    except zmq.ZMQError as error:
        raise JoinError(
            f"host 0 cannot listen at {place.coordinator}: {error.strerror} "
            "(--distributed-coordinator is an address of host 0; one host alone has --host-id 0)"
        ) from None
    members = _gather(meeting, place, started_with, clock)
    public, secret = zmq.curve_keypair()
    reserved = _reserve_port(address)
    jax_coordinator = f"{address}:{reserved.getsockname()[1]}"
    links = []
    for host_id, identity in members.items():
        commands = _command_socket(context, zmq.PUSH)
        commands.curve_server, commands.curve_secretkey = True, secret
        monitor = commands.get_monitor_socket(EVENTS)
        commands.bind(f"tcp://{address}:0")
        endpoint = commands.getsockopt_string(zmq.LAST_ENDPOINT)
        welcome = Welcome(jax_coordinator, endpoint, public)
        link = None
        if _reachable(meeting, identity, welcome):
            link = _link(f"host {host_id}", commands, monitor, clock)
        if link is None:
            raise JoinError(f"host {host_id} was there and is gone; its log may say why")
        links.append(link)
    return Meeting(jax_coordinator, meeting, members, links, reserved)


def _gather(
    meeting: zmq.Socket, place: Place, started_with: Mapping[str, str], clock: _Clock
) -> dict[int, bytes]:
    """Identities of all followers; those that come twice or were started otherwise are refused."""
    members: dict[int, bytes] = {}
    # What has arrived is heard to its end: it may be the leave of one that counts as there.
    while len(members) < place.num_hosts - 1 or meeting.poll(0):
        if not meeting.poll(clock.left_ms()):
            missing = [f"host {i}" for i in range(1, place.num_hosts) if i not in members]
            reason = (
                f"{', '.join(missing)} did not join within {clock.seconds:g} s: every host runs "
                f"the same command, with its own --host-id"
            )
            for identity in members.values():
                _reachable(meeting, identity, Refused(reason))
            raise JoinError(reason)
        sender, hello = receive(meeting)
        if isinstance(hello, Leave):
            members = {host: known for host, known in members.items() if known != sender}
        if not isinstance(hello, Hello):
            continue
        reason = _difference(hello, started_with)
        taken = members.get(hello.host_id, sender)
        if not reason and taken != sender and _reachable(meeting, taken, Wait()):
            reason = f"two hosts have --host-id {hello.host_id}; this one came later"
        if reason:
            log.warning("a host was sent away: %s", reason)
            _reachable(meeting, sender, Refused(reason))
        elif _reachable(meeting, sender, Wait()):
            members[hello.host_id] = sender
    return members


def _difference(hello: Hello, started_with: Mapping[str, str]) -> str:
    """In what a follower was started otherwise than the leader; empty if in nothing."""
    theirs = hello.started_with
    names = [
        name for name in {**started_with, **theirs} if theirs.get(name) != started_with.get(name)
    ]
    told = [f"{name} ({theirs.get(name)}, not {started_with.get(name)})" for name in names]
    return f"host {hello.host_id} differs from host 0 in {', '.join(told)}" if told else ""


def _follow(
    context: zmq.Context,
    place: Place,
    started_with: Mapping[str, str],
    clock: _Clock,
) -> Meeting:
    address, port = _resolve(place.coordinator)
    meeting = context.socket(zmq.DEALER)
    meeting.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for a leader who is not there
    meeting.connect(f"tcp://{address}:{port}")
    hello = Hello(place.host_id, dict(started_with))
    answer: Message | None = None
    silent = True
    while answer is None or isinstance(answer, Wait):
        # Again and again: a leader who was started anew has not heard it.
        if silent and meeting.poll(clock.left_ms(AGAIN_MS), zmq.POLLOUT):
            send(meeting, hello)
        silent = not meeting.poll(clock.left_ms(AGAIN_MS))
        if not silent:
            answer = decode(meeting.recv())
        elif place.is_orphan():
            raise JoinError(ORPHANED)
        elif not clock.left_ms():
            if meeting.poll(0, zmq.POLLOUT):
                send(meeting, Leave())
            raise JoinError(
                f"no host 0 answers at {place.coordinator} (waited {clock.seconds:g} s)"
                if answer is None
                else f"host 0 still waits for other hosts (waited {clock.seconds:g} s)"
            )
    if isinstance(answer, Refused):
        raise JoinError(answer.reason)
    assert isinstance(answer, Welcome)
    commands = _command_socket(context, zmq.PULL)
    commands.curve_publickey, commands.curve_secretkey = zmq.curve_keypair()
    commands.curve_serverkey = answer.commands_key
    monitor = commands.get_monitor_socket(EVENTS)
    commands.connect(answer.commands)
    link = _link("host 0, the leader,", commands, monitor, clock)
    if link is None:
        raise JoinError(f"host 0 is gone, or a firewall blocks {answer.commands}")
    return Meeting(answer.jax_coordinator, meeting, {}, [link])


def _command_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    made = context.socket(kind)
    made.set_hwm(0)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    return made


def _link(name: str, commands: zmq.Socket, monitor: zmq.Socket, clock: _Clock) -> Link | None:
    """Wait for somebody who has the key; None: nobody came."""
    opened: set[int] = set()
    while monitor.poll(clock.left_ms()):
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return Link(name, commands, monitor, frozenset(opened))
        if event["event"] == zmq.EVENT_DISCONNECTED:
            opened.discard(event["value"])
        else:
            opened.add(event["value"])
    return None


def _reachable(meeting: zmq.Socket, identity: bytes, message: Message) -> bool:
    """Send to a host that may be gone; whether it is not."""
    try:
        send(meeting, message, identity)
    except zmq.ZMQError:
        return False
    return True


def send(meeting: zmq.Socket, message: Message, *identity: bytes) -> None:
    """To the leader, or to the follower of this identity."""
    meeting.send_multipart([*identity, msgspec.msgpack.encode(message)])


def decode(data: bytes) -> Message:
    """What a host that is known says."""
    return msgspec.msgpack.decode(data, type=Message)


def receive(meeting: zmq.Socket) -> tuple[bytes, Message | None]:
    """Who says what; None: nothing that one of us would."""
    sender, *parts = meeting.recv_multipart()
    try:
        return sender, decode(b"".join(parts))
    except msgspec.DecodeError:
        return sender, None


def _resolve(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    try:
        return socket.gethostbyname(host), int(port)
    except OSError as error:
        raise JoinError(f"--distributed-coordinator {coordinator}: {error.strerror}") from None


def _reserve_port(address: str) -> socket.socket:
    """Keep a free TCP port from all who do not share it on purpose, as gRPC does."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((address, 0))
    return reserved
