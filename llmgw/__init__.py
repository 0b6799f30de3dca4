"""llmgw serves language models on a fleet of machines that somebody owns, without Kubernetes."""

__version__ = "0.1.0"
__all__ = ["__version__"]
