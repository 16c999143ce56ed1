"""The device side of transport ``ce``: the only caller of the private ``_ce_*`` operators."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from .agreement import Agreement
from .errors import UlyssesError
from .mapping import MappingKind, SharedMemory, allocate
from .plan import Layout

SignalKind = Literal["write_value", "memcpy"]
SIGNAL_KINDS: tuple[SignalKind, ...] = (
    "write_value",
    "memcpy",
)  # numbered as in csrc/cuda/handshake.h

POLL_S = 0.0005
PROBE_VALUE = 0x51A7


class CopyEngineGroup:
    """Signal words and windows of one communicator, as the compiled library knows them."""

    def __init__(self, number: int, words: SharedMemory, rank: int, world_size: int) -> None:
        """Wrap a group that the library made; :meth:`establish` is the way to get one."""
        self.number = number
        self.signal: SignalKind = SIGNAL_KINDS[0]
        self._words: SharedMemory | None = words
        self._rank = rank
        self._world_size = world_size
        self._closed = False

    @classmethod
    def establish(
        cls,
        mapping: MappingKind,
        signal: SignalKind | None,
        *,
        name: str,
        group: ProcessGroup,
        device: torch.device,
        agreement: Agreement,
    ) -> CopyEngineGroup:
        """Map the signal words of all ranks and find a kind of signal that reaches every peer.

        Collective.

        Args:
            mapping: Provider of the memory.
            signal: The kind to use; the first that works when left out.
            name: Name of the communicator, which the public operators know it by.
            group: The ranks.
            device: This rank's GPU.
            agreement: Meetings of the ranks.

        Raises:
            UlyssesError: mapping failed, or no kind of signal arrives; alike on every rank.
        """
        rank, world_size = group.rank(), group.size()
        num_bytes: int = torch.ops.ulysses._ce_words_bytes(world_size)
        words = allocate(mapping, num_bytes, group=group, device=device, agreement=agreement)
        number, failures = agreement.attempt(
            "group",
            lambda: torch.ops.ulysses._ce_create_group(
                name, rank, world_size, device.index, list(words.pointers), 0, agreement.timeout_s
            ),
        )
        if failures:
            if number is not None:
                torch.ops.ulysses._ce_destroy_group(number)
            words.release()
            message = f"{mapping}: the group cannot be made on {'; '.join(failures)}"
            raise UlyssesError(message)
        result = cls(int(number or 0), words, rank, world_size)
        try:
            result._choose_signal(SIGNAL_KINDS if signal is None else (signal,), agreement)
        except UlyssesError:
            result.close()
            raise
        return result

    def _choose_signal(self, kinds: tuple[SignalKind, ...], agreement: Agreement) -> None:
        causes = []
        for kind in kinds:
            value = PROBE_VALUE + SIGNAL_KINDS.index(kind)
            _, failures = agreement.attempt("signal", lambda: self._announce(kind, value))  # noqa: B023
            missing = self._missing_signals(value)
            for receiver, record in enumerate(agreement.exchange("signals", {"missing": missing})):
                failures += [f"rank {sender} to rank {receiver}" for sender in record["missing"]]
            if not failures:
                self.signal = kind
                return
            causes.append(f"{kind} ({'; '.join(failures)})")
        message = f"signals do not arrive: {', '.join(causes)}"
        raise UlyssesError(message)

    def _announce(self, kind: SignalKind, value: int) -> None:
        torch.ops.ulysses._ce_set_signal(self.number, SIGNAL_KINDS.index(kind))
        torch.ops.ulysses._ce_announce_probe(self.number, value)
        torch.ops.ulysses._ce_read_probe(self.number, self._world_size)  # issued and done

    def _missing_signals(self, value: int) -> list[int]:
        words = torch.ops.ulysses._ce_read_probe(self.number, self._world_size)
        return [
            peer for peer, word in enumerate(words) if peer != self._rank and int(word) != value
        ]

    @property
    def closed(self) -> bool:
        """Whether the group is forgotten."""
        return self._closed

    def add_window(
        self, name: str, channel: str, tag: int, layout: Layout, itemsize: int, memory: SharedMemory
    ) -> None:
        """Make a window known; ranks do so in the same order."""
        torch.ops.ulysses._ce_add_window(
            self.number,
            name,
            channel,
            tag,
            layout.direction == "gather",
            layout.batch,
            layout.head_dim,
            itemsize,
            list(layout.seq_splits),
            list(layout.head_splits),
            *layout.ranges(),
            list(memory.pointers),
        )

    def remove_window(self, memory: SharedMemory) -> None:
        """Forget a window; refused while its channel has an exchange in flight."""
        torch.ops.ulysses._ce_remove_window(self.number, memory.pointers[self._rank])

    def open_round(self, address: int) -> None:
        """Open a round of the channel of the window there, behind the current stream."""
        torch.ops.ulysses._ce_open_round(self.number, address)

    def run_handshakes(self, num_pairs: int) -> None:
        """Issue pairs of bare handshakes, for measurements. Collective."""
        torch.ops.ulysses._ce_run_handshakes(self.number, num_pairs)

    def pending(self) -> str:
        """Channels with an exchange in flight in the capture of the current stream, or outside."""
        names: str = torch.ops.ulysses._ce_pending(self.number)
        return names

    def own_capture(self) -> int:
        """Claim the current stream's capture for this group alone, and return its id."""
        return int(torch.ops.ulysses._ce_own_capture(self.number))

    def captured_exchanges(self, capture: int) -> list[str]:
        """What a capture exchanges, in order: alike on ranks whose graphs belong together."""
        text: str = torch.ops.ulysses._ce_captured_exchanges(self.number, capture)
        return text.splitlines()

    def window_states(self) -> dict[int, tuple[int, int]]:
        """Address of each window -> when it was last used (higher is later), graphs that use it."""
        numbers = torch.ops.ulysses._ce_window_states(self.number)
        return {numbers[i]: (numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)}

    def forget_capture(self, capture: int) -> None:
        """The graph of this capture is gone: it pins no window any more."""
        if not self._closed:
            torch.ops.ulysses._ce_forget_capture(self.number, capture)

    def abandon_captures(self) -> None:
        """Forget what captures that were given up had in flight."""
        torch.ops.ulysses._ce_abandon_captures(self.number)

    def before_replay(self) -> None:
        """Order the current stream behind the copy chain and all readers of windows."""
        torch.ops.ulysses._ce_before_replay(self.number)

    def after_replay(self) -> None:
        """Order the copy chain behind the current stream, which may also read windows now."""
        torch.ops.ulysses._ce_after_replay(self.number)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait on the host until the copy chain is idle; ``False`` when the time is up."""
        return _poll(lambda: bool(torch.ops.ulysses._ce_is_idle(self.number)), timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait out what is in flight, or end it: local, and bounded.

        When a peer does not answer within ``timeout_s``, every window is filled with NaN bytes and
        the waits are released, so that nothing hangs and no half-filled result looks like a good
        one.

        Returns:
            Whether the copy chain is idle now; if not, its memory must stay.
        """
        try:
            if self.wait_idle(timeout_s):
                return True
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            warnings.warn(
                f"ulysses: the device failed ({first}); what it holds is given back when the "
                f"process ends",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        torch.ops.ulysses._ce_poison_windows(self.number)

        def release() -> bool:
            torch.ops.ulysses._ce_release_wait(self.number)
            return bool(torch.ops.ulysses._ce_is_idle(self.number))

        released = _poll(release, timeout_s)
        outcome = "were released" if released else "could not be released"
        warnings.warn(
            f"ulysses: peers did not answer within {timeout_s:g} s; pending waits {outcome} and "
            f"windows hold NaN: results that were not synchronised before are invalid",
            RuntimeWarning,
            stacklevel=2,
        )
        return released

    def failure(self, *, look: bool = False) -> str:
        """Why the group gave up; empty while it did not.

        Args:
            look: Read what the peers have told, which takes a copy from the device.
        """
        if self._closed:
            return ""
        why: str = torch.ops.ulysses._ce_failure(self.number, look)
        return why

    def set_limit(self, limit_s: float) -> None:
        """How long one wait for peers may take, in seconds."""
        torch.ops.ulysses._ce_set_limit(self.number, limit_s)

    def exchange_log(self) -> list[tuple[float, str]]:
        """The latest exchanges issued: seconds since the epoch, and what it was; oldest first."""
        text: str = torch.ops.ulysses._ce_exchange_log(self.number)
        entries = [line.split(" ", 1) for line in text.splitlines()]
        return [(int(issued) / 1e6, what) for issued, what in entries]

    def forget(self) -> None:
        """Forget the group, but keep its words: something on the device may still use them."""
        if not self._closed:
            self._closed = True
            torch.ops.ulysses._ce_destroy_group(self.number)

    def close(self) -> None:
        """Forget the group and give up its words. Local; call it when nothing is in flight."""
        self.forget()
        words, self._words = self._words, None
        if words is not None:
            words.release()


def _poll(done: Callable[[], Any], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
