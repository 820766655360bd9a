"""`python -m trainer` trains, `plan` computes what a run would need, `export` writes its model for others."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import click

from ckptkit import CheckpointError, StoreError, TierUnusableError, TransientStoreError, TreeMismatchError
from ckptkit.errors import GuardStopError
from ckptkit.events import EventLog, Kind
from ckptkit.launch import ExitCode
from ckptkit.model.policies import BroadcastMode
from tools.corpus import CorpusError
from trainer.checkpoint import Preempted, check_writable
from trainer.cluster import detect_rank, leave
from trainer.config import (
    PRESETS,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    GuardConfig,
    InputError,
    LoopConfig,
    ManagerName,
    MeshConfig,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
    preset,
)
from trainer.export import export_llama
from trainer.loop import train
from trainer.plan import make_plan, print_plan

CHECKPOINT_FLAGS = ("save_every", "keep", "ram", "ram_every", "peer_copies", "ssd", "ssd_every", "host_id", "broadcast")
CLUSTER_FLAGS = ("coordinator", "processes", "process", "heartbeat_s", "start_timeout_s", "grace_s")
DTYPES = click.Choice(["float32", "bfloat16"])
Dtype = Literal["float32", "bfloat16"]


@click.group(invoke_without_command=True, context_settings={"show_default": True, "terminal_width": 110})
@click.option("--preset", type=click.Choice(list(PRESETS)), default="tiny", help="Model, batch and rate.")
@click.option("--steps", type=click.IntRange(1), default=200, help="Steps in all, resumed ones included.")
@click.option("--seed", type=int, default=0, help="Fixes weights, dropout and data order.")
@click.option("--mesh", help="Axis sizes, like data=1,fsdp=2,model=2.  [default: all devices on fsdp]")
@click.option("--global-batch", type=click.IntRange(1), help="Rows per step.  [default: the preset's]")
@click.option("--accumulate", type=click.IntRange(1), default=1, help="Microbatches per step.")
@click.option("--optimizer", type=click.Choice(get_args(OptimizerName)), default="adamw", help="Which family.")
@click.option(
    "--offload", type=click.Choice(["optimizer"]), help="Keep its moments in pinned host memory.  [default: none]"
)
@click.option("--learning-rate", type=click.FloatRange(0), help="Peak rate.  [default: the preset's]")
@click.option("--schedule-steps", type=click.IntRange(1), help="Length of the rate schedule.  [default: --steps]")
@click.option("--compute-dtype", type=DTYPES, help="The dtype of matmuls.  [default: the preset's]")
@click.option("--data", default="stdlib", help="Text file, directory, or stdlib.")
@click.option("--run-dir", default="runs/default", help="Where a run keeps what has no other place.")
@click.option("--corpus-dir", help="Where corpora are built.  [default: RUN_DIR/corpus]")
@click.option(
    "--compile-cache", help="Compiled programs.  [default: $JAX_COMPILATION_CACHE_DIR, or RUN_DIR/compile-cache]"
)
@click.option("--checkpoint", help="Durable tier: a directory or gs://bucket/path.  [default: none]")
@click.option("--manager", type=click.Choice(get_args(ManagerName)), default="ckptkit", help="orbax: to compare.")
@click.option("--save-every", type=click.IntRange(1), default=50, help="Steps between durable saves.")
@click.option("--keep", type=click.IntRange(1), default=3, help="Durable steps to keep.")
@click.option("--ram", help="Ramdisk tier, a directory on this host.  [default: none]")
@click.option("--ram-every", type=click.IntRange(1), default=5, help="Steps between ramdisk saves.")
@click.option("--peer-copies", type=click.IntRange(0), default=0, help="Other hosts that keep each ramdisk save too.")
@click.option("--ssd", help="SSD tier, a directory on this host.  [default: none]")
@click.option("--ssd-every", type=click.IntRange(1), default=20, help="Steps between SSD saves.")
@click.option("--host-id", help="Name of this host in the tiers.  [default: the machine's]")
@click.option("--broadcast", type=click.Choice(get_args(BroadcastMode)), default="auto", help="Read once for replicas.")
@click.option("--guard", is_flag=True, help="Go back and skip batches where the loss is not finite, jumps or rises.")
@click.option("--guard-margin", type=click.IntRange(1), default=5, help="Steps from the restored save to the onset.")
@click.option("--guard-skip-ahead", type=click.IntRange(0), default=0, help="Batches to skip beyond the alarm's.")
@click.option("--coordinator", help="HOST:PORT of process 0, for --processes above 1.")
@click.option("--processes", type=click.IntRange(1), default=1, help="Processes of the job.")
@click.option("--process", type=click.IntRange(0), default=0, help="Which of them this is.")
@click.option("--cluster", type=click.Choice(["detect"]), help="Ask ckptkit run, srun or mpirun who the processes are.")
@click.option("--heartbeat-s", type=click.IntRange(1), default=10, help="Silence after which a peer is lost.")
@click.option("--start-timeout-s", type=click.IntRange(1), default=300, help="How long the start waits for a peer.")
@click.option(
    "--grace-s", type=click.FloatRange(0, min_open=True), default=25.0, help="From SIGTERM to the end: for a last save."
)
@click.option("--events", help="Write event logs here, for goodput.  [default: none]")
@click.option(
    "--attempt",
    type=click.IntRange(0),
    default=0,
    envvar="CKPTKIT_ATTEMPT",
    help="Which start of this run it is, for the logs.  [default: the attempt of ckptkit run, or 0]",
)
@click.option("--proof", help="Write record ids, losses and state digests here.  [default: none]")
@click.option("--log-every", type=click.IntRange(1), default=10, help="Steps between progress lines.")
@click.option("--quiet", is_flag=True, help="No progress lines.")
@click.pass_context
def main(context: click.Context, **flags: Any) -> None:
    """Train a byte-level language model on text, and resume where the last run stopped.

    Exit codes: 0 trained; 1 failed, and a restart may help; 2 input that has to be mended first; 75 preempted by
    SIGTERM (with --coordinator): the same command continues from the newest save.
    """
    if context.invoked_subcommand is not None:
        return
    cluster = ClusterConfig()
    try:
        config = read_flags(flags)
        cluster = config.cluster
        with event_log(flags["events"], flags["attempt"], cluster.process) as events:
            train(config, events)
    except (InputError, CorpusError, TierUnusableError, TreeMismatchError, StoreError, GuardStopError) as error:
        click.echo(f"Error: {error}", err=True)
        leave(cluster, 1 if isinstance(error, TransientStoreError) else 2)  # what may pass is worth a restart
    except Preempted as preempted:
        last = preempted.last
        click.echo(str(preempted))
        leave(cluster, ExitCode.PREEMPTED, at_once=last is not None and bool(last.unfinished))
    except CheckpointError as error:
        click.echo(f"Error: {error}", err=True)
        leave(cluster, 1)
    except Exception:  # noqa: BLE001 - shown, not hidden: peers wait for a process that lingers after a failure
        traceback.print_exc()
        leave(cluster, 1)
    leave(cluster, 0)


@contextmanager
def event_log(directory: str | None, attempt: int, process: int) -> Iterator[EventLog]:
    """This process's log of this attempt, where `ckptkit.goodput.load_run` finds it; without a directory, no file."""
    check_writable(directory, "--events")
    path = Path(directory) / f"attempt-{attempt}-process-{process}.jsonl" if directory else None
    log = EventLog(path, process=process)
    log.emit(Kind.STARTED, attempt=attempt, pid=os.getpid())
    yield log
    log.emit(Kind.FINISHED)
    log.close()


