"""The configuration: its parameters, their sources, and their allowed values.

Each parameter is one field of `Config`, with its check beside it.  Values come, key by key,
from the first of these with the key:

1. ``SMP_CONFIG``: JSON text, or the path of a .json, .toml or .yaml file;
2. ``SMP_COMM_TRANSPORTS``, ``SMP_COMM_INTERFACE``, ``SMP_COMM_POOL_BYTES``,
   ``SMP_COMM_DEVICE_POOL_BYTES``, ``SMP_COMM_DEVICE_GATHER_BYTES``,
   ``SMP_WATCHDOG_REPORT_S``, ``SMP_WATCHDOG_END_S``;
3. ``SM_HP_MP_PARAMETERS``: JSON, set by SageMaker;
4. the dict given to ``smp.init``;
5. the default.

Source: SageMaker Python SDK docs, "Configuration Parameters for distribution".
"""

import dataclasses
import difflib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp import _core

TRANSPORTS = (*_core.transports, "mpi")
PIPELINES = ("interleaved", "simple", "zero_bubble")
ONLY_FORWARD = "_only_forward"  # of the original: steps without a backward
REST = -1  # a degree left to the number of ranks
_RESTS = ("pipeline_parallel_degree", "tensor_parallel_degree")  # one of these may be `REST`
PLACEMENTS = ("cluster", "spread", *map("".join, itertools.permutations("DPT")))


class ConfigError(ValueError):
    """A wrong configuration: the text names the key, its value and the allowed values."""


class _Wrong(Exception):
    """Raised by a check; the text names the allowed values."""


def whole(
    default: int | None, *, at_least: int = 0, scientific: bool = False, effect: bool = True
) -> Any:
    """An int; with ``scientific`` also ``5e8``, a float in JSON."""

    def check(value: Any) -> int:
        if scientific and isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < at_least:
            raise _Wrong(f"an int of at least {at_least}")
        return value

    return _parameter(default, check, effect)


def degree_or_rest(default: int) -> Any:
    """An int, or `REST`: the quotient of the ranks by the other degrees."""

    def check(value: Any) -> int:
        if type(value) is not int or value < 1 and value != REST:
            raise _Wrong(
                "an int of at least 1, or -1: as many ranks as the other degrees leave"
            )
        return value

    return _parameter(default, check)


def flag(default: bool = False, effect: bool = True) -> Any:
    def check(value: Any) -> bool:
        if type(value) is not bool:
            raise _Wrong("True or False")
        return value

    return _parameter(default, check, effect)


def number(default: float | None, low: float, high: float = float("inf")) -> Any:
    """A float, or an int in place of one, in [low, high]."""

    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            limits = f"from {low:g} to {high:g}" if high < float("inf") else f"from {low:g}"
            raise _Wrong(f"a number {limits}")
        return float(value)

    return _parameter(default, check)


def choice(default: str, *allowed: str) -> Any:
    def check(value: Any) -> str:
        if value not in allowed:
            raise _Wrong(f"one of {', '.join(map(repr, allowed))}")
        return value

    return _parameter(default, check)


def schedule(default: str) -> Any:
    """A named schedule, a callable, or a list of (microbatch, phase)."""

    def check(value: Any) -> Any:
        if value == ONLY_FORWARD:
            return default  # a step without a backward needs no schedule of its own
        if callable(value) or value in PIPELINES:
            return value
        try:
            pairs = tuple((mb, phase) for mb, phase in value)
        except (TypeError, ValueError):
            pairs = ()
        if not pairs or not all(type(mb) is int and type(ph) in (int, str) for mb, ph in pairs):
            raise _Wrong(
                f"one of {', '.join(map(repr, PIPELINES))}, a callable, "
                "or a list of (microbatch, phase)"
            )
        return pairs

    return _parameter(default, check)


def transports(default: None) -> Any:
    """Names in order of preference, or names to leave out, each with a leading ``^``."""

    def check(value: Any) -> tuple[str, ...]:
        names = tuple(value) if isinstance(value, list | tuple) else ()
        bare = [name.removeprefix("^") for name in names if isinstance(name, str)]
        forbidding = {name.startswith("^") for name in names if isinstance(name, str)}
        if len(bare) != len(names) or len(forbidding) != 1 or set(bare) - set(TRANSPORTS):
            raise _Wrong(
                f"a list of {', '.join(map(repr, TRANSPORTS))}, in order of preference; "
                "or each with a leading '^', to leave it out"
            )
        left = tuple(name for name in TRANSPORTS if name not in bare)
        if forbidding == {True} and not left:
            raise _Wrong("a list that leaves at least one transport")
        if forbidding == {True} and len(left) == 1:
            return left
        return names

    return _parameter(default, check)


