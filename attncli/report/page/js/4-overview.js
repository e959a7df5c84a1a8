"use strict";
// All heads: layers down, heads across, as pictures or as one number each; and the choice of one.

/** What a head can be shown by: its column, digits, and the value at which the ramp ends. */
const METRICS = {
  entropy: ["entropy_bits_mean", 1, Math.log2(Math.max(2, ...GROUPS.map(g => g.k_len)))],
  sink: ["sink_mass_mean", 2, 1],
  largest: ["max_weight_mean", 2, 1],
  distance: ["distance_mean", 1, Math.max(1, ...GROUPS.map(g => g.k_len / 3))],
  logit: ["max_logit", 0, Math.max(1, ...D.heads.max_logit)],
};
const WIDEST = Math.max(...GROUPS.map(g => g.heads));
const thumbs = []; // the buttons, in the order of HEADS

/** Class and text of a head's label; a mixed head has those of the nearest label, faintly. */
const labelText = i => (i === null ? "–" : t("label." + D.labels[i]));
const labelClass = h => (h.nearest === null ? `c${h.label}` : `c${h.nearest} faint`);
function labelOf(h) {
  if (h.nearest === null) return labelText(h.label);
  return t("js.head.nearest", { label: labelText(h.label), nearest: labelText(h.nearest) });
}

function buildGrid() {
  const row = (...cells) => el("div", { className: "row", role: "row" }, ...cells);
  const cell = (role, className, textContent = "") => el("span", { role, className, textContent });
  const headings = range(WIDEST).map(i => cell("columnheader", "gh", i));
  $("grid").append(row(cell("gridcell", "gl"), ...headings));
  for (const g of GROUPS) {
    const own = HEADS.slice(g.first, g.first + g.heads).map(headButton);
    const rest = range(WIDEST - g.heads).map(() => cell("gridcell", ""));
    const name = cell(layerOf(g) ? "rowheader" : "gridcell", "gl", layerOf(g));
    $("grid").append(row(name, ...own, ...rest));
  }
  $("grid").onkeydown = e => {
    const move = moveOf(e);
    if (!move) return;
    e.preventDefault();
    const g = GROUPS[clamp(head().group + move[0], 0, GROUPS.length - 1)];
    select(g.first + clamp(head().local + move[1], 0, g.heads - 1));
    thumbs[S.at].focus();
  };
}

function headButton(h) {
  const title = t("js.head.title", {
    name: nameOf(h),
    label: labelOf(h),
    entropy: fixed(h.entropy_bits_mean),
    sink: fixed(h.sink_mass_mean),
  });
  const button = el("button", { type: "button", role: "gridcell", tabIndex: -1, title, ariaLabel: title });
  button.className = `cell ${labelClass(h)}`;
  button.append(el("canvas"), el("b"));
  button.onclick = () => {
    select(h.i);
    $("head").scrollIntoView({ block: "start", behavior: still.matches ? "auto" : "smooth" });
  };
  thumbs.push(button);
  return button;
}

/** Cells as wide as there is room for, from 22 to 92 px; with less the grid scrolls sideways. */
function layoutGrid() {
  const room = $("grid").parentElement.clientWidth;
  const small = room < 500;
  const [lead, gap] = small ? [30, 2] : [72, 5];
  const side = clamp(Math.floor((room - lead) / WIDEST - gap), 22, 92);
  $("grid").style.gridTemplateColumns = `minmax(${lead}px, max-content) repeat(${WIDEST}, ${side}px)`;
  const cells = Math.max(...GROUPS.map(g => g.small.k.count));
  $("grid").classList.toggle("fine", cells > side * (devicePixelRatio || 1));
  const edges = $("grid").querySelectorAll(".row ~ .row > .gl");
  GROUPS.forEach((g, i) => (edges[i].textContent = small ? g.short : layerOf(g)));
}

