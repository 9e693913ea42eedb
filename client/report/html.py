"""HTML in small pieces: text is escaped, pictures lie in the page."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

SCALE = 1124 / 1625
"""Pixels of the page to one of a picture: the widest pictures fill its 1,124."""


def text(value: object) -> str:
    """A value as text."""
    return html.escape(str(value))


def paragraph(value: object, kind: str = "") -> str:
    """A paragraph of text."""
    return f"<p{_class(kind)}>{text(value)}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, words: Iterable[int] = (0,)) -> str:
    """A table; numbers to the right but in the columns ``words``."""
    left = set(words)
    head = "".join(
        f"<th{_class('w' if i in left else '')}>{text(name)}</th>" for i, name in enumerate(columns)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{_class('w' if i in left else '')}>{text(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def picture(png: bytes, alt: str) -> str:
    """A PNG file inside the page, at the scale that the widest of them needs: letters are of one size."""
    width, height = (int.from_bytes(png[at : at + 4], "big") * SCALE for at in (16, 20))
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return f'<img alt="{text(alt)}" {size} src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def badge(ok: bool, right: str, wrong: str) -> str:
    """A word in green or red."""
    return label(right if ok else wrong, "ok" if ok else "bad")


def label(words: str, kind: str) -> str:
    """Words on green (``ok``), red (``bad``) or amber (``open``)."""
    return f'<span class="badge {kind}">{text(words)}</span>'


def items(lines: Iterable[object]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>"


def tile(label: str, value: str, note: str = "") -> str:
    """A figure with its name."""
    return (
        f'<div class="tile"><div class="label">{text(label)}</div><div class="value">{text(value)}</div>'
        f'<div class="note">{text(note)}</div></div>'
    )


def section(title: str, *parts: str) -> str:
    """A section with a heading."""
    name = title.lower().replace(" ", "-")
    return f'<section id="{text(name)}"><h2>{text(title)}</h2>{"".join(parts)}</section>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
