"""Names and paths: where everything lives, and which names are allowed. Nothing here touches a disk.

```
<tier root>/<job>-<place>-<root>/<host id>/<local rank>/lock, slot-<k>.bin, <manifests>, newest.json   fast tiers
<durable root>/<step>/<item>/_ckptkit/process-<i>.json                            our sidecars in Orbax's steps
<durable root>/<step>/<item>/_ckptkit/joined.jsonl.z                              the sidecars of all processes
<durable root>/<step>/<item>/_ckptkit/unchanged-<i>.json                          data files for the next step
<durable root>/<step>/ckptkit.sig                                                 the signature of a signed step
<durable root>/_ckptkit/root.json                                                 the random id of the root
<durable root>/_ckptkit/epochs/<epoch>.json, <epoch>.copy.json                    one record per run that saved
<durable root>/_ckptkit/leases/<id>.json, doomed.json                             what is read, what is to be deleted
<durable root>/_ckptkit/leases/pin-<step>.json, doomed-<id>.json                  the same, by people and commands
<durable root>/_ckptkit/certified/<epoch>-<step>-<number>-<run>                   the saves that a replay came to
<durable root>/<step>.orbax-checkpoint-tmp-e<epoch>-<attempt> a step that is written, on a disk
<durable root>/_ckptkit/intents/e<epoch>-<attempt>-<step>                         the same, in a bucket; or it goes
<durable root>/_ckptkit/leaving/                                                  steps in deletion, on a disk
```
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
from typing import Any

LOCK_NAME = "lock"
HANDLER_PREFIX = ".item-"  # of directories into which a handler writes an item, among the slots or in memory
NEWEST_NAME = "newest.json"  # next to the manifests: which of them was committed last
SIDECAR_DIR = "_ckptkit"
ROOT_KEY = f"{SIDECAR_DIR}/root.json"  # the id of a durable root
JOINED_SIDECARS = f"{SIDECAR_DIR}/joined.jsonl.z"  # in an item that several processes have written
SIDECAR_SIGN = "ckptkit_sidecars"  # in an item's `array_metadatas`: it has sidecars, and one without has lost them
SIGNATURE = "ckptkit.sig"  # in a signed step, or in a tree that was saved by itself
SAVE_ID_FIELD = "ckptkit_save_id"  # in the custom metadata of a step without arrays, which has no sidecar
EPOCHS_DIR = f"{SIDECAR_DIR}/epochs"
LEASES_DIR = f"{SIDECAR_DIR}/leases"
DOOMED_KEY = f"{SIDECAR_DIR}/doomed.json"
INTENTS_DIR = f"{SIDECAR_DIR}/intents"
LEAVING_DIR = f"{SIDECAR_DIR}/leaving"
CERTIFIED_DIR = f"{SIDECAR_DIR}/certified"

# The names of Orbax.
STEP_METADATA = "_CHECKPOINT_METADATA"  # in a step
TREE_METADATA = "_METADATA"  # in an array item, as the next three
SHARDINGS = "_sharding"
ARRAY_METADATAS = "array_metadatas"  # a directory with a file of each process
AGGREGATE = "checkpoint"  # of old versions: a file with the tree, and with the leaves that have no files of their own
ZARR_METADATA = (".zarray", "zarr.json")  # in the directory of one array, by zarr's version
OCDBT_MANIFEST = "manifest.ocdbt"  # names the root of an OCDBT database: what is not below it is not in the database
JSON_VALUE = "metadata"  # in an item of JSON
JSON_VALUE_V1 = "data.json"  # the same by Orbax's newer API
METRICS = "metrics"  # the item with the metrics of a step, and its file
COMMIT_MARK = "commit_success.txt"  # an object in what Orbax has committed, on a bucket
COPY_JOURNAL = "_ckptkit_copy.json"  # of ckptkit, next to the objects of a step that is copied: the progress
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of what it has not committed yet, on a disk

_MANIFEST = re.compile(r"step-([0-9]{12})-e([0-9]{8})-n([0-9]{8})\.json")
_SIDECAR = re.compile(r"process-([0-9]{1,6})\.json")
_EPOCH = re.compile(r"([0-9]{8})(?:\.copy)?\.json")
_CERTIFICATE = re.compile(r"([0-9]{8})-([0-9]{18})-([0-9]{12})(?:-([0-9a-f]{16}))?")
_DELETED = re.compile(r"deleted-([0-9]{8})-([0-9]{18})-([0-9]{12})(?:-([0-9a-f]{16}))?")
_PIN = re.compile(r"pin-([0-9]{18})\.json")
_DOOMED = re.compile(r"doomed-[0-9a-f]{32}\.json")
_OWNED = re.compile(r".+" + re.escape(TEMPORARY) + r"-e([0-9]{8})-[0-9a-f]{32}")
_INTENT = re.compile(r"e([0-9]{8})-[0-9a-f]{32}-(.+)")
_SLOT = re.compile(r"slot-([0-9]{1,3})\.bin")
_STEP = re.compile(r"(?!ocdbt\.process_)(?:.*_)?([0-9]{1,18})", re.DOTALL)  # not a process's part of an item
_JOB = re.compile(r".+-[0-9a-f]{12}(?:-[0-9a-f]{16})?")
_ROOT_ENDING = re.compile(r"-[0-9a-f]{16}$")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_PART_BYTES_MAX = 255  # of one part of a path: the most that file systems take


def is_key(key: str) -> bool:
    """Whether a key stays below its root, and means the same to every storage: no empty part, no `.` or `..`."""
    return "\0" not in key and {"", ".", ".."}.isdisjoint(key.split("/"))


def checked_key(key: str) -> str:
    """`key` if it stays below its root; raises ValueError for absolute keys and for `..`."""
    if not is_key(key):
        raise ValueError(f"{key!r} is not a key: relative, with no empty part, '.' or '..'")
    return key


def is_utf8(name: str) -> bool:
    """Whether a name is text: a name of a disk may be any bytes, which Python shows as surrogates."""
    try:
        return name.encode() is not None
    except UnicodeEncodeError:
        return False


def is_part(name: str) -> bool:
    """Whether a name can be one file or directory everywhere: text, within the limit of file systems, no `..`."""
    return is_key(name) and "/" not in name and is_utf8(name) and len(name.encode()) <= _PART_BYTES_MAX


def checked_file(name: object) -> str:
    """The path of a file below an item as a record names it. Raises ValueError for a path that cannot be written there,
    TypeError for a value that is not text."""
    if not isinstance(name, str):
        raise TypeError(f"{name!r:.100} is not the path of a file")
    if not all(map(is_part, checked_key(name).split("/"))):
        raise ValueError(f"{name!r:.100} has a part of more than {_PART_BYTES_MAX} bytes, or that is not UTF-8")
    return name


def array_prefix(leaf_name: str) -> str:
    """The prefix of the keys of a leaf's array, below its item. The array of a leaf without a name (a tree that is
    one array, or the key `""` at the top of a tree) is the item itself, as Orbax has it."""
    return f"{leaf_name}/" if leaf_name else ""


def job_name(durable_url: str, name: str = "job", *, root: str = "") -> str:
    """The directory of a job under a tier root: a readable name, a hash of where its durable steps live, and the id of
    that durable root. So a root that was removed and made again at the same place has other slots. Earlier formats
    have no id."""
    digest = hashlib.sha256(os.fsencode(durable_url.rstrip("/"))).hexdigest()[:12]
    return f"{checked_name(name, 'job name')}-{digest}" + (f"-{root}" if root else "")


def is_job(name: str) -> bool:
    """Whether the name of a directory could be that of a job under a tier root."""
    return _JOB.fullmatch(name) is not None


def job_of_url(directory: str, durable_url: str) -> bool:
    """Whether the name of a directory is that of a job that saves, or saved, to this place, to whichever root."""
    ending = job_name(durable_url).removeprefix("job")
    return directory.endswith(ending) or _ROOT_ENDING.sub("", directory).endswith(ending)


def checked_name(name: str, what: str) -> str:
    """`name` if it can be one component of a path; raises ValueError otherwise."""
    if not _SAFE_NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r} cannot be a directory name: use letters, digits, '.', '_' and '-', "
            "at most 128, beginning with a letter or digit"
        )
    return name


STEP_LIMIT = 10**12  # steps are below it: what a manifest's name has room for


def step_number(step: Any) -> Any:
    """A step as an int: NumPy's and JAX's scalars too, a training loop's counter often is one; whole floats.

    A value that is not a number is returned as it is: no step has it, and a save refuses it.
    """
    try:
        return operator.index(step)
    except TypeError:
        return int(step) if isinstance(step, float) and step.is_integer() else step


def saved_step_number(step: Any) -> int:
    """The same for a save. Raises TypeError for a value that is not a whole number, ValueError for one that no manifest
    can name."""
    number = step_number(step)
    if not isinstance(number, int):
        raise TypeError(f"step {step!r} is not a whole number")
    if number >= STEP_LIMIT:
        raise ValueError(f"step {number} cannot be saved: steps are below {STEP_LIMIT}")
    return number


def manifest_name(step: int, epoch: int, number: int) -> str:
    """The file name of a fast-tier manifest: one per save, so that a save never replaces another's manifest."""
    if not (0 <= step < STEP_LIMIT and 0 <= epoch < 10**8 and 0 <= number < 10**8):
        raise ValueError(
            f"step {step}, epoch {epoch}, save {number}: a manifest's name has room for 12, 8 and 8 digits"
        )
    return f"step-{step:012d}-e{epoch:08d}-n{number:08d}.json"


