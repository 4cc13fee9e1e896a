"""The C core of smp: the manual of its binding (``csrc/python``).

A rank is the core's number of it: pipeline * pp_size + pp_rank in steps, its place in the names
of a ``Comm`` in collectives.  Seconds are floats, sizes bytes.  A buffer is contiguous, and
borrowed for the call.  A tensor with gaps raises BufferError.  Functions with a wait for other
ranks drop the GIL and raise the exceptions of signals' handlers.

Errors of statuses end with the status's name, "[SMP_ERR_TIMED_OUT]".  SMP_ERR_NO_MEMORY is a
MemoryError, SMP_ERR_INVALID a ValueError.  The rest is, from collectives, a `GroupError`, from
steps a RuntimeError.  A rank that is lost (SMP_ERR_PEER_LOST), has left (SMP_ERR_UNREACHABLE,
SMP_ERR_CLOSED) or cannot be connected is a `PeerError`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, final, type_check_only

from torch import Tensor, nn
from torch.distributed import DistBackendError
from typing_extensions import Buffer

# ---------------------------------------------------------------------------- constants

ANY_SOURCE: int  # of `receive`
WITH_KEY: str  # in an error, before the eight hexadecimal digits of a differing key
compiler: str  # with its version
flags: str  # of the compiler
has_gpu_kernels: bool  # the build has the kernels of tensor parallelism for GPUs
operations: dict[str, int]  # "all-reduce" -> its number for `Group.work_item`
phases: tuple[str, ...]  # "forward", "backward", by number
misses: tuple[str, ...]  # reasons for calls of a chain in vain, by number
reductions: dict[str, int]  # "sum" -> its number for `Group.work_item`
transports: tuple[str, ...]  # those of every build, in the order of preference

# ------------------------------------------------------------------------------ errors

class Error(Exception):
    """An error of the core, with more than its text; raised as one of the classes below."""

    status: str  # "SMP_ERR_MISMATCH"; "" where there is none
    keys: tuple[int, ...]  # of the two calls of SMP_ERR_MISMATCH, where these have other ones

class GroupError(Error, DistBackendError):
    """An error of collectives.

    SMP_ERR_MISMATCH: the members called other operations.  SMP_ERR_SIZES: all gathered with
    assumed sizes, and assumed other ones.  The group goes on after both, and has ended after
    others.
    """

class PeerError(Error, ConnectionError):
    """A rank that is gone, in a step or in a message outside of groups."""

class StepError(Error, RuntimeError):
    """Steps of ranks that do not fit.

    SMP_ERR_MISMATCH: the ranks do not make the same calls.  SMP_ERR_DEADLOCK: each rank waits.
    """

# ----------------------------------------------------------------- the session of a rank

def open(
    rank: int,
    size: int,
    pipelines: int,
    pool_bytes: int,
    device_pool_bytes: int,
    spin_us: int,
    transports: str | None,
    interface: str | None,
    job: str,
    report_s: float,
    end_s: float,
    names: tuple[str, ...],
    in_sequence: bool = False,
    recording_steps: int = 0,
    /,
) -> bytes:
    """Prepare the session: the comm, the server, the watchdog.  This rank's address card.

    rank, size: of all pipelines.  pool_bytes: 0: a quarter of the machine's memory.  spin_us:
    the spinning of a wait; -1: the core decides.  transports: "shm,tcp", None: all.  job: the
    ranks' common secret.  report_s, end_s: the watchdog's limits, 0: none.  names: of the ranks
    in messages, by rank.  in_sequence: all replicas run in one order.  recording_steps: of
    static mode; 0: none.

    RuntimeError: the session is open.  ValueError, MemoryError, RuntimeError: a status.
    """

def connect(cards: list[bytes], timeout_ms: int, /) -> None:
    """Connect to all ranks; their cards are by rank.  Collective.

    ConnectionError names the rank out of reach.  ValueError: not a card for each.
    """

def close() -> None:
    """Join the workers and leave the other ranks; without effect where none is open."""

def configure(**objects: Any) -> None:
    """Python's side of the session; the names are in ``csrc/python/modules/session.h``.

    TypeError: there is no such name.
    """

def set_entries(
    entries: list[tuple[Callable[..., Any], nn.Module | None, str, int]], /
) -> None:
    """The targets of other ranks' calls, by number: (callable, module or None, path, owner)."""

