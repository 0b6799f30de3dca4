`llmgw explain` prints every failed check of each node, with need, have and holder, the nearest miss first (`nearest` in `--json`); `llmgw restart --replica` takes an id as `status` shows it.
