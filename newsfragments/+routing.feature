Requests go where the beginning of their prompt is likely cached, unless that replica is too busy (policy `least_cost`); limits of replicas, models, keys and teams hold over all router workers.
