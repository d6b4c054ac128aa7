"""Byte counts as text. No torch here: commands print sizes before they know whether they need it."""


def size_text(nbytes: float) -> str:
    """`1.5 GB`: decimal units, as disks and bandwidths have them."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
