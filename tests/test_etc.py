"""What is shipped under etc/: examples that pass the check, units that systemd takes and that let engines live."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from llmgw.cli.main import llmgw, run
from llmgw.cli.session import Session
from llmgw.config.agent import read_agent
from llmgw.config.machine import Machine
from llmgw.config.server import read_server
from llmgw.daemon import MISCONFIGURED, STOP_BUDGET

ETC = Path(__file__).resolve().parent.parent / "etc"
UNITS = ["llmgw-server.service", "llmgw-agent.service"]


def unit(name):
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str
    parser.read_string((ETC / name).read_text())
    return parser


TWO = ["two-servers/cp1.yaml", "two-servers/cp2.yaml"]


@pytest.mark.parametrize("name", ["server.yaml", "agent.yaml", *TWO, "two-servers/agent.yaml"])
def test_examples_pass_the_check(name, capsys):
    """The example configurations are good as they are."""
    assert run(["check", str(ETC / name)]) == 0, capsys.readouterr().out


def test_examples_live_where_the_units_say():
    """State, socket and log of the examples are in folders that the units make."""
    server = read_server(Path("/etc/llmgw/server.yaml"), (ETC / "server.yaml").read_text(), Machine())
    agent = read_agent(Path("/etc/llmgw/agent.yaml"), (ETC / "agent.yaml").read_text(), Machine())
    one, two = unit(UNITS[0])["Service"], unit(UNITS[1])["Service"]
    assert server.state == Path("/var/lib") / one["StateDirectory"]
    assert server.socket.parent == Path("/run") / one["RuntimeDirectory"]
    assert server.router.access_log.parent == Path("/var/log") / one["LogsDirectory"]
    assert agent.state == Path("/var/lib") / two["StateDirectory"]
    assert server.fleet.tls.key == Path("/etc/llmgw/pki/cp1.key") and agent.tls.key == Path("/etc/llmgw/pki/n1.key")
    for settings, service in (("server", one), ("agent", two)):
        assert f"llmgw-{settings} --config /etc/llmgw/{settings}.yaml" in service["ExecStart"]


def test_two_servers_are_one_fleet():
    """They differ in names and addresses only: one store, one catalog, one set of clocks; agents dial both."""
    one, two = (read_server(Path("/etc/llmgw/server.yaml"), (ETC / name).read_text(), Machine()) for name in TWO)
    for each in ("store", "state", "timing", "catalog", "warnings", "socket"):
        assert getattr(one, each) == getattr(two, each), each
    assert one.store.startswith("postgresql://") and one.warnings == ()
    assert [str(each.fleet.advertise) for each in (one, two)] == ["cp1.example:7443", "cp2.example:7443"]
    assert [str(each.admin.advertise) for each in (one, two)] == ["cp1.example:7444", "cp2.example:7444"]
    assert [each.fleet.tls.key.name for each in (one, two)] == ["cp1.key", "cp2.key"]
    agent = read_agent(Path("/etc/llmgw/agent.yaml"), (ETC / "two-servers/agent.yaml").read_text(), Machine())
    assert list(agent.servers) == [one.fleet.advertise, two.fleet.advertise]


@pytest.mark.parametrize("readme", ["two-servers/README.md", "../README.md"])
def test_the_commands_in_a_readme_exist(readme):
    """Each llmgw in it parses with the options it has there, up to where it would be carried out."""
    typed = re.findall(r"^\S*[#$] (.*?)(?: *#.*)?$", (ETC / readme).read_text(), flags=re.M)
    commands = [part.rpartition("-- ")[2] for line in typed for part in line.split(" && ")]
    lines = [command.removeprefix("llmgw ") for command in commands if command.startswith("llmgw ")]
    for line in lines:
        group, words = llmgw, shlex.split(line)
        while isinstance(group, click.Group):
            name, *words = words
            group = group.get_command(click.Context(group), name)
            assert group is not None, line
        group.make_context(name, words, obj=Session())
    assert len(lines) >= 7 and ("store copy" if "two" in readme else "key create") in "".join(lines)


def test_the_manual_installs_as_the_readme_does():
    """Each line of the example in llmgw-server(8) stands in the README."""
    page = (ETC / "../man/llmgw-server.8").read_text()
    example = page.partition(".SH EXAMPLE")[2].partition(".EX\n")[2].partition(".EE")[0]
    lines = example.replace("\\e\n    ", "").replace("\\-", "-").splitlines()
    readme = (ETC / "../README.md").read_text()
    assert len(lines) == 9 and not [line for line in lines if f"\n# {line}\n" not in readme]


def test_the_readme_installs_what_the_units_need():
    """Their user and who reads the key, a bundle's state folder, the files that they start from."""
    text, server, agent = (ETC / "../README.md").read_text(), unit(UNITS[0])["Service"], unit(UNITS[1])["Service"]
    assert f"u {server['User']} " in (ETC / "llmgw.sysusers.conf").read_text()
    assert "etc/llmgw.sysusers.conf /etc/sysusers.d/llmgw.conf && systemd-sysusers" in text
    assert f"install -o {server['User']} -m 600 -t /etc/llmgw/pki ~/pki/cp1.key" in text
    assert f"--state /var/lib/{agent['StateDirectory']} " in text
    for name in UNITS:
        assert f"etc/{name}" in text and unit(name)["Service"]["ExecStart"].startswith("/opt/llmgw/bin/")
    assert "-m venv /opt/llmgw" in text


