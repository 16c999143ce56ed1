"""Where console scripts start: outside the package, whose import takes seconds.

Whoever ends a command within these seconds, or has a torch that cannot be imported, is told so in
a line and by the exit status. Within the package it would be too late to catch that.
"""

from __future__ import annotations

import sys
from importlib import import_module

COULD_NOT_TELL = 2
INTERRUPTED = 130  # as shells count a program that Ctrl-C ended


def topology() -> None:
    """Run ``ulysses-topology``."""
    try:
        command = import_module("ulysses_ops.tools.topology_check")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001  whatever this machine lacks, the answer is a line
        text = " ".join(str(error).split())[:500]
        print(f"could not tell: {type(error).__name__}: {text}", file=sys.stderr)
        sys.exit(COULD_NOT_TELL)
    command.main()
