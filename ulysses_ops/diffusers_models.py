"""Models of ``diffusers`` whose sequence is sharded between the ranks of a communicator.

Image rows are cut by hooks (:mod:`ulysses_ops.diffusers_plans`), attention goes through processors
of our own (:mod:`ulysses_ops.diffusers_attention`), and our operators put the rows of the result
together. ``diffusers`` is imported where it is used, never with this module.
"""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .agreement import find_disagreement
from .communicator import UlyssesCommunicator
from .diffusers_attention import Forward, Processor
from .diffusers_plans import REFUSED_INPUTS, CutRows, Family, description, family_of, is_sharded
from .errors import UlyssesError


def parallelize(
    model: nn.Module, comm: UlyssesCommunicator, *, forward: Forward | None = None
) -> ParallelModel:
    """Make a ``diffusers`` transformer run on its share of the sequence, in place.

    Every rank calls the model with the same, whole inputs, and gets the whole output. In between it
    holds ``1 / world_size`` of the image rows; attention runs over the whole sequence of
    ``H / world_size`` heads.

    =============================== ================================================================
    ``WanTransformer3DModel``,      cross attention to text needs no exchange: every rank holds all
    ``LTXVideoTransformer3DModel``  text rows
    ``FluxTransformer2DModel``,     text rows T of joint attention are sharded like image rows where
    ``QwenImageTransformer2DModel`` T is divisible by the number of ranks: cheapest, since every
    ``HunyuanVideoTransformer3D-    rank computes its share of them only. Else they are replicated,
    Model``                         each rank attends with its own heads of them, and the result of
                                    the other heads is sent to it. Both are exact; masks are put
                                    into the order of the keys.
    =============================== ================================================================

    Runs eagerly, under ``torch.compile``, and, after one eager call that reserves windows, in CUDA
    graphs (:func:`ulysses_ops.graphs.capture_step`). Under ``torch.no_grad()`` or
    ``torch.inference_mode()`` exchanges go through windows, V before K before Q; otherwise through
    the functional operators. Attention backends chosen by ``model.set_attention_backend`` are kept.

    Args:
        model: One of the classes above, of ``diffusers`` 0.42.1, on ``comm.device``, alike on every
            rank. Not compiled yet; with stock attention processors.
        comm: An open communicator; ``num_attention_heads`` must be divisible by its number of
            ranks. One communicator serves any number of models; it has to stay open meanwhile.
        forward: What moves rows between the ranks, of this communicator; the benchmark passes other
            ways of doing so.

    Returns:
        A handle whose :meth:`ParallelModel.close` gives the model back as it was.

    Raises:
        ValueError: the version, the class, the heads or the processors cannot be served, the model
            is parallel already, or ranks gave different models; the same text on every rank.
            Calls of the model raise it where the image rows are not divisible by the number of
            ranks, or an input cannot be served, before any rank waits.
        AgreementError: a rank did not come within ``comm.timeout_s``.

    Collective: every rank calls it with its copy of the same model.
    """
    comm.check_open("parallelize")
    family, failures = comm.agreement.attempt("parallelize", lambda: family_of(model, comm))
    if failures:
        message = f"parallelize: {'; '.join(failures)}"
        raise ValueError(message)
    assert family is not None
    differing = find_disagreement(comm.agreement.exchange("parallelize", description(model)))
    if differing is not None:
        message = f"parallelize: models differ between ranks: {differing.describe()}"
        raise ValueError(message)
    return ParallelModel(model, comm, family, forward or Forward(comm))


