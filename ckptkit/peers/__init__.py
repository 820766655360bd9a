"""Host to host: each process serves the committed slots of its host to the other processes of its job."""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.peers.link import PeerLink as PeerLink
    from ckptkit.peers.link import open_link as open_link

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
