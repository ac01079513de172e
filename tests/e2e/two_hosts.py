"""Two hosts on one machine: network and process namespaces, joined by one cable, each with its own sshd.

``python -m tests.e2e.two_hosts`` (as root) starts ``deepspeed --hostfile ... launch/serve.py`` across them, streams a
completion, pulls the cable in the middle of another, and prints what both hosts said and when they ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.e2e.planted_fault import ROOT

TOOLS = ("ip", "unshare", "ssh", "ssh-keygen", "sshd", "pdsh")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("node-0", "node-1")
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))

# What a host sees of its own: a name, other machines' names, a key, and an ssh that gives up on a dead connection.
_BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run && mkdir /run/sshd
mount --bind {directory}/hosts{host} /etc/hosts
mount --bind {directory}/ssh_config /etc/ssh/ssh_config
hostname {name}
exec {sshd} -D -e -f {directory}/sshd_config
"""
_SSH_CONFIG = """
Host *
  IdentityFile {directory}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 10
  ServerAliveInterval 3
  ServerAliveCountMax 3
"""
_SSHD_CONFIG = """
HostKey {directory}/key
AuthorizedKeysFile {directory}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""


def missing() -> str | None:
    """Why such hosts cannot be made here; None where they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces need Linux and root"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: iproute2, openssh-server, pdsh)"
    probe = f"hlx{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """``node-0`` and ``node-1`` with one slot each; `directory` holds their keys, settings and logs."""

    directory: Path
    spaces: tuple[str, str]

    def inside(self, host: int, *command: str) -> list[str]:
        """The command that runs `command` on the network of a host."""
        return ["ip", "netns", "exec", self.spaces[host], *command]

    def ssh(self, host: int, command: str, **options: Any) -> subprocess.Popen[bytes]:
        """`command` in a shell on node-0 or node-1, as a person would start it there."""
        config = str(self.directory / "ssh_config")
        return subprocess.Popen(self.inside(host, "ssh", "-F", config, ADDRESSES[host], command), **options)

    def pull_the_cable(self) -> None:
        """From now on neither host hears anything of the other, and neither is told."""
        _ip("-n", self.spaces[1], "link", "set", "cable", "down")


@contextmanager
def two_hosts(directory: Path) -> Iterator[TwoHosts]:
    """Make the hosts under `directory`, and end all that runs on them afterwards."""
    tag = f"hlx{os.getpid()}"
    hosts = TwoHosts(directory, (f"{tag}a", f"{tag}b"))
    directory.chmod(0o755)
    _write_settings(directory)
    sshds: list[subprocess.Popen[bytes]] = []
    try:
        for space in hosts.spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        one, other = hosts.spaces
        _ip("link", "add", "cable", "netns", one, "type", "veth", "peer", "name", "cable", "netns", other)
        for host, space in enumerate(hosts.spaces):
            _ip("-n", space, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "cable")
            _ip("-n", space, "link", "set", "cable", "up")
        sshds += [_boot(hosts, host) for host in range(2)]
        _wait_for_ssh(hosts)
        yield hosts
    finally:
        for sshd in sshds:
            sshd.kill()  # its namespace's first process goes with it, and takes all others along
            sshd.wait()
        for space in hosts.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False, timeout=20)


def _write_settings(directory: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "key")], check=True)
    places = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
    for host, name in enumerate(NAMES):
        # As Debian does it: a machine's own name stands for an address that no other machine reaches.
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}", *places, ""]
        (directory / f"hosts{host}").write_text("\n".join(lines))
    (directory / "hostfile").write_text("".join(f"{name} slots=1\n" for name in NAMES))
    (directory / "ssh_config").write_text(_SSH_CONFIG.format(directory=directory))
    (directory / "sshd_config").write_text(_SSHD_CONFIG.format(directory=directory))


def _boot(hosts: TwoHosts, host: int) -> subprocess.Popen[bytes]:
    script = _BOOT.format(directory=hosts.directory, host=host, name=NAMES[host], sshd=shutil.which("sshd", path=PATH))
    own = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script)
    with (hosts.directory / f"sshd{host}.log").open("wb") as log:
        return subprocess.Popen(hosts.inside(host, *own), stdout=log, stderr=log)


def _wait_for_ssh(hosts: TwoHosts) -> None:
    deadline = time.monotonic() + 20
    for host in range(2):
        while hosts.ssh(host, "true", stderr=subprocess.DEVNULL).wait(20) != 0:
            if time.monotonic() > deadline:
                raise RuntimeError((hosts.directory / f"sshd{host}.log").read_text())
            time.sleep(0.1)


# Stand-ins for Slurm's commands: one task a node, in the job's environment.
_SCONTROL = "#!/bin/sh\nprintf 'node-0\\nnode-1\\n'\n"
_SRUN = """#!/bin/bash
shift
printf -v command '%q ' "$@"
for node in 0 1; do
    ssh -F {directory}/ssh_config node-$node "cd $PWD; $(export -p); export SLURM_NODEID=$node; $command" &