def save_of_manifest(name: str) -> tuple[int, int, int] | None:
    """`(step, epoch, number)` of a fast-tier manifest's file name; None for any other name."""
    match = _MANIFEST.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def slot_name(index: int) -> str:
    """The file name of slot `index`."""
    return f"slot-{index}.bin"


def slot_index(name: str) -> int | None:
    """The index of a slot's file name; None for any other name."""
    match = _SLOT.fullmatch(name)
    return int(match[1]) if match else None


def sidecar_name(process: int) -> str:
    """The file name of one process's sidecar in a durable item."""
    return f"process-{process}.json"


def process_of_sidecar(name: str) -> int | None:
    """The process of a sidecar's file name; None for any other name."""
    match = _SIDECAR.fullmatch(name)
    return int(match[1]) if match else None


def unchanged_name(process: int) -> str:
    """The file name, next to a sidecar, of the record of the data files that the next step may take over."""
    return f"unchanged-{process}.json"


def epoch_name(epoch: int) -> str:
    """The file name of an epoch record."""
    return f"{epoch:08d}.json"


def epoch_copy_name(epoch: int) -> str:
    """The file name of the second copy of an epoch record."""
    return f"{epoch:08d}.copy.json"


def epoch_of_name(name: str) -> int | None:
    """The epoch of the file name of a record, or of its copy; None for any other name."""
    match = _EPOCH.fullmatch(name)
    return int(match[1]) if match else None


