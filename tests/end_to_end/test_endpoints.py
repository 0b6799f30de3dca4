"""Endpoints that others run: what operators see of one that is gone and comes back, and who answers meanwhile."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

from tests.end_to_end.fleet import until


@contextlib.contextmanager
def engine(port):
    """Somebody else's."""
    process = subprocess.Popen([sys.executable, "-m", "llmgw.testing.fake_engine", "--port", str(port), "--name", "upstream"])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def two_ports():
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def test_a_dead_endpoint_is_shown_and_its_models_fallback_answers(fleet):
    """Nobody has to ask for it: the routers' probes find out. Requests go to the fallback until it answers again."""
    gone, there = two_ports()
    (fleet.folder / "server.yaml").write_text(
        f"router: {{listen: 127.0.0.1:{fleet.router}}}\nadmin: {{socket: {fleet.socket}}}\nstore: sqlite:///state/llmgw.db\n"
        f"models:\n  - name: main\n    routing: {{fallbacks: [spare]}}\n"
        f"    endpoints: [{{url: 'http://127.0.0.1:{gone}/v1', model: upstream}}]\n"
        f"  - name: spare\n    endpoints: [{{url: 'http://127.0.0.1:{there}/v1', model: upstream}}]\n"
    )

    def shown(*command):
        return fleet.llmgw(*command, code=None)

    with engine(there):
        fleet.start_server()
        until(lambda: fleet.ask("spare")[0] == 200, "served")
        assert [fleet.ask("main")[0] for _ in range(3)] == [200] * 3
        why = "its requests fail: it does not answer the routers' probes"
        until(lambda: f"http://127.0.0.1:{gone}/v1 failing: {why}" in " ".join(shown("status").split()), "shown", 40)
        assert f"http://127.0.0.1:{gone}/v1  is failing: {why}" in shown("explain", "main")
        assert "main: 0 of 1 endpoints elsewhere do not fail." in shown("explain", "main")
        assert "spare: 1 of 1 endpoints elsewhere do not fail." in shown("explain", "spare")
        until(lambda: f"static:main/0: {why}" in shown("events"), "an event")
        assert fleet.ask("main")[0] == 200
        with engine(gone):
            until(lambda: "static:main/0: it answers requests again" in shown("events"), "another event", 40)
            until(lambda: "failing" not in shown("status"), "not shown any more")
