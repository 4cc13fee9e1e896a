"""Spec: docs of the parameters (api section 1): sources, checks, rules, defaults."""

import dataclasses
import itertools
import json
import re
import sys
import warnings

import pytest

from smp.job import config
from smp.job.config import Config, ConfigError


@pytest.fixture(autouse=True)
def no_configuration_from_outside(monkeypatch):
    for name in (
        "SMP_CONFIG",
        "SM_HP_MP_PARAMETERS",
        "SMP_COMM_TRANSPORTS",
        "SMP_COMM_INTERFACE",
        "SMP_COMM_POOL_BYTES",
        "SMP_COMM_DEVICE_POOL_BYTES",
        "SMP_COMM_DEVICE_GATHER_BYTES",
        "SMP_WATCHDOG_REPORT_S",
        "SMP_WATCHDOG_END_S",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config, "_warned", set())


def load(size: int = 1, **given) -> Config:
    return config.load(given, size)


def test_defaults():
    cfg = config.load(None, 1)

    assert dataclasses.asdict(cfg) == {
        "pipeline_parallel_degree": 1,
        "tensor_parallel_degree": 1,
        "ddp": False,
        "microbatches": 1,
        "active_microbatches": 3,
        "pipeline": "interleaved",
        "optimize": "memory",
        "placement_strategy": "cluster",
        "auto_partition": True,
        "default_partition": 0,
        "memory_weight": 0.8,
        "deterministic_server": False,
        "static_mode": False,
        "static_mode_recording_steps": 5,
        "fast_mode": True,
        "skip_tracing": False,
        "offload_activations": False,
        "activation_loading_horizon": 4,
        "shard_optimizer_state": False,
        "prescaled_batch": False,
        "fp16": False,
        "bf16": False,
        "fp16_params": False,
        "sharded_data_parallel_degree": 1,
        "sdp_reduce_bucket_size": 500_000_000,
        "sdp_param_persistence_threshold": 1_000_000,
        "sdp_max_live_parameters": 1_000_000_000,
        "sdp_hierarchical_allgather": True,
        "sdp_gradient_clipping": 1.0,
        "comm_transports": None,
        "comm_interface": None,
        "comm_pool_bytes": 0,
        "comm_device_pool_bytes": 256 << 20,
        "comm_device_gather_bytes": 16 << 20,
        "watchdog_report_s": 30.0,
        "watchdog_end_s": 0.0,
        "ddp_dist_backend": "auto",
        "device": "auto",
        "ddp_port": None,
        "horovod": False,
        "contiguous": True,
        "xla": False,
        "partition_file": None,
        "load_partition": False,
        "checkpoint_attentions": True,
        "activation_checkpointing": False,
        "delayed_parameter_initialization": False,
        "overlapping_allreduce": True,
        "_match_weights": False,
        "_fp32_grad_accumulation": False,
        "_shard_offloaded_activations": False,
    }


PAIRS = ((0, "forward"), (0, "backward"))
GIVES = [
    (4, {"pipeline_parallel_degree": 4}, {"active_microbatches": 6}),
    (1, {"pipeline": "simple", "microbatches": 7}, {"active_microbatches": 7}),
    (1, {"pipeline": [*PAIRS], "microbatches": 9}, {"active_microbatches": 9}),
    (2, {"partitions": 2, "microbatches": 9}, {"active_microbatches": 4}),
    (1, {"active_microbatches": None, "memory_weight": None}, {"active_microbatches": 3}),
    (1, {"optimize": "memory"}, {"memory_weight": 0.8}),
    (1, {"optimize": "channels"}, {"memory_weight": 0.8}),
    (1, {"optimize": "speed"}, {"memory_weight": 0.2}),
    (1, {"optimize": "speed", "memory_weight": 1}, {"memory_weight": 1.0}),
    (4, {"pipeline_parallel_degree": 2}, {"ddp": True}),
    (2, {"partitions": 2}, {"ddp": False, "partitions": 2, "pipeline_parallel_degree": 2}),
    (
        2,
        {"partitions": 2, "auto_partition": False, "default_partition": 1},
        {"auto_partition": False, "default_partition": 1},
    ),
    (1, {"pipeline": [*PAIRS]}, {"pipeline": PAIRS}),
    (1, {"pipeline": sorted}, {"pipeline": sorted}),
    (1, {"comm_transports": ["mpi"]}, {"comm_transports": ("mpi",)}),
    (1, {"comm_transports": ["tcp", "shm"]}, {"comm_transports": ("tcp", "shm")}),
    (1, {"comm_transports": ["ucx", "mpi"]}, {"comm_transports": ("ucx", "mpi")}),
    (1, {"comm_transports": ["^shm"]}, {"comm_transports": ("^shm",)}),
    (1, {"comm_transports": ["^shm", "^tcp"]}, {"comm_transports": ("^shm", "^tcp")}),
    (1, {"comm_transports": ["^shm", "^tcp", "^mpi"]}, {"comm_transports": ("ucx",)}),
    *(
        (1, {name: value}, {name: value})
        for name in ("memory_weight", "sdp_gradient_clipping", "watchdog_report_s")
        for value in (0, 1)
    ),
    *(
        (1, {"placement_strategy": name}, {"placement_strategy": name})
        for name in config.PLACEMENTS
    ),
]


