"""Command line: ``aenv``."""
