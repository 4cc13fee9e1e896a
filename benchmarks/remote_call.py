"""What does a call of a module on another rank cost, against an RPC of PyTorch?

    mpirun -np 2 python benchmarks/remote_call.py

Modules on the other rank that return their argument, one tensor of 4 floats: ``Same``
returns the tensor itself, which stays the caller's own; ``View`` returns a new tensor, with
autograd's nodes on both ranks.  The peer is a TensorPipe ``rpc_sync`` echo of the same
tensor between the same two processes.
"""

import argparse
import os
import socket
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn

import smp
from table import alternate, show, timed


class View(nn.Module):
    def forward(self, x):
        return x.view_as(x)


class Echo(nn.Module):
    """Calls a child of another rank ``calls`` times."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()
        self.view = View()

    def forward(self, x, calls, name):
        far = getattr(self, name)
        for _ in range(calls):
            x = far(x)
        return x


def echo(x):
    return x


peer_done = threading.Event()


def end_of_peer():
    peer_done.set()


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
            init_method=f"tcp://127.0.0.1:{port}"
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=500, help="in each round")
    parser.add_argument("--relay", action="store_true", help="a request for each call")
    options = parser.parse_args()
    calls = options.calls
    torch.set_num_threads(1)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1, "fast_mode": not options.relay})
    net = Echo()
    smp.set_partition(net, 0)
    smp.set_partition(net.same, 1)
    smp.set_partition(net.view, 1)
    model = smp.DistributedModel(net)
    seconds = {}

    @smp.step(non_split_inputs=["x"])
    def without_grad(x, name):
        with torch.no_grad():
            model(x, 10, name)
            seconds["forward"] = timed(lambda: model(x, calls, name))

    @smp.step(non_split_inputs=["x"])
    def with_grad(x, name):
        out = []
        seconds["forward"] = timed(lambda: out.append(model(x, calls, name)))
        rest = timed(lambda: model.backward(out[0].sum()))
        seconds["both"] = seconds["forward"] + rest

    x = torch.randn(4, requires_grad=True)
    start_rpc()

    def run(step, name, key):
        step(x, name)
        return seconds.get(key, 0.0) / calls

    def peer():
        if smp.rank() == 1:  # waits without a core of its own
            peer_done.wait()
            peer_done.clear()
            return 0.0
        y = x.detach()
        trips = max(1, calls // 5)
        time = timed(lambda: [rpc.rpc_sync("rank1", echo, (y,)) for _ in range(trips)])
        rpc.rpc_sync("rank1", end_of_peer)
        return time / trips

    sides = {
        "rpc_sync echo": peer,
        "Same, no_grad": lambda: run(without_grad, "same", "forward"),
        "View, no_grad": lambda: run(without_grad, "view", "forward"),
        "Same, grad": lambda: run(with_grad, "same", "forward"),
        "View, grad": lambda: run(with_grad, "view", "forward"),
        "View, grad and backward": lambda: run(with_grad, "view", "both"),
    }
    for side in sides.values():
        side()
    times = alternate(sides, options.rounds)
    if smp.rank() == 0:
        title = "Remote module that returns its argument, 4 floats"
        show(title, "us", 1e6, times, "rpc_sync echo")
    rpc.shutdown()


main()