def set_names(
    modules: list[Any], parameters: list[Any], owners: list[Any], paths: list[Any], /
) -> None:
    """The things sent by number: modules and parameters, of these the owner's pp_rank and path.
    Alike on all ranks.
    """

def signal_fd() -> int:
    """The descriptor for ``signal.set_wakeup_fd`` during steps."""

def forward_signals(fd: int, /) -> None:
    """Have the bytes written to `signal_fd` go on to ``fd``; -1: nowhere."""

def expect_in_pool(bytes: int, /) -> None:
    """So many bytes of the own pool will be in use at a time."""

@type_check_only
class _Counters(TypedDict):
    messages: int  # sent
    bytes: int  # ... of them
    pool_blocks: int  # tensors placed in the pool
    pool_fallbacks: int  # ... without room there
    pool_in_use: int  # bytes now,
    pool_high: int  # ... at most so far,
    pool_made: int  # ... given by the system,
    pool_size: int  # ... at most
    left: int  # ranks gone in order
    lost: int  # the lost rank; -1
    device_tensors: int
    device_bytes: int
    device_landed: int  # tensors of them that were copied once
    device_fallbacks: int
    device_in_use: int
    device_high: int
    device_size: int
    device_why: str  # why there is no device pool, or ""
    pinned_bytes: int  # of the pool, for tensors of a device
    pinned_why: str  # why there are no more, or ""

def counters() -> _Counters:
    """The work of the session's comm so far; an empty dict where none is open."""

def peers() -> list[tuple[str | None, int, int]]:
    """By rank: the transport's name (None: this rank), messages and bytes sent."""

def mix(a: int, b: int, /) -> int:
    """A number of 64 bits from two, as for seeds and numbers of calls."""

# ------------------------------------------------------------------------------- steps

def step(
    kind: int,
    microbatches: int,
    active: int,
    turns: list[tuple[int, int]],
    entry_flags: Buffer,
    run_root: Callable[[int], None],
    seed: int,
    backwards: int,
    described: bytes,
    /,
) -> tuple[bool, Any]:
    """Run a step: whether it went well, and pp_rank 0's value at its end (None there).  After a
    failure, the value is its description by `configure`'s ``describe_error``.

    kind: 0 simple, 1 interleaved, 2 as in ``turns`` (microbatch, phase); -1: serve pp_rank 0.
    active: microbatches at a time.  entry_flags: a byte for each entry.  run_root: called for
    each microbatch, on a worker's thread.  described: to be alike on all ranks.

    PeerError: a rank is lost, or has left.  StepError: a deadlock, or the ranks do not make the
    same calls.  KeyboardInterrupt and other exceptions of signals.
    """

def send_end(value: object, /) -> None:
    """The other ranks' steps return it."""

def send_abort(value: object, /) -> None:
    """The other ranks' steps fail with it: the one under way.  Where that ended well, the next
    one fails, and this rank leaves it out.
    """

def skip_step(value: object, /) -> None:
    """The next step fails on every rank, with ``value``."""

def ended_well() -> bool:
    """Whether the last step begun is over, and well, on every rank."""

def raise_signal() -> None:
    """Raise the exception of a signal's handler from the end of the last step, if any."""

def check_schedule(microbatches: int, turns: list[tuple[int, int]], /) -> None:
    """ValueError: the turns are not a forward and then a backward of each microbatch."""

def begin_backward() -> int:
    """The step function reached model.backward: wait for its turn.  The microbatch.

    RuntimeError: outside a step, in a module's forward, or inside a backward.
    """

def end_backward() -> None:
    """The backward is over."""

def in_backward() -> bool:
    """Whether this thread's task runs a backward, or for one."""

