`llmgw check` finds a server certificate that is not for the address at which agents and operators dial the server.
