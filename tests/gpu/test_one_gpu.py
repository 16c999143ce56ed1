"""What one GPU can show: a group of one, and two ranks that share the GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, WindowSpec, gather, reserve, scatter, ulysses_attention
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import capture_step


def test_one_rank_copies_and_maps_nothing() -> None:
    with UlyssesCommunicator(device="cuda") as comm:
        assert (comm.transport, comm.mapping) == ("local", None)
        x = torch.randn(2, 8, 4, 16, device="cuda")
        for op in (scatter, gather):
            got = op(x, comm)
            assert torch.equal(got, x)
            assert got.data_ptr() != x.data_ptr()
        (window,) = reserve(comm, [WindowSpec("w", "scatter", (2, 8, 4, 16), torch.float32)])
        with Exchange(comm) as exchange:
            exchange.send(x, window)
        assert torch.equal(window.tensor, x)
        assert ulysses_attention(x, x, x, comm).shape == x.shape


def test_one_rank_captures() -> None:
    with UlyssesCommunicator(device="cuda") as comm:
        x = torch.zeros(1, 8, 4, 16, device="cuda")
        step = capture_step(comm, lambda x: scatter(x + 1, comm), [x])
        for value in (3.0, 5.0):
            got = step.replay(torch.full_like(x, value))
            assert torch.equal(got, torch.full_like(x, value + 1))


def shared_gpu(rank: int, world_size: int) -> int:
    """Replays with changing data and skew, two ranks on as few GPUs as there are."""
    device = torch.device("cuda", torch.cuda.current_device())
    with UlyssesCommunicator(device=device, transport="ce", allow_shared_devices=True) as comm:
        spec = WindowSpec("w", "scatter", (1, 32, 8, 16), torch.float32)
        (window,) = reserve(comm, [spec])

        def step(x: Tensor) -> Tensor:
            with Exchange(comm) as exchange:
                exchange.send(x, window)
            return window.tensor.clone()

        x = torch.zeros(window.source_shape, device=device)
        captured = capture_step(comm, step, [x])
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for number in range(50):
            if number % 2 == rank:
                torch.cuda._sleep(4_000_000)
            got = captured.replay(torch.full_like(x, rank * 1000 + number))
            for peer, part in enumerate(got.split(list(window.layout.seq_splits), dim=1)):
                wrong += (part != peer * 1000 + number).sum()
        return int(wrong)


def test_two_ranks_share_a_gpu(crowd: Callable[[int], RankPool]) -> None:
    assert crowd(2).run(shared_gpu) == [0, 0]


def test_import_makes_no_context() -> None:
    program = (
        "import ulysses_ops, torch; assert not torch.cuda.is_initialized(); "
        "assert ulysses_ops.NATIVE.cuda, ulysses_ops.NATIVE.cuda_reason; "
        "assert ulysses_ops.NATIVE.kernels, ulysses_ops.NATIVE.kernels_reason"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
