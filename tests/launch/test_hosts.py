"""Agents of several hosts: they start and end together, a lost one is replaced, and a stranger cannot disturb them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptkit.launch import Hooks, Launcher, RestartPolicy, WarmStart, Workers
from ckptkit.launch.control import Connection, ControlError, Listener, connect
from ckptkit.launch.follower import Follower
from ckptkit.launch.roster import HostLimits, Roster
from ckptkit.launch.run_command import first_node, hosts_of
from ckptkit.util.whole_file import write_whole
from tests.launch.agents import SECRET, TOLD, Agents
from tests.launch.test_launcher import is_alive, wait_until


def test_worker_lost_on_one_host_restarts_all_hosts(agents: Agents) -> None:
    """Workers of the other hosts would wait in a collective for a lost one."""
    for rank in range(3):
        agents.start(rank)
    first = agents.wait_up(0, 6)
    os.kill(first[5], signal.SIGKILL)
    second = agents.wait_up(1, 6)
    assert not any(is_alive(pid) for pid in first.values())
    assert not set(first.values()) & set(second.values())
    assert "process 5 was lost (SIGKILL)" in agents.log(0)
    assert "restarting all 6 processes" in agents.log(0)
    agents.finish()
    assert agents.status()["state"] == "ended"
    assert not any(is_alive(pid) for pid in second.values())


@pytest.mark.long
def test_lost_agent_is_replaced_by_a_spare_in_its_place(agents: Agents) -> None:
    """A host that dies would stop the job until a person starts it again, or change which host has which share."""
    for rank in range(4):
        agents.start(rank)
        assert rank or wait_until(lambda: (agents.home / "log-0").exists())
    first = agents.wait_up(0, 6)
    spare = next(rank for rank in range(1, 4) if " up 0 " not in agents.log(rank))
    lost = next(rank for rank in range(1, 4) if " up 0 2 " in agents.log(rank))
    kept = next(rank for rank in range(1, 4) if " up 0 4 " in agents.log(rank))
    agents.agents[lost].kill()
    agents.wait_up(1, 6)
    assert not any(is_alive(pid) for pid in first.values()), "workers end with their agent"
    assert " up 1 2 6 0 " in agents.log(spare)
    assert " up 1 4 6 0 " in agents.log(kept)
    assert "is lost: the connection" in agents.log(0)
    agents.agents[lost].wait()
    agents.finish()


def test_job_goes_on_with_fewer_hosts_down_to_the_minimum(agents: Agents) -> None:
    """A job that could train on what is left would wait for a host that never comes."""
    for rank in range(3):
        agents.start(rank, "--rejoin-timeout", "0.5", nnodes="2:3")
    agents.wait_up(0, 6)
    agents.agents[2].kill()
    assert set(agents.wait_up(1, 4)) == {0, 1, 2, 3}
    agents.agents[2].wait()
    agents.finish()


@pytest.mark.long
def test_other_agents_wait_for_a_first_agent_that_was_killed(agents: Agents) -> None:
    """The loss of the first agent would leave workers that nobody restarts, or end agents that its successor needs."""
    for rank in range(3):
        agents.start(rank)
    first = agents.wait_up(0, 6)
    agents.agents[0].kill()
    agents.agents[0].wait()
    assert wait_until(lambda: not any(is_alive(pid) for pid in first.values()))
    (agents.home / "log-0").unlink()
    for rank in (1, 2):
        assert agents.agents[rank].poll() is None
    agents.start(0)
    is_up = wait_until(lambda: len([p for p in agents.up(0).values() if is_alive(p)]) == 6, 120)
    assert is_up, {rank: agents.log(rank) for rank in agents.agents}
    agents.finish()


def test_first_agent_waits_for_its_port() -> None:
    """An agent that waits for the first one may hold its port for a moment: the job would end with bad usage."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        freed = threading.Timer(0.5, holder.close)
        freed.start()
        listener = Listener("127.0.0.1", port, SECRET, 5.0, lambda connection, address: None)
        assert listener.port == port
        listener.close()
        freed.join()


@pytest.mark.long
def test_host_that_is_frozen_is_lost_after_silence(agents: Agents) -> None:
    """A host whose network or kernel hangs would stop the job for as long as TCP waits: minutes."""
    for rank in range(4):
        agents.start(rank)
    agents.wait_up(0, 6)
    frozen = next(rank for rank in range(1, 4) if " up 0 " in agents.log(rank))
    agents.agents[frozen].send_signal(signal.SIGSTOP)
    agents.wait_up(1, 6)
    assert "nothing was received for 5 s" in agents.log(0)
    agents.agents[frozen].kill()
    agents.agents[frozen].wait()
    agents.finish()


