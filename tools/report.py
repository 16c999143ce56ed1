"""What a run has found so far: handed in after every section, so that a cut run loses only one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.kept_rows import UNKNOWN, difference, finished_of
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.results import Machine, Row, read_results, rows_from_json, rows_to_json
from ulysses_ops.tools.revision import DIRTY

NOTHING_INSISTED = "transport any, mapping any, signal any"
NO_TIME = "the time limit left none for it"


@dataclass(frozen=True)
class Outcome:
    """What a rank hands back.

    Attributes:
        machine: Where it ran.
        rows: What was measured; the same on every rank.
        transport: Transport, mapping and signal in use, and why.
        finished: Sections that are complete.
        not_run: Why something has no rows, by its name.
        insisted: What the communicator was told to use, by finished section.
    """

    machine: Machine
    rows: list[Row]
    transport: str
    finished: tuple[str, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
    insisted: dict[str, str] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """Entries of a results file, after its header."""
        return {
            "transport": self.transport,
            "finished": list(self.finished),
            "not_run": self.not_run,
            "insisted": self.insisted,
            "rows": rows_to_json(self.rows),
        }


@dataclass(frozen=True)
class ResumeFrom:
    """An earlier run to go on with.

    Attributes:
        folder: Of results.
        name: Of the file, without suffix.
        commit: What is run now.
    """

    folder: Path
    name: str
    commit: str | None


class Report:
    """Collects sections. Every rank keeps one, and adds the same to it."""

    def __init__(self, context: RankContext, machine: Machine) -> None:
        """Begin with nothing found."""
        self._context = context
        self._machine = machine
        self._rows: list[Row] = []
        self._finished: list[str] = []
        self._not_run: dict[str, str] = {}
        self._insisted: dict[str, str] = {}
        self._insists = NOTHING_INSISTED
        self.transport = ""

    @property
    def outcome(self) -> Outcome:
        """All that was found so far."""
        transport = self.transport or (self._rows[0].transport if self._rows else "")
        return Outcome(
            self._machine,
            list(self._rows),
            transport,
            tuple(self._finished),
            dict(self._not_run),
            dict(self._insisted),
        )

    def begin(self, job: Any) -> None:
        """Note what the job insists on; sections that are added from here on carry it."""
        names = ("transport", "mapping", "signal")
        self._insists = insistence(**{name: getattr(job, name, None) for name in names})

    def has(self, section: str) -> bool:
        """Whether a section was finished, in this run or in the one that it resumes."""
        return section in self._finished

    def add(
        self, section: str, rows: Sequence[Row], not_run: Mapping[str, str] | None = None
    ) -> None:
        """Finish a section, and hand in everything so far."""
        self._rows += rows
        self._finished.append(section)
        self._insisted[section] = self._insists
        self._not_run |= not_run or {}
        self._context.deliver(self.outcome)

    def amend(self, change: Callable[[Row], Row]) -> None:
        """Add to rows what was found after them, and hand in everything so far."""
        self._rows = [change(row) for row in self._rows]
        self._context.deliver(self.outcome)

    def leave_out(self, section: str, reason: str) -> None:
        """Note why a section, or a part of it, has no rows."""
        self._not_run[section] = reason
        self._context.deliver(self.outcome)

    def resume(self, source: ResumeFrom) -> None:
        """Take over what an earlier run has finished. Collective.

        Raises:
            ValueError: it ran elsewhere, with other versions, or insisted on something else.
        """
        path = source.folder / self._machine.folder / f"{source.name}.json"
        earlier = self._context.gather(_read(path))[0]  # one rank's view of the file, on all
        if earlier is not None:
            found = earlier_outcome(
                earlier, self._machine, source.commit, str(path), insists=self._insists
            )
            self._rows = list(found.rows)
            self._finished = list(found.finished)
            self._insisted = dict(found.insisted)
            self.transport = found.transport


def insistence(
    *, transport: str | None = None, mapping: str | None = None, signal: str | None = None
) -> str:
    """What a run insists on, as a results file keeps it; ``any`` is left to the communicator."""
    return f"transport {transport or 'any'}, mapping {mapping or 'any'}, signal {signal or 'any'}"


def describe_transport(comm: UlyssesCommunicator) -> str:
    """Transport, mapping, signal, and why."""
    text = f"{comm.transport}, mapping {comm.mapping}, signal {comm.signal}"
    return f"{text} ({'; '.join(comm.reasons)})"


def _read(path: Path) -> dict[str, Any] | None:
    return read_results(path, needs_rows=True) if path.exists() else None


def earlier_outcome(
    content: Mapping[str, Any],
    machine: Machine,
    commit: str | None,
    what: str,
    *,
    insists: str = NOTHING_INSISTED,
) -> Outcome:
    """What an earlier run of this commit, now cut off, had finished; reasons are found anew.

    What other commits have measured stays in the file, and is not taken for this one's. Of files
    that differ from their commit nobody can tell whether they are the same: nothing is taken over.

    Args:
        content: Of the file.
        machine: Where it goes on.
        commit: What goes on.
        what: The file, for the message.
        insists: What this run insists on.

    Raises:
        ValueError: its rows may not stand beside those of this machine, or of this transport.
    """
    other = difference(content, machine)
    if other:
        message = f"resume: {what} is of another run: {other}; start anew"
        raise ValueError(message)
    if commit is None or commit.endswith(DIRTY):
        return Outcome(machine, [], "")
    header = content.get("commit")
    rows = [row for row in content["rows"] if (row.get("commit") or header) == commit]
    finished = [key for key, of in finished_of(content, header).items() if of == commit]
    told = content.get("insisted", {})
    insisted = {key: str(told.get(key, UNKNOWN)) for key in finished}
    for key, said in insisted.items():
        if said != insists:
            message = (
                f"resume: {what}: {key} was measured with {said}, this run asks for {insists}; "
                f"ask for the same, or start anew"
            )
            raise ValueError(message)
    transport = str(content.get("transport", "")) if finished else ""
    return Outcome(machine, rows_from_json(rows), transport, tuple(finished), insisted=insisted)
