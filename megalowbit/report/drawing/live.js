// Values under the pointer. Charts and maps are drawn without this script; it reads values back from them.
"use strict";
(() => {
  const text = (value) => {
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e5 || (size && size < 1e-3)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  };
  const range = (words) => {
    const [low, high, kind] = words.split(" ");
    return { low: Number(low), high: Number(high), isLog: kind === "log" };
  };
  const at = (axis, share) =>
    axis.isLog
      ? axis.low * (axis.high / axis.low) ** share
      : axis.low + share * (axis.high - axis.low);
  const add = (parent, kind, name, content) => {
    const made = parent.appendChild(document.createElement(kind));
    if (name) made.className = name;
    if (content !== undefined) made.textContent = content; // never as HTML
    return made;
  };

  const show = (plot, x, y, fill) => {
    hide(plot);
    const tip = add(plot, "div", "tip");
    fill(tip);
    const box = plot.getBoundingClientRect();
    const left = x + 14 + tip.offsetWidth > box.width ? x - 14 - tip.offsetWidth : x + 14;
    tip.style.left = `${Math.max(left, -40)}px`;
    tip.style.top = `${Math.max(0, Math.min(y, box.height - tip.offsetHeight))}px`;
  };
  const hide = (plot) => plot.querySelectorAll(":scope > .tip, :scope > .cursor").forEach((each) => each.remove());

  const linesOf = (plot) => {
    const lines = new Map(); // a line with gaps has several polylines
    plot.querySelectorAll("polyline[data-n]").forEach((each) => {
      const name = each.dataset.n;
      if (!lines.has(name)) lines.set(name, { kind: each.getAttribute("class"), points: [] });
      for (const point of each.points) lines.get(name).points.push(point);
    });
    return lines;
  };
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle].x < x) low = middle; else high = middle;
    }
    return Math.abs(points[low].x - x) <= Math.abs(points[high].x - x) ? points[low] : points[high];
  };

  const charts = [...document.querySelectorAll(".plot[data-x]")];
  charts.forEach((plot) => {
    const x = range(plot.dataset.x), y = range(plot.dataset.y);
    let lines;
    plot.addEventListener("pointermove", (event) => {
      lines = lines || linesOf(plot);
      const box = plot.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      if (share < 0 || share > 1 || !lines.size) return hide(plot);
      const found = [...lines].map(([name, line]) => [name, line, nearest(line.points, 1000 * share)]);
      const first = found.reduce((a, b) => (Math.abs(b[2].x - 1000 * share) < Math.abs(a[2].x - 1000 * share) ? b : a))[2];
      show(plot, event.clientX - box.left, event.clientY - box.top, (tip) => {
        const place = (point) => {
          const value = at(x, point.x / 1000);
          return x.isLog || x.high - x.low < 20 ? text(value) : Math.round(value).toLocaleString("en");
        };
        add(tip, "b", "", `${plot.dataset.name} ${place(first)}`);
        found.forEach(([name, line, point]) => {
          const row = add(tip, "div", line.kind.replace(/line|faint/, ""));
          add(row, "em");
          const isElsewhere = Math.abs(point.x - first.x) > 8; // a validation, between whose points it is not known
          row.append(`${name} ${text(at(y, 1 - point.y / 1000))}${isElsewhere ? ` at ${place(point)}` : ""}`);
        });
      });
      charts.filter((each) => each.dataset.x === plot.dataset.x).forEach((each) => {
        each.querySelectorAll(":scope > .cursor").forEach((old) => old.remove());
        add(each, "div", "cursor").style.left = `${first.x / 10}%`;
      });
    });
    plot.addEventListener("pointerleave", () => charts.forEach(hide));
  });

  document.querySelectorAll(".map").forEach((plot) => {
    const data = plot.dataset, rows = JSON.parse(data.rows), columns = JSON.parse(data.columns);
    const low = Number(data.low), high = Number(data.high);
    let pixels, context;
    const read = () => {
      const image = plot.querySelector("img"), canvas = document.createElement("canvas");
      canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
      context = canvas.getContext("2d");
      context.drawImage(image, 0, 0);
      pixels = context.getImageData(0, 0, canvas.width, canvas.height);
    };
    const palette = data.palette ? JSON.parse(data.palette) : JSON.parse(document.body.dataset.palette);
    const level = new Map(palette.map((colour, number) => [colour.join(), number]));
    const names = data.palette ? data.unit.split(",") : [];
    plot.addEventListener("pointermove", (event) => {
      if (!pixels) read();
      const box = plot.getBoundingClientRect();
      const across = (event.clientX - box.left) / box.width, down = (event.clientY - box.top) / box.height;
      if (across < 0 || across >= 1 || down < 0 || down >= 1) return hide(plot);
      const row = Math.floor(down * pixels.height);
      const place = 4 * (row * pixels.width + Math.floor(across * pixels.width));
      const [r, g, b, alpha] = pixels.data.slice(place, place + 4);
      const number = level.get([r, g, b].join());
      const step = Number(data.start) + across * (columns[columns.length - 1] - Number(data.start));
      const column = Math.max(0, columns.findIndex((end) => end >= step));
      const value = low + (number / (palette.length - 1)) * (high - low);
      const said = !alpha || number === undefined ? "nothing counted" : names[number] || `≈ ${Number(value.toPrecision(3))} ${data.unit}`;
      show(plot, event.clientX - box.left, event.clientY - box.top, (tip) => {
        add(tip, "b", "", rows[row]);
        const from = column ? columns[column - 1] + 1 : Number(data.start) + 1;
        add(tip, "div", "", from < columns[column] ? `steps ${from.toLocaleString("en")}–${columns[column].toLocaleString("en")}` : `step ${columns[column].toLocaleString("en")}`);
        add(tip, "div", "", said);
      });
    });
    plot.addEventListener("pointerleave", () => hide(plot));
  });
})();
