"use strict";
// What the other files share: elements, numbers as text, colours, groups of buttons.
// The files of this folder are joined in the order of their names, inside one function. The page
// allows no style attributes and no HTML from strings: styles are set by property, text as text.

const $ = id => document.getElementById(id);
const root = document.documentElement;
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const range = n => Array.from({ length: n }, (_, i) => i);
const sum = list => list.reduce((a, b) => a + b, 0);
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** An element with properties, or attributes where it has no such property, and children. */
function el(tag, props = {}, ...children) {
  const e = document.createElement(tag);
  for (const name in props) name in e ? (e[name] = props[name]) : e.setAttribute(name, props[name]);
  e.append(...children);
  return e;
}
const text = (tag, textContent, className = "") => el(tag, { textContent, className });

/** A formula, in which what follows a _ is set lower. */
const formula = words => words.split(/_(\w)/).map((part, i) => (i % 2 ? text("sub", part) : part));

/** The same for SVG, where all are attributes. */
function svg(tag, attributes, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) e.setAttribute(name, attributes[name]);
  e.append(...children);
  return e;
}

/** Moves an element to a place in pixels, and gives it a size if there is one. */
function place(e, left, top, width, height) {
  Object.assign(e.style, { left: `${left}px`, top: `${top}px` });
  if (width !== undefined) Object.assign(e.style, { width: `${width}px`, height: `${height}px` });
}

// ---- Numbers: a true minus, and no digits that are not there ------------------------------------
function fixed(x, digits = 2) {
  if (x === null || Number.isNaN(x)) return x === null ? "–" : "NaN";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  return x.toFixed(digits).replace(/^-(?=.*[1-9])/, "−").replace("-", "");
}
function scientific(x) {
  const [digits, power] = x.toExponential(1).split("e");
  const raised = [...String(+power)].map(c => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  return `${digits.replace("-", "−")}·10${raised.join("")}`;
}
const percent = x => `${Math.round(100 * x)} %`;

// ---- Colours ------------------------------------------------------------------------------------
const system = matchMedia("(prefers-color-scheme: dark)");
const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");
const bytesOfHex = hex => Uint8Array.from(hex.match(/../g), pair => parseInt(pair, 16));

/** Place of u (0 to 1) on a ramp of 256 colours, as the index of its red byte. */
const placeOf = u => 3 * clamp(Math.round(u * 255), 0, 255);
const colour = (ramp, u) => `rgb(${ramp.subarray(placeOf(u), placeOf(u) + 3)})`;
/** Black or white, which of both is the easier to read on a ramp at u: at least 4.5 to 1. */
function inkOn(ramp, u) {
  const linear = c => (c > 10 ? ((c / 255 + 0.055) / 1.055) ** 2.4 : c / 3295);
  const [r, g, b] = Array.from(ramp.subarray(placeOf(u), placeOf(u) + 3), linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// ---- Keys and buttons ---------------------------------------------------------------------------
/** [rows down, columns across] that a key moves; those of FAR go to the end. */
const ARROWS = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
const FAR = { Home: [0, -1e9], End: [0, 1e9], PageUp: [-1e9, 0], PageDown: [1e9, 0] };
const moveOf = e => (e.ctrlKey || e.metaKey || e.altKey ? undefined : ARROWS[e.key] ?? FAR[e.key]);

/** Fills a box with buttons for the values of `state[field]`, moved among by arrow keys, and returns
 * what marks the current one. `options`: [value, text, name if it says more]; `role`: or "tab". */
function choices(id, options, state, field, redraw, role = "radio") {
  const box = $(id);
  const mark = () =>
    [...box.children].forEach((button, i) => {
      const on = options[i][0] === state[field];
      button.setAttribute(role === "tab" ? "aria-selected" : "aria-checked", on);
      button.tabIndex = on ? 0 : -1;
    });
  const button = ([value, textContent, ariaLabel = null]) => {
    const onclick = () => {
      state[field] = value;
      mark();
      redraw();
    };
    return el("button", { type: "button", role, textContent, ariaLabel, title: ariaLabel ?? "", onclick });
  };
  box.replaceChildren(...options.map(button));
  box.onkeydown = e => {
    const move = moveOf(e);
    if (!move) return;
    e.preventDefault();
    const to = [...box.children].indexOf(document.activeElement) + move[0] + move[1];
    const next = box.children[Math.abs(to) > 99 ? clamp(to, 0, options.length - 1) : to];
    (next ?? box.children[to < 0 ? options.length - 1 : 0]).focus();
    document.activeElement.click();
  };
  mark();
  return mark;
}

/** A walk through `names` by numbered dots and Back, Next and Reset: `state.step` is where it is.
 * Returns what marks that; elements are named by the prefix. */
function walk(prefix, names, state, redraw) {
  const last = names.length - 1;
  const options = names.map((name, i) => [i, i + 1, t("js.steps.step", { i: i + 1, name })]);
  const markDots = choices(`${prefix}dots`, options, state, "step", redraw, "tab");
  const go = by => () => {
    state.step = clamp(state.step + by, 0, last);
    redraw();
  };
  $(`${prefix}back`).onclick = go(-1);
  $(`${prefix}next`).onclick = go(1);
  $(`${prefix}reset`).onclick = go(-1e9);
  return () => {
    $(`${prefix}back`).disabled = state.step === 0;
    $(`${prefix}next`).disabled = state.step === last;
    [...$(`${prefix}dots`).children].forEach((dot, i) => dot.classList.toggle("done", i < state.step));
    markDots();
  };
}
