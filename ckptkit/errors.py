"""The errors of ckptkit: each names what failed, where, and what to do next."""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast

_Call = TypeVar("_Call", bound=Callable[..., Any])
_log = logging.getLogger("ckptkit")
_SHOWN_MAX = 40  # differences in one message


def one_line(text: str) -> str:
    """`text` with every unprintable character escaped: names in a checkpoint may hold line ends and terminal
    commands."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _listed(head: str, lines: Iterable[str], then: str) -> str:
    """A message of several lines; none of them can begin another one."""
    return "\n".join(map(one_line, (head, *(f"  {line}" for line in lines), then)))


def _differences(found: Collection[str]) -> str:
    return "1 difference" if len(found) == 1 else f"{len(found)} differences"


class CheckpointError(Exception):
    """Base of every error that ckptkit raises; carries `.step`, `.tier` and `.path` where they are known."""

    has_lines = False  # whether its message has several lines, with the names in them escaped (`one_line`)

    def __init__(self, message: str, *, step: int | None = None, tier: str | None = None, path: str | None = None):
        super().__init__(message)
        self.step = step
        self.tier = tier
        self.path = path


class StepNotFoundError(CheckpointError, FileNotFoundError):
    """No tier holds the step that was asked for (also a `FileNotFoundError`, which Orbax's callers catch)."""


class ItemNotFoundError(CheckpointError, KeyError):
    """The step has no item of that name (also a `KeyError`, which Orbax raises)."""

    __str__ = Exception.__str__  # a KeyError shows the representation of its message


class NoRestorableStepError(CheckpointError):
    """Every candidate was rejected; `.candidates` lists each as `(tier, step, reason)`."""

    has_lines = True

    def __init__(self, candidates: Sequence[tuple[str, int, str]], *, path: str, repair: str | None):
        """`repair` names the command that repairs what another copy still has, and where to run it; None where nothing
        is damaged."""
        self.candidates = tuple(candidates)
        lines = [f"step {step} in {tier}: {reason}" for tier, step, reason in candidates]
        then = (
            "Nothing is damaged, and nothing was deleted."
            if repair is None
            else f"Nothing was deleted. Run {repair}. It repairs each save of which another copy is "
            "intact, and puts the others aside."
        )
        head = f"no restorable step under {path}; every candidate was rejected:"
        super().__init__(_listed(head, lines, then), path=path)


class CorruptCheckpointError(CheckpointError):
    """Bytes that do not match their digest, or metadata that cannot be what was written."""


class ProgramChangedError(CheckpointError):
    """A program that was loaded from a cache is not the one that its function gives now (`ckptkit.resume.compiled`)."""


class MemoryBudgetError(CheckpointError, ValueError):
    """A chunk that is read whole needs more memory than the caller allows. The message has the least budget."""


class BeyondLimitError(CheckpointError):
    """Nothing is damaged, and it is larger than what any command reads; no option raises this limit."""


class UnsuitedSaveError(CorruptCheckpointError):
    """The save is not damaged, and cannot give what was asked for in this form, or to this number of processes."""


def internal_error(error: BaseException) -> str:
    """The words for an error of ckptkit's own, which no checkpoint should be able to cause."""
    return f"internal error, please report it: {type(error).__name__}: {error}"


@contextmanager
def with_damage(problems: Collection[str]) -> Iterator[None]:
    """An error that leaves the block has a note for each damage that was found before it: `problems`, as they are
    then."""
    try:
        yield
    except Exception as error:
        for problem in problems:
            error.add_note(one_line(f"damaged: {problem}"))
        raise


class UntrustedStepError(CorruptCheckpointError):
    """The step is not signed, is signed by another key, or is not what was signed. Its bytes may be intact."""


class SigningKeyError(CheckpointError, ValueError):
    """A key cannot sign, or verify a signature: the message names the file, or the package that is not installed."""


class TreeMismatchError(CheckpointError, ValueError):
    """The tree asked for is not the tree on disk; `.differences` holds all differences, sorted."""

    has_lines = True

    def __init__(self, differences: Iterable[str], *, step: int, where: str):
        self.differences = tuple(sorted(differences))
        head = f"step {step} in {where} is not the tree that was asked for ({_differences(self.differences)}):"
        then = "Restore with the abstract state of the model that was saved, or change the model."
        super().__init__(
            _listed(head, self.differences, then),
            step=step,
            path=where,
        )


class SurgeryError(TreeMismatchError):
    """The rules of a surgery do not cover both sides; `.differences` holds everything that is wrong, sorted."""

    def __init__(self, differences: Iterable[str]):
        self.differences = tuple(sorted(differences))
        head = f"the rules do not give every leaf a source and a target ({_differences(self.differences)}):"
        then = (
            "Nothing was read. Add or change rules: Init for leaves that begin afresh, Skip for leaves that are left "
            "behind."
        )
        CheckpointError.__init__(self, _listed(head, self.differences, then))


class MergeError(TreeMismatchError):
    """Checkpoints do not go together; `.differences` holds everything that is in the way, sorted."""

    def __init__(self, differences: Iterable[str], *, advice: str):
        self.differences = tuple(sorted(differences))
        shown = self.differences[:_SHOWN_MAX]
        more = len(self.differences) - len(shown)
        head = f"the checkpoints do not go together ({_differences(self.differences)}):"
        lines = [*shown, *([f"and {more} more"] if more else [])]
        CheckpointError.__init__(self, _listed(head, lines, advice))


class SaveFailedError(CheckpointError):
    """A save failed in the background; the cause is attached as `__cause__`. `lost`: no tier holds the step."""

    lost: bool = True


class ReplicaMismatchError(CheckpointError):
    """Data replicas hold different bits; `.differences` names each leaf and box with who holds what."""

    has_lines = True

    def __init__(self, differences: Iterable[str], *, step: int):
        self.differences = tuple(differences)
        head = f"step {step}: data replicas differ ({len(self.differences)} boxes are named, at most 16):"
        then = (
            "No step was committed since. Restore the newest step, without the device or host that is named if one is."
        )
        super().__init__(_listed(head, self.differences, then), step=step)


class GuardStopError(CheckpointError):
    """A guard does not go back once more: too many alarms in a row, or no save is old enough. The message has all."""


class NotJoinedError(CheckpointError, RuntimeError):
    """A worker of `ckptkit run` has not joined its job. It exits with 2, which the launcher does not restart."""


class CoordinationError(CheckpointError, TimeoutError):
    """A barrier timed out; the message names the barrier and the missing processes."""


class StoreError(CheckpointError):
    """A store refused or failed an operation; not retried."""


class TransientStoreError(StoreError):
    """A store failed in a way that a retry may mend (the only error that is retried)."""


class NewerFormatError(StoreError):
    """A newer version of ckptkit wrote it, and this one cannot read it. Nothing is damaged."""


class OutsideRootError(StoreError):
    """A name leads out of a root by a link; nothing was read or written there."""


class PeerUnreachableError(TransientStoreError):
    """Another process of the job did not answer, or refused; the message has its number and address."""


class StoreFullError(StoreError, OSError):
    """Not enough room for the data to write; the message has the bytes needed and the bytes free."""


_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRANSIENT = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE)
_REMEDIES = {
    **dict.fromkeys(_FULL, "free some space or take another directory"),
    errno.EROFS: "mount it writable, or take another directory",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user access to it, or take another directory"),
}


