"""The three real clients behind one face, so that one contract can be asked of each."""

import io
from collections.abc import Callable
from typing import ClassVar, Protocol

import gcsfs
import tensorstore as ts
from bucket_http import BUCKET
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage


class Client(Protocol):
    """The client that the contract needs. Names have no leading slash; None is "absent"."""

    by_generation: ClassVar[bool]

    def write(self, name: str, data: bytes) -> None: ...
    def create(self, name: str, data: bytes) -> bool: ...
    def replace(self, name: str, data: bytes, generation: object) -> bool: ...
    def generation(self, name: str) -> object: ...
    def read(self, name: str) -> bytes | None: ...
    def read_range(self, name: str, start: int, stop: int) -> bytes: ...
    def names(self, prefix: str) -> list[str]: ...
    def delete(self, name: str) -> None: ...


class TensorStoreClient:
    by_generation: ClassVar[bool] = True

    def __init__(self, _url: str) -> None:
        # Few and fast retries: else an emulator's refusal takes minutes.
        context = ts.Context({"gcs_request_retries": {"max_retries": 4, "initial_delay": "10ms", "max_delay": "100ms"}})
        self._store = ts.KvStore.open({"driver": "gcs", "bucket": BUCKET}, context=context).result()

    def write(self, name: str, data: bytes) -> None:
        assert self._store.write(name, data).result().generation

    def create(self, name: str, data: bytes) -> bool:
        absent = self._store.read("never/written").result().stamp.generation
        return self.replace(name, data, absent)

    def replace(self, name: str, data: bytes, generation: object) -> bool:
        assert isinstance(generation, bytes)
        # A condition that does not hold gives an empty generation, not an exception.
        return self._store.write(name, data, if_equal=generation).result().generation != b""

    def generation(self, name: str) -> object:
        return self._store.read(name).result().stamp.generation

    def read(self, name: str) -> bytes | None:
        found = self._store.read(name).result()
        return found.value if found.state == "value" else None

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return self._store.read(name, byte_range=slice(start, stop)).result().value

    def names(self, prefix: str) -> list[str]:
        keys = self._store.list(ts.KvStore.KeyRange(prefix, prefix + "\U0010ffff")).result()
        return sorted(key.decode() for key in keys)

    def delete(self, name: str) -> None:
        self._store.write(name, None).result()


class GcsfsClient:
    by_generation: ClassVar[bool] = False  # gcsfs can create exclusively, it has no replace of a given generation

    def __init__(self, url: str) -> None:
        self._fs = gcsfs.GCSFileSystem(
            token="anon", endpoint_url=url, skip_instance_cache=True, use_listings_cache=False, asynchronous=False
        )

    def write(self, name: str, data: bytes) -> None:
        with self._fs.open(f"{BUCKET}/{name}", "wb", block_size=1 << 20) as file:
            file.write(data)  # pyright: ignore[reportArgumentType] - fsspec types every mode as text

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(f"{BUCKET}/{name}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def replace(self, name: str, data: bytes, generation: object) -> bool:
        raise AssertionError("gcsfs has no such call; see by_generation")

    def generation(self, name: str) -> object:
        return self._fs.info(f"{BUCKET}/{name}")["generation"]

    def read(self, name: str) -> bytes | None:
        try:
            return _bytes(self._fs.cat_file(f"{BUCKET}/{name}"))
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return _bytes(self._fs.cat_file(f"{BUCKET}/{name}", start=start, end=stop))

    def names(self, prefix: str) -> list[str]:
        found = self._fs.find(f"{BUCKET}/", prefix=prefix)
        return sorted(path.removeprefix(f"{BUCKET}/") for path in found)

    def delete(self, name: str) -> None:
        self._fs.rm_file(f"{BUCKET}/{name}")


class GoogleClient:
    by_generation: ClassVar[bool] = True

    def __init__(self, url: str) -> None:
        self._client = storage.Client(
            project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": url}
        )
        self._bucket = self._client.bucket(BUCKET)

    def write(self, name: str, data: bytes) -> None:
        blob = self._bucket.blob(name, chunk_size=1 << 20)
        blob.upload_from_file(io.BytesIO(data), size=len(data))

    def create(self, name: str, data: bytes) -> bool:
        return self.replace(name, data, 0)

    def replace(self, name: str, data: bytes, generation: object) -> bool:
        assert isinstance(generation, int)
        try:
            self._bucket.blob(name).upload_from_string(data, if_generation_match=generation)
        except PreconditionFailed:
            return False
        return True

    def generation(self, name: str) -> object:
        blob = self._bucket.get_blob(name)
        assert blob is not None
        return blob.generation

    def read(self, name: str) -> bytes | None:
        try:
            return self._bucket.blob(name).download_as_bytes()
        except NotFound:
            return None

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return self._bucket.blob(name).download_as_bytes(start=start, end=stop - 1)

    def names(self, prefix: str) -> list[str]:
        return [blob.name for blob in self._client.list_blobs(self._bucket, prefix=prefix)]

    def delete(self, name: str) -> None:
        self._bucket.blob(name).delete()


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value


CLIENTS: dict[str, Callable[[str], Client]] = {
    "tensorstore": TensorStoreClient,
    "gcsfs": GcsfsClient,
    "google": GoogleClient,
}
