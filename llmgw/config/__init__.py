"""YAML text to settings. Every problem of a file is collected, each with file and line."""
