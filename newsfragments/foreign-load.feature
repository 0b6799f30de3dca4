Load that engines report besides what came through the router, as from clients that use an engine directly, now moves requests to other replicas.
