"""Exit codes and messages; hostile and damaged input: one sentence, never a traceback, a hang or a write."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptkit
from ckptkit.cli import inspect as inspect_module
from ckptkit.model.digests import digest_of
from tests.cases import long_except
from tests.cli.conftest import HOST, Ours, Run

SEED = 20

HOSTILE = (
    b"",
    b"\0" * 64,
    b"\xff\xfe{}",
    b"null",
    b"[]",
    b"{}",
    b"1e999",
    b'"text"',
    b"[" * 100_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"tree_metadata": null}',
    b'{"tree_metadata": {"x": {"key_metadata": [{"key": 1}], "value_metadata": {"value_type": "jax.Array"}}}}',
    b'{"tree_metadata": {"x": {"key_metadata": [{"key": "../../x"}], "value_metadata": {"value_type": "jax.Array"}}}}',
    b'{"Li4v": "{\\"sharding_type\\": \\"NamedSharding\\", \\"shape\\": 3}"}',
    b'{"commit_timestamp_nsecs": 1e400, "epoch": 1e400, "ancestry": [[1]]}',
    b'{"shape": [-1], "chunks": [0], "dtype": "<f4"}',
    b'{"shape": [9223372036854775807, 9223372036854775807], "chunks": [1, 1], "dtype": "<f4"}',
    b'{"shape": [1], "chunks": [1], "dtype": [["a", "<f4"]]}',
)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Usage: ckptkit"),
        (("nonsense",), 2, "No such command 'nonsense'"),
        (("inspect",), 2, "Missing argument 'PATH'"),
        (("explain", "{root}"), 2, "Missing option '--like'.\nExample: ckptkit explain other --like run/200"),
        (("tiers", "list"), 2, "Example: ckptkit tiers list /dev/shm/ckpt"),
        (("inspect", "{root}", "--depth", "0"), 2, "0 is not in the range"),
        (("inspect", "{root}", "--sort", "age"), 2, "'age' is not one of 'name', 'bytes'"),
        (("steps", "{root}", "--host-id", "../h1"), 2, "host id '../h1' cannot be a directory name"),
        (("steps", "{root}", "--tier", "gs://bucket/x"), 2, "'gs://bucket/x' is not a local directory"),
        *((("steps", "{root}", "--timeout", each), 2, f"{each} is not a number of seconds") for each in ("nan", "inf")),
        (("inspect", "{home}/none"), 10, "there is no such file or directory; check the path"),
        (("inspect", "{home}/empty"), 10, "it is empty"),
        (("inspect", "{home}/some.txt"), 10, "first bytes are those of no format known here"),
        (("inspect", "{ram}"), 10, "a fast tier's slots are <tier>/<job>/<host id>/<rank>"),
        (("inspect", "{root}", "--match", "zzz*"), 10, "no leaf matches 'zzz*'"),
        (("steps", "{home}/none"), 10, "there is no such root"),
        (("inspect", "{home}/loop"), 1, "look at its permissions and links"),
        (("steps", "{home}/loop"), 1, "{home}/loop: Too many levels of symbolic links"),
        (("inspect", "what://there/is"), 1, "Protocol not known: what"),
    ],
)
def test_exit_codes_and_messages(ckpt: Run, mine: Ours, arguments: tuple[str, ...], code: int, message: str) -> None:
    """A script could not tell a missing checkpoint from a broken one, nor a person what to do next."""
    (mine.home / "empty").mkdir()
    (mine.home / "some.txt").write_text("words")
    (mine.home / "loop").symlink_to("loop")
    names = {"home": mine.home, "root": mine.root, "ram": mine.ram}
    said = ckpt(*(argument.format(**names) for argument in arguments))
    assert (said.code, said.out) == (code, "")
    assert message.format(**names) in said.err


def test_version_is_printed(ckpt: Run) -> None:
    """A report of a defect could not name the version."""
    assert ckpt("--version").out == f"ckptkit {ckptkit.__version__}\n"


def test_an_empty_root_has_no_steps(ckpt: Run, tmp_path: Path) -> None:
    """A job that has not saved yet would look like a mistyped path."""
    assert ckpt("steps", tmp_path).out.startswith(f"{tmp_path}: 0 steps")


def test_interrupt_ends_without_traceback(ckpt: Run, ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C would end in a traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_module, "inspect_path", interrupted)
    said = ckpt("inspect", ours.root)
    assert (said.code, said.err) == (130, "\nckptkit: interrupted\n")  # on a line of its own, after the ^C


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Root may read everything; for the test it is nobody."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


def test_missing_permission_is_not_absence(ckpt: Run, mine: Ours, unprivileged: None) -> None:
    """An unreadable file would pass for absent, and a restart would begin anew."""
    if os.geteuid() != 65534:
        mine.home.chmod(0)
    try:
        for arguments in (("inspect", mine.root), ("steps", mine.root), ("inspect", mine.root / "4")):
            said = ckpt(*arguments)
            assert said.code == 1
            assert "Permission denied" in said.err
    finally:
        if os.geteuid() != 65534:
            mine.home.chmod(0o700)


def metadata_files(home: Path) -> list[Path]:
    """Every file of a checkpoint that is not array data."""
    return sorted(p for p in home.rglob("*") if p.is_file() and p.parent.name != "d" and p.suffix != ".bin")


def look(ckpt: Run, ours: Ours) -> set[int]:
    """Looks at everything in every way, and returns the exit codes."""
    codes = {
        ckpt("steps", ours.root, "--tier", ours.ram, "--host-id", HOST).code,
        ckpt("inspect", ours.root, "--json").code,
        ckpt("inspect", ours.root / "4").code,
        ckpt("inspect", ours.root / "4/state").code,
        ckpt("inspect", ours.slots).code,
    }
    assert codes <= {0, 10, 11}
    return codes


@pytest.mark.parametrize(
    "name",
    long_except(
        ["root/4/state/_ckptkit/process-0.json", "ram"],
        [
            "root/4/state/_ckptkit/process-0.json",
            "root/_ckptkit/epochs/00000002.json",
            "root/4/_CHECKPOINT_METADATA",
            "root/4/data/metadata",
            "ram",
        ],
    ),
)
def test_damaged_ckptkit_metadata_is_reported(ckpt: Run, mine: Ours, name: str) -> None:
    """A torn or hostile record would end in a traceback, or be shown as a good step."""
    path = mine.manifest(5) if name == "ram" else mine.home / name
    whole = path.read_bytes()
    random.seed(SEED)
    cuts = [whole[: random.randrange(1, len(whole) - 1)] for _ in range(6)]
    for data in (*cuts, *HOSTILE):
        path.write_bytes(data)
        codes = look(ckpt, mine)
        if data in cuts:
            assert 11 in codes, (SEED, name, len(data))
    for at in (random.randrange(len(whole)) for _ in range(12)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << random.randrange(8))]) + whole[at + 1 :])
        codes = look(ckpt, mine)
        if name == "ram" or "process-0" in name:  # these carry a digest of themselves
            assert 11 in codes, (SEED, name, at)


@pytest.mark.parametrize(
    "name",
    long_except(
        ["root/3/state/_METADATA", "root/3/state/manifest.ocdbt", "files/w/.zarray"],
        [
            "root/3/state/_METADATA",
            "root/3/state/_sharding",
            "root/3/state/array_metadatas/process_0",
            "root/3/state/manifest.ocdbt",
            "root/3/metrics/metrics",
            "files/_METADATA",
            "files/w/.zarray",
        ],
    ),
)
def test_damaged_orbax_metadata_is_reported(ckpt: Run, stock: Path, tmp_path: Path, name: str) -> None:
    """A torn or hostile file of stock Orbax would end in a traceback, or be shown as a good checkpoint."""
    home = tmp_path / "stock"
    shutil.copytree(stock, home)
    path = home / name
    if not path.exists():
        pytest.fail(f"{name} is not written by this Orbax: the test would test nothing")
    looked = home / name.partition("/")[0]
    whole = path.read_bytes()
    random.seed(SEED)
    cuts = [whole[: random.randrange(1, len(whole) - 1)] for _ in range(6)]
    for data in (*cuts, *HOSTILE):
        path.write_bytes(data)
        said = ckpt("inspect", looked)
        assert said.code in (0, 11)
        noted = f"{path} cannot be read" in said.out  # no restart with a template needs it
        assert said.code == 11 or noted or data not in cuts, (SEED, name, len(data))
        assert ckpt("steps", home / "root").code in (0, 11)
    path.unlink()
    assert ckpt("inspect", looked).code in (0, 11)


def test_hostile_manifest_with_a_valid_digest_is_refused(ckpt: Run, mine: Ours) -> None:
    """A digest proves only that its writer computed it: every field must still be checked."""
    path = mine.manifest(5)
    body = json.loads(path.read_text())["manifest"]
    changes = [
        ("save_id", {"epoch": "2", "step": None, "number": 0}),
        ("save_id", {"epoch": -2, "step": 5, "number": 0}),
        ("writer", {"process": 7, "count": 1, "host": HOST}),
        ("writer", {"process": 0, "count": 1, "host": [1]}),
        ("slot", "../../slot-0.bin"),
        ("slot", 3),
        ("inline", [1]),
        ("inline", {"data": 1}),
        ("arrays", {"state": [{**body["arrays"]["state"][0], "path": [1]}]}),
        ("arrays", {"state": [{**body["arrays"]["state"][0], "dtype": "object"}]}),
        ("arrays", {"state": [{**body["arrays"]["state"][0], "dtype": 7}]}),
        ("arrays", {"state": [{**body["arrays"]["state"][0], "extra": {"sharding": "[]"}}]}),
        ("shardings", [["[]", None]]),
        ("shardings", [["{}", 7]]),
        ("meshes", {"devices": 1}),
        ("arrays", {"state": [{**body["arrays"]["state"][0], "sharding": 10**9}]}),
        ("arrays", {"state": [{**body["arrays"]["state"][0], "shape": [10**30], "boxes": []}]}),
        ("arrays", {"state": [{**body["arrays"]["state"][0], "boxes": [[[0], [4], 1e999, []]]}]}),
    ]
    for field, value in changes:
        changed = {**body, field: value}
        text = json.dumps(changed, separators=(",", ":"), sort_keys=True)
        path.write_text(f'{{"digest":"{digest_of(text.encode())}","manifest":{text}}}')
        assert ckpt("inspect", path).code == 11, (field, value)
        assert ckpt("steps", mine.root, "--tier", mine.ram, "--host-id", HOST).code == 11, (field, value)


def test_damaged_ocdbt_node_is_corrupt(ckpt: Run, stock: Path, tmp_path: Path) -> None:
    """Damage that TensorStore gives no status name would pass for a failure of the network."""
    home = tmp_path / "stock"
    shutil.copytree(stock / "zarr3", home)
    nodes = list((home / "d").iterdir())
    assert nodes
    for node in nodes:
        data = bytearray(node.read_bytes())
        data[-40:] = bytes(40)
        node.write_bytes(data)
    said = ckpt("inspect", home)
    assert (said.code, said.out) == (11, "")
    assert said.err.startswith(f"ckptkit: corrupt: {home}/")


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "dangling"])
def test_pipes_devices_and_broken_links_are_reported(ckpt: Run, mine: Ours, kind: str) -> None:
    """A pipe would hang the command, and a link to a device fill its memory."""
    for path in (mine.manifest(5), mine.root / "4/state/_ckptkit/process-0.json", mine.root / "4/data/metadata"):
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
    codes = look(ckpt, mine)
    assert 11 in codes


def test_links_to_parent_directories_do_not_loop(ckpt: Run, mine: Ours) -> None:
    """A link to a parent directory would count bytes without an end."""
    (mine.root / "4/state/up").symlink_to(mine.root)
    (mine.root / "20").symlink_to(mine.root)
    said = ckpt("steps", mine.root)
    assert said.code in (0, 11)
    assert "4@1.4" in said.out


def test_control_characters_in_names_are_escaped(ckpt: Run, mine: Ours) -> None:
    """A name in a checkpoint could clear the screen, or be taken for markup."""
    (mine.root / "4" / "\x1b[2J[red]x\udcff").mkdir()
    for arguments in (("inspect", mine.root / "4"), ("steps", mine.root)):
        out = ckpt(*arguments).out
        assert "\x1b" not in out
        assert "\\x1b[2J[red]x\\udcff" in out


def test_nan_and_infinity_are_valid_json(ckpt: Run, mine: Ours) -> None:
    """A NaN loss in a small item would make `--json` no JSON."""
    (mine.root / "4/data/metadata").write_text('{"loss": NaN, "most": 1e999}')

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(ckpt("inspect", mine.root / "4/data", "--json").out, parse_constant=refuse)
    assert found["items"][0]["value"] == {"loss": "NaN", "most": "Infinity"}


def test_command_keeps_library_loggers(ckpt: Run, ours: Ours) -> None:
    """One command run in a process would silence its libraries for good."""
    before = logging.getLogger("gcsfs").level
    ckpt("inspect", ours.root)
    assert logging.getLogger("gcsfs").level == before


def test_closed_output_is_no_error(mine: Ours) -> None:
    """A script that wants the exit code alone would be told of an internal error."""
    command = [sys.executable, "-m", "ckptkit", "steps", str(mine.root)]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_mistyped_command_names_the_nearest(ckpt: Run) -> None:
    """People would have to read the whole help for one letter."""
    said = ckpt("inspct", "x")
    assert (said.code, "No such command 'inspct'. Did you mean inspect?" in said.err) == (2, True)


def test_bucket_without_a_name_is_refused(ckpt: Run) -> None:
    """`gs://` would be looked for on the disk."""
    said = ckpt("inspect", "gs://")
    assert (said.code, said.err) == (1, "ckptkit: gs:// does not name a bucket; write gs://BUCKET/PATH\n")