def set_gates(expected: Buffer | None, /) -> None:
    """int32, by gate: the number of a microbatch's passes, 0: unknown; None: no gates."""

def await_turn(gate: int, /) -> bool:
    """Wait until earlier microbatches have left the gate.  Whether this microbatch must call
    `left`: not outside a step, and not in a backward.
    """

def left(gate: int, /) -> None:
    """This thread's microbatch has left the gate."""

def current() -> int | None:
    """The microbatch of this thread's task; None: it runs none."""

def task_number() -> int | None:
    """The number of this thread's task (``csrc/server/calls.h``); None: it runs none."""

def timeline() -> list[tuple[int, int, int, int, int, int, int]]:
    """The last step's events, oldest first: (nanoseconds, worker, kind, phase, microbatch,
    entry)."""

# --------------------------------------------------------------- calls of remote modules

def given(args: tuple[Any, ...], kwargs: dict[str, Any], /) -> None:
    """The arguments of a model: its tensors may go ahead to calls foreseen on other ranks."""

def module_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """``__call__`` of a module on another rank; binds like a method.

    RuntimeError: outside a step, or its DistributedModel is gone; or the module's own.
    """

def call_remote(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    bare: bool,
    inputs: bool,
    /,
) -> Any:
    """The call without the caller's hooks; bare: without the owner's, too; inputs, and both: as
    in ``smp.modules.hooks.serve_hooked``.
    """

def call_entry(number: int, args: tuple[Any, ...], /) -> Any:
    """Call a run of ``nn.Sequential`` children by its entry's number."""

def requests() -> int | None:
    """Number of the microbatch's requests so far; None outside of tasks."""

def set_requests(number: int, /) -> None:
    """The next request is the one after this."""

def chains() -> list[tuple[int, list[int]]]:
    """Calls that this rank has learned to follow one another: by the caller's entry, -1 for the
    step function, the called entries.
    """

def touch_output(tensor: Tensor, call: Any, link: int, used: bool, /) -> None:
    """The caller uses an output of a chain: it ends there in later steps, and now, too, if
    foreseen calls have the tensor.  Not used, but packed for another call: a miss.
    """

def refuse_foreseen(undo: Callable[[], None], /) -> None:
    """Raises in a call of a chain, which may run again; its owner then undoes the chain.

    A call with collectives goes on: ``undo`` ends its effects.
    """

def fetch_outputs(call: Any, places: list[tuple[int, int]], /) -> list[Tensor]:
    """The values of outputs of a chain, by the number of its call, and of its tensor.

    RuntimeError: outside the call's step.
    """

# The nodes of `smp.pytorch.autograd`, drawn in ``csrc/python/modules``.
def send_forward(ctx: Any, call: Any, leaf: Tensor, *tensors: Tensor) -> Tensor: ...
def send_backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]: ...
def recv_forward(ctx: Any, call: Any, token: Tensor) -> tuple[Tensor, ...]: ...
def recv_backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]: ...
def enter_forward(ctx: Any, context: Any, leaf: Tensor) -> tuple[Tensor, ...]: ...
def enter_backward(ctx: Any, *grad_outputs: Any) -> tuple[None, ...]: ...

# --------------------------------------------------------------------------- gradients

def gradients_setup(
    parameters: list[nn.Parameter],
    first: Buffer,
    uses: Buffer,
    mix_layouts: Callable[[Tensor, Tensor], Tensor],
    /,
) -> None:
    """The parameters with gradients in the ledger.  first, uses: int32, as in
    ``smp_ledger_create()``.  mix_layouts: the sum of a dense and a sparse tensor.
    """

def grad_flags(dicts: list[dict[str, nn.Parameter | None]], /) -> bytes:
    """One byte for each: whether it requires grad; 2 for None.  Then 8 bytes: which objects."""

def gradients_begin(
    microbatches: int, backwards: int, on_complete: Callable[[int], None] | None, /
) -> None:
    """A step begins, with so many backwards of a microbatch.  on_complete: called with a
    parameter's number when its gradient is complete."""

