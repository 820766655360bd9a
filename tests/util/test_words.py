"""Commands in messages: what is copied from one into a shell is what was meant."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

from ckptkit.util.words import command_line, count_text, on_each_host, repair_command


def test_words_of_a_command_are_quoted_for_a_shell() -> None:
    """`ckptkit tiers clean /mnt/my run` would clean two other directories."""
    assert shlex.split(command_line("steps", "/mnt/my run", 5)) == ["ckptkit", "steps", "/mnt/my run", "5"]
    assert command_line("steps", "gs://bucket/run") == "ckptkit steps gs://bucket/run"
    said = repair_command("/a b", [Path("/ram"), "/it's"], ["h;0"])
    assert said == """ckptkit scrub '/a b' --tier /ram --tier '/it'"'"'s' --host-id 'h;0' --repair"""


def test_host_is_named_only_where_a_command_would_take_another() -> None:
    """The same command on the next host would look for slots of the first."""
    here = repair_command("/run", ["/ram"], [socket.gethostname()])
    assert on_each_host(here) == "on each host: `ckptkit scrub /run --tier /ram --repair`"
    pod = repair_command("/run", ["/ram"], ["pod-3"])
    assert on_each_host(pod) == (
        "on each host, with its own --host-id: `ckptkit scrub /run --tier /ram --host-id pod-3 --repair`"
    )


def test_counts_are_written_with_their_noun() -> None:
    """One message would have "1 steps", and the next one "1 step(s)"."""
    assert (count_text(1, "leaf", "leaves"), count_text(2, "leaf", "leaves")) == ("1 leaf", "2 leaves")
    assert (count_text(0, "step"), count_text(1, "step"), count_text(1200, "step")) == (
        "0 steps",
        "1 step",
        "1,200 steps",
    )
