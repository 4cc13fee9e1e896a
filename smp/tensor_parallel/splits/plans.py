"""The common parts of most families' plans: an attention, and two linears in a row.

Linears are named from the plan's module.  A linear may lie behind the gathering module, if
called next: ``entry`` names that module then.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from smp.tensor_parallel.rows.linears import cut_inputs, cut_outputs
from smp.tensor_parallel.rows.regions import Region, make_holder, make_region


def attention(
    module: nn.Module,
    path: str,
    *,
    columns: Sequence[str],
    row: str,
    head: str,
    heads: str = "",
    widths: Sequence[str] = (),
    packed: int = 1,
    blocks: int = 1,
    entry: str = "",
    samples: tuple[str, ...] = ("hidden_states",),
    masks: tuple[tuple[str, str], ...] = (("attention_mask", "hidden_states"),),
) -> None:
    """Cut an attention by its heads.

    Args:
        module: with the linears.
        path: of it.
        columns: linears for queries, keys and values.
        row: the linear behind them.
        head: attribute with the size of a head; it and the next two are those of ``entry``'s
            module.
        heads: attribute with the number of heads.
        widths: attributes with the size of all heads together.
        packed: parts of a head from each of ``columns``, side by side: 3 for q, k, v.
        blocks: parts of all heads from each of ``columns``: 3 for q|k|v.
        entry: the gathering module; "": ``module``.
        samples, masks: see ``Region``.
    """
    entered: Any = module.get_submodule(entry)
    size = getattr(entered, head)
    for name in columns:
        cut_outputs(module.get_submodule(name), size * packed, blocks)
    own = cut_inputs(module.get_submodule(row), f"{path}.{row}", size)
    if heads:
        setattr(entered, heads, own // size)
    for name in widths:
        setattr(entered, name, own)
    _enter(module, path, entry, Region(samples, masks))


def mlp(module: nn.Module, path: str, *, column: str, row: str, entry: str = "") -> None:
    """Cut two linears by the channels between them; arguments as for ``attention``."""
    cut_outputs(module.get_submodule(column))
    cut_inputs(module.get_submodule(row), f"{path}.{row}")
    _enter(module, path, entry, Region(("hidden_states",)))


def _enter(module: nn.Module, path: str, entry: str, region: Region) -> None:
    if entry:
        make_region(module.get_submodule(entry), region, f"{path}.{entry}", within=path)
        make_holder(module)
    else:
        make_region(module, region, path)
