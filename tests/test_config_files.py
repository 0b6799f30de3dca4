"""server.yaml and agent.yaml: the examples of the manual, defaults, and every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve, fields

from llmgw.config.agent import EngineSettings, read_agent
from llmgw.config.check import check_file
from llmgw.config.machine import Machine, this_machine
from llmgw.config.server import read_server
from llmgw.config.settings import Address, Timeouts
from llmgw.errors import Invalid
from llmgw.fleet.node import Fabric
from llmgw.fleet.timing import Timing, timing_problems

MACHINE = Machine("CP1", 8, (32768, 60999))
FILE = Path("/etc/llmgw/server.yaml")
AGENT = Path("/etc/llmgw/agent.yaml")

SERVER_YAML = """\
router:
  listen: 127.0.0.1:8080        # tls: {certificate, key} for HTTPS
  workers: 1
  keys: required                # required or none; loopback may leave it out, any other address must say
  metrics: 127.0.0.1:9464       # always on the admin socket, too
  access_log: log/access.jsonl
  timeouts: {headers: 10s, connect: 5s, first_token: 600s, idle: 180s, queue: 60s, drain: 180s}
fleet:                          # absent when no model has a profile: then llmgw-server is only a router
  listen: 127.0.0.1:7443
  advertise: cp1.example:7443
  tls: {authority: pki/ca.pem, certificate: pki/cp1.pem, key: pki/cp1.key}
admin: {socket: run/admin.sock}
store: sqlite:///state/llmgw.db # or postgresql://user@host/db
timing: {heartbeat: 5s, lost_after: 300s, failover_grace: 60s, stop_grace: 20s, drain: 10m}
models:
  - name: smol                  # what clients ask for
    aliases: [default]
    replicas: 2                 # or {min: 0, max: 4, idle_after: 15m}
    profile:
      engine: llamacpp          # an installation's name: llamacpp, vllm, sglang, ...
      weights: smol.gguf        # under the node's model roots, an absolute path, or hf:org/name@revision
      context: 4096             # tokens
      parallel: {tensor: 1, pipeline: 1, data: 1, expert: false, nodes: 1}
      resources: {devices: 0, device_memory: 20GiB, host_memory: 1GiB, share: false}
      arguments: {threads: 2}
      extra_argv: []
      environment: {}
      place: {labels: {pool: a}, fabric: rack3, spread: false}
      start_timeout: 30m
  - name: anything
    profile:
      engine: command           # any program that speaks OpenAI's HTTP
      argv: [python3, /opt/engine.py, --port, "{port}"]
      health: /health           # 200 when ready
      resources: {devices: 0, host_memory: 64MiB}
  - name: elsewhere
    endpoints:
      - {url: "http://10.0.0.9:8000/v1", model: upstream-name, key_file: secrets/elsewhere.key, share: 1}
"""
AGENT_YAML = """\
node: n1                        # must be the name in the certificate
server: cp1.example:7443        # and/or servers: [...]; server is tried first
tls: {authority: pki/ca.pem, certificate: pki/n1.pem, key: pki/n1.key}
state: state/agent              # shards, logs, epoch; 0700
address: 10.0.0.5               # where routers reach the engines
ports: 20000-20999              # outside the kernel's ephemeral range
labels: {pool: a}
fabrics: {rack3: {address: 10.9.0.5, interface: ib0}}   # or [rack3]
devices: auto                   # auto, none, or a list of GPU UUIDs
models: [/nvme/models, /mnt/models]                     # roots, first hit wins
environment: {NCCL_IB_HCA: mlx5}                        # agent, then installation, then profile; last wins
engines:
  vllm: {command: /opt/vllm/bin/vllm, user: llm}
  vllm-next: {adapter: vllm, command: [apptainer, exec, --nv, /opt/v34.sif, vllm]}
