// The page: it keeps a state, draws it, and changes it by pointer, keyboard, sliders and the address. The maths is in sweeps.js.
import { collect, counts, frontier, likeliest, problemOf, sample, solve, tables } from "./sweeps.js";

const LOWEST = -4, HIGHEST = 8, HEAVIEST = 12, MOST_ITEMS = 14, GROUPS = "ABCDEF";
const $ = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const rounded = (x, digits) => Number(x.toFixed(digits));
const item = (score, weight, group) => ({ score, weight, group });

const START = {
  constraint: "knapsack",
  regularizer: "gini",
  gamma: 2,
  capacity: 12,
  atLeast: 0,
  optional: false,
  items: [item(5, 6, 0), item(3.4, 3, 0), item(2.6, 2, 0), item(4.2, 5, 1), item(1.2, 1, 1), item(2.9, 4, 2), item(-0.8, 2, 2)],
};
let state = structuredClone(START);
let current = 0; // the item that is edited
let drawn = null; // the drawn subset, as the set of its items
let shown = {}; // what was computed for the state

// The state in the address ------------------------------------------------------------------------------------------

function toHash() {
  const items = state.items.map(({ score, weight, group }) => `${score}_${weight}_${group}`).join("~");
  const { constraint, regularizer, gamma, capacity, atLeast, optional } = state;
  const all = { constraint, regularizer, gamma, capacity, atLeast, optional: Number(optional), items };
  if (drawn) all.drawn = state.items.map((_, i) => Number(drawn.has(i))).join("");
  return "#" + new URLSearchParams(all);
}

function fromHash(hash) {
  const given = new URLSearchParams(hash.slice(1));
  const one = (name, allowed) => (allowed.includes(given.get(name)) ? given.get(name) : START[name]);
  const number = (name, low, high) => {
    const x = Number(given.get(name));
    return given.has(name) && Number.isFinite(x) ? clamp(x, low, high) : START[name];
  };
  const items = (given.get("items") ?? "").split("~").slice(0, MOST_ITEMS).map((text) => {
    const [score, weight, group] = text.split("_").map(Number);
    return item(clamp(score, LOWEST, HIGHEST), clamp(Math.round(weight), 0, HEAVIEST), clamp(Math.round(group), 0, GROUPS.length - 1));
  });
  const whole = items.every((x) => [x.score, x.weight, x.group].every(Number.isFinite));
  state = {
    constraint: one("constraint", ["knapsack", "topk", "groups"]),
    regularizer: one("regularizer", ["shannon", "gini", "tsallis"]),
    gamma: number("gamma", 0.01, 10),
    capacity: Math.round(number("capacity", 0, 1e6)),
    atLeast: Math.round(number("atLeast", 0, 1e6)),
    optional: given.get("optional") === "1",
    items: whole ? items : structuredClone(START.items),
  };
  const bits = given.get("drawn");
  drawn = bits?.length === state.items.length ? new Set([...bits].flatMap((bit, i) => (bit === "1" ? [i] : []))) : null;
}

// What follows from the state ---------------------------------------------------------------------------------------

/** Items in the order in which they are decided: by group if there are groups. */
const order = () => {
  const all = state.items.map((_, i) => i);
  return state.constraint === "groups" ? all.sort((a, b) => state.items[a].group - state.items[b].group || a - b) : all;
};

const weightOf = (i) => (state.constraint === "topk" ? 1 : state.items[i].weight);

/** The most that a selection can weigh. */
function total() {
  if (state.constraint !== "groups") return state.items.reduce((sum, _, i) => sum + weightOf(i), 0);
  const heaviest = {};
  for (const { group, weight } of state.items) heaviest[group] = Math.max(heaviest[group] ?? 0, weight);
  return Object.values(heaviest).reduce((a, b) => a + b, 0);
}

const picked = (problem, path) => new Set(path.map(({ k, o }) => problem.choices[k][o].item).filter((i) => i !== null));

