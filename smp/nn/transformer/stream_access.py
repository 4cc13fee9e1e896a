"""How the modules of a transformer come to their `TokenStream`."""

from typing import Any

import torch
from torch import Tensor

from smp.nn.transformer.options import Options
from smp.nn.transformer.seeds import seeds_of
from smp.nn.transformer.token_stream import (
    OwnChannels,
    OwnPositions,
    OwnSamples,
    Required,
    SameSamples,
    Source,
    TokenStream,
)
from smp.tensor_parallel import group
from smp.tensor_parallel.rows import same_samples

_MASK_AXES = 4


def form_of(options: Options) -> type[TokenStream]:
    """The tp_ranks' way to share the residual stream of a module with these options."""
    if options.splits_channels():
        return OwnChannels
    if group.size() == 1 or not group.same_samples():
        return OwnSamples
    return SameSamples if options.optimizes() == "speed" else OwnPositions


def given_stream(inputs: Any) -> tuple[Any, TokenStream | None]:
    """The input of a module, and the stream behind it, where a module around has made one."""
    if isinstance(inputs, tuple | list) and inputs and isinstance(inputs[-1], TokenStream):
        return inputs[:-1], inputs[-1]
    return inputs, None


def check_hidden(module: Any, hidden: Any) -> None:
    """Refuse any value but a hidden state of the module.

    Args:
        module: a distributed module, with ``options``.
        hidden: the user's.

    Raises:
        ValueError: the text names the module, the value found and the one wanted.
    """
    width = module.options.hidden_size
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.size(-1) != width:
        found = f"shape {list(hidden.shape)}" if isinstance(hidden, Tensor) else repr(hidden)
        raise ValueError(
            f"smp.nn.{type(module).__name__}: hidden of {found}: must be [samples, positions, "
            f"{width}]"
        )


def meet(
    module: Any,
    hidden: Tensor,
    states: Tensor | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> TokenStream:
    """The stream of a module called by the user.  Collective over the TP_GROUP.

    Args:
        module: a distributed module, with ``options``.
        hidden: ``[samples, positions, channels]``, as the user gives it.
        states: for its cross-attention; None: there is none.
        mask: of its attention, or cross-attention if there is.
        seed: of the attention's dropout of this rank's samples; 0: it drops nothing.

    Raises:
        TypeError: the mask is bool.
        ValueError: hidden or mask of another shape; ranks declared to have the same samples
            have others.
    """
    check_hidden(module, hidden)
    same_samples.check(module, hidden)
    return _meet(module.options, hidden, states, mask, seed)


def _meet(
    options: Options,
    hidden: Tensor,
    states: Tensor | None,
    mask: Tensor | None,
    seed: int = 0,
) -> TokenStream:
    if mask is not None and mask.dtype == torch.bool:
        raise TypeError(
            "smp.nn: the attention mask is bool: it is added to the scores, so give 0 where a "
            "position is seen and a large negative number where it is not"
        )
    if mask is not None and mask.dim() != _MASK_AXES:
        raise ValueError(
            f"smp.nn: the attention mask has shape {list(mask.shape)}: must be [samples, 1, 1, "
            "keys], added to the scores"
        )
    if mask is not None and mask.size(1) != 1 and group.size() > 1:
        raise ValueError(
            f"smp.nn: the attention mask has shape {list(mask.shape)}, and heads are split "
            "over the TP_GROUP: it must be one for all heads, [samples, 1, positions, keys]"
        )
    samples, positions, _ = hidden.shape
    own = Source(
        samples=samples,
        positions=positions,
        keys=positions if states is None else states.size(1),
        mask=None if mask is None else tuple(mask.shape),
        seed=seed,
    )
    required = Required(*map(_requires_grad, (hidden, states, mask)))
    form = form_of(options)
    if group.size() == 1:
        return form(options, [own], required)
    if group.same_samples():
        (seed,) = seeds_of(seed)
        return form(options, [own._replace(seed=seed)], required)
    return form(options, *_everyones(own, required))


def travelling(module: Any, inputs: tuple[Tensor | None, ...]) -> tuple | None:
    """The input of the layers in a module; None: the module's own.

    Args:
        module: called by the user, with ``options``.
        inputs: ``(hidden, mask)``, or ``(hidden, cross_states, mask, cross_mask)``.
    """
    if not form_of(module.options).TRAVELS:
        return None
    hidden, *others = inputs
    assert hidden is not None
    states, mask, cross_mask = others if len(others) == 3 else (None, *others, None)
    stream = meet(module, hidden, None, mask)
    entered = stream.enter(hidden)
    mask = stream.enter_mask(mask, hidden)
    if len(others) == 1:
        return entered, mask, stream
    if states is not None:
        stream.crossed = _meet(module.options, hidden, states, cross_mask)
        states = stream.crossed.enter_states(states)
        cross_mask = stream.crossed.enter_mask(cross_mask, hidden)
    return entered, states, mask, cross_mask, stream


def _everyones(own: Source, required: Required) -> tuple[list[Source], Required]:
    """The sources on all tp_ranks."""
    shape = own.mask or ()
    words = [own.samples, own.positions, own.keys, own.seed, own.mask is None, *required]
    words += [*shape, *[0] * (_MASK_AXES - len(shape))]
    everyones = group.gather_numbers(words)
    sources = [
        Source(samples, positions, keys, None if no_mask else tuple(sizes), seed)
        for samples, positions, keys, seed, no_mask, _, _, _, *sizes in everyones
    ]
    return sources, Required(*(any(theirs[i] for theirs in everyones) for i in (5, 6, 7)))


def _requires_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()
