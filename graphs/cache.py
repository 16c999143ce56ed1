"""A step that is a graph for every signature that comes often enough, and eager otherwise."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ulysses_ops.agreement import find_disagreement
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import UlyssesError
from ulysses_ops.graphs.buckets import Bucket
from ulysses_ops.graphs.ledger import Ledger
from ulysses_ops.graphs.signature import GENERATORS, Signature, clone_tensors, flatten
from ulysses_ops.graphs.step import CapturedStep, can_capture, capture_step
from ulysses_ops.kinds import check_at_least_1, check_callable, check_kind, each_of
from ulysses_ops.names import check_communicator

MAX_COUNTED = 1024  # signatures whose uses are counted before they are captured


@dataclass
class GraphStats:
    """What a cache did so far; the same on every rank but for bytes.

    Attributes:
        hits: Calls that replayed a graph.
        captures: Graphs captured.
        eager: Calls that ran eagerly: seen too seldom, too long, too large, or not on a GPU.
        evictions: Graphs dropped to make room.
        graphs: Graphs held now.
        num_bytes: Memory that captures of the graphs held now added, in bytes; the largest of the
            ranks for each.
    """

    hits: int = 0
    captures: int = 0
    eager: int = 0
    evictions: int = 0
    graphs: int = 0
    num_bytes: int = 0


class GraphCache:
    """Calls a step through graphs, one for each signature of its inputs.

    ::

        step = GraphCache(comm, denoise)
        for t in timesteps:
            latents = step(latents, t, prompt=prompt)   # the first call captures, the rest replay

    The signature is the nesting of the inputs, shape and dtype of every tensor, and the value of
    every constant: a number that changes with each call belongs into a tensor. Graphs of a cache
    share one memory pool. Each graph pins the windows that it uses, so give the communicator a
    ``max_windows`` of all shapes together. On a CPU, and with transport gloo, every call is eager.

    Not differentiable: the step runs with no gradients. Weights may change in place, not be
    replaced.
    """

    def __init__(
        self,
        comm: UlyssesCommunicator,
        step: Callable[..., Any],
        *,
        max_graphs: int = 8,
        max_bytes: int | None = None,
        capture_after: int = 1,
        buckets: Sequence[Bucket] = (),
        copy_out: bool = True,
        warmup: int = 2,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        """Start empty.

        Args:
            comm: An open communicator; the step uses no other.
            step: As for :func:`capture_step`.
            max_graphs: Graphs to hold, at least 1; the least recently used one goes first.
            max_bytes: Bound on the sum of what their captures added, in bytes. A graph that is
                larger on its own is dropped, and its signature runs eagerly from then on.
            capture_after: Capture a signature at its n-th call; the calls before run eagerly. For
                lengths that seldom come again.
            buckets: Pads inputs whose length changes with every call.
            copy_out: Return copies. Without it, outputs are overwritten by the next replay of the
                same graph.
            warmup: Eager calls before each capture, at least 1.
            generators: CUDA generators that the step draws from, besides the default one.

        Raises:
            ValueError: a bound below 1, or a value of another kind.
        """
        check_communicator("GraphCache", comm)
        check_callable("GraphCache", "step", step, "a function of the inputs")
        bounds = {"max_graphs": max_graphs, "capture_after": capture_after, "warmup": warmup}
        check_at_least_1("GraphCache", **bounds)
        if max_bytes is not None:
            check_at_least_1("GraphCache", max_bytes=max_bytes)
        check_kind("GraphCache", "copy_out", copy_out, bool, "True or False")
        self._buckets = each_of("GraphCache", "buckets", buckets, Bucket, "a list of Buckets")
        self._generators = each_of("GraphCache", "generators", generators, *GENERATORS)
        self._comm = comm
        self._step = step
        self._capture_after = capture_after
        self._copy_out = copy_out
        self._warmup = warmup
        self._graphs: Ledger[Signature, CapturedStep] = Ledger(max_graphs, max_bytes)
        self._uses: OrderedDict[Signature, int] = OrderedDict()
        self._too_large: set[Signature] = set()
        self._pool: Any = None
        self._stats = GraphStats()

    @property
    def stats(self) -> GraphStats:
        """What the cache did so far."""
        self._stats.graphs = len(self._graphs)
        self._stats.num_bytes = self._graphs.num_bytes
        return self._stats

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: replay its graph, capture it, or call it.

        Raises:
            ValueError: a tensor on another device, or inputs that a bucket cannot pad.
            TypeError: an input that is neither a tensor nor a constant.
            UlyssesError: the step cannot be captured, or the ranks are at different calls; the same
                text on every rank.

        Collective: every rank makes the same calls in the same order.
        """
        padded = self._pad(args, kwargs)
        if padded is None or not can_capture(self._comm):
            return self._call_eagerly(args, kwargs)
        flat = flatten("GraphCache", padded, self._comm.device)
        graph = self._graphs.use(flat.signature)
        if graph is None:
            if not self._is_due(flat.signature):
                return self._call_eagerly(*padded)
            graph = self._capture(flat.signature, padded)
            if graph is None:
                return self._call_eagerly(*padded)
        else:
            self._stats.hits += 1
        outputs = graph.replay_tensors(flat.tensors)
        return clone_tensors(outputs) if self._copy_out else outputs

    def _pad(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        for bucket in self._buckets:
            padded = bucket.padded(args, kwargs)
            if padded is None:
                return None
            args, kwargs = padded
        return args, kwargs

    def _call_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stats.eager += 1
        with torch.no_grad():
            return self._step(*args, **kwargs)

    def _is_due(self, signature: Signature) -> bool:
        if signature in self._too_large:
            return False
        uses = self._uses.pop(signature, 0) + 1
        if uses >= self._capture_after:
            return True
        self._uses[signature] = uses
        if len(self._uses) > MAX_COUNTED:
            self._uses.popitem(last=False)
        return False

    def _capture(
        self, signature: Signature, call: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> CapturedStep | None:
        """The graph of this call; ``None`` when it is too large to be kept. Collective."""
        self._meet()
        self._drop(self._graphs.make_room())
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = capture_step(
            self._comm,
            partial(_call, self._step),  # not a method: a cycle would be freed at any time
            call,
            warmup=self._warmup,
            generators=self._generators,
            pool=self._pool,
        )
        self._stats.captures += 1
        sizes = self._comm.agreement.exchange("size of a graph", {"bytes": graph.num_bytes})
        num_bytes = max(record["bytes"] for record in sizes)
        if not self._graphs.fits(num_bytes):
            self._too_large.add(signature)
            self._drop([graph])
            return None
        self._drop(self._graphs.make_room(num_bytes))
        self._graphs.add(signature, graph, num_bytes)
        return graph

    def _meet(self) -> None:
        """All ranks capture now, and hold the same graphs in the same order."""
        records = self._comm.agreement.exchange(
            "GraphCache", {"graphs": self._graphs.numbers(), "captures": self._stats.captures}
        )
        differing = find_disagreement(records)
        if differing is not None:
            message = (
                f"GraphCache: the ranks hold different graphs: {differing.describe()}; every rank "
                f"must make the same calls in the same order"
            )
            raise UlyssesError(message)

    def _drop(self, graphs: list[CapturedStep]) -> None:
        """Give graphs back once their replays are over, on every rank. Collective."""
        if not graphs:
            return

        def close_all() -> None:
            for graph in graphs:
                graph.close()

        self._stats.evictions += len(graphs)
        _, failures = self._comm.agreement.attempt("eviction of graphs", close_all)
        if failures:
            message = f"GraphCache: eviction failed on {'; '.join(failures)}"
            raise UlyssesError(message)

    def clear(self) -> None:
        """Give all graphs back, after replacing weights, say. Local; on every rank alike."""
        for graph in self._graphs.clear():
            graph.close()
        self._uses.clear()
        self._too_large.clear()


def _call(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return step(*args, **kwargs)
