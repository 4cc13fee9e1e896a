"""``torch.compile`` of a split model, of parts of it and of what calls it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import smp
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, in_float64

ROWS = 4


@module_of(
    lambda: {
        "words": nn.Embedding(11, 6),
        "mlp": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)),
        "head": nn.Linear(6, 11),
    }
)
def Net(self, ids: Tensor) -> Tensor:
    x = self.words(ids) * 2
    return self.head(x + self.mlp(x).relu()).cos()


class Blocks(nn.Module):
    """Regions: their collectives are within calls that are compiled."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        dropouts = {"resid_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_embd=8, n_head=2, attn_implementation="sdpa", **dropouts)
        self.words = nn.Embedding(11, 8)
        self.mlp = GPT2Block(config, layer_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.mlp(self.words(ids))
        return out if isinstance(out, Tensor) else out[0]


class Compiled:
    """``torch.compile`` to torch's own operators, with the graphs that it made."""

    def __init__(self) -> None:
        self.backend = CompileCounterWithBackend("aot_eager")

    def __call__(self, module: Any) -> Any:
        return torch.compile(module, backend=self.backend)


def compile_part(net: Any, compiled: Compiled) -> Any:
    net.mlp = compiled(net.mlp)
    return net


def compile_leaf(net: Any, compiled: Compiled) -> Any:
    net.mlp[2] = compiled(net.mlp[2])
    return net


def compile_part_in_place(net: Any, compiled: Compiled) -> Any:
    net.mlp.compile(backend=compiled.backend)
    return net


def compile_in_place(net: Any, compiled: Compiled) -> Any:
    net.compile(backend=compiled.backend)
    return net


WAYS: dict[str, Callable[[Any, Compiled], Any]] = {
    "the whole": lambda net, compiled: compiled(net),
    "the whole in place": compile_in_place,
    "a part": compile_part,
    "a part in place": compile_part_in_place,
    "a split linear": compile_leaf,
}


def mean_square(model: Any, ids: Tensor) -> Tensor:
    return model(ids).square().mean()


def ids_of(rank: int, step: int) -> tuple:
    """Lengths differ by step: what is compiled meets new sizes."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randint(0, 11, (ROWS, 3 + step), generator=generator),)


def check(net: nn.Module, before: str, after: str) -> None:
    """Two steps equal the plain model's, and some rank has compiled something."""
    reference = type(net)()
    reference.load_state_dict(net.state_dict())
    torch._dynamo.reset()  # of what other tests have compiled
    compiled = Compiled()
    if before:  # names have what torch wraps around
        reference, net = WAYS[before](reference, Compiled()), WAYS[before](net, compiled)
    job = WholeJob(net, mean_square, ids_of, plain=reference)
    if after == "the DistributedModel":
        job.model = compiled(job.model)
    elif after == "the step function":
        job.loss = compiled(mean_square)
    elif after:
        WAYS[after](job.model.module, compiled)
        WAYS[after](job.plain, Compiled())
    job.run(2, max_norm=0.05)
    assert any(smp.allgather(compiled.backend.frame_count, smp.WORLD))


CASES = [(way, "") for way in WAYS] + [
    ("", "the whole in place"),
    ("", "a part"),
    ("", "a part in place"),
    ("", "the DistributedModel"),
    ("", "the step function"),
]


@pytest.mark.parametrize(("before", "after"), CASES)
@pytest.mark.sample(1)
@on_ranks(2, timeout_s=120)
def test_a_compiled_model_that_is_split_equals_the_plain_one(before, after):
    smp.init({"tensor_parallel_degree": 2})
    in_float64(3)
    with smp.tensor_parallelism():
        net = Net()
    check(net, before, after)


@pytest.mark.stress
@on_ranks(4, timeout_s=240)
def test_likewise_in_a_pipeline():
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2})
    in_float64(3)
    with smp.tensor_parallelism():
        net = Net()
    check(net, "a part", "")


@on_ranks(2, timeout_s=120)
def test_regions_are_compiled_between_their_collectives():
    smp.init({"tensor_parallel_degree": 2})
    in_float64(3)
    with smp.tensor_parallelism():
        net = Blocks()
    check(net, "", "a part in place")
