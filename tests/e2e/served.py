"""A server as a process, and what its tests ask of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import yaml

from tests.e2e.planted_fault import ROOT

LIMIT_S = 30.0


class Served:
    """``launch/serve.py`` as a process, with what its tests ask of it."""

    def __init__(self, directory: Path, config: dict[str, Any], num_launched: int) -> None:
        self.port = free_port()
        config["server"] = {"port": self.port} | config.get("server", {})
        file = directory / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self._log = directory / "log"
        key = config["server"].get("api_key")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        launcher = ["-m", "deepspeed.launcher.runner", "--hostfile=/dev/null", f"--num_accelerators={num_launched}"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *([*launcher, f"--master_port={free_port()}"] if num_launched else []),
                    *("launch/serve.py", "--config", str(file)),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            )
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key=key or "none",
            max_retries=0,
            http_client=httpx2.Client(trust_env=False, timeout=60),
        )

    def wait_ready(self) -> Served:
        """Until then /health says that the model is being loaded, or nobody listens yet."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            try:
                health = self.http.get("/health")
                if health.status_code == 200:
                    return self
                assert (health.status_code, health.json()) == (503, {"status": "loading"})
            except httpx2.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready in time: {self.log()}")

    def log(self) -> str:
        return self._log.read_text()

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        if body is not None:
            options["json"] = body
        return self.http.post(path, headers=self.headers | options.pop("headers", {}), **options)

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics", headers=self.headers).text
        found = re.search(rf"^helix_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_free(self) -> None:
        """Nothing runs, nothing waits, and every page row is free."""
        deadline = time.monotonic() + LIMIT_S
        names = ("page_rows_used", "requests_running", "requests_waiting")
        while any(self.metric(name) for name in names):
            assert time.monotonic() < deadline, [(name, self.metric(name)) for name in names]
            time.sleep(0.05)

    def send_raw(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A request on a socket of its own, which the caller may drop at any moment."""
        content = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: here", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(content)}", *(f"{name}: {value}" for name, value in self.headers.items())]
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        return connection

    def destroy(self) -> None:
        self.openai.close()
        self.http.close()
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


Starter = Callable[..., Served]


def tiny_config(path: Path | str, **layout: int) -> dict[str, Any]:
    return {
        "model": {"path": str(path), "dtype": "float32"},
        "layout": layout,
        "cache": {"page_tokens": 4, "num_page_rows": 64},
        "engine": {
            "device": "cpu",
            "max_batch": 4,
            "prefill_chunk": 32,
            "check_schedule": True,
            "stall_timeout_s": 12.0,
        },
    }
