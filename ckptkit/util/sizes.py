"""How a number of bytes reads."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)  # many leaves, few sizes
def size_text(size_bytes: int) -> str:
    """Bytes in binary units: `1.5 GiB`."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1024 or unit == "EiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
