"""How one rank warms up and captures a call, and how the ranks compare what they have captured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.copy_engine import CopyEngineGroup
from ulysses_ops.errors import UlyssesError
from ulysses_ops.exchange import pending_channels
from ulysses_ops.graphs.line_up import lined_up
from ulysses_ops.graphs.refusals import explained

POLL_S = 0.0005


@dataclass
class Captured:
    """What one rank has captured, until all ranks have.

    Attributes:
        graph: The graph.
        outputs: What the step returned.
        number: Id of the capture; 0 where no copy engine takes part.
        num_bytes: What the caching allocator took from the device meanwhile.
    """

    graph: torch.cuda.CUDAGraph
    outputs: Any = None
    number: int = 0
    num_bytes: int = 0

    def discard(self, engine: CopyEngineGroup | None) -> None:
        """Give everything back."""
        self.outputs = None
        self.graph.reset()
        if engine is not None:
            engine.forget_capture(self.number)


def warm_up(comm: UlyssesCommunicator, call: Callable[[], Any], count: int) -> None:
    """Call the step on a side stream and wait, within the communicator's limit, until it is done.

    In the first call the ranks compare each exchange before they issue it.

    Raises:
        UlyssesError: the ranks' exchanges differ, it is not done in time, a peer was late, or an
            exchange was left open.
    """
    stream = torch.cuda.Stream(comm.device)
    stream.wait_stream(torch.cuda.current_stream(comm.device))
    with torch.cuda.stream(stream):
        with lined_up(comm):
            call()
            _refuse_pending(comm)
        for _ in range(count - 1):
            call()
            _refuse_pending(comm)
        done = stream.record_event()
    torch.cuda.current_stream(comm.device).wait_stream(stream)
    deadline = time.monotonic() + comm.timeout_s
    while not done.query():
        if time.monotonic() > deadline:
            message = f"the step did not finish within {comm.timeout_s:g} s; is every rank in it?"
            raise UlyssesError(message)
        time.sleep(POLL_S)
    comm.check()


def capture(
    comm: UlyssesCommunicator,
    call: Callable[[], Any],
    generators: Sequence[torch.Generator],
    pool: Any,
) -> Captured:
    """Capture one call of the step; what breaks it is raised, with what it means if that is known.

    Nothing of a broken capture is left behind.
    """
    engine = comm.copy_engine
    captured = Captured(torch.cuda.CUDAGraph())
    for generator in generators:
        captured.graph.register_generator_state(generator)
    cause: Exception | None = None
    try:
        # Other threads (the watchdog of NCCL, say) may go on using CUDA meanwhile.
        with (
            _no_collection(),
            torch.cuda.graph(captured.graph, pool=pool, capture_error_mode="thread_local"),
        ):
            try:
                captured.number = 0 if engine is None else engine.own_capture()
                before = torch.cuda.memory_reserved(comm.device)
                captured.outputs = call()
                captured.num_bytes = torch.cuda.memory_reserved(comm.device) - before
                _refuse_pending(comm)
            except Exception as error:
                cause = error
                raise
    except Exception as error:  # noqa: BLE001  whatever it was, the ranks must hear of it
        if engine is not None:
            engine.abandon_captures()
            engine.forget_capture(captured.number)
        # Ending a broken capture raises as well; what broke it says more.
        raise explained(cause or error) from None
    return captured


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now and not later: to free device memory would break the capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refuse_pending(comm: UlyssesCommunicator) -> None:
    pending = pending_channels(comm)
    if pending:
        message = (
            f"the step left channel '{pending}' without complete; complete every exchange in it"
        )
        raise UlyssesError(message)


def compare_exchanges(comm: UlyssesCommunicator, capture: int) -> list[str]:
    """The first exchange in which the graphs of the ranks differ, by rank. Collective.

    Replays of graphs that differ would wait for each other until they are given up.
    """
    if comm.copy_engine is None:
        return []
    mine = comm.copy_engine.captured_exchanges(capture)
    records = comm.agreement.exchange("captured exchanges", {"exchanges": mine})
    by_rank: list[list[str]] = [record["exchanges"] for record in records]
    for number, steps in enumerate(zip_longest(*by_rank, fillvalue="nothing")):
        if len(set(steps)) > 1:
            return [
                f"rank {rank}: exchange {number} of its graph is {step}"
                for rank, step in enumerate(steps)
            ]
    return []