@pytest.mark.parametrize(("size", "given", "wanted"), GIVES)
def test_what_is_given_is_taken_and_settles_what_is_not(size, given, wanted):
    cfg = load(size, **given)
    assert {name: getattr(cfg, name) for name in wanted} == wanted


TP, PP = "tensor_parallel_degree", "pipeline_parallel_degree"


@pytest.mark.parametrize("size", [1, 2, 3, 12])
@pytest.mark.parametrize(("name", "other"), [(PP, TP), ("partitions", TP), (TP, PP)])
def test_a_degree_of_minus_1_is_what_the_others_leave(size, name, other, monkeypatch):
    monkeypatch.setattr(config, "_NOT_BUILT", [])
    cfg = load(size, **{name: -1})
    assert cfg == load(size, **{name: size})
    assert (getattr(cfg, name), getattr(cfg, other)) == (size, 1)
    assert cfg.ddp is (size > 1 and name == TP)
    assert cfg.active_microbatches == cfg.partitions + 2
    if size == 12:
        assert getattr(load(size, **{name: -1, other: 3}), name) == 4
        more = load(size, **{name: -1, other: 3}, sharded_data_parallel_degree=2)
        assert getattr(more, name) == 2 and more.ddp


@pytest.mark.parametrize("pipeline", ["pipeline_parallel_degree", "partitions"])
@pytest.mark.parametrize("size", [1, 4])
def test_two_degrees_of_minus_1_are_refused(pipeline, size):
    with pytest.raises(ConfigError) as caught:
        load(size, **{pipeline: -1, "tensor_parallel_degree": -1})
    assert str(caught.value) == (
        "pipeline_parallel_degree=-1 and tensor_parallel_degree=-1: only one of them can be "
        "-1, as many ranks as the other degrees leave"
    )


def test_a_degree_of_minus_1_where_the_others_do_not_divide():
    for size in (1, 3):
        with pytest.raises(ConfigError, match="tensor_parallel_degree=2 must divide .* ranks"):
            load(size, pipeline_parallel_degree=-1, tensor_parallel_degree=2)
        with pytest.raises(ConfigError, match="pipeline_parallel_degree=2 times .* ranks"):
            load(size, pipeline_parallel_degree=2, tensor_parallel_degree=-1)
    for name in ("pipeline_parallel_degree", "tensor_parallel_degree"):
        with pytest.raises(ConfigError, match="=-2 .* at least 1, or -1: as many ranks as"):
            load(4, **{name: -2})


def test_two_names_of_one_parameter_must_agree():
    assert load(2, partitions=2, pipeline_parallel_degree=2).partitions == 2
    with pytest.raises(ConfigError, match="pipeline_parallel_degree=1 and partitions=2"):
        load(2, partitions=2, pipeline_parallel_degree=1)


def test_the_configuration_is_read_only():
    cfg = load()

    with pytest.raises(AttributeError):
        cfg.microbatches = 2
    assert cfg.microbatches == 1


