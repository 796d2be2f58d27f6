"use strict";
(() => {
  const root = document.documentElement, byId = (id) => document.getElementById(id), SHOWN = 100;
  const stored = (value) => { try { return value === undefined ? localStorage.getItem("tenuto-theme") : localStorage.setItem("tenuto-theme", value); } catch { return null; } };
  const themes = ["auto", "light", "dark"], toggle = byId("theme");
  const paint = (theme) => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    toggle.textContent = `Theme: ${theme}`;
  };
  let theme = themes.includes(stored()) ? stored() : "auto";
  paint(theme);
  toggle.hidden = false;
  toggle.addEventListener("click", () => { theme = themes[(themes.indexOf(theme) + 1) % 3]; stored(theme); paint(theme); });

  const days = (Date.now() / 1000 - Number(root.dataset.made)) / 86400;
  if (days > 1) { byId("stale").hidden = false; byId("stale-days").textContent = days.toFixed(0); }

  const table = byId("checkpoints");
  if (!table) return;
  const body = table.tBodies[0], search = byId("search"), run = byId("run"), only = byId("only"), more = byId("more");
  let rows = [...body.rows], all = false;
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const row of rows) {
      const fits = words.every((word) => texts.get(row).includes(word)) && (!run.value || row.dataset.run === run.value)
        && (!only.checked || row.hasAttribute("data-look"));
      row.hidden = !fits || (!all && found >= SHOWN);
      found += fits;
    }
    byId("found").textContent = `${found.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
    more.hidden = all || found <= SHOWN;
    more.textContent = `Show all ${found.toLocaleString("en")}`;
  };
  const key = (row, column) => { const cell = row.cells[column]; return cell.dataset.s ?? cell.textContent.trim(); };
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const difference = Number(a) - Number(b);
    return Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference;
  };
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending" || !head.hasAttribute("aria-sort");
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keys = new Map(rows.map((row) => [row, key(row, head.cellIndex)]));
      rows.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        return x === "" || y === "" ? compare(x, y) : up ? compare(x, y) : compare(y, x);
      });
      body.append(...rows);
      show();
    });
  }
  search.addEventListener("input", show);
  run.addEventListener("change", show);
  only.addEventListener("change", show);
  more.addEventListener("click", () => { all = true; show(); });
  byId("controls").hidden = false;
  show();
  addEventListener("beforeprint", () => { all = true; show(); });
})();
