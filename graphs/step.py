"""One step captured as a CUDA graph on every rank, exchanges included, and replayed.

The ranks warm up together, line up, capture, and vote: a graph that some rank could not capture is
dropped on all. Replays are serialised with each other and with eager exchanges by the copy chain.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.copy_engine import CopyEngineGroup
from ulysses_ops.errors import UlyssesError
from ulysses_ops.exchange import pending_channels

RESOURCE = "captured steps"
POLL_S = 0.0005


class _Steps:
    """The captured steps of a communicator that are still in use."""

    def __init__(self) -> None:
        self.live: weakref.WeakSet[CapturedStep] = weakref.WeakSet()

    def close(self) -> None:
        for step in list(self.live):
            step.close()


class CapturedStep:
    """A captured step; :func:`capture_step` makes it.

    Attributes:
        inputs: Static inputs that the graph reads; write into them, or pass tensors to
        :meth:`replay`.
        outputs: What the step returned at capture; each replay overwrites it.
    """

    def __init__(
        self,
        comm: UlyssesCommunicator,
        graph: torch.cuda.CUDAGraph,
        inputs: tuple[Tensor, ...],
        outputs: Any,
        capture: int,
    ) -> None:
        """Take over a finished capture."""
        self._comm = comm  # its windows are what the graph writes into
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._engine = comm.copy_engine
        self.inputs = inputs
        self.outputs = outputs
        comm.attach(RESOURCE, _Steps).live.add(self)
        if self._engine is not None:
            self._finalizer = weakref.finalize(self, _unpin, self._engine, capture)

    def replay(self, *inputs: Tensor) -> Any:
        """Run the step again on the current stream.

        Args:
            inputs: New values, copied into the static inputs; none to keep what is there.

        Returns:
            ``outputs``, valid until the next replay.

        Raises:
            ValueError: number, shape, dtype or device of the inputs is not that of the capture.
            UlyssesError: the step or its communicator is closed, or an exchange is in flight.

        Collective: every rank replays the same steps in the same order. Never waits on the host.
        """
        graph = self._graph
        if graph is None:
            message = "replay: the step is closed; capture it again"
            raise UlyssesError(message)
        if inputs:
            self._copy_in(inputs)
        with torch.cuda.device(self._comm.device):
            self._launch(graph)
        return self.outputs

    def _launch(self, graph: torch.cuda.CUDAGraph) -> None:
        if self._engine is None:
            graph.replay()
            return
        pending = self._engine.pending()
        if pending:
            message = f"replay: channel '{pending}' has an exchange in flight; complete it first"
            raise UlyssesError(message)
        self._engine.before_replay()
        graph.replay()
        self._engine.after_replay()

    def _copy_in(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self.inputs):
            message = (
                f"replay: {len(inputs)} inputs given, the step was captured with {len(self.inputs)}"
            )
            raise ValueError(message)
        for index, (static, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if (static.shape, static.dtype, static.device) != (
                given.shape,
                given.dtype,
                given.device,
            ):
                message = (
                    f"replay: input {index} is {list(given.shape)}, {given.dtype}, on "
                    f"{given.device}; "
                    f"captured was {list(static.shape)}, {static.dtype}, on {static.device}; "
                    f"capture a step for each shape"
                )
                raise ValueError(message)
        for static, given in zip(self.inputs, inputs, strict=True):
            if static is not given:
                static.copy_(given, non_blocking=True)

    def close(self) -> None:
        """Give the graph and its memory back once its replays are over. Local, idempotent."""
        if self._graph is None:
            return
        # The copy chain is ordered behind every replay, so that its wait is theirs, with a limit.
        if self._engine is None:
            torch.cuda.synchronize(self._comm.device)
        elif not self._engine.closed and not self._engine.wait_idle(self._comm.timeout_s):
            message = (
                f"close: replays did not finish within {self._comm.timeout_s:g} s; "
                f"close the communicator"
            )
            raise UlyssesError(message)
        self._graph.reset()
        self._graph = None
        self.outputs = None
        self.inputs = ()
        if self._engine is not None:
            self._finalizer()


def _unpin(engine: CopyEngineGroup, capture: int) -> None:
    engine.forget_capture(capture)


def capture_step(
    comm: UlyssesCommunicator,
    step: Callable[..., Any],
    inputs: Sequence[Tensor] = (),
    *,
    warmup: int = 3,
) -> CapturedStep:
    """Capture one call of ``step`` on every rank.

    Args:
        comm: An open communicator on a CUDA device, of transport ``ce`` or ``nccl``.
        step: ``step(*inputs)``; must not synchronise with the host, and must complete what it
        sends.
        inputs: Example values; copies of them become the static inputs.
        warmup: Eager calls before the capture, at least 1: they reserve windows and load kernels.

    Raises:
        ValueError: ``warmup`` below 1.
        UlyssesError: the step cannot be captured on some rank; the same text on every rank, nothing
            is left captured, and the communicator can be used on.

    Collective: every rank calls it with its own inputs and the same step.
    """
    if warmup < 1:
        message = f"capture_step: warmup={warmup} must be at least 1, so that windows are reserved"
        raise ValueError(message)
    if comm.device.type != "cuda" or comm.transport == "gloo":
        message = (
            f"capture_step: device {comm.device} with transport '{comm.transport}' cannot be "
            f"captured; use a CUDA device and transport 'ce' or 'nccl'"
        )
        raise UlyssesError(message)
    with torch.cuda.device(comm.device):
        return _capture_step(comm, step, inputs, warmup)


def _capture_step(
    comm: UlyssesCommunicator, step: Callable[..., Any], inputs: Sequence[Tensor], warmup: int
) -> CapturedStep:
    if torch.cuda.is_current_stream_capturing():
        message = "capture_step: this stream is being captured already; end that capture first"
        raise UlyssesError(message)
    static = tuple(value.detach().clone() for value in inputs)
    _, failures = comm.agreement.attempt("warm-up", lambda: _warm_up(comm, step, static, warmup))
    _raise_failures("warm-up", failures)
    captured, failures = comm.agreement.attempt("capture", lambda: _capture(comm, step, static))
    if failures and captured is not None:
        captured.discard(comm.copy_engine)
    _raise_failures("capture", failures)
    assert captured is not None
    return CapturedStep(comm, captured.graph, static, captured.outputs, captured.number)


def _raise_failures(topic: str, failures: list[str]) -> None:
    if failures:
        message = f"capture_step: {topic} failed on {'; '.join(failures)}"
        raise UlyssesError(message)


@dataclass
class _Captured:
    """What one rank has captured, until all ranks have."""

    graph: torch.cuda.CUDAGraph
    outputs: Any
    number: int  # id of the capture; 0 where no copy engine takes part

    def discard(self, engine: CopyEngineGroup | None) -> None:
        self.outputs = None
        self.graph.reset()
        if engine is not None:
            engine.forget_capture(self.number)


def _warm_up(
    comm: UlyssesCommunicator, step: Callable[..., Any], static: tuple[Tensor, ...], count: int
) -> None:
    stream = torch.cuda.Stream(comm.device)
    stream.wait_stream(torch.cuda.current_stream(comm.device))
    with torch.cuda.stream(stream):
        for _ in range(count):
            step(*static)
            _refuse_pending(comm)
        done = stream.record_event()
    torch.cuda.current_stream(comm.device).wait_stream(stream)
    deadline = time.monotonic() + comm.timeout_s
    while not done.query():
        if time.monotonic() > deadline:
            message = f"the step did not finish within {comm.timeout_s:g} s; is every rank in it?"
            raise UlyssesError(message)
        time.sleep(POLL_S)


def _capture(
    comm: UlyssesCommunicator, step: Callable[..., Any], static: tuple[Tensor, ...]
) -> _Captured:
    engine = comm.copy_engine
    captured = _Captured(torch.cuda.CUDAGraph(), None, 0)
    cause: Exception | None = None
    try:
        # Other threads (the watchdog of NCCL, say) may go on using CUDA meanwhile.
        with torch.cuda.graph(captured.graph, capture_error_mode="thread_local"):
            try:
                captured.number = 0 if engine is None else engine.own_capture()
                captured.outputs = step(*static)
                _refuse_pending(comm)
            except Exception as error:
                cause = error
                raise
    except Exception as error:  # noqa: BLE001  whatever it was, the ranks must hear of it
        if engine is not None:
            engine.abandon_captures()
            engine.forget_capture(captured.number)
        # Ending a broken capture raises as well; what broke it says more.
        raise cause or error from None
    return captured


def _refuse_pending(comm: UlyssesCommunicator) -> None:
    pending = pending_channels(comm)
    if pending:
        message = (
            f"the step left channel '{pending}' without complete; complete every exchange in it"
        )
        raise UlyssesError(message)
