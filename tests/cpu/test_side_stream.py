"""The second stream: in which order it is forked and joined, shown by streams that note it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch

from ulysses_ops.side_stream import SideStream


class NotedStream:
    """A stream that writes down what it waits for."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self._notes = name, notes

    def wait_stream(self, other: NotedStream) -> None:
        self._notes.append(f"{self.name} waits for {other.name}")


def on(side: SideStream, *, capturing: bool, fails: bool = False) -> list[str]:
    """Fork, do something there, and join; what happened."""
    notes: list[str] = []
    caller = NotedStream("caller", notes)
    if fails:
        caller.wait_stream = mock.Mock(side_effect=RuntimeError("broken"))  # type: ignore[method-assign]
    side._streams = [NotedStream(name, notes) for name in ("eager", "captured")]  # type: ignore[misc]

    def entered(stream: NotedStream) -> AbstractContextManager[None]:
        notes.append(f"on {stream.name}")
        return nullcontext()

    with (
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=capturing),
        mock.patch("torch.cuda.current_stream", return_value=caller),
        mock.patch("torch.cuda.stream", entered),
        side.forked(),
        side.current(),
    ):
        if fails:
            message = "ours"
            raise KeyError(message)
    return notes


@pytest.mark.parametrize(("capturing", "name"), [(False, "eager"), (True, "captured")])
def test_it_forks_from_the_caller_and_is_joined(capturing: bool, name: str) -> None:
    assert on(SideStream(), capturing=capturing) == [
        f"{name} waits for caller",
        f"on {name}",
        f"caller waits for {name}",
    ]


def test_an_error_is_not_hidden_by_a_join_that_fails() -> None:
    with pytest.raises(KeyError, match="ours"):
        on(SideStream(), capturing=True, fails=True)


def test_without_streams_nothing_is_forked() -> None:
    side = SideStream(torch.device("cpu"))
    with side.forked(), side.current():
        side.follow()
    side.join()
    side.close()
    assert not side._streams
