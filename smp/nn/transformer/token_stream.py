"""The residual stream: own samples' tokens outside of what is split, everybody's inside.

A tensor ``[samples, positions, channels]`` is rows of tokens.  On the way in, the tokens of
all tp_ranks are joined, rank behind rank, whatever the lengths of their sequences; on the way
out, what is added up goes back to the tokens' own rank.

Ranks that are fed the same batch (``prescaled_batch``) have the same stream, and what they add
up stays with all.  There a ``DistributedTransformer`` that is to save memory cuts the stream
along its positions: a rank's own tokens are some positions of every sample.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp.nn.layer_norm import FusedLayerNorm
from smp.nn.transformer.options import Options
from smp.tensor_parallel import gradients, group, kernels, primitives
from smp.tensor_parallel.gathered_linears import gathered_linears
from smp.tensor_parallel.kernels import Dropout
from smp.tensor_parallel.linears import cut_weights
from smp.tensor_parallel.slices import Slices


class Source(NamedTuple):
    """A tp_rank whose tokens were joined.

    Attributes:
        samples, positions: of its residual stream.
        keys: positions that its attention looks at.
        mask: shape of its attention mask; None: it has none.
        seed: of its attention's dropout; 0: it drops nothing.
        required: whether tokens, what its attention looks at, and the mask require grad.
    """

    samples: int
    positions: int
    keys: int
    mask: tuple[int, ...] | None
    seed: int
    required: tuple[bool, bool, bool]

    @property
    def tokens(self) -> int:
        """Rows that its residual stream has."""
        return self.samples * self.positions


_MASK_AXES = 4


SHARDED = "_smp_has_sharded_stream"  # in the __dict__ of modules of such a transformer


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's stream is some positions of samples that all tp_ranks have."""
    return group.size() > 1 and group.same_samples() and SHARDED in module.__dict__


def has_stream_of_all(module: nn.Module) -> bool:
    """Whether a module's stream is the same on all tp_ranks."""
    return group.same_samples() and not is_sharded(module)


def meet(own: Source, device: torch.device, sharded: bool) -> list[Source]:
    """What each tp_rank has; of ranks with the same stream, once.

    Collective over the TP_GROUP.  The seed of ranks with the same samples is tp_rank 0's.

    Args:
        own: what this rank has.
        device: of its tokens.
        sharded: whether ranks with the same samples have positions of their own.
    """
    if group.size() == 1:
        return [own]
    shape = own.mask or ()
    words = [own.samples, own.positions, own.keys, own.seed, own.mask is None, *own.required]
    words += [*shape, *[0] * (_MASK_AXES - len(shape))]
    alike = group.same_samples() and not sharded
    if alike and own.seed == 0:
        return [own]  # nothing can differ
    everyone = group.gather_numbers(words, device)
    if alike:
        return [own._replace(seed=everyone[0][3])]
    return [
        Source(n, s, k, None if no_mask else tuple(sizes), seed, (x > 0, states > 0, mask > 0))
        for n, s, k, seed, no_mask, x, states, mask, *sizes in everyone
    ]


def new_seed() -> int:
    """A seed of dropout, above 0; drawn from torch's generator on the host."""
    return int(torch.randint(1, 2**62, (), device="cpu").item())


def join(
    x: Tensor,
    lengths: Sequence[int],
    linears: Sequence[nn.Linear],
    keep: bool,
    of_all: bool,
) -> list[Tensor]:
    """Linears, cut by their outputs, of the tokens of all sources.

    Args:
        x: own tokens, ``[..., channels]``.
        lengths: tokens of each source.
        linears: that have ``x`` as their input.
        keep: see `gathered_linears`.
        of_all: whether ``x`` is the same on all tp_ranks.

    Returns:
        for each ``[all tokens, own outputs]``.
    """
    tokens = x.reshape(-1, x.size(-1))
    if of_all:
        tokens = primitives.bwd_allreduce_for_tp(tokens)
        return [linear(tokens) for linear in linears]
    return gathered_linears(tokens, list(lengths), linears, keep)


def lead_out(
    x: Tensor, linear: nn.Linear, lengths: Sequence[int], like: Tensor, of_all: bool
) -> Tensor:
    """A linear, cut by its inputs and without its bias, for the tokens' own ranks.

    Args:
        x: of all tokens this tp_rank's channels, ``[all tokens, own inputs]``.
        linear: with a slice of its inputs.
        lengths: tokens of each source.
        like: the residual stream, ``[samples, positions, channels]``.
        of_all: whether that is the same on all tp_ranks.
    """
    part = F.linear(x, linear.weight)
    if of_all:
        own = primitives.fwd_allreduce_for_tp(part)
    else:
        own = primitives.reduce_scatter(part, 0, list(lengths))
    return own.view(*like.shape[:-1], own.size(-1))


def add_to_stream(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: FusedLayerNorm | None,
    options: Options,
    training: bool,
    positions: Sequence[int] | None = None,
) -> Tensor:
    """``norm(residual + dropout(x + bias))``, all of own tokens.

    Args:
        positions: of a stream that is cut along its positions, how many each tp_rank has.
    """
    p = options.hidden_dropout_prob if training else 0.0
    drop = _dropout_of_stream(x, p, positions) if p else None
    out_dtype = residual.dtype
    if options.fp32_residual_addition:
        x, residual = x.float(), residual.float()
        bias = None if bias is None else bias.float()
    elif bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)  # under autocast
    if norm is None:
        return kernels.bias_dropout_residual(x, bias, residual, drop).to(out_dtype)
    if options.fp32_residual_addition:
        return norm(kernels.bias_dropout_residual(x, bias, residual, drop).to(out_dtype))
    out, _ = kernels.bias_dropout_residual_layer_norm(
        x, bias, residual, norm.weight, norm.bias, norm.eps, drop
    )
    return out


def dropout_of_stream(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of own tokens."""
    if not training or not p:
        return x
    return kernels.dropout(x, _dropout_of_stream(x, p, None))


def _dropout_of_stream(x: Tensor, p: float, positions: Sequence[int] | None) -> Dropout:
    """Ranks with the same samples drop the same."""
    seed = new_seed()
    if group.size() > 1 and group.same_samples():
        seed = group.gather_numbers([seed], x.device)[0][0]
    if positions is None:
        return Dropout(p, seed)
    width, first = x.size(-1), sum(positions[: group.rank()])
    return Dropout(p, seed, first * width, width, x.size(1), sum(positions) * width)


def cut_along_positions(module: nn.Module) -> None:
    """Have the modules of a transformer work on own positions where samples are the same.

    Their parameters that are whole see own positions alone there.
    """
    for one in module.modules():
        one.__dict__[SHARDED] = True
    gradients.mark_partial(module)


def cut_linear(linear: nn.Linear, by_outputs: bool, unit: int = 1) -> None:
    """Keep this tp_rank's slice of a linear.  Collective over the TP_GROUP.

    Args:
        by_outputs: cut weight and bias by outputs; else the weight by inputs, and the bias
            stays whole.
        unit: channels that stay together: the size of a head.
    """
    size = linear.out_features if by_outputs else linear.in_features
    slices = Slices.even(0 if by_outputs else 1, size, group.size(), unit)
    cut_weights(linear, slices, cut_bias=by_outputs)
    own = slices.local_size(group.rank())
    if by_outputs:
        linear.out_features = own
    else:
        linear.in_features = own
