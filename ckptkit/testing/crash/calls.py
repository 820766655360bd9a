"""From the lines of `strace -f -xx` to operations below one directory."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ckptkit.testing.crash.disk import ROOT, Disk, DiskEffect, Names, NodeKind, Note, Operation, Resize, Sync, Write

CALLS = (
    *("openat", "open", "creat", "close", "dup", "dup2", "dup3", "lseek"),
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range"),
    *("ftruncate", "truncate", "fallocate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "clone", "clone3", "fork", "vfork"),
)
_LINE = re.compile(r"(\d+) +(.*)", re.DOTALL)
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)", re.DOTALL)
_HEX = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_UNFINISHED, _RESUMED = " <unfinished ...>", re.compile(r"<\.\.\. \w+ resumed>(.*)", re.DOTALL)


class TraceError(Exception):
    """The recording cannot be trusted; the message has the reason."""


@dataclass(slots=True)
class _Open:
    node: int
    position: int = 0
    appends: bool = False
    is_notes: bool = False


@final
class Reader:
    """Follows descriptors, offsets and names through the calls of one command and its threads."""

    def __init__(self, root: Path, notes_name: str, before: Reader | None):
        self._root = root
        self._notes = str(root / notes_name)
        self.kinds: dict[int, NodeKind] = {ROOT: "directory", **(before.kinds if before else {})}
        self.operations: list[Operation] = []
        self.targets: list[Write] = []  # of links, which have them from the beginning
        self._disk = Disk(self.kinds)
        if before is not None:
            self._disk.replay(before.effects)
        self._open: dict[tuple[int, int], _Open] = {}
        self._groups: dict[int, int] = {}  # thread -> process
        self._begun: dict[int, str] = {}
        self._process = 0  # of the call that is read now

    @property
    def effects(self) -> tuple[DiskEffect, ...]:
        """The operations' effects."""
        return tuple(operation.effect for operation in self.operations)

    def found(self, path: Path) -> None:
        """Something that stood there before the trace began."""
        parent, name = self._place(-1, str(path))
        assert parent is not None
        node = self._new("link" if path.is_symlink() else "directory" if path.is_dir() else "file")
        self._do("found", str(path), Names(((parent, name, node),)))
        if self.kinds[node] != "directory":
            data = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
            self._do("found", str(path), Write(node, 0, data))

    def feed(self, line: str) -> None:
        """One line of the trace; a call that is interrupted by others counts when it ends, `close` when it begins."""
        match = _LINE.match(line.rstrip("\n"))
        if match is None:
            raise TraceError(f"not a line of a trace: {line[:100]!r}")
        thread, text = int(match[1]), match[2]
        process = self._groups.setdefault(thread, thread)
        if text.startswith(("+++", "---")):
            return
        if text.endswith(_UNFINISHED):
            self._begun[thread] = text.removesuffix(_UNFINISHED)
            if text.startswith("close("):  # another thread may get the number before the call is seen to end
                self._open.pop((process, int(text.removesuffix(_UNFINISHED)[6:])), None)
            return
        resumed = _RESUMED.match(text)
        if resumed is not None:
            begun = self._begun.pop(thread, None)
            if begun is None or begun.startswith("close("):
                return
            text = begun + resumed[1]
        call = _CALL.match(text)
        if call is not None and int(call[3]) >= 0:
            self._call(process, call[1], call[2], int(call[3]))

    def _call(self, process: int, name: str, text: str, result: int) -> None:
        self._process = process
        if name in ("clone", "clone3", "fork", "vfork"):
            shares = "CLONE_THREAD" in text
            self._groups[result] = process if shares else result
            if not shares:
                self._open.update({(result, fd): o for (owner, fd), o in [*self._open.items()] if owner == process})
            return
        if name == "close":
            self._open.pop((process, int(text)), None)
            return
        arguments = text.split(", ")
        if name in ("open", "creat"):
            flags = "O_CREAT|O_TRUNC" if name == "creat" else arguments[1]
            self._opened(process, -1, arguments[0], flags, result)
        elif name == "openat":
            self._opened(process, self._base(process, arguments[0]), arguments[1], arguments[2], result)
        elif name in _NAMING:
            self._naming(process, name, arguments)
        elif name == "truncate":
            parent, last = self._place(-1, _path(arguments[0]))
            if parent is not None and (node := self._child(parent, last)) is not None:
                self._do(name, _path(arguments[0]), Resize(node, int(arguments[1])))
        else:
            self._described(process, name, arguments, text, result)

    def _described(self, process: int, name: str, arguments: list[str], text: str, result: int) -> None:
        """A call on an open file."""
        out = int(arguments[2 if name == "copy_file_range" else 0])
        file = self._open.get((process, out))
        if name in ("dup", "dup2", "dup3"):
            self._open.pop((process, result), None)
            if file is not None:
                self._open[process, result] = file
        if file is None or name.startswith("dup"):
            return
        path = self._name_of(file.node)
        if name == "lseek":
            file.position = result
        elif name in ("fsync", "fdatasync"):
            self._do(name, path, Sync(file.node))
        elif name == "ftruncate":
            self._do(name, path, Resize(file.node, int(arguments[1])))
        elif name == "fallocate":
            if arguments[1] != "0":
                raise TraceError(f"fallocate({text}) cannot be followed")
            self._do(name, path, Resize(file.node, int(arguments[2]) + int(arguments[3]), grows=True))
        else:
            data = self._data(process, name, arguments, text, result)
            if file.is_notes:
                self._noted(json.loads(data))
                return
            at = int(arguments[3]) if name.startswith("pwrite") else file.position
            at = len(self._disk.content(file.node)) if file.appends else at
            if not name.startswith("pwrite"):
                file.position = at + len(data)
            self._do(name, path, Write(file.node, at, data))

    def _data(self, process: int, name: str, arguments: list[str], text: str, result: int) -> bytes:
        if name in ("sendfile", "copy_file_range"):
            source = self._open.get((process, int(arguments[0 if name == "copy_file_range" else 1])))
            offset = arguments[1 if name == "copy_file_range" else 2]
            if source is None:
                raise TraceError(f"{name}({text}) copies from where nothing was recorded")
            start = source.position if offset == "NULL" else int(offset.lstrip("[").partition("]")[0])
            if offset == "NULL":
                source.position += result
            return self._disk.content(source.node)[start : start + result]
        parts = text.split('"')  # every second one is a string, in hexadecimal: it has no quotes
        if any(after.startswith("...") for after in parts[2::2]):
            raise TraceError(f"a {name} is too long to be recorded")
        return bytes.fromhex("".join(parts[1::2]).replace("\\x", ""))[:result]

    def _opened(self, process: int, base: int | None, path: str, flags: str, fd: int) -> None:
        self._open.pop((process, fd), None)
        name = _path(path)
        if name == self._notes:
            self._open[process, fd] = _Open(-1, is_notes=True)
            return
        if name == str(self._root):
            self._open[process, fd] = _Open(ROOT)
            return
        parent, last = self._place(base, name)
        if parent is None:
            return
        node = self._child(parent, last)
        if node is None:
            if "O_CREAT" not in flags:
                raise TraceError(f"{name} was opened, and nothing that was recorded made it")
            node = self._new("file")
            self._do("create", name, Names(((parent, last, node),)))
        elif "O_TRUNC" in flags and self._disk.content(node):
            self._do("truncate", name, Resize(node, 0))
        self._open[process, fd] = _Open(node, appends="O_APPEND" in flags)

    def _naming(self, process: int, name: str, arguments: list[str]) -> None:
        kind, has_directories = _NAMING[name]
        words = list(arguments)
        target = ""
        bases: list[int | None] = []
        paths: list[str] = []
        for each in range(2 if kind in ("rename", "link") else 1):
            if kind == "symlink" and each == 0:
                target = _path(words.pop(0))
            bases.append(self._base(process, words.pop(0)) if has_directories else -1)
            paths.append(_path(words.pop(0)))
        places = [self._place(base, path) for base, path in zip(bases, paths, strict=True)]
        if any(parent is None for parent, _ in places):
            if any(parent is not None for parent, _ in places):
                raise TraceError(f"{name}({', '.join(paths)}) moves something in or out of what is recorded")
            return
        (parent, last) = places[0]
        assert parent is not None
        node = self._child(parent, last)
        changes: list[tuple[int, str, int | None]] = []
        if kind in ("unlink", "rmdir"):
            changes = [(parent, last, None)]
        elif kind == "mkdir":
            changes = [(parent, last, self._new("directory"))]
        elif kind == "symlink":
            made = self._new("link")
            self.targets.append(Write(made, 0, os.fsencode(target)))
            self._disk.apply(self.targets[-1])
            changes = [(parent, last, made)]
        else:
            to_parent, to_last = places[1]
            assert to_parent is not None
            if node is None:
                raise TraceError(f"{name} of {paths[0]}, which nothing that was recorded made")
            swapped = self._child(to_parent, to_last) if "RENAME_EXCHANGE" in arguments[-1] else None
            changes = [(to_parent, to_last, node)]
            if kind == "rename":
                changes.append((parent, last, swapped))
        where = f"{self._name_of(places[-1][0] or ROOT)}/{places[-1][1]}".lstrip("/")
        self._do(kind, where, Names(tuple(changes)))

    def _noted(self, record: dict[str, str]) -> None:
        if "say" in record:
            self._add("note", "", Note(record["say"]))
            return
        path = record.get("stored") or record["unchanged"]
        node = self._disk.find(path)
        if node is None:
            raise TraceError(f"{path} was noted, and nothing that was recorded made it")
        if "stored" in record:
            self._do("store", path, Write(node, int(record["offset"]), base64.b64decode(record["data"])))
        elif hashlib.sha256(self._disk.content(node)).hexdigest() != record["digest"]:
            raise TraceError(f"{path} was changed through a mapping before the program announced it")

    def _do(self, call: str, path: str, effect: DiskEffect) -> None:
        self._disk.apply(effect)
        self._add(call, path.removeprefix(f"{self._root}/"), effect)

    def _add(self, call: str, path: str, effect: DiskEffect) -> None:
        self.operations.append(Operation(call=call, path=path, effect=effect, process=self._process))

    def _new(self, kind: NodeKind) -> int:
        node = len(self.kinds)
        self.kinds[node] = kind
        return node

    def _base(self, process: int, word: str) -> int | None:
        """The node of a directory descriptor; -1 for the working directory, None for one that is not recorded."""
        if word == "AT_FDCWD":
            return -1
        file = self._open.get((process, int(word)))
        return file.node if file is not None else None

    def _below(self, path: str) -> str | None:
        return path.removeprefix(f"{self._root}/") if path.startswith(f"{self._root}/") else None

    def _place(self, base: int | None, path: str) -> tuple[int | None, str]:
        """The directory node and the name in it; no node for what is not below the root."""
        path = path.rstrip("/")
        if path.startswith("/"):
            below = self._below(path)
            if below is None:
                return None, ""
            parent, _, last = below.rpartition("/")
            return self._disk.find(parent), last
        if base is None or base < 0:
            return None, ""
        node: int | None = base
        *above, last = path.split("/")
        for name in above:
            node = self._child(node, name) if node is not None else None
        return node, last

    def _child(self, parent: int, name: str) -> int | None:
        return parent if name == "." else self._disk.entry(parent, name)

    def _name_of(self, node: int) -> str:
        path = self._disk.path_of(node)
        return "(a file without a name)" if path is None else path


_NAMING = {
    "rename": ("rename", False),
    "renameat": ("rename", True),
    "renameat2": ("rename", True),
    "link": ("link", False),
    "linkat": ("link", True),
    "symlink": ("symlink", False),
    "symlinkat": ("symlink", True),
    "unlink": ("unlink", False),
    "unlinkat": ("unlink", True),
    "rmdir": ("rmdir", False),
    "mkdir": ("mkdir", False),
    "mkdirat": ("mkdir", True),
}


def _path(word: str) -> str:
    match = _HEX.match(word)
    if match is None:
        raise TraceError(f"a path was expected, found {word[:60]!r}")
    return os.fsdecode(bytes.fromhex(match[1].replace("\\x", "")))
