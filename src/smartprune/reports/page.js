"use strict";
// The script of every page: colours, copy buttons and curves. block_map.js follows in the same script.

const id = (name) => document.getElementById(name);
const root = document.documentElement;
const data = JSON.parse(id("data").textContent);

// light and dark
const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
const listeners = [];
const remember = (value) => {
  try {
    localStorage.setItem("smartprune-theme", value);
  } catch {
    /* the browser blocks storage */
  }
};
try {
  const kept = localStorage.getItem("smartprune-theme");
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
} catch {
  /* the browser blocks storage */
}
const theme = id("theme");
const updateTheme = () => {
  theme.textContent = dark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
  listeners.forEach((call) => call());
};
theme.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  remember(root.dataset.theme);
  updateTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", updateTheme);

// copy buttons; a page opened from a file has no clipboard, so its text is selected instead
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const from = id(button.dataset.from),
      words = button.textContent;
    try {
      await navigator.clipboard.writeText(from.textContent);
      button.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(from);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
    }
    setTimeout(() => {
      button.textContent = words;
    }, 1800);
  });
}

// curves: show the value at the pointer, or move with the arrow keys
const short = (v) =>
  v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2) : Number(v.toPrecision(4)).toString();
for (const chart of data.charts) {
  const figure = id(`figure-${chart.key}`),
    svg = figure.querySelector("svg"),
    readout = figure.querySelector("output");
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.setAttribute("class", "rule");
  rule.setAttribute("y1", chart.top);
  rule.setAttribute("y2", chart.bottom);
  rule.setAttribute("visibility", "hidden");
  svg.append(rule);
  let at = -1;
  const show = (i) => {
    at = Math.max(0, Math.min(chart.x.length - 1, i));
    const x = chart.left + ((chart.x[at] - chart.span[0]) / (chart.span[1] - chart.span[0])) * (chart.right - chart.left);
    rule.setAttribute("x1", x);
    rule.setAttribute("x2", x);
    rule.setAttribute("visibility", "visible");
    readout.textContent = `step ${chart.x[at].toLocaleString("en")}: ${short(chart.y[at])}`;
  };
  const near = (event) => {
    const box = svg.getBoundingClientRect();
    const x =
      ((((event.clientX - box.left) / box.width) * chart.width - chart.left) / (chart.right - chart.left)) *
        (chart.span[1] - chart.span[0]) +
      chart.span[0];
    let best = 0;
    chart.x.forEach((v, i) => {
      if (Math.abs(v - x) < Math.abs(chart.x[best] - x)) best = i;
    });
    show(best);
  };
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointermove", near);
  svg.addEventListener("pointerdown", near);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (move !== undefined) {
      show(at + move);
      event.preventDefault();
    }
  });
}

updateTheme();
