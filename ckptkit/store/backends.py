"""The storage services: the properties of each, what it does in its own way, and the table of them. A new one is a
`Backend` here, and a row in `BACKENDS`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal

from ckptkit.errors import StoreError, one_line
from ckptkit.store.base import Properties
from ckptkit.store.local import DIRECTORY, directory_properties
from ckptkit.util.words import count_text

Needed = Literal["get", "list", "create", "delete"]
Ask = Callable[..., Any]  # the name of a method of fsspec's file system, and its arguments

BUCKET = Properties(
    file_system=False,
    round_trips=True,
    atomic_rename=False,
    generations=False,
    known_to_orbax=False,
    may_ignore_conditions=True,
)
# Of any other, gcsfs takes a part for a generation or leaves out the blank that it begins with, `rm` takes a pattern.
PLAIN_PATH = re.compile(r"/?[\w.-]+/(?! )[\w./=+,~ -]+")
_CALLER = re.compile(r"(Anonymous caller|[\w.+-]+@[\w.-]+\w) does not have")
_TEXT_MAX = 400  # of the service's message: TensorStore appends the whole answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The meaning of a service's errors, and the advice for a person whose request it refused."""

    permissions: Mapping[Needed, str]  # the service's name of what each operation needs
    grant: str  # all of them, in a sentence
    sign_in: str  # how a person signs in
    caller: Callable[[Any], str | None]  # of fsspec's file system: the caller, without a request; None: unknown
    named: re.Pattern[str]  # how its messages name a permission
    signed_out: frozenset[str] = frozenset()  # errors of its client where it finds no credentials
    unanswered: frozenset[str] = frozenset()  # "library Class": errors of its client for an answer that did not come
    extra: str | None = None  # of this package, which installs the service's client; None: it needs none of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One service: its behaviour, and the settings that TensorStore and fsspec need for it."""

    properties: Properties
    access: Access
    driver: str | None = None  # TensorStore's key-value store; None: TensorStore gets the URL, and decides
    service: Callable[[], Mapping[str, str]] = field(default=dict)  # more of its specification: an endpoint, a region
    create_copies: Mapping[str, str] = field(default_factory=dict)  # of `cp_file`: it fails where its target exists
    # Copies from path to path in one request, if the target has that generation (0: there is none; None: any).
    copy: Callable[[Ask, str, str, int | None], None] | None = None
    # Deletes paths, where fsspec's own `rm` cannot be relied on. Raises OSError for those that are left.
    delete_many: Callable[[Any, Ask, Sequence[str]], None] | None = None
    # Deletes these generations of paths. The limit of time is for each request.
    delete_generations: Callable[[Ask, Mapping[str, int], float], None] | None = None


# Google Cloud Storage, through gcsfs: copies and deletions that name generations.


def _gs_copy(ask: Ask, source: str, target: str, generation: int | None) -> None:
    names = [part for path in (source, target) for part in path.split("/", 1)]
    conditions = {} if generation is None else {"ifGenerationMatch": generation}
    answer: dict[str, Any] = {"done": False}
    token: dict[str, str] = {}
    while not answer["done"]:  # a large object between storage classes takes several requests
        headers = {"Content-Type": "application/json"}
        path = "b/{}/o/{}/rewriteTo/b/{}/o/{}"
        answer = ask("call", "POST", path, *names, headers=headers, json_out=True, **token, **conditions)
        token = {"rewriteToken": answer.get("rewriteToken", "")}


def _gs_delete_generations(ask: Ask, generations: Mapping[str, int], timeout_s: float) -> None:
    """Deleting a named generation is final, also in a bucket with object versions."""
    plain = [path for path in generations if PLAIN_PATH.fullmatch(path)]
    for path in sorted(generations.keys() - set(plain)):
        with suppress(FileNotFoundError):
            ask("call", "DELETE", "b/{}/o/{}", *path.split("/", 1), generation=generations[path])
    if plain:
        import fsspec  # loaded by now: only a bucket has generations

        by_generation: Any = fsspec.filesystem("gs", version_aware=True)
        with suppress(FileNotFoundError):
            by_generation.rm([f"{path}#{generations[path]}" for path in plain], timeout=timeout_s)


def _gs_caller(client: Any) -> str:
    credentials = client.credentials
    if credentials.method == "anon" or credentials.token == "anon":
        return "an anonymous caller: no credentials were found"
    signed = credentials.credentials
    for name in ("service_account_email", "signer_email", "account", "client_id"):
        found = getattr(signed, name, None)
        if isinstance(found, str) and found and found != "default":
            return found
    return f"the credentials of {credentials.method or credentials.token} (which contain no account)"


