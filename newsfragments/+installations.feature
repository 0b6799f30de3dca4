The version of an engine that was installed anew shows in ``llmgw status`` as soon as its agent knows it, with the replicas that still run the former one and the command that changes them one by one.