def gradients_end(failed: bool, /) -> None:
    """Put every ``.grad`` back; after a failure, None where it was None."""

def gradients_hooked() -> nn.Parameter | None:
    """One of the ledger with a post-accumulate-grad hook of the script's."""

def gradients_leave_out() -> None:
    """Some gradients of the step may be zeros, from outputs without use in a loss."""

def gradients_leaves_out() -> bool:
    """Whether `gradients_leave_out` was called here, or on a rank that sent gradients."""

def kept_outputs() -> list[list[list[Tensor]]]:
    """Outputs kept here for callers that may still fetch them: by chain, then by call."""

def gradients_taken() -> list[Tensor]:
    """Gradients and terms of this step outside of all ``.grad``."""

def gradients_held() -> int:
    """Terms awaiting their turn."""

# ----------------------------------------------------- collectives of modules in a step

@type_check_only
@final
class _Collective:
    """A collective at its turn."""

    def __call__(self, *future: Any) -> None:
        """It is over.  Any thread, at any time."""

    def issued(self) -> None:
        """It has been, since `line_up` returned.  RuntimeError: the ranks call others."""

    def wait(self) -> None:
        """Wait until it is over, while other tasks run."""

def distributed_call(path: str, /) -> tuple[int, int, int, int] | None:
    """A call of the module by this thread's task: its number, microbatch, phase, and the count
    of the task's calls of the module; None: there is no step, or one without a server.

    RuntimeError: by a thread of the script during a step.
    """

def line_up(
    number: int, microbatch: int, phase: int, call: int, collective: int, path: str, /
) -> _Collective:
    """Wait until the collective is this rank's next.  RuntimeError: the ranks of the TP_GROUP
    do not make the same calls, or the call runs outside its step."""

def collectives_ended(timeout_s: float, /) -> tuple[int, int, int] | None:
    """After a failed step: the number of collectives issued by this rank, and the fewest and
    the most of a rank of its pp_rank; None: unknown within the time.
    """

def ended_in_order() -> tuple[bool, bool]:
    """Whether this rank had done its part of the last step before the failure.

    Also whether all of its pp_rank had, as far as known to `collectives_ended`.
    """

def hear_failure(timeout_s: float, /) -> None:
    """Wait for word of a failure of the step, after different operations on the ranks."""

# ------------------------------------------------------------------------ the watchdog

def watch(name: str, report_s: float, end_s: float, /) -> None:
    """Watch a rank without a session, until `unwatch`.  Limits in seconds, 0: none."""

def unwatch() -> None:
    """End the watch of `watch`, if any."""

def place(call: str | None, /) -> None:
    """The script waits for other ranks in the call; None: not any more."""

def place_of_step(text: str | None, /) -> None:
    """The place of the script outside of such calls; None: nowhere."""

def moved() -> None:
    """This rank goes on, where it was."""

def standing() -> tuple[float, str] | None:
    """Seconds without a move, and this rank's work and waits in lines; None: in no step and no
    call.
    """

def hear_of(lines: str, /) -> None:
    """Where other ranks stand, for the next reports."""

# ------------------------------------------------------------------------- collectives

@final
class Comm:
    """One rank's end of a set of ranks for collectives; errors call rank r names[r].

    Once closed, RuntimeError.
    """

    def __new__(
        cls,
        rank: int,
        names: list[int],
        pool_bytes: int,
        transports: str | None,
        interface: str | None,
        job: str,
        /,
    ) -> Comm: ...
    def card(self) -> bytes:
        """How other ranks reach this one."""

    def connect(self, cards: list[bytes], timeout_ms: int, /) -> None:
        """Connect to all ranks; their cards are by rank.  Collective."""

    def transport(self, rank: int, /) -> str | None:
        """The name of the transport to that rank; None: this one."""

    def peers(self) -> list[tuple[str | None, int, int]]:
        """By rank: the transport's name (None: this rank), messages and bytes sent."""

    def pool(self) -> tuple[int, int, int, int]:
        """The most bytes, the most in use so far, blocks from the pool, blocks without room."""

    def allocate(self, bytes: int, /) -> Tensor:
        """A uint8 tensor of so many bytes in this rank's pool, where there is room."""

    def finished(self) -> Any:
        """Wait for the next work item that is over; its owner.  None: closing, or closed."""

    def report_after(self, seconds: float, /) -> None:
        """Have an operation with so long a wait for ranks report on stderr; 0: none does."""

    def waits(self) -> str:
        """The long waits of operations: lines."""

    def stop(self) -> None:
        """Let `finished` come to its end."""

    def close(self) -> None:
        """Leave the other ranks.  RuntimeError: groups are open."""

