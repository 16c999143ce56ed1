"""How many ranks share a sequence, a matrix, and a batch: chosen from lengths, heads and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .kinds import check_at_least_1, check_kind, whole_numbers
from .workload import ModelShape, Workload

ACTIVATIONS = 12  # tensors of a row's width that a layer has in memory at once, about


@dataclass(frozen=True)
class Parallelism:
    """One way to use the GPUs.

    Attributes:
        sp: Ranks that a sequence is sharded between.
        tp: Ranks that every matrix is sharded between.
        dp: Groups of ``sp * tp`` ranks with requests of their own.
        step_us: Predicted time of a step.
        memory_bytes: Predicted memory of a GPU: weights, activations, windows, cache.
    """

    sp: int
    tp: int
    dp: int
    step_us: float
    memory_bytes: int

    def describe(self) -> str:
        """One line."""
        return (
            f"sp={self.sp} tp={self.tp} dp={self.dp}: {self.step_us / 1e3:.2f} ms, "
            f"{self.memory_bytes / 2**30:.1f} GiB"
        )


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        best: The choice.
        others: What also fits, the fastest first.
        refused: What does not, with the reason.
    """

    best: Parallelism
    others: tuple[Parallelism, ...]
    refused: tuple[tuple[tuple[int, int, int], str], ...]

    def explain(self) -> str:
        """Every candidate, one a line."""
        lines = [f"-> {self.best.describe()}"]
        lines += [f"   {other.describe()}" for other in self.others]
        lines += [f"   sp={sp} tp={tp} dp={dp}: no, {why}" for (sp, tp, dp), why in self.refused]
        return "\n".join(lines)


def choose_parallelism(
    lengths: Sequence[int],
    num_gpus: int,
    workload: Workload,
    *,
    memory_bytes: int,
    cached: bool = False,
    connected: int | None = None,
) -> Choice:
    """Try every ``sp * tp * dp = num_gpus`` and take the fastest that fits.

    Pure: ranks that give the same numbers come to the same choice. Of equal predictions the one
    with less tensor parallelism, then less sequence parallelism wins.

    Args:
        lengths: Rows of the requests of a step.
        num_gpus: GPUs.
        workload: Model and constants.
        memory_bytes: Memory of a GPU that may be used.
        cached: Whether keys and values of all layers stay.
        connected: Largest group of GPUs of which each reaches each; all of them when left out.

    Raises:
        ValueError: something is of a wrong kind or below 1, or nothing fits; the text says why,
            for each candidate.
    """
    op = "choose_parallelism"
    lengths = whole_numbers(op, "lengths", lengths, "rows, a whole number for each request")
    check_at_least_1(op, num_gpus=num_gpus, memory_bytes=memory_bytes)
    check_kind(op, "workload", workload, Workload, "a Workload")
    check_kind(op, "cached", cached, bool, "True or False")
    if connected is None:
        connected = num_gpus
    check_at_least_1(op, connected=connected)
    if not lengths or min(lengths) < 1:
        message = f"{op}: lengths={list(lengths)} must be at least one number, and each >= 1"
        raise ValueError(message)
    fits: list[Parallelism] = []
    refused = []
    for tp in range(1, num_gpus + 1):
        for sp in range(1, num_gpus // tp + 1):
            if num_gpus % (sp * tp):
                continue
            shape = (sp, tp, num_gpus // (sp * tp))
            found = _predict(lengths, shape, workload, cached=cached)
            why = _obstacle(found, workload.model, connected, memory_bytes)
            if why:
                refused.append((shape, why))
            else:
                fits.append(found)
    if not fits:
        reasons = "; ".join(f"sp={s} tp={t} dp={d}: {why}" for (s, t, d), why in refused)
        message = f"choose_parallelism: nothing fits on {num_gpus} GPUs: {reasons}"
        raise ValueError(message)
    best, *others = sorted(fits, key=lambda found: found.step_us)
    return Choice(best, tuple(others), tuple(refused))


def _obstacle(p: Parallelism, model: ModelShape, connected: int, memory_bytes: int) -> str:
    if p.sp * p.tp > connected:
        return f"{p.sp * p.tp} GPUs that all reach each other are needed, {connected} do"
    if model.heads % p.tp:
        return f"{model.heads} heads cannot be divided by tp={p.tp}"
    if model.kv_heads % p.tp and p.tp % model.kv_heads:
        return f"{model.kv_heads} KV heads cannot be divided by tp={p.tp}, nor repeated"
    if model.heads // p.tp < p.sp:
        return f"{model.heads // p.tp} heads are too few for sp={p.sp}"
    if p.memory_bytes > memory_bytes:
        return f"{p.memory_bytes / 2**30:.1f} GiB do not fit into {memory_bytes / 2**30:.1f}"
    return ""


def _predict(
    lengths: Sequence[int], shape: tuple[int, int, int], workload: Workload, *, cached: bool
) -> Parallelism:
    sp, tp, dp = shape
    groups: list[list[int]] = [[] for _ in range(dp)]
    loads = [0.0] * dp
    for length in sorted(lengths, reverse=True):
        group = loads.index(min(loads))
        groups[group].append(length)
        loads[group] += workload.request_us(length)
    step_us = max(workload.step_us(group, sp, tp) for group in groups)
    m = workload.model
    rows = math.ceil(max(sum(group) for group in groups) / sp)
    weights = m.layers * m.layer_parameters // tp
    row_width = m.width + (m.heads + m.kv_heads) * m.head_dim // tp
    elems = weights + ACTIVATIONS * rows * row_width
    if cached:
        kv_heads = math.ceil(m.kv_heads / (sp * tp))  # of a rank, for all rows of its group
        elems += m.layers * rows * sp * 2 * kv_heads * m.head_dim
    return Parallelism(sp, tp, dp, step_us, elems * m.itemsize)
