// The page: token, stream of views, tabs, keys, and the slider of a replay.
import { forgetCharts } from "./charts.js";
import { h } from "./dom.js";
import { PAGES } from "./pages.js";

const $ = (id) => document.getElementById(id);
const NAMES = Object.keys(PAGES);
const state = { view: null, curves: null, tab: "overview", token: "", behind: 0, at: null, filter: "", log: false };
const keep = {
  config: {}, live: true, run: null, task: null, log: false, filter: "",
  set(name, value) { keep[name] = value; if (name === "task") logged = { task: null, next: 0, lines: [] }; draw(true); },
  timeline: { trace: null, error: "", saved: "" }, showTimeline, saveTrace,
  filtered(value) { keep.filter = value; showLines(); },
  showLog,
};
let logged = { task: null, next: 0, lines: [] };

function takeToken() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  if (fragment.has("token")) sessionStorage.setItem("jgraph-token", fragment.get("token"));
  if (NAMES.includes(fragment.get("tab"))) state.tab = fragment.get("tab");
  history.replaceState(null, "", `#tab=${state.tab}`);
  state.token = sessionStorage.getItem("jgraph-token") || "";
}

// A proxy of notebooks knows its user by a cookie of its own, and passes events on at once if they are asked for.
async function ask(path, accept = "*/*") {
  const headers = { Accept: accept, Authorization: `Bearer ${state.token}` };
  const reply = await fetch(path, { headers, cache: "no-store", credentials: "same-origin" }).catch(() => {
    throw new Error("the dashboard does not answer: it has ended, or the way to it is cut; this page asks again each second");
  });
  if (!reply.ok) {
    const told = await reply.json().catch(() => ({}));
    throw new Error(told.error || `the dashboard answered ${reply.status}`);
  }
  // The clock of this machine may be another than that of the dashboard.
  const answered = Date.parse(reply.headers.get("date") || "");
  if (answered) state.behind = answered - Date.now();
  return reply;
}
// A report has what was asked for in the page itself.
const report = $("report") && JSON.parse($("report").textContent);
const json = async (path) => (report ? report[path.split("?")[0]] : (await ask(path)).json());
const during = () => (state.at === null ? "" : `?at=${state.at}`);

function patched(value, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const found = value !== null && typeof value === "object" && !Array.isArray(value) ? { ...value } : {};
  for (const [name, change] of Object.entries(patch)) {
    if (change === null) delete found[name];
    else found[name] = patched(found[name], change);
  }
  return found;
}

function say(sentence) { if ($("sentence").textContent !== sentence) $("sentence").textContent = sentence; }

// What is scrolled by itself: wide tables, and the lines of a log, which stay at their end where they were.
function scrolled() {
  return [...document.querySelectorAll("#page section, #log-lines")].map((box) => [
    box, box.scrollLeft, isAtEnd(box) ? box.scrollHeight : box.scrollTop]);
}
const isAtEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < 30;

