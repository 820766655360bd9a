"""The listeners to a training with exporters, in a process of their own: `python -m bench.listening PORT`.

A collector takes what OpenTelemetry sends; its address is the first line on stdout. The port of the training's
Prometheus endpoint is asked once a second. Ends with its standard input.
"""

from __future__ import annotations

import sys
import threading
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_SCRAPE_S = 1.0


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def main(port: int) -> None:
    """Listens until standard input ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(_SCRAPE_S):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            answer.read()  # OSError: the loop has not begun, or is over
    server.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
