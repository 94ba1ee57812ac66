"""AENV: agent environments at scale."""

__version__ = "0.1.0"
