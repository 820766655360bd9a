"""Google Cloud Storage, through gcsfs: copies and deletions that name generations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckptkit.store.backend import BUCKET, PLAIN_PATH, Access, Ask, Backend


def _rewrite(ask: Ask, source: str, target: str, generation: int | None) -> None:
    names = [part for path in (source, target) for part in path.split("/", 1)]
    conditions = {} if generation is None else {"ifGenerationMatch": generation}
    answer: dict[str, Any] = {"done": False}
    token: dict[str, str] = {}
    while not answer["done"]:  # a large object between storage classes takes several requests
        headers = {"Content-Type": "application/json"}
        path = "b/{}/o/{}/rewriteTo/b/{}/o/{}"
        answer = ask("call", "POST", path, *names, headers=headers, json_out=True, **token, **conditions)
        token = {"rewriteToken": answer.get("rewriteToken", "")}


def _delete_generations(ask: Ask, generations: Mapping[str, int], timeout_s: float) -> None:
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


def _caller(client: Any) -> str:
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
    properties=replace(BUCKET, generations=True, known_to_orbax=True),
    access=Access(
        permissions={each: f"storage.objects.{each}" for each in ("get", "list", "create", "delete")},
        grant="storage.objects.get, .list, .create and .delete",
        sign_in="gcloud auth application-default login, GOOGLE_APPLICATION_CREDENTIALS, or the host's service account",
        caller=_caller,
        named=re.compile(r"\bstorage\.[a-z]+\.[a-zA-Z]+\b"),
        signed_out=frozenset({"GoogleAuthError", "DefaultCredentialsError", "RefreshError"}),
        unanswered=frozenset({"google TransportError"}),
    ),
    driver="gcs",
    copy=_rewrite,
    delete_generations=_delete_generations,
)
# gcsfs's other name for it, which neither Orbax nor TensorStore knows.
GCS = replace(GS, properties=replace(GS.properties, known_to_orbax=False), driver=None)
