"""Where a process serves, and that it serves nowhere else."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ckptkit.events import Event, EventLog
from ckptkit.job.coordination import Job, LocalCoordinator
from ckptkit.model.policies import PeerOptions
from ckptkit.peers import link
from ckptkit.peers.link import job_interface, open_link
from ckptkit.slots.arena import Arena
from tests.peers.conftest import SAVE


def opened(arena: Arena, options: PeerOptions, events: EventLog) -> link.PeerLink:
    assert arena.directory is not None
    return open_link(
        {"ram": arena.directory.parent}, ["h"], options, Job(coordinator=LocalCoordinator(), events=events)
    )


def test_server_listens_on_its_interface_only(arena: Arena) -> None:
    """A host with a public address would offer the weights there."""
    made = opened(arena, PeerOptions(host="127.0.0.2"), EventLog())
    try:
        assert made.server is not None
        host, _, port = made.server.address.rpartition(":")
        assert host == "127.0.0.2"
        manifest, _ = made.client.manifest(0, SAVE, 0)
        assert manifest.save_id == SAVE
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=10)
    finally:
        made.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=10)


def test_name_with_several_addresses_is_served_on_one(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose name resolves to all its networks would offer the weights on each of them."""
    real = socket.getaddrinfo

    def several(host: str, *args: Any, **words: Any) -> Any:
        if host != "multihomed":
            return real(host, *args, **words)
        return [*real("127.0.0.2", *args, **words), *real("127.0.0.3", *args, **words)]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    made = opened(arena, PeerOptions(host="multihomed"), EventLog())
    try:
        assert made.server is not None
        assert made.server.address.startswith("127.0.0.2:")
        assert [each.getsockname()[0] for each in made.server._listener.sockets] == ["127.0.0.2"]
        assert made.client.manifest(0, SAVE, 0)[0].save_id == SAVE
    finally:
        made.close()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]"])
def test_an_address_that_means_every_interface_is_refused(host: str) -> None:
    """A host with a public address would offer the weights there, and no other host find it at `0.0.0.0`."""
    with pytest.raises(ValueError, match="every interface; give the address of one"):
        PeerOptions(host=host)


def test_address_of_another_host_degrades_the_tier(arena: Arena) -> None:
    """A wrong option would stop a job that can train without peers."""
    said: list[Event] = []
    events = EventLog()
    events.observe(said.append)
    made = opened(arena, PeerOptions(host="192.0.2.1"), events)
    try:
        assert made.server is None
        assert not made.client.serves(0)
        ((kind, tier, reason),) = [(event.kind, event.tier, event.fields["reason"]) for event in said]
        assert (kind, tier) == ("tier_degraded", "peer")
        assert "PeerOptions(host=...)" in reason
    finally:
        made.close()


@pytest.mark.parametrize(
    ("coordinator", "several", "expected"),
    [
        ("127.0.0.1:1234", False, "127.0.0.1"),
        ("127.0.0.1:1234", True, "127.0.0.1"),  # every process is where the coordinator is
        ("localhost:1234", True, None),
        (None, False, "127.0.0.1"),
    ],
)
def test_server_uses_the_interface_to_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, coordinator: str | None, several: bool, expected: str | None
) -> None:
    """Others could not reach it, or anybody could."""
    monkeypatch.setattr(link, "coordinator_address", lambda: coordinator)
    assert job_interface(several) in ([expected] if expected else ["127.0.0.1", "::1"])


def test_loopback_address_is_not_used_in_a_multi_host_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps a host's own name to 127.0.1.1, where no other host finds process 0."""
    monkeypatch.setattr(link, "coordinator_address", lambda: "head-node:1234")
    asked: list[str] = []

    def local(host: str, port: int) -> str:
        del port
        asked.append(host)
        return "127.0.1.1" if host == "head-node" else "10.0.0.5"

    monkeypatch.setattr(link, "_local_address", local)
    assert job_interface(True) == "10.0.0.5"
    assert job_interface(False) == "127.0.1.1"


def test_unreachable_address_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without IPv6 would serve nothing where the coordinator's name has an IPv6 address too."""
    real = socket.getaddrinfo

    def several(host: str, port: int, **words: Any) -> Any:
        if host != "head-node":
            return real(host, port, **words)
        # A datagram to all is refused, as an address of a family without a route is.
        return [*real("255.255.255.255", port, **words), *real("127.0.0.1", port, **words)]

    monkeypatch.setattr(link, "coordinator_address", lambda: "head-node:1234")
    monkeypatch.setattr(socket, "getaddrinfo", several)
    assert job_interface(False) == "127.0.0.1"


def test_ipv6_only_host_does_not_use_its_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would ask themselves for what process 0 holds."""
    monkeypatch.setattr(link, "coordinator_address", lambda: "head-node:1234")

    def local(host: str, port: int) -> str:
        del port
        if host == "head-node":
            return "::1"
        if ":" not in host:
            raise OSError("Network is unreachable")
        return "fd00::5"

    monkeypatch.setattr(link, "_local_address", local)
    assert job_interface(True) == "fd00::5"


def test_temporary_name_resolution_failure_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process would serve nothing, and take no copies, for the whole run because of a moment at its start."""
    real, asked = socket.getaddrinfo, list[str]()

    def busy(host: str, port: int, **words: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real("127.0.0.1", port, **words)

    monkeypatch.setattr(link, "_PAUSE_S", 0.001)
    monkeypatch.setattr(link, "coordinator_address", lambda: "head-node:1234")
    monkeypatch.setattr(socket, "getaddrinfo", busy)
    assert job_interface(False) == "127.0.0.1"
    assert asked == ["head-node"] * 3
    monkeypatch.setattr(link, "_NAME_S", 0.0)
    asked.clear()
    with pytest.raises(socket.gaierror, match="Temporary failure"):
        job_interface(False)
