"""Saving and loading: files that are whole, checked, and load into what trains."""

import errno
import io
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from transformers import GPT2Config

import smp
from smp.collectives import objects
from smp.saving import folder_lock, saved_files
from tests.models.trained import (
    OPTIMIZERS,
    PlainRun,
    Run,
    assert_same,
    init,
    make_model,
    snapshot,
    trained,
)
from tests.ranks import call_on_ranks, on_ranks, python

HERE = Path(__file__).parent
KINDS = pytest.mark.parametrize("partial", [True, False], ids=["partial", "full"])


def save(run: Run, path: Path, tag: str, partial: bool, **more) -> None:
    content = {"step": 3, "scheduler": run.scheduler.state_dict()}
    smp.save_checkpoint(
        path,
        tag,
        partial=partial,
        model=run.model,
        optimizer=run.optimizer,
        user_content=content,
        **more,
    )


def saved_run(path: Path, name: str, partial: bool) -> Run:
    """One that has saved its first step as "a"."""
    run = trained(name)
    save(run, path, "a", partial)
    return run


def remove(path: Path) -> None:
    """By rank 0, while the others wait."""
    smp.barrier()
    if smp.rank() == 0:
        path.unlink()
    smp.barrier()


def listed(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


# ------------------------------------------------------------------------- checkpoints


@on_ranks(2, 4)  # one replica, two
@KINDS
@pytest.mark.parametrize("when", ["before", "after", "converted"])
@pytest.mark.sample(6)
def test_a_run_resumes_with_the_bits_of_an_uninterrupted_one(partial, when, tmp_path):
    """Model, optimizer, scheduler, before the first step and after it.

    Also if a script has made a checkpoint of the other kind, without any step.
    """
    whole = trained("adamw", 3)
    save(whole, tmp_path, "three", partial)
    whole.train(3, 6)
    want = snapshot(whole.model.state_dict())

    resumed = Run("adamw", seed=9)
    if when == "after":
        resumed.evaluate()
    content = smp.resume_from_checkpoint(tmp_path, partial=partial)
    resumed.scheduler.load_state_dict(content["scheduler"])
    if when == "converted":
        save(resumed, tmp_path, "converted", not partial)
        resumed = Run("adamw", seed=8)
        smp.resume_from_checkpoint(tmp_path, partial=not partial)
        resumed.scheduler.load_state_dict(content["scheduler"])
    resumed.train(content["step"], 6)

    assert_same(resumed.model.state_dict(), want)
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())


@on_ranks(2)
def test_the_files_have_the_names_of_the_original(tmp_path):
    run = saved_run(tmp_path, "sgd", partial=True)
    assert listed(tmp_path) == [
        "a_partial/model_0_0.pt",
        "a_partial/model_1_0.pt",
        "a_partial/optimizer_0_0.pt",
        "a_partial/optimizer_1_0.pt",
        "a_partial/parts",
        "a_partial/user_content.pt",
        "newest",
    ]
    assert (tmp_path / "newest").read_text() == "a_partial"
    smp.barrier()
    save(run, tmp_path / "full", "model.pt", partial=False)
    assert listed(tmp_path / "full") == [
        "model.pt",
        "newest",
        "optimizer_model.pt",
        "parts_model.pt",
        "user_content_model.pt",
    ]


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_full_checkpoint_loads_into_the_plain_model(name, tmp_path):
    """By torch.load with weights_only, without this library; the optimizer, too, whose
    indices are those of the user's groups."""
    init(2)
    run, plain = Run(name), PlainRun(name)
    run.train(0, 2)
    save(run, tmp_path, "m", partial=False)

    plain.model.load_state_dict(torch.load(tmp_path / "m", weights_only=True))
    plain.optimizer.load_state_dict(torch.load(tmp_path / "optimizer_m", weights_only=True))
    plain.train(2, 4)
    run.train(2, 4)

    assert_same(run.model.state_dict(), plain.model.state_dict())
    assert_same(run.optimizer.state_dict(), plain.optimizer.state_dict())


def _as_bytes(run: Run) -> bytes:
    """Its full state dicts, as a rank can return them."""
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], file)
    return file.getvalue()


def _save_trained(path: Path, ranks: int) -> bytes:
    init(ranks)
    run = Run("adamw")
    run.train(0, 2)
    save(run, path, "t", partial=True)
    return _as_bytes(run)


def _resume_and_show(path: Path, ranks: int, first: bool) -> bytes:
    init(ranks)
    run = Run("adamw", seed=4)
    if first:
        run.evaluate()
    smp.resume_from_checkpoint(path)
    run.evaluate()
    return _as_bytes(run)


@pytest.mark.parametrize("saved, loaded", [(2, 3), (3, 2), (2, 1), (1, 2)])
@pytest.mark.sample(2)
def test_a_partial_checkpoint_loads_under_another_pipeline_degree(saved, loaded, tmp_path):
    """Beyond the original: the parts go to the ranks that own them now."""
    want = torch.load(io.BytesIO(call_on_ranks(saved, _save_trained, tmp_path, saved)[0]))

    for first in (False, True):
        for got in call_on_ranks(loaded, _resume_and_show, tmp_path, loaded, first):
            assert_same(torch.load(io.BytesIO(got)), want)


class Versioned(nn.Linear):
    """Its state dict says by which version of the class it was made."""

    _version = 3

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.loaded = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _wrap_versioned(ranks: int) -> nn.Module:
    smp.init({"pipeline_parallel_degree": ranks, "microbatches": 2})
    net = nn.Sequential(Versioned(2, 2), nn.Sequential(Versioned(2, 2)))
    if ranks > 1:
        smp.set_partition(net[0], 0)
        smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)
    smp.step(lambda model, x: model(x))(model, torch.ones(2, 2))
    return net


def _save_versioned(path: Path) -> None:
    _wrap_versioned(2)
    smp.save_checkpoint(path, "m")


def _resumed_versions(path: Path) -> list:
    net = _wrap_versioned(1)
    smp.resume_from_checkpoint(path)
    return [net[0].loaded, net[1][0].loaded]


def test_parts_that_are_put_together_keep_the_versions_of_modules(tmp_path):
    call_on_ranks(2, _save_versioned, tmp_path)
    assert call_on_ranks(1, _resumed_versions, tmp_path) == [[3, 3]]


@on_ranks(2)
@KINDS
def test_what_is_loaded_may_be_a_part(partial, tmp_path):
    """Without the optimizer's state, whatever it is; by other names, and not by all."""
    saved = trained("sgd")
    save(saved, tmp_path, "m", partial)
    run = Run("sgd", seed=9)
    run.evaluate()
    want = snapshot(saved.model.state_dict())
    want["first.0.bias"] = snapshot(run.model.state_dict())["first.0.bias"]
    if smp.rank() == 0:
        for file in tmp_path.rglob("optimizer*"):
            file.write_bytes(b"damaged")
    smp.barrier()

    def without_a_bias(loaded):
        return {name: value for name, value in loaded.items() if name != "first.0.bias"}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smp.resume_from_checkpoint(
            tmp_path,
            partial=partial,
            strict=False,
            load_optimizer=False,
            translate_function=without_a_bias,
        )
    assert_same(run.model.state_dict(), want)
    assert run.optimizer.state_dict()["state"] == {}


@on_ranks(2)
@KINDS
def test_user_content_may_hold_numpys_values_and_configurations(partial, tmp_path):
    init(2)
    config = GPT2Config(n_layer=3)
    arrays = [numpy.arange(6.0).reshape(2, 3), numpy.zeros(0), numpy.array(["a", None])]
    scalars = [numpy.float32(0.1), numpy.int64(7), numpy.bool_(True), numpy.str_("ab")]
    content = {"best": scalars, "dtype": numpy.dtype(">i2"), "config": config, "rest": b""}

    smp.save_checkpoint(
        tmp_path,
        "a",
        partial=partial,
        model=Run("sgd").model,
        user_content={**content, "arrays": arrays},
    )
    read = smp.resume_from_checkpoint(tmp_path, partial=partial, load_optimizer=False)

    for got, want in zip(read.pop("arrays"), arrays, strict=True):
        assert got.dtype == want.dtype
        numpy.testing.assert_array_equal(got, want)
    assert read["config"].to_dict() == config.to_dict()
    assert {**read, "config": config} == content
    assert [type(one) for one in read["best"]] == [type(one) for one in scalars]


