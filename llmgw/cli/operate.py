"""C{llmgw drain, cordon, uncordon, restart, orphans, adopt, stop}: orders about what runs."""

from __future__ import annotations

import click

from llmgw.cli.session import Session, duration, json_option, pass_session

NODES = click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
DEVICE = click.option("--device", metavar="UUID", help="Only this device of NODE; the beginning of its UUID is enough.")
OUTAGE = click.option("--allow-outage", is_flag=True, help="Even if a model is then served by nobody for a while.")


@click.command(name="drain")
@NODES
@click.option("--deadline", type=duration, help="How long running requests may take, e.g. 30m; default: timing.node_drain.")
@click.option("--wait", is_flag=True, help="Return only when nothing runs there any more; tells how far it is.")
@click.option("--force", is_flag=True, help="Begin at once, without waiting for successors elsewhere; requests still finish.")
@OUTAGE
@json_option
@pass_session
def drain_command(
    session: Session, nodes: tuple[str, ...], deadline: float | None, wait: bool, force: bool, allow_outage: bool
) -> None:
    """Move what runs on NODE... elsewhere, finish its requests, and place nothing there.

    A request that still runs at the deadline is ended with an error event. uncordon ends a drain.
    """
    client = session.client
    answer = client.post("/v1/drain", nodes=list(nodes), deadline=deadline, force=force, allow_outage=allow_outage)
    if wait:
        from llmgw.cli.draining import wait_until_drained

        wait_until_drained(client, nodes, float(answer.get("deadline") or 0.0))
        session.show(answer | {"drained": True}, lambda: f"{', '.join(nodes)}: drained")
    else:
        session.show(answer)


@click.command(name="cordon")
@NODES
@DEVICE
@click.option("--reason", metavar="TEXT", help="Why, for those who look at it later; with --device.")
@json_option
@pass_session
def cordon_command(session: Session, nodes: tuple[str, ...], device: str | None, reason: str | None) -> None:
    """Place nothing new on NODE..., or on one device of NODE; what runs there goes on.

    Devices that are lost or sick are cordoned by themselves for as long as they are.
    """
    if reason and device is None:
        raise click.UsageError("--reason goes with --device")
    session.show(session.client.post("/v1/cordon", nodes=list(nodes), device=device, reason=reason))


@click.command(name="uncordon")
@NODES
@DEVICE
@json_option
@pass_session
def uncordon_command(session: Session, nodes: tuple[str, ...], device: str | None) -> None:
    """Allow placing on NODE... again, ending a cordon or a drain; with --device, on that device again."""
    session.show(session.client.post("/v1/uncordon", nodes=list(nodes), device=device))


@click.command(name="restart")
@click.argument("model", required=False)
@click.option("--node", metavar="NAME", help="Only replicas on this node; without MODEL, all of them.")
@click.option("--replica", metavar="ID", help="Only this replica, as `llmgw status` calls it (MODEL/N), or by its number.")
@click.option("--outdated", is_flag=True, help="Only those whose engine was replaced on its node; without MODEL, of all models.")
@OUTAGE
@json_option
@pass_session
def restart_command(
    session: Session, model: str | None, node: str | None, replica: str | None, outdated: bool, allow_outage: bool
) -> None:
    """Start the replicas of MODEL afresh, one after another.

    Each successor is ready before the old one drains, where there is room for both. Also gives replicas that failed too often
    a new budget, and takes up an engine that was installed anew.
    """
    of, _, number = (replica or "").rpartition("/")
    if replica is not None and not (number.isascii() and number.isdigit()):
        raise click.BadParameter(f"found {replica}, want MODEL/N or N", param_hint="--replica")
    if of and model not in (None, of):
        raise click.UsageError(f"{replica} is no replica of {model}")
    model = model or of or None
    if model is None and ((node is None and not outdated) or replica is not None):
        raise click.UsageError("say which MODEL, or --node for all replicas there, or --outdated for those of replaced engines")
    post, only = session.client.post, outdated or None
    session.show(
        post(
            "/v1/restart",
            model=model,
            node=node,
            replica=int(number) if number else None,
            outdated=only,
            allow_outage=allow_outage,
        )
    )


@click.command(name="orphans")
@json_option
@pass_session
def orphans_command(session: Session) -> None:
    """Engines that run although nothing wants them.

    They are left running until you adopt or stop them.
    """
    answer = session.client.get("/v1/orphans")
    session.show(answer, lambda: orphan_table(answer.get("orphans", [])))


def orphan_table(orphans: list[dict[str, object]]) -> str:
    """One row per orphan, or that there is none."""
    from llmgw.cli.render import table

    if not orphans:
        return "no orphans"
    columns = ("shard", "node", "state", "pid", "port", "generation", "reason")
    rows = [["" if row.get(column) is None else row[column] for column in columns] for row in orphans]
    return table([column.upper() for column in columns], rows)


@click.command(name="adopt")
@click.argument("shard")
@click.option("--node", metavar="NAME", help="Where it runs, if several nodes have one of this name.")
@json_option
@pass_session
def adopt_command(session: Session, shard: str, node: str | None) -> None:
    """Make the orphan SHARD a replica of its model again."""
    session.show(session.client.post("/v1/adopt", shard=shard, node=node))


@click.command(name="stop")
@click.argument("shard")
@click.option("--node", metavar="NAME", help="Where it runs, if several nodes have one of this name.")
@json_option
@pass_session
def stop_command(session: Session, shard: str, node: str | None) -> None:
    """Stop the orphan SHARD. (A replica is stopped by lowering replicas in the catalog.)"""
    session.show(session.client.post("/v1/stop", shard=shard, node=node))
