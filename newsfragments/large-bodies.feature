Large JSON bodies are read a few milliseconds at a time, so that other streams go on meanwhile.
