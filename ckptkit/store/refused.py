"""A permission that a bucket refused, as one message: which bucket, who asked, what is missing, and what to do."""

from __future__ import annotations

import re
from contextlib import suppress

from ckptkit.errors import StoreError
from ckptkit.store.backends import Needed, backend_of

_CALLER = re.compile(r"(Anonymous caller|[\w.+-]+@[\w.-]+\w) does not have")
_TEXT_MAX = 400  # of the service's message: TensorStore appends the whole answer


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
    quoted = text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]} ..."
    if "quota" in text.lower():
        return StoreError(
            f"{url}: {bucket} takes no more, a quota is reached: {quoted}\nRaise it, or delete what is not needed.",
            path=url,
        )
    access, caller = backend_of(url).access, _CALLER.search(text)
    named = access.named.search(text)
    missing = named[0] if named else access.permissions.get(needs, "a permission that it did not name")
    who = caller[1] if caller else identity(url)
    return StoreError(
        f"{url}: the bucket {bucket} refuses {who}; missing is {missing}\n"
        f"The credentials in use may not do this; grant {access.grant} on the bucket to them, or sign in with others "
        f"({access.sign_in}).\nThe service answered: {quoted}",
        path=url,
    )


def identity(url: str) -> str:
    """The identity of this process for a bucket, as far as its client knows without a request: an address, a file, or
    anonymous."""
    who = None
    import fsspec  # loaded by now: a bucket has refused something

    with suppress(Exception):  # a message is made: nothing here may hide what it is about
        who = backend_of(url).access.caller(fsspec.core.url_to_fs(url)[0])
    return who or "a caller that cannot be named here"