done
wait
"""
_DEEPSPEED = '#!/bin/sh\nexec {python} -m deepspeed.launcher.runner --enable_each_rank_log {directory}/ranks "$@"\n'


def hostfile_command(directory: Path, config: Path) -> str:
    """What a person types on node-0."""
    launcher = f"{sys.executable} -m deepspeed.launcher.runner --enable_each_rank_log {directory}/ranks"
    # The launcher hands variables whose names begin with PYTHON to every node.
    variables = f"PYTHONPATH={ROOT} PYTHONUNBUFFERED=1 DS_ACCELERATOR=cpu"
    return f"{variables} {launcher} --hostfile {directory}/hostfile launch/serve.py --config {config}"


def slurm_command(directory: Path, config: Path) -> str:
    """What Slurm runs on node-0."""
    tools = directory / "bin"
    tools.mkdir()
    for name, script in (("scontrol", _SCONTROL), ("srun", _SRUN), ("deepspeed", _DEEPSPEED)):
        file = tools / name
        file.write_text(script.replace("{directory}", str(directory)).replace("{python}", sys.executable))
        file.chmod(0o755)
    job = "SLURM_JOB_NODELIST='node-[0-1]' SLURM_JOB_ID=7 SLURM_GPUS_ON_NODE=1"
    batch = ROOT / "launch" / "slurm.sbatch"
    return (
        f"cd {directory}; ln -s {ROOT}/launch launch; PATH={tools}:$PATH PYTHONPATH={ROOT} {job} bash {batch} {config}"
    )


class ServedByTwo:
    """``launch/serve.py`` over both hosts, started by `command` (see `hostfile_command`, `slurm_command`) on node-0."""

    def __init__(self, hosts: TwoHosts, config: dict[str, Any], command: Callable[[Path, Path], str]) -> None:
        self.hosts = hosts
        self.port = 8000
        file = hosts.directory / "serve.yaml"
        file.write_text(yaml.safe_dump(config | {"server": {"port": self.port, "model_name": "served"}}))
        self._log = hosts.directory / "log"
        with self._log.open("wb") as log:
            started = f"cd {ROOT} && {command(hosts.directory, file)}"
            self.process = hosts.ssh(0, started, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def log(self) -> str:
        """What the launcher said, and each rank, those among them whose last words no other host could hear."""
        ranks = sorted((self.hosts.directory / "ranks").glob("*"))
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in (self._log, *ranks))

    def ranks_alive(self) -> list[int]:
        """Processes of ranks on both hosts, by this machine's numbers."""
        return [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if str(self.hosts.directory) in " ".join(process.info["cmdline"] or ())
            and "--local_rank" in " ".join(process.info["cmdline"] or ())
        ]

    def wait_ready(self, limit_s: float = 150.0) -> None:
        deadline = time.monotonic() + limit_s
        while "ready:" not in self.log():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"not ready: {self.log()}")
            time.sleep(0.2)

    def stream(self, body: dict[str, Any]) -> subprocess.Popen[str]:
        """A client on node-0 that prints each event of ``/v1/chat/completions`` as it comes."""
        command = (sys.executable, "-m", "tests.e2e.two_hosts", "client", str(self.port), json.dumps(body))
        return subprocess.Popen(
            self.hosts.inside(0, *command), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait_ended(self, limit_s: float) -> tuple[float, float]:
        """Seconds until every rank of both hosts is gone, and until the launcher's command is over too."""
        started = time.monotonic()
        while self.ranks_alive() and time.monotonic() - started < limit_s:
            time.sleep(0.1)
        ranks_s = time.monotonic() - started
        self.process.wait(limit_s)
        return ranks_s, time.monotonic() - started


def text_of(printed: str) -> str:
    """The text of a printed stream."""
    events = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))


def _client(port: int, body: str) -> None:
    """Raw events on stdout: what a client of another language would see."""
    content = body.encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(head.encode() + b"\r\n" + content)
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                print(line.rstrip(), flush=True)


def smollm2_config(model: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "layout": {"kvp": 2},
        "cache": {"page_tokens": 16, "num_page_rows": 64},
        "engine": {"device": "cpu", "max_context": 1024},
    }


QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def _show(model: Path) -> None:
    with tempfile.TemporaryDirectory() as name, two_hosts(Path(name)) as hosts:
        served = ServedByTwo(hosts, smollm2_config(model), hostfile_command)
        served.wait_ready()
        print(text_of(served.stream(QUESTION | {"stream": True}).communicate(timeout=120)[0]))
        client = served.stream(QUESTION | {"stream": True, "ignore_eos": True, "max_tokens": 900})
        assert client.stdout is not None
        for _ in range(20):
            client.stdout.readline()
        hosts.pull_the_cable()
        ranks_s, all_s = served.wait_ended(60)
        print(f"cable pulled: all ranks gone after {ranks_s:.1f} s, the launcher after {all_s:.1f} s")
        print(served.log())


if __name__ == "__main__":
    signal.alarm(600)
    if sys.argv[1:2] == ["client"]:
        _client(int(sys.argv[2]), sys.argv[3])
    else:
        problem = missing()
        if problem is not None:
            sys.exit(problem)
        _show(ROOT / "models" / "smollm2-135m-instruct")
