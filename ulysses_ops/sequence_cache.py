"""A cache of keys, values or latents that is sharded by sequence and read across steps.

Each rank holds the rows that it was given, ``1 / world_size`` of the whole. A step writes its new
rows and reads all of them, by one exchange into a window of fixed size: so a captured step can be
replayed while the cache grows. What changes from step to step are three small tensors, made on the
host: the slots of the new rows, the positions in the window, and with them the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .communicator import UlyssesCommunicator
from .exchange import Exchange
from .heads import share_heads
from .kinds import check_kind, check_readable, check_tensors, is_whole, shown
from .names import check_communicator
from .plan import checked_splits, even_splits
from .row_slots import Keep, Placement, RowSlots
from .window_spec import WindowSpec
from .windows import Window, agree, refuse, reserve

Heads = Literal["all", "split"]
OP = "SequenceCache"


class SequenceCache:
    """Rows ``(B, capacity, H, D)`` of this rank, and where all rows of the sequence are.

    Eager::

        cache.append(latents)  # this rank's shard of the chunk
        rows = cache.read()  # (B, capacity * world_size, H, D), valid until the next read
        mask = cache.positions() >= 0

    Captured: call :meth:`place` before each replay and give the graph :meth:`slots` and
    :meth:`positions` as inputs; inside, :meth:`write` and :meth:`read`.

    Attributes:
        rows: The rows of this rank, by slot.
        account: Which row is where, on every rank.
    """

    def __init__(
        self,
        comm: UlyssesCommunicator,
        *,
        batch: int,
        capacity: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        keep: Keep = "all",
        name: str = "cache",
    ) -> None:
        """Allocate the slots of this rank.

        Args:
            comm: An open communicator.
            batch: B.
            capacity: Slots of a rank: the whole sequence may have ``world_size`` times as many.
            heads: H of a row: 1 for latents, a single KV head and indexer keys.
            head_dim: D.
            dtype: Element type.
            keep: ``"latest"`` overwrites the oldest rows of a rank when it is full: a sliding
                window.
            name: Caches of one name and shape, as those of all layers, share the window that they
                are read into.

        Raises:
            ValueError: a size, ``dtype``, ``keep`` or ``name`` is wrong.
        """
        check_communicator(OP, comm)
        sizes = {"batch": batch, "capacity": capacity, "heads": heads, "head_dim": head_dim}
        for what, size in sizes.items():
            if not is_whole(size) or size < 1:
                message = f"{OP}: {what}={shown(size)} must be a whole number from 1"
                raise ValueError(message)
        check_kind(OP, "dtype", dtype, torch.dtype, "a torch.dtype")
        check_kind(OP, "name", name, str, "text")
        if keep not in ("all", "latest"):
            message = f"{OP}: keep={shown(keep)} must be 'all' or 'latest'"
            raise ValueError(message)
        self._comm = comm
        self._name = name
        self.account = RowSlots(capacity, comm.world_size, keep)
        # One slot more than is ever placed or read: where replays write what other ranks keep.
        shape = (batch, capacity + 1, heads, head_dim)
        self._rows_and_spare = torch.zeros(shape, dtype=dtype, device=comm.device)
        self.rows = self._rows_and_spare[:, :capacity]

    @property
    def comm(self) -> UlyssesCommunicator:
        """The communicator that it was made with."""
        return self._comm

    @property
    def capacity(self) -> int:
        """Slots of a rank."""
        return self.account.capacity

    def place(self, splits: Sequence[int] | int) -> Placement:
        """Take slots for new rows; on the host, alike on every rank.

        Args:
            splits: New rows of each rank; or their number, to be divided so that the ranks fill up
                evenly.

        Raises:
            ValueError: they do not fit, or splits are wrong.
        """
        shares = splits if isinstance(splits, Iterable) else self.account.divide(splits)
        return self.account.place(shares)

    def slots(self, placement: Placement, *, replicated: bool = False) -> Tensor:
        """Slots of this rank's new rows, as :meth:`write` takes them.

        Args:
            placement: From :meth:`place`.
            replicated: For new rows that every rank has and passes to :meth:`write` whole: as many
                slots on each rank, so that one captured step serves all. What other ranks keep goes
                to the spare slot, number ``capacity``, which is never placed or read.

        Returns:
            ``(n,)``, int64: of this rank's new rows, or with ``replicated`` of all.
        """
        check_kind(OP, "placement", placement, Placement, "what place() returned")
        check_kind(OP, "replicated", replicated, bool, "True or False")
        rank = self._comm.rank
        chosen = list(placement.slots[rank])
        if replicated:
            before, after = sum(placement.splits[:rank]), sum(placement.splits[rank + 1 :])
            chosen = [self.capacity] * before + chosen + [self.capacity] * after
        return torch.tensor(chosen, dtype=torch.int64, device=self._comm.device)

    def write(self, x: Tensor, slots: Tensor) -> None:
        """Put rows into slots. Local, on the current stream, and capturable.

        Args:
            x: ``(B, n, H, D)``, this rank's new rows.
            slots: ``(n,)`` from :meth:`slots`. On a GPU nobody looks at the numbers: one beyond
                the spare slot is an error of the device.

        Raises:
            ValueError: shape, dtype or device is not that of the cache, ``x`` is not dense; or, on
                the CPU, there is no such slot. Nothing is written then.
        """
        check_tensors(OP, slots=slots)
        device = self.rows.device
        if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device != device:
            message = (
                f"{OP}: slots are {list(slots.shape)}, {slots.dtype}, on {slots.device}, and must "
                f"be (n,), torch.int64, on {device}; pass what slots() returned"
            )
            raise ValueError(message)
        self._check_rows(x, slots.shape[0])
        beyond = numbers_beyond(slots, 0, self.capacity)
        if beyond:
            message = (
                f"{OP}: slots hold {beyond[0]}, and a slot is from 0 to {self.capacity}, the last "
                f"of which is spare; pass what slots() returned"
            )
            raise ValueError(message)
        rows = self._rows_and_spare
        if x.dtype.itemsize == 1:  # some types of a byte have no such operator everywhere
            rows, x = rows.view(torch.uint8), x.view(torch.uint8)
        rows.index_copy_(1, slots, x)

    def _check_rows(self, x: Tensor, count: int | None = None) -> None:
        """Refuse new rows that have no place here, or are not as many as ``count``."""
        check_tensors(OP, x=x)
        check_readable(OP, x)
        if x.requires_grad and torch.is_grad_enabled():
            message = (
                f"{OP}: x requires grad, and a cache has no gradient; call it under "
                f"torch.no_grad(), or pass x.detach()"
            )
            raise ValueError(message)
        batch, _, heads, head_dim = self.rows.shape
        rows = x.shape[1] if count is None and x.dim() == 4 else count
        expected = [batch, "n" if rows is None else rows, heads, head_dim]
        of_cache = (self.rows.dtype, self.rows.device)
        if list(x.shape) != expected or (x.dtype, x.device) != of_cache:
            message = (
                f"{OP}: new rows are {list(x.shape)}, {x.dtype}, on {x.device}, and {expected}, "
                f"{self.rows.dtype}, on {self.rows.device} have a place on rank {self._comm.rank}; "
                f"pass the rows of this rank"
            )
            raise ValueError(message)

    def append(self, x: Tensor, splits: Sequence[int] | None = None) -> Placement:
        """Place and write this rank's shard ``(B, S_local, H, D)`` of a chunk.

        Args:
            x: Rows of this rank.
            splits: Rows of every rank; alike on all when left out.

        Raises:
            ValueError: they do not fit, or shape, dtype, device or splits are wrong; no slot is
                taken then. Where ranks have splits that differ, or one holds other rows than its
                splits say, all raise it at the first call with these splits. Later only the rank
                whose rows are wrong raises it, and the others have taken slots: end the run then.

        Collective at the first call with splits, or a number of rows without them; local later.
        """
        world_size, rank = self._comm.world_size, self._comm.rank
        if splits is None:
            self._check_rows(x)
        given = (x.shape[1],) * world_size if splits is None else splits
        sizes = checked_splits(OP, "seq", given, None, world_size)
        # Each rank accounts for the rows of all: accounts would differ unseen.
        shape = (1, sum(sizes), 1, 1)
        spec = WindowSpec.all_gather(
            f"{OP}.append", shape, self.rows.dtype, world_size, seq_splits=sizes
        )
        with self._comm.turn.of(f"{OP}.append"):
            try:
                self._check_rows(x, sizes[rank])
            except ValueError as error:
                refuse(self._comm, [spec], str(error))
            agree(self._comm, spec)
        placement = self.account.choose(sizes)
        self._write_and_take(x, placement)
        return placement

    def _write_and_take(self, x: Tensor, placement: Placement) -> None:
        """Write first: a write that fails takes no slots."""
        self.write(x, self.slots(placement))
        self.account.take(placement)

    def append_replicated(self, x: Tensor) -> Placement:
        """Of rows ``(B, n, H, D)`` that every rank has, each writes a share: nothing is sent.

        Raises:
            ValueError: they do not fit, or shape, dtype or device is wrong; no slot is taken then.
        """
        self._check_rows(x)
        placement = self.account.choose(self.account.divide(x.shape[1]))
        first = sum(placement.splits[: self._comm.rank])
        share = x.narrow(1, first, placement.splits[self._comm.rank])
        self._write_and_take(share, placement)
        return placement

    def window(
        self, *, heads: Heads = "all", query_heads: int | None = None, slots: int | None = None
    ) -> Window:
        """The window that :meth:`read` fills. Collective at the first call with a size."""
        count = self._checked_slots(slots)
        if heads not in ("all", "split"):
            message = f"{OP}: heads={shown(heads)} must be 'all' or 'split'"
            raise ValueError(message)
        if query_heads is not None and (heads != "split" or not is_whole(query_heads)):
            message = (
                f"{OP}: query_heads={shown(query_heads)} must be the number of query heads, and "
                f"goes with heads='split' alone, which is {heads!r}"
            )
            raise ValueError(message)
        batch, _, num_heads, head_dim = self.rows.shape
        world_size = self._comm.world_size
        shape = (batch, count * world_size, num_heads, head_dim)
        name = f"{self._name}.{heads}"
        if heads == "all":
            spec = WindowSpec.all_gather(name, shape, self.rows.dtype, world_size)
        elif query_heads is None:
            shares = even_splits(num_heads, world_size)
            spec = WindowSpec(name, "scatter", shape, self.rows.dtype, head_splits=shares)
        else:
            share = share_heads(query_heads, num_heads, world_size)
            spec = WindowSpec(
                name,
                "scatter",
                shape,
                self.rows.dtype,
                head_splits=share.kv_splits,
                head_starts=share.kv_starts,
            )
        return reserve(self._comm, [spec])[0]

    def read(
        self, *, heads: Heads = "all", query_heads: int | None = None, slots: int | None = None
    ) -> Tensor:
        """All rows of all ranks, in the order rank by rank, slot by slot.

        Args:
            heads: ``"all"`` of every row on every rank; ``"split"`` gives each rank its share of
                the heads, as attention by heads takes them.
            query_heads: With ``"split"`` where several query heads read one KV head: how many
                there are. Each rank then gets the KV heads that its query heads read, some of them
                on two ranks; see :func:`ulysses_ops.heads.share_heads`, whose result also says how
                often each is read. Without it each rank gets an even share of the cache's heads.
            slots: Read the first so many slots of each rank alone. At least the fullest rank's
                rows; a few sizes are better than many, since each has a window.

        Returns:
            ``(B, slots * world_size, heads, D)``: the window itself, valid until the next read of
            a cache of this name. Empty slots hold old or no data: mask them.

        Raises:
            ValueError: ``slots``, ``heads`` or ``query_heads`` is wrong, or a row lies beyond
                ``slots``.
            UlyssesError: closed, or a capture needs a window that is not reserved.

        Collective, and capturable.
        """
        self._check_reach(self._checked_slots(slots))
        window = self.window(heads=heads, query_heads=query_heads, slots=slots)
        count = window.layout.seq_splits[self._comm.rank]
        with Exchange(self._comm) as exchange:
            exchange.send(self.rows[:, :count], window)
        return window.tensor

    def positions(self, slots: int | None = None) -> Tensor:
        """Position in the sequence of each row that :meth:`read` returns, -1 for empty slots.

        Raises:
            ValueError: ``slots`` is wrong, or a row lies beyond.
        """
        count = self._checked_slots(slots)
        self._check_reach(count)
        numbers = [
            position
            for rank in range(self._comm.world_size)
            for position in self.account.positions(rank)[:count]
        ]
        return torch.tensor(numbers, dtype=torch.int64, device=self._comm.device)

    def _checked_slots(self, slots: int | None) -> int:
        count = self.capacity if slots is None else slots
        if not is_whole(count) or not 0 < count <= self.capacity:
            message = (
                f"{OP}: slots={shown(slots)} must be from 1 to {self.capacity}, a whole number"
            )
            raise ValueError(message)
        return count

    def _check_reach(self, count: int) -> None:
        """Refuse to leave out rows that there are."""
        if count == self.capacity:  # all are read: nothing to look at in each step
            return
        for rank in range(self._comm.world_size):
            beyond = [p for p in self.account.positions(rank)[count:] if p >= 0]
            if beyond:
                message = (
                    f"{OP}: slots={count} would leave out {len(beyond)} rows of rank {rank}, that "
                    f"at position {beyond[0]} first; read more slots, up to {self.capacity}"
                )
                raise ValueError(message)

    def own_positions(self) -> Tensor:
        """Position of the row in each slot of this rank, -1 for empty ones."""
        numbers = self.account.positions(self._comm.rank)
        return torch.tensor(numbers, dtype=torch.int64, device=self._comm.device)

    def truncate(self, length: int) -> None:
        """Forget the rows from position ``length`` on; 0 empties the cache. Local."""
        self.account.truncate(length)


def numbers_beyond(numbers: Tensor, first: int, last: int) -> list[int]:
    """Those that are not from ``first`` to ``last``, where it costs no wait to look.

    Nothing is known of numbers on a GPU, of fakes, or while a compiler traces.
    """
    if numbers.device.type != "cpu" or type(numbers) is not Tensor or torch.compiler.is_compiling():
        return []
    wide = numbers.long()
    beyond: list[int] = wide[(wide < first) | (wide > last)].tolist()
    return beyond
