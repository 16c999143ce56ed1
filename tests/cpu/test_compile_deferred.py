"""Under torch.compile a round sends and completes the very buffers that it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from generated_code import faults
from rank_pool import RankPool
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from whole_tensors import numbered

from ulysses_ops import (
    Exchange,
    UlyssesCommunicator,
    UlyssesError,
    Window,
    WindowSpec,
    gather,
    ops,
    reserve,
    reserve_attention,
    ulysses_attention,
)
from ulysses_ops.exchange import pending_channels

UNTAGGED = "ulysses_untagged"


def compiled(fn: Callable[..., Any], backend: Any = "inductor", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


def open_windows(comm: UlyssesCommunicator, *names: str) -> list[Window]:
    specs = [WindowSpec(name, "scatter", (1, 8, 4, 8), torch.float32, "vkq") for name in names]
    return reserve(comm, specs)


def define_untagged() -> torch.library.Library:
    """The control: the deferred operators again, without ``Tag.flexible_layout``."""
    library = torch.library.Library(UNTAGGED, "FRAGMENT")
    for name, function in (("scatter_into", ops._scatter_into), ("complete", ops._complete)):
        library.define(name + ops.SCHEMAS[name])
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"{UNTAGGED}::{name}", lambda *args: None, lib=library)
    return library


Round = Callable[[Tensor], Any]


def rounds(comm: UlyssesCommunicator, namespace: str) -> dict[str, Round]:
    """Rounds whose sources a compiler would like to compute twice, reuse, or hand on as copies."""
    op = getattr(torch.ops, namespace)
    v, k = (window.tensor for window in open_windows(comm, "v", "k"))
    after = (comm.token, comm.world_size, comm.name)

    def pointwise(x: Tensor) -> Any:
        s = x * 2 + 1
        op.scatter_into(s, v, *after)
        t = s.sin() * 3
        op.complete([v], [s], *after)
        return v.sum() + t.sum()

    def two_sources(x: Tensor) -> Any:
        s = x * 2 + 1
        op.scatter_into(s, v, *after)
        t = s + 1
        op.scatter_into(t, k, *after)
        u = t.relu() * s
        op.complete([v, k], [s, t], *after)
        return v + k + u.sum()

    def transposed(x: Tensor) -> Any:
        s = (x.transpose(1, 2).contiguous() * 2).transpose(1, 2)
        op.scatter_into(s, v, *after)
        op.complete([v], [s], *after)
        return v.sum() + s.sin()

    def result_unused(x: Tensor) -> Any:
        s = x + 1
        op.scatter_into(s, v, *after)
        op.complete([v], [s], *after)
        return x * 2

    return {
        function.__name__: function
        for function in (pointwise, two_sources, transposed, result_unused)
    }


def generated(rank: int, world_size: int, namespace: str) -> dict[str, list[str]]:
    from torch._inductor.utils import get_code

    library = define_untagged() if namespace == UNTAGGED else None
    found = {}
    with UlyssesCommunicator(timeout_s=20) as comm:
        for name, function in rounds(comm, namespace).items():
            order = ["scatter_into"] * (2 if name == "two_sources" else 1) + ["complete"]
            codes = get_code(compiled(function), numbered(1, 4, 4, 8))
            found[name] = faults(codes, namespace, order)
    del library
    return found


def test_generated_code_completes_the_very_buffers_that_were_sent(
    compiling_ranks: RankPool,
) -> None:
    for found in compiling_ranks.run(generated, "ulysses", timeout_s=100):
        assert found == {
            "pointwise": [],
            "two_sources": [],
            "transposed": [],
            "result_unused": [],
        }


def test_without_the_tag_a_copy_is_completed(compiling_ranks: RankPool) -> None:
    """Control of the test above: Inductor computes the source twice."""
    first, _ = compiling_ranks.run(generated, UNTAGGED, timeout_s=100)
    assert any("sources sent" in fault for fault in first["pointwise"]), first
    assert any("sources sent" in fault for fault in first["two_sources"]), first


def run_rounds(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=20) as comm:
        for function in rounds(comm, "ulysses").values():
            fast = compiled(function)
            for x in (numbered(1, 4, 4, 8) + rank, -numbered(1, 4, 4, 8)):
                found, expected = fast(x), function(x)
                torch.testing.assert_close(found, expected)
                assert pending_channels(comm) == ""


def test_deferred_operators_equal_eager_ones(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(run_rounds, timeout_s=150)


def in_a_block(rank: int, world_size: int) -> None:
    """``with Exchange`` and attention in given windows, in one graph without a break."""
    with UlyssesCommunicator(timeout_s=20) as comm:
        v, k = open_windows(comm, "v", "k")
        windows = reserve_attention(comm, (1, 4, 4, 8), (1, 4, 4, 8), torch.float32)

        def step(x: Tensor) -> Tensor:
            with Exchange(comm) as exchange:
                exchange.send(x * 2, v)
                exchange.send(x + 1, k)
            local = gather(v.tensor * k.tensor, comm)
            return ulysses_attention(local, x, x, comm, windows=windows)

        fast = compiled(step)
        for x in (numbered(1, 4, 4, 8) / 64 + rank, numbered(1, 4, 4, 8) / 128):
            torch.testing.assert_close(fast(x), step(x))


def test_exchange_and_attention_in_one_graph(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(in_a_block, timeout_s=100)


def hand_over_a_copy(rank: int, world_size: int) -> None:
    """``aot_eager`` functionalises and leaves it at that: the window it passes is a clone."""
    with UlyssesCommunicator(timeout_s=20) as comm:
        function = rounds(comm, "ulysses")["pointwise"]
        with pytest.raises(ValueError, match="none of the windows of"):
            compiled(function, "aot_eager")(numbered(1, 4, 4, 8))
        assert pending_channels(comm) == ""
        function(numbered(1, 4, 4, 8))


def test_a_temporary_in_place_of_the_window_is_refused(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(hand_over_a_copy, timeout_s=60)


# ---- reuse, removal, breaks, lengths -------------------------------------------------------------


def reuse(comm: UlyssesCommunicator, is_told: bool) -> Round:
    """A source that is done with, to all appearances, and a product that would fit its memory."""
    op = torch.ops.ulysses
    v, k = (window.tensor for window in open_windows(comm, "v", "k"))
    after = (comm.token, comm.world_size, comm.name)
    weight = torch.eye(8) * 2

    def round_of_two(x: Tensor) -> Any:
        s = x * 2 + 1
        op.scatter_into(s, v, *after)
        t = x @ weight
        op.scatter_into(t, k, *after)
        op.complete([v, k], [s, t] if is_told else [t], *after)
        return v + k

    return round_of_two


def reused(rank: int, world_size: int, is_told: bool) -> list[str]:
    """Lines before the completion that hand a buffer on, as the memory of another one."""
    from torch._inductor.utils import get_code

    with UlyssesCommunicator(timeout_s=20) as comm:
        function = reuse(comm, is_told)
        x = numbered(1, 4, 4, 8)
        codes = get_code(compiled(function), x)
        if is_told:
            fast = compiled(function)
            for sign in (1, -1):
                torch.testing.assert_close(fast(sign * x), function(sign * x))
            assert faults(codes, "ulysses", ["scatter_into"] * 2 + ["complete"]) == []
        else:  # which it is not told at its peril
            with pytest.raises(UlyssesError, match="the 1 sources are not the 2 tensors that"):
                function(x)
    (source,) = [code for code in codes if "torch.ops.ulysses." in code]
    before, _ = source.split("torch.ops.ulysses.complete")
    return [line.strip() for line in before.splitlines() if "# reuse" in line]


def test_a_source_in_flight_is_not_reused(compiling_ranks: RankPool) -> None:
    assert compiling_ranks.run(reused, True, timeout_s=100) == [[], []]


def test_a_source_that_complete_is_not_given_is_reused(compiling_ranks: RankPool) -> None:
    """Control of the test above: Inductor writes the product where the source still is."""
    first, second = compiling_ranks.run(reused, False, timeout_s=100)
    assert len(first) == len(second) == 1, (first, second)


PURE = "ulysses_pure"


def define_pure() -> torch.library.Library:
    """The control: the deferred operators, said to change nothing."""
    library = torch.library.Library(PURE, "FRAGMENT")
    for name, function in (("scatter_into", ops._scatter_into), ("complete", ops._complete)):
        schema = ops.SCHEMAS[name].replace("(a!)", "").replace("(b!)", "")
        library.define(name + schema)
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"{PURE}::{name}", lambda *args: None, lib=library)
    return library


def removed(rank: int, world_size: int, namespace: str) -> bool:
    from torch._inductor.utils import get_code

    library = define_pure() if namespace == PURE else None
    with UlyssesCommunicator(timeout_s=20) as comm:
        function = rounds(comm, namespace)["result_unused"]
        codes = get_code(compiled(function), numbered(1, 4, 4, 8))
    del library
    return not any(f"torch.ops.{namespace}." in code for code in codes)


def test_operators_without_a_result_are_not_removed(compiling_ranks: RankPool) -> None:
    """Nor would the test miss it: said to mutate nothing, they are."""
    assert compiling_ranks.run(removed, "ulysses", timeout_s=60) == [False, False]
    assert compiling_ranks.run(removed, PURE, timeout_s=60) == [True, True]


def with_a_break(rank: int, world_size: int) -> int:
    """The source is a result of one graph and an argument of the next."""
    with UlyssesCommunicator(timeout_s=20) as comm:
        (v,) = open_windows(comm, "v")
        after = (comm.token, comm.world_size, comm.name)

        def broken(x: Tensor) -> Tensor:
            s = x * 2 + 1
            torch.ops.ulysses.scatter_into(s, v.tensor, *after)
            torch._dynamo.graph_break()
            t = s.sin()
            torch.ops.ulysses.complete([v.tensor], [s], *after)
            return v.tensor + t.sum()

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("inductor")
        fast = torch.compile(broken, backend=counter)
        for x in (numbered(1, 4, 4, 8) + rank, -numbered(1, 4, 4, 8)):
            torch.testing.assert_close(fast(x), broken(x))
            assert pending_channels(comm) == ""
    return counter.frame_count


def test_a_graph_break_between_send_and_completion(compiling_ranks: RankPool) -> None:
    assert compiling_ranks.run(with_a_break, timeout_s=100) == [2, 2]


def of_other_lengths(rank: int, world_size: int) -> int:
    """Windows come in as arguments, one for each length; one dynamic graph serves them."""
    with UlyssesCommunicator(timeout_s=20) as comm:

        def step(x: Tensor, window: Tensor, token: Tensor) -> Tensor:
            s = x * 2 + 1
            torch.ops.ulysses.scatter_into(s, window, token, comm.world_size, comm.name)
            t = s.sin()
            torch.ops.ulysses.complete([window], [s], token, comm.world_size, comm.name)
            return window + t.sum()

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("inductor")
        fast = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
        for rows in (5, 7, 11, 13):  # no size is another one's by chance
            spec = WindowSpec("v", "scatter", (1, rows * world_size, 4, 8), torch.float32)
            (window,) = reserve(comm, [spec])
            x = numbered(1, rows, 4, 8) + rank
            found = fast(x, window.tensor, comm.token)
            torch.testing.assert_close(found, step(x, window.tensor, comm.token))
    return counter.frame_count


def test_windows_of_other_lengths_in_one_graph(compiling_ranks: RankPool) -> None:
    assert compiling_ranks.run(of_other_lengths, timeout_s=150) == [1, 1]
