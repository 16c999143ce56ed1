"""Attention processors, one for each model class of ``diffusers``.

Each computes what the stock processor of ``diffusers`` 0.42.1 computes, from the rows that this
rank holds: the same projections, norms and rotations, values first, attention between the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .diffusers_attention import Processor
from .values_first import Producer

Linear = Callable[[Tensor], Tensor]
Rotation = tuple[Tensor, Tensor] | None


class WanProcessor(Processor):
    """Self attention of Wan: RMSNorm across heads, rotation of neighbouring pairs, no text."""

    def import_rotation(self) -> Any:
        """Own: the stock one is local to a function."""
        return _rotate_pairs

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Rotation = None,
    ) -> Tensor:
        """``(B, S_local, H * D)`` -> the same."""
        _refuse_mask("Wan", attention_mask)
        v, k, q = _projections(attn, hidden_states, ("to_v", "to_k", "to_q"), "to_qkv")

        def turned(project: Producer, norm: Linear) -> Tensor:
            x = norm(project()).unflatten(2, (attn.heads, -1))
            return x if rotary_emb is None else self.rotate(x, *rotary_emb)

        out = self.attend(
            lambda: v().unflatten(2, (attn.heads, -1)),
            lambda: turned(k, attn.norm_k),
            lambda: turned(q, attn.norm_q),
        )
        return _projected_out(attn, out)


class LTXProcessor(Processor):
    """Self attention of LTX: norm and rotation across heads, before they are told apart."""

    def import_rotation(self) -> Any:
        """On ``(B, S, H * D)``."""
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        return apply_rotary_emb

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotation = None,
    ) -> Tensor:
        """``(B, S_local, H * D)`` -> the same."""
        _refuse_mask("LTX", attention_mask)

        def turned(project: Linear, norm: Linear) -> Tensor:
            x: Tensor = norm(project(hidden_states))
            if image_rotary_emb is not None:
                x = self.rotate(x, image_rotary_emb)
            per_head: Tensor = x.unflatten(2, (attn.heads, -1))
            return per_head

        out = self.attend(
            lambda: attn.to_v(hidden_states).unflatten(2, (attn.heads, -1)),
            lambda: turned(attn.to_k, attn.norm_k),
            lambda: turned(attn.to_q, attn.norm_q),
        )
        return _projected_out(attn, out)


class RotatedPerHead(Processor):
    """What FLUX and HunyuanVideo share: rotation of ``(B, S, H, D)``, the same for every head."""

    def import_rotation(self) -> Any:
        """On ``(B, S, H, D)`` with ``sequence_dim=1``."""
        from diffusers.models.embeddings import apply_rotary_emb

        return apply_rotary_emb

    def turned(self, x: Tensor, by: Rotation) -> Tensor:
        """``x`` turned by its positions, where it has any."""
        return x if by is None else self.rotate(x, by, sequence_dim=1)


class FluxProcessor(RotatedPerHead):
    """Joint attention of FLUX: text before image, norm per head; or one stream that holds both."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotation = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Image rows, and text rows where they are a stream of their own."""
        _refuse_mask("FLUX", attention_mask)
        v, k, q = _projections(attn, hidden_states, ("to_v", "to_k", "to_q"), "to_qkv")
        text = encoder_hidden_states
        text_v = text_k = text_q = None
        norm_text_k = norm_text_q = _same
        if text is not None:
            names = ("add_v_proj", "add_k_proj", "add_q_proj")
            text_v, text_k, text_q = _projections(attn, text, names, "to_added_qkv")
            norm_text_k, norm_text_q = attn.norm_added_k, attn.norm_added_q

        def joint(
            project: Producer, norm: Linear, project_text: Producer | None, norm_text: Linear
        ) -> Tensor:
            x = norm(project().unflatten(-1, (-1, attn.head_dim)))
            if project_text is None:
                return x
            y = norm_text(project_text().unflatten(-1, (-1, attn.head_dim)))
            return torch.cat([y, x], dim=1)

        out = self.attend(
            lambda: joint(v, _same, text_v, _same),
            lambda: self.turned(joint(k, attn.norm_k, text_k, norm_text_k), image_rotary_emb),
            lambda: self.turned(joint(q, attn.norm_q, text_q, norm_text_q), image_rotary_emb),
            copy_out=text is None,  # goes out as it is, and who keeps it must not see it change
        )
        if text is None:
            return out
        return _streams_out(attn, out, text.shape[1])


