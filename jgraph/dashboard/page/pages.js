// Pages: each makes elements of the view, and of the curves where it draws some.
import { bytes, card, clock, h, inOrder, number, percent, short, table } from "./dom.js";
import { ages, curves, heat, lanes, timeline, treemap } from "./charts.js";

const KINDS = ["compute", "update", "lookup", "rows", "copy", "read"];
const PARTS = ["compute", "pull", "push", "wait", "input", "other"];
const rows = (of) => inOrder(Object.keys(of || {})).map((name) => ({ name, ...of[name] }));
const begun = (view) => Object.entries(view.runs || {}).map(([name, row]) => ({ name, ...row }));  // the newest last
const newest = (view) => begun(view).sort((a, b) => (a.state === "running") - (b.state === "running")).pop();
const series = (name, of, only) => ({ name, x: of.x, mean: of.mean, ...(only ? {} : { min: of.min, max: of.max }) });

function alarms(view) {
  const found = view.alarms.map((one) => h("div", { class: `alarm ${one.level}` },
    h("strong", null, one.level), " ", one.text, h("span", { class: "soft" }, ` since ${clock(one.since)}; type `), h("code", null, one.type)));
  return card("Alarms", found.length ? found : h("p", { class: "soft" }, "nothing is wrong"));
}

function timeLanes(view) {
  const busy = rows(view.tasks).map((task) => ({ name: task.name, parts: task.cores, text: (v) => `${number(v)} cores` }));
  const most = Math.max(1, ...busy.map((one) => KINDS.reduce((sum, kind) => sum + (one.parts[kind] || 0), 0)));
  return card("What each task computes, in cores", lanes(busy, KINDS, "CPU of each task by kind of work", most));
}

function workersOf(run) {
  const each = rows(run.workers).map((w) => ({ name: w.name, parts: w.parts, text: (v) => `${number(1000 * v)} ms` }));
  const most = Math.max(1e-9, ...each.map((one) => PARTS.reduce((sum, part) => sum + (one.parts[part] || 0), 0)));
  return lanes(each, PARTS, "Time of a step by part, of each worker", most);
}

const overview = {
  title: "Overview",
  curves: true,
  show(view, all) {
    const run = newest(view);
    const of = run && all.runs[run.name];
    return [
      alarms(view),
      h("div", { class: "wide" },
        run && card(`Loss of ${run.name}`, curves(of && of.metrics.loss ? [series("loss", of.metrics.loss)] : [], { label: "Loss over steps" })),
        run && card("Steps per second", curves(of ? [series("steps/s", of.rate)] : [], { time: true, label: "Steps per second over time" }))),
      timeLanes(view),
      card("Runs", table("Runs", [
        ["run", (r) => r.name], ["state", (r) => r.state], ["step", (r) => `${number(r.step)} of ${number(r.steps)}`, "n"],
        ["steps/s", (r) => number(r.steps_per_s), "n"], ["examples/s", (r) => number(r.examples_per_s), "n"],
        ["loss", (r) => number((r.metrics || {}).loss, 4), "n"], ["went back", (r) => r.recoveries, "n"], ["master", (r) => short(r.master)],
      ], begun(view), (r) => r.state === "failed")),
    ];
  },
};

const training = {
  title: "Training",
  curves: true,
  show(view, all, keep) {
    const runs = begun(view);
    if (!runs.length) return [card("Training", h("p", { class: "soft" }, "no run yet"))];
    const name = runs.some((r) => r.name === keep.run) ? keep.run : newest(view).name;
    const of = all.runs[name] || { metrics: {}, rate: { x: [], mean: [] } };
    const choose = h("select", { id: "run", onchange: (e) => keep.set("run", e.target.value) },
      runs.map((r) => h("option", { value: r.name, selected: r.name === name }, r.name)));
    const log = h("input", { type: "checkbox", id: "log", checked: keep.log, onchange: (e) => keep.set("log", e.target.checked) });
    const metrics = Object.entries(of.metrics).map(([metric, points]) =>
      card(metric, curves([series(metric, points)], { log: keep.log, label: `${metric} over steps` })));
    return [
      h("div", { class: "row" }, h("label", { for: "run" }, "Run"), choose, h("label", null, log, " logarithmic")),
      h("div", { class: "wide" }, metrics),
      card("Where the time of a step goes", workersOf(view.runs[name])),
    ];
  },
};

