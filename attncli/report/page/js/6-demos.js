"use strict";
// Demonstrations: why √dₖ, what masks do, softmax that does not overflow.

// ---- Why √dₖ ------------------------------------------------------------------------------------
const KEYS = 8;
const WALK = float32(D.walk); // row by row, q·k of each key after 1, 2, … components
const WIDE = WALK.length / KEYS;
const W = { draw: "normal", after: false };

const entropyOf = p => -sum(p.map(x => (x > 0 ? x * Math.log2(x) : 0)));
function varianceOf(list) {
  const mean = sum(list) / list.length;
  return sum(list.map(x => (x - mean) ** 2)) / (list.length - 1);
}
/** Frobenius norm of the Jacobian diag(p) − p pᵀ of softmax. */
function gradientOf(p) {
  const squares = sum(p.map(x => x * x));
  const pairs = squares * squares - sum(p.map(x => x ** 4));
  return Math.sqrt(sum(p.map(x => (x * (1 - x)) ** 2)) + Math.max(0, pairs));
}
const words = (x, y, anchor, what, tone = "") =>
  svg("text", { x, y, "text-anchor": anchor, class: tone }, what);
const axis = (x1, x2, y) => svg("line", { x1, x2, y1: y, y2: y, class: "axis" });

/** Scores and the shares made of them as bars, and what tells how sharp these are. They may be no
 * shares at all, where something after softmax has changed their sum. */
function panel(title, scores, shares, highest, tone) {
  const [width, middle, base] = [460, 68, 217];
  const x = i => ((i + 0.5) * width) / scores.length;
  const bar = (i, y, height) =>
    svg("rect", { x: x(i) - 13, width: 26, y, height: Math.max(0.8, height), class: tone });
  const score = (s, i) => {
    const height = clamp(s / highest, -1, 1) * 48;
    const digits = Math.abs(s) < 10 && !Number.isInteger(s) ? 1 : 0;
    return [
      bar(i, middle - Math.max(0, height), Math.abs(height)),
      words(x(i), middle + (height < 0 ? -5 : 13), "middle", fixed(s, digits)),
    ];
  };
  const share = (p, i) => [
    bar(i, base - 62 * p, 62 * p),
    words(x(i), 230, "middle", p < 0.005 ? "0" : `${Math.round(100 * p)}%`),
  ];
  const total = sum(shares);
  const whole = Math.abs(total - 1) < 1e-9;
  const facts = {
    variance: fixed(varianceOf(scores)),
    entropy: whole ? t("js.scaling.bits", { bits: fixed(entropyOf(shares), 3) }) : "–",
    largest: fixed(Math.max(...shares), 3),
    even: fixed(Math.max(...shares) * shares.length, 2),
    gradient: whole ? fixed(gradientOf(shares), 3) : "–",
    sum: fixed(total, 3),
  };
  const picture = svg("svg", { viewBox: `0 0 ${width} 232`, role: "img" });
  picture.append(axis(0, width, middle), axis(0, width, base));
  picture.append(words(0, 9, "start", t("js.stage.scores")), words(0, 140, "start", "softmax"));
  picture.append(...scores.flatMap(score), ...shares.flatMap(share));
  const names = Object.keys(facts).map(key => [key, t("js.scaling." + key)]);
  picture.ariaLabel = [title, ...names.map(([key, name]) => `${name} ${facts[key]}`)].join(", ");
  const fact = ([key, name]) =>
    el("span", {}, `${name} `, text("b", facts[key], key === "sum" && !whole ? "bad" : ""));
  const line = el("p", { className: "facts" }, ...names.map(fact));
  return el("div", { className: "pan" }, text("h3", title), picture, line);
}

function drawScaling() {
  const d = Math.round(2 ** (+$("dk").value / 10));
  const tau = 2 ** (+$("tau").value / 10);
  const root = fixed(Math.sqrt(d), Number.isInteger(Math.sqrt(d)) ? 0 : 2);
  const raw = W.draw === "normal" ? range(KEYS).map(k => WALK[k * WIDE + d - 1]) : [10, 1, 1];
  const scaled = raw.map(x => x / Math.sqrt(d));
  const before = softmax(raw.map(x => x / tau));
  const after = W.after ? before.map(p => p / Math.sqrt(d)) : softmax(scaled.map(x => x / tau));
  const highest = Math.max(4, ...raw.map(Math.abs));
  const hot = tau === 1 ? "" : t("js.scaling.tau", { tau: plain(tau) });
  const title = W.after ? "js.scaling.after" : "js.scaling.scaled";
  $("dkv").textContent = d;
  $("tauv").textContent = plain(tau);
  $("dk").ariaValueText = `dₖ = ${d}`;
  $("tau").ariaValueText = `τ = ${plain(tau)}`;
  $("duo").replaceChildren(
    panel(t("js.scaling.raw") + hot, raw, before, highest, "tone0"),
    panel(t(title, { d, root }) + hot, W.after ? raw : scaled, after, highest, "tone1")
  );
  $("scalesay").textContent = t(W.after ? "js.scaling.say.after" : "js.scaling.say", {
    d,
    root,
    deviation: fixed(Math.sqrt(varianceOf(raw)), 1),
    before: percent(Math.max(...before)),
    after: percent(Math.max(...after)),
    sum: fixed(sum(after), 3),
  });
  $("curves").replaceChildren(
    curve("variance", d, ["var", "scaled_var"], [0.3, 2000], [1, 10, 100, 1000], "var_theory"),
    curve("entropy", d, ["entropy_bits_unscaled", "entropy_bits_scaled"], [0, 3], [0, 1, 2, 3]),
    curve("gradient", d, ["softmax_grad_unscaled", "softmax_grad_scaled"], [0, 0.4], [0, 0.2, 0.4])
  );
}

