"""Names on a command line."""

from __future__ import annotations

from collections.abc import Sequence


def choose_names(
    what: str, names: str, known: Sequence[str], everything: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Names in a comma-separated list, in the order of ``known``.

    Args:
        what: What they are of, for the error.
        names: The list, or ``"all"``.
        known: What may be named.
        everything: What ``"all"`` stands for; all of ``known`` when left out.

    Raises:
        ValueError: a name is unknown.
    """
    if names == "all":
        return tuple(known if everything is None else everything)
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        message = f"{what}: {unknown} are unknown; choose from {list(known)} or 'all'"
        raise ValueError(message)
    return tuple(name for name in known if name in wanted)