def store_error(error: OSError, path: str | os.PathLike[str], *, then: str = "") -> StoreError:
    """The error of ckptkit for what a file system refused: the path, the cause, and what to do about it.

    `then`: more words, about what follows from it.
    """
    said = [f"{os.fspath(path)}: {error.strerror or error}", *filter(None, (_REMEDIES.get(error.errno or 0), then))]
    kind = StoreFullError if error.errno in _FULL else TransientStoreError if error.errno in _TRANSIENT else StoreError
    return kind("; ".join(said), path=os.fspath(path))


@contextmanager
def store_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the file system that leave the block are `store_error`s of `path`, once; those about absent and
    existing files stay what they are."""
    try:
        yield
    except (CheckpointError, FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise store_error(error, path) from error


def plainly(call: _Call) -> _Call:
    """For the calls that people make: a `CheckpointError` that leaves one ends in a traceback of a few lines, which has
    the frame of the caller, and no chain of errors that were translated. The chain is logged at DEBUG; with that level
    nothing is left out. An error with a cause that nobody translates keeps all: it may be a bug. So does one that is
    raised while another is handled, which is the caller's."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        handled = sys.exc_info()[1]
        try:
            return call(*args, **kwargs)
        except CheckpointError as error:
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s raises", call.__qualname__, exc_info=error)
                raise
            if handled is not None or not _shortened(error):
                raise
            raise error.with_traceback(None)  # noqa: B904  it is the same error, without the frames up to here

    return cast("_Call", called)