@on_ranks(2)
@KINDS
def test_what_could_not_be_read_back_is_refused_when_saved(partial, tmp_path):
    init(2)
    run = Run("sgd")
    save(run, tmp_path, "old", partial)

    content = {"args": SimpleNamespace(lr=1)}
    name = "user_content.pt" if partial else "user_content_new"
    with pytest.raises(smp.CheckpointError, match=rf"{name} holds a types.SimpleNamespace"):
        smp.save_checkpoint(tmp_path, "new", partial, run.model, user_content=content)

    assert smp.resume_from_checkpoint(tmp_path, partial=partial)["step"] == 3
    assert not [name for name in listed(tmp_path) if "new_" in name or name[0] == "."]
    smp.barrier()
    with torch.serialization.safe_globals([SimpleNamespace]):
        smp.save_checkpoint(tmp_path, "new", partial, run.model, user_content=content)
        read = smp.resume_from_checkpoint(tmp_path, partial=partial, load_optimizer=False)
    assert read == content


@on_ranks(2)
@pytest.mark.parametrize("partial", [True, False])
def test_the_lock_of_a_save_is_gone_before_any_rank_returns(tmp_path, monkeypatch, partial):
    """No rank returns before the last exchange, in which rank 0 takes part."""
    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()))
    gather, held = objects.gather_bytes, []

    def looks(*args):
        held.append((tmp_path / ".lock").exists())
        return gather(*args)

    if smp.rank() == 0:
        monkeypatch.setattr(objects, "gather_bytes", looks)
    smp.save_checkpoint(tmp_path, "a", partial=partial, model=model)
    assert smp.rank() != 0 or (any(held) and not held[-1])


@on_ranks(4)
@KINDS
def test_the_first_replica_writes_and_its_buffers_are_saved(partial, tmp_path, monkeypatch):
    smp.init({"pipeline_parallel_degree": 2, "ddp": True})
    run, written = Run("sgd"), []
    write = saved_files.write_in_staged_folder

    def noted(path, value):
        written.append(Path(path).name.removeprefix(".saving."))
        write(path, value)

    monkeypatch.setattr(saved_files, "write_in_staged_folder", noted)
    for path in ("first.1.running_mean", "second.1.running_mean"):
        run.model.module.get_buffer(path).fill_(1.0 + smp.rdp_rank())
    save(run, tmp_path, "a", partial)

    mine = [f"{kind}_{smp.pp_rank()}_0.pt" for kind in ("model", "optimizer")]
    first = ["user_content.pt"] if partial else ["a", "optimizer_a", "user_content_a"]
    want = [*(mine if partial else []), *(first if smp.rank() == 0 else [])]
    assert written == (want if smp.rdp_rank() == 0 else [])
    smp.resume_from_checkpoint(tmp_path, partial=partial)
    run.evaluate()
    assert set(run.model.state_dict()["second.1.running_mean"].tolist()) == {1.0}


