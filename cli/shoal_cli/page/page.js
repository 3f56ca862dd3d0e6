const specs = JSON.parse(document.getElementById("specs").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const config = {
  background: "transparent",
  font: "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif",
  view: { stroke: null },
  axis: { titleFontWeight: "normal", labelFontSize: 11 },
  legend: { labelFontSize: 11, symbolType: "square" },
};
const drawn = Object.entries(specs).map(([name, spec]) =>
  vegaEmbed(
    document.getElementById(name),
    { ...spec, width: "container", autosize: { type: "fit-x", contains: "padding" }, config },
    { mode: "vega-lite", renderer: "svg", actions: false, tooltip: { theme: dark ? "dark" : "light" } },
  ),
);
Promise.all(drawn).then(() => { document.body.dataset.drawn = drawn.length; });
