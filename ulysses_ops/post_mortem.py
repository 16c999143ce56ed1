"""What is said, and written down, when a communicator gave up on its peers."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import NamedTemporaryFile

from .copy_engine import CopyEngineGroup
from .errors import PeerTimeoutError


class PostMortem:
    """Raises what the copy engine's watchdog found, and dumps the latest exchanges once."""

    def __init__(self, name: str, rank: int, world_size: int, dump_dir: Path | None) -> None:
        """Nothing has happened yet.

        Args:
            name: Name of the communicator.
            rank: This rank.
            world_size: Number of ranks.
            dump_dir: Folder for the dump; none is written when left out.
        """
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._dump_dir = dump_dir
        self._is_dumped = False

    def raise_failure(self, op: str, engine: CopyEngineGroup, *, look: bool = False) -> None:
        """Raise if the group gave up.

        Raises:
            PeerTimeoutError: it did.
        """
        why = engine.failure(look=look)
        if not why:
            return
        where = ""
        if self._dump_dir is not None:
            where = f" (its latest exchanges are in {self._dump(self._dump_dir, why, engine)})"
        raise PeerTimeoutError(self.sentence(op, f"{why}{where}"))

    def sentence(self, op: str, why: str) -> str:
        """What a call says when the communicator gave up."""
        return (
            f"{op}: rank {self._rank} of '{self._name}' gave up: {why}; close the communicator and "
            f"construct another on every rank"
        )

    def _dump(self, folder: Path, why: str, engine: CopyEngineGroup) -> Path:
        """Write what this rank issued last, for its owner alone; the ranks' files tell who left.

        Once; what an earlier run left under that name is replaced.
        """
        path = folder / f"{self._name.replace('/', '_')}-rank{self._rank}.json"
        if not self._is_dumped:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = engine.exchange_log()
            content = {
                "name": self._name,
                "rank": self._rank,
                "world_size": self._world_size,
                "gave_up": why,
                "exchanges": [{"issued_s": issued, "what": what} for issued, what in log],
            }
            # Of a random name and readable by its owner: nobody can have put a link there.
            with NamedTemporaryFile(
                "w", encoding="utf-8", prefix=".dump-", dir=folder, delete=False
            ) as file:
                file.write(json.dumps(content, indent=1) + "\n")
            Path(file.name).replace(path)
            self._is_dumped = True
        return path
