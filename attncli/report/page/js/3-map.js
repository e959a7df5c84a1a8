"use strict";
// One head: the map of its weights, the edges, and what is known of the cell that is looked at.

// ---- Scales: weight → place on a ramp, and the ticks of the legend ------------------------------
const plain = x => (x > 0 && x < 1e-3 ? scientific(x) : String(+x.toPrecision(2)));

/** How a view's weights are coloured: `at(w, keys)` is from 0 to 1; `keys` is what the row sees. */
function scaleOf(h, view, how) {
  if (S.scale === "log") return logScale(GROUPS[h.group].k_len);
  if (S.scale === "even") {
    const ticks = [[0, "1/32"], [0.2, "1/8"], [0.5, t("js.scale.tick")], [0.8, "8"], [1, "32 ×"]];
    return { at: (w, keys) => (w > 0 ? 0.5 + Math.log2(w * keys) / 10 : 0), ramp: SIGNED, ticks };
  }
  let top = 0;
  view.weights(h.local, how).forEach((w, i) => {
    if (w > top && i % view.k.count >= S.skip) top = w;
  });
  top ||= 1;
  const power = S.scale === "sqrt" ? 0.5 : 1;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map(u => [u, plain(u ** (1 / power) * top)]);
  return { at: w => (Math.max(w, 0) / top) ** power, ramp: RAMP, ticks };
}

/** From a tenth of even attention to 1: the floor means something, and keeps noise out. */
function logScale(keys) {
  const floor = 0.1 / keys;
  const at = w => (w > floor ? 1 - Math.log(w) / Math.log(floor) : 0);
  const even = at(1 / keys);
  const ticks = [[even, t("js.scale.even", { weight: plain(1 / keys) })]];
  if (even > 0.4) ticks.unshift([0, `≤ ${plain(floor)}`]); // else the two texts would meet
  for (const w of [0.001, 0.01, 0.1, 1]) if (at(w) - even > 0.2) ticks.push([at(w), plain(w)]);
  return { at, ramp: RAMP, ticks };
}

/** Draws a head into a canvas, a pixel a cell. Masked cells are a faint grey, never a weight's
 * colour; keys that are skipped fade. */
