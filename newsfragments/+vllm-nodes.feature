vLLM's data parallel ranks may span nodes: the head balances for all of them, or with `parallel: {balance: hybrid}` each node serves its own; ranks above 0 count as ready once they have joined.
