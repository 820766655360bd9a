"""The hosts of a `ckptkit run`: from its flags, or from the environment that Slurm, mpirun or Kubernetes give it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

SECRET_NAME = "CKPTKIT_SECRET"
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_PORTS = range(20000, 30000)  # below what Linux gives out by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """From `min` to `max` hosts; this agent has `rank`, and rank 0 listens at `rendezvous`."""

    min: int
    max: int
    rank: int
    rendezvous: tuple[str, int]
    secret: str


def hosts_of(
    environ: Mapping[str, str],
    nnodes: str | None,
    rank: int | None,
    rendezvous: str | None,
    secret_file: str | None,
) -> Hosts | None:
    """None where the job is of this host alone. Raises click's usage errors for what is missing or wrong."""
    in_slurm = "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ
    if nnodes is None and in_slurm and int(environ.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        nnodes = environ["SLURM_STEP_NUM_NODES"]
    if nnodes is None:
        if rendezvous is not None or rank is not None:
            raise click.UsageError("--rendezvous and --node-rank need --nnodes")
        return None
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", nnodes)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise click.BadParameter(f"{nnodes!r}; write 4, or 3:4 for at least 3 and at most 4", param_hint="--nnodes")
    if rank is None:
        rank = next((int(environ[name]) for name in _RANKS if name in environ), None)
    if rank is None:
        raise click.UsageError("give --node-rank: nothing in the environment tells which host this is")
    if rendezvous is None and in_slurm:
        job = int(environ.get("SLURM_JOB_ID", "0"))
        rendezvous = f"{first_node(environ['SLURM_STEP_NODELIST'])}:{_PORTS[job % len(_PORTS)]}"
    if rendezvous is None:
        raise click.UsageError("give --rendezvous HOST:PORT, where the host of --node-rank 0 listens")
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(f"{rendezvous!r}; write HOST:PORT", param_hint="--rendezvous")
    return Hosts(
        min=int(match[1]),
        max=int(match[2] or match[1]),
        rank=rank,
        rendezvous=(host.strip("[]"), int(port)),
        secret=_secret(environ, secret_file),
    )


def first_node(nodes: str) -> str:
    """The first name in a list of Slurm's: `gpu[003-007,9],x` is `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?([^,]*)", nodes)
    return nodes if match is None else match[1] + (match[2] or "")


def _secret(environ: Mapping[str, str], path: str | None) -> str:
    if path is not None:
        return Path(path).read_text().strip()
    if SECRET_NAME not in environ:
        raise click.UsageError(
            f"several hosts need a secret: the same {SECRET_NAME} in the environment of all agents, or --secret-file"
        )
    return environ[SECRET_NAME]
