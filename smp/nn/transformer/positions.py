"""A token's position for an attention: rotations of channels, and ALiBi."""

import math

import torch
from torch import Tensor


def rotate(x: Tensor, dim: int, base: float, pairs: str) -> Tensor:
    """The first ``dim`` channels of each head rotated by their position.

    Args:
        x: ``[samples, heads, positions, channels]``, of positions 0 and on.
        dim: even.
        base: of the angles: position * base ** (-2 i / dim).
        pairs: "neighbours" rotates channels 2i and 2i + 1, "halves" i and i + dim / 2.

    Source: Su et al., RoFormer, arXiv:2104.09864.
    """
    turned, rest = x[..., :dim], x[..., dim:]
    # Angles are float32 in the models of loaded weights.
    steps = torch.arange(0, dim, 2, dtype=torch.int64, device=x.device).float() / dim
    at = torch.arange(x.size(2), dtype=torch.int64, device=x.device).float()
    angles = at[:, None] * (1.0 / base**steps)[None, :]
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    if pairs == "neighbours":
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out, rest), -1) if rest.size(-1) else out


def alibi(heads: range, of: int, keys: int, most: int, like: Tensor) -> Tensor:
    """ALiBi's terms for the scores of some heads, ``[1, heads, 1, keys]``.

    A query's own position counts as the last key; softmax does not mind a constant a row.

    Args:
        heads: the numbers of these, of ``of`` in all.
        most: the slopes fall from 2 ** (-most / of') to 2 ** -most.

    Source: Press et al., arXiv:2108.12409.
    """
    wide = 2 ** math.ceil(math.log2(of))
    # Made there: a copy from the host would wait for the device.
    at = torch.arange(heads.start, heads.stop, dtype=torch.float64, device=like.device)
    if wide != of:  # the paper's order where heads are no power of two: 1, 3, ..., 0, 2, ...
        at = 2 * at + torch.where(2 * at < wide, 1, -wide)
    own = (-most / wide * (at + 1)).exp2().to(like.dtype)
    distance = torch.arange(1 - keys, 1, dtype=like.dtype, device=like.device)
    return own[None, :, None, None] * distance[None, None, None, :]
