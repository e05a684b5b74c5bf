"use strict";
// Asks /status.json every second and shows what it says. Everything is written as text or attributes, never as HTML.

const SECONDS = 60, WIDTH = 240, HEIGHT = 56, POLL = 1000, PATIENCE = 7000;
const find = (root, selector) => root.querySelector(selector);
const byId = (id) => document.getElementById(id);
const cards = new Map(); // model name -> its section and charts
let lastSeen = null;

// ---- words -------------------------------------------------------------------------------------------------------

const NONE = "–";
const number = (value, digits = 0) =>
  value == null ? NONE : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const rate = (value) => number(value, value != null && value < 10 ? 1 : 0);
const percent = (value) => (value == null ? NONE : `${number(100 * value, value < 0.1 ? 1 : 0)} %`);

function time(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 0.01) return `${number(seconds * 1e3, 1)} ms`;
  if (seconds < 1) return `${number(seconds * 1e3)} ms`;
  return `${number(seconds, seconds < 10 ? 2 : seconds < 60 ? 1 : 0)} s`;
}

function duration(seconds) {
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

// ---- charts ------------------------------------------------------------------------------------------------------

// Each: heading, the value in large (number, unit, swatch), the series to draw, how a number of them is written.
const CHARTS = {
  decoder: [
    { title: "Output tokens per second", series: ["generated_tokens"], write: rate,
      value: (m) => [[rate(m.per_second.generated_tokens), "tokens/s"]] },
    { title: "Requests", series: ["running", "waiting"], write: (v) => number(v),
      value: (m) => [[number(m.now.running), "running", "first"], [number(waiting(m)), "waiting", "second"]] },
    { title: "First token", series: ["first_token"], write: time, middle: true,
      value: (m) => [[time(m.latency.first_token.p50), "median"]] },
    { title: "Between tokens", series: ["inter_token"], write: time, middle: true,
      value: (m) => [[time(m.latency.inter_token.p50), "median"]] },
  ],
  model: [
    { title: "Requests per second", series: ["requests"], write: rate,
      value: (m) => [[rate(m.per_second.requests), "requests/s"]] },
    { title: "In the queue", series: ["queue"], write: time, middle: true,
      value: (m) => [[time(m.latency.queue.p50), "median"]] },
    { title: "Whole request", series: ["request"], write: time, middle: true,
      value: (m) => [[time(m.latency.request.p50), "median"]] },
    { title: "Batch size", series: ["batch_size"], write: (v) => number(v, 1),
      value: (m) => [[number(m.means.batch_size, 1), "mean"]] },
  ],
};

const waiting = (m) =>
  m.now.waiting_interactive == null ? null : m.now.waiting_interactive + (m.now.waiting_batch || 0);

const svg = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);

function makeChart(spec) {
  const root = byId("chart").content.cloneNode(true).firstElementChild;
  const picture = find(root, "svg"), cursor = find(root, ".cursor");
  find(root, "figcaption").textContent = spec.title;
  const lines = spec.series.map((_, index) => {
    const kind = index ? "second" : "first";
    const [area, line] = ["area", "line"].map((part) => {
      const path = svg("path");
      path.setAttribute("class", `${part} ${kind}`);
      picture.insertBefore(path, cursor);
      return path;
    });
    return { area, line };
  });
  const chart = { spec, root, picture, lines, cursor, points: [], ago: null };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    chart.ago = Math.round((1 - (event.clientX - box.left) / box.width) * (SECONDS - 1));
    note(chart);
  });
  picture.addEventListener("pointerleave", () => { chart.ago = null; note(chart); });
  return chart;
}

