"""The page: runs are read, sections drawn in order, one HTML file written whole; it needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from vitruvius._errors import RunError
from vitruvius._files import atomic_write_text, check_out
from vitruvius._style import DARK, HEAT, LIGHT
from vitruvius._version import __version__
from vitruvius.report.blocks import Block, sections
from vitruvius.report.gathering import gathered_parts, runs_in
from vitruvius.report.run import Run, read_runs
from vitruvius.targets.base import local_run

Part = tuple[str, str, Sequence[Block]]  # address, heading, blocks


def write_page(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    title: str = "A vitruvius report",
    evaluations: Mapping[Path, Path] | None = None,
) -> Path:
    """Write one self-contained HTML page about run folders, sweeps and studies; returns its path.

    Pieces that a run does not have are left out and named under Remarks. Nothing is written unless all is well.

    runs: run folders or their URLs, side by side; the folder of a sweep means its runs and a table of them, that of a
        study its table and figure, and the runs it is about.
    out: the file of the page.
    title: its heading.
    evaluations: by run folder, the folder of an evaluation that lies elsewhere than in the run.
    """
    out = check_page(out)
    folders = [Path(local_run(run)) for run in runs]
    run_folders = runs_in(folders)
    read = read_runs(run_folders, evaluations) if run_folders or not folders else []
    atomic_write_text(out, render_page(read, title=title, parts=gathered_parts(folders, read)))
    return out


def check_page(out: str | Path) -> Path:
    """Refuse a place where no page can be written; nothing is made there."""
    check_out(out, example="report.html")
    if not Path(out).absolute().parent.is_dir():
        raise RunError(f"cannot write {out}: the folder {Path(out).parent} does not exist. Make it first.")
    return Path(out)


def render_page(runs: Sequence[Run], *, title: str, parts: Sequence[Part] = ()) -> str:
    """The page as text; `parts` come before the sections about the runs, which are shown in the given order."""
    ordered = sorted((sections[name] for name in sections), key=lambda section: (section.order, section.name))
    drawn = [(section.name, section.title, section(runs)) for section in ordered] if runs else []
    return (
        _environment()
        .get_template("templates/page.html.j2")
        .render(
            title=title,
            runs=runs,
            parts=[part for part in (*parts, *drawn) if part[2]],
            made=datetime.now().astimezone(),
            version=__version__,
            motif=Markup(_read("motif.svg").strip()),
            heat=HEAT,
            css=Markup(_colours() + _read("style.css")),
            scripts=[Markup(_read(name)) for name in ("page.js", "viewer.js")],
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["channel"] = _channel
    return environment


def _read(name: str) -> str:
    return (files("vitruvius.report") / name).read_text("utf-8")


def _colours() -> str:
    """The palettes as CSS variables: light, dark by the system's wish or the reader's, and light on paper."""
    light, dark = ("".join(f"--{name}:{colour};" for name, colour in p.items()) for p in (LIGHT, DARK))
    return (
        f":root{{color-scheme:light;{light}--heat:url(#heat-light)}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}--heat:url(#heat-dark)}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}--heat:url(#heat-dark)}}}}\n"
    )


def _channel(colours: Sequence[str], place: int) -> str:
    """One channel (0 red, 1 green, 2 blue) of hex colours as numbers in [0, 1] for an SVG filter."""
    return " ".join(f"{int(colour[1 + 2 * place : 3 + 2 * place], 16) / 255:.4f}" for colour in colours)