@final
class Group:
    """Ranks of a comm, together for collectives.  Making one is collective over them.

    id: 64 bits, not 0, unlike any other group's of its ranks.  Once closed, methods raise
    GroupError; mere questions give nothing, 0 or False.
    """

    def __new__(
        cls, comm: Comm, ranks: list[int], id: int, name: str, timeout_s: float, /
    ) -> Group: ...
    def work_item(
        self,
        operation: int,
        ins: Sequence[Tensor] | None,
        outs: Sequence[Tensor] | None,
        reduction: int,
        root: int,
        factor: float,
        counts: list[int] | None,
        out_counts: list[int] | None,
        timeout_s: float,
        sparse: int = 0,
        assumed: int = 0,
        in_rows: int = 0,
        out_rows: int = 0,
        key: int = 0,
        /,
    ) -> WorkItem:
        """A work item of one call for each of the tensors, to be issued.

        Tensors in host memory, ``ins`` and ``outs`` of a call with the dtype in common; without
        ``ins``: in place.  counts, out_counts: elements for each member.  root: a member.
        timeout_s: 0: the group's.  The rest is as in ``smp_call`` (checks/call.h).

        BufferError: a tensor is not dense.  TypeError: dtypes differ, or the reduction is not
        defined for them.  ValueError: sizes do not go together.
        """

    def run(
        self,
        operation: int,
        ins: Sequence[Tensor] | None,
        outs: Sequence[Tensor] | None,
        reduction: int,
        root: int,
        factor: float,
        counts: list[int] | None,
        out_counts: list[int] | None,
        timeout_s: float,
        sparse: int = 0,
        assumed: int = 0,
        in_rows: int = 0,
        out_rows: int = 0,
        key: int = 0,
        /,
    ) -> None:
        """Make such a work item and wait for its end; raise its error."""

    def gather(
        self,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        timeout_s: float,
        waits: bool,
        key: int = 0,
        /,
    ) -> WorkItem | None:
        """A work item of one all-gather between devices for each of the tensors, to be issued;
        with ``waits``, do it: None.  After `meet_devices`."""

    def meet_devices(
        self, ins: Sequence[Tensor], outs: Sequence[Tensor], timeout_s: float, bytes: int, /
    ) -> str:
        """Before the first `gather`, of these tensors: prepare all members' devices, with so
        many bytes of each.  The reason against, or "".  Collective.
        """

    def sequence(self) -> int:
        """How many operations have begun."""

    def issued(self) -> int:
        """How many work items were issued, whether they have begun or wait behind others."""

    def rename(self, name: str, /) -> None:
        """Change its name in errors; without effect after its first operation."""

    def is_on_one_host(self) -> bool:
        """Whether all members share memory."""

    def use(self) -> tuple[int, int, int, int, bool, int, int, int, str]:
        """Operations, their bytes, messages and bytes to other hosts, whether members read each
        other's memory.  Then operations between devices, their bytes, those with tensors read
        where they lie, and the reason for none.
        """

    def close(self) -> None:
        """Leave the group; operations under way end with an error."""

