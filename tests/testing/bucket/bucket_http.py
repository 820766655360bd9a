"""Plain HTTP against a bucket: a test's own text is sent unchanged."""

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

BUCKET = "test-bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def reason(self) -> str:
        """The reason in Google's error body; asserts that the body has its shape."""
        error = self.json()["error"]
        assert error["code"] == self.status
        assert error["errors"][0]["message"] == error["message"]
        assert error["errors"][0]["domain"]
        return error["errors"][0]["reason"]


class Http:
    """One connection for each request, so that one test cannot disturb another through it."""

    def __init__(self, url: str) -> None:
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 0

    def __call__(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: bytes | str | Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        target = path + ("?" + urlencode(query, quote_via=quote) if query else "")
        if isinstance(body, Mapping):
            body = json.dumps(body)
        data = body.encode() if isinstance(body, str) else body
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request(method, target, body=data, headers=dict(headers or {}))
            response = connection.getresponse()
            return Answer(status=response.status, headers=response.headers, body=response.read())
        finally:
            connection.close()

    def insert(self, name: str, data: bytes, *, headers: Mapping[str, str] | None = None, **query: object) -> Answer:
        """A media upload."""
        query = {"uploadType": "media", "name": name, **query}
        return self("POST", f"/upload/storage/v1/b/{BUCKET}/o", query=query, body=data, headers=headers)

    def put(self, name: str, data: bytes = b"x") -> dict[str, Any]:
        """A media upload that must succeed; returns the resource."""
        answer = self.insert(name, data)
        assert answer.status == 200, answer
        return answer.json()

    def read(self, name: str, **query: object) -> Answer:
        return self("GET", object_path(name), query={"alt": "media", **query})

    def names(self, **query: object) -> list[str]:
        """All names, over all pages."""
        names: list[str] = []
        while True:
            page = self("GET", f"/storage/v1/b/{BUCKET}/o", query=query).json()
            names += [item["name"] for item in page.get("items", [])]
            if "nextPageToken" not in page:
                return names
            query["pageToken"] = page["nextPageToken"]

    def raw(self, data: bytes, *, patience_s: float = 0.1) -> bytes:
        """Send bytes as they are, and return all that comes; a server that waits for more is told there is none."""
        received = b""
        with socket.create_connection((self.host, self.port), timeout=patience_s) as connection:
            connection.sendall(data)
            told = False
            while True:
                try:
                    chunk = connection.recv(65536)
                except ConnectionResetError:
                    return received
                except TimeoutError:
                    if told:
                        raise
                    told = True
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(20)
                    continue
                if not chunk:
                    return received
                received += chunk


def object_path(name: str) -> str:
    return f"/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}"
