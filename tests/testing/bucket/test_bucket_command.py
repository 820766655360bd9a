"""If this fails, `python -m ckptkit.testing.bucket` is not what a demo or a launcher can rely on."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bucket_http import BUCKET, Http
from bucket_process import BucketProcess

from ckptkit.testing import BucketServer


def test_first_line_is_the_address_and_sigterm_exits_0(tmp_path: Path) -> None:
    with BucketProcess(tmp_path, "--bucket", "second-bucket") as server:
        assert server.url.startswith("http://127.0.0.1:")
        Http(server.url).put("name", b"kept")
        assert Http(server.url)("GET", "/storage/v1/b/second-bucket").status == 200
        server.process.send_signal(signal.SIGTERM)
        output, errors = server.process.communicate(timeout=10)
        assert (server.process.returncode, output, errors) == (0, "", "")
    with BucketProcess(tmp_path) as server:
        assert Http(server.url).read("name").body == b"kept"


def test_server_stops_when_its_parent_exits(tmp_path: Path) -> None:
    with BucketProcess(tmp_path) as server:
        assert server.process.stdin is not None
        server.process.stdin.close()  # what the system does for a parent that was killed
        assert server.process.wait(timeout=10) == 0


def test_faults_are_read_from_a_file(tmp_path: Path) -> None:
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps({"faults": [{"effect": {"type": "status", "code": 503}, "count": 1}]}))
    with BucketProcess(tmp_path / "bucket", "--faults", str(plan)) as server:
        assert [Http(server.url).insert("name", b"x").status for _ in range(2)] == [503, 200]


def test_server_listens_on_the_given_address(tmp_path: Path) -> None:
    with BucketProcess(tmp_path / "one") as first:
        port = first.url.rpartition(":")[2]
    with BucketProcess(tmp_path / "two", "--port", port) as second:
        assert second.url == first.url


def test_second_server_on_a_directory_is_refused(tmp_path: Path) -> None:
    with BucketProcess(tmp_path), pytest.raises(BlockingIOError):
        BucketServer(dir=tmp_path).start()
    with BucketServer(dir=tmp_path, buckets=[BUCKET]) as server:  # the killed one has released it
        assert Http(server.url)("GET", f"/storage/v1/b/{BUCKET}").status == 200


@pytest.mark.parametrize(
    ("content", "told"),
    [('{"faults": [{"effect": {"type": "boom"}}]}', "no fault plan: effect has type 'boom'"), ("{", "no fault plan")],
)
def test_invalid_fault_plan_is_refused(tmp_path: Path, content: str, told: str) -> None:
    plan = tmp_path / "faults.json"
    plan.write_text(content)
    command = [sys.executable, "-m", "ckptkit.testing.bucket", "--dir", str(tmp_path / "b"), "--faults", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_invalid_bucket_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Invalid bucket name: 'Not A Bucket'"):
        BucketServer(dir=tmp_path, buckets=["Not A Bucket"]).start()