"""
TLS = "tls: {authority: ca.pem, certificate: a.pem, key: a.key}"


def problems(text: str, file: Path = FILE, read=None) -> list[str]:
    """What is wrong with it, without the folder."""
    with pytest.raises(Invalid) as caught:
        (read or (lambda file, text, machine: check_file(file, text, machine)))(file, text, MACHINE)
    return [str(problem).removeprefix("/etc/llmgw/") for problem in caught.value.problems]


def agent_problems(text: str) -> list[str]:
    return problems(text, AGENT, read_agent)


def test_the_servers_example_reads_as_the_manual_says():
    """Every key of the documented server.yaml, paths absolute, durations in seconds."""
    found = read_server(FILE, SERVER_YAML, MACHINE)
    assert found.name == "cp1"
    assert (found.router.listen, found.router.metrics) == (Address("127.0.0.1", 8080), Address("127.0.0.1", 9464))
    assert (found.router.keys, found.router.workers) == ("required", 1)
    assert found.router.access_log == Path("/etc/llmgw/log/access.jsonl")
    assert found.router.timeouts == Timeouts()
    assert found.fleet is not None
    assert (str(found.fleet.advertise), found.fleet.tls.key) == ("cp1.example:7443", Path("/etc/llmgw/pki/cp1.key"))
    assert (found.socket, found.state) == (Path("/etc/llmgw/run/admin.sock"), Path("/etc/llmgw/state"))
    assert found.store == "sqlite:////etc/llmgw/state/llmgw.db"
    assert found.timing == Timing()
    assert [model.name for model in found.catalog.models] == ["smol", "anything", "elsewhere"]
    assert not found.warnings


def test_the_agents_example_reads_as_the_manual_says():
    """Every key of the documented agent.yaml."""
    found = read_agent(AGENT, AGENT_YAML, MACHINE)
    assert (found.node, found.servers, found.address) == ("n1", (Address("cp1.example", 7443),), "10.0.0.5")
    assert (found.ports, found.devices, found.labels) == ((20000, 20999), "auto", {"pool": "a"})
    assert found.fabrics == (Fabric("rack3", "10.9.0.5", "ib0"),)
    assert found.models == (Path("/nvme/models"), Path("/mnt/models"))
    assert found.state == Path("/etc/llmgw/state/agent")
    assert found.environment == {"NCCL_IB_HCA": "mlx5"}
    assert found.engines == (
        EngineSettings("vllm", "vllm", ("/opt/vllm/bin/vllm",), "llm"),
        EngineSettings("vllm-next", "vllm", ("apptainer", "exec", "--nv", "/opt/v34.sif", "vllm")),
    )


def test_the_kind_of_a_file_follows_from_its_keys():
    """llmgw check and apply take any of the three without being told which."""
    assert [check_file(FILE, text, MACHINE).kind for text in (SERVER_YAML, AGENT_YAML, "models: []", "")] == [
        "server", "agent", "models", "server",
    ]  # fmt: skip


def test_an_empty_server_file_is_a_router_with_defaults():
    """Nothing is required; workers follow the cores, the name the machine."""
    found = read_server(FILE, "models:\nrouter:\n", MACHINE)
    assert (found.name, found.router.workers, found.fleet, found.router.keys) == ("cp1", 4, None, "none")
    assert (found.store, found.state) == ("sqlite:////var/lib/llmgw/llmgw.db", Path("/var/lib/llmgw"))
    assert read_server(FILE, "", Machine(cores=1)).router.workers == 1


def test_every_problem_of_a_server_file_at_once():
    """Each with its line, what was found and what is allowed; unknown keys with the nearest one or where they belong."""
    text = """
nme: x
router:
  listen: 0.0.0.0:80
  workers: many
  timeout: {idle: 5s}
  timeouts: {idle: 5, conect: 5s, queue: 0s}
  metrics: localhost
  tls: {certificate: a.pem}
  body_limit: 5
  trusted_proxies: [10.0.0.0/8, ten]
fleet: {listen: "0.0.0.0:7443", tls: {certificate: a, key: b}}
timing: {heartbeat: 5s, lost_after: 4s, lease: 3s, lease_deadline: 3s, crash_budget: true}
store: mysql://x/y
listen: a
admin: {socket: /%s}
""" % ("a" * 120)  # fmt: skip
    found = problems(text)
    long = "/" + "a" * 120
    assert found == [
        "server.yaml:2: nme: unknown key, did you mean name?",
        "server.yaml:4: router.listen: 0.0.0.0:80 can be reached from other machines: "
        "say keys: required, or keys: none to serve anybody",
        "server.yaml:5: router.workers: found 'many', want a whole number from 1 to 256",
        "server.yaml:6: router.timeout: unknown key, did you mean timeouts?",
        "server.yaml:7: router.timeouts.idle: found 5, want a duration: 500ms, 5s, 10m, 1h or 90d",
        "server.yaml:7: router.timeouts.conect: unknown key, did you mean connect?",
        "server.yaml:7: router.timeouts.queue: found '0s', want a duration longer than zero",
        "server.yaml:8: router.metrics: found 'localhost', want HOST:PORT, e.g. 127.0.0.1:8080 or [::1]:8080",
        "server.yaml:9: router.tls: key is missing",
        "server.yaml:10: router.body_limit: found 5, want a size: 64MiB, 20GiB or 80GB",
        "server.yaml:11: router.trusted_proxies.1: found 'ten', want an address or a network: 10.0.0.0/8",
        "server.yaml:12: fleet.tls: authority is missing",
        "server.yaml:13: timing.crash_budget: found true, want a whole number from 1 to 1000",
        "server.yaml:14: store: found 'mysql://x/y', want sqlite:///FILE or postgresql://USER@HOST/DATABASE",
        "server.yaml:15: listen: unknown key, it belongs under router",
        f"server.yaml:16: admin.socket: {long} is too long for a socket: at most 107 bytes, it has 121",
    ]


def test_every_problem_of_an_agent_file_at_once():
    """The same for agent.yaml."""
    text = """
