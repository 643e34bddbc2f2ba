"""Which replica of Ray Serve a request goes to: the one whose cache holds most of its prompt.

Ray sends the router's module by value, without what it finds by annotations: the front makes the
keys, where the module is imported as any other, and passes them as the last argument of the call.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
from cachetools import LRUCache
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

BLOCK = 256  # bytes of a prompt that are remembered as one
LONGEST = 256  # blocks of a prompt that are looked at
MAX_BLOCKS = 200_000  # that are remembered, those of the latest prompts


class _Prompt(msgspec.Struct):
    """What a prompt is made of, in the order of its tokens, as the client spelled it."""

    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def prefixes(body: bytes) -> list[int]:
    """A hash of each prefix of a request's prompt that ends with a block, the shortest first."""
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except msgspec.DecodeError:
        return []
    text = b"".join(bytes(part) for part in msgspec.structs.astuple(prompt))
    found = [0]
    for start in range(0, min(len(text), BLOCK * LONGEST) - BLOCK + 1, BLOCK):
        found.append(hash((found[-1], text[start : start + BLOCK])))
    return found[1:]


class PrefixRouter(RequestRouter):
    """Prefers the replica that the longest prefix of the prompt was sent to last.

    Unless it has `slack` requests more than the idlest replica: then, as for a prompt without a
    known prefix, the idler of any two.
    """

    # Ray's 0.1 would give a prefix away when its replica is busy with a long text for a moment.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, slack: int = 8) -> None:
        """Called by Ray with the router's settings."""
        self._slack = slack
        self._homes: LRUCache[int, ReplicaID] = LRUCache(MAX_BLOCKS)
        self._running: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; of a rank Ray takes the idlest that has room."""
        any_two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [any_two]
        pending_request.routing_context.should_backoff = True  # if all of them are full
        idlest = min(self._running[replica.replica_id] for replica in candidate_replicas)
        home = self._home(candidate_replicas, pending_request.args[-1])
        if home is None or self._running[home.replica_id] - idlest >= self._slack:
            return [any_two]
        return [[home], any_two]

    def _home(self, candidates: list[RunningReplica], keys: list[int]) -> RunningReplica | None:
        by_id = {replica.replica_id: replica for replica in candidates}
        found = None
        for key in keys:
            owner = self._homes.get(key)
            if owner is None:
                break
            found = by_id.get(owner, found)
        return found

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Ray when the replica has taken the request."""
        for key in pending_request.args[-1]:
            self._homes[key] = replica_id

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Ray for everything sent to a replica."""
        super().on_send_request(replica_id)
        self._running[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when it has ended, in whatever way."""
        self._running[replica_id] -= 1
        if self._running[replica_id] <= 0:
            del self._running[replica_id]
