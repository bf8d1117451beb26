"""A report as a web page: one file that asks for nothing from anywhere."""

from html import escape

from .parts import Report, Section, Table


# Nothing may be loaded, whatever is in the text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --soft: #667381; --line: #e3e7ec; --card: #fff; --page: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaef; --soft: #98a4b3; --line: #2c343e; --card: #171c22; --page: #0e1216; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .9rem; }
.subtitle { color: var(--soft); margin: 0 0 1.6rem; overflow-wrap: anywhere; }
.headline { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: .75rem; margin: 0 0 1.2rem; }
.headline div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .7rem .9rem; }
.headline dt { color: var(--soft); font-size: .8rem; }
.headline dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.2rem 1.3rem; margin: 1.2rem 0; }
section > p { margin: .3rem 0; max-width: 80ch; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.2rem; align-items: start; }
.figures svg { width: 100%; max-width: 640px; height: auto; display: block; }
.table { overflow-x: auto; margin-top: .9rem; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
details { margin-top: .9rem; }
summary { cursor: pointer; color: var(--soft); }
"""


def render_html(report: Report) -> str:
    """
    Write a report as a web page.

    Args:
        report ([`Report`]):
            The report.

    Returns:
        `str`: HTML.
    """
    numbers = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in report.headline.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(report.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(report.title)}</h1>
<p class="subtitle">{escape(report.subtitle)}</p>
{f'<dl class="headline">{numbers}</dl>' if numbers else ""}
{"".join(map(_section, report.sections))}
</main>
</body>
</html>
"""


def _section(section: Section) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in section.lines)
    # Drawn by matplotlib, which escapes the text in it.
    figures = f'<div class="figures">{"".join(section.figures)}</div>' if section.figures else ""
    return (
        f"<section><h2>{escape(section.title)}</h2>{lines}{figures}{''.join(map(_table, section.tables))}</section>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    html = f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return html if table.title is None else f"<details><summary>{escape(table.title)}</summary>{html}</details>"
