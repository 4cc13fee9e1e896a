"""``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``.

A partial checkpoint is a folder with a file from each rank, a full one is a few files::

    path/{tag}_partial/model_{pp_rank}_{tp_rank}.pt
                       optimizer_{pp_rank}_{tp_rank}.pt
                       fp16_states_{pp_rank}_{tp_rank}.pt     with fp16 or bf16
                       optimizer_{pp_rank}_{tp_rank}_{rdp_rank}.pt, fp16_states_... likewise
                                                              with shard_optimizer_state
                       user_content.pt
                       parts               the names of these files
    path/{tag}                     the model, as torch.load and the plain model take it
    path/optimizer_{tag}
    path/user_content_{tag}
    path/parts_{tag}               the names of these files
    path/newest                    the name of the latest one

All files are written under names with the prefix ``.saving.``; then ``.saved`` lists them, and
from that moment they are the checkpoint.  They are renamed; a reader before the end of this,
after a crash, takes them under the first name.  ``newest`` comes last.  ``path`` is a folder
shared by all ranks, and one job at a time saves into it.
"""

import os
import re
import shutil
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from smp.collectives import objects
from smp.collectives.objects import PeerLost
from smp.job.collective_calls import CallMismatch
from smp.marks import IS_PARTIAL, IS_SHARD
from smp.ranks import CommGroup
from smp.saving import folder_lock, saved_files
from smp.saving.optimizer_state import HALF_STATES
from smp.saving.saved_files import CheckpointError, staged_name
from smp.sharding import owners
from smp.sharding.slices import joined_shards
from smp.state_mod import Job, state

if TYPE_CHECKING:
    from smp.modules.live_models import LiveModel
    from smp.saving.optimizer_state import LiveOptimizer

_NEWEST = "newest"
_SAVED = ".saved"
_REMOVING = ".removing."
_PARTIAL = "_partial"
_USER_CONTENT = "user_content.pt"
_PARTS = "parts"
_BESIDE = ("optimizer_", "user_content_", "parts_")  # files of a full one, before its tag
# Files of an optimizer's parts, and their entries by the numbers of parameters.
_BY_NUMBER = {"optimizer": "state", HALF_STATES: "master_weights"}
_KINDS = tuple(_BY_NUMBER)
_SAVE, _RESUME = "smp.save_checkpoint", "smp.resume_from_checkpoint"