/** The path that leads to a subset; null if there is none, or if it is never drawn. */
function pathOf(problem, P, subset) {
  const path = [];
  let c = problem.capacity;
  for (let k = problem.choices.length - 1; k >= 0; k--) {
    const options = problem.choices[k];
    const own = options.flatMap(({ item }, o) => (item !== null && subset.has(item) ? [o] : []));
    const o = own.length ? own[0] : options.findIndex((option) => option.item === null && !option.missing);
    if (own.length > 1 || o < 0 || !(P[k][o][c] > 0)) return null;
    path.push({ k, o, c });
    c -= options[o].weight;
  }
  return path;
}

function compute() {
  state.capacity = clamp(state.capacity, 0, total());
  state.atLeast = clamp(state.atLeast, 0, state.capacity);
  const { gamma, regularizer } = state;
  const problem = problemOf(state, gamma);
  const { P, V, value, feasible } = tables(problem, regularizer);
  const relaxed = state.items.map(() => 0);
  shown = { problem, P, V, feasible, relaxed, exact: new Set(), path: null };
  if (!feasible) return;
  const { y, entropy } = collect(problem, P);
  problem.choices.forEach((options, k) => options.forEach(({ item }, o) => item !== null && (relaxed[item] = y[k][o])));
  const exact = picked(problem, solve(problemOf(state)));
  Object.assign(shown, { value: value * gamma, entropy, exact, counts: counts(problem, P), best: likeliest(problem, P, 8) });
  shown.path = drawn && pathOf(problem, P, drawn);
}

// Drawing -----------------------------------------------------------------------------------------------------------

const names = (subset) => (subset.size ? order().filter((i) => subset.has(i)).map((i) => i + 1).join(", ") : "nothing");
/** Only what is certain is 0% or 100%: that some regularizers give exactly that is the point of them. */
function percent(p) {
  if (p <= 1e-12 || p >= 1 - 1e-12) return `${Math.round(100 * p)}%`;
  if (p < 0.0001 || p > 0.9999) return p < 0.5 ? "<0.01%" : ">99.99%";
  return `${(100 * p).toFixed(p < 0.1 || p > 0.999 ? 2 : 1)}%`;
}

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, x] of Object.entries(attributes)) node.setAttribute(name, x);
  node.textContent = text;
  return node;
}

const BARS = { top: 20, height: 210, foot: 38, left: 30 };
const scoreY = (score) => BARS.top + (BARS.height * (HIGHEST - score)) / (HIGHEST - LOWEST);

/** Where the bars stand; the width of a unit of weight stays as it is while one is dragged. */
function layout(unit) {
  const room = $("bars").parentElement.clientWidth - BARS.left - 8;
  const ids = order(), gap = 6;
  const breaks = (a, b) => state.constraint === "groups" && a !== undefined && state.items[a].group !== state.items[b].group;
  const gaps = ids.reduce((sum, i, at) => sum + (at ? gap : 0) + (breaks(ids[at - 1], i) ? 18 : 0), 0);
  const wide = (i, unit) => Math.max(unit * weightOf(i), 22);
  if (!unit) {
    unit = state.constraint === "topk" ? 56 : 30;
    while (unit > 3 && ids.reduce((sum, i) => sum + wide(i, unit), gaps) > room) unit -= 0.5;
  }
  let x = BARS.left;
  const places = [];
  ids.forEach((i, at) => {
    if (at) x += gap + (breaks(ids[at - 1], i) ? 18 : 0);
    const width = wide(i, unit);
    places[i] = { x, width };
    x += width;
  });
  return { places, unit, width: x + 8 };
}

let unitWhileDragged; // set while an edge is dragged
const EDGE = matchMedia("(pointer: coarse)").matches ? 28 : 14; // pixels that a pointer can hit

function drawBars() {
  const root = $("bars"), { places, unit, width } = layout(unitWhileDragged);
  shown.unit = unit;
  const bottom = BARS.top + BARS.height, height = bottom + BARS.foot;
  root.setAttribute("height", height);
  root.style.minWidth = `${width}px`;
  let axis = root.querySelector(".axes");
  if (!axis) {
    axis = svg("g", { class: "axes" });
    root.append(axis);
  }
  const right = Math.max(width, root.parentElement.clientWidth);
  axis.replaceChildren(
    ...[-4, -2, 0, 2, 4, 6, 8].flatMap((score) => [
      svg("line", { x1: BARS.left - 4, x2: right, y1: scoreY(score), y2: scoreY(score), class: score ? "axis" : "zero" }),
      svg("text", { x: BARS.left - 8, y: scoreY(score) + 4, "text-anchor": "end" }, score),
    ]),
    svg("text", { x: BARS.left - 8, y: bottom + 29, "text-anchor": "end" }, "%"),
  );
  const bars = [...root.querySelectorAll(".bar")].sort((a, b) => a.dataset.item - b.dataset.item);
  while (bars.length > state.items.length) bars.pop().remove();
  while (bars.length < state.items.length) {
    const bar = svg("g", { class: "bar", tabindex: 0, role: "slider", "aria-orientation": "vertical" });
    bar.append(...["reach", "frame", "fill"].map((name) => svg("rect", { class: name })));
    bar.append(svg("line", { class: "grip" }), svg("rect", { class: "edge" }));
    bar.append(...["score", "name", "taken"].map((name) => svg("text", { class: name })));
    root.append(bar);
    bars.push(bar);
  }
  const sorted = order().map((i) => bars[i]); // tabbing follows what is seen
  const standing = [...root.querySelectorAll(".bar")];
  if (sorted.some((bar, at) => bar !== standing[at])) root.append(...sorted);
  bars.forEach((bar, i) => {
    const { x, width } = places[i], { score, weight, group } = state.items[i], share = shown.relaxed[i];
    const [zero, tip] = [scoreY(0), scoreY(score)], y = Math.min(zero, tip), long = Math.abs(zero - tip);
    const set = (name, attributes) => Object.entries(attributes).forEach(([key, v]) => bar.querySelector("." + name).setAttribute(key, v));
    const filled = share * long;
    bar.dataset.item = i;
    bar.classList.toggle("current", i === current);
    set("reach", { x, width, y: BARS.top, height: BARS.height });
    set("frame", { x, width, y, height: long, rx: 3 });
    set("fill", { x, width, y: score > 0 ? zero - filled : zero, height: filled, rx: filled > 4 ? 3 : 0 });
    set("grip", { x1: x + width / 2 - 6, x2: x + width / 2 + 6, y1: tip, y2: tip });
    set("edge", { x: x + width - EDGE / 2, width: state.constraint === "topk" ? 0 : EDGE, y: y - 6, height: long + 12 });
    set("score", { x: x + width / 2, y: score >= 0 ? tip - 7 : tip + 15 });
    set("name", { x: x + width / 2, y: bottom + 14 });
    set("taken", { x: x + width / 2, y: bottom + 29 });
    bar.querySelector(".score").textContent = score;
    const letter = state.constraint === "groups" ? GROUPS[group] : "";
    bar.querySelector(".name").textContent = letter + (i + 1);
    bar.querySelector(".taken").textContent = Math.round(100 * share);
    bar.setAttribute("aria-label", `Item ${i + 1}${letter && `, group ${letter}`}`);
    bar.setAttribute("aria-valuemin", LOWEST);
    bar.setAttribute("aria-valuemax", HIGHEST);
    bar.setAttribute("aria-valuenow", score);
    const heavy = state.constraint === "topk" ? "" : `weight ${weight}, `;
    bar.setAttribute("aria-valuetext", `score ${score}, ${heavy}${Math.round(100 * share)}% selected`);
  });
}

function drawEditor() {
  const { score, weight, group } = state.items[current];
  $("edited").textContent = `Item ${current + 1}`;
  const fields = { "edit-score": score, "edit-weight": weight, "edit-group": group };
  for (const [id, x] of Object.entries(fields)) if (document.activeElement !== $(id)) $(id).value = x;
  $("edit-weight-label").hidden = state.constraint === "topk";
  $("edit-group-label").hidden = state.constraint !== "groups";
  $("remove").disabled = state.items.length < 2;
  $("add").disabled = state.items.length >= MOST_ITEMS;
}

function drawControls() {
  for (const name of ["constraint", "regularizer"]) {
    document.querySelector(`input[name=${name}][value=${state[name]}]`).checked = true;
  }
  $("capacity-name").textContent = state.constraint === "topk" ? "k" : "capacity";
  $("capacity").max = total();
  $("capacity").value = $("capacity-value").textContent = state.capacity;
  $("atleast").max = state.capacity;
  $("atleast").value = $("atleast-value").textContent = state.atLeast;
  $("optional-label").hidden = state.constraint !== "groups";
  $("weight-hint").hidden = state.constraint === "topk";
  $("optional").checked = state.optional;
  $("gamma").value = Math.log10(state.gamma);
  $("gamma-value").textContent = state.gamma;
  $("gamma").setAttribute("aria-valuetext", state.gamma);
}

function drawNumbers() {
  const best = [...shown.exact].reduce((sum, i) => sum + state.items[i].score, 0);
  const rows = shown.feasible
    ? [["value, smoothed", shown.value.toFixed(3)], ["value, exact", best.toFixed(3)], ["entropy, nats", Math.abs(shown.entropy).toFixed(3)]]
    : [["No selection is feasible: raise the capacity or lower at_least", ""]];
  $("numbers").replaceChildren(
    ...rows.flatMap(([name, x]) => ["dt", "dd"].map((tag, at) => Object.assign(document.createElement(tag), { textContent: [name, x][at] }))),
  );
}

/** Three packed boxes: what is taken of each item, times its weight, in the room that the heaviest selection needs. */
function drawSelections() {
  const room = Math.max(total(), 1), all = order();
  const unit = state.constraint === "topk" ? "items" : "weight";
  const kinds = [
    ["relaxed", shown.relaxed],
    ["exact", state.items.map((_, i) => Number(shown.exact.has(i)))],
    ["drawn", drawn && state.items.map((_, i) => Number(drawn.has(i)))],
  ];
  $("selections").replaceChildren(
    ...kinds.map(([kind, share]) => {
      const row = Object.assign(document.createElement("div"), { className: "selection" });
      const label = Object.assign(document.createElement("span"), { className: `key-${kind}`, textContent: kind });
      const track = Object.assign(document.createElement("div"), { className: "track" });
      const note = Object.assign(document.createElement("span"), { className: "total" });
      row.dataset.kind = kind;
      row.append(label, track, note);
      if (share && shown.feasible) {
        for (const i of all.filter((i) => share[i] > 0)) {
          const part = Object.assign(document.createElement("div"), { className: `part ${kind}` });
          const width = (100 * share[i] * weightOf(i)) / room;
          part.style.flex = `0 0 ${width}%`;
          part.textContent = width > 3.5 ? i + 1 : "";
          part.title = `item ${i + 1}: ${percent(share[i])}`;
          track.append(part);
        }
        const used = share.reduce((sum, x, i) => sum + x * weightOf(i), 0);
        const worth = share.reduce((sum, x, i) => sum + x * state.items[i].score, 0);
        note.textContent = `${unit} ${rounded(used, 2)}, score ${rounded(worth, 2)}`;
      } else if (kind === "relaxed" || shown.feasible) note.textContent = shown.feasible ? "draw a subset" : "nothing is feasible";
      for (const limit of new Set(state.atLeast ? [state.atLeast, state.capacity] : [state.capacity])) {
        const line = Object.assign(document.createElement("i"), { className: "limit" });
        line.style.left = `min(${(100 * limit) / room}%, 100% - 2px)`;
        track.append(line);
      }
      return row;
    }),
  );
}

function drawSubsets() {
  const body = $("subsets"), draw = $("draw");
  draw.disabled = !shown.feasible;
  body.replaceChildren();
  $("counts").textContent = "";
  if (!shown.feasible) return;
  const { subsets, possible } = shown.counts;
  const number = (x) => x.toLocaleString("en");
  $("counts").textContent = `${number(possible)} of ${number(subsets)} feasible subsets can be drawn. The most probable:`;
  const same = (a, b) => b && a.size === b.size && [...a].every((i) => b.has(i));
  const rows = shown.best.map(({ probability, picks }) => {
    const subset = new Set(picks.map((o, k) => shown.problem.choices[k][o].item).filter((i) => i !== null));
    return [names(subset), probability, same(subset, shown.exact) ? "exact" : "", same(subset, drawn)];
  });
  const rest = possible - rows.length;
  if (rest > 0) rows.push([`${number(rest)} others`, 1 - rows.reduce((sum, row) => sum + row[1], 0), "", drawn && !rows.some((row) => row[3])]);
  for (const [label, probability, tag, now] of rows) {
    const row = body.insertRow();
    row.className = now ? "now" : "";
    row.insertCell().textContent = label;
    if (tag) row.cells[0].append(" ", Object.assign(document.createElement("span"), { className: "tag", textContent: tag }));
    const meter = Object.assign(document.createElement("div"), { className: "meter" });
    meter.style.width = `${100 * probability}%`;
    row.insertCell().append(meter);
    row.insertCell().textContent = percent(Math.max(probability, 0));
  }
}

function drawTable() {
  const { problem, P, path } = shown, root = $("table"), groups = state.constraint === "groups";
  $("table-hint").textContent =
    `Each cell: the probability of picking ${groups ? "the option" : "the item"} given the remaining capacity. ` +
    "A draw starts at the top right and decides about the last " + (groups ? "group" : "item") + " first" + (path || !shown.feasible ? "." : "; draw a subset to see its path.");
  const rows = [], rowOf = new Map();
  for (let k = problem.choices.length - 1; k >= 0; k--) {
    problem.choices[k].forEach(({ item, missing }, o) => {
      if (missing || (!groups && item === null)) return;
      const group = groups && GROUPS[state.items[problem.choices[k].find((x) => x.item !== null).item].group];
      rows.push({ k, o, label: groups ? group + (item === null ? " none" : item + 1) : `item ${item + 1}` });
      rowOf.set(`${k} ${o}`, rows.length - 1);
    });
  }
  const left = 50, room = root.parentElement.clientWidth - left - 4, columns = problem.capacity + 1;
  const size = clamp(room / columns, 9, 60), high = 22, top = 4;
  const [width, height] = [left + columns * size + 4, top + rows.length * high + 34];
  root.setAttribute("height", height);
  root.style.minWidth = `${width}px`;
  root.setAttribute("aria-label", `Table Q: ${rows.length} rows, capacity left 0 to ${problem.capacity}`);
  const cells = [];
  rows.forEach(({ k, o, label }, r) => {
    const parted = groups && r > 0 && rows[r - 1].k !== k;
    if (parted) cells.push(svg("line", { x1: 0, x2: width, y1: top + r * high - 1, y2: top + r * high - 1, class: "zero" }));
    cells.push(svg("text", { x: left - 6, y: top + r * high + 15, "text-anchor": "end" }, label));
    for (let c = 0; c < columns; c++) {
      const q = P[k][o][c], live = shown.V[k + 1][c] > -1e299;
      const place = { x: left + c * size, y: top + r * high, width: size - 1, height: high - 2 };
      if (!live) continue;
      const cell = svg("rect", { ...place, class: "cell", "fill-opacity": q });
      cell.append(svg("title", {}, `${label}, ${c} left: ${percent(q)}`));
      cells.push(svg("rect", { ...place, class: "back" }), cell);
    }
  });
  const every = Math.ceil(26 / size);
  for (let c = 0; c < columns; c += every) {
    cells.push(svg("text", { x: left + (c + 0.5) * size - 0.5, y: top + rows.length * high + 13, "text-anchor": "middle" }, c));
  }
  cells.push(svg("text", { x: left, y: height - 4 }, "capacity left"));
  if (path) {
    const steps = path.map(({ k, o, c }) => ({ r: rowOf.get(`${k} ${o}`) ?? rowOf.get(`${k} 1`), c, takes: problem.choices[k][o].item !== null }));
    const spots = steps.map(({ r, c }) => [left + (c + 0.5) * size - 0.5, top + r * high + high / 2 - 1]);
    cells.push(svg("polyline", { class: "walk", points: spots.map((spot) => spot.join()).join(" ") }));
    spots.forEach(([cx, cy], at) => cells.push(svg("circle", { cx, cy, r: 4.5, class: steps[at].takes ? "stop" : "step" })));
  }
  root.replaceChildren(...cells);
}

function drawFrontier() {
  const root = $("frontier"), reach = total(), { gamma, atLeast, capacity, regularizer } = state;
  const mode = atLeast === 0 ? "most" : atLeast === capacity ? "exactly" : "band";
  const smooth = frontier(shown.problem, reach, atLeast, mode, regularizer).map((v) => v === null ? null : v * gamma);
  const hard = frontier(problemOf(state), reach, atLeast, mode, "hard");
  const limit = { most: "at most c", exactly: "exactly c", band: `from ${atLeast} to c` }[mode];
  const axis = state.constraint === "topk" ? "k" : "capacity", what = axis === "k" ? `${limit} items` : `a weight of ${limit}`;
  $("frontier-hint").innerHTML = `The best score, <span class="key-exact">exact</span> and <span class="key-relaxed">smoothed</span>, of selections with ${what}. Click to set the ${axis}.`;
  const width = Math.max(root.clientWidth, 200), height = 206, left = 34, bottom = 40, top = 10, right = 12;
  const known = [...smooth, ...hard].filter((v) => v !== null);
  const low = Math.min(0, ...known), high = Math.max(1, ...known);
  const x = (c) => left + ((width - left - right) * c) / Math.max(reach, 1);
  const y = (v) => height - bottom - ((height - bottom - top) * (v - low)) / (high - low);
  const line = (values) => {
    let d = "", open = false;
    values.forEach((v, c) => {
      if (v === null) return (open = false);
      d += open ? `H${x(c)}V${y(v)}` : `M${x(c)} ${y(v)}`;
      if (!open && values[c + 1] == null) d += "h0.01";
      return (open = true);
    });
    return d;
  };
  const tick = [1, 2, 5, 10, 20, 50].find((step) => (high - low) / step <= 6) ?? 100;
  const marks = [];
  for (let v = Math.ceil(low / tick) * tick; v <= high; v += tick) {
    marks.push(svg("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), class: v ? "axis" : "zero" }));
    marks.push(svg("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, v));
  }
  const every = Math.max(1, Math.ceil(reach / Math.max((width - left) / 44, 1)));
  for (let c = 0; c <= reach; c += every) marks.push(svg("text", { x: x(c), y: height - 22, "text-anchor": "middle" }, c));
  marks.push(svg("text", { x: width - right, y: height - 6, "text-anchor": "end" }, axis === "k" ? "c, items" : "c, total weight"));
  root.setAttribute("height", height);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("aria-label", `Frontier: the ${axis} is ${capacity} of ${reach}`);
  root.dataset.left = left;
  root.dataset.right = right;
  root.dataset.reach = reach;
  const now = smooth[capacity];
  root.replaceChildren(
    ...marks,
    svg("line", { x1: x(capacity), x2: x(capacity), y1: top, y2: height - bottom, class: "now-line", "data-capacity": capacity }),
    svg("path", { d: line(hard), class: "steps", "stroke-linecap": "round" }),
    svg("path", { d: line(smooth), class: "curve", "stroke-linecap": "round" }),
    ...(now == null ? [] : [svg("circle", { cx: x(capacity), cy: y(now), r: 5, class: "cell" })]),
  );
}

/** Code that gives the same numbers. */
function drawPython() {
  const { constraint, gamma, capacity, atLeast, optional, items } = state;
  const kind = state.regularizer[0].toUpperCase() + state.regularizer.slice(1);
  const list = (numbers) => `[${numbers.join(", ")}]`;
  const extra = (atLeast ? `, at_least=${atLeast}` : "") + (constraint === "groups" && optional ? ", optional=True" : "");
  let theta = list(items.map((x) => x.score)), made = `kg.TopK(${capacity}${atLeast === capacity ? "" : `, at_least=${atLeast}`})`;
  if (constraint === "knapsack") made = `kg.Knapsack(${list(items.map((x) => x.weight))}, ${capacity}${extra})`;
  if (constraint === "groups") {
    const rows = shown.problem.choices.map((options) => options.filter(({ item, missing }) => item !== null || missing));
    theta = list(rows.map((row) => list(row.map(({ item }) => (item === null ? "-np.inf" : items[item].score)))));
    made = `kg.MultipleChoice(${list(rows.map((row) => list(row.map(({ weight }) => weight))))}, ${capacity}${extra})`;
  }
  $("python").textContent = `import numpy as np
import knapgrad as kg

theta = np.array(${theta}, dtype=float)
constraint = ${made}
kg.relax(theta, constraint, kg.${kind}(${gamma}))
kg.solve(theta, constraint)
kg.sample(theta, constraint, kg.${kind}(${gamma}), rng=0)`;
}

let waiting;
function render() {
  current = clamp(current, 0, state.items.length - 1);
  compute();
  for (const draw of [drawBars, drawEditor, drawControls, drawNumbers, drawSelections, drawSubsets, drawTable, drawFrontier, drawPython]) draw();
  clearTimeout(waiting); // browsers limit how often the address may change
  waiting = setTimeout(remember, 150);
}
const remember = () => history.replaceState(null, "", toHash());

// What changes the state --------------------------------------------------------------------------------------------

const say = (text) => ($("status").textContent = text);

/** Changes the state; a subset that was drawn from another distribution is forgotten. */
function change(update) {
  update(state);
  drawn = null;
  render();
}

function edit(i, { score, weight, group }) {
  change(({ items }) => {
    if (Number.isFinite(score)) items[i].score = rounded(clamp(score, LOWEST, HIGHEST), 1);
    if (Number.isFinite(weight)) items[i].weight = clamp(Math.round(weight), 0, HEAVIEST);
    if (Number.isFinite(group)) items[i].group = clamp(group, 0, GROUPS.length - 1);
  });
}

function select(i) {
  current = i;
  document.querySelectorAll(".bar").forEach((bar) => bar.classList.toggle("current", Number(bar.dataset.item) === i));
  drawEditor();
}

function add() {
  if (state.items.length >= MOST_ITEMS) return;
  change(({ items }) => items.push(item(2, 3, items[current].group)));
  current = state.items.length - 1;
  render();
  document.querySelector(`.bar[data-item="${current}"]`).focus();
  say(`Item ${current + 1} added`);
}

function remove(i) {
  if (state.items.length < 2) return;
  change(({ items }) => items.splice(i, 1));
  say(`Item ${i + 1} removed`);
}

const bars = $("bars");
let drag = null;
bars.addEventListener("pointerdown", (event) => {
  const bar = event.target.closest(".bar");
  if (!bar || event.button) return;
  const i = Number(bar.dataset.item), edge = event.target.classList.contains("edge");
  drag = { i, edge, x: event.clientX, y: event.clientY, ...state.items[i] };
  if (edge) unitWhileDragged = shown.unit;
  select(i);
  bars.setPointerCapture(event.pointerId);
});
bars.addEventListener("pointermove", (event) => {
  if (!drag) return;
  if (drag.edge) edit(drag.i, { weight: drag.weight + (event.clientX - drag.x) / unitWhileDragged });
  else edit(drag.i, { score: drag.score + ((drag.y - event.clientY) * (HIGHEST - LOWEST)) / BARS.height });
});
for (const name of ["pointerup", "pointercancel"]) {
  bars.addEventListener(name, () => {
    if (!drag) return;
    drag = unitWhileDragged = null;
    render();
  });
}
bars.addEventListener("focusin", (event) => event.target.dataset.item && select(Number(event.target.dataset.item)));
bars.addEventListener("keydown", (event) => {
  const i = Number(event.target.dataset.item), { score, weight } = state.items[i] ?? {};
  const step = event.shiftKey ? 1 : 0.1;
  const keys = {
    ArrowUp: () => edit(i, { score: score + step }),
    ArrowDown: () => edit(i, { score: score - step }),
    Home: () => edit(i, { score: LOWEST }),
    End: () => edit(i, { score: HIGHEST }),
    Delete: () => {
      remove(i);
      document.querySelector(`.bar[data-item="${current}"]`).focus();
    },
  };
  if (state.constraint !== "topk") {
    keys.ArrowRight = () => edit(i, { weight: weight + 1 });
    keys.ArrowLeft = () => edit(i, { weight: weight - 1 });
  }
  if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  keys[event.key]();
});

for (const field of ["score", "weight", "group"]) {
  $(`edit-${field}`).addEventListener("input", (event) => event.target.value !== "" && edit(current, { [field]: Number(event.target.value) }));
  $(`edit-${field}`).addEventListener("change", render);
}
$("edit-group").append(...[...GROUPS].map((name, at) => new Option(name, at)));
$("add").addEventListener("click", add);
$("remove").addEventListener("click", () => remove(current));
for (const input of document.querySelectorAll("input[type=radio]")) {
  input.addEventListener("change", () =>
    change((s) => {
      s[input.name] = input.value;
      if (input.name !== "constraint") return;
      s.capacity = Math.round(total() / 2); // a budget of one constraint means nothing to another
      s.atLeast = input.value === "topk" ? s.capacity : 0;
    }),
  );
}
$("capacity").addEventListener("input", (event) =>
  change((s) => {
    if (s.atLeast && s.atLeast === s.capacity) s.atLeast = Number(event.target.value); // exactly stays exactly
    s.capacity = Number(event.target.value);
  }),
);
$("atleast").addEventListener("input", (event) => change((s) => (s.atLeast = Number(event.target.value))));
$("optional").addEventListener("change", (event) => change((s) => (s.optional = event.target.checked)));
$("gamma").addEventListener("input", (event) => change((s) => (s.gamma = Number((10 ** event.target.value).toPrecision(3)))));
$("frontier").addEventListener("click", (event) => {
  const { left, right, reach } = $("frontier").dataset, box = $("frontier").getBoundingClientRect();
  const share = (event.clientX - box.left - left) / (box.width - left - right);
  $("capacity").value = clamp(Math.round(share * reach), 0, reach);
  $("capacity").dispatchEvent(new Event("input"));
});
$("draw").addEventListener("click", () => {
  drawn = picked(shown.problem, sample(shown.problem, shown.P));
  render();
  say(`Drawn: ${names(drawn)}`);
});
$("copy").addEventListener("click", async () => {
  clearTimeout(waiting);
  remember();
  try {
    await navigator.clipboard.writeText(location.href);
    $("copy").textContent = "Copied";
  } catch {
    $("copy").textContent = "Copy it from the address bar";
  }
  setTimeout(() => ($("copy").textContent = "Copy link"), 2000);
});

$("reset").addEventListener("click", () => {
  current = 0;
  change(() => (state = structuredClone(START)));
  say("As at the start");
});

// Light or dark: as on the other pages of the site, which keep the choice where Material for MkDocs keeps it; else as the system has it.
const dark = matchMedia("(prefers-color-scheme: dark)"), kept = new URL("..", location).pathname + ".__palette";
function chosen() {
  try {
    return JSON.parse(localStorage.getItem(kept))?.color?.scheme;
  } catch {
    return undefined; // no storage, or not ours
  }
}
function theme() {
  const scheme = chosen() ?? (dark.matches ? "slate" : "default");
  document.documentElement.dataset.theme = scheme === "slate" ? "dark" : "light";
}
theme();
dark.addEventListener("change", theme);
$("theme").addEventListener("click", () => {
  const index = document.documentElement.dataset.theme === "dark" ? 0 : 1, name = ["light", "dark"][index];
  const color = { media: `(prefers-color-scheme: ${name})`, scheme: ["default", "slate"][index], primary: "indigo", accent: "deep-orange" };
  try {
    localStorage.setItem(kept, JSON.stringify({ index, color }));
  } catch {} // the choice is not kept
  document.documentElement.dataset.theme = name;
});
addEventListener("hashchange", () => (fromHash(location.hash), render()));
addEventListener("resize", render);

fromHash(location.hash);
render();
