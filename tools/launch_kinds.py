"""What a graph can consist of: kernels, forks, copies, memory operations, and what is made of them.

Each kind enqueues ``n`` units, one behind the other, and can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import UlyssesError
from ulysses_ops.exchange import Exchange
from ulysses_ops.tools.cuda_driver import await_equal, batch, write
from ulysses_ops.tools.cuda_runtime import MEMCPY_DEFAULT, memcpy_2d_async, memcpy_async
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

MANY = (64, 256, 1024)
FEWER = (16, 64, 256)  # of what has several nodes a unit
ROWS, ROW_BYTES = 64, 512  # of a copy; its pitch is twice that
COPY_BYTES = ROWS * ROW_BYTES
FLAT_TO_PEER, ROWS_TO_PEER = "copy to a peer, flat", "copy to a peer, 2-D"
HANDSHAKE, EXCHANGE = "handshake of ours", "exchange of ours"
EXCHANGING = (HANDSHAKE, EXCHANGE)
MAPPED = (FLAT_TO_PEER, ROWS_TO_PEER, HANDSHAKE)  # what needs peers that map each other's memory
NO_PEER = "needs windows that the peers map: two ranks with transport 'ce'"
NO_GPU = "needs a GPU"


@dataclass(frozen=True)
class Kind:
    """One kind of node, or of several.

    Attributes:
        name: Which.
        units: How many, from few to many.
        make: What enqueues so many. Collective where peers take part.
        uses_peers: Whether it exchanges, so that our own capture is what captures it.
    """

    name: str
    units: tuple[int, ...]
    make: Callable[[], Callable[[int], None]]
    uses_peers: bool = False


def all_kinds(
    context: RankContext, comm: UlyssesCommunicator | None
) -> tuple[list[Kind], dict[str, str]]:
    """Every kind that can run here, and why others cannot."""
    kinds = [Kind("kernel", MANY, partial(_kernels, context.device))]
    on_gpu = {
        "two kernels, forked and joined": partial(_forks, context.device),
        "copy inside the GPU, flat": partial(_own_copies, context.device, is_flat=True),
        "copy inside the GPU, 2-D": partial(_own_copies, context.device, is_flat=False),
        "batch of 1 memory operation": partial(_batches, context.device, 1),
        "batch of 5 memory operations": partial(_batches, context.device, 5),
    }
    with_peers = kinds_with_peers(comm) if comm is not None else {}
    not_run: dict[str, str] = {}
    if context.device.type != "cuda":
        not_run = dict.fromkeys((*on_gpu, *MAPPED), NO_GPU)
        on_gpu = {}
    elif comm is None or comm.copy_engine is None:
        not_run = dict.fromkeys((*MAPPED, *(() if comm else (EXCHANGE,))), NO_PEER)
    kinds += [Kind(name, MANY, make) for name, make in on_gpu.items()]
    kinds += [
        Kind(name, FEWER if name in EXCHANGING else MANY, make, name in EXCHANGING)
        for name, make in with_peers.items()
        if name not in not_run
    ]
    return kinds, not_run


def kinds_with_peers(comm: UlyssesCommunicator) -> dict[str, Callable[[], Callable[[int], None]]]:
    """What makes each kind that has to do with peers."""
    return {
        FLAT_TO_PEER: partial(_peer_copies, comm, is_flat=True),
        ROWS_TO_PEER: partial(_peer_copies, comm, is_flat=False),
        HANDSHAKE: partial(_handshakes, comm),
        EXCHANGE: partial(_exchanges, comm),
    }


def _kernels(device: torch.device) -> Callable[[int], None]:
    value = torch.zeros(1, device=device)

    def issue(units: int) -> None:
        for _ in range(units):
            value.add_(1)

    return issue


def _forks(device: torch.device) -> Callable[[int], None]:
    one, other = torch.zeros(1, device=device), torch.zeros(1, device=device)
    side = torch.cuda.Stream(device)

    def issue(units: int) -> None:
        caller = torch.cuda.current_stream()
        for _ in range(units):
            side.wait_stream(caller)
            one.add_(1)
            with torch.cuda.stream(side):
                other.add_(1)
            caller.wait_stream(side)

    return issue


def _copies(source: Tensor, target: Callable[[], int], *, is_flat: bool) -> Callable[[int], None]:
    """Copies of a few rows to an address; 2-D ones from rows that are apart to such rows."""
    flat, rows = memcpy_async(), memcpy_2d_async()
    pitch = 2 * ROW_BYTES

    def issue(units: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        address, to = source.data_ptr(), target()
        for _ in range(units):
            if is_flat:
                status = flat(to, address, COPY_BYTES, MEMCPY_DEFAULT, stream)
            else:
                shape = (to, pitch, address, pitch, ROW_BYTES, ROWS)
                status = rows(*shape, MEMCPY_DEFAULT, stream)
            if status != 0:
                message = f"copy of {COPY_BYTES} bytes: the runtime gave {status}"
                raise UlyssesError(message)

    return issue


def _own_copies(device: torch.device, *, is_flat: bool) -> Callable[[int], None]:
    source = torch.zeros(2 * COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return _copies(source, target.data_ptr, is_flat=is_flat)


def _batches(device: torch.device, operations: int) -> Callable[[int], None]:
    """As many operations as a handshake of two ranks has, on words of this GPU; none waits long."""
    words = torch.zeros(2, dtype=torch.int64, device=device)

    def issue(units: int) -> None:
        one, other = words.data_ptr(), words.data_ptr() + words.itemsize
        five = (write(one, 1), write(other, 1), await_equal(one, 1), write(one, 0), write(other, 0))
        run = batch(five[:operations])
        for _ in range(units):
            run()

    return issue


def _window(comm: UlyssesCommunicator, name: str) -> Window:
    world_size = comm.world_size
    # A rank's part of it has room for the rows of one copy, and the pitch between them.
    dims = (1, ROWS * world_size, world_size, 2 * ROW_BYTES)
    (window,) = reserve(comm, [WindowSpec(name, "scatter", dims, torch.uint8)])
    return window


def _peer_copies(comm: UlyssesCommunicator, *, is_flat: bool) -> Callable[[int], None]:
    window = _window(comm, "bench.launch.copies")
    if window.memory is None:
        raise UlyssesError(NO_PEER)
    peer = (comm.rank + 1) % comm.world_size
    pointers, place = window.memory.pointers, comm.rank * 2 * COPY_BYTES
    source = torch.zeros(2 * COPY_BYTES, dtype=torch.uint8, device=comm.device)
    return _copies(source, lambda: pointers[peer] + place, is_flat=is_flat)


def _handshakes(comm: UlyssesCommunicator) -> Callable[[int], None]:
    engine = comm.copy_engine
    assert engine is not None

    def issue(units: int) -> None:
        engine.run_handshakes(units // 2)

    return issue


def _exchanges(comm: UlyssesCommunicator) -> Callable[[int], None]:
    """Scatters of a few rows, each with its open, its copies and its close."""
    window = _window(comm, "bench.launch.exchange")
    part = torch.zeros(window.source_shape, dtype=torch.uint8, device=comm.device)

    def issue(units: int) -> None:
        for _ in range(units):
            with Exchange(comm) as exchange:
                exchange.send(part, window)

    return issue
