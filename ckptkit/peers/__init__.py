"""Host to host: each process serves the committed slots of its host to the other processes of its job."""

from ckptkit.peers.link import PeerLink as PeerLink
from ckptkit.peers.link import open_link as open_link
