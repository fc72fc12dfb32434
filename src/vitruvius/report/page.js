// The page's own habits: theme, sorting of tables, opening of folds for print.
"use strict";
(() => {
  const root = document.documentElement;
  const themes = ["auto", "light", "dark"];

  function remembered() {
    try { return localStorage.getItem("vitruvius-theme"); } catch { return null; }
  }
  function remember(theme) {
    try { localStorage.setItem("vitruvius-theme", theme); } catch { /* a page without storage forgets */ }
  }
  function wear(theme) {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
    button.setAttribute("aria-label", `Theme: ${theme}. Change theme`);
  }
  const button = document.getElementById("theme");
  let theme = themes.includes(remembered()) ? remembered() : "auto";
  wear(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    wear(theme);
    remember(theme);
  });

  function valueOf(row, place) {
    const cell = row.cells[place];
    return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
  }
  function compare(a, b, place) {
    const [x, y] = [valueOf(a, place), valueOf(b, place)];
    if (x !== null && y !== null) return x - y;
    if (x !== null || y !== null) return x === null ? 1 : -1;
    return a.cells[place].textContent.localeCompare(b.cells[place].textContent, undefined, { numeric: true });
  }
  function sortBy(table, heading) {
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => (up ? 1 : -1) * compare(a, b, heading.cellIndex));
    table.tBodies[0].append(...rows);
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    if (table.tBodies[0].rows.length < 2) continue;
    for (const heading of table.tHead.rows[0].cells) {
      const press = document.createElement("button");
      press.type = "button";
      press.title = "Sort by this column";
      press.textContent = heading.textContent;
      press.addEventListener("click", () => sortBy(table, heading));
      heading.replaceChildren(press);
    }
  }

  const links = new Map([...document.querySelectorAll(".contents a")].map((a) => [a.hash.slice(1), a]));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const section of document.querySelectorAll("main > section")) watcher.observe(section);

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => { for (const fold of opened) fold.open = false; });
})();
