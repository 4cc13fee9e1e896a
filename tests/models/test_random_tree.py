"""Spec: random_tree.py and partition.py."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.models.partition import partition_by_path, random_partition, weight_reads
from tests.models.random_tree import ALL, COMPOSITES, LEAVES, WHOLE, describe, make_tree
from tests.reference.compare import gradients
from tests.reference.cut_loop import cut_loop


def fingerprint(seed: int) -> str:
    """A hash of the tree, its weights, a batch and a partition."""
    tree = make_tree(seed)
    text = describe(tree.model, random_partition(tree.model, 3, seed))
    digest = hashlib.sha256(text.encode())
    for tensor in [*tree.model.parameters(), *tree.make_batch(4, torch.Generator())]:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def test_a_seed_gives_the_same_tree_in_every_process():
    program = "import sys; from tests.models.test_random_tree import fingerprint\n"
    program += "print([fingerprint(seed) for seed in range(20)])"
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert other.stdout.strip() == str([fingerprint(seed) for seed in range(20)])


def test_making_a_tree_draws_nothing_from_the_users_generator():
    before = torch.get_rng_state()
    make_tree(1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("feature", sorted(ALL))
def test_a_feature_alone_runs_cut_in_three(feature):
    """Each of them makes a tree with remote calls that trains."""
    remote = 0
    for seed in range(4):
        tree = make_tree(seed, {feature})
        rank_of = random_partition(tree.model, 3, seed)
        batch = tree.make_batch(6, torch.Generator().manual_seed(seed))
        result = cut_loop(tree.step, tree.model, batch, rank_of=rank_of, microbatches=3)

        remote += len(result.requests) - 3
        assert any(gradient is not None for gradient in gradients(tree.model).values())
        if feature not in WHOLE:
            kind = {**LEAVES, **COMPOSITES}[feature]
            assert any(type(module) is kind for module in tree.model.modules())
    assert remote > 0


def test_every_feature_occurs_among_the_first_seeds():
    seen = {type(m) for seed in range(60) for m in make_tree(seed).model.modules()}

    assert set(LEAVES.values()) | set(COMPOSITES.values()) <= seen


def test_a_feature_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"no such features: \['skips'\]; there are"):
        make_tree(1, {"skips"})


def test_a_tree_is_described_module_by_module():
    model = nn.Sequential(nn.Linear(1, 2), nn.Sequential(nn.ReLU()))

    assert describe(model, {"": 0, "0": 1, "1": 0, "1.0": 0}) == (
        "root: Sequential() on 0\n"
        "  0: Linear(in_features=1, out_features=2, bias=True) on 1\n"
        "  1: Sequential() on 0\n"
        "    0: ReLU() on 0"
    )


# Partitions.


def test_a_partition_keeps_together_what_belongs_together():
    for seed in range(40):
        model = make_tree(seed).model
        rank_of = random_partition(model, 4, seed)
        paths = {module: path for path, module in model.named_modules()}

        assert rank_of.keys() == set(paths.values()) and rank_of[""] == 0
        holders: dict[nn.Parameter, int] = {}
        for module, path in paths.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    assert holders.setdefault(parameter, rank_of[path]) == rank_of[path]
            for child in getattr(module, "reads_weights_of", ()):
                assert rank_of[path] == rank_of[paths[getattr(module, child)]]
            if path and not list(module.parameters()) and not list(module.buffers()):
                assert rank_of[path] == rank_of[path.rpartition(".")[0]]


def test_partitions_use_all_ranks_and_nest_calls():
    """Among a few seeds; a call from 0 to another rank that calls 0 is nested."""
    used, nested = set(), 0
    for seed in range(20):
        model = make_tree(seed).model
        rank_of = random_partition(model, 3, seed)
        used |= set(rank_of.values())
        for path, rank in rank_of.items():
            if rank == 0 and path:
                above = [rank_of[path[:i]] for i, c in enumerate(path) if c == "."]
                nested += any(above)

    assert used == {0, 1, 2} and nested > 0


def test_a_partition_by_path_is_inherited():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU()))

    assert partition_by_path(model, {"1": 1}) == {"": 0, "0": 0, "1": 1, "1.0": 1, "1.1": 1}
    with pytest.raises(AttributeError):
        partition_by_path(model, {"2": 1})


def test_who_reads_whose_weights_is_seen_as_the_model_runs():
    attention = nn.MultiheadAttention(4, 2)
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"attention": attention}))

    def run():
        x = model[0](torch.randn(3, 2, 4))
        attention(x, x, x)

    reads = weight_reads(model, run)

    assert reads == [("1.attention", "1.attention.out_proj")]
    assert partition_by_path(model, {"1.attention.out_proj": 1}, reads) == dict.fromkeys(
        ["", "0", "1", "1.attention", "1.attention.out_proj"], 0
    )