def pin_name(step: int) -> str:
    """The file name of a pin, next to the leases: one per step."""
    if not 0 <= step < 10**18:
        raise ValueError(f"step {step}: a step has 18 digits at most")
    return f"pin-{step:018d}.json"


def step_of_pin(name: str) -> int | None:
    """The step of a pin's file name; None for any other name."""
    match = _PIN.fullmatch(name)
    return int(match[1]) if match else None


def certificate_name(epoch: int, step: int, number: int, run: str) -> str:
    """The file name of the certificate of a save."""
    return f"{epoch:08d}-{step:018d}-{number:012d}" + (f"-{run}" if run else "")


def save_of_certificate(name: str) -> tuple[int, int, int, str] | None:
    """Epoch, step, number and run of the save that a certificate names; None for any other name."""
    match = _CERTIFICATE.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3]), match[4] or "") if match else None


def deleted_name(epoch: int, step: int, number: int, run: str) -> str:
    """The name of the file, next to the epoch records, of a save that somebody has deleted."""
    return f"deleted-{certificate_name(epoch, step, number, run)}"


def save_of_deleted(name: str) -> tuple[int, int, int, str] | None:
    """Epoch, step, number and run of the save that such a file names; None for any other name."""
    match = _DELETED.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3]), match[4] or "") if match else None


def is_announcement(name: str) -> bool:
    """Whether a file next to the leases names steps that a command is about to delete."""
    return _DOOMED.fullmatch(name) is not None


def claim_name(step_name: str) -> str:
    """The file name, among the leases, of the claim of the process that copies a step into a bucket."""
    return f"copying-{hashlib.sha256(os.fsencode(step_name)).hexdigest()[:24]}.json"


def step_of_name(name: str, *, temporary: bool = True) -> int | None:
    """The step of a directory's name under any of Orbax's standard formats (`12`, `00012`, `step_12`), with `temporary`
    also of a name that Orbax has not committed yet; None for any other name, also for those inside of Orbax's items."""
    match = _STEP.fullmatch(name.partition(TEMPORARY)[0] if temporary else name)
    return int(match[1]) if match else None


def temporary_name(step_name: str, epoch: int, attempt: str) -> str:
    """The name of a step's directory while it is written on a disk: no other attempt has it, of this run or another.

    Orbax takes every name that contains `TEMPORARY` for a step that is not committed.
    """
    return f"{step_name}{TEMPORARY}-e{epoch:08d}-{attempt}"


def epoch_of_temporary(name: str) -> int | None:
    """The epoch of a temporary name of ours; None for any other name, Orbax's own temporary ones too."""
    match = _OWNED.fullmatch(name)
    return int(match[1]) if match else None


def intent_name(step_name: str, epoch: int, attempt: str) -> str:
    """The name of the object that becomes a step's mark in a bucket, while the step is written."""
    return f"e{epoch:08d}-{attempt}-{step_name}"


def going_name(step_name: str) -> str:
    """The name of an object next to the intents while a step in a bucket is deleted. It belongs to no run, so the next
    run removes the leftovers of an interrupted deletion."""
    return intent_name(step_name, 0, "0" * 32)


def intent_of_name(name: str) -> tuple[int, str] | None:
    """The epoch and the step's directory of an intent's name; None for any other name."""
    match = _INTENT.fullmatch(name)
    return (int(match[1]), match[2]) if match else None
