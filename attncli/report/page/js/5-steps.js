"use strict";
// The computation step by step on four tokens, cell by cell; and the shapes of the bundle's own.

const X = D.example; // Q, K and V of the embedded example, as lists of rows
const indexed = (name, count) => range(count).map(i => name + "₁₂₃₄₅₆₇₈"[i]);
/** Where the walk stands: cell (i, j) of a step's result. `drawn`: cells of it while it plays. */
const T = { step: 0, i: 2, j: 1, causal: true, full: true, timer: 0, drawn: Infinity };

function softmax(row) {
  const highest = Math.max(...row);
  const exps = row.map(x => Math.exp(x - highest));
  const total = sum(exps);
  return exps.map(e => e / total);
}

/** All stages of the example, as rows of numbers. */
function stages() {
  const scores = X.q.map(q => X.k.map(k => sum(q.map((x, l) => x * k[l]))));
  const scaled = scores.map(row => row.map(x => x / Math.sqrt(X.dk)));
  const mask = scores.map((row, i) => row.map((_, j) => (T.causal && j > i ? -Infinity : 0)));
  const masked = scaled.map((row, i) => row.map((x, j) => x + mask[i][j]));
  const highest = masked.map(row => Math.max(...row));
  const exps = masked.map((row, i) => row.map(x => Math.exp(x - highest[i])));
  const weights = masked.map(softmax);
  const output = weights.map(w => X.v[0].map((_, c) => sum(w.map((x, j) => x * X.v[j][c]))));
  return { scores, scaled, mask, masked, highest, exps, weights, output };
}

/** A matrix as a table of coloured figures. Options:
 * `rows`, `columns`: names. `shares`: colours for 0 to 1, otherwise for signed values; `bare`: none.
 * `row`, `column`, `cell` [i, j]: framed. `hidden`: the mask, whose −∞ cells are drawn as hidden.
 * `digits` of the figures; `span`: the size that has the last colour. `pick(i, j)`: makes it the result, whose
 * cells are chosen by pointer or keys. */
function matrix(caption, m, o = {}) {
  const ramp = (o.shares ? RAMP : SIGNED)[theme()];
  const cell = (x, i, j) => {
    const td = text("td", o.shares && x === 0 ? "0" : fixed(x, o.digits));
    if (o.pick && i * m[0].length + j > T.drawn) td.textContent = "";
    else if (x === -Infinity || o.hidden?.[i][j] === -Infinity) td.className = "hid";
    else if (!o.bare) {
      const u = o.shares ? x * 0.9 : 0.5 + clamp(x / (o.span ?? 2), -1, 1) * 0.42;
      Object.assign(td.style, { backgroundColor: colour(ramp, u), color: inkOn(ramp, u) });
    }
    if (o.row === i || o.column === j) td.classList.add("hl");
    if (o.cell?.[0] === i && o.cell[1] === j) td.classList.add("sel");
    if (o.pick) td.onpointermove = td.onclick = () => o.pick(i, j); // not …enter: the cells are new
    return td;
  };
  const names = o.rows ?? indexed("t", m.length);
  const across = o.columns ?? indexed("t", m[0].length);
  const top = across.map(name => el("th", { textContent: name, scope: "col" }));
  const line = (row, i) =>
    el("tr", {}, el("th", { textContent: names[i], scope: "row" }), ...row.map((x, j) => cell(x, i, j)));
  const table = el("table", { className: "mx" }, text("caption", caption));
  table.append(el("thead", {}, el("tr", {}, el("td"), ...top)), el("tbody", {}, ...m.map(line)));
  if (!o.pick) return table;
  Object.assign(table, { tabIndex: 0, ariaLabel: t("js.steps.arrows", { name: caption }) });
  table.onkeydown = e => {
    const move = moveOf(e);
    if (!move) return;
    e.preventDefault();
    o.pick(clamp(T.i + move[0], 0, m.length - 1), clamp(T.j + move[1], 0, m[0].length - 1));
  };
  return table;
}

// ---- What each step shows, and the arithmetic of cell (i, j) of its result ------------------------
const sign = words => text("span", words, "op");
const factor = (x, digits) => (x < 0 ? `(${fixed(x, digits)})` : fixed(x, digits));
const product = (a, b) =>
  a.map((x, l) => `${fixed(x)}·${factor(b[l])}`).join(" + ").replaceAll("+ −", "− ");

