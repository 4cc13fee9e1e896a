"""Spec: what a user sees when a rank dies or is interrupted in the middle of a step."""

import re
from types import SimpleNamespace

import pytest

from smp.collectives import objects
from smp.job import bootstrap
from tests.ranks import mpirun, wait_until_gone
from tests.test_connecting import stale

SCRIPT = """
from tests.models.jobs import *

class Part(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 20 and smp.rank() == 1:
            {how}
        return super().forward(x)

model = chain(nn.Linear(16, 16), Part(16, 16), microbatches=4)
try:
    for _ in range(100):
        train(model, torch.randn(16, 16))
except BaseException as error:
    print(f"rank {{smp.rank()}} saw {{type(error).__name__}}", flush=True)
    wait_until_all_have_said(smp.rank(), {seen})
    raise
print("finished")
"""

# The rank that fails first ends the job when it has told why; here, when the other has said
# its line as well.
BOTH_SPEAK = """
from tests.models.jobs import *
from smp.job.job_end import FirstFailure
told, wait_until_told = FirstFailure.told, FirstFailure.wait_until_told
other_has_spoken = Path(__file__).with_name("other has spoken")

def told_after_the_other(self):
    until = time.monotonic() + 20
    while not other_has_spoken.exists() and time.monotonic() < until:
        threading.Event().wait(0.01)
    told(self)

def wait_having_spoken(self):
    other_has_spoken.touch()
    wait_until_told(self)

FirstFailure.told = told_after_the_other
FirstFailure.wait_until_told = wait_having_spoken
"""

ENDINGS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", {0: "PeerError"}),
    "crashed": ("ctypes.string_at(0)", {0: "PeerError"}),
    "Ctrl-C": (
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(0)",
        {0: "KeyboardInterrupt", 1: "KeyboardInterrupt"},
    ),
    "raised": ("raise ValueError('no good')", {0: "ValueError", 1: "ValueError"}),
    "sys.exit": ("sys.exit(3)", {0: "SystemExit", 1: "SystemExit"}),
}


@pytest.mark.parametrize(
    ("ending", "transports"),
    [*((ending, "shm") for ending in ENDINGS), ("killed", "mpi"), ("raised", "mpi")],
)
def test_every_rank_hears_of_the_end_of_one(tmp_path, ending, transports):
    """The others name what happened, all ranks end, the exit code is not 0 (a signal's is
    the launcher's own business), and nothing of ours is left in shared memory."""
    how, seen = ENDINGS[ending]
    by_signal = ending in ("killed", "crashed")
    script = tmp_path / "train.py"
    both_speak = BOTH_SPEAK if ending == "raised" else ""
    script.write_text(both_speak + SCRIPT.format(how=how, seen=len(seen)))
    before = stale()

    done = mpirun(2, script, env={"SMP_COMM_TRANSPORTS": transports}, go_on=by_signal)

    said = done.stdout + done.stderr
    assert by_signal or done.returncode != 0
    assert "finished" not in said
    for rank, error in seen.items():
        assert f"rank {rank} saw {error}" in said, said
    if by_signal:
        assert re.search(
            r"pp_rank 1 is gone .*on pp_rank 0: microbatch \d, (forward|backward): "
            r"the step function waits for (the backward of )?module '1' on pp_rank 1",
            said,
        ), said
    if ending == "raised":
        assert re.search(r"raised on pp_rank 1 in module '1', microbatch \d, forward", said)
        assert re.search(r"rank \d of 2, after rank \d failed: ValueError: no good\n", said)
    assert stale() <= before


BESIDE_ANOTHER = """
from tests.models.jobs import *

class Part(nn.Linear):
    def forward(self, x):
        if smp.rank() == {victim}:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

model = chain(nn.Linear(4, 4), Part(4, 4), microbatches=2, ddp=True)
print("pipeline", smp.get_pp_group(), flush=True)
smp.barrier()
try:
    train(model, torch.randn(4, 4))
except Exception:
    if {victim} not in smp.get_pp_group():
        signal.pause()  # the other replica hears of the death, too, and may end the job before
    raise
print("finished")
"""


