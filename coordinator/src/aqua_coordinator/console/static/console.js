// The console's script. HTML comes drawn from the coordinator, through htmx; what is here is what
// HTML cannot do: the token, the event stream, the timeline, the keyboard. Text from the cluster is
// only ever set as text.
"use strict";

const HOUR_S = 3600;
const LEAST_WINDOW_S = 300;
const RETRY_MS = 1000;
const SILENT_MS = 32000;  // Until no answer counts as none: the stream has a comment every 15 s.
const at = (id) => document.getElementById(id);

// --- The token: in this tab, in a header, nowhere else ------------------------------------

const KEY = "aqua-token";
let token = sessionStorage.getItem(KEY) || "";
let answered = null;

function headers() {
  return token ? { Authorization: "Bearer " + token } : {};
}

function keep(text) {
  token = text;
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
  at("forget").hidden = !text;
}

// Resolves once there is another token to try than the one that was refused.
function askForToken(refused) {
  if (refused !== headers().Authorization) return Promise.resolve();
  if (!answered) {
    const wrong = "This token is unknown, revoked or has expired.";
    at("ask-error").textContent = refused ? wrong : "";
    connection("away", "needs a token");
    answered = new Promise((resolve) => {
      at("ask-form").onsubmit = (event) => {
        const typed = at("token").value.trim();
        at("token").value = "";
        if (/[^!-~]/.test(typed)) {  // No header can hold it: `fetch` would throw.
          event.preventDefault();
          at("ask-error").textContent = wrong;
          return;
        }
        keep(typed);
        answered = null;
        resolve();
        refreshAll();
      };
    });
    at("details").close();
    at("ask").showModal();
  }
  return answered;
}

async function ask(path, more) {
  for (;;) {
    const used = headers();
    const response = await fetch(path, { signal: AbortSignal.timeout(SILENT_MS), ...more, headers: { ...used, ...(more || {}).headers } });
    if (response.status !== 401) return response;
    await askForToken(used.Authorization);
  }
}

document.addEventListener("htmx:config:request", (event) => {
  Object.assign(event.detail.ctx.request.headers, headers());
});
document.addEventListener("htmx:before:response", (event) => {
  const ctx = event.detail.ctx;
  if (ctx.response.status === 401) askForToken(ctx.request.headers.Authorization);
});

// --- When to look again ---------------------------------------------------------------------

// Calls `look` at once, then no sooner than some times what the last look took; a wish in
// between is kept.
function paced(look, leastMs) {
  let due = 0, timer = null, busy = false, again = false;
  async function go() {
    timer = null;
    busy = true;
    again = false;
    const begun = performance.now();
    try { await look(); } catch (error) { console.debug(error); }
    busy = false;
    due = performance.now() + Math.max(leastMs, 4 * (performance.now() - begun));
    if (again) want();
  }
  function want() {
    if (busy) again = true;
    else if (timer === null) timer = setTimeout(go, Math.max(0, due - performance.now()));
  }
  return want;
}

function refreshed(element) {
  return new Promise((resolve) => {
    const done = (event) => {
      if (event.detail.ctx.sourceElement !== element) return;
      document.removeEventListener("htmx:finally:request", done);
      resolve();
    };
    document.addEventListener("htmx:finally:request", done);
    element.dispatchEvent(new Event("refresh"));
  });
}

const lookAtCluster = paced(async () => {
  await refreshed(at("cluster"));
  tidyCluster();
  requestAnimationFrame(() => performance.mark("cluster-drawn"));
}, 400);
const lookAtHappened = paced(async () => {
  await refreshed(at("happened-list"));
  for (const time of document.querySelectorAll("#happened-list time")) time.textContent = clock(Date.parse(time.dateTime) / 1e3);
}, 400);
const lookAtTimeline = paced(readTimeline, 400);
const lookAtBatches = paced(async () => {
  await refreshed(at("batches"));
  at("batch-key").hidden = !at("batch-table");
}, 2000);

function refreshAll() {
  lookAtTimeline();
  lookAtHappened();
  lookAtCluster();
  lookAtBatches();
}

// --- The event stream ---------------------------------------------------------------------

function connection(state, text) {
  at("connection").dataset.state = state;
  at("connection-text").textContent = text;
}