class TestSources:
    """Precedence, key by key: SMP_CONFIG > SM_HP_MP_PARAMETERS > dict > defaults."""

    @pytest.mark.parametrize("held", list(itertools.product([False, True], repeat=4)))
    def test_a_key_in_some_sources_hides_no_other_key_of_theirs(self, monkeypatch, held):
        """One key in some of the sources, another in the rest; each from its strongest."""
        config_text, environment, sagemaker, given = (
            {"comm_pool_bytes" if has else "comm_device_pool_bytes": place}
            for place, has in enumerate(held, start=1)
        )
        monkeypatch.setenv("SMP_CONFIG", json.dumps({**config_text, "microbatches": 5}))
        for name, value in environment.items():
            monkeypatch.setenv(f"SMP_{name.upper()}", str(value))
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps({**sagemaker, "ddp": True}))

        cfg = load(**given, skip_tracing=True)

        first = {has: place for place, has in reversed(list(enumerate(held, start=1)))}
        assert cfg.comm_pool_bytes == first.get(True, 0)
        assert cfg.comm_device_pool_bytes == first.get(False, 256 << 20)
        assert (cfg.microbatches, cfg.ddp, cfg.skip_tracing) == (5, True, True)

    def test_what_the_library_shall_decide_hides_no_weaker_source(self, monkeypatch):
        """None is "not given", of what defaults to None; rules look at all sources."""
        monkeypatch.setenv("SMP_CONFIG", '{"memory_weight": null, "default_partition": 1}')
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"auto_partition": false}')

        cfg = load(2, partitions=2, memory_weight=0.5)

        assert (cfg.memory_weight, cfg.auto_partition) == (0.5, False)
        assert cfg.default_partition == 1

    def test_an_alias_in_a_stronger_source_overrides(self, monkeypatch):
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 2}')

        assert load(4, pipeline_parallel_degree=4).pipeline_parallel_degree == 2

    @pytest.mark.parametrize(
        "name, content",
        [
            ("c.json", '{"microbatches": 6, "ddp": true}'),
            ("c.yaml", "microbatches: 6\nddp: true\n"),
            ("c.yml", "microbatches: 6\nddp: true\n"),
            ("c.toml", "microbatches = 6\nddp = true\n"),
        ],
    )
    def test_smp_config_may_be_a_file(self, monkeypatch, tmp_path, name, content):
        (tmp_path / name).write_text(content)
        monkeypatch.setenv("SMP_CONFIG", str(tmp_path / name))
        if name == "c.toml" and sys.version_info < (3, 11):
            with pytest.raises(ConfigError, match=r"a \.toml file needs Python 3\.11"):
                load()
            return

        cfg = load()

        assert (cfg.microbatches, cfg.ddp) == (6, True)

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("SMP_CONFIG", "{", "SMP_CONFIG cannot be parsed"),
            ("SMP_CONFIG", "/nowhere/c.json", "c.json' cannot be read: No such file"),
            ("SMP_CONFIG", "settings.ini", "neither a JSON object nor the path"),
            ("SMP_CONFIG", "[1]", "neither a JSON object nor the path"),
            ("SM_HP_MP_PARAMETERS", "{partitions: 2}", "SM_HP_MP_PARAMETERS cannot be parsed"),
            ("SMP_COMM_POOL_BYTES", "much", r"comm_pool_bytes='much' \(in the environment\)"),
            *(
                (
                    f"SMP_{key.upper()}",
                    "soon",
                    rf"{key}='soon' \(in the environment\): must be a n",
                )
                for key in ("watchdog_report_s", "watchdog_end_s")
            ),
        ],
    )
    def test_a_wrong_variable_says_what_is_wrong(self, monkeypatch, name, value, said):
        monkeypatch.setenv(name, value)

        with pytest.raises(ConfigError, match=said):
            load()

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("c.json", "[1]", "must hold an object"),
            ("c.yaml", "microbatches: [1", r"c\.yaml' cannot be parsed: (.|\n)*line 1"),
        ],
    )
    def test_a_file_must_hold_an_object(self, monkeypatch, tmp_path, name, text, said):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv("SMP_CONFIG", str(tmp_path / name))

        with pytest.raises(ConfigError, match=said):
            load()

    @pytest.mark.parametrize(
        "key, text, value",
        [
            ("comm_transports", "^mpi,^ucx", ("^mpi", "^ucx")),
            ("comm_transports", "mpi, shm", ("mpi", "shm")),
            ("comm_interface", "eth1", "eth1"),
            ("comm_pool_bytes", "7", 7),
            ("comm_device_pool_bytes", "0", 0),
            ("comm_device_gather_bytes", "7", 7),
            ("watchdog_report_s", "2.5", 2.5),
            ("watchdog_end_s", "2.5", 2.5),
            ("device", "cpu", "cpu"),
        ],
    )
    def test_a_variable_of_the_environment_sets_its_own_key(
        self, monkeypatch, key, text, value
    ):
        others = dataclasses.asdict(load())
        monkeypatch.setenv(f"SMP_{key.upper()}", text)

        assert dataclasses.asdict(load()) == {**others, key: value}

    @pytest.mark.parametrize(
        "name, module, told",
        [
            ("c.yml", "yaml", r"a \.yaml file needs PyYAML: pip install pyyaml"),
            ("c.toml", "tomllib", r"a \.toml file needs Python 3\.11"),
        ],
    )
    def test_a_file_for_which_a_parser_is_missing_says_what_to_install(
        self, monkeypatch, tmp_path, name, module, told
    ):
        (tmp_path / name).touch()
        monkeypatch.setenv("SMP_CONFIG", str(tmp_path / name))
        monkeypatch.setitem(sys.modules, module, None)

        with pytest.raises(ConfigError, match=f"^{told}"):
            load()

    def test_init_takes_a_dict(self):
        with pytest.raises(ConfigError, match="takes a dict of parameters, got 3"):
            config.load(3, 1)