@on_ranks(2)
def test_the_oldest_partial_checkpoints_are_removed(tmp_path):
    run = trained("sgd")

    for tag in ("c", "b", "a"):
        save(run, tmp_path, tag, partial=True, num_kept_partial_checkpoints=2)

    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["a_partial", "b_partial", "newest"]
    assert smp.resume_from_checkpoint(tmp_path)["step"] == 3
    with pytest.raises(FileNotFoundError, match="c_partial"):
        smp.resume_from_checkpoint(tmp_path, "c")
    smp.barrier()
    if smp.rank() == 0:  # a clock that went back; a folder without the file, and no folder
        os.utime(tmp_path / "b_partial" / "user_content.pt", (2**33, 2**33))
        (tmp_path / "x_partial").mkdir()
        (tmp_path / "y_partial").touch()
    smp.barrier()
    save(run, tmp_path, "d", partial=True, num_kept_partial_checkpoints=2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["b_partial", "d_partial", "newest", "y_partial"]
    smp.barrier()
    save(run, tmp_path, "e", partial=True, num_kept_partial_checkpoints=1)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["e_partial", "newest", "y_partial"]


@on_ranks(2)
def test_a_bare_state_dict_with_empty_user_content_is_a_full_checkpoint(tmp_path):
    """What Hugging Face's Trainer leaves: a state dict and an empty user_content.pt."""
    init(2)
    run = Run("sgd")
    want = make_model(seed=3, pin=False).state_dict()
    if smp.rank() == 0:
        torch.save(want, tmp_path / "pytorch_model.bin")
        (tmp_path / "user_content.pt").touch()
    smp.barrier()

    content = smp.resume_from_checkpoint(
        tmp_path, tag="pytorch_model.bin", partial=False, load_optimizer=False
    )
    run.evaluate()

    assert content == {}
    assert_same(run.model.state_dict(), want)


@on_ranks(2)
def test_a_damaged_or_missing_part_is_an_error_on_every_rank(tmp_path):
    """Rank 1's file has flipped bytes; rank 0 hears of it instead of waiting."""
    run = saved_run(tmp_path, "sgd", partial=True)
    part = tmp_path / "a_partial" / "model_1_0.pt"
    bytes_of_weight = run.model.state_dict()["second.0.weight"].numpy().tobytes()
    if smp.rank() == 0:
        data = bytearray(part.read_bytes())
        data[data.index(bytes_of_weight) + 5] ^= 4
        part.write_bytes(data)
    smp.barrier()

    with pytest.raises(
        smp.CheckpointError, match=r"model_1_0\.pt is damaged: tensor 'second\.0"
    ):
        smp.resume_from_checkpoint(tmp_path)
    smp.barrier()
    if smp.rank() == 0:
        part.rename(part.with_name("model_2_0.pt"))
    smp.barrier()
    with pytest.raises(smp.CheckpointError, match=r"a_partial lacks model_1_0\.pt"):
        smp.resume_from_checkpoint(tmp_path)


@on_ranks(2)
def test_what_one_rank_cannot_load_is_an_error_on_every_rank(tmp_path):
    saved_run(tmp_path, "sgd", partial=True)

    def without_it(state: dict) -> dict:
        return {name: value for name, value in state.items() if name != "second.0.weight"}

    kind = RuntimeError if smp.rank() == 1 else smp.CheckpointError
    with pytest.raises(kind, match=r"(?s)Missing key.*second\.0\.weight"):
        smp.resume_from_checkpoint(tmp_path, translate_function=without_it)
    assert smp.resume_from_checkpoint(tmp_path)["step"] == 3


@on_ranks(2)
def test_the_last_part_is_missed_too(tmp_path):
    """No gap in the numbers shows it; what is not loaded may be missing."""
    saved_run(tmp_path, "adamw", partial=True)
    folder = tmp_path / "a_partial"

    remove(folder / "optimizer_1_0.pt")
    with pytest.raises(smp.CheckpointError, match=r"a_partial lacks optimizer_1_0\.pt"):
        smp.resume_from_checkpoint(tmp_path)
    assert smp.resume_from_checkpoint(tmp_path, load_optimizer=False)["step"] == 3
    remove(folder / "user_content.pt")
    with pytest.raises(smp.CheckpointError, match=r"a_partial lacks user_content\.pt$"):
        smp.resume_from_checkpoint(tmp_path, load_optimizer=False)
    remove(folder / "model_1_0.pt")
    with pytest.raises(smp.CheckpointError, match=r"lacks model_1_0\.pt, user_content\.pt"):
        smp.resume_from_checkpoint(tmp_path, load_optimizer=False)


@on_ranks(2)
def test_a_full_checkpoint_lists_its_files(tmp_path):
    """What is listed and missing is an error; what an older one of that name had is no part."""
    run = trained("adamw")

    save(run, tmp_path, "a", partial=False)
    remove(tmp_path / "optimizer_a")
    with pytest.raises(smp.CheckpointError, match="lacks optimizer_a of the checkpoint 'a'"):
        smp.resume_from_checkpoint(tmp_path, partial=False)
    found = smp.resume_from_checkpoint(tmp_path, partial=False, load_optimizer=False)
    assert found["step"] == 3
    remove(tmp_path / "user_content_a")
    with pytest.raises(smp.CheckpointError, match="lacks user_content_a, optimizer_a"):
        smp.resume_from_checkpoint(tmp_path, partial=False)
    remove(tmp_path / "parts_a")  # as of versions that listed nothing
    with pytest.warns(UserWarning, match="has no optimizer state"):
        assert smp.resume_from_checkpoint(tmp_path, partial=False) == {}

    save(run, tmp_path, "b", partial=False)
    smp.save_checkpoint(tmp_path, "b", partial=False, model=run.model)
    assert (tmp_path / "optimizer_b").exists()
    with pytest.warns(UserWarning, match="has no optimizer state"):
        smp.resume_from_checkpoint(tmp_path, partial=False)


@on_ranks(2)
def test_a_checkpoint_that_does_not_list_its_parts_loads(tmp_path):
    saved_run(tmp_path, "sgd", partial=True)

    remove(tmp_path / "a_partial" / "parts")
    assert smp.resume_from_checkpoint(tmp_path)["step"] == 3
    remove(tmp_path / "a_partial" / "user_content.pt")
    assert smp.resume_from_checkpoint(tmp_path) == {}
    remove(tmp_path / "a_partial" / "optimizer_0_0.pt")
    with pytest.raises(smp.CheckpointError, match=r"a_partial lacks optimizer_0_0\.pt$"):
        smp.resume_from_checkpoint(tmp_path)
    remove(tmp_path / "a_partial" / "model_0_0.pt")
    with pytest.raises(smp.CheckpointError, match=r"a_partial lacks model_0_0\.pt$"):
        smp.resume_from_checkpoint(tmp_path, load_optimizer=False)
    remove(tmp_path / "a_partial" / "model_1_0.pt")
    with pytest.raises(smp.CheckpointError, match=r"a_partial has no model_\*_\*\.pt$"):
        smp.resume_from_checkpoint(tmp_path)


@on_ranks(2)
@pytest.mark.parametrize("text", [b"\xff\xfea", b"", b"a_parti", b"../a_partial", b"a\0"])
def test_a_damaged_newest_is_named(text, tmp_path):
    init(2)
    run = Run("sgd")
    save(run, tmp_path, "a", partial=True)
    if smp.rank() == 0:
        (tmp_path / "newest").write_bytes(text)
    smp.barrier()

    for partial in (True, False):
        with pytest.raises(smp.CheckpointError, match="newest (is damaged|names .*pass a tag)"):
            smp.resume_from_checkpoint(tmp_path, partial=partial)
    assert smp.resume_from_checkpoint(tmp_path, "a")["step"] == 3


@on_ranks(2)
def test_a_wrong_kind_or_degree_is_said(tmp_path):
    saved_run(tmp_path, "sgd", partial=False)

    with pytest.raises(smp.CheckpointError, match="'a', a full one: pass partial=False"):
        smp.resume_from_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file 'newest'"):
        smp.resume_from_checkpoint(tmp_path / "nowhere")
    if smp.rank() == 0:
        folder = tmp_path / "b_partial"
        folder.mkdir()
        for tp in range(2):
            for kind in ("model", "optimizer"):
                torch.save({}, folder / f"{kind}_0_{tp}.pt")
    smp.barrier()
    with pytest.raises(smp.CheckpointError, match="degree 2, and here it is 1"):
        smp.resume_from_checkpoint(tmp_path, "b")


@on_ranks(3)
def test_ranks_may_write_the_same_file(tmp_path):
    """One of the values that they wrote stands, whole; nothing else is left."""
    init(3)
    value = torch.full((100_000,), float(smp.rank()))
    for _ in range(10):
        smp.barrier()
        smp.save({"value": value}, tmp_path / "same", partial=False)
    smp.barrier()

    read = smp.load(tmp_path / "same", partial=False)["value"]
    assert read.shape == value.shape and read.unique().tolist() in ([0.0], [1.0], [2.0])
    assert os.listdir(tmp_path) == ["same"]


# ------------------------------------------------------------------ crashes and full disks


@KINDS
@pytest.mark.parametrize("tags", ["same", "other"])
@pytest.mark.sample(1)
def test_a_crash_at_any_point_leaves_a_whole_checkpoint(partial, tags, tmp_path):
    """The process ends at its first, second, third ... write until it gets through."""
    kind = "partial" if partial else "full"
    done = python(HERE / "crashes_while_saving.py", tmp_path, kind, tags, timeout_s=200)

    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    assert int(done.stdout) > 50, "so few steps: were they counted?"


def test_two_jobs_do_not_save_into_one_folder_at_once(tmp_path):
    done = python(HERE / "two_jobs_save.py", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    refused, *rest = done.stdout.splitlines()
    assert refused.startswith(f"smp: another job saves into {tmp_path}: process PID on ")
    assert rest == [
        "{'tag': 'first'}",
        "{'tag': 'second'} ['first_partial', 'newest', 'second_partial']",
    ]


# ------------------------------------------------------------------------ save and load


@on_ranks(2)
def test_every_rank_saves_a_file_of_its_own(tmp_path):
    """Names of partial files, with v3, and of the first versions."""
    init(2)
    mine = {"rank": smp.rank(), "t": torch.arange(3)}

    smp.save(mine, tmp_path / "s.pt")
    smp.save(mine, str(tmp_path / "v.pt"), v3=True)
    smp.save(mine, tmp_path / f"w.pt_{smp.mp_rank()}", partial=False)
    smp.barrier()

    assert listed(tmp_path) == [
        f"{name}_{rank}{rest}"
        for name, rest in [("s.pt", "_0"), ("v.pt", "_0_0"), ("w.pt", "")]
        for rank in range(2)
    ]
    smp.barrier()  # both have looked
    for name in ("s.pt", "v.pt", "w.pt"):
        assert_same(smp.load(tmp_path / name), mine)
        assert smp.load(tmp_path / name, map_location="meta")["t"].is_meta
    smp.save("of the first version", tmp_path / f"s.pt_{smp.mp_rank()}", partial=False)
    assert_same(smp.load(tmp_path / "s.pt"), mine)
    assert smp.load(tmp_path / "s.pt", back_compat=True) == "of the first version"
    assert_same(smp.load(tmp_path / "v.pt", back_compat=True), mine)
    with pytest.raises(FileNotFoundError, match=r"x\.pt_\d_0"):
        smp.load(tmp_path / "x.pt")


@on_ranks(4)
@pytest.mark.parametrize("pp, tp", [(2, 2), (2, 1), (1, 2)])
def test_the_names_of_partial_files_are_of_pp_tp_and_rdp_ranks(pp, tp, tmp_path):
    smp.init({"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": True})
    at = f"{smp.pp_rank()}_{smp.tp_rank()}"
    smp.save(at, tmp_path / "s")
    smp.save([at, smp.rdp_rank()], tmp_path / "v", v3=True)
    smp.save(smp.mp_rank(), tmp_path / f"w_{smp.mp_rank()}", partial=False)
    smp.barrier()
    assert torch.load(tmp_path / f"s_{at}") == smp.load(tmp_path / "s") == at
    read = torch.load(tmp_path / f"v_{at}_{smp.rdp_rank()}")
    assert read == smp.load(tmp_path / "v") == [at, smp.rdp_rank()]
    assert smp.load(tmp_path / "w") == smp.mp_rank()
    assert len(listed(tmp_path)) == 2 * pp * tp + 4


@pytest.fixture
def saved(tmp_path) -> Path:
    """A file with a layer, an entry that shares its weight, and a list."""
    sd = nn.Linear(5, 4).state_dict()
    sd["tied"] = sd["weight"]
    path = tmp_path / "file.pt"
    smp.save({"model": sd, "more": [torch.arange(9.0)]}, path, partial=False)
    return path


def test_every_flipped_byte_is_noticed_or_harmless(saved):
    """A file with a flipped bit is refused, by name, or has the values it had."""
    data = saved.read_bytes()
    want = smp.load(saved, partial=False)
    refused = 0
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        saved.write_bytes(damaged)
        try:
            got = smp.load(saved, partial=False)
        except smp.CheckpointError as error:
            assert "file.pt" in str(error)
            refused += 1
        else:
            assert_same(got, want)
    assert refused > len(data) // 7 / 4


@pytest.mark.parametrize(
    "tensor, name", [("weight", "model.weight"), ("bias", "model.bias"), (None, "more.0")]
)
def test_the_damaged_tensor_is_named(saved, tensor, name):
    whole = smp.load(saved, partial=False)
    values = whole["model"][tensor] if tensor else whole["more"][0]
    data = bytearray(saved.read_bytes())
    data[data.index(values.numpy().tobytes())] ^= 1
    saved.write_bytes(data)

    with pytest.raises(smp.CheckpointError, match=rf"file\.pt is damaged: tensor '{name}' "):
        smp.load(saved, partial=False)


def test_a_damaged_tensor_without_a_name_is_its_record(tmp_path):
    """Nothing tells the elements of a set apart."""
    tensor = torch.arange(9.0)
    smp.save({"some": {tensor}}, tmp_path / "file.pt", partial=False)
    data = bytearray((tmp_path / "file.pt").read_bytes())
    data[data.index(tensor.numpy().tobytes())] ^= 1
    (tmp_path / "file.pt").write_bytes(data)

    with pytest.raises(smp.CheckpointError, match=r"damaged: its record '\w+/data/0' does"):
        smp.load(tmp_path / "file.pt", partial=False)


def test_files_of_the_first_torch_are_read(saved):
    """They have no checksums."""
    value = {"a": torch.arange(3.0), "b": [1]}
    torch.save(value, saved, _use_new_zipfile_serialization=False)
    assert_same(smp.load(saved, partial=False), value)
    data = saved.read_bytes()
    for damaged in data[:50], data[:30] + b"\xff" * 20 + data[50:]:
        saved.write_bytes(damaged)
        with pytest.raises(smp.CheckpointError, match=r"file\.pt is damaged"):
            smp.load(saved, partial=False)


@pytest.mark.parametrize("length", [0, 1, 100, 0.5, -1])
def test_a_file_that_was_cut_is_refused(saved, length):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * length) if 0 < length < 1 else length])

    with pytest.raises(smp.CheckpointError, match="file.pt"):
        smp.load(saved, partial=False)


