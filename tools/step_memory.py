"""What the graphs of several shapes of one model take, with one memory pool and with many."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from ulysses_ops.diffusers_attention import Forward
from ulysses_ops.graphs import GraphCache, capture_step
from ulysses_ops.graphs.signature import same_bits
from ulysses_ops.graphs.step import can_capture
from ulysses_ops.tools.block_rows import give_memory_back
from ulysses_ops.tools.block_variants import OURS
from ulysses_ops.tools.denoising_step import StepArgs
from ulysses_ops.tools.report import NO_TIME
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.step_bench import window_bytes
from ulysses_ops.tools.step_rows import StepSite, described_case

OP = "graphs"
WINDOWS_PER_SHAPE = 5  # V, K, Q, attention's output, and the rows of the model's


def memory_rows(site: StepSite, until: float, not_run: dict[str, str]) -> list[Row]:
    """Hold a graph of every shape at once, replay the first and the last, and add up. Collective.

    ``exact``: after all captures, a replay of the first graph and one of the last give the bits of
    an eager call, for arguments that they were not captured with.
    """
    context, case = site.context, site.case
    comm = site.comms[OURS]
    step = site.step()
    site.shared.use(Forward(comm))
    give_memory_back(context.device)
    free_before, reserved_before = _free(context.device), _reserved(context.device)
    windows_before = window_bytes(comm)
    cache = GraphCache(comm, step, max_graphs=len(case.resolutions), warmup=1)
    sizes: list[int] = []
    held: list[StepArgs] = []
    for number, resolution in enumerate(case.resolutions):
        if number and context.gather(time.monotonic() >= until)[0]:
            break
        title = case.shape(resolution).title
        context.progress(f"{title}: graph {number + 1} of {len(case.resolutions)}")
        before = cache.stats.num_bytes
        args = site.arguments(resolution)
        cache(*args)
        context.finish(f"graph of {title}")
        sizes.append(cache.stats.num_bytes - before)
        held.append(args)
    exact = True
    for index in sorted({0, len(held) - 1}):
        fresh = site.arguments(case.resolutions[index], seed=7)
        exact &= context.agree(same_bits(cache(*fresh), step(*fresh)))
        context.finish("check of a held graph")
    give_memory_back(context.device)
    stats = cache.stats
    details = {
        "variant": "one pool",
        "sequences": [case.shape(resolution).seq for resolution in case.resolutions[: len(held)]],
        "graphs": stats.graphs,
        "bytes_of_each": sizes,
        "total_bytes": stats.num_bytes,
        "window_bytes": window_bytes(comm) - windows_before,
        "device_bytes": free_before - _free(context.device),
        "reserved_bytes": _reserved(context.device) - reserved_before,
        **described_case(case),
    }
    cache.clear()
    give_memory_back(context.device)
    rows = [_row(site, details, exact)]
    if can_capture(comm):
        rows += _pools_of_their_own(site, held, until, not_run)
    return rows


def _pools_of_their_own(
    site: StepSite, held: list[StepArgs], until: float, not_run: dict[str, str]
) -> list[Row]:
    """The same graphs without a pool in common. Collective."""
    context, case, comm, step = site.context, site.case, site.comms[OURS], site.step()
    sizes: list[int] = []
    with ExitStack() as closing:
        for args in held:
            if context.gather(time.monotonic() >= until)[0]:
                not_run[f"{OP}/{case.model.key}: pools of their own"] = NO_TIME
                return []
            graph = capture_step(comm, step, args, warmup=1)
            closing.callback(graph.close)
            sizes.append(max(context.gather(graph.num_bytes)))
    give_memory_back(context.device)
    details = {
        "variant": "a pool each",
        "sequences": [case.shape(resolution).seq for resolution in case.resolutions[: len(held)]],
        "graphs": len(held),
        "bytes_of_each": sizes,
        "total_bytes": sum(sizes),
        **described_case(case),
    }
    return [_row(site, details, None)]


def _row(site: StepSite, details: dict[str, object], exact: bool | None) -> Row:
    comm = site.comms[OURS]
    shape = site.case.shape(site.case.resolutions[0])
    return Row(
        OP,
        shape.dims,
        site.dtype_name,
        site.context.world_size,
        comm.transport,
        "graph" if can_capture(comm) else "eager",
        None,
        None,
        exact,
        0,
        model=site.case.model.title,
        details=details,
    )


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