// counts: {age: updates}. The ages that half of them, 95 of 100, and all are at most.
function spread(counts) {
  const found = Object.entries(counts).map(([age, n]) => [Number(age), n]).sort((a, b) => a[0] - b[0]);
  const all = found.reduce((sum, [, n]) => sum + n, 0);
  const within = (share) => {
    let left = share * all;
    for (const [age, n] of found) { left -= n; if (left <= 0) return age; }
    return null;
  };
  return { all, half: within(0.5), high: within(0.95), most: within(1) };
}

const workers = {
  title: "Workers",
  show(view) {
    const all = begun(view).flatMap((run) => rows(run.workers).map((w) => ({ ...w, run: run.name, running: run.state === "running" })));
    const gates = rows(view.gates);
    const stale = gates.flatMap((gate) => Object.entries(gate.staleness || {}).map(([worker, counts]) => ({ gate, worker, counts, ...spread(counts) })));
    return [
      card("Steps of each worker", table("Workers", [
        ["worker", (w) => short(w.name)], ["run", (w) => w.run], ["steps", (w) => number(w.steps), "n"],
        ["p50 ms", (w) => number(w.step_ms.p50), "n"], ["p95 ms", (w) => number(w.step_ms.p95), "n"], ["p99 ms", (w) => number(w.step_ms.p99), "n"],
        ["too late", (w) => number(w.dropped), "n"],
      ], all.filter((w) => w.running || all.every((one) => !one.running)))),
      begun(view).filter((run) => run.state === "running").map((run) => card(`Time of a step of ${run.name}`, workersOf(run))),
      card("Staleness: updates by how many others came between read and update", table("Staleness", [
        ["worker", (a) => short(a.worker)], ["at", (a) => short(a.gate.task)], ["bound", (a) => a.gate.max_staleness ?? "none", "n"],
        ["updates", (a) => number(a.all), "n"], ["half at most", (a) => number(a.half), "n"], ["95 % at most", (a) => number(a.high), "n"], ["most", (a) => number(a.most), "n"],
        ["0 to 15 and more", (a) => ages(a.counts, `Updates of ${short(a.worker)} by age`)],
      ], stale)),
      card("Gates: steps that wait until they may read", table("Gates", [
        ["task", (g) => short(g.task)], ["waiting now", (g) => number(g.waiting), "n"], ["oldest s", (g) => number(g.oldest_s), "n"],
        ["waited in a minute", (g) => number(g.waits), "n"], ["seconds of that", (g) => number(g.wait_s), "n"],
      ], gates)),
    ];
  },
};

const tasks = {
  title: "Tasks",
  curves: true,
  show(view, all, keep) {
    const versions = new Set(rows(view.tasks).map((t) => `${t.jgraph} ${t.jax}`));
    const names = inOrder(Object.keys(view.tasks));
    const name = names.includes(keep.task) ? keep.task : names[0];
    const choose = h("select", { id: "task", onchange: (e) => keep.set("task", e.target.value) },
      names.map((n) => h("option", { value: n, selected: n === name }, short(n))));
    const filter = h("input", { type: "search", id: "filter", value: keep.filter || "", oninput: (e) => keep.filtered(e.target.value) });
    const pick = (what) => names.map((n) => series(short(n), (all.tasks[n] || {})[what] || { x: [], mean: [] }, true));
    return [
      card("Tasks", table("Tasks", [
        ["task", (t) => short(t.name)], ["state", (t) => (t.missed ? `no answer since ${clock(t.seen)}` : t.state)],
        ["cores", (t) => number((t.cores || {}).process), "n"], ["memory", (t) => bytes(t.rss_bytes), "n"],
        ["variables", (t) => bytes(t.variable_bytes), "n"], ["restarts", (t) => t.restarts, "n"],
        ["compiled", (t) => number(t.compilations), "n"], ["platform", (t) => `${t.platform ?? "–"} x${t.device_count ?? "–"}`],
        ["jgraph", (t) => t.jgraph ?? "not told"], ["jax", (t) => t.jax ?? "not told"], ["process", (t) => t.pid ?? "–", "n"], ["address", (t) => t.address],
      ], rows(view.tasks), (t) => t.missed || versions.size > 1)),
      h("div", { class: "wide" },
        card("Cores", curves(pick("busy"), { time: true, label: "Cores of each task over time" })),
        card("Memory", curves(pick("memory"), { time: true, unit: bytes, label: "Memory of each task over time" }))),
      keep.live && card("Log", h("div", { class: "row" }, h("label", { for: "task" }, "Task"), choose,
        h("label", { for: "filter" }, "Lines with"), filter), h("pre", { id: "log-lines", tabindex: "0", "aria-label": "Lines of the log" })),
    ];
  },
  after(view, keep) { keep.showLog(); },
};

