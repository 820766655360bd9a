"""Put, get, stat, list and delete on one root: local directories, memory, and buckets."""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.store.backends import all_of as all_of
    from ckptkit.store.backends import properties_of as properties_of
    from ckptkit.store.backends import side_by_side as side_by_side
    from ckptkit.store.base import Properties as Properties
    from ckptkit.store.base import PutMode as PutMode
    from ckptkit.store.base import Stat as Stat
    from ckptkit.store.base import Store as Store
    from ckptkit.store.base import put_new as put_new
    from ckptkit.store.local import LocalStore as LocalStore
    from ckptkit.store.memory import MemoryStore as MemoryStore
    from ckptkit.store.remote import RemoteStore as RemoteStore
    from ckptkit.store.retry import RetryStore as RetryStore
    from ckptkit.store.roots import open_store as open_store

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
