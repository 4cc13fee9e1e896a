"""Llama: attention by the heads of keys and values, the MLP by its channels."""

import math
from collections import Counter
from typing import Any

from smp.compat.translation import as_it_is
from smp.tensor_parallel import group
from smp.tensor_parallel.rows.linears import choose_outputs, cut_inputs, cut_outputs
from smp.tensor_parallel.rows.regions import Region, make_region


def split_attention(attention: Any, path: str) -> None:
    """A ``LlamaAttention``, and those of other families written alike.

    Heads of queries stay with their common head of keys and values.  Where there are fewer of
    these than tp_ranks, queries alone are cut.
    """
    head = attention.head_dim
    together = attention.num_key_value_groups
    shared = attention.k_proj.out_features // head
    if shared >= group.size():
        unit = together * head
        for linear in (attention.k_proj, attention.v_proj):
            cut_outputs(linear, unit=head)
    else:
        unit = head
        chosen, attention.num_key_value_groups = shared_heads(shared, together)
        for linear in (attention.k_proj, attention.v_proj):
            choose_outputs(linear, unit=head, chosen=chosen)
    cut_outputs(attention.q_proj, unit=unit)
    cut_inputs(attention.o_proj, f"{path}.o_proj", unit=unit)
    region = Region(
        # Flash attention finds packed sequences by position_ids.
        samples=("hidden_states", "position_embeddings", "position_ids"),
        masks=(("attention_mask", "hidden_states"),),
    )
    make_region(attention, region, path)


def shared_heads(shared: int, together: int) -> tuple[list[int], int]:
    """The heads of keys and values for this tp_rank's heads of queries.

    Args:
        shared: heads of keys and values.
        together: heads of queries with one head of keys and values.

    Returns:
        the heads, one as often as it takes for each to go with equally many heads of
        queries; and how many those are.
    """
    shares = group.shares(shared * together)
    first = sum(shares[: group.rank()])
    queries = Counter(q // together for q in range(first, first + shares[group.rank()]))
    equally = math.gcd(*queries.values())
    return [h for h, count in queries.items() for _ in range(count // equally)], equally


def split_mlp(mlp: Any, path: str) -> None:
    """A ``LlamaMLP``."""
    cut_outputs(mlp.gate_proj)
    cut_outputs(mlp.up_proj)
    cut_inputs(mlp.down_proj, f"{path}.down_proj")
    make_region(mlp, Region(samples=("x",)), path)


IN_PLACE = {"LlamaAttention": split_attention, "LlamaMLP": split_mlp}

# Split where they stand, and without another form.
translate_hf_state_dict_to_smdistributed_llama = as_it_is
translate_state_dict_to_hf_llama = as_it_is
