"""Names llmgw's two daemons for twistd; imports nothing of llmgw, since twistd imports this for every command it runs."""

from twisted.application.service import ServiceMaker

server = ServiceMaker(
    "llmgw server",
    "llmgw.server_tap",
    "The control plane and OpenAI-compatible router of llmgw.",
    "llmgw-server",
)
agent = ServiceMaker(
    "llmgw agent",
    "llmgw.agent_tap",
    "The node daemon of llmgw: keeps inference engines running.",
    "llmgw-agent",
)