function drawChart(chart, model) {
  const { spec } = chart;
  const value = find(chart.root, ".value");
  value.replaceChildren(...spec.value(model).flatMap(([text, unit, swatch]) => {
    const small = document.createElement("small");
    small.textContent = ` ${unit}`;
    const strong = document.createElement("span");
    if (swatch) strong.append(Object.assign(document.createElement("i"), { className: swatch }));
    strong.append(text);
    return [strong, small];
  }));
  chart.points = spec.series.map((name) => model.history[name]);
  const known = chart.points.flat().filter((v) => v != null);
  chart.peak = known.length ? Math.max(...known) : null;
  const top = chart.peak || 1;
  const y = (v) => (HEIGHT - 1 - (v / top) * (HEIGHT - 5)).toFixed(1);
  chart.points.forEach((points, index) => {
    const x = (i) => (WIDTH * (SECONDS - points.length + i) / (SECONDS - 1)).toFixed(1);
    let line = "", area = "", start = null;
    points.forEach((v, i) => {
      if (v == null) { start = null; return; }
      line += start == null ? `M${x(i)} ${y(v)}h0` : `L${x(i)} ${y(v)}`;
      if (start != null) area += `M${x(i - 1)} ${HEIGHT}V${y(points[i - 1])}L${x(i)} ${y(v)}V${HEIGHT}Z`;
      start = i;
    });
    chart.lines[index].line.setAttribute("d", line);
    chart.lines[index].area.setAttribute("d", area);
  });
  const said = spec.value(model).map(([text, unit]) => `${text} ${unit}`).join(", ");
  chart.picture.setAttribute("aria-label", `${spec.title}, last minute: now ${said}; peak ${spec.write(chart.peak)}`);
  note(chart);
}

function note(chart) {
  const { ago, cursor, spec } = chart;
  const shown = ago != null && ago >= 0 && ago < SECONDS;
  cursor.setAttribute("visibility", shown ? "visible" : "hidden");
  const text = find(chart.root, ".note");
  if (!shown) {
    const what = spec.middle ? "medians per second, peak" : "last minute, peak";
    text.textContent = chart.peak == null ? "nothing in the last minute" : `${what} ${spec.write(chart.peak)}`;
    return;
  }
  const x = WIDTH * (SECONDS - 1 - ago) / (SECONDS - 1);
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  const values = chart.points.map((points) => spec.write(points[points.length - 1 - ago]));
  text.textContent = `${ago ? `${ago} s ago` : "now"}: ${values.join(" · ")}`;
}

// ---- one model ---------------------------------------------------------------------------------------------------

const LATENCIES = {
  decoder: [["queue", "Arrival to first step"], ["first_token", "Arrival to first token"],
            ["inter_token", "Token to next token"], ["request", "Arrival to end"]],
  model: [["queue", "Arrival to batch"], ["step", "One batch"], ["request", "Arrival to end"]],
};

function makeCard(model) {
  const root = byId("model").content.cloneNode(true).firstElementChild;
  const charts = CHARTS[model.kind].map(makeChart);
  find(root, ".charts").append(...charts.map((chart) => chart.root));
  root.dataset.model = model.name;
  root.setAttribute("aria-label", model.name);
  byId("models").append(root);
  return { root, charts };
}

function setRows(root, name, rows, make) {
  const holder = find(root, `[data-rows="${name}"]`);
  const wanted = rows.filter(([, ...values]) => values.some((value) => value != null));
  while (holder.children.length > wanted.length) holder.lastElementChild.remove();
  wanted.forEach(([label, ...values], index) => {
    const row = holder.children[index] || holder.appendChild(make(values.length));
    [label, ...values].forEach((text, column) => { row.children[column].textContent = text; });
  });
}

const element = (name) => document.createElement(name);
const definition = () => { const row = element("div"); row.append(element("dt"), element("dd")); return row; };
const tableRow = (columns) => {
  const row = element("tr"), head = element("th");
  head.scope = "row";
  row.append(head, ...Array.from({ length: columns }, () => element("td")));
  return row;
};