def text(default: None) -> Any:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise _Wrong("a text")
        return value

    return _parameter(default, check)


def no_effect(default: Any = None) -> Any:
    """A parameter of the original without a use in this project: any value."""
    return _parameter(default, lambda value: value, effect=False)


def _parameter(default: Any, check: Callable[[Any], Any], effect: bool = True) -> Any:
    return dataclasses.field(default=default, metadata={"check": check, "effect": effect})


@dataclass(frozen=True, kw_only=True)
class Config:
    """``smp.state.cfg``: an attribute for each parameter, read-only.

    A default of None below is computed from other parameters by `_fill`, or means
    "the library decides".
    """

    pipeline_parallel_degree: int = degree_or_rest(1)
    tensor_parallel_degree: int = degree_or_rest(1)
    ddp: bool = flag()
    microbatches: int = whole(1, at_least=1)
    active_microbatches: int = whole(None, at_least=1)
    pipeline: Any = schedule("interleaved")
    optimize: str = choice("memory", "memory", "speed", "channels")
    placement_strategy: str = choice("cluster", *PLACEMENTS)
    auto_partition: bool = flag(True)
    default_partition: int = whole(0)
    memory_weight: float = number(None, 0, 1)
    deterministic_server: bool = flag()  # all replicas run requests in one order
    static_mode: bool = flag()
    static_mode_recording_steps: int = whole(5, at_least=1)
    fast_mode: bool = flag(True)
    skip_tracing: bool = flag()
    offload_activations: bool = flag()
    activation_loading_horizon: int = whole(4, at_least=1)
    shard_optimizer_state: bool = flag()
    prescaled_batch: bool = flag()
    fp16: bool = flag()
    bf16: bool = flag()
    fp16_params: bool = flag()
    sharded_data_parallel_degree: int = whole(1, at_least=1)
    sdp_reduce_bucket_size: int = whole(500_000_000, at_least=1, scientific=True, effect=False)
    sdp_param_persistence_threshold: int = whole(1_000_000, scientific=True)
    sdp_max_live_parameters: int = whole(1_000_000_000, at_least=1, scientific=True)
    sdp_hierarchical_allgather: bool = flag(True, effect=False)
    sdp_gradient_clipping: float = number(1.0, 0)
    comm_transports: tuple[str, ...] | None = transports(None)
    comm_interface: str | None = text(None)
    comm_pool_bytes: int = whole(0)  # 0: the library decides
    comm_device_pool_bytes: int = whole(256 << 20)  # of each rank's GPU; 0: none
    comm_device_gather_bytes: int = whole(16 << 20)  # of it, for each group; 0: none
    watchdog_report_s: float = number(30.0, 0)  # 0: never
    watchdog_end_s: float = number(0.0, 0)  # 0: never
    ddp_dist_backend: str = choice("auto", "auto", "nccl", "gloo", "smddp")
    device: str = choice("auto", "auto", "cpu")  # cpu: models stay where they are
    ddp_port: Any = no_effect()
    horovod: Any = no_effect(False)
    contiguous: Any = no_effect(True)
    xla: Any = no_effect(False)
    partition_file: Any = no_effect()
    load_partition: Any = no_effect(False)
    checkpoint_attentions: Any = no_effect(True)
    activation_checkpointing: Any = no_effect(False)
    delayed_parameter_initialization: Any = no_effect(False)
    overlapping_allreduce: Any = no_effect(True)  # an argument of smp.DistributedModel
    _match_weights: Any = no_effect(False)
    _fp32_grad_accumulation: bool = flag()
    _shard_offloaded_activations: Any = no_effect(False)

    @property
    def partitions(self) -> int:
        """The older name of ``pipeline_parallel_degree``."""
        return self.pipeline_parallel_degree

    def as_texts(self) -> dict[str, str]:
        """Every parameter as text, to be compared across ranks.

        ``comm_interface`` is left out: hosts may well name their networks differently.
        """
        return {
            name: getattr(value, "__qualname__", None) or repr(value)
            for name, value in vars(self).items()
            if name != "comm_interface"
        }


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
ALIASES = {"partitions": "pipeline_parallel_degree", "_prescaled_batch": "prescaled_batch"}

