"""Signed steps: what was signed is accepted, and every other thing is refused with one sentence that tells why.

Fault model: somebody can write into the durable root, knows the format, and does not have the private key.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

if importlib.util.find_spec("model_signing") is None:  # looked for only: its import takes a second of each worker
    pytest.skip("ckptkit-jax[sign] is not installed", allow_module_level=True)

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

import ckptkit
from ckptkit import CorruptCheckpointError, direct
from ckptkit.cli import main
from ckptkit.durable.write_step import StepWriter
from ckptkit.errors import SigningKeyError, UntrustedStepError
from ckptkit.model.digests import digest_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer
from ckptkit.upkeep import copy, plan_copy, sign
from ckptkit.upkeep.signatures import TrustedKey
from ckptkit.upkeep.signing import check_signature
from tests.durable.test_split_leaf import make_tree
from tests.durable.test_write_step import Meeting
from tests.manager.test_handler_items import StorySave

ARGS: Any = ocp.args
PAGE = Path(__file__).parents[2] / "docs" / "CLI.md"
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


class Keys:
    """The files of two pairs of keys, and of what is not one."""

    def __init__(self, home: Path):
        self.private, self.public = self._pair(home, "own", ec.generate_private_key(ec.SECP256R1()))
        self.other_private, self.other_public = self._pair(home, "other", ec.generate_private_key(ec.SECP384R1()))
        self.rsa, self.rsa_public = self._pair(home, "rsa", rsa.generate_private_key(65537, 2048))
        odd = ec.generate_private_key(ec.SECP256K1())
        self.odd_curve, self.odd_curve_public = self._pair(home, "odd", odd)
        self.encrypted = str(home / "encrypted.pem")
        locked = odd.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
        Path(self.encrypted).write_bytes(locked)
        self.garbage = str(home / "garbage.pem")
        Path(self.garbage).write_bytes(b"\xff\x00 not a key")
        self.none = str(home / "none.pem")

    def _pair(self, home: Path, name: str, key: Any) -> tuple[str, str]:
        private, public = home / f"{name}.pem", home / f"{name}.pub"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return str(private), str(public)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


def state(value: float) -> dict[str, Any]:
    return {"w": jnp.full((64, 8), value), "n": 3}


def write_run(root: Path | str, *values: float, first: int = 1) -> None:
    with ckptkit.CheckpointManager(root) as manager:
        for step, value in enumerate(values, first):
            args = ARGS.Composite(state=ARGS.StandardSave(state(value)), note=ARGS.JsonSave({"value": value}))
            manager.save(step, args=args, custom_metadata={"value": value})
            manager.wait_until_finished()


@pytest.fixture(scope="module")
def signed_run(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    """Steps 1 to 3 with their number as value, 1 and 2 signed."""
    root = tmp_path_factory.mktemp("signed") / "run"
    write_run(root, 1, 2, 3)
    for step in (1, 2):
        sign(str(root / f"{step}"), keys.private)
    return root


@pytest.fixture
def run(signed_run: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    return Path(shutil.copytree(signed_run, tmp_path / "run"))


def restored(root: Path | str, step: int) -> float:
    with ckptkit.CheckpointManager(root, item_names=("state", "note")) as manager:
        found = manager.restore(step)
        assert found["note"] == {"value": float(found["state"]["w"][0, 0])}
        return float(found["state"]["w"][0, 0])


def check(path: Path | str, key: str) -> None:
    check_signature(str(path), TrustedKey(key))


def test_signed_step_is_accepted_and_an_unsigned_one_refused(
    signed_run: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing would be accepted with a key, or everything would."""
    check(signed_run / "2", keys.public)
    assert main(["verify", str(signed_run), "--step", "2", "--key", keys.public]) == 0
    with pytest.raises(UntrustedStepError, match=r"run/3 is not signed: it has no ckptkit\.sig"):
        check(signed_run / "3", keys.public)
    with pytest.raises(UntrustedStepError, match=r"run/2 is signed by another key than .*other\.pub"):
        check(signed_run / "2", keys.other_public)
    capsys.readouterr()
    assert main(["verify", str(signed_run), "--key", keys.public, "--json"]) == 11
    states = {each["step"]: each["state"] for each in json.loads(capsys.readouterr().out)["steps"]}
    assert states == {1: "proven", 2: "proven", 3: "corrupt"}


