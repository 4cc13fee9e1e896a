"""Recommenders: tables that are looked up hold most of the parameters.

Sources: He et al., Neural Collaborative Filtering (2017); Naumov et al., Deep Learning
Recommendation Model (2019).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

MakeTable = Callable[[int, int], nn.Module]  # (rows, width) -> what maps indices to vectors


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linears with ReLU behind each."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class NCF(nn.Module):
    """Neural matrix factorization: an MLP and a product, each with tables of its own.

    Args:
        users, items: rows of the tables.
        mlp_width, gmf_width: of a vector for the MLP, and for the product.
        make_table: makes one of the four tables.

    Shapes: users and items ``[samples]``; the logit of each, ``[samples]``.
    """

    def __init__(
        self,
        users: int,
        items: int,
        mlp_width: int,
        gmf_width: int,
        make_table: MakeTable = nn.Embedding,
    ) -> None:
        super().__init__()
        self.mlp_users = make_table(users, mlp_width)
        self.mlp_items = make_table(items, mlp_width)
        self.gmf_users = make_table(users, gmf_width)
        self.gmf_items = make_table(items, gmf_width)
        top = mlp_width // 4
        self.mlp = mlp([2 * mlp_width, mlp_width, mlp_width // 2, top])
        self.out = nn.Linear(top + gmf_width, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        deep = self.mlp(torch.cat([self.mlp_users(users), self.mlp_items(items)], -1))
        product = self.gmf_users(users) * self.gmf_items(items)
        return self.out(torch.cat([deep, product], -1)).squeeze(-1)


class DLRM(nn.Module):
    """Numbers and categories: vectors of one width, and the products of all pairs of them.

    Args:
        numbers: of each sample.
        rows: of each category's table.
        width: of the vectors.
        make_table: makes a table.

    Shapes: numbers ``[samples, numbers]``, categories ``[samples, tables]``; the logit of each
    sample, ``[samples]``.
    """

    def __init__(
        self,
        numbers: int,
        rows: Sequence[int],
        width: int,
        make_table: MakeTable = nn.Embedding,
    ) -> None:
        super().__init__()
        self.bottom = mlp([numbers, 2 * width, width])
        self.tables = nn.ModuleList(make_table(n, width) for n in rows)
        vectors = 1 + len(rows)
        self.top = mlp([width + vectors * (vectors - 1) // 2, 2 * width])
        self.out = nn.Linear(2 * width, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found], 1)
        first, second = torch.tril_indices(len(found) + 1, len(found) + 1, offset=-1)
        products = (vectors @ vectors.mT)[:, first, second]
        return self.out(self.top(torch.cat([dense, products], -1))).squeeze(-1)
