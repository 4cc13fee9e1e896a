"""What a profile shows of operations of ``smddp``: their names, and shapes of what is given."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.test_collectives import job

ROW, WIDE = [2, 3], [4, 3]


def operations(rank: int, size: int, **how) -> list:
    """A call of each, with its name and the shapes; the root is the last rank."""
    x, wide, last = torch.ones(ROW), torch.ones(WIDE), size - 1
    parts = [torch.ones(ROW) for _ in range(size)]
    mine = parts if rank == last else None
    to, source = (rank + 1) % size, (rank - 1) % size
    return [
        (lambda: dist.all_reduce(x, **how), "all_reduce", [ROW]),
        (lambda: dist.broadcast(x, last, **how), "broadcast", [ROW]),
        (lambda: dist.reduce(x, last, **how), "reduce", [ROW]),
        (lambda: dist.all_gather(parts, x, **how), "all_gather", [ROW]),
        (lambda: dist.all_gather_into_tensor(wide, x, **how), "all_gather_single", [ROW]),
        (lambda: dist.reduce_scatter(x, parts, **how), "reduce_scatter", [ROW] * size),
        (lambda: dist.reduce_scatter_tensor(x, wide, **how), "reduce_scatter_single", [WIDE]),
        (lambda: dist.gather(x, mine, last, **how), "gather", [ROW]),
        # Who is given nothing shows what it gets.
        (lambda: dist.scatter(x, mine, last, **how), "scatter", [ROW] * (size if mine else 1)),
        (lambda: dist.all_to_all_single(wide, wide.clone(), **how), "all_to_all", [WIDE]),
        (lambda: dist.all_to_all(parts, [x] * size, **how), "all_to_all", [ROW] * size),
        (lambda: dist.isend(x, to), "send", [ROW]),
        (lambda: dist.irecv(x, source), "recv", [ROW]),
        (lambda: dist.isend(x, to, tag=1), "send", [ROW]),
        (lambda: dist.irecv(x, tag=1), "recvAnySource", [ROW]),
    ]


@pytest.mark.parametrize("is_async", [False, True])
@on_ranks(2)
def test_a_profile_shows_every_operation(is_async, tmp_path):
    with job(tmp_path) as (rank, size):
        made = operations(rank, size, async_op=is_async)
        with torch.profiler.profile(record_shapes=True) as profile:
            works = [call() for call, _, _ in made]
            assert all(work.wait() for work in works if work is not None)
        dist.barrier()
    shown = [e for e in profile.events() if e.name.startswith("smddp:")]
    got = Counter((e.name.removeprefix("smddp:"), str(e.input_shapes)) for e in shown)
    assert got == Counter((name, str(shapes)) for _, name, shapes in made)