def test_a_rank_beside_another_of_its_pp_rank_is_named_by_its_global_number(script):
    """Its pp_rank alone says the same of two ranks."""
    done = mpirun(4, script(BESIDE_ANOTHER.format(victim=3)), go_on=True)

    said = done.stdout + done.stderr
    assert "finished" not in said
    (first,) = {int(n) for n in re.findall(r"pipeline \[(\d), 3\]", said)}
    named = (
        rf"rank 3 \(pp_rank 1\) is gone .*on rank {first} \(pp_rank 0\): microbatch .*"
        r"waits for (the backward of )?module '1' on rank 3 \(pp_rank 1\)"
    )
    assert re.search(named, said), said


KILLED = """
from tests.models.jobs import *

victim, moment = map(int, sys.argv[1:])
parts = (nn.Linear(64, 64) for _ in range(3))
model = chain(*parts, pipeline_parallel_degree=2, microbatches=4)
train(model, torch.randn(64, 64))
print("pid", os.getpid(), flush=True)

def kill():
    for _ in range(random.Random(moment).randrange(100_000)):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

if smp.rank() == victim:
    threading.Thread(target=kill, daemon=True).start()
while True:
    train(model, torch.randn(64, 64))
"""


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.sample(1)
def test_a_rank_killed_at_any_instant_leaves_nothing_behind(script, moment):
    """The other says who died; no process and no shared memory is left."""
    before = stale()
    victim = moment % 2

    done = mpirun(2, script(KILLED), str(victim), str(moment), go_on=True)

    said = done.stdout + done.stderr
    assert f"pp_rank {victim} is gone" in said, said
    wait_until_gone([int(pid) for pid in re.findall(r"pid (\d+)", said)])
    assert stale() <= before


TO_ONE_THAT_IS_GONE = """
from tests.models.jobs import *

transport, floats = sys.argv[1], int(sys.argv[2])
smp.init({"pipeline_parallel_degree": 2, "comm_pool_bytes": 1 << 22,
          "comm_transports": [transport]})
net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Tanh())
model = distributed(net, [0, 1, 1])
pids = smp.allgather(os.getpid(), smp.WORLD)

@smp.step
def step(model, x, large):
    y = model(x)
    if large:
        os.kill(pids[1], signal.SIGKILL)
        while _core.counters()["lost"] < 0:
            os.sched_yield()
        try:
            model.module[2](torch.ones(floats))
        except Exception as error:
            print(f"the call raised {type(error).__name__}: {error}", flush=True)
            raise
    return y.sum()

step(model, torch.randn(4, 16), False)
step(model, torch.randn(4, 16), True)
"""


# A message holds a few floats in itself; the pool does not hold 16 MiB.
@pytest.mark.parametrize(("transport", "floats"), [("tcp", 64), ("shm", 1 << 22)])
def test_a_tensor_of_any_size_for_a_rank_that_was_killed_names_the_rank(
    script, transport, floats
):
    """There is no memory for a rank that is gone: that is not what the error says."""
    done = mpirun(2, script(TO_ONE_THAT_IS_GONE), transport, str(floats), go_on=True)

    said = done.stdout + done.stderr
    assert "the call raised PeerError: smp: sending to pp_rank 1: a peer rank" in said
    assert "MemoryError" not in said


DIES_WHILE_SAVING = """
from tests.models.jobs import *

partial = sys.argv[1] == "partial"
model = chain(*(nn.Linear(16, 16) for _ in range(3)), ddp_dist_backend=sys.argv[2])
smp.step(lambda model, x: model(x))(model, torch.zeros(1, 16))

def die(*args, **named):
    os.kill(os.getpid(), signal.SIGKILL)

if smp.rank() == 1:
    if partial:
        os.fsync = die
    else:
        torch.distributed.send = die
try:
    smp.save_checkpoint(sys.argv[3], "a", partial=partial)
except ConnectionError as error:
    print(f"rank {smp.rank()} saw {error}", flush=True)
    wait_until_all_have_said(smp.rank(), 2)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("kind", "backend"), [("partial", "smddp"), ("partial", "gloo"), ("full", "smddp")]
)
def test_who_saves_hears_which_rank_has_died(kind, backend, tmp_path, script):
    done = mpirun(
        3, script(DIES_WHILE_SAVING), kind, backend, str(tmp_path / "saved"), go_on=True
    )

    said = done.stdout + done.stderr
    for rank in (0, 2):
        assert re.search(rf"rank {rank} saw smp: .*: rank 1 is gone ", said), said


ENDS_AFTER_A_DEATH = """
from tests.models.jobs import *
from smp.job import (bootstrap)

