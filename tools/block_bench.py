"""Everything that one shape of the block needs, built once: variants, graphs, and their checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.errors import UlyssesError
from ulysses_ops.graphs import CapturedStep, capture_step
from ulysses_ops.tools.attempts import attempt
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.block_setting import Outputs, Setting
from ulysses_ops.tools.block_variants import NAIVE, BlockVariant
from ulysses_ops.tools.noise import random_values
from ulysses_ops.tools.peak_memory import allocated_bytes, peak_bytes, reset_peak
from ulysses_ops.tools.results import Mode

HOST_CALLS = 7
HOST_SECONDS = 0.3  # on the calls of one variant
MAX_ERROR = 2.0**-6  # some more roundings to 8 bits on the way; a part that is missing is 0.1


@dataclass
class Built:
    """A variant in one mode, ready to be run.

    Attributes:
        variant: Which.
        mode: Eager or graph.
        run: Enqueues it, on the input that all variants share, and returns the output.
        calls: How often, one behind the other.
        peak_bytes: GPU memory beside input and weights; ``None`` on the CPU.
        exact: Whether its output is, bit for bit, that of the naive variant.
        error: Norm of the difference over that of the naive output, where bits may differ.
    """

    variant: BlockVariant
    mode: Mode
    run: Callable[[], Outputs]
    calls: int = 1
    peak_bytes: int | None = None
    exact: bool | None = None
    error: float | None = None

    @property
    def key(self) -> str:
        """``name/mode``."""
        return f"{self.variant.name}/{self.mode}"


@dataclass
class BlockBench:
    """The variants of a block at one shape. Built, checked and closed by all ranks together.

    Attributes:
        setting: What variants are built from.
        x: The input of all variants, ``(B, S_local, H * D)``.
        repeats: How often a graph does what it was captured of, one behind the other.
        built: Those that work, by key.
        not_run: Why others do not, by key.
    """

    setting: Setting
    x: Tensor
    repeats: int = 1
    built: dict[str, Built] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, setting: Setting, repeats: int = 1) -> BlockBench:
        """A bench with an input and no variant yet."""
        context, shape = setting.context, setting.block.shape
        local = shape.local_source(context.world_size)
        x = random_values((*local[:2], local[2] * local[3]), context, context.rank, 600)
        setting.block.compute_only(x)  # loads the kernels before the first signal is waited for
        return cls(setting, x, repeats)

    def add(self, variant: BlockVariant) -> None:
        """Build a variant, eager and, on GPUs, captured; failures are noted. Collective."""
        context = self.setting.context
        before = allocated_bytes(context.device)
        made = attempt(context, lambda: variant.build(self.setting))
        if made.reason or made.value is None:
            self.not_run[variant.name] = made.reason
            return
        run = partial(made.value, self.x)
        buffers = allocated_bytes(context.device) - before
        if variant.is_ours and self.setting.comm.transport == "ce":
            buffers += 4 * self.x.nbytes  # windows, which the caching allocator does not know
        self._keep(f"{variant.name}/eager", lambda: self._run_eagerly(variant, run, buffers))
        if context.device.type == "cuda" and f"{variant.name}/eager" in self.built:
            self._keep(f"{variant.name}/graph", lambda: self._capture(variant, run, buffers))

    def _keep(self, key: str, make: Callable[[], Built]) -> None:
        """Keep what all ranks could make, unless it is known not to run."""
        if key in self.not_run:
            return
        made = attempt(self.setting.context, make)
        if made.reason or made.value is None:
            self.not_run[key] = made.reason
        else:
            self.built[key] = made.value

    def _run_eagerly(
        self, variant: BlockVariant, run: Callable[[], Outputs], buffers: int
    ) -> Built:
        context = self.setting.context
        before = reset_peak(context.device)
        run()
        context.finish(f"{variant.name}, first run")
        peak = peak_bytes(context.device, before, buffers)
        return Built(variant, "eager", run, peak_bytes=peak)

    def _capture(self, variant: BlockVariant, run: Callable[[], Outputs], buffers: int) -> Built:
        context = self.setting.context
        what = f"block, {variant.name}"
        before = reset_peak(context.device)
        graph: CapturedStep | PlainGraph

        def repeated() -> Outputs:
            for _ in range(self.repeats - 1):
                run()
            return run()

        if variant.is_ours:
            graph = capture_step(self.setting.comm, repeated, warmup=1)
            replay: Callable[[], Any] = graph.replay
        else:
            graph = PlainGraph(context, repeated, what)
            replay = graph.run
        self.setting.closing.callback(graph.close)
        peak = peak_bytes(context.device, before, buffers)
        replay()
        context.finish(f"{what}, first replay")
        return Built(variant, "graph", replay, self.repeats, peak)

    def check(self) -> None:
        """Compare every output, for an input that no graph was captured with. Collective.

        Raises:
            UlyssesError: the naive variant, with which all are compared, does not run.
        """
        context = self.setting.context
        if f"{NAIVE}/eager" not in self.built:
            message = f"block: the {NAIVE} variant does not run: {self.not_run}"
            raise UlyssesError(message)
        self.x.copy_(random_values(tuple(self.x.shape), context, context.rank, 601))
        reference = self._outputs_of(self.built[f"{NAIVE}/eager"])
        for built in self.built.values():
            if built.variant.is_blind:
                continue
            pairs = list(zip(self._outputs_of(built), reference, strict=True))
            if built.variant.compares_bits:
                built.exact = context.agree(all(torch.equal(*pair) for pair in pairs))
            else:
                error = max(_relative_error(*pair) for pair in pairs)
                built.error = max(context.gather(error))
        off = {key: built.error for key, built in self.built.items() if _is_off(built.error)}
        for key, by in off.items():
            self.not_run[key] = f"its output is off by {by:.1e} of the naive variant's norm"
            del self.built[key]

    def _outputs_of(self, built: Built) -> list[Tensor]:
        context = self.setting.context
        context.line_up(f"check of {built.key}")
        output = built.run()
        kept = [part.clone() for part in ((output,) if isinstance(output, Tensor) else output)]
        context.finish(f"check of {built.key}")
        return kept

    def host_us(self, built: Built) -> float:
        """Median time that the slowest rank's host takes to enqueue a call. Collective."""
        context = self.setting.context
        samples: list[float] = []
        until = time.monotonic() + HOST_SECONDS
        for number in range(HOST_CALLS):
            context.line_up(f"host time of {built.key}")
            start = time.perf_counter()
            built.run()
            samples.append((time.perf_counter() - start) * 1e6 / built.calls)
            if number and not context.agree(time.monotonic() < until):
                break
        median = sorted(samples)[len(samples) // 2]
        slowest: float = max(context.gather(median))
        return slowest


def open_bench(
    setting: Setting,
    variants: Sequence[BlockVariant],
    not_run: Mapping[str, str],
    repeats: int = 1,
) -> BlockBench:
    """Build and check the variants, less those with a reason already. Collective."""
    bench = BlockBench.empty(setting, repeats)
    bench.not_run.update(not_run)
    for variant in variants:
        if variant.name not in not_run:
            setting.context.progress(f"{setting.block.shape.title}, block: {variant.name}")
            bench.add(variant)
    bench.check()
    return bench


def _relative_error(output: Tensor, reference: Tensor) -> float:
    difference = torch.linalg.vector_norm(output - reference, dtype=torch.float32)
    return float(difference / torch.linalg.vector_norm(reference, dtype=torch.float32))


def _is_off(error: float | None) -> bool:
    return error is not None and not error <= MAX_ERROR