@pytest.mark.parametrize("name", UNITS)
def test_units_let_workers_and_engines_live(name):
    """What the fleet's safety hangs on: only the daemon is killed, it has time to end, and it always comes back."""
    service = unit(name)["Service"]
    assert service["KillMode"] == "process"
    assert service["Type"] == "notify" and service["NotifyAccess"] == "main"
    assert STOP_BUDGET < int(service["TimeoutStopSec"]) <= 15
    assert int(service["WatchdogSec"]) >= 15
    assert service["Restart"] == "always" and unit(name)["Unit"]["StartLimitIntervalSec"] == "0"
    assert service["RestartPreventExitStatus"] == str(MISCONFIGURED)
    assert service["OOMPolicy"] == "continue" and service["TasksMax"] == "infinity"
    assert service["StateDirectoryMode"] == "0700"
    assert service.get("RuntimeDirectoryPreserve", "yes") == "yes"


def test_the_agents_unit_takes_nothing_from_engines():
    """Nothing that engines would inherit to their harm: no namespace, no privilege taken, no device policy, no limit."""
    harmful = ("Private", "Protect", "Restrict", "NoNewPrivileges", "SystemCall", "Memory", "Device", "Capability", "User")
    found = [key for key in unit("llmgw-agent.service")["Service"] if key.startswith(harmful)]
    assert not found


@pytest.mark.parametrize("name", UNITS)
def test_a_reload_is_refused_where_the_check_refuses_the_file(name):
    """Of the file that the daemon reads; only behind it comes the signal."""
    service = unit(name)["Service"]
    check, signal = service["ExecReload"].split(" ; ")
    assert shlex.split(check)[:2] == ["/opt/llmgw/bin/llmgw", "check"]
    assert shlex.split(check)[2:] == [shlex.split(service["ExecStart"])[-1]]
    assert signal == "/bin/kill -HUP $MAINPID"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_units(name, tmp_path):
    """systemd-analyze verify has nothing to say of our units (with this environment's commands)."""
    (tmp_path / name).write_text((ETC / name).read_text().replace("/opt/llmgw/bin", str(Path(sys.executable).parent)))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", tmp_path / name], capture_output=True, text=True, timeout=60)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if name in line]
    assert not ours, ours


@pytest.mark.skipif(not shutil.which("systemd-sysusers"), reason="no systemd here")
def test_systemd_takes_the_user_and_folders(tmp_path):
    """sysusers and tmpfiles make the user and the folders in an empty root."""
    (tmp_path / "etc").mkdir()
    for tool, *rest, file in (
        ("systemd-sysusers", ETC / "llmgw.sysusers.conf"),
        ("systemd-tmpfiles", "--create", ETC / "llmgw.tmpfiles.conf"),
    ):
        done = subprocess.run([tool, f"--root={tmp_path}", *rest, file], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "llmgw:" in (tmp_path / "etc" / "passwd").read_text()
    assert (tmp_path / "etc" / "llmgw" / "pki").is_dir()
