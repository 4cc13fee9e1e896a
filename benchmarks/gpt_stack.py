"""What does splitting a stack of GPT-2's layers cost, against DTensor and data parallelism?

    mpirun -np 2 python benchmarks/gpt_stack.py [--width 512] [--rounds 15]

One TP_GROUP of all ranks, float32, no dropout, the same global batch for all sides:

- "smp": transformers' GPT2Block split in place, each rank's own samples;
- "smp.nn, speed" and "smp.nn, memory": the layers of ``smp.nn.DistributedTransformer`` with
  the same weights, each rank's own samples;
- "DTensor": the same class, its Conv1D made nn.Linear, by ``parallelize_module`` over the
  group of smp (smddp) and over gloo; every rank is fed all samples;
- "data parallel": whole layers on every rank, each rank's own samples, over smddp.

A step is forward, backward and averaging, without the optimizer, which has less to do where
parameters are split.  The sides' losses are compared.  Activations are the storages that
autograd keeps for a backward, but for parameters, in units of a rank's own hidden state;
parameters, gradients and state are shares of what a data-parallel rank holds.
"""

import argparse
import copy
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import smp
from table import alternate, best_and_median, machine, timed

HEAD = 64


class Stack(nn.Module):
    """GPT-2's layers by themselves, with torch's gelu and attention."""

    def __init__(self, width: int, layers: int) -> None:
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        super().__init__()
        config = GPT2Config(
            n_embd=width,
            n_head=max(width // HEAD, 4),
            n_layer=layers,
            activation_function="gelu",
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
        )
        self.layers = nn.ModuleList(GPT2Block(config, layer_idx=i) for i in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(hidden)
            hidden = out if isinstance(out, Tensor) else out[0]
        return hidden


# ------------------------------------------------------------------------------- DTensor


def linear_of(conv: Any, rows: list[int] | None = None) -> nn.Linear:
    """A Conv1D as an nn.Linear; its outputs in another order, if one is given."""
    weight, bias = conv.weight.detach().t(), conv.bias.detach()
    if rows is not None:
        weight, bias = weight[rows], bias[rows]
    linear = nn.Linear(weight.size(1), weight.size(0), device="meta")
    linear.weight, linear.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return linear


def in_columns_and_rows(stack: Stack, mesh: DeviceMesh) -> nn.Module:
    """Columns, rows, an all-reduce behind each pair: Megatron's layout."""
    stack = copy.deepcopy(stack)
    parts = mesh.size()
    for layer in stack.layers:
        attention, mlp = layer.attn, layer.mlp
        width = attention.split_size
        part = width // parts
        mine = [  # q, k and v of each rank's heads lie side by side
            block * width + rank * part + i
            for rank in range(parts)
            for block in range(3)
            for i in range(part)
        ]
        attention.c_attn = linear_of(attention.c_attn, mine)
        attention.c_proj = linear_of(attention.c_proj)
        mlp.c_fc, mlp.c_proj = linear_of(mlp.c_fc), linear_of(mlp.c_proj)
        plan = {
            "attn.c_attn": ColwiseParallel(),
            "attn.c_proj": RowwiseParallel(),
            "mlp.c_fc": ColwiseParallel(),
            "mlp.c_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
        attention.split_size, attention.num_heads = part, attention.num_heads // parts
    return stack


# --------------------------------------------------------------------------------- sides


class Side(NamedTuple):
    """One way to train the stack, ready in this job."""

    net: nn.Module
    step: Callable[[], Tensor]  # one forward and backward, gradients averaged: the loss
    forward: Callable[[], Tensor]


def by_smp(stack: Stack, everyones: Tensor, degree: int) -> Side:
    """Split over ``degree`` ranks, replicated over the rest."""
    smp.init({"tensor_parallel_degree": degree, "ddp": True})
    net = copy.deepcopy(stack)
    if degree > 1:
        smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    own = everyones.chunk(smp.dp_size())[smp.dp_rank()].clone()  # a storage of its own

    @smp.step
    def train(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return Side(net, lambda: train(model, own).reduce_mean(), lambda: model(own))


def by_layers(stack: Stack, everyones: Tensor, optimize: str) -> Side:
    """Distributed layers with the stack's weights."""
    from smp.nn.huggingface.gpt2 import translate_hf_block_state_dict_to_smdistributed as ours

    smp.init({"tensor_parallel_degree": smp_size(), "ddp": True, "optimize": optimize})
    config = stack.layers[0].attn.config
    net = smp.nn.DistributedTransformer(
        num_layers=len(stack.layers),
        num_attention_heads=config.n_head,
        attention_head_size=config.n_embd // config.n_head,
        hidden_size=config.n_embd,
        intermediate_size=4 * config.n_embd,
        attention_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        activation="gelu",
        layernorm_epsilon=config.layer_norm_epsilon,
        causal_mask_size=config.n_positions,
        pre_layernorm=True,
        post_layernorm=False,
    )
    model = smp.DistributedModel(net)
    model.load_state_dict(
        {
            f"seq_layers.{i}.{name}": value
            for i, layer in enumerate(stack.layers)
            for name, value in ours(layer.state_dict()).items()
        }
    )
    own = everyones.chunk(smp.dp_size())[smp.dp_rank()].clone()  # a storage of its own

    def forward(model: nn.Module) -> Tensor:
        out = model((own, None))
        return out if isinstance(out, Tensor) else out[0]

    @smp.step
    def train(model: nn.Module) -> Tensor:
        loss = forward(model).square().mean()
        model.backward(loss)
        return loss

    return Side(net, lambda: train(model).reduce_mean(), lambda: forward(model))


def by_dtensor(stack: Stack, everyones: Tensor, backend: str) -> Side:
    """The group is smp's own (smddp), or one of another backend."""
    smp.init({"tensor_parallel_degree": smp_size()})
    smddp = smp.get_tp_process_group()
    group = smddp if backend == "smddp" else dist.new_group(backend=backend)
    net = in_columns_and_rows(stack, DeviceMesh.from_group(group, "cpu"))

    def step() -> Tensor:
        loss = net(everyones).square().mean()
        loss.backward()
        return loss.detach()

    return Side(net, step, lambda: net(everyones))


def smp_size() -> int:
    return int(os.environ["OMPI_COMM_WORLD_SIZE"])


SIDES: dict[str, Callable[[Stack, Tensor], Side]] = {
    "smp": lambda stack, x: by_smp(stack, x, smp_size()),
    "smp.nn, speed": lambda stack, x: by_layers(stack, x, "speed"),
    "smp.nn, memory": lambda stack, x: by_layers(stack, x, "memory"),
    "DTensor, smddp": lambda stack, x: by_dtensor(stack, x, "smddp"),
    "DTensor, gloo": lambda stack, x: by_dtensor(stack, x, "gloo"),
    "data parallel": lambda stack, x: by_smp(stack, x, 1),
}


class Held(NamedTuple):
    """What a rank holds, in elements."""

    kept: int  # by autograd, of the whole stack
    parameters: int
    gradients: int
    state: int  # of AdamW


def held(side: Side) -> Held:
    """By a step of AdamW more."""
    optimizer = torch.optim.AdamW(side.net.parameters(), lr=0.0)
    side.step()
    optimizer.step()
    parameters = list(side.net.parameters())
    state = [t for of in optimizer.state.values() for t in of.values() if t.dim()]

    def count(tensors: Iterable[Tensor]) -> int:
        return sum(local(t).numel() for t in tensors)

    gradients = count(p.grad for p in parameters)
    return Held(kept(side), count(parameters), gradients, count(state))


def kept(side: Side) -> int:
    """Elements of the storages that autograd keeps for a backward, but for parameters."""
    own = {local(p).untyped_storage().data_ptr() for p in side.net.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = side.forward()
    total = sum(storage.nbytes() for storage in storages.values())
    del out
    return total // 4


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(width: int, args: argparse.Namespace) -> None:
    """Print the tables of one width."""
    steps = max(1, 2560 // width)
    torch.manual_seed(0)
    stack = Stack(width, args.layers)
    everyones = torch.randn(smp_size() * args.samples, args.positions, width)
    holds: dict[str, Held] = {}
    losses: dict[str, float] = {}

    def one_round(name: str) -> float:
        side = SIDES[name](stack, everyones)
        for _ in range(2):
            side.net.zero_grad()
            loss = side.step()
        dist.all_reduce(loss)  # a rank's own samples', or all samples'
        losses[name] = loss.item() / smp_size()

        def run() -> None:
            for _ in range(steps):
                side.net.zero_grad()
                side.step()
            dist.barrier()

        dist.barrier()
        seconds = timed(run) / steps
        if name not in holds:
            holds[name] = held(side)
        smp.reset()
        return seconds

    times = alternate({name: partial(one_round, name) for name in SIDES}, args.rounds)
    first = losses["smp"]
    if any(not math.isclose(loss, first, rel_tol=1e-4) for loss in losses.values()):
        raise RuntimeError(f"the sides' losses differ: {losses}")
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
        hidden = args.samples * args.positions * width * args.layers
        report(f"{args.layers} layers, {width} wide", times, holds, hidden)


def report(title: str, times: Mapping, holds: Mapping[str, Held], hidden: int) -> None:
    """Print both tables; ``hidden``: elements of a rank's hidden states behind each layer."""
    print(f"\n{title}, {smp_size()} ranks\n{machine()}, torch {torch.__version__}")
    print(f"command: {' '.join(sys.orig_argv[1:])}\n")
    print("| side | min (ms) | median (ms) | side / smp: best, median |")
    print("|---|---|---|---|")
    base = best_and_median(times["smp"])
    for name, rounds in times.items():
        low, middle = best_and_median(rounds)
        ratios = f"{low / base[0]:.2f}, {middle / base[1]:.2f}"
        print(f"| {name} | {low * 1e3:.2f} | {middle * 1e3:.2f} | {ratios} |")
    print("\n| side | kept a layer, own [B, S, H] | parameters | gradients | state |")
    print("|---|---|---|---|---|")
    whole = holds["data parallel"]
    for name, side in holds.items():
        shares = [f"{a / b:.3f}" for a, b in zip(side[1:], whole[1:], strict=True)]
        print(f"| {name} | {side.kept / hidden:.2f} | {' | '.join(shares)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, nargs="*", default=[512, 128])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="of a rank")
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for width in args.width:
        measure(width, args)


main()
