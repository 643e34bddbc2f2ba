"""What the leader's device does, for other hosts to do as well: one ordered stream of commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import zmq

from jaxpaged.parallel.hosts import Group
from jaxpaged.runtime.programs import Key


class Execute(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Run an executable."""

    number: int  # counts up: a gap would be a lost command
    key: int  # place among the keys that all hosts compiled
    words: list[bytes]  # int32 each


class End(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The engine ends, in peace."""


class CommandSender:
    """The leader's end.

    Args:
        group: the hosts that this one leads.
        keys: of all executables, in the order that every host has them in.
    """

    def __init__(self, group: Group, keys: Sequence[Key]) -> None:
        self._group = group
        self._index = {key: index for index, key in enumerate(keys)}
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0

    def execute(self, key: Key, words: Sequence[np.ndarray]) -> None:
        """Have every follower run an executable on these words; returns at once."""
        self._send(Execute(self._number, self._index[key], [each.tobytes() for each in words]))
        self._number += 1

    def end(self) -> None:
        """Have every follower leave the group, and do so as well."""
        self._send(End())
        self._group.leave()

    def _send(self, command: Execute | End) -> None:
        data = self._encoder.encode(command)
        for socket in self._group.commands:
            socket.send(data)


def received(socket: zmq.Socket, keys: Sequence[Key]) -> Iterator[tuple[Key, list[np.ndarray]]]:
    """A follower's end: what to run, in order, until the leader ends.

    Raises:
        RuntimeError: a command is missing.
    """
    decoder = msgspec.msgpack.Decoder(Execute | End)
    number = 0
    while not isinstance(command := decoder.decode(socket.recv()), End):
        if command.number != number:
            raise RuntimeError(f"command {number} of host 0 is lost: {command.number} came instead")
        number += 1
        yield keys[command.key], [np.frombuffer(each, np.int32) for each in command.words]
