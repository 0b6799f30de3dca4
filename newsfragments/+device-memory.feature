vLLM takes no more of a device than its profile claims, and what could never fit there is refused before a start, with what would.