const traffic = {
  title: "Traffic",
  show(view) {
    const pairs = rows(view.traffic);
    const names = inOrder(Object.keys(view.tasks));
    const value = (a, b) => {
      const row = view.traffic[`${a} ${b}`];
      return row ? (row.bytes_per_s || 0) + (row.shared_bytes_per_s || 0) : 0;
    };
    return [
      card("Bytes per second, from row to column", names.length <= 64 ? heat(names, value, "Bytes per second between tasks") : h("p", null, "too many tasks for a picture")),
      card("Links", table("Links", [
        ["from", (p) => short(p.from)], ["to", (p) => short(p.to)], ["frames/s", (p) => number(p.frames_per_s), "n"],
        ["by socket", (p) => `${bytes(p.bytes_per_s)}/s`, "n"], ["in shared memory", (p) => `${bytes(p.shared_bytes_per_s)}/s`, "n"],
        ["sent so far", (p) => bytes(p.bytes_sent + p.shared_bytes_sent), "n"],
      ], pairs)),
      card("Calls in the last minute", table("Calls", [
        ["task", (c) => short(c.task)], ["method", (c) => c.method], ["per second", (c) => number(c.per_s), "n"],
        ["p50 ms", (c) => number(c.p50_ms), "n"], ["p99 ms", (c) => number(c.p99_ms), "n"], ["errors so far", (c) => number(c.errors), "n"],
      ], rows(view.calls).sort((a, b) => (b.per_s || 0) - (a.per_s || 0)), (c) => c.new_errors > 0)),
    ];
  },
};

const parameters = {
  title: "Parameters",
  show(view) {
    const shards = Object.entries(view.shards).flatMap(([task, of], at) =>
      Object.entries(of).map(([name, row]) => ({ task, name, nbytes: row.nbytes || 0, version: row.version, at })));
    const sums = Object.entries(view.shards).map(([task, of]) => ({ task, nbytes: Object.values(of).reduce((sum, row) => sum + (row.nbytes || 0), 0), count: Object.keys(of).length }));
    const tables = Object.entries(view.tables).flatMap(([task, of]) => rows(of).map((row) => ({ task, ...row })));
    return [
      card("Bytes of variables; a colour for each task", shards.length ? treemap(shards, "Variables by their bytes") : h("p", { class: "soft" }, "nothing to show yet")),
      h("div", { class: "wide" },
        card("Per task", table("Bytes per task", [["task", (t) => short(t.task)], ["variables", (t) => t.count, "n"], ["bytes", (t) => bytes(t.nbytes), "n"]], sums)),
        tables.length > 0 && card("Hash tables", table("Hash tables", [
          ["task", (t) => short(t.task)], ["table", (t) => t.name], ["rows", (t) => number(t.rows), "n"], ["in use", (t) => bytes(t.nbytes), "n"],
          ["of", (t) => bytes(t.capacity_bytes), "n"], ["full", (t) => percent(t.nbytes / t.capacity_bytes), "n"], ["given up", (t) => number(t.evicted), "n"],
        ], tables))),
      card("Shards", table("Shards", [
        ["task", (x) => short(x.task)], ["variable", (x) => x.name], ["bytes", (x) => bytes(x.nbytes), "n"], ["version", (x) => number(x.version), "n"],
      ], shards.sort((a, b) => b.nbytes - a.nbytes).slice(0, 200))),
    ];
  },
};