function draw(anyway = false) {
  if (!state.view) return;
  say(state.view.cluster.sentence);
  document.title = `${state.view.alarms.length ? `(${state.view.alarms.length}) ` : ""}jgraph`;
  const page = PAGES[state.tab];
  for (const button of document.querySelectorAll("#tabs button")) {
    if (button.dataset.tab === state.tab) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  const at = document.activeElement && document.activeElement.id;
  const looking = state.tab === "timeline" && $("page").dataset.tab === "timeline";
  if (!anyway && (looking || ["filter", "run", "task"].includes(at))) return;  // somebody is typing, or chooses
  if (!anyway && window.getSelection().toString()) return;  // or copies
  if (page.curves && !state.curves) return;
  const isSame = $("page").dataset.tab === state.tab;
  const places = isSame ? scrolled() : [];
  const top = window.scrollY;
  forgetCharts();
  $("page").replaceChildren(...page.show(state.view, state.curves, keep).flat(Infinity).filter((one) => one instanceof Node));
  if (page.after) page.after(state.view, keep);
  $("page").dataset.tab = state.tab;
  scrolled().forEach(([box], at) => { if (places[at]) [, box.scrollLeft, box.scrollTop] = places[at]; });
  window.scrollTo(0, top);
  if (at && $(at)) $(at).focus();
}

async function refreshCurves() {
  if (!PAGES[state.tab].curves) return;
  state.curves = await json(`api/v1/curves${during()}`);
}

async function choose(tab) {
  state.tab = tab;
  history.replaceState(null, "", `#tab=${tab}`);
  try { await refreshCurves(); } catch (error) { say(error.message); }
  draw(true);
}

async function showTimeline(again) {
  if (!keep.live || keep.timeline.busy) return;
  keep.timeline = { ...keep.timeline, busy: true, trace: again ? keep.timeline.trace : null };
  try {
    const trace = await json("api/v1/timeline");
    keep.timeline = { trace, error: "", saved: "" };
  } catch (error) { keep.timeline = { trace: null, error: error.message, saved: "" }; }
  if (state.tab === "timeline") draw(true);
}

async function saveTrace() {
  try {
    const file = await (await ask("api/v1/trace?last=30")).blob();
    const link = h("a", { href: URL.createObjectURL(file), download: "cluster.pftrace" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    keep.timeline.saved = "saved cluster.pftrace; open it in ui.perfetto.dev";
  } catch (error) { keep.timeline.saved = error.message; }
  draw(true);
}

async function showLog() {
  const names = Object.keys(state.view.tasks);
  const task = names.includes(keep.task) ? keep.task : names[0];
  if (!keep.live || !task) return;
  if (logged.task !== task) logged = { task, next: 0, lines: [] };
  const [, job, index] = task.match(/^\/job:(.*)\/task:(\d+)$/) || [];
  const after = logged.next;
  showLines();
  try {
    const told = await json(`api/v1/tasks/${encodeURIComponent(job)}/${index}/log?after=${after}&lines=200`);
    if (logged.task !== task || logged.next !== after || told.next === after) return;
    logged.next = told.next;
    logged.lines = [...logged.lines, ...told.lines].slice(-1000);
  } catch (error) { logged.lines = [error.message]; }
  showLines();
}
function showLines() {
  const box = $("log-lines");
  if (!box) return;
  const end = isAtEnd(box);
  box.textContent = logged.lines.filter((line) => line.toLowerCase().includes(keep.filter.toLowerCase())).join("\n");
  if (end) box.scrollTop = box.scrollHeight;
}

// An event is lines "event:", "id:" and "data:", and an empty line.
async function listen() {
  const reply = await ask("api/v1/stream", "text/event-stream");
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const field = (name) => (lines.find((line) => line.startsWith(`${name}: `)) || "").slice(name.length + 2);
      if (!field("data")) continue;
      const told = JSON.parse(field("data"));
      state.view = field("event") === "state" ? told : patched(state.view, told);
    }
    draw();
  }
}

async function live() {
  setInterval(() => {
    const age = state.view ? Math.max(0, Math.round((Date.now() + state.behind) / 1000 - (state.view.answered || 0))) : 0;
    const stale = Boolean(state.view) && (age > 5 || Boolean(state.view.silent));
    document.body.classList.toggle("stale", stale);
    $("age").textContent = stale ? `seen ${age} s ago` : "live";
  }, 1000);
  setInterval(() => refreshCurves().then(() => draw(), () => {}), 2000);
  for (;;) {
    try { await refreshCurves(); await listen(); } catch (error) {
      say(error.message);
      if (error.message.startsWith("JG-114")) return;
    }
    await new Promise((resolve) => { setTimeout(resolve, 1000); });
  }
}

async function replay(config) {
  keep.live = false;
  $("slider").hidden = false;
  const slider = $("at");
  Object.assign(slider, { min: config.first, max: config.last, step: "any", value: config.at });
  let wanted = 0;
  const show = async () => {
    const mine = ++wanted;
    state.at = Number(slider.value);
    $("when").textContent = new Date(1000 * state.at).toLocaleString();
    $("age").textContent = "a journal";
    try {
      const view = await json(`api/v1/state${during()}`);
      if (mine !== wanted) return;
      state.view = view;
      await refreshCurves();
      if (mine === wanted) draw();
    } catch (error) { say(error.message); }
  };
  slider.addEventListener("input", show);
  await show();
}

async function shown(config) {
  keep.live = false;
  keep.timeline.trace = report["api/v1/timeline"] || null;
  state.view = await json("api/v1/state");
  state.curves = await json("api/v1/curves");
  $("age").textContent = `as of ${new Date(1000 * config.at).toLocaleString()}`;
  draw(true);
}

NAMES.forEach((name, at) => $("tabs").append(h("li", null, h("button", {
  type: "button", "data-tab": name, "aria-keyshortcuts": at < 10 ? (at + 1) % 10 : null, onclick: () => choose(name) }, PAGES[name].title))));
addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "range";
  const name = NAMES["1234567890".indexOf(event.key)];
  if (name && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) choose(name);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
addEventListener("hashchange", () => {
  const before = state.token;
  takeToken();
  if (state.token !== before) location.reload();
  else draw(true);
});
takeToken();
json("api/v1/config").then((config) => {
  keep.config = config;
  if (config.kind === "report") return shown(config);
  return config.kind === "replay" ? replay(config) : live();
}).catch((error) => say(error.message));
