"""From the command line to launches of ranks: which jobs, on which ranks, into which file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from ulysses_ops.tools.benchmark_job import HANDSHAKE, SECTIONS, BenchmarkJob
from ulysses_ops.tools.block_job import SECTION as BLOCK
from ulysses_ops.tools.block_job import VARIANTS_OF, BlockJob
from ulysses_ops.tools.block_variants import select_variants
from ulysses_ops.tools.choosing import choose_names
from ulysses_ops.tools.launch import Launch
from ulysses_ops.tools.overhead_job import FILES as OVERHEADS
from ulysses_ops.tools.overhead_job import LAUNCH, OverheadJob
from ulysses_ops.tools.parity import ParityJob
from ulysses_ops.tools.power import POWER
from ulysses_ops.tools.projection_variants import QKV
from ulysses_ops.tools.replays import ReplayJob
from ulysses_ops.tools.report import ResumeFrom
from ulysses_ops.tools.results import Mode
from ulysses_ops.tools.shapes import (
    BLOCKS,
    FUNCTIONAL,
    FUNCTIONAL_BLOCKS,
    FUNCTIONAL_GATHERED,
    GATHERED,
    PRODUCTION,
    SMALL_STEP,
    select_shapes,
)
from ulysses_ops.tools.step_cases import DEFAULT_MODELS, TINY_CASES, select_cases
from ulysses_ops.tools.step_job import SECTION as STEP
from ulysses_ops.tools.step_job import WEIGHTS as PARTS
from ulysses_ops.tools.step_job import StepJob
from ulysses_ops.tools.step_rows import STEPS
from ulysses_ops.tools.step_variants import STEP_VARIANTS, select_step_variants
from ulysses_ops.tools.timing import Effort

PRODUCTION_REPLAYS = 200
CPU_REPLAYS = 20
STEP_FILE = "attention_step"
UNEVEN = "uneven"
ALL_GATHER = "all_gather"
OF_OPERATORS = tuple(name for name in SECTIONS if name not in (UNEVEN, ALL_GATHER))  # share a file
BLOCKS_AND_PARTS = (BLOCK, QKV, POWER)
KNOWN = (*SECTIONS, *BLOCKS_AND_PARTS, STEP, *OVERHEADS)
# Run when they are named, not as part of "all".
NAMED = (UNEVEN, ALL_GATHER, QKV, POWER, STEP, *OVERHEADS)
EVERYTHING = tuple(name for name in KNOWN if name not in NAMED)
CPU_STEPS = 3
LAUNCHES = "launches"  # a part of the step


@dataclass(frozen=True)
class Choice:
    """What the command line says about every job.

    Attributes:
        shapes: Names, separated by commas, or ``"all"``.
        only: Names of sections, separated by commas, or ``"all"``.
        variants: Of the block or the step: names, separated by commas, or ``"all"``.
        models: Of the step: names, separated by commas.
        layers: Of the step's models, of the first kind; all of them when ``None``.
        parts: Of the step: names, separated by commas, or ``"all"``.
        size: Of the step that is timed, ``"<width>x<height>[x<frames>]"``; the model's when empty.
        trial: Whether variants of the block are tried in processes of their own first.
        modes: In which block and qkv are timed: names, separated by commas, or ``"all"``.
        transport: Transport to insist on.
        mapping: Mapping to insist on.
        signal: Signal to insist on.
        resume: Folder of results to go on with.
        commit: What is run.
    """

    shapes: str = "all"
    only: str = "all"
    variants: str = "all"
    models: str = DEFAULT_MODELS
    layers: int | None = None
    parts: str = "all"
    size: str = ""
    trial: bool = True
    modes: str = "all"
    transport: str | None = None
    mapping: str | None = None
    signal: str | None = None
    resume: Path | None = None
    commit: str | None = None

    @property
    def sections(self) -> tuple[str, ...]:
        """Sections, in the order in which they are measured.

        Raises:
            ValueError: a name is unknown.
        """
        return choose_names("only", self.only, KNOWN, EVERYTHING)

    @property
    def block_modes(self) -> tuple[Mode, ...]:
        """Modes in which block and qkv are timed.

        Raises:
            ValueError: a name is unknown.
        """
        modes: tuple[Any, ...] = choose_names("modes", self.modes, get_args(Mode))
        return modes

    @property
    def step_parts(self) -> tuple[str, ...]:
        """Parts of the step, in the order in which they are measured.

        Raises:
            ValueError: a name is unknown, or launches are wanted without the rows that tell them.
        """
        wanted = choose_names("parts", self.parts, list(PARTS))
        if LAUNCHES in wanted and STEP not in wanted:
            message = f"parts: '{LAUNCHES}' are told by the rows of '{STEP}'; name it as well"
            raise ValueError(message)
        return wanted

    def check(self) -> None:
        """Refuse unknown names, also of what is not measured: a mistyped one would pass in silence.

        Raises:
            ValueError: a name is unknown.
        """
        select_shapes(self.shapes)
        variants = [variant.name for group in VARIANTS_OF.values() for variant in group]
        variants += [variant.name for variant in STEP_VARIANTS if variant.name not in variants]
        choose_names("variants", self.variants, list(dict.fromkeys(variants)))
        choose_names("parts", self.parts, list(PARTS))
        select_cases(self.models)
        choose_names("modes", self.modes, get_args(Mode))
        choose_names("only", self.only, KNOWN)

    def resume_from(self, name: str) -> ResumeFrom | None:
        """The earlier run of this file."""
        return None if self.resume is None else ResumeFrom(self.resume, name, self.commit)


@dataclass(frozen=True)
class Plan:
    """One launch.

    Attributes:
        launch: Ranks to start.
        jobs: What each of them does.
        name: Name of the results file.
        is_functional: Its times mean nothing.
    """

    launch: Launch
    jobs: list[Any]
    name: str
    is_functional: bool = False


def launch_on_gpus(
    world_size: int, num_devices: int, oversubscribe: bool, limit_s: float
) -> Launch:
    """Ranks on GPUs.

    Raises:
        ValueError: there are more ranks than GPUs, and they may not share.
    """
    if world_size > num_devices and not oversubscribe:
        message = (
            f"world_size={world_size} needs as many GPUs, {num_devices} are visible; "
            f"add --oversubscribe to check only"
        )
        raise ValueError(message)
    return Launch(world_size, "cuda", num_devices, limit_s)


def plan_benchmark(launch: Launch, choice: Choice, effort: Effort) -> list[Plan]:
    """One launch for operators and attention steps, one for each other section or whole model.

    Raises:
        ValueError: a name is unknown, or one rank is to do what takes several.
    """
    if launch.world_size == 1 and choice.sections != (LAUNCH,):
        message = f"world_size=1 is enough for --only {LAUNCH} alone; give 2 or more"
        raise ValueError(message)
    insisted = (choice.transport, choice.mapping, choice.signal)
    plans = []
    files = (
        (STEP_FILE, OF_OPERATORS, PRODUCTION),
        (UNEVEN, (UNEVEN,), PRODUCTION),
        (ALL_GATHER, (ALL_GATHER,), GATHERED),
    )
    for file, names, among in files:
        sections = tuple(name for name in choice.sections if name in names)
        shapes = select_shapes(choice.shapes, among)
        if sections and (shapes or HANDSHAKE in sections):
            earlier = choice.resume_from(file)
            job = BenchmarkJob(shapes, effort, sections, *insisted, earlier)
            plans.append(Plan(launch, [job], file))
    stages = [op for op in BLOCKS_AND_PARTS if op in choice.sections]
    plans += [Plan(launch, [_block_job(choice, effort, op)], op) for op in stages]
    if STEP in choice.sections:
        plans += [Plan(launch, [job], _step_file(job)) for job in _step_jobs(choice, effort)]
    for name, file in OVERHEADS.items():
        if name in choice.sections:
            plans.append(Plan(launch, [_overhead_job(choice, effort, name)], file))
    choice.check()
    if not plans:
        message = (
            f"shapes: '{choice.shapes}' has none of what {list(choice.sections)} measures; leave "
            f"--shapes out for all of them"
        )
        raise ValueError(message)
    return plans


def _overhead_job(choice: Choice, effort: Effort, section: str) -> OverheadJob:
    return OverheadJob(
        section,
        replace(effort, batch_ms=effort.batch_ms / 2),  # a form has four variants in each mode
        choice.transport,
        choice.mapping,
        choice.resume_from(OVERHEADS[section]),
    )


def _step_jobs(choice: Choice, effort: Effort) -> list[StepJob]:
    select_step_variants(choice.variants)  # refused here rather than by the ranks
    jobs = [
        StepJob(
            case,
            effort,
            choice.variants,
            STEPS,
            transport=choice.transport,
            mapping=choice.mapping,
            signal=choice.signal,
            parts=choice.step_parts,
        )
        for case in select_cases(choice.models, choice.layers, choice.size)
    ]
    return [replace(job, resume=choice.resume_from(_step_file(job))) for job in jobs]


def _step_file(job: StepJob) -> str:
    return f"{STEP}_{job.case.model.key}"


def _block_job(choice: Choice, effort: Effort, op: str) -> BlockJob:
    select_variants(choice.variants, VARIANTS_OF[op])  # refused here rather than by the ranks
    # Half the batch: there are twice as many variants as elsewhere, and long steps beside them.
    return BlockJob(
        select_shapes(choice.shapes, BLOCKS),
        replace(effort, batch_ms=effort.batch_ms / 2),
        choice.variants,
        transport=choice.transport,
        mapping=choice.mapping,
        signal=choice.signal,
        resume=choice.resume_from(op),
        op=op,
        trial=choice.trial,
        modes=("graph",) if op == POWER else choice.block_modes,
    )


def _check_fresh(choice: Choice) -> None:
    """Replays and runs on the CPU are done whole: none of their sections is looked up."""
    if choice.resume is not None:
        message = "resume: only timed runs on GPUs go on where they were cut; leave --resume out"
        raise ValueError(message)


def plan_replays(launch: Launch, replays: int, choice: Choice) -> Plan:
    """Many replays instead of times; ranks that share GPUs do small checks before.

    Raises:
        ValueError: a name is unknown, or an earlier run is to be gone on with.
    """
    _check_fresh(choice)
    transport = choice.transport
    if launch.shares_devices:
        transport = transport or "ce"  # what ranks that share GPUs are there to check
    replays = replays or PRODUCTION_REPLAYS
    shapes = (SMALL_STEP, *select_shapes(choice.shapes))
    fitting = [shape for shape in shapes if shape.fits(launch.world_size)]
    counts = tuple(
        (shape, replays if shape is SMALL_STEP else min(replays, PRODUCTION_REPLAYS))
        for shape in fitting
    )
    jobs: list[Any] = [ReplayJob(counts, transport, choice.mapping, choice.signal)]
    name = "replays"
    if launch.shares_devices:
        parity = ParityJob(FUNCTIONAL, ("bfloat16", "uint8"), Effort(1, 1.0), transport)
        jobs.insert(0, parity)
        name = f"replays_w{launch.world_size}_oversubscribed"
    choice.check()
    return Plan(launch, jobs, name)


def plan_functional(world_size: int, replays: int, limit_s: float, choice: Choice) -> Plan:
    """The same code on CPU ranks, with small shapes.

    Raises:
        ValueError: no small shape can be split over so many ranks, a name is unknown, or an
            earlier run is to be gone on with.
    """
    _check_fresh(choice)
    launch = Launch(world_size, "cpu", 0, limit_s)
    fitting = tuple(shape for shape in FUNCTIONAL if shape.fits(world_size))
    if not fitting:
        message = f"world_size={world_size} splits none of the small shapes; use 2 ranks"
        raise ValueError(message)
    effort = Effort(3, 2.0, until=None)
    sections = tuple(name for name in choice.sections if name in SECTIONS)
    jobs: list[Any] = []
    if choice.only == "all":
        jobs.append(ParityJob(FUNCTIONAL, ("float32", "uint8"), effort, choice.transport))
    # GEMMs to hide behind take a CPU long: one shape of them will do.
    own = {"load", ALL_GATHER}
    for shapes, names in (
        (fitting, set(sections) - own),
        (fitting[:1], {"load"}),
        (FUNCTIONAL_GATHERED, {ALL_GATHER}),
    ):
        wanted = tuple(name for name in sections if name in names)
        if wanted:
            jobs.append(BenchmarkJob(shapes, effort, wanted, choice.transport))
    blocks = tuple(shape for shape in FUNCTIONAL_BLOCKS if shape.fits(world_size))
    modes = choice.block_modes
    for op in BLOCKS_AND_PARTS:
        if op in choice.sections:
            select_variants(choice.variants, VARIANTS_OF[op])  # refused here, not by the ranks
            jobs.append(
                BlockJob(
                    blocks,
                    effort,
                    choice.variants,
                    transport=choice.transport,
                    op=op,
                    modes=modes,
                )
            )
    if STEP in choice.sections:
        select_step_variants(choice.variants)
        jobs += [
            StepJob(case, effort, choice.variants, CPU_STEPS, parts=choice.step_parts)
            for case in TINY_CASES
        ]
    jobs += [_overhead_job(choice, effort, n) for n in OVERHEADS if n in choice.sections]
    if choice.only == "all":
        counts = tuple((shape, replays or CPU_REPLAYS) for shape in fitting)
        jobs.append(ReplayJob(counts, choice.transport, skew_us=200.0))
    choice.check()
    return Plan(launch, jobs, "functional", is_functional=True)
