"""Turn text files into fixed windows of bytes in an ArrayRecord file.

    python -m tools.corpus --data PATH|stdlib --out DIR --record-bytes N

A corpus is one directory, `<name>-<digest>-<record bytes>`, with `records.arrayrecord` and `index.json`. It appears by
rename, so what can be seen is finished; the same text gives the same bytes on every machine.
"""

import fcntl
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import xxhash

SEPARATOR = b"\x00"  # follows each document; text files hold no NUL, which also identifies binaries
RECORDS, INDEX = "records.arrayrecord", "index.json"
NOT_CORPUS = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}


class CorpusError(ValueError):
    """The text cannot become a corpus; the message has the path and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A finished corpus, as described by its index. Every record is `record_bytes` of tokens, one byte each."""

    path: str  # of the ArrayRecord file
    source: str  # where the text came from, absolute, or "stdlib"
    digest: str  # xxh3-128 of the documents' names and bytes and of record_bytes
    records: int
    record_bytes: int
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text file; `name` is its path below the source."""

    name: str
    path: Path


def build_corpus(data: str, out: str | Path, record_bytes: int) -> Corpus:
    """Return the corpus of `data` below `out`, building it when it is not there.

    Any number of processes may call this at once: one builds, the others wait for its lock and find the result.
    The cost of finding a finished one is reading the text once (its digest is the key).

    Args:
        data: a text file, a directory (all text files below it), or "stdlib", the Python files of this interpreter.
        out: directory of all corpora; made when missing.
        record_bytes: size of a record; the last, partial window of the whole text is dropped.

    Raises:
        CorpusError: nothing at `data`, no text in it, too little text for one record, or `out` cannot be written.
    """
    if record_bytes < 2:
        raise CorpusError(f"record bytes {record_bytes}: a window needs at least 2 bytes, one to predict the other")
    documents = find_documents(data)
    digest = _digest(documents, record_bytes)
    directory = Path(out) / f"{_name(data)}-{digest[:16]}-{record_bytes}"
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        with _lock(Path(out) / ".lock"):
            if not (directory / INDEX).exists():
                _build(data, documents, digest, record_bytes, directory)
    except OSError as error:
        raise CorpusError(f"corpus directory {out}: {error}; choose one that can be written") from error
    return load_corpus(directory)


def load_corpus(directory: Path) -> Corpus:
    """Read the index of a finished corpus."""
    index = json.loads((directory / INDEX).read_text())
    return Corpus(path=str(directory / RECORDS), **index)


def find_documents(data: str) -> list[Document]:
    """The text files of a source in sorted order of their names; hidden files and binaries are left out."""
    root = Path(sysconfig.get_paths()["stdlib"]) if data == "stdlib" else Path(data).expanduser()
    if not root.exists():
        raise CorpusError(
            f"--data {data}: there is no such file or directory; give a text file, a directory, or stdlib"
        )
    if root.is_file():
        paths = [root]
    else:
        paths = sorted(_walk(root, only_python=data == "stdlib"), key=lambda path: path.relative_to(root).parts)
    documents = [
        Document(name=str(path.relative_to(root)) if path != root else path.name, path=path)
        for path in paths
        if _is_text(path)
    ]
    if not documents:
        raise CorpusError(f"--data {data}: no text in {root}; give a file or directory that holds some")
    return documents


def windows(documents: list[Document], record_bytes: int) -> Iterator[bytes]:
    """Cut the documents, each followed by the separator, into windows of `record_bytes`."""
    rest = b""
    for document in documents:
        rest += document.path.read_bytes().replace(SEPARATOR, b"") + SEPARATOR
        whole = len(rest) - len(rest) % record_bytes
        yield from (rest[i : i + record_bytes] for i in range(0, whole, record_bytes))
        rest = rest[whole:]


def _walk(root: Path, *, only_python: bool) -> Iterator[Path]:
    for directory, children, files in os.walk(root):
        children[:] = [c for c in children if not c.startswith(".") and not (only_python and c in NOT_CORPUS)]
        for file in files:
            if not file.startswith(".") and (file.endswith(".py") or not only_python):
                yield Path(directory, file)


def _is_text(path: Path) -> bool:
    """Not empty, and no NUL in the first 8 KiB (git's rule)."""
    try:
        with path.open("rb") as file:
            head = file.read(8192)
    except OSError as error:
        raise CorpusError(f"--data: cannot read {path}: {error.strerror}; make it readable or leave it out") from error
    return bool(head) and SEPARATOR not in head


def _digest(documents: list[Document], record_bytes: int) -> str:
    digest = xxhash.xxh3_128(f"ckptkit corpus 1, record bytes {record_bytes}\n".encode())
    for document in documents:
        content = document.path.read_bytes()
        digest.update(f"{len(document.name)} {document.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _name(data: str) -> str:
    stem = Path(data).expanduser().resolve().name if data != "stdlib" else data
    return "".join(c if c.isalnum() or c in "._" else "_" for c in stem) or "root"


def _build(data: str, documents: list[Document], digest: str, record_bytes: int, directory: Path) -> None:
    building = directory.with_name(f".building-{directory.name}")
    shutil.rmtree(building, ignore_errors=True)  # left by a dead builder; the lock shows that none is alive
    building.mkdir()
    records = _write_records(building / RECORDS, windows(documents, record_bytes))
    if not records:
        shutil.rmtree(building)
        raise CorpusError(
            f"--data {data}: less text than one record of {record_bytes} bytes; give more text or a shorter record"
        )
    source = data if data == "stdlib" else str(Path(data).expanduser().resolve())
    index = Corpus(
        path="", source=source, digest=digest, records=records, record_bytes=record_bytes, documents=len(documents)
    )
    fields = {name: value for name, value in asdict(index).items() if name != "path"}
    (building / INDEX).write_text(json.dumps(fields, indent=1) + "\n")
    for path in (building / RECORDS, building / INDEX, building):
        _fsync(path)
    building.rename(directory)
    _fsync(directory.parent)


def _write_records(path: Path, records: Iterator[bytes]) -> int:
    from array_record.python.array_record_module import ArrayRecordWriter  # slow to import, and not always needed

    writer = ArrayRecordWriter(str(path), "group_size:1")  # one record per chunk: reads are random
    count = 0
    for record in records:
        writer.write(record)
        count += 1
    writer.close()
    return count


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by close, also of a killed process
        yield


@click.command(context_settings={"show_default": True})
@click.option("--data", default="stdlib", help="Text file, directory, or stdlib.")
@click.option("--out", default="runs/corpus", help="Directory of all corpora.")
@click.option("--record-bytes", default=65, help="Bytes per record: sequence length + 1.")
def main(data: str, out: str, record_bytes: int) -> None:
    """Build a corpus, or find it built, and return its place."""
    try:
        corpus = build_corpus(data, out, record_bytes)
    except CorpusError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(2) from None
    click.echo(
        f"{corpus.path}: {corpus.records} records of {corpus.record_bytes} bytes "
        f"from {corpus.documents} documents, digest {corpus.digest}"
    )


if __name__ == "__main__":
    main()
