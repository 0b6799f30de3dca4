``llmgw restart --outdated`` takes up engines that were installed anew: the replicas that still run a former version, of the whole fleet, a model or a node, are restarted one by one.
