"""The bucket as a command, in a process that a test can kill."""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from bucket_http import BUCKET


class BucketProcess:
    """`python -m ckptkit.testing.bucket`; leaving it kills it, and so does the death of this process."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "ckptkit.testing.bucket", "--dir", str(directory), "--bucket", BUCKET]
        self.process = subprocess.Popen(
            [*command, "--stop-with-stdin", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL, and gone."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def peak_bytes(self) -> int:
        """The most memory that it ever had resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