def read_flags(flags: dict[str, Any]) -> RunConfig:
    """The run that the flags describe."""
    chosen = preset(flags["preset"], compute_dtype=flags["compute_dtype"])
    run_dir = Path(flags["run_dir"])
    return RunConfig(
        model=chosen.model,
        optimizer=OptimizerConfig(
            name=flags["optimizer"],
            learning_rate=chosen.learning_rate if flags["learning_rate"] is None else flags["learning_rate"],
            schedule_steps=flags["schedule_steps"] or flags["steps"],
            accumulate=flags["accumulate"],
            offload=flags["offload"] is not None,
        ),
        mesh=MeshConfig.parse(flags["mesh"]) if flags["mesh"] else None,
        data=DataConfig(
            data=flags["data"],
            corpus_dir=flags["corpus_dir"] or str(run_dir / "corpus"),
            global_batch=flags["global_batch"] or chosen.global_batch,
            seed=flags["seed"],
        ),
        checkpoint=CheckpointConfig(
            directory=flags["checkpoint"],
            manager=flags["manager"],
            **{name: flags[name] for name in CHECKPOINT_FLAGS},
        ),
        cluster=_cluster(flags),
        guard=GuardConfig(margin_steps=flags["guard_margin"], skip_ahead_steps=flags["guard_skip_ahead"])
        if flags["guard"]
        else None,
        loop=LoopConfig(
            steps=flags["steps"],
            compile_cache=flags["compile_cache"]
            or os.environ.get("JAX_COMPILATION_CACHE_DIR")
            or str(run_dir / "compile-cache"),
            proof=flags["proof"],
            events=flags["events"],
            log_every=None if flags["quiet"] else flags["log_every"],
        ),
    )


