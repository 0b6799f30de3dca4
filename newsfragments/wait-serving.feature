`llmgw apply --wait` returns when what was added or changed is ready. `llmgw wait` and `llmgw rollout` say how many replicas serve as before while a change waits, and what for, instead of 0/2 ready.
