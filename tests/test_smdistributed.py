"""Spec: both imports give the same objects (api, beginning; clients, sections 1 and 2)."""

import importlib
import importlib.util
import sys

import pytest
import torch
from packaging.version import Version

import smdistributed.modelparallel.exceptions
import smp
from tests.ranks import python

ROOT = "smdistributed.modelparallel"
FROM_SCRIPTS = [
    ("smdistributed.modelparallel.torch.nn", "FusedLayerNorm", "smp.nn"),
    ("smdistributed.modelparallel.torch.nn", "DistributedTransformerLayer", "smp.nn"),
    ("smdistributed.modelparallel.torch.nn", "FlashAttentionLayer", "smp.nn"),
    *(
        ("smdistributed.modelparallel.torch.nn.utils", name, "smp.nn.building_blocks")
        for name in vars(smp.nn.utils)
        if "partition" in name or "_tp" in name
    ),
    ("smdistributed.modelparallel.torch.state_mod", "state", "smp.state_mod"),
    (
        "smdistributed.modelparallel.torch.utils",
        "get_distribution_axis",
        "smp.compat.script_names",
    ),
    ("smdistributed.modelparallel.torch.utils", "rmsg", "smp.compat.script_names"),
    ("smdistributed.modelparallel.test.torch.utils", "dump_model", "smp.compat.script_names"),
    ("smdistributed.modelparallel.test.torch.utils", "verify", "smp.compat.script_names"),
    (
        "smdistributed.modelparallel.torch.patches.checkpoint",
        "checkpoint_sequential",
        "smp.compat.checkpoint_calls",
    ),
    ("smdistributed.modelparallel.torch.optimizers", "FusedLAMB", "smp.optimizers"),
    ("smdistributed.modelparallel.torch.optimizers", "FusedNovoGrad", "smp.optimizers"),
    ("smdistributed.modelparallel.torch.model", "DistributedModel", "smp.model"),
    *(
        (f"{ROOT}.{package}.exceptions", "ConfigError", f"{ROOT}.exceptions")
        for package in ("torch", "backend")
    ),
    *(
        (f"smdistributed.modelparallel.torch.nn.huggingface.{model}", name, None)
        for model, name in [
            ("gpt2", "translate_state_dict_to_hf_gpt2"),
            ("gpt2", "translate_hf_state_dict_to_smdistributed"),
            ("gpt2", "translate_hf_state_dict_to_smdistributed_gpt2"),
            ("gpt2", "get_hf_gpt2_transformer_layer_hooks"),
            ("gpt2", "translate_hf_block_state_dict_to_smdistributed"),
            ("gpt2", "translate_layer_state_dict_to_hf_gpt2_block"),
            ("gptj", "translate_hf_gptj_state_dict_to_smdistributed"),
            ("gptj", "translate_state_dict_to_hf_gptj"),
            ("gptj", "translate_hf_state_dict_to_smdistributed_gptj"),
            ("gptneo", "translate_hf_gptneo_state_dict_to_smdistributed"),
            *(
                (family, name)
                for family in ("gptneo", "gptneox", "bert", "roberta", "vit", "t5", "llama")
                for name in (
                    f"translate_state_dict_to_hf_{family}",
                    f"translate_hf_state_dict_to_smdistributed_{family}",
                )
            ),
        ]
    ),
]


@pytest.fixture(autouse=True)
def not_initialised():
    smp.reset()
    yield
    smp.reset()


def test_the_package_is_smp_itself():
    import smdistributed.modelparallel.torch as alias

    assert alias is smp
    assert smp.__spec__.name == "smp"


@pytest.mark.parametrize("module, name, real", FROM_SCRIPTS)
def test_what_scripts_import_is_the_same_object(module, name, real):
    alias = importlib.import_module(module)

    real = real or module.replace("smdistributed.modelparallel.torch", "smp")
    assert getattr(alias, name) is getattr(importlib.import_module(real), name)
    assert alias is sys.modules[real] and alias.__spec__.name == real


def in_a_new_process(source: str) -> str:
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_order_of_imports_does_not_matter():
    in_a_new_process(
        "from smdistributed.modelparallel.torch.nn.huggingface import gpt2 as first\n"
        "import smdistributed.modelparallel.torch.ranks as ranks\n"
        "import smp, smp.nn.huggingface.gpt2, smp.ranks\n"
        "import smdistributed.modelparallel.torch as alias\n"
        "assert alias is smp and first is smp.nn.huggingface.gpt2\n"
        "assert ranks is smp.ranks and ranks.CommGroup is smp.CommGroup\n"
        "assert alias.nn.FusedLayerNorm is smp.nn.FusedLayerNorm\n"
    )


def test_what_users_modules_are_made_of_is_imported_by_both_names():
    in_a_new_process(
        "import smp.nn.utils as first\n"
        "from smp.nn.utils import get_local_channels\n"
        "import smdistributed.modelparallel.torch.nn.utils as alias, smp.nn.building_blocks\n"
        "assert first is alias is smp.nn.utils is smp.nn.building_blocks\n"
        "assert first.__spec__.name == 'smp.nn.building_blocks'\n"
    )


