"""A real systemd in namespaces of its own, with llmgw installed as the manual says and the units of etc/ as they are.

Nothing of the machine is changed: /etc, /opt, /tmp, /var/lib, /var/log and /run are others inside, and all that was started
there ends with its init. The first process of the namespace is C{boot.sh}, then systemd itself, whose only job is
C{drive.service}: it runs C{tests.end_to_end.systemd_drive}, which writes what it sees to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from llmgw.testing.certificates import Fleet

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--net", "--cgroup", "--kill-child=KILL"]

BOOT = """#!/bin/sh
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --bind {folder}/etc /etc
for place in /opt /run /var/lib /var/log; do mount -t tmpfs -o mode=755 tmpfs $place; done
mkdir /opt/python /opt/llmgw /opt/folder
mount --bind {folder} /opt/folder
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p {folder}
mount --move /opt/folder {folder}
mount --bind {python} /opt/python
LD_LIBRARY_PATH=/opt/python/lib /opt/python/bin/python3 -m venv --without-pip /opt/llmgw
site=$(echo /opt/llmgw/lib/python*/site-packages)
echo "import site; site.addsitedir('{packages}')" > $site/llmgw.pth
cp {folder}/twistd {folder}/llmgw /opt/llmgw/bin/
ip link set lo up
for generators in /lib/systemd/system-generators /etc/systemd/system-generators; do
    [ ! -d $generators ] || mount -t tmpfs tmpfs $generators
done
export container=test SYSTEMD_UNIT_PATH={folder}/units
exec {systemd} --system --unit=drive.target --log-target=console --show-status=no
"""
DRIVE = """[Service]
Type=oneshot
WorkingDirectory={root}
ExecStart=/opt/llmgw/bin/python3 -m tests.end_to_end.systemd_drive {folder}
"""
# The interpreter's own library is where only the namespace has it.
LIBRARY = "[Manager]\nDefaultEnvironment=LD_LIBRARY_PATH=/opt/python/lib\n"
SERVER = """
router: {listen: 127.0.0.1:8080, access_log: /var/log/llmgw/access.jsonl}
fleet:
  listen: 127.0.0.1:7443
  advertise: 127.0.0.1:7443
  tls: {authority: pki/ca.pem, certificate: pki/cp1.pem, key: pki/cp1.key}
admin: {socket: /run/llmgw/admin.sock}
store: sqlite:////var/lib/llmgw/llmgw.db
models:
  - name: m
    profile:
      engine: command
      argv: [/opt/llmgw/bin/python3, -m, llmgw.testing.fake_engine, --port, "{port}", --name, "{model}", --events, "400",
             --interval, "0.02"]
      health: /health
      resources: {devices: 0, host_memory: 16MiB}
"""
AGENT = """
node: n1
server: 127.0.0.1:7443
tls: {authority: pki/ca.pem, certificate: pki/n1.pem, key: pki/n1.key}
state: /var/lib/llmgw-agent
address: 127.0.0.1
ports: 20000-20099
"""
SCRIPT = "#!/opt/llmgw/bin/python3\nimport sys\nfrom {module} import {name}\nsys.exit({name}())\n"


def obstacle() -> str:
    """Why it cannot be done here; empty if it can."""
    if os.geteuid() != 0:
        return "only root may make the namespaces"
    if missing := [tool for tool in ("unshare", "systemctl", "systemd-sysusers", "ip") if not shutil.which(tool)]:
        return f"not installed: {', '.join(missing)}"
    if not SYSTEMD.exists():
        return f"there is no {SYSTEMD}"
    if any(hidden in ROOT.parents for hidden in (Path("/root"), Path("/home"), Path("/opt"), Path("/run"))):
        return f"{ROOT} is where the server's unit, or the namespace, hides it"
    attempt = "mount --make-rprivate / && mount -t cgroup2 cgroup2 /sys/fs/cgroup && mount -t tmpfs tmpfs /run"
    done = subprocess.run([*UNSHARE, "sh", "-c", attempt], capture_output=True, text=True, timeout=30)
    return f"the namespaces cannot be made: {done.stderr.strip()}" if done.returncode else ""


def boot(folder: Path, seconds: float) -> dict[str, object]:
    """Run the drive in a namespace; returns what it saw. C{folder} must be readable by everybody.

    @raise AssertionError: it did not come to its end in time; the message has what systemd said.
    """
    _prepare(folder)
    log = folder / "console.log"
    with log.open("wb") as console:
        booted = subprocess.Popen([*UNSHARE, folder / "boot.sh"], stdout=console, stderr=console, stdin=subprocess.DEVNULL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        booted.wait(seconds)
    booted.kill()
    booted.wait()
    seen: dict[str, object] = json.loads((folder / "seen.json").read_text()) if (folder / "seen.json").exists() else {}
    assert seen.get("over"), f"{seen}\n{log.read_text(errors='replace')[-6000:]}"
    return seen


def _prepare(folder: Path) -> None:
    shutil.copytree("/etc", folder / "etc", symlinks=True, ignore_dangling_symlinks=True)
    place = {"folder": folder, "root": ROOT, "systemd": SYSTEMD, "python": Path(sys.base_prefix)}
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    boot = folder / "boot.sh"
    boot.write_text(BOOT.format(packages=packages, **place))
    boot.chmod(0o755)
    for name, module in (("twistd", "twisted.scripts.twistd"), ("llmgw", "llmgw.cli.main")):
        (folder / name).write_text(SCRIPT.format(module=module, name="run" if name == "twistd" else "main"))
        (folder / name).chmod(0o755)
    units = folder / "units"
    units.mkdir()
    for unit in ("llmgw-server.service", "llmgw-agent.service"):
        shutil.copy(ROOT / "etc" / unit, units)
    (units / "drive.service").write_text(DRIVE.format(**place))
    (units / "drive.target").write_text("[Unit]\nWants=drive.service\n")
    for target in ("sysinit", "basic", "shutdown", "network-online"):
        (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    (folder / "etc/systemd/system.conf.d").mkdir(parents=True, exist_ok=True)
    (folder / "etc/systemd/system.conf.d/python.conf").write_text(LIBRARY)
    subprocess.run(
        ["systemd-sysusers", f"--root={folder}", ROOT / "etc" / "llmgw.sysusers.conf"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    _configure(folder / "etc" / "llmgw")


def _configure(etc: Path) -> None:
    etc.mkdir()
    (etc / "server.yaml").write_text(SERVER)
    (etc / "agent.yaml").write_text(AGENT)
    fleet = Fleet(datetime.now(UTC))
    fleet.write(etc / "pki", "n1", fleet.node("n1"))
    files = fleet.write(etc / "pki", "cp1", fleet.server("cp1"))
    rows = (row.split(":") for row in (etc.parent / "passwd").read_text().splitlines())
    os.chown(files.key, *next((int(row[2]), int(row[3])) for row in rows if row[0] == "llmgw"))
