"""Starts an attempt: everything it needs into its folder, then the shim. Nothing here waits for anything.

Order matters. The intent is on disk before the shim runs, so that an agent killed in between knows what it may find.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.internet.protocol import ProcessProtocol

from llmgw.agent import shim
from llmgw.agent.processes import ProcessId, identify
from llmgw.agent.shardfolder import AttemptFolder, Intent
from llmgw.errors import LlmgwError
from llmgw.interfaces import ShardLaunch

OUTPUT_LIMIT = 16 * 2**20
CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")


class CannotStart(LlmgwError):
    """An attempt could not be started; C{code} is the stable word for it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def own_cgroup(name: str) -> str | None:
    """A new cgroup below ours for one engine, where systemd has delegated that (C{Delegate=yes}); None elsewhere."""
    try:
        with open("/proc/self/cgroup") as file:
            inside = next(line[3:].strip() for line in file if line.startswith("0::"))
        parent = next(root + inside for root in CGROUPS if os.path.exists(f"{root}{inside}/cgroup.procs"))
        if os.getxattr(parent, "user.delegate") != b"1":
            return None
        os.makedirs(made := f"{parent.rstrip('/')}/{name}", exist_ok=True)
    except (OSError, StopIteration):
        return None
    return made


def other_user(name: str | None) -> dict[str, Any] | None:
    """The ids of C{name} as the shim takes them; None when that is who we are.

    @raise CannotStart: there is no such user, or we may not become it.
    """
    if name is None:
        return None
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise CannotStart("user", f"there is no user {name} on this node (agent.yaml, engines: user)") from None
    if found.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise CannotStart("user", f"only an agent that runs as root can start engines as {name} (agent.yaml, engines: user)")
    groups = os.getgrouplist(name, found.pw_gid)
    return {"uid": found.pw_uid, "gid": found.pw_gid, "groups": groups, "home": found.pw_dir, "name": name}


def write_secrets(folder: Path, launch: ShardLaunch) -> dict[str, str]:
    """The launch's secret files on disk; returns C{{secret:NAME}} to path."""
    paths = {}
    for secret in launch.secrets:
        path = folder / "secrets" / os.path.basename(secret.name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secret.text)
        paths[f"{{secret:{secret.name}}}"] = str(path)
    return paths


def _fill(text: str, paths: Mapping[str, str]) -> str:
    for name, path in paths.items():
        text = text.replace(name, path)
    return text


def write_launch(
    folder: AttemptFolder,
    intent: Intent,
    launch: ShardLaunch,
    environment: Mapping[str, str],
    user: Mapping[str, Any] | None = None,
    limit: int = OUTPUT_LIMIT,
) -> None:
    """Write all that the shim needs; C{launch.json} last, since with it the shim may begin.

    @raise OSError: the disk is full, for one.
    @raise CannotStart: another user could not read the secret files.
    """
    if user and launch.secrets:
        raise CannotStart("user", f"engine {intent.installation} takes secrets in files, which user {user['name']} cannot read")
    folder.create()
    folder.write_intent(intent)
    paths = write_secrets(folder.path, launch)
    (work := folder.path / "work").mkdir(mode=0o700, exist_ok=True)
    who = {"HOME": user["home"], "USER": user["name"], "LOGNAME": user["name"]} if user else {}
    folder.write(
        "launch.json",
        {
            "argv": [_fill(word, paths) for word in launch.argv],
            "environment": {name: _fill(value, paths) for name, value in environment.items()} | who,
            "directory": user["home"] if user else str(work),
            "cgroup": intent.cgroup,
            "user": user,
            "limit": limit,
        },
    )


def spawn_shim(reactor: Any, folder: AttemptFolder, marks: Mapping[str, str]) -> ProcessId | None:
    """Start the shim; None if it has ended already. It is our child only as long as we live.

    @raise OSError: it could not be started.
    """
    log = os.open(folder.path / "shim.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        process = reactor.spawnProcess(
            ProcessProtocol(),
            sys.executable,
            [sys.executable, "-I", "-S", shim.__file__, str(folder.path)],
            env={**marks, "PATH": os.environ.get("PATH", os.defpath)},
            childFDs={0: null, 1: log, 2: log},
        )
    finally:
        os.close(log)
        os.close(null)
    return identify(process.pid)
