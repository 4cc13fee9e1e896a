"""What `smp.save_checkpoint` and `smp.save` refuse, and how they say what went wrong."""

import io
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import smp
from tests.models.trained import Run, init, trained
from tests.ranks import on_ranks
from tests.test_checkpoints import KINDS, listed, save


class Raises:
    """Cannot be saved."""

    def __init__(self, error: Exception):
        self.error = error

    def __reduce__(self):
        raise self.error


ERRORS = {
    "RuntimeError": RuntimeError(),
    "KeyError: 'mine'": KeyError("mine"),
    "OSError": OSError(),
    "user_content.*: mine": OSError("mine"),
    "No space left.*user_content": OSError(28, "No space left"),
}


@on_ranks(2)
@KINDS
def test_an_error_of_what_is_saved_is_one_on_every_rank_with_or_without_text(partial, tmp_path):
    """Nothing is left of the checkpoint, and the next one is saved."""
    run = trained("sgd")
    for told, error in ERRORS.items():
        kind, text = smp.CheckpointError, f"on rank 0: .*{told}"
        if smp.rank() == 0:
            kind, text = type(error), told if "user_content" in told else ""
        with pytest.raises(kind, match=text):
            smp.save_checkpoint(
                tmp_path, "t", partial, model=run.model, user_content=Raises(error)
            )
        smp.barrier()
        assert listed(tmp_path) == []
        smp.barrier()
    save(run, tmp_path, "t", partial)
    assert smp.resume_from_checkpoint(tmp_path, partial=partial)["step"] == 3


@on_ranks(2)
def test_a_rank_that_fails_between_what_ranks_do_together_keeps_its_own_error(
    tmp_path, monkeypatch
):
    """The others meet another call than theirs; where it began is the cause."""
    run = trained("sgd")
    own = LookupError("mine")

    def fail(*_, **__):
        raise own

    if smp.rank() == 1:
        monkeypatch.setattr(type(run.model), "state_dict", fail)
    with pytest.raises(smp.CallMismatch) as caught:
        smp.save_checkpoint(tmp_path, "t", partial=False, model=run.model)
    assert smp.rank() == 0 or caught.value.__cause__ is own


@on_ranks(2)
def test_tags_that_are_files_of_other_checkpoints_are_refused(tmp_path):
    """Of full ones, and what is no name of a file; nothing is written.

    A partial one is a folder with a name that none of them has.
    """
    init(2)
    with pytest.raises(ValueError, match=r"smp\.save_checkpoint: there is no DistributedModel"):
        smp.save_checkpoint(tmp_path, "a")
    with pytest.raises(ValueError, match="resume_from_checkpoint: make the DistributedModel"):
        smp.resume_from_checkpoint(tmp_path, "a")
    run = Run("sgd")
    run.train(0, 1)
    save(run, tmp_path, "a", partial=False)
    smp.barrier()
    before = {name: (tmp_path / name).read_bytes() for name in listed(tmp_path)}
    smp.barrier()
    for tag in "", ".", "..", ".a", "a/b", "/a", "a/":
        for partial in True, False:
            with pytest.raises(ValueError, match="plain file name, not"):
                save(run, tmp_path, tag, partial)
    for tag in "newest", "optimizer_a", "user_content_a", "parts_a", "a_partial":
        with pytest.raises(ValueError, match=f"'{tag}'.*give it another tag"):
            save(run, tmp_path, tag, partial=False)
    for kept in 0, -1:
        with pytest.raises(ValueError, match=f"num_kept_partial_.* at least 1, got {kept}"):
            save(run, tmp_path, "b", True, num_kept_partial_checkpoints=kept)
    assert {name: (tmp_path / name).read_bytes() for name in listed(tmp_path)} == before
    smp.barrier()
    for tag in "newest", "optimizer_a":
        save(run, tmp_path, tag, partial=True)
        assert smp.resume_from_checkpoint(tmp_path)["step"] == 3


@on_ranks(2)
@KINDS
def test_user_content_is_rank_0s_and_only_none_is_an_empty_dict(partial, tmp_path):
    init(2)
    run = Run("sgd")
    for number, content in enumerate([0, False, [], "", None, {"a": 1}]):
        mine = content if smp.rank() == 0 else "of another rank"
        smp.save_checkpoint(tmp_path, f"{number}", partial, run.model, user_content=mine)
        read = smp.resume_from_checkpoint(tmp_path, partial=partial, load_optimizer=False)
        assert repr(read) == repr({} if content is None else content)


def odd_strides() -> list[torch.Tensor]:
    """One element each, with the strides of what they are a part of."""
    long = torch.arange(10.0)
    return [long[::5][:1], long.view(2, 5)[:1, 1:2], long.view(5, 2).t()[1:, 3:4]]