INTS = [
    "pipeline_parallel_degree",
    "partitions",
    "tensor_parallel_degree",
    "microbatches",
    "active_microbatches",
    "static_mode_recording_steps",
    "activation_loading_horizon",
    "sharded_data_parallel_degree",
    "sdp_reduce_bucket_size",
    "sdp_max_live_parameters",
]
INTS_FROM_ZERO = [
    "default_partition",
    "sdp_param_persistence_threshold",
    "comm_pool_bytes",
    "comm_device_pool_bytes",
]
BOOLS = [f.name for f in dataclasses.fields(Config) if f.type is bool]


@pytest.mark.parametrize("name", INTS + INTS_FROM_ZERO)
@pytest.mark.parametrize("value", ["2", 1.5, True, [1], -2])
def test_an_int_is_an_int(name, value):
    with pytest.raises(ConfigError) as caught:
        load(**{name: value})

    assert str(caught.value).startswith(f"{name}={value!r} (in smp.init): must be an int of")


@pytest.mark.parametrize("name", INTS)
def test_a_count_is_at_least_one(name):
    with pytest.raises(ConfigError, match=f"{name}=0 .*: must be an int of at least 1"):
        load(**{name: 0})


@pytest.mark.parametrize("name", BOOLS)
@pytest.mark.parametrize("value", ["true", 1, None])
def test_a_bool_is_a_bool(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} .*: must be True or False"):
        load(**{name: value})


def test_there_are_bools_and_placements():
    assert len(BOOLS) == 14 and len(set(config.PLACEMENTS)) == 8


def test_json_writes_large_ints_as_floats():
    assert load(sdp_reduce_bucket_size=5e8).sdp_reduce_bucket_size == 500_000_000
    assert type(load(sdp_max_live_parameters=1e9).sdp_max_live_parameters) is int
    with pytest.raises(ConfigError):
        load(microbatches=2.0)


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("memory_weight", 1.1, "a number from 0 to 1"),
        ("memory_weight", -0.1, "a number from 0 to 1"),
        ("memory_weight", float("nan"), "a number from 0 to 1"),
        ("memory_weight", "0.5", "a number from 0 to 1"),
        ("memory_weight", True, "a number from 0 to 1"),
        ("sdp_gradient_clipping", -1, "a number from 0"),
        ("optimize", "size", "one of 'memory', 'speed', 'channels'"),
        ("device", "cuda:1", "one of 'auto', 'cpu'"),
        ("ddp_dist_backend", "mpi", "one of 'auto', 'nccl', 'gloo', 'smddp'"),
        ("placement_strategy", "DPD", "one of 'cluster', 'spread', 'DPT', 'DTP', 'PDT'"),
        ("pipeline", "fast", "one of 'interleaved', 'simple', 'zero_bubble', a callable"),
        ("pipeline", [(0, 1.5)], r"a list of \(microbatch, phase\)"),
        ("pipeline", [], r"a list of \(microbatch, phase\)"),
        ("pipeline", 3, r"a list of \(microbatch, phase\)"),
        ("comm_transports", "shm", "a list of 'shm', 'ucx', 'tcp', 'mpi'"),
        ("comm_transports", [], "a list of 'shm', 'ucx', 'tcp', 'mpi'"),
        ("comm_transports", ["shm", 1], "a list of 'shm', 'ucx', 'tcp', 'mpi'"),
        ("comm_transports", ["udp"], "a list of 'shm', 'ucx', 'tcp', 'mpi'"),
        ("comm_transports", ["shm", "^mpi"], "to leave it out"),
        ("comm_transports", ["^shm", "^ucx", "^tcp", "^mpi"], "leaves at least one"),
        ("comm_interface", 3, "a text"),
        ("comm_interface", "", "a text"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name, value, allowed):
    with pytest.raises(ConfigError, match=rf"^{name}=.*must be .*{allowed}"):
        load(**{name: value})


