"""Downloads one model into the node's Hugging Face cache and tells of it in lines of JSON; run as a child of the agent.

The first line of stdin is C{{"repo", "revision", "cache"}}. A second line, C{cancel}, has partial files removed; the end of
stdin, which comes when the agent dies, ends the child and leaves them to be resumed by the next one. Since its version 2
huggingface_hub throws them away, so large files are fetched here with its C{http_get} into a file named by their hash.

A revision gets its name in C{refs/} only when all its files are there and hashed, so that nobody loads half of a model.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

from attrs import frozen

from llmgw.fleet.units import show_size

AT_ONCE = 4
EVERY = 0.5
# huggingface_hub writes 10 MiB at a time, so that a slow link would look like one that stalls, and loses what a cut leaves of it.
CHUNK = 2**18
# Copies of the weights in other formats, which no engine of ours loads where there are safetensors.
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".gguf")
OTHER_FOLDERS = ("original/", "onnx/", "openvino/", "metal/", "coreml/")


class Failed(Exception):
    """It cannot go on. C{code} is a stable word."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@frozen
class File:
    """One file of the revision. C{blob} is its name in the cache: the SHA-256 of a large file, git's SHA-1 of a small one."""

    name: str
    size: int
    blob: str
    large: bool


def say(**what: Any) -> None:
    """Tell the agent."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def chosen(names: Iterable[str]) -> set[str]:
    """The files that are worth downloading: all, but where there are safetensors not the same weights in other formats."""
    everything = set(names)
    if not any(name.endswith(".safetensors") and "/" not in name for name in everything):
        return everything
    return {n for n in everything if not n.endswith(OTHER_FORMATS) and not n.startswith(OTHER_FOLDERS)}


def digest(path: Path, file: File) -> str:
    """What its name in the cache must be."""
    made = hashlib.sha256() if file.large else hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with open(path, "rb") as opened:
        while chunk := opened.read(CHUNK):
            made.update(chunk)
    return made.hexdigest()


def load() -> Any:
    """What of huggingface_hub is used, under one roof.

    @raise ImportError: it is not installed.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    constants.DOWNLOAD_CHUNK_SIZE = CHUNK
    return SimpleNamespace(
        HfApi=hub.HfApi,
        constants=constants,
        errors=errors,
        get_hf_file_metadata=hub.get_hf_file_metadata,
        hf_hub_download=hub.hf_hub_download,
        hf_hub_url=hub.hf_hub_url,
        http_get=http_get,
        build_hf_headers=build_hf_headers,
    )


