"""The handshake as an explicit-state model: scenarios, safe and wrong.

`host_calls` turns what hosts do into streams of steps, `stream_steps` says what a step does, and
`state_space` tries all interleavings. `schedules` and `broken_schedules` hold the scenarios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from host_calls import Host, Protocol
from state_space import Assembly, Model

BUILT = Protocol()
Script = Callable[[Host], None]


@dataclass(frozen=True)
class Scenario:
    """Every rank runs `prologue` once, then `script` for ever (or once)."""

    name: str
    world_size: int
    script: Script
    protocol: Protocol = BUILT
    prologue: Script | None = None
    forever: bool = True
    leftover: tuple[str, ...] = ()
    """Words that hold 1 at the start."""

    def model(self) -> Model:
        """The scenario as cells and streams."""
        assembly = Assembly(self.forever)
        generations: list[int] = []
        for word in self.leftover:
            assembly.cell(word, 1)
        for rank in range(self.world_size):
            host = Host(rank, self.world_size, self.protocol, assembly, generations)
            if self.prologue is not None:
                self.prologue(host)
                host.end_of_loop()
            assembly.loop(f"rank {rank} ")
            self.script(host)
            host.end_of_loop()
        return assembly.model()


@dataclass(frozen=True)
class Wrong:
    """A scenario with one thing taken away, the failure that it must show, and why in one line."""

    scenario: Scenario
    kind: str
    why: str