@final
class WorkItem:
    """Calls of a group, over together."""

    def issue(self, owner: Any, /) -> None:
        """Begin; `Comm.finished` gives the owner when it is over."""

    def wait(self, timeout_s: float, /) -> bool:
        """Whether it is over by then; 0: no limit."""

    def describe(self) -> str | None:
        """Its wait, in words; None: it is over, or its wait is unknown."""

    def is_over(self) -> bool:
        """Whether it is over."""

    def is_done(self) -> bool:
        """Whether it is over, and the device has done it."""

    def check(self) -> None:
        """Raise its error; it is over."""

    def join(self) -> None:
        """Have the current stream wait for the device; it is over."""

@final
class Receipt:
    """A tensor on its way."""

    def wait(self, timeout_s: float, /) -> bool:
        """Whether it is over by then; 0: no limit."""

    def withdraw(self) -> bool:
        """Whether it is over after all; else nothing comes any more."""

    def describe(self) -> str:
        """The group, the tag and the sender, in words."""

    def is_over(self) -> bool:
        """Whether it is over."""

    def check(self) -> None:
        """Raise its error; it is over."""

    def source(self) -> int:
        """The sender; it is over."""

def send(group: Group, rank: int, tag: int, tensor: Tensor, /) -> None:
    """Send a copy of the tensor; does not wait for the receiver."""

def receive(group: Group, rank: int, tag: int, tensor: Tensor, /) -> Receipt:
    """A receipt of the next tensor from that rank, or from any: ANY_SOURCE."""

# ------------------------------------------------------------- the process, and the codec

def register_transport(capsule: object, /) -> None:
    """Sessions opened from now on may use this transport (``smp._mpi.transport``)."""

def load_ucx(path: str | None, /) -> str:
    """Load libucp.so.0: its version.  path: a package's, looked at last.

    OSError gives the reason against its use.
    """

def addresses(interface: str | None, /) -> list[str]:
    """This host's addresses for ``comm_interface``, "eth0 10.0.0.7/24"; None: all."""

def someone_died() -> bool:
    """Whether a rank with a connection to this process has died, also in a job left by this
    one.
    """

def log(text: str, /) -> None:
    """Write a line on stderr where SMP_LOG is info."""

def log_rank(rank: int, /) -> None:
    """The rank in these lines."""

def take_warning() -> str | None:
    """A warning of the core for the script, once; None: nothing."""

def share_heap() -> None:
    """Have all threads with their first allocation from here on share one heap, and keep its
    pages.
    """

def heap_holes() -> int:
    """Bytes of the heap without a block; 0 where glibc before 2.33 does not tell."""

def trim_heap() -> None:
    """Give the system back the empty pages of the heap."""

def pack(value: object, /) -> bytes:
    """The codec's bytes of a value, tensors too."""

def unpack(bytes: Buffer, /) -> Any:
    """The value of `pack`.  ValueError: not such bytes."""

# ------------------------------------------------------------------------ the partition

class PartitionConflict(ValueError):
    """Two modules with a common parameter are pinned to different devices: their numbers."""

def partition(
    devices: int,
    memory_weight: float,
    default_device: int,
    nmodules: int,
    edge_parent: Buffer,
    edge_child: Buffer,
    parameter_bytes: Buffer,
    use_module: Buffer,
    use_parameter: Buffer,
    first_run: Buffer | None = None,
    activation_bytes: Buffer | None = None,
    seconds: Buffer | None = None,
    chain: Buffer | None = None,
    pin: Buffer | None = None,
) -> tuple[bytes, bytes, bytes, bytes]:
    """The device of each module; see ``csrc/partition/partition.h``.

    Buffers: int32 for indices and pins, int64 for bytes and positions, float64 for seconds,
    int8 for chain.  device and node (int32 by module), own_cost (float64 by module), cost
    (float64 by device).

    PartitionConflict; ValueError: an index, a number or a length is out of range; TypeError: a
    buffer of other elements.
    """

def partition_hash(device: Buffer, names: Buffer, /) -> int:
    """A number of 64 bits for the ranks to compare: of int32 ``device`` and bytes ``names``."""

# ---------------------------------------------------- kernels of tensor parallelism