def test_warnings_that_were_given_once_are_given_again_when_they_are_forgotten():
    for _ in range(2):
        with pytest.warns(UserWarning, match="no effect here: ddp_port"):
            load(ddp_port=1234)
        config.forget_warnings()


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("microbatch", "did you mean 'microbatches'"),
        ("partition", "did you mean 'partitions'"),
        ("Optimize", "did you mean 'optimize'"),
        ("zzz", "known are .*microbatches"),
    ],
)
def test_a_misspelt_key_names_the_nearest_or_all_that_are_known(key, nearest):
    with pytest.raises(ConfigError, match=f"{key}=1 .*{nearest}"):
        load(**{key: 1})


@pytest.mark.parametrize("key", ["_match_weight", "prescaled", "zzz"])
def test_a_private_key_is_not_proposed(key):
    with pytest.raises(ConfigError) as error:
        load(**{key: 1})
    assert not re.search(r"[ ']_", str(error.value).removeprefix(key))


@pytest.mark.parametrize(
    "size, given, said",
    [
        (3, {"pipeline_parallel_degree": 2}, "pipeline_parallel_degree=2 .* of ranks, 3"),
        (1, {"pipeline_parallel_degree": 2}, "of ranks, 1; a launcher sets .* mpirun -np N"),
        (1, {"tensor_parallel_degree": 2}, "tensor_parallel_degree=2 .* of ranks, 1"),
        (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 4}, "of ranks, 4"),
        (4, {"sharded_data_parallel_degree": 3}, "sharded_data_parallel_degree=3 must"),
        (2, {"partitions": 2, "auto_partition": False}, "needs default_partition"),
        (2, {"partitions": 2, "default_partition": 2}, "default_partition=2 must be below"),
        (
            1,
            {"pipeline": "simple", "microbatches": 4, "active_microbatches": 3},
            "active_microbatches=3 is too few",
        ),
        (1, {"fp16": True, "bf16": True}, "only one of them"),
    ],
)
def test_impossible_combinations(size, given, said):
    with pytest.raises(ConfigError, match=said):
        config.load(given, size)


def test_every_rule_has_a_combination_above():
    broken = test_impossible_combinations.pytestmark[0].args[1]

    assert len(broken) >= len(config._RULES)


@pytest.mark.parametrize(
    "size, given",
    [
        (4, {"sharded_data_parallel_degree": 2}),
        (1, {"pipeline": "zero_bubble"}),
    ],
)
def test_what_is_not_built_is_refused_by_name(size, given):
    [(name, value)] = given.items()

    with pytest.raises(NotImplementedError, match=f"{name}={value!r}: .* is not built yet"):
        config.load(given, size)


def test_every_parameter_that_is_not_built_has_a_value_above():
    refused = test_what_is_not_built_is_refused_by_name.pytestmark[0].args[1]

    assert {name for _, given in refused for name in given} >= {
        name for name, _, _ in config._NOT_BUILT
    }


def test_a_parameter_without_effect_warns_once():
    with pytest.warns(UserWarning, match="no effect here: ddp_port, xla"):
        load(ddp_port=1234, xla=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(ddp_port=1234)


def test_what_the_original_accepts_in_the_configuration_is_accepted():
    """An argument of the model, a private name, and a schedule without backwards."""
    with pytest.warns(UserWarning, match="no effect here: overlapping_allreduce"):
        more = {"_prescaled_batch": True, "pipeline": "_only_forward"}
        given = load(overlapping_allreduce=True, **more)
    assert given.prescaled_batch and given.pipeline == "interleaved"


def test_what_is_not_given_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(microbatches=2)


def test_every_parameter_as_text():
    texts = load(pipeline=sorted, comm_interface="eth0").as_texts()

    assert texts["pipeline"] == "sorted"
    assert texts["ddp"] == "False"
    assert "comm_interface" not in texts
    assert json.loads(json.dumps(texts)) == texts
