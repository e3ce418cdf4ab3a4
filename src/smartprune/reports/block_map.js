// The block map of a report: its layers, its drawing, and its controls.

function showBlockMap(canvas) {
  const select = id("map-layer"),
    where = id("map-kernel"),
    paint = id("map-paint"),
    readout = id("map-readout");
  const bytes = (text) => {
    const raw = atob(text),
      out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out;
  };
  const half = (h) => {
    const sign = h & 0x8000 ? -1 : 1,
      power = (h >> 10) & 31,
      rest = h & 1023;
    return power === 0
      ? sign * rest * 2 ** -24
      : power === 31
        ? rest
          ? NaN
          : sign * Infinity
        : sign * (1 + rest / 1024) * 2 ** (power - 15);
  };
  const halves = (packed) => {
    const raw = bytes(packed[1]),
      out = new Float32Array(raw.length / 2);
    for (let i = 0; i < out.length; i++) out[i] = packed[0] * half(raw[2 * i] | (raw[2 * i + 1] << 8));
    return out;
  };

  let layer = null;
  const view = { x: 0, y: 0, sx: 1, sy: 1, fit: 1 };
  let cursor = null; // [panel, row, column]
  let table = null,
    tableOf = ""; // summed-area table, for pixels that cover many cells

  function open(index) {
    const raw = data.layers[index],
      axes = raw.axes.map(([parts, length, step]) => ({
        parts,
        length,
        step,
        per: Math.ceil(length / step),
        count: parts * Math.ceil(length / step),
      }));
    const grid = axes.map((axis) => axis.count),
      out = raw.transposed ? 1 : 0,
      inn = 1 - out;
    const strides = new Array(grid.length).fill(1);
    for (let i = grid.length - 2; i >= 0; i--) strides[i] = strides[i + 1] * grid[i + 1];
    const n = strides[0] * grid[0],
      bits = bytes(raw.kept),
      kept = new Uint8Array(n);
    for (let i = 0; i < n; i++) kept[i] = (bits[i >> 3] >> (i & 7)) & 1;
    let norms = null;
    if (raw.norms) {
      norms = new Float32Array(n);
      const some = halves(raw.norms);
      for (let i = 0, j = 0; i < n; i++) if (kept[i]) norms[i] = some[j++];
    }
    const kernel = grid.slice(2),
      panels = kernel.reduce((a, b) => a * b, 1);
    layer = {
      index,
      raw,
      axes,
      grid,
      out,
      inn,
      strides,
      n,
      kept,
      norms,
      scores: raw.scores ? halves(raw.scores) : null,
      kernel,
      panels,
      rows: grid[out],
      columns: grid[inn],
    };
    layer.only = -1;
    where.replaceChildren(new Option(panels > 1 ? `all ${panels}` : "the only one", "-1"));
    for (let p = 0; p < panels && panels > 1 && panels <= 400; p++) where.add(new Option(place(p).join(", "), String(p)));
    where.disabled = panels === 1;
    for (const choice of paint.options) choice.disabled = choice.value !== "kept" && layer[choice.value] === null;
    if (paint.selectedOptions[0].disabled) paint.value = "kept";
    select.value = String(index);
    for (const row of document.querySelectorAll("tr[data-layer]"))
      row.setAttribute("aria-current", String(row.dataset.layer === String(index)));
    cursor = null;
    arrange();
    const words = `${raw.name}: ${raw.counts[0].toLocaleString("en")} of ${raw.counts[1].toLocaleString("en")} blocks kept`;
    canvas.setAttribute("aria-label", `Block map of ${words}. Arrow keys move from block to block, plus and minus zoom.`);
    canvas.textContent = words;
    readout.textContent = `${words}.`;
  }

  /** The kernel position of a panel. */
  function place(p) {
    const out = [];
    for (let i = layer.kernel.length - 1; i >= 0; i--) {
      out.unshift(p % layer.kernel[i]);
      p = Math.floor(p / layer.kernel[i]);
    }
    return out;
  }
  /** The flat number of a block. */
  function flat(p, r, c) {
    const at = place(p);
    let i = r * layer.strides[layer.out] + c * layer.strides[layer.inn];
    at.forEach((v, k) => {
      i += v * layer.strides[k + 2];
    });
    return i;
  }

  function arrange() {
    const single = layer.only >= 0;
    layer.across = single ? 1 : layer.kernel.length ? layer.kernel[layer.kernel.length - 1] : 1;
    layer.down = single ? 1 : layer.panels / layer.across;
    layer.gap = Math.max(1, Math.round(0.06 * Math.max(layer.rows, layer.columns)));
    layer.wide = layer.across * (layer.columns + layer.gap) - layer.gap;
    layer.high = layer.down * (layer.rows + layer.gap) - layer.gap;
    const room = canvas.parentElement.clientWidth - 20;
    const scale = Math.min(room / layer.wide, 28);
    const height = Math.max(120, Math.min(innerHeight * 0.62, 640, layer.high * scale));
    canvas.style.height = `${Math.round(height)}px`;
    fit();
  }

  function fit() {
    const box = canvas.getBoundingClientRect();
    view.fit = Math.min(box.width / layer.wide, box.height / layer.high, 28);
    view.sx = view.fit;
    view.sy = Math.max(view.fit, Math.min(24, box.height) / layer.high); // keep a map of one row or column visible
    view.x = (layer.wide - box.width / view.sx) / 2;
    view.y = (layer.high - box.height / view.sy) / 2;
    updateZoom();
  }

  function updateZoom() {
    canvas.style.touchAction = view.sx > view.fit * 1.01 ? "none" : "pan-y";
    draw();
  }

  function zoom(factor, px, py) {
    const box = canvas.getBoundingClientRect();
    const x = px ?? box.width / 2,
      y = py ?? box.height / 2,
      before = view.sx;
    const next = Math.max(view.fit, Math.min(64, view.sx * factor)),
      ratio = next / before;
    if (ratio === 1) return;
    if (next === view.fit) {
      fit();
      return;
    }
    const wx = view.x + x / view.sx,
      wy = view.y + y / view.sy;
    view.sx = next;
    view.sy *= ratio;
    view.x = wx - x / view.sx;
    view.y = wy - y / view.sy;
    updateZoom();
  }

  /** The value that colours a block, 0 to 1. */
  function levels() {
    const mode = paint.value,
      n = layer.n,
      out = new Float32Array(n);
    if (mode === "kept") {
      out.set(layer.kept);
      return out;
    }
    const values = layer[mode];
    let low = Infinity,
      high = -Infinity;
    for (let i = 0; i < n; i++) {
      const v = values[i];
      if (v < low) low = v;
      if (v > high) high = v;
    }
    if (mode === "norms") low = 0;
    for (let i = 0; i < n; i++) out[i] = high > low ? (values[i] - low) / (high - low) : 0;
    return out;
  }

  function prepare() {
    const name = `${layer.index} ${paint.value}`;
    if (name === tableOf) return;
    tableOf = name;
    const level = levels(),
      { rows, columns, panels } = layer,
      size = (rows + 1) * (columns + 1);
    const cells = new Float32Array(panels * rows * columns),
      sums = new Float64Array(panels * size);
    for (let p = 0; p < panels; p++) {
      const base = flat(p, 0, 0);
      for (let r = 0; r < rows; r++) {
        let line = 0;
        for (let c = 0; c < columns; c++) {
          const v = level[base + r * layer.strides[layer.out] + c * layer.strides[layer.inn]];
          cells[(p * rows + r) * columns + c] = v;
          line += v;
          sums[p * size + (r + 1) * (columns + 1) + c + 1] = sums[p * size + r * (columns + 1) + c + 1] + line;
        }
      }
    }
    table = { cells, sums, size };
  }

  const colour = (name) => {
    const probe = id("probe");
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map(Number);
  };
  let palette = null;
  function colours() {
    const ground = colour("--panel"),
      empty = colour("--cell"),
      full = colour("--accent"),
      edge = colour("--ink");
    const shades = new Uint32Array(256);
    for (let i = 0; i < 256; i++) {
      const [r, g, b] = empty.map((v, k) => Math.round(v + ((full[k] - v) * i) / 255));
      shades[i] = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    }
    palette = {
      ground: ((255 << 24) | (ground[2] << 16) | (ground[1] << 8) | ground[0]) >>> 0,
      shades,
      edge: `rgb(${edge.join(",")})`,
    };
  }

  /** For every pixel along an axis: its panel (-1 for none) and the range of cells that it covers. */
  function cut(pixels, ratio, start, scale, size, count, gap) {
    const panel = new Int32Array(pixels).fill(-1),
      from = new Int32Array(pixels),
      to = new Int32Array(pixels),
      line = new Uint8Array(pixels);
    for (let i = 0; i < pixels; i++) {
      const a = start + i / ratio / scale,
        b = start + (i + 1) / ratio / scale,
        p = Math.floor(a / (size + gap));
      if (p < 0 || p >= count) continue;
      const u = a - p * (size + gap),
        v = Math.min(b - p * (size + gap), size);
      if (u >= size) continue;
      panel[i] = p;
      from[i] = Math.floor(u);
      to[i] = Math.max(from[i] + 1, Math.min(size, Math.floor(v)));
      line[i] = scale >= 6 && Math.floor(b - p * (size + gap)) > from[i] ? 1 : 0;
    }
    return { panel, from, to, line };
  }

  let waiting = false;
  function draw() {
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        paintNow();
      });
    }
  }

  function paintNow() {
    if (layer === null) return;
    if (palette === null) colours();
    prepare();
    const box = canvas.getBoundingClientRect(),
      ratio = Math.min(devicePixelRatio || 1, 2);
    const width = Math.max(1, Math.round(box.width * ratio)),
      height = Math.max(1, Math.round(box.height * ratio));
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    const pen = canvas.getContext("2d"),
      image = pen.createImageData(width, height),
      pixels = new Uint32Array(image.data.buffer);
    pixels.fill(palette.ground);
    const xs = cut(width, ratio, view.x, view.sx, layer.columns, layer.across, layer.gap);
    const ys = cut(height, ratio, view.y, view.sy, layer.rows, layer.down, layer.gap);
    const { cells, sums, size } = table,
      stride = layer.columns + 1,
      many = layer.columns;
    for (let y = 0; y < height; y++) {
      if (ys.panel[y] < 0 || ys.line[y]) continue;
      const r0 = ys.from[y],
        r1 = ys.to[y];
      for (let x = 0, at = y * width; x < width; x++, at++) {
        if (xs.panel[x] < 0 || xs.line[x]) continue;
        const p = layer.only >= 0 ? layer.only : ys.panel[y] * layer.across + xs.panel[x],
          c0 = xs.from[x],
          c1 = xs.to[x];
        let v;
        if (r1 - r0 === 1 && c1 - c0 === 1) v = cells[(p * layer.rows + r0) * many + c0];
        else {
          const base = p * size;
          v =
            (sums[base + r1 * stride + c1] -
              sums[base + r0 * stride + c1] -
              sums[base + r1 * stride + c0] +
              sums[base + r0 * stride + c0]) /
            ((r1 - r0) * (c1 - c0));
        }
        pixels[at] = palette.shades[v <= 0 ? 0 : v >= 1 ? 255 : Math.max(24, Math.round(255 * v))];
      }
    }
    pen.putImageData(image, 0, 0);
    if (cursor !== null) {
      const [p, r, c] = cursor,
        q = layer.only >= 0 ? 0 : p;
      const x = ((q % layer.across) * (layer.columns + layer.gap) + c - view.x) * view.sx * ratio,
        y = (Math.floor(q / layer.across) * (layer.rows + layer.gap) + r - view.y) * view.sy * ratio;
      pen.strokeStyle = palette.edge;
      pen.lineWidth = 2 * ratio;
      const w = Math.max(view.sx * ratio, 4 * ratio),
        h = Math.max(view.sy * ratio, 4 * ratio);
      pen.strokeRect(x - ratio, y - ratio, w + ratio, h + ratio);
    }
  }

  const range = (axis, index) => {
    const part = Math.floor(index / axis.per),
      first = part * axis.length + (index % axis.per) * axis.step;
    const last = Math.min(first + axis.step, (part + 1) * axis.length) - 1;
    return first === last ? `${first}` : `${first}\u2013${last}`;
  };

  function describeCursor() {
    const [p, r, c] = cursor,
      i = flat(p, r, c),
      at = place(p),
      parts = [`block ${i.toLocaleString("en")} of ${layer.n.toLocaleString("en")}`];
    parts.push(
      `outputs ${range(layer.axes[layer.out], r)}`,
      `inputs ${range(layer.axes[layer.inn], c)}${layer.axes[0].parts > 1 ? " of its group" : ""}`,
    );
    if (at.length) parts.push(`kernel ${at.map((v, k) => range(layer.axes[k + 2], v)).join(", ")}`);
    const norm = layer.norms === null ? null : layer.norms[i];
    parts.push(layer.kept[i] ? (norm === 0 ? "kept, but zero" : "kept") : "removed");
    if (layer.scores !== null) parts.push(`score ${short(layer.scores[i])}`);
    if (norm !== null) parts.push(`norm ${short(norm)}`);
    readout.textContent = parts.join(" \u00b7 ");
    draw();
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect(),
      x = view.x + (event.clientX - box.left) / view.sx,
      y = view.y + (event.clientY - box.top) / view.sy;
    const px = Math.floor(x / (layer.columns + layer.gap)),
      py = Math.floor(y / (layer.rows + layer.gap));
    const c = Math.floor(x - px * (layer.columns + layer.gap)),
      r = Math.floor(y - py * (layer.rows + layer.gap));
    if (px < 0 || py < 0 || px >= layer.across || py >= layer.down || c >= layer.columns || r >= layer.rows) return null;
    return [layer.only >= 0 ? layer.only : py * layer.across + px, r, c];
  }

  function step(dx, dy) {
    if (cursor === null) {
      cursor = [Math.max(layer.only, 0), 0, 0];
    } else {
      let [p, r, c] = cursor;
      const q = layer.only >= 0 ? 0 : p;
      let px = q % layer.across,
        py = Math.floor(q / layer.across);
      c += dx;
      r += dy;
      if (c < 0) {
        if (px > 0) {
          px--;
          c = layer.columns - 1;
        } else c = 0;
      }
      if (c >= layer.columns) {
        if (px < layer.across - 1) {
          px++;
          c = 0;
        } else c = layer.columns - 1;
      }
      if (r < 0) {
        if (py > 0) {
          py--;
          r = layer.rows - 1;
        } else r = 0;
      }
      if (r >= layer.rows) {
        if (py < layer.down - 1) {
          py++;
          r = 0;
        } else r = layer.rows - 1;
      }
      cursor = [layer.only >= 0 ? layer.only : py * layer.across + px, r, c];
    }
    const [p, r, c] = cursor,
      q = layer.only >= 0 ? 0 : p,
      box = canvas.getBoundingClientRect();
    const x = (q % layer.across) * (layer.columns + layer.gap) + c,
      y = Math.floor(q / layer.across) * (layer.rows + layer.gap) + r;
    if (view.sx > view.fit * 1.01) {
      // scroll to the cursor
      view.x = Math.min(x, Math.max(view.x, x + 1 - box.width / view.sx));
      view.y = Math.min(y, Math.max(view.y, y + 1 - box.height / view.sy));
    }
    describeCursor();
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, vx: view.x, vy: view.y };
    const cell = cellAt(event);
    if (cell) {
      cursor = cell;
      describeCursor();
    }
    if (view.sx > view.fit * 1.01) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag !== null && event.buttons && view.sx > view.fit * 1.01) {
      view.x = drag.vx - (event.clientX - drag.x) / view.sx;
      view.y = drag.vy - (event.clientY - drag.y) / view.sy;
      draw();
      return;
    }
    const cell = cellAt(event);
    if (cell && (cursor === null || cell.some((v, i) => v !== cursor[i]))) {
      cursor = cell;
      describeCursor();
    }
  });
  for (const name of ["pointerup", "pointercancel"])
    canvas.addEventListener(name, () => {
      drag = null;
    });
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return; // let the page scroll
      const box = canvas.getBoundingClientRect();
      zoom(2 ** (-event.deltaY / 240), event.clientX - box.left, event.clientY - box.top);
      event.preventDefault();
    },
    { passive: false },
  );
  const changeLayer = (by) => open((layer.index + by + data.layers.length) % data.layers.length);
  canvas.addEventListener("keydown", (event) => {
    const action = {
      ArrowLeft: () => step(-1, 0),
      ArrowRight: () => step(1, 0),
      ArrowUp: () => step(0, -1),
      ArrowDown: () => step(0, 1),
      "+": () => zoom(1.5),
      "=": () => zoom(1.5),
      "-": () => zoom(1 / 1.5),
      0: fit,
      PageUp: () => changeLayer(-1),
      PageDown: () => changeLayer(1),
    }[event.key];
    if (action && !event.ctrlKey && !event.metaKey && !event.altKey) {
      action();
      event.preventDefault();
    }
  });
  id("zoom-in").addEventListener("click", () => zoom(1.5));
  id("zoom-out").addEventListener("click", () => zoom(1 / 1.5));
  id("zoom-fit").addEventListener("click", fit);
  id("layer-before").addEventListener("click", () => changeLayer(-1));
  id("layer-after").addEventListener("click", () => changeLayer(1));
  data.layers.forEach((entry, i) => select.add(new Option(entry.name, String(i))));
  select.addEventListener("change", () => open(Number(select.value)));
  where.addEventListener("change", () => {
    layer.only = Number(where.value);
    cursor = null;
    arrange();
  });
  paint.addEventListener("change", draw);
  for (const button of document.querySelectorAll("button[data-layer]")) {
    button.addEventListener("click", () => {
      open(Number(button.dataset.layer));
      id("map-section").scrollIntoView({ block: "start" });
      canvas.focus({ preventScroll: true });
    });
  }
  let width = 0;
  new ResizeObserver((seen) => {
    const now = seen[0].contentRect.width;
    if (now !== width) {
      width = now;
      requestAnimationFrame(arrange);
    }
  }).observe(canvas.parentElement);
  listeners.push(() => {
    palette = null;
    draw();
  });
  let saved = null; // pages are printed in light colours
  addEventListener("beforeprint", () => {
    saved = root.dataset.theme ?? "";
    root.dataset.theme = "light";
    palette = null;
    paintNow();
  });
  addEventListener("afterprint", () => {
    if (saved) root.dataset.theme = saved;
    else delete root.dataset.theme;
    palette = null;
    draw();
  });
  open(data.first);
}

if (id("map") !== null) showBlockMap(id("map"));
