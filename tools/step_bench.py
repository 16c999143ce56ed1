"""One model, its weights shared by every variant: each is built, captured and checked here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.diffusers_attention import Forward
from ulysses_ops.diffusers_models import ParallelModel, parallelize
from ulysses_ops.errors import UlyssesError
from ulysses_ops.graphs import capture_step
from ulysses_ops.graphs.signature import same_bits, tensors_of
from ulysses_ops.tools.attempts import attempt, attempt_all
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.cuda_driver import nodes_if_captured
from ulysses_ops.tools.denoising_step import DenoisingStep, StepArgs
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.peak_memory import peak_bytes, reset_peak
from ulysses_ops.tools.results import Mode
from ulysses_ops.tools.step_variants import NCCL, StepVariant
from ulysses_ops.windows import WindowCache


class SharedModel:
    """One set of weights, parallel in one way at a time."""

    def __init__(self, model: Any) -> None:
        """Take a model that is not parallel."""
        self.model = model
        self._forward: Forward | None = None
        self._parallel: ParallelModel | None = None

    def use(self, forward: Forward) -> None:
        """Make the model parallel in this way from now on. Collective."""
        if forward is self._forward:
            return
        self.close()
        self._parallel = parallelize(self.model, forward.comm, forward=forward)
        self._forward = forward

    def close(self) -> None:
        """Give the model back as it was."""
        if self._parallel is not None:
            self._parallel.close()
        self._parallel = self._forward = None


@dataclass
class BuiltStep:
    """A variant in one mode, ready to be run.

    Attributes:
        variant: Which.
        mode: Eager or graph.
        run: Enqueues it on the arguments that all variants share, and returns the latents.
        prepare: What has to be done before a series of runs. Collective.
        renew: Enqueues it with all arguments passed anew, as a loop does.
        peak_bytes: GPU memory beside arguments and weights; ``None`` on the CPU.
        graph_bytes: What the capture took from the device; ``None`` without one.
        nodes: Nodes of its graph, by kind; nothing where the driver does not tell.
        exact: Whether its output is, bit for bit, that of NCCL called eagerly.
    """

    variant: StepVariant
    mode: Mode
    run: Callable[[], Tensor]
    prepare: Callable[[], object] | None = None
    renew: Callable[[], Tensor] | None = None
    peak_bytes: int | None = None
    graph_bytes: int | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)
    exact: bool | None = None

    @property
    def key(self) -> str:
        """``name/mode``."""
        return f"{self.variant.name}/{self.mode}"


@dataclass
class StepBench:
    """The variants of one step. Built, checked and closed by all ranks together.

    Attributes:
        context: This rank.
        shared: The model.
        step: What is run.
        args: Its arguments, which all variants read.
        closing: Closes what variants open.
        built: Those that work, by key.
        not_run: Why others do not, by name or key.
    """

    context: RankContext
    shared: SharedModel
    step: DenoisingStep
    args: StepArgs
    closing: ExitStack
    built: dict[str, BuiltStep] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def add(self, variant: StepVariant, comms: Mapping[str, UlyssesCommunicator]) -> None:
        """Build a variant, eager and, on GPUs, captured; failures are noted. Collective."""
        made = attempt(self.context, lambda: variant.forward(comms, self.context))
        if made.reason or made.value is None:
            self.not_run[variant.name] = made.reason
            return
        forward = made.value
        self._keep(f"{variant.name}/eager", lambda: self._run_eagerly(variant, forward))
        if self.context.device.type == "cuda" and f"{variant.name}/eager" in self.built:
            self._keep(f"{variant.name}/graph", lambda: self._capture(variant, forward))

    def _keep(self, key: str, make: Callable[[], BuiltStep]) -> None:
        made = attempt(self.context, make)
        if made.reason or made.value is None:
            self.not_run[key] = made.reason
        else:
            self.built[key] = made.value

    def _run_eagerly(self, variant: StepVariant, forward: Forward) -> BuiltStep:
        device = self.context.device
        self.shared.use(forward)
        run = partial(self.step, *self.args)
        before = reset_peak(device)
        run()
        self.context.finish(f"{variant.name}, first run")
        peak = peak_bytes(device, before, _window_bytes(variant, forward.comm))
        return BuiltStep(variant, "eager", run, partial(self.shared.use, forward), peak_bytes=peak)

    def _capture(self, variant: StepVariant, forward: Forward) -> BuiltStep:
        device, what = self.context.device, f"step, {variant.name}"
        self.shared.use(forward)
        before = reset_peak(device)
        renew: Callable[[], Tensor] | None = None
        graph_bytes: int | None = None
        nodes: dict[str, int] = {}

        def step(*args: Any) -> Tensor:
            output = self.step(*args)
            nodes.update(nodes_if_captured())
            return output

        if variant.is_ours:
            graph = capture_step(forward.comm, step, self.args, warmup=1)
            self.closing.callback(graph.close)
            run, renew, graph_bytes = (
                graph.replay,
                partial(_replay, graph, self.args),
                graph.num_bytes,
            )
        else:
            plain = PlainGraph(self.context, partial(step, *self.args), what, warm_up=1)
            self.closing.callback(plain.close)
            run = plain.run
        peak = peak_bytes(device, before, _window_bytes(variant, forward.comm))
        run()
        self.context.finish(f"{what}, first replay")
        return BuiltStep(variant, "graph", run, None, renew, peak, graph_bytes, nodes)

    def check(self, fresh: StepArgs) -> None:
        """Compare every output, for arguments that no graph was captured with. Collective.

        Raises:
            UlyssesError: NCCL, with which all are compared, does not run, its output is not finite,
                or computation without any exchange gives the same.
        """
        if f"{NCCL}/eager" not in self.built:
            message = f"step: NCCL, with which all are compared, does not run: {self.not_run}"
            raise UlyssesError(message)
        for mine, new in zip(tensors_of(self.args), tensors_of(fresh), strict=True):
            mine.copy_(new)
        reference = self._output_of(self.built[f"{NCCL}/eager"])
        if not self.context.agree(bool(reference.isfinite().all())):
            message = "step: the output of the model is not finite; choose other weights or inputs"
            raise UlyssesError(message)
        for built in self.built.values():
            is_same = self.context.agree(same_bits(self._output_of(built), reference))
            if not built.variant.is_blind:
                built.exact = is_same
            elif is_same:
                message = f"step: BLIND: {built.key}, which exchanges nothing, gives the same"
                raise UlyssesError(message)

    def _output_of(self, built: BuiltStep) -> Tensor:
        what = f"check of {built.key}"
        if built.prepare is not None:
            built.prepare()
        self.context.line_up(what)
        output = (built.renew or built.run)().clone()
        self.context.finish(what)
        return output

    def host_us(self, run: Callable[[], Any], count: int, until: float) -> list[list[float]]:
        """Microseconds the host takes to enqueue a run on an idle GPU, by rank. Collective."""
        samples: list[float] = []
        for number in range(count):
            self.context.line_up("host time")
            start = time.perf_counter()
            run()
            samples.append((time.perf_counter() - start) * 1e6)
            if number and not self.context.agree(time.monotonic() < until):
                break
        self.context.line_up("host time")
        by_rank: list[list[float]] = self.context.gather(samples)
        return by_rank


def share_model(context: RankContext, make: Callable[[], nn.Module]) -> SharedModel:
    """Build a model on every rank. Collective.

    Raises:
        UlyssesError: some rank cannot, or the ranks have other weights.
    """
    model = attempt_all(context, make, "model")
    some = list(model.parameters())[::7]
    prints = context.gather([float(parameter.double().sum()) for parameter in some])
    if any(one != prints[0] for one in prints):
        message = "step: the ranks have other weights; seed them alike"
        raise UlyssesError(message)
    return SharedModel(model)


def _replay(graph: Any, args: StepArgs) -> Tensor:
    output: Tensor = graph.replay(*args)
    return output


def _window_bytes(variant: StepVariant, comm: UlyssesCommunicator) -> int:
    """Bytes of windows that the caching allocator does not know."""
    if not variant.is_ours or comm.transport != "ce":
        return 0
    return window_bytes(comm)


def window_bytes(comm: UlyssesCommunicator) -> int:
    """Bytes of all windows of a communicator."""
    return sum(window.tensor.nbytes for window in WindowCache.of(comm).all())