/** What `attncli variance` measures against dₖ, before and after scaling; a line at the slider. */
function curve(name, d, columns, [low, high], ticks, theory) {
  const [width, height, left, right, top, bottom] = [360, 200, 34, 296, 14, 174];
  const unit = theory ? Math.log10 : value => value; // variances are drawn on a logarithmic scale
  const share = value => (unit(Math.max(value, low)) - unit(low)) / (unit(high) - unit(low));
  const y = value => bottom - share(value) * (bottom - top);
  const x = dk => left + (Math.log2(dk) / Math.log2(WIDE)) * (right - left);
  const { dk } = D.curves;
  const line = (column, className) => {
    const points = dk.map((at, i) => `${x(at).toFixed(1)},${y(D.curves[column][i]).toFixed(1)}`);
    return svg("polyline", { points: points.join(" "), class: className });
  };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const at of ticks) picture.append(axis(left, right, y(at)), words(left - 8, y(at) + 4, "end", at));
  for (const at of [1, 4, 16, 64, 256, 1024]) picture.append(words(x(at), height - 6, "middle", at));
  columns.forEach((column, i) => {
    const end = words(right + 8, y(D.curves[column].at(-1)) + 4, "start", "", `tone${i}`);
    end.textContent = i ? "÷ √dₖ" : t("js.scaling.not");
    picture.append(line(column, `line${i}`), end);
  });
  if (theory) picture.append(line(theory, "theory"));
  picture.append(svg("line", { x1: x(d), x2: x(d), y1: top, y2: bottom, class: "now" }));
  picture.ariaLabel = t("js.curve." + name);
  return el("div", { className: "pan" }, text("h3", picture.ariaLabel), picture);
}

function bindScaling() {
  const draws = [["normal", t("js.scaling.normal")], ["ten", "[10, 1, 1]"]];
  choices("draw", draws, W, "draw", drawScaling);
  $("dk").oninput = $("tau").oninput = drawScaling;
  const preset = d => {
    const button = el("button", { type: "button", textContent: `dₖ = ${d}` });
    button.onclick = () => {
      $("dk").value = 10 * Math.log2(d);
      drawScaling();
    };
    return button;
  };
  $("presets").append(...[1, 64, 128, 1024].map(preset));
  $("after").onchange = e => {
    W.after = e.target.checked;
    drawScaling();
  };
}

// ---- Masks --------------------------------------------------------------------------------------
/** For each kind whether query i sees key j of n at slider v, and the options that build it. */
const MASKS = {
  none: [() => true, () => ""],
  causal: [(i, j) => j <= i, () => " --causal"],
  window: [(i, j, v) => j <= i && j >= i - v, v => ` --causal --left-window ${v}`],
  prefix: [(i, j, v) => j <= i || j < v, v => ` --causal --prefix ${v}`],
  padding: [(i, j, v, n) => j < n - v, (v, n) => ` --key-lengths ${n - v}`],
  both: [(i, j, v, n) => j <= i && j < n - v, (v, n) => ` --causal --key-lengths ${n - v}`],
  documents: [
    (i, j, v) => j <= i && i < v === j < v,
    (v, n) => ` --causal --segments ${range(n).map(j => +(j >= v))}`,
  ],
};
const M = { kind: "causal", step: 2, value: 2 };
let markMaskSteps = () => {};

/** Whether the scores are there, of more than a query or two. */
const ownCorner = g => g.corners && Math.min(g.q_len, g.k_len) > 2;
/** Scaled scores of the first eight tokens, and names of both axes: of the head that is looked at, or,
 * where it has none to show, of the example. */
function corner() {
  const [h, g] = [head(), group()];
  if (!ownCorner(g)) return [stages().scaled, indexed("t", X.q.length), indexed("t", X.k.length)];
  const n = Math.min(8, g.q_len, g.k_len);
  const rows = range(n).map(i => Array.from(g.corners.subarray((h.local * n + i) * n).subarray(0, n)));
  const names = axis => range(n).map(i => (axis.tokens && axis.single(i) ? axis.names[i] : String(i)));
  return [rows, names(g.full.q), names(g.full.k)];
}