class Network:
    """Passes bytes to `port`, until it is cut: then nothing arrives, nothing closes, and nobody can connect."""

    def __init__(self, port: int):
        self._port = port
        self._cuts = 0
        self._links: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._accept()

    def cut(self) -> None:
        self._cuts += 1
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def mend(self) -> None:
        self._listener = socket.create_server(self.address)
        self._accept()

    def close(self) -> None:
        for link in [self._listener, *self._links]:
            link.close()

    def _accept(self) -> None:
        def accept(listener: socket.socket, cuts: int) -> None:
            with suppress(OSError):
                while True:
                    near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", self._port))
                    self._links += [near, far]
                    for source, target in ((near, far), (far, near)):
                        threading.Thread(target=self._pass, args=(source, target, cuts), daemon=True).start()

        threading.Thread(target=accept, args=(self._listener, self._cuts), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, cuts: int) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self._cuts == cuts:
                    target.sendall(data)
            if self._cuts == cuts:
                target.shutdown(socket.SHUT_WR)


def test_both_sides_of_a_partition_end_their_workers(tmp_path: Path) -> None:
    """Two halves of one job would go on, and both write its checkpoints."""
    (tmp_path / "told.py").write_text(TOLD)
    workers = Workers([sys.executable, str(tmp_path / "told.py"), str(tmp_path / "go")], processes=1, warm=WarmStart())
    said: list[str] = []
    up: dict[str, dict[str, int]] = {"0": {}, "1": {}}
    left: list[int] = []

    def on_output(process: int, line: str) -> None:
        del process
        _, attempt, number, *_, pid = line.split()
        up[attempt][number] = int(pid)
        if attempt == "1":
            left.extend(filter(is_alive, up["0"].values()))

    rosters: list[Roster] = []

    def make_roster(wake: Callable[[], None]) -> Roster:
        limits = HostLimits(min=2, max=2, join_s=60.0, rejoin_s=60.0, silence_s=3.0)
        rosters.append(Roster(("127.0.0.1", 0), SECRET, limits, 1, wake))
        return rosters[0]

    hooks = Hooks(on_output=on_output, say=said.append)
    policy = RestartPolicy(restarts=1, grace_s=0.1)
    launcher = Launcher(workers, policy=policy, make_roster=make_roster, hooks=hooks)
    network = Network(rosters[0].port)
    other = Follower(workers, rank=1, first=network.address, secret=SECRET, join_s=60.0, silence_s=3.0, hooks=hooks)

    def drive() -> None:
        if wait_until(lambda: len(up["0"]) == 2, 60):
            network.cut()
            lost = ("the first agent is lost: nothing was received", "was lost (host")
            wait_until(lambda: all(any(each in line for line in said) for each in lost), 60)
            network.mend()
            wait_until(lambda: len(up["1"]) == 2, 60)
        write_whole(tmp_path / "go", "0")

    threads = [threading.Thread(target=other.run), threading.Thread(target=drive)]
    for thread in threads:
        thread.start()
    assert launcher.run() == 0, said
    for thread in threads:
        thread.join()
    network.close()
    assert [len(up["0"]), len(up["1"])] == [2, 2], said
    assert left == []


def test_bad_input_of_one_host_ends_the_job_on_all(agents: Agents) -> None:
    """One host's usage error would be restarted by the others, or leave them waiting."""
    for rank in range(3):
        agents.start(rank)
    agents.wait_up(0, 6)
    agents.finish(2)


@pytest.mark.long
def test_slow_and_hanging_process_of_another_host_is_named(agents: Agents) -> None:
    """The first agent would name its own process, which waits for that one, and the wrong host would be replaced."""
    loop = "    heartbeat.beat(step)\n    heartbeat.staged(0.5 if e['CKPTKIT_PROCESS'] == '2' else 0.1, 0.0)\n"
    loop += "    culprit = e['CKPTKIT_PROCESS'] == '3' and e['CKPTKIT_ATTEMPT'] == '0'\n"
    loop += "    while e['CKPTKIT_ATTEMPT'] == '0' and time.monotonic() > end_s + (0 if culprit else 0.5):\n"
    loop += "        time.sleep(60)\n"
    code = TOLD.replace("    heartbeat.beat(step)\n", loop).replace(
        "step = 0\n", "step, end_s = 0, time.monotonic() + 14\n"
    )
    (agents.home / "hangs.py").write_text(code)
    for rank in range(2):
        agents.start(rank, "--hang-timeout", "5", nnodes="2", command="hangs.py")
    agents.wait_up(0, 4)
    agents.wait_up(1, 4)
    log = agents.log(0)
    assert "process 2 is slow: it takes 500 ms for its part of a save, the others 100 ms; look at its host" in log
    assert "process 3 has made no step for 5 s" in log
    assert "process 3 was lost (no step for 5 s" in log
    assert agents.status()["losses"][0]["process"] == 3
    agents.finish()


