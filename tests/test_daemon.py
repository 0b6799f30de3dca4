"""Signals, the bounded stop and systemd's notifications, each in a process of its own."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from twisted.internet.task import Clock
from twisted.logger import LogPublisher, formatEvent, globalLogPublisher
from twisted.python.log import LogPublisher as LegacyPublisher

from llmgw.daemon import AwakeClock, SystemdNotify
from llmgw.logs import JsonLines, TextLines, escape

PROGRAM = """
import os, sys, time
import llmgw.daemon as daemon
daemon.STOP_BUDGET = 1.0
from twisted.application.service import MultiService
from twisted.internet import reactor, threads
from twisted.internet.defer import Deferred
top = MultiService()
life = daemon.Lifecycle(reactor, daemon.SystemdNotify(os.environ), lambda: print("reload", flush=True), lambda: "status line")
life.setServiceParent(top)
reactor.addSystemEventTrigger("before", "shutdown", top.stopService)
def hang():
    print("hung", flush=True)
    time.sleep(60)
def {name}():
    {body}
reactor.callWhenRunning(top.startService)
reactor.callLater(0, lambda: reactor.callLater(0, lambda: (print("up", flush=True), {name}())))
reactor.run()
print("clean", flush=True)
"""


def start(body: str, environment: dict[str, str] | None = None, stdin: int | None = None) -> subprocess.Popen[str]:
    program = PROGRAM.format(name="do", body=body)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout.readline() == "up\n"
    return process


def finish(process: subprocess.Popen[str], seconds: float) -> tuple[float, str, str]:
    begin = time.monotonic()
    out, err = process.communicate(timeout=seconds)
    return time.monotonic() - begin, out, err


def test_sigterm_is_a_clean_stop():
    """Exit status 0, at once."""
    process = start("pass")
    process.send_signal(signal.SIGTERM)
    _, out, _ = finish(process, 5)
    assert (process.returncode, out) == (0, "clean\n")


@pytest.mark.parametrize(
    ("body", "blamed"),
    [
        ("threads.deferToThread(hang)", "in hang"),
        ("reactor.addSystemEventTrigger('before', 'shutdown', Deferred); print('hung', flush=True)", "reactor"),
        ("reactor.callLater(0.05, hang)", "in hang"),
    ],
)
def test_a_hung_stop_ends_in_time_and_says_where(body, blamed):
    """A blocked pool thread, a Deferred that never fires, a blocked reactor: the stack is printed, the status is 1."""
    process = start(body)
    assert process.stdout.readline() == "hung\n"
    process.send_signal(signal.SIGTERM)
    took, out, err = finish(process, 10)
    assert process.returncode == 1
    assert "most recent call first" in err and blamed in err
    assert "clean" not in out
    assert took < 5


def test_a_second_signal_means_now():
    """The operator's second SIGTERM does not wait for the first."""
    process = start("threads.deferToThread(time.sleep, 60)")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    finish(process, 5)
    assert process.returncode == 1


def test_sighup_reloads_and_goes_on():
    """SIGHUP, which would end a plain twistd, calls reload."""
    process = start("pass")
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "reload\n"
    process.send_signal(signal.SIGTERM)
    finish(process, 5)
    assert process.returncode == 0