class QwenImageProcessor(Processor):
    """Joint attention of Qwen-Image: text before image, each rotated by positions of its own."""

    def import_rotation(self) -> Any:
        """On ``(B, S, H, D)`` by complex factors, ``use_real=False``."""
        from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

        return apply_rotary_emb_qwen

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotation = None,
    ) -> tuple[Tensor, Tensor]:
        """Image rows and text rows; the mask is over all rows of the text, on every rank."""
        _refuse_mask("Qwen-Image", attention_mask)
        head_dim = attn.inner_dim // attn.heads
        image_freqs, text_freqs = (None, None) if image_rotary_emb is None else image_rotary_emb
        comm = self.forward.comm
        if text_freqs is not None and self.forward.is_text_sharded:
            text_freqs = text_freqs.chunk(comm.world_size, dim=0)[comm.rank]

        def part(x: Tensor, project: Linear, norm: Linear | None, freqs: Tensor | None) -> Tensor:
            y = project(x).unflatten(-1, (-1, head_dim))
            if norm is not None:
                y = norm(y)
            return y if freqs is None else self.rotate(y, freqs, use_real=False)

        def joint(text: Tensor, image: Tensor) -> Tensor:
            return torch.cat([text, image], dim=1)

        text, image = encoder_hidden_states, hidden_states
        out = self.attend(
            lambda: joint(
                part(text, attn.add_v_proj, None, None), part(image, attn.to_v, None, None)
            ),
            lambda: joint(
                part(text, attn.add_k_proj, attn.norm_added_k, text_freqs),
                part(image, attn.to_k, attn.norm_k, image_freqs),
            ),
            lambda: joint(
                part(text, attn.add_q_proj, attn.norm_added_q, text_freqs),
                part(image, attn.to_q, attn.norm_q, image_freqs),
            ),
            mask=self._joint_mask(encoder_hidden_states_mask, image),
        )
        return _streams_out(attn, out, text.shape[1])

    def _joint_mask(self, text_mask: Tensor | None, image: Tensor) -> Tensor | None:
        """``(B, 1, 1, T + S_global)``: image rows are always attended to."""
        if text_mask is None:
            return None
        rows = image.shape[1] * self.forward.comm.world_size
        every = text_mask.new_ones(text_mask.shape[0], rows)
        return torch.cat([text_mask, every], dim=1)[:, None, None, :]


class HunyuanVideoProcessor(RotatedPerHead):
    """Joint attention of HunyuanVideo: text behind image, without positions; with a mask."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotation = None,
    ) -> tuple[Tensor, Tensor]:
        """Image rows and text rows; the mask is over all rows of image and text, on every rank."""
        count = encoder_hidden_states.shape[1]
        is_one_stream = attn.add_q_proj is None
        both = torch.cat([hidden_states, encoder_hidden_states], dim=1) if is_one_stream else None

        def part(x: Tensor, project: Linear, norm: Linear | None) -> Tensor:
            y = project(x).unflatten(2, (attn.heads, -1))
            return y if norm is None else norm(y)

        def joint(letter: str, is_turned: bool) -> Tensor:
            project, norm = getattr(attn, f"to_{letter}"), getattr(attn, f"norm_{letter}", None)
            if both is not None:
                x = part(both, project, norm)
                if not is_turned:
                    return x
                image, text = x[:, :-count], x[:, -count:]
            else:
                image = part(hidden_states, project, norm)
                text = part(
                    encoder_hidden_states,
                    getattr(attn, f"add_{letter}_proj"),
                    getattr(attn, f"norm_added_{letter}", None),
                )
            if is_turned:
                image = self.turned(image, image_rotary_emb)
            return torch.cat([image, text], dim=1)

        has_projection = getattr(attn, "to_out", None) is not None
        out = self.attend(
            lambda: joint("v", False),
            lambda: joint("k", True),
            lambda: joint("q", True),
            mask=attention_mask,
            is_text_first=False,
            copy_out=not has_projection,
        )
        image, text = out[:, :-count], out[:, -count:]
        if has_projection:
            image = _projected_out(attn, image)
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return image, text


# ---- what they share -----------------------------------------------------------------------------


def _projections(
    attn: Any, x: Tensor, names: tuple[str, str, str], fused: str
) -> tuple[Producer, Producer, Producer]:
    """What computes V, K and Q of ``x``, ``(B, S, H * D)``; views of one product where fused."""
    if attn.fused_projections:
        q, k, v = getattr(attn, fused)(x).chunk(3, dim=-1)
        return (lambda: v), (lambda: k), (lambda: q)
    to_v, to_k, to_q = (getattr(attn, name) for name in names)
    return (lambda: to_v(x)), (lambda: to_k(x)), (lambda: to_q(x))


def _projected_out(attn: Any, x: Tensor) -> Tensor:
    for layer in attn.to_out:  # a projection, and a dropout where there is one
        x = layer(x)
    return x


def _streams_out(attn: Any, out: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Image rows and text rows, projected, of rows that begin with ``count`` of text."""
    return (
        _projected_out(attn, out[:, count:].contiguous()),
        attn.to_add_out(out[:, :count].contiguous()),
    )


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring pairs of ``x`` ``(B, S, H, D)``; each factor is there twice in a row."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x)


def _same(x: Tensor) -> Tensor:
    return x


def _refuse_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None:
        message = (
            f"{name}: an attention_mask over sharded rows is not supported; "
            f"leave it out, or close() the parallel model first"
        )
        raise ValueError(message)
