"""One step captured as a CUDA graph on every rank, exchanges included, and replayed.

The ranks warm up together, line up, capture, and vote: a graph that some rank could not capture is
dropped on all. Replays are serialised with each other and with eager exchanges by the copy chain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.copy_engine import CopyEngineGroup
from ulysses_ops.errors import UlyssesError
from ulysses_ops.graphs.capturing import Captured, capture, compare_exchanges, warm_up
from ulysses_ops.graphs.line_up import compare_inputs
from ulysses_ops.graphs.signature import GENERATORS, Flat, flatten, same_bits, tensors_of
from ulysses_ops.kinds import check_callable, check_kind, each_of
from ulysses_ops.names import check_communicator

RESOURCE = "captured steps"


class _Steps:
    """The captured steps of a communicator that are still in use."""

    def __init__(self) -> None:
        self.live: weakref.WeakSet[CapturedStep] = weakref.WeakSet()
        self._last: torch.cuda.Stream | None = None

    def follow_last(self) -> None:
        """Order the current stream behind the latest replay and what read it, of any step.

        For transports without a copy chain that does so.
        """
        if self._last is not None:
            torch.cuda.current_stream().wait_stream(self._last)
        self._last = torch.cuda.current_stream()

    def close(self) -> None:
        for step in list(self.live):
            step.close()


class CapturedStep:
    """A captured step; :func:`capture_step` makes it.

    Attributes:
        inputs: Static inputs that the graph reads, nested as they were given; write into their
            tensors, or pass new ones to :meth:`replay`.
        outputs: What the step returned at capture; each replay overwrites its tensors.
        num_bytes: Memory that the capture added, static inputs included, in bytes.
    """

    def __init__(
        self, comm: UlyssesCommunicator, step: Callable[..., Any], static: Flat, captured: Captured
    ) -> None:
        """Take over a finished capture."""
        self._comm = comm  # its windows are what the graph writes into
        self._step: Callable[..., Any] | None = step  # holds the weights that the graph reads
        self._graph: torch.cuda.CUDAGraph | None = captured.graph
        self._engine = comm.copy_engine
        self._signature = static.signature
        self._static = static.tensors
        self.inputs = static.with_tensors(self._static)
        self.outputs = captured.outputs
        self.num_bytes = captured.num_bytes + sum(tensor.nbytes for tensor in self._static)
        self._siblings = comm.attach(RESOURCE, _Steps)
        self._siblings.live.add(self)
        if self._engine is not None:
            self._finalizer = weakref.finalize(self, _unpin, self._engine, captured.number)

    def replay(self, *inputs: Any) -> Any:
        """Run the step again on the current stream.

        Args:
            inputs: New values, nested as at the capture; their tensors are copied into the static
                inputs. None to keep what is there.

        Returns:
            ``outputs``, valid until the next replay.

        Raises:
            ValueError: structure, shapes, dtypes, device or constants are not those of the capture.
            UlyssesError: the step or its communicator is closed, or an exchange is in flight.

        Collective: every rank replays the same steps in the same order. Never waits on the host.
        """
        given = self._checked(inputs) if inputs else []
        return self.replay_tensors(given)

    def replay_tensors(self, given: Sequence[Tensor]) -> Any:
        """:meth:`replay` for tensors that are known to fit, in the order of the leaves."""
        graph = self._graph
        if graph is None:
            message = "replay: the step is closed; capture it again"
            raise UlyssesError(message)
        turn = self._comm.turn
        turn.take("replay")
        try:
            with torch.cuda.device(self._comm.device):
                self._issue(graph, given)
        finally:
            turn.give()
        return self.outputs

    def _issue(self, graph: torch.cuda.CUDAGraph, given: Sequence[Tensor]) -> None:
        try:
            self._begin()
        except RuntimeError:
            self._comm.check_open("replay")
            raise
        for static, value in zip(self._static, given, strict=bool(given)):
            if static is not value:
                static.copy_(value, non_blocking=True)
        graph.replay()
        if self._engine is not None:
            self._engine.after_replay()

    def _begin(self) -> None:
        """Order this stream behind earlier replays: they read the static inputs too."""
        if self._engine is None:
            self._comm.check_open("replay")
            self._siblings.follow_last()
            return
        pending = self._engine.pending()
        if pending:
            message = f"replay: channel '{pending}' has an exchange in flight; complete it first"
            raise UlyssesError(message)
        self._engine.before_replay()

    def _checked(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        flat = flatten("replay", inputs, self._comm.device)
        difference = flat.signature.difference(self._signature)
        if difference:
            message = f"replay: {difference} at the capture; capture a step for each signature"
            raise ValueError(message)
        return flat.tensors

    def verify(self, *inputs: Any) -> None:
        """Raise unless a replay with these inputs gives the bits of an eager call.

        Finds what a capture cannot see: work on a stream that was not forked inside the step, host
        values that were baked in, state that the step keeps. Use other values than at the capture.

        Raises:
            UlyssesError: an output differs on some rank; the same text on every rank.

        Collective. Waits on the host. A step that draws random numbers does not pass.
        """
        _, failures = self._comm.agreement.attempt("verify", lambda: self._compare(inputs))
        if failures:
            message = f"verify: the graph is not the step on {'; '.join(failures)}"
            raise UlyssesError(message)

    def _compare(self, inputs: tuple[Any, ...]) -> None:
        tensors = self._checked(inputs)
        if self._step is None:
            message = "the step is closed"
            raise UlyssesError(message)
        replayed = [value.clone() for value in tensors_of(self.replay_tensors(tensors))]
        with torch.no_grad():
            eager = tensors_of(self._step(*inputs))
        for index, (one, other) in enumerate(zip(replayed, eager, strict=True)):
            if not same_bits(one, other):
                message = (
                    f"output {index} of {len(eager)}, {list(one.shape)}: replay and eager call "
                    f"differ; look for work on streams that are not forked inside the step, values "
                    f"from the host, and state"
                )
                raise UlyssesError(message)

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
        self._step = None
        self._static = []
        self.outputs = None
        self.inputs = ()
        if self._engine is not None:
            self._finalizer()


def _unpin(engine: CopyEngineGroup, capture: int) -> None:
    engine.forget_capture(capture)


def capture_step(
    comm: UlyssesCommunicator,
    step: Callable[..., Any],
    inputs: Sequence[Any] = (),
    *,
    warmup: int = 3,
    generators: Sequence[torch.Generator] = (),
    pool: Any = None,
) -> CapturedStep:
    """Capture one call of ``step`` on every rank, with no gradients.

    Args:
        comm: An open communicator on a CUDA device, of transport ``ce`` or ``nccl``.
        step: ``step(*inputs)``; must not synchronise with the host, must join the streams that it
            forks, and must complete what it sends. May be compiled. It is kept, and with it the
            weights that the graph reads.
        inputs: Example values: tensors on ``comm.device``, constants, and nested dicts, lists and
            tuples of both. Copies of the tensors become the static inputs, constants are baked in.
        warmup: Eager calls before the capture, at least 1: they reserve windows, compile, and load
            kernels. A step that changes state of its own changes it this often.
        generators: CUDA generators that the step draws from, besides the default one.
        pool: As ``torch.cuda.graph`` takes it: graphs that share one keep their intermediates in
            the same memory.

    Raises:
        ValueError: ``warmup`` below 1, a tensor on another device, or an argument of another kind.
        TypeError: an input that is neither a tensor nor a constant.
        UlyssesError: the ranks were given inputs of different kinds, or issue different exchanges;
            or the step cannot be captured on some rank; the same text on every rank, nothing
            is left captured, and the communicator can be used on.

    Collective: every rank calls it with its own inputs and the same step.
    """
    check_communicator("capture_step", comm)
    check_callable("capture_step", "step", step, "a function of the inputs")
    check_kind("capture_step", "warmup", warmup, int, "a whole number, at least 1")
    if warmup < 1:
        message = f"capture_step: warmup={warmup} must be at least 1, so that windows are reserved"
        raise ValueError(message)
    known = each_of("capture_step", "generators", generators, *GENERATORS)
    if not can_capture(comm):
        message = (
            f"capture_step: device {comm.device} with transport '{comm.transport}' cannot be "
            f"captured; use a CUDA device and transport 'ce' or 'nccl'"
        )
        raise UlyssesError(message)
    with torch.cuda.device(comm.device), torch.no_grad():
        if torch.cuda.is_current_stream_capturing():
            message = "capture_step: this stream is being captured already; end that capture first"
            raise UlyssesError(message)
        given = flatten("capture_step", tuple(inputs), comm.device)
        static = flatten(
            "capture_step",
            given.with_tensors([value.detach().clone() for value in given.tensors]),
            comm.device,
        )
        compare_inputs(comm, static.signature, warmup)
        call = partial(step, *static.with_tensors(static.tensors))
        _, failures = comm.agreement.attempt("warm-up", lambda: warm_up(comm, call, warmup))
        _raise_failures("warm-up", failures)
        captured, failures = comm.agreement.attempt(
            "capture", lambda: capture(comm, call, known, pool)
        )
    if captured is not None and not failures:
        failures = compare_exchanges(comm, captured.number)
    if failures and captured is not None:
        captured.discard(comm.copy_engine)
    _raise_failures("capture", failures)
    assert captured is not None
    return CapturedStep(comm, step, static, captured)


def can_capture(comm: UlyssesCommunicator) -> bool:
    """Whether steps of this communicator can become graphs."""
    return comm.device.type == "cuda" and comm.transport != "gloo"


def _raise_failures(topic: str, failures: list[str]) -> None:
    if failures:
        message = f"capture_step: {topic} failed on {'; '.join(failures)}"
        raise UlyssesError(message)
