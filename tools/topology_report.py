"""What is found out about a machine, as it is saved and read again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ulysses_ops.facts import Topology
from ulysses_ops.tools.pair_bandwidth import PairRate, Unmeasured
from ulysses_ops.tools.pair_check import PairFailure
from ulysses_ops.tools.topology_verdict import Verdict, doubted, judge


@dataclass
class Findings:
    """What is known so far.

    Attributes:
        topology: What the probe told.
        probe_ms: What the first probe took, CUDA and NVML started by it.
        warm_probe_ms: What a second one took, with both up.
        checked: Whether data was sent over the pairs and compared.
        failures: Where it did not arrive.
        rates: What was measured.
        unmeasured: Pairs without a rate, where rates were asked for.
        broken: Why measuring ended early; "" if it did not.
    """

    topology: Topology
    probe_ms: float | None = None
    warm_probe_ms: float | None = None
    checked: bool = False
    failures: list[PairFailure] = field(default_factory=list)
    rates: list[PairRate] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)
    broken: str = ""

    def judged(self, world_size: int | None) -> Verdict:
        """The verdict by all of this, for a group of ``world_size``."""
        verdict = judge(self.topology, world_size, self.failures)
        count = verdict.world_size
        doubts = [f"measuring failed: {self.broken}"] if self.broken else []
        doubts += [str(u) for u in self.unmeasured if u.source < count and u.target < count]
        return doubted(verdict, self.topology, doubts)


def report(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    """Everything, for ``--json`` and for results; ``--from`` reads it."""
    return {
        "verdict": asdict(verdict),
        "probe_ms": findings.probe_ms,
        "warm_probe_ms": findings.warm_probe_ms,
        "data_check": [asdict(f) for f in findings.failures] if findings.checked else None,
        "bandwidth": [asdict(rate) for rate in findings.rates] or None,
        "unmeasured": [asdict(one) for one in findings.unmeasured],
        "measuring_failed": findings.broken,
        "topology": json.loads(findings.topology.to_json()),
    }


def load(path: Path) -> Findings:
    """Read a topology, or a report with one and with what was measured then.

    Raises:
        OSError: the file cannot be read.
        ValueError, TypeError: it holds no topology or report of this version.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or "topology" not in content:
        return Findings(Topology.from_json(json.dumps(content)))
    failures = content.get("data_check")
    return Findings(
        Topology.from_json(json.dumps(content["topology"])),
        content.get("probe_ms"),
        content.get("warm_probe_ms"),
        checked=failures is not None,
        failures=[PairFailure(**failure) for failure in failures or []],
        rates=[PairRate(**rate) for rate in content.get("bandwidth") or []],
        unmeasured=[Unmeasured(**one) for one in content.get("unmeasured") or []],
        broken=str(content.get("measuring_failed") or ""),
    )
