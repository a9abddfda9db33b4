// Draws the charts of a load test's report with uPlot: hover for figures, drag to zoom, double-click to see all.
"use strict";
(() => {
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8a5a2b", "#6a3d9a", "#b2b200", "#b5446e"];
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => value === null || value === undefined ? "—"
    : Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));

  function axisOf(label, more) {
    const grid = { stroke: style("--line"), width: 1 };
    const font = "12px system-ui, sans-serif";
    return { stroke: style("--soft"), grid, ticks: { ...grid, size: 4 }, font, labelFont: font, label, labelSize: 18, labelGap: 0, ...more };
  }

  function seriesOf({ label, look, colour }) {
    const stroke = look === "thin" ? style("--soft") : COLOURS[colour % COLOURS.length];
    const drawn = { label, stroke, width: look === "thin" ? 1 : 1.75, value: (u, value) => isPointedAt(u) ? short(value) : "" };
    if (look === "bars") return { ...drawn, fill: `${stroke}aa`, paths: uPlot.paths.bars({ size: [0.8, 48] }), points: { show: false } };
    if (look === "points") return { ...drawn, paths: () => null, points: { show: true, size: 7, fill: stroke } };
    return { ...drawn, dash: look === "dotted" ? [2, 3] : undefined, points: { show: false } };
  }

  // Errors are marks on the axis: where there were some matters, not how many.
  function markErrors(u, times) {
    u.ctx.save();
    u.ctx.strokeStyle = style("--bad");
    u.ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const time of times) {
      const x = u.valToPos(time, "x", true), end = u.bbox.top + u.bbox.height;
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      u.ctx.beginPath();
      u.ctx.moveTo(x, end - 10 * devicePixelRatio);
      u.ctx.lineTo(x, end);
      u.ctx.stroke();
    }
    u.ctx.restore();
  }

  const rowsOf = (u) => u.root.querySelectorAll(".u-legend .u-series");

  function setPressed(u, index, show) {
    if (show !== undefined && index !== null) rowsOf(u)[index].querySelector("th").ariaPressed = String(show);
  }

  // A name in the legend is pressed by the keyboard, too.
  function asButtons(u) {
    for (const row of [...rowsOf(u)].slice(1)) {
      const name = row.querySelector("th");
      Object.assign(name, { tabIndex: 0, role: "button", ariaPressed: "true" });
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
    }
  }

  // Without a cursor in the chart there are no figures to show.
  const isPointedAt = (u) => u.cursor.idx !== null && u.cursor.idx !== undefined;
  const showPlace = (u) => { rowsOf(u)[0].hidden = !isPointedAt(u); };

  function optionsOf(chart, width) {
    const isBars = chart.series.some((one) => one.look === "bars");
    const isPoints = chart.series.some((one) => one.look === "points");
    const x = axisOf(chart.x, { values: (_, splits) => splits.map((at) => isBars && !Number.isInteger(at) ? "" : short(at)) });
    const top = (_, low, high) => chart.log ? uPlot.rangeLog(low > 0 ? low : 1e-3, high, 10, false) : [0, high > 0 ? high * 1.08 : 1];
    return {
      width, height: 300, padding: [10, 24, 0, 0],
      cursor: { drag: { x: true, y: false }, focus: { prox: 24 } },
      focus: { alpha: chart.series.length > 2 ? 0.35 : 1 },
      scales: {
        x: isBars ? { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] }
          : isPoints ? { time: false, range: (_, low, high) => [low - 0.02 * (high - low || 1), high + 0.02 * (high - low || 1)] }
          : { time: false },
        y: { distr: chart.log ? 3 : 1, range: top },
      },
      axes: [x, axisOf(chart.y, {
        size: (_, labels) => 18 + 7 * Math.max(2, ...(labels || []).map((label) => (label || "").length)),
        values: (_, splits) => splits.map((at) => at === null ? "" : short(at)),
      })],
      series: [{ label: chart.x, value: (_, value) => short(value) },
        ...chart.series.map(seriesOf)],
      hooks: { setSeries: [(u, index, { show }) => setPressed(u, index, show)], setLegend: [showPlace], ready: [asButtons, showPlace], draw: chart.errors && chart.errors.length ? [(u) => markErrors(u, chart.errors)] : [] },
    };
  }

  const drawn = [];
  for (const place of document.querySelectorAll(".chart")) {
    const chart = JSON.parse(document.getElementById(`${place.dataset.chart}-data`).textContent);
    const data = [chart.xs, ...chart.series.map((one) => one.values)];
    const draw = () => new uPlot({ ...optionsOf(chart, place.clientWidth) }, data, place);
    drawn.push({ place, draw, plot: draw() });
  }
  const again = () => drawn.forEach((one) => { one.plot.destroy(); one.plot = one.draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", () => drawn.forEach(({ place, plot }) => {
    if (place.clientWidth && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: 300 });
  }));
})();
