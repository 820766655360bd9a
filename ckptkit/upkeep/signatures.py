"""Signatures over the files of a directory, made and checked by OpenSSF's `model-signing` with an elliptic key.

The statement that is signed names each file with its SHA-256, as `model_signing sign key` writes it for the same
directory. So that package's own command checks a directory that ckptkit has signed. Nothing here does cryptography.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, final

from ckptkit.errors import SigningKeyError, UntrustedStepError
from ckptkit.util.words import command_line, first_of

_T = TypeVar("_T")
_SHOWN_MAX = 8  # files in one message
_KEY_BYTES_MAX = 64 << 10  # of a file with a key
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@final
class SigningKey:
    """An elliptic private key (P-256, P-384 or P-521) in a PEM file that is not encrypted.

    Raises `SigningKeyError` for a file that is not there or holds no such key, and without `model-signing`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        library = _library()
        self.path = os.fspath(path)
        config = library.signing.Config()
        made = _loaded(library, self.path, "private", lambda: config.use_elliptic_key_signer(private_key=self.path))
        self._library, self._config = library, made

    def sign(self, name: str, digests: Mapping[str, str], ignored: Sequence[str]) -> bytes:
        """The signature over files by their SHA-256 in hex. `ignored` are those that a check leaves out."""
        self._config.set_hashing_config(_Known(self._library, name, digests, ignored))
        with tempfile.TemporaryDirectory(prefix="ckptkit-sign-") as directory:
            file = Path(directory, "signature")
            self._config.sign(name, file)
            return file.read_bytes()


@final
class TrustedKey:
    """The public part of such a key, in a PEM file. Safe from several threads. Raises as `SigningKey`."""

    def __init__(self, path: str | os.PathLike[str]):
        library = _library()
        self.path = os.fspath(path)
        config = library.verifying.Config()
        made = _loaded(library, self.path, "public", lambda: config.use_elliptic_key_verifier(public_key=self.path))
        self._library, self._config = library, made
        self._lock = threading.Lock()

    def require(self, where: str, signature: bytes, found: Mapping[str, str]) -> None:
        """Raises `UntrustedStepError` unless `signature` is by this key, over exactly these files and digests."""
        signed = _claimed(where, signature)
        known = _Known(self._library, where, found, ())
        with tempfile.TemporaryDirectory(prefix="ckptkit-sign-") as directory, self._lock:
            file = Path(directory, "signature")
            file.write_bytes(signature)
            self._config.set_hashing_config(known)
            try:
                self._config.verify(Path(where), file)
            except (*_UNREADABLE, self._library.InvalidSignature) as error:
                raise self._untrusted(where, signed, found, error, proven=known.was_asked) from error

    def _untrusted(
        self, where: str, signed: Mapping[str, str], found: Mapping[str, str], error: Exception, *, proven: bool
    ) -> UntrustedStepError:
        if proven:
            why = f"is not what was signed: {_differences(signed, found)}"
        elif "Key mismatch" in str(error):
            why = f"is signed by another key than {self.path}"
        else:
            words = str(error) or "its content was changed after it was signed, or it was signed by another key"
            why = f"has a signature that does not verify with {self.path}: {words}"
        return UntrustedStepError(f"{where} {why}", path=where)


def _claimed(where: str, signature: bytes) -> dict[str, str]:
    """The SHA-256 of each file as a signature has it; the signature is not verified yet.

    Raises `UntrustedStepError` for what is not a signature, and for one over other digests.
    """
    try:
        statement = json.loads(base64.b64decode(json.loads(signature)["dsseEnvelope"]["payload"], validate=True))
        resources = statement["predicate"]["resources"]
        others = {str(each["algorithm"]) for each in resources} - {"sha256"}
        digests = {str(each["name"]): bytes.fromhex(each["digest"]).hex() for each in resources}
    except _UNREADABLE as error:
        why = f"{where} has a signature that cannot be read ({type(error).__name__}): it is truncated, or not one"
        raise UntrustedStepError(why, path=where) from error
    if others:
        sign = command_line("sign", where, "--key", "FILE")
        why = f"{where} is signed over digests by {', '.join(sorted(others))}; sign it with `{sign}`"
        raise UntrustedStepError(why, path=where)
    return digests


def _differences(signed: Mapping[str, str], found: Mapping[str, str]) -> str:
    changed = sorted(name for name in signed.keys() & found.keys() if signed[name] != found[name])
    named = {"changed": changed, "added": sorted(found.keys() - signed), "missing": sorted(signed.keys() - found)}
    return "; ".join(f"{word}: {first_of(names, _SHOWN_MAX)}" for word, names in named.items() if names)


@final
class _Known:
    """In place of the configuration by which `model-signing` hashes a directory: digests that are known."""

    def __init__(self, library: _Library, name: str, digests: Mapping[str, str], ignored: Sequence[str]):
        parameters: dict[str, Any] = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
        kind = library.manifest.SerializationType.from_args({**parameters, "ignore_paths": list(ignored)})
        digest: Callable[[str, bytes], Any] = library.manifest.hashing.Digest
        items = [
            library.manifest.FileManifestItem(path=PurePosixPath(key), digest=digest("sha256", bytes.fromhex(value)))
            for key, value in digests.items()
        ]
        self._manifest = library.manifest.Manifest(name.rstrip("/").rpartition("/")[2], items, kind)
        self.was_asked = False  # in a check: only after the signature itself was verified

    def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
        """The manifest that is signed, or compared with the signed one."""
        del model_path, files_to_hash
        self.was_asked = True
        return self._manifest

    def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
        """Does nothing: the digests do not include paths that are left out."""


@final
class _Library:
    """The modules of `model-signing`."""

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from model_signing import manifest, signing, verifying

        self.signing: Any = signing
        self.verifying: Any = verifying
        self.manifest: Any = manifest
        self.InvalidSignature: type[Exception] = InvalidSignature
        self.unusable: tuple[type[Exception], ...] = (*_UNREADABLE, UnsupportedAlgorithm)


def _library() -> _Library:
    """Imported when a key is used: 1 s. Raises `SigningKeyError` where it is not installed."""
    try:
        return _Library()
    except ImportError as error:
        raise SigningKeyError(
            f"signatures need the package model-signing ({error}): pip install 'ckptkit-jax[sign]'"
        ) from error


def _loaded(library: _Library, path: str, kind: str, load: Callable[[], _T]) -> _T:
    try:
        found = os.stat(path)
        if (
            not stat.S_ISREG(found.st_mode) or found.st_size > _KEY_BYTES_MAX
        ):  # a pipe or a device would be read without end
            raise ValueError("it is not a regular file of a few KB")
        return load()
    except FileNotFoundError as error:
        raise SigningKeyError(f"{path}: there is no such {kind} key; see docs/CLI.md for how to make one") from error
    except OSError as error:
        raise SigningKeyError(f"{path}: the {kind} key cannot be read: {error.strerror}") from error
    except library.unusable as error:
        raise SigningKeyError(
            f"{path} holds no {kind} key that can be used ({str(error).partition('.')[0]}): an elliptic key in PEM, "
            "not encrypted, of P-256, P-384 or P-521; see docs/CLI.md for how to make one"
        ) from error