def test_other_types_are_refused_with_what_to_do(tmp_path, monkeypatch):
    """Files load with weights_only: no code runs.  Of files that one trusts torch's switch
    says so."""
    path = tmp_path / "file.pt"
    smp.save({"args": SimpleNamespace(lr=1)}, path, partial=False)

    said = r"file.pt holds a types.SimpleNamespace.*add_safe_globals"
    for words in (said, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"):
        with pytest.raises(smp.CheckpointError, match=words):
            smp.load(path, partial=False)
    assert smp.load(path, partial=False, weights_only=False)["args"].lr == 1
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        assert smp.load(path, partial=False)["args"].lr == 1


class Hostile:
    """Makes a folder when it is unpickled."""

    folder = ""

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (GPT2Config(), r"file.pt holds a transformers\.\S*GPT2Con"),
        (numpy.float64(1), "holds a numpy.dtypes.Float64DType"),
        (Hostile(), "could run code"),
    ],
    ids=["transformers is not there", "the state of a numpy dtype", "code"],
)
def test_what_a_file_may_not_hold_is_named_and_not_read(value, said, tmp_path, monkeypatch):
    """A dtype's state would let a file say that bytes are addresses of objects."""
    monkeypatch.setattr(Hostile, "folder", str(tmp_path / "ran"))
    path = tmp_path / "file.pt"
    torch.save(value, path)
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(smp.CheckpointError, match=said):
        smp.load(path, partial=False)
    assert not (tmp_path / "ran").exists()


def test_where_a_file_system_has_no_locks_nobody_is_kept_out(tmp_path, monkeypatch):
    def without(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(folder_lock.fcntl, "lockf", without)
    with folder_lock.held(str(tmp_path)), folder_lock.held(str(tmp_path)):
        assert (tmp_path / ".lock").exists()
    assert not list(tmp_path.iterdir())


def test_a_lock_whose_file_its_holder_has_just_removed_is_taken_anew(tmp_path, monkeypatch):
    """Else the next job would make a file of its own, and both would save."""
    path, lockf, times = tmp_path / ".lock", folder_lock.fcntl.lockf, []

    def after_its_removal(fd: int, how: int) -> None:
        if not times:
            path.unlink()
        times.append(fd)
        lockf(fd, how)

    monkeypatch.setattr(folder_lock.fcntl, "lockf", after_its_removal)
    with folder_lock.held(str(tmp_path)):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert len(times) == 2 and not path.exists()
