"""Downloads of an agent: the real child process with the real huggingface_hub, against a small hub on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from llmgw.agent import fetching as module
from llmgw.agent.fetch_process import fetch_environment
from llmgw.agent.fetching import Fetching
from llmgw.agent.weights import WeightFinder
from llmgw.fleet.fetch import FetchState
from tests.hub_stub import COMMIT, Hub, sha256

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install -e '.[fetch]'")

WEIGHTS = "hf:acme/tiny"
HEADER = b'{"a": {"dtype": "U8", "shape": [1048576], "data_offsets": [0, 1048576]}}'
TENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(256)) * 4096
FILES = {"config.json": b'{"model_type": "tiny"}', "model.safetensors": TENSORS, "pytorch_model.bin": b"the same again"}


class Rig:
    """A hub, and the downloads of one node."""

    def __init__(self, reactor, folder, **hub):
        self.reactor, self.folder = reactor, folder
        self.hub = Hub(**{"files": dict(FILES), **hub}).start()
        self.cache = folder / "hub"
        self.path = folder / "fetches.json"
        own = {"PATH": os.environ["PATH"], "HF_ENDPOINT": self.hub.url, "HF_HOME": str(folder / "home")}
        self.environment = fetch_environment(own, {"HF_HUB_DOWNLOAD_TIMEOUT": "5"})
        self.blobs = self.cache / "models--acme--tiny" / "blobs"
        self.made = []
        self.fetching = self.agent()

    def agent(self):
        self.fetching = Fetching(self.reactor, self.environment, self.cache, self.path, lambda: 1000.0)
        self.made.append(self.fetching)
        self.fetching.start()
        return self.fetching

    def found(self):
        return WeightFinder([], {"HF_HUB_CACHE": str(self.cache)}).inspect(WEIGHTS)

    @property
    def now(self):
        return self.fetching.all()[-1]

    async def until(self, found, what, seconds=15.0):
        deadline = self.reactor.seconds() + seconds
        while not (value := found()):
            assert self.reactor.seconds() < deadline, f"{what}: not in {seconds} s; {self.fetching.all()}"
            await deferLater(self.reactor, 0.02)
        return value

    async def over(self, state=FetchState.DONE):
        await self.until(lambda: not self.now.state.active, "over")
        assert self.now.state is state, self.now
        return self.now

    async def close(self):
        self.hub.stop()
        for fetching in self.made:
            fetching.stop()
        await self.until(lambda: not any(fetching._running for fetching in self.made), "children ended")


@pytest.fixture
def rig_of(reactor, tmp_path, monkeypatch):
    """Makes rigs whose second tries come soon."""
    monkeypatch.setattr(module, "AGAIN", (0.1, 0.2))
    made = []

    def make(**more):
        made.append(Rig(reactor, tmp_path, **more))
        return made[-1]

    yield make
    for rig in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(rig.close()))


@pytest_twisted.ensureDeferred
async def test_a_model_is_downloaded_verified_and_found(rig_of):
    """The same weights in another format are left alone; the revision has its name only at the end; the size is told first."""
    rig = rig_of()
    assert not rig.found().found
    first = await rig.fetching.order(WEIGHTS)
    assert first.total == len(FILES["config.json"]) + len(TENSORS)
    done = await rig.over()
    assert (done.bytes, done.error, done.text.startswith("done (1.0 MiB)")) == (done.total, "", True)
    found = rig.found()
    assert (found.found, found.revision, found.config) == (True, COMMIT, {"model_type": "tiny"})
    modes = {path.stat().st_mode & 0o777 for path in rig.blobs.iterdir()}
    assert modes == {0o644}, "an engine may run as another user"
    assert not rig.hub.gets("pytorch_model.bin") and json.loads(rig.path.read_text()) == []


@pytest_twisted.ensureDeferred
async def test_i4_the_same_weights_are_downloaded_once(rig_of):
    """I4: two orders while it runs, also under the name with its revision, are one download."""
    rig = rig_of()
    orders = [rig.fetching.order(WEIGHTS), rig.fetching.order(f"{WEIGHTS}@main")]
    for order in orders:
        await order
    await rig.over()
    assert len(rig.fetching.all()) == 1 and rig.hub.gets("model.safetensors") == [""]


@pytest_twisted.ensureDeferred
async def test_i2_a_killed_downloader_is_followed_by_one_that_resumes(rig_of):
    """I2: kill -9 of the child: the next goes on from the bytes that are there, and the file is whole."""
    rig = rig_of(cut=300_000, held=True)
    await rig.fetching.order(WEIGHTS)
    await rig.until(lambda: rig.now.bytes >= 262144, "a part is there")
    rig.hub.cut, rig.hub.held = None, False
    rig.fetching._running[WEIGHTS].transport.signalProcess("KILL")
    await rig.over()
    assert rig.hub.gets("model.safetensors") == ["", "bytes=262144-"]
    assert sha256((rig.blobs / sha256(TENSORS)).read_bytes()) == sha256(TENSORS)


@pytest_twisted.ensureDeferred
async def test_a_download_goes_on_with_the_next_agent(rig_of):
    """The agent ends in the middle: its child ends with it, and the next agent takes the download up without being told."""
    rig = rig_of(cut=300_000, held=True)
    await rig.fetching.order(WEIGHTS)
    await rig.until(lambda: rig.now.bytes >= 262144, "a part is there")
    first = rig.fetching
    first.stop()
    await rig.until(lambda: not first._running, "the child ended")
    assert json.loads(rig.path.read_text()) == [WEIGHTS]
    rig.hub.cut, rig.hub.held = None, False
    second = rig.agent()
    assert second.busy(WEIGHTS)
    await rig.over()
    assert rig.hub.gets("model.safetensors")[-1] == "bytes=262144-"


@pytest_twisted.ensureDeferred
async def test_i1_a_connection_that_breaks_off_is_resumed(rig_of):
    """I1: each answer ends too early, and yet it gets there."""
    rig = rig_of(cut=600_000)
    await rig.fetching.order(WEIGHTS)
    await rig.over()
    ranges = rig.hub.gets("model.safetensors")
    assert ranges[:2] == ["", "bytes=524288-"] and rig.found().found


@pytest_twisted.ensureDeferred
async def test_i1_a_download_to_which_no_byte_comes_is_begun_anew_and_resumed(rig_of, monkeypatch):
    """I1: the child is killed at its deadline; progress is live again with the next one."""
    monkeypatch.setattr(module, "STALLED", 3.0)
    rig = rig_of(cut=300_000, held=True)
    rig.environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "60"
    await rig.fetching.order(WEIGHTS)
    await rig.until(lambda: rig.now.state is FetchState.WAITING, "killed")
    assert "no byte came in 3 s; next try in" in rig.now.reason and rig.now.bytes == 262144 + len(FILES["config.json"])
    rig.hub.cut, rig.hub.held = None, False
    await rig.over()
    assert rig.hub.gets("model.safetensors")[-1] == "bytes=262144-"


@pytest_twisted.ensureDeferred
async def test_an_answer_comes_in_time_though_the_hub_says_nothing(rig_of, monkeypatch):
    """Somebody waits for it; the download goes on."""
    monkeypatch.setattr(module, "TELL_WITHIN", 0.05)
    rig = rig_of()
    assert (await rig.fetching.order(WEIGHTS)).state is FetchState.CHECKING
    await rig.over()


@pytest_twisted.ensureDeferred
async def test_i1_a_hub_that_is_away_is_told_with_its_address_after_three_tries(rig_of):
    """I1: and the next order tries again."""
    rig = rig_of()
    rig.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    failed = await rig.fetching.order(WEIGHTS)
    failed = await rig.over(FetchState.FAILED)
    assert failed.error == "network" and "http://127.0.0.1:9/acme/tiny" in failed.reason and "3 tries" in failed.reason
    rig.environment["HF_ENDPOINT"] = rig.hub.url
    rig.fetching.order(WEIGHTS)
    await rig.over()


@pytest_twisted.ensureDeferred
async def test_a_gated_model_is_told_with_what_to_do_and_taken_with_its_token(rig_of):
    """The page of the licence and where the token goes; the token is in no argument and nothing we print."""
    rig = rig_of(gated="hf_secret")
    failed = await rig.fetching.order(WEIGHTS)
    failed = await rig.over(FetchState.FAILED)
    assert failed.error == "gated"
    assert f"accept the licence at {rig.hub.url}/acme/tiny, set the token in HF_TOKEN" in failed.reason
    assert str(rig.folder / "home" / "token") in failed.reason
    (rig.folder / "home").mkdir(exist_ok=True)
    (rig.folder / "home" / "token").write_text("hf_secret")
    rig.hub.cut, rig.hub.held = 300_000, True
    rig.fetching.order(WEIGHTS)
    await rig.until(lambda: rig.now.bytes >= 262144, "a part is there")
    pid = rig.fetching._running[WEIGHTS].transport.pid
    assert b"hf_secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    rig.hub.cut, rig.hub.held = None, False
    rig.hub.release.set()
    await rig.over()
    assert "hf_secret" in rig.hub.tokens and "hf_secret" not in str(rig.fetching.all())


@pytest_twisted.ensureDeferred
async def test_i5_a_damaged_file_alone_is_fetched_again(rig_of):
    """I5, I6: once, silently; the others are untouched."""
    rig = rig_of(damaged=1)
    await rig.fetching.order(WEIGHTS)
    await rig.over()
    assert rig.hub.gets("model.safetensors") == ["", ""] and len(rig.hub.gets("config.json")) == 1
    assert rig.found().found


@pytest_twisted.ensureDeferred
async def test_i5_a_file_of_a_wrong_hash_is_never_taken(rig_of):
    """I5: twice damaged is a failure that names it; nothing of it is left that could pass for the model."""
    rig = rig_of(damaged=2)
    await rig.fetching.order(WEIGHTS)
    failed = await rig.over(FetchState.FAILED)
    assert failed.error == "wrong_hash" and "model.safetensors" in failed.reason and sha256(TENSORS)[:12] in failed.reason
    assert not rig.found().found and not list(rig.blobs.glob(f"{sha256(TENSORS)}*"))


@pytest_twisted.ensureDeferred
async def test_i5_a_whole_file_that_was_damaged_on_disk_is_fetched_again(rig_of):
    """I5: an order for what is there verifies it."""
    rig = rig_of()
    await rig.fetching.order(WEIGHTS)
    await rig.over()
    blob = rig.blobs / sha256(TENSORS)
    blob.write_bytes(b"y" + blob.read_bytes()[1:])
    rig.fetching.order(WEIGHTS)
    await rig.over()
    assert sha256(blob.read_bytes()) == sha256(TENSORS) and len(rig.hub.gets("config.json")) == 1


@pytest_twisted.ensureDeferred
async def test_i7_what_does_not_fit_on_the_disk_is_refused_before_the_first_byte(rig_of):
    """I7: with what it needs and what is free."""
    rig = rig_of(size_told={"model.safetensors": 2**60})
    failed = await rig.fetching.order(WEIGHTS)
    failed = await rig.over(FetchState.FAILED)
    assert failed.error == "disk_full" and "more are needed in" in failed.reason and "are free" in failed.reason
    assert rig.hub.gets("model.safetensors") == []


@pytest_twisted.ensureDeferred
async def test_i7_a_disk_that_becomes_full_fails_with_what_is_there_kept(rig_of):
    """I7: somebody else filled it meanwhile; here the whole device is full from the start, as /dev/full is."""
    rig = rig_of()
    rig.blobs.mkdir(parents=True)
    (rig.blobs / f"{sha256(TENSORS)}.incomplete").symlink_to("/dev/full")
    await rig.fetching.order(WEIGHTS)
    failed = await rig.over(FetchState.FAILED)
    assert failed.error == "disk_full" and "the disk became full" in failed.reason


@pytest_twisted.ensureDeferred
async def test_i8_cancel_ends_it_and_removes_what_is_not_whole(rig_of):
    """I3, I8: at once; a later order begins from nothing, and what nobody downloads cannot be cancelled."""
    rig = rig_of(cut=300_000, held=True)
    assert rig.fetching.cancel(WEIGHTS) is None
    await rig.fetching.order(WEIGHTS)
    await rig.until(lambda: rig.now.bytes >= 262144, "a part is there")
    began = rig.reactor.seconds()
    assert rig.fetching.cancel(f"{WEIGHTS}@main").state is FetchState.CANCELLED
    await rig.until(lambda: not rig.fetching._running, "the child ended")
    assert rig.reactor.seconds() - began < 5
    assert not list(rig.blobs.glob("*.incomplete")) and rig.fetching.busy(WEIGHTS) is None
    assert json.loads(rig.path.read_text()) == []


@pytest_twisted.ensureDeferred
async def test_i3_progress_only_grows_and_is_whole_only_when_verified(rig_of):
    """I3: 100 % is said of nothing that is not done."""
    rig = rig_of(damaged=1)
    seen = []
    keep = rig.fetching._set
    rig.fetching._set = lambda key, **changes: seen.append(keep(key, **changes)) or seen[-1]
    await rig.fetching.order(WEIGHTS)
    await rig.over()
    sizes = [one.bytes for one in seen if one.total]
    assert sizes == sorted(sizes)
    assert all("100 %" not in one.text and (one.state is FetchState.DONE or one.state.active) for one in seen)


@pytest_twisted.ensureDeferred
async def test_without_huggingface_hub_the_command_that_installs_it_is_said(rig_of):
    """With the very interpreter that the agent runs by."""
    rig = rig_of()
    (rig.folder / "huggingface_hub.py").write_text("raise ImportError('none here')")
    rig.environment["PYTHONPATH"] = str(rig.folder)
    await rig.fetching.order(WEIGHTS)
    failed = await rig.over(FetchState.FAILED)
    assert failed.error == "not_installed" and f"{sys.prefix}/bin/pip install 'llmgw[fetch]'" in failed.reason


@pytest_twisted.ensureDeferred
async def test_a_model_or_revision_that_is_not_there_is_said(rig_of):
    """Without a second try."""
    rig = rig_of()
    for weights, error in (("hf:acme/other", "not_found"), (f"{WEIGHTS}@v9", "no_revision"), ("tiny.gguf", "no_hub")):
        told = await rig.fetching.order(weights)
        await rig.until(lambda: not rig.fetching.busy(weights), "over")
        told = next((one for one in rig.fetching.all() if one.weights == weights), told)
        assert (told.state, told.error) == (FetchState.FAILED, error), told
