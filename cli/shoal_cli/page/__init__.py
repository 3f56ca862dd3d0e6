"""One page of a run: a report as a self-contained HTML file.

`series` makes bounded data of what was recorded, `charts` and the modules below it (`over_time`,
`graph`) make specifications for Vega-Lite of it, `tables` makes rows; all of these are pure.
`document` puts them into one text, `writing` adds the JavaScript that draws, and writes.
"""