function shownIn(step, i, j, pick) {
  const g = stages();
  const stage = (name, o) => matrix(t("js.stage." + name), g[name], o);
  const given = (name, o, title = name) => {
    const m = X[name.toLowerCase()];
    return matrix(title, m, { columns: indexed("d", m[0].length), ...o });
  };
  const value = name => fixed(g[name][i][j], 4);
  const [cell, columns, shares] = [[i, j], indexed("d", X.v[0].length), { shares: true, hidden: g.mask }];
  if (step === 0) {
    const size = name => `${name} (${X.q.length}×${X[name.toLowerCase()][0].length})`;
    return [["Q", "K", "V"].map(name => given(name, {}, size(name))), t("js.steps.start")];
  }
  if (step === 1) {
    const keys = given("K", { row: j }, t("js.stage.keys"));
    const parts = [given("Q", { row: i }), sign("·"), keys, sign("="), stage("scores", { cell, pick })];
    return [parts, `${product(X.q[i], X.k[j])} = ${value("scores")}`];
  }
  if (step === 2) {
    const parts = [stage("scores", { cell }), sign(`÷ √${X.dk} =`), stage("scaled", { cell, pick })];
    return [parts, `${value("scores")} ÷ ${fixed(Math.sqrt(X.dk), 4)} = ${value("scaled")}`];
  }
  if (step === 3) {
    const mask = stage("mask", { cell, digits: 0, bare: true });
    const later = g.mask[i][j] ? t("js.steps.later", { i: i + 1, j: j + 1 }) : "";
    return [
      [stage("scaled", { cell }), sign("+"), mask, sign("="), stage("masked", { cell, pick })],
      `${later}${value("scaled")} + ${factor(g.mask[i][j], 0)} = ${value("masked")}`,
    ];
  }
  if (step === 4) {
    const exps = stage("exps", { ...shares, cell });
    const weights = stage("weights", { ...shares, cell, pick });
    const above = `exp(${fixed(g.masked[i][j])} − ${factor(g.highest[i])})`;
    return [
      [stage("masked", { row: i }), sign("→"), exps, sign(t("js.steps.over")), weights],
      `${above} ÷ ${fixed(sum(g.exps[i]), 4)} = ${value("weights")}${t("js.steps.sums", { i: i + 1 })}`,
    ];
  }
  const weights = stage("weights", { ...shares, row: i });
  const output = stage("output", { columns, cell, pick });
  const values = X.v.map(row => row[j]);
  return [
    [weights, sign("·"), given("V", { column: j }), sign("="), output],
    `${product(g.weights[i], values)} = ${value("output")}`,
  ];
}
const LAST = 5;
const widthOf = step => (step === LAST ? X.v[0].length : X.k.length); // columns of the result
let markSteps = () => {};

function drawSteps() {
  T.j = Math.min(T.j, widthOf(T.step) - 1);
  const pick = (i, j) => {
    if (i === T.i && j === T.j) return;
    [T.i, T.j] = [i, j];
    stop();
  };
  const focused = $("flow").contains(document.activeElement);
  const [parts, work] = shownIn(T.step, T.i, T.j, pick);
  $("flow").replaceChildren(...parts);
  if (focused) $("flow").querySelector("[tabindex]")?.focus();
  $("sformula").replaceChildren(`${T.step + 1}. `, ...formula(t("js.step.formula." + T.step)));
  $("ssay").textContent = t("js.step.say." + T.step);
  $("swork").textContent = work;
  $("scmd").textContent = T.causal ? D.commands.steps_causal : D.commands.steps;
  markSteps();
}

// ---- Play: a cell every 400 ms, from the step that is shown to the end ----------------------------
function stop() {
  clearInterval(T.timer);
  [T.timer, T.drawn] = [0, Infinity];
  $("splay").textContent = t("js.steps.play");
  drawSteps();
}
function play() {
  if (T.timer) return stop();
  if (T.step === LAST) T.step = 0;
  T.drawn = -1;
  T.timer = setInterval(playOn, 400);
  $("splay").textContent = t("js.steps.pause");
  return playOn();
}
function playOn() {
  T.drawn += 1;
  if (T.drawn >= (T.step ? X.q.length * widthOf(T.step) : 1)) {
    if (T.step === LAST) return stop();
    [T.step, T.drawn] = [T.step + 1, 0];
  }
  [T.i, T.j] = [Math.floor(T.drawn / widthOf(T.step)), T.drawn % widthOf(T.step)];
  return drawSteps();
}

function bindSteps() {
  markSteps = walk("s", range(LAST + 1).map(i => t("js.step.name." + i)), T, stop);
  $("splay").onclick = play;
  $("splay").hidden = still.matches;
  $("scausal").onchange = e => {
    T.causal = e.target.checked;
    drawSteps();
  };
  const sizes = [[false, t("js.shapes.one")], [true, t("js.shapes.all")]];
  choices("shapemode", sizes, T, "full", drawShapes);
}

// ---- Shapes -------------------------------------------------------------------------------------
/** From X to O, and the table of steps: for one head, or for all of the batch and the heads. */
function drawShapes() {
  const g = group();
  const of = (heads, ...sizes) =>
    `(${[...(T.full ? [g.batches, heads] : []), ...sizes].filter(size => size !== null).join(", ")})`;
  const [dk, dv] = [g.dk ?? "d_k", g.dv ?? "d_v"]; // of given weights nobody knows them
  const pairs = of(g.heads, g.q_len, g.k_len);
  const output = of(g.heads, g.q_len, dv);
  const part = ([name, made, shape]) =>
    el("div", {}, text("b", name), el("span", {}, ...formula(made)), text("code", shape));
  const strip = [
    [["X", t("js.shapes.input"), of(null, g.q_len, g.dk ? g.heads * g.dk : "d_model")]],
    [
      ["Q", "X W_Q", of(g.heads, g.q_len, dk)],
      ["K", "X W_K", of(g.kv_heads, g.k_len, dk)],
      ["V", "X W_V", of(g.kv_heads, g.k_len, dv)],
    ],
    [["S", "Q Kᵀ ÷ √dₖ + M", pairs]],
    [["A", "softmax(S)", pairs]],
    [["O", "A V", output]],
  ].map(parts => el("div", { className: "shape" }, ...parts.map(part)));
  $("strip").replaceChildren(...strip.flatMap((e, i) => (i ? [sign("→"), e] : [e])));
  const line = name => {
    const title = el("th", { scope: "row", textContent: t("js.stage." + name) });
    const shape = text("td", name === "output" ? output : pairs, "nowrap");
    const operation = text("td", t("js.operation." + name));
    return el("tr", {}, title, operation, shape, text("td", t("js.purpose." + name)));
  };
  const names = ["scores", "scaled", "masked", "weights", "output"];
  $("summary").tBodies[0].replaceChildren(...names.map(line));
}
