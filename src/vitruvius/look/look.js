// The page of `vitruvius look`: maps are unpacked when their picture is chosen, and drawn over it.
"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const { shown, live, heat } = JSON.parse(find("data").textContent);
  const state = { picture: "", method: "", layer: 0, head: "mean", class: "", query: { prefix: 0 }, model: "" };
  const METHODS = { attention: "Attention", rollout: "Rollout", relevance: "Relevance", gradients: "Integrated gradients" };
  const KEPT = 0.03; // to which numbers are kept
  const SIDE = 448; // pixels of a drawing
  let all = { views: [], notes: [] };
  let panes = [];

  // numbers: one byte each, in a map of attention evenly spaced in the logarithm, else in the value itself
  const numbersOf = ({ low, high }) => high.map((most, head) =>
    Float32Array.from({ length: 256 }, (_, code) => (code ? low[head] * (most / low[head]) ** ((code - 1) / 254) : 0)));
  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  async function ready(view) {
    const maps = [view.rollout, ...Object.values(view.relevance), ...Object.values(view.gradients)].filter(Boolean);
    await Promise.all([...view.layers, ...maps].map(async (map) => { map.bytes ??= await unpack(map.codes); }));
    for (const name of ["image", "difference"]) {
      if (!view[name] || view[name].width) continue;
      const image = new Image();
      image.src = view[name];
      await image.decode();
      view[name] = image;
    }
  }

  // what is drawn: {values, rows, columns, prefix}, NaN where there is nothing to say
  function attention(layer, head, query) {
    const [windows, heads, queries, keys] = layer.shape;
    const chosen = head === "mean" ? [...Array(heads).keys()] : [Math.min(Number(head), heads - 1)];
    const at = (window, h, row, key) => layer.bytes[((window * heads + h) * queries + row) * keys + key];
    layer.numbers ??= numbersOf(layer);
    const mean = (window, row, key) => chosen.reduce((sum, h) => sum + layer.numbers[h][at(window, h, row, key)], 0) / chosen.length;
    if (layer.kind === "matrix") {
      const values = Float32Array.from({ length: queries * keys }, (_, place) => mean(0, Math.floor(place / keys), place % keys));
      return { values, rows: queries, columns: keys, prefix: [] };
    }
    const [rows, columns] = layer.grid;
    if (layer.kind === "windows") return inWindows(layer, query, mean);
    const prefix = layer.prefix.length;
    let asked = [...Array(rows * columns).keys()].map((patch) => prefix + patch);
    if (queries === 1) asked = [0];
    else if (query.prefix !== undefined && prefix) asked = [Math.min(query.prefix, prefix - 1)];
    else if (query.x !== undefined) asked = [prefix + patchAt(query, rows, columns)];
    const sums = Float32Array.from({ length: keys }, (_, key) => asked.reduce((sum, row) => sum + mean(0, row, key), 0) / asked.length);
    return { values: sums.slice(prefix), rows, columns, prefix: [...sums.slice(0, prefix)] };
  }
  const patchAt = (query, rows, columns) =>
    Math.min(rows - 1, Math.floor(query.y * rows)) * columns + Math.min(columns - 1, Math.floor(query.x * columns));
  function inWindows(layer, query, mean) {
    const [rows, columns] = layer.grid, [high, wide] = layer.window, [down, right] = layer.shift;
    const across = Math.ceil(columns / wide);
    const place = (patch) => {
      const row = (Math.floor(patch / columns) - down + rows) % rows, column = ((patch % columns) - right + columns) % columns;
      return [Math.floor(row / high) * across + Math.floor(column / wide), (row % high) * wide + (column % wide)];
    };
    const asked = query.x === undefined ? null : place(patchAt(query, rows, columns));
    const values = Float32Array.from({ length: rows * columns }, (_, patch) => {
      const [window, key] = place(patch);
      if (asked) return asked[0] === window ? mean(window, asked[1], key) : NaN;
      let sum = 0;
      for (let row = 0; row < high * wide; row++) sum += mean(window, row, key);
      return sum / (high * wide);
    });
    return { values, rows, columns, prefix: [] };
  }
  const layerOf = (view, place) => view.layers[Math.min(place, view.layers.length - 1)];
  function explained(map) {
    if (!map) return null;
    const values = Float32Array.from(map.bytes, (code) => map.low + (map.high - map.low) * code / 255);
    return { values, rows: map.grid[0], columns: map.grid[1], prefix: [] };
  }
  function drawn(view) {
    if (state.method === "attention") return view.layers.length ? attention(layerOf(view, state.layer), state.head, state.query) : null;
    if (state.method === "rollout") return explained(view.rollout);
    const maps = view[state.method];
    if (!maps) return null;
    return explained(maps[state.class] ?? Object.values(maps)[0]);
  }
  function minus(after, before) {
    if (!after || !before || after.values.length !== before.values.length) return null;
    const change = (a, b) => (Math.abs(a - b) < KEPT * Math.max(Math.abs(a), Math.abs(b)) ? 0 : a - b);
    return { ...after, values: after.values.map((value, place) => change(value, before.values[place])), prefix: [] };
  }

  // colours
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const HEAT = heat.map(rgb), CHANGE = ["#0067ad", "#8fb8d8", "#f2eee6", "#eeb083", "#cd5700"].map(rgb);
  function colour(palette, t) {
    const place = Math.min(1, Math.max(0, t)) * (palette.length - 1), low = Math.min(Math.floor(place), palette.length - 2);
    return palette[low].map((channel, at) => channel + (place - low) * (palette[low + 1][at] - channel));
  }
  const gradient = (palette) => `linear-gradient(90deg, ${palette.map((one) => `rgb(${one.join(" ")})`).join(", ")})`;
  function scaleOf(maps, signed) {
    const values = Float32Array.from(maps.flatMap((map) => [...map.values].filter((value) => !Number.isNaN(value)))).sort();
    const share = (q) => values[Math.round(q * (values.length - 1))] ?? 0;
    if (signed) {
      const most = Math.max(Math.abs(share(0.01)), Math.abs(share(0.99)), 1e-12);
      return [-most, most];
    }
    const [low, high] = [share(0.01), share(0.99)];
    return high > low ? [low, high] : [Math.min(values[0] ?? 0, low), Math.max(values[values.length - 1] ?? 0, low + 1e-12)];
  }
  function tile(map, [low, high], palette, opacity) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [map.columns, map.rows];
    const context = canvas.getContext("2d"), image = context.createImageData(map.columns, map.rows);
    map.values.forEach((value, place) => {
      if (Number.isNaN(value)) return;
      image.data.set([...colour(palette, (value - low) / (high - low)), 255 * opacity], 4 * place);
    });
    context.putImageData(image, 0, 0);
    return canvas;
  }
  const number = (value) => (value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toPrecision(2));
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  function create(kind, className, text) {
    const element = document.createElement(kind);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // panes: one for each view of the picture, and one for what a threat has changed
  function makePane(view, clean) {
    const figure = create("figure", "pane"), canvas = create("canvas");
    const title = view.threat ? `${view.model}, ${view.threat}` : view.model;
    figure.append(create("h2", "", clean ? `What changed: ${title}` : title), canvas);
    const bar = create("div", "bar"), ends = create("div", "ends"), legend = create("p", "note"), chips = create("p", "chips");
    ends.append(create("span"), create("span"));
    figure.append(bar, ends, legend, chips);
    const image = clean ? view.difference : view.image;
    [canvas.width, canvas.height] = [SIDE, Math.round(SIDE * image.height / image.width)];
    canvas.setAttribute("role", "img");
    if (clean) canvas.dataset.still = "";
    canvas.tabIndex = 0;
    canvas.addEventListener("pointerdown", (event) => point(event, canvas));
    canvas.addEventListener("pointermove", (event) => { if (event.buttons) point(event, canvas); });
    canvas.addEventListener("keydown", (event) => arrow(event, view));
    if (!clean && view.answers.length) figure.append(answersOf(view));
    return { figure, canvas, bar, ends, legend, chips, view, clean, image, title };
  }
  function answersOf(view) {
    const list = create("ol", "answers");
    for (const [name, , probability] of view.answers) {
      const item = create("li"), line = create("span", "line"), share = create("i");
      share.style.width = `${100 * probability}%`;
      line.append(share);
      item.append(create("span", "name", name), create("span", "share", percent(probability)), line);
      list.append(item);
    }
    return list;
  }
  function draw(pane, map, scale) {
    const { canvas, view, clean } = pane, context = canvas.getContext("2d"), palette = clean ? CHANGE : HEAT;
    const layer = state.method === "attention" && layerOf(view, state.layer), matrix = layer && layer.kind === "matrix";
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = pane.image.width >= 100;
    if (!matrix) context.drawImage(pane.image, 0, 0, canvas.width, canvas.height);
    pane.bar.hidden = pane.ends.hidden = !map;
    pane.chips.textContent = "";
    const changed = clean ? `Behind: the difference of the pictures, × ${view.factor}. Before it: more attention orange, less blue; changes below 3 % are left out. ` : "";
    if (!map) {
      pane.legend.textContent = `${changed}There is no ${METHODS[state.method]?.toLowerCase() ?? "map"} to lay over it.`;
      canvas.setAttribute("aria-label", `${view.picture} as ${pane.title} sees it`);
      return;
    }
    context.imageSmoothingEnabled = find("smooth").checked;
    context.drawImage(tile(map, scale, palette, matrix ? 1 : find("opacity").value / 100), 0, 0, canvas.width, canvas.height);
    if (layer && !matrix && state.query.x !== undefined && layer.shape[2] > 1) mark(context, map, canvas);
    pane.bar.style.background = gradient(palette);
    [...pane.ends.children].forEach((end, at) => { end.textContent = number(scale[at]); });
    const what = matrix ? "keys across, queries down; no place on the picture" : "patches";
    pane.legend.textContent = `${changed}From the 1st to the 99th percentile of the ${what}; what is beyond has the colour of the end.${layer?.negative ? " Negative weights are shown as 0." : ""}`;
    if (map.prefix.length) pane.chips.textContent = layer.prefix.map((name, at) => `${name} ${percent(map.prefix[at])}`).join(" · ");
    canvas.setAttribute("aria-label", `${METHODS[state.method]} on ${view.picture}, ${pane.title}; ${find("status").textContent}`);
  }
  function mark(context, map, canvas) {
    const wide = canvas.width / map.columns, high = canvas.height / map.rows, place = patchAt(state.query, map.rows, map.columns);
    const box = [(place % map.columns) * wide, Math.floor(place / map.columns) * high, wide, high];
    for (const [style, width] of [["#fff", 4], ["#0067ad", 2]]) {
      context.strokeStyle = style;
      context.lineWidth = width;
      context.strokeRect(...box);
    }
  }
  function point(event, canvas) {
    const box = canvas.getBoundingClientRect(), inside = (value) => Math.min(0.9999, Math.max(0, value));
    state.query = { x: inside((event.clientX - box.left) / box.width), y: inside((event.clientY - box.top) / box.height) };
    show();
  }
  function arrow(event, view) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const layer = view.layers.length && layerOf(view, state.layer);
    if (!step || !layer?.grid) return;
    event.preventDefault();
    const [rows, columns] = layer.grid, at = state.query.x === undefined ? { x: 0.5, y: 0.5 } : state.query;
    const move = (value, by, count) => Math.min(count - 0.5, Math.max(0.5, Math.floor(value * count) + 0.5 + by)) / count;
    state.query = { x: move(at.x, step[0], columns), y: move(at.y, step[1], rows) };
    show();
  }

  // what is under the pictures
  function where(layer) {
    if (layer.kind === "matrix") return "This layer attends over items that have no place on the picture: its weights as a table.";
    const from = state.query;
    if (layer.shape[2] === 1) return `Where the ${layer.prefix[0] ?? "query"} looks, the only one that asks in this layer.`;
    if (from.x !== undefined) {
      const place = patchAt(from, ...layer.grid), [row, column] = [Math.floor(place / layer.grid[1]), place % layer.grid[1]];
      return `Where patch (${row + 1}, ${column + 1}) looks${layer.kind === "windows" ? ", inside its window" : ""}.`;
    }
    if (from.prefix !== undefined && layer.prefix.length) return `Where the ${layer.prefix[Math.min(from.prefix, layer.prefix.length - 1)]} looks. Point at a patch to see where that looks.`;
    return `Where the patches look, on average${layer.kind === "windows" ? ", inside their windows" : ""}. Point at a patch to see where that looks.`;
  }
  function makeTokens(layer) {
    const choices = [...layer.prefix.map((name, prefix) => [name, { prefix }]), ["mean of patches", {}]];
    find("tokens").replaceChildren(...(layer.kind === "matrix" || layer.shape[2] === 1 ? [] : choices).map(([name, query]) => {
      const button = create("button", "", name);
      button.type = "button";
      const now = state.query.x === undefined && (state.query.prefix === query.prefix || (!layer.prefix.length && query.prefix === undefined));
      button.setAttribute("aria-pressed", String(now));
      button.addEventListener("click", () => { state.query = query; show(); });
      return button;
    }));
  }
  function makeAll() {
    find("all").classList.toggle("narrow", panes.length > 1 && panes[0].view.layers.every((layer) => layer.shape[1] <= 6));
    const view = panes.find((pane) => !pane.clean && pane.title === state.model)?.view ?? panes[0].view;
    find("all").replaceChildren(...view.layers.map((layer, place) => {
      const row = create("div", "row"), tiles = create("div", "tiles");
      for (let head = 0; head < layer.shape[1]; head++) {
        const button = create("button"), map = attention(layer, head, state.query);
        button.type = "button";
        button.setAttribute("aria-label", `layer ${place + 1}, head ${head + 1}`);
        button.setAttribute("aria-pressed", String(place === state.layer && state.head === String(head)));
        button.append(tile(map, scaleOf([map]), HEAT, 1));
        button.addEventListener("click", () => { Object.assign(state, { layer: place, head: String(head) }); settle(); });
        tiles.append(button);
      }
      row.append(create("span", "", `${place + 1}`), tiles);
      row.firstChild.title = layer.name;
      return row;
    }));
  }
  function makeMoved() {
    const disturbed = panes.filter((pane) => !pane.clean && pane.view.moved?.length);
    find("moved").hidden = !disturbed.length;
    find("moved-rows").replaceChildren(...disturbed.flatMap(({ view, title }) => [create("h3", "", title), ...view.moved.map((value, place) => {
      const row = create("div", "move"), line = create("span", "line"), share = create("i");
      share.style.width = `${100 * Math.min(1, value)}%`;
      line.append(share);
      row.append(create("span", "name", view.layers[place].name), line, create("span", "", value.toFixed(3)));
      return row;
    })]));
  }

  function show() {
    const first = panes[0]?.view, layer = state.method === "attention" && first.layers.length && layerOf(first, state.layer);
    find("status").textContent = layer ? where(layer) : { rollout: "Attention through all layers, residual paths included.", relevance: "Which patches speak for the class.", gradients: "Which pixels speak for the class." }[state.method] ?? "";
    document.querySelectorAll(".of-attention").forEach((element) => { element.hidden = state.method !== "attention"; });
    if (layer) makeTokens(layer);
    const maps = panes.map((pane) => (pane.clean ? minus(drawn(pane.view), drawn(pane.clean)) : drawn(pane.view)));
    const plain = maps.filter((map, at) => map && !panes[at].clean), same = find("same").checked && plain.length && scaleOf(plain);
    panes.forEach((pane, at) => draw(pane, maps[at], maps[at] && (pane.clean ? scaleOf([maps[at]], true) : same || scaleOf([maps[at]]))));
    if (layer) makeAll();
    document.documentElement.dataset.drawn = String(1 + Number(document.documentElement.dataset.drawn ?? 0));
  }
  const options = (select, pairs, value) => {
    select.replaceChildren(...pairs.map(([text, key]) => new Option(text, key)));
    select.value = pairs.some(([, key]) => key === value) ? value : pairs[0]?.[1] ?? "";
    return select.value;
  };
  // The choices there are for this picture, then everything is drawn.
  function settle() {
    const views = panes.filter((pane) => !pane.clean).map((pane) => pane.view), first = views[0];
    const has = { attention: views.some((view) => view.layers.length), rollout: views.some((view) => view.rollout), relevance: views.some((view) => Object.keys(view.relevance).length), gradients: views.some((view) => Object.keys(view.gradients).length) };
    state.method = options(find("method"), Object.keys(METHODS).filter((name) => has[name]).map((name) => [METHODS[name], name]), state.method);
    if (first.layers.length) {
      state.layer = Math.min(state.layer, first.layers.length - 1);
      const layer = first.layers[state.layer], heads = layer.shape[1];
      Object.assign(find("layer"), { max: first.layers.length - 1, value: state.layer });
      find("layer-shown").textContent = `${state.layer + 1} of ${first.layers.length}: ${layer.name} (${layer.core})`;
      state.head = options(find("head"), [["mean of all", "mean"], ...Array.from({ length: heads }, (_, head) => [String(head + 1), String(head)])], state.head);
    }
    const explains = state.method === "relevance" || state.method === "gradients";
    const classes = [...new Set(views.flatMap((view) => Object.keys((explains && view[state.method]) || {})))];
    find("class-label").hidden = !explains;
    if (classes.length) state.class = options(find("class"), classes.map((name) => [name, name]), state.class);
    const titles = panes.filter((pane) => !pane.clean).map((pane) => [pane.title, pane.title]);
    state.model = options(find("model"), titles, state.model);
    find("model-label").hidden = titles.length < 2;
    show();
  }
  async function choose(picture) {
    state.picture = picture;
    const views = all.views.filter((view) => view.picture === picture);
    await Promise.all(views.map(ready));
    panes = views.flatMap((view) => {
      const clean = view.threat && views.find((one) => one.model === view.model && !one.threat);
      return clean ? [makePane(view), makePane(view, clean)] : [makePane(view)];
    });
    find("board").classList.toggle("one", panes.length === 1);
    find("panes").replaceChildren(...panes.map(({ figure }) => figure));
    settle();
    makeMoved();
  }
  async function start(data) {
    all = data;
    const pictures = [...new Set(all.views.map((view) => view.picture))];
    find("title").textContent = document.title = all.title;
    find("picture-label").hidden = pictures.length < 2;
    options(find("picture"), pictures.map((name) => [name, name]), state.picture);
    find("notes").replaceChildren(...all.notes.map((note) => create("p", "", note)));
    find("shown").hidden = false;
    if (!state.method) state.layer = Math.max(...all.views.map((view) => view.layers.length)) - 1;
    await choose(find("picture").value);
    document.documentElement.dataset.ready = String(1 + Number(document.documentElement.dataset.ready ?? 0));
  }

  find("picture").addEventListener("change", () => choose(find("picture").value));
  for (const name of ["method", "head", "class", "model"]) find(name).addEventListener("change", () => { state[name] = find(name).value; settle(); });
  find("layer").addEventListener("input", () => { state.layer = Number(find("layer").value); settle(); });
  for (const name of ["opacity", "same", "smooth"]) find(name).addEventListener("input", show);
  if (live) serve();
  if (shown) start(shown);

  // live: a picture and what to do with it go to the server, which answers in lines of JSON
  function serve() {
    let picture = live.picture, asked = 0, timer = 0;
    const ask = (path, body, type) => fetch(path, { method: "POST", body, headers: { "Content-Type": type } });
    const say = (text) => { find("said").textContent = text; };
    find("live").hidden = false;
    options(find("threat"), [["none", ""], ...live.threats.map((name) => [name, name])], "");
    options(find("attention"), [["as it is", ""], ...live.attentions.map((name) => [name, name])], "");
    find("gradients").closest("label").hidden = !live.head;
    async function send(file) {
      say(`Sending ${file.name}`);
      const answer = await ask(`picture?name=${encodeURIComponent(file.name)}`, file, "application/octet-stream");
      const told = await answer.json();
      if (told.error) return say(told.error);
      picture = told.picture;
      await run();
    }
    async function run() {
      if (picture === null) return;
      const mine = ++asked, value = (id) => find(id).value;
      const body = JSON.stringify({ picture, threat: value("threat"), eps: Number(value("eps")), attention: value("attention"), sparsity: Number(value("sparsity")) / 100, gradients: find("gradients").checked });
      say("Looking");
      const answer = await ask("look", body, "application/json");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value: part, done } = await reader.read();
        text += part ?? "";
        const lines = text.split("\n");
        text = lines.pop();
        for (const line of lines) if (mine === asked) await hear(JSON.parse(line));
        if (done) break;
      }
    }
    async function hear(told) {
      find("progress").hidden = !told.progress;
      if (told.error !== undefined) return say(told.error);
      if (told.progress) {
        const [done, total, words] = told.progress;
        Object.assign(find("progress"), { value: done, max: total || 1 });
        return say(words);
      }
      say("");
      await start(told.shown);
    }
    const soon = () => { clearTimeout(timer); timer = setTimeout(() => run().catch(failed), 250); };
    const failed = (error) => say(`The server does not answer (${error.message}). Is the command still running?`);
    const take = (files) => { if (files.length) send(files[0]).catch(failed); };
    find("file").addEventListener("change", () => take(find("file").files));
    for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
      addEventListener(name, (event) => {
        event.preventDefault();
        find("drop").classList.toggle("over", over);
        if (name === "drop") take(event.dataTransfer.files);
      });
    }
    const tell = () => {
      const pixels = live.corruptions.includes(find("threat").value);
      find("eps").disabled = pixels || !find("threat").value;
      find("eps-shown").textContent = pixels ? "" : `${find("eps").value}/255`;
      find("sparsity-shown").textContent = `${find("sparsity").value} %`;
    };
    for (const name of ["threat", "eps", "attention", "sparsity", "gradients"]) find(name).addEventListener("input", () => { tell(); soon(); });
    tell();
    if (picture !== null && !shown) soon();
  }
})();