// `fetch` and not EventSource, which can send no header.
async function follow() {
  let last = "";
  for (;;) {
    // A machine that is lost, or a process that stands still, closes no connection.
    const silence = new AbortController();
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENT_MS);
    };
    heard();
    try {
      const response = await ask("/v1/events", { headers: last ? { "Last-Event-ID": last } : {}, signal: silence.signal });
      if (!response.ok) throw new Error(response.status === 503 ? "polling" : String(response.status));
      connection("live", "live");
      refreshAll();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        heard();
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        const parts = text.split("\n\n");
        text = parts.pop();
        for (const part of parts) {
          const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s, 2)));
          if (fields.id) last = fields.id;
          if (fields.event) happened(fields.event, JSON.parse(fields.data));
        }
      }
      connection("away", "connecting");
    } catch (error) {
      if (error.message === "polling") connection("polling", "every few seconds");
      else connection("away", "the coordinator does not answer");
    }
    clearTimeout(timer);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    if (at("connection").dataset.state !== "live") refreshAll();
  }
}

let toldMs = -Infinity;

function happened(kind, event) {
  lookAtHappened();
  lookAtCluster();
  if (kind.startsWith("reclaim")) lookAtTimeline();
  if (kind === "reclaim_closed" && event.reclaim && performance.now() - toldMs > 5000) {
    toldMs = performance.now();
    at("announce").textContent = `${event.producer_id} took back ${bytes(event.reclaim.returned_bytes)}`;
  }
}

// --- The timeline ---------------------------------------------------------------------------

let timeline = null;
let charts = [];
const live = [];  // Of this tab: what was read between two samples of the books.

async function readTimeline() {
  const response = await ask("/v1/console/timeline");
  if (!response.ok) return;
  timeline = await response.json();
  const columns = ["offered_bytes", "leased_bytes", "spilled_bytes"];
  const rows = timeline.at_s.map((time, i) => [time, ...columns.map((name) => timeline[name][i])]);
  const now = rows.pop();
  live.push(now);
  while (live.length && live[0][0] < timeline.now_s - HOUR_S) live.shift();
  timeline.rows = [...rows, ...live].sort((a, b) => a[0] - b[0]).filter((row, i, all) => !i || row[0] > all[i - 1][0]);
  timeline.past = timeline.reclaims.filter((one) => one.reclaim.total_ms !== null).reverse();
  drawTimeline();
  tellReclaims();
}

function since() {
  const firsts = [timeline.rows[0][0], timeline.past.length ? timeline.past[0].at_s : Infinity];
  return Math.max(timeline.now_s - HOUR_S, Math.min(...firsts, timeline.now_s - LEAST_WINDOW_S));
}

function drawTimeline() {
  const memory = timeline.rows[0].map((_, i) => timeline.rows.map((row) => row[i]));
  const past = [timeline.past.map((one) => one.at_s), timeline.past.map((one) => one.reclaim.total_ms)];
  if (!charts.length) makeCharts(memory, past);
  else {
    charts[0].setData(memory);
    charts[1].setData(past);
  }
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function makeCharts(memory, past) {
  for (const chart of charts) chart.destroy();
  const font = "12px " + getComputedStyle(document.body).fontFamily;
  const axis = { stroke: style("muted"), font, grid: { stroke: style("line"), width: 1 }, ticks: { show: false } };
  const x = { range: () => [since(), timeline.now_s] };
  const times = { ...axis, size: 28, grid: { show: false }, values: (_, marks) => marks.map((mark) => clock(mark, timeline.now_s - since() < 900)), space: 90 };
  const shared = { legend: { show: false }, padding: [8, 8, 0, 0] };
  const cursor = { y: false, points: { size: 7 }, drag: { x: false, y: false }, sync: { key: "hour", scales: ["x", null] } };
  const line = (name, fill) => ({ stroke: style(name), width: 1.5, fill: fill && style(name) + fill, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) });
  charts = [
    new uPlot({
      ...shared, ...size("memory"), cursor: { ...cursor },
      scales: { x, y: { range: (_, low, high) => [0, Math.max(high || 0, 1) * 1.08] } },
      axes: [{ ...times }, { ...axis, size: 76, splits: byteSplits, values: (_, marks) => marks.map(bytes) }],
      series: [{}, line("offered", "55"), line("leased", "55"), line("spilled", "")],
      hooks: { setCursor: [(chart) => readMemory(chart)] },
    }, memory, at("memory")),
    new uPlot({
      ...shared, ...size("reclaims"), cursor: { ...cursor, points: { show: false } },
      scales: { x, y: { distr: 3, range: () => reclaimRange() } },
      axes: [{ ...times }, { ...axis, size: 76, splits: decades, values: (_, marks) => marks.map(duration) }],
      series: [{}, { stroke: style("reclaiming"), paths: () => null, points: { show: true, size: 7, fill: style("reclaiming") } }],
      hooks: { draw: [drawSpans], setCursor: [(chart) => readReclaim(chart)] },
    }, past, at("reclaims")),
  ];
}

