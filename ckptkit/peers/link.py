"""The way between the processes of a job: a server and a client in each, and a secret that all of them know."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ckptkit.events import Kind
from ckptkit.job.coordination import Job, coordinator_address
from ckptkit.model.policies import PeerOptions
from ckptkit.model.tiers import PEER
from ckptkit.peers.client import PeerClient
from ckptkit.peers.server import Also, PeerServer
from ckptkit.peers.share_index import ShareIndex
from ckptkit.util.clock import Deadline

_NAME_S, _PAUSE_S = 20.0, 0.5  # for a name server that answers "again", and between tries
# Reserved for documents (RFC 5737, RFC 3849): only asked which interface would lead there.
_ANYWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The server of this process (None: it could not start), and its client for the others."""

    server: PeerServer | None
    client: PeerClient

    def close(self) -> None:
        """Ends both."""
        self.client.close()
        if self.server is not None:
            self.server.close()


def open_link(
    host_dirs: Mapping[str, Path],
    hosts: Sequence[str],
    options: PeerOptions,
    job: Job,
    *,
    also: Also | None = None,
) -> PeerLink:
    """Starts the server, and learns the addresses of the others; called by all processes together.

    A process that cannot serve emits an event, and the others do not use it. Cost: one exchange, in which process 0
    creates the secret; one thread, and two more during reads.
    """
    server, address = None, None
    try:
        host = options.host or job_interface(len(set(hosts)) > 1)
        server = PeerServer(ShareIndex(host_dirs), host, also=also)
        address = server.address
    except OSError as error:
        reason = f"this host cannot serve other hosts:  {error}; give its address with PeerOptions(host=...)"
        job.events.emit(Kind.DEGRADED, tier=PEER, reason=reason)

    def introduce(addresses: list[Any]) -> dict[str, Any]:
        return {"secret": secrets.token_hex(32), "addresses": addresses}

    try:
        said = job.coordinator.agree("peers", address, introduce)
    except BaseException:
        if server is not None:
            server.close()
        raise
    if server is not None:
        server.admit(said["secret"])
    client = PeerClient(said["addresses"], said["secret"], timeout_s=options.timeout_s)
    return PeerLink(server=server, client=client)


def job_interface(several_hosts: bool) -> str:
    """The address of the interface over which this host reaches the job's coordinator.

    Process 0 may know its own host by a loopback name; with other hosts in the job, it then takes the interface that
    leads out of the host.
    """
    host, _, port = (coordinator_address() or "127.0.0.1:9").rpartition(":")
    address = _local_address(host.strip("[]"), int(port))
    if several_hosts and _is_loopback(address) and not _is_loopback(host):
        for anywhere in _ANYWHERE:  # a host may have addresses of one kind only
            with suppress(OSError):
                return _local_address(*anywhere)
    return address


def _local_address(host: str, port: int) -> str:
    """From where this host would send to another; by the first of its addresses to which a way leads."""
    error = OSError(f"{host} has no address")
    for family, kind, protocol, _, target in _addresses(host, port):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # nothing is sent
                return probe.getsockname()[0]
        except OSError as caught:
            error = caught
    raise error


def _addresses(host: str, port: int) -> list[Any]:
    """The address of a name. When a thousand hosts start at once, the name server may ask some to retry."""
    deadline = Deadline(_NAME_S)
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or deadline.passed:
                raise
            time.sleep(_PAUSE_S)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
