"""``@smp.step``: running a training step once per microbatch, pipelined.

pp_rank 0 runs the step function; the others serve it.  Order, workers and messages are
in ``csrc/server``.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp import _core, memory, ranks
from smp.collectives.objects import refuse_if_forked
from smp.collectives.torch_process_groups import device_of_numbers
from smp.data_parallel import data_parallel, live_parameters
from smp.data_parallel.reduction import Reduction
from smp.execution import first_step
from smp.job import core_warnings, interrupts
from smp.job.config import ConfigError
from smp.modules import (
    device_placement,
    hooks,
    late_hooks,
    live_models,
    microbatch_attributes,
    parametrizations,
    travelling_changes,
)
from smp.modules.live_models import LiveModel, parts_of, record_of
from smp.precision import loss_scale
from smp.pytorch import accelerator, call_warnings, context_variables
from smp.pytorch.restore import write_back
from smp.runtime import core_tables, failures, microbatches, thread_state
from smp.runtime_state import Runtime, StepPhase
from smp.sharding import owners
from smp.state_mod import state
from smp.tensor_parallel import group
from smp.tensor_parallel.backward import order, sequence, step_end, unused_collectives
from smp.tensor_parallel.rows import random_streams, same_samples

_SIMPLE, _INTERLEAVED, _LISTED, _SERVE = 0, 1, 2, -1

Plan = tuple[int, int, int, list[tuple[int, int]]]


def is_tracing() -> bool:
    """Whether the step function runs now for tracing, before the first real step."""
    return state.is_tracing


def step(
    function: Callable | None = None,
    *,
    non_split_inputs: list[str] | None = None,
    input_split_axes: dict[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable:
    """Decorate a training or evaluation step.

    Every tensor in the arguments is cut along axis 0 into ``microbatches`` pieces, the function
    runs once for each, and returned tensors become :class:`smp.StepOutput`.  A batch with fewer
    samples has one in each piece, and as many pieces.  The ranks of a TP_GROUP have as many as
    the one with the fewest.

    Args:
        function: the step function; calls the model and ``model.backward(loss)``.
        non_split_inputs: names of arguments given whole to every microbatch.
        input_split_axes: name -> axis to cut along, where it is not 0.
        detach_outputs: return tensors without their graph.

    Raises:
        ValueError: a batch has no samples, or one of its tensors has fewer than the
            microbatches and than another tensor.

    Source: SageMaker Python SDK documentation, ``smp.step``.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    splitter = microbatches.Splitter(function, non_split_inputs, input_split_axes)
    name = _name_of(function)
    caller = f"the @smp.step function {microbatches.short_name_of(function)}"

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        rt = state.job(caller).runtime
        if rt.alone:
            return _run_alone(rt, function, splitter, detach_outputs, args, kwargs)
        return Step(rt, function, name, splitter, detach_outputs).run(args, kwargs)

    if next(iter(splitter.signature.parameters), None) in ("self", "cls"):
        return run
    # As an attribute of a class it takes its arguments alone, without the instance.
    return staticmethod(run)


def _name_of(function: Callable) -> str:
    """A function's name and place, the same on every rank."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} (line {code.co_firstlineno})"


def _begin(rt: Runtime, function: Callable) -> None:
    if rt.step.is_under_way:
        raise RuntimeError(
            f"smp: the step function {microbatches.short_name_of(function)} was called inside "
            "another"
        )
    if torch.is_grad_enabled():
        loss_scale.begin_backward()
    rt.step.begin()


def _run_alone(
    rt: Runtime,
    function: Callable,
    splitter: microbatches.Splitter,
    detach: bool,
    args: tuple,
    kwargs: dict,
) -> Any:
    """A step of a job of one rank; short, because it stands beside a bare loop."""
    _begin(rt, function)
    try:
        hooked = live_models.living() if rt.hooks_wait else ()
        for one in hooked:
            record_of(one).post_partition_hooks.run(one)
        count = splitter.count(rt.cfg.microbatches, args, kwargs)
        calls, rt.step.weights = splitter.split(count, args, kwargs)
        if rt.home is not None:
            calls = microbatches.map_calls(calls, device_placement.mover(rt.home))
        output = _run_in_order(rt, function, detach, calls)
        if hooked:
            for one in hooked:
                record_of(one).post_step_hooks.run(one)
            records = [record_of(one) for one in live_models.living()]
            rt.hooks_wait = any(r.post_partition_hooks or r.post_step_hooks for r in records)
        return output
    finally:
        rt.step.end()


def _run_in_order(
    rt: Runtime, function: Callable, detach: bool, calls: list[tuple[tuple, dict]]
) -> Any:
    """One microbatch after the other, without a pipeline."""
    step, outputs = rt.step, []
    for i, (args, kwargs) in enumerate(calls):
        _core.moved()
        step.microbatch, step.backward_calls = i, 0
        output = function(*args, **kwargs)
        outputs.append(microbatches.map_tensors(output, Tensor.detach) if detach else output)
        step.backwards = max(1, step.backward_calls)
    return microbatches.merge(outputs, step.weights)


def _share_place(rt: Runtime) -> None:
    """Have the workers use the calling thread's device, stream and generator."""
    place = accelerator.place()
    if place != rt.place:
        rt.place = place
        _core.configure(
            enter_device=None if place is None else place.enter,
            device_generator=accelerator.generator(),
        )