# Parameters not built yet: (parameter, asks for it, its effect).
_NOT_BUILT: list[tuple[str, Callable[[Any], bool], str]] = [
    ("pipeline", lambda v: v == "zero_bubble", "the zero-bubble schedule"),
]

# Rules between parameters: (broken, message).  `c` is the Config with its defaults filled in,
# `given` the names set, `size` the number of ranks.
_Rule = tuple[Callable[[Config, frozenset[str], int], bool], str]
_RULES: list[_Rule] = [
    (
        lambda c, given, size: size % _degrees(c) != 0,
        "pipeline_parallel_degree={c.pipeline_parallel_degree} times tensor_parallel_degree="
        "{c.tensor_parallel_degree} must divide the number of ranks, {size}; a launcher sets "
        "that number: mpirun -np N python ..., or torchrun --nproc-per-node N ...",
    ),
    (
        lambda c, given, size: (size // _degrees(c)) % c.sharded_data_parallel_degree != 0,
        "sharded_data_parallel_degree={c.sharded_data_parallel_degree} must divide the "
        "number of data-parallel ranks of {size} ranks",
    ),
    (
        lambda c, given, size: not c.auto_partition and "default_partition" not in given,
        "auto_partition=False needs default_partition, the partition for modules outside "
        "any smp.partition: an int below pipeline_parallel_degree="
        "{c.pipeline_parallel_degree}",
    ),
    (
        lambda c, given, size: c.default_partition >= c.pipeline_parallel_degree,
        "default_partition={c.default_partition} must be below pipeline_parallel_degree="
        "{c.pipeline_parallel_degree}",
    ),
    (
        lambda c, given, size: (
            c.pipeline == "simple" and c.active_microbatches < c.microbatches
        ),
        "active_microbatches={c.active_microbatches} is too few for pipeline='simple', which "
        "has all of microbatches={c.microbatches} in flight at once",
    ),
    (
        lambda c, given, size: c.fp16 and c.bf16,
        "fp16=True and bf16=True: only one of them can be True",
    ),
]


def _degrees(c: Config) -> int:
    return c.pipeline_parallel_degree * c.tensor_parallel_degree


def load(given: Mapping[str, Any] | None, size: int) -> Config:
    """The configuration of a job of ``size`` ranks.

    Args:
        given: the script's argument of ``smp.init``.
        size: number of ranks of the job.

    Raises:
        ConfigError: the text names the key, its value and the allowed values.
        NotImplementedError: the text names a parameter not built yet.
    """
    values: dict[str, Any] = {}
    for source, mapping in reversed(_sources(given)):
        values.update(_checked(source, mapping))
    config = _fill(values, size)
    names = frozenset(values)
    for broken, message in _RULES:
        if broken(config, names, size):
            raise ConfigError(message.format(c=config, size=size))
    replicas, shards = size // _degrees(config), config.sharded_data_parallel_degree
    if 1 < shards < replicas:
        raise NotImplementedError(
            f"sharded_data_parallel_degree={shards}: to shard over some of the "
            f"{replicas} ranks with the same parameters (rdp_size) is not built yet: set it to "
            f"{replicas}"
        )
    for name, asks_for_it, what in _NOT_BUILT:
        if asks_for_it(value := getattr(config, name)):
            raise NotImplementedError(f"{name}={value!r}: {what} is not built yet")
    _warn_without_effect(values)
    return config


def comm_environment() -> dict[str, Any]:
    """The values of ``SMP_COMM_*``, checked, by parameter name."""
    return _checked("the environment", _comm_environment())


def _sources(given: Mapping[str, Any] | None) -> list[tuple[str, Mapping[str, Any]]]:
    """The sources of values, the strongest first."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"smp.init takes a dict of parameters, got {given!r}")
    return [
        ("SMP_CONFIG", _text_or_file(os.environ.get("SMP_CONFIG", ""))),
        ("the environment", _comm_environment()),
        ("SM_HP_MP_PARAMETERS", _json_of_sagemaker()),
        ("smp.init", given or {}),
    ]


def _text_or_file(value: str) -> Mapping[str, Any]:
    if not value.strip():
        return {}
    if value.lstrip().startswith("{"):
        return _parsed("SMP_CONFIG", value, json.loads)
    path = Path(value)
    parsers: dict[str, Callable[[str], Any]] = {
        ".json": json.loads,
        ".toml": _parse_toml,
        ".yaml": _parse_yaml,
        ".yml": _parse_yaml,
    }
    if path.suffix not in parsers:
        raise ConfigError(
            f"SMP_CONFIG={value!r} is neither a JSON object nor the path of a file that "
            f"ends in {', '.join(parsers)}"
        )
    try:
        content = path.read_text()
    except OSError as error:
        raise ConfigError(f"SMP_CONFIG={value!r} cannot be read: {error.strerror}") from None
    return _parsed(f"SMP_CONFIG={value!r}", content, parsers[path.suffix])


def _parse_toml(content: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        raise ConfigError("a .toml file needs Python 3.11 or later") from None
    return tomllib.loads(content)


def _parse_yaml(content: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("a .yaml file needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _json_of_sagemaker() -> Mapping[str, Any]:
    value = os.environ.get("SM_HP_MP_PARAMETERS", "")
    return _parsed("SM_HP_MP_PARAMETERS", value, json.loads) if value.strip() else {}


def _comm_environment() -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if names := os.environ.get("SMP_COMM_TRANSPORTS"):
        found["comm_transports"] = [name.strip() for name in names.split(",")]
    if interface := os.environ.get("SMP_COMM_INTERFACE"):
        found["comm_interface"] = interface
    for name in ("comm_pool_bytes", "comm_device_pool_bytes", "comm_device_gather_bytes"):
        if size := os.environ.get(f"SMP_{name.upper()}"):
            found[name] = int(size) if size.isdecimal() else size
    if device := os.environ.get("SMP_DEVICE"):
        found["device"] = device
    for name in ("watchdog_report_s", "watchdog_end_s"):
        if seconds := os.environ.get(f"SMP_{name.upper()}"):
            found[name] = _number_or_text(seconds)
    return found


def _number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _parsed(source: str, content: str, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    try:
        value = parse(content)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{source} cannot be parsed: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source} must hold an object of parameters, got {value!r}")
    return value


def _checked(source: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one source by parameter name, each checked.

    None stands for "not given" where the library decides the default.
    """
    values: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in mapping.items():
        name = ALIASES.get(key, key)
        if name not in FIELDS:
            raise ConfigError(_unknown(source, key, value))
        field = FIELDS[name]
        if value is None and field.default is None:
            continue
        try:
            value = field.metadata["check"](value)
        except _Wrong as allowed:
            raise ConfigError(f"{key}={value!r} (in {source}): must be {allowed}") from None
        if name in values and values[name] != value:
            raise ConfigError(
                f"{key}={value!r} and {spelt[name]}={values[name]!r} (in {source}) are two "
                "names of one parameter with different values"
            )
        values[name], spelt[name] = value, key
    return values


def _unknown(source: str, key: Any, value: Any) -> str:
    known = sorted(name for name in [*FIELDS, *ALIASES] if not name.startswith("_"))
    nearest = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
    return f"{key}={value!r} (in {source}): there is no such parameter; {hint}"


def _fill(values: dict[str, Any], size: int) -> Config:
    """Fill in the parameters left to others, and to the number of ranks."""
    config = _with_the_rest(Config(**values), size)
    computed: dict[str, Any] = {}
    if config.active_microbatches is None:
        computed["active_microbatches"] = (
            config.pipeline_parallel_degree + 2
            if config.pipeline in ("interleaved", "zero_bubble")
            else config.microbatches
        )
    if config.memory_weight is None:
        computed["memory_weight"] = 0.2 if config.optimize == "speed" else 0.8
    if size > config.pipeline_parallel_degree:
        computed["ddp"] = True
    return dataclasses.replace(config, **computed)


def _with_the_rest(config: Config, size: int) -> Config:
    """With `REST` replaced by the quotient of the ranks by the other degrees."""
    unknown = [name for name in _RESTS if getattr(config, name) == REST]
    if not unknown:
        return config
    if len(unknown) > 1:
        raise ConfigError(
            f"{'=-1 and '.join(unknown)}=-1: only one of them can be -1, as many ranks as the "
            "other degrees leave"
        )
    others = -_degrees(config) * config.sharded_data_parallel_degree
    rest: dict[str, Any] = {unknown[0]: max(1, size // others)}
    return dataclasses.replace(config, **rest)


_warned: set[str] = set()


def _warn_without_effect(values: Mapping[str, Any]) -> None:
    names = [n for n in values if not FIELDS[n].metadata["effect"] and n not in _warned]
    if names:
        _warned.update(names)
        warnings.warn(f"smp: no effect here: {', '.join(names)}", stacklevel=5)


def forget_warnings() -> None:
    """Let each warning given once be given again."""
    _warned.clear()
