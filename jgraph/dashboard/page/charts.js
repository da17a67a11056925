// Charts: curves by uPlot, and bars, heat map and treemap as SVG of our own.
import { bytes, h, s, short } from "./dom.js";

const color = (at) => getComputedStyle(document.documentElement).getPropertyValue(`--c${at % 6}`).trim();
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// uPlot holds each chart, with its canvas, until that is destroyed: a page is drawn twice a second.
const drawn = new Set();
export function forgetCharts() {
  for (const chart of drawn) chart.destroy();
  drawn.clear();
}

// Times below a chart: with their day, in a line above, where it has more than one.
function times(chart, ticks) {
  const isLong = ticks.length > 1 && ticks[ticks.length - 1] - ticks[0] > 86400;
  return ticks.map((tick) => {
    const at = new Date(1000 * tick);
    return isLong ? `${at.toLocaleDateString()}\n${at.toLocaleTimeString()}` : at.toLocaleTimeString();
  });
}

// series: [{name, x, mean, min, max}], all of one chart on one axis of x.
export function curves(series, { time = false, log = false, label, unit }) {
  const box = h("div", { role: "img", "aria-label": label });
  const some = series.filter((one) => one.x.length);
  if (!some.length) { box.append(h("p", { class: "soft" }, "nothing to show yet")); return box; }
  const xs = [...new Set(some.flatMap((one) => one.x))].sort((a, b) => a - b);
  const data = [xs];
  const shown = [{ label: time ? "time" : "step" }];
  const bands = [];
  some.forEach((one, at) => {
    const where = new Map(one.x.map((x, i) => [x, i]));
    const column = (values) => xs.map((x) => {
      const i = where.get(x);
      return i === undefined || (log && values[i] <= 0) ? null : values[i];
    });
    const spread = one.max && one.max.some((v, i) => v !== one.min[i]);
    data.push(column(one.mean));
    shown.push({ label: one.name, stroke: color(at), width: 1.5, spanGaps: true, points: { show: one.x.length < 3 } });
    if (spread) {
      const first = data.length;
      data.push(column(one.max), column(one.min));
      for (const end of ["most", "least"]) {
        shown.push({ label: `${one.name}, ${end}`, stroke: color(at), width: 0.4, spanGaps: true, points: { show: false } });
      }
      bands.push({ series: [first, first + 1], fill: `${color(at)}22` });
    }
  });
  const axis = { stroke: ink("soft"), grid: { stroke: ink("line"), width: 1 }, ticks: { stroke: ink("line") } };
  const draw = () => {
    if (!box.isConnected) return;  // another page is shown by now
    const width = Math.max(240, box.clientWidth || 480);
    const options = {
      width, height: 220, series: shown, bands,
      // Around one point alone it would choose years.
      scales: { x: { time, ...(xs.length < 2 && { range: [xs[0] - 1, xs[0] + 1] }) }, y: log ? { distr: 3 } : {} },
      axes: [time ? { ...axis, values: times, space: 90 } : axis, { ...axis, size: 70, ...(unit && { values: (chart, ticks) => ticks.map(unit) }) }],
      cursor: { drag: { x: true, y: false } },
      legend: { live: false, show: some.length > 1 },
    };
    drawn.add(new window.uPlot(options, data, box));
  };
  requestAnimationFrame(draw);
  return box;
}

// Pixels across that a picture may have, so that its text is not made smaller than that of the page.
const across = (most) => Math.max(240, Math.min(most, document.documentElement.clientWidth - 64));

// rows: [{name, parts: {kind: share}}]: a lane for each, as wide as `most`, with its sum behind.
export function lanes(rows, kinds, label, most) {
  const width = across(720), left = width < 500 ? 72 : 130, high = 20, right = 80;
  const bars = rows.map((row, at) => {
    let from = left;
    const y = at * (high + 4);
    const pieces = kinds.map((kind, k) => {
      const wide = Math.max(0, ((row.parts[kind] || 0) / most) * (width - left - right));
      const piece = s("rect", { x: from, y, width: wide, height: high, fill: color(k) },
        s("title", null, `${row.name}: ${kind} ${row.text(row.parts[kind] || 0)}`));
      from += wide;
      return piece;
    });
    const sum = kinds.reduce((all, kind) => all + (row.parts[kind] || 0), 0);
    return [s("text", { x: 0, y: y + 14 }, short(row.name)), pieces, s("text", { x: from + 6, y: y + 14, class: "soft" }, row.text(sum))];
  });
  const legend = kinds.map((kind, k) => h("span", null,
    s("svg", { width: 10, height: 10, viewBox: "0 0 10 10" }, s("rect", { width: 10, height: 10, fill: color(k) })), kind));
  const height = Math.max(1, rows.length * (high + 4));
  return h("div", null,
    s("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height }, bars),
    h("p", { class: "legend" }, legend));
}

export function heat(names, value, label) {
  const cell = names.length > 16 ? 22 : 40, left = 100, top = 80;
  const most = Math.max(1, ...names.flatMap((a) => names.map((b) => value(a, b))));
  const cells = names.flatMap((a, row) => names.map((b, column) => {
    const v = value(a, b);
    return s("rect", { x: left + column * cell, y: top + row * cell, width: cell - 2, height: cell - 2,
      fill: v ? color(0) : ink("line"), "fill-opacity": v ? 0.15 + 0.85 * Math.sqrt(v / most) : 0.4 },
      s("title", null, `${short(a)} to ${short(b)}: ${bytes(v)}/s`));
  }));
  const rows = names.map((a, at) => s("text", { x: 0, y: top + at * cell + cell / 2 + 4 }, short(a)));
  const columns = names.map((b, at) => s("text", {
    transform: `translate(${left + at * cell + cell / 2},${top - 6}) rotate(-50)` }, short(b)));
  const size = names.length * cell;
  return s("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${left + size + 60} ${top + size}`,
    width: left + size + 60, height: top + size, class: "own" }, cells, rows, columns);
}

