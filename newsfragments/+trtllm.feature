Engine `trtllm` runs TensorRT-LLM on one node through `trtllm-serve`: server options go to its command line, everything of its LLM API to its file, and both are checked before a start.