function drawGrid() {
  const ramp = RAMP[theme()];
  for (const h of HEADS) {
    const [canvas, figure] = thumbs[h.i].children;
    const { small } = GROUPS[h.group];
    thumbs[h.i].classList.toggle("off", S.label !== null && h.label !== S.label);
    figure.textContent = "";
    if (S.metric === "pictures") paint(canvas, h, small, "mean", scaleOf(h, small));
    else {
      const [column, digits, top] = METRICS[S.metric];
      const u = 0.92 * clamp((h[column] ?? 0) / top, 0, 1);
      [canvas.width, canvas.height] = [1, 1];
      const context = canvas.getContext("2d");
      context.fillStyle = colour(ramp, u);
      context.fillRect(0, 0, 1, 1);
      figure.textContent = fixed(h[column], digits).replace(/^0\.(?=..)/, "."); // .24, but 0.2
      figure.style.color = inkOn(ramp, u);
    }
  }
}

/** A button for each label that occurs; pressed, it dims the heads of all others. */
function buildChips() {
  const chip = i => {
    const count = D.heads.label.filter(label => label === i).length;
    const button = el("button", { type: "button", className: `c${i}`, ariaPressed: false });
    button.textContent = `${labelText(i)} ${count}`;
    button.onclick = () => {
      S.label = S.label === i ? null : i;
      for (const other of $("chips").children) other.ariaPressed = other === button && S.label === i;
      drawGrid();
    };
    return button;
  };
  $("chips").append(...range(D.labels.length).filter(i => D.heads.label.includes(i)).map(chip));
}

/** Looks at a head: all that is about one head follows. */
function select(i, byUser = true) {
  S.at = i;
  const [h, g, v] = [head(), group(), view()];
  thumbs.forEach((button, j) => {
    button.setAttribute("aria-selected", j === i);
    button.tabIndex = j === i ? 0 : -1;
  });
  $("headname").textContent = nameOf(h);
  const facts = {
    entropy: fixed(h.entropy_bits_mean),
    keys: fixed(h.effective_keys_mean, 1),
    sink: h.sink_mass_mean === null ? "–" : percent(h.sink_mass_mean),
    first: t(D.sink_keys > 1 ? "js.head.firsts" : "js.head.first", { keys: D.sink_keys }),
  };
  const label = text("span", labelOf(h), `dot ${labelClass(h)}`);
  $("headlabel").replaceChildren(label, t("js.head.facts", facts));
  if (S.pinned) [S.q, S.k] = [Math.min(S.q, v.q.count - 1), Math.min(S.k, v.k.count - 1)];
  else [S.q, S.k] = telling(v, h);
  $("pool").hidden = !v.pooled;
  layoutMap();
  drawMap();
  cursor();
  drawShapes();
  drawMask();
  if (byUser) history.replaceState(null, "", `#head=${h.group},${h.head}`);
}

/** The largest weight that is neither on the first key nor on the query itself. */
function telling({ k }, h) {
  let [best, where] = [0, [0, 0]];
  view().weights(h.local).forEach((w, i) => {
    const [row, column] = [Math.floor(i / k.count), i % k.count];
    if (w > best && column > 0 && row !== column) [best, where] = [w, [row, column]];
  });
  return where;
}

function drawHeads() {
  drawGrid();
  drawMap();
  cursor();
}
const turn = by => select((S.at + by + HEADS.length) % HEADS.length);

function bindOverview() {
  const known = Object.keys(METRICS).filter(name => D.heads[METRICS[name][0]].some(x => x !== null));
  const metrics = ["pictures", ...known].map(name => [name, t("js.metric." + name)]);
  choices("metric", metrics, S, "metric", drawGrid);
  const scales = ["log", "sqrt", "linear", "even"].map(name => [name, t("js.scale.name." + name)]);
  choices("scale", scales, S, "scale", drawHeads);
  const pools = ["mean", "max"].map(name => [name, t("js.pool." + name)]);
  choices("pool", pools, S, "how", drawHeads);
  $("skip").oninput = e => {
    S.skip = clamp(Math.floor(+e.target.value) || 0, 0, 8);
    drawHeads();
  };
  $("prev").onclick = () => turn(-1);
  $("next").onclick = () => turn(1);
}
