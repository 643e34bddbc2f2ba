"""What lies on the devices of one stage, and what they can be told to do with it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxpaged.core.buckets import Bucket
from jaxpaged.models.decoder import Decoder, Params, head_params
from jaxpaged.parallel.peers import make_boxes
from jaxpaged.parallel.sharding import put
from jaxpaged.runtime import sampler
from jaxpaged.runtime.command_stream import CommandSender
from jaxpaged.runtime.compilation import Executables
from jaxpaged.runtime.memory import keep_holes
from jaxpaged.runtime.plan import EnginePlan
from jaxpaged.runtime.programs import (
    Embed,
    Forward,
    Key,
    Receive,
    Sample,
    Send,
    TakeInput,
    Upkeep,
    zero_states,
)


class Stage:
    """Weights, state and executables of a model's layers, or of some of them, on one mesh.

    Every method dispatches and returns at once; the stage's devices work in the order of the calls.
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        plan: EnginePlan,
        executables: Executables[Key],
        device: jax.Device,
        followers: CommandSender | None = None,
    ) -> None:
        self.model, self.params, self.executables = model, params, executables
        self._weights = tuple(jax.tree.leaves(params))
        self.state, self._penalties = zero_states(model, plan, device)
        if model.mesh is not None and model.stores_to_peers:
            self._boxes, where_N2 = make_boxes(model.mesh)  # kept: programs know their addresses
            self.state = self.state.replace(peer_addresses_N2=where_N2)
        here = self.state.last_token.sharding.addressable_devices
        self._between_holes = [keep_holes(each) for each in here]  # kept: without them all is one
        self.followers = followers  # None: all devices of the mesh are this host's
        self._head_params = head_params(params) if model.is_last else None

    def put(self, array: np.ndarray | jax.Array) -> jax.Array:
        """The one way here, from the host or another stage: explicit, so that a test can forbid any
        other transfer.
        """
        return put(array, self.state.last_token.sharding)

    def _tell(self, key: Key, *words: np.ndarray) -> None:
        """Have the other hosts of the mesh do the same."""
        if self.followers is not None:
            self.followers.execute(key, words)

    def execute(self, key: Key, words: Sequence[np.ndarray]) -> None:
        """Do what the leader's stage has told its followers."""
        match key:
            case TakeInput():
                self.take_input(*words)
            case Forward(bucket):
                self.forward(bucket, None)
            case Sample():
                self.sample(key, *words)
            case Embed(num_rows):
                self.embed(num_rows)
            case Upkeep.PAGE_TABLES:
                self.update_page_tables(*words)
            case Upkeep.PENALTIES:
                self.count_tokens(*words)

    def take_input(self, words_X: np.ndarray) -> None:
        """Copy what the host says of a step into the state."""
        key = TakeInput(words_X.size)
        self._tell(key, words_X)
        input_X = self.executables[key](self.state.input_X, self.put(words_X))
        self.state = self.state.replace(input_X=input_X)

    def update_page_tables(self, index_X: np.ndarray, page_X: np.ndarray) -> None:
        """Write entries that did not go up with a step."""
        self._tell(Upkeep.PAGE_TABLES, index_X, page_X)
        tables = self.executables[Upkeep.PAGE_TABLES](
            self.state.page_tables, self.put(index_X), self.put(page_X)
        )
        self.state = self.state.replace(page_tables=tables)

    def forward(self, bucket: Bucket, sent_TD: jax.Array | None) -> jax.Array | None:
        """Compute the step's tokens.

        Args:
            sent_TD: what the stage before returned; None: this is the first.

        Returns:
            What the next stage takes; None: this is the last.
        """
        self._tell(Forward(bucket))
        if sent_TD is not None:
            receive = self.executables[Receive(bucket.num_tokens)]
            self.state = self.state.replace(x_TD=receive(self.state.x_TD, self.put(sent_TD)))
        self.state = self.executables[Forward(bucket)](self._weights, self.state)
        if self.model.is_last:
            return None
        # What goes on is a copy: the state stays where it is, or a GPU would record its graph anew.
        return self.executables[Send(bucket.num_tokens)](self.state.hidden_RD)

    def take_last_tokens(self, last_token: jax.Array) -> None:
        """Copy what the last stage sampled into the state of this one."""
        copied = self.executables[Upkeep.LAST_TOKENS](self.state.last_token, last_token)
        self.state = self.state.replace(last_token=copied)

    def sample(self, key: Sample, late_X: np.ndarray | None = None) -> sampler.SampleOutput:
        """Sample with the settings in the state's input, or with those that come late."""
        self._tell(key, *(() if late_X is None else (late_X,)))
        full, state = key.variant == "full", self.state
        out, last_token, penalties = self.executables[key](
            self._head_params,
            state.hidden_RD,
            state.position_R,
            state.last_token,
            self._penalties if full else None,
            state.input_X if late_X is None else self.put(late_X),
        )
        self.state = state.replace(last_token=last_token)
        if full:
            self._penalties = penalties
        return out

    def embed(self, num_rows: int) -> jax.Array:
        """Embeddings of the first rows of the last step."""
        self._tell(Embed(num_rows))
        state = self.state
        pooled_RD = state.hidden_RD if state.pooled_RD is None else state.pooled_RD
        return self.executables[Embed(num_rows)](pooled_RD)

    def count_tokens(self, piece: np.ndarray) -> None:
        """Add known tokens to a slot's counts; see `sampler.count_tokens`."""
        self._tell(Upkeep.PENALTIES, piece)
        self._penalties = self.executables[Upkeep.PENALTIES](self._penalties, self.put(piece))
