"""``kvferry keygen``: a CURVE key pair for one side."""

from __future__ import annotations

from orchestrator.curve import write_pair


def run_keygen(directory: str, name: str) -> int:
    """Write the pair, say where and what to do with it. Raises ConfigError."""
    public, secret = write_pair(directory, name)
    print(f"{secret}  the secret: stays here; Config(secret_key={str(secret)!r})")
    print(f"{public}  for the others: a prefill worker lists it in client_keys, a decode worker names it as server_key")
    return 0
