// A dashboard of Grafana on a page of its own: the board's JSON and the answers of its queries, drawn
// with Grafana's panel library. What a Grafana server adds to the JSON is in DEFAULTS.
// `window.dashboard` is {board, answers, from, to, chosen}; answers: by panel id, series of
// {legend, labels, times, values}.
import { createRoot } from "react-dom/client";
import {
  FieldConfigOptionsRegistry,
  FieldType,
  ThemeContext,
  applyFieldOverrides,
  createTheme,
  dateTime,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
  toDataFrame,
} from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from "@grafana/ui";

const { board, answers, from, to, chosen } = window.dashboard;
const COLUMNS = 24;
const CELL_HEIGHT = 30;
const GAP = 8;
const TIME_ZONE = "utc";
const theme = createTheme({ colors: { mode: "dark" } });
const timeRange = {
  from: dateTime(from),
  to: dateTime(to),
  raw: { from: dateTime(from), to: dateTime(to) },
};

// What the panel plugins set where the JSON is silent.
const THRESHOLDS = {
  mode: "absolute",
  steps: [
    { value: -Infinity, color: "green" },
    { value: 80, color: "red" },
  ],
};
const DEFAULTS = {
  stat: { color: { mode: "thresholds" }, thresholds: THRESHOLDS },
  timeseries: {
    color: { mode: "palette-classic" },
    thresholds: THRESHOLDS,
    custom: {
      axisPlacement: "auto",
      drawStyle: "line",
      fillOpacity: 0,
      gradientMode: "none",
      lineInterpolation: "linear",
      lineWidth: 1,
      pointSize: 5,
      scaleDistribution: { type: "linear" },
      showPoints: "auto",
      spanNulls: false,
      stacking: { mode: "none", group: "A" },
      thresholdsStyle: { mode: "off" },
    },
  },
};
const STANDARD = [
  ...["unit", "min", "max", "decimals", "color", "thresholds", "mappings", "noValue"],
  ...["displayName", "description", "links", "fieldMinMax"],
];

function registryOf({ custom = {} }) {
  const item = (path, isCustom) => ({
    id: isCustom ? `custom.${path}` : path,
    path,
    name: path,
    isCustom,
    process: (value) => value,
    shouldApply: () => true,
  });
  return new FieldConfigOptionsRegistry(() => [
    ...STANDARD.map((path) => item(path, false)),
    ...Object.keys(custom).map((path) => item(path, true)),
  ]);
}

function fieldConfigOf(panel) {
  const defaults = DEFAULTS[panel.type];
  const own = structuredClone(panel.fieldConfig.defaults);
  for (const step of own.thresholds?.steps ?? []) step.value ??= -Infinity;
  const custom = { ...defaults.custom, ...own.custom };
  return { defaults: { ...defaults, ...own, custom }, overrides: panel.fieldConfig.overrides };
}

function framesOf(panel) {
  const fieldConfig = fieldConfigOf(panel);
  const frames = answers[panel.id].map(({ legend, labels, times, values }) =>
    toDataFrame({
      name: legend,
      fields: [
        { name: "Time", type: FieldType.time, values: times, config: {} },
        {
          name: "Value",
          type: FieldType.number,
          values,
          labels,
          config: legend ? { displayNameFromDS: legend } : {},
        },
      ],
    }),
  );
  return applyFieldOverrides({
    data: frames,
    fieldConfig,
    fieldConfigRegistry: registryOf(fieldConfig.defaults),
    replaceVariables: (text) => text,
    theme,
    timeZone: TIME_ZONE,
  });
}

function Numbers({ panel, frames, width, height }) {
  const { reduceOptions, graphMode, colorMode, justifyMode, textMode } = panel.options;
  const values = () =>
    getFieldDisplayValues({
      data: frames,
      fieldConfig: fieldConfigOf(panel),
      reduceOptions,
      replaceVariables: (text) => text,
      sparkline: graphMode !== "none",
      theme,
      timeZone: TIME_ZONE,
    });
  const one = ({ value, alignmentFactors, width, height, count }) => (
    <BigValue
      value={value.display}
      count={count}
      sparkline={value.sparkline && { ...value.sparkline, timeRange }}
      {...{ alignmentFactors, colorMode, graphMode, height, justifyMode, textMode, theme, width }}
    />
  );
  return (
    <VizRepeater
      source={frames}
      getValues={values}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={one}
      renderCounter={0}
      autoGrid
      orientation={panel.options.orientation}
      {...{ width, height }}
    />
  );
}

function Graph({ panel, frames, width, height }) {
  const { legend } = panel.options;
  if (!frames.length) {
    const text = panel.fieldConfig.defaults.noValue ?? "No data";
    return <div style={{ ...empty, width, height }}>{text}</div>;
  }
  return <TimeSeries {...{ frames, width, height, legend, timeRange, timeZone: TIME_ZONE }} />;
}

const KINDS = { stat: Numbers, timeseries: Graph };

function Panel({ panel, cell }) {
  const { x, y, w, h } = panel.gridPos;
  const width = w * cell - GAP;
  const height = h * (CELL_HEIGHT + GAP) - GAP;
  const place = { position: "absolute", left: x * cell, top: y * (CELL_HEIGHT + GAP) };
  const Kind = KINDS[panel.type];
  const frames = framesOf(panel);
  return (
    <div style={place}>
      <PanelChrome title={panel.title} {...{ width, height }}>
        {(width, height) =>
          <Kind {...{ panel, frames, width, height }} />
        }
      </PanelChrome>
    </div>
  );
}

const empty = {
  display: "flex",
  alignItems: "center",
  justifyContent: "center",
  fontSize: 18,
  color: theme.colors.text.secondary,
};
const choice = {
  border: `1px solid ${theme.colors.border.medium}`,
  borderRadius: 2,
  padding: "4px 8px",
  marginRight: 8,
};

function Board() {
  const cell = (window.innerWidth - GAP) / COLUMNS;
  const rows = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <div style={{ padding: `12px 0 0 ${GAP}px`, position: "relative" }}>
      <h3>{board.title}</h3>
      {board.templating.list.map(({ name, label }) => (
        <span key={name} style={choice}>
          {label} <b>{chosen[name]}</b>
        </span>
      ))}
      <div style={{ position: "relative", marginTop: 16, height: rows * (CELL_HEIGHT + GAP) }}>
        {board.panels.map((panel) => (
          <Panel key={panel.id} {...{ panel, cell }} />
        ))}
      </div>
    </div>
  );
}

function Themed({ children }) {
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      {children}
    </ThemeContext.Provider>
  );
}

document.body.style.margin = 0;
document.body.innerHTML = "<div id=board></div>";
const root = createRoot(document.getElementById("board"));
// The styles declare the fonts; a canvas draws with those that are loaded.
root.render(<Themed />);
setTimeout(async () => {
  await Promise.all([400, 500].map((weight) => document.fonts.load(`${weight} 12px Inter`)));
  root.render(<Themed>
      <Board />
    </Themed>);
  setTimeout(() => (document.body.dataset.drawn = "yes"), 2000);
}, 500);
