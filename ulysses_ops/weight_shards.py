"""Weights that are sharded between ranks, brought together one layer ahead of their use.

Every rank keeps ``1 / world_size`` of the rows of each layer's weight. Two windows take turns:
while layer ``i`` computes with one, an all-gather fills the other for layer ``i + 1``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .agreement import find_disagreement
from .communicator import UlyssesCommunicator
from .errors import UlyssesError
from .exchange import Exchange
from .kinds import check_dense, check_kind, check_readable, check_tensors, is_whole, shown
from .names import check_communicator
from .plan import even_splits
from .window_spec import WindowSpec
from .windows import Window, WindowCache, reserve

NUM_SLOTS = 2
OP = "WeightShards"


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
            ValueError: there are none, they are not alike, not dense or of device meta; or ranks
                differ in their number, ``in``, dtype or ``name``; the same text on every rank.
            UlyssesError: as :func:`ulysses_ops.reserve`.

        Collective.
        """
        check_communicator(OP, comm)
        own: dict[str, str | int]
        try:
            _check_shards(shards, name)
            width, dtype = shards[0].shape[1], shards[0].dtype
            layers = f"{len(shards)} layers (rows, {width}), {dtype}, name={name!r}"
            own = {"rows": len(shards[0]), "layers": layers}
        except ValueError as error:  # the others are about to meet, and hear of it
            own = {"refusal": str(error)}
        records = comm.agreement.exchange(OP, own)
        for record in records:
            if "refusal" in record:
                raise ValueError(record["refusal"])
        differing = find_disagreement([record["layers"] for record in records])
        if differing is not None:
            message = (
                f"{OP}: ranks hold shards of different weights: {differing.describe()}; give each "
                f"its rows of the same layers"
            )
            raise ValueError(message)
        self._comm = comm
        self._shards = tuple(shards)
        splits = tuple(int(record["rows"]) for record in records)
        shape = (1, sum(splits), 1, shards[0].shape[1])
        self._specs = [
            WindowSpec.all_gather(
                f"{name}.{slot}", shape, shards[0].dtype, comm.world_size, seq_splits=splits
            )
            for slot in range(NUM_SLOTS)
        ]
        self._windows: list[Window] = reserve(comm, self._specs)
        self._in_flight: dict[int, Exchange] = {}
        self._held: dict[int, tuple[int, Window]] = {}

    @staticmethod
    def cut(weight: Tensor, comm: UlyssesCommunicator) -> Tensor:
        """This rank's rows of a whole weight ``(out, in)``, in memory of their own.

        Raises:
            ValueError: it is no dense weight of two dimensions.
        """
        check_communicator(f"{OP}.cut", comm)
        check_tensors(f"{OP}.cut", weight=weight)
        check_dense(f"{OP}.cut", weight)
        if weight.dim() != 2:
            message = f"{OP}.cut: weight must be (out, in), got {list(weight.shape)}"
            raise ValueError(message)
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
        self._check_layer(layer)
        slot = layer % NUM_SLOTS
        if slot in self._in_flight:
            holds = self._held[slot][0]
            message = (
                f"{OP}: layer {layer} needs the window of layer {holds}, which was prefetched and "
                f"not used; call whole({holds}) first"
            )
            raise UlyssesError(message)
        # Other calls may have evicted the windows, and with them what was complete; not in flight.
        self._windows = reserve(self._comm, self._specs)
        exchange = Exchange(self._comm)
        shard = self._shards[layer]
        exchange.send(
            shard.detach().view(1, shard.shape[0], 1, shard.shape[1]), self._windows[slot]
        )
        self._in_flight[slot] = exchange
        self._held[slot] = (layer, self._windows[slot])

    def whole(self, layer: int) -> Tensor:
        """The whole weight ``(out, in)`` of a layer that was prefetched.

        Returns:
            A view of the window, valid on the current stream until the layer two after it is
            prefetched.

        Raises:
            ValueError: there is no such layer.
            UlyssesError: the layer was not prefetched, its window is another layer's by now, or
                was evicted since; or another thread is in a call, and the layer may be asked for
                again; or its exchange failed, and it has to be prefetched again.
        """
        self._check_layer(layer)
        slot = layer % NUM_SLOTS
        if self._held.get(slot) != (layer, self._windows[slot]) or not self._is_there(slot):
            message = f"{OP}: layer {layer} is not there; call prefetch({layer}) first"
            raise UlyssesError(message)
        exchange = self._in_flight.get(slot)
        if exchange is not None:
            # Refused here, the exchange is still as it was and can be completed later.
            with self._comm.turn.of(f"{OP}.whole"):
                self._complete(slot, exchange)
        return self._windows[slot].tensor.squeeze(2).squeeze(0)

    def _complete(self, slot: int, exchange: Exchange) -> None:
        """Fill the window; one that was not filled is never taken for a weight later."""
        try:
            exchange.complete()
        except BaseException:
            # With NCCL and gloo what failed is forgotten; copies of the device stay to be waited
            # for, so there the next call tries again.
            if self._comm.copy_engine is None and not self._windows[slot].is_in_flight:
                del self._in_flight[slot], self._held[slot]
            raise
        del self._in_flight[slot]

    def _is_there(self, slot: int) -> bool:
        """Whether the window still has its memory; it is the most recently used then."""
        window = self._windows[slot]
        return WindowCache.of(self._comm).find(window.key) is window

    def _check_layer(self, layer: int) -> None:
        if not is_whole(layer) or not 0 <= layer < len(self._shards):
            last = len(self._shards) - 1
            message = f"{OP}: layer={shown(layer)} must be from 0 to {last}, a whole number"
            raise ValueError(message)


def _check_shards(shards: object, name: object) -> None:
    """Refuse what this rank cannot take part with.

    Raises:
        ValueError: a shard, or the name, is of a wrong kind, or shards are not alike.
    """
    check_kind(OP, "name", name, str, "text")
    wanted = f"{OP}: shards must be (rows, in) and all alike"
    if not isinstance(shards, list | tuple):
        message = f"{wanted}, in a list; got {shown(shards)}"
        raise ValueError(message)
    for x in shards:
        if not isinstance(x, Tensor):
            message = f"{wanted}, each a tensor; got {shown(x)}"
            raise ValueError(message)
        check_readable(OP, x)
    kinds = sorted({f"{list(x.shape)}, {x.dtype}" for x in shards})
    if len(kinds) != 1 or shards[0].dim() != 2:
        message = f"{wanted}, got {'; '.join(kinds) or 'none'}"
        raise ValueError(message)
