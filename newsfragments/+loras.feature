LoRA adapters (`loras: [{name, weights}]` on a model) are given to vLLM and SGLang at their start and served as models of their own, on the replicas that were started with them.
