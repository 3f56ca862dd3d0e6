"""Charts, as specifications for Vega-Lite, and the SVG files that are made of them: pages and
pictures have the same."""