function drawCard({ root, charts }, model) {
  const say = (name, text) => { find(root, `[data-text="${name}"]`).textContent = text; };
  say("name", model.name);
  const state = find(root, '[data-text="state"]');
  state.textContent = model.ready ? "Ready" : "Not ready: starting again or ending";
  state.dataset.state = model.ready ? "good" : "bad";
  say("origin", [model.kind === "decoder" ? "generates text" : "dynamic batching", model.sku,
                 model.source !== model.name && model.source].filter(Boolean).join(" · "));
  charts.forEach((chart) => drawChart(chart, model));

  say("window", `last ${number(Math.min(model.window_seconds, SECONDS))} s`);
  const bounded = (latency, name) =>
    latency.largest_bound != null && latency[name] >= latency.largest_bound ? `≥ ${time(latency.largest_bound)}` : time(latency[name]);
  setRows(root, "latency", LATENCIES[model.kind].map(([name, label]) =>
    [label, ...["p50", "p90", "p99"].map((p) => bounded(model.latency[name], p))]), tableRow);

  drawCache(root, model, say);
  const { totals, means } = model;
  const outcomes = Object.entries(model.outcomes).sort((a, b) => b[1] - a[1]).map(([k, v]) => `${number(v)} ${k}`);
  const known = (value, text) => (value == null ? null : text(value));
  setRows(root, "work", [
    [model.kind === "decoder" ? "Sequences in a step, mean" : "Requests in a batch, mean", known(means.batch_size, (v) => number(v, 1))],
    ["Tokens in a step, mean", known(means.step_tokens, rate)],
    ["Waiting, interactive / batch", known(model.now.waiting_interactive, (v) => `${number(v)} / ${number(model.now.waiting_batch)}`)],
    ["Prompt tokens per second", model.kind === "decoder" ? rate(model.per_second.prompt_tokens) : null],
    ["Speculated tokens accepted", known(model.acceptance_rate, percent)],
    ["Preemptions since start", known(totals.preemptions, number)],
    ["Blocks swapped to host memory", totals.swapped_blocks ? number(totals.swapped_blocks) : null],
    ["Engine restarts", known(totals.engine_restarts, number)],
    ["Requests ended", outcomes.length ? outcomes.join(", ") : "none yet"],
  ], definition);
}

function drawCache(root, model, say) {
  const { blocks_held: held, blocks_cached: cached, blocks_free: free } = model.now;
  const part = find(root, '[data-part="cache"]');
  part.hidden = held == null;
  if (part.hidden) return;
  const total = held + cached + free;
  say("blocks", `${number(total)} blocks`);
  const share = (blocks) => `${number(blocks)} (${percent(total ? blocks / total : 0)})`;
  say("held", share(held));
  say("cached", share(cached));
  say("free", share(free));
  const bar = find(part, "svg");
  let x = 0;
  for (const [kind, blocks] of [["held", held], ["cached", cached], ["free", free]]) {
    const rectangle = find(bar, `.${kind}`), width = total ? 1000 * blocks / total : 0;
    rectangle.setAttribute("x", x);
    rectangle.setAttribute("width", width);
    x += width;
  }
  bar.setAttribute("aria-label", `${share(held)} held, ${share(cached)} cached, ${share(free)} free`);
  const saved = model.totals.prefix_saved_tokens;
  setRows(root, "prefixes", [
    ["Prefix hit rate, last minute", model.totals.prefix_lookups == null ? null : percent(model.prefix_hit_rate)],
    ["Prompt tokens saved since start", saved == null ? null : number(saved)],
  ], definition);
}

// ---- the server --------------------------------------------------------------------------------------------------

function show(status) {
  byId("uptime").textContent = duration(status.uptime_seconds);
  byId("running").textContent = number(status.requests_running);
  const names = new Set(status.models.map((model) => model.name));
  for (const [name, card] of cards) if (!names.has(name)) { card.root.remove(); cards.delete(name); }
  for (const model of status.models) {
    if (!cards.has(model.name)) cards.set(model.name, makeCard(model));
    drawCard(cards.get(model.name), model);
  }
}

function setState(kind, text, stale) {
  const pill = byId("state");
  if (pill.textContent !== text) pill.textContent = text; // a screen reader hears changes only
  pill.dataset.state = kind;
  document.body.classList.toggle("stale", stale);
}

function askForKey(problem) {
  byId("key-problem").textContent = problem;
  byId("key").hidden = false;
  setState("warn", "API key needed", true);
}

async function poll() {
  const key = sessionStorage.getItem("kiln-key");
  try {
    const answer = await fetch("status.json", {
      headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store", signal: AbortSignal.timeout(PATIENCE),
    });
    if (answer.status === 401) {
      sessionStorage.removeItem("kiln-key");
      askForKey(key ? "The server does not know this key." : "");
      return; // go on when there is a key
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const status = await answer.json();
    show(status);
    lastSeen = new Date();
    if (status.draining) setState("warn", "Shutting down", false);
    else setState("good", "Live", false);
  } catch {
    setState("bad", lastSeen ? `Server not reachable; figures of ${lastSeen.toLocaleTimeString()}` : "Server not reachable", true);
  }
  setTimeout(poll, POLL);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("kiln-key", byId("key-value").value.trim());
  byId("key-value").value = "";
  byId("key").hidden = true;
  poll();
});
poll();
