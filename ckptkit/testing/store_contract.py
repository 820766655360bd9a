"""The promises of every store, as tests: for ckptkit's own stores, for wrappers, and for those of other projects.

Needs pytest. Importing it runs nothing; subclass `StoreContract` in a test module (docs/TESTING.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.store.base import Stat, Store

BAD_KEYS = ["", "/", "/etc/passwd", "..", "../up", "a/../../up", "a//b", "a/", "./a", "a/./b", "a\0b"]


class StoreContract:
    """Give a fixture `store` that makes an empty store; every test gets a new one.

    An object is whole or absent, what `put` returned for is read by every later call, `create` creates, names are
    relative and stay below the root. Costs about twenty small tests.
    """

    @pytest.fixture
    def store(self) -> Store:
        """An empty store: to be overridden."""
        raise TypeError(f"{type(self).__name__} has no fixture `store` that makes the store to be tested")

    def test_what_was_listed_and_deleted_is_gone(self, store: Store) -> None:
        """A store that caches its listings would report a marker that has been deleted."""
        store.put("a/b", b"x")
        store.delete_unchanged(store.stat_all("a"))
        assert store.stat("a/b") is None

    def test_every_store_is_a_store(self, store: Store) -> None:
        """If it failed, a store could not be put in another's place."""
        assert isinstance(store, Store)
        assert store.url

    def test_properties_are_those_of_the_store(self, store: Store) -> None:
        """If it failed, a step would be committed by a rename that the store cannot do."""
        store.put("dir/key", b"1")
        found, path = store.stat("dir/key"), f"{store.url.removeprefix('file://')}/dir/key"
        assert found is not None
        assert os.path.isfile(path) == store.properties.file_system
        assert found.generation is None or store.properties.generations
        assert store.properties.file_system or not store.properties.atomic_rename

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096], ids=["empty", "one", "1 MiB"])
    def test_what_was_put_is_got(self, store: Store, data: bytes) -> None:
        """If it failed, nothing else matters."""
        store.put("a/b/c.json", data)
        assert store.get("a/b/c.json") == data
        assert store.stat("a/b/c.json") == Stat(len(data))

    def test_replace_replaces_and_create_does_not(self, store: Store) -> None:
        """If it failed, a manifest could be overwritten by another save's, or an epoch be claimed twice."""
        store.put("key", b"first", mode="create")
        with pytest.raises(FileExistsError, match="key"):
            store.put("key", b"second", mode="create")
        assert store.get("key") == b"first"
        store.put("key", b"third")
        assert store.get("key") == b"third"
        store.put("key", b"")
        assert store.get("key") == b""

    def test_a_copy_is_whole_and_its_source_has_to_be_there(self, store: Store) -> None:
        """If it failed, a step could be committed although its writer got the error that it is fenced off."""
        store.put("dir/source", b"first")
        store.copy("dir/source", "target", mode="create")
        assert (store.get("target"), store.get("dir/source")) == (b"first", b"first")
        store.put("dir/source", b"second")
        with pytest.raises(FileExistsError, match="target"):
            store.copy("dir/source", "target", mode="create")
        assert store.get("target") == b"first"
        store.copy("dir/source", "target")
        assert store.get("target") == b"second"
        store.delete("dir/source")
        for mode in ("create", "replace"):
            with pytest.raises(FileNotFoundError, match="source"):
                store.copy("dir/source", "other", mode=mode)
        assert store.stat("other") is None

    def test_an_absent_key_is_absent_everywhere(self, store: Store) -> None:
        """If it failed, `nothing saved yet` would look like a broken bucket."""
        store.put("dir/there", b"1")
        for key in ("absent", "dir/absent", "absent/deep/er"):
            with pytest.raises(FileNotFoundError, match=key):
                store.get(key)
            assert store.stat(key) is None
            assert store.list(key) == []
            store.delete(key)

    def test_a_whole_tree_is_listed_and_removed(self, store: Store) -> None:
        """If it failed, a step that was pruned would leave objects that no listing shows and the owner pays for."""
        keys = ["run/1/d/a", "run/1/d/b", "run/1/marker", "run/10/marker"]
        for key in keys:
            store.put(key, b"1")
        assert store.list_all("") == keys
        assert store.list_all("run/1") == keys[:3]
        assert store.list_all("run/2") == []
        store.delete_many([*keys[:3], "run/1/absent"])
        assert store.list_all("") == keys[3:]
        store.delete_many([])

    def test_a_name_is_no_pattern(self, store: Store) -> None:
        """If it failed, a deletion would delete objects that the caller did not name, or leave the named one."""
        keys = ["run/*", "run/1", "run/?", "run/[1-3]"]
        for key in keys:
            store.put(key, b"1")
        store.delete_many(["run/*", "run/absent?"])
        assert store.list_all("") == keys[1:]
        store.delete("run/?")
        store.delete_many(["run/[1-3]"])
        assert store.list_all("") == ["run/1"]

    def test_what_was_found_is_removed(self, store: Store) -> None:
        """If it failed, what an earlier attempt at a step has left would be joined by the next."""
        for key in ("5/d/a", "5/b, odd [1]?#2", "50/c"):
            store.put(key, b"12")
        found = store.stat_all("5")
        assert list(found) == ["5/b, odd [1]?#2", "5/d/a"]
        assert set(found.values()) == {Stat(2)}
        assert store.stat_all("6") == {}
        store.delete("5/d/a")
        store.delete_unchanged(found)
        store.delete_unchanged({})
        assert store.list_all("") == ["50/c"]

    def test_what_was_put_since_stays(self, store: Store) -> None:
        """If it failed, a run that was stopped in mid-deletion would delete what a later one has saved meanwhile."""
        for key in ("5/a", "5/b?x#1"):
            store.put(key, b"old")
        found = store.stat_all("5")
        if not store.properties.generations or any(stat.generation is None for stat in found.values()):
            pytest.skip("this store has no generations")
        for key in found:
            store.put(key, b"new")
        store.delete_unchanged(found)
        assert store.list_all("5") == list(found)
        store.delete_unchanged(store.stat_all("5"))
        assert store.list_all("5") == []

    def test_a_directory_is_no_object(self, store: Store) -> None:
        """If it failed, `stat` would report an object that `get` does not find."""
        store.put("dir/key", b"1")
        assert store.stat("dir") is None
        with pytest.raises(FileNotFoundError, match="dir"):
            store.get("dir")
        store.delete("dir")
        assert store.get("dir/key") == b"1"

    def test_below_an_object_there_is_nothing(self, store: Store) -> None:
        """If it failed, a question about a child of an object would be an error of the disk."""
        store.put("key", b"1")
        assert store.stat("key/below") is None
        assert store.list("key/below") == []
        assert store.list("key") == []
        with pytest.raises(FileNotFoundError, match="key/below"):
            store.get("key/below")
        store.delete("key/below")

    def test_lists_are_of_one_level_and_sorted(self, store: Store) -> None:
        """If it failed, processes would see steps in different orders, or deeper names among them."""
        for key in ("b", "a/2", "a/1/x", "a/1/y", "a/10", "ab/c", "Z"):
            store.put(key, b"")
        assert store.list("") == ["Z", "a/", "ab/", "b"]
        assert store.list("a") == ["1/", "10", "2"]
        assert store.list("a/1") == ["x", "y"]

    def test_a_deleted_object_is_gone(self, store: Store) -> None:
        """If it failed, a forgotten save would be restored."""
        store.put("a/one", b"1")
        store.put("a/two", b"2")
        store.delete("a/one")
        store.delete("a/one")
        assert store.stat("a/one") is None
        assert store.list("a") == ["two"]
        store.put("a/one", b"again", mode="create")
        assert store.get("a/one") == b"again"

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_keys_that_leave_the_root_are_refused(self, store: Store, key: str) -> None:
        """If it failed, a hostile manifest could read or delete a file outside its job's directory."""
        operations: list[Callable[[], Any]] = [
            lambda: store.put(key, b"x"),
            lambda: store.put(key, b"x", mode="create"),
            lambda: store.get(key),
            lambda: store.stat(key),
            lambda: store.delete(key),
            lambda: store.delete_many([key]),
        ]
        if key:
            operations += [lambda: store.list(key), lambda: store.list_all(key)]  # the root itself may be listed
        for operation in operations:
            with pytest.raises(ValueError, match=r"is not a key: relative, with no empty part, '\.' or '\.\.'"):
                operation()