GS = Backend(
    properties=replace(BUCKET, generations=True, known_to_orbax=True, may_ignore_conditions=False),
    access=Access(
        permissions={each: f"storage.objects.{each}" for each in ("get", "list", "create", "delete")},
        grant="storage.objects.get, .list, .create and .delete",
        sign_in="gcloud auth application-default login, GOOGLE_APPLICATION_CREDENTIALS, or the host's service account",
        caller=_gs_caller,
        named=re.compile(r"\bstorage\.[a-z]+\.[a-zA-Z]+\b"),
        signed_out=frozenset({"GoogleAuthError", "DefaultCredentialsError", "RefreshError"}),
        unanswered=frozenset({"google TransportError"}),
        extra="gcs",
    ),
    driver="gcs",
    copy=_gs_copy,
    delete_generations=_gs_delete_generations,
)
# gcsfs's other name for it, which neither Orbax nor TensorStore knows.
GCS = replace(GS, properties=replace(GS.properties, known_to_orbax=False), driver=None)

# Amazon S3 and services that speak its protocol, through s3fs.

_S3_BATCH = 1000  # keys of one deletion
# S3's codes for single objects of a batch, in an answer that is a success as a whole.
_S3_TRANSIENT = {"InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
_S3_ABSENT = {"NoSuchKey", "NoSuchVersion"}
_AMAZON = ".amazonaws.com"


def _s3_delete_many(client: Any, ask: Ask, paths: Sequence[str]) -> None:
    """S3 lists the objects that it did not delete in a successful answer. s3fs's own `rm` ignores that list, so a step
    would lose its bytes and keep its marker."""
    names = [client.split_path(path)[:2] for path in paths]
    for start in range(0, len(names), _S3_BATCH):
        batch = names[start : start + _S3_BATCH]
        keys = {"Objects": [{"Key": key} for _, key in batch], "Quiet": True}
        answer = ask("call_s3", "delete_objects", Bucket=batch[0][0], Delete=keys)
        _s3_raise_left(answer.get("Errors", []))


def _s3_raise_left(errors: Sequence[Mapping[str, str]]) -> None:
    """Raises for objects that S3 has left where they are: a refusal, which no retry mends, before all else."""
    left = sorted((each for each in errors if each.get("Code") not in _S3_ABSENT), key=_s3_may_pass)
    if not left:
        return
    first = left[0]
    left_there = f"{count_text(len(left), 'object')} not deleted"
    said = f"{first.get('Key')}: {first.get('Code')}: {first.get('Message')} ({left_there})"
    refused = first.get("Code") == "AccessDenied"
    raise PermissionError(said) if refused else ConnectionError(said) if _s3_may_pass(first) else OSError(said)


def _s3_may_pass(error: Mapping[str, str]) -> bool:
    return error.get("Code") in _S3_TRANSIENT


@lru_cache(maxsize=1)
def _s3_service() -> Mapping[str, str]:
    """Endpoint and region of another service than Amazon's; for Amazon's TensorStore finds the bucket's own region.

    TensorStore does not read where other clients are led (`AWS_ENDPOINT_URL`, profiles): these are those that s3fs has
    found. Raises what s3fs raises without credentials; ImportError without s3fs.
    """
    import fsspec  # loaded by now: `RemoteStore` needs it

    client: Any = fsspec.filesystem("s3")
    client.connect()
    meta = client._s3.meta
    if _AMAZON in meta.endpoint_url:
        return {}
    return {"endpoint": meta.endpoint_url, "aws_region": meta.region_name or "us-east-1"}


def _s3_caller(client: Any) -> str:
    if client.anon:
        return "an anonymous caller"
    key = client.key or importlib.import_module("botocore.session").get_session().get_credentials().access_key
    return f"the access key {key[:4]}...{key[-2:]}"


S3 = Backend(
    properties=BUCKET,
    access=Access(
        permissions={
            "get": "s3:GetObject",
            "list": "s3:ListBucket",
            "create": "s3:PutObject",
            "delete": "s3:DeleteObject",
        },
        grant="s3:GetObject, s3:ListBucket, s3:PutObject and s3:DeleteObject",
        sign_in="aws configure, or the host's role",
        caller=_s3_caller,
        named=re.compile(r"\bs3:[A-Z][A-Za-z]+\b"),
        signed_out=frozenset({"NoCredentialsError"}),
        unanswered=frozenset({"botocore ConnectionError", "botocore HTTPClientError"}),
        extra="s3",
    ),
    driver="s3",
    service=_s3_service,
    create_copies={"IfNoneMatch": "*"},  # Amazon's conditional copies, which other services may not have
    delete_many=_s3_delete_many,
)
S3A = replace(S3, driver=None)  # s3fs's other name for it, which TensorStore does not know

# Any other file system of fsspec: nothing is asked of it that not every bucket does.
_OTHER: Final = Backend(properties=BUCKET, access=replace(GS.access, permissions={}, caller=lambda _: None, extra=None))

BACKENDS: Final = {
    "file": replace(_OTHER, properties=DIRECTORY, driver="file"),
    "gs": GS,
    "gcs": GCS,
    "s3": S3,
    "s3a": S3A,
    "memory": replace(_OTHER, properties=replace(BUCKET, round_trips=False)),
}
_AT_A_TIME = 16


def endpoint_of(client: Any) -> str | None:
    """The address that a file system of gcsfs or s3fs asks, without a request; None for others."""
    service = getattr(getattr(client, "_s3", None), "meta", None)
    return getattr(client, "_location", None) or getattr(service, "endpoint_url", None)


def backend_of(url: str) -> Backend:
    """The row of a bucket URL, or of a path: nothing is asked."""
    scheme, found, _ = url.partition("://")
    return BACKENDS.get(scheme, _OTHER) if found else BACKENDS["file"]


def properties_of(url: str) -> Properties:
    """The properties of the store of a URL or path (see `Properties`), if no store is open. Cost: nothing for a bucket;
    for a path a look at its mount (`mounts.file_system_of`)."""
    properties = backend_of(url).properties
    return directory_properties(url) if properties.file_system else properties


def side_by_side(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of `acts`, in their order.

    All of them have ended when this returns or raises, so what follows comes after each; among themselves they have no
    order. Raises what the first in the sequence has raised.
    """
    if len(acts) <= 1:
        return [act() for act in acts]
    with ThreadPoolExecutor(min(len(acts), _AT_A_TIME), thread_name_prefix="ckptkit-ask") as pool:
        begun = [pool.submit(act) for act in acts]
    return [each.result() for each in begun]


def all_of(root: str, acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of `acts` on one store. They run in parallel if each waits for an answer (`Properties.round_trips`),
    else one after the other."""
    return side_by_side(acts) if properties_of(root).round_trips else [act() for act in acts]


def is_refusal(text: str) -> bool:
    """Whether a library's error means that the service refused a permission (in TensorStore's and gcsfs's wording)."""
    return any(word in text for word in ("PERMISSION_DENIED", "UNAUTHENTICATED")) or text.startswith("Forbidden")


def refused(url: str, text: str, *, needs: Needed) -> StoreError:
    """The error for a refused request to `url`; `text` is the library's, `needs` the permission that the request
    needs.

    The permission and the caller that the service names take precedence over those known here. A reached quota is
    refused with the same status, and is reported as a quota. Costs no request.
    """
    scheme, _, path = url.partition("://")
    bucket = f"{scheme}://{path.partition('/')[0]}"
    text = " ".join(text.split())
    quoted = one_line(text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]} ...")
    where = one_line(url)
    if "quota" in text.lower():
        lines = [f"{where}: {bucket} takes no more, a quota is reached", "Raise it, or delete what is not needed."]
    else:
        access, caller = backend_of(url).access, _CALLER.search(text)
        named = access.named.search(text)
        missing = named[0] if named else access.permissions.get(needs, "a permission that it did not name")
        who = caller[1] if caller else identity(url)
        lines = [
            f"{where}: the bucket {bucket} refuses {who}; missing is {missing}",
            f"The credentials in use may not do this; grant {access.grant} on the bucket to them, or sign in with "
            f"others ({access.sign_in}).",
        ]
    error = StoreError("\n".join([*lines, f"The service answered: {quoted}"]), path=url)
    error.has_lines = True
    return error


def identity(url: str) -> str:
    """The identity of this process for a bucket, as far as its client knows without a request: an address, a file, or
    anonymous."""
    who = None
    import fsspec  # loaded by now: a bucket has refused something

    with suppress(Exception):  # a message is made: nothing here may hide what it is about
        who = backend_of(url).access.caller(fsspec.core.url_to_fs(url)[0])
    return who or "a caller that cannot be named here"
