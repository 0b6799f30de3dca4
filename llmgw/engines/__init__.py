"""Engine adapters: profile and allocation to argv, environment, probes and diagnosis. They do no I/O."""
