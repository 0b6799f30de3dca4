"""C{llmgw estimate}: what a replica takes of memory, and what context would fit where.

Usually the server is asked: it has the catalog, and agents that can look at the weights. With a catalog file and a path of
weights on this machine nobody is asked, so a profile can be tried before there is a fleet.
"""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.catalog import read_text
from llmgw.cli.client import Answer
from llmgw.cli.render import table
from llmgw.cli.session import Session, json_option, pass_session
from llmgw.errors import Invalid, LlmgwError, Problem
from llmgw.fleet.units import show_size

PATIENCE = 90.0


class CannotEstimate(LlmgwError):
    """There is nothing that could be reckoned."""


@click.command(name="estimate")
@click.argument("model")
@click.option("--node", metavar="NAME", help="The weights on this node, and what would fit on it.")
@click.option("-c", "--catalog", "file", type=click.Path(path_type=Path), metavar="FILE", help="The models in FILE instead.")
@click.option("--weights", metavar="PATH", help="Weights on this machine; needs -c, and asks no server.")
@json_option
@pass_session
def estimate_command(session: Session, model: str, node: str | None, file: Path | None, weights: str | None) -> None:
    """How much memory a replica of MODEL takes, for what, and what context would fit on which node.

    Nothing is started. What is not known is shown as unknown and never counted as nothing.
    """
    if weights is not None and (file is None or node is not None):
        raise click.UsageError("--weights goes with -c FILE and without --node")
    found = _local(model, file, weights) if file and weights else _ask(session, model, node, file)
    session.show(found, lambda: show(found))


def _ask(session: Session, model: str, node: str | None, file: Path | None) -> Answer:
    if file is None:
        return session.client.get("/v1/estimate", timeout=PATIENCE, model=model, node=node)
    body = {"text": read_text(file), "path": str(file.absolute())}
    return session.client.post("/v1/estimate", timeout=PATIENCE, model=model, node=node, **body)


def _local(name: str, file: Path, weights: str) -> Answer:
    """Everything on this machine.

    @raise Invalid: the file is no catalog, or has no such model.
    @raise CannotEstimate: llmgw does not run the model, or its engine's adapter cannot tell.
    """
    from llmgw.agent.weights import WeightFinder
    from llmgw.config.catalog import read_catalog
    from llmgw.engines.registry import adapters
    from llmgw.interfaces import IMemoryEstimator

    catalog = read_catalog(file, read_text(file))
    model = next((one for one in catalog.models if name in (one.name, *one.aliases)), None)
    if model is None:
        there = ", ".join(one.name for one in catalog.models) or "none"
        raise Invalid([Problem(f"no model {name}; it has: {there}", str(file), "unknown_model")])
    adapter = adapters().get(model.profile.engine) if model.profile else None
    if model.profile is None or adapter is None or not IMemoryEstimator.providedBy(adapter):
        raise CannotEstimate(f"{name}: nobody can tell what it takes: it needs a profile of an engine that llmgw knows")
    where = weights if weights.startswith("hf:") else str(Path(weights).absolute())
    files = WeightFinder([]).inspect(where)
    found = IMemoryEstimator(adapter).estimate(model.profile, files)
    said = [files.problem] if files.problem else []
    said += [f"{where} is not there (looked at {', '.join(files.looked)})"] if not files.found else []
    head = {"model": model.name, "engine": model.profile.engine, "weights": where, "node": None}
    return head | found.data() | {"seen": None, "nodes": [], "notes": said}


def show(found: Answer) -> str:
    """Tables of the ranks and of the nodes, and in words what is not known."""
    ranks = [(str(row["rank"]), row) for row in found["ranks"]] + ([("host", found["host"])] if found["host"] else [])
    rows = [(name, *(size(row[part]) for part in ("weights", "cache", "overhead", "total"))) for name, row in ranks]
    lines = [_title(found), table(("RANK", "WEIGHTS", "KV CACHE", "OVERHEAD", "TOTAL"), rows)]
    if found["per_token"] is not None:
        lines.append(f"One more token of context takes {size(found['per_token'])}{' on the fullest device' * (len(ranks) > 2)}.")
    if found["observed"] is not None:
        lines.append(f"Seen at work it took at most {size(found['observed'])} of a device, which counts instead.")
    elif found["seen"] is not None:
        lines.append(f"Seen at work it held {size(found['seen'])} of a device: it fills what it is given.")
    if found["share"] < 1 and found["ranks"]:
        lines.append(f"The engine takes at most {found['share']:.0%} of a device's memory.")
    lines += [f"Unknown: {text}" for text in found["unknown"]] + list(found.get("notes") or ())
    if found["nodes"]:
        nodes = [
            (node["node"], _devices(node), _context(node["context_free"]), _context(node["context_empty"]))
            for node in found["nodes"]
        ]
        lines += ["", table(("NODE", "DEVICES", "CONTEXT THAT FITS NOW", "IF IT WERE EMPTY"), nodes)]
    return "\n".join(lines)


def _title(found: Answer) -> str:
    context = f"{found['context']} tokens" if found["context"] is not None else "a context that is not known"
    where = f" ({found['weights']}{' on ' + found['node'] if found['node'] else ''})" if found["weights"] else ""
    return f"{found['model']} with {found['engine']}{where}, {context}{_at_once(found)}:"


def _at_once(found: Answer) -> str:
    return f", {found['sequences']} requests at once" if found["sequences"] > 1 else ""


def size(count: int | None) -> str:
    """A size for people; C{unknown} where nobody knows."""
    return "unknown" if count is None else show_size(count)


def _devices(node: Answer) -> str:
    if not node["devices"]:
        return f"host {size(node['host_memory'])}" if node["host_memory"] is not None else "none"
    return ", ".join(f"gpu {one['index']}: {size(one['free'])} of {size(one['memory_total'])} free" for one in node["devices"])


def _context(tokens: int | None) -> str:
    return "unknown" if tokens is None else f"{tokens} tokens" if tokens else "none"