class ClosedAtEnd(ABC):
    """Closed at the end of a `with` block. Where the block ended by an error, what `close` raises is one of its notes.

    Not for SystemExit: nobody sees notes of that one, and its exit code would hide a save that is lost.
    """

    @abstractmethod
    def close(self) -> None:
        """Finishes what is in flight."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if not isinstance(error, Exception):
                raise
            error.add_note(f"and at the end of the block: {type(failure).__name__}: {failure}")


def _shortened(error: CheckpointError) -> bool:
    """Hides the causes of an error, which stay in `__context__`; of a failed save it shows one. False: they stay."""
    cause = error.__cause__
    if not isinstance(cause, CheckpointError | OSError | None) and not isinstance(error, StoreError):
        return False
    if isinstance(error, SaveFailedError) and cause is not None:
        if isinstance(cause, CheckpointError) and not _shortened(cause):
            return False
        cause.__traceback__ = None
        return True
    if cause is not None:
        error.__context__, error.__cause__ = cause, None  # which also keeps the context from being shown
    return True


class TierUnusableError(CheckpointError, ValueError):
    """A tier cannot be used as it was declared: not writable, without locks, or all its directories are in use."""


_HEARD = {
    error.__name__: error
    for error in (
        CorruptCheckpointError,
        ItemNotFoundError,
        SaveFailedError,
        PeerUnreachableError,
        StoreError,
        NewerFormatError,
        TransientStoreError,
        StoreFullError,
        TierUnusableError,
    )
}


Cause = Literal["damaged", "unsuited", "no item"]


class Reason(NamedTuple):
    """Why something was rejected: `text` is for people, and `causes` for decisions. No decision reads a text."""

    text: str
    causes: tuple[Cause, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Reason:
        """The reason of an error, with the name of its class."""
        cause = _cause_of(error)
        return cls(f"{type(error).__name__}: {error}", () if cause is None else (cause,))

    @classmethod
    def of_json(cls, values: Any) -> Reason | None:
        """The reason that JSON has made a list of, or None."""
        return None if values is None else cls(values[0], tuple(values[1]))

    @classmethod
    def of_processes(cls, reasons: Mapping[int, Reason], shown_max: int) -> Reason | None:
        """One for all processes that have a reason, with the texts of the first `shown_max`; None without any."""
        texts = [f"process {process}: {reason.text}" for process, reason in reasons.items()]
        more = [f"and {len(texts) - shown_max} more processes"] if len(texts) > shown_max else []
        causes: set[Cause] = {cause for reason in reasons.values() for cause in reason.causes}
        return cls("; ".join([*texts[:shown_max], *more]), tuple(sorted(causes))) if texts else None

    @property
    def is_damage(self) -> bool:
        """Whether bytes are damaged, or files are missing."""
        return "damaged" in self.causes

    @property
    def is_intact(self) -> bool:
        """Whether another job restores the save: a repair changes nothing."""
        return not self.is_damage and "unsuited" in self.causes


def _cause_of(error: BaseException) -> Cause | None:
    if isinstance(error, StepNotFoundError):
        return None
    causes: dict[type[Exception], Cause] = {
        UnsuitedSaveError: "unsuited",
        CorruptCheckpointError: "damaged",
        FileNotFoundError: "damaged",
        ItemNotFoundError: "no item",
    }
    return next((cause for kind, cause in causes.items() if isinstance(error, kind)), None)


def heard_from(process: int, name: str, message: str) -> CheckpointError:
    """The error that another process raised, of the same class where that can be, so that all end in the same way."""
    return _HEARD.get(name, CheckpointError)(f"process {process}: {message}")