def test_an_import_does_not_hide_a_function_behind_a_module():
    """Modules and functions of smp that share a name keep their places."""
    names = in_a_new_process(
        "import smp, sys\n"
        "before = dict(vars(smp))\n"
        "import importlib, smdistributed.modelparallel.torch as alias\n"
        "for name in [n for n in sys.modules if n.startswith('smp.')]:\n"
        "    importlib.import_module('smdistributed.modelparallel.torch.' + name[4:])\n"
        "print(*[n for n in before if vars(smp)[n] is not before[n]])\n"
    )

    assert names.split() == []


def test_versions():
    from smdistributed.modelparallel import __version__

    assert __version__ == "1.15.0" and Version(__version__) >= Version("1.10")
    assert Version(smp.__version__)


def test_hugging_faces_switch_finds_the_package():
    assert importlib.util.find_spec("smdistributed") is not None
    assert importlib.util.find_spec("smdistributed.modelparallel.torch") is not None


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(ModuleNotFoundError, match="smdistributed.modelparallel.torch.nowhere"):
        importlib.import_module("smdistributed.modelparallel.torch.nowhere")


def test_importing_touches_no_gpu():
    in_a_new_process(
        "import torch\n"
        "def touched(*args): raise SystemExit('touched torch.cuda')\n"
        "for name in ('_lazy_init', 'set_device', 'device_count', 'current_device'):\n"
        "    setattr(torch.cuda, name, touched)\n"
        "import smdistributed.modelparallel.torch as smp\n"
    )


@pytest.mark.parametrize("name", ["dump_model", "verify"])
def test_what_is_not_built_says_so_when_used(name):
    use = getattr(smp.utils, name)
    told = rf"^smdistributed\..*\.utils\.{name}: it is not built yet$"
    with pytest.raises(NotImplementedError, match=told):
        use(torch.nn.Linear(1, 1), verbose=True)
    assert use.__name__ == use.__qualname__ == name and "Not built yet" in use.__doc__


def test_nothing_is_an_instance_of_what_is_not_built():
    assert not isinstance(torch.nn.Linear(1, 1), smp.nn.DistributedLinear)
    assert issubclass(smp.nn.DistributedLinear, smp.nn.DistributedModule)


def test_fused_layer_norm_is_layer_norm():
    norm = smp.nn.FusedLayerNorm(4, eps=1e-12)
    x = torch.randn(2, 4)

    assert torch.equal(norm(x), torch.nn.functional.layer_norm(x, (4,), eps=1e-12))
    assert norm.weight.shape == norm.bias.shape == (4,)
    assert not isinstance(torch.nn.LayerNorm(4), smp.nn.FusedLayerNorm)


def test_state_as_scripts_read_it(monkeypatch):
    smp.init({"microbatches": 2})

    assert smp.state.cfg.fp16 is False and smp.state.cfg.prescaled_batch is False
    assert smp.state.cfg.shard_optimizer_state is False
    assert smp.state.cfg.sharded_data_parallel_degree == 1
    assert list(smp.state.module_manager.translate_functions) == []
    assert smp.core.initialized() and smp.core.rank() == smp.rank() == 0
    assert smp.core.size() == smp.core.local_size() == 1 and smp.core.local_rank() == 0
    monkeypatch.setattr(smp.state.job("a test").boot, "local_size", 8)
    assert (smp.core.local_size(), smp.core.size()) == (8, 1)
    monkeypatch.setattr(smp.state.job("a test").boot, "local_rank", 3)
    assert (smp.core.local_rank(), smp.core.rank()) == (3, 0)
    linear = torch.nn.Linear
    assert smp.state.patch_manager.get_original_method("forward", linear) is linear.forward
    assert smp.utils.rmsg("hello") == "[rank 0] hello"
    assert smp.utils.get_distribution_axis(torch.ones(1)) is None


def test_a_model_of_which_nothing_is_distributed():
    """What scripts ask of each parameter, whether tensor parallelism is on or not."""
    smp.init()
    net = torch.nn.BatchNorm1d(2)
    model = smp.DistributedModel(net)

    assert dict(model.virtual_named_parameters()) == dict(net.named_parameters())
    assert dict(model.default_reducer_named_parameters()) == dict(net.named_parameters())
    assert [*model.scaled_batch_reducer_named_parameters(), *model.distributed_modules()] == []
    assert not model.is_distributed_parameter(net.weight)
    assert not model.is_scaled_batch_parameter(net.weight)
    assert not model.is_distributed_buffer(net.running_mean)
    assert not model.is_scaled_batch_buffer(net.running_mean)


def test_errors_by_the_names_that_the_manual_has():
    told = ["CallMismatch", "CheckpointError", "ConfigError", "PartitionError"]
    for name in [*told, "PartitionMismatch", "ReplicasDiffer"]:
        assert issubclass(getattr(smp, name), Exception)
        assert getattr(smdistributed.modelparallel.exceptions, name) is getattr(smp, name)