_Dropout = tuple[float, int, int, int, int, int]  # p, seed, first, run, jump, width
_Sight = tuple[bool, int, int, int]  # causal, first_query, queries, window
_Mask = tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]  # with elements, shape, strides

# Tensors of one dtype (float32, float16, bfloat16) and device, [rows, columns] or [columns];
# statistics are float32, [rows], ids and targets int64.  See ``csrc/tp_kernels/tp_kernels.h``.
# BufferError: a tensor is not dense, or where no kernels are.  TypeError: another dtype.
# ValueError: another number of elements, or another device.

def tp_gpu_open(tensor: Tensor, /) -> str | None:
    """The reason for kernels not to run on the tensor's device; None: they do."""

def tp_residual(
    rows: int,
    columns: int,
    dropout: _Dropout,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    /,
) -> None:
    """out = residual + dropout(x + bias)."""

def tp_residual_backward(
    rows: int,
    columns: int,
    dropout: _Dropout,
    grad: Tensor,
    grad_x: Tensor,
    grad_bias: Tensor | None,
    /,
) -> None:
    """grad_x = dropout(grad); grad_bias = the sum of its rows."""

def tp_norm(
    rows: int,
    columns: int,
    dropout: _Dropout,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    shift: Tensor | None,
    eps: float,
    sum: Tensor,
    out: Tensor,
    statistics: Tensor,
    /,
) -> None:
    """sum = residual + dropout(x + bias); out = its normalised rows * weight + shift;
    statistics [2, rows]: mean and 1 / deviation."""

def tp_norm_backward(
    rows: int,
    columns: int,
    dropout: _Dropout,
    grad_out: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    grad_residual: Tensor,
    grad_x: Tensor | None,
    grad_bias: Tensor,
    grad_weight: Tensor,
    grad_shift: Tensor,
    /,
) -> None:
    """The gradients of all inputs from those of out and sum."""

def tp_softmax(
    rows: int,
    keys: int,
    scale: float,
    sight: _Sight,
    dropout: _Dropout,
    scores: Tensor,
    mask: _Mask | None,
    probabilities: Tensor,
    out: Tensor | None,
    /,
) -> None:
    """probabilities = softmax(scores * scale + mask) over the keys seen by a row; out =
    dropout(probabilities).  All [rows, keys].
    """

def tp_softmax_backward(
    rows: int,
    keys: int,
    scale: float,
    sight: _Sight,
    dropout: _Dropout,
    probabilities: Tensor,
    grad: Tensor,
    grad_scores: Tensor,
    /,
) -> None:
    """The gradient of the scores."""

def tp_cross_entropy(
    rows: int,
    columns: int,
    where: tuple[int, int, int],
    logits: Tensor,
    targets: Tensor,
    top: Tensor,
    sum: Tensor,
    target: Tensor,
    all: Tensor | None,
    /,
) -> int | None:
    """One rank's statistics of its columns; where = (id of the first, vocabulary, ignored
    target).  The first row with a target neither an id nor ignored, or ``rows``.  On a GPU
    None: the caller checks the targets there.
    """

def tp_cross_entropy_backward(
    rows: int,
    columns: int,
    where: tuple[int, int],
    smoothing: float,
    logits: Tensor,
    targets: Tensor,
    top: Tensor,
    sum: Tensor,
    factors: Tensor,
    grad: Tensor,
    /,
) -> None:
    """The gradient of the logits, from the statistics of all ranks; factors: of the rows'
    losses.  grad may be logits."""

def tp_gather(
    count: int, rows: int, columns: int, start: int, table: Tensor, ids: Tensor, out: Tensor, /
) -> None:
    """out [count, columns]: the row of the table [rows, columns] for each id from ``start`` on;
    zeros where another rank has it.  Host memory only."""

def tp_scatter(
    count: int,
    rows: int,
    columns: int,
    start: int,
    padding: int,
    ids: Tensor,
    grad: Tensor,
    grad_table: Tensor,
    /,
) -> None:
    """grad_table: the sums of grad's rows by id, in their order; host memory only.  padding: an
    id without a gradient; -1: none.
    """
