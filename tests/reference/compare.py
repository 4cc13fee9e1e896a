"""Comparing what two runs gave: bit for bit, or within rounding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.objects import map_tensors, tensors_in


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Of all parameters; of a model that is distributed, of this rank's."""
    named = getattr(model, "local_named_parameters", model.named_parameters)
    return {name: parameter.grad for name, parameter in named()}


def assert_same_bits(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]
) -> None:
    """Every tensor of ``got`` has the bits of the one of that name in ``want``.

    ``got`` may be a part, such as one rank's.  A gradient that is None must be None.

    Raises:
        AssertionError: names the first tensor that differs, and how much.
    """
    for name, tensor in got.items():
        difference = _difference(tensor, want[name])
        assert not difference, f"{name}: {difference}"


def assert_same_outputs(got: Any, want: Any) -> None:
    """Two nested objects have the same tensors, bit for bit, and are equal otherwise."""
    pairs = list(zip(tensors_in(got), tensors_in(want), strict=True))
    for index, (a, b) in enumerate(pairs):
        difference = _difference(a, b)
        assert not difference, f"tensor {index} of the outputs: {difference}"
    a, b = (map_tensors(lambda tensor: tuple(tensor.shape), obj) for obj in (got, want))
    assert a == b, f"{a} instead of {b}"


def assert_close(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], relative: float
) -> None:
    """Equal within ``relative`` of the largest number in ``want``."""
    scale = max((float(t.abs().max()) for t in want.values() if t is not None), default=0)
    for name, tensor in got.items():
        other = want[name]
        assert (tensor is None) == (other is None), f"{name}: {tensor} instead of {other}"
        if tensor is not None:
            error = float((tensor - other).abs().max())
            assert error <= relative * scale, f"{name} is off by {error} of {scale}"


def _difference(got: Tensor | None, want: Tensor | None) -> str:
    """What is different, in words; nothing where nothing is."""
    if got is None or want is None:
        return "" if got is want else f"{got} instead of {want}"
    for what in ("shape", "dtype"):
        if getattr(got, what) != getattr(want, what):
            return f"{what} {getattr(got, what)} instead of {getattr(want, what)}"
    if got.layout is not torch.strided:
        got, want = got.to_dense(), want.to_dense()
    a, b = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (got, want))
    if torch.equal(a, b):
        return ""
    size = got.element_size()
    count = int((a != b).view(-1, size).any(1).sum())
    worst = float((got.double() - want.double()).abs().max())
    return f"{count} of {got.numel()} elements differ, by at most {worst:.3g}"
