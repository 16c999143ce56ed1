"""From a topology to a verdict on the machine, and to what can be done about each "no"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ulysses_ops.eligibility import Decision, Request, decide
from ulysses_ops.facts import Topology
from ulysses_ops.suggestions import suggest
from ulysses_ops.tools.pair_check import PairFailure
from ulysses_ops.tools.topology_advice import advise

Word = Literal["eligible", "not eligible", "unknown"]
MAX_IN_LINE = 12  # directed pairs that are named in the verdict's line; reasons name all
EXIT_CODES: dict[Word, int] = {"eligible": 0, "not eligible": 1, "unknown": 2}


@dataclass(frozen=True)
class Verdict:
    """What is said of a machine.

    Attributes:
        word: Whether a group of ``world_size`` may use the copy engines.
        line: The same in one line.
        world_size: Number of ranks that were judged.
        reasons: Cause by cause.
        warnings: What to know besides.
        suggestions: Which GPUs could form groups.
        advice: What to do.
    """

    word: Word
    line: str
    world_size: int
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 eligible, 1 not, 2 could not tell."""
        return EXIT_CODES[self.word]


def judge(
    topology: Topology, world_size: int | None = None, failures: Sequence[PairFailure] = ()
) -> Verdict:
    """Judge the first ``world_size`` CUDA devices, or all, as a group with a rank on each.

    Where there are more devices than ranks, it is also told how all of them could be grouped.

    Args:
        topology: What a process knows that was asked for all its devices.
        world_size: Ranks of a group; None for one on each device.
        failures: What the data check found.
    """
    ranks = topology.as_ranks()
    count = len(ranks) if world_size is None else world_size
    if not ranks or count > len(ranks):
        return _too_few(topology, count)
    if count == 1:
        word: Word = "not eligible" if world_size is None else "eligible"
        return _verdict(topology, word, 1, "one GPU: there is no peer, the operators copy locally")
    group = ranks[:count]
    decision = decide(group, Request(backends=("nccl",), suggest=False))
    failed = [f for f in failures if f.source < count and f.target < count]
    sizes = (count,) if count < len(ranks) else None
    warnings = decision.warnings
    if sizes:
        warnings += (
            f"judged are the first {count} of {len(ranks)} GPUs, as a launcher takes them",
        )
    if failed:  # a certain no, whatever else is known
        others = () if decision.transport == "ce" else decision.reasons
        decision = Decision("nccl", (*map(str, failed), *others))
    is_eligible = decision.transport == "ce"
    suggestions: tuple[str, ...] = ()
    if sizes or not is_eligible:
        suggestions = suggest(ranks, sizes=sizes, apart=[(f.source, f.target) for f in failures])
    if is_eligible:
        (line, *more) = decision.reasons
        return _verdict(
            topology,
            "eligible",
            count,
            line,
            reasons=tuple(more),
            warnings=warnings,
            suggestions=suggestions,
        )
    causes = condensed(decision.reasons, most=MAX_IN_LINE)
    return _verdict(
        topology,
        "not eligible" if decision.certain else "unknown",
        count,
        causes[0] + (f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""),
        reasons=decision.reasons,
        warnings=warnings,
        suggestions=suggestions,
    )


def doubted(verdict: Verdict, topology: Topology, doubts: Sequence[str]) -> Verdict:
    """Return the verdict less sure: a yes does not stand where measuring it failed."""
    if not doubts or verdict.word != "eligible":
        return verdict
    return _verdict(
        topology,
        "unknown",
        verdict.world_size,
        doubts[0],
        reasons=(*doubts[1:], *verdict.reasons),
        warnings=verdict.warnings,
        suggestions=verdict.suggestions,
    )


def condensed(reasons: Sequence[str], most: int | None = None) -> list[str]:
    """Say once what holds for several pairs: ``X: 2 of the directed pairs, 0->2 1->2``.

    More pairs than ``most`` are counted and not named.
    """
    pairs: dict[str, list[str]] = {}
    for reason in reasons:
        match = re.fullmatch(r"rank (\d+) -> rank (\d+) \[.*?\]: (.*)", reason)
        what = re.sub(r" \(seen by ranks?[^)]*\)", "", match[3]) if match else reason
        pairs.setdefault(what, []).append(f"{match[1]}->{match[2]}" if match else "")
    said = []
    for what, ways in pairs.items():
        named = f", {' '.join(ways)}" if most is None or len(ways) <= most else ""
        said.append(f"{what}: {len(ways)} of the directed pairs{named}" if ways[0] else what)
    return said


def _too_few(topology: Topology, count: int) -> Verdict:
    ranks = topology.as_ranks()
    if not ranks and any(gpu.cuda_ordinal is not None for gpu in topology.gpus):
        line = "this topology tells of one rank alone; save it with ulysses-topology --json"
        return _verdict(topology, "unknown", count, line)
    if ranks:
        line = f"{count} ranks were asked for, and CUDA shows this process {len(ranks)} GPUs"
        return _verdict(topology, "not eligible", count, line)
    causes = [topology.nvml.reason] if topology.nvml.answer != "yes" else []
    if topology.identity.reason not in ("", *causes):
        causes.append(topology.identity.reason)
    sure = topology.nvml.answer != "unknown" and "cannot be asked" not in topology.identity.reason
    word: Word = "not eligible" if sure and not topology.notes else "unknown"
    said = [*causes, *topology.notes, "nothing is known of the GPUs of this process"]
    line = "CUDA shows this process no GPU" if word == "not eligible" else said[0]
    return _verdict(topology, word, count, line, reasons=tuple(causes))


def _verdict(
    topology: Topology,
    word: Word,
    count: int,
    line: str,
    *,
    reasons: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    suggestions: tuple[str, ...] = (),
) -> Verdict:
    said = [*reasons, *warnings, line, *topology.notes]
    notes = tuple(note for note in topology.notes if note not in warnings)
    advice = advise(topology, count, said, eligible=word == "eligible")
    return Verdict(word, line, count, reasons, warnings + notes, suggestions, tuple(advice))
