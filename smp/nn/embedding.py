"""``DistributedEmbedding``: a table split over the TP_GROUP."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp import ranks
from smp.marks import PATH
from smp.slicing import split_parameters
from smp.slicing.slices import Slices, in_words
from smp.tensor_parallel import group, primitives
from smp.tensor_parallel.rows import same_samples
from smp.tensor_parallel.rows.linears import cut_weights
from smp.tensor_parallel.splits.distributed_module import DistributedModule, take_class


class DistributedEmbedding(nn.Embedding, DistributedModule):
    """``nn.Embedding`` cut along the embedding dimension, or by rows.

    The indices of all tp_ranks are gathered and looked up in each rank's slice.  Slices of the
    vectors then come back to the samples' own ranks; of rows, the sum of the vectors found.

    Args:
        num_embeddings, embedding_dim: of the whole; sizes need not divide.
        padding_idx, sparse: as in ``nn.Embedding``.
        max_norm, norm_type: likewise, of whole rows; all tp_ranks' indices are renormalised.
            Only where there are no replicas of the TP_GROUP.
        scale_grad_by_freq: likewise, by how often an index comes among all tp_ranks' samples
            in one call.
        weight: the whole table, instead of new values.
        initializer_range: standard deviation of the normal distribution of new values.
        vocab_parallel: cut by rows.
        skip_allgather: the indices are those of the whole TP_GROUP already.
        skip_scatter_and_merge: return this rank's slice of the vectors of all samples; of a
            table cut along the embedding dimension.
        device, dtype: of the table.

    Shapes: indices ``[samples, ...]``, output ``[samples, ..., embedding_dim]``.

    Raises:
        ValueError: ``skip_scatter_and_merge`` together with ``vocab_parallel``, or a weight of
            another shape.
    """

    vocab_parallel: bool
    gradient_factor = 1.0  # see smp.tensor_parallel.backward.gradients
    skip_allgather = False
    skip_scatter_and_merge = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        weight: Tensor | None = None,
        initializer_range: float = 0.02,
        skip_allgather: bool = False,
        skip_scatter_and_merge: bool = False,
        vocab_parallel: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if skip_scatter_and_merge and vocab_parallel:
            raise ValueError(
                "smp.nn.DistributedEmbedding: skip_scatter_and_merge=True with "
                "vocab_parallel=True: no rank has a slice of each vector of a table that is "
                "cut by its rows"
            )
        if weight is not None and weight.shape != (num_embeddings, embedding_dim):
            raise ValueError(
                f"smp.nn.DistributedEmbedding: weight of shape {list(weight.shape)}: the whole "
                f"table has [{num_embeddings}, {embedding_dim}]"
            )
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            device=device,
            dtype=dtype,
        )
        with torch.no_grad():
            if weight is not None:
                self.weight.copy_(weight)
            else:
                self.weight.normal_(0.0, initializer_range)
                if padding_idx is not None:
                    self.weight[padding_idx].zero_()
        self.skip_allgather = skip_allgather
        self.skip_scatter_and_merge = skip_scatter_and_merge
        self._split(vocab_parallel)
        if type(self) is DistributedEmbedding:  # a subclass may use its slice
            split_parameters.guard(self, type(self).__name__)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, *args: Any, **options: Any
    ) -> "DistributedEmbedding":
        """One with a slice of a table, as ``nn.Embedding.from_pretrained``.

        Args:
            embeddings: the whole table; it is copied.
            freeze: whether the table stays as it is.
            args, options: the options from ``padding_idx`` on.
        """
        make: Any = cls
        made = make(
            *embeddings.shape,
            *args,
            weight=embeddings,
            device=embeddings.device,
            dtype=embeddings.dtype,
            **options,
        )
        made.weight.requires_grad_(not freeze)
        return made

    @classmethod
    def take_over(cls, embedding: nn.Embedding, vocab_parallel: bool = False) -> None:
        """Turn an ``nn.Embedding`` into one, in place.  Collective over the TP_GROUP.

        Args:
            embedding: whole, with its weights; they become this rank's slice.
            vocab_parallel: cut by rows.
        """
        take_class(embedding, cls)
        embedding._split(vocab_parallel)  # type: ignore[operator]

    def _split(self, vocab_parallel: bool) -> None:
        self._refuse_norms_of_replicas()
        self.vocab_parallel = vocab_parallel
        axis, size = (0, self.num_embeddings) if vocab_parallel else (1, self.embedding_dim)
        slices = Slices.even(axis, size, group.size())
        cut_weights(self, slices)
        self._first_row = slices.ranges[group.rank()][0][0] if vocab_parallel else 0

    def _refuse_norms_of_replicas(self) -> None:
        """Each would renormalise the rows of its own samples, and the weights drift apart.

        Raises:
            NotImplementedError: there are replicas, and a ``max_norm``.
        """
        if self.max_norm is None or group.is_traced() or not ranks.state.is_initialized:
            return
        if ranks.rdp_size() > 1:
            where = self.__dict__.get(PATH, type(self).__name__)
            raise NotImplementedError(
                f"smp: '{where}' is to be split and has max_norm={self.max_norm}: each of its "
                f"{ranks.rdp_size()} replicas (rdp_size) would renormalise the rows of its own "
                "samples, and their weights would drift apart: leave max_norm out, or have one "
                "TP_GROUP of all ranks"
            )

    def extra_repr(self) -> str:
        """The whole module's sizes, and this rank's part of the weight."""
        return super().extra_repr() + in_words(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """The vectors of indices.  Collective over the TP_GROUP.

        Args:
            input: indices, ``[samples, ...]``, of this rank's samples; with ``skip_allgather``
                of all tp_ranks' samples, one rank's behind the other's.

        Returns:
            ``[own samples, ..., embedding_dim]``; with ``skip_scatter_and_merge``
            ``[all samples, ..., own channels]``.

        Raises:
            IndexError: an index is none of the rows.
        """
        own = input.reshape(-1)
        same_samples.check(self, own)
        if group.same_samples():
            vectors = self._of_same_samples(own)
            return vectors.view(*input.shape, vectors.size(-1))
        if self.skip_allgather:
            found = self._look_up(own)
            of_a_sample = own.numel() // max(len(input), 1)
            out_of = [n * of_a_sample for n in group.shares(len(input))]
        else:
            everyones, out_of = primitives.gather_all(own, 0)
            found = self._look_up(everyones)
        if self.vocab_parallel:
            vectors = primitives.reduce_scatter(found, 0, out_of)
        elif self.skip_scatter_and_merge:
            vectors = found
        else:
            shares = group.shares(self.embedding_dim)
            vectors = primitives.scatter_and_merge(found, 0, -1, out_of, shares)
        if vectors.size(0) == own.size(0):
            return vectors.view(*input.shape, vectors.size(-1))
        return vectors.view(-1, *input.shape[1:], vectors.size(-1))

    @property
    def divides_gradient(self) -> bool:
        """Whether the weight is used by `_look_up` alone, as far as this class knows."""
        return type(self).forward is DistributedEmbedding.forward

    def _of_same_samples(self, indices: Tensor) -> Tensor:
        found = self._look_up(indices)
        if self.vocab_parallel:
            return primitives.fwd_allreduce_for_tp(found)
        if self.skip_scatter_and_merge:
            return found
        return primitives.gather_alike(found, -1, group.shares(self.embedding_dim))

    def _look_up(self, indices: Tensor) -> Tensor:
        """This rank's slice of each index's vector; of rows, zeros for those of other ranks."""
        if self.vocab_parallel:
            self._check(indices)
        if self.max_norm is not None and not group.is_traced():
            self._renormalise(indices.unique())
        found = self._rows_of(indices)
        if self.scale_grad_by_freq and found.requires_grad:
            _, kinds, counts = indices.unique(return_inverse=True, return_counts=True)
            times = counts[kinds].unsqueeze(-1)
            found.register_hook(lambda gradient: gradient / times)
        if self.gradient_factor != 1.0 and found.requires_grad:
            found.register_hook(lambda gradient: gradient * self.gradient_factor)
        return found

    def _rows_of(self, indices: Tensor) -> Tensor:
        padding = self.padding_idx
        if not self.vocab_parallel:
            return F.embedding(indices, self.weight, padding, sparse=self.sparse)
        local, elsewhere = self._local(indices)
        if padding is not None:
            padding -= self._first_row
            padding = padding if 0 <= padding < self.weight.size(0) else None
        if self.sparse and not group.is_traced():
            # SparseAdam updates each row with an entry, also of zeros.
            own = ~elsewhere
            rows = F.embedding(local[own], self.weight, padding, sparse=True)
            found = rows.new_zeros(len(indices), rows.size(-1))
            return found.masked_scatter(own.unsqueeze(-1), rows)
        found = F.embedding(
            local.masked_fill(elsewhere, 0), self.weight, padding, sparse=self.sparse
        )
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def _local(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers in this rank's slice, and a mask of the rows of other ranks."""
        local = indices - self._first_row
        return local, (local < 0) | (local >= self.weight.size(0))

    def _check(self, indices: Tensor) -> None:
        if indices.device.type == "cpu" and indices.numel() and not group.is_traced():
            least, most = int(indices.min()), int(indices.max())
            if least < 0 or most >= self.num_embeddings:
                raise IndexError(
                    f"smp.nn.DistributedEmbedding: an index is {least if least < 0 else most}, "
                    f"of {self.num_embeddings} embeddings"
                )

    @torch.no_grad()
    def _renormalise(self, indices: Tensor) -> None:
        """Scale rows down to ``max_norm``, as ``torch.embedding_renorm_`` does.

        Args:
            indices: each once, alike on all tp_ranks.
        """
        if self.vocab_parallel:
            indices, elsewhere = self._local(indices)
            indices = indices[~elsewhere]
        rows = self.weight[indices]
        norms = torch.linalg.vector_norm(rows, self.norm_type, -1)
        if not self.vocab_parallel and group.size() > 1:
            parts = primitives.gather(norms[None], 0, [1] * group.size())
            norms = _norm_of_parts(parts, self.norm_type)
        factors = torch.where(norms > self.max_norm, self.max_norm / (norms + 1e-7), 1.0)
        self.weight[indices] = rows * factors.unsqueeze(-1).to(rows.dtype)


def _norm_of_parts(parts: Tensor, norm_type: float) -> Tensor:
    """The norm of each row, from those of its parts ``[parts, rows]``."""
    if norm_type == 0:
        return parts.sum(0)  # of nonzero elements
    return torch.linalg.vector_norm(parts, norm_type, 0)
