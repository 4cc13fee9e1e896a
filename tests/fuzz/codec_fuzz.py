"""Changes valid messages of the codec at random for some seconds; any exception will do.

    make -C tests/fuzz fuzz-codec SECONDS=60

runs it on an extension built with the address and undefined sanitizers, which stop it at
the first wrong access.  The seed is printed, and the message under way is kept in the
file named last, so that a crash can be repeated: pass the seed, or `--repeat FILE`.
"""

import argparse
import collections
import random
import sys
import time
from pathlib import Path

from smp._core import pack, unpack
from tests.codec_values import sample
from tests.test_codec import hostile, survives


def fuzz(seconds: float, seed: int, keep: Path) -> collections.Counter:
    """How many messages were read and how many refused."""
    rng = random.Random(seed)
    corpus = [pack(part) for part in sample()] + [pack(sample())]
    counts: collections.Counter = collections.Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        message = hostile(rng, rng.choice(corpus))
        keep.write_bytes(message)
        read = survives(message)
        counts["read" if read else "refused"] += 1
        if read and len(corpus) < 500 and rng.random() < 0.05:
            corpus.append(message)
    return counts


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--repeat", type=Path, default=None)
    parser.add_argument("keep", type=Path, nargs="?", default=Path("codec_message"))
    chosen = parser.parse_args()
    if chosen.repeat is not None:
        unpack(chosen.repeat.read_bytes())
        return
    seed = random.SystemRandom().getrandbits(32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    counts = fuzz(chosen.seconds, seed, chosen.keep)
    print(f"{counts['read']} read, {counts['refused']} refused")
    if not counts["read"] or not counts["refused"]:
        sys.exit("one of the two never happened: the mutations are of no use")


if __name__ == "__main__":
    main()
