At zero replicas an engine that can sleep (vLLM with its sleep mode) is put to sleep instead of stopped, keeps only what it still holds, and is woken by the next request.