class ParallelModel:
    """A model that :func:`parallelize` has changed, until :meth:`close`; a context manager."""

    def __init__(
        self, model: Any, comm: UlyssesCommunicator, family: Family, forward: Forward
    ) -> None:
        """Put processors and hooks in place; local, :func:`parallelize` has checked everything."""
        self._model = model
        self._comm = comm
        self._family = family
        self._forward = forward
        self._stock: dict[str, Any] = {
            name: processor for name, processor in model.attn_processors.items() if is_sharded(name)
        }
        self._own: dict[str, Processor] = {}
        for name, stock in self._stock.items():
            self._own[name] = family.processor(self._forward, stock._attention_backend)
        model.set_attn_processor({**model.attn_processors, **self._own})
        self._layers = [
            (model.get_submodule(name.removesuffix(".processor")), own)
            for name, own in self._own.items()
        ]
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.proj_out.register_forward_hook(self._end),
        ]
        self._inputs = _Inputs(model)
        entry = model.get_submodule(family.entry)
        self._entry_inputs = _Inputs(entry)
        self._hooks.append(entry.register_forward_pre_hook(self._enter, with_kwargs=True))
        self._cut = CutRows(model, comm, family)

    def close(self) -> None:
        """Give the model back as it was. Local, idempotent; works with a closed communicator."""
        if not self._own:
            return
        self._cut.undo()
        for hook in self._hooks:
            hook.remove()
        present = self._model.attn_processors
        # A processor that somebody has put in place of ours stays.
        back = {name: self._stock[name] for name, own in self._own.items() if present[name] is own}
        self._model.set_attn_processor({**present, **back})
        self._own, self._layers, self._hooks = {}, [], []

    def __enter__(self) -> ParallelModel:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # ---- around the forward of the model ---------------------------------------------------------

    def _begin(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Refuse what cannot be served, and note what the processors need to know of this call."""
        inputs = self._inputs.by_name(args, kwargs)
        world_size = self._comm.world_size
        name = type(model).__name__
        rows = self._family.rows(model.config, inputs["hidden_states"])
        if rows % world_size != 0:
            message = (
                f"{name}: the {rows} image rows of hidden_states "
                f"{list(inputs['hidden_states'].shape)} must be divisible by "
                f"world_size={world_size}; choose another resolution or number of frames"
            )
            raise ValueError(message)
        for refused in REFUSED_INPUTS:
            if inputs.get(refused) is not None:
                message = f"{name}: {refused} cannot be sharded; close() the parallel model first"
                raise ValueError(message)
        if not torch.compiler.is_compiling():
            self._check_processors(name)
        self._forward.is_under_way = True
        self._forward.image_rows = rows
        if self._family.text_inputs:
            self._forward.text_rows = inputs["encoder_hidden_states"].shape[1]
        timestep = inputs["timestep"]
        # One time for every row, where part of a video is given.
        if timestep is not None and timestep.dim() == 2 and timestep.shape[1] == rows:
            inputs["timestep"] = timestep.chunk(world_size, dim=1)[self._comm.rank]
        return self._inputs.passed(inputs, args)

    def _check_processors(self, name: str) -> None:
        for layer, own in self._layers:
            if layer.processor is not own:
                message = (
                    f"{name}: an attention processor was set after parallelize, and would attend "
                    f"to the rows of one rank; close() the parallel model, then set it"
                )
                raise UlyssesError(message)

    def _enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's share of the text rows of joint attention, where they are sharded."""
        inputs = self._entry_inputs.by_name(args, kwargs)
        if self._forward.is_text_sharded:
            for name in self._family.text_inputs:
                inputs[name] = inputs[name].chunk(self._comm.world_size, dim=-2)[self._comm.rank]
        return self._entry_inputs.passed(inputs, args)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Put the rows of all ranks together."""
        self._forward.is_under_way = False
        return self._forward.replicate(output)


class _Inputs:
    """Arguments of a forward by name, whichever way they were passed."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._names = [parameter.name for parameter in parameters if parameter.kind is kind]

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments that have names."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def passed(
        self, by_name: dict[str, Any], args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """By name, which the hooks of ``diffusers`` find without looking at signatures.

        By place where there are more arguments than names.
        """
        rest = args[len(self._names) :]
        if not rest:
            return (), by_name
        named = dict(by_name)
        return (*(named.pop(name) for name in self._names), *rest), named
