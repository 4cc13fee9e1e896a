"""The C core; its functions are documented where C defines them (csrc/python)."""

from typing import Any

def __getattr__(name: str) -> Any: ...
