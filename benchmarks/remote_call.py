"""What does a call of a module on another rank cost, against an RPC of PyTorch?

    mpirun -np 2 python benchmarks/remote_call.py

An identity module on the other rank, one tensor of 4 floats.  The peer is a TensorPipe
``rpc_sync`` echo of the same tensor between the same two processes.
"""

import os
import socket

import torch
import torch.distributed.rpc as rpc
from torch import nn

import smp
from benchmarks.table import alternate, show, timed

CALLS = 500
ROUNDS = 15


class Echo(nn.Module):
    """Calls a child of another rank ``calls`` times."""

    def __init__(self):
        super().__init__()
        self.far = nn.Identity()

    def forward(self, x, calls):
        for _ in range(calls):
            x = self.far(x)
        return x


def echo(x):
    return x


def start_rpc() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    smp.broadcast(port, smp.WORLD) if smp.rank() == 0 else None
    port = port if smp.rank() == 0 else smp.recv_from(0, smp.WORLD_RANK)
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    rpc.init_rpc(
        f"rank{smp.rank()}",
        rank=smp.rank(),
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", _transports=["uv"]
        ),
    )


def main() -> None:
    torch.set_num_threads(1)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    net = Echo()
    smp.set_partition(net, 0)
    smp.set_partition(net.far, 1)
    model = smp.DistributedModel(net)
    seconds = {}

    @smp.step(non_split_inputs=["x"])
    def without_grad(x):
        with torch.no_grad():
            model(x, 10)
            seconds["forward under no_grad"] = timed(lambda: model(x, CALLS))

    @smp.step(non_split_inputs=["x"])
    def with_grad(x):
        out = []
        seconds["forward with grad"] = timed(lambda: out.append(model(x, CALLS)))
        rest = timed(lambda: model.backward(out[0].sum()))
        seconds["forward and backward"] = seconds["forward with grad"] + rest

    x = torch.randn(4, requires_grad=True)
    start_rpc()

    def run(step, key):
        step(x)
        return seconds.get(key, 0.0) / CALLS

    def peer():
        smp.barrier()
        if smp.rank() == 0:
            y = x.detach()
            time = timed(lambda: [rpc.rpc_sync("rank1", echo, (y,)) for _ in range(CALLS // 5)])
        smp.barrier()
        return time / (CALLS // 5) if smp.rank() == 0 else 0.0

    sides = {
        "rpc_sync echo": peer,
        "forward under no_grad": lambda: run(without_grad, "forward under no_grad"),
        "forward with grad": lambda: run(with_grad, "forward with grad"),
        "forward and backward": lambda: run(with_grad, "forward and backward"),
    }
    for side in sides.values():
        side()
    times = alternate(sides, ROUNDS)
    if smp.rank() == 0:
        show("Remote identity module, 4 floats", "us", 1e6, times, "rpc_sync echo")
    rpc.shutdown()


main()
