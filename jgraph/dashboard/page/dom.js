// Elements from data: every text is set as text, and nothing else is.
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export const h = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export function bytes(n) {
  if (typeof n !== "number") return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (n >= 1000 && at < units.length - 1) { n /= 1000; at += 1; }
  return `${at ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}
export const number = (n, digits = 3) =>
  typeof n !== "number" ? "–" : Math.abs(n) >= 1000 ? Math.round(n).toLocaleString("en") : String(Number(n.toPrecision(digits)));
export const percent = (n) => (typeof n === "number" ? `${Math.round(100 * n)} %` : "–");
// With its day, if that is not today.
export function clock(t) {
  if (typeof t !== "number") return "–";
  const at = new Date(1000 * t);
  return at.toDateString() === new Date().toDateString() ? at.toLocaleTimeString() : at.toLocaleString();
}
export const short = (task) => String(task).replace("/job:", "").replace("/task:", ":");

// Names in the order of their numbers: worker:2 before worker:10.
const order = new Intl.Collator("en", { numeric: true });
export const inOrder = (names) => [...names].sort(order.compare);

// columns: [title, row => cell, "n" for numbers]; rows that are bad are marked.
export function table(label, columns, rows, bad = () => false) {
  if (!rows.length) return h("p", { class: "soft" }, "nothing to show yet");
  const head = columns.map(([title, , kind]) => h("th", { scope: "col", class: kind }, title));
  const body = rows.map((row) => h("tr", { class: bad(row) ? "bad" : null },
    columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row)))));
  return h("table", { "aria-label": label }, h("thead", null, h("tr", null, head)), h("tbody", null, body));
}
export const card = (title, ...children) => h("section", null, h("h2", null, title), children);