class Step:
    """One call of a step function."""

    def __init__(
        self,
        rt: Runtime,
        function: Callable,
        name: str,
        splitter: microbatches.Splitter,
        detach_outputs: bool,
    ):
        self.rt = rt
        self.function = function
        self.name = name
        self.splitter = splitter
        self.detach = detach_outputs
        self.count = rt.cfg.microbatches  # on pp_rank 0 fewer, if there are fewer samples
        self.given: tuple[tuple, dict] = (), {}
        self.calls: list[tuple[tuple, dict]] = []
        self.outputs: list[Any] = []
        self.reduction: Reduction | None = None  # gradients are exchanged after the step
        self.before: StepState | None = None
        self.description: tuple | None = None  # of the step's failure

    def run(self, args: tuple, kwargs: dict) -> Any:
        rt = self.rt
        if rt.pp_size > 1:
            self._refuse_if_forked()
        _begin(rt, self.function)
        _core.place_of_step(f"the step function {self.name}")
        try:
            if live_models.collect_replaced():
                travelling_changes.forget_others(live_models.living())
            models = live_models.living()
            self.given = args, kwargs
            refused = self._split_or_refuse()
            if rt.pp_size > 1:
                refused = self._refuse_other_samples(refused)
                self._partition_new_models(refused)
            self._move_inputs()
            if rt.pp_size == 1:
                for one in models:
                    record_of(one).post_partition_hooks.run(one)
                run = self._run_unpipelined
            else:
                run = self._run_pipelined
            replicated = [m for m in models if record_of(m).replicas is not None]
            if replicated:
                if owners.shards_parameters():
                    data_parallel.assign_owners()
                with live_parameters.in_use(replicated):
                    output = self._run_replicated(run, refused, replicated)
            else:
                output = run(refused)
            for one in models:
                record_of(one).post_step_hooks.run(one)
            if rt.pp_size > 1:
                self._raise_late_signal()
            return output
        except Exception as error:
            if self.description is None:
                memory.tell_if_out_of_memory(error)
            raise
        finally:
            _core.place_of_step(None)
            rt.step.end()
            self.calls, self.given = [], ((), {})

    def _refuse_if_forked(self) -> None:
        refuse_if_forked(f"the @smp.step function {self.name}", self.rt.boot.rank, self.rt.pid)

    def _split(self, count: int) -> None:
        self.calls, self.rt.step.weights = self.splitter.split(count, *self.given)
        self.count = count

    def _split_or_refuse(self) -> Exception | None:
        """Cut the arguments on pp_rank 0; an error in them is for every rank."""
        if self.rt.pp_rank == 0:
            try:
                self._split(self.splitter.count(self.count, *self.given))
            except Exception as refused:  # noqa: BLE001 - the other ranks are waiting
                return refused
        return None

    def _move_inputs(self) -> None:
        if self.rt.home is not None:
            self.calls = microbatches.map_calls(
                self.calls, device_placement.mover(self.rt.home)
            )

    def _split_as_others(self, refused: Exception | None) -> Exception | None:
        """Have no more microbatches than any rank that meets this one's modules in collectives.

        Collective over these ranks, in the step.
        """
        rt, most = self.rt, self.rt.cfg.microbatches
        if rt.pp_rank != 0 or most == 1:
            return refused
        models = live_models.living()
        synchronised = any(m.training and record_of(m).has_sync_norm for m in models)
        if rt.in_sequence or synchronised:
            others = ranks.get_dp_process_group()
        elif rt.tp_size > 1:
            others = ranks.get_tp_process_group()
        elif (gathers := live_parameters.group_of_call(models)) is not None:
            others = gathers
        else:
            return refused
        self._refuse_if_forked()
        fewest = torch.tensor(
            [self.count if refused is None else most], device=device_of_numbers(others)
        )
        try:
            try:
                dist.all_reduce(fewest, dist.ReduceOp.MIN, others)
            except Exception as error:
                step_end.hear("the number of microbatches of a step", error)
                raise
            if refused is None and fewest < self.count:
                self._split(int(fewest))
                self._move_inputs()
        except Exception as error:  # noqa: BLE001 - the other ranks are waiting
            return error if refused is None else refused
        return refused

    def _refuse_other_samples(self, refused: Exception | None) -> Exception | None:
        """In the first steps, compare the inputs of ranks declared to have the same samples."""
        rt = self.rt
        if rt.pp_rank != 0 or rt.compared_steps == same_samples.COMPARED_STEPS:
            return refused
        if group.size() == 1 or not group.same_samples():
            return refused
        rt.compared_steps += 1
        inputs: list[Tensor] = []

        def take(tensor: Tensor) -> Tensor:
            inputs.append(tensor)
            return tensor

        microbatches.map_calls(self.calls, take)
        other = same_samples.inputs_differ(self.name, None if refused else inputs)
        return refused or other

    # ----------------------------------------------------------- with the other replicas

    def _run_replicated(
        self, run: Callable, refused: Exception | None, models: list[LiveModel]
    ) -> Any:
        """Run the step; its gradients are averaged over the replicas.

        A step without a backward in evaluation mode is this replica's own.
        """
        rt = self.rt
        trains = torch.is_grad_enabled() and any(m.training for m in models)
        spread = []
        if torch.is_grad_enabled() and rt.pp_size > 1:
            spread = data_parallel.spread_averages(models)
        if trains:
            self._refuse_if_forked()
            self.reduction = data_parallel.begin(data_parallel.due(models))
        elif torch.is_grad_enabled():
            data_parallel.watch(models)
        if self.reduction is not None and rt.in_sequence:
            self.reduction.active()  # nothing is under way when modules use the group
        try:
            output = run(refused)
        except BaseException as error:
            failure = failures.as_failure(error)
            in_backward = rt.step.phase is StepPhase.BACKWARD
            if self.reduction is not None:
                told = self.description or failures.describe(
                    failure,
                    failures.module_of(failure, live_models.living()),
                    rt.step.microbatch,
                    _core.phases.index("backward" if in_backward else "forward"),
                    rt.name,
                )
                data_parallel.finish(self.reduction, failure, told)
            elif not rt.step.saw_backward:
                data_parallel.take_back_averages(spread)
            if failure is not error:
                raise failure from error
            raise
        if self.reduction is None and not rt.step.saw_backward:
            data_parallel.take_back_averages(spread)
        if rt.step.saw_backward and not trains:
            self.reduction = data_parallel.begin(data_parallel.due(models), with_buffers=False)
        if self.reduction is not None:
            try:
                data_parallel.finish(self.reduction)
            except BaseException:
                if self.before is not None:
                    self.before.restore()
                raise
        return output

    # ------------------------------------------------------------- without a pipeline

    def _run_unpipelined(self, refused: Exception | None) -> Any:
        gathers = live_parameters.group_of_call(live_models.living())
        with step_end.of_tp_group(), step_end.together(gathers):
            random_streams.share()  # before any failure on one tp_rank alone
            refused = self._split_as_others(refused)
            if refused is not None:
                raise refused
            return _run_in_order(self.rt, self.function, self.detach, self.calls)

    def _keep(self, output: Any) -> Any:
        if not self.detach:
            return output
        return microbatches.map_tensors(output, _own)

    # ------------------------------------------------------------------ the first step

    def _partition_new_models(self, refused: Exception | None) -> None:
        rt = self.rt
        new = [m for m in live_models.living() if not m.partitioned]
        if not new:
            return
        first_step.partition_models(rt, new, lambda on: self._run_traced(refused, on))

    def _run_traced(self, refused: Exception | None, on: torch.device | None) -> None:
        """Run the step function on the first microbatch, without backward.

        Args:
            on: where its inputs are moved to first; None: they stay.
        """
        if refused is not None:
            raise refused
        calls = self.calls[:1]
        if on is not None:
            calls = microbatches.map_calls(calls, device_placement.mover(on))
        [(args, kwargs)] = calls
        # Those of the modules inside are put back with the other marks of tracing.
        modes = [(one, one.training) for one in live_models.living()]
        try:
            with self.rt.step.traced_run():
                self.function(*args, **kwargs)
        finally:
            for one, mode in modes:
                one.training = mode

    # -------------------------------------------------------------------- the pipeline

    def _run_pipelined(self, refused: Exception | None) -> Any:
        rt = self.rt
        models = live_models.partitioned()
        before = self.before = StepState(models)
        # Before any failure on one tp_rank alone.
        seed = random_streams.shared_seed(
            int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        )
        refused = self._split_as_others(refused)
        self.outputs = [None] * self.count
        if core_tables.grad_flags(rt.tables) != rt.tables.grad_flags:
            core_tables.install_gradients(rt, models)
        try:
            plan = self._plan(refused)
        except Exception as error:
            _core.skip_step(failures.describe(error, None, 0, 0, rt.name))
            before.restore()
            self._finish_collectives()
            raise
        random_state = accelerator.RandomState()
        _share_place(rt)
        context_variables.begin_step()
        cached = parametrizations.begin_step()
        call_warnings.begin_step()
        call_warnings.warn_of_modes(self.name, "step function", cached)
        self.state = thread_state.capture()
        self.grad = torch.is_grad_enabled()
        gradients = unused_collectives.PipelinedStep(
            rt.tables.parameters if rt.tp_size > 1 else ()
        )
        _core.gradients_begin(self.count, rt.step.backwards, self._on_complete())
        try:
            ok, value = self._run_core(plan, seed)
            if not ok:
                self.description = value
                local = next((e for told, e in rt.local_errors if told == value), None)
                raise failures.rebuild(value, local)
        finally:
            local = None
            rt.local_errors.clear()
            travelling_changes.finish()
            hooks.finish()
            late_hooks.finish()
            went_well = _core.ended_well()
            microbatch_attributes.finish(went_well)
            _core.gradients_end(not went_well)
            gradients.end()
            if self.reduction is None:
                unused_collectives.drop_zeros()
            if went_well:
                random_state.restore()
            else:
                before.restore()
                self._finish_collectives()
        outputs, weights, rt.step.saw_backward, (modes, made) = value
        if rt.pp_rank != 0:
            travelling_changes.make(made)
            for one, mode in zip(live_models.living(), modes, strict=False):
                one.training = mode
        core_warnings.pass_on()
        return microbatches.merge(list(outputs), list(weights))

    def _run_core(self, plan: Plan, seed: int) -> tuple[bool, Any]:
        """Whether the step went well, and pp_rank 0's values for all ranks at its end.

        Errors of this rank's core, and Ctrl-C, are for every rank.
        """
        rt = self.rt
        try:
            with interrupts.heard():
                kind, count, active, turns = plan
                ok, value = _core.step(
                    kind,
                    count,
                    active,
                    turns,
                    rt.tables.entry_flags,
                    self._run_microbatch,
                    seed,
                    rt.step.backwards,
                    self._described(),
                )
            if ok and rt.pp_rank == 0:
                travelling_changes.finish()
                made = (
                    tuple(m.training for m in live_models.living()),
                    travelling_changes.told(),
                )
                value = (self.outputs, rt.step.weights, rt.step.saw_backward, made)
                _core.send_end(value)
            return ok, value
        except ConnectionError as error:
            # Each rank finds the death of another by itself, with its own need of it.  An
            # orderly leave is found by the ranks in need alone.
            if not (isinstance(error, _core.Error) and error.status == "SMP_ERR_PEER_LOST"):
                _core.send_abort(failures.describe(error, None, 0, 0, rt.name))
            raise
        except BaseException as error:
            _core.send_abort(failures.describe(error, None, 0, 0, rt.name))
            raise

    def _finish_collectives(self) -> None:
        """After a failure: no rank is left alone in a collective of a module."""
        if self.rt.in_sequence:
            sequence.finish_failed_step()
        elif self.rt.tp_size > 1:
            order.finish_failed_step()

    def _raise_late_signal(self) -> None:
        """Ctrl-C from after this step's end elsewhere: it is for the next one."""
        try:
            _core.raise_signal()
        except BaseException as error:
            _core.send_abort(failures.describe(error, None, 0, 0, self.rt.name))
            raise

    def _described(self) -> bytes:
        """The step's facts to be alike on all ranks, for people to read."""
        modes = {m.training for m in live_models.living()}
        mode = "a part of the models" if len(modes) > 1 else "models"
        trains = "evaluation" if modes == {False} else "training"
        return f"{self.name}, {mode} in {trains} mode, {self.rt.tables.grad_told}".encode()

    def _on_complete(self) -> Callable[[int], None] | None:
        """The ledger's callback for each complete gradient of this step."""
        reduction = self.reduction
        if reduction is None or self.rt.in_sequence:  # modules may use the same group
            return None
        parameters = self.rt.tables.parameters
        return lambda number: reduction.complete(parameters[number])

    def _plan(self, refused: Exception | None) -> Plan:
        """Kind, microbatches, active microbatches and turns of the schedule.

        Raises:
            ValueError: an impossible schedule; or an earlier refusal.
        """
        if refused is not None:
            raise refused
        self._refuse_hooks_on_sums()
        kind, turns, active = self._schedule()
        if kind == _LISTED:
            _core.check_schedule(self.count, turns)
        return kind, self.count, active, turns

    def _refuse_hooks_on_sums(self) -> None:
        """Microbatches' gradients are added up in order, behind autograd's back.

        Raises:
            NotImplementedError: a parameter has a hook in need of the sum.
        """
        hooked = core_tables.with_hook_on_sum(self.rt.tables)
        for one in live_models.partitioned() if hooked is not None else ():
            for name, parameter in one.module.named_parameters():
                if parameter is hooked:
                    raise NotImplementedError(
                        f"smp: parameter '{name}' has a register_post_accumulate_grad_hook, "
                        "which would see parts of its gradient: with pipeline parallelism it "
                        "is complete when the step function has returned on all ranks; do it "
                        "then, for p in model.local_parameters(), or use p.register_hook"
                    )

    def _schedule(self) -> tuple[int, list[tuple[int, int]], int]:
        rt = self.rt
        active = rt.active_microbatches
        if rt.pp_rank != 0:
            return _SERVE, [], active
        if rt.cfg.pipeline == "simple":
            return _SIMPLE, [], self.count
        if rt.cfg.pipeline == "interleaved":
            return _INTERLEAVED, [], active
        turns = read_turns(rt.cfg.pipeline, self.count)
        # A list is made for batches with a sample for each microbatch.
        turns = [turn for turn in turns if not self.count <= turn[0] < rt.cfg.microbatches]
        if (most := most_in_flight(turns)) > active:
            raise ConfigError(
                f"active_microbatches={active} is too few for the schedule, which has {most} "
                "microbatches in flight at once"
            )
        return _LISTED, turns, self.count

    def _run_microbatch(self, microbatch: int) -> None:
        """Called by the core, on a worker thread, for each microbatch."""
        args, kwargs = self.calls[microbatch]
        with torch.set_grad_enabled(self.grad):
            if self.state is None:
                output = self.function(*args, **kwargs)
            else:
                output = thread_state.with_state(self.state, self.function, args, kwargs)
        self.outputs[microbatch] = self._keep(output)
        travelling_changes.returned(microbatch)


