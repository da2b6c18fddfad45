"""The report's page."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from ..charts.markup import prose
from ..charts.page import facts
from ..charts.page import page as shared_page
from ...telemetry.reading import Run
from ...telemetry.soundness import shown
from ...units import seconds_text
from .figures import figures
from .words import Tile, happenings, steps_taken, tiles, verdict, what_was_run


def page(run: Run, name: str) -> str:
    """Return the page of a run; name: what its record's folder is called."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    title = f"Run {shown(name)}"
    plots = "".join(
        f'<h2>{escape(heading)}</h2>\n<div class="plots">\n' + "\n".join(those) + "\n</div>\n"
        for heading, those in figures(run).items()
    )
    return shared_page(
        title,
        style,
        f"""<h1>{escape(title)}</h1>
{_verdict(run)}<p class="lead">{escape(opening(run))}</p>
<dl class="tiles">{"".join(map(tile, tiles(run)))}</dl>
{plots}{_happened(run)}<h2>What was run</h2>
<dl class="facts">{facts(what_was_run(run))}</dl>""",
    )


def opening(run: Run) -> str:
    """Return the page's opening sentence."""
    begin = run.first.begin
    ranks, hosts = int(begin["ranks"]), len({rank.begin["host"] for rank in run.ranks})
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    over = begin["transport"]
    emulated = ""
    if link := begin.get("link"):
        over += f" and an {link}"
        emulated = " Seconds are emulated: messages waited as long as they would there."
    return (
        f"{ranks} rank{'s' * (ranks > 1)} on {where}, over {over}, took "
        f"{steps_taken(run)} in {seconds_text(run.seconds)}. All of it is as the ranks "
        f"measured it, unless it is called predicted.{emulated}"
    )


def tile(of: Tile) -> str:
    """Return a figure at the head of the page."""
    return (
        f'<div class="{"tile loss" if of.loss else "tile"}"><dt>{escape(of.name)}</dt>'
        f'<dd class="value">{escape(of.value)}</dd><dd class="detail">{prose(of.detail)}</dd></div>'
    )


def _verdict(run: Run) -> str:
    said = verdict(run)
    if not said:
        return ""
    return f'<p class="lead"><strong>{escape(said[0].upper() + said[1:])}.</strong></p>\n'


def _happened(run: Run) -> str:
    found = happenings(run)
    if not found:
        return ""
    items = "".join(
        f"<li><h3>{escape(where)}</h3><p>{prose(said)}</p></li>" for where, said in found
    )
    return f'<h2>What happened</h2>\n<ul class="findings">{items}</ul>\n'