def _cluster(flags: dict[str, Any]) -> ClusterConfig:
    chosen: dict[str, Any] = {name: flags[name] for name in CLUSTER_FLAGS}
    if flags["cluster"] is None:
        return ClusterConfig(**chosen)
    if flags["coordinator"] is not None:
        raise InputError("--cluster detect finds the coordinator by itself: leave --coordinator out")
    return ClusterConfig(**{**chosen, **detect_rank(os.environ), "detect": True})


@main.command()
@click.option("--preset", "name", type=click.Choice(list(PRESETS)), default="gpt3-175b", help="The model.")
@click.option("--mesh", default="data=8,model=8", help="Axis sizes, like data=8,fsdp=4,model=8.")
@click.option("--microbatch-rows", type=click.IntRange(1), default=1, help="Rows per device at a time.")
@click.option("--offload", type=click.Choice(["optimizer"]), help="Moments in pinned host memory.  [default: none]")
@click.option("--device-memory-gb", type=float, default=80.0, help="Memory of one device, in 1e9 bytes.")
@click.option("--devices-per-host", type=click.IntRange(1), default=8, help="Devices of one host.")
@click.option("--keep", type=click.IntRange(1), default=3, help="Durable steps to keep.")
def plan(
    name: str,
    mesh: str,
    microbatch_rows: int,
    offload: str | None,
    device_memory_gb: float,
    devices_per_host: int,
    keep: int,
) -> None:
    """Compute memory, checkpoint bytes and sharding of a run; allocates nothing and needs no device."""
    try:
        made = make_plan(
            preset(name).model,
            MeshConfig.parse(mesh),
            microbatch_rows=microbatch_rows,
            device_bytes=int(device_memory_gb * 1e9),
            devices_per_host=devices_per_host,
            offload=offload is not None,
        )
    except InputError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    print_plan(made, keep=keep, devices_per_host=devices_per_host)


@main.command()
@click.argument("checkpoint")
@click.argument("target", metavar="DIRECTORY")
@click.option("--dtype", type=DTYPES, default="float32", help="Of the exported weights.")
def export(checkpoint: str, target: str, dtype: Dtype) -> None:
    """Write the newest durable step of CHECKPOINT (or the step in it: CHECKPOINT/100) as a Llama of Hugging Face's.

    DIRECTORY has the weights as safetensors, and config.json. It appears complete or not at all.
    """
    try:
        done = export_llama(checkpoint, target, dtype=dtype)
    except (InputError, CheckpointError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2 if isinstance(error, InputError) else 1)
    click.echo(f"{done.target}: {len(done.tensors)} tensors of {done.source} in {done.written_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
