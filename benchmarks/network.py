"""How fast do large messages get to another host, beside the tools of TCP and of UCX?

    python benchmarks/network.py [--ucx FOLDER]

The hosts are two network namespaces of this machine, joined by a veth pair, so all of it
is the kernel's TCP and what one core can copy.  ``iperf3`` sends one buffer of 128 KiB again
and again; smp sends and receives blocks, each of its own memory, and answers each, as a
plain loop of ``send()`` and ``recv()`` over as many buffers does.  Needs root,
``ip``, ``iperf3``, a C compiler and UCX with its ``ucx_perftest`` (``pip install
libucx-cu12`` has it; FOLDER is where it lies, with ``bin`` and ``lib``).
"""

import argparse
import json
import os
import subprocess
from pathlib import Path

from table import alternate, show
from two_hosts import ADDRESSES, SPACES, on, output, two_hosts

HERE = Path(__file__).parent
COUNT = 64  # messages in a round


def with_server(server: list[str], client: list[str], ready: str) -> str:
    """What the client prints, started once the server has printed ``ready``."""
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        for line in listening.stdout:
            if ready in line:
                break
        out = output(*client)
        listening.stdout.read()
    return out


def iperf(nbytes: int) -> float:
    out = with_server(
        on(1, "iperf3", "-s", "-1", "--forceflush"),
        on(0, "iperf3", "-c", ADDRESSES[1], "-n", str(nbytes * COUNT), "-J"),
        "Server listening",
    )
    return 8 * nbytes / json.loads(out)["end"]["sum_received"]["bits_per_second"]


def perftest(folder: Path, nbytes: int) -> float:
    tool = ["env", f"LD_LIBRARY_PATH={folder}/lib", "UCX_NET_DEVICES=net", "UCX_TLS=tcp"]
    tool += ["stdbuf", "-oL", str(folder / "bin" / "ucx_perftest"), "-f"]
    test = ["-t", "tag_bw", "-s", str(nbytes), "-n", str(COUNT), "-w", "16"]
    out = with_server(on(1, *tool), on(0, *tool, ADDRESSES[1], *test), "Waiting for connection")
    overall = out.split()[-3]  # MB/s, of 2^20 bytes
    return nbytes / (float(overall) * 2**20)


def stream(transport: str, nbytes: int) -> float:
    spaces = [f"/run/netns/{space}" for space in SPACES]
    command = [HERE / "../build/bench/stream", transport, str(nbytes), str(COUNT), *spaces]
    return float(output(*command).split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ucx", type=Path, help="UCX's folder; default: that of libucx-cu12")
    args = parser.parse_args()
    if args.ucx is None:
        import libucx

        args.ucx = Path(libucx.__file__).parent
    os.environ["SMP_UCX_LIBRARY"] = str(args.ucx / "lib" / "libucp.so.0")
    subprocess.run(["make", "-s", "-C", HERE / "core", "stream"], check=True)
    with two_hosts():
        for nbytes in (16 << 20, 1 << 20):
            sides = {
                "iperf3": lambda n=nbytes: iperf(n),
                "plain socket": lambda n=nbytes: stream("plain", n),
                "smp over tcp": lambda n=nbytes: stream("tcp", n),
                "ucx_perftest": lambda n=nbytes: perftest(args.ucx, n),
                "smp over ucx": lambda n=nbytes: stream("ucx", n),
            }
            times = alternate(sides, args.rounds)
            show(f"{nbytes >> 20} MiB to another host", "ms", 1e3, times, "iperf3")
            load = os.getloadavg()[0]
            print(f"\nload of the machine at the end: {load:.1f}")


main()
