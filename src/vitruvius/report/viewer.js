// The attention viewer: one query patch, one pane for each run and each view of the picture (clean, attacked), one tile
// a head. Bytes of attention are round(255 * sqrt(attention)), of relevance from its minimum to its maximum.
"use strict";
(() => {
  const view = document.querySelector("[data-viewer]");
  if (!view) return;
  const find = (name) => view.querySelector(`[data-${name}]`);
  const { images, pictures, runs } = JSON.parse(find("maps").textContent);
  const [runChoice, siteChoice, prefixButton, thumbs, board] = ["run", "site", "prefix", "thumbs", "panes"].map(find);
  const ramp = ["#5a1520", "#8a2a20", "#bd4f24", "#dd8436", "#f0b04a", "#ffd873"];
  const longest = runs.reduce((most, run) => (run.sites.length > most.sites.length ? run : most));
  // The query is a prefix token, or a place on the picture with 0 <= x, y < 1, so that grids may differ between panes.
  const state = { run: "all", site: 0, picture: 0, query: { prefix: null, x: 0.5, y: 0.5 }, held: false, active: 0 };
  let drawn = [];  // the images, decoded
  let panes = [];

  const percent = (a) => `${(100 * a).toFixed(a < 0.0995 ? 1 : 0)}\u00a0%`;
  const clamp = (value, size) => Math.min(size - 1, Math.max(0, value));
  const create = (kind, name = "", text = "") => Object.assign(document.createElement(kind), { className: name, textContent: text });

  const decoded = new Map();
  function bytes(text) {
    if (!decoded.has(text)) decoded.set(text, Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));
    return decoded.get(text);
  }
  // The site of a run that goes with the chosen one: of the same name, else at the same depth.
  function siteOf(run) {
    const wanted = longest.sites[state.site].name;
    const depth = Math.round((state.site / Math.max(1, longest.sites.length - 1)) * (run.sites.length - 1));
    return run.sites.find((site) => site.name === wanted) ?? run.sites[depth];
  }
  const count = (site) => site.prefix + site.grid[0] * site.grid[1];
  // The token of a pane's site that the query means.
  function tokenOf({ site }) {
    const { prefix, x, y } = state.query;
    if (prefix !== null && site.prefix) return Math.min(prefix, site.prefix - 1);
    const [rows, columns] = site.grid;
    return site.prefix + clamp(Math.floor(y * rows), rows) * columns + clamp(Math.floor(x * columns), columns);
  }
  function aim(site, token) {
    const [rows, columns] = site.grid;
    const at = token - site.prefix;
    if (at < 0) state.query = { ...state.query, prefix: token };
    else state.query = { prefix: null, x: ((at % columns) + 0.5) / columns, y: (Math.floor(at / columns) + 0.5) / rows };
  }
  // Attention of one head from the query to every token.
  function attention({ site, row }, head, token) {
    const n = count(site);
    const start = ((row * site.heads + head) * n + token) * n;
    return Array.from(bytes(site.maps).subarray(start, start + n), (level) => (level / 255) ** 2);
  }
  function colour(a) {
    const at = Math.min(Math.max(a, 0), 1) * (ramp.length - 1);
    const low = Math.min(Math.floor(at), ramp.length - 2);
    const mix = (place) => {
      const [from, to] = [ramp[low], ramp[low + 1]].map((hex) => parseInt(hex.slice(place, place + 2), 16));
      return Math.round(from + (at - low) * (to - from));
    };
    return `rgb(${mix(1)} ${mix(3)} ${mix(5)} / ${0.95 * at ** 0.7 / (ramp.length - 1) ** 0.7})`;
  }
  // Draw the pane's picture, then `paint(context)` over it.
  function draw(pane, target, width, paint) {
    const [w, h] = pane.run.size;
    target.width = width;
    target.height = Math.round((width * h) / w);
    const context = target.getContext("2d");
    context.imageSmoothingEnabled = w > 64;
    context.drawImage(drawn[pane.view.image], 0, 0, target.width, target.height);
    paint(context);
  }
  // Darken the picture and light each cell of a grid by its value in [0, 1].
  function light(context, [rows, columns], values) {
    const { width, height } = context.canvas;
    const [cw, ch] = [width / columns, height / rows];
    context.fillStyle = "rgb(12 10 9 / 0.66)";
    context.fillRect(0, 0, width, height);
    values.forEach((value, at) => {
      context.fillStyle = colour(value);
      context.fillRect(Math.floor((at % columns) * cw), Math.floor(Math.floor(at / columns) * ch), Math.ceil(cw), Math.ceil(ch));
    });
  }
  function outline(context, site, token, thickness) {
    if (token < site.prefix) return;
    const at = token - site.prefix;
    const [rows, columns] = site.grid;
    const [cw, ch] = [context.canvas.width / columns, context.canvas.height / rows];
    const [x, y] = [(at % columns) * cw, Math.floor(at / columns) * ch];
    for (const [style, grow] of [["#000", 1], ["#ff9d5c", 0]]) {
      context.strokeStyle = style;
      context.lineWidth = thickness + 2 * grow;
      context.strokeRect(x + thickness / 2 + 1, y + thickness / 2 + 1, cw - thickness - 2, ch - thickness - 2);
    }
  }
  function drawQuery(pane, token) {
    draw(pane, pane.canvas, 608, (context) => {
      const [rows, columns] = pane.site.grid;
      const { width, height } = context.canvas;
      context.strokeStyle = "rgb(140 140 140 / 0.35)";
      context.lineWidth = 1;
      context.beginPath();
      for (let i = 1; i < columns; i++) { context.moveTo((i * width) / columns, 0); context.lineTo((i * width) / columns, height); }
      for (let i = 1; i < rows; i++) { context.moveTo(0, (i * height) / rows); context.lineTo(width, (i * height) / rows); }
      context.stroke();
      outline(context, pane.site, token, 5);
    });
  }
  function drawRelevance(pane) {
    if (!pane.relevance) return;
    const { grid, maps } = pane.run.relevance;
    const size = grid[0] * grid[1];
    const values = Array.from(bytes(maps).subarray(pane.row * size, (pane.row + 1) * size), (level) => level / 255);
    draw(pane, pane.relevance, 288, (context) => light(context, grid, values));
  }
  function drawHead(pane, head, token) {
    const [tile, caption] = pane.heads[head].children;
    const row = attention(pane, head, token);
    const { prefix, grid } = pane.site;
    const patches = row.slice(prefix);
    const most = Math.max(...patches);
    const top = Math.max(most, 4 / row.length);
    draw(pane, tile, 288, (context) => {
      light(context, grid, patches.map((a) => a / top));
      outline(context, pane.site, token, 2.5);
    });
    const rest = row.slice(0, prefix).reduce((sum, a) => sum + a, 0);
    const extra = prefix === 1 ? `\nclass token ${percent(rest)}` : prefix ? `\nprefix tokens ${percent(rest)}` : "";
    caption.textContent = `head ${head}: up to ${percent(most)}${extra}`;
    return row.map((a, key) => ({ pane, head, key, a }));
  }
  function place(site, token) {
    const { prefix, grid } = site;
    if (token < prefix) return prefix === 1 ? "class token" : `prefix token ${token}`;
    return `row ${Math.floor((token - prefix) / grid[1])}, column ${(token - prefix) % grid[1]}`;
  }
  const title = ({ run, view: one }) => [runs.length > 1 ? run.name : "", (one.threat && `under ${one.threat}`) || (paired() ? "clean" : "")].filter(Boolean).join(", ");
  const paired = () => runs.some((run) => run.views.some((one) => one.threat));

  function show() {
    const rows = panes.map((pane) => {
      const token = tokenOf(pane);
      drawQuery(pane, token);
      return Array.from({ length: pane.site.heads }, (_, head) => drawHead(pane, head, token)).flat();
    });
    const active = panes[Math.min(state.active, panes.length - 1)];
    const best = rows[panes.indexOf(active)].reduce((top, one) => (one.a > top.a ? one : top));
    const where = title(active) ? ` (${title(active)})` : "";
    find("status").textContent =
      `From ${place(active.site, tokenOf(active))}${where}: head ${best.head} looks most, ${percent(best.a)} at ${place(active.site, best.key)}.${state.held ? " Held; click to let go." : ""}`;
    const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    const lines = rows.flat().map(({ pane, head, key, a }) =>
      [quoted(pane.run.name), quoted(pane.view.threat || "clean"), head, quoted(place(pane.site, key)), a.toPrecision(3)].join(","));
    find("csv").href = "data:text/csv," + encodeURIComponent(["run,threat,head,key,attention", ...lines].join("\n") + "\n");
    prefixButton.setAttribute("aria-pressed", String(state.query.prefix !== null));
    view.dataset.query = String(tokenOf(active));
  }
  function look(site, token) {
    if (state.query.prefix === null ? token === tokenOf({ site }) : token === state.query.prefix) return;
    aim(site, token);
    show();
  }

  function makeTile(label) {
    const tile = create("figure");
    const canvas = create("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    tile.append(canvas, create("figcaption"));
    return tile;
  }
  // One run's view of the picture: the image to point at, what the answer rests on, and a tile a head.
  function makePane(run, row, number) {
    const [site, one] = [siteOf(run), run.views[row]];
    const pane = { run, row, site, view: one, canvas: create("canvas"), relevance: null, heads: [] };
    const article = create("article", "pane");
    if (title(pane)) {
      const heading = create("h3", "pane-title");
      if (runs.length > 1) heading.append(Object.assign(create("span", "dot"), { style: `--own: var(--${run.colour})` }));
      heading.append(title(pane));
      article.append(heading);
    }
    const query = create("figure", "query");
    const home = site.prefix ? "; Home chooses the class token" : "";
    Object.assign(pane.canvas, { tabIndex: 0 });
    pane.canvas.setAttribute("role", "application");
    pane.canvas.setAttribute("aria-describedby", "viewer-status");
    pane.canvas.setAttribute("aria-label", `${title(pane) || "Picture"}: ${one.caption}. Move the query patch with the arrow keys${home}.`);
    query.append(pane.canvas, create("figcaption", "", one.caption));
    const tiles = create("div", "head-tiles");
    if (run.relevance) {
      const tile = makeTile("What the answer rests on");
      tile.lastChild.textContent = "rests on";
      pane.relevance = tile.firstChild;
      tiles.append(tile);
    }
    pane.heads = Array.from({ length: site.heads }, (_, head) => makeTile(`Attention of head ${head}`));
    tiles.append(...pane.heads);
    tiles.classList.toggle("many", site.heads > 6);
    const stage = create("div", "stage");
    stage.append(query, tiles);
    article.append(stage);
    listen(pane, number);
    return { pane, article };
  }
  function listen(pane, number) {
    const { canvas } = pane;
    const follow = (event) => { state.active = number; look(pane.site, underPointer(pane, event)); };
    canvas.addEventListener("pointermove", (event) => { if (!state.held || event.pointerType === "touch") follow(event); });
    canvas.addEventListener("click", (event) => {
      state.held = !state.held;
      state.active = number;
      aim(pane.site, underPointer(pane, event));
      show();
    });
    canvas.addEventListener("focus", () => { state.active = number; });
    canvas.addEventListener("keydown", (event) => onKey(pane, event));
  }
  function underPointer({ canvas, site }, event) {
    const box = canvas.getBoundingClientRect();
    const [rows, columns] = site.grid;
    const cell = (at, size, cells) => clamp(Math.floor((at / size) * cells), cells);
    return site.prefix + cell(event.clientY - box.top, box.height, rows) * columns + cell(event.clientX - box.left, box.width, columns);
  }
  function onKey({ site }, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { prefix, grid: [rows, columns] } = site;
    const token = tokenOf({ site });
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Home" && prefix) look(site, 0);
    else if (event.key === "n" || event.key === "p") step(event.key === "n" ? 1 : -1);
    else if (event.key in moves && token < prefix) look(site, prefix);
    else if (event.key in moves) {
      const [dy, dx] = moves[event.key];
      const [y, x] = [Math.floor((token - prefix) / columns), (token - prefix) % columns];
      look(site, prefix + clamp(y + dy, rows) * columns + clamp(x + dx, columns));
    } else return;
    event.preventDefault();
  }

  // Rebuild the panes: of the chosen run or of all, with every view of the picture that they have.
  function settle() {
    const chosen = state.run === "all" ? runs : [runs[Number(state.run)]];
    const name = pictures[state.picture].name;
    const shown = chosen.flatMap((run) => run.views.map((one, row) => ({ run, row, one })).filter(({ one }) => one.picture === name));
    const made = shown.map(({ run, row }, number) => makePane(run, row, number));
    const focused = panes.findIndex((pane) => pane.canvas === document.activeElement);
    panes = made.map(({ pane }) => pane);
    board.replaceChildren(...made.map(({ article }) => article));
    board.classList.toggle("one", panes.length === 1);
    if (!panes.length) {
      board.append(create("p", "note", "This run has not recorded this picture."));
      find("status").textContent = "";
      return;
    }
    if (focused >= 0) panes[Math.min(focused, panes.length - 1)].canvas.focus();
    const prefix = Math.max(...panes.map(({ site }) => site.prefix));
    prefixButton.hidden = prefix === 0;
    prefixButton.textContent = prefix > 1 ? "Prefix token" : "Class token";
    panes.forEach(drawRelevance);
    show();
  }
  function choose(picture) {
    state.picture = picture;
    [...thumbs.children].forEach((thumb, at) => thumb.setAttribute("aria-pressed", String(at === picture)));
    settle();
  }
  const step = (by) => choose((state.picture + by + pictures.length) % pictures.length);

  prefixButton.addEventListener("click", () => {
    const { prefix } = panes.reduce((most, { site }) => (site.prefix > most.prefix ? site : most), { prefix: 0 });
    const now = state.query.prefix;
    state.query = { ...state.query, prefix: now === null ? 0 : now + 1 < prefix ? now + 1 : null };
    show();
  });
  siteChoice.append(...longest.sites.map((site, at) => new Option(site.name, at)));
  siteChoice.addEventListener("change", () => { state.site = Number(siteChoice.value); settle(); });
  runChoice?.addEventListener("change", () => { state.run = runChoice.value; settle(); });
  [...thumbs.children].forEach((thumb, at) => thumb.addEventListener("click", () => choose(at)));
  find("relevance").hidden = !runs.some((run) => run.relevance);

  Promise.all(images.map(async (address) => {
    const image = new Image();
    image.src = address;
    await image.decode();
    return image;
  })).then((all) => {
    drawn = all;
    choose(0);
    view.dataset.ready = "true";
    if (location.hash === "#selftest") selftest();
  });

  // Move the pointer to the last patch of the last pane, then one key to the left in the first; the page says whether
  // every pane followed, whether N shows the next picture, and by how many pixels the page is wider than its window.
  function selftest() {
    const [first, last] = [panes[0], panes[panes.length - 1]];
    const box = last.canvas.getBoundingClientRect();
    const corner = { clientX: box.right - 2, clientY: box.bottom - 2, bubbles: true };
    const before = panes.map((pane) => pane.heads[0].firstChild.toDataURL());
    last.canvas.dispatchEvent(new PointerEvent("pointermove", corner));
    const followed = panes.every((pane, at) => tokenOf(pane) === count(pane.site) - 1 && pane.heads[0].firstChild.toDataURL() !== before[at]);
    first.canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true, cancelable: true }));
    const moved = tokenOf(first) === count(first.site) - 2;
    first.canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "n", bubbles: true, cancelable: true }));
    const turned = pictures.length === 1 || panes.every((pane) => pane.view.picture === pictures[1].name);
    const root = document.documentElement;
    root.dataset.overflow = String(root.scrollWidth - root.clientWidth);
    root.dataset.panes = String(panes.length);
    root.dataset.selftest = followed && moved && turned ? "passed" : "failed";
  }
})();