function reclaimRange() {
  const figures = timeline.past.flatMap((one) => [one.reclaim.first_slab_ms || one.reclaim.total_ms, one.reclaim.total_ms]).filter((ms) => ms > 0);
  if (!figures.length) return [1, 1000];
  return [10 ** Math.floor(Math.log10(Math.min(...figures, 10))), 10 ** Math.ceil(Math.log10(1.1 * Math.max(...figures, 90)))];
}

// From the first slab to the last.
function drawSpans(chart) {
  const pen = chart.ctx;
  pen.save();
  pen.strokeStyle = style("reclaiming");
  pen.lineWidth = 2 * devicePixelRatio;
  for (const one of timeline.past) {
    const left = chart.valToPos(one.at_s, "x", true);
    if (left < chart.bbox.left || !one.reclaim.first_slab_ms || !one.reclaim.total_ms) continue;
    pen.beginPath();
    pen.moveTo(left, chart.valToPos(one.reclaim.first_slab_ms, "y", true));
    pen.lineTo(left, chart.valToPos(one.reclaim.total_ms, "y", true));
    pen.stroke();
  }
  pen.restore();
}

function byteSplits(_chart, _axis, low, high) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, (high - low) / 5)));
  const marks = [];
  for (let mark = 0; mark <= high; mark += step) marks.push(mark);
  return marks;
}

function decades() {
  const [low, high] = reclaimRange().map((ms) => Math.round(Math.log10(ms)));
  return Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
}

function readMemory(chart) {
  const i = chart.cursor.idx;
  if (i === null || i === undefined) return void (at("readout").textContent = "");
  const [time, offered, leased, spilled] = chart.data.map((column) => column[i]);
  at("readout").textContent = `${clock(time)}   ${bytes(offered)} offered, ${bytes(leased)} lent, ${bytes(spilled)} spilled`;
}

function readReclaim(chart) {
  const i = chart.cursor.idx;
  const left = i === null || i === undefined ? NaN : chart.valToPos(chart.data[0][i], "x");
  if (Math.abs(left - chart.cursor.left) < 12) at("readout").textContent = `${clock(timeline.past[i].at_s)}   ${timeline.past[i].sentence}`;
}

function tellReclaims() {
  const totals = timeline.past.map((one) => one.reclaim.total_ms).sort((a, b) => a - b);
  const figures = totals.length
    ? `${totals.length} ended, half within ${duration(totals[Math.floor((totals.length - 1) / 2)])}, the slowest in ${duration(totals[totals.length - 1])}`
    : "none ended";
  at("reclaim-figures").textContent = figures;
  at("reclaims").setAttribute("aria-label", `How long each reclaim of the last hour took: ${figures}`);
  const rows = timeline.reclaims.slice(0, 200).map((one) => {
    const reclaim = one.reclaim;
    const row = document.createElement("tr");
    const cells = [
      clock(one.at_s), reclaim.producer_id, bytes(reclaim.returned_bytes),
      reclaim.first_slab_ms === null ? "" : duration(reclaim.first_slab_ms),
      reclaim.total_ms === null ? "" : duration(reclaim.total_ms), reclaim.outcome.replace("_", " "),
    ];
    cells.forEach((text, i) => {
      const cell = row.insertCell();
      cell.textContent = text;
      if (i > 1 && i < 5) cell.className = "number";
    });
    row.title = one.sentence;
    return row;
  });
  at("reclaim-rows").replaceChildren(...rows);
}

function size(id) {
  return { width: Math.max(200, at(id).clientWidth), height: at(id).clientHeight };
}

// In the next frame: what is resized within the observer's call would be told to it again.
new ResizeObserver(() => requestAnimationFrame(() => charts.forEach((chart, i) => chart.setSize(size(["memory", "reclaims"][i]))))).observe(at("memory"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (charts.length) makeCharts(charts[0].data, charts[1].data);
});

// --- Words --------------------------------------------------------------------------------------

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(count) >= 1024 && i < 4) { count /= 1024; i++; }
  return `${Number.isInteger(count) ? count : count.toFixed(1)} ${units[i]}`;
}