def read_turns(pipeline: Any, count: int) -> list[tuple[int, int]]:
    """The user's schedule as (microbatch, phase) pairs with phase 0 or 1.

    Args:
        pipeline: a list of pairs, or a callable from the number of microbatches to pairs,
            returned or yielded.  A phase is ``"forward"`` or ``"backward"``, or 0 or 1.

    Raises:
        ValueError: a pair is malformed; the core refuses an impossible order.
    """
    phases: dict[Any, int] = {}
    for number, name in enumerate(_core.phases):
        phases[name] = phases[number] = number
    turns = []
    for turn in pipeline(count) if callable(pipeline) else pipeline:
        try:
            microbatch, phase = turn
            turns.append((int(microbatch), phases[phase]))
        except (TypeError, ValueError, KeyError):
            raise ValueError(
                f"smp: the schedule holds {turn!r}; each entry is (microbatch, phase) with "
                "phase 'forward' or 'backward'"
            ) from None
    return turns


def most_in_flight(turns: list[tuple[int, int]]) -> int:
    """The most microbatches between their forward and their last backward at once."""
    last = {microbatch: at for at, (microbatch, _) in enumerate(turns)}
    begun: set[int] = set()
    most = 0
    for at, (microbatch, _) in enumerate(turns):
        begun.add(microbatch)
        most = max(most, len(begun))
        if last[microbatch] == at:
            begun.discard(microbatch)
    return most


class StepState:
    """State put back after a failed step: changed buffers and random numbers."""

    def __init__(self, models: Sequence[LiveModel]):
        self.random = accelerator.RandomState()
        self.buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for one in models
            for module in parts_of(one).stateful
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Put everything back as it was."""
        self.random.restore()
        for owner, name, buffer, value in self.buffers:
            owner[name] = buffer
            with torch.no_grad():
                write_back(buffer, value)


def _own(tensor: Tensor) -> Tensor:
    """The tensor without its graph, in memory of its own: blocks of the pool go back."""
    tensor = tensor.detach()
    foreign = tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()
    return tensor.clone() if foreign else tensor
