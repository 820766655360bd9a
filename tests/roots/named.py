"""Roots with a hostile name in one record, whose digest fits: whoever may write a record may seal it too."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np

from ckptkit.durable.lifecycle import epochs
from ckptkit.model.digests import digest_of
from tests.durable.test_leases import ended_process
from tests.model.hostile import sealed
from tests.roots.tree import ROOT, StrangeRoot, Tree

NAMED: Final[dict[str, StrangeRoot]] = {}
OURS, STOCK = "ckptkit composite", "orbax composite"
STEP = f"{ROOT}/3"

NAMES: Final = {
    "up": "../../../x",
    "absolute": "/tmp/ckptkit-not-there",
    "parent": "..",
    "slash": "a/b",
    "empty": "",
    "surrogate": "\ud800",
    "long": "y" * 300,
    "line": "n\nckptkit: 3 proven, 0 corrupt",
    "terminal": "\x1b[2Jx",
}
_Change = Callable[[Any, str], None]


def _renamed(record: dict[str, Any], name: str, old: str = "") -> None:
    """Gives the first entry, or `old`, another name."""
    record[name] = record.pop(old or next(iter(record)))


def _leaf(body: Any, name: str) -> None:
    body["arrays"]["state"][-1]["path"][-1] = name


def _text(body: Any, name: str) -> None:
    body["inline"]["state"]["value"][0][0][0] = name


def _key(record: Any, name: str) -> None:
    next(iter(record["tree_metadata"].values()))["key_metadata"][-1]["key"] = name


def _parameter(record: Any, name: str) -> None:
    record["array_metadatas"][0]["array_metadata"]["param_name"] = name


def _sharded(record: Any, name: str) -> None:
    _renamed(record, base64.urlsafe_b64encode(name.encode(errors="surrogatepass")).decode())


SIDECAR: Final = "state/_ckptkit/process-0.json"
_IN_STEP: Final[dict[str, tuple[str, str, _Change]]] = {
    "leaf-of-sidecar": (OURS, SIDECAR, _leaf),
    "item-of-sidecar": (OURS, SIDECAR, lambda body, name: _renamed(body["arrays"], name)),
    "small-item-of-sidecar": (OURS, SIDECAR, lambda body, name: _renamed(body["inline"], name, "data")),
    "text-of-sidecar": ("ckptkit text leaves", SIDECAR, _text),
    "file-of-sidecar": (
        "ckptkit custom handler",
        SIDECAR,
        lambda body, name: _renamed(body["inline"]["story"]["value"], name),
    ),
    "slot-of-sidecar": (OURS, SIDECAR, lambda body, name: body.update(slot=name)),
    "host-of-sidecar": (OURS, SIDECAR, lambda body, name: body["writer"].update(host=name)),
    "command-of-sidecar": (OURS, SIDECAR, lambda body, name: body["provenance"].update(command=name)),
    "leaf-of-metadata": (OURS, "state/_METADATA", _key),
    "leaf-of-stock-metadata": (STOCK, "state/_METADATA", _key),
    "item-of-step": (OURS, "_CHECKPOINT_METADATA", lambda found, name: _renamed(found["item_handlers"], name)),
    "item-of-stock-step": (STOCK, "_CHECKPOINT_METADATA", lambda found, name: _renamed(found["item_handlers"], name)),
    "leaf-of-sharding": (OURS, "state/_sharding", _sharded),
    "leaf-of-array-metadatas": (OURS, "state/array_metadatas/process_0", _parameter),
    "leaf-of-strings": ("ckptkit text leaves", "state/_strings.json", _renamed),
}


def _in_step(record: str, name: str, tree: Tree) -> None:
    kind, file, change = _IN_STEP[record]
    tree.run(kind)
    place = tree.home / STEP / file
    body = json.loads(place.read_bytes())
    body = body["manifest"] if file == SIDECAR else body
    change(body, NAMES[name])
    place.unlink()  # one of several links
    place.write_bytes(sealed(body) if file == SIDECAR else json.dumps(body).encode())
    tree.fact(STEP, state="forged")


def _root_id(tree: Tree, name: str) -> None:
    fields = {"id": name, "earlier": False}
    tree.put(f"{ROOT}/_ckptkit/root.json", json.dumps({**fields, "digest": digest_of(json.dumps(fields).encode())}))


def _run_id(tree: Tree, name: str) -> None:
    for path in (tree.root / "_ckptkit/epochs").iterdir():
        record = {**json.loads(path.read_bytes()), "run": name}
        del record["digest"]
        path.unlink()
        path.write_text(json.dumps({**record, "digest": epochs._digest(record)}))


def _pinned(tree: Tree, name: str) -> None:
    record = {"step": 3, "reason": name, "at_s": 1.0, "holder": name}
    tree.put(f"{ROOT}/_ckptkit/leases/pin-{3:018d}.json", json.dumps(record))
    tree.fact(STEP, held=True)


def _leased(tree: Tree, name: str) -> None:
    record = {"step": 3, "beat": 1, "lease_s": 3600.0, "holder": name}
    tree.put(f"{ROOT}/_ckptkit/leases/{'e' * 32}.json", json.dumps(record))
    tree.fact(STEP, held=True)


def _doomed(tree: Tree, name: str) -> None:
    record = {"steps": [3], "beat": 1, "lease_s": 60.0, "holder": name, "process": ended_process()}
    tree.put(f"{ROOT}/_ckptkit/leases/doomed-{'e' * 32}.json", json.dumps(record))


def _intended(tree: Tree, name: str) -> None:
    tree.put(f"{ROOT}/_ckptkit/intents/{'e' * 32}.json", json.dumps({"step": 3, "directory": name, "holder": name}))


_OF_ROOT: Final[dict[str, Callable[[Tree, str], None]]] = {
    "id-of-root": _root_id,
    "id-of-run": _run_id,
    "holder-of-pin": _pinned,
    "holder-of-lease": _leased,
    "holder-of-notice": _doomed,
    "directory-of-intent": _intended,
}


def _of_root(record: str, name: str, tree: Tree) -> None:
    tree.run(OURS)
    _OF_ROOT[record](tree, NAMES[name])
    tree.records_damaged = True


def _npz(tree: Tree, names: list[str]) -> str:
    arrays: dict[str, Any] = {name: np.arange(4.0) for name in names if name.isprintable() or "\n" in name}
    np.savez(tree.home / "model.npz", **arrays)
    return "model.npz"


def _safetensors(tree: Tree, names: list[str]) -> str:
    about = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * at, 16 * at + 16]} for at, name in enumerate(names)
    }
    header = json.dumps(about).encode()
    path = tree.home / "model.safetensors"
    path.write_bytes(
        len(header).to_bytes(8, "little") + header + np.arange(4.0 * len(names), dtype=np.float32).tobytes()
    )
    return "model.safetensors"


def _hugging_face(tree: Tree, names: list[str]) -> str:
    """An index of tensors whose files have hostile names."""
    tree.put("export/model.safetensors.index.json", json.dumps({"weight_map": {name: name for name in names}}))
    return "export"


_FORMATS: Final = {"npz": _npz, "safetensors": _safetensors, "hugging-face": _hugging_face}


def _in_file(form: str, tree: Tree) -> None:
    tree.run(OURS)
    tree.subject = _FORMATS[form](tree, list(NAMES.values()))
    tree.records_damaged = True


for _record, _name in product((*_IN_STEP, *_OF_ROOT), NAMES):
    _build = partial(_in_step if _record in _IN_STEP else _of_root, _record, _name)
    NAMED[f"{_record}-{_name}"] = StrangeRoot(
        name=f"{_record}-{_name}", line=f"{_record.replace('-', ' ')}: {ascii(NAMES[_name])[:40]}.", build=_build
    )
for _form in _FORMATS:
    NAMED[f"names-in-{_form}"] = StrangeRoot(
        name=f"names-in-{_form}",
        line=f"A {_form} file whose tensors have hostile names.",
        build=partial(_in_file, _form),
    )
