An endpoint that others run and that does not answer is shown as failing by `llmgw status` and `explain`, and told as an event when that begins and ends; before, only the routers' log knew.
