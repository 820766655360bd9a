"""Text to records: the same everywhere, built once, and clear about what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordReader

from tools.corpus import CorpusError, build_corpus, find_documents, windows


@pytest.fixture
def text(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    (root / "b").mkdir(parents=True)
    (root / "b" / "two.txt").write_text("second " * 10)
    (root / "a.txt").write_text("first " * 10)
    (root / "binary.bin").write_bytes(b"\x00\x01" * 50)
    (root / ".hidden").write_text("hidden")
    (root / "empty.txt").write_text("")
    return root


def test_corpus_is_deterministic_and_complete(text: Path, tmp_path: Path):
    """Two hosts would build corpora that differ, and a resume on the other would be refused."""
    one, two = (build_corpus(str(text), tmp_path / out, 16) for out in ("one", "two"))
    assert Path(one.path).read_bytes() == Path(two.path).read_bytes()
    assert (one.digest, one.records, one.documents) == (two.digest, two.records, 2)
    reader = ArrayRecordReader(one.path)
    joined = b"".join(reader.read_all())
    reader.close()
    assert joined == (b"first " * 10 + b"\x00" + b"second " * 10 + b"\x00")[: one.records * 16]


def test_corpus_is_reused_until_its_source_changes(text: Path, tmp_path: Path):
    """Every start would pay for the build again, or changed text would train under the old digest."""
    one = build_corpus(str(text), tmp_path / "out", 16)
    built_ns = Path(one.path).stat().st_mtime_ns
    assert build_corpus(str(text), tmp_path / "out", 16) == one
    assert Path(one.path).stat().st_mtime_ns == built_ns
    (text / "a.txt").write_text("fjrst " * 10)
    assert build_corpus(str(text), tmp_path / "out", 16).digest != one.digest
    assert build_corpus(str(text), tmp_path / "out", 8).path != one.path


def test_crashed_builder_does_not_block_the_next(text: Path, tmp_path: Path):
    """A run killed while building would block every later one, or be taken for finished."""
    one = build_corpus(str(text), tmp_path / "out", 16)
    directory = Path(one.path).parent
    directory.rename(directory.with_name(f".building-{directory.name}"))
    assert build_corpus(str(text), tmp_path / "out", 16) == one
    assert not directory.with_name(f".building-{directory.name}").exists()


def test_concurrent_builders_do_not_conflict(text: Path, tmp_path: Path):
    """Processes of one host that start together would write over each other."""
    command = [sys.executable, "-m", "tools.corpus", "--data", str(text), "--out", str(tmp_path / "out")]
    builders = [
        subprocess.Popen([*command, "--record-bytes", "16"], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    lines = {builder.communicate(timeout=60)[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert len(lines) == 1
    assert "8 records of 16 bytes from 2 documents" in lines.pop()


def test_stdlib_is_real_text():
    """The default corpus would be empty, or hold other people's packages."""
    documents = find_documents("stdlib")
    names = [document.name for document in documents]
    assert len(names) > 300
    assert "json/decoder.py" in names
    assert names == [d.name for d in sorted(documents, key=lambda d: Path(d.name).parts)]
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert len(next(windows(documents, 65))) == 65


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nowhere", "there is no such file or directory; give a text file, a directory, or stdlib"),
        (lambda root: root, "no text in .*; give a file or directory that holds some"),
        (lambda root: root / "short.txt", "less text than one record of 16 bytes; give more text or a shorter record"),
    ],
)
def test_missing_or_empty_sources_are_refused(tmp_path: Path, make, message: str):
    """A missing or empty corpus would end in a traceback, or in training on nothing."""
    root = tmp_path / "text"
    root.mkdir()
    source = make(root)
    if source.suffix:
        source.write_text("short")
    with pytest.raises(CorpusError, match=message):
        build_corpus(str(source), tmp_path / "out", 16)
    assert not list((tmp_path / "out").glob("*text*")) if (tmp_path / "out").exists() else True


def test_command_reports_an_error_in_one_line(tmp_path: Path):
    """A person would read a traceback instead of what to do."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.corpus", "--data", str(tmp_path / "no"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "there is no such file or directory" in done.stderr
