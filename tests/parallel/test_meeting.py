"""Hosts that find each other, as threads: no JAX, sockets of this machine."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import zmq
from ports import free_port

from jaxpaged.core.buckets import Bucket
from jaxpaged.parallel.hosts import Group
from jaxpaged.parallel.meeting import JoinError, Meeting, Place, Wait, meet, receive, send
from jaxpaged.runtime.command_stream import CommandSender, received
from jaxpaged.runtime.programs import Forward, TakeInput

SETTINGS = {"--seed": "0"}
KEYS = [TakeInput(3), Forward(Bucket(1, 1, True))]


@pytest.fixture
def coordinator() -> str:
    return f"127.0.0.1:{free_port()}"


def meet_all(
    coordinator: str, num_hosts: int, ids: list[int], timeout: float = 10.0
) -> list[Meeting | str]:
    """What each host gets: all others, or an error."""
    with ThreadPoolExecutor(len(ids)) as pool:
        tasks = [
            pool.submit(meet, Place(coordinator, num_hosts, host_id), SETTINGS, timeout)
            for host_id in ids
        ]
        errors = [task.exception() for task in tasks]
        assert all(isinstance(error, JoinError | None) for error in errors), errors
        return [
            task.result() if error is None else str(error)
            for task, error in zip(tasks, errors, strict=True)
        ]


def groups(
    coordinator: str, num_hosts: int, on_loss: Callable[[str], Any]
) -> tuple[list[Group], list[Meeting]]:
    met = meet_all(coordinator, num_hosts, list(range(num_hosts)))
    meetings = [each for each in met if isinstance(each, Meeting)]
    assert len(meetings) == num_hosts, met
    return [
        Group(Place(coordinator, num_hosts, i), each, on_loss) for i, each in enumerate(meetings)
    ], meetings


def test_hosts_agree_and_commands_come_in_order(coordinator: str) -> None:
    (leader, *followers), _ = groups(coordinator, 3, lambda reason: None)
    with ThreadPoolExecutor(3) as pool:
        values = zip((leader, *followers), (7, 5, 2**40), strict=True)
        assert set(pool.map(lambda each: each[0].minimum(each[1]), values)) == {5}
    sender = CommandSender(leader, KEYS)
    for number in range(100):
        sender.execute(KEYS[0], [np.full(3, number, np.int32)])
        sender.execute(KEYS[1], [])
    for each in followers:
        stream = received(each.commands[0], KEYS)
        for number in range(100):
            key, words = next(stream)
            assert key == KEYS[0] and words[0].tolist() == [number] * 3
            assert next(stream) == (KEYS[1], [])


def test_the_port_of_jax_is_kept_for_it(coordinator: str) -> None:
    _, (leader, _) = groups(coordinator, 2, lambda reason: None)
    host, _, port = leader.jax_coordinator.rpartition(":")
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((host, int(port)))


def test_a_lost_command_is_noticed(coordinator: str) -> None:
    (leader, follower), _ = groups(coordinator, 2, lambda reason: None)
    sender = CommandSender(leader, KEYS)
    sender._number = 1
    sender.execute(KEYS[1], [])
    with pytest.raises(RuntimeError, match="command 0 of host 0 is lost"):
        next(received(follower.commands[0], KEYS))


def test_a_host_that_is_gone_is_named(coordinator: str) -> None:
    told: queue.Queue[str] = queue.Queue()
    (_, _, third), _ = groups(coordinator, 3, told.put)
    third.commands[0].close(linger=0)
    assert told.get(timeout=5) == "host 2 is gone: all end; its log may say why"


def test_followers_miss_their_leader(coordinator: str) -> None:
    told: queue.Queue[str] = queue.Queue()
    (leader, _), _ = groups(coordinator, 2, told.put)
    leader.commands[0].close(linger=0)
    assert told.get(timeout=5).startswith("host 0, the leader, is gone")


def test_strangers_neither_join_nor_read_nor_disturb(coordinator: str) -> None:
    told: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor(1) as pool, zmq.Context() as context:
        leading = pool.submit(meet, Place(coordinator, 2, 0), SETTINGS, 10.0)
        stranger = context.socket(zmq.DEALER)
        stranger.connect(f"tcp://{coordinator}")
        stranger.send(b"\xff garbage")
        with socket.create_connection(coordinator.split(":")) as plain:
            plain.send(b"GET / HTTP/1.1\r\n\r\n")
        follower = meet(Place(coordinator, 2, 1), SETTINGS, 10.0)
        leader = Group(Place(coordinator, 2, 0), leading.result(), told.put)
        thief = context.socket(zmq.PULL)
        thief.connect(leader.commands[0].getsockopt_string(zmq.LAST_ENDPOINT))
        sender = CommandSender(leader, KEYS)
        for _ in range(20):
            sender.execute(KEYS[1], [])
            time.sleep(0.01)
        assert thief.poll(100) == 0
        port = leader.commands[0].getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x01\x7f"):
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.send(words)
                time.sleep(0.05)
        for socket_ in (thief, stranger):
            socket_.close(linger=0)
        stream = received(follower.links[0].commands, KEYS)
        assert [next(stream)[0] for _ in range(20)] == [KEYS[1]] * 20
    assert told.empty()


def test_a_number_that_two_hosts_have_goes_to_the_first(coordinator: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        leading, *ones = (
            pool.submit(meet, Place(coordinator, 3, host_id), SETTINGS, 10.0)
            for host_id in (0, 1, 1)
        )
        (refused,), _ = wait(ones, return_when="FIRST_COMPLETED")
        assert str(refused.exception()) == "two hosts have --host-id 1; this one came later"
        last = meet(Place(coordinator, 3, 2), SETTINGS, 10.0)
        (taken,) = set(ones) - {refused}
        assert leading.result().jax_coordinator == taken.result().jax_coordinator
        assert last.jax_coordinator == leading.result().jax_coordinator


def test_some_give_up(coordinator: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(meet_all, f"127.0.0.1:{free_port()}", 3, [0, 1], 6.0)
        leading = pool.submit(meet, Place(coordinator, 3, 0), SETTINGS, 10.0)
        with pytest.raises(JoinError, match="host 0 still waits for other hosts"):
            meet(Place(coordinator, 3, 1), SETTINGS, 3.0)
        again = meet_all(coordinator, 3, [1, 2])
        assert all(isinstance(each, Meeting) for each in (*again, leading.result()))
        leader, follower = others.result()
        assert str(leader).startswith("host 2 did not join within 6 s: ")
        assert follower in (leader, "host 0 still waits for other hosts (waited 6 s)")


def test_another_setting_is_named(coordinator: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(meet, Place(coordinator, 2, 0), SETTINGS, 10.0)
        with pytest.raises(JoinError, match="^host 1 differs from host 0 in --seed .1, not 0.$"):
            meet(Place(coordinator, 2, 1), {"--seed": "1"}, 10.0)
        meet(Place(coordinator, 2, 1), SETTINGS, 10.0)
        assert set(leading.result().members) == {1}


def test_a_leader_that_starts_anew_hears_of_those_who_wait(coordinator: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, Place(coordinator, 3, 1), SETTINGS, 10.0)
        with zmq.Context() as context:
            first = context.socket(zmq.ROUTER)
            first.bind(f"tcp://{coordinator}")
            sender, _ = receive(first)
            send(first, Wait(), sender)
            first.close()
        assert all(isinstance(each, Meeting) for each in meet_all(coordinator, 3, [0, 2]))
        assert waiting.result().links[0].name == "host 0, the leader,"


def test_a_name_of_this_machine_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("127.0.0.1", "localhost"):
        with pytest.raises(JoinError, match="host 1 did not join within 0 s"):
            meet(Place(f"{name}:{free_port()}", 2, 0), SETTINGS, 0.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("localhost is 127.0.0.1 here, which no other machine")


def test_nobody_there_and_no_such_place() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(JoinError, match=f"no host 0 answers at {nowhere} .waited 0.2 s."):
        meet(Place(nowhere, 2, 1), SETTINGS, 0.2)
    with pytest.raises(JoinError, match="host 0 cannot listen at 192.0.2.1:9: Cannot assign"):
        meet(Place("192.0.2.1:9", 2, 0), SETTINGS, 0.2)
    with pytest.raises(JoinError, match="--distributed-coordinator no.invalid:9: "):
        meet(Place("no.invalid:9", 2, 1), SETTINGS, 0.2)
