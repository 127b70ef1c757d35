"""One connection to the local Hub: requests, answers, and the faults that tests inject into them."""

import contextlib
import json
import re
import socket
import struct
import time
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from hub_storage import HTTPError


@dataclass
class Fault:
    """
    One injected fault. `match` is a regular expression, searched in "METHOD /path?query" (the path is still quoted).

        status=N     answer N, with `headers`, and do nothing
        close        close the connection without an answer
        lost         process the request, then close without sending the answer
        drop=N       declare the whole length, send N bytes of the body, then close
        rst=N        like `drop`, but with a TCP reset
        truncate=N   declare and send only N bytes
        corrupt=N    flip the byte at offset N of the body
        delay=S      wait S seconds, then answer
    """

    match: str
    status: int = 0
    close: bool = False
    lost: bool = False
    drop: int = -1
    rst: int = -1
    truncate: int = -1
    corrupt: int = -1
    delay: float = 0.0
    # How many matching requests get the fault (-1: all), after how many that do not.
    times: int = 1
    skip: int = 0
    headers: dict = field(default_factory=dict)
    hits: int = 0

    def take(self, line: str) -> bool:
        if self.times == 0 or not re.search(self.match, line):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times > 0:
            self.times -= 1
        self.hits += 1
        return True


ROUTES: list[tuple[str, re.Pattern, str]] = []


def route(methods: str, pattern: str):
    """Call the decorated method for these requests, with the groups of the pattern; {repo} matches owner/name."""
    compiled = re.compile(pattern.replace("{repo}", r"(?P<repo_id>[^/]+/[^/]+|[^/]+)"))

    def register(function):
        ROUTES.extend((method, compiled, function.__name__) for method in methods.split())
        return function

    return register


class Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are sent one after the other, and the client confirms the former late.
    disable_nagle_algorithm = True

    def log_message(self, *args):
        """The requests are in `HubServer.requests`."""

    @property
    def hub(self):
        return self.server.hub

    def body_chunks(self):
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            while size := int(self.rfile.readline().split(b";")[0].strip() or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        else:
            left = int(self.headers.get("Content-Length") or 0)
            while left > 0 and (chunk := self.rfile.read(min(left, 1 << 20))):
                left -= len(chunk)
                yield chunk

    def body(self) -> bytes:
        if self._body is None:
            self._body = b"".join(self.body_chunks())
        return self._body

    def json_body(self) -> dict:
        return json.loads(self.body() or b"{}")

    def kill(self, reset: bool = False) -> None:
        """Close the connection: FIN, or RST if `reset`."""
        with contextlib.suppress(OSError):
            self.wfile.flush()
            if reset:
                # A reset discards what is in flight: let the bytes arrive first.
                time.sleep(0.3)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
        self.close_connection = True

    def send(self, status: int, data: bytes = b"", headers: dict | None = None, span: tuple | None = None):
        """Send a response, whose body is `data` or its part `span`, with the fault of the request."""
        fault = self._fault or Fault("")
        if fault.lost:
            self.kill()
            return
        start, end = span or (0, len(data))
        body = bytearray(data[start:end])
        if 0 <= fault.corrupt - start < len(body):
            body[fault.corrupt - start] ^= 0xFF
        if fault.truncate >= 0:
            body = body[: fault.truncate]
        self.send_response(status)
        for name, value in ({"Content-Length": len(body), "X-Request-Id": "Root=1-local"} | (headers or {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            # A fault of the body waits for a body.
            fault.times += fault.truncate >= 0
        elif status not in (204, 304):
            cut = max(fault.drop, fault.rst)
            self.wfile.write(body if cut < 0 else body[:cut])
            if cut >= 0:
                self.kill(reset=fault.rst >= 0)

    def send_json(self, content, status: int = 200, headers: dict | None = None) -> None:
        headers = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
        self.send(status, json.dumps(content).encode(), headers)

    def send_failure(self, error: HTTPError) -> None:
        self.body()
        headers = {**error.headers, "X-Error-Message": re.sub(r"[^\x20-\x7e]", " ", str(error))}
        if error.code:
            headers["X-Error-Code"] = error.code
        self.send_json({"error": str(error), **error.content}, error.status, headers)

    def answer(self):
        """Record the request, apply its fault, and call its route."""
        self._body = None
        line = f"{self.command} {self.path}"
        with self.hub.lock:
            self.hub.requests.append({"line": line, "t": time.time()})
            self._fault = next((fault for fault in self.hub.faults if fault.take(line)), None)
        try:
            if self._fault is None or not self.answer_fault(self._fault):
                self.call_route()
            if not self.close_connection:
                # What a route has not read would be taken for the next request.
                self.body()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception:
            # An error of the server must be visible, and not a hang.
            self.hub.errors.append(traceback.format_exc())
            with contextlib.suppress(Exception):
                self.send_json({"error": "error in the server of the tests"}, 500)
            self.close_connection = True

    def answer_fault(self, fault: Fault) -> bool:
        """Whether the fault is all of the answer."""
        time.sleep(fault.delay)
        if fault.close:
            self.kill()
        elif fault.status:
            self.body()
            self.send_json({"error": f"injected {fault.status}"}, fault.status, fault.headers)
        return fault.close or bool(fault.status)

    def call_route(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for accepted, pattern, name in ROUTES:
                if accepted == method and (found := pattern.fullmatch(url.path)):
                    groups = found.groupdict().items()
                    return getattr(self, name)(**{group: value and unquote(value) for group, value in groups})
            raise HTTPError(404, f"no route for {self.command} {self.path}")
        except HTTPError as error:
            self.send_failure(error)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer
