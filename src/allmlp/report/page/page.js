"use strict";
// Sorting, the curves, and the choice of a run. Names of runs are only ever set as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, inside = document) => inside.querySelector(selector);
const $$ = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const table = $("#table");
const rows = $$("tbody tr", table);

/* --- the table ------------------------------------------------------------------------------------------ */

for (const button of $$("thead button", table)) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const column = [...heading.parentNode.children].indexOf(heading);
    const numbers = button.dataset.sort === "number";
    // Numbers start with the largest, words with A; missing values stay at the bottom.
    const before = heading.getAttribute("aria-sort");
    const up = before === "none" ? !numbers : before === "descending";
    for (const other of heading.parentNode.children) {
      if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    }
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.children[column].dataset.value;
    const sorted = [...rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (!x || !y) return x ? -1 : y ? 1 : 0;
      const order = numbers ? x - y : x.localeCompare(y, "en", { numeric: true });
      return up ? order : -order;
    });
    $("tbody", table).append(...sorted);
  });
}

const visible = data.runs.map(() => true);
const ticks = rows.map((row) => $("input", row));
const all = $("#all");

const legend = $$("#legend [data-run]");

function tick(row, shown) {
  visible[row.dataset.run] = shown;
  row.classList.toggle("off", !shown);
  if (legend.length) legend[row.dataset.run].hidden = !shown;
}
rows.forEach((row, number) => {
  ticks[number].addEventListener("change", () => {
    tick(row, ticks[number].checked);
    all.checked = visible.every(Boolean);
    all.indeterminate = !all.checked && visible.some(Boolean);
    drawAll();
  });
});
for (const item of [...rows, ...legend]) {
  item.addEventListener("pointerenter", () => highlight(item.dataset.run));
  item.addEventListener("pointerleave", () => highlight(null));
}
all.addEventListener("change", () => {
  rows.forEach((row, number) => {
    ticks[number].checked = all.checked;
    tick(row, all.checked);
  });
  drawAll();
});

/* --- numbers -------------------------------------------------------------------------------------------- */

const color = (run) => `var(--run-${run % data.colors})`;
const dash = (run) => `dash-${Math.floor(run / data.colors) % 4}`;
const plain = (value) => {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
};
const formatted = (value, chart) => (chart.percent ? `${(100 * value).toFixed(2)}%` : plain(value));
const clock = (seconds) => {
  const whole = Math.max(Math.round(seconds), 0);
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
};

function niceTicks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let number = Math.ceil(low / step); number * step <= high * (1 + 1e-12); number++) found.push(number * step);
  return found;
}

function timeTicks(low, high, count) {
  const raw = (high - low) / count;
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const step = steps.find((one) => one >= raw);
  if (!step || raw < 1) return niceTicks(low, high, count);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of high / low > 1000 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
  }
  const inside = found.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside : niceTicks(low, high, 4);
}

/* --- the curves ----------------------------------------------------------------------------------------- */

const view = { axis: "steps", range: null, train: true, eval: true, log: false };
const MARGIN = { left: 54, right: 14, top: 10, bottom: 40 };
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, parent = null, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

/** The x values of a curve; null where they are not known. */
function xs(curve) {
  if (view.axis === "epochs" && curve.epochs === undefined) {
    const rate = data.runs[curve.run].epochs;
    curve.epochs = rate === null ? null : curve.steps.map((step) => step * rate);
  }
  return curve[view.axis];
}

const shownCurves = (chart) => chart.curves.filter((curve) => visible[curve.run] && view[curve.kind] && xs(curve));

function fullRange(charts = data.charts) {
  let [low, high] = [Infinity, -Infinity];
  for (const chart of charts) {
    for (const curve of shownCurves(chart)) {
      const found = xs(curve);
      low = Math.min(low, found[0]);
      high = Math.max(high, found[found.length - 1]);
    }
  }
  if (!(low < Infinity)) return [0, 1];
  low = Math.min(low, low > 0.2 * high ? low : 0);
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

/** The first index whose x is not below `at`. */
function seek(found, at) {
  let [low, high] = [0, found.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (found[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(found, at) {
  const after = Math.min(seek(found, at), found.length - 1);
  return after > 0 && at - found[after - 1] < found[after] - at ? after - 1 : after;
}

class Chart {
  constructor(figure) {
    this.chart = data.charts[figure.dataset.chart];
    this.figure = figure;
    this.place = $(".plot", figure);
    this.svg = make("svg", { tabindex: 0, role: "img" }, this.place);
    this.svg.setAttribute("aria-label", `${this.chart.title} of ${data.runs.length} runs; arrow keys read values`);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    figure.append(this.tip);
    this.cursor = null;
    this.seen = false;
    this.stale = true;
    this.listen();
  }

  /** Draw now if visible, else when scrolled into view. */
  refresh() {
    this.stale = true;
    if (this.seen) this.draw();
  }

  draw() {
    const { chart, svg } = this;
    this.width = this.place.clientWidth;
    this.height = this.place.clientHeight;
    if (this.width < 2 * MARGIN.left) return;
    this.stale = false;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.curves = shownCurves(chart).map((curve) => ({ curve, x: xs(curve), y: curve.values }));
    const [x0, x1] = (this.range = view.range ?? fullRange([chart]));
    let [y0, y1] = [Infinity, -Infinity];
    for (const one of this.curves) {
      // One point beyond either edge, so that lines leave the plot area.
      one.from = Math.max(seek(one.x, x0) - 1, 0);
      one.to = Math.min(seek(one.x, x1) + 1, one.x.length);
      for (let i = one.from; i < one.to; i++) {
        if (one.x[i] >= x0 && one.x[i] <= x1) [y0, y1] = [Math.min(y0, one.y[i]), Math.max(y1, one.y[i])];
      }
    }
    if (!(y0 <= y1)) {
      make("text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }, svg, "no curves selected");
      return;
    }
    const log = view.log && !chart.percent && y0 > 0;
    if (log) {
      const pad = (y1 / y0) ** 0.05 || 1;
      [y0, y1] = [y0 / pad, y1 * pad];
      if (y0 === y1) [y0, y1] = [y0 / 2, y1 * 2];
    } else {
      const pad = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 1;
      [y0, y1] = [y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad, y1 + pad];
      if (chart.percent && y1 > 1 && y1 - pad <= 1) y1 = 1 + pad / 3;
    }
    const scale = (from, to, low, high) => (value) => low + ((value - from) / (to - from)) * (high - low);
    this.x = scale(x0, x1, MARGIN.left, this.width - MARGIN.right);
    this.unx = scale(MARGIN.left, this.width - MARGIN.right, x0, x1);
    const [bottom, top] = [this.height - MARGIN.bottom, MARGIN.top];
    const straight = log ? scale(Math.log(y0), Math.log(y1), bottom, top) : scale(y0, y1, bottom, top);
    this.y = log ? (value) => straight(Math.log(value)) : straight;
    this.axes(log ? logTicks(y0, y1) : niceTicks(y0, y1, 5), x0, x1);
    const clip = `clip-${this.figure.dataset.chart}`;
    const box = { x: MARGIN.left - 4, y: top - 4, width: this.width - MARGIN.left - MARGIN.right + 8, height: bottom - top + 8 };
    make("rect", box, make("clipPath", { id: clip }, make("defs", {}, svg)));
    const alone = !this.curves.some((one) => one.curve.kind === "eval");
    const group = make("g", { "clip-path": `url(#${clip})`, class: alone ? "alone" : "" }, svg);
    for (const kind of ["train", "eval"]) {
      for (const one of this.curves) if (one.curve.kind === kind) this.line(one, group);
    }
    this.over = make("g", {}, svg);
    if (this.cursor !== null) this.point(this.cursor);
  }

  axes(heights, x0, x1) {
    const bottom = this.height - MARGIN.bottom;
    for (const value of heights) {
      const y = this.y(value);
      make("path", { class: "grid", d: `M${MARGIN.left} ${y}H${this.width - MARGIN.right}` }, this.svg);
      const text = this.chart.percent ? `${plain(Number((100 * value).toPrecision(6)))}%` : plain(value);
      make("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, this.svg, text);
    }
    const count = Math.max(Math.floor(this.width / 90), 2);
    const time = view.axis === "seconds";
    for (const value of time ? timeTicks(x0, x1, count) : niceTicks(x0, x1, count)) {
      const at = { x: this.x(value), y: bottom + 16, "text-anchor": "middle" };
      make("text", at, this.svg, time && x1 - x0 >= 5 ? clock(value) : plain(value));
    }
    const name = time ? (x1 - x0 < 5 ? "time (s)" : x1 >= 3600 ? "time (h:min:s)" : "time (min:s)") : view.axis;
    const middle = (MARGIN.left + this.width - MARGIN.right) / 2;
    make("text", { x: middle, y: this.height - 6, "text-anchor": "middle" }, this.svg, name);
  }

  line(one, group) {
    let path = "";
    for (let i = one.from; i < one.to; i++) {
      path += `${path ? "L" : "M"}${this.x(one.x[i]).toFixed(1)} ${this.y(one.y[i]).toFixed(1)}`;
    }
    const { run, kind } = one.curve;
    const look = { "data-run": run, style: `--color: ${color(run)}` };
    make("path", { ...look, class: `curve ${kind} ${dash(run)}`, d: path }, group);
    if (one.to - one.from > (kind === "eval" ? 40 : 1)) return;
    let dots = "";
    for (let i = one.from; i < one.to; i++) {
      const [x, y] = [this.x(one.x[i]).toFixed(1), this.y(one.y[i]).toFixed(1)];
      dots += `M${x} ${y}m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0`;
    }
    make("path", { ...look, class: "marks", d: dots }, group);
  }

  listen() {
    const { svg } = this;
    const at = (event) => Math.min(
      Math.max(event.clientX - svg.getBoundingClientRect().left, MARGIN.left), this.width - MARGIN.right);
    let start = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || !this.over) return;
      start = at(event);
      svg.setPointerCapture(event.pointerId);
      this.point(this.unx(start), event.clientY - svg.getBoundingClientRect().top);
    });
    svg.addEventListener("pointermove", (event) => {
      if (!this.over) return;
      const x = at(event);
      this.point(this.unx(x), event.clientY - svg.getBoundingClientRect().top);
      if (start !== null && Math.abs(x - start) > 5) {
        const height = this.height - MARGIN.top - MARGIN.bottom;
        const box = { class: "brush", x: Math.min(start, x), y: MARGIN.top, width: Math.abs(x - start), height };
        make("rect", box, this.over);
      }
    });
    svg.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [from, to] = [start, at(event)].sort((a, b) => a - b);
      start = null;
      if (to - from > 5) zoom([this.unx(from), this.unx(to)]);
    });
    svg.addEventListener("pointercancel", () => { start = null; this.leave(); });
    // After a touch the values stay visible.
    svg.addEventListener("pointerleave", (event) => {
      if (start === null && event.pointerType !== "touch") this.leave();
    });
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("blur", () => this.leave());
    svg.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const [low, high] = this.range;
    const now = this.cursor ?? (low + high) / 2;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move && this.curves.length) {
      const points = [...new Set(this.curves.flatMap((one) => one.x.slice(one.from, one.to)))]
        .filter((x) => x >= low && x <= high).sort((a, b) => a - b);
      const place = Math.min(Math.max(nearest(points, now) + (this.cursor === null ? 0 : move), 0), points.length - 1);
      this.point(points[place]);
      $("#reading").textContent = this.tip.innerText;
    } else if (event.key === "+" || event.key === "=") zoomBy(0.5, now);
    else if (event.key === "-") zoomBy(2, now);
    else if (event.key === "0" || event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
  }

  /** Show the cursor at `x` and the values of the runs there; of many runs those nearest to the height `y`. */
  point(x, y = null) {
    this.cursor = x;
    this.over.replaceChildren();
    const found = new Map();
    for (const one of this.curves) {
      const index = nearest(one.x, x);
      if (x > one.x[one.x.length - 1] * 1.02 + 1e-9) continue;
      const place = found.get(one.curve.run) ?? found.set(one.curve.run, { run: one.curve.run }).get(one.curve.run);
      place[one.curve.kind] = one.y[index];
      const [px, py] = [this.x(one.x[index]), this.y(one.y[index])];
      place.distance = Math.min(place.distance ?? Infinity, y === null ? 0 : Math.abs(py - y));
      if (px >= MARGIN.left - 1 && px <= this.width - MARGIN.right + 1) {
        make("circle", { class: "marks", cx: px, cy: py, r: 3.5, style: `--color: ${color(one.curve.run)}` }, this.over);
      }
    }
    const at = this.x(x);
    make("path", { class: "cursor", d: `M${at} ${MARGIN.top}V${this.height - MARGIN.bottom}` }, this.over);
    this.tooltip(x, at, [...found.values()]);
  }

  tooltip(x, at, places) {
    const MOST = 10;
    const near = places.sort((a, b) => a.distance - b.distance).slice(0, MOST);
    const value = (place) => place.eval ?? place.train;
    near.sort((a, b) => value(b) - value(a));
    const kinds = ["train", "eval"].filter((kind) => near.some((place) => place[kind] !== undefined));
    const cells = (tag, texts, row) => texts.forEach((text) => {
      const cell = row.appendChild(document.createElement(tag));
      cell.textContent = text;
    });
    const body = document.createElement("table");
    const where = view.axis === "seconds" ? clock(x) : `${view.axis.slice(0, -1)} ${plain(x)}`;
    cells("th", [where, ...kinds.map((kind) => (kind === "train" ? "training" : "evaluation"))], body.insertRow());
    for (const place of near) {
      const row = body.insertRow();
      const texts = kinds.map((kind) => (place[kind] === undefined ? "" : formatted(place[kind], this.chart)));
      cells("td", [data.runs[place.run].name, ...texts], row);
      const dot = document.createElement("span");
      dot.className = place.run < data.colors ? "dot" : "dot ring";
      dot.style.setProperty("--color", color(place.run));
      row.cells[0].prepend(dot);
    }
    if (places.length > near.length) cells("td", [`and ${places.length - near.length} more`], body.insertRow());
    this.tip.replaceChildren(body);
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth;
    const left = at + wide + 24 > this.width ? Math.max(at - wide - 14, 0) : at + 14;
    this.tip.style.left = `${Math.min(left, Math.max(this.figure.clientWidth - wide, 0))}px`;
    this.tip.style.top = "30px";
  }

  leave() {
    this.cursor = null;
    this.tip.hidden = true;
    this.over?.replaceChildren();
  }
}

const drawn = $$(".chart").map((figure) => new Chart(figure));
const drawAll = () => drawn.forEach((one) => one.refresh());

function zoom(range) {
  const [low, high] = fullRange();
  if (range) {
    range = [Math.max(range[0], low), Math.min(range[1], high)];
    if (range[0] <= low && range[1] >= high) range = null;
    else if (!(range[1] - range[0] > (high - low) * 1e-5)) return;
  }
  view.range = range;
  $("#zoom-all").disabled = range === null;
  drawn.forEach((one) => one.leave());
  drawAll();
}

function zoomBy(factor, around = null) {
  const [low, high] = view.range ?? fullRange();
  const center = around ?? (low + high) / 2;
  zoom([center - (center - low) * factor, center + (high - center) * factor]);
}

function highlight(run) {
  const charts = $("#charts");
  if (!charts) return;
  charts.classList.toggle("highlighted", run !== null && visible[run]);
  for (const one of $$("[data-run]", charts)) one.classList.toggle("on", one.dataset.run === run);
}

if (drawn.length) {
  for (const radio of $$("[name=axis]")) {
    radio.addEventListener("change", () => {
      view.axis = radio.value;
      zoom(null);
    });
  }
  for (const name of ["train", "eval", "log"]) {
    const box = $(`#${name}`);
    view[name] = box.checked;
    box.addEventListener("change", () => {
      view[name] = box.checked;
      drawAll();
    });
  }
  $("#zoom-in").addEventListener("click", () => zoomBy(0.5));
  $("#zoom-out").addEventListener("click", () => zoomBy(2));
  $("#zoom-all").addEventListener("click", () => zoom(null));
  const of = (entry) => drawn.find((one) => one.place === entry.target);
  const sized = new ResizeObserver((entries) => entries.forEach((entry) => of(entry).refresh()));
  const met = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const one = of(entry);
      one.seen = entry.isIntersecting;
      if (one.seen && one.stale) one.draw();
    }
  }, { rootMargin: "200px" });
  drawn.forEach((one) => [sized, met].forEach((observer) => observer.observe(one.place)));
}

/* --- run details -------------------------------------------------------------------------------------------- */

const articles = $$("#one article");
const which = $("#which");

function select(number) {
  articles.forEach((article, place) => { article.hidden = place !== number; });
  which.value = String(number);
  $("#before").disabled = number === 0;
  $("#next").disabled = number === articles.length - 1;
}
function followHash() {
  const wanted = articles.findIndex((article) => `#${article.id}` === location.hash);
  if (wanted < 0) return false;
  select(wanted);
  $("#one").scrollIntoView();
  return true;
}
which.addEventListener("change", () => select(Number(which.value)));
$("#before").addEventListener("click", () => select(Number(which.value) - 1));
$("#next").addEventListener("click", () => select(Number(which.value) + 1));
addEventListener("hashchange", followHash);
for (const link of $$("tbody th a", table)) {
  link.addEventListener("click", () => { if (link.hash === location.hash) followHash(); });
}
select(0);
followHash();
