"use strict";
// What the page was given (see page.py): JSON with numbers packed in base64, and the page's words.

const D = JSON.parse($("data").textContent);
root.classList.add("on"); // what needs scripts appears

/** The page's text of a key, {names} filled in. */
const t = (key, values = {}) => D.strings[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
/** The same with elements in the places of {names}: a list of nodes. */
const phrase = (key, nodes) =>
  D.strings[key].split(/\{(\w+)\}/).map((part, i) => (i % 2 ? nodes[part] : part));

const RAMP = { light: bytesOfHex(D.ramps.light), dark: bytesOfHex(D.ramps.dark) };
const SIGNED = {
  light: bytesOfHex(D.ramps.diverging_light),
  dark: bytesOfHex(D.ramps.diverging_dark),
};

// ---- Packed numbers -----------------------------------------------------------------------------
const decode = base64 => Uint8Array.from(atob(base64), c => c.charCodeAt(0));
const float32 = base64 => new Float32Array(decode(base64).buffer);
/** "u2sqrt": 16 bits that hold the root of a weight, so that small ones keep their digits. */
const rooted = base64 =>
  Float32Array.from(new Uint16Array(decode(base64).buffer), u =>
    u === 65535 ? -1 : u === 65534 ? NaN : (u / 65533) ** 2
  );
const once = make => {
  let made;
  return () => (made ??= make());
};

/** Token names as they can be shown: spaces and breaks of tokenizers get a sign. */
const shown = token =>
  token.replace(/^[Ġ▁ ]/, "␣").replace(/[\nĊ]/g, "⏎").replace(/[\tĉ]/g, "⇥") || "∅";

/** The bins of queries or keys: position `edges[i]` up to `edges[i + 1]` is bin i. */
class Axis {
  constructor(edges, tokens) {
    this.count = edges.length - 1;
    this.edges = edges;
    this.tokens = tokens; // of each bin the first twelve, or null
    this.names = range(this.count).map(i => this.name(i));
  }
  single(i) {
    return this.edges[i + 1] - this.edges[i] === 1;
  }
  name(i) {
    if (!this.single(i)) return `${this.edges[i]}–${this.edges[i + 1] - 1}`;
    return this.tokens ? shown(this.tokens[i][0]) : String(this.edges[i]);
  }
  /** " 5" behind a token's name, nothing where the name is the position already. */
  position(i) {
    return this.tokens && this.single(i) ? ` ${this.edges[i]}` : "";
  }
  /** What a bin of several tokens holds. */
  inside(i) {
    if (!this.tokens || this.single(i)) return "";
    const more = this.edges[i + 1] - this.edges[i] > this.tokens[i].length;
    return this.tokens[i].map(shown).join(" ") + (more ? " …" : "");
  }
}

/** Maps of the heads of a group at one size: its own, or that of small pictures. */
class View {
  constructor(maps, q, k) {
    Object.assign(this, { q, k, size: q.count * k.count });
    this.exact = maps.encoding === "f4";
    this.pooled = Boolean(maps.max);
    this.heads = maps.heads ?? null; // of which heads there are maps; null: of all
    const unpack = plane => once(() => (this.exact ? float32 : rooted)(maps[plane]));
    this.planes = { mean: unpack("mean"), max: this.pooled ? unpack("max") : unpack("mean") };
  }
  has(head) {
    return this.heads === null || this.heads.includes(head);
  }
  /** What an array that holds so many numbers of each of these heads has of one of them. */
  part(values, size, head) {
    const at = size * (this.heads ? this.heads.indexOf(head) : head);
    return values.subarray(at, at + size);
  }
  /** Weights of a head, row by row; −1 where the mask hides a cell. */
  weights(head, how = "mean") {
    return this.part(this.planes[how](), this.size, head);
  }
}

/** Heads that share their lengths and mask. Maps are unpacked when they are first looked at. */
class Group {
  constructor(given) {
    Object.assign(this, given);
    const tokens = axis => (given.tokens[axis] === null ? null : D.tokens[given.tokens[axis]]);
    const axis = name => new Axis(given.edges[name], tokens(name));
    this.full = new View(given.maps, axis("q"), axis("k"));
    const { thumbs } = given;
    const small = name => new Axis(thumbs.edges[name], null);
    this.small = thumbs ? new View(thumbs, small("q"), small("k")) : this.full;
    this.seen = float32(given.keys);
    this.entropies = float32(given.rows);
    this.masses = float32(given.mass);
    this.corners = given.corner && float32(given.corner);
  }
  view(head) {
    return this.full.has(head) ? this.full : this.small;
  }
  /** How many keys a query of this row of a view sees, mean over the row's queries. */
  visible(head, view, row) {
    const { q } = this.full;
    const bin = view === this.full ? row : q.edges.findLastIndex(edge => edge <= view.q.edges[row]);
    return this.seen[this.seen.length > q.count ? head * q.count + bin : bin];
  }
  entropiesOf(head) {
    return this.full.part(this.entropies, this.full.q.count, head);
  }
  massesOf(head) {
    return this.full.part(this.masses, this.full.k.count, head);
  }
}

const GROUPS = D.groups.map(given => new Group(given));
/** All heads, in the order of groups, as records; `local` is the place in the group. */
const HEADS = D.heads.head.map((_, i) => {
  const h = Object.fromEntries(Object.entries(D.heads).map(([name, column]) => [name, column[i]]));
  return { ...h, i, local: i - GROUPS[h.group].first };
});
const layerOf = g => (/^\d+$/.test(g.short) ? t("js.layer", { name: g.short }) : g.short);
/** "layer 3, head 1", without a layer where the group has no name. */
const nameOf = h => {
  const layer = layerOf(GROUPS[h.group]);
  return t(layer ? "js.head.name" : "js.head.only", { layer, head: h.head });
};

/** What is looked at: head `at` of HEADS, query and key, and how it is coloured. */
const S = { at: D.start, q: 0, k: 0, pinned: false, scale: "log", how: "mean", skip: 0 };
Object.assign(S, { metric: "pictures", label: null });
const head = () => HEADS[S.at];
const group = () => GROUPS[head().group];
const view = () => group().view(head().local);

/** A weight as text, with no more digits than its bits carry. */
function weightText(w, exact = view().exact) {
  if (!(w > 0)) return w === 0 ? "0" : w < 0 ? t("js.masked") : "NaN";
  const digits = exact ? 4 : 3;
  const figures = w >= 10 ** -digits ? w.toFixed(digits) : scientific(w);
  return exact ? figures : w < 1e-7 ? "< 10⁻⁷" : `≈ ${figures}`;
}
