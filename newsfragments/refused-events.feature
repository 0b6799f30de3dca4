`llmgw events` tells when a model cannot be placed and why, when that changes, and when it waits for a place no more.
