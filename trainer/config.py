"""Every choice of a run, as frozen records, and the presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptkit.model.policies import BroadcastMode

MESH_AXES = ("data", "fsdp", "model")
OptimizerName = Literal["adamw", "muon", "lion", "adafactor", "sgd"]
ManagerName = Literal["ckptkit", "orbax", "orbax-sync"]


class InputError(ValueError):
    """An error that the user can correct: the command line prints it and exits with code 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes that fix every tensor's shape. All counts; `seq_len` is in tokens."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int  # fewer than `heads` is grouped-query attention
    d_ff: int
    vocab: int
    seq_len: int

    def __post_init__(self) -> None:
        if self.d_model % self.heads or (self.d_model // self.heads) % 2:
            raise InputError(
                f"model: d_model {self.d_model} over {self.heads} heads is not an even whole head size; "
                "rotary positions rotate pairs, so choose d_model = heads x an even number"
            )
        if self.heads % self.kv_heads:
            raise InputError(
                f"model: {self.heads} heads cannot share {self.kv_heads} kv heads; choose kv_heads that divides heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Parameters are float32; `compute_dtype` is what matmuls run in."""

    size: ModelSize
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    head: Literal["tied", "untied"] = "untied"
    dropout: float = 0.0  # on the embeddings and on each residual branch
    remat: bool = False  # recompute each block in the backward pass instead of keeping its activations
    compute_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """An optimizer with clipping and a warm-up + cosine schedule, counted in optimizer steps."""

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-3  # the peak
    warmup_steps: int = 20
    schedule_steps: int = 1000  # warm-up and decay together
    final_fraction: float = 0.1  # of the peak, at the end of the schedule
    weight_decay: float = 0.1  # matrices only
    betas: tuple[float, float] = (0.9, 0.95)  # of adamw; lion and muon have their papers'; the first is sgd's momentum
    clip_norm: float = 1.0
    accumulate: int = 1  # microbatches per optimizer step
    offload: bool = False  # its moments are in the host's pinned memory between updates


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Sizes of the named mesh axes, slowest first; `model` neighbours are neighbouring devices."""

    data: int = 1
    fsdp: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise InputError(f"--mesh: {axis}={size}; an axis has at least 1 device")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to number of devices, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def devices(self) -> int:
        """How many devices the mesh needs."""
        return self.data * self.fsdp * self.model

    @classmethod
    def parse(cls, text: str) -> "MeshConfig":
        """Read `data=1,fsdp=2,model=2`; an axis left out has size 1."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.strip().partition("=")
            if axis not in MESH_AXES or axis in sizes or not size.isdecimal():
                raise InputError(
                    f"--mesh {text!r}: cannot read {part!r}; "
                    f"write each of {', '.join(MESH_AXES)} at most once, like data=1,fsdp=2,model=2"
                )
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which text, and in what order. The order depends on `seed` and `global_batch` alone."""

    data: str = "stdlib"  # a file, a directory, or "stdlib"
    corpus_dir: str = "runs/default/corpus"
    global_batch: int = 8  # rows per step over all processes
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where the state goes and how often; a tier that is None is not used. `manager`: by whose manager."""

    manager: ManagerName = "ckptkit"
    directory: str | None = None  # the durable tier: a directory or gs://bucket/path
    save_every: int = 50
    keep: int = 3
    ram: str | None = None
    ram_every: int = 5
    ssd: str | None = None
    ssd_every: int = 20
    host_id: str | None = None
    peer_copies: int = 0  # of each host's ramdisk saves, on so many other hosts
    broadcast: BroadcastMode = "auto"  # whether data replicas read the durable tier for each other

    def __post_init__(self) -> None:
        if self.peer_copies and self.ram is None:
            raise InputError("--peer-copies are of what --ram holds: also give --ram")
        if self.directory is None and (self.ram or self.ssd):
            raise InputError("--ram and --ssd hold copies of what goes to the durable tier: also give --checkpoint")
        if self.manager != "ckptkit" and (self.ram or self.ssd):
            raise InputError(f"--manager {self.manager} has no tiers: leave --ram and --ssd out")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """The reaction to an alarm over the loss. The rules are the defaults of `ckptkit.guard.Guard`."""

    margin_steps: int = 5  # between the save that is restored and the onset of the trouble
    skip_ahead_steps: int = 0  # batches that are skipped beyond the alarm's
    retries_max: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """This process among the others."""

    coordinator: str | None = None  # HOST:PORT of process 0
    processes: int = 1
    process: int = 0
    heartbeat_s: int = 10  # a silent peer ends the job after this long
    start_timeout_s: int = 300  # how long the processes wait for each other at the start
    grace_s: float = 25.0  # from SIGTERM to the end, for a last save
    detect: bool = False  # JAX finds the coordinator, from variables of Slurm or Open MPI

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.processes:
            raise InputError(
                f"--process {self.process} of --processes {self.processes}: count from 0 to {self.processes - 1}"
            )
        if self.processes > 1 and not self.coordinator and not self.detect:
            raise InputError(
                f"--processes {self.processes} needs --coordinator HOST:PORT, the address that process 0 listens on, "
                "or --cluster detect under Slurm or Open MPI"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How long to train and what to report."""

    steps: int
    compile_cache: str | None = None
    proof: str | None = None
    log_every: int | None = 10  # None is silent
    events: str | None = None  # where this run's earlier attempts left their logs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run, whole."""

    model: ModelConfig
    loop: LoopConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig | None = None  # None: every device on `fsdp`
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    guard: GuardConfig | None = None  # None: no alarm takes the run back

    def __post_init__(self) -> None:
        if self.guard and (self.checkpoint.directory is None or self.checkpoint.manager != "ckptkit"):
            raise InputError("--guard goes back to saves of ckptkit: also give --checkpoint, and no other --manager")
        if self.data.global_batch % self.optimizer.accumulate:
            raise InputError(
                f"--global-batch {self.data.global_batch} does not split into --accumulate "
                f"{self.optimizer.accumulate} microbatches; choose a multiple"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model with the batch and the learning rate that suit it."""

    model: ModelConfig
    global_batch: int
    learning_rate: float


PRESETS: Mapping[str, Preset] = {
    # One weight above 1 MB (mlp/up: 128 x 2 x 1024 float32) so that the sharding rules have something to hold.
    "tiny": Preset(
        model=ModelConfig(
            size=ModelSize(layers=2, d_model=128, heads=4, kv_heads=2, d_ff=1024, vocab=256, seq_len=64),
            dropout=0.1,
        ),
        global_batch=8,
        learning_rate=3e-3,
    ),
    # The same with a key-value head for each head, so that it splits over model=4.
    "tiny-mha": Preset(
        model=ModelConfig(
            size=ModelSize(layers=2, d_model=128, heads=4, kv_heads=4, d_ff=1024, vocab=256, seq_len=64),
            dropout=0.1,
        ),
        global_batch=8,
        learning_rate=3e-3,
    ),
    "25m": Preset(
        model=ModelConfig(
            size=ModelSize(layers=8, d_model=512, heads=8, kv_heads=4, d_ff=1536, vocab=256, seq_len=512)
        ),
        global_batch=32,
        learning_rate=1e-3,
    ),
    "125m": Preset(
        model=ModelConfig(
            size=ModelSize(layers=12, d_model=1024, heads=16, kv_heads=4, d_ff=2560, vocab=256, seq_len=1024),
            compute_dtype="bfloat16",
        ),
        global_batch=128,
        learning_rate=6e-4,
    ),
    # The state of 125m (1.5 GB) under steps of about a second on two cores: what saves and restarts cost shows.
    "125m-cpu": Preset(
        model=ModelConfig(
            size=ModelSize(layers=12, d_model=1024, heads=16, kv_heads=4, d_ff=2560, vocab=256, seq_len=32),
        ),
        global_batch=2,
        learning_rate=6e-4,
    ),
    # Brown et al. 2020, table 2.1: sizes, learning rate, 3.2 M tokens per batch (1562 rows, here 1536 so that
    # it splits). Its 50257 tokens are padded to a multiple of 128; rotary replaces its learned positions.
    "gpt3-175b": Preset(
        model=ModelConfig(
            size=ModelSize(layers=96, d_model=12288, heads=96, kv_heads=96, d_ff=49152, vocab=50304, seq_len=2048),
            mlp="gelu",
            head="tied",
            remat=True,
            compute_dtype="bfloat16",
        ),
        global_batch=1536,
        learning_rate=6e-5,
    ),
}


def preset(name: str, *, compute_dtype: Literal["float32", "bfloat16"] | None = None) -> Preset:
    """Look a preset up by name, with another compute dtype when one is given."""
    if name not in PRESETS:
        raise InputError(f"--preset {name}: there is no such preset; choose one of {', '.join(PRESETS)}")
    found = PRESETS[name]
    if compute_dtype is None:
        return found
    return replace(found, model=replace(found.model, compute_dtype=compute_dtype))
