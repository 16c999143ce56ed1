"""Weights that are sharded between ranks, brought together one layer ahead of their use.

Every rank keeps ``1 / world_size`` of the rows of each layer's weight. Two windows take turns:
while layer ``i`` computes with one, an all-gather fills the other for layer ``i + 1``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .communicator import UlyssesCommunicator
from .errors import UlyssesError
from .exchange import Exchange
from .plan import even_splits
from .window_spec import WindowSpec
from .windows import Window, reserve

NUM_SLOTS = 2


class WeightShards:
    """Weights ``(out, in)`` of alike layers, each sharded by rows.

    ::

        weights = WeightShards(comm, [WeightShards.cut(w, comm) for w in whole_weights])
        weights.prefetch(0)
        for i, layer in enumerate(layers):
            q, k, v = layer.project(x)  # and send them
            if i + 1 < len(layers):
                weights.prefetch(i + 1)  # leaves behind q, k and v, under the attention
            attended = ...
            x = attended @ weights.whole(i).T

    Exchanges leave in the order in which they are issued, so prefetch after what is needed first. A
    captured step begins and ends with nothing in flight: its first prefetch hides behind the first
    layer alone.
    """

    def __init__(
        self, comm: UlyssesCommunicator, shards: Sequence[Tensor], *, name: str = "weights"
    ) -> None:
        """Take the shards of this rank and reserve the windows.

        Args:
            comm: An open communicator.
            shards: Of each layer, this rank's rows, from :meth:`cut`; of one shape and dtype.
            name: Weights of one name and shape share windows, if they do not overlap in time.

        Raises:
            ValueError: there are none, or they are not alike.
            UlyssesError: as :func:`ulysses_ops.reserve`.

        Collective.
        """
        if not shards or any(
            x.dim() != 2 or x.shape != shards[0].shape or x.dtype != shards[0].dtype for x in shards
        ):
            shapes = sorted({(*x.shape, str(x.dtype)) for x in shards})
            message = f"WeightShards: shards must be (rows, in) and all alike, got {shapes}"
            raise ValueError(message)
        self._comm = comm
        self._shards = tuple(shards)
        rows, depth = shards[0].shape
        records = comm.agreement.exchange("WeightShards", {"rows": rows})
        splits = tuple(int(record["rows"]) for record in records)
        shape = (1, sum(splits), 1, depth)
        specs = [
            WindowSpec.all_gather(
                f"{name}.{slot}", shape, shards[0].dtype, comm.world_size, seq_splits=splits
            )
            for slot in range(NUM_SLOTS)
        ]
        self._windows: list[Window] = reserve(comm, specs)
        self._in_flight: dict[int, Exchange] = {}
        self._held: dict[int, int] = {}

    @staticmethod
    def cut(weight: Tensor, comm: UlyssesCommunicator) -> Tensor:
        """This rank's rows of a whole weight ``(out, in)``, in memory of their own."""
        shares = even_splits(weight.shape[0], comm.world_size)
        own: Tensor = weight.split(list(shares))[comm.rank]
        return own.clone()

    @property
    def saved_bytes(self) -> int:
        """Memory that this rank has less in use than with whole weights, windows included."""
        whole = self._windows[0].tensor.nbytes
        return (len(self._shards) - NUM_SLOTS) * whole - sum(x.nbytes for x in self._shards)

    def prefetch(self, layer: int) -> None:
        """Begin to bring a layer's weight together.

        Args:
            layer: From 0. Its window is that of the layer two before it, which must have been used.

        Raises:
            ValueError: there is no such layer.
            UlyssesError: its window holds a weight that was never asked for.

        Collective: every rank prefetches the same layers in the same order.
        """
        if not 0 <= layer < len(self._shards):
            message = f"WeightShards: layer={layer} must be from 0 to {len(self._shards) - 1}"
            raise ValueError(message)
        slot = layer % NUM_SLOTS
        if slot in self._in_flight:
            message = (
                f"WeightShards: layer {layer} needs the window of layer {self._held[slot]}, which "
                f"was prefetched and not used; call whole({self._held[slot]}) first"
            )
            raise UlyssesError(message)
        exchange = Exchange(self._comm)
        shard = self._shards[layer]
        exchange.send(
            shard.detach().view(1, shard.shape[0], 1, shard.shape[1]), self._windows[slot]
        )
        self._in_flight[slot] = exchange
        self._held[slot] = layer

    def whole(self, layer: int) -> Tensor:
        """The whole weight ``(out, in)`` of a layer that was prefetched.

        Returns:
            A view of the window, valid on the current stream until the layer two after it is
            prefetched.

        Raises:
            UlyssesError: the layer was not prefetched, or its window is another layer's by now.
        """
        slot = layer % NUM_SLOTS
        if self._held.get(slot) != layer:
            message = f"WeightShards: layer {layer} is not there; call prefetch({layer}) first"
            raise UlyssesError(message)
        exchange = self._in_flight.pop(slot, None)
        if exchange is not None:
            exchange.complete()
        return self._windows[slot].tensor.squeeze(2).squeeze(0)