def test_fast_tiers_are_not_trusted(tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody signs what is in a ramdisk."""
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), slots=2)]
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
        manager.save(1, args=ARGS.StandardSave(state(1)))
        manager.wait_until_finished()
    assert main(["verify", str(tmp_path / "ram"), "--key", keys.public]) == 11
    assert "is in a fast tier, and only durable steps are signed" in capsys.readouterr().err


def test_tree_saved_by_itself_is_signed_and_may_be_renamed(tmp_path: Path, keys: Keys) -> None:
    """Weights that are handed on are such a directory, and get another name."""
    direct.save(tmp_path / "weights", {**state(5), "name": "text"})
    with pytest.raises(UntrustedStepError, match="weights is not signed"):
        check(tmp_path / "weights", keys.public)
    assert sign(str(tmp_path / "weights"), keys.private).step is None
    (tmp_path / "weights").rename(tmp_path / "final")
    assert main(["verify", str(tmp_path / "final"), "--key", keys.public]) == 0
    found = direct.load(tmp_path / "final")
    assert (float(found["w"][0, 0]), found["name"]) == (5.0, "text")
    with pytest.raises(UntrustedStepError, match="signed by another key"):
        check(tmp_path / "final", keys.other_public)
    flip(tmp_path / "final")
    with pytest.raises(UntrustedStepError, match=r"is not what was signed: changed: \S*d/"):
        check(tmp_path / "final", keys.public)


def flip(step: Path) -> None:
    """Changes one element of `w` in the data files."""
    for path in step.rglob("d/*"):
        data = path.read_bytes()
        value = next((data[at : at + 4] for at in range(len(data) - 256) if is_run(data, at)), None)
        if value is not None:
            at = data.index(value * 64)
            path.write_bytes(data[: at + 128] + bytes(4) + data[at + 132 :])
            return
    raise AssertionError(step)


def is_run(data: bytes, at: int) -> bool:
    return data[at : at + 4] != bytes(4) and data[at : at + 256] == data[at : at + 4] * 64


def write(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def reforged(record: bytes) -> bytes:
    """A sidecar as a writer would write it, with another digest of its first cell."""
    manifest = Manifest.from_bytes(record, path="x")
    text = record.decode().replace(manifest.arrays["state"][0].boxes[0].digests[0], "0" * 32)
    body = json.dumps(json.loads(text)["manifest"], sort_keys=True, separators=(",", ":")).encode()
    changed = Manifest.from_bytes(b'{"digest":"' + digest_of(body).encode() + b'","manifest":' + body + b"}", path="x")
    return changed.to_bytes()


def replaced_by_another_save(step: Path) -> None:
    """All of the step but the signature: digests of the save prove every byte."""
    other = step.parents[1] / "other"
    write_run(other, 9.0, first=2)
    shutil.copy(step / "ckptkit.sig", other / "2" / "ckptkit.sig")
    shutil.rmtree(step)
    (other / "2").rename(step)


def renamed_from(number: int) -> Callable[[Path], None]:
    def rename(step: Path) -> None:
        shutil.rmtree(step)
        shutil.copytree(step.parent / str(number), step)

    return rename


SIDECAR = "state/_ckptkit/process-0.json"
TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "whole step replaced": (replaced_by_another_save, r"is not what was signed: changed: .*_ckptkit/process-0\.json"),
    "another signed step": (renamed_from(1), r"2/state has sidecars of step 1, found in step 2"),
    "sidecar": (
        lambda step: write(step / SIDECAR, reforged),
        r"is not what was signed: changed: state/_ckptkit/process-0\.json",
    ),
    "sidecar missing": (
        lambda step: (step / SIDECAR).unlink(),
        r"is not what was signed: missing: state/_ckptkit/process-0\.json",
    ),
    "cell": (flip, r"is not what was signed: changed: state/d/"),
    "file added": (lambda step: (step / "state" / "x").write_text("x"), r"not what was signed: added: state/x"),
    "data file added": (lambda step: (step / "state/d/x").write_text("x"), r"not what was signed: added: state/d/x"),
    "item added": (
        lambda step: shutil.copytree(step / "note", step / "extra"),
        r"not what was signed: added: extra/metadata",
    ),
    "item missing": (lambda step: shutil.rmtree(step / "note"), r"not what was signed: missing: note/metadata"),
    "small item": (
        lambda step: write(step / "note/metadata", lambda data: data.replace(b"2", b"7")),
        r"not what was signed: changed: note/metadata",
    ),
    "step metadata": (
        lambda step: write(step / "_CHECKPOINT_METADATA", lambda data: data.replace(b'"value"', b'"eulav"')),
        r"not what was signed: changed: _CHECKPOINT_METADATA",
    ),
    "database": (
        lambda step: shutil.copy(step.parent / "3/state/manifest.ocdbt", step / "state/manifest.ocdbt"),
        r"not what was signed: changed: state/manifest\.ocdbt",
    ),
    "signature of another step": (
        lambda step: shutil.copy(step.parent / "1/ckptkit.sig", step / "ckptkit.sig"),
        r"is not what was signed: changed: ",
    ),
    "signature missing": (lambda step: (step / "ckptkit.sig").unlink(), r"is not signed"),
    "signature truncated": (
        lambda step: write(step / "ckptkit.sig", lambda data: data[:-100]),
        r"has a signature that cannot be read \(JSONDecodeError\): it is truncated, or not one",
    ),
    "signature empty": (lambda step: (step / "ckptkit.sig").write_text(""), r"has a signature that cannot be read"),
    "signature of garbage": (
        lambda step: (step / "ckptkit.sig").write_text("[" * 100_000),
        r"has a signature that cannot be read",
    ),
    "statement changed": (
        lambda step: resign(step, lambda body: body["dsseEnvelope"].update(payload=forged(body))),
        r"has a signature that does not verify with .*own\.pub: its content was changed after it was signed",
    ),
    "signature bytes changed": (
        lambda step: resign(step, lambda body: body["dsseEnvelope"]["signatures"][0].update(sig="MEUCIQ==")),
        r"has a signature that does not verify with .*own\.pub",
    ),
    "no signature in it": (
        lambda step: resign(step, lambda body: body["dsseEnvelope"].update(signatures=[])),
        r"has a signature that does not verify with .*own\.pub",
    ),
}


def resign(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads((step / "ckptkit.sig").read_text())
    change(body)
    (step / "ckptkit.sig").write_text(json.dumps(body))


def forged(body: dict[str, Any]) -> str:
    import base64

    text = base64.b64decode(body["dsseEnvelope"]["payload"]).decode()
    return base64.b64encode(text.replace("a", "b", 1).encode()).decode()


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_step_is_refused(name: str, run: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of somebody else would be used as the signed ones."""
    tamper, said = TAMPERED[name]
    tamper(run / "2")
    with pytest.raises(CorruptCheckpointError, match=said):
        check(run / "2", keys.public)
    assert main(["verify", str(run), "--step", "2", "--key", keys.public]) == 11
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


def test_step_replaced_by_another_save_is_corrupt_only_with_a_key(run: Path) -> None:
    """The test above would pass for a step that is damaged anyway."""
    replaced_by_another_save(run / "2")
    assert restored(run, 2) == 9.0
    assert main(["verify", str(run), "--step", "2"]) == 0


def test_cells_with_the_same_fast_digest_are_told_apart(
    run: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other bytes with the same xxh3 can be made; a signature over these digests would accept them."""
    flip(run / "2")
    sidecar = Manifest.from_bytes((run / "2" / SIDECAR).read_bytes(), path="x")
    (whole,) = {box.digests[0] for leaf in sidecar.arrays["state"] for box in leaf.boxes if leaf.name == "w"}
    real = digest_of

    def collides(data: Any) -> str:
        return whole if len(memoryview(data).cast("B")) == 64 * 8 * 4 else real(bytes(data))

    monkeypatch.setattr("ckptkit.model.cells.copy_digested", lambda *_, **__: whole)
    for module in ("ckptkit.model.cells", "ckptkit.verification.durable"):
        monkeypatch.setattr(f"{module}.digest_of", collides)
    with ckptkit.CheckpointManager(run) as manager:
        assert len(set(np.asarray(manager.restore(2)["state"]["w"]).ravel())) == 2, "the attack works"
    assert main(["verify", str(run), "--step", "2"]) == 0
    assert main(["verify", str(run), "--step", "2", "--key", keys.public]) == 11
    assert "is not what was signed: changed: state/d/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "there is no such {kind} key"),
        ("garbage", "holds no {kind} key that can be used"),
        ("rsa", "holds no {kind} key that can be used"),
        ("odd_curve", r"holds no {kind} key that can be used \(Unsupported key for curve 'secp256k1'\)"),
        ("encrypted", "holds no {kind} key that can be used"),
        ("swapped", "holds no {kind} key that can be used"),
    ],
)
def test_unusable_key_is_named_before_anything_is_read(
    name: str, said: str, signed_run: Path, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped path would look like a step that nobody signed."""
    private = keys.public if name == "swapped" else getattr(keys, name)
    public = keys.private if name == "swapped" else getattr(keys, f"{name}_public", private)
    with pytest.raises(SigningKeyError, match=said.format(kind="private")):
        sign(str(tmp_path / "no step"), private)
    with pytest.raises(SigningKeyError, match=said.format(kind="public")):
        TrustedKey(public)
    assert main(["sign", str(signed_run / "3"), "--key", private]) == 1
    assert main(["verify", str(signed_run), "--key", public]) == 1
    assert "internal error" not in capsys.readouterr().err


def test_missing_package_is_named(signed_run: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback of an import, or a step that is taken unproven because nothing can prove it."""
    monkeypatch.setitem(sys.modules, "model_signing", None)
    said = r"signatures need the package model-signing .*: pip install 'ckptkit-jax\[sign\]'"
    with pytest.raises(SigningKeyError, match=said):
        sign(str(signed_run / "3"), keys.private)
    with pytest.raises(SigningKeyError, match=said):
        TrustedKey(keys.public)
    assert main(["verify", str(signed_run), "--key", keys.public]) == 1
    assert restored(signed_run, 2) == 2.0


def test_the_package_itself_accepts_a_signed_step(run: Path, keys: Keys) -> None:
    """Somebody without ckptkit could not check a step."""
    from model_signing import verifying

    config = verifying.Config().use_elliptic_key_verifier(public_key=keys.public)
    config.verify(run / "2", run / "2" / "ckptkit.sig")
    flip(run / "2")
    config = verifying.Config().use_elliptic_key_verifier(public_key=keys.public)
    with pytest.raises(ValueError, match=r"Hash mismatch for .*state/d/"):
        config.verify(run / "2", run / "2" / "ckptkit.sig")


def test_stock_orbax_restores_a_signed_step(signed_run: Path) -> None:
    """Stock Orbax would take the signature for an item, or fail on it."""
    code = (
        "import sys, orbax.checkpoint as ocp\n"
        "with ocp.CheckpointManager(sys.argv[1], item_names=('state', 'note')) as manager:\n"
        "    found = manager.restore(2, args=ocp.args.Composite(state=ocp.args.StandardRestore()))\n"
        "    print('w is', float(found['state']['w'][0, 0]), sorted(manager.item_metadata(2)))\n"
    )
    call = [sys.executable, "-c", code, str(signed_run)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert "w is 2.0 ['note', 'state']" in done.stdout, done.stderr


def test_damaged_step_is_not_signed(run: Path, keys: Keys) -> None:
    """A signature would confirm the damage."""
    flip(run / "3")
    with pytest.raises(CorruptCheckpointError, match=r"is not intact and is not signed: .*leaf state:w"):
        sign(str(run / "3"), keys.private)
    assert not (run / "3" / "ckptkit.sig").exists()


def test_step_is_signed_again_by_another_key(run: Path, keys: Keys) -> None:
    """A key that was lost could never be replaced."""
    before = {path: path.read_bytes() for path in (run / "2").rglob("*") if path.is_file()}
    sign(str(run / "2"), keys.other_private)
    check(run / "2", keys.other_public)
    with pytest.raises(UntrustedStepError, match="signed by another key"):
        check(run / "2", keys.public)
    changed = [path.name for path, data in before.items() if path.read_bytes() != data]
    assert changed == ["ckptkit.sig"]


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        ("", ckptkit.StepNotFoundError, "neither a step nor a tree that was saved by itself"),
        ("2/state", ckptkit.StepNotFoundError, "an item of a step is signed with its step: .*/2"),
        ("none", ckptkit.StepNotFoundError, "there is nothing"),
        ("stock/1", ckptkit.CheckpointError, "has no digests of its cells"),
    ],
)
def test_what_is_no_step_is_not_signed(where: str, error: type[Exception], said: str, run: Path, keys: Keys) -> None:
    """The step number would be in nothing that is signed."""
    with ocp.CheckpointManager(run / "stock") as stock:
        stock.save(1, args=ARGS.StandardSave({"w": jnp.ones(4)}))
    with pytest.raises(error, match=said):
        sign(f"{run}/{where}", keys.private)


def test_step_without_digests_is_refused_although_its_files_are_signed(tmp_path: Path, keys: Keys) -> None:
    """Nothing signed has its number, so a renamed step would be accepted."""
    from model_signing import signing

    with ocp.CheckpointManager(tmp_path / "stock") as stock:
        stock.save(1, args=ARGS.StandardSave({"w": jnp.ones(4)}))
    step = tmp_path / "stock" / "1"
    (step / "default/commit_success.txt").unlink(missing_ok=True)  # no signature of ours covers it
    config = signing.Config().use_elliptic_key_signer(private_key=keys.private)
    config.sign(step, step / "ckptkit.sig")
    with pytest.raises(UntrustedStepError, match="has no digests of its cells"):
        check(step, keys.public)


@pytest.mark.parametrize("large", [False, True])
def test_files_of_a_handler_are_signed(
    large: bool, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restore would give back what somebody else wrote into one of them."""
    if large:
        monkeypatch.setattr("ckptkit.manager.save.INLINE_BYTES_MAX", 3)
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ARGS.Composite(state=ARGS.StandardSave(state(1)), story=StorySave("once upon a time")))
        manager.wait_until_finished()
    sign(str(tmp_path / "run" / "1"), keys.private)
    assert main(["verify", str(tmp_path / "run"), "--key", keys.public]) == 0
    (tmp_path / "run" / "1" / "story" / "notes" / "one.txt").write_text("once upon a tide")
    assert main(["verify", str(tmp_path / "run"), "--key", keys.public]) == 11
    assert "is not what was signed: changed: story/notes/one.txt" in capsys.readouterr().err


def test_step_of_two_processes_is_signed_whole(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what process 0 wrote would be covered."""
    value = np.arange(61 * 6, dtype=np.float32).reshape(61, 6)
    trees = [make_tree(value, (7, 6), process, monkeypatch) for process in (0, 1)]
    meeting = Meeting()

    def write_part(process: int) -> None:
        writer = StepWriter(str(tmp_path / "run"), meeting.of(process), DurableProfile())
        writer.write("5", SaveId(1, 5, 0), {"default": trees[process]}, {})

    threads = [threading.Thread(target=write_part, args=(process,)) for process in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    step = tmp_path / "run" / "5"
    sign(str(step), keys.private)
    check(step, keys.public)
    record = step / "default/_ckptkit/process-1.json"
    write(record, lambda data: data + b" ")
    with pytest.raises(UntrustedStepError, match=r"changed: default/_ckptkit/process-1\.json"):
        check(step, keys.public)
    record.unlink()
    with pytest.raises(UntrustedStepError, match=r"missing: default/_ckptkit/process-1\.json"):
        check(step, keys.public)


def test_copy_of_a_signed_step_stays_signed(run: Path, keys: Keys, tmp_path: Path, server: BucketServer) -> None:
    """A step would have to be signed again in each root that it is published to."""
    del server
    bucket, back = "gs://runs/run", tmp_path / "back"
    copy(plan_copy(str(run), bucket))
    assert main(["verify", f"{bucket}/2", "--key", keys.public]) == 0
    assert main(["verify", f"{bucket}/3", "--key", keys.public]) == 11
    copy(plan_copy(bucket, str(back)))
    check(back / "2", keys.public)
    sign(f"{bucket}/3", keys.private)
    check(f"{bucket}/3", keys.public)
    store = open_store(bucket)
    store.put(f"3/{SIDECAR}", reforged(store.get(f"3/{SIDECAR}")))
    with pytest.raises(UntrustedStepError, match=r"changed: state/_ckptkit/process-0\.json"):
        check(f"{bucket}/3", keys.public)


def test_step_of_another_run_loses_its_signature(run: Path, keys: Keys, tmp_path: Path) -> None:
    """Its sidecars get a new identity, and a signature that does not fit would look like an attack."""
    write_run(tmp_path / "own", 7, first=1)
    plan = plan_copy(str(run / "2"), str(tmp_path / "own"), adopted="newest")
    assert plan.notes[0] == f"{tmp_path / 'own' / '2'} is not signed: it has a new identity; sign it again"
    copy(plan)
    with pytest.raises(UntrustedStepError, match="is not signed"):
        check(tmp_path / "own" / "2", keys.public)
    sign(str(tmp_path / "own" / "2"), keys.private)
    check(tmp_path / "own" / "2", keys.public)


def test_commands_on_the_page_make_keys_and_sign(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that a user copies would not work."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    monkeypatch.chdir(run.parent)
    section = PAGE.read_text().partition("## `ckptkit sign`")[2].partition("\n## ")[0]
    commands = [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ ")]
    assert [each.split()[0] for each in commands] == ["openssl", "openssl", "ckptkit", "ckptkit"]
    for command in commands:
        words = command.replace("run/300", "run/3").replace("run --step 300", "run --step 3").split()
        done = main(words[1:]) if words[0] == "ckptkit" else subprocess.run(words, check=True, timeout=60).returncode
        assert done == 0, command


def test_plan_writes_nothing(run: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    """`--dry-run` would sign."""
    before = sorted(path for path in (run / "3").rglob("*"))
    assert main(["sign", str(run / "3"), "--key", keys.private, "--dry-run"]) == 0
    assert "would be signed" in capsys.readouterr().out
    assert sorted((run / "3").rglob("*")) == before
    assert main(["sign", str(run / "3"), "--key", keys.private, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["done"], said["cells"]) == (3, True, 2)
