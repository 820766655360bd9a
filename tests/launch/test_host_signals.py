"""Signals to the agents of several hosts: what one agent or all of them get is for the whole job, once."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.launch.agents import TOLD, Agents
from tests.launch.test_launcher import is_alive, wait_until


def on_sigterm(*lines: str) -> str:
    """The worker of `TOLD`, with these lines as its handler of SIGTERM."""
    handler = "".join(f"    {line}\n" for line in lines)
    handler = f"import signal\ndef save(*_):\n{handler}signal.signal(signal.SIGTERM, save)\n"
    return TOLD.replace("words = [", f"{handler}words = [")


@pytest.mark.parametrize("told", [[2], [1, 2, 0]])
def test_preemption_told_to_one_agent_or_to_all_saves_on_all(agents: Agents, told: list[int]) -> None:
    """A scheduler that takes hosts back would kill the workers without the last save of the job."""
    (agents.home / "saves.py").write_text(on_sigterm("time.sleep(1)", "sys.exit(75)"))
    for rank in range(3):
        agents.start(rank, command="saves.py")
    agents.wait_up(0, 6)
    for rank in told:
        agents.agents[rank].send_signal(signal.SIGTERM)
    assert [agent.wait(timeout=120) for agent in agents.agents.values()] == [75, 75, 75], agents.log(0)


def test_preempted_job_with_a_host_that_did_not_save_is_not_called_saved(agents: Agents) -> None:
    """The batch script would queue the job again for a step that not all processes have saved."""
    (agents.home / "saves.py").write_text(on_sigterm("e['CKPTKIT_PROCESS'] == '3' or sys.exit(75)"))
    for rank in range(2):
        agents.start(rank, "--preempt-grace", "2", nnodes="2", command="saves.py")
    agents.wait_up(0, 4)
    agents.agents[0].send_signal(signal.SIGTERM)
    assert [agent.wait(timeout=120) for agent in agents.agents.values()] == [130, 130]
    assert "these processes ended before they had saved their last step: 3" in agents.log(0)


def test_ctrl_c_to_all_agents_is_one_and_a_second_signal_to_any_cuts_the_grace(agents: Agents) -> None:
    """srun passes Ctrl-C on to each agent: the workers would be killed at once; or nothing could end a long grace."""
    (agents.home / "slow.py").write_text(on_sigterm("print('told', words[1], flush=True)"))
    for rank in range(2):
        agents.start(rank, "--grace", "600", nnodes="2", command="slow.py")
    ups = agents.wait_up(0, 4)
    for agent in agents.agents.values():
        agent.send_signal(signal.SIGINT)
    assert wait_until(lambda: all(agents.log(rank).count(" told") == 2 for rank in range(2)), 60), agents.log(1)
    time.sleep(0.5)
    assert all(map(is_alive, ups.values())), "the second agent's signal was the same Ctrl-C"
    agents.agents[1].send_signal(signal.SIGINT)
    assert [agent.wait(timeout=60) for agent in agents.agents.values()] == [130, 130], agents.log(0)
    assert not any(map(is_alive, ups.values()))


def test_spare_that_is_told_to_end_leaves_and_the_job_goes_on(agents: Agents) -> None:
    """A scheduler that takes an idle host back would end a job that does not need it."""
    for rank in range(3):
        agents.start(rank, nnodes="2")
    agents.wait_up(0, 4)
    spare = next(rank for rank in (1, 2) if " up 0 " not in agents.log(rank))
    assert wait_until(lambda: catches(agents.agents[spare].pid, signal.SIGTERM))
    agents.agents[spare].send_signal(signal.SIGTERM)
    assert agents.agents.pop(spare).wait(timeout=60) == 130
    agents.finish()


def test_agent_below_nohup_outlives_its_terminal(agents: Agents) -> None:
    """A job that was started with nohup would end when its owner logs out."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the agents inherit it
    try:
        for rank in range(2):
            agents.start(rank, nnodes="2")
    finally:
        signal.signal(signal.SIGHUP, before)
    ups = agents.wait_up(0, 4)
    for agent in agents.agents.values():
        agent.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert all(map(is_alive, ups.values())), agents.log(0)
    agents.finish()


def test_user_signals_of_a_scheduler_reach_each_worker_once(agents: Agents) -> None:
    """`scancel --signal=USR1` would end all agents but the first, or the workers would count one signal twice."""
    signums = (signal.SIGUSR1, signal.SIGUSR2)
    handlers = "import signal\nfor each in (signal.SIGUSR1, signal.SIGUSR2):\n"
    handlers += (
        "    signal.signal(each, lambda signum, frame: print('got', signum, e['CKPTKIT_PROCESS'], flush=True))\n"
    )
    (agents.home / "told_twice.py").write_text(TOLD.replace("words = [", f"{handlers}words = ["))

    def got() -> list[str]:
        lines = [line for rank in agents.agents for line in agents.log(rank).splitlines()]
        return sorted(line.partition(" ")[2] for line in lines if " got " in line)

    agents.start(1, nnodes="2", command="told_twice.py")
    assert wait_until(lambda: catches(agents.agents[1].pid, signal.SIGUSR2))
    agents.agents[1].send_signal(signal.SIGUSR1)  # before it has found the first agent: for no worker
    agents.start(0, nnodes="2", command="told_twice.py")
    agents.wait_up(0, 4)
    for signum in signums:
        for agent in agents.agents.values():
            agent.send_signal(signum)
        expected = sorted(f"got {each:d} {process}" for each in signums if each <= signum for process in range(4))
        assert wait_until(lambda expected=expected: len(got()) >= len(expected)), got()
        assert got() == expected
    agents.finish()


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