def save_checkpoint(
    path: str | os.PathLike,
    tag: str,
    partial: bool = True,
    model: "LiveModel | None" = None,
    optimizer: "LiveOptimizer | None" = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save a checkpoint.  Collective over all ranks.

    A crash at any point leaves the previous one, or this one, whole.

    Args:
        path: folder for all checkpoints of the training, shared by all ranks.
        tag: name of this one.
        partial: each rank saves its own part; else rank 0 saves everything.
        model: the latest ``DistributedModel`` if None.
        optimizer: not saved if None.
        user_content: tensors, plain values, NumPy's scalars and arrays, configurations of
            transformers; rank 0's is saved.
        translate_if_full: whether a full one gets Hugging Face's names, for models with
            replaced modules.
        num_kept_partial_checkpoints: remove the oldest partial ones beyond this number.

    Raises:
        ValueError: no ``DistributedModel`` exists; the tag is no file name, or is another
            file's of a checkpoint; or less than one is to be kept.
        OSError: a file cannot be written; the text names it.  No part of the checkpoint is
            left.
        CheckpointError: a file's content could not be read back; the text names both.  Or
            another job saves into this folder, or another rank could not save.

    Source: SageMaker Python SDK documentation, ``smp.save_checkpoint``.
    """
    job = state.job("smp.save_checkpoint")
    root, tag = os.fspath(path), str(tag)
    _check_name(tag, partial, num_kept_partial_checkpoints)
    if model is None:
        model = state.model
    if model is None:
        raise ValueError("smp.save_checkpoint: there is no DistributedModel to save")
    leads = job.boot.rank == 0
    name = tag + _PARTIAL if partial else tag
    names = [name]
    if not partial:
        names += [f"user_content_{tag}"] + ([f"optimizer_{tag}"] if optimizer else [])
        names.append(f"{_PARTS}_{tag}")
    folder = staged_name(os.path.join(root, name))
    with ExitStack() as held:
        if leads:
            _together(_SAVE, lambda: _prepare(root, folder if partial else None, held))
        else:
            _together(_SAVE)

        def stage() -> None:
            if partial:
                _check_shared(folder)
                content = _partial_files(job, model, optimizer)
                if leads:
                    content[_USER_CONTENT] = user_content
                files = {os.path.join(folder, file): value for file, value in content.items()}
            else:
                values = _full_files(job, model, optimizer, tag, translate_if_full)
                if leads:
                    values[f"user_content_{tag}"] = user_content
                files = {staged_name(os.path.join(root, file)): v for file, v in values.items()}
            _write_files(files)

        try:
            _together(_SAVE, stage)
        except BaseException:
            if leads:
                _remove_leftovers(root)
            raise

        def publish() -> None:
            with held:  # free again before another rank returns
                publish_staged()

        def publish_staged() -> None:
            try:
                if partial:
                    _list_parts(folder, _names_of_parts(job, optimizer is not None))
                else:
                    listed = staged_name(os.path.join(root, f"{_PARTS}_{tag}"))
                    saved_files.write_text(listed, "\n".join(names[:-1]))
                saved_files.sync_folder(folder if partial else root)
                saved_files.write_text(os.path.join(root, _SAVED), "\n".join(names))
            except (OSError, CheckpointError):
                _remove_leftovers(root)
                raise
            _finish(root)
            saved_files.write_text(os.path.join(root, _NEWEST), name)
            if partial and num_kept_partial_checkpoints is not None:
                _remove_oldest(root, num_kept_partial_checkpoints, name)

        _together(_SAVE, publish if leads else None)


def resume_from_checkpoint(
    path: str | os.PathLike,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable | None = None,
) -> Any:
    """Load a checkpoint into the latest model and optimizer.  Collective over all ranks.

    Before the first step the model's values are on every rank, and the optimizer's state is
    kept until the partition.  A partial checkpoint loads under another pipeline degree or
    partition, too.

    Args:
        path: the folder given to ``save_checkpoint``.
        tag: the checkpoint's; the newest if None.
        partial: whether it is a partial checkpoint, or a full one.
        strict: whether missing and unexpected keys of the model are an error.
        load_optimizer: whether the optimizer's state is loaded, if it was saved.
        load_sharded_optimizer_state: whether state saved with ``shard_optimizer_state`` is
            loaded; otherwise master weights and loss scale alone are.
        translate_function: from the saved model's names to the module's.

    Returns:
        the user content; an empty dict where there was none.

    Raises:
        ValueError: no ``DistributedModel`` exists yet.
        FileNotFoundError: no such checkpoint exists.
        CheckpointError: a file is damaged or missing, on this or another rank; or the tensor
            parallel degree was another.  Or the newest is full and ``partial`` is True, or the
            other way round; or another rank could not load its part.
        RuntimeError: a missing or unexpected key of this rank's, when ``strict``, or a tensor
            of another shape.

    Source: SageMaker Python SDK documentation, ``smp.resume_from_checkpoint``.
    """
    job = state.job("smp.resume_from_checkpoint")
    root = os.fspath(path)
    model, optimizer = state.model, state.optimizer
    if model is None:
        raise ValueError("smp.resume_from_checkpoint: make the DistributedModel before")
    found: dict[str, Any] = {}

    def read() -> None:
        name = _name_of(root, tag, partial)
        wanted = optimizer is not None and load_optimizer
        if partial:
            found.update(_read_partial(job, root, name, wanted))
            if owners.is_on() and not load_sharded_optimizer_state and "optimizer" in found:
                found["optimizer"]["state"] = {}
        else:
            found.update(_read_full(root, name, wanted))

    _together(_RESUME, read)
    translate = translate_function
    if translate is None and not partial:
        translate = _from_hugging_face

    def load_model() -> None:
        model.load_state_dict(found["model"], strict=strict, translate_function=translate)

    _together(_RESUME, load_model)
    if optimizer is not None and load_optimizer:
        if "optimizer" in found:
            _together(_RESUME, lambda: optimizer.load_state_dict(found["optimizer"]))
        else:
            warnings.warn(f"smp: the checkpoint in {root} has no optimizer state", stacklevel=2)
    content = found["user_content"]
    return {} if content is None else content


def _check_name(tag: str, partial: bool, kept: int | None) -> None:
    if not tag or tag != os.path.basename(tag) or tag.startswith("."):
        raise ValueError(f"smp: the tag of a checkpoint is a plain file name, not {tag!r}")
    if not partial and (tag == _NEWEST or tag.startswith(_BESIDE) or tag.endswith(_PARTIAL)):
        raise ValueError(
            f"smp: a full checkpoint cannot be called {tag!r}: {_NEWEST!r}, names that begin "
            f"with {', '.join(map(repr, _BESIDE))} and those that end with {_PARTIAL!r} are "
            "files and folders of other checkpoints; give it another tag"
        )
    if kept is not None and kept < 1:
        raise ValueError(f"smp: num_kept_partial_checkpoints is at least 1, got {kept}")


def _together(what: str, function: Callable[[], None] | None = None) -> None:
    """Run the function, where there is one; after a failure on one rank, raise on all."""
    error: Exception | None = None
    if function is not None:
        try:
            function()
        except Exception as raised:  # noqa: BLE001 - the others wait for the outcome
            error = raised
    try:
        said = objects.gather_bytes(
            what, CommGroup.WORLD, _told(error).encode() if error else b""
        )
    except (CallMismatch, PeerLost) as sequel:
        if error is None:
            raise
        if not isinstance(error, CallMismatch | PeerLost):  # it says more than its sequel
            raise sequel from error
    if error is not None:
        raise error
    for rank, text in enumerate(said):
        if text:
            raise CheckpointError(f"on rank {rank}: {text.decode()}")


def _told(error: Exception) -> str:
    """An error's text for other ranks; never empty."""
    ours = isinstance(error, CheckpointError | OSError) and str(error)
    return str(error) if ours else "".join(traceback.format_exception_only(error)).strip()


# --------------------------------------------------------------------------------- files


def _prepare(root: str, folder: str | None, held: ExitStack) -> None:
    os.makedirs(root, exist_ok=True)
    held.enter_context(folder_lock.held(root))
    _finish(root)
    _remove_leftovers(root)
    if folder is not None:
        os.mkdir(folder)


def _check_shared(folder: str) -> None:
    """Raises CheckpointError: this rank does not see the folder made by rank 0."""
    if not os.path.isdir(folder):
        root, name = os.path.split(saved_files.final_name(folder))
        raise CheckpointError(
            f"smp: there is no folder {folder}, made by rank 0 for its own path and tag: this "
            f"rank has path {root!r} and tag {name.removesuffix(_PARTIAL)!r}; give all ranks "
            "the same ones, with a path on a file system that all hosts share"
        )


def _write_files(files: dict[str, Any]) -> None:
    for path, value in files.items():
        saved_files.write_in_staged_folder(path, value)
        saved_files.check_kinds(path, saved_files.final_name(path))


def _saved(root: str) -> list[str]:
    """The names listed in ``.saved``: whole, and not all renamed, because of a crash."""
    try:
        return saved_files.read_text(os.path.join(root, _SAVED)).splitlines()
    except FileNotFoundError:
        return []


def _where(root: str, name: str) -> str:
    """The path of a file or folder of a checkpoint."""
    path = os.path.join(root, name)
    if name in _saved(root) and os.path.exists(staged_name(path)):
        return staged_name(path)
    return path


def _finish(root: str) -> None:
    """Rename the files listed in ``.saved``; may be interrupted and called again."""
    names = _saved(root)
    if not names:
        return
    for name in names:
        path = os.path.join(root, name)
        if not os.path.exists(staged_name(path)):
            continue
        if os.path.isdir(path):
            old = os.path.join(root, _REMOVING + name)
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
        os.replace(staged_name(path), path)
    saved_files.sync_folder(root)
    os.unlink(os.path.join(root, _SAVED))
    _remove_leftovers(root)


def _remove_leftovers(root: str) -> None:
    """Remove files left unfinished by a crash; only after ``_finish``."""
    with suppress(FileNotFoundError):
        for name in os.listdir(root):
            if not name.startswith((staged_name(""), _REMOVING)):
                continue
            path = os.path.join(root, name)
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(path)


def _remove_oldest(root: str, kept: int, newest: str) -> None:
    def saved_at(name: str) -> tuple[bool, int, str]:
        try:
            stat = os.stat(os.path.join(root, name, _USER_CONTENT))
        except FileNotFoundError:
            return (False, 0, name)
        return (name == newest, stat.st_mtime_ns, name)

    folders = [name for name in os.listdir(root) if name.endswith(_PARTIAL)]
    folders = [n for n in folders if not n.startswith(".") and os.path.isdir(f"{root}/{n}")]
    for name in sorted(folders, key=saved_at)[:-kept]:
        old = os.path.join(root, _REMOVING + name)
        os.rename(os.path.join(root, name), old)
        shutil.rmtree(old, ignore_errors=True)


def _name_of(root: str, tag: str | None, partial: bool) -> str:
    """The name of the checkpoint's folder, or of its first file."""
    if tag is not None:
        name = f"{tag}{_PARTIAL}" if partial else tag
    else:
        name = _newest(root)
        if partial != name.endswith(_PARTIAL):
            raise CheckpointError(
                f"smp: the newest checkpoint in {root} is {name!r}, a "
                f"{'full' if partial else 'partial'} one: pass partial={not partial}, or a tag"
            )
    if not os.path.exists(_where(root, name)):
        raise FileNotFoundError(f"smp: there is no checkpoint {os.path.join(root, name)}")
    return name


def _newest(root: str) -> str:
    path = os.path.join(root, _NEWEST)
    try:
        name = saved_files.read_text(path).strip()
    except FileNotFoundError:
        raise FileNotFoundError(f"smp: {root} has no checkpoint: no file 'newest'") from None
    is_name = name and name == os.path.basename(name) and not name.startswith(".")
    if not is_name or not os.path.exists(_where(root, name)):
        raise CheckpointError(
            f"smp: {path} names {name!r}, and there is no such checkpoint: pass a tag"
        )
    return name


def _read_user_content(path: str) -> Any:
    """The user content; an empty file, as Hugging Face's Trainer makes it, has none."""
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return None
    return saved_files.read(path)


# --------------------------------------------------------------------------- full, partial


def _names_of_parts(job: Job, with_optimizer: bool) -> list[str]:
    kinds = ["model", *_KINDS] if with_optimizer else ["model"]
    if not (job.cfg.fp16 or job.cfg.bf16):
        kinds = [kind for kind in kinds if kind != HALF_STATES]
    degrees = job.placement
    parts = [f"{pp}_{tp}" for pp in range(degrees.pp) for tp in range(degrees.tp)]
    shards = [f"_{rdp}" for rdp in range(degrees.rdp)] if owners.is_on() else [""]
    names = [
        f"{kind}_{part}{shard}.pt"
        for kind in kinds
        for part in parts
        for shard in (shards if kind in _KINDS else [""])
    ]
    return [*names, _USER_CONTENT]


def _list_parts(folder: str, names: list[str]) -> None:
    """Write the list of parts, once all exist.

    Raises:
        CheckpointError: a part is missing.
    """
    _refuse_missing(folder, names)
    saved_files.write_text(os.path.join(folder, _PARTS), "\n".join(names))


def _listed_parts(file: str) -> list[str] | None:
    """The list of parts; None for older checkpoints, without a list."""
    try:
        return saved_files.read_text(file).splitlines()
    except FileNotFoundError:
        return None


def _refuse_missing(folder: str, names: list[str]) -> None:
    missing = [name for name in names if not os.path.exists(os.path.join(folder, name))]
    if missing:
        raise CheckpointError(
            f"smp: {saved_files.final_name(folder)} lacks {', '.join(missing)}"
        )


def _partial_files(
    job: Job, model: "LiveModel", optimizer: "LiveOptimizer | None"
) -> dict[str, Any]:
    """The values for this rank to write, by file name.

    The first replica has everything but shards of the optimizer's state.
    """
    at = job.placement.coordinates(job.boot.rank)
    files: dict[str, Any] = {}
    if at.rdp == 0 or owners.shards_parameters():
        values = model.local_state_dict()
        if at.rdp == 0:
            files[f"model_{at.pp}_{at.tp}.pt"] = values
    if optimizer is not None and (at.rdp == 0 or owners.is_on()):
        part = f"{at.pp}_{at.tp}" + (f"_{at.rdp}" if owners.is_on() else "")
        states = optimizer.local_state_dict(gather_if_shard=False)
        if HALF_STATES in states:
            files[f"{HALF_STATES}_{part}.pt"] = half = states.pop(HALF_STATES)
            if IS_SHARD in states:
                half[IS_SHARD] = states[IS_SHARD]
        files[f"optimizer_{part}.pt"] = states
    return files


def _full_files(
    job: Job,
    model: "LiveModel",
    optimizer: "LiveOptimizer | None",
    tag: str,
    translate: bool,
) -> dict[str, Any]:
    leads = job.placement.coordinates(job.boot.rank).rdp == 0
    takes_part = leads or owners.shards_parameters()
    whole: Any = model.state_dict(gather_to_rank0=True) if takes_part else None
    states = None
    if optimizer is not None and (leads or owners.is_on()):
        states = optimizer.state_dict()
    if job.boot.rank != 0:
        return {}
    if translate:
        for to_hugging_face, _ in state.module_manager.translate_functions:
            whole = to_hugging_face(whole)
    files = {tag: whole}
    if states is not None:
        files[f"optimizer_{tag}"] = states
    return files


def _from_hugging_face(state_dict: Any) -> Any:
    for _, from_hugging_face in state.module_manager.translate_functions:
        state_dict = from_hugging_face(state_dict)
    return state_dict


def _read_full(root: str, name: str, with_optimizer: bool) -> dict[str, Any]:
    names = _listed_parts(_where(root, f"{_PARTS}_{name}"))
    content, states = (_where(root, f"{kind}_{name}") for kind in ("user_content", "optimizer"))
    if names is not None:
        with_optimizer = with_optimizer and f"optimizer_{name}" in names
        wanted = [content, states] if with_optimizer else [content]
        if missing := [os.path.basename(p) for p in wanted if not os.path.exists(p)]:
            raise CheckpointError(
                f"smp: {root} lacks {', '.join(missing)} of the checkpoint {name!r}"
            )
    found = {"model": saved_files.read(_where(root, name), "cpu")}
    if not os.path.exists(content):
        content = os.path.join(root, _USER_CONTENT)
    found["user_content"] = _read_user_content(content)
    if with_optimizer and os.path.exists(states):
        found["optimizer"] = saved_files.read(states, "cpu")
    return found


def _read_partial(job: Job, root: str, name: str, with_optimizer: bool) -> dict[str, Any]:
    """This rank's share of the files; under another pipeline degree, some or none."""
    folder = _where(root, name)
    names = _listed_parts(os.path.join(folder, _PARTS)) or os.listdir(folder)
    wanted = [n for n in names if with_optimizer or not n.startswith(_KINDS)]
    _refuse_missing(folder, wanted)
    found = {
        "model": _read_parts(job, folder, names, "model"),
        "user_content": _read_user_content(os.path.join(folder, _USER_CONTENT)),
    }
    if found["model"] is None:
        raise CheckpointError(f"smp: {folder} has no model_*_*.pt")
    if with_optimizer and (states := _read_parts(job, folder, names, "optimizer")) is not None:
        found["optimizer"] = states
        if (half_states := _read_parts(job, folder, names, HALF_STATES)) is not None:
            half_states.pop(IS_PARTIAL)
            states[HALF_STATES] = half_states
    return found


def _read_parts(job: Job, folder: str, names: list[str], kind: str) -> dict[str, Any] | None:
    """This rank's parts, as one partial dict; None: nothing was saved.

    Raises:
        CheckpointError: a part is missing; another tensor parallel degree.
    """
    parts, shards = set(), set[str]()
    for file in names:
        if match := re.fullmatch(rf"{kind}_(\d+)_(\d+)(_\d+)?\.pt", file):
            parts.add((int(match[1]), int(match[2])))
            shards.add(match[3] or "")
    if not parts:
        return None
    saved_pp, saved_tp = (1 + max(numbers) for numbers in zip(*parts, strict=True))
    if shards != {""}:
        shards = {f"_{rdp}" for rdp in range(len(shards))}
    missing = [
        name
        for pp in range(saved_pp)
        for tp in range(saved_tp)
        for shard in sorted(shards)
        if (name := f"{kind}_{pp}_{tp}{shard}.pt") not in names
    ]
    if missing:
        raise CheckpointError(f"smp: {folder} lacks {', '.join(missing)}")
    if saved_tp != job.placement.tp:
        raise CheckpointError(
            f"smp: {folder} was saved with tensor_parallel_degree {saved_tp}, and here it is "
            f"{job.placement.tp}: load it with the same, or save a full checkpoint"
        )
    at = job.placement.coordinates(job.boot.rank)
    out: dict[str, Any] = {}
    for pp in range(saved_pp):
        if pp % job.placement.pp == at.pp:
            files = [f"{kind}_{pp}_{at.tp}{shard}.pt" for shard in sorted(shards)]
            every = [saved_files.read(os.path.join(folder, file), "cpu") for file in files]
            out = _merged(out, _of_all_owners(every, kind))
    if kind in _KINDS and not out:  # more ranks than parts
        file = f"{kind}_0_{at.tp}{min(shards)}.pt"
        part = saved_files.read(os.path.join(folder, file), "cpu")
        out = {**part, _BY_NUMBER[kind]: {}}
        out.pop(IS_SHARD, None)
    out[IS_PARTIAL] = True
    return out


def _of_all_owners(shards: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The parts of a sharded state's owners as one."""
    first, *_ = shards
    if first.get(IS_SHARD) is None:
        return first
    key, places = _BY_NUMBER[kind], [shard.pop(IS_SHARD)["places"] for shard in shards]
    return {**first, key: joined_shards([shard[key] for shard in shards], places)}


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two partial dicts as one; of an optimizer's, the states by number."""
    if not one:
        return other
    for key in _BY_NUMBER.values():
        if isinstance(one.get(key), dict) and ("param_groups" in one or key != "state"):
            return {**other, key: {**one[key], **other[key]}}
    one.update(other)  # each has the metadata of all modules
    return one
