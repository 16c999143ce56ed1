"""An attention layer over a sequence that is sharded between ranks, from its input to its output.

It owns what surrounds attention, and so can compute in the order that hides the exchanges
(``peers_first``), where :func:`ulysses_ops.ulysses_attention` takes finished Q, K and V.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._native import NATIVE
from .attention import out_specs, qkv_specs, sdpa, ulysses_attention
from .communicator import UlyssesCommunicator
from .constants import Constants, shipped_constants
from .exchange import Exchange
from .first_stage import FirstStage
from .layer_checks import (
    check_chunks,
    check_inputs,
    check_no_autocast,
    check_options,
    check_parts,
    check_tables,
)
from .norm_rope_checks import Rope
from .ops import scatter
from .packed_projection import PackedWeights
from .part_norm_rope import NormRope, NormRopeKernel, apply_norm_rope, norm_rope_rows
from .peers_first import Output, Projected, attend
from .planner import Plan, plan_schedule, planned_shape
from .progress import Progress
from .projections import Projections, linear_of, norms_of, projections_of, weight_like, weight_of
from .schedule import Problem, Schedule
from .values_first import AttentionKernel
from .windows import Window, reserve

NOTHING = NormRope()  # what happens to V


class UlyssesAttention(nn.Module):
    """Projections, QK norm, RoPE, attention and output projection, exchanges included.

    ::

        q, k, v = x W_q^T, x W_k^T, x W_v^T       (B, S_local, heads, D), with biases if any
        q, k    = rope(norm(q)), rope(norm(k))
        y       = gather(attention(scatter(q), scatter(k), scatter(v))) W_out^T

    ``schedule`` says in which parts and in which order that is computed. Whatever it says, every
    element of Q, K, V and of the attention is the same sum; only with ``output="slabs"`` it is
    rounded once more for each slab of heads that is added.

    Weights are used where they are, since those for one rank lie side by side in each projection.
    Only with ``pack_weights``, those of Q, K and V are held twice where the planner finds that it
    pays, for small layers. The copy does not follow changes through ``.data``, and in a captured
    graph it follows no change before the next call outside of it. Head chunks copy the columns of
    the output weight in each step.

    Attributes:
        comm: The ranks.
        norm_rope: What happens to Q and K.
        schedule: ``"auto"``, or the schedule to use.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """

    _q_norm: Tensor | None
    _k_norm: Tensor | None

    def __init__(
        self,
        comm: UlyssesCommunicator,
        *,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        out: nn.Linear,
        num_heads: int,
        num_kv_heads: int | None = None,
        norm_rope: NormRope = NOTHING,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        attention: AttentionKernel = sdpa,
        norm_rope_kernel: NormRopeKernel | None = None,
        schedule: Schedule | Literal["auto"] = "auto",
        constants: Constants | None = None,
        pack_weights: bool = False,
    ) -> None:
        """Take over projections that exist; alike on every rank.

        Args:
            comm: An open communicator.
            q: ``(H * D, width)``. Of this and the others, weight and bias are used and nothing
                else: a forward of their own, and hooks, are refused.
            k: ``(H_kv * D, width)``.
            v: As ``k``.
            out: ``(out_width, H * D)``.
            num_heads: H; divisible by ``comm.world_size``.
            num_kv_heads: ``H_kv``; H when left out.
            norm_rope: What happens to Q and K.
            q_norm: Weight of Q's norm, ``(D,)`` per head or ``(H * D,)`` across heads; ones when
                left out.
            k_norm: The same for K.
            attention: The kernel, on ``(B, S, heads, D)``. It must treat each query row and each
                head by itself; one that cannot (with a causal mask, say) needs a schedule with
                ``attention="whole"``.
            norm_rope_kernel: What computes :func:`~ulysses_ops.part_norm_rope.apply_norm_rope`;
                when left out, :func:`~ulysses_ops.qk_norm_rope_into` on CUDA, where its kernel
                fits the layer and ``cos`` and ``sin`` are contiguous ``(S_local, D / 2)`` tables
                in float32.
            schedule: ``"auto"`` lets the planner choose by shape.
            constants: What the planner computes with; those of the package when left out.
            pack_weights: Let the planner choose ``qkv_weights="packed"``.

        Raises:
            ValueError: sizes, dtypes or devices do not fit each other or the ranks.
        """
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_parts(comm, (q, k, v, out), (num_heads, kv_heads), norm_rope, attention)
        check_options(schedule, constants, norm_rope_kernel, pack_weights)
        sizes = Projections(q, k, v, out, num_heads, kv_heads)
        sizes.check(norm_rope, comm.world_size)
        self.comm = comm
        self.q, self.k, self.v, self.out = q, k, v, out
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, kv_heads, sizes.head_dim
        self.norm_rope = norm_rope
        self.schedule = schedule
        self._attention = attention
        self._norm_rope_kernel = norm_rope_kernel
        self._packed = PackedWeights()
        self._progress = self._shared_progress()
        self._may_pack = pack_weights
        self._constants = shipped_constants() if constants is None else constants
        for name, weight, heads in (("q_norm", q_norm, num_heads), ("k_norm", k_norm, kv_heads)):
            used = sizes.norm_weight(name, weight, heads, norm_rope.norm)
            self.register_buffer(f"_{name}", used, persistent=False)
        self.norms = nn.ModuleDict()  # those of a module, which may change

    @classmethod
    def from_weights(
        cls,
        comm: UlyssesCommunicator,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
        out_bias: Tensor | None = None,
        **options: Any,
    ) -> UlyssesAttention:
        """Build it from weights ``(out_features, in_features)``, which are shared, not copied.

        Args:
            comm: An open communicator.
            q: Weight of Q.
            k: Weight of K.
            v: Weight of V.
            out: Weight of the output projection.
            q_bias: Bias of Q, if any; the others likewise.
            k_bias: Bias of K.
            v_bias: Bias of V.
            out_bias: Bias of the output projection.
            options: ``num_heads`` and what else the class takes.

        Raises:
            ValueError: as the class.
        """
        return cls(
            comm,
            q=linear_of("q", q, q_bias),
            k=linear_of("k", k, k_bias),
            v=linear_of("v", v, v_bias),
            out=linear_of("out", out, out_bias),
            **options,
        )

    @classmethod
    def from_module(
        cls,
        comm: UlyssesCommunicator,
        module: nn.Module,
        *,
        num_heads: int,
        rope: Rope = "none",
        **options: Any,
    ) -> UlyssesAttention:
        """Build it from an attention module, whose parameters it shares.

        Args:
            comm: An open communicator.
            module: Has linear layers ``to_q, to_k, to_v, to_out`` (the last also first in a list),
                ``q_proj, k_proj, v_proj, o_proj``, or ``q, k, v, o``; and, if it normalises, RMS
                norms ``norm_q, norm_k`` or ``q_norm, k_norm``, whose width tells their kind.
            num_heads: H.
            rope: How pairs are made; a module does not tell.
            options: What else the class takes, less ``norm_rope`` and norm weights.

        Raises:
            ValueError: the module is none of these, or as the class.
        """
        q, k, v, out = projections_of(module)
        norm, eps, norms = norms_of(module, q.out_features, num_heads)
        layer = cls(
            comm,
            q=q,
            k=k,
            v=v,
            out=out,
            num_heads=num_heads,
            norm_rope=NormRope(norm, rope, eps),
            q_norm=weight_of(norms.get("q")),
            k_norm=weight_of(norms.get("k")),
            **options,
        )
        layer.norms.update(norms)
        return layer

    @property
    def q_norm(self) -> Tensor | None:
        """Weight of Q's norm as it is now, ``(D,)`` per head or ``(H, D)`` across heads."""
        return self._norm_weight("q")

    @property
    def k_norm(self) -> Tensor | None:
        """The same for K."""
        return self._norm_weight("k")

    def _norm_weight(self, name: str) -> Tensor | None:
        given: Tensor | None = getattr(self, f"_{name}_norm")
        if given is None or name not in self.norms:
            return given
        return weight_like(f"norms['{name}']", self.norms[name], given, self.q.weight.device)

    def plan(self, shape: tuple[int, int, int]) -> Plan:
        """What the planner chooses for an input ``(B, S_local, width)``, and why."""
        batch, rows, width = planned_shape(shape)
        world_size = self.comm.world_size
        problem = Problem(
            batch,
            rows * world_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            width,
            self.out.out_features,
            world_size,
            self.q.weight.element_size(),
            self.norm_rope,
            self._may_pack,
        )
        return plan_schedule(problem, self._constants)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        """Run the layer on this rank's rows.

        Args:
            x: ``(B, S_local, width)``, of the weights' dtype.
            cos: ``(S_local, D / 2)`` or ``(B, S_local, D / 2)``: an angle for each pair of this
                rank's rows. Needed with RoPE, and only then.
            sin: As ``cos``.

        Returns:
            ``(B, S_local, out_width)``, owned by the caller, ready on the current stream.

        Raises:
            ValueError: shape, dtype or device is wrong, or the schedule does not fit the heads;
                raised before any rank waits.
            UlyssesError: closed, or a capture needs windows that are not reserved.

        Collective: every rank calls it with the same shape, in the same order. Where a gradient
        is needed, and inside a compiler, it takes the functional operators instead of windows.
        """
        self._check(x, cos, sin)
        if self._is_functional(x):
            q, k, v = self._projected(x, cos, sin)
            if self.comm.world_size == 1:
                attended = self._attention(q, k, v)
            else:
                attended = ulysses_attention(q, k, v, self.comm, attention=self._attention)
            projected: Tensor = self.out(attended.flatten(2))
            return projected
        schedule = self._schedule_for(x)
        qkv, outs = self._reserve(x, schedule)
        with torch.no_grad(), self.comm.turn.of("UlyssesAttention"):
            return attend(
                self._project(x, cos, sin, schedule, qkv),
                self._attention,
                Output(self.out.weight, self.out.bias),
                outs,
                self.comm.rank,
                schedule,
                self.begin_exchange,
            )

    def project(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first stage alone: from ``x`` to Q, K and V that an attention kernel can take.

        Args:
            x: As in :meth:`forward`.
            cos: As in :meth:`forward`.
            sin: As in :meth:`forward`.

        Returns:
            Q, K and V of this rank's heads over the whole sequence, ``(B, S_global, H_local, D)``,
            ready on the current stream. Without gradients they are windows, which the next call
            of this layer, or of any other with the same shape, fills anew.

        Raises:
            ValueError: as :meth:`forward`.
            UlyssesError: as :meth:`forward`.

        Collective, as :meth:`forward`.
        """
        self._check(x, cos, sin)
        if self._is_functional(x):
            parts = self._projected(x, cos, sin)
            if self.comm.world_size == 1:
                return parts
            q, k, v = (scatter(part, self.comm) for part in parts)
            return q, k, v
        schedule = self._schedule_for(x)
        qkv, _ = self._reserve(x, schedule)
        with torch.no_grad(), self.comm.turn.of("UlyssesAttention"):
            return self._project(x, cos, sin, schedule, qkv)

    def _project(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        schedule: Schedule,
        windows: list[Window],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the windows of V, K and Q, given in this order."""
        norms = (None, self.k_norm, self.q_norm)
        kinds = (NOTHING, self.norm_rope, self.norm_rope)
        v, k, q = (
            Projected(layer.weight, layer.bias, window, kind, norm)
            for layer, window, kind, norm in zip(
                (self.v, self.k, self.q), windows, kinds, norms, strict=True
            )
        )
        kept = (self._packed, self._progress)
        stage = FirstStage(self.comm, self._norm_rope_kernel, *kept, self.begin_exchange)
        stage.run(x, (v, k, q), cos, sin, schedule)
        return q.window.tensor, k.window.tensor, v.window.tensor

    def begin_exchange(self) -> Exchange:
        """Start an exchange; a subclass that measures may hand out one that sends nothing."""
        return Exchange(self.comm)

    def _shared_progress(self) -> Progress | None:
        """The communicator's, since its rounds come one after the other; none without copies.

        Where exchanges send nothing it has to be none: nobody would join what waits.
        """
        comm = self.comm
        if comm.copy_engine is None or not NATIVE.projection:
            return None
        return comm.attach("progress", lambda: Progress(comm.device, comm.world_size))

    def _schedule_for(self, x: Tensor) -> Schedule:
        check_no_autocast(x.device)
        batch, rows, width = x.shape
        chosen = self.schedule
        if isinstance(chosen, Schedule):
            world_size = self.comm.world_size
            check_chunks(chosen, self.num_heads // world_size, self.num_kv_heads // world_size)
            return chosen
        return self.plan((batch, rows, width)).schedule

    def _reserve(self, x: Tensor, schedule: Schedule) -> tuple[list[Window], list[Window]]:
        batch, rows, _ = x.shape
        q_shape = (batch, rows, self.num_heads, self.head_dim)
        kv_shape = (batch, rows, self.num_kv_heads, self.head_dim)
        specs = qkv_specs(self.comm, q_shape, kv_shape, x.dtype)
        outs = out_specs(specs[2], schedule.head_chunks)
        windows = reserve(self.comm, [*specs, *outs])
        return windows[:3], windows[3:]

    def _check(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
        counts = (self.num_heads, self.num_kv_heads)
        sizes = Projections(self.q, self.k, self.v, self.out, *counts)
        check_inputs(x, sizes, self.head_dim, self.comm.device)
        check_tables(x, cos, sin, rope=self.norm_rope.rope, head_dim=self.head_dim)

    def _is_functional(self, x: Tensor) -> bool:
        """Whether operators without windows have to do: differentiable, traceable, of one rank."""
        needs_grad = torch.is_grad_enabled() and (
            x.requires_grad or any(weight.requires_grad for weight in self.parameters())
        )
        return self.comm.world_size == 1 or needs_grad or torch.compiler.is_compiling()

    def _projected(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of this rank's rows, ``(B, S_local, H, D)``."""
        kernel = self._norm_rope_kernel or apply_norm_rope
        v, k, q = (
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.v, self.k, self.q)
        )
        k = norm_rope_rows(k, self.norm_rope, self.k_norm, cos, sin, kernel)
        return norm_rope_rows(q, self.norm_rope, self.q_norm, cos, sin, kernel), k, v
