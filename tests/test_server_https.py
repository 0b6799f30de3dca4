"""The router's own certificate: an end that comes, one that has come, and files that cannot be used are told."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import pytest_twisted
from attrs import evolve
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher

from llmgw.config.settings import TlsFiles
from llmgw.errors import LlmgwError
from llmgw.server.https import BadCertificate, HttpsCertificate
from llmgw.testing.certificates import SERVER, Fleet
from tests.server_rig import Rig
from tests.test_server_service import STATIC, ended, rigs, started  # noqa: F401

DAY = 86400


@pytest.fixture
def said():
    """The warnings that were logged of certificates."""
    found = []

    def hear(event):
        if event.get("event") == "certificate_expires":
            found.append(event["warning"])

    globalLogPublisher.addObserver(hear)
    yield found
    globalLogPublisher.removeObserver(hear)


def write(folder, days):
    """A certificate that ends in so many days, after one of 90."""
    fleet = Fleet()
    pair = fleet.leaf([], [SERVER], ["127.0.0.1"], start=timedelta(days=days - 90), end=timedelta(days=days))
    files = fleet.write(folder, "web", pair)
    return TlsFiles(files.certificate, files.key)


def with_https(folder, days):
    rig = Rig(folder, STATIC, fleet=False)
    rig.settings = evolve(rig.settings, router=evolve(rig.settings.router, tls=write(folder / "web", days)))
    rig.make()
    return rig


async def told(rig):
    return (await rig.get("/v1/status"))["server"]["notes"]


@pytest_twisted.ensureDeferred
async def test_an_expired_certificate_taken_on_sighup_is_told(rigs, tmp_path, said):  # noqa: F811
    """In status, in the log and as a metric; a good one ends it."""
    rig = await started(rigs, with_https(tmp_path, 80))
    assert not await told(rig) and not said
    write(tmp_path / "web", -1)
    await rig.server.reload(rig.settings)
    [note] = await told(rig)
    assert note.startswith("router.tls: certificate expired ") and "renew it now" in note
    assert ["expired" in warning for warning in said] == [True]
    metrics = await rig.server.metrics()
    [line] = [line for line in metrics.splitlines() if line.startswith("llmgw_certificate_expires{")]
    assert line.startswith('llmgw_certificate_expires{role="router",name="cp1"} ')
    assert float(line.split()[-1]) == pytest.approx(time.time() - DAY, abs=60)
    write(tmp_path / "web", 80)
    await rig.server.reload(rig.settings)
    assert not await told(rig)


@pytest_twisted.ensureDeferred
async def test_files_that_cannot_be_used_refuse_the_reload(rigs, tmp_path):  # noqa: F811
    """The one before stays, and status says so until the files are good; nothing else of that SIGHUP is taken."""
    rig = await started(rigs, with_https(tmp_path, 80))
    good = (tmp_path / "web" / "web.pem").read_bytes()
    (tmp_path / "web" / "web.pem").write_text("nonsense")
    with pytest.raises(LlmgwError, match=r"router.tls: .*web.pem with .*web.key cannot be used"):
        rig.server.reload(rig.settings)
    assert ["web.pem" in note and "the one before" in note for note in await told(rig)] == [True]
    (tmp_path / "web" / "web.pem").write_bytes(good)
    await rig.server.reload(rig.settings)
    assert not await told(rig)


@pytest_twisted.ensureDeferred
async def test_a_start_with_files_that_cannot_be_used_says_so(rigs, tmp_path, monkeypatch):  # noqa: F811
    """In one sentence, in place of workers that end again and again."""
    rig = with_https(tmp_path, 80)
    rigs.append(rig)
    (tmp_path / "web" / "web.key").write_text("nonsense")
    assert "router.tls: " in await ended(rig, monkeypatch)


def test_the_end_is_told_as_it_comes(tmp_path, said):
    """Fourteen days before, three, one, and when it is there; each once, by the hour."""
    clock, begin = Clock(), time.time()
    certificate = HttpsCertificate(write(tmp_path, 20), clock, lambda: begin + clock.seconds())
    certificate.start()
    said.clear()  # its last third has begun
    for _ in range(24 * 21):
        clock.advance(3600)
    assert [warning.split(":")[0] for warning in said] == [
        "certificate expires soon", "certificate expires very soon", "certificate expires within a day", said[-1].split(":")[0],
    ]  # fmt: skip
    assert said[-1].startswith("certificate expired")
    certificate.stop()
    assert not clock.getDelayedCalls()


def test_without_https_nothing_is_told():
    """Nothing to read, nothing to look at."""
    certificate = HttpsCertificate(None, Clock(), time.time)
    certificate.start()
    certificate.read()
    assert certificate.expires is None and not certificate.notes()


def test_a_certificate_of_another_key_is_refused(tmp_path):
    """The two files have to belong together."""
    files = write(tmp_path / "one", 80)
    other = write(tmp_path / "two", 80)
    with pytest.raises(BadCertificate):
        HttpsCertificate(TlsFiles(files.certificate, other.key), Clock(), time.time).start()