bootstrap.END_AFTER_DEATH_S = 0.1
smp.init({"pipeline_parallel_degree": int(sys.argv[1])})
pids = smp.allgather(os.getpid(), smp.WORLD)
first = os.pidfd_open(pids[0])
if smp.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    smp.allgather(None, smp.WORLD)
except ConnectionError as error:
    print(f"rank {smp.rank()} saw {error}", flush=True)
if smp.rank() == 2 and select.select([first], [], [], 20)[0]:
    print("rank 0 has ended", flush=True)
"""


@pytest.mark.parametrize("pipeline", [3, 1])
def test_a_rank_that_knows_of_a_death_ends_though_mpi_waits_for_all(pipeline, script):
    done = mpirun(3, script(ENDS_AFTER_A_DEATH), str(pipeline), go_on=True)

    for rank in (0, 2):
        assert re.search(rf"rank {rank} saw smp: .*: rank 1 is gone ", done.stdout), done
    assert "rank 0 has ended" in done.stdout, done.stderr


def test_who_misses_a_rank_waits_for_the_cores_word_of_its_death(monkeypatch):
    """torch's connection may break first; without a death nobody ends MPI's clean-up."""
    answers = [False, False, True]
    monkeypatch.setattr(
        bootstrap, "_core", SimpleNamespace(someone_died=lambda: answers.pop(0))
    )
    mpi_runs = SimpleNamespace(cache_info=lambda: SimpleNamespace(currsize=1))
    monkeypatch.setattr(bootstrap, "over_mpi", mpi_runs)
    monkeypatch.setattr(bootstrap, "_misses_a_rank", False)

    bootstrap.look_for_the_dead()
    assert len(answers) == 3, "nobody is missed"
    objects.PeerLost("smp.allgather()", 1)
    bootstrap.look_for_the_dead()
    assert not answers


EXITS = """
from tests.models.jobs import *

pipeline, at = map(int, sys.argv[1:])

class Part(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == at and smp.rank() == smp.size() - 1 - (at == 1):
            sys.exit(0)
        return super().forward(x)

model = chain(*(Part(16, 16) for _ in range(pipeline)), microbatches=2)
try:
    for _ in range(3):
        train(model, torch.randn(16, 16))
except RuntimeError as error:
    print(f"rank {smp.rank()} saw {error}", flush=True)
    wait_until_all_have_said(smp.rank(), 2)
    raise
"""


@pytest.mark.parametrize(
    ("pipeline", "at"), [(2, 3), (2, 1), (1, 3)], ids=["pipeline", "first step", "replicas"]
)
def test_an_exit_inside_a_step_is_an_error_on_every_rank(pipeline, at, script):
    """Also ``sys.exit(0)``, for which a job would end as if all had gone well."""
    done = mpirun(2, script(EXITS), str(pipeline), str(at))

    assert done.returncode != 0
    for rank in range(2):
        assert f"rank {rank} saw smp: sys.exit(0) inside a step" in done.stdout, done.stderr


LEAVES = """
from tests.models.jobs import *

model = chain(*(nn.Linear(16, 16) for _ in range(4)), microbatches=2)
try:
    for _ in range(2 if smp.rank() == 2 else 3):
        train(model, torch.randn(16, 16))
except ConnectionError as error:
    print(f"rank {smp.rank()} saw {error}; died: {_core.someone_died()}", flush=True)
    wait_until_all_have_said(smp.rank(), smp.size() - 1)
    sys.exit(1)
"""


def test_all_survivors_hear_which_rank_has_left(script):
    """A rank that makes fewer steps is named on every other one, also where those have
    nothing to do with it."""
    done = mpirun(4, script(LEAVES))

    said = done.stdout + done.stderr
    assert done.returncode != 0
    for rank in (0, 1, 3):
        left = (
            rf"rank {rank} saw .*pp_rank 2 has left the job in order, and "
            r"(pp_rank \d is in step 3|this rank still needs it): all ranks must make the "
            "same number of steps .*; died: False"
        )
        assert re.search(left, said), said