def test_a_refused_reload_stands_in_the_status_line_until_the_next(tmp_path):
    """systemctl reload cannot wait for it, so systemctl status says it; answered late and in many lines as well as at once."""
    body = """
    from twisted.internet.defer import fail, Deferred
    from llmgw.errors import LlmgwError
    late = Deferred()
    reactor.callLater(0.1, lambda: late.errback(LlmgwError("later")))
    def refuse():
        raise LlmgwError("x.yaml:2: bad\\nx.yaml:3: worse\\nREADY=0")
    answers = iter([refuse, lambda: late, lambda: None])
    life._reload = lambda: next(answers)()
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(5)
        process = start(body, {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        heard = []
        refusals = [". Reload refused: x.yaml:2: bad (and 2 more)", ". Reload refused: later", ""]
        until_heard(notify, heard, "STATUS=status line")
        for refusal in refusals:
            process.send_signal(signal.SIGHUP)
            until_heard(notify, heard, f"STATUS=status line{refusal}")
        until_heard(notify, heard, "READY=1")
        process.send_signal(signal.SIGTERM)
        finish(process, 5)
    assert process.returncode == 0
    assert heard.count("READY=1") == heard.count("RELOADING=1") == 3


def until_heard(notify: socket.socket, heard: list[str], text: str) -> None:
    """Listen until this is said, as a message of its own."""
    heard.append(notify.recv(500).decode())
    while heard[-1] != text:
        heard.append(notify.recv(500).decode())


def test_a_process_that_was_stopped_hears_what_came_before_it_counts_deadlines():
    """SIGSTOP past a deadline, the answer in time: it is read first, and the deadline has as long as it had before."""
    process = start(
        """
    from llmgw.daemon import awake_clock
    from twisted.internet.protocol import Protocol
    from twisted.internet.stdio import StandardIO
    awake_clock(reactor)
    began = reactor.seconds()
    reactor.callLater(2.5, lambda: print("late", reactor.seconds() - began, flush=True))
    answer = Protocol()
    answer.dataReceived = lambda data: print("heard", reactor.seconds() - began, flush=True)
    StandardIO(answer)
    """,
        stdin=subprocess.PIPE,
    )
    process.send_signal(signal.SIGSTOP)
    process.stdin.write("answer\n")
    process.stdin.flush()
    time.sleep(4)  # that it is stopped for so long is the fault
    process.send_signal(signal.SIGCONT)
    heard, late = process.stdout.readline().split(), process.stdout.readline().split()
    process.send_signal(signal.SIGTERM)
    finish(process, 5)
    assert (heard[0], late[0]) == ("heard", "late")
    assert float(heard[1]) < 2 and 2.5 <= float(late[1]) < 3.5


def test_the_awake_clock_goes_on_a_second_at_most_between_two_looks():
    """And never back; what it left out is in the log, once."""
    now, clock = [100.0], Clock()
    awake = AwakeClock(clock, lambda: now[0])
    awake.start()
    seen, said = [], []
    observe = lambda event: said.append(formatEvent(event))  # noqa: E731
    globalLogPublisher.addObserver(observe)
    for step in (0.5, 1.0, 1.9, 60.0, 1.0, 3600.0):
        now[0] += step
        seen.append(awake.seconds())
        clock.advance(1)
    globalLogPublisher.removeObserver(observe)
    assert seen == pytest.approx([100.5, 101.5, 103.4, 104.4, 105.4, 106.4])
    assert said == [f"this process did not run for {lost} s; no deadline counts them" for lost in (59, 3599)]


def test_systemd_hears_of_watchdog_status_and_stop(tmp_path):
    """WATCHDOG=1 comes from the reactor, STATUS when it changes, STOPPING first in a stop."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(5)
        process = start("pass", {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"})
        heard = [notify.recv(200), notify.recv(200)]
        process.send_signal(signal.SIGTERM)
        while b"STOPPING=1" not in heard:
            heard.append(notify.recv(200))
        finish(process, 5)
    assert b"WATCHDOG=1" in heard
    assert b"STATUS=status line" in heard


def test_an_abstract_notify_socket():
    """systemd may hand out a name in the abstract namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        name = f"llmgw-test-{os.getpid()}"
        notify.bind("\0" + name)
        notify.settimeout(5)
        SystemdNotify({"NOTIFY_SOCKET": "@" + name}).tell(READY="1", STATUS="x")
        assert notify.recv(200) == b"READY=1\nSTATUS=x"


def test_no_notify_socket_and_a_dead_one_are_silent():
    """Without systemd nothing happens, and a supervisor that went away is no error."""
    SystemdNotify({}).tell(READY="1")
    SystemdNotify({"NOTIFY_SOCKET": "/nonexistent/notify"}).tell(READY="1")
    assert SystemdNotify({"WATCHDOG_USEC": "x"}).watchdog is None


@pytest.mark.parametrize("bad", ["\n", "\x1b[31m", "\u2028", "\u202e", "\x9b", "\ud800"])
def test_no_text_forges_a_log_line(bad):
    """Line ends, escapes and direction marks are shown, not obeyed."""
    assert bad not in escape(f"a{bad}b") and escape(f"a{bad}b").encode()


@pytest.mark.parametrize("observer", [TextLines, JsonLines])
def test_a_plugin_cache_that_cannot_be_written_is_no_news(observer):
    """twistd says so at each start under our unit, which lets the server write nowhere but its own folders."""
    out = io.StringIO()
    publisher = LogPublisher(observer(out))
    legacy = LegacyPublisher(observerPublisher=publisher, publishPublisher=publisher)
    legacy.msg(format="Unable to write to plugin cache %(path)s: error number %(errno)d", path="/x", errno=30)
    legacy.msg("something else")
    assert "something else" in out.getvalue() and "cache" not in out.getvalue()
