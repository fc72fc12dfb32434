// The attention viewer: one query patch, one tile a head. Bytes are round(255 * sqrt(attention)).
"use strict";
(() => {
  const view = document.querySelector("[data-viewer]");
  if (!view) return;
  const find = (name) => view.querySelector(`[data-${name}]`);
  const runs = JSON.parse(find("maps").textContent);
  const canvas = find("query");
  const [runChoice, siteChoice, prefixButton, tiles] = ["run", "site", "prefix", "heads"].map(find);
  const ramp = ["#5a1520", "#8a2a20", "#bd4f24", "#dd8436", "#f0b04a", "#ffd873"];
  const decoded = new Map();
  const state = { run: 0, site: 0, image: 0, query: 0, held: false };

  const run = () => runs[state.run];
  const site = () => run().sites[state.site];
  const thumbs = () => view.querySelector(`[data-thumbs="${state.run}"]`);
  const picture = () => thumbs().querySelectorAll("img")[state.image];
  const tokens = () => site().prefix + site().grid[0] * site().grid[1];
  const percent = (a) => `${(100 * a).toFixed(a < 0.0995 ? 1 : 0)} %`;

  function bytes() {
    const key = `${state.run} ${state.site}`;
    if (!decoded.has(key)) decoded.set(key, Uint8Array.from(atob(site().maps), (c) => c.charCodeAt(0)));
    return decoded.get(key);
  }
  // Attention of one head from the query to every token.
  function attention(head) {
    const n = tokens();
    const start = ((state.image * site().heads + head) * n + state.query) * n;
    return Array.from(bytes().subarray(start, start + n), (level) => (level / 255) ** 2);
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
  // Draw the picture, then `paint(context, cell width, cell height)` over it.
  function draw(target, width, paint) {
    const [w, h] = run().size;
    target.width = width;
    target.height = Math.round((width * h) / w);
    const context = target.getContext("2d");
    context.imageSmoothingEnabled = w > 64;
    context.drawImage(picture(), 0, 0, target.width, target.height);
    paint(context, target.width / site().grid[1], target.height / site().grid[0]);
  }
  function outline(context, cw, ch, thickness) {
    if (state.query < site().prefix) return;
    const at = state.query - site().prefix;
    const [x, y] = [(at % site().grid[1]) * cw, Math.floor(at / site().grid[1]) * ch];
    for (const [style, grow] of [["#000", 1], ["#ff9d5c", 0]]) {
      context.strokeStyle = style;
      context.lineWidth = thickness + 2 * grow;
      context.strokeRect(x + thickness / 2 + 1, y + thickness / 2 + 1, cw - thickness - 2, ch - thickness - 2);
    }
  }
  function drawQuery() {
    draw(canvas, 608, (context, cw, ch) => {
      const [rows, columns] = site().grid;
      context.strokeStyle = "rgb(140 140 140 / 0.35)";
      context.lineWidth = 1;
      context.beginPath();
      for (let i = 1; i < columns; i++) { context.moveTo(i * cw, 0); context.lineTo(i * cw, rows * ch); }
      for (let i = 1; i < rows; i++) { context.moveTo(0, i * ch); context.lineTo(columns * cw, i * ch); }
      context.stroke();
      outline(context, cw, ch, 5);
    });
  }
  function drawHead(head) {
    const [tile, caption] = tiles.children[head].children;
    const row = attention(head);
    const { prefix, grid } = site();
    const patches = row.slice(prefix);
    const most = Math.max(...patches);
    const top = Math.max(most, 4 / row.length);
    draw(tile, 288, (context, cw, ch) => {
      context.fillStyle = "rgb(12 10 9 / 0.66)";
      context.fillRect(0, 0, tile.width, tile.height);
      patches.forEach((a, at) => {
        const [x, y] = [at % grid[1], Math.floor(at / grid[1])];
        context.fillStyle = colour(a / top);
        context.fillRect(Math.floor(x * cw), Math.floor(y * ch), Math.ceil(cw), Math.ceil(ch));
      });
      outline(context, cw, ch, 2.5);
    });
    const rest = row.slice(0, prefix).reduce((sum, a) => sum + a, 0);
    const extra = prefix === 1 ? `\nclass token ${percent(rest)}` : prefix ? `\nprefix tokens ${percent(rest)}` : "";
    caption.textContent = `head ${head}: up to ${percent(most)}${extra}`;
    return row.map((a, token) => [head, token, a]);
  }
  function place(token) {
    const { prefix, grid } = site();
    if (token < prefix) return prefix === 1 ? "class token" : `prefix token ${token}`;
    return `row ${Math.floor((token - prefix) / grid[1])}, column ${(token - prefix) % grid[1]}`;
  }
  function show() {
    drawQuery();
    const rows = Array.from({ length: site().heads }, (_, head) => drawHead(head)).flat();
    const best = rows.reduce((top, row) => (row[2] > top[2] ? row : top));
    find("caption").textContent = run().captions[state.image];
    find("status").textContent =
      `From ${place(state.query)}: head ${best[0]} looks most, ${percent(best[2])} at ${place(best[1])}.${state.held ? " Held; click to let go." : ""}`;
    const lines = rows.map(([head, token, a]) => `${head},"${place(token)}",${a.toPrecision(3)}`);
    find("csv").href = "data:text/csv," + encodeURIComponent(["head,key,attention", ...lines].join("\n") + "\n");
    prefixButton.setAttribute("aria-pressed", String(state.query < site().prefix));
    view.dataset.query = String(state.query);
  }
  function look(query) {
    if (query === state.query) return;
    state.query = query;
    show();
  }
  // Rebuild what depends on the site; the query keeps its place where it can.
  function settle() {
    const { heads, prefix } = site();
    tiles.replaceChildren(...Array.from({ length: heads }, (_, head) => {
      const tile = document.createElement("figure");
      const picture = document.createElement("canvas");
      picture.setAttribute("role", "img");
      picture.setAttribute("aria-label", `Attention of head ${head}`);
      tile.append(picture, document.createElement("figcaption"));
      return tile;
    }));
    tiles.classList.toggle("many", heads > 6);
    prefixButton.hidden = prefix === 0;
    canvas.setAttribute("aria-label", `Example image. Move the query patch with the arrow keys${prefix ? "; Home chooses the class token" : ""}.`);
    prefixButton.textContent = prefix > 1 ? "Prefix token" : "Class token";
    state.query = Math.min(state.query, tokens() - 1);
    show();
  }
  function choose(image) {
    state.image = image;
    [...thumbs().children].forEach((thumb, at) => thumb.setAttribute("aria-pressed", String(at === image)));
  }
  function enter(index) {
    const name = run().sites[state.site].name;
    state.run = index;
    siteChoice.replaceChildren(...run().sites.map((one, at) => new Option(one.name, at)));
    state.site = Math.max(0, run().sites.findIndex((one) => one.name === name));
    siteChoice.value = String(state.site);
    for (const group of view.querySelectorAll("[data-thumbs]")) group.hidden = group.dataset.thumbs !== String(index);
    choose(Math.min(state.image, run().captions.length - 1));
    settle();
  }

  function underPointer(event) {
    const box = canvas.getBoundingClientRect();
    const [rows, columns] = site().grid;
    const cell = (at, size, cells) => Math.min(cells - 1, Math.max(0, Math.floor((at / size) * cells)));
    const [y, x] = [cell(event.clientY - box.top, box.height, rows), cell(event.clientX - box.left, box.width, columns)];
    return site().prefix + y * columns + x;
  }
  function onKey(event) {
    const { prefix, grid: [rows, columns] } = site();
    const at = Math.max(0, state.query - prefix);
    const [y, x] = [Math.floor(at / columns), at % columns];
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Home" && prefix) look(0);
    else if (event.key in moves && state.query < prefix) look(prefix);
    else if (event.key in moves) {
      const [dy, dx] = moves[event.key];
      const clamp = (value, size) => Math.min(size - 1, Math.max(0, value));
      look(prefix + clamp(y + dy, rows) * columns + clamp(x + dx, columns));
    } else return;
    event.preventDefault();
  }
  canvas.addEventListener("pointermove", (event) => { if (!state.held) look(underPointer(event)); });
  canvas.addEventListener("click", (event) => { state.held = !state.held; state.query = underPointer(event); show(); });
  canvas.addEventListener("keydown", onKey);
  prefixButton.addEventListener("click", () => { look(state.query < site().prefix ? (state.query + 1) % site().prefix : 0); });
  siteChoice.addEventListener("change", () => { state.site = Number(siteChoice.value); settle(); });
  runChoice?.addEventListener("change", () => enter(Number(runChoice.value)));
  for (const group of view.querySelectorAll("[data-thumbs]"))
    [...group.children].forEach((thumb, at) => thumb.addEventListener("click", () => { choose(at); show(); }));

  const first = site();
  state.query = first.prefix + Math.floor(first.grid[0] / 2) * first.grid[1] + Math.floor(first.grid[1] / 2);
  Promise.all([...view.querySelectorAll(".thumbs img")].map((img) => img.decode())).then(() => {
    enter(0);
    view.dataset.ready = "true";
    if (location.hash === "#selftest") selftest();
  });

  // Move the pointer to the last patch, then one key to the left; the page says whether the viewer followed.
  function selftest() {
    const box = canvas.getBoundingClientRect();
    const corner = { clientX: box.right - 2, clientY: box.bottom - 2, bubbles: true };
    const before = tiles.querySelector("canvas").toDataURL();
    canvas.dispatchEvent(new PointerEvent("pointermove", corner));
    const hovered = state.query === tokens() - 1 && tiles.querySelector("canvas").toDataURL() !== before;
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true, cancelable: true }));
    const moved = state.query === tokens() - 2;
    document.documentElement.dataset.selftest = hovered && moved ? "passed" : "failed";
  }
})();
