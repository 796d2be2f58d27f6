"""Makes text from files and from people safe to print.

Names, messages, reasons and metrics may contain anything, including sequences that move a terminal's cursor. Every text
that goes to a terminal passes `clean`: the command's output, lines on stderr, what `str` gives of records, and errors.
"""

from __future__ import annotations


def clean(text: str) -> str:
    """Escapes characters in `text` that a terminal would obey or a reader could not see."""
    if text.isprintable():
        return text
    return "".join(char if _is_shown(char) else _escaped(char) for char in text)


def clean_lines(text: str) -> str:
    """Escapes like `clean`, but keeps line ends."""
    return "\n".join(map(clean, text.split("\n")))


def _is_shown(char: str) -> bool:
    import unicodedata  # seldom needed

    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii") if ord(char) < 0x110000 else "?"