function duration(ms) {
  if (ms < 1) return `${+ms.toFixed(2)} ms`;
  return ms < 10 ? `${+ms.toFixed(1)} ms` : ms < 1000 ? `${ms.toFixed(0)} ms` : `${+(ms / 1000).toFixed(1)} s`;
}

function clock(seconds, withSeconds = true) {
  return new Date(seconds * 1e3).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: withSeconds ? "2-digit" : undefined });
}

// --- GPUs: the keyboard, finding, details ---------------------------------------------------------

let current = "";

function gpus(list) {
  return [...(list || at("cluster")).querySelectorAll("button.gpu")].filter((gpu) => gpu.offsetParent);
}

// What morphing has taken away again.
function tidyCluster() {
  const wanted = at("find").value.trim().toLowerCase();
  for (const domain of document.querySelectorAll(".domain")) domain.hidden = wanted && !domain.textContent.toLowerCase().includes(wanted);
  const one = (current && document.getElementById(current)) || document.querySelector("button.gpu");
  if (one) one.tabIndex = 0;
}

function goTo(gpu) {
  if (!gpu) return;
  const before = current && document.getElementById(current);
  if (before) before.tabIndex = -1;
  current = gpu.id;
  gpu.tabIndex = 0;
  gpu.focus();
  gpu.scrollIntoView({ block: "nearest" });
}

function beside(gpu, step) {
  const lists = [...document.querySelectorAll(".match ul")].filter((list) => list.offsetParent);
  const here = gpu.closest("ul");
  const next = lists[lists.indexOf(here) + step];
  if (!next) return null;
  const rows = gpus(next);
  return rows[Math.min(gpus(here).indexOf(gpu), rows.length - 1)];
}

const STEPS = {
  ArrowDown: (gpu) => gpus()[gpus().indexOf(gpu) + 1],
  ArrowUp: (gpu) => gpus()[gpus().indexOf(gpu) - 1],
  ArrowRight: (gpu) => beside(gpu, 1),
  ArrowLeft: (gpu) => beside(gpu, -1),
  Home: () => gpus()[0],
  End: () => gpus().at(-1),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const gpu = event.target.closest && event.target.closest("button.gpu");
  if (gpu && STEPS[event.key]) {
    event.preventDefault();
    goTo(STEPS[event.key](gpu));
  } else if (event.target === at("find")) {
    if (event.key === "Escape") { at("find").value = ""; tidyCluster(); at("find").blur(); }
    if (event.key === "Enter") event.preventDefault(), goTo(gpus().find((one) => one.textContent.toLowerCase().includes(at("find").value.trim().toLowerCase())));
  } else if (event.key === "/") {
    event.preventDefault();
    at("find").focus();
  } else if (event.key === "g") {
    goTo((current && document.getElementById(current)) || gpus()[0]);
  } else if (event.key === "b" && at("batch-table")) {
    at("batch-table").focus();
  }
});
at("find").addEventListener("input", tidyCluster);

at("cluster").addEventListener("click", async (event) => {
  const gpu = event.target.closest("button.gpu");
  if (!gpu) return;
  goTo(gpu);
  const response = await ask(`/v1/console/${gpu.dataset.role}/${encodeURIComponent(gpu.dataset.name)}`).catch(() => null);
  if (response && response.ok) at("details-body").innerHTML = await response.text();
  else tellNoDetails(gpu.dataset.name, response && response.status === 404 ? "It is not in the books any more." : "The coordinator does not answer.");
  if (!at("details").open) at("details").showModal();
});

function tellNoDetails(name, why) {
  const title = document.createElement("h2"), sentence = document.createElement("p");
  title.id = "details-title";
  title.textContent = name;
  sentence.textContent = why;
  at("details-body").replaceChildren(title, sentence);
}

at("ask").addEventListener("cancel", (event) => event.preventDefault());
at("forget").addEventListener("click", () => { keep(""); location.reload(); });

// --- Begin -------------------------------------------------------------------------------------------

keep(token);
document.addEventListener("DOMContentLoaded", () => {
  follow();
  setInterval(() => {
    if (answered || at("connection").dataset.state === "connecting") return;
    lookAtCluster();
    lookAtTimeline();
    // Where there is no batch service, or none for this token, the first answer was empty.
    if (at("batches").firstElementChild) lookAtBatches();
  }, 2000);
});
