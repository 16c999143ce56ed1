"""Attention over a ring of ranks: keys and values go round, partial results are merged.

NOTE [merging]: attention over two sets of keys is a weighted mean of the attention over each,
``out = (exp(l1) out1 + exp(l2) out2) / (exp(l1) + exp(l2))`` with ``l`` the log-sum-exp of a query
row's scores. The weight of the second is ``sigmoid(l2 - l1)``, which neither over- nor underflows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .agreement import Agreement, find_disagreement, group_store, join
from .arguments import check_timeout, group_of
from .attention import check_qkv
from .errors import PeerTimeoutError, UlyssesError

# (q, k, v) of (B, S, H, D) -> out of (B, S, H, D), and log-sum-exp of the scores, (B, S, H, 1)
KernelWithLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

FUSED = (torch.float16, torch.bfloat16)


class RingAttention:
    """A kernel for :func:`ulysses_ops.ulysses_attention`: each rank of a ring holds a part of S.

    ``out = softmax(q k^T / sqrt(D)) v`` over the keys of all ranks of the ring. While a rank
    attends to the keys and values that it has, they travel on to the next one.

    Collective: every rank of the ring constructs it, and calls it with the same shapes.

    Attributes:
        rank: This rank in the ring.
        world_size: Number of ranks in the ring.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh,
        *,
        kernel: KernelWithLse | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Meet the other ranks of the ring.

        Args:
            group: The ring; its backend sends and receives, NCCL between GPUs.
            kernel: Attention that returns its log-sum-exp; :func:`attend_with_lse` when left out.
            timeout_s: How long a meeting, and on the CPU a message, waits for the slowest rank, in
                seconds; between GPUs messages have NCCL's own limit.

        Raises:
            ValueError: this process is not in the group, or ``timeout_s`` is not above 0.
            AgreementError: a rank did not come within ``timeout_s``.
        """
        check_timeout(timeout_s)
        found = group_of(group)
        assert found is not None
        self.group = found
        self.rank, self.world_size = found.rank(), found.size()
        self._kernel = attend_with_lse if kernel is None else kernel
        self._after, self._before = (
            dist.get_global_rank(found, (self.rank + step) % self.world_size) for step in (1, -1)
        )
        store = group_store(found)
        key = f"ulysses/{found.group_name}/ring"
        session = join(store, key, self.rank, self.world_size, timeout_s)
        self._agreement = Agreement(store, session, self.rank, self.world_size, timeout_s)
        self._agreed: set[str] = set()
        self._limit = timedelta(seconds=timeout_s)
        self._failure = ""  # from then on its messages pair no more
        # Ranks meet in it, which they must not while one of them traces.
        self._untraced: Callable[..., Tensor] = torch.compiler.disable(self._go_round)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend over the keys of the whole ring; a graph break in compiled code.

        Args:
            q: ``(B, S, H, D)``, this rank's queries.
            k: ``(B, S, H_kv, D)``, this rank's keys; H is a multiple of ``H_kv``.
            v: As ``k``.

        Returns:
            ``(B, S, H, D)``, owned by the caller, ready on the current stream.

        Raises:
            ValueError: gradients are wanted, or ranks have different shapes or dtypes; the latter
                on every rank, at the first call with a shape.
            UlyssesError: a shape is first met inside a capture.
            AgreementError: a rank did not come within ``timeout_s``.
            PeerTimeoutError: on the CPU, a message did not come within ``timeout_s``.

        Source: Ring Attention, arXiv:2310.01889.
        """
        return self._untraced(q, k, v)

    def _go_round(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._failure:
            raise PeerTimeoutError(self._failure)
        check_qkv("RingAttention", q, k, v)
        self._meet(q, k, v)
        held = torch.stack((k, v))  # one message a step, and not a window that peers write
        out, lse = None, None
        for step in range(self.world_size):
            arriving, works = self._pass_on(held, is_last=step + 1 == self.world_size)
            try:
                block, block_lse = self._kernel(q, held[0], held[1])
                out, lse = merged(out, lse, block, block_lse)
            finally:  # also where the kernel raises: the next call must not meet these messages
                self._wait(works, on_cpu=held.device.type == "cpu")
            held = arriving
        assert out is not None
        return out.to(q.dtype)

    def _wait(self, works: Sequence[dist.Work], *, on_cpu: bool) -> None:
        """Order the current stream behind them, or on the CPU wait for them.

        Raises:
            PeerTimeoutError: under gloo, the neighbours did not come within ``timeout_s``.
        """
        try:
            for work in works:
                if on_cpu:
                    work.wait(self._limit)
                else:
                    work.wait()
        except RuntimeError as error:
            self._failure = (
                f"RingAttention: rank {self.rank} of the ring waited for its neighbours longer "
                f"than {self._limit.total_seconds():g} s, or one is gone; start the ranks anew"
            )
            raise PeerTimeoutError(self._failure) from error

    def _pass_on(self, held: Tensor, *, is_last: bool) -> tuple[Tensor, list[dist.Work]]:
        if is_last:
            return held, []
        arriving = torch.empty_like(held)
        send = dist.P2POp(dist.isend, held, self._after, self.group)
        receive = dist.P2POp(dist.irecv, arriving, self._before, self.group)
        return arriving, dist.batch_isend_irecv([send, receive])

    def _meet(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Compare what the ranks are about to send, once a shape."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            message = (
                "RingAttention: q, k or v requires grad, and a ring has no gradient; call it under "
                "torch.no_grad()"
            )
            raise ValueError(message)
        called = ", ".join(
            f"{name} {list(x.shape)} {x.dtype} on {x.device.type}"
            for name, x in (("q", q), ("k", k), ("v", v))
        )
        if called in self._agreed:
            return
        if q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            message = (
                f"RingAttention: {called} is first met inside a capture; run the step once before "
                f"it is captured"
            )
            raise UlyssesError(message)
        records = self._agreement.exchange("RingAttention", {"called": called})
        differing = find_disagreement([record["called"] for record in records])
        if differing is not None:
            message = (
                f"RingAttention: ranks of the ring differ: {differing.describe()}; give every rank "
                f"as many rows and heads"
            )
            raise ValueError(message)
        self._agreed.add(called)


def merged(
    out: Tensor | None, lse: Tensor | None, block: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, see NOTE [merging]; in the precision of ``block_lse``.

    Args:
        out: ``(B, S, H, D)`` over the keys so far; ``None`` where there are none.
        lse: Their log-sum-exp, ``(B, S, H, 1)``.
        block: Over further keys.
        block_lse: Theirs.
    """
    block = block.to(block_lse.dtype)
    if out is None or lse is None:
        return block, block_lse
    weight = torch.sigmoid(block_lse - lse)
    return torch.lerp(out, block, weight), torch.logaddexp(lse, block_lse)


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``softmax(q k^T / sqrt(D)) v``, and ``log(sum(exp(q k^T / sqrt(D))))`` over the keys.

    On CUDA by PyTorch's flash attention in half precision and its memory-efficient one otherwise;
    elsewhere from the scores themselves.

    Args:
        q: ``(B, S, H, D)``.
        k: ``(B, S_kv, H_kv, D)``; H is a multiple of ``H_kv``.
        v: As ``k``.

    Returns:
        ``(B, S, H, D)`` of ``q``'s dtype, and ``(B, S, H, 1)`` in float32, or float64 of float64.
    """
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cuda" and q.dtype in FUSED:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    elif q.device.type == "cuda" and q.dtype == torch.float32:
        found = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        out, lse = found[0], found[1][..., : q.shape[2]]  # rows are padded to a multiple of 32
    else:
        precise = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = q.to(precise) @ k.to(precise).transpose(-1, -2) * q.shape[-1] ** -0.5
        lse = scores.logsumexp(-1)
        out = ((scores - lse.unsqueeze(-1)).exp() @ v.to(precise)).to(q.dtype)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)
