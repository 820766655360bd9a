"""A permission that a bucket refused, as one message: which bucket, who asked, what is missing, and what to do."""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from typing import Any, Literal

import fsspec

from ckptkit.errors import StoreError

_PERMISSION = re.compile(r"\b(storage\.[a-z]+\.[a-zA-Z]+|s3:[A-Z][A-Za-z]+)\b")
_CALLER = re.compile(r"(Anonymous caller|[\w.+-]+@[\w.-]+\w) does not have")
_GOOGLE = "storage.objects.get, .list, .create and .delete"
_AMAZON = "s3:GetObject, s3:ListBucket, s3:PutObject and s3:DeleteObject"
Needed = Literal["get", "list", "create", "delete"]
_NEEDED: dict[str, dict[Needed | None, str]] = {
    "gs": {each: f"storage.objects.{each}" for each in ("get", "list", "create", "delete")},
    "s3": {"get": "s3:GetObject", "list": "s3:ListBucket", "create": "s3:PutObject", "delete": "s3:DeleteObject"},
}
_TEXT_MAX = 400  # of what the service said: TensorStore appends the whole answer


def is_refusal(text: str) -> bool:
    """Whether what a library raised says that the service refused a permission (TensorStore's and gcsfs's words)."""
    return any(word in text for word in ("PERMISSION_DENIED", "UNAUTHENTICATED")) or text.startswith("Forbidden")


def refused(url: str, said: str, *, needs: Needed | None = None) -> StoreError:
    """The error for a refused request to `url`; `said` is the library's text, `needs` what the request needed.

    What the service itself names, the permission and the caller, is taken before what is known here. A quota that is
    reached is refused with the same status, and is said as what it is. Costs no request.
    """
    scheme, _, path = url.partition("://")
    bucket = f"{scheme}://{path.partition('/')[0]}"
    quoted = said if len(said) <= _TEXT_MAX else f"{said[:_TEXT_MAX]} ..."
    if "quota" in said.lower():
        return StoreError(
            f"{url}: {bucket} takes no more, a quota is reached: {quoted}\nRaise it, or delete what is not needed.",
            path=url,
        )
    named, caller = _PERMISSION.search(said), _CALLER.search(said)
    missing = named[1] if named else _NEEDED.get(scheme, {}).get(needs, "a permission that it did not name")
    who = caller[1] if caller else identity(url)
    everything, sign_in = (
        (_AMAZON, "aws configure, or the host's role") if scheme == "s3" else (_GOOGLE, _google_sign_in())
    )
    return StoreError(
        f"{url}: the bucket {bucket} refuses {who}; missing is {missing}\n"
        f"The credentials in use may not do this; grant {everything} on the bucket to them, or sign in with others "
        f"({sign_in}).\nThe service said: {quoted}",
        path=url,
    )


def identity(url: str) -> str:
    """Who this process is to a bucket, as far as its client knows without asking: an address, a file, or nobody."""
    with suppress(Exception):  # a message is made: nothing here may hide what it is about
        scheme = url.partition("://")[0]
        client: Any = fsspec.core.url_to_fs(url)[0]
        if scheme == "gs":
            return _google_identity(client.credentials)
        if scheme == "s3":
            if client.anon:
                return "an anonymous caller"
            key = client.key or importlib.import_module("botocore.session").get_session().get_credentials().access_key
            return f"the access key {key[:4]}...{key[-2:]}"
    return "a caller that cannot be named here"


def _google_identity(credentials: Any) -> str:
    if credentials.method == "anon" or credentials.token == "anon":
        return "an anonymous caller: no credentials were found"
    signed = credentials.credentials
    for name in ("service_account_email", "signer_email", "account", "client_id"):
        found = getattr(signed, name, None)
        if isinstance(found, str) and found and found != "default":
            return found
    return f"the credentials of {credentials.method or credentials.token} (which name nobody)"


def _google_sign_in() -> str:
    return "gcloud auth application-default login, GOOGLE_APPLICATION_CREDENTIALS, or the host's service account"
