"""`ckptkit simulate`: every input checked, one table or one document out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ckptkit.cli import main
from tests.cli.conftest import Run

QUICK = ["simulate", "--runs", "5", "--days", "3", "--hosts", "2000"]


def test_json_has_all_inputs_and_parts_that_add_up(capsys: pytest.CaptureFixture[str]):
    """A reader of the document must be able to repeat the run, and to trust its sums."""
    assert main([*QUICK, "--json", "--stall", "durable=2.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"] == 2000
    assert [tier["name"] for tier in found["tiers"]] == ["ram", "peer", "durable"]
    assert found["tiers"][2]["stall_s"] == 2.5
    names = [each["policy"] for each in found["policies"]]
    assert names == ["oracle", "learned", "levels", "daly", "young", "continuous"]
    for each in found["policies"]:
        assert each["goodput"] + each["stall"] + each["lost"] + each["down"] == pytest.approx(1.0, abs=1e-9)


def test_the_same_seed_gives_the_same_answer(capsys: pytest.CaptureFixture[str]):
    """A projection that cannot be repeated is not an argument."""
    answers = []
    for seed in ("1", "1", "2"):
        assert main([*QUICK, "--policy", "levels", "--seed", seed, "--json"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("preset", ["llama3-405b", "tpu-pod", "spot"])
def test_presets_state_their_source_and_assumptions(capsys: pytest.CaptureFixture[str], preset: str):
    """A published job without its source would be a made-up number."""
    assert main(["simulate", "--preset", preset, "--runs", "3", "--days", "2", "--policy", "levels"]) == 0
    out = capsys.readouterr().out
    assert "Assumed:" in out
    assert "each host writes 8 GB/s to ram, 2 GB/s to ssd, 5 GB/s to peer, 0.5 GB/s to durable" in out
    assert "a save stalls for 0.1 of its copy from the devices at 10 GB/s" in out
    assert "oracle" in out


def test_projection_is_the_same_job_on_more_hosts(capsys: pytest.CaptureFixture[str]):
    """If it failed, the answer for 100,000 hosts would be one for another job."""
    words = ["simulate", "--days", "0.3", "--runs", "4", "--policy", "levels", "--json"]
    assert main([*words, "--hosts", "1000", "--project", "1000,100000"]) == 0
    found = json.loads(capsys.readouterr().out)
    same, large = found["projection"]
    levels = next(each for each in found["policies"] if each["policy"] == "levels")
    assert (same["goodput"], same["goodput_ci"]) == (levels["goodput"], levels["goodput_ci"])
    assert large["mtbf_s"] == pytest.approx(same["mtbf_s"] / 100)
    assert large["goodput"] + large["goodput_ci"] < same["goodput"]
    assert sum(large[name] for name in ("goodput", "stall", "lost", "down")) == pytest.approx(1.0)


def test_costs_are_what_is_no_new_work(capsys: pytest.CaptureFixture[str]) -> None:
    """A policy would look cheap or dear by an arithmetic that nobody sees."""
    words = [*QUICK, "--hosts", "100", "--days", "1", "--price", "2.5/h"]
    assert main([*words, "--json"]) == 0
    for each in json.loads(capsys.readouterr().out)["policies"]:
        assert each["badput_cost"] == pytest.approx((1 - each["goodput"]) * 2.5 * 100 * 24)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "cost of a run: 100 x 2.50 = 250.00 an hour; 1 day = 6,000.00" in out
    assert re.search(r"^oracle +\d+\.\d\d % +[\d,]+\.\d\d +0\.00$", out, re.M)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tiers", "ram"], "the last tier must survive every failure"),
        (["--project", "10,many"], "--project 10,many: give numbers of hosts"),
        (["--tiers", "ram,floppy"], "choose among ram, ssd, peer, durable, each once"),
        (["--tiers", "durable,ram"], "the last tier must survive every failure"),
        (["--stall", "ssd=1"], "ssd is not one of --tiers"),
        (["--stall", "ram"], "write TIER=SECONDS"),
        (["--stall", "ram=x"], "'x' is not a number; write TIER=SECONDS"),
        (["--stall", "ram=-1"], "give 0 or more seconds"),
        (["--fixed", "60"], "give 3 of more than 0 s"),
        (["--fixed", "60,x,60"], "write seconds, separated by commas"),
        (["--system", "20"], "belong to --trace"),
    ],
)
def test_wrong_flag_gives_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    """Exit code 2 and what to write instead; never a traceback, never a number from half an input."""
    assert main([*QUICK, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_trace_excludes_other_failure_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two sources of failures at once would make one of them a lie."""
    path = tmp_path / "spot.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 3600}, "data": [1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0]}))
    assert main([*QUICK, "--trace", str(path), "--mtbf-host-h", "3"]) == 2
    assert "leave --mtbf-host-h" in capsys.readouterr().err
    assert main([*QUICK, "--trace", str(path), "--policy", "levels"]) == 0
    assert "Failures as in spot.json, gaps times 1" in capsys.readouterr().out


def test_given_mtbf_is_the_one_that_is_shown(ckpt: Run) -> None:
    """`--mtbf-host-h 300` printed the 6,000 hours of the default above its result."""
    said = ckpt("simulate", "--mtbf-host-h", 300, "--hosts", 8, "--days", 1, "--runs", 2)
    assert "No preset: 300 h between failures of a host, as given." in said.out
    assert "6,000" not in said.out
