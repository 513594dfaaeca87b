"""The look of the page: light and dark as the system has it, for a phone and for a wide screen.

The charts are drawn once, for a light page. On a dark one CSS turns their lightness over and keeps their
hues, so they follow the system at once, without a script.
"""

# Okabe and Ito's colours, which colour-blind readers can distinguish as well.
CHART_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#A0A000",
    "#444444",
)

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c1e21; --quiet: #5f6670; --line: #dfe2e6; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14161a; --text: #e4e6ea; --quiet: #a0a7b1; --line: #33373e; }
  .chart, .swatch { filter: invert(0.92) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 16px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 8px 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
.charts { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; }
tr { border-bottom: 1px solid var(--line); }
th[scope=row] { font-weight: 400; color: var(--quiet); white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 7em; }
li { overflow-wrap: anywhere; }
ul { padding-left: 20px; }
.legend { list-style: none; padding: 0; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; }
.quiet, footer { color: var(--quiet); }
summary { cursor: pointer; }
footer { margin: 40px 0 8px; font-size: 13px; }
"""