function paint(canvas, h, view, how, scale) {
  const weights = view.weights(h.local, how);
  const ramp = scale.ramp[theme()];
  const image = new ImageData(view.k.count, view.q.count);
  for (let q = 0, i = 0; q < view.q.count; q++) {
    const keys = GROUPS[h.group].visible(h.local, view, q);
    for (let k = 0; k < view.k.count; k++, i++) {
      const from = placeOf(scale.at(weights[i], keys));
      const is = weights[i] >= 0; // otherwise masked, or not a number
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = is ? ramp[from + c] : 128;
      image.data[4 * i + 3] = is ? (k < S.skip ? 70 : 255) : 26;
    }
  }
  [canvas.width, canvas.height] = [view.k.count, view.q.count];
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// ---- Places -------------------------------------------------------------------------------------
let places = null; // of the map as it is laid out, in CSS pixels
const measure = el("canvas").getContext("2d");
measure.font = "700 11px system-ui, sans-serif"; // as that of the cell that is looked at
const longest = names => Math.min(84, Math.max(...names.map(n => measure.measureText(n).width)));

function layoutMap() {
  const { q, k } = view();
  const width = $("map").clientWidth;
  const narrow = width < 480;
  const left = Math.ceil(Math.min(longest(q.names), narrow ? 56 : 84) + 8);
  const above = Math.ceil(longest(k.names) * 0.82 + 14); // names stand at 55°
  const [strip, gap, ratio] = [narrow ? 12 : 18, 5, devicePixelRatio || 1];
  const room = Math.min((width - left - strip - gap) / k.count, k.count > 8 ? 44 : 68);
  const cell = Math.max(1, Math.floor(room * ratio)) / ratio; // whole pixels of the device
  const [across, down, top] = [cell * k.count, cell * q.count, above + strip + gap];
  places = { left, top, cell, strip, ratio };
  $("map").style.height = `${top + down + 2}px`;
  place($("cells"), left, top, across, down);
  place($("top"), left, above, across, strip);
  place($("right"), left + across + gap, top, strip, down);
  for (const e of [$("legend"), $("ticks")]) e.style.marginLeft = `${left}px`;
  const every = Math.ceil(12 / cell); // so that each name has 12 px
  const label = (names, x, y) =>
    names.map((name, i) => {
      const e = el("span", { textContent: name, hidden: i % every > 0 });
      place(e, x(i), y(i));
      return e;
    });
  $("xlab").replaceChildren(...label(k.names, i => left + (i + 0.5) * cell, () => above - 10.5));
  $("ylab").replaceChildren(...label(q.names, () => 0, i => top + (i + 0.5) * cell - 7));
  for (const e of $("ylab").children) e.style.width = `${left - 6}px`;
}

// ---- Drawing ------------------------------------------------------------------------------------
function drawMap() {
  const [h, g, v] = [head(), group(), view()];
  const scale = scaleOf(h, v, S.how);
  paint($("cells"), h, v, S.how, scale);
  if (places.cell >= 34) figures(h, v, scale);
  for (const id of ["top", "right"]) $(id).hidden = v !== g.full; // small pictures have none
  if (v === g.full) {
    const masses = g.massesOf(h.local);
    bars($("top"), masses, Math.max(...masses.subarray(S.skip).filter(x => x >= 0)), true);
    bars($("right"), g.entropiesOf(h.local), Math.log2(Math.max(2, ...g.seen)));
  }
  const ramp = scale.ramp[theme()];
  $("legend").style.backgroundImage =
    `linear-gradient(to right, ${range(33).map(i => colour(ramp, i / 32))})`;
  $("ticks").replaceChildren(
    ...scale.ticks.map(([u, words]) => {
      const e = text("span", words, u === 0 ? "first" : u === 1 ? "last" : "");
      e.style.left = `${100 * u}%`;
      return e;
    })
  );
}

/** Where cells have room for figures the map is drawn anew, as fine as the screen can show it. */
function figures(h, v, scale) {
  const [canvas, ratio, ramp] = [$("cells"), places.ratio, scale.ramp[theme()]];
  const side = Math.round(places.cell * ratio);
  const small = canvas.cloneNode();
  small.getContext("2d").drawImage(canvas, 0, 0);
  [canvas.width, canvas.height] = [side * v.k.count, side * v.q.count];
  const context = canvas.getContext("2d");
  Object.assign(context, { imageSmoothingEnabled: false, textAlign: "center", textBaseline: "middle" });
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  context.font = `${Math.round(11 * ratio)}px system-ui, sans-serif`;
  const skipped = getComputedStyle(root).getPropertyValue("color");
  v.weights(h.local, S.how).forEach((w, i) => {
    if (!(w >= 0.005)) return;
    const [q, k] = [Math.floor(i / v.k.count), i % v.k.count];
    const u = scale.at(w, group().visible(h.local, v, q));
    context.fillStyle = k < S.skip ? skipped : inkOn(ramp, u);
    context.fillText(w.toFixed(2).replace(/^0/, ""), (k + 0.5) * side, (q + 0.5) * side);
  });
}

/** Bars along an edge of the map: upwards over the columns, or rightwards beside the rows. */
function bars(canvas, values, most, upwards = false) {
  const { ratio, strip } = places;
  const [cell, thick] = [places.cell * ratio, Math.round(strip * ratio)];
  const long = Math.round(cell * values.length);
  [canvas.width, canvas.height] = upwards ? [long, thick] : [thick, long];
  const context = canvas.getContext("2d");
  context.fillStyle = colour(RAMP[theme()], 0.62);
  values.forEach((value, i) => {
    const size = value > 0 && most > 0 ? Math.min(1, value / most) * thick : 0;
    const from = Math.round(i * cell);
    const wide = Math.max(1, Math.round((i + 1) * cell) - from - (cell > 3));
    context.fillRect(...(upwards ? [from, thick - size, wide, size] : [0, from, size, wide]));
  });
}

// ---- The cell that is looked at -----------------------------------------------------------------
/** Marks cell (S.q, S.k) and its names, and says what is known of it; aloud if `aloud`. */
function cursor(aloud = false) {
  const { left, top, cell } = places;
  $("cursor").hidden = false;
  place($("cursor"), left + S.k * cell, top + S.q * cell, cell, cell);
  $("cursor").classList.toggle("pin", S.pinned);
  const every = Math.ceil(12 / cell);
  for (const [box, at] of [[$("xlab"), S.k], [$("ylab"), S.q]])
    [...box.children].forEach((name, i) => {
      name.classList.toggle("hot", i === at);
      const near = Math.abs(i - at) < every; // its name would lie over this one
      name.hidden = i !== at && (i % every > 0 || near);
    });
  readout(aloud);
}

const token = (name, mine = false) => text("span", name, mine ? "tok me" : "tok");

/** The largest of some weights as bars with their names; `mine` is the one that is looked at. */
function ranking(weights, names, count, mine) {
  const order = range(weights.length).sort((a, b) => weights[b] - weights[a]).slice(0, count);
  const line = i => {
    const bar = el("i");
    bar.style.width = `${Math.max(0.5, (100 * weights[i]) / weights[order[0]])}%`;
    return [token(names[i], i === mine), bar, text("span", weightText(weights[i]))];
  };
  return el("div", { className: "bars" }, ...order.filter(i => weights[i] > 0).flatMap(line));
}

/** A number as text; a dash for what no query has, which is NaN in the data. */
const known = (x, write) => (Number.isNaN(x) ? "–" : write(x));

function readout(aloud) {
  const [h, g, v] = [head(), group(), view()];
  const { q, k } = v;
  const weights = v.weights(h.local, S.how);
  const row = weights.subarray(S.q * k.count, (S.q + 1) * k.count);
  const column = range(q.count).map(i => weights[i * k.count + S.k]);
  const [w, keys] = [row[S.k], g.visible(h.local, v, S.q)];
  const facts = [];
  const fact = (name, value) => facts.push(text("dt", name), text("dd", value));
  if (w >= 0) {
    const even = w * keys;
    fact(t("js.read.even"), w > 0 && even < 0.001 ? "< 0.001" : String(+even.toPrecision(3)));
    const among = row.filter(x => x >= 0).length;
    fact(t("js.read.rank"), t("js.read.of", { a: 1 + row.filter(x => x > w).length, b: among }));
  } else if (w < 0) facts.push(text("dt", t("js.read.hidden"), "wide"));
  if (v.pooled) fact(t("js.read.largest"), weightText(v.weights(h.local, "max")[S.q * k.count + S.k]));
  if (v === g.full) {
    const bits = known(g.entropiesOf(h.local)[S.q], fixed);
    const most = fixed(Math.log2(Math.max(1, keys)));
    const single = q.single(S.q);
    fact(t(single ? "js.read.entropy" : "js.read.entropies"), t("js.read.bits", { a: bits, b: most }));
    const mean = known(g.massesOf(h.local)[S.k], x => weightText(x, true));
    fact(t(k.single(S.k) ? "js.read.mean" : "js.read.means"), mean);
  } else facts.push(text("dt", t("js.read.small"), "wide note"));
  const pair = [token(q.names[S.q]), `${q.position(S.q)} → `, token(k.names[S.k]), k.position(S.k)];
  const inside = [q.inside(S.q), k.inside(S.k)].filter(Boolean).join("  →  ");
  $("read").replaceChildren(
    el("p", { className: "pair" }, ...pair),
    text("p", inside, "inside"),
    text("div", weightText(w), "big"),
    el("dl", {}, ...facts),
    el("h3", {}, ...phrase("js.read.looks", { token: token(q.names[S.q]) })),
    ranking(row, k.names, 8, S.k),
    el("h3", {}, ...phrase("js.read.seen", { token: token(k.names[S.k]) })),
    ranking(column, q.names, 4, S.q)
  );
  const rows = q.single(S.q) ? ` --rows ${q.edges[S.q]}` : "";
  const { compute, entropy } = g.commands; // given weights are not computed; tensors have no command
  const command = compute ?? entropy;
  $("hcmd").parentElement.hidden = !command;
  $("hcmd").textContent =
    `${command} --head-index ${h.head} ${compute ? `--stage weights${rows}` : "--per-row"}`;
  const said = { query: q.names[S.q], key: k.names[S.k], weight: weightText(w) };
  if (aloud) $("live").textContent = t("js.read.aloud", said);
}

// ---- Pointer and keys ---------------------------------------------------------------------------
function bindMap() {
  const inMap = (q, k) => [clamp(q, 0, view().q.count - 1), clamp(k, 0, view().k.count - 1)];
  const under = e => {
    const box = $("cells").getBoundingClientRect();
    const { cell } = places;
    return inMap(Math.floor((e.clientY - box.top) / cell), Math.floor((e.clientX - box.left) / cell));
  };
  let frame = 0;
  $("map").onpointermove = e => {
    const [q, k] = under(e);
    if (S.pinned || (q === S.q && k === S.k)) return;
    [S.q, S.k] = [q, k];
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => cursor());
  };
  $("map").onclick = e => {
    const [q, k] = under(e);
    S.pinned = !(S.pinned && q === S.q && k === S.k);
    [S.q, S.k] = [q, k];
    cursor(true);
  };
  $("map").onkeydown = e => {
    const move = moveOf(e);
    if (move) [S.q, S.k] = inMap(S.q + move[0], S.k + move[1]);
    else if (e.key === "Enter" || e.key === " ") S.pinned = !S.pinned;
    else if (e.key === "Escape") S.pinned = false;
    else return;
    e.preventDefault();
    cursor(true);
  };
}