@on_ranks(2)
def test_single_elements_with_odd_strides_are_saved_whole(tmp_path):
    """In an optimizer's state, which is gathered tensor by tensor."""
    run = trained("sgd")
    odd = odd_strides()
    for parameter in run.model.local_parameters():
        run.optimizer.state[parameter]["odd"] = odd[smp.rank()]
    save(run, tmp_path, "t", partial=False)
    if smp.rank() == 0:
        saved = torch.load(tmp_path / "optimizer_t", weights_only=True)["state"].values()
        got = {float(one["odd"]): one["odd"].shape for one in saved}
        assert got == {float(one): one.shape for one in odd[:2]}


@on_ranks(2)
def test_full_checkpoints_are_translated_unless_told_not_to(tmp_path):
    """By all registered functions, in their order; partial ones have the module's names."""

    def renamed(old: str, new: str):
        return lambda states: {name.replace(old, new): v for name, v in states.items()}

    run = trained("sgd")
    functions = smp.state.module_manager.translate_functions
    functions.append((renamed("first", "1st"), renamed("1st", "first")))
    functions.append((renamed("1st", "theirs"), renamed("theirs", "1st")))
    try:
        save(run, tmp_path, "theirs", partial=False)
        save(run, tmp_path, "ours", partial=False, translate_if_full=False)
        save(run, tmp_path, "p", partial=True)
        smp.barrier()
        names = {tag: set(torch.load(tmp_path / tag)) for tag in ("theirs", "ours")}
        assert names["ours"] == set(run.model.state_dict())
        assert names["theirs"] == {n.replace("first", "theirs") for n in names["ours"]}
        assert "first.0.weight" in torch.load(tmp_path / "p_partial" / "model_1_0.pt")
        want = run.model.state_dict()["first.0.weight"].clone()

        def blank() -> None:
            with torch.no_grad():
                for parameter in run.model.local_parameters():
                    parameter.zero_()

        for tag, partial, function in (
            ("ours", False, lambda states: states),
            ("theirs", False, renamed("theirs", "first")),
            ("p", True, None),
        ):
            blank()
            smp.resume_from_checkpoint(
                tmp_path, tag, partial=partial, translate_function=function
            )
            assert torch.equal(run.model.state_dict()["first.0.weight"], want)
    finally:
        functions.clear()


class Noted(pickle.Pickler):
    """A pickler of a script's own."""

    made = 0

    def __init__(self, *args, **kwargs):
        Noted.made += 1
        super().__init__(*args, **kwargs)


def protocol_of(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        return archive.read(name)[1]


@on_ranks(2)
def test_save_hears_of_pickles_and_takes_open_files(tmp_path):
    """As torch.save does; a file that is open is the caller's, and whole at once."""
    smp.init({})
    value = {"x": torch.arange(3), "n": numpy.float64(2)}
    module = SimpleNamespace(**{**vars(pickle), "Pickler": Noted})
    for partial in True, False:
        name = f"{smp.rank()}"
        path = tmp_path / (f"{name}_0_0" if partial else name)
        smp.save(value, tmp_path / name, partial)
        assert protocol_of(path) == 2 and Noted.made == 0
        smp.save(value, tmp_path / name, partial, pickle_protocol=4)
        assert protocol_of(path) == 4
        smp.save({"x": 1}, tmp_path / name, partial, pickle_module=module)
        assert Noted.made == 1 and smp.load(tmp_path / name, partial=partial) == {"x": 1}
        Noted.made = 0
    file = io.BytesIO()
    smp.save({"x": 2}, file, False, pickle_module=module, pickle_protocol=3)
    assert Noted.made == 1
    Noted.made = 0
    file.seek(0)
    assert smp.load(file, partial=False) == {"x": 2}
    file.seek(0)
    (tmp_path / f"file{smp.rank()}").write_bytes(file.read())
    assert protocol_of(tmp_path / f"file{smp.rank()}") == 3


class Read(pickle.Unpickler):
    """The same for reading."""

    made = 0

    def __init__(self, *args, **kwargs):
        Read.made += 1
        super().__init__(*args, **kwargs)


def test_load_passes_on_what_torch_load_takes(tmp_path):
    """``map_location``, and what comes by its name; none of it gets lost."""
    smp.save({"x": torch.arange(3)}, tmp_path / "f", partial=False)
    assert smp.load(tmp_path / "f", "meta", partial=False)["x"].is_meta
    assert smp.load(tmp_path / "f", map_location="meta", partial=False, mmap=False)["x"].is_meta
    with open(tmp_path / "f", "rb") as file:
        assert smp.load(file, "meta", partial=False)["x"].is_meta
    module = SimpleNamespace(**{**vars(pickle), "Unpickler": Read})
    assert smp.load(tmp_path / "f", partial=False, pickle_module=module)["x"].tolist() == [
        0,
        1,
        2,
    ]
    with open(tmp_path / "f", "rb") as file:
        smp.load(file, partial=False, pickle_module=module)
    assert Read.made == 2
