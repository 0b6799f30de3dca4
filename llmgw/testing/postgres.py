"""A PostgreSQL server in a folder of its own, for tests: started, stopped hard, frozen and thawed on one port.

PostgreSQL refuses to run as root, so root runs it as C{nobody}. It listens on loopback only and asks for a password, which
stands in a passfile as it would in operation.
"""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

USER = "llmgw"
PASSWORD = "correct horse"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "fsync": "off",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "autovacuum": "off",
}


def programs() -> Path | None:
    """Where C{initdb} and C{pg_ctl} are; None where PostgreSQL's server is not installed."""
    beside = shutil.which("initdb")
    found = [*sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), reverse=True), *([beside] if beside else [])]
    return Path(found[0]).parent if found else None


class Postgres:
    """One server. It is no child of ours (C{pg_ctl} lets go of it), so L{close} must be called.

    @param port: one that nobody takes while the server is stopped; 0 for any that is free now.
    @ivar as_user: what makes L{subprocess} run a program as the user that PostgreSQL runs as.
    """

    def __init__(self, port: int = 0) -> None:
        bin_folder = programs()
        if bin_folder is None:
            raise FileNotFoundError("PostgreSQL's server is not installed: apt-get install postgresql")
        self._bin = bin_folder
        self.folder = Path(tempfile.mkdtemp(prefix="llmgw-pg-"))
        self.data = self.folder / "data"
        self.passfile = self.folder / "passfile"
        self.port = port or _free_port()
        self._databases = 0
        self.as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            who = pwd.getpwnam("nobody")
            self.as_user = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
            os.chown(self.folder, who.pw_uid, who.pw_gid)
        self._init()

    def _init(self) -> None:
        word = self.folder / "word"
        word.write_text(PASSWORD)
        word.chmod(0o644)
        self._run("initdb", "-D", self.data, "-U", USER, "-A", "scram-sha-256", f"--pwfile={word}", "--no-sync", "-E", "UTF8")
        lines = [f"{name} = '{value}'" for name, value in _SETTINGS.items()]
        with open(self.data / "postgresql.conf", "a") as file:
            file.write("\n".join([*lines, f"port = {self.port}", ""]))
        self.passfile.write_text(f"127.0.0.1:*:*:{USER}:{PASSWORD}\n")
        self.passfile.chmod(0o600)

    def _run(self, program: str, *words: object) -> None:
        subprocess.run(
            [str(self._bin / program), *map(str, words)], check=True, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, **self.as_user,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The postmaster's."""
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._run("pg_ctl", "-D", self.data, "-w", "-s", "-l", self.folder / "log", "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it: C{fast} ends sessions, C{immediate} is a crash."""
        self._run("pg_ctl", "-D", self.data, "-w", "-s", "-m", mode, "stop")

    def signal(self, number: int) -> None:
        """Send a signal to the postmaster and every one of its processes: SIGSTOP makes a database that hangs."""
        pid = self.pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            for each in [pid, *map(int, file.read().split())]:
                os.kill(each, number)

    def database(self) -> str:
        """The address of a new, empty database."""
        import psycopg

        self._databases += 1
        name = f"test{self._databases}"
        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.address(name)

    def address(self, database: str, port: int | None = None) -> str:
        """The address of a database, with the passfile; by C{port} through a proxy."""
        return f"postgresql://{USER}@127.0.0.1:{port or self.port}/{database}?passfile={self.passfile}"

    def close(self) -> None:
        """End it, whatever state it is in, and remove its folder."""
        try:
            if (self.data / "postmaster.pid").exists():
                self.signal(signal.SIGCONT)
                self.stop("immediate")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
