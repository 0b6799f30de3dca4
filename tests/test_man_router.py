"""llmgw-router(7) has every metric, log field, reason and header of the router, and none that is not."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmgw.router.access import AccessLog, Row
from llmgw.router.errors import Refusal, error_head
from llmgw.router.histogram import Metrics
from llmgw.router.request import OURS, Request
from llmgw.server.metrics import _families
from tests.test_man import source, words
from tests.test_server_metrics import STATUS

CODE = Path(__file__).resolve().parent.parent / "llmgw" / "router"
# Of Refusal(status, f"engine_{kind}") and Refusal(429, grant.kind).
MADE = {"engine_connect", "engine_reset", "engine_timeout", "engine_key", "engine_forbidden", "rpm", "tpm", "tpd", "concurrency"}


def tagged(section):
    """The tags of a section's paragraphs, as plain words."""
    body = source("llmgw-router.7").partition(f".SH {section}\n")[2].partition("\n.SH ")[0]
    return [words(tag) for tag in re.findall(r"^\.TP\n(.*)$", body, flags=re.M)]


def test_every_metric_is_in_the_manual_with_its_labels():
    """Those of the workers, those of the control plane, and those that are made where they are told."""
    real = {family.name: family.labels for family in (*Metrics().families, *_families(STATUS))}
    for path in CODE.parent.rglob("*.py"):
        real |= dict.fromkeys(re.findall(r'Family\(\s*"(llmgw_\w+)", "\w+", "[^"]*"\)', path.read_text()), ())
    said = {}
    for tag in tagged("METRICS"):
        name, _, labels = tag.partition(" ")
        said[name] = tuple(label.strip(" ,{}") for label in labels.split(",")) if labels else ()
    assert said == real


def test_every_field_of_the_access_log_is_in_the_manual(tmp_path):
    """Of requests that engines saw, of others, and of the line that tells of lines that were lost."""
    log = AccessLog(tmp_path / "log", ThreadPoolExecutor(1))
    log.dropped = 1
    log.answered("127.0.0.1", Request(0.0), 200, "done")
    log.flush()
    log._writing.result()
    written = {name for line in (tmp_path / "log").read_text().splitlines() for name in json.loads(line)}
    said = {word for tag in tagged("ACCESS LOG") for word in tag.replace(",", "").split()}
    assert said == {*Row.__struct_fields__, *written}


def test_every_reason_is_in_the_manual():
    """The words in errors and in X-Llmgw-Reason, each under its status."""
    found = [re.findall(r'Refusal\(\s*(\d+), "(\w+)"', path.read_text()) for path in CODE.glob("*.py")]
    real = {code for each in found for _, code in each} | MADE
    real |= {code for path in CODE.glob("*.py") for code in re.findall(r'_missing" if.* else "(\w+)"', path.read_text())}
    body = source("llmgw-router.7").partition(".SH ERRORS\n")[2].partition("\n.SH ")[0]
    said = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b|\b(?:internal|leaving|starting|rpm|tpm|tpd|concurrency)\b", words(body)))
    assert real <= said, real - said
    statuses = {code: status for each in found for status, code in each}
    assert set(map(int, statuses.values())) <= {int(tag.split()[0]) for tag in tagged("ERRORS")}


def test_headers_of_ours_are_in_the_manual():
    """What the router takes for itself, and what it adds."""
    said = {tag.split()[0].lower() for tag in tagged("HEADERS")}
    sent = set()
    for path in CODE.glob("*.py"):
        sent |= set(re.findall(r"\b(x-llmgw-\w+|x-request-id)\b", path.read_text()))
    assert sent | {"x-session-id"} <= said, sent - said
    assert b"x-session-id" in OURS
    assert error_head(Refusal(404, "model_not_found", "no"))[1][0] == b"x-llmgw-reason"