class Download:
    """One revision of one repository.

    @param hub: see L{load}.
    """

    def __init__(self, hub: Any, repo: str, revision: str, cache: Path) -> None:
        self._hub = hub
        self._repo = repo
        self._revision = revision
        self._cache = cache
        self._folder = cache / f"models--{repo.replace('/', '--')}"
        self._blobs = self._folder / "blobs"
        self._files: list[File] = []
        self._commit = ""
        self._verifying: set[str] = set()

    def run(self) -> None:
        """All of it.

        @raise Failed: with a code and a sentence.
        @raise Exception: whatever huggingface_hub raises.
        """
        self._plan()
        self._check_disk()
        pool = ThreadPoolExecutor(AT_ONCE)
        waiting = {pool.submit(self._fetch, file) for file in self._files}
        self._watch(waiting)
        self._name_it()
        say(state="done", bytes=self._total, total=self._total)

    @property
    def _total(self) -> int:
        return sum(file.size for file in self._files)

    def _plan(self) -> None:
        info = self._hub.HfApi().model_info(self._repo, revision=self._revision, files_metadata=True)
        self._commit = info.sha
        names = chosen(one.rfilename for one in info.siblings)
        self._files = [
            File(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else one.blob_id, one.lfs is not None)
            for one in info.siblings
            if one.rfilename in names
        ]

    def _check_disk(self) -> None:
        """Before the first byte.

        @raise Failed: what is missing has no room.
        """
        missing = self._total - self._there()
        folder = next(path for path in (self._cache, *self._cache.parents) if path.exists())
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
        if missing > free:
            need = f"{show_size(missing)} more are needed in {self._cache}, {show_size(free)} are free"
            raise Failed("disk_full", f"{need}: nothing was downloaded. Free some space, or set HF_HOME to a larger disk")

    def _there(self) -> int:
        """How many bytes of it are on the disk, whole files and parts."""
        sizes = {file.blob: file.size for file in self._files}
        found = dict.fromkeys(sizes, 0)
        try:
            for entry in os.scandir(self._blobs):
                blob = entry.name.partition(".")[0]
                if blob in found:
                    found[blob] = max(found[blob], min(sizes[blob], entry.stat().st_size))
        except FileNotFoundError:
            return 0
        return sum(found[file.blob] for file in self._files)

    def _watch(self, waiting: set[Future[None]]) -> None:
        while waiting:
            done, waiting = wait(waiting, EVERY, FIRST_EXCEPTION)
            state = "verifying" if self._verifying else "downloading"
            say(state=state, bytes=self._there(), total=self._total)
            for each in done:
                each.result()

    # One file.

    def _fetch(self, file: File) -> None:
        """One file, whole and hashed; a wrong hash costs that file alone, and one more try."""
        if not self._got(file) and not self._got(file):
            text = f"{file.name} was downloaded twice with another hash than the hub says ({file.blob[:12]}); it was removed"
            raise Failed("wrong_hash", f"{text}. The mirror or a proxy in between damages it")

    def _got(self, file: File) -> bool:
        whole = self._blobs / file.blob
        if file.large and not whole.exists() and file.size <= self._hub.constants.MAX_HTTP_DOWNLOAD_SIZE:
            partial = self._part(file)
            if not self._good(partial, file):
                partial.unlink()
                return False
            os.replace(partial, whole)
            self._point(file)
            return True
        path = self._point(file)
        if self._good(path, file):
            return True
        for wrong in (path.resolve(), path):
            wrong.unlink(missing_ok=True)
        return False

    def _point(self, file: File) -> Path:
        """Its place in the snapshot; huggingface_hub downloads it if it is not there."""
        return Path(self._hub.hf_hub_download(self._repo, file.name, revision=self._commit, cache_dir=self._cache))

    def _part(self, file: File) -> Path:
        """Download what is missing of a large file, from where an earlier child got to."""
        url = self._hub.hf_hub_url(self._repo, file.name, revision=self._commit)
        found = self._hub.get_hf_file_metadata(url)
        headers = self._hub.build_hf_headers()
        if urlparse(found.location).netloc != urlparse(url).netloc:
            headers.pop("authorization", None)
        self._blobs.mkdir(parents=True, exist_ok=True)
        partial = self._blobs / f"{file.blob}.incomplete"
        with open(partial, "ab") as opened:
            # A child of an agent that was killed may still hang in a write; the kernel's lock is gone when it is.
            fcntl.flock(opened, fcntl.LOCK_EX)
            if opened.tell() > file.size:
                opened.truncate(0)
                opened.seek(0)
            self._hub.http_get(found.location, opened, resume_size=opened.tell(), headers=headers, expected_size=file.size)
        return partial

    def _good(self, path: Path, file: File) -> bool:
        self._verifying.add(file.name)
        try:
            return digest(path, file) == file.blob
        finally:
            self._verifying.discard(file.name)

    def _name_it(self) -> None:
        if self._revision == self._commit:
            return
        refs = self._folder / "refs"
        refs.mkdir(parents=True, exist_ok=True)
        (refs / f".{self._revision}.new").write_text(self._commit)
        os.replace(refs / f".{self._revision}.new", refs / self._revision)

    def forget_parts(self) -> int:
        """Remove what is not whole; how many bytes that were."""
        size = 0
        for file in self._files:
            for path in self._blobs.glob(f"{file.blob}*.incomplete"):
                size += path.stat().st_size
                path.unlink(missing_ok=True)
        return size


def explained(error: BaseException, hub: Any, repo: str) -> Failed:
    """What went wrong, for people, and whether trying again may help: C{network} is the only code for which it may."""
    if isinstance(error, Failed):
        return error
    errors, at = hub.errors, f"{hub.constants.ENDPOINT}/{repo}"
    where = f"set the token in HF_TOKEN of llmgw-agent's environment or in {hub.constants.HF_TOKEN_PATH}"
    if isinstance(error, errors.GatedRepoError):
        return Failed("gated", f"{repo} is gated: accept the licence at {at}, {where}, and say llmgw fetch again")
    if isinstance(error, errors.RevisionNotFoundError):
        return Failed("no_revision", f"{at} has no such revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        return Failed("not_found", f"{at} is not there, or it is private: then {where}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failed(
            "disk_full", f"the disk became full; what is there is kept and resumed: {error.strerror} {error.filename or ''}"
        )
    if isinstance(error, PermissionError):
        return Failed("unwritable", f"{error.filename} cannot be written: {error.strerror}")
    status = getattr(getattr(error, "response", None), "status_code", 0)
    said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    if status in (401, 403):
        return Failed("refused", f"{at} refuses it ({status}): {where}")
    if status or isinstance(error, OSError) or "httpx" in type(error).__module__:
        return Failed("network", f"{at}: {said}")
    return Failed("failed", f"{type(error).__name__}: {said}")


def obey(download: Download) -> None:
    """Wait for the agent's word, or its death; neither waits for a thread that hangs in a read."""
    word = sys.stdin.readline()
    if word.strip() == "cancel":
        say(state="cancelled", removed=download.forget_parts())
    os._exit(0)


def main() -> None:
    """See the module."""
    # The agent's own is 077; engines may run as another user, and have to read the weights.
    os.umask(0o022)
    order = json.loads(sys.stdin.readline())
    try:
        hub = load()
    except ImportError:
        text = f"huggingface_hub is not installed beside llmgw-agent: {sys.prefix}/bin/pip install 'llmgw[fetch]'"
        say(state="failed", error="not_installed", reason=text)
        return
    download = Download(hub, order["repo"], order["revision"], Path(order["cache"]))
    threading.Thread(target=obey, args=(download,), daemon=True).start()
    say(state="checking")
    try:
        download.run()
    except Exception as error:
        why = explained(error, hub, order["repo"])
        say(state="failed", error=why.code, reason=str(why))
    os._exit(0)


if __name__ == "__main__":
    main()
