"""The report's page and its look: a template and a style sheet: light, dark, on paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --font: system-ui, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
  --page: #fdfdfc; --card: #ffffff; --ink: #1b1f24; --faint: #6b7480;
  --grid: #e4e7ea; --line: #d9dde2;
  --good: #1a7f4b; --warn: #9a6200; --bad: #b3261e;
  --series-0: #2563a8; --series-1: #d1661a; --series-2: #2e8b57;
  --series-3: #8a4fa3; --series-4: #b03a5b;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1b1f25; --ink: #e6e9ed; --faint: #98a2ae;
    --grid: #2c323a; --line: #333a43;
    --good: #5cc98f; --warn: #e0b050; --bad: #ff8a80;
    --series-0: #6fb1f2; --series-1: #f5a25d; --series-2: #6fcf97;
    --series-3: #c69ae0; --series-4: #f08cac;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 var(--font);
}
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 0 0 .75rem; }
header p { margin: .2rem 0; }
.subject { font-weight: 500; }
a { color: var(--series-0); }
nav { margin: 1.25rem .25rem 0; }
nav ol { columns: 18rem; margin: 0; padding-left: 1.5rem; }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.1rem 1.25rem; margin-top: 1.25rem;
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.25rem; margin: 0; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
figure { margin: 0 0 1.1rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption, .small { color: var(--faint); font-size: .85rem; }
p.small { margin: .75rem 0 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; position: relative; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td {
  text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; vertical-align: baseline;
}
td.small { white-space: normal; }
tbody th, td:first-child {
  white-space: normal; overflow-wrap: break-word; min-width: 11rem;
}
td.fact { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
thead .warn { white-space: normal; display: inline-block; max-width: 11rem; }
dl + .wide, .wide + .wide { margin-top: 1.1rem; }
th { font-weight: 500; }
thead th { color: var(--faint); }
tbody th { font-weight: inherit; }
caption, .unseen {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap;
}
.n { text-align: right; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
@media print {
  :root { color-scheme: light; --page: #fff; --card: #fff; --faint: #4a525c; }
  @page { margin: 15mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  section { border: 0; border-radius: 0; padding: 0; margin-top: 8mm; }
  h1, h2, thead { break-after: avoid; }
  figure, tr, dt, dd { break-inside: avoid; }
  a { color: inherit; }
  .wide { overflow: visible; }
  table { font-size: .8rem; }
  th, td { white-space: normal; overflow-wrap: anywhere; padding-right: .5rem; }
  td.n, td.e { white-space: nowrap; } td.n .small { white-space: normal; }
  tbody th, td:first-child { min-width: 7rem; }
}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<header>
<h1>$heading</h1>
$lead
</header>
$parts
</main>
</body>
</html>
"""