function drawMask() {
  const [scores, rows, columns] = corner();
  const n = scores.length;
  const v = clamp(M.value, 1, Math.max(1, n - 1));
  const [sees, options] = MASKS[M.kind];
  const mask = scores.map((row, i) => row.map((_, j) => (sees(i, j, v, n) ? 0 : -Infinity)));
  const masked = scores.map((row, i) => row.map((x, j) => x + mask[i][j]));
  const show = (key, m, o) => matrix(t("js.mask." + key), m, { rows, columns, ...o });
  const signed = { digits: 1, span: Math.max(1, ...scores.flat().map(Math.abs)) };
  const shares = (key, m) => show(key, m.map(softmax), { shares: true, hidden: m });
  const zeros = () => show("added", mask, { digits: 0, bare: true });
  const steps = [
    () => [show("scores", scores, signed), sign("→"), shares("before", scores)],
    () => [show("scores", scores, signed), sign("+"), zeros(), sign("="), show("masked", masked, signed)],
    () => [shares("before", scores), zeros(), shares("after", masked)],
  ];
  $("trio").replaceChildren(...steps[M.step]());
  const slider = options(v, n) !== options(v + 1, n);
  $("mparam").hidden = !slider;
  if (slider) $("mname").textContent = t("js.mask.slider." + M.kind);
  $("mval").max = Math.max(1, n - 1);
  $("mvalo").textContent = v;
  const visible = mask.flat().filter(x => x === 0).length;
  const count = { visible, cells: n * n, n };
  $("msay").textContent = [
    t("js.mask.step." + M.step),
    t("js.mask.why." + M.kind),
    t("js.mask.count", count),
    ownCorner(group()) ? t("js.mask.of", { head: $("headname").textContent, n }) : "",
  ].join(" ");
  $("mcmd").textContent = `attncli mask --k-len ${n}${options(v, n)}`;
  markMaskSteps();
}

function bindMasks() {
  const kinds = Object.keys(MASKS).map(kind => [kind, t("js.mask.kind." + kind)]);
  choices("mkind", kinds, M, "kind", drawMask);
  markMaskSteps = walk("m", range(3).map(i => t("js.mask.step." + i)), M, drawMask);
  $("mval").oninput = e => {
    M.value = +e.target.value;
    drawMask();
  };
}

// ---- Softmax ------------------------------------------------------------------------------------
/** To float16: 11 significant bits, ties to even, ∞ from 65520 on. */
function half(x) {
  if (!(Math.abs(x) < 65520)) return x / 0 || x; // ±∞, and NaN as it is
  const apart = 2 ** (Math.max(Math.floor(Math.log2(Math.abs(x))), -14) - 10);
  const shift = 1.5 * 2 ** 52 * apart; // at its size doubles are that far apart
  return x + shift - shift;
}
/** What rounds to each type, and the largest x whose exp is finite in it. */
const TYPES = {
  float16: [half, 11.09],
  float32: [Math.fround, 88.72],
  float64: [x => x, 709.78],
};
const LOGITS = [2, 1, 0.2, -1];
const Z = { type: "float32" };

function drawSoftmax() {
  const shift = +$("shift").value;
  const [round, limit] = TYPES[Z.type];
  const value = v => ((v >= 1e5 && v < Infinity) || (v > 0 && v < 1e-3) ? scientific(v) : fixed(v, 4));
  const table = (way, logits, note) => {
    const exps = logits.map(x => round(Math.exp(x)));
    const total = round(sum(exps));
    const cells = logits.map((x, i) => [fixed(x, 1), value(exps[i]), value(round(exps[i] / total))]);
    const line = row => el("tr", {}, ...row.map(v => text("td", v, /NaN|∞/.test(v) ? "bad" : "")));
    const names = ["x", "exp", "weight"].map(column => t(`js.softmax.${way}.` + column));
    const top = names.map(name => el("th", { scope: "col", textContent: name }));
    const figures = el("table", { className: "mx wide" }, el("thead", {}, el("tr", {}, ...top)));
    figures.append(el("tbody", {}, ...cells.map(line)));
    const facts = el("p", { className: "facts" }, el("span", {}, `${t("js.softmax.sum")} `));
    facts.firstChild.append(text("b", value(total)));
    facts.append(text("span", total === Infinity ? t("js.softmax.over", { limit }) : note, "bad"));
    return el("div", { className: "pan" }, text("h3", t("js.softmax." + way)), figures, facts);
  };
  const x = LOGITS.map(logit => round(round(logit) + shift));
  const off = LOGITS.some((logit, i) => Math.abs(x[i] - shift - logit) > 1e-3);
  const lost = off ? t("js.softmax.rounded", { type: Z.type }) : "";
  const stable = x.map(a => round(a - Math.max(...x)));
  $("shiftv").textContent = shift;
  $("soft").replaceChildren(table("naive", x, ""), table("stable", stable, lost));
}

function bindSoftmax() {
  const types = Object.keys(TYPES).map(name => [name, name]);
  choices("dtype", types, Z, "type", drawSoftmax);
  $("shift").oninput = drawSoftmax;
}
