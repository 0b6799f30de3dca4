"""C{llmgw top}, what the models are doing now, and C{llmgw usage}, what was used by whom."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Mapping, Sequence

import click

from llmgw.cli.client import Answer
from llmgw.cli.render import count, table
from llmgw.cli.session import Session, duration, json_option, pass_session

HEADERS = ("MODEL", "REPLICA", "IN FLIGHT", "WAITING", "REQ/S", "TOKENS/S", "TTFT P50", "P95", "KV", "PREFIX", "")
SUMS = ("requests", "failures", "prompt_tokens", "cached_tokens", "completion_tokens", "seconds")


@click.command(name="top")
@click.option("--interval", type=duration, default="2s", metavar="TIME", help="How often to look (default 2s).")
@click.option("--once", is_flag=True, help="Look twice, print once, and end; so it does into a pipe.")
@json_option
@pass_session
def top_command(session: Session, interval: float, once: bool) -> None:
    """What the models and engines are doing now."""
    before = session.client.get("/v1/top")
    if session.as_json:
        session.show(before)
        return
    while True:
        time.sleep(interval)
        now = session.client.get("/v1/top")
        if once or not sys.stdout.isatty():
            click.echo(screen(before, now))
            return
        click.clear()
        click.echo(f"every {interval:g} s, end with Ctrl-C\n\n{screen(before, now)}")
        before = now


def screen(before: Answer, now: Answer) -> str:
    """One look: differences between two answers of the server."""
    took = max(0.001, now["at"] - before["at"])
    old = {model["name"]: model for model in before["models"]}
    rows: list[Sequence[object]] = []
    for model in now["models"]:
        rows += _rows(model, old.get(model["name"], {}), took)
    flying = sum(replica["in_flight"] for model in now["models"] for replica in model["replicas"])
    waiting = sum(model["waiting"] for model in now["models"])
    return f"{count(flying, 'request')} in flight, {waiting} waiting\n\n{table(HEADERS, rows)}"


def _rows(model: Answer, before: Answer, took: float) -> list[Sequence[object]]:
    tokens = (model["completion_tokens"] - before.get("completion_tokens", 0)) / took
    blocks = model["prefix_blocks"] - before.get("prefix_blocks", 0)
    held = model["prefix_held"] - before.get("prefix_held", 0)
    waits = str(model["waiting"]) + (f" ({model['waiting_high']} high)" if model["waiting_high"] else "")
    prefix = f"{held / blocks:.0%}" if blocks > 0 else ""
    old = {replica["id"]: replica for replica in before.get("replicas", ())}
    rows: list[Sequence[object]] = []
    for number, replica in enumerate(model["replicas"] or [None]):
        first = number == 0
        shared = (model["name"], waits, f"{max(0.0, tokens):.0f}", prefix) if first else ("", "", "", "")
        rows.append(_row(shared, replica, old.get(replica["id"], {}) if replica else {}, took, model["reason"]))
    return rows


def _row(shared: tuple[str, ...], replica: Answer | None, before: Answer, took: float, reason: str) -> Sequence[object]:
    name, waits, tokens, prefix = shared
    if replica is None:
        return (name, "none", "", waits, "", "", "", "", "", "", reason)
    rate = max(0.0, replica["requests"] - before.get("requests", 0)) / took
    fresh = _since(replica["ttft"], before.get("ttft", {}))
    kv = "" if replica["kv_used"] is None else f"{replica['kv_used']:.0%}"
    notes = ["left alone after failures"] if replica["breaker_open"] else []
    if replica["engine_waiting"]:
        notes.append(f"{replica['engine_waiting']} wait in the engine")
    half, most = quantile(fresh, 0.5), quantile(fresh, 0.95)
    return (name, replica["id"], replica["in_flight"], waits, f"{rate:.1f}", tokens, half, most, kv, prefix, ", ".join(notes))


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> list[tuple[float, int]]:
    """The buckets of what has come since: (upper bound, how many at most that), ascending."""
    return sorted((float(bound), total - before.get(bound, 0)) for bound, total in now.items())


def quantile(buckets: Sequence[tuple[float, int]], share: float) -> str:
    """About the time below which C{share} of all lie, e.g. C{240 ms}; empty where there were none."""
    total = buckets[-1][1] if buckets else 0
    if total <= 0:
        return ""
    low, below = 0.0, 0
    for bound, upto in buckets:
        if upto >= total * share:
            if bound == float("inf"):
                return f"> {_time(low)}"
            return _time(low + (bound - low) * (total * share - below) / max(1, upto - below))
        low, below = bound, upto
    return ""


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


@click.command(name="usage")
@click.option("--by", default="key,model", metavar="WORDS", help="Kept apart by these of hour, key, model (default key,model).")
@click.option("--since", type=duration, default="30d", metavar="TIME", help="As far back as this (default 30d).")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@json_option
@pass_session
def usage_command(session: Session, by: str, since: float, as_csv: bool) -> None:
    """Requests and tokens, by key and model."""
    names = [word.strip() for word in by.split(",") if word.strip()]
    answer = session.client.get("/v1/usage", by=",".join(names), since=time.time() - since)
    session.show(answer, lambda: as_text(answer["usage"], names, as_csv))


def as_text(rows: Sequence[Answer], names: Sequence[str], as_csv: bool) -> str:
    """The rows for people, or for a spreadsheet."""
    columns = [*names, *SUMS]
    if as_csv:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row, column) for column in columns] for row in rows)
        return out.getvalue().rstrip("\n")
    headers = [column.upper().replace("_TOKENS", "").replace("_", " ") for column in columns]
    return table(headers, ([_cell(row, column) for column in columns] for row in rows))


def _cell(row: Answer, column: str) -> object:
    if column == "hour":
        return time.strftime("%Y-%m-%d %H:00", time.gmtime(row["hour"]))
    return round(row[column], 1) if column == "seconds" else row[column]
