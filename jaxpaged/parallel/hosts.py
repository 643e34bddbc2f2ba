"""The hosts that run one model together: what they agree on, and when one is gone.

JAX notices a dead process too, but after minutes, or with a stack trace.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn

import jax
import zmq

from jaxpaged.parallel.meeting import (
    ORPHANED,
    Link,
    Meeting,
    Place,
    Value,
    decode,
    meet,
    receive,
    send,
)

log = logging.getLogger(__name__)

POLL_MS = 1000
SHUTDOWN_SECONDS = 10  # for all hosts to leave JAX's group together

OnLoss = Callable[[str], None]  # is given one line; must end the process


class Group:
    """The hosts that this one has met, in one JAX. `join` makes it; one thread uses it.

    Attributes:
        leads: this is host 0.
        commands: on the leader one socket to each follower; on a follower the one from the leader.
    """

    def __init__(self, place: Place, meeting: Meeting, on_loss: OnLoss) -> None:
        self.leads = place.host_id == 0
        self.commands = [link.commands for link in meeting.links]
        self._meeting, self._members = meeting.messages, meeting.members
        self._on_loss, self._leaving = on_loss, False
        args = ({link.monitor: link for link in meeting.links}, place)
        threading.Thread(target=self._watch, args=args, name="hosts", daemon=True).start()

    def minimum(self, value: int) -> int:
        """The smallest of what all hosts give; each must ask."""
        if not self.leads:
            send(self._meeting, Value(value))
            answer = decode(self._meeting.recv())
            assert isinstance(answer, Value)
            return answer.value
        values: dict[bytes, int] = {}
        while len(values) < len(self._members):
            sender, message = receive(self._meeting)
            if isinstance(message, Value) and sender in self._members.values():
                values[sender] = message.value
        least = min(value, *values.values())
        for identity in self._members.values():
            send(self._meeting, Value(least), identity)
        return least

    def leave(self) -> None:
        """End the group in peace, on every host: returns when all have left JAX's, too."""
        self._leaving = True
        jax.distributed.shutdown()
        for each in (*self.commands, self._meeting):
            each.close(linger=0)

    def _watch(self, links: Mapping[zmq.Socket, Link], place: Place) -> None:
        """End this process when a host is gone, whatever its other threads wait for."""
        poller = zmq.Poller()
        for monitor in links:
            poller.register(monitor, zmq.POLLIN)
        while not self._leaving and not place.is_orphan():
            for monitor, _ in poller.poll(POLL_MS):
                if links[monitor].is_lost() and not self._leaving:
                    self._on_loss(f"{links[monitor].name} is gone: all end; its log may say why")
                    return
        if not self._leaving:
            self._on_loss(ORPHANED)


def end_process(reason: str) -> NoReturn:
    """Tell and end at once: JAX would wait for the other hosts, and a thread for its device."""
    print(f"jaxpaged: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    os._exit(1)


def join(
    place: Place, started_with: Mapping[str, str], *, timeout: float, on_loss: OnLoss
) -> Group:
    """Meet the other hosts and form one JAX with them; before its backend starts.

    Args:
        started_with: what must be equal on all hosts, by the name that an error gives it.
        timeout: seconds until all hosts must be there.
        on_loss: called in a thread when another host has died, or this process' parent.

    Raises:
        JoinError: one line.
    """
    meeting = meet(place, started_with, timeout)
    group = Group(place, meeting, on_loss)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.distributed.initialize(
        meeting.jax_coordinator,
        place.num_hosts,
        place.host_id,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout) + 1,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=meeting.jax_coordinator,
    )
    if meeting.reserved is not None:
        meeting.reserved.close()
    log.info("host %d of %d has joined the others", place.host_id, place.num_hosts)
    return group