node: N_1
server: cp1:99999
address: 0.0.0.0
ports: 32000-33000
labels: {"a b": 1, ok: true}
devices: all
models: /nvme
engine: {}
engines:
  vllm: {command: vllm serve}
  Bad: {}
  x: {adapter: 5, comand: y}
environment: {A-B: c, D: [1]}
fabrics: {r: {adress: 10.0.0.1}}
"""
    assert agent_problems(text) == [
        "agent.yaml:2: node: found 'N_1', want the name in the node's certificate: small letters, digits and . -",
        "agent.yaml:2: tls is missing",
        "agent.yaml:3: server: found 'cp1:99999', want HOST:PORT, e.g. 127.0.0.1:8080 or [::1]:8080",
        "agent.yaml:4: address: found '0.0.0.0', want an address that routers can dial",
        "agent.yaml:5: ports: 32000-33000 overlaps 32768-60999, from which the kernel takes ports for outgoing connections "
        "(net.ipv4.ip_local_port_range): choose another range",
        "agent.yaml:6: labels.a b: found 'a b' as a name, want a label: letters, digits and . _ / -",
        "agent.yaml:7: devices: found 'all', want auto, none or a list of GPU UUIDs",
        "agent.yaml:8: models: found '/nvme', want a list",
        "agent.yaml:9: engine: unknown key, did you mean engines?",
        "agent.yaml:11: engines.vllm.command: found 'vllm serve', want a program's name or path, "
        "or a list of words: [apptainer, exec, image.sif, vllm]",
        "agent.yaml:12: engines.Bad: found 'Bad' as a name, want an installation's name",
        "agent.yaml:13: engines.x.adapter: found 5, want an adapter's name: vllm, sglang, trtllm, llamacpp, command",
        "agent.yaml:13: engines.x.comand: unknown key, did you mean command?",
        "agent.yaml:14: environment.A-B: found 'A-B' as a name, want a variable's name: letters, digits and _",
        "agent.yaml:14: environment.D: found a list, want text",
        "agent.yaml:15: fabrics.r.adress: unknown key, did you mean address?",
    ]


def test_server_and_servers_may_stand_alone_or_together():
    """server is tried first, doubles are dropped, the port may be left out."""

    def servers(lines: str) -> list[str]:
        return [str(one) for one in read_agent(AGENT, f"node: n1\n{TLS}\n{lines}", MACHINE).servers]

    assert servers("server: a:1") == ["a:1"]
    assert servers("servers: [a, 'b:2']") == ["a:7443", "b:2"]
    assert servers("server: b:2\nservers: [a:1, b:2, '[::1]:7']") == ["b:2", "a:1", "[::1]:7"]
    assert agent_problems(f"node: n1\n{TLS}\n") == ["agent.yaml:1: server is missing: say server: HOST:PORT, or servers: [...]"]


def test_a_loopback_address_needs_a_loopback_server():
    """Routers elsewhere could not reach an engine on 127.0.0.1."""
    text = f"node: n1\n{TLS}\naddress: 127.0.0.1\n"
    assert read_agent(AGENT, text + "server: '[::1]:7443'", MACHINE).address == "127.0.0.1"
    assert agent_problems(text + "servers: ['127.0.0.1:1', cp2]") == [
        "agent.yaml:3: address: 127.0.0.1 is loopback, but cp2:7443 is not: its routers could not reach this node's engines"
    ]


@pytest.mark.parametrize("text", ["0.0.0.0:80", "'[::]:80'", "10.0.0.1:80", "cp1.example:80"])
def test_an_address_that_others_reach_must_say_about_keys(text):
    """Only loopback may leave keys out; keys: none written down is accepted."""
    assert "say keys: required, or keys: none" in problems(f"router: {{listen: {text}}}")[0]
    assert read_server(FILE, f"router: {{listen: {text}, keys: none}}", MACHINE).router.keys == "none"


@pytest.mark.parametrize("text", ["127.0.0.1:80", "'[::1]:80'", "localhost:80", "127.9.9.9:80"])
def test_loopback_may_leave_keys_out(text):
    """Trying it out needs no key."""
    assert read_server(FILE, f"router: {{listen: {text}}}", MACHINE).router.keys == "none"


@pytest.mark.parametrize(
    "text", [":80", "a:", "a:0", "a:65536", "a:b", "::1:80", "[a]:80", "[127.0.0.1]:80", "1.2.3:80", "a..b:80", "-:80", "a:٣"]
)
def test_an_address_that_is_none(text):
    """Half an address, a bare IPv6 one, digits of another script."""
    assert "want HOST:PORT" in problems(f'router: {{listen: "{text}", keys: none}}')[0]


def test_a_wildcard_listener_needs_a_name_to_dial():
    """Agents are told where to go; 0.0.0.0 is nowhere."""
    assert problems(f"fleet: {{listen: '[::]:7443', {TLS}}}") == [
        "server.yaml:1: fleet: agents cannot dial [::]:7443: say advertise: NAME:PORT"
    ]
    assert read_server(FILE, f"fleet: {{listen: '[::]:7443', advertise: cp1, {TLS}}}", MACHINE).fleet.advertise.port == 7443


def test_a_profile_needs_a_fleet_section():
    """Without a listener no agent could ever run it."""
    assert problems("router:\nmodels:\n- {name: a, profile: {engine: vllm}}\n") == [
        "server.yaml:3: models.a.profile: a profile needs a fleet section: without one no agent can link"
    ]


def test_a_password_does_not_stand_in_the_stores_address():
    """Status and logs show the address; libpq reads a passfile."""
    for text in ("postgresql://u:secret@h/d", "postgresql://u@h/d?password=secret"):
        (found,) = problems(f"store: {text}\nrouter:\n")
        assert "?passfile=FILE" in found
        assert "secret" not in found
    found = read_server(FILE, "store: 'postgresql://u@h:5433/d?passfile=pg.pass&sslmode=require'\n", MACHINE)
    assert found.store == "postgresql://u@h:5433/d?passfile=/etc/llmgw/pg.pass&sslmode=require"
    assert found.state == Path("/var/lib/llmgw")
    assert found.warnings == ()


def test_timings_are_held_to_each_other_with_numbers():
    """A lease that could be taken while its holder still acts is refused, and the sum is shown."""
    assert problems("timing: {lease: 3s, lease_deadline: 2800ms}\nrouter:\n") == [
        "server.yaml:1: timing.lease: lease_deadline 2.8 s + store_timeout 0.4 s + stepping down 0.2 s + 1 % of drift 0.03 s "
        "= 3.43 s must be less than lease, 3 s"
    ]
    assert problems("timing: {heartbeat: 5s, lost_after: 10s, backoff: 10m}\nrouter:\n") == [
        "server.yaml:1: timing.lost_after: 10 s is less than 3 heartbeats (15 s), after which a node counts as unreachable",
        "server.yaml:1: timing.backoff: 10 m must be at most backoff_max, 5 m",
    ]


def test_the_leases_clocks_follow_the_lease():
    """A shorter lease alone is a working one: the rest is scaled."""
    found = read_server(FILE, "timing: {lease: 1500ms}", MACHINE).timing
    assert (found.lease_renew, found.lease_deadline, found.store_timeout) == pytest.approx((0.3, 0.9, 0.2))
    assert not list(timing_problems(found))


@pytest.mark.parametrize("change", [{"lease_renew": 5.0}, {"store_timeout": 3.0}, {"lease": 11.0}, {"lease_deadline": 12.0}])
def test_each_lease_inequality_is_seen(change):
    """Every single clock that is off is named."""
    assert not list(timing_problems(Timing()))
    assert [key for key, _ in timing_problems(evolve(Timing(), **change))]


def test_a_short_failover_grace_is_a_warning():
    """It works, but late agents count as lost: said, not refused."""
    (warning,) = read_server(FILE, "timing: {failover_grace: 5s}", MACHINE).warnings
    assert warning.startswith("timing.failover_grace is 5 s: after a failover agents take up to 35 s")


def test_every_timeout_and_clock_can_be_set():
    """Each field of the settings is a key of the file."""
    for section, kind in (("router: {timeouts: {%s: 7s}}", Timeouts), ("timing: {%s: 7s}", Timing)):
        for field in fields(kind):
            if field.name not in ("crash_budget", "lease_deadline", "store_timeout", "lease_renew", "heartbeat", "lease"):
                text = section % field.name
                if field.name in ("lost_after", "backoff_max"):
                    text = text.replace("7s", "700s")
                assert read_server(FILE, text, MACHINE)


def test_this_machine_is_read_without_asking_anything_else():
    """The name, the cores we may use and the kernel's range of ports."""
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.name
    assert 0 < machine.ephemeral[0] < machine.ephemeral[1]
