"""What may happen to a sandbox, and what follows from it: a pure state machine in ``machine``."""
