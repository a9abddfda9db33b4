// The dashboard: fetches the server's newest samples once a second, and draws them. No build step.
"use strict";
(() => {
  const POLL_MS = 1000;
  const PATIENCE_MS = 5000;
  const SAMPLES_MAX = 300;
  const NEAR_S = 2;
  const BARS = 7;
  const TOKEN = "asynctrt-token";
  const DASHES = [[], [9, 5], [2, 4], [12, 3, 2, 3]];
  const NONE = "\u2013";

  const $ = (id) => document.getElementById(id);
  const text = (id, value) => { if ($(id).textContent !== value) $(id).textContent = value; };
  const show = (id, shown) => { $(id).hidden = !shown; };

  function element(tag, className, content) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (content !== undefined) made.textContent = content;
    return made;
  }

  // ---- figures as text

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

  function figure(value) {
    if (value === null || value === undefined) return NONE;
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 100) return whole.format(value);
    return String(Number(value.toPrecision(3)));
  }

  function short(value) {
    if (value === null || value === undefined) return NONE;
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
    }
    return String(Number(value.toPrecision(3)));
  }

  function bytes(value) {
    if (value === null || value === undefined) return [NONE, ""];
    let unit = 0;
    while (value >= 1024 && unit < 4) { value /= 1024; unit += 1; }
    return [String(Number(value.toPrecision(3))), ["B", "KiB", "MiB", "GiB", "TiB"][unit]];
  }

  const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));

  const several = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;

  const pad = (number) => String(number).padStart(2, "0");

  function clock(seconds, hasSeconds) {
    const at = new Date(seconds * 1000);
    const minutes = `${pad(at.getHours())}:${pad(at.getMinutes())}`;
    return hasSeconds ? `${minutes}:${pad(at.getSeconds())}` : minutes;
  }

  // ---- the server's samples

  let samples = [];
  let fields = { server: {}, model: {} };
  let answer = null;
  let chosen = "";

  const names = (list) => Object.fromEntries(list.map((name, index) => [name, index]));

  /** Merges an answer; returns false if samples between it and the known ones are missing. */
  function take(content, isAll) {
    const isSame = answer !== null && answer.started_ms === content.started_ms;
    const last = isSame && samples.length ? samples[samples.length - 1].number : 0;
    const fresh = content.samples.filter((sample) => sample.number > last);
    if (!isAll && (!isSame || (fresh.length && fresh[0].number !== last + 1))) return false;
    fields = { server: names(content.server_fields), model: names(content.model_fields) };
    samples = (isAll ? content.samples : samples.concat(fresh)).slice(-SAMPLES_MAX);
    answer = content;
    return true;
  }

  const ofServer = (sample, name) => sample.server[fields.server[name]];

  function ofModel(sample, name) {
    const figures = sample.models[chosen];
    return figures === undefined ? null : figures[fields.model[name]];
  }

  // ---- charts

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function faded(colour) {
    return colour + "4d";
  }

  /** A card with a heading, a plot, and a key that shows the figures at the cursor, or else the newest. */
  class Chart {
    constructor(home, spec) {
      this.spec = spec;
      this.card = element("figure");
      const caption = element("figcaption");
      this.when = element("span", "quiet");
      caption.append(element("h3", "", spec.title), this.when);
      this.plot = element("div", "plot");
      this.plot.setAttribute("role", "img");
      this.idle = element("div", "idle");
      this.idle.append(element("span", "", spec.idle || ""));
      this.key = element("ul", "key");
      this.values = spec.series.map((series, index) => {
        const item = element("li");
        const mark = element("span", `mark m${index}${spec.isStacked || spec.isBars ? " fill" : ""}`);
        mark.setAttribute("aria-hidden", "true");
        const value = element("b", "", NONE);
        item.append(mark, element("span", "", series.label), value);
        this.key.append(item);
        return value;
      });
      this.card.append(caption, this.plot, this.key);
      home.append(this.card);
      this.raw = null;
      this.draw = null;
      new ResizeObserver(() => this.resize()).observe(this.plot);
    }

    options(width) {
      const spec = this.spec;
      const grid = { stroke: style("--line"), width: 1 };
      const axis = {
        stroke: style("--soft"), grid, ticks: { ...grid, size: 4 }, font: "12px system-ui, sans-serif",
        labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: 0,
      };
      const y = {
        ...axis, label: spec.unit, space: 32, incrs: spec.isWhole ? [1, 2, 5].flatMap(
          (step) => Array.from({ length: 12 }, (_, power) => step * 10 ** power)).sort((a, b) => a - b) : undefined,
        size: (_, labels) => 16 + 7 * Math.max(2, ...(labels || []).map((label) => label.length)),
        values: (_, splits) => splits.map(short),
      };
      const x = spec.isBars
        ? { ...axis, grid: { show: false }, label: "rows in a batch", values: (_, splits) => splits.map(
          (at) => (Number.isInteger(at) && at % Math.ceil(spec.names.length / (BARS + 1)) === 0 && spec.names[at]) || ""), splits: () => spec.names.map((_, at) => at), size: 28 }
        : { ...axis, label: "local time", incrs: [60], space: 20, size: 28, values: (_, splits) => splits.map(
          (at) => clock(at, false)) };
      return {
        width, height: this.plot.clientHeight || 200, padding: [8, 12, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: !spec.isBars }, sync: spec.isBars ? undefined : { key: "time" } },
        scales: {
          x: spec.isBars ? { time: false, range: () => [-0.6, spec.names.length - 0.4] }
            : { time: true, range: () => this.span() },
          y: { range: (_, __, top) => [0, top === null ? 1 : Math.max(spec.least || 1e-3, top * 1.1)] },
        },
        axes: [x, y],
        series: [{}, ...spec.series.map((series, index) => this.series(index))],
        bands: spec.isStacked ? spec.series.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })) : [],
        hooks: { setCursor: [() => this.follow()], draw: spec.isBars ? [(u) => this.counts(u)] : [] },
      };
    }

    series(index) {
      const stroke = style(`--s${index}`);
      if (this.spec.isBars) {
        return { stroke, fill: faded(stroke), width: 1.5, paths: uPlot.paths.bars({ size: [0.7, 64] }), points: { show: false } };
      }
      return {
        stroke, width: this.spec.isStacked ? 1 : 1.5, dash: DASHES[index], fill: this.spec.isStacked ? faded(stroke) : undefined,
        points: { show: false, filter: lone, size: 5, fill: stroke },
      };
    }

    /** Five minutes, of which the newest sample is the end. */
    span() {
      const end = samples.length ? samples[samples.length - 1].at_ms / 1000 : Date.now() / 1000;
      return [end - SAMPLES_MAX, end];
    }

    /** Writes its count over each bar: a bar's height alone is hard to read. */
    counts(u) {
      u.ctx.save();
      u.ctx.fillStyle = style("--text");
      u.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      u.ctx.textAlign = "center";
      u.data[1].forEach((value, at) => {
        if (value) u.ctx.fillText(short(value), u.valToPos(at, "x", true), u.valToPos(value, "y", true) - 4 * devicePixelRatio);
      });
      u.ctx.restore();
    }

    resize() {
      const width = this.plot.clientWidth;
      if (this.draw !== null && width > 0 && width !== this.draw.width) {
        this.draw.setSize({ width, height: this.plot.clientHeight || 200 });
      }
    }

    /** Draws rows of figures: the first is x, the others one for each series. */
    set(rows) {
      this.raw = rows;
      const width = this.plot.clientWidth;
      if (width === 0) return;
      const drawn = this.spec.isStacked ? stacked(rows) : rows;
      if (this.draw === null) {
        this.draw = new uPlot(this.options(width), drawn, this.plot);
        this.draw.over.append(this.idle);
      } else {
        this.draw.setData(drawn);
      }
      this.idle.hidden = rows.slice(1).some((row) => row.some((value) => value !== null && (value !== 0 || !this.spec.isBars)));
      this.follow();
      const newest = this.values.map((value, index) => `${this.spec.series[index].label} ${value.textContent}`);
      this.plot.setAttribute("aria-label", `Chart: ${this.spec.title} (${this.spec.unit}). Now: ${newest.join(", ")}.`);
    }

    follow() {
      if (this.raw === null || this.draw === null) return;
      const isBars = this.spec.isBars;
      const { left, idx } = this.draw.cursor;
      const isPointed = left >= 0 && !isBars;
      let at = this.raw[0].length - 1;
      if (isPointed) {
        // The library's nearest sample may be minutes away: then there is none where the cursor is.
        const time = this.draw.posToVal(left, "x");
        at = Math.abs(this.raw[0][idx] - time) <= NEAR_S ? idx : -1;
        this.when.textContent = clock(at < 0 ? time : this.raw[0][at], true);
      } else {
        this.when.textContent = "";
      }
      this.values.forEach((value, index) => {
        const row = this.raw[index + 1];
        const said = isBars ? short(row.reduce((sum, part) => sum + part, 0)) : figure(row[at]);
        if (value.textContent !== said) value.textContent = said;
      });
    }

    /** Forgets the drawing, so that the next one has the colours and the bars of its time. */
    forget() {
      if (this.draw !== null) this.draw.destroy();
      this.draw = null;
    }
  }

  /** The samples that no line goes to, as the seconds beside them had no request: each is a point. */
  function lone({ data }, series) {
    const row = data[series], isNone = (at) => (row[at] ?? null) === null;
    return row.flatMap((_, at) => (!isNone(at) && isNone(at - 1) && isNone(at + 1) ? [at] : []));
  }

  function stacked(rows) {
    const drawn = [rows[0]];
    let below = null;
    for (const row of rows.slice(1)) {
      below = row.map((value, at) => (value === null ? null : value + (below === null ? 0 : below[at])));
      drawn.push(below);
    }
    return drawn;
  }

  const quietly = "No requests in these five minutes";
  const modelCharts = [
    { title: "Throughput", unit: "per second", least: 1, idle: quietly,
      series: [["requests", "answers_per_s"], ["rows", "rows_per_s"], ["failures", "failures_per_s"]] },
    { title: "Latency", unit: "milliseconds", idle: quietly,
      series: [["p50", "p50_ms"], ["p95", "p95_ms"], ["p99", "p99_ms"]] },
    { title: "Where the time of a request goes", unit: "milliseconds", isStacked: true, idle: quietly,
      series: [["queue", "queue_ms"], ["copy in", "copy_in_ms"], ["compute", "compute_ms"], ["copy out", "copy_out_ms"]] },
    { title: "Batch sizes", unit: "batches", isBars: true, isWhole: true, least: 1, names: [], idle: quietly,
      series: [["batches in five minutes", "batches"]] },
    { title: "Queue and in flight", unit: "requests, batches", isWhole: true, least: 1,
      series: [["requests queued", "queued_requests"], ["requests not answered yet", "pending_requests"],
        ["batches in flight", "in_flight_batches"]] },
  ];
  const serverCharts = [
    { title: "Event loop lag", unit: "milliseconds", least: 0.1, series: [["lag", "loop_lag_ms"]] },
    { title: "CPU", unit: "% of one core", least: 1, series: [["CPU", "cpu_percent"]] },
  ];
  const ready = (spec) => ({ ...spec, series: spec.series.map(([label, field]) => ({ label, field })) });
  const charts = modelCharts.map((spec) => new Chart($("charts"), ready(spec)));
  $("charts").append($("resource-card"));
  const ownCharts = serverCharts.map((spec) => new Chart($("server-charts"), ready(spec)));

  // ---- tiles and tables

  function tile(home, name) {
    let made = $(`${home}-${name}`);
    if (made === null) {
      const box = element("div", "tile");
      made = element("dd");
      made.id = `${home}-${name}`;
      const line = element("div");
      line.append(element("span", "value"), " ", element("span", "unit"));
      made.append(line, element("div", "more"));
      box.append(element("dt"), made);
      $(home).append(box);
    }
    return made;
  }

  function setTile(home, name, label, value, unit, more) {
    const made = tile(home, name);
    made.previousSibling.textContent = label;
    made.querySelector(".value").textContent = value;
    made.querySelector(".unit").textContent = value === NONE ? "" : unit;
    made.querySelector(".more").textContent = more || "";
  }

  /** Rows of a table: an id, a name, and figures. Rows that are there already are written over. */
  function setRows(home, rows, named) {
    const body = $(home);
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach(([id, name, ...figures], at) => {
      const row = body.rows[at] || body.insertRow();
      row.id = `${home}-${id}`;
      while (row.cells.length < figures.length + 1) {
        row.append(row.cells.length ? element("td") : element("th"));
      }
      row.cells[0].scope = "row";
      [name, ...figures].forEach((content, column) => {
        if (named && column === 0) named(row.cells[0], id, name);
        else if (row.cells[column].textContent !== content) row.cells[column].textContent = content;
      });
    });
  }

  const withUnit = (value, unit) => (value === NONE || !unit ? value : `${value} ${unit}`);

  function drawTiles(model, newest) {
    const now = (name) => ofModel(newest, name);
    const failed = Object.values(model.failures).reduce((sum, one) => sum + one, 0);
    setTile("tiles", "rate", "Requests", figure(now("answers_per_s")), "/s", `${figure(now("rows_per_s"))} rows/s`);
    setTile("tiles", "p50", "Latency p50", figure(now("p50_ms")), "ms");
    setTile("tiles", "p95", "Latency p95", figure(now("p95_ms")), "ms");
    setTile("tiles", "p99", "Latency p99", figure(now("p99_ms")), "ms");
    setTile("tiles", "batch", "Mean batch", figure(now("batch_rows")), "rows", `of at most ${count(model.max_rows)}`);
    setTile("tiles", "queued", "Queued", count(now("queued_requests")), "requests", `${count(now("queued_rows"))} rows`);
    setTile("tiles", "in-flight", "In flight", count(now("in_flight_batches")), "batches",
      `on ${several(now("contexts"), "context")}`);
    setTile("tiles", "failures", "Failures", figure(now("failures_per_s")), "/s", `${count(failed)} since loaded`);
  }

  const WHY = {
    REJECTED: "Rejected: queue full, or timed out", CANCELED: "Cancelled by the client",
    BACKEND: "Failed in the model", OTHER: "Bad requests and other failures",
  };

  const LAUNCHED = {
    full: "full", idle: "the device had room", delay: "max_delay was over", deadline: "a timeout was near",
    turn: "its turn", aged: "it had waited longest", ahead: "the one before was nearly done", again: "part of one that failed",
  };

  function drawTables(model, newest) {
    const now = (name) => ofModel(newest, name);
    const rate = (name) => withUnit(figure(now(name)), "/s");
    const time = (name) => withUnit(figure(now(name)), "ms");
    setRows("numbers", [
      ["answered", "Requests answered", rate("answers_per_s"), count(model.answered)],
      ["rows", "Rows answered", rate("rows_per_s"), count(model.rows)],
      ["batches", "Mean rows in a batch; batches", figure(now("batch_rows")), count(model.batches)],
      ...Object.entries(model.launched).map(([reason, launched]) => [
        `launched-${reason}`, `Batches launched: ${LAUNCHED[reason] || reason}`, "", count(launched),
      ]),
      ...["p50", "p95", "p99"].map((name) => [name, `Latency ${name}`, time(`${name}_ms`), ""]),
      ["queue", "Time in the queue, per request", time("queue_ms"), ""],
      ["copy-in", "Time to copy in, per request", time("copy_in_ms"), ""],
      ["compute", "Time to compute, per request", time("compute_ms"), ""],
      ["copy-out", "Time to copy out, per request", time("copy_out_ms"), ""],
      ["failed", "Requests failed", rate("failures_per_s"),
        count(Object.values(model.failures).reduce((sum, one) => sum + one, 0))],
      ...Object.entries(model.failures).map(([reason, failed]) => [
        reason.toLowerCase(), WHY[reason] || reason, "", count(failed)]),
    ]);
    setRows("resources", [
      ["contexts", "Contexts", count(now("contexts"))],
      ["quarantined", "Contexts abandoned", count(model.contexts_quarantined)],
      ...(model.worker_deaths ? [["deaths", "Workers that died", count(model.worker_deaths)]] : []),
      ["arenas", "Arenas", count(now("arenas"))],
      ["memory", "Memory of slabs and arenas", withUnit(...bytes(now("memory_bytes")))],
    ]);
  }

  function drawCharts() {
    const times = samples.map((sample) => sample.at_ms / 1000);
    for (const chart of charts) {
      if (!chart.spec.isBars) {
        chart.set([times, ...chart.spec.series.map(({ field }) => samples.map((sample) => ofModel(sample, field)))]);
      }
    }
  }

  function drawBatches(model) {
    const chart = charts.find(({ spec }) => spec.isBars);
    const all = model.batch_bounds.map(() => 0);
    for (const sample of samples) {
      const counts = ofModel(sample, "batches");
      // A model loaded again may have other sizes than the one before it.
      if (counts !== null && counts.length === all.length) counts.forEach((part, at) => { all[at] += part; });
    }
    // The largest sizes of a pipeline are hardly ever used, and their names would not fit beside each other.
    const sums = all.slice(0, Math.max(BARS, all.findLastIndex((sum) => sum > 0) + 1));
    const bars = sums.map((_, at) => {
      const bound = model.batch_bounds[at], from = at ? model.batch_bounds[at - 1] + 1 : 1;
      return from === bound ? `${bound}` : `${from}\u2013${bound}`;
    });
    if (chart.spec.names.join() !== bars.join()) {
      chart.forget();
      chart.spec.names = bars;
    }
    chart.set([sums.map((_, at) => at), sums]);
    const said = sums.map((sum, at) => `${bars[at]} rows: ${sum}`).join("; ");
    chart.plot.setAttribute("aria-label", `Chart: batches of the last five minutes by their rows. ${said}.`);
  }

  function drawServer(newest) {
    const now = (name) => ofServer(newest, name);
    const [memory, unit] = bytes(now("resident_bytes"));
    setTile("server-tiles", "connections", "Connections", count(now("connections")), "open");
    setTile("server-tiles", "requests", "In flight", count(now("requests_in_flight")), "requests");
    setTile("server-tiles", "lag", "Event loop lag", figure(now("loop_lag_ms")), "ms");
    setTile("server-tiles", "cpu", "CPU", figure(now("cpu_percent")), "%", "of one core");
    setTile("server-tiles", "memory", "Memory", memory, unit, "in RAM");
    const times = samples.map((sample) => sample.at_ms / 1000);
    for (const chart of ownCharts) {
      chart.set([times, ...chart.spec.series.map(({ field }) => samples.map((sample) => ofServer(sample, field)))]);
    }
  }

  /** Lists the models if there are several; the name of each is a link that chooses it. */
  function drawOverview(models, newest) {
    const keys = models.map(({ key }) => key);
    if (!keys.includes(chosen)) chosen = keys.includes(wanted()) ? wanted() : keys[0] || "";
    show("overview", models.length > 1 && newest !== undefined);
    if (models.length < 2 || newest === undefined) return;
    const rows = models.map(({ key, name, version, state }) => {
      const figures = newest.models[key] || [];
      const now = (field) => figures[fields.model[field]];
      return [key, `${name}, version ${version}`, figure(now("answers_per_s")), figure(now("p50_ms")), figure(now("p99_ms")),
        figure(now("batch_rows")), count(now("queued_requests")), count(now("in_flight_batches")),
        figure(now("failures_per_s")), state];
    });
    setRows("models", rows, link);
  }

  /** Makes the name in a row of the overview a link. */
  function link(cell, key, name) {
    const anchor = cell.firstElementChild || cell.appendChild(element("a"));
    if (anchor.textContent !== name) anchor.textContent = name;
    anchor.href = `#model=${encodeURIComponent(key)}`;
    if (key === chosen) anchor.setAttribute("aria-current", "true");
    else anchor.removeAttribute("aria-current");
  }

  const quoted = (words) => `'${words.replaceAll("'", "'\\''")}'`;

  /** Shows how to ask a model with curl. */
  function drawAsk({ ask }) {
    $("docs").href = "docs";
    const token = sessionStorage.getItem(TOKEN) === null ? "" : " -H 'Authorization: Bearer TOKEN'";
    const base = new URL(".", location.href).href.replace(/\/$/, "");
    text("curl", `curl -s${token} ${base}${ask.path}${ask.body ? ` -d ${quoted(ask.body)}` : ""}`);
  }

  function wanted() {
    try {
      return decodeURIComponent(location.hash.replace(/^#model=/, ""));
    } catch {
      return "";
    }
  }

  function drawUnserved(isAlone) {
    const missing = answer.index.filter(({ state }) => state !== "READY");
    show("unserved", missing.length > 0);
    text("none-text", isAlone && missing.length ? "The models that the server knows are listed below."
      : "Its figures appear here as soon as one is loaded.");
    const lines = missing.map(({ name, version, reason }) => `${name}, version ${version}: ${reason || "not loaded"}`);
    const list = $("unserved-list");
    if ([...list.children].map(({ textContent }) => textContent).join("\n") !== lines.join("\n")) {
      list.replaceChildren(...lines.map((line) => element("li", "", line)));
    }
  }

  function draw() {
    if (answer === null) return;
    const newest = samples[samples.length - 1];
    drawOverview(answer.models, newest);
    const model = answer.models.find(({ key }) => key === chosen);
    text("release", answer.version);
    show("none", model === undefined);
    show("model", model !== undefined && newest !== undefined);
    show("server", newest !== undefined);
    drawUnserved(model === undefined);
    if (newest === undefined) return;
    if (model !== undefined) {
      text("model-title", model.name);
      const unit = model.platform === "asynctrt_pipeline" ? "request" : "batch";
      text("about", `Version ${model.version}, ${model.platform} on ${model.device}, up to ${several(model.max_rows, "row")} in a ${unit}`);
      text("batching", model.batching ?? "");
      show("batching", Boolean(model.batching));
      show("quiet", model.answered === 0);
      drawAsk(model);
      drawTiles(model, newest);
      drawCharts();
      drawBatches(model);
      drawTables(model, newest);
    }
    drawServer(newest);
  }

  // ---- asking

  let timer = 0;
  let asking = null;
  let isLocked = false;
  let heardAt = null;

  function setState(state, status, banner) {
    $("status").dataset.state = state;
    $("banner").dataset.state = state;
    text("status", status);
    text("banner", banner);
    show("banner", banner !== "");
  }

  function lock() {
    isLocked = true;
    const had = sessionStorage.getItem(TOKEN) !== null;
    sessionStorage.removeItem(TOKEN);
    for (const id of ["none", "overview", "model", "server", "unserved"]) show(id, false);
    show("locked", true);
    setState("locked", "Waiting for a token", "");
    text("token-error", had ? "The server refused that token." : "");
    $("token").focus();
  }

  async function ask(path, signal) {
    const token = sessionStorage.getItem(TOKEN);
    const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
    const response = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
    if (response.status === 401) return null;
    if (!response.ok) throw new Error(`the server answers with status ${response.status}`);
    return response.json();
  }

  async function poll() {
    asking = new AbortController();
    const patience = setTimeout(() => asking.abort(), PATIENCE_MS);
    try {
      let content = await ask(answer === null ? "dashboard/data" : "dashboard/recent", asking.signal);
      if (content !== null && !take(content, answer === null)) {
        content = await ask("dashboard/data", asking.signal);
        if (content !== null) take(content, true);
      }
      if (content === null) return lock();
      heardAt = Date.now() / 1000;
      show("locked", false);
      if (answer.is_draining) {
        setState("draining", "Draining", "The server is shutting down: it takes no new requests, and answers those in progress.");
      } else {
        setState("live", "Live", "");
      }
    } catch (error) {
      // Whatever it is, it may be over in a second.
      const why = error.message.startsWith("the server answers") ? error.message : "the server does not answer";
      const when = heardAt === null ? "" : ` The figures below are of ${clock(heardAt, true)}.`;
      setState("gone", "No connection", `No new figures: ${why}.${when} Trying again every second.`);
    } finally {
      clearTimeout(patience);
      asking = null;
    }
    draw();
  }

  async function turn() {
    clearTimeout(timer);
    if (document.hidden || isLocked || asking !== null) return;
    try {
      await poll();
    } finally {
      if (!document.hidden && !isLocked) timer = setTimeout(turn, POLL_MS);
    }
  }

  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const token = $("token").value.trim();
    if (!/^[\x21-\x7e]+$/.test(token)) {
      text("token-error", "A token consists of printable ASCII characters without spaces.");
      return;
    }
    sessionStorage.setItem(TOKEN, token);
    $("token").value = "";
    isLocked = false;
    turn();
  });
  addEventListener("hashchange", () => {
    chosen = wanted();
    draw();
  });
  $("copy").hidden = !navigator.clipboard;
  $("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText($("curl").textContent).then(
      () => text("copied", "Copied"), () => text("copied", "The browser does not allow it: select the line"));
    setTimeout(() => text("copied", ""), 4000);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const chart of [...charts, ...ownCharts]) chart.forget();
    draw();
  });
  document.addEventListener("visibilitychange", turn);
  turn();
})();