@pytest.mark.long
def test_wrong_secret_and_garbage_do_not_disturb_the_job(agents: Agents) -> None:
    """A port scanner, or another user's job, could end this one or take part in it."""
    agents.start(0)
    agents.start(1)

    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", agents.port), timeout=1).close()
        except OSError:
            return False
        return True

    assert wait_until(listens)
    agents.start(7, secret="another secret of 30 characters")
    assert agents.agents[7].wait(timeout=120) == 1
    assert "the first agent has another secret" in agents.log(7)
    del agents.agents[7]
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100_000,
        b"ckptkit run 1\n" + b"0" * 64,
        struct.pack("<I", 1 << 31),
    ):
        with socket.create_connection(("127.0.0.1", agents.port)) as stranger:
            stranger.sendall(garbage)
    silent = [socket.create_connection(("127.0.0.1", agents.port)) for _ in range(20)]
    agents.start(2)
    agents.wait_up(0, 6)
    for stranger in silent:
        stranger.close()
    agents.finish()


class Ends:
    """Both ends of one connection."""

    def __init__(self, silence_s: float = 5.0):
        self.heard: list[dict[str, Any]] = []
        self.lost: list[ControlError] = []
        accepted: list[Connection] = []
        self.listener = Listener("127.0.0.1", 0, SECRET, silence_s, lambda link, address: accepted.append(link))
        self.client = connect("127.0.0.1", self.listener.port, SECRET, silence_s)
        assert wait_until(lambda: bool(accepted))
        (self.server,) = accepted
        self.server.start(self.heard.append, self.lost.append)

    def close(self) -> None:
        self.listener.close()
        self.server.close()
        self.client.close()


def test_messages_that_were_changed_or_sent_again_end_the_connection() -> None:
    """Somebody in the network could repeat a stop, or make up a start."""
    for tamper in ("repeat", "change", "large"):
        ends = Ends()
        ends.client.send({"is": "here"})
        assert wait_until(lambda ends=ends: ends.heard == [{"is": "here"}])
        body = b'{"is": "stop"}'
        mac = ends.client._mac(b"c", 0 if tamper == "repeat" else 1, body)
        size = 1 << 30 if tamper == "large" else len(body)
        ends.client._link.sendall(struct.pack("<I", size) + mac + (body if tamper != "change" else body.upper()))
        assert wait_until(lambda ends=ends: bool(ends.lost)), tamper
        assert ends.heard == [{"is": "here"}], tamper
        ends.close()


def test_silent_connection_is_lost_and_a_pinged_one_is_not() -> None:
    """The others would wait for a host that lost its power, or drop one that has nothing to report."""
    ends = Ends(silence_s=3.0)
    ends.client.start(lambda message: None, lambda error: None)  # pings from now on
    time.sleep(6.0)
    assert not ends.lost
    ends.client._closed.set()
    assert wait_until(lambda: bool(ends.lost))
    assert ends.lost[0].silent
    ends.close()


def test_short_secret_is_refused() -> None:
    """A secret that can be guessed would let anybody run commands' lifecycles."""
    with pytest.raises(ValueError, match="the secret has 5 characters, expected 16 or more"):
        connect("127.0.0.1", 1, "guess", 1.0)


SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "gpu[003-006]", "SLURM_STEP_NUM_NODES": "4", "SLURM_JOB_ID": "77"}


def test_hosts_are_found_under_slurm_and_kubernetes() -> None:
    """A batch script would have to work out ranks and addresses by itself."""
    found = hosts_of({**SLURM, "CKPTKIT_SECRET": SECRET}, None, None, None, None)
    assert found is not None
    assert (found.min, found.max, found.rank, found.rendezvous) == (4, 4, 2, ("gpu003", 20077))
    pod = {"JOB_COMPLETION_INDEX": "3", "CKPTKIT_SECRET": SECRET}
    found = hosts_of(pod, "3:4", None, "train-0.train:8477", None)
    assert found is not None
    assert (found.min, found.max, found.rank, found.rendezvous) == (3, 4, 3, ("train-0.train", 8477))
    assert hosts_of({}, None, None, None, None) is None
    assert hosts_of({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, None, None, None, None) is None
    lists = {"a": "a", "a,b": "a", "gpu[003-006,9],x": "gpu003", "n1-[2,4]-x": "n1-2-x", "r[1-2]n[07,9].x,y": "r1n07.x"}
    assert {each: first_node(each) for each in lists} == lists


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nnodes", "4:3", "--node-rank", "0"], "write 4, or 3:4"),
        (["--nnodes", "2"], "give --node-rank"),
        (["--nnodes", "2", "--node-rank", "0"], "give --rendezvous HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "here"], "write HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "here:80"], "several hosts need a secret"),
        (["--node-rank", "0"], "need --nnodes"),
    ],
)
def test_wrong_flags_of_several_hosts_are_usage_errors(flags: list[str], message: str) -> None:
    """A typing error would start a job of one host, or wait for hosts that never come."""
    words = [sys.executable, "-m", "ckptkit.cli", "run", *flags, "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