const steps = {
  title: "Timeline",
  show(view, all, keep) {
    const { trace, error } = keep.timeline;
    const again = h("button", { type: "button", id: "again", onclick: () => keep.showTimeline(true) }, "Look again");
    const save = h("button", { type: "button", id: "save", onclick: () => keep.saveTrace() }, "Save the last 30 s for Perfetto");
    const path = trace && trace.path.shares.map(([what, share]) => ({ what, share }));
    return [
      keep.live && h("div", { class: "row" }, again, save, h("span", { class: "soft", role: "status" }, keep.timeline.saved || "")),
      card("What the steps of the last seconds waited for, from their end back", error ? h("p", { class: "soft" }, error) : !trace ? h("p", { class: "soft" }, keep.live ? "looking" : "a journal has the facts of tasks and no timeline; while a cluster lives, this page and jgraph trace save one")
        : [h("p", null, path.length ? `a step takes ${number(trace.path.ms)} ms (mean of ${number(trace.path.steps)})` : "no step ran in that time"),
          table("Critical path", [["of a step", (p) => percent(p.share), "n"], ["", (p) => p.what, "text"]], path)]),
      trace && trace.tasks.length > 0 && card("The last steps, by one clock; arrows go with messages", timeline(trace, "What each task did in the last steps"),
        h("p", { class: "soft" }, trace.tasks.map((t) => `${short(t.task)} ± ${Math.round(t.error_us)} us`).join("   "))),
    ];
  },
  after(view, keep) { if (!keep.timeline.trace && !keep.timeline.error) keep.showTimeline(false); },
};

const CHANGES = ["joined", "left", "leaves", "lost", "replaced", "frozen", "died", "restarted", "abandoned"];

const members = {
  title: "Members",
  show(view) {
    const running = begun(view).filter((run) => run.state === "running");
    const runsOf = (task) => running.filter((run) => (run.members || []).includes(task)).map((run) => run.name).join(", ");
    return [
      card("Tasks of the cluster", table("Members", [
        ["task", (t) => short(t.name)], ["state", (t) => (t.missed ? `no answer since ${clock(t.seen)}` : t.state)],
        ["serves since", (t) => clock(t.up_s === undefined || t.up_s === null ? null : view.time - t.up_s)], ["restarts", (t) => t.restarts, "n"],
        ["takes part in", (t) => runsOf(t.name) || "–"], ["process", (t) => t.pid ?? "–", "n"], ["address", (t) => t.address],
      ], rows(view.tasks), (t) => t.missed)),
      card("Workers of each run", table("Workers of runs", [
        ["run", (r) => r.name], ["now", (r) => (r.members || []).length, "n"],
        ["at least", (r) => (r.bounds ? r.bounds[0] : "as begun"), "n"], ["at most", (r) => (r.bounds ? r.bounds[1] ?? "any" : "as begun"), "n"],
        ["who", (r) => (r.members || []).map(short).join(", "), "text"],
      ], running)),
      card("Who came and went, the newest first", table("Changes", [
        ["time", (e) => clock(e.time_s)], ["what", (e) => e.kind], ["", (e) => e.text, "text"],
      ], view.events.filter((e) => CHANGES.includes(e.kind)).reverse())),
    ];
  },
};

