"""
A local server that speaks the Hub's protocol for the real clients: repositories of models, commits, LFS and Xet
storage, tokens, private and gated repositories, and injected faults.

    with HubServer(folder) as hub:
        subprocess.run([...], env={**os.environ, **hub.env(folder / "hf_home")})
        hub.fail("POST .*/commit/", status=503, times=2)
        assert hub.count("POST .*/commit/") == 3
"""

import re
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

from hub_connection import Fault
from hub_routes import Routes
from hub_storage import Repo, Store


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that went away is not an error."""


class HubServer:
    """The server with what a test asks of it: `fail` injects a fault, `lines` and `count` look at the requests."""

    def __init__(self, root: Path, xet: bool = False):
        self.store = Store(root)
        # By token: name and role.
        self.tokens = {
            "hf_tester_write": ("tester", "write"),
            "hf_tester_read": ("tester", "read"),
            "hf_other_write": ("other", "write"),
        }
        # hf_xet reads and writes a local directory if the address of the storage is local://DIR.
        self.xet_cas_url = f"local://{self.store.cas}" if xet else None
        self.lock = threading.RLock()
        self.faults: list[Fault] = []
        self.requests: list[dict] = []
        self.errors: list[str] = []
        self.server = Server(("127.0.0.1", 0), Routes)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        # A second name for the same socket plays the CDN: another origin, to which no client may send its token.
        self.cdn_url = f"http://localhost:{self.server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def env(self, home: str | Path, token: str | None = "hf_tester_write") -> dict[str, str]:
        """Environment of a client process: this endpoint, another HF_HOME, no telemetry, no proxies."""
        Path(home).mkdir(parents=True, exist_ok=True)
        switches = ("TELEMETRY", "PROGRESS_BARS", "UPDATE_CHECK")
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "0" if self.xet_cas_url else "1",
            **{f"HF_HUB_DISABLE_{name}": "1" for name in switches},
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
            **({"HF_TOKEN": token} if token else {}),
        }

    def fail(self, match: str, **fields) -> None:
        with self.lock:
            self.faults.append(Fault(match, **fields))

    def reset(self) -> None:
        """Forget faults and requests; repositories stay."""
        with self.lock:
            for each in (self.faults, self.requests, self.errors):
                each.clear()

    def lines(self, pattern: str) -> list[dict]:
        with self.lock:
            return [request for request in self.requests if re.search(pattern, request["line"])]

    def count(self, pattern: str) -> int:
        return len(self.lines(pattern))

    def repo(self, repo_id: str) -> Repo | None:
        return self.store.repos.get(repo_id)

    def files(self, repo_id: str, revision: str = "main") -> dict:
        return self.repo(repo_id).tree(revision)[1]
