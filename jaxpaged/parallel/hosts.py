"""Several hosts that run one model: how they find each other, agree, and notice a death.

Host 0, the leader, listens at the coordinator's address. The others connect to it and say who they
are and how they were started; when all are there, and were started alike, each is told where to
find JAX's own coordinator and the socket with its commands. Followers listen nowhere. Commands are
encrypted with a key that is told on joining, so that nobody who comes later can read or send any.

JAX notices missing, doubled and dead processes too, but by ending the process with a stack trace,
and a dead one only after minutes: all of it is looked for here first.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import jax
import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

HEARTBEAT_MS, SILENCE_MS = 2000, 10000  # a host that says nothing for so long is gone
POLL_MS = 1000
SHUTDOWN_SECONDS = 10  # for all hosts to leave JAX's group together

OnLoss = Callable[[str], None]  # is given one line; must end the process


class JoinError(OSError):
    """The hosts did not come together; one line that says what to change."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A follower asks to be taken in."""

    host_id: int
    started_with: dict[str, str]


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


Message = Hello | Wait | Refused | Welcome | Value


@dataclass(frozen=True)
class Place:
    """Where this host stands in its group."""

    coordinator: str  # HOST:PORT of host 0
    num_hosts: int
    host_id: int


class Group:
    """The hosts that this one has joined. `join` makes it; one thread uses it.

    Attributes:
        commands: on the leader one socket to each follower; on a follower the one from the leader.
    """

    def __init__(
        self, place: Place, meeting: zmq.Socket, members: Mapping[int, bytes], on_loss: OnLoss
    ) -> None:
        self.place, self.commands = place, list[zmq.Socket]()
        self._meeting, self._members = meeting, members
        self._on_loss, self._leaving = on_loss, False

    @property
    def leads(self) -> bool:
        return self.place.host_id == 0

    def minimum(self, value: int) -> int:
        """The smallest of what all hosts give; each must ask."""
        if not self.leads:
            _send(self._meeting, Value(value))
            answer = _decode(self._meeting.recv())
            assert isinstance(answer, Value)
            return answer.value
        values = {}
        while values.keys() != self._members.keys():
            sender, data = self._meeting.recv_multipart()
            message = _decode(data)
            for host_id, identity in self._members.items():
                if identity == sender and isinstance(message, Value):
                    values[host_id] = message.value
        least = min(value, *values.values())
        for identity in self._members.values():
            _send(self._meeting, Value(least), identity)
        return least

    def leave(self) -> None:
        """End the group in peace, on every host: returns when all have left."""
        self._leaving = True
        jax.distributed.shutdown()
        for each in (*self.commands, self._meeting):
            each.close(linger=0)

    def _watch(self, monitors: Mapping[zmq.Socket, tuple[str, int]], parent: int) -> None:
        """End this process when a host is gone, whatever its other threads wait for."""
        poller = zmq.Poller()
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        while not self._leaving and (self.leads or os.getppid() == parent):
            for monitor, _ in poller.poll(POLL_MS):
                name, connection = monitors[monitor]
                if recv_monitor_message(monitor)["value"] == connection and not self._leaving:
                    self._on_loss(f"{name} is gone: the whole group ends; its log may say why")
        if not self._leaving:
            self._on_loss("the process that started this one is gone")

    def _start_watch(self, monitors: Mapping[zmq.Socket, tuple[str, int]]) -> None:
        threading.Thread(
            target=self._watch, args=(monitors, os.getppid()), name="hosts", daemon=True
        ).start()


def end_process(reason: str) -> NoReturn:
    """Tell and end at once: JAX would wait for the other hosts, and a thread for its device."""
    print(f"jaxpaged: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    os._exit(1)


def join(
    place: Place, started_with: Mapping[str, str], *, timeout: float, on_loss: OnLoss
) -> Group:
    """Come together with the other hosts; before JAX's backend starts.

    Args:
        started_with: what must be equal on all hosts, by the name that an error gives it.
        timeout: seconds until all hosts must be there.
        on_loss: called in a thread when another host has died; on a follower also when the process
            that started this one has.

    Raises:
        JoinError: one line.
    """
    deadline = time.monotonic() + timeout
    began = _lead if place.host_id == 0 else _follow
    context = zmq.Context()
    try:
        group, welcome, monitors = began(context, place, started_with, timeout, deadline, on_loss)
    except BaseException:
        context.destroy(linger=1000)  # a refusal may be on its way
        raise
    group._start_watch(monitors)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        welcome.jax_coordinator,
        place.num_hosts,
        place.host_id,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout) + 1,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=welcome.jax_coordinator,
    )
    log.info("host %d of %d has joined", place.host_id, place.num_hosts)
    return group


Joined = tuple[Group, Welcome, dict[zmq.Socket, tuple[str, int]]]


def _lead(
    context: zmq.Context,
    place: Place,
    started_with: Mapping[str, str],
    timeout: float,
    deadline: float,
    on_loss: OnLoss,
) -> Joined:
    address, port = _resolve(place.coordinator)
    meeting = context.socket(zmq.ROUTER)
    meeting.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        meeting.bind(f"tcp://{address}:{port}")
    except zmq.ZMQError as error:
        raise JoinError(
            f"host 0 cannot listen at {place.coordinator}: {error.strerror}; "
            "--distributed-coordinator names an address of host 0, and one host alone is 0"
        ) from None
    members = _gather(meeting, place, started_with, timeout, deadline)
    group = Group(place, meeting, members, on_loss)
    public, secret = zmq.curve_keypair()
    coordinator = f"{address}:{_free_port(address)}"
    monitors = {}
    for host_id, identity in members.items():
        commands = _watched(context, zmq.PUSH)
        commands.curve_server, commands.curve_secretkey = True, secret
        monitor = _monitor(commands)
        commands.bind(f"tcp://{address}:0")
        endpoint = commands.last_endpoint.decode()
        _send(meeting, Welcome(coordinator, endpoint, public), identity)
        connection = _connection(monitor, deadline)
        if connection is None:
            raise JoinError(f"host {host_id} was there and is gone: start all hosts again")
        monitors[monitor] = (f"host {host_id}", connection)
        group.commands.append(commands)
    return group, Welcome(coordinator, "", public), monitors


def _gather(
    meeting: zmq.Socket,
    place: Place,
    started_with: Mapping[str, str],
    timeout: float,
    deadline: float,
) -> dict[int, bytes]:
    """Identities of all followers; those that come twice or were started otherwise are refused."""
    members: dict[int, bytes] = {}
    while len(members) < place.num_hosts - 1:
        if not meeting.poll(_milliseconds(deadline)):
            missing = [i for i in range(1, place.num_hosts) if i not in members]
            reason = (
                f"{', '.join(f'host {i}' for i in missing)} did not join within {timeout:g} s: "
                f"every host runs the same command with its own --host-id"
            )
            for identity in members.values():
                _reachable(meeting, identity, Refused(reason))
            raise JoinError(reason)
        sender, data = meeting.recv_multipart()
        try:
            message = _decode(data)
        except msgspec.DecodeError:
            continue  # whoever that was
        if not isinstance(message, Hello):
            continue
        refusal = _refusal(message, started_with)
        taken = members.get(message.host_id)
        if refusal is None and taken is not None and _reachable(meeting, taken, Wait()):
            refusal = f"two hosts have --host-id {message.host_id}: this one came later"
        if refusal is not None:
            log.warning("a host was refused: %s", refusal)
        elif _reachable(meeting, sender, Wait()):
            members[message.host_id] = sender
            continue
        _reachable(meeting, sender, Refused(refusal or ""))
    return members


def _refusal(hello: Hello, started_with: Mapping[str, str]) -> str | None:
    theirs = hello.started_with
    different = [
        f"{name} ({theirs.get(name)} instead of {started_with.get(name)})"
        for name in {**started_with, **theirs}
        if theirs.get(name) != started_with.get(name)
    ]
    if not different:
        return None
    return f"host {hello.host_id} differs from host 0 in {', '.join(different)}"


def _follow(
    context: zmq.Context,
    place: Place,
    started_with: Mapping[str, str],
    timeout: float,
    deadline: float,
    on_loss: OnLoss,
) -> Joined:
    address, port = _resolve(place.coordinator)
    meeting = context.socket(zmq.DEALER)
    meeting.connect(f"tcp://{address}:{port}")
    _send(meeting, Hello(place.host_id, dict(started_with)))
    answer: Message = Wait()
    late = f"no host 0 answers at {place.coordinator}, for {timeout:g} s now"
    while isinstance(answer, Wait):
        if not meeting.poll(_milliseconds(deadline)):
            raise JoinError(late)
        answer = _decode(meeting.recv())
        late = f"host 0 still waits for other hosts, after {timeout:g} s"
    if isinstance(answer, Refused):
        raise JoinError(answer.reason)
    assert isinstance(answer, Welcome)
    commands = _watched(context, zmq.PULL)
    commands.curve_publickey, commands.curve_secretkey = zmq.curve_keypair()
    commands.curve_serverkey = answer.commands_key
    monitor = _monitor(commands)
    commands.connect(answer.commands)
    connection = _connection(monitor, deadline)
    if connection is None:
        raise JoinError(f"{answer.commands} on host 0 cannot be reached: a firewall in between?")
    group = Group(place, meeting, {}, on_loss)
    group.commands.append(commands)
    return group, answer, {monitor: ("host 0, the leader,", connection)}


def _watched(context: zmq.Context, kind: int) -> zmq.Socket:
    made = context.socket(kind)
    made.set_hwm(0)
    made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    return made


def _monitor(watched: zmq.Socket) -> zmq.Socket:
    return watched.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


def _connection(monitor: zmq.Socket, deadline: float) -> int | None:
    """The file descriptor of the first that has the key; None: nobody came."""
    while monitor.poll(_milliseconds(deadline)):
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return event["value"]
    return None


def _reachable(meeting: zmq.Socket, identity: bytes, message: Message) -> bool:
    """Send to a host that may be gone; whether it is not."""
    try:
        _send(meeting, message, identity)
    except zmq.ZMQError:
        return False
    return True


def _send(meeting: zmq.Socket, message: Message, *identity: bytes) -> None:
    meeting.send_multipart([*identity, msgspec.msgpack.encode(message)])


def _decode(data: bytes) -> Message:
    return msgspec.msgpack.decode(data, type=Message)


def _milliseconds(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000))


def _resolve(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    try:
        return socket.gethostbyname(host), int(port)
    except OSError as error:
        raise JoinError(f"--distributed-coordinator {coordinator}: {error.strerror}") from None


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
