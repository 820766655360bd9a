"""Hosts on one machine: each with its own network, mounts, name and ramdisk, that share only TCP and the durable root.
If the machine does not allow that, they are directories, and this is reported."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NETWORK = "10.177.0"
_START_LIMIT_S = 20.0
_SETUP = """
set -e
mount --make-rprivate /
hostname host-{number}
printf '127.0.0.1 localhost\\n{addresses}' > {home}/hosts-{number}
mount --bind {home}/hosts-{number} /etc/hosts
mount -t tmpfs -o size=512m tmpfs /dev/shm
mkdir -p {home}/view/durable {home}/view/host {home}/view/ram
mount --bind {home}/durable {home}/view/durable
mount --bind {home}/host-{number} {home}/view/host
mount -t tmpfs -o size=512m tmpfs {home}/view/ram
for other in {home}/host-*; do mount -t tmpfs tmpfs $other; done
mount -t tmpfs tmpfs {home}/durable
ip link set lo up
touch {home}/view/host/ready
exec sleep 86400
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One of the hosts. `pid` None: only a directory. The paths are as the bench sees them."""

    number: int
    home: Path
    pid: int | None

    @property
    def directory(self) -> Path:
        """The files that outlive a wiped ramdisk: SSD tier, event logs, proofs."""
        return self.home / f"host-{self.number}"

    @property
    def ram(self) -> Path:
        """The ramdisk tier's root."""
        if self.pid is None:
            return self.directory / "ram"
        return Path(f"/proc/{self.pid}/root{self.home}/view/ram")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """All hosts of a job. `why_shared` is the reason for sharing a network and mounts; None if they do not."""

    home: Path
    hosts: tuple[Host, ...]
    why_shared: str | None

    @property
    def coordinator_host(self) -> str:
        """The address of host 0, as the others see it."""
        return f"{_NETWORK}.1" if self.why_shared is None else "127.0.0.1"

    def prefix(self, number: int) -> list[str]:
        """Words that run a command on a host: it finds `$DURABLE`, `$HOST_DIR` and `$RAM` in its environment."""
        if self.why_shared is None:
            view = self.home / "view"
            places = f"DURABLE={view}/durable HOST_DIR={view}/host RAM={view}/ram"
            enter = f"exec nsenter -t {self.hosts[number].pid} -m -n -u --"
        else:
            own = self.home / f"host-{number}"
            places, enter = f"DURABLE={self.home}/durable HOST_DIR={own} RAM={own}/ram", "exec"
        inner = f'cd {Path.cwd()} && exec "$@"'
        return ["sh", "-c", f"export {places}; {enter} sh -c '{inner}' sh \"$@\"", "sh"]

    @property
    def prefixes(self) -> list[list[str]]:
        """One for each host."""
        return [self.prefix(host.number) for host in self.hosts]


@contextmanager
def running_hosts(home: Path, count: int) -> Iterator[Hosts]:
    """`count` hosts for the time of the block. Their kernel resources end with their processes, however the bench
    ends."""
    for number in range(count):
        (home / f"host-{number}").mkdir()
    (home / "durable").mkdir()
    why = why_not_apart()
    if why is not None:
        for number in range(count):
            (home / f"host-{number}" / "ram").mkdir()
        hosts = tuple(Host(number=number, home=home, pid=None) for number in range(count))
        yield Hosts(home=home, hosts=hosts, why_shared=why)
        return
    holders: list[subprocess.Popen[bytes]] = []
    try:
        switch = _hold(["unshare", "-n", "sleep", "86400"], holders)
        for number in range(count):
            pid = _hold(["unshare", "-m", "-n", "-u", "sh", "-c", _setup(home, number, count)], holders)
            (home / f"pid-{number}").write_text(f"{pid}\n")
        _await([home / f"host-{number}" / "ready" for number in range(count)])
        pids = [holder.pid for holder in holders[1:]]
        _connect(switch, pids)
        hosts = tuple(Host(number=number, home=home, pid=pid) for number, pid in enumerate(pids))
        yield Hosts(home=home, hosts=hosts, why_shared=None)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def why_not_apart() -> str | None:
    """Why hosts cannot have networks and mounts of their own here; None where they can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    tried = subprocess.run(
        [
            "unshare",
            "-m",
            "-n",
            "-u",
            "sh",
            "-c",
            "mount -t tmpfs tmpfs /mnt && ip link add ckptkit0 type veth peer name ckptkit1",
        ],
        capture_output=True,
        text=True,
        timeout=_START_LIMIT_S,
    )
    return None if tried.returncode == 0 else f"not allowed here: {tried.stderr.strip()[:100]}"


def _hold(words: Sequence[str], holders: list[subprocess.Popen[bytes]]) -> int:
    # With its parent's death comes its own, and with that the end of its namespaces and all that is in them.
    holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words], stdout=sys.stderr)
    holders.append(holder)
    return holder.pid


def _setup(home: Path, number: int, count: int) -> str:
    addresses = "".join(f"{_NETWORK}.{other + 1} host-{other}\\n" for other in range(count))
    return _SETUP.format(home=home, number=number, addresses=addresses)


def _await(paths: Sequence[Path]) -> None:
    end_s = time.monotonic() + _START_LIMIT_S
    while missing := [path for path in paths if not path.exists()]:
        if time.monotonic() > end_s:
            raise RuntimeError(f"{missing[0].parent.name} did not come up within {_START_LIMIT_S:g} s")
        time.sleep(0.02)


def _connect(switch: int, pids: Sequence[int]) -> None:
    """One bridge in a network of its own, and a cable from it to each host."""
    _ip(switch, "link add br0 type bridge")
    _ip(switch, "link set br0 up")
    for number, pid in enumerate(pids):
        _ip(switch, f"link add h{number} type veth peer name eth0 netns {pid}")
        _ip(switch, f"link set h{number} master br0 up")
        _ip(pid, f"addr add {_NETWORK}.{number + 1}/24 dev eth0")
        _ip(pid, "link set eth0 up")


def _ip(pid: int, words: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *words.split()], check=True, timeout=_START_LIMIT_S)
