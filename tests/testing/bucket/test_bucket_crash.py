"""If this fails, a bucket that was killed comes back with half an object, or without one that it had confirmed."""

import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from bucket_http import BUCKET, Http, object_path
from bucket_process import BucketProcess

WORKERS = 4
BLOCK = 256 * 1024


def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new() -> None:
    script = Path(__file__).with_name("crash_points.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    assert len(points) == 11
    assert all(count >= 2 for count in points.values()), points
    assert sum(points.values()) >= 50, points


def test_killed_server_keeps_confirmed_writes(tmp_path: Path) -> None:
    kill_rounds(tmp_path, rounds=5, seed=20_261_121)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_100_kills_lose_no_confirmed_write(tmp_path: Path, part: int) -> None:
    kill_rounds(tmp_path, rounds=25, seed=random.SystemRandom().randrange(1 << 30) * 4 + part)


def payload(text: str) -> bytes:
    """Bytes that `text` alone determines, so that half of them cannot pass for the whole."""
    size = 1 + random.Random(text).randrange(2_000_000)
    return text.encode() + b"\n" + hashlib.sha256(text.encode()).digest() * (size // 32)


class Worker:
    """Writes, overwrites and deletes names of its own, and knows what must be there after a kill."""

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.source = random.Random(f"{seed}/{number}")
        self.confirmed: dict[str, str | None] = {}
        self.pending: tuple[str, str | None] | None = None
        self.acts = 0

    def run(self, url: str) -> None:
        host = urlsplit(url).netloc
        connection = HTTPConnection(host, timeout=20)
        try:
            while True:
                self.step(connection)
        except (OSError, HTTPException):
            return  # the server has ended
        finally:
            connection.close()

    def step(self, connection: HTTPConnection) -> None:
        name = f"worker-{self.number}/name-{self.source.randrange(4)}"
        self.acts += 1
        if self.confirmed.get(name) and self.source.random() < 0.3:
            self.pending = (name, None)
            status = self.send(connection, "DELETE", object_path(name), b"")
        else:
            text = f"{name} act {self.acts}"
            self.pending = (name, text)
            status = self.write(connection, name, payload(text))
        assert status in {200, 204}, status
        self.confirmed[name] = self.pending[1]
        self.pending = None

    def write(self, connection: HTTPConnection, name: str, data: bytes) -> int:
        upload = f"/upload/storage/v1/b/{BUCKET}/o"
        if self.source.random() < 0.5:
            return self.send(connection, "POST", f"{upload}?uploadType=media&name={name}", data)
        connection.request("POST", f"{upload}?uploadType=resumable", body=json.dumps({"name": name}))
        response = connection.getresponse()
        response.read()
        session = urlsplit(response.headers["Location"])
        status = 0
        for start in range(0, len(data), 2 * BLOCK):
            part = data[start : start + 2 * BLOCK]
            total = len(data) if start + len(part) == len(data) else "*"
            content_range = f"bytes {start}-{start + len(part) - 1}/{total}"
            status = self.send(connection, "PUT", f"{session.path}?{session.query}", part, content_range)
        return status

    @staticmethod
    def send(connection: HTTPConnection, method: str, target: str, data: bytes, content_range: str = "") -> int:
        headers = {"Content-Range": content_range} if content_range else {}
        connection.request(method, target, body=data, headers=headers)
        response = connection.getresponse()
        response.read()
        return response.status

    def check(self, http: Http) -> None:
        """Each name holds what was confirmed last, or what was under way when the server was killed."""
        for name in {*self.confirmed, *([self.pending[0]] if self.pending else [])}:
            answer = http.read(name)
            found = answer.body.partition(b"\n")[0].decode() if answer.status == 200 else None
            allowed = {self.confirmed.get(name)} | (
                {self.pending[1]} if self.pending and self.pending[0] == name else set()
            )
            assert found in allowed, f"{name}: found {found!r}, expected one of {allowed}"
            if found is not None:
                assert answer.body == payload(found), f"{name} is not whole"
            self.confirmed[name] = found
        self.pending = None


def kill_rounds(directory: Path, *, rounds: int, seed: int) -> None:
    print(f"kill_rounds(directory, rounds={rounds}, seed={seed})")
    source = random.Random(seed)
    workers = [Worker(number, seed) for number in range(WORKERS)]
    interrupted = 0
    for _ in range(rounds):
        with BucketProcess(directory) as server:
            http = Http(server.url)
            for worker in workers:
                worker.check(http)
            there = {name for worker in workers for name, text in worker.confirmed.items() if text}
            assert set(http.names()) == there
            records = len(list(directory.rglob("records/*.json")))
            assert len([path for path in directory.rglob("data/*") if path.is_file()]) == records == len(there)
            threads = [threading.Thread(target=worker.run, args=(server.url,)) for worker in workers]
            enough = sum(worker.acts for worker in workers) + 10
            for thread in threads:
                thread.start()
            time.sleep(source.uniform(0.02, 0.3))
            while sum(worker.acts for worker in workers) <= enough and any(thread.is_alive() for thread in threads):
                time.sleep(0.001)  # a busy machine
            server.kill()
            for thread in threads:
                thread.join()
        interrupted += sum(worker.pending is not None for worker in workers)
    assert interrupted > rounds, "the kills have to hit work under way"
    assert sum(worker.acts for worker in workers) > 10 * rounds