// counts: {age: updates}: a bar for each age, the last for all that are older.
export function ages(counts, label) {
  const bins = 16, wide = 9, high = 18;
  const sums = Array(bins).fill(0);
  for (const [age, n] of Object.entries(counts)) sums[Math.min(bins - 1, Number(age))] += n;
  const most = Math.max(1, ...sums);
  const bars = sums.map((n, at) => {
    const tall = n ? Math.max(1, (n / most) * high) : 0;
    return s("rect", { x: at * wide, y: high - tall, width: wide - 2, height: tall, fill: color(0) },
      s("title", null, `${at}${at === bins - 1 ? " and more" : ""}: ${n}`));
  });
  return s("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${bins * wide} ${high}`, width: bins * wide, height: high, class: "own" }, bars);
}

// items: [{name, nbytes, at}]: areas as large as the bytes, row by row.
export function treemap(items, label) {
  const width = across(720), height = 260;
  const all = items.reduce((sum, one) => sum + one.nbytes, 0);
  const parts = [];
  let x = 0, y = 0, wide = width, high = height, rest = all;
  for (const [at, one] of [...items].sort((a, b) => b.nbytes - a.nbytes).slice(0, 200).entries()) {
    if (!rest || wide < 1 || high < 1) break;
    const share = one.nbytes / rest;
    const [w, t] = wide > high ? [wide * share, high] : [wide, high * share];
    const fits = w > 60 && t > 16;
    parts.push(s("g", null,
      s("rect", { x, y, width: Math.max(0, w - 1), height: Math.max(0, t - 1), fill: color(one.at), "fill-opacity": 0.75 - 0.3 * (at % 2) },
        s("title", null, `${one.name}: ${bytes(one.nbytes)}`)),
      fits && s("text", { x: x + 4, y: y + 13 }, one.name.split(" ").pop().slice(0, Math.floor(w / 7)))));
    if (wide > high) { x += w; wide -= w; } else { y += t; high -= t; }
    rest -= one.nbytes;
  }
  return s("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height }, parts);
}

const TRACKS = { compute: 0, send: 1, "recv wait": 5, queueing: 3, turn: 3, register: 2, client: 2, checkpoint: 4 };

// trace: {tasks: [{task, error_us, rows: [[{track, name, at_ms, ms, sends, receives}]]}], ms}
export function timeline(trace, label) {
  const width = 980, left = 120, high = 18, gap = 10, top = 20;
  const scale = (width - left) / Math.max(1e-9, trace.ms);
  const ends = { sends: new Map(), receives: new Map() };
  const parts = [];
  let y = top;
  for (const task of trace.tasks) {
    parts.push(s("text", { x: 0, y: y + 13 }, short(task.task)));
    for (const row of task.rows) {
      for (const one of row) {
        const x = left + one.at_ms * scale;
        const wide = Math.max(0.7, one.ms * scale);
        const waits = one.track === "recv wait" || one.track === "turn";
        parts.push(s("rect", { x, y, width: wide, height: high - 3, fill: color(TRACKS[one.track] ?? 5), "fill-opacity": waits ? 0.3 : 0.9 },
          s("title", null, `${one.name}: ${one.ms.toFixed(3)} ms`)));
        if (wide > 70) parts.push(s("text", { x: x + 3, y: y + 11, class: waits ? null : "on" }, one.name.replace(/\/job:(\w+)\/task:(\d+)/g, "$1:$2").slice(0, Math.floor(wide / 6.5))));
        if (one.sends) ends.sends.set(one.sends, [x, y + high / 2]);
        if (one.receives) ends.receives.set(one.receives, [x + one.ms * scale, y + high / 2]);
      }
      y += high;
    }
    y += gap + (task.rows.length ? 0 : high);  // a name of its own line, though nothing ran there
  }
  const arrows = [...ends.sends].filter(([key]) => ends.receives.has(key)).map(([key, [x, at]]) => {
    const [x2, at2] = ends.receives.get(key);
    return s("line", { x1: x, y1: at, x2, y2: at2, stroke: ink("soft"), "stroke-width": 0.8, "marker-end": "url(#arrow)" });
  });
  const marker = s("defs", null, s("marker", { id: "arrow", viewBox: "0 0 6 6", refX: 6, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto" },
    s("path", { d: "M0 0 L6 3 L0 6 z", fill: ink("soft") })));
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => s("text", {
    x: left + share * (width - left), y: 10, "text-anchor": share === 1 ? "end" : share ? "middle" : "start" }, `${(share * trace.ms).toFixed(2)} ms`));
  return s("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${y}`, width, height: y, class: "own" }, marker, ticks, parts, arrows);
}
