"""Where a command writes, refused before anything is measured rather than when it is lost."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import typer

from ulysses_ops.tools.results import check_results


def check_folder(folder: Path) -> None:
    """Refuse a folder that is none, or that cannot be made; nothing is made yet.

    Raises:
        ValueError: a file is in its way, or this user may not write there.
    """
    nearest = next(place for place in (folder, *folder.absolute().parents) if _is_there(place))
    if not nearest.is_dir():
        message = f"nothing can be written into {folder}: {nearest} is no folder; name another one"
        raise ValueError(message)
    if not os.access(nearest, os.W_OK | os.X_OK):
        message = f"nothing can be written into {folder}: {nearest} is read-only; name another one"
        raise ValueError(message)


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written; its folder has to be there.

    Raises:
        ValueError: it is a folder, or its folder is missing, or this user may not write it.
    """
    if path.is_dir():
        message = f"{path} is a folder; name a file"
        raise ValueError(message)
    if not _is_there(path.absolute().parent):
        message = f"{path} cannot be written: its folder is not there; make it"
        raise ValueError(message)
    check_folder(path.absolute().parent)
    if path.exists() and not os.access(path, os.W_OK):
        message = f"{path} is read-only; name another file"
        raise ValueError(message)


def refuse_folder(folder: Path | None, names: Iterable[str] = (), option: str = "--out") -> None:
    """Refuse an option's folder of results, if one is given.

    Args:
        folder: Of the option.
        names: Files of results in it that rows are to be added to.
        option: For the message.

    Raises:
        typer.BadParameter: nothing can be written there, or a file is not as results are.
    """
    if folder is None:
        return
    try:
        check_folder(folder)
        check_results(folder, names)
    except ValueError as error:
        message = f"{option}: {error}"
        raise typer.BadParameter(message) from error


def refuse_file(path: Path | None, option: str = "--out") -> None:
    """Refuse an option's file, if one is given.

    Raises:
        typer.BadParameter: it cannot be written.
    """
    if path is None:
        return
    try:
        check_file(path)
    except ValueError as error:
        message = f"{option}: {error}"
        raise typer.BadParameter(message) from error


def _is_there(place: Path) -> bool:
    """Whether something is there; below a file nothing is."""
    try:
        return place.exists()
    except OSError:
        return False
