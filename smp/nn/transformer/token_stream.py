"""The residual stream of a transformer, and how the tp_ranks share it: see `TokenStream`."""

import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from smp.nn.layer_norm import DistributedLayerNorm, FusedLayerNorm
from smp.nn.transformer.options import Options
from smp.nn.transformer.seeds import new_dropout, new_seed, seeds_of
from smp.nn.transformer.split_parts import PartOfSum
from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.rows import kernels
from smp.tensor_parallel.rows.autocast import computed_in
from smp.tensor_parallel.rows.gathered_linears import gathered_linears, is_hooked
from smp.tensor_parallel.rows.kernels import Dropout


class Source(NamedTuple):
    """Samples with their tokens joined: those of one tp_rank, or those common to all.

    Attributes:
        samples, positions: of the residual stream.
        keys: positions for its attention to look at.
        mask: shape of its attention mask; None: it has none.
        seed: of its attention's dropout; 0: it drops nothing.
    """

    samples: int
    positions: int
    keys: int
    mask: tuple[int, ...] | None
    seed: int

    @property
    def tokens(self) -> int:
        """Rows of its residual stream."""
        return self.samples * self.positions


def _length_of_mask(source: Source) -> int:
    return 0 if source.mask is None else math.prod(source.mask)


def _is_alike(source: Source, other: Source) -> bool:
    """Whether samples of both can be in one batch without dropout."""
    if source.seed or (source.positions, source.keys) != (other.positions, other.keys):
        return False
    if source.mask is None or other.mask is None:
        return source.mask is other.mask
    return source.mask[0] == source.samples and source.mask[1:] == other.mask[1:]


def _in_batches(sources: list[Source]) -> list[Source]:
    """All as one where their samples are alike: the result then needs no joining copy."""
    first = sources[0]
    if len(sources) == 1 or not all(_is_alike(of, first) for of in sources):
        return sources
    samples = sum(of.samples for of in sources)
    mask = None if first.mask is None else (samples, *first.mask[1:])
    return [first._replace(samples=samples, mask=mask)]


class Required(NamedTuple):
    """Whether tokens, cross-attention's states, and masks require grad on any tp_rank."""

    hidden: bool
    states: bool
    mask: bool