const rounds = {
  title: "Rounds",
  show(view) {
    const all = begun(view).filter((run) => Object.keys(run.rounds || {}).length);
    if (!all.length) return [card("Rounds of federated runs", h("p", { class: "soft" }, "no run trains in rounds of clients: jg.Federated"))];
    return all.flatMap((run) => [
      card(`Rounds of ${run.name}, the newest first`, table("Rounds", [
        ["round", (r) => number(r.round), "n"], ["clients", (r) => number(r.clients), "n"], ["dropped", (r) => number(r.dropped), "n"],
        ["waited s", (r) => number(r.wait_s), "n"], ["who took part", (r) => r.who.map(short).join(", ") + (r.clients > r.who.length ? " …" : ""), "text"],
        ["who was dropped", (r) => Object.entries(r.why).map(([task, why]) => `${short(task)} ${why}`).join(", "), "text"],
        ...(Object.values(run.rounds).some((r) => r.void?.length) ? [["given up before", (r) => (r.void || []).join("; "), "text"]] : []),
      ], Object.entries(run.rounds).map(([round, row]) => ({ round: Number(round), ...row })).reverse(), (r) => r.dropped > 0 || r.void?.length)),
      card(`Clients of ${run.name}`, table("Clients", [
        ["client", (c) => short(c.name)], ["rounds with it", (c) => number(c.members || 0), "n"], ["too late", (c) => number(c.late || 0), "n"], ["lost", (c) => number(c.lost || 0), "n"],
        ["not finite", (c) => number(c["not finite"] || 0), "n"],
      ], rows(run.clients), (c) => c["not finite"] || (c.late || 0) + (c.lost || 0) > (c.members || 0))),
    ]);
  },
};

const events = {
  title: "Checkpoints and events",
  show(view) {
    return [
      card("Checkpoints: what each task wrote of them", table("Checkpoints", [
        ["task", (c) => short(c.name)], ["last", (c) => clock(c.last)], ["bytes", (c) => bytes(c.nbytes), "n"], ["seconds", (c) => number(c.seconds), "n"],
        ["so far", (c) => number(c.saves), "n"], ["failed", (c) => number(c.failures), "n"],
      ], rows(view.saves), (c) => c.failures > 0)),
      card("Events, the newest first", table("Events", [
        ["time", (e) => clock(e.time_s)], ["what", (e) => e.kind], ["", (e) => e.text, "text"], ["seen by", (e) => short(e.by)],
      ], [...view.events].reverse())),
    ];
  },
};

const serving = {
  title: "Serving",
  show(view) {
    const servers = rows(view.models);
    const versions = servers.flatMap((server) => rows(server.versions).map((v) => ({ ...v, server: server.name })));
    return [
      card("Model servers", servers.length ? table("Model servers", [
        ["server", (m) => m.name], ["", (m) => (m.silent ? `no answer: ${m.silent}` : "answers"), "text"],
      ], servers, (m) => m.silent) : h("p", { class: "soft" }, "none is watched; name them: jgraph dashboard --models ADDRESS")),
      card("Versions, in the last minute", table("Versions", [
        ["server", (v) => v.server], ["model", (v) => v.model], ["version", (v) => v.version, "n"], ["requests/s", (v) => number(v.per_s), "n"],
        ["mean ms", (v) => number(v.mean_ms), "n"], ["in the queue ms", (v) => number(v.queue_ms), "n"], ["in the model ms", (v) => number(v.compute_ms), "n"],
        ["rows at once", (v) => number(v.batch_rows), "n"], ["rows that wait", (v) => number(v.queued_rows), "n"], ["refused", (v) => percent(v.refused_share), "n"],
        ["refused so far, by code", (v) => Object.entries(v.refused || {}).map(([code, n]) => `${code}: ${number(n)}`).join("   "), "text"],
      ], versions, (v) => v.refused_share > 0.01)),
    ];
  },
};

const about = {
  title: "About",
  show(view, all, keep) {
    const facts = Object.entries(keep.config).map(([name, value]) => ({ name, value }));
    return [
      card("This dashboard", table("Facts", [["", (f) => f.name], ["", (f) => String(f.value ?? "none"), "text"]], facts)),
      card("How it works", h("p", null, "It asks the master of the cluster once a second, as ", h("code", null, "jgraph status"), " does, and changes nothing. Keys 1 to 9 and 0 choose a page. Charts are drawn by uPlot (MIT licence; ",
        h("a", { href: "page/vendor/LICENSE" }, "its text"), ").")),
    ];
  },
};

export const PAGES = { overview, training, workers, tasks, traffic, parameters, timeline: steps, events, members, serving, rounds, about };
