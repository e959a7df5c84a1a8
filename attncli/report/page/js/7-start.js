"use strict";
// The page as a whole: theme, keys that hold everywhere, the order of the table, and the start.

function drawAll() {
  drawHeads();
  drawSteps();
  drawMask();
}

/** Theme: as the system has it, then dark, then light. */
function showTheme() {
  const chosen = root.dataset.theme || "system";
  $("theme").textContent = { system: "◐", dark: "☾", light: "☀" }[chosen];
  $("theme").ariaLabel = $("theme").title = t("js.theme." + chosen);
}
$("theme").onclick = () => {
  const next = { system: "dark", dark: "light", light: "" }[root.dataset.theme || "system"];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  showTheme();
  drawAll();
};
system.addEventListener("change", drawAll);

$("helpbutton").onclick = () => $("help").showModal();
document.addEventListener("keydown", e => {
  const typing = e.target.matches("input[type=number]") || e.ctrlKey || e.metaKey || e.altKey;
  if (typing || $("help").open) return;
  if (e.key === "[") turn(-1);
  if (e.key === "]") turn(1);
  if (e.key === "?") $("help").showModal();
});

/** Headings of the table sort it: the largest first, then, pressed again, the smallest. */
function bindTable() {
  const body = $("table").tBodies[0];
  const headings = [...$("table").tHead.rows[0].cells];
  const words = new Intl.Collator(undefined, { numeric: true });
  headings.forEach((heading, column) => {
    const cell = row => row.cells[column].textContent.trim().replace("−", "-");
    const figure = row => (/\d/.test(cell(row)) ? parseFloat(cell(row)) : -Infinity); // – last
    const compare = heading.classList.contains("n")
      ? (a, b) => figure(a) - figure(b) || 0
      : (a, b) => words.compare(cell(a), cell(b));
    const onclick = () => {
      const down = heading.ariaSort !== "descending";
      for (const other of headings) other.ariaSort = null;
      heading.ariaSort = down ? "descending" : "ascending";
      body.append(...[...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b))));
    };
    const button = el("button", { type: "button", textContent: heading.textContent, onclick });
    heading.replaceChildren(button);
  });
}

/** The head that the address names, #head=GROUP,HEAD; −1 if it names none. */
function headOfAddress() {
  const [, layer, number] = /head=(\d+),(\d+)/.exec(location.hash) ?? [];
  return HEADS.findIndex(h => h.group === +layer && h.head === +number);
}

showTheme();
buildGrid();
buildChips();
bindOverview();
bindMap();
bindSteps();
bindMasks();
bindScaling();
bindSoftmax();
bindTable();
layoutGrid();
select(headOfAddress() < 0 ? D.start : headOfAddress(), false);
drawGrid();
drawSteps();
drawScaling();
drawSoftmax();
window.addEventListener("hashchange", () => headOfAddress() < 0 || select(headOfAddress()));
let waiting = 0;
new ResizeObserver(() => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    layoutGrid();
    layoutMap();
    drawMap();
    cursor();
  }, 60);
}).observe(document.body);
window.attncli = { D, S, T, GROUPS, HEADS, select }; // for whoever looks from a console, and tests