class TokenStream:
    """The tokens of a hidden state, and the tp_ranks' way to share them.

    A rank normalises, drops out and adds on its own:

    - `OwnSamples`: samples of its own;
    - `SameSamples`: samples common to all ranks (``prescaled_batch``);
    - `OwnPositions`: of such samples some positions;
    - `OwnChannels`: some channels of all samples.

    Linears and attention have the tokens of all `sources`, and each rank some channels or heads
    of them: ``first`` leads there and ``last`` back.  ``enter``, ``enter_states`` and
    ``enter_mask`` make the user's tensors the rank's own, and ``leave`` makes the user's result
    of these.  Where these change anything (``TRAVELS``), the outermost module calls them.
    Modules in it get the stream behind their input: ``(hidden, mask, stream)``.

    Attributes:
        sources: of the tokens in linears and attention, one behind the other.
        batches: the sources as attention takes them.
        crossed: the stream of the cross-attentions in the module; None: they have none.
    """

    TRAVELS: ClassVar[bool] = False

    def __init__(self, options: Options, sources: list[Source], required: Required) -> None:
        self.options, self.sources, self.required = options, sources, required
        self.batches = _in_batches(sources)
        self.crossed: TokenStream | None = None

    @property
    def tokens(self) -> list[int]:
        """Rows of each source."""
        return [source.tokens for source in self.sources]

    @property
    def others(self) -> list[int]:
        """Rows of each source's states for cross-attention."""
        return [source.samples * source.keys for source in self.sources]

    def seeded(self, seed: int) -> "TokenStream":
        """The same for another attention layer, with new seeds.

        Args:
            seed: of the dropout of this rank's samples; 0: it drops nothing.
        """
        if not self.options.attention_dropout_prob:
            return self
        seeds = seeds_of(seed)
        other = copy.copy(self)
        other.sources = [
            source._replace(seed=one) for source, one in zip(self.sources, seeds, strict=True)
        ]
        other.batches = _in_batches(other.sources)
        return other

    # --------------------------------------------------------------------- in and out

    def enter(self, hidden: Tensor) -> Tensor:
        """This rank's own of ``[samples, positions, channels]``."""
        return primitives.requiring(hidden, self.required.hidden)

    def enter_states(self, states: Tensor) -> Tensor:
        """The input of ``first_of_states``, from cross-attention's states."""
        return primitives.requiring(states, self.required.states)

    def enter_mask(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """The input of ``masks``; to be added to scores of such tokens as ``like``."""
        dtype = computed_in(like)
        if len(self.sources) == 1:
            if mask is None:
                return None
            mask = mask.to(dtype)
            return primitives.bwd_allreduce_for_tp(mask) if mask.requires_grad else mask
        lengths = self._lengths_of_masks()
        if not any(lengths):
            return None
        own = like.new_zeros(0, dtype=dtype) if mask is None else mask.to(dtype).reshape(-1)
        return primitives.gather(primitives.requiring(own, self.required.mask), 0, lengths)

    def leave(self, hidden: Tensor) -> Tensor:
        """``[samples, positions, channels]`` again."""
        return hidden

    # ----------------------------------------------------------------------- linears

    @property
    def lengths(self) -> list[int]:
        """Rows of each tp_rank's own."""
        return self.tokens

    def first(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        """Linears of own tokens: of each all sources' tokens, ``[tokens, own outputs]``."""
        return self._gathered(x, self.lengths, linears)

    def first_of_states(self, states: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        """Likewise for cross-attention's states; here of states alike on all ranks."""
        x = primitives.bwd_allreduce_for_tp(states.reshape(-1, states.size(-1)))
        return [linear(x) for linear in linears]

    def last(self, x: Tensor, linear: PartOfSum, like: Tensor) -> Tensor:
        """A linear, without its bias, of all sources' tokens: of these the own.

        Args:
            x: ``[tokens, own inputs]``.
            linear: with a slice of its inputs.
            like: the residual stream, with the shape of the result.
        """
        return primitives.reduce_scatter(linear(x), 0, self.lengths).view(like.shape)

    def _gathered(
        self, x: Tensor, lengths: list[int], linears: Sequence[nn.Linear]
    ) -> list[Tensor]:
        rows = x.reshape(-1, x.size(-1))
        return gathered_linears(rows, lengths, linears, self.options.optimizes() == "speed")

    # --------------------------------------------------------------------- attention

    def sequences(self, x: Tensor, of_states: bool = False) -> Sequence[Tensor]:
        """Each batch's rows of the result of ``first``, or ``first_of_states``."""
        return x.split(
            [of.samples * (of.keys if of_states else of.positions) for of in self.batches]
        )

    def joined(self, sequences: Sequence[Tensor]) -> Tensor:
        """The batches' rows as ``last`` takes them."""
        return torch.cat(list(sequences)) if len(sequences) > 1 else sequences[0]

    def masks(self, mask: Tensor | None) -> list[Tensor | None]:
        """Each batch's mask."""
        if mask is None or len(self.sources) == 1:
            return [mask] * len(self.batches)
        lengths = [_length_of_mask(of) for of in self.batches]
        parts = zip(self.batches, mask.split(lengths), strict=True)
        return [None if of.mask is None else part.view(of.mask) for of, part in parts]

    def _lengths_of_masks(self) -> list[int]:
        return [_length_of_mask(of) for of in self.sources]

    # -------------------------------------------------------------------- own tokens

    def add(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: FusedLayerNorm | DistributedLayerNorm | None,
        training: bool,
    ) -> Tensor:
        """``norm(residual + dropout(x + bias))``, all of own tokens."""
        drops = self.dropouts(x, training)
        out_dtype, fp32 = residual.dtype, self.options.fp32_residual_addition
        if fp32:
            x, residual = x.float(), residual.float()
            bias = None if bias is None else bias.float()
        elif bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)  # under autocast
        if isinstance(norm, FusedLayerNorm) and not fp32 and not is_hooked(norm):
            out, _ = kernels.bias_dropout_residual_layer_norm(
                x, bias, residual, norm.weight, norm.bias, norm.eps, drops[0]
            )
            return out
        if len(drops) == 1:
            total = kernels.bias_dropout_residual(x, bias, residual, drops[0])
        else:
            parts = zip(x.split(self.tokens), residual.split(self.tokens), drops, strict=True)
            total = torch.cat(
                [kernels.bias_dropout_residual(y, bias, on, drop) for y, on, drop in parts]
            )
        total = total.to(out_dtype)
        return total if norm is None else norm(total)

    def dropouts(self, x: Tensor, training: bool) -> list[Dropout | None]:
        """The dropout of own tokens: of all rows together, or of each source's."""
        p = self.options.hidden_dropout_prob if training else 0.0
        return [self._dropout(x, p) if p else None]

    def _dropout(self, x: Tensor, p: float) -> Dropout:
        return new_dropout(x, p)


class OwnSamples(TokenStream):
    """Samples of one tp_rank alone.

    Their tokens are gathered, rank behind rank, with sequences of any lengths; sums go back to
    the tokens' own rank.
    """

    def first_of_states(self, states: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        return self._gathered(states, self.others, linears)


class SameSamples(TokenStream):
    """Samples common to all tp_ranks, whole; sums stay with all."""

    def first(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        return self.first_of_states(x, linears)

    def last(self, x: Tensor, linear: PartOfSum, like: Tensor) -> Tensor:
        return primitives.fwd_allreduce_for_tp(linear(x)).view(like.shape)


class OwnPositions(TokenStream):
    """Some positions of each of the samples common to all tp_ranks.

    They are gathered, piece behind piece, each of all samples; sums go back to the positions'
    own rank.
    """

    TRAVELS = True

    @property
    def positions(self) -> list[int]:
        """The number for each tp_rank."""
        return group.shares(self.sources[0].positions)

    @property
    def lengths(self) -> list[int]:
        return [self.sources[0].samples * count for count in self.positions]

    def enter(self, hidden: Tensor) -> Tensor:
        return primitives.own_part(hidden, 1, self.positions)

    def leave(self, hidden: Tensor) -> Tensor:
        return primitives.gather_alike(hidden, 1, self.positions)

    def sequences(self, x: Tensor, of_states: bool = False) -> Sequence[Tensor]:
        if of_states:
            return [x]
        pieces = zip(x.split(self.lengths), self.positions, strict=True)
        samples, width = self.sources[0].samples, x.size(-1)
        by_sample = torch.cat([piece.view(samples, n, width) for piece, n in pieces], 1)
        return [by_sample.flatten(0, 1)]

    def joined(self, sequences: Sequence[Tensor]) -> Tensor:
        of = self.sources[0]
        by_sample = sequences[0].view(of.samples, of.positions, sequences[0].size(-1))
        return torch.cat([piece.flatten(0, 1) for piece in by_sample.split(self.positions, 1)])

    def _dropout(self, x: Tensor, p: float) -> Dropout:
        width, first = x.size(-1), sum(self.positions[: group.rank()])
        all_of_a_sample = sum(self.positions) * width
        return Dropout(
            p, new_dropout(x, p).seed, first * width, width, x.size(1), all_of_a_sample
        )


class OwnChannels(TokenStream):
    """Some channels of all samples: those of all tp_ranks, or those common to all.

    A hidden state is ``[tokens, own channels]``.  All linears are cut by their inputs, and of
    each sum a rank keeps some outputs.  Source: the SageMaker paper, appendix F.2.
    """

    TRAVELS = True

    @property
    def channels(self) -> list[int]:
        """The number for each tp_rank."""
        return group.shares(self.options.hidden_size)

    def enter(self, hidden: Tensor) -> Tensor:
        return self._own(super().enter(hidden), self.tokens)

    def enter_states(self, states: Tensor) -> Tensor:
        return self._own(super().enter_states(states), self.others)

    def _own(self, x: Tensor, lengths: list[int]) -> Tensor:
        tokens = x.reshape(-1, x.size(-1))
        if group.same_samples():
            return primitives.own_part(tokens, 1, self.channels)
        return primitives.scatter_and_merge(tokens, 1, 0, self.channels, lengths)

    def leave(self, hidden: Tensor) -> Tensor:
        if group.same_samples():
            of, own = self.sources[0], primitives.gather_alike(hidden, 1, self.channels)
        else:
            of = self.sources[group.rank()]
            own = primitives.scatter_and_merge(hidden, 0, 1, self.tokens, self.channels)
        return own.view(of.samples, of.positions, own.size(-1))

    def first(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        sums = zip(self._kept(x, linears), linears, strict=True)
        return [y if of.bias is None else y + of.bias.to(y.dtype) for y, of in sums]

    def first_of_states(self, states: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        return self.first(states, linears)

    def last(self, x: Tensor, linear: PartOfSum, like: Tensor) -> Tensor:
        return self._kept(x, [linear])[0]

    def _kept(self, x: Tensor, linears: Sequence[Any]) -> list[Tensor]:
        """This rank's outputs of the sums, ``[tokens, outputs]``, of all in one collective."""
        # Transposed: the scatter is of rows; joining the terms copies them anyway.
        terms = [linear(x).t().split(linear.kept) for linear in linears]
        of_ranks = [piece for pieces in zip(*terms, strict=True) for piece in pieces]
        lengths = [sum(of) for of in zip(*(linear.kept for linear in linears), strict=True)]
        own = primitives.reduce_scatter(torch.cat(of_ranks), 0, lengths)
        counts = [linear.kept[group.rank()] for linear in linears]
        return [part.t().contiguous() for part in own.split(counts)]

    def dropouts(self, x: Tensor, training: bool) -> list[Dropout | None]:
        p, width = self.options.hidden_dropout_prob, self.options.hidden_size
        if not p:
            return [None]
        seeds = seeds_of(new_seed() if training else 0)
        first = sum(self.channels[: group.rank()])
        return [Dropout(p, seed, first, width) if seed else None for seed in seeds]
